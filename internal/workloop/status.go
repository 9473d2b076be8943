package workloop

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// Status is what a loop is doing, for people who look at the process.
type Status struct {
	Name     string    `json:"name"`
	Waiting  int       `json:"waiting"`  // keys that wait for a worker
	Running  []Running `json:"running"`  // longest first
	Failing  []Failing `json:"failing"`  // whose next attempt is soonest first; listed at most
	Failures int       `json:"failures"` // how many keys are in back-off, the listed ones included
	Recent   []Attempt `json:"recent"`   // newest first
	Slowest  []Attempt `json:"slowest"`  // since the loop began
}

// Running is a key that is worked on.
type Running struct {
	Key   string    `json:"key"`
	Since time.Time `json:"since"`
}

// Failing is a key whose last attempts failed.
type Failing struct {
	Key      string    `json:"key"`
	Attempts int       `json:"attempts"` // that failed in a row
	Error    string    `json:"error"`    // of the last one
	Next     time.Time `json:"next"`
}

// Attempt is an attempt that has ended.
type Attempt struct {
	Key   string        `json:"key"`
	Ended time.Time     `json:"ended"`
	Took  time.Duration `json:"tookNanoseconds"`
	Error string        `json:"error,omitempty"`
}

// minRecordedDuration is what an attempt takes that has done something.
const minRecordedDuration = time.Millisecond

const (
	listed       = 100 // of the keys in back-off
	keptRecent   = 20
	keptSlowest  = 10
	keptErrorLen = 500
)

// history is the last and the longest attempts of a loop.
type history struct {
	recent  []Attempt // oldest first
	slowest []Attempt // longest first
}

func (h *history) add(d Attempt) {
	if len(h.recent) == keptRecent {
		h.recent = slices.Delete(h.recent, 0, 1)
	}
	h.recent = append(h.recent, d)
	if len(h.slowest) == keptSlowest && d.Took <= h.slowest[keptSlowest-1].Took {
		return
	}
	i, _ := slices.BinarySearchFunc(h.slowest, d, func(a, b Attempt) int { return cmp.Compare(b.Took, a.Took) })
	h.slowest = slices.Insert(h.slowest, i, d)
	h.slowest = h.slowest[:min(len(h.slowest), keptSlowest)]
}

// errorText is err for a page, "" for nil.
func errorText(err error) string {
	if err == nil {
		return ""
	}
	text := err.Error()
	if len(text) > keptErrorLen {
		text = strings.ToValidUTF8(text[:keptErrorLen], "") + "…"
	}
	return text
}

// Status is what the loop is doing now.
func (l *Loop[K]) Status() Status {
	s := Status{Name: l.cfg.Name, Waiting: l.Len()}
	l.mu.Lock()
	for key, st := range l.known {
		switch {
		case st.running:
			s.Running = append(s.Running, Running{fmt.Sprint(key), st.since})
		case st.failures > 0:
			s.Failing = append(s.Failing, Failing{fmt.Sprint(key), st.failures, st.lastError, st.notBefore})
		}
	}
	s.Recent, s.Slowest = slices.Clone(l.history.recent), slices.Clone(l.history.slowest)
	l.mu.Unlock()
	slices.Reverse(s.Recent)
	slices.SortFunc(s.Running, func(a, b Running) int { return a.Since.Compare(b.Since) })
	slices.SortFunc(s.Failing, func(a, b Failing) int { return cmp.Or(a.Next.Compare(b.Next), strings.Compare(a.Key, b.Key)) })
	s.Failures = len(s.Failing)
	s.Failing = s.Failing[:min(len(s.Failing), listed)]
	return s
}

// running is the loops of a process that are at work.
type running struct {
	mu    sync.Mutex
	loops map[string]func() Status
}

func (r *running) begin(name string, status func() Status) (end func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.loops == nil {
		r.loops = map[string]func() Status{}
	}
	r.loops[name] = status
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.loops, name)
	}
}

// Status is what the loops that are at work do, by their names.
func (m *Metrics) Status() []Status {
	m.running.mu.Lock()
	var reads []func() Status
	for _, read := range m.running.loops {
		reads = append(reads, read)
	}
	m.running.mu.Unlock()
	all := make([]Status, 0, len(reads))
	for _, read := range reads {
		all = append(all, read())
	}
	slices.SortFunc(all, func(a, b Status) int { return strings.Compare(a.Name, b.Name) })
	return all
}
