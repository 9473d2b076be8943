// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// testState is a state with a clock, the nodes n1 and n2 in the zones a and b, and the class
// fast.
type testState struct {
	*state
	clock time.Time
}

func newTestState(change func(*Config)) *testState {
	cfg := DefaultConfig()
	if change != nil {
		change(&cfg)
	}
	w := &testState{clock: testNow}
	w.state = newState("drv", cfg, func() time.Time { return w.clock })
	w.node("n1", "a")
	w.node("n2", "b")
	w.classChanged(class("fast"))
	return w
}

// deleted is the event of a deletion.
func (w *testState) deleted(o *storagev1.CSIStorageCapacity) []pair {
	return w.objectDeleted(pairOf(o), o.Name, o.UID)
}

// node registers the driver on a node in a zone.
func (w *testState) node(name, zone string) []pair {
	items := w.nodeChanged(name, map[string]string{"z": zone}, true)
	return append(items, w.csiNodeChanged(name, &storagev1.CSINode{Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{
		{Name: "other", TopologyKeys: []string{"x"}}, {Name: "drv", TopologyKeys: []string{"z"}},
	}}})...)
}

func class(name string) *storagev1.StorageClass {
	return &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: "drv",
		VolumeBindingMode: ptr.To(storagev1.VolumeBindingWaitForFirstConsumer),
	}
}

// objectFor is an object of that name for class/zone.
func objectFor(name, classAndZone string) *storagev1.CSIStorageCapacity {
	class, zone, _ := strings.Cut(classAndZone, "/")
	return &storagev1.CSIStorageCapacity{
		ObjectMeta:       metav1.ObjectMeta{Name: name, UID: types.UID("uid-" + name)},
		StorageClassName: class, NodeTopology: &metav1.LabelSelector{MatchLabels: map[string]string{"z": zone}},
	}
}

func pairIn(class, zone string) pair { return pair{Class: class, Segment: segment("z=" + zone)} }

// describe returns pairs as "class/zone", sorted.
func describe(pairs []pair) string {
	var names []string
	for _, i := range pairs {
		names = append(names, i.Class+"/"+strings.TrimPrefix(string(i.Segment), "z=")+string(i.UnmatchedUID))
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

func wantPairs(t *testing.T, what string, got []pair, want string) {
	t.Helper()
	if describe(got) != want {
		t.Errorf("%s: there may be work for %q instead of %q", what, describe(got), want)
	}
}

func TestStateNodesAndClasses(t *testing.T) {
	w := newTestState(nil)
	wantPairs(t, "a class", w.classChanged(class("slow")), "slow/a slow/b")
	wantPairs(t, "a node in a known zone", w.node("n3", "a"), "")
	wantPairs(t, "a node in a new zone", w.node("n4", "c"), "fast/c slow/c")
	wantPairs(t, "a node leaves a zone that has another", w.nodeChanged("n1", nil, false), "")
	wantPairs(t, "the last node leaves", w.csiNodeChanged("n4", nil), "fast/c slow/c")
	wantPairs(t, "a class, a zone being about to go", w.classChanged(class("new")), "new/a new/b new/c")
	wantPairs(t, "a class goes", w.classDeleted("slow"), "slow/a slow/b slow/c")
	wantPairs(t, "it goes again", w.classDeleted("slow"), "")
	wantPairs(t, "a heartbeat", w.nodeChanged("n2", map[string]string{"z": "b", "beat": "1"}, true), "")
	wantPairs(t, "the zone is back", w.node("n4", "c"), "fast/c new/c")
	wantPairs(
		t, "the driver is not there any more",
		w.csiNodeChanged("n4", &storagev1.CSINode{Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: "other"}}}}),
		"fast/c new/c",
	)
}

func TestStateChoosesClasses(t *testing.T) {
	change := func(f func(*storagev1.StorageClass)) *storagev1.StorageClass {
		c := class("fast")
		f(c)
		return c
	}
	immediate := change(func(c *storagev1.StorageClass) { c.VolumeBindingMode = ptr.To(storagev1.VolumeBindingImmediate) })
	for name, tt := range map[string]struct {
		class *storagev1.StorageClass
		flag  bool
		want  bool
	}{
		"late binding":             {class: class("fast"), want: true},
		"no binding mode":          {class: change(func(c *storagev1.StorageClass) { c.VolumeBindingMode = nil }), want: true},
		"immediate":                {class: immediate},
		"immediate, with the flag": {class: immediate, flag: true, want: true},
		"of another driver":        {class: change(func(c *storagev1.StorageClass) { c.Provisioner = "drv2" }), flag: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestState(func(c *Config) { c.ImmediateBinding = tt.flag })
			// As an update of one that was published: its items are always looked at.
			wantPairs(t, "the class", w.classChanged(tt.class), "fast/a fast/b")
			if got := w.counts().goal; (got == 2) != tt.want {
				t.Errorf("the goal is %d", got)
			}
		})
	}
	if got := newTestState(nil).classChanged(change(func(c *storagev1.StorageClass) { c.Name, c.Provisioner = "x", "drv2" })); got != nil {
		t.Errorf("a class that never was ours gives work for %q", describe(got))
	}
}

