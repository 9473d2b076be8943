package kube

import (
	"errors"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
)

// MutationCache is a view on a kind that knows the own writes before the watch does: a
// stale cache never causes a second call or a second write. The zero value is
// not usable, see [NewMutationCache]. It is safe for use by several goroutines.
type MutationCache[T metav1.Object] struct {
	informer Informer[T]
	reg      Registration

	mu      sync.Mutex
	written map[string]T           // newer than the cache, by key
	deleted map[types.UID]struct{} // gone, but still in the cache
}

// NewMutationCache makes the view on kind. It forgets a write as soon as the watch has passed
// it. [MutationCache.Close] must be called at the end.
func NewMutationCache[T metav1.Object](kind Informer[T]) (*MutationCache[T], error) {
	o := &MutationCache[T]{informer: kind, written: map[string]T{}, deleted: map[types.UID]struct{}{}}
	var err error
	o.reg, err = kind.Handle(Handlers[T]{
		Add:    func(obj T) { o.prune(obj) },
		Update: func(_, obj T) { o.prune(obj) },
		Delete: func(obj T) {
			o.prune(obj)
			o.mu.Lock()
			delete(o.deleted, obj.GetUID())
			o.mu.Unlock()
		},
	})
	return o, err
}

// Close ends the view.
func (o *MutationCache[T]) Close() error { return o.reg.Remove() }

// Get is the newest known object behind key; false when there is none, or when
// it is known to be gone.
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
		if _, gone := o.deleted[obj.GetUID()]; gone {
			var none T
			return none, false
		}
	}
	return obj, ok
}

// Observe remembers obj, as the API server returned it from a write or a live
// read. An object that has a deletionTimestamp and no finalizer left is gone.
func (o *MutationCache[T]) Observe(obj T) {
	if obj.GetDeletionTimestamp() != nil && len(obj.GetFinalizers()) == 0 {
		o.MarkDeleted(obj)
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	key := Key(obj)
	if w, ok := o.written[key]; ok && w.GetUID() == obj.GetUID() && !older(w.GetResourceVersion(), obj.GetResourceVersion()) {
		return // two writers: the answer of the earlier write came later
	}
	if !o.observedByWatch(obj) {
		o.written[key] = obj
	}
}

// MarkDeleted remembers that obj is gone, for as long as the cache still has it.
func (o *MutationCache[T]) MarkDeleted(obj T) {
	o.mu.Lock()
	defer o.mu.Unlock()
	key := Key(obj)
	if w, ok := o.written[key]; ok && w.GetUID() == obj.GetUID() {
		delete(o.written, key)
	}
	// Only what the cache still has can come back from it; its Delete event,
	// which ends the entry, is then still to come.
	if cached, ok := o.informer.Get(key); ok && cached.GetUID() == obj.GetUID() {
		o.deleted[obj.GetUID()] = struct{}{}
	}
}

// RecordWrite remembers the outcome of [PatchMetadata], or of another write to before: what it
// returned, or that the object is gone, which is no error then. Other errors are
// returned as they are.
func (o *MutationCache[T]) RecordWrite(before, after T, err error) error {
	if IsNotFound(err) {
		o.MarkDeleted(before)
		return nil
	}
	// The answer to a write that removes the last finalizer of an object has its old
	// resourceVersion: only whether it is the same object in memory tells.
	if any(after) != any(before) {
		o.Observe(after)
	}
	return err
}

// IsNotFound tells whether err says that an object is not there. A proxy that does not know
// the path says NotFound too, and knows nothing of the object.
func IsNotFound(err error) bool {
	return apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}

// IsPatchTestFailed tells whether err says that a test of a JSON patch did not hold, so that what was
// read is outdated. What a policy or the validation refuses is as invalid, but names the object.
func IsPatchTestFailed(err error) bool {
	if !apierrors.IsInvalid(err) {
		return false
	}
	var status apierrors.APIStatus
	return errors.As(err, &status) && (status.Status().Details == nil || status.Status().Details.Name == "")
}

// prune drops what the cache has passed, so that nothing is kept for good.
func (o *MutationCache[T]) prune(obj T) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if w, ok := o.written[Key(obj)]; ok && o.observedByWatch(w) {
		delete(o.written, Key(obj))
	}
}

// observedByWatch tells whether the cache has seen obj or something later of its kind.
// It is asked before the cache is read, so that what is read is not older.
func (o *MutationCache[T]) observedByWatch(obj T) bool {
	return !older(o.informer.informer.GetStore().LastStoreSyncResourceVersion(), obj.GetResourceVersion())
}

// older tells whether resourceVersion a is before b. Versions of one kind are
// ordered (KEP-5504). An empty or odd a, of a cache that has not been filled yet,
// counts as older.
func older(a, b string) bool {
	order, err := resourceversion.CompareResourceVersion(a, b)
	return err != nil || order < 0
}
