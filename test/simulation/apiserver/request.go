// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"bytes"
	"fmt"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"
)

// call is a request in progress.
type call struct {
	Request
	res         *resource
	method      string
	query       url.Values
	contentType string
	media       media
	static      *http.Response // complete: the request is none for a resource
}

// parse returns the call of r.
func (s *Server) parse(r *http.Request, client string) *call {
	c := &call{method: r.Method, query: r.URL.Query(), media: negotiate(r.Header.Get("Accept"))}
	c.contentType, _, _ = mime.ParseMediaType(r.Header.Get("Content-Type"))
	c.Client, c.User, c.UserAgent = client, client, r.UserAgent()
	c.Initial = c.query.Get("sendInitialEvents") == "true"
	if user := r.Header.Get("Impersonate-User"); user != "" {
		c.User = user
	}
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	var gv schema.GroupVersion
	switch {
	case parts[0] == "api" && len(parts) > 1:
		gv, parts = schema.GroupVersion{Version: parts[1]}, parts[2:]
	case parts[0] == "apis" && len(parts) > 2:
		gv, parts = schema.GroupVersion{Group: parts[1], Version: parts[2]}, parts[3:]
	default:
		c.static = notServed()
		if root := s.root(strings.Join(parts, "/")); root != nil {
			c.static = respond(http.StatusOK, jsonType, mustEncode(root))
		}
		return c
	}
	if len(parts) == 0 {
		c.static = s.discover(gv)
		return c
	}
	if c.route(s, gv, parts) {
		return c
	}
	switch {
	case c.res != nil && c.res.custom && c.Subresource != "":
		c.static = c.failure(c.notFound())
	case scheme.Scheme.IsVersionRegistered(gv):
		c.static = c.failure(&apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: http.StatusNotFound,
			Reason: metav1.StatusReasonNotFound, Message: "the server could not find the requested resource",
			Details: &metav1.StatusDetails{}}})
	default:
		c.static = notServed()
	}
	return c
}

// route sets resource, names and verb from the path after the group and version. It reports whether
// the path is served.
func (c *call) route(s *Server, gv schema.GroupVersion, parts []string) bool {
	if parts[0] == "namespaces" && len(parts) > 2 && parts[2] != "status" && parts[2] != "finalize" {
		c.Namespace, parts = parts[1], parts[2:]
	}
	c.Resource = gv.WithResource(parts[0])
	c.res = s.resource(c.Resource)
	if c.res == nil || len(parts) > 3 {
		return false
	}
	if len(parts) > 1 {
		c.Name = parts[1]
	}
	if len(parts) > 2 {
		c.Subresource = parts[2]
	}
	if c.res.gvr.Resource == "namespaces" && c.res.gvr.Group == "" {
		c.Namespace = c.Name
	}
	named := c.Name != ""
	if c.Subresource != "" && !slices.Contains(c.res.subresources(), c.Subresource) ||
		c.Namespace != "" && !c.res.namespaced && c.res.kind != "Namespace" || named && c.Namespace == "" && c.res.namespaced {
		return false
	}
	c.Verb = map[string]string{
		http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete", http.MethodGet: "get",
	}[c.method]
	switch watching := c.query.Get("watch"); {
	case named:
	case c.Verb == "get" && (watching == "true" || watching == "1"):
		c.Verb = "watch"
	case c.Verb == "get":
		c.Verb = "list"
	case c.Verb == "delete":
		c.Verb = "deletecollection"
	}
	return true
}

// Preconditions returns those of a deletion. A request that cannot be decoded has none.
func (r Request) Preconditions() metav1.Preconditions {
	o, contentType := metav1.DeleteOptions{}, jsonType
	if !bytes.HasPrefix(r.Body, []byte("{")) {
		contentType = protobufType
	}
	if err := decodeInto(contentType, r.Body, &o); err == nil && o.Preconditions != nil {
		return *o.Preconditions
	}
	return metav1.Preconditions{}
}

// namespace returns the namespace of the object of c.
func (c *call) namespace() string {
	if c.res.namespaced {
		return c.Namespace
	}
	return ""
}

func (c *call) key() string { return key(c.namespace(), c.Name) }

// dryRun reports whether the request must not take effect.
func (c *call) dryRun() bool { return slices.Contains(c.query["dryRun"], metav1.DryRunAll) }

// listOptions returns the options of a list or watch.
func (c *call) listOptions() (metav1.ListOptions, error) {
	var o metav1.ListOptions
	if err := metav1.Convert_url_Values_To_v1_ListOptions(&c.query, &o, nil); err != nil {
		return o, apierrors.NewBadRequest(err.Error())
	}
	return o, nil
}

// forbidden returns the error of a user without the permission.
func (c *call) forbidden() error {
	resource := c.res.gvr.Resource
	if c.Subresource != "" {
		resource += "/" + c.Subresource
	}
	scope := "at the cluster scope"
	if c.Namespace != "" {
		scope = fmt.Sprintf("in the namespace %q", c.Namespace)
	}
	//lint:ignore ST1005 the message of the API server
	err := fmt.Errorf("User %q cannot %s resource %q in API group %q %s", c.User, c.Verb, resource, c.res.gvr.Group, scope)
	return apierrors.NewForbidden(c.res.gvr.GroupResource(), c.Name, err)
}

// notServed returns the response for a path that is not served.
func notServed() *http.Response {
	return respond(http.StatusNotFound, "text/plain; charset=utf-8", []byte("404 page not found\n"))
}

// discover returns the resources of gv.
func (s *Server) discover(gv schema.GroupVersion) *http.Response {
	list := metav1.APIResourceList{
		TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}, GroupVersion: gv.String(),
	}
	for _, r := range s.sortedResources() {
		if r.gvr.GroupVersion() != gv {
			continue
		}
		for _, sub := range append([]string{""}, r.subresources()...) {
			list.APIResources = append(list.APIResources, r.discovered(sub))
		}
	}
	if len(list.APIResources) == 0 {
		return notServed()
	}
	return respond(http.StatusOK, jsonType, mustEncode(list))
}
