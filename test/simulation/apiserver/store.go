// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// change is one write. Stored objects are never modified.
type change struct {
	version uint64
	res     *resource
	key     string
	before  runtime.Object // nil: created
	after   runtime.Object // nil: deleted
	deleted runtime.Object // if after is nil: before, with the resourceVersion of the deletion
}

// key returns the key of an object, in the order of lists.
func key(namespace, name string) string {
	if namespace == "" {
		return name
	}
	return namespace + "/" + name
}

// commit stores after instead of before, either of which may be nil, and notifies watches. It returns
// the stored or deleted object. after must not be modified any more.
func (s *Server) commit(r *resource, key string, before, after runtime.Object) runtime.Object {
	s.version++
	c := change{version: s.version, res: r, key: key, before: before, after: after}
	result := after
	if after == nil {
		delete(s.objects[r], key)
		c.deleted = withVersion(before, s.version)
		result = c.deleted
	} else {
		accessor(after).SetResourceVersion(strconv.FormatUint(s.version, 10))
		s.objects[r][key] = after
	}
	s.log = append(s.log, c)
	for _, w := range s.watches {
		w.push(c)
	}
	return result
}

// at returns the objects of r at a resourceVersion, which must not be compacted.
func (s *Server) at(r *resource, version uint64) map[string]runtime.Object {
	if version >= s.version {
		return s.objects[r]
	}
	objects := maps.Clone(s.objects[r])
	for _, c := range slices.Backward(s.log) {
		if c.version <= version {
			break
		}
		if c.res != r {
			continue
		}
		if c.before == nil {
			delete(objects, c.key)
		} else {
			objects[c.key] = c.before
		}
	}
	return objects
}

// cached returns the resourceVersion that the API server of the client has observed.
func (s *Server) cached(c *call) uint64 {
	if s.hooks.Cached == nil {
		return s.version
	}
	return min(max(s.hooks.Cached(c.Request), s.compacted), s.version)
}

// uid returns a UID that was not used before.
func (s *Server) uid() types.UID {
	if s.hooks.UID != nil {
		return s.hooks.UID()
	}
	s.ids++
	return types.UID(fmt.Sprintf("00000000-0000-4000-8000-%012x", s.ids))
}

// generateName returns base with a suffix of five characters.
func (s *Server) generateName(base string) string {
	const alphabet = "bcdfghjklmnpqrstvwxz2456789"
	s.ids++
	suffix, n := "", s.ids*2654435761 // so that following names do not look alike
	for range 5 {
		suffix += string(alphabet[n%uint64(len(alphabet))])
		n /= uint64(len(alphabet))
	}
	return base[:min(len(base), 58)] + suffix
}

// resource returns the resource with that name, or nil.
func (s *Server) resource(gvr schema.GroupVersionResource) *resource {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.resources[gvr]
}

// define serves the resource of a new CustomResourceDefinition, each version as an own resource without conversion.
func (s *Server) define(crd runtime.Object) error {
	content := crd.(*unstructured.Unstructured).Object
	text := func(fields ...string) string {
		value, _, _ := unstructured.NestedString(content, fields...) // empty if it is none
		return value
	}
	versions, _, err := unstructured.NestedSlice(content, "spec", "versions")
	if err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	for _, v := range versions {
		version, _ := v.(map[string]any)
		name, _, _ := unstructured.NestedString(version, "name")
		_, status, _ := unstructured.NestedMap(version, "subresources", "status")
		r := customResource(text("spec", "group"), name, text("spec", "names", "plural"), text("spec", "names", "kind"),
			text("spec", "scope") == "Namespaced", status)
		if s.resources[r.gvr] == nil {
			s.resources[r.gvr], s.objects[r] = r, map[string]runtime.Object{}
		}
	}
	return nil
}

// sortedResources returns the resources by group, version and name.
func (s *Server) sortedResources() []*resource {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.SortedFunc(maps.Values(s.resources), func(a, b *resource) int {
		return cmp.Or(strings.Compare(a.gvr.Group, b.gvr.Group), strings.Compare(a.gvr.Version, b.gvr.Version),
			strings.Compare(a.gvr.Resource, b.gvr.Resource))
	})
}

// sortedKeys returns the keys of objects in the order of lists.
func sortedKeys(objects map[string]runtime.Object) []string { return slices.Sorted(maps.Keys(objects)) }

// withVersion returns a shallow copy of obj with another resourceVersion.
func withVersion(obj runtime.Object, version uint64) runtime.Object {
	obj = shallow(obj)
	accessor(obj).SetResourceVersion(strconv.FormatUint(version, 10))
	return obj
}

// equal reports whether a and b have the same stored form, so that writing one over the other is no change. As in a
// real API server, the stored form of custom resources is JSON, and that of all others is protobuf.
func (r *resource) equal(a, b runtime.Object) bool {
	encode := r.encodeJSON
	if !r.custom {
		encode = encodeProtobuf
	}
	return reflect.DeepEqual(a, b) || bytes.Equal(encode(a), encode(b))
}