func TestStateObjects(t *testing.T) {
	w := newTestState(nil)
	wantPairs(t, "the object of a pair", w.objectAdded(objectFor("x", "fast/a")), "")
	wantPairs(t, "the same again", w.objectAdded(objectFor("x", "fast/a")), "")
	wantPairs(t, "another", w.objectAdded(objectFor("y", "fast/a")), "fast/a")
	wantPairs(t, "of an unknown class", w.objectAdded(objectFor("c", "gone/a")), "gone/a")
	wantPairs(t, "of an unknown zone", w.objectAdded(objectFor("z", "fast/q")), "fast/q")
	odd := objectFor("o", "fast/a")
	odd.NodeTopology = nil
	wantPairs(t, "of no segment", w.objectAdded(odd), "/uid-o")
	if names, _ := w.read(pairIn("fast", "a")); !slices.Equal(slices.Sorted(maps.Keys(names)), []string{"x", "y"}) {
		t.Errorf("the objects of the pair are %q", names)
	}
	if diff := cmp.Diff(counts{goal: 2, current: 1, obsolete: 3}, w.counts(), cmp.AllowUnexported(counts{})); diff != "" {
		t.Error(diff)
	}
	wantPairs(t, "one is lost", w.deleted(objectFor("y", "fast/a")), "fast/a")
	wantPairs(t, "the same, once more", w.deleted(objectFor("y", "fast/a")), "")
	other := objectFor("x", "fast/a")
	other.UID = "another"
	wantPairs(t, "an earlier one of the name", w.deleted(other), "")
	wantPairs(t, "an obsolete one is deleted", w.deleted(objectFor("c", "gone/a")), "")
	w.deleted(odd)
	if got := w.counts(); got.obsolete != 1 || got.current != 1 {
		t.Errorf("the counts are %+v", got)
	}
	w.forgetObject(pairIn("fast", "a"), "x", objectFor("x", "fast/a").UID)
	if names, s := w.read(pairIn("fast", "a")); names != nil || !s.refresh {
		t.Errorf("the objects of the pair are %q, and it is to be refreshed: %v", names, s.refresh)
	}
}

func TestStateGrace(t *testing.T) {
	w := newTestState(func(c *Config) { c.RemovalGrace = 30 * time.Second })
	w.objectAdded(objectFor("x", "fast/b"))
	b := pairIn("fast", "b")
	w.callStarted(b)
	w.callSucceeded(b, "", w.clock.Add(time.Minute))
	until := func() time.Time { _, s := w.read(b); return s.removeAt }

	w.csiNodeChanged("n2", nil)
	if _, s := w.read(b); s.hasNodes || !s.removeAt.Equal(testNow.Add(30*time.Second)) {
		t.Errorf("there is %v until %v", s.hasNodes, s.removeAt)
	}
	w.clock = testNow.Add(20 * time.Second)
	w.prune(b) // too early
	wantPairs(t, "back within the grace", w.node("n2", "b"), "fast/b")
	if _, s := w.read(b); !s.hasNodes || !s.removeAt.IsZero() || s.rounds != 1 || s.refresh || !s.due.Equal(testNow.Add(time.Minute)) {
		t.Errorf("it is not as it was: %+v", s)
	}
	w.nodeChanged("n2", nil, false)
	if !until().Equal(testNow.Add(50 * time.Second)) {
		t.Errorf("the grace of the second time ends at %v", until())
	}
	w.clock = testNow.Add(50 * time.Second)
	w.prune(b) // there still is an object
	if until().IsZero() {
		t.Error("the segment is forgotten before its object is deleted")
	}
	w.forgetObject(b, "x", w.objects[b]["x"])
	w.prune(b)
	if !until().IsZero() || len(w.emptySince) > 0 || w.schedules[b] != nil {
		t.Errorf("%v and %v are left", w.emptySince, w.schedules)
	}
}

