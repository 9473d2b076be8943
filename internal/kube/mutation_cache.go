// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
)

// MutationCache overlays an informer with this process's own writes, so that a stale informer
// never causes a second call or write. It is safe for concurrent use.
//
// Unlike client-go's cache.MutationCache, it knows deletions, and it has no TTL: a write stays
// visible until the watch has observed it, however slow the watch is. It has no event handler: each
// handler of an informer costs two goroutine switches per event.
type MutationCache[T metav1.Object] struct {
	informer Informer[T]

	patchForbidden sync.Once // the missing permission to patch is logged

	mu      sync.Mutex
	written map[string]T         // newer than the informer, by key
	deleted map[types.UID]string // keys of objects that are deleted, but were in the informer then
	pruneAt int                  // number of entries at which those that the watch has observed are removed
}

// minPruned is the number of entries below which [MutationCache] removes none.
const minPruned = 32

// NewMutationCache returns an overlay for informer.
func NewMutationCache[T metav1.Object](informer Informer[T]) *MutationCache[T] {
	return &MutationCache[T]{informer: informer, written: map[string]T{}, deleted: map[types.UID]string{}, pruneAt: minPruned}
}

// Get returns the newest known version of the object with this key, or false if it does not exist
// or was deleted.
func (o *MutationCache[T]) Get(key string) (T, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if w, ok := o.written[key]; ok {
		if !o.observedByWatch(w) {
			return w, true
		}
		delete(o.written, key)
	}
	obj, ok := o.informer.Get(key)
	if ok {
		if _, deleted := o.deleted[obj.GetUID()]; deleted {
			var none T
			return none, false
		}
	}
	return obj, ok
}

// ByIndex returns the newest known versions of the objects with this value in an index of the informer. The watch may observe a write
// meanwhile: whether the overlay counts is decided once per object, so that none is returned twice.
func (o *MutationCache[T]) ByIndex(index, value string) []T {
	o.mu.Lock()
	defer o.mu.Unlock()
	values := o.informer.informer.GetIndexer().GetIndexers()[index]
	var found []T
	unseen := map[string]bool{}
	for key, w := range o.written {
		if o.observedByWatch(w) {
			continue
		}
		unseen[key] = true
		if of, _ := values(w); slices.Contains(of, value) {
			found = append(found, w)
		}
	}
	for _, cached := range o.informer.ByIndex(index, value) {
		if _, deleted := o.deleted[cached.GetUID()]; !deleted && !unseen[Key(cached)] {
			found = append(found, cached)
		}
	}
	return found
}

