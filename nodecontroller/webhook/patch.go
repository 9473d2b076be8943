package webhook

import (
	"encoding/json"
	"fmt"
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

// add puts value where path says, also in the place of another one.
func add(path string, value any) operation { return operation{Op: "add", Path: path, Value: value} }

// step makes a key one step of a JSON pointer (RFC 6901).
func step(key string) string {
	return "/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(key)
}

// decode reads what v names of data: keys as they are written, and each only once. An
// object with a key twice means one thing to one reader and another to the next, so
// that a patch for it may hit the wrong one.
func decode(data []byte, v any) error {
	twice, err := kjson.UnmarshalStrict(data, v, kjson.DisallowDuplicateFields)
	if err == nil && len(twice) > 0 {
		err = twice[0]
	}
	return err
}

// rawMeta is what is read of metadata. Nil is absent or null for all that is in it.
type rawMeta struct {
	Annotations map[string]string `json:"annotations"`
	Finalizers  []string          `json:"finalizers"`
}

// metaOps are the operations that make metadata an object, and meta as it is then.
func metaOps(meta *rawMeta) ([]operation, rawMeta) {
	if meta == nil {
		return []operation{add("/metadata", struct{}{})}, rawMeta{}
	}
	return nil, *meta
}

// finalizerPatch adds finalizer at the end, unless it is there.
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

// annotationOps set annotations and remove others, sorted by key.
func annotationOps(meta *rawMeta, set map[string]string, remove []string) []operation {
	var changes []operation
	keys := slices.Concat(slices.Collect(maps.Keys(set)), remove)
	slices.Sort(keys)
	parents, have := metaOps(meta)
	for _, k := range keys {
		wanted, keep := set[k]
		old, there := have.Annotations[k]
		path := "/metadata/annotations" + step(k)
		switch {
		case keep && (!there || old != wanted):
			changes = append(changes, add(path, wanted))
		case !keep && there:
			changes = append(changes, operation{Op: "remove", Path: path})
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

// rawResources is what is read of the resources of a container, in which nil is absent
// or null. Quantities stay as they are written.
type rawResources struct {
	Limits   map[string]json.RawMessage `json:"limits"`
	Requests map[string]json.RawMessage `json:"requests"`
}

// markOps give a container, at path, one piece of resource as limit and as request.
func markOps(path string, have *rawResources, resource string) []operation {
	const one = "1"
	var ops []operation
	path += "/resources"
	if have == nil {
		ops, have = append(ops, add(path, struct{}{})), &rawResources{}
	}
	mark := func(path string, list map[string]json.RawMessage) {
		if list == nil {
			ops = append(ops, add(path, struct{}{}))
		}
		if string(list[resource]) != `"`+one+`"` {
			ops = append(ops, add(path+step(resource), one))
		}
	}
	mark(path+"/limits", have.Limits)
	mark(path+"/requests", have.Requests)
	return ops
}

// encode is ops as the API server takes them; nil for none.
func encode(ops []operation) ([]byte, error) {
	if len(ops) == 0 {
		return nil, nil
	}
	data, err := json.Marshal(ops)
	if err != nil {
		return nil, fmt.Errorf("encoding the patch: %w", err)
	}
	return data, nil
}
