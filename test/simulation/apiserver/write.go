// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/mergepatch"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

// create stores a new object.
func (s *Server) create(c *call) (int, runtime.Object, error) {
	obj, err := c.decode()
	if err != nil {
		return 0, nil, err
	}
	if err := c.fixNamespace(obj); err != nil {
		return 0, nil, err
	}
	stored, err := s.insert(c, obj)
	if err != nil {
		return 0, nil, err
	}
	return http.StatusCreated, stored, nil
}

// decode returns the object in the body.
func (c *call) decode() (runtime.Object, error) {
	obj, err := c.res.decode(c.contentType, c.Body)
	if err != nil {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("%s in version %q cannot be handled as a %s: %v",
			c.res.kind, c.res.gvr.Version, c.res.kind, err))
	}
	return obj, nil
}

// fixNamespace sets the namespace of obj to that of the request, unless it has another.
func (c *call) fixNamespace(obj runtime.Object) error {
	m := accessor(obj)
	if have := m.GetNamespace(); have != "" && have != c.namespace() {
		return apierrors.NewBadRequest("the namespace of the provided object does not match the namespace sent on the request")
	}
	m.SetNamespace(c.namespace())
	return nil
}

// insert validates and stores obj.
func (s *Server) insert(c *call, obj runtime.Object) (runtime.Object, error) {
	m := accessor(obj)
	if err := s.checkNamespace(c, m.GetName()); err != nil {
		return nil, err
	}
	m.SetCreationTimestamp(s.clock.now())
	m.SetDeletionTimestamp(nil)
	m.SetDeletionGracePeriodSeconds(nil)
	m.SetSelfLink("")
	m.SetUID(s.uid())
	if m.GetName() == "" && m.GetGenerateName() != "" {
		m.SetName(s.generateName(m.GetGenerateName()))
	}
	if c.res.admitCreate != nil {
		if err := c.res.admitCreate(s, obj); err != nil {
			return nil, err
		}
	}
	s.mutate(c, obj)
	c.res.prepareCreate(obj)
	errs := c.res.validateNew(obj)
	if len(errs) == 0 {
		errs = validation.ValidateObjectMetaAccessor(m, c.res.namespaced, validPathSegment, metadata)
	}
	if len(errs) > 0 {
		return nil, c.invalid(m.GetName(), errs...)
	}
	if version := m.GetResourceVersion(); version != "" && version != "0" {
		return nil, statusError("resourceVersion should not be set on objects to be created")
	}
	key := key(m.GetNamespace(), m.GetName())
	if existing, ok := s.objects[c.res][key]; ok {
		err := apierrors.NewAlreadyExists(c.res.gvr.GroupResource(), m.GetName())
		if accessor(existing).GetDeletionTimestamp() != nil {
			err.ErrStatus.Message = "object is being deleted: " + err.ErrStatus.Message
		}
		return nil, err
	}
	m.SetResourceVersion("")
	if c.dryRun() {
		return obj, nil
	}
	return s.commit(c.res, key, nil, obj), nil
}

// put replaces an object.
func (s *Server) put(c *call) (int, runtime.Object, error) {
	obj, err := c.decode()
	if err != nil {
		return 0, nil, err
	}
	if err := c.checkName(obj); err != nil {
		return 0, nil, err
	}
	return s.putObject(c, obj)
}

// putObject replaces the object with the name of obj by obj.
func (s *Server) putObject(c *call, obj runtime.Object) (int, runtime.Object, error) {
	m := accessor(obj)
	existing, ok := s.objects[c.res][c.key()]
	if !ok && c.res.upsert {
		stored, err := s.insert(c, obj)
		return http.StatusCreated, stored, err
	}
	if !ok {
		return 0, nil, c.notFound()
	}
	if uid, have := m.GetUID(), accessor(existing).GetUID(); uid != "" && uid != have {
		return 0, nil, apierrors.NewConflict(c.res.gvr.GroupResource(), c.Name, fmt.Errorf("StorageError: invalid object, Code: 4, "+
			"Key: %s, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: UID in precondition: %v, UID in object meta: %v",
			c.storageKey(), uid, have))
	}
	stored, err := s.replace(c, existing, obj)
	return http.StatusOK, stored, err
}