// Observe stores obj as returned by the API server from a write or a live read. An object with a
// deletionTimestamp and without finalizers counts as deleted.
func (o *MutationCache[T]) Observe(obj T) {
	if obj.GetDeletionTimestamp() != nil && len(obj.GetFinalizers()) == 0 {
		o.MarkDeleted(obj)
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	key := Key(obj)
	if w, ok := o.written[key]; ok && w.GetUID() == obj.GetUID() && !older(w.GetResourceVersion(), obj.GetResourceVersion()) {
		return // concurrent writes: the response to the earlier one arrived later
	}
	if !o.observedByWatch(obj) {
		o.written[key] = obj
		o.pruneIfGrown()
	}
}

// MarkDeleted hides obj until the informer has observed its deletion.
func (o *MutationCache[T]) MarkDeleted(obj T) {
	o.mu.Lock()
	defer o.mu.Unlock()
	key := Key(obj)
	if w, ok := o.written[key]; ok && w.GetUID() == obj.GetUID() {
		delete(o.written, key)
	}
	// Without obj in the informer there is nothing to hide.
	if cached, ok := o.informer.Get(key); ok && cached.GetUID() == obj.GetUID() {
		o.deleted[obj.GetUID()] = key
		o.pruneIfGrown()
	}
}

// Patch applies c to obj like [PatchMetadata] and records the result like [MutationCache.RecordWrite].
// It returns the object as stored, or obj itself if it wrote nothing.
func (o *MutationCache[T]) Patch(ctx context.Context, w Writer[T], obj T, c MetadataPatch) (T, error) {
	changed, err := patchMetadata(ctx, w, obj, c, &o.patchForbidden)
	if IsNotFound(err) {
		changed = obj
	}
	return changed, o.RecordWrite(obj, changed, err)
}

// UpdateInstead fetches obj, applies change and updates it, after a patch that was forbidden. It
// records nothing.
func (o *MutationCache[T]) UpdateInstead(ctx context.Context, w Writer[T], obj T, change func(live T) T, forbidden error) (T, error) {
	return updateInstead(ctx, w, obj, func(live T) (T, error) { return change(live), nil }, forbidden, &o.patchForbidden)
}

// RecordWrite records the result of a write to before. NotFound marks before as deleted and is not
// an error. Other errors are returned.
func (o *MutationCache[T]) RecordWrite(before, after T, err error) error {
	if IsNotFound(err) {
		o.MarkDeleted(before)
		return nil
	}
	// Compare pointers: the response to a write that removes the last finalizer has the old
	// resourceVersion.
	if any(after) != any(before) {
		o.Observe(after)
	}
	return err
}

// IsPatchTestFailed reports whether err means that a test operation of a JSON patch failed because
// the object was modified. Errors of policies and validation are Invalid, too, but name the object.
func IsPatchTestFailed(err error) bool {
	if !apierrors.IsInvalid(err) {
		return false
	}
	var status apierrors.APIStatus
	return errors.As(err, &status) && (status.Status().Details == nil || status.Status().Details.Name == "")
}

// Outdated reports whether a write of obj has failed with err because another writer has changed or deleted the object, and a newer state
// is known: decide again.
func (o *MutationCache[T]) Outdated(obj T, err error) bool {
	newest, exists := o.Newest(obj)
	if IsPatchTestFailed(err) || apierrors.IsConflict(err) {
		return !exists || newest.GetResourceVersion() != obj.GetResourceVersion()
	}
	// No finalizer can be added to an object that is being deleted.
	return apierrors.IsInvalid(err) && exists && newest.GetDeletionTimestamp() != nil && obj.GetDeletionTimestamp() == nil
}

// Newest returns the newest known version of obj, or false if obj was deleted.
func (o *MutationCache[T]) Newest(obj T) (newest T, exists bool) {
	newest, exists = o.Get(Key(obj))
	return newest, exists && newest.GetUID() == obj.GetUID()
}

// pruneIfGrown calls prune if there are twice as many entries as it left. So an entry costs the same however many
// there are. It must be called with the lock held.
func (o *MutationCache[T]) pruneIfGrown() {
	if len(o.written)+len(o.deleted) >= o.pruneAt {
		o.prune()
		o.pruneAt = max(minPruned, 2*(len(o.written)+len(o.deleted)))
	}
}

// prune removes the entries that the watch has observed. It must be called with the lock held.
func (o *MutationCache[T]) prune() {
	maps.DeleteFunc(o.written, func(_ string, w T) bool { return o.observedByWatch(w) })
	maps.DeleteFunc(o.deleted, func(uid types.UID, key string) bool {
		cached, ok := o.informer.Get(key)
		return !ok || cached.GetUID() != uid
	})
}

// observedByWatch reports whether the informer has received this or a later version of its
// resource. Call it before reading the informer, so that the object read is not older.
func (o *MutationCache[T]) observedByWatch(obj T) bool {
	return o.Reached(obj.GetResourceVersion())
}

// Reached reports whether the informer has received all changes of its resource up to version. The empty version is later
// than all others.
func (o *MutationCache[T]) Reached(version string) bool {
	return !older(o.informer.informer.GetStore().LastStoreSyncResourceVersion(), version)
}

// older reports whether resourceVersion a precedes b. The versions of a resource are ordered
// (KEP-5504). The empty version of an informer before its first list precedes all others.
func older(a, b string) bool {
	order, err := resourceversion.CompareResourceVersion(a, b)
	return err != nil || order < 0
}
