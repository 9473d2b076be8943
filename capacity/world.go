package capacity

import (
	"maps"
	"sync"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// world is what there is and what there should be, kept up to date by events. Its methods
// that change it return the items of which something may have to be done. It is safe for
// use by several goroutines.
type world struct {
	immediate bool // classes with immediate binding count too
	driver    string
	grace     time.Duration
	now       func() time.Time

	mu      sync.Mutex
	nodes   *nodes
	gone    map[segment]time.Time              // when their last node left; dropped when it is back
	classes map[string]*storagev1.StorageClass // that are published
	names   map[item]map[string]types.UID      // and UIDs of the objects for an item
	asked   map[item]*schedule                 // of the items that the driver was asked about, or is to be
}

// schedule is when the driver is asked about an item.
type schedule struct {
	due      time.Time // the zero time: at once
	refresh  bool      // something happened that changes the answer
	rounds   int       // answers so far
	answered time.Time // when the last good answer came; the zero time: never
	failing  bool      // the last call failed
}

func newWorld(driver string, cfg Config, now func() time.Time) *world {
	return &world{
		immediate: cfg.ImmediateBinding, driver: driver, grace: cfg.RemovalGrace, now: now,
		nodes: newNodes(), gone: map[segment]time.Time{}, classes: map[string]*storagev1.StorageClass{},
		names: map[item]map[string]types.UID{}, asked: map[item]*schedule{},
	}
}

// setNode takes the labels of a Node, or its end.
func (w *world) setNode(name string, labels map[string]string, exists bool) []item {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.moved(w.nodes.setLabels(name, labels, exists))
}

// setCSINode takes what a CSINode, nil for its end, says of the driver.
func (w *world) setCSINode(name string, node *storagev1.CSINode) []item {
	var keys []string
	registered := false
	if d := kube.DriverOnNode(node, w.driver); d != nil {
		keys, registered = d.TopologyKeys, true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.moved(w.nodes.setKeys(name, keys, registered))
}

// setSegment makes s the segment of a node that never changes.
func (w *world) setSegment(s segment) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nodes.segments[s] = 1
}

func (w *world) moved(m move) []item {
	var items []item
	if m.appeared != nil {
		delete(w.gone, *m.appeared)
		items = append(items, w.ofSegment(*m.appeared)...)
	}
	if m.vanished != nil && len(w.classes) > 0 {
		w.gone[*m.vanished] = w.now()
		items = append(items, w.ofSegment(*m.vanished)...)
	}
	return items
}

// setClass takes a class. It may be published, or not any more: one of the same name that
// is another's now.
func (w *world) setClass(class *storagev1.StorageClass) []item {
	w.mu.Lock()
	defer w.mu.Unlock()
	immediate := class.VolumeBindingMode != nil && *class.VolumeBindingMode == storagev1.VolumeBindingImmediate
	if class.Provisioner != w.driver || immediate && !w.immediate {
		return w.dropClass(class.Name)
	}
	w.classes[class.Name] = class
	items := w.ofClass(class.Name)
	for _, i := range items {
		w.scheduleOf(i).refresh = true
	}
	return items
}

// removeClass takes the end of a class.
func (w *world) removeClass(name string) []item {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.dropClass(name)
}

func (w *world) dropClass(name string) []item {
	if w.classes[name] == nil {
		return nil
	}
	delete(w.classes, name)
	return w.ofClass(name)
}

// ofSegment is the items of s.
func (w *world) ofSegment(s segment) []item {
	items := make([]item, 0, len(w.classes))
	for class := range w.classes {
		items = append(items, item{Class: class, Segment: s})
	}
	return items
}

// ofClass is the items of a class, those in segments that are about to go included.
func (w *world) ofClass(class string) []item {
	items := make([]item, 0, len(w.nodes.segments)+len(w.gone))
	for s := range w.nodes.segments {
		items = append(items, item{Class: class, Segment: s})
	}
	for s := range w.gone {
		items = append(items, item{Class: class, Segment: s})
	}
	return items
}

// seen takes an object that is there. The result is empty when it is the only one for an
// item that should have one.
func (w *world) seen(obj *storagev1.CSIStorageCapacity) []item {
	w.mu.Lock()
	defer w.mu.Unlock()
	i := itemOf(obj)
	if w.names[i] == nil {
		w.names[i] = map[string]types.UID{}
	}
	w.names[i][obj.Name] = obj.UID
	if i.Odd == "" && w.nodes.segments[i.Segment] == 0 {
		if _, known := w.gone[i.Segment]; !known {
			w.gone[i.Segment] = w.now() // its last node may have left while nobody looked
		}
	}
	if len(w.names[i]) == 1 && w.wanted(i) {
		return nil
	}
	return []item{i}
}

// lost takes an object that is not there any more.
func (w *world) lost(obj *storagev1.CSIStorageCapacity) []item {
	w.mu.Lock()
	defer w.mu.Unlock()
	i := itemOf(obj)
	if w.names[i][obj.Name] != obj.UID {
		return nil // it was removed here
	}
	w.drop(i, obj.Name, obj.UID)
	if s := w.asked[i]; s != nil {
		s.refresh = true // also of a segment that is about to go: it may come back
	}
	if !w.wanted(i) {
		return nil
	}
	w.scheduleOf(i).refresh = true
	return []item{i}
}

// drop forgets the very object of a name: another one may have it by now.
func (w *world) drop(i item, name string, uid types.UID) {
	if w.names[i][name] != uid {
		return
	}
	delete(w.names[i], name)
	if len(w.names[i]) == 0 {
		delete(w.names, i)
	}
}

// wanted tells whether i should have an object: a class that is published, in a segment
// that has nodes.
func (w *world) wanted(i item) bool {
	return i.Odd == "" && w.classes[i.Class] != nil && w.nodes.segments[i.Segment] > 0
}

func (w *world) scheduleOf(i item) *schedule {
	s := w.asked[i]
	if s == nil {
		s = &schedule{}
		w.asked[i] = s
	}
	return s
}

// look is what is known of an item: the names and UIDs of its objects, and the rest of a
// snapshot. What is not wanted any more is forgotten.
func (w *world) look(i item) (names map[string]types.UID, s snapshot) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s.now = w.now()
	s.odd, s.class = i.Odd != "", w.classes[i.Class]
	s.there = w.nodes.segments[i.Segment] > 0
	if since, ok := w.gone[i.Segment]; ok {
		s.until = since.Add(w.grace)
	}
	if w.wanted(i) {
		s.schedule = *w.scheduleOf(i)
	} else if s.class == nil || !s.until.After(s.now) {
		delete(w.asked, i)
	}
	return maps.Clone(w.names[i]), s
}