// checkName returns an error if obj has another name or namespace than the path.
func (c *call) checkName(obj runtime.Object) error {
	if name := accessor(obj).GetName(); name != "" && name != c.Name {
		return apierrors.NewBadRequest(fmt.Sprintf("the name of the object (%s) does not match the name on the URL (%s)", name, c.Name))
	}
	return c.fixNamespace(obj)
}

// storageKey returns the key of the object in etcd, which is part of a message.
func (c *call) storageKey() string {
	prefix := "/registry/"
	if c.res.custom {
		prefix += c.res.gvr.Group + "/"
	}
	return prefix + c.res.storagePrefix() + "/" + c.key()
}

// patch applies a patch to an object.
func (s *Server) patch(c *call) (int, runtime.Object, error) {
	existing, ok := s.objects[c.res][c.key()]
	if !ok {
		return 0, nil, c.notFound()
	}
	patched, err := c.applyPatch(c.res.encodeJSON(existing))
	if err != nil {
		return 0, nil, err
	}
	obj, err := c.res.decode(jsonType, patched)
	if err != nil {
		return 0, nil, invalid("", "", field.Invalid(field.NewPath("patch"), string(patched), err.Error()))
	}
	if err := c.checkName(obj); err != nil {
		return 0, nil, err
	}
	stored, err := s.replace(c, existing, obj)
	return http.StatusOK, stored, err
}

// applyPatch returns the JSON form of an object with the patch of c.
func (c *call) applyPatch(original []byte) ([]byte, error) {
	switch types.PatchType(c.contentType) {
	case types.JSONPatchType:
		patch, err := jsonpatch.DecodePatch(c.Body)
		if err != nil {
			message := strings.ReplaceAll(err.Error(), "jsonpatch.Patch", "[]handlers.jsonPatchOp") // the type there
			return nil, apierrors.NewBadRequest("error decoding patch: " + message)
		}
		patched, err := patch.Apply(original)
		if err != nil {
			const code = http.StatusUnprocessableEntity
			return nil, apierrors.NewGenericServerResponse(code, "", schema.GroupResource{}, "", err.Error(), 0, false)
		}
		return patched, nil
	case types.MergePatchType:
		patched, err := jsonpatch.MergePatch(original, c.Body)
		if errors.Is(err, jsonpatch.ErrBadJSONPatch) {
			return nil, apierrors.NewBadRequest(err.Error())
		}
		return patched, err
	case types.StrategicMergePatchType:
		if c.res.custom {
			break
		}
		patched, err := strategicpatch.StrategicMergePatch(original, c.Body, c.res.object())
		if errors.Is(err, mergepatch.ErrBadPatchFormatForPrimitiveList) || errors.Is(err, mergepatch.ErrBadJSONDoc) {
			return nil, apierrors.NewBadRequest(err.Error())
		}
		return patched, err
	}
	return nil, c.unsupportedPatch()
}

// unsupportedPatch returns the error for a kind of patch that the resource does not have.
func (c *call) unsupportedPatch() error {
	accepted := "application/json-patch+json, application/merge-patch+json"
	if c.res.custom {
		accepted += ", application/apply-patch+yaml"
	} else {
		accepted += ", application/strategic-merge-patch+json, application/apply-patch+yaml"
	}
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusUnsupportedMediaType, Reason: metav1.StatusReasonUnsupportedMediaType,
		Message: "the body of the request was in an unknown format - accepted media types include: " + accepted,
	}}
}

