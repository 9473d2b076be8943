// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// MetadataPatch describes changes of the finalizers and annotations of an object. Applying it twice
// has no further effect, but its tests may fail then.
type MetadataPatch struct {
	AddFinalizers     []string // appended in this order
	RemoveFinalizers  []string // every occurrence
	SetAnnotations    map[string]string
	RemoveAnnotations []string
	// InitAnnotations are set unless the object has an annotation with the key.
	InitAnnotations map[string]string
	// Tests are values that the object must have before the change, by JSON pointer; nil means absent. Otherwise
	// the patch fails, see [IsPatchTestFailed].
	Tests map[string]any
}

// annotationsPath is the JSON pointer of the annotations of an object.
const annotationsPath = "/metadata/annotations"

// jsonPatchOp is one operation of a JSON patch (RFC 6902).
type jsonPatchOp struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value,omitempty"`
}

// testOp is a test operation. A test for nil passes if the value is absent. It encodes "value":null,
// unlike [jsonPatchOp].
type testOp struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// JSONPatch returns the JSON patch that applies c to obj, or nil if obj is up to date. Test
// operations make it fail if the object has another UID or if another writer changed the
// finalizers, which the patch would revert.
func (c MetadataPatch) JSONPatch(obj metav1.Object) ([]byte, error) {
	changes := append(c.finalizerOps(obj.GetFinalizers()), c.annotationOps(obj.GetAnnotations())...)
	if len(changes) == 0 {
		return nil, nil
	}
	ops := []any{jsonPatchOp{"test", "/metadata/uid", obj.GetUID()}}
	for _, path := range slices.Sorted(maps.Keys(c.Tests)) {
		value := c.Tests[path]
		if value == nil && len(obj.GetAnnotations()) == 0 && strings.HasPrefix(path, annotationsPath+"/") {
			path = annotationsPath // a test of a field of an absent object fails
		}
		ops = append(ops, testOp{"test", path, value})
	}
	return json.Marshal(append(ops, changes...))
}

func (c MetadataPatch) finalizerOps(have []string) []any {
	want := c.finalizers(have)
	const path = "/metadata/finalizers"
	switch {
	case slices.Equal(have, want):
		return nil
	case len(have) == 0:
		return []any{testOp{"test", path, nil}, jsonPatchOp{"add", path, want}}
	case len(want) == 0:
		return []any{jsonPatchOp{"test", path, have}, jsonPatchOp{Op: "remove", Path: path}}
	}
	return []any{jsonPatchOp{"test", path, have}, jsonPatchOp{"replace", path, want}}
}

func (c MetadataPatch) finalizers(have []string) []string {
	want := slices.DeleteFunc(slices.Clone(have), func(f string) bool { return slices.Contains(c.RemoveFinalizers, f) })
	for _, f := range c.AddFinalizers {
		if !slices.Contains(want, f) {
			want = append(want, f)
		}
	}
	return want
}

func (c MetadataPatch) annotationOps(have map[string]string) []any {
	const path = annotationsPath
	var ops []any
	set := maps.Clone(c.SetAnnotations)
	maps.DeleteFunc(set, func(k, v string) bool { old, ok := have[k]; return ok && old == v })
	init := maps.Clone(c.InitAnnotations)
	maps.DeleteFunc(init, func(k, _ string) bool { _, ok := have[k]; return ok })
	if len(have) == 0 && len(set)+len(init) > 0 {
		all := map[string]string{}
		maps.Copy(all, init)
		maps.Copy(all, set)
		return []any{testOp{"test", path, nil}, jsonPatchOp{"add", path, all}}
	}
	for _, k := range slices.Sorted(maps.Keys(init)) { // the cache may be outdated: another writer may have set it
		ops = append(ops, testOp{"test", path + "/" + escape(k), nil}, jsonPatchOp{"add", path + "/" + escape(k), init[k]})
	}
	for _, k := range slices.Sorted(maps.Keys(set)) {
		ops = append(ops, jsonPatchOp{"add", path + "/" + escape(k), set[k]})
	}
	for _, k := range c.RemoveAnnotations {
		if old, ok := have[k]; ok {
			ops = append(ops, jsonPatchOp{"test", path + "/" + escape(k), old}, jsonPatchOp{Op: "remove", Path: path + "/" + escape(k)})
		}
	}
	return ops
}

// AnnotationPath returns the JSON pointer of an annotation, for [MetadataPatch.Tests].
func AnnotationPath(name string) string { return annotationsPath + "/" + escape(name) }

// escape returns key as a reference token of a JSON pointer (RFC 6901).
func escape(key string) string {
	return strings.NewReplacer("~", "~0", "/", "~1").Replace(key)
}

