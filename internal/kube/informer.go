// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
)

// Informer provides typed access to a shared informer. Returned objects are shared and must not be
// modified.
type Informer[T metav1.Object] struct {
	informer cache.SharedIndexInformer
}

// Key returns namespace/name of obj, or its name if it is cluster-scoped.
func Key(obj metav1.Object) string {
	return cache.MetaObjectToName(obj).String()
}

// Synced reports whether the initial list is complete. Before that, an object may exist that is not
// in the cache.
func (i Informer[T]) Synced() bool { return i.informer.HasSynced() }

// SyncedChecker is done once Synced returns true.
func (i Informer[T]) SyncedChecker() cache.DoneChecker { return i.informer.HasSyncedChecker() }

// Get returns the cached object with this key (see [Key]), or false if there is none.
func (i Informer[T]) Get(key string) (T, bool) {
	obj, _, _ := i.informer.GetIndexer().GetByKey(key) // the store of an informer returns no errors
	return typedObject[T](obj)
}

// List returns all cached objects, in no particular order.
func (i Informer[T]) List() []T {
	return typed[T](i.informer.GetIndexer().List())
}

// ByIndex returns the cached objects with this value in an index of this package. It panics if the
// resource does not have the index.
func (i Informer[T]) ByIndex(index, value string) []T {
	objs, err := i.informer.GetIndexer().ByIndex(index, value)
	if err != nil {
		panic(fmt.Sprintf("index %q: %v", index, err))
	}
	return typed[T](objs)
}

// AddIndex adds an index to the informer, unless it has one of that name. value returns the value of an object, or "" to leave it out.
func (i Informer[T]) AddIndex(name string, value func(T) string) error {
	indexer := i.informer.GetIndexer()
	if _, exists := indexer.GetIndexers()[name]; exists {
		return nil
	}
	return i.informer.AddIndexers(cache.Indexers{name: index(value)})
}

func typed[T any](objs []any) []T {
	out := make([]T, 0, len(objs))
	for _, obj := range objs {
		if o, ok := typedObject[T](obj); ok {
			out = append(out, o)
		}
	}
	return out
}

// Handlers are called one at a time for each event of a resource. A nil handler ignores its events.
// An object that is replaced by a stub of another type counts as deleted, and as added afterwards.
// Handlers must not block: they enqueue a key and return.
type Handlers[T metav1.Object] struct {
	// Add is called for new objects, and for existing ones after the registration.
	Add func(obj T)
	// Update is called with the previous and the current object. Both have the same
	// resourceVersion if a watch was interrupted and the object is unchanged.
	Update func(old, new T)
	// Delete is called with the last known state.
	Delete func(obj T)
	// Missed is called instead of Delete if the watch was interrupted, so that the state may not be the last one.
	// Nil: Delete is called.
	Missed func(obj T)
}

// Registration is a registered set of handlers.
type Registration struct {
	// Synced is done after Add was called for all objects of the initial list.
	Synced cache.DoneChecker
	remove func() error
}

// Remove unregisters the handlers. It does not wait for a running one.
func (r Registration) Remove() error { return r.remove() }

// Handle registers h. It fails only if the informer was stopped.
func (i Informer[T]) Handle(h Handlers[T]) (Registration, error) {
	reg, err := i.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) {
			if o, ok := typedObject[T](obj); ok && h.Add != nil {
				h.Add(o)
			}
		},
		UpdateFunc: func(before, after any) {
			b, okBefore := typedObject[T](before)
			a, okAfter := typedObject[T](after)
			switch { // a transform may replace objects by stubs of another type
			case okBefore && okAfter && h.Update != nil:
				h.Update(b, a)
			case okAfter && !okBefore && h.Add != nil:
				h.Add(a)
			case okBefore && !okAfter && h.Delete != nil:
				h.Delete(b)
			}
		},
		DeleteFunc: func(obj any) {
			deleted := h.Delete
			if last, missed := obj.(cache.DeletedFinalStateUnknown); missed {
				obj = last.Obj // the object was deleted while the watch was interrupted
				if h.Missed != nil {
					deleted = h.Missed
				}
			}
			if o, ok := typedObject[T](obj); ok && deleted != nil {
				deleted(o)
			}
		},
	})
	if err != nil {
		return Registration{}, fmt.Errorf("registering event handlers: %w", err)
	}
	return Registration{
		Synced: reg.HasSyncedChecker(),
		remove: func() error { return i.informer.RemoveEventHandler(reg) },
	}, nil
}

// index returns an index function for objects with at most one value, which is not empty.
func index[T any](value func(T) string) cache.IndexFunc {
	return func(obj any) ([]string, error) {
		if o, ok := typedObject[T](obj); ok {
			if v := value(o); v != "" {
				return []string{v}, nil
			}
		}
		return nil, nil
	}
}
