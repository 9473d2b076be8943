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

// MetadataPatch is a change of the finalizers and annotations of one object. What
// is there already, or already gone, is left as it is.
type MetadataPatch struct {
	AddFinalizers     []string // put at the end, in this order
	RemoveFinalizers  []string // every occurrence
	SetAnnotations    map[string]string
	RemoveAnnotations []string
}

// jsonPatchOp is one operation of a JSON patch (RFC 6902).
type jsonPatchOp struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value,omitempty"`
}

// testAbsent is a test operation for an absent value; "value":null must be spelled out.
type testAbsent struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// JSONPatch is the JSON patch that makes c of obj; nil when nothing is to change.
// It applies only to the object with the UID of obj, and only while what it
// builds on is unchanged: a finalizer that somebody else added or removed
// meanwhile is never rolled back, and no finalizer is ever doubled.
func (c MetadataPatch) JSONPatch(obj metav1.Object) ([]byte, error) {
	changes := append(c.finalizerOps(obj.GetFinalizers()), c.annotationOps(obj.GetAnnotations())...)
	if len(changes) == 0 {
		return nil, nil
	}
	ops := append([]any{jsonPatchOp{"test", "/metadata/uid", obj.GetUID()}}, changes...)
	return json.Marshal(ops)
}

func (c MetadataPatch) finalizerOps(have []string) []any {
	want := c.finalizers(have)
	const path = "/metadata/finalizers"
	switch {
	case slices.Equal(have, want):
		return nil
	case len(have) == 0:
		return []any{testAbsent{"test", path, nil}, jsonPatchOp{"add", path, want}}
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
	const path = "/metadata/annotations"
	var ops []any
	set := maps.Clone(c.SetAnnotations)
	maps.DeleteFunc(set, func(k, v string) bool { old, ok := have[k]; return ok && old == v })
	if len(have) == 0 && len(set) > 0 {
		return []any{testAbsent{"test", path, nil}, jsonPatchOp{"add", path, set}}
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

// escape makes a key one step of a JSON pointer (RFC 6901).
func escape(key string) string {
	return strings.NewReplacer("~", "~0", "/", "~1").Replace(key)
}

// Apply makes c of obj itself, for a write of the whole object.
func (c MetadataPatch) Apply(obj metav1.Object) {
	obj.SetFinalizers(c.finalizers(obj.GetFinalizers()))
	annotations := maps.Clone(obj.GetAnnotations())
	if annotations == nil {
		annotations = map[string]string{}
	}
	maps.Copy(annotations, c.SetAnnotations)
	for _, k := range c.RemoveAnnotations {
		delete(annotations, k)
	}
	obj.SetAnnotations(annotations)
}

// Writer is the part of a typed client that [PatchMetadata] needs; T is a pointer to
// an API type.
type Writer[T metav1.Object] interface {
	Get(ctx context.Context, name string, opts metav1.GetOptions) (T, error)
	Update(ctx context.Context, obj T, opts metav1.UpdateOptions) (T, error)
	Patch(ctx context.Context, name string, pt types.PatchType, data []byte, opts metav1.PatchOptions, subresources ...string) (T, error)
}

// PatchMetadata makes c of obj, which may come from a cache, at the API server, and
// returns the object as it is then: obj itself when nothing is to change. When
// obj turns out to be outdated, it is read and tried once more; an object of
// another UID under its name is NotFound. Where a ClusterRole grants update but not
// patch, the whole object is updated from a live read.
func PatchMetadata[T metav1.Object](ctx context.Context, w Writer[T], obj T, c MetadataPatch) (T, error) {
	data, err := c.JSONPatch(obj)
	if err != nil || data == nil {
		return obj, err
	}
	changed, err := w.Patch(ctx, obj.GetName(), types.JSONPatchType, data, metav1.PatchOptions{})
	switch {
	case err == nil:
		return changed, nil
	case apierrors.IsForbidden(err):
		return updateMetadata(ctx, w, obj, c, err)
	case !apierrors.IsInvalid(err) && !apierrors.IsConflict(err):
		return obj, err
	}
	// A test of the patch did not hold: obj is outdated.
	live, err := refetch(ctx, w, obj)
	if err != nil {
		return obj, err
	}
	if data, err = c.JSONPatch(live); err != nil || data == nil {
		return live, err
	}
	if changed, err = w.Patch(ctx, obj.GetName(), types.JSONPatchType, data, metav1.PatchOptions{}); err != nil {
		return live, err
	}
	return changed, nil
}

// warnPatchForbidden has the hint below given once per process: it is about the
// permissions of the process, not about one object.
var warnPatchForbidden sync.Once

// updateMetadata is the way around a missing permission to patch. The update
// carries the resourceVersion of the live read, so that it overwrites nothing. What
// its error is, is what became of the update.
func updateMetadata[T metav1.Object](ctx context.Context, w Writer[T], obj T, c MetadataPatch, forbidden error) (T, error) {
	live, err := refetch(ctx, w, obj)
	if err != nil {
		return obj, fmt.Errorf("%v; reading it to update it instead: %w", forbidden, err)
	}
	c.Apply(live)
	updated, err := w.Update(ctx, live, metav1.UpdateOptions{})
	if err != nil {
		return obj, fmt.Errorf("%v; updating it instead: %w", forbidden, err)
	}
	WarnPatchForbidden(ctx, forbidden)
	return updated, nil
}

// WarnPatchForbidden says, once per process, that a permission to patch is missing.
func WarnPatchForbidden(ctx context.Context, forbidden error) {
	warnPatchForbidden.Do(func() {
		klog.FromContext(ctx).Info("No permission to patch, using update instead; grant the verb patch to save a read per write", "cause", forbidden)
	})
}

// refetch is a live read of the very object obj.
func refetch[T metav1.Object](ctx context.Context, w Writer[T], obj T) (T, error) {
	live, err := w.Get(ctx, obj.GetName(), metav1.GetOptions{})
	if err == nil && live.GetUID() != obj.GetUID() {
		err = apierrors.NewNotFound(schema.GroupResource{}, obj.GetName()+" (with UID "+string(obj.GetUID())+")")
	}
	return live, err
}

// AppliedTo tells whether obj is as c would make it.
func (c MetadataPatch) AppliedTo(obj metav1.Object) bool {
	return len(c.finalizerOps(obj.GetFinalizers())) == 0 && len(c.annotationOps(obj.GetAnnotations())) == 0
}