// Apply applies c to obj, for an update of the whole object.
func (c MetadataPatch) Apply(obj metav1.Object) {
	obj.SetFinalizers(c.finalizers(obj.GetFinalizers()))
	annotations := maps.Clone(obj.GetAnnotations())
	if annotations == nil {
		annotations = map[string]string{}
	}
	for k, v := range c.InitAnnotations {
		if _, ok := annotations[k]; !ok {
			annotations[k] = v
		}
	}
	maps.Copy(annotations, c.SetAnnotations)
	for _, k := range c.RemoveAnnotations {
		delete(annotations, k)
	}
	obj.SetAnnotations(annotations)
}

// Writer is the part of a typed client that [PatchMetadata] needs. T is a pointer to an
// API type.
type Writer[T metav1.Object] interface {
	Get(ctx context.Context, name string, opts metav1.GetOptions) (T, error)
	Update(ctx context.Context, obj T, opts metav1.UpdateOptions) (T, error)
	Patch(ctx context.Context, name string, pt types.PatchType, data []byte, opts metav1.PatchOptions, subresources ...string) (T, error)
}

// PatchMetadata applies c to obj, which may be from a cache, and returns the object as stored, or
// obj itself if it is up to date. If obj is outdated, it is fetched and patched once more; an
// object with the same name and another UID is NotFound. Without permission to patch, the object
// is fetched and updated. The error is [ErrNotStored] if the stored object lacks c. Prefer [MutationCache.Patch] where a cache exists.
func PatchMetadata[T metav1.Object](ctx context.Context, w Writer[T], obj T, c MetadataPatch) (T, error) {
	return patchMetadata(ctx, w, obj, c, new(sync.Once))
}

func patchMetadata[T metav1.Object](ctx context.Context, w Writer[T], obj T, c MetadataPatch, warn *sync.Once) (T, error) {
	stored, err := patchOrUpdate(ctx, w, obj, c, warn)
	if err == nil && !c.AppliedTo(stored) {
		err = ErrNotStored
	}
	return stored, err
}

func patchOrUpdate[T metav1.Object](ctx context.Context, w Writer[T], obj T, c MetadataPatch, warn *sync.Once) (T, error) {
	data, err := c.JSONPatch(obj)
	if err != nil || data == nil {
		return obj, err
	}
	changed, err := w.Patch(ctx, obj.GetName(), types.JSONPatchType, data, metav1.PatchOptions{})
	switch {
	case err == nil:
		return changed, nil
	case apierrors.IsForbidden(err):
		return updateInstead(ctx, w, obj, func(live T) (T, error) {
			if err := c.test(live); err != nil {
				return live, err
			}
			c.Apply(live)
			return live, nil
		}, err, warn)
	case !apierrors.IsInvalid(err) && !apierrors.IsConflict(err):
		return obj, err
	}
	// A test operation failed: obj is outdated.
	live, err := refetch(ctx, w, obj)
	if err != nil {
		return obj, err
	}
	if err := c.test(live); err != nil { // also if another writer has made the change meanwhile
		return live, err
	}
	if data, err = c.JSONPatch(live); err != nil || data == nil {
		return live, err
	}
	if changed, err = w.Patch(ctx, obj.GetName(), types.JSONPatchType, data, metav1.PatchOptions{}); err != nil {
		return live, err
	}
	return changed, nil
}

// updateInstead fetches obj and updates it, for a ClusterRole that grants update but not patch. The
// resourceVersion prevents lost updates. The wrapped error is the one of the update. It logs
// forbidden, the error of the patch, once per warn. After an error of change, it returns the live object, and after one of the update obj:
// change has modified the live object, and the API server has not stored that.
func updateInstead[T metav1.Object](
	ctx context.Context, w Writer[T], obj T, change func(live T) (T, error), forbidden error, warn *sync.Once,
) (T, error) {
	live, err := refetch(ctx, w, obj)
	if err != nil {
		return obj, fmt.Errorf("%v; fetching the object for an update: %w", forbidden, err)
	}
	changed, err := change(live)
	if err != nil {
		return live, err
	}
	updated, err := w.Update(ctx, changed, metav1.UpdateOptions{})
	if err != nil {
		return obj, fmt.Errorf("%v; updating the object: %w", forbidden, err)
	}
	warn.Do(func() {
		klog.FromContext(ctx).Info("No permission to patch, falling back to get and update. Grant the verb patch", "err", forbidden)
	})
	return updated, nil
}

// refetch gets obj from the API server, or NotFound if its UID has changed.
func refetch[T metav1.Object](ctx context.Context, w Writer[T], obj T) (T, error) {
	live, err := w.Get(ctx, obj.GetName(), metav1.GetOptions{})
	if err == nil && live.GetUID() != obj.GetUID() {
		err = apierrors.NewNotFound(schema.GroupResource{}, obj.GetName()+" (with UID "+string(obj.GetUID())+")")
	}
	return live, err
}

// AppliedTo reports whether c would not change obj.
func (c MetadataPatch) AppliedTo(obj metav1.Object) bool {
	return len(c.finalizerOps(obj.GetFinalizers())) == 0 && len(c.annotationOps(obj.GetAnnotations())) == 0
}
