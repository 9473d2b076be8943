// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"sync"

	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// sourceLocks holds a lock per source that may be held during requests. The zero value is ready for use.
type sourceLocks struct {
	mu   sync.Mutex
	held map[volumerules.Source]chan struct{} // closed on release
}

// lock waits until no other goroutine holds the lock of key.
func (l *sourceLocks) lock(key volumerules.Source) (unlock func()) {
	released := make(chan struct{})
	for {
		l.mu.Lock()
		other := l.held[key]
		if other == nil {
			if l.held == nil {
				l.held = map[volumerules.Source]chan struct{}{}
			}
			l.held[key] = released
			l.mu.Unlock()
			return func() { l.unlock(key, released) }
		}
		l.mu.Unlock()
		<-other
	}
}

func (l *sourceLocks) unlock(key volumerules.Source, released chan struct{}) {
	l.mu.Lock()
	delete(l.held, key)
	l.mu.Unlock()
	close(released)
}
