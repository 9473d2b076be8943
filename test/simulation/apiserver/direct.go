// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Create creates a copy of obj, an object of a built-in resource, without the hooks and encodings of a client.
func (s *Server) Create(gvr schema.GroupVersionResource, obj runtime.Object) error {
	c, obj := s.direct(gvr, obj)
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.insert(c, obj)
	return err
}

// Update replaces the object with the name of obj, or its subresource, by a copy of obj. See [Server.Create].
func (s *Server) Update(gvr schema.GroupVersionResource, obj runtime.Object, subresource string) error {
	c, obj := s.direct(gvr, obj)
	c.Subresource = subresource
	s.mu.Lock()
	defer s.mu.Unlock()
	_, _, err := s.putObject(c, obj)
	return err
}

// Delete deletes an object of a built-in resource. p may be nil. See [Server.Create].
func (s *Server) Delete(gvr schema.GroupVersionResource, namespace, name string, p *metav1.Preconditions) error {
	c := &call{Request: Request{Resource: gvr, Namespace: namespace, Name: name}, res: s.resource(gvr)}
	s.mu.Lock()
	defer s.mu.Unlock()
	existing, ok := s.objects[c.res][c.key()]
	if !ok {
		return c.notFound()
	}
	_, err := s.remove(c, existing, metav1.DeleteOptions{Preconditions: p})
	return err
}

// direct returns the call for obj, and a copy of obj as a request with it would be decoded.
func (s *Server) direct(gvr schema.GroupVersionResource, obj runtime.Object) (*call, runtime.Object) {
	obj = obj.DeepCopyObject()
	m := accessor(obj)
	c := &call{Request: Request{Resource: gvr, Namespace: m.GetNamespace(), Name: m.GetName()}, res: s.resource(gvr)}
	c.res.normalize(obj)
	return c, obj
}
