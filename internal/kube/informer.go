package kube

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
)

// Informer is a typed view on the watch of one kind. What it returns is shared with
// everybody else and must not be changed.
type Informer[T metav1.Object] struct {
	informer cache.SharedIndexInformer
}

// Key is the name of obj in its kind: namespace/name, or the name alone.
func Key(obj metav1.Object) string {
	return cache.MetaObjectToName(obj).String()
}

// Synced tells whether the first list has arrived. What is not in the cache before that
// may exist all the same.
func (k Informer[T]) Synced() bool { return k.informer.HasSynced() }

// Get is the cached object behind key (see [Key]); false when there is none.
func (k Informer[T]) Get(key string) (T, bool) {
	var none T
	obj, exists, err := k.informer.GetIndexer().GetByKey(key)
	if err != nil || !exists { // a map cannot fail: err is always nil
		return none, false
	}
	o, ok := obj.(T)
	return o, ok
}

// List is every cached object, in no order.
func (k Informer[T]) List() []T {
	return typed[T](k.informer.GetIndexer().List())
}

// ByIndex is the cached objects for which an index, one of the constants of this
// package, has value. The index must be one of this kind.
func (k Informer[T]) ByIndex(index, value string) []T {
	objs, err := k.informer.GetIndexer().ByIndex(index, value)
	if err != nil {
		panic(fmt.Sprintf("index %q: %v", index, err)) // not an index of this kind: a mistake of the caller
	}
	return typed[T](objs)
}

func typed[T any](objs []any) []T {
	out := make([]T, 0, len(objs))
	for _, obj := range objs {
		if o, ok := obj.(T); ok {
			out = append(out, o)
		}
	}
	return out
}

// Handlers are called for each change of a kind, one after the other. Nil ones
// are left out. They must be quick: add a key to a queue and return.
type Handlers[T metav1.Object] struct {
	// Add is called for new objects, and for those that exist when the handlers
	// are registered.
	Add func(obj T)
	// Update is called with the object before and after. Both have the same
	// resourceVersion when the watch was interrupted and nothing had changed.
	Update func(old, new T)
	// Delete is called with the last known state.
	Delete func(obj T)
}

// Registration is a set of handlers at work.
type Registration struct {
	// Synced is done when Add has been called for everything that existed.
	Synced cache.DoneChecker
	remove func() error
}

// Remove ends the calls of the handlers; one that is running may still go on.
func (r Registration) Remove() error { return r.remove() }

// Handle registers h. It fails only when the informer has been stopped.
func (k Informer[T]) Handle(h Handlers[T]) (Registration, error) {
	reg, err := k.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) {
			if o, ok := obj.(T); ok && h.Add != nil {
				h.Add(o)
			}
		},
		UpdateFunc: func(before, after any) {
			b, okBefore := before.(T)
			a, okAfter := after.(T)
			if okBefore && okAfter && h.Update != nil {
				h.Update(b, a)
			}
		},
		DeleteFunc: func(obj any) {
			if gone, missed := obj.(cache.DeletedFinalStateUnknown); missed {
				obj = gone.Obj // the watch was interrupted when it went
			}
			if o, ok := obj.(T); ok && h.Delete != nil {
				h.Delete(o)
			}
		},
	})
	if err != nil {
		return Registration{}, fmt.Errorf("registering event handlers: %w", err)
	}
	return Registration{
		Synced: reg.HasSyncedChecker(),
		remove: func() error { return k.informer.RemoveEventHandler(reg) },
	}, nil
}