func TestStateSchedule(t *testing.T) {
	w := newTestState(nil)
	a := pairIn("fast", "a")
	due := func() schedule { _, s := w.read(a); return s.schedule }
	if s := due(); !s.refresh || s.rounds != 0 {
		t.Errorf("in the beginning it is %+v", s)
	}
	w.callStarted(a)
	w.callFailed(a)
	if s := due(); !s.refresh || !s.failing || w.counts().failing != 1 {
		t.Errorf("after a failure it is %+v", s)
	}
	w.callStarted(a)
	w.requestRefresh([]pair{a}) // something happens while the driver is asked
	w.callSucceeded(a, "", testNow.Add(time.Minute))
	if s := due(); !s.refresh || s.failing || s.rounds != 1 || !s.due.Equal(testNow.Add(time.Minute)) {
		t.Errorf("after an answer that may be out of date it is %+v", s)
	}
	w.callStarted(a)
	w.clock = testNow.Add(time.Second)
	w.callSucceeded(a, "", testNow.Add(time.Minute))
	if s := due(); s.refresh || s.rounds != 2 {
		t.Errorf("after an answer it is %+v", s)
	}
	w.callSucceeded(pairIn("fast", "b"), "", testNow)
	if c := w.counts(); !c.oldest.Equal(testNow.Add(time.Second)) || c.failing != 0 {
		t.Errorf("the counts are %+v", c)
	}
	wantPairs(
		t, "refresh of more than there is",
		w.requestRefresh([]pair{a, pairIn("gone", "a"), pairIn("fast", "q"), {UnmatchedUID: "o"}}), "fast/a",
	)
	w.classDeleted("fast")
	w.prune(a)
	w.prune(pairIn("fast", "b"))
	if len(w.schedules) > 0 {
		t.Errorf("%v is kept", w.schedules)
	}
	if c := w.counts(); c != (counts{}) {
		t.Errorf("the counts are %+v", c)
	}
}

func TestStateRank(t *testing.T) {
	w := newTestState(nil)
	a := pairIn("fast", "a")
	rank := func(what string, want int) {
		t.Helper()
		if got := w.rank(a); got != want {
			t.Errorf("%s: rank %d instead of %d", what, got, want)
		}
	}
	rank("never asked, nothing published", 0)
	w.callStarted(a)
	rank("being asked", 0)
	w.callSucceeded(a, "", testNow)
	rank("asked, nothing available", 2)
	w.objectAdded(objectFor("x", "fast/a"))
	rank("published", 2)
	w.requestRefresh([]pair{a})
	rank("published, something happened", 1)
	w.deleted(objectFor("x", "fast/a"))
	rank("lost", 1)
	adopted := newTestState(nil)
	adopted.objectAdded(objectFor("x", "fast/a"))
	if got := adopted.rank(a); got != 1 {
		t.Errorf("found at the start: rank %d", got)
	}
	if got := adopted.rank(pairIn("gone", "q")); got != 0 {
		t.Errorf("unknown: rank %d", got)
	}
}

// simulation carries out what decide says, as the controller does, with a queue of what
// the world has named and of when to look again.
type simulation struct {
	*testState
	objects map[string]*storagev1.CSIStorageCapacity
	queue   map[pair]struct{}
	later   map[pair]time.Time
	made    int
}

func (s *simulation) add(items []pair) {
	for _, i := range items {
		s.queue[i] = struct{}{}
	}
}

// addAfter keeps the earlier of two times, as a work queue does.
func (s *simulation) addAfter(i pair, at time.Time) {
	if have, ok := s.later[i]; !ok || at.Before(have) {
		s.later[i] = at
	}
}

// settle works until nothing is due.
func (s *simulation) settle(t *testing.T) {
	for range 10_000 {
		for i, at := range s.later {
			if !at.After(s.clock) {
				delete(s.later, i)
				s.queue[i] = struct{}{}
			}
		}
		var due *pair
		for i := range s.queue {
			due = &i
			break
		}
		if due == nil {
			return
		}
		i := *due
		delete(s.queue, i)
		names, snap := s.read(i)
		for name := range names {
			snap.objects = append(snap.objects, s.objects[name])
		}
		p := decide(snap)
		for _, o := range p.remove {
			delete(s.objects, o.Name)
			s.forgetObject(i, o.Name, o.UID)
			s.add(s.deleted(o))
		}
		if !p.getCapacity {
			s.prune(i)
			if !p.next.IsZero() {
				s.addAfter(i, p.next)
			}
			continue
		}
		s.callStarted(i)
		if p.keep == nil {
			s.made++
			o := objectFor(fmt.Sprint("made", s.made), i.Class+"/"+strings.TrimPrefix(string(i.Segment), "z="))
			o.CreationTimestamp = metav1.NewTime(s.clock)
			s.objects[o.Name] = o
			s.objectAdded(o)
			s.add(s.objectAdded(o)) // and once more, by the event
			p.keep = o
		}
		s.callSucceeded(i, p.keep.UID, s.clock.Add(time.Minute))
		s.addAfter(i, s.clock.Add(time.Minute))
	}
	t.Fatal("it does not come to an end")
}

