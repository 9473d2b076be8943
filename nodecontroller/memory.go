package nodecontroller

import (
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// memory is what a term knows that stands nowhere in the API. What is lost with it is at
// most a grace that begins again, or something tried twice.
type memory struct {
	mu      sync.Mutex
	volumes map[types.UID]remembered
	absent  map[string]time.Time // nodes with unbound claims or custom resources
	alone   map[string]time.Time // nodes that the driver has left
	ends    map[string]time.Time // nodes that are looked at again when they have been held for long enough
	nodes   map[string]time.Time // absent nodes whose clean-up was tried in dry-run mode
}

type remembered struct {
	noticed       time.Time // since when its node is known to be missing
	present       time.Time // when its node was there although it was noted as missing
	kept          string    // the clock that has run since it was first seen
	forced, tried bool
	unwritable    bool          // the API server refuses what is to be written on it
	behind        time.Time     // when the cache was last found to lag behind
	patience      time.Duration // until the look after that one
}

func newMemory() *memory {
	return &memory{volumes: map[types.UID]remembered{}, absent: map[string]time.Time{}, alone: map[string]time.Time{}, ends: map[string]time.Time{}, nodes: map[string]time.Time{}}
}

func (m *memory) get(uid types.UID) remembered {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.volumes[uid]
}

func (m *memory) noticed(uid types.UID) time.Time { return m.get(uid).noticed }
func (m *memory) present(uid types.UID) time.Time { return m.get(uid).present }
func (m *memory) kept(uid types.UID) string       { return m.get(uid).kept }
func (m *memory) forced(uid types.UID) bool       { return m.get(uid).forced }
func (m *memory) tried(uid types.UID) bool        { return m.get(uid).tried }

func (m *memory) unwritable(uid types.UID) bool { return m.get(uid).unwritable }

// patience is how long to wait for the cache, which lags behind just now: twice as long
// each time, from soon on, up to later.
func (m *memory) patience(uid types.UID, now time.Time) (wait time.Duration) {
	m.change(uid, func(r *remembered) {
		if r.patience *= 2; r.patience == 0 || now.Sub(r.behind) > 2*later {
			r.patience = soon
		}
		r.patience = min(r.patience, later)
		r.behind, wait = now, r.patience
	})
	return wait
}

func (m *memory) change(uid types.UID, f func(*remembered)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.volumes[uid]
	f(&r)
	m.volumes[uid] = r
}

func (m *memory) forget(uid types.UID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.volumes, uid)
}

// since is from when on name is in times, which is now if it was not.
func (m *memory) since(times map[string]time.Time, name string, now time.Time) time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := times[name]; !ok {
		times[name] = now
	}
	return times[name]
}

// has tells whether name is in times.
func (m *memory) has(times map[string]time.Time, name string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, ok := times[name]
	return ok
}

func (m *memory) clear(times map[string]time.Time, name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(times, name)
}

// namespaces remembers which namespaces have said no to the clean-up, as they were read
// last: they are not watched. Before anything is destroyed they are read again.
type namespaces struct {
	mu    sync.Mutex
	wants map[string]string // the object that has said no, by namespace
}

// note remembers what a live read of a namespace has found.
func (n *namespaces) note(namespace string, refused bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !refused {
		delete(n.wants, namespace)
		return
	}
	if n.wants == nil {
		n.wants = map[string]string{}
	}
	n.wants[namespace] = "Namespace " + namespace
}

func (n *namespaces) optedOut(claim *corev1.ObjectReference) string {
	if claim == nil {
		return ""
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.wants[claim.Namespace]
}

// list is the namespaces that have said no, in no order.
func (n *namespaces) list() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Collect(maps.Keys(n.wants))
}
