// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package workloop

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// Status describes the state of a loop for /statusz.
type Status struct {
	Name     string    `json:"name"`
	Waiting  int       `json:"waiting"`  // keys that wait for a worker
	Running  []Running `json:"running"`  // longest first
	Failing  []Failing `json:"failing"`  // by time of the next attempt, at most maxFailing
	Failures int       `json:"failures"` // number of keys whose last attempt failed
	Recent   []Attempt `json:"recent"`   // newest first
	Slowest  []Attempt `json:"slowest"`  // since the loop started
}

// Running is a key that is being processed.
type Running struct {
	Key   string    `json:"key"`
	Stage string    `json:"stage,omitempty"` // see [Loop.ShowStage]
	Since time.Time `json:"since"`
}

// Failing is a key whose last attempt failed.
type Failing struct {
	Key      string    `json:"key"`
	Stage    string    `json:"stage,omitempty"`
	Attempts int       `json:"attempts"`      // failed in a row
	Error    string    `json:"error"`         // of the last attempt
	Next     time.Time `json:"next,omitzero"` // zero: after an event
}

// Attempt is a completed call of the sync function.
type Attempt struct {
	Key   string        `json:"key"`
	Ended time.Time     `json:"ended"`
	Took  time.Duration `json:"tookNanoseconds"`
	Error string        `json:"error,omitempty"`
}

// minRecordedDuration excludes successful attempts that made no call from the history.
const minRecordedDuration = time.Millisecond

const (
	maxFailing   = 100
	maxRecent    = 20
	maxSlowest   = 10
	maxErrorText = 500 // bytes
	// maxLoggedText is the limit of an error in the log, in bytes.
	maxLoggedText = 4096
)

// history holds the latest and the slowest attempts of a loop.
type history struct {
	recent  []Attempt // oldest first
	slowest []Attempt // longest first
}

func (h *history) add(d Attempt) {
	if len(h.recent) == maxRecent {
		h.recent = slices.Delete(h.recent, 0, 1)
	}
	h.recent = append(h.recent, d)
	if len(h.slowest) == maxSlowest && d.Took <= h.slowest[maxSlowest-1].Took {
		return
	}
	i, _ := slices.BinarySearchFunc(h.slowest, d, func(a, b Attempt) int { return cmp.Compare(b.Took, a.Took) })
	h.slowest = slices.Insert(h.slowest, i, d)
	h.slowest = h.slowest[:min(len(h.slowest), maxSlowest)]
}

// errorText returns the beginning of the text of err, or "" for nil.
func errorText(err error) string {
	if err == nil {
		return ""
	}
	return shortened(err.Error(), maxErrorText)
}

// shortened returns the first bytes of text, up to limit.
func shortened(text string, limit int) string {
	if len(text) > limit {
		text = strings.ToValidUTF8(text[:limit], "") + "…"
	}
	return text
}

// ShowStage has [Loop.Status] and the log show how far the object of each key has come. It must be
// called before [Loop.Run]; stage must not call the loop.
func (l *Loop[K]) ShowStage(stage func(K) string) { l.stage = stage }

// Status returns the current state of the loop.
func (l *Loop[K]) Status() Status {
	s := Status{Name: l.cfg.Name, Waiting: l.Len()}
	l.mu.Lock()
	for key, st := range l.states {
		switch {
		case st.running:
			s.Running = append(s.Running, Running{fmt.Sprint(key), l.stage(key), st.since})
		case st.attempts > 0:
			s.Failing = append(s.Failing, Failing{fmt.Sprint(key), l.stage(key), st.attempts, st.lastError, st.next})
		}
	}
	s.Recent, s.Slowest = slices.Clone(l.history.recent), slices.Clone(l.history.slowest)
	l.mu.Unlock()
	slices.Reverse(s.Recent)
	slices.SortFunc(s.Running, func(a, b Running) int { return a.Since.Compare(b.Since) })
	slices.SortFunc(s.Failing, func(a, b Failing) int { return cmp.Or(a.Next.Compare(b.Next), strings.Compare(a.Key, b.Key)) })
	s.Failures = len(s.Failing)
	s.Failing = s.Failing[:min(len(s.Failing), maxFailing)]
	return s
}

// loops holds the status functions of the running loops by name.
type loops struct {
	mu     sync.Mutex
	status map[string]func() Status
}

func (r *loops) register(name string, status func() Status) (unregister func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.status == nil {
		r.status = map[string]func() Status{}
	}
	r.status[name] = status
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.status, name)
	}
}

// Status returns the states of the running loops, sorted by name.
func (m *Metrics) Status() []Status {
	m.loops.mu.Lock()
	defer m.loops.mu.Unlock()
	all := make([]Status, 0, len(m.loops.status))
	for _, name := range slices.Sorted(maps.Keys(m.loops.status)) {
		all = append(all, m.loops.status[name]())
	}
	return all
}
