// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package keylock provides a shared/exclusive lock per key. The locks of volumes keep the loops of one
// process from releasing a PersistentVolume while a CSI call for its volume is running, those of data
// sources from releasing a source while a claim is about to copy it.
package keylock

import (
	"context"
	"fmt"
	"sync"
)

// Locks holds a shared/exclusive lock per key, which may be held during requests. The zero value is
// ready for use. The methods of a nil *Locks always succeed.
type Locks[K comparable] struct {
	mu   sync.Mutex
	held map[K]*lockState
}

// lockState describes a key that is locked by any number of sharers or by one exclusive holder.
type lockState struct {
	shared    int
	exclusive bool
	released  chan struct{} // closed with the last release
	// waiting are those of [Locks.Exclusive], whose channels are closed when they hold the lock.
	waiting []chan struct{}
}

// Share waits for the exclusive holder of key, if any, and takes a shared lock. If ctx ends during
// the wait, it returns the cause. Call release after the use of key.
func (l *Locks[K]) Share(ctx context.Context, key K) (release func(), err error) {
	if l == nil {
		return func() {}, nil
	}
	for {
		l.mu.Lock()
		s := l.state(key)
		release, ok := l.share(key, s)
		l.mu.Unlock()
		if ok {
			return release, nil
		}
		select {
		case <-s.released:
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for the lock of %v: %w", key, context.Cause(ctx))
		}
	}
}

// TryExclusive takes an exclusive lock on key, or returns false if key is locked.
func (l *Locks[K]) TryExclusive(key K) (release func(), ok bool) {
	if l == nil {
		return func() {}, true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.exclusive(key, l.state(key))
}

// TryShare takes a shared lock on key, or returns false if key has an exclusive holder.
func (l *Locks[K]) TryShare(key K) (release func(), ok bool) {
	if l == nil {
		return func() {}, true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.share(key, l.state(key))
}

// Exclusive waits for the other holders of key, and takes an exclusive lock. Those that wait get it in the order of their calls: one
// that locks key again and again does not starve them.
func (l *Locks[K]) Exclusive(key K) (release func()) {
	if l == nil {
		return func() {}
	}
	l.mu.Lock()
	s := l.state(key)
	release, ok := l.exclusive(key, s)
	if ok {
		l.mu.Unlock()
		return release
	}
	held := make(chan struct{})
	s.waiting = append(s.waiting, held)
	l.mu.Unlock()
	<-held
	return l.releaseExclusive(key)
}

// share takes a shared lock on key, whose state is s, unless it has an exclusive holder.
func (l *Locks[K]) share(key K, s *lockState) (release func(), ok bool) {
	if s.exclusive {
		return nil, false
	}
	s.shared++
	return func() { l.release(key, func(s *lockState) { s.shared-- }) }, true
}

// exclusive locks key, whose state is s, unless it is locked.
func (l *Locks[K]) exclusive(key K, s *lockState) (release func(), ok bool) {
	if s.shared > 0 || s.exclusive {
		return nil, false
	}
	s.exclusive = true
	return l.releaseExclusive(key), true
}

func (l *Locks[K]) releaseExclusive(key K) func() {
	return func() { l.release(key, func(s *lockState) { s.exclusive = false }) }
}

func (l *Locks[K]) state(key K) *lockState {
	s := l.held[key]
	if s == nil {
		if l.held == nil {
			l.held = map[K]*lockState{}
		}
		s = &lockState{released: make(chan struct{})}
		l.held[key] = s
	}
	return s
}

func (l *Locks[K]) release(key K, change func(*lockState)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.held[key]
	change(s)
	switch {
	case s.shared > 0 || s.exclusive:
	case len(s.waiting) > 0:
		s.exclusive = true
		close(s.waiting[0])
		s.waiting = s.waiting[1:]
	default:
		delete(l.held, key)
		close(s.released)
	}
}