// After any events in any order: once the grace is over and everything has been
// looked at, there is one object for each pair and nothing else is kept.
func TestStateConverges(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 7))
		s := &simulation{
			testState: newTestState(nil), objects: map[string]*storagev1.CSIStorageCapacity{}, queue: map[pair]struct{}{},
			later: map[pair]time.Time{},
		}
		s.add([]pair{pairIn("fast", "a"), pairIn("fast", "b")})
		zones, classes := []string{"a", "b", "c"}, []string{"fast", "slow", "gone"}
		for step := range 60 {
			node, zone, name := fmt.Sprint("n", 1+random.IntN(3)), zones[random.IntN(3)], classes[random.IntN(3)]
			switch random.IntN(9) {
			case 0:
				s.add(s.nodeChanged(node, nil, false))
			case 1:
				s.add(s.nodeChanged(node, map[string]string{"z": zone}, true))
			case 2:
				s.add(s.csiNodeChanged(node, nil))
			case 3:
				s.add(s.node(node, zone))
			case 4:
				s.add(s.classChanged(class(name)))
			case 5:
				s.add(s.classDeleted(name))
			case 6:
				o := objectFor(fmt.Sprint("by-hand", step), name+"/"+zone)
				s.objects[o.Name] = o
				s.add(s.objectAdded(o))
			case 7:
				for _, o := range slices.Sorted(maps.Keys(s.objects))[:min(1, len(s.objects))] {
					lost := s.objects[o]
					delete(s.objects, o)
					s.add(s.deleted(lost))
				}
			case 8:
				s.clock = s.clock.Add(time.Duration(random.IntN(40)) * time.Second)
			}
			if random.IntN(2) == 0 {
				s.settle(t)
			}
		}
		s.settle(t)
		s.clock = s.clock.Add(time.Hour)
		s.settle(t)
		for _, name := range classes {
			if s.classes[name] != nil {
				s.add(s.classChanged(class(name))) // a segment in which nothing was published is forgotten when a class is looked at
			}
		}
		s.settle(t)
		var want, have []pair
		for c := range s.classes {
			for z := range s.nodes.segments {
				want = append(want, pair{Class: c, Segment: z})
			}
		}
		for _, o := range s.objects {
			have = append(have, pairOf(o))
		}
		if describe(want) != describe(have) {
			t.Errorf("seed %d: there are objects for %q, and there should be for %q", seed, describe(have), describe(want))
		}
		if got := s.counts(); got.goal != len(want) || got.current != len(want) || got.obsolete != 0 {
			t.Errorf("seed %d: the counts are %+v", seed, got)
		}
		if len(s.emptySince) > 0 && len(s.classes) > 0 || len(s.schedules) != len(want) || len(s.objects) != len(want) {
			t.Errorf("seed %d: %v, %v and %v are kept", seed, s.emptySince, s.schedules, s.objects)
		}
	}
}

// A pair whose calls fail comes last: calls that run into their deadline must not keep the
// others from being made.
func TestStateRanks(t *testing.T) {
	w := newTestState(nil)
	a := pairIn("fast", "a")
	ranks := func(want int) {
		t.Helper()
		if got := w.rank(a); got != want {
			t.Errorf("the rank is %d instead of %d", got, want)
		}
	}
	ranks(0)
	w.callStarted(a)
	w.callFailed(a)
	ranks(2)
	w.callStarted(a)
	w.callSucceeded(a, "", testNow.Add(time.Minute))
	w.objectAdded(objectFor("x", "fast/a"))
	ranks(2)
	w.requestRefresh([]pair{a})
	ranks(1)
}

// An object that goes while its zone has no node is needed again when the zone is back.
func TestStateObjectLostInTheGrace(t *testing.T) {
	w := newTestState(nil)
	a := pairIn("fast", "a")
	w.callStarted(a)
	w.callSucceeded(a, "", testNow.Add(time.Hour))
	w.objectAdded(objectFor("x", "fast/a"))
	w.nodeChanged("n1", nil, false)
	wantPairs(t, "lost in the grace", w.deleted(objectFor("x", "fast/a")), "")
	w.nodeChanged("n1", map[string]string{"z": "a"}, true)
	if _, s := w.read(a); !s.refresh {
		t.Errorf("it is not asked about: %+v", s)
	}
}