// replace stores obj instead of existing, or deletes it if obj has no finalizers any more.
func (s *Server) replace(c *call, existing, obj runtime.Object) (runtime.Object, error) {
	m, old := accessor(obj), accessor(existing)
	if version := m.GetResourceVersion(); version == "" || version == "0" {
		if !c.res.unconditional {
			return nil, invalid(schema.GroupKind{Group: c.res.gvr.Group, Kind: c.res.gvr.Resource}.String(), c.Name,
				field.Invalid(field.NewPath("metadata", "resourceVersion"), uint64(0), "must be specified for an update"))
		}
		m.SetResourceVersion(old.GetResourceVersion())
	} else if version != old.GetResourceVersion() {
		return nil, apierrors.NewConflict(c.res.gvr.GroupResource(), c.Name,
			errors.New("the object has been modified; please apply your changes to the latest version and try again"))
	}
	m.SetGeneration(old.GetGeneration())
	if c.Subresource == "status" {
		obj = c.res.prepareStatus(obj, existing)
	} else {
		c.res.prepareUpdate(obj, existing)
	}
	s.mutate(c, obj)
	m = accessor(obj)
	keepSystemFields(m, old)
	if errs := c.validateUpdate(obj, existing); len(errs) > 0 {
		return nil, c.invalid(m.GetName(), errs...)
	}
	if c.res.admitUpdate != nil && c.Subresource == "" {
		if err := c.res.admitUpdate(s, obj, existing); err != nil {
			return nil, err
		}
	}
	grace := old.GetDeletionGracePeriodSeconds()
	switch {
	case len(m.GetFinalizers()) == 0 && old.GetDeletionTimestamp() != nil && (grace == nil || *grace == 0) && !c.res.lingers(existing):
		if !c.dryRun() {
			s.commit(c.res, c.key(), existing, nil)
		}
		return obj, nil
	case c.res.equal(obj, existing):
		return existing, nil
	case c.dryRun():
		return obj, nil
	}
	return s.commit(c.res, c.key(), existing, obj), nil
}

// keepSystemFields sets the fields of m that clients cannot change.
func keepSystemFields(m, old metav1.Object) {
	if m.GetUID() == "" {
		m.SetUID(old.GetUID())
	}
	m.SetCreationTimestamp(old.GetCreationTimestamp())
	if old.GetDeletionTimestamp() != nil {
		m.SetDeletionTimestamp(old.GetDeletionTimestamp())
	}
	if m.GetDeletionGracePeriodSeconds() == nil {
		m.SetDeletionGracePeriodSeconds(old.GetDeletionGracePeriodSeconds())
	}
}

// validateUpdate returns the errors of an update.
func (c *call) validateUpdate(obj, existing runtime.Object) field.ErrorList {
	var errs field.ErrorList
	if m, old := accessor(obj), accessor(existing); !sameMetadata(m, old) {
		errs = validation.ValidateObjectMetaAccessor(m, c.res.namespaced, validPathSegment, metadata)
		errs = append(errs, validation.ValidateObjectMetaAccessorUpdate(m, old, metadata)...)
	}
	validate := c.res.validateUpdate
	if c.Subresource == "status" {
		validate = c.res.validateStatus
	}
	if validate != nil {
		errs = append(errs, validate(obj, existing)...)
	}
	return errs
}

// sameMetadata reports whether the metadata that clients can set, and the time of the deletion, are those of the valid
// object old.
func sameMetadata(m, old metav1.Object) bool {
	return m.GetUID() == old.GetUID() && m.GetName() == old.GetName() && m.GetNamespace() == old.GetNamespace() &&
		m.GetGenerateName() == old.GetGenerateName() && len(m.GetOwnerReferences()) == 0 &&
		m.GetDeletionTimestamp().Equal(old.GetDeletionTimestamp()) &&
		ptr.Equal(m.GetDeletionGracePeriodSeconds(), old.GetDeletionGracePeriodSeconds()) &&
		maps.Equal(m.GetLabels(), old.GetLabels()) && maps.Equal(m.GetAnnotations(), old.GetAnnotations()) &&
		slices.Equal(m.GetFinalizers(), old.GetFinalizers())
}

