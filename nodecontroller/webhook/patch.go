// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"

	kjson "sigs.k8s.io/json"
)

// operation is one operation of a JSON patch (RFC 6902).
type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value,omitempty"`
}

// add returns the operation that sets the value at path, or replaces it.
func add(path string, value any) operation { return operation{Op: "add", Path: path, Value: value} }

// pointer returns key as a step of a JSON pointer (RFC 6901).
func pointer(key string) string {
	return "/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(key)
}

// decode decodes the fields of v, with case-sensitive keys. It rejects duplicate keys: two programs
// may read different values, and a patch may hit the wrong one.
func decode(data []byte, v any) error {
	duplicates, err := kjson.UnmarshalStrict(data, v, kjson.DisallowDuplicateFields)
	if err == nil && len(duplicates) > 0 {
		err = duplicates[0]
	}
	return err
}

// rawMeta holds the fields of metadata that are read. Nil is absent or null.
type rawMeta struct {
	Annotations map[string]string `json:"annotations"`
	Finalizers  []string          `json:"finalizers"`
}

// metaOps returns the operations that make metadata an object, and meta after them.
func metaOps(meta *rawMeta) ([]operation, rawMeta) {
	if meta == nil {
		return []operation{add("/metadata", struct{}{})}, rawMeta{}
	}
	return nil, *meta
}

// finalizerPatch returns the operations that append finalizer, none if it is there.
func finalizerPatch(meta *rawMeta, finalizer string) []operation {
	ops, have := metaOps(meta)
	switch {
	case slices.Contains(have.Finalizers, finalizer):
		return nil
	case have.Finalizers == nil:
		return append(ops, add("/metadata/finalizers", []string{finalizer}))
	}
	return append(ops, add("/metadata/finalizers/-", finalizer))
}

// annotationOps returns the operations that set annotations, sorted by key.
func annotationOps(meta *rawMeta, annotations map[string]string) []operation {
	var changes []operation
	parents, have := metaOps(meta)
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		if old, ok := have.Annotations[key]; !ok || old != annotations[key] {
			changes = append(changes, add("/metadata/annotations"+pointer(key), annotations[key]))
		}
	}
	if len(changes) == 0 {
		return nil
	}
	if have.Annotations == nil {
		parents = append(parents, add("/metadata/annotations", struct{}{}))
	}
	return append(parents, changes...)
}

// rawResources holds the resources of a container. Nil is absent or null; quantities stay as they are
// written.
type rawResources struct {
	Limits   map[string]json.RawMessage `json:"limits"`
	Requests map[string]json.RawMessage `json:"requests"`
}

// resourceOps returns the operations that set the limit and the request of the container at path to
// one unit of resource.
func resourceOps(path string, have *rawResources, resource string) []operation {
	const one = "1"
	var ops []operation
	path += "/resources"
	if have == nil {
		ops, have = append(ops, add(path, struct{}{})), &rawResources{}
	}
	set := func(path string, list map[string]json.RawMessage) {
		if list == nil {
			ops = append(ops, add(path, struct{}{}))
		}
		if string(list[resource]) != `"`+one+`"` {
			ops = append(ops, add(path+pointer(resource), one))
		}
	}
	set(path+"/limits", have.Limits)
	set(path+"/requests", have.Requests)
	return ops
}
