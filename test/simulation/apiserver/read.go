// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes/scheme"
)

// prefix returns the prefix of the keys of a list, which continue tokens leave out.
func (c *call) prefix() string {
	if c.namespace() == "" {
		return ""
	}
	return c.namespace() + "/"
}

// get returns one object.
func (s *Server) get(c *call) (int, runtime.Object, error) {
	objects := s.objects[c.res]
	if c.query.Get("resourceVersion") == "0" {
		objects = s.at(c.res, s.cached(c))
	}
	obj, ok := objects[c.key()]
	if !ok {
		return 0, nil, c.notFound()
	}
	return http.StatusOK, obj, nil
}

func (c *call) notFound() error { return apierrors.NewNotFound(c.res.gvr.GroupResource(), c.Name) }

// list returns a page of objects.
func (s *Server) list(c *call) (int, runtime.Object, error) {
	o, err := c.listOptions()
	if err != nil {
		return 0, nil, err
	}
	match, err := c.matcher(o)
	if err != nil {
		return 0, nil, err
	}
	p, err := s.page(c, o)
	if err != nil {
		return 0, nil, err
	}
	objects := s.at(c.res, p.Version)
	var items []runtime.Object
	var next string // the key of the first object after the page
	rest := int64(0)
	for _, key := range sortedKeys(objects) {
		switch {
		case key < c.prefix()+p.Start || !match(objects[key]):
		case o.Limit > 0 && int64(len(items)) == o.Limit:
			rest++
		default:
			items = append(items, objects[key])
			next = strings.TrimPrefix(key, c.prefix()) + "\x00"
		}
	}
	m := metav1.ListMeta{ResourceVersion: strconv.FormatUint(p.Version, 10)}
	if rest > 0 {
		m.Continue = token{"meta.k8s.io/v1", int64(p.Version), next}.String()
		if o.LabelSelector == "" && o.FieldSelector == "" {
			m.RemainingItemCount = &rest
		}
	}
	return http.StatusOK, c.res.listOf(m, items), nil
}

// listOf returns a list object.
func (r *resource) listOf(m metav1.ListMeta, items []runtime.Object) runtime.Object {
	gvk := r.gvr.GroupVersion().WithKind(r.kind + "List")
	var list runtime.Object
	if r.custom {
		u := &unstructured.UnstructuredList{Items: []unstructured.Unstructured{}}
		u.SetGroupVersionKind(gvk)
		list = u
	} else {
		var err error
		if list, err = scheme.Scheme.New(gvk); err != nil {
			panic(err) // all kinds are registered
		}
	}
	if err := meta.SetList(list, items); err != nil {
		panic(err)
	}
	to, err := meta.ListAccessor(list)
	if err != nil {
		panic(err)
	}
	to.SetResourceVersion(m.ResourceVersion)
	to.SetContinue(m.Continue)
	to.SetRemainingItemCount(m.RemainingItemCount)
	return list
}

// matcher returns the function that evaluates namespace and selectors.
func (c *call) matcher(o metav1.ListOptions) (func(runtime.Object) bool, error) {
	byLabel, err := labels.Parse(o.LabelSelector)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	byField, err := fields.ParseSelector(o.FieldSelector)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	for _, requirement := range byField.Requirements() {
		if err := c.res.selectable(requirement.Field); err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
	}
	namespace, name := c.namespace(), c.Name
	return func(obj runtime.Object) bool {
		m := accessor(obj)
		return (namespace == "" || m.GetNamespace() == namespace) && (name == "" || m.GetName() == name) &&
			byLabel.Matches(labels.Set(m.GetLabels())) && (byField.Empty() || byField.Matches(c.res.fieldSet(obj)))
	}, nil
}

// selectable returns an error unless the field with that name can be used in a selector.
func (r *resource) selectable(name string) error {
	special := r.custom || len(r.selectors) > 0
	if name == metav1.ObjectNameField || name == "metadata.namespace" && (r.namespaced || !special) || slices.Contains(r.selectors, name) {
		return nil
	}
	if special {
		return fmt.Errorf("field label not supported: %s", name)
	}
	return fmt.Errorf("%q is not a known field selector: only \"metadata.name\", \"metadata.namespace\"", name)
}

// fieldSet returns the values of the selectable fields of obj.
func (r *resource) fieldSet(obj runtime.Object) fields.Set {
	set := fields.Set{}
	if r.fields != nil {
		set = r.fields(obj)
	}
	m := accessor(obj)
	set[metav1.ObjectNameField] = m.GetName()
	set["metadata.namespace"] = m.GetNamespace()
	return set
}

