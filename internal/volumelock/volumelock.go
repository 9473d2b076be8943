// Package volumelock keeps what the loops of one process do with a volume apart: as long
// as a call of the driver for it runs, nobody takes its PersistentVolume away.
package volumelock

import "sync"

// Locks is a lock for each volume, by its handle. The zero value is ready for use, and a
// nil one never refuses.
type Locks struct {
	mu   sync.Mutex
	held map[string]*lockState
}

// lockState is who has a volume: any number of calls, or one that wants it for itself.
type lockState struct {
	calls int
	alone chan struct{} // closed at the end of the time alone; nil: nobody has it alone
}

// Share takes handle for a call of the driver, any number of which may run at the same
// time, after whoever has it alone. The result gives it back.
func (l *Locks) Share(handle string) (done func()) {
	if l == nil {
		return func() {}
	}
	for {
		l.mu.Lock()
		s := l.of(handle)
		if s.alone == nil {
			s.calls++
			l.mu.Unlock()
			return func() { l.release(handle, func(s *lockState) { s.calls-- }) }
		}
		wait := s.alone
		l.mu.Unlock()
		<-wait
	}
}

// TryExclusive takes handle while nobody else has it; false when somebody has.
func (l *Locks) TryExclusive(handle string) (done func(), ok bool) {
	if l == nil {
		return func() {}, true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.of(handle)
	if s.calls > 0 || s.alone != nil {
		return nil, false
	}
	s.alone = make(chan struct{})
	return func() { l.release(handle, func(s *lockState) { close(s.alone); s.alone = nil }) }, true
}

func (l *Locks) of(handle string) *lockState {
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
	if s.calls == 0 && s.alone == nil {
		delete(l.held, handle)
	}
}
