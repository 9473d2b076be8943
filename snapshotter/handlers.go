package snapshotter

import (
	"context"
	"maps"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// register adds the event handlers that fill the queue.
func (l *loop[T, C]) register() *kube.Registrations {
	registrations := &kube.Registrations{}
	registrations.Add(l.watches.contents.Handle(kube.Handlers[T]{Add: l.added, Update: l.updated, Delete: l.deleted}))
	registrations.Add(l.watches.classes.Handle(kube.Handlers[C]{
		Add: l.classChanged,
		Update: func(old, class C) {
			a, b := l.class(old), l.class(class)
			if a.driver != b.driver || !maps.Equal(a.parameters, b.parameters) {
				l.classChanged(class)
			}
		},
	}))
	return registrations
}

func keyOf(c *content) contentKey { return contentKey{c.meta.Name, c.meta.UID} }

// unfinished reports whether c needs a sync.
func (l *loop[T, C]) unfinished(c *content) bool {
	switch l.c.driver.rowOf(c, l.memories.get(c.uid())) {
	case notResponsible, deletionDone:
		return false
	case waitForGroup:
		return c.terminating()
	case complete:
		return c.has(c.creating) || c.terminating()
	}
	return true
}

func (l *loop[T, C]) added(obj T) {
	c := l.content(obj)
	if l.unfinished(c) {
		l.queue.Add(keyOf(c))
	}
	l.wakeMembers(c)
}

// wakeMembers enqueues the members of a group that is ready.
func (l *loop[T, C]) wakeMembers(c *content) {
	if wake := l.c.wakeMembers.Load(); wake != nil && c.group && c.known().ready {
		(*wake)(c.known().handle)
	}
}

// wake enqueues the members of the group with that handle.
func (l *loop[T, C]) wake(handle string) {
	for _, obj := range l.watches.contents.ByIndex(byGroup, handle) {
		l.added(obj)
	}
}

// updated enqueues a content that has changed in a way that may change the outcome of a failed
// attempt. Other changes, above all the own ones, leave the back-off alone.
func (l *loop[T, C]) updated(old, obj T) {
	before, after := l.content(old), l.content(obj)
	if before.uid() != after.uid() { // deleted and recreated while the watch was interrupted
		l.deleted(old)
	}
	if l.unfinished(after) && (before.uid() != after.uid() || l.matters(before, after)) {
		l.queue.Add(keyOf(after))
	}
	if !before.known().ready {
		l.wakeMembers(after)
	}
}

// matters reports whether a change ends a back-off.
func (l *loop[T, C]) matters(before, after *content) bool {
	m := l.memories.get(after.uid())
	same := before.driver == after.driver && before.policy == after.policy && before.class == after.class &&
		before.handle == after.handle && equality.Semantic.DeepEqual(before.ref, after.ref)
	switch {
	case !same,
		before.meta.Annotations[before.secretName] != after.meta.Annotations[after.secretName],
		before.meta.Annotations[before.secretNamespace] != after.meta.Annotations[after.secretNamespace],
		before.has(before.secretName) != after.has(after.secretName),
		before.has(before.secretNamespace) != after.has(after.secretNamespace):
		return true
	case before.has(before.creating) && !after.has(after.creating) && after.indeterminate(m):
		return true // by another writer: this process removes it after a definite result
	case after.has(after.creating) && after.known().handle != "":
		return true // restored by another writer
	}
	return before.terminating() != after.terminating() || l.c.driver.rowOf(before, m) != l.c.driver.rowOf(after, m)
}

func (l *loop[T, C]) deleted(obj T) {
	c := l.content(obj)
	l.queue.Forget(keyOf(c))
	l.forget(context.Background(), keyOf(c))
}

// forget drops the memory of a deleted content.
func (l *loop[T, C]) forget(ctx context.Context, key contentKey) {
	if m := l.memories.forget(key.UID); m.answer != nil && m.request != nil && !m.deleted {
		klog.FromContext(ctx).Info("Content deleted, its snapshot may remain at the storage system", "content", key.Name,
			"snapshotHandle", m.answer.handle, "snapshotName", m.request.Name)
	}
}

// classChanged enqueues the contents that may wait for the class.
func (l *loop[T, C]) classChanged(class C) {
	for _, obj := range l.watches.contents.ByIndex(byClass, class.GetName()) {
		l.added(obj)
	}
}

// resync enqueues everything unfinished at the interval --resync-period.
func (l *loop[T, C]) resync(ctx context.Context) {
	if l.c.cfg.ResyncPeriod == 0 {
		return
	}
	tick := time.NewTicker(l.c.cfg.ResyncPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for _, obj := range l.watches.contents.List() {
			if c := l.content(obj); l.unfinished(c) {
				l.queue.Resync(keyOf(c))
			}
		}
	}
}