// forget takes that an object is not there, which no event told of.
func (w *world) forget(i item, name string, uid types.UID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.drop(i, name, uid)
}

// vacate drops what is kept of a segment whose last node left long ago, when there is
// nothing of it any more.
func (w *world) vacate(s segment) {
	w.mu.Lock()
	defer w.mu.Unlock()
	since, ok := w.gone[s]
	if !ok || w.now().Before(since.Add(w.grace)) {
		return
	}
	for class := range w.classes {
		if len(w.names[item{Class: class, Segment: s}]) > 0 {
			return
		}
	}
	delete(w.gone, s)
}

// refresh has the driver asked again about items: those that should have an object now,
// and those in segments that are about to go when these come back.
func (w *world) refresh(items []item) (now []item) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, i := range items {
		if w.wanted(i) {
			w.scheduleOf(i).refresh = true
			now = append(now, i)
		} else if s := w.asked[i]; s != nil {
			s.refresh = true
		}
	}
	return now
}

// asking takes that the driver is being asked. What happens meanwhile is seen.
func (w *world) asking(i item) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.scheduleOf(i).refresh = false
}

// answered takes that there was an answer, and the object is as it says, so that the
// driver need not be asked again before next.
func (w *world) answered(i item, next time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.scheduleOf(i)
	s.due, s.answered, s.failing = next, w.now(), false
	s.rounds++
}

// failed takes that there was none, or that the object could not be written.
func (w *world) failed(i item) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s := w.asked[i]; s != nil {
		s.refresh, s.failing = true, true
	}
}

// rank orders the work: first what the scheduler knows nothing of, then what has
// changed, then what is only looked at again, and what has failed before: calls that run
// into their deadline must not keep the others from being made.
func (w *world) rank(i item) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch s := w.asked[i]; {
	case s != nil && s.failing:
		return 2
	case len(w.names[i]) == 0 && (s == nil || s.rounds == 0):
		return 0
	case s != nil && s.refresh:
		return 1
	default:
		return 2
	}
}

// counts is what there is, for the metrics.
type counts struct {
	goal, current, obsolete, failing int
	oldest                           time.Time // answer of all; zero: there is none
}

func (w *world) counts() counts {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := counts{goal: len(w.nodes.segments) * len(w.classes)}
	for i, names := range w.names {
		if w.wanted(i) {
			c.current++
		} else {
			c.obsolete += len(names)
		}
	}
	for i, s := range w.asked {
		if !w.wanted(i) {
			continue
		}
		if s.failing {
			c.failing++
		}
		if !s.answered.IsZero() && (c.oldest.IsZero() || s.answered.Before(c.oldest)) {
			c.oldest = s.answered
		}
	}
	return c
}