// validPathSegment validates a name as a part of a path.
func validPathSegment(name string, prefix bool) []string {
	if prefix {
		return content.IsPathSegmentPrefix(name)
	}
	return content.IsPathSegmentName(name)
}

// invalid returns the error of an invalid object of the resource.
func (c *call) invalid(name string, errs ...*field.Error) error {
	return apierrors.NewInvalid(schema.GroupKind{Group: c.res.gvr.Group, Kind: c.res.kind}, name, errs)
}

// invalid returns the error of an invalid object; kind may have a group after a dot.
func invalid(kind, name string, errs ...*field.Error) error {
	return apierrors.NewInvalid(schema.ParseGroupKind(kind), name, errs)
}

// statusError returns an error that is none of the API, as the API server reports those of its storage.
func statusError(message string) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusInternalServerError, Message: message,
	}}
}

// review answers whether the user of c has a permission, without storing the question.
func (s *Server) review(c *call) (int, runtime.Object, error) {
	obj, err := c.decode()
	if err != nil {
		return 0, nil, err
	}
	review := obj.(*authorizationv1.SelfSubjectAccessReview)
	a := review.Spec.ResourceAttributes
	if a == nil {
		return 0, nil, c.invalid("", field.Required(field.NewPath("spec", "resourceAttributes"), ""))
	}
	asked := Request{
		Client: c.Client, User: c.User, UserAgent: c.UserAgent, Verb: a.Verb, Subresource: a.Subresource, Namespace: a.Namespace,
		Name:     a.Name,
		Resource: schema.GroupVersionResource{Group: a.Group, Version: a.Version, Resource: a.Resource},
	}
	review.Status.Allowed = s.hooks.Allow == nil || s.hooks.Allow(asked)
	return http.StatusCreated, review, nil
}

// bind assigns a Pod to a node.
func (s *Server) bind(c *call) (int, runtime.Object, error) {
	existing, ok := s.objects[c.res][c.key()]
	if !ok {
		return 0, nil, c.notFound()
	}
	bound, err := s.clock.bindPod(existing, c.contentType, c.Body)
	if err != nil {
		return 0, nil, err
	}
	if !c.dryRun() {
		s.commit(c.res, c.key(), existing, bound)
	}
	status := &metav1.Status{Status: metav1.StatusSuccess, Code: http.StatusCreated}
	status.Kind, status.APIVersion = "Status", "v1"
	return http.StatusCreated, status, nil
}

// validMatch returns an error for options of a list or watch that exclude each other.
func validMatch(c *call, o metav1.ListOptions) error {
	var errs field.ErrorList
	match, path := o.ResourceVersionMatch, field.NewPath("resourceVersionMatch")
	forbid := func(when bool, path *field.Path, message string) {
		if when {
			errs = append(errs, field.Forbidden(path, message))
		}
	}
	watching := c.Verb == "watch"
	notOlder := match == metav1.ResourceVersionMatchNotOlderThan
	forbid(watching && o.SendInitialEvents != nil && !notOlder, path,
		"sendInitialEvents requires setting resourceVersionMatch to NotOlderThan")
	forbid(watching && match != "" && o.SendInitialEvents == nil, path,
		"resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided")
	forbid(!watching && match != "" && o.ResourceVersion == "", path,
		"resourceVersionMatch is forbidden unless resourceVersion is provided")
	forbid(match != "" && o.Continue != "", path, "resourceVersionMatch is forbidden when continue is provided")
	if !watching && match != "" && !notOlder && match != metav1.ResourceVersionMatchExact {
		errs = append(errs, field.NotSupported(path, match, []string{"Exact", "NotOlderThan", ""}))
	}
	forbid(!watching && match == metav1.ResourceVersionMatchExact && o.ResourceVersion == "0", path,
		"resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"")
	forbid(!watching && o.SendInitialEvents != nil, field.NewPath("sendInitialEvents"), "sendInitialEvents is forbidden for list")
	if len(errs) == 0 {
		return nil
	}
	return apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: "ListOptions"}, "", errs)
}
