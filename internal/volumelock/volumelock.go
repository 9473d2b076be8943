// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package volumelock keeps the loops of one process from releasing a PersistentVolume while a CSI
// call for its volume is running.
package volumelock

import "sync"

// Locks holds a shared/exclusive lock per volume handle. The zero value is ready for use. The
// methods of a nil *Locks always succeed.
type Locks struct {
	mu   sync.Mutex
	held map[string]*lockState
}

// lockState describes a volume that is locked by any number of sharers or by one exclusive holder.
type lockState struct {
	shared    int
	exclusive chan struct{} // closed on release; nil without an exclusive holder
}

// Share waits for the exclusive holder of handle, if any, and takes a shared lock. Call release
// after the CSI call.
func (l *Locks) Share(handle string) (release func()) {
	if l == nil {
		return func() {}
	}
	for {
		l.mu.Lock()
		s := l.state(handle)
		if s.exclusive == nil {
			s.shared++
			l.mu.Unlock()
			return func() { l.release(handle, func(s *lockState) { s.shared-- }) }
		}
		wait := s.exclusive
		l.mu.Unlock()
		<-wait
	}
}

// TryExclusive takes an exclusive lock on handle, or returns false if the volume is locked.
func (l *Locks) TryExclusive(handle string) (release func(), ok bool) {
	if l == nil {
		return func() {}, true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.state(handle)
	if s.shared > 0 || s.exclusive != nil {
		return nil, false
	}
	s.exclusive = make(chan struct{})
	return func() { l.release(handle, func(s *lockState) { close(s.exclusive); s.exclusive = nil }) }, true
}

func (l *Locks) state(handle string) *lockState {
	s := l.held[handle]
	if s == nil {
		if l.held == nil {
			l.held = map[string]*lockState{}
		}
		s = &lockState{}
		l.held[handle] = s
	}
	return s
}

func (l *Locks) release(handle string, change func(*lockState)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.held[handle]
	change(s)
	if s.shared == 0 && s.exclusive == nil {
		delete(l.held, handle)
	}
}
