package provisioner

import (
	"maps"
	"slices"
	"strings"
	"sync"
)

// aggregate is [topologies] kept up to date node by node, so that a claim costs the
// same in a cluster of any size. The zero value is not usable, see newAggregate.
// It is safe for use by several goroutines.
type aggregate struct {
	mu      sync.Mutex
	labels  map[string]map[string]string // of Nodes
	keyList map[string][]string          // of CSINodes, sorted; empty without the driver
	sets    map[string]*keySet           // by their keys, joined
}

// keySet is the nodes seen through one set of topology keys.
type keySet struct {
	keys     []string
	csiNodes int            // that have these keys
	count    map[string]int // nodes by term, as text
	byText   map[string]topologyTerm
	sorted   []topologyTerm // nil: to be made anew
}

func newAggregate() *aggregate {
	return &aggregate{labels: map[string]map[string]string{}, keyList: map[string][]string{}, sets: map[string]*keySet{}}
}

func (a *aggregate) node(name string) (map[string]string, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	labels, ok := a.labels[name]
	return labels, ok
}

func (a *aggregate) keys(node string) ([]string, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	keys, ok := a.keyList[node]
	return keys, ok
}

func (a *aggregate) commonKeys() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	var best *keySet
	for _, text := range slices.Sorted(maps.Keys(a.sets)) {
		if s := a.sets[text]; best == nil || s.csiNodes > best.csiNodes {
			best = s
		}
	}
	if best == nil {
		return nil
	}
	return best.keys
}

func (a *aggregate) terms(keys []string) []topologyTerm {
	a.mu.Lock()
	defer a.mu.Unlock()
	s, ok := a.sets[joined(keys)]
	if !ok {
		return nil
	}
	if s.sorted == nil {
		s.sorted = slices.SortedFunc(maps.Values(s.byText), compareTerms)
	}
	return slices.Clone(s.sorted)
}

// setNode is called for a Node that is new or whose labels have changed; nil
// labels mean that it is gone. It tells whether the node is somewhere else now, as
// seen through any of the key sets, also if other nodes are there already.
func (a *aggregate) setNode(name string, labels map[string]string, exists bool) (changed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	before, existed := a.labels[name]
	if exists {
		a.labels[name] = labels
	} else {
		delete(a.labels, name)
	}
	for _, s := range a.sets {
		was, is := "", ""
		if existed {
			was = s.add(before, -1)
		}
		if exists {
			is = s.add(labels, 1)
		}
		changed = changed || was != is
	}
	return changed || existed != exists
}

// setKeys is called for a CSINode that is new or has changed: keys is what it has
// for the driver, empty when the driver is not on it.
func (a *aggregate) setKeys(name string, keys []string, exists bool) (changed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	keys = slices.Sorted(slices.Values(keys))
	before, existed := a.keyList[name]
	if existed == exists && slices.Equal(before, keys) {
		return false
	}
	if exists {
		a.keyList[name] = keys
	} else {
		delete(a.keyList, name)
	}
	if len(before) > 0 {
		text := joined(before)
		if a.sets[text].csiNodes--; a.sets[text].csiNodes == 0 {
			delete(a.sets, text)
		}
	}
	if exists && len(keys) > 0 {
		a.set(keys).csiNodes++
	}
	return true
}

// set is the key set of keys. A new one looks at all nodes, once.
func (a *aggregate) set(keys []string) *keySet {
	text := joined(keys)
	if s, ok := a.sets[text]; ok {
		return s
	}
	s := &keySet{keys: keys, count: map[string]int{}, byText: map[string]topologyTerm{}}
	for _, labels := range a.labels {
		s.add(labels, 1)
	}
	a.sets[text] = s
	return s
}

// add counts a node with these labels in or out. It returns the term of the node as
// text, "" when it has none.
func (s *keySet) add(labels map[string]string, n int) string {
	term, ok := nodeTerm(labels, s.keys)
	if !ok {
		return ""
	}
	text := term.text()
	s.count[text] += n
	switch c := s.count[text]; {
	case c == 0:
		delete(s.count, text)
		delete(s.byText, text)
		s.sorted = nil
	case c == n: // the first
		s.byText[text] = term
		s.sorted = nil
	}
	return text
}

// text is different for different terms: no key or value of a label contains a zero byte.
func (t topologyTerm) text() string {
	var b strings.Builder
	for _, s := range t {
		b.WriteString(s.key + "\x00" + s.value + "\x00")
	}
	return b.String()
}

func joined(keys []string) string { return strings.Join(keys, "\x00") }
