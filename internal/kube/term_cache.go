// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"maps"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// TermCache is a [MutationCache] that lives as long as this process holds a Lease, its term. It says which objects may lack what an
// earlier leader has written, such as the record of a call. It is safe for concurrent use.
type TermCache[T metav1.Object] struct {
	*MutationCache[T]

	mu sync.Mutex
	// latest is the resourceVersion that the resource had in this term, empty if it is not known.
	latest string
	// acted has by UID the objects that this process has read or written in this term while the cache had not reached latest, and
	// those with a doubt.
	acted   map[types.UID]acted
	pruneAt int
}

type acted struct {
	key     string
	doubted bool
}

// NewTermCache returns an overlay for informer, for one term.
func NewTermCache[T metav1.Object](informer Informer[T]) *TermCache[T] {
	return &TermCache[T]{MutationCache: NewMutationCache(informer), acted: map[types.UID]acted{}, pruneAt: minPruned}
}

// BeginTerm reads the latest resourceVersion. From then on, objects are fresh that the watch has delivered since. list is the List method
// of the client of the resource. Without BeginTerm, only the objects are fresh that this process has read or written in the term.
func BeginTerm[T metav1.Object, L metav1.ListInterface](
	ctx context.Context, c *TermCache[T], list func(context.Context, metav1.ListOptions) (L, error),
) error {
	objects, err := list(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.latest = objects.GetResourceVersion()
	return nil
}

// version returns latest.
func (c *TermCache[T]) version() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.latest
}

// Begun reports whether [BeginTerm] has succeeded.
func (c *TermCache[T]) Begun() bool { return c.version() != "" }

// Complete reports whether the cache shows all writes from before the term, to all objects.
func (c *TermCache[T]) Complete() bool { return c.Reached(c.version()) }

// Fresh is [MutationCache.Get], and also reports whether the object shows all writes to it from before the term.
func (c *TermCache[T]) Fresh(key string) (obj T, fresh, exists bool) {
	// Also while the object is read: a mark that another worker sets after that is not for this version.
	c.mu.Lock()
	defer c.mu.Unlock()
	complete := c.Reached(c.latest) // before the object is read, which may be newer then
	obj, exists = c.Get(key)
	if !exists {
		return obj, false, false
	}
	a, acted := c.acted[obj.GetUID()]
	return obj, !a.doubted && (acted || complete || !older(obj.GetResourceVersion(), c.latest)), true
}

// Doubt makes obj no longer fresh, until [TermCache.Refetch]: a write to it got no response and may still take effect, or another source
// contradicts it.
func (c *TermCache[T]) Doubt(obj T) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.acted[obj.GetUID()] = acted{Key(obj), true}
}

// Observe is [MutationCache.Observe].
func (c *TermCache[T]) Observe(obj T) {
	c.MutationCache.Observe(obj)
	c.mark(obj, false)
}

// Refetch is [MutationCache.Refetch].
func (c *TermCache[T]) Refetch(ctx context.Context, w Writer[T], obj T) (live T, exists bool, err error) {
	live, exists, err = c.MutationCache.Refetch(ctx, w, obj)
	if exists {
		c.mark(live, true)
	}
	return live, exists, err
}

// Patch is [MutationCache.Patch].
func (c *TermCache[T]) Patch(ctx context.Context, w Writer[T], obj T, change MetadataPatch) (T, error) {
	stored, err := c.MutationCache.Patch(ctx, w, obj, change)
	c.written(obj, stored, err)
	return stored, err
}

// RecordWrite is [MutationCache.RecordWrite].
func (c *TermCache[T]) RecordWrite(before, after T, err error) error {
	err = c.MutationCache.RecordWrite(before, after, err)
	c.written(before, after, err)
	return err
}

// written marks the response to a write; equal pointers mean that there was none.
func (c *TermCache[T]) written(before, after T, err error) {
	if err == nil && any(after) != any(before) {
		c.mark(after, false)
	}
}

// mark makes obj fresh, as the API server has returned it. After a doubt, only a read does. What has no doubt is forgotten when the
// cache has reached latest.
func (c *TermCache[T]) mark(obj T, read bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.acted[obj.GetUID()].doubted && !read {
		return
	}
	c.acted[obj.GetUID()] = acted{key: Key(obj)}
	complete := c.Reached(c.latest)
	if len(c.acted) < c.pruneAt && !complete {
		return
	}
	maps.DeleteFunc(c.acted, func(uid types.UID, a acted) bool {
		newest, exists := c.Get(a.key)
		return !exists || newest.GetUID() != uid || !a.doubted && (complete || !older(newest.GetResourceVersion(), c.latest))
	})
	c.pruneAt = max(minPruned, 2*len(c.acted))
}
