// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"maps"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// register adds the event handlers, which enqueue the contents that need a sync.
func (l *loop) register() *kube.Registrations {
	registrations := &kube.Registrations{}
	registrations.Add(l.watches.contents.Handle(kube.Handlers[*content]{
		Add: l.added, Update: l.updated, Delete: l.deleted, Missed: l.missed,
	}))
	registrations.Add(l.watches.classes.Handle(kube.Handlers[*class]{
		Add: l.classChanged,
		Update: func(before, after *class) {
			if before.driver != after.driver || !maps.Equal(before.parameters, after.parameters) {
				l.classChanged(after)
			}
		},
	}))
	return registrations
}

func keyOf(c *content) contentKey { return contentKey{c.Name, c.UID} }

// unfinished reports whether c needs a sync.
func (l *loop) unfinished(c *content) bool {
	switch l.c.driver.rowOf(c, l.call(c)) {
	case notResponsible, deletionDone:
		return false
	case waitForGroup:
		return c.terminating()
	case complete:
		return c.has(c.creating) || c.terminating()
	}
	return true
}

func (l *loop) added(c *content) {
	if l.unfinished(c) {
		l.queue.Add(keyOf(c))
	}
	l.wakeMembers(c)
}

// wakeMembers enqueues the members of a group that is ready.
func (l *loop) wakeMembers(c *content) {
	if contents := l.c.contentLoop.Load(); contents != nil && c.group && c.known().ready {
		for _, member := range contents.watches.contents.ByIndex(byGroup, c.known().handle) {
			contents.added(member)
		}
	}
}

// updated enqueues a content that has changed in a way that may change the outcome of a failed
// attempt. Other changes, above all the own ones, leave the back-off alone.
func (l *loop) updated(before, after *content) {
	if before.UID != after.UID { // deleted and recreated while the watch was interrupted
		l.missed(before)
	}
	if l.unfinished(after) && (before.UID != after.UID || l.matters(before, after)) {
		l.queue.Add(keyOf(after))
	}
	if after.leaving() && !before.leaving() {
		l.wakeSharing(after)
	}
	if !before.known().ready {
		l.wakeMembers(after)
	}
}

// matters reports whether a change ends a back-off.
func (l *loop) matters(before, after *content) bool {
	was, is := l.call(before), l.call(after)
	same := func(key string) bool {
		return before.Annotations[key] == after.Annotations[key] && before.has(key) == after.has(key)
	}
	switch {
	case before.policy != after.policy, before.class != after.class, before.handle != after.handle,
		before.ref != after.ref, !same(after.secretName), !same(after.secretNamespace), after.endsWait(before, is):
		return true
	case !before.has(before.creating) && after.has(after.creating) && after.known().handle != "" && !after.terminating():
		return true // restored by another writer; during a deletion, this process sets it for a check
	case after.known().ready && after.has(after.creating):
		return true // the watch may have skipped the version without it
	}
	return before.terminating() != after.terminating() || l.c.driver.rowOf(before, was) != l.c.driver.rowOf(after, is)
}

// wakeSharing enqueues the contents that may wait until c does not name their snapshot.
func (l *loop) wakeSharing(c *content) {
	for _, o := range l.watches.contents.ByIndex(byHandle, c.namedHandle()) {
		if o.leaving() && o.UID != c.UID {
			l.added(o)
		}
	}
}

// classChanged enqueues the contents that may wait for the class.
func (l *loop) classChanged(class *class) {
	for _, c := range l.watches.contents.ByIndex(byClass, class.Name) {
		l.added(c)
	}
}

// resync enqueues everything unfinished.
func (l *loop) resync() {
	for _, c := range l.watches.contents.List() {
		if l.unfinished(c) {
			l.queue.Resync(keyOf(c))
		}
	}
}