// token is the content of a continue token.
type token struct {
	APIVersion string `json:"v"`
	Version    int64  `json:"rv"` // -1: the current one
	Start      string `json:"start"`
}

func (t token) String() string {
	data, err := json.Marshal(t)
	if err != nil {
		panic(err) // a struct of strings and numbers
	}
	return base64.RawURLEncoding.EncodeToString(data)
}

// page is where a list begins.
type page struct {
	Version uint64
	Start   string // without the prefix of the list
}

const (
	expired = "The resourceVersion for the provided list is too old."
	// inconsistent is the message of an expired continue token.
	inconsistent = "The provided continue parameter is too old to display a consistent list result. You can start a new list without " +
		"the continue parameter, or use the continue token in this response to retrieve the remainder of the results. Continuing with " +
		"the provided token results in an inconsistent list - objects that were created, modified, or deleted between the time the " +
		"first chunk was returned and now may show up in the list."
)

// page returns the state and the first key of a list.
func (s *Server) page(c *call, o metav1.ListOptions) (page, error) {
	if err := validMatch(c, o); err != nil {
		return page{}, err
	}
	if o.Continue != "" {
		return s.next(o)
	}
	version, err := parseVersion(o.ResourceVersion)
	if err != nil {
		return page{}, apierrors.NewBadRequest(fmt.Sprintf("invalid resource version: %v", err))
	}
	exact := o.ResourceVersionMatch == metav1.ResourceVersionMatchExact || o.ResourceVersionMatch == "" && o.Limit > 0 && version > 0
	switch {
	case o.ResourceVersion == "":
		return page{Version: s.version}, nil
	case exact && version < s.compacted:
		return page{}, apierrors.NewResourceExpired(expired)
	case exact:
		return page{Version: version}, nil
	}
	return page{Version: max(version, s.cached(c))}, nil
}

// next returns the page of a continue token.
func (s *Server) next(o metav1.ListOptions) (page, error) {
	if o.ResourceVersion != "" && o.ResourceVersion != "0" {
		return page{}, apierrors.NewBadRequest("specifying resource version is not allowed when using continue")
	}
	var t token
	data, err := base64.RawURLEncoding.DecodeString(o.Continue)
	if err == nil {
		err = json.Unmarshal(data, &t)
	}
	switch {
	case err != nil:
		err = fmt.Errorf("continue key is not valid: %w", err)
	case t.Version == 0:
		err = errors.New("continue key is not valid: incorrect encoded start resourceVersion (version meta.k8s.io/v1)")
	case t.Start == "":
		err = errors.New("continue key is not valid: encoded start key empty (version meta.k8s.io/v1)")
	}
	if err != nil {
		return page{}, apierrors.NewBadRequest(fmt.Sprintf("invalid continue token: %v", err))
	}
	if t.Version < 0 {
		return page{s.version, t.Start}, nil
	}
	if uint64(t.Version) < s.compacted {
		gone := apierrors.NewResourceExpired(inconsistent)
		gone.ErrStatus.ListMeta.Continue = token{t.APIVersion, -1, t.Start}.String()
		return page{}, gone
	}
	return page{uint64(t.Version), t.Start}, nil
}

// parseVersion returns the number in a resourceVersion; empty means 0.
func parseVersion(version string) (uint64, error) {
	if version == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(version, 10, 64)
	if err != nil {
		return 0, field.Invalid(field.NewPath("resourceVersion"), version, err.Error())
	}
	return n, nil
}

// tooLarge reports whether a list asks for a state of the future.
func (s *Server) tooLarge(c *call) bool {
	n, err := strconv.ParseUint(c.query.Get("resourceVersion"), 10, 64)
	return err == nil && c.query.Get("continue") == "" && n > s.Version()
}

// waitTooLarge returns the error of a request for a state of the future, after the time that the API
// server waits for it.
func (s *Server) waitTooLarge(ctx context.Context, c *call) error {
	select {
	case <-ctx.Done():
	case <-time.After(freshTimeout):
	}
	const message = "Too large resource version"
	err := apierrors.NewTimeoutError(fmt.Sprintf("%s: %s, current: %d", message, c.query.Get("resourceVersion"), s.Version()), 1)
	err.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: metav1.CauseTypeResourceVersionTooLarge, Message: message}}
	return err
}
