// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/wrapperspb"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

var testNow = time.Unix(1_700_000_000, 0)

// made is an object that was made some seconds after the others.
func made(name string, later int) *storagev1.CSIStorageCapacity {
	return &storagev1.CSIStorageCapacity{ObjectMeta: metav1.ObjectMeta{
		Name: name, UID: types.UID("uid-" + name), CreationTimestamp: metav1.NewTime(testNow.Add(time.Duration(later) * time.Second)),
	}}
}

func namesOf(objects ...*storagev1.CSIStorageCapacity) []string {
	var names []string
	for _, o := range objects {
		if o != nil {
			names = append(names, o.Name)
		}
	}
	return names
}

func TestDecide(t *testing.T) {
	objects := func(o ...*storagev1.CSIStorageCapacity) []*storagev1.CSIStorageCapacity { return o }
	class, later, earlier := &storagev1.StorageClass{}, testNow.Add(time.Minute), testNow.Add(-time.Minute)
	fresh := schedule{due: later, rounds: 1}
	published := func(name string) schedule { return schedule{due: later, rounds: 1, object: made(name, 0).UID} }
	for name, tt := range map[string]struct {
		s      pairState
		keep   string
		remove []string
		ask    bool
		next   time.Time
		reason string
	}{
		"new": {s: pairState{class: class, hasNodes: true}, ask: true, reason: "Due"},
		"new, with an object": {
			s: pairState{class: class, hasNodes: true, objects: objects(made("x", 0))}, keep: "x", ask: true, reason: "Due",
		},
		"due": {
			s: pairState{class: class, hasNodes: true, schedule: schedule{due: testNow, rounds: 3}}, ask: true, reason: "Due",
		},
		"overdue": {
			s: pairState{class: class, hasNodes: true, schedule: schedule{due: earlier, rounds: 3}}, ask: true, reason: "Due",
		},
		"not due": {
			s: pairState{class: class, hasNodes: true, schedule: published("x"), objects: objects(made("x", 0))}, keep: "x", next: later,
			reason: "UpToDate",
		},
		"not due, nothing available": {s: pairState{class: class, hasNodes: true, schedule: fresh}, next: later, reason: "UpToDate"},
		"not due, but something happened": {
			s: pairState{class: class, hasNodes: true, schedule: schedule{due: later, refresh: true}}, ask: true, reason: "Due",
		},
		"two, the older stays and was never compared": {
			s: pairState{class: class, hasNodes: true, schedule: published("a"), objects: objects(made("a", 1), made("b", 0))}, keep: "b",
			remove: []string{"a"}, ask: true, reason: "Due",
		},
		"two, the older stays": {
			s: pairState{class: class, hasNodes: true, schedule: published("b"), objects: objects(made("a", 1), made("b", 0))}, keep: "b",
			remove: []string{"a"}, next: later, reason: "UpToDate",
		},
		"two of one time, by name": {
			s: pairState{class: class, hasNodes: true, schedule: published("a"), objects: objects(made("b", 0), made("a", 0))}, keep: "a",
			remove: []string{"b"}, next: later, reason: "UpToDate",
		},
		"three, and due": {
			s: pairState{class: class, hasNodes: true, objects: objects(made("c", 2), made("a", 1), made("b", 0))}, keep: "b",
			remove: []string{"a", "c"}, ask: true, reason: "Due",
		},
		"no class": {
			s: pairState{hasNodes: true, objects: objects(made("x", 0)), schedule: fresh}, remove: []string{"x"},
			reason: "NoClass",
		},
		"neither class nor node": {
			s: pairState{removeAt: later, objects: objects(made("x", 0))}, remove: []string{"x"}, next: later, reason: "NoClass",
		},
		"no node for long": {
			s: pairState{class: class, removeAt: testNow, objects: objects(made("x", 0))}, remove: []string{"x"},
			reason: "NoNode",
		},
		"no node, since an unknown time": {
			s: pairState{class: class, objects: objects(made("x", 0))}, remove: []string{"x"}, reason: "NoNode",
		},
		"last node has left": {
			s: pairState{class: class, removeAt: later, objects: objects(made("x", 0))}, keep: "x", next: later,
			reason: "LastNodeDeleted",
		},
		"last node has left, two objects": {
			s: pairState{class: class, removeAt: later, objects: objects(made("y", 0), made("x", 0))}, keep: "x",
			remove: []string{"y"}, next: later, reason: "LastNodeDeleted",
		},
		"last node has left, refresh": {
			s: pairState{class: class, removeAt: later, schedule: schedule{refresh: true}}, next: later,
			reason: "LastNodeDeleted",
		},
		"node is back within the grace": {
			s:    pairState{class: class, hasNodes: true, removeAt: later, schedule: published("x"), objects: objects(made("x", 0))},
			keep: "x", next: later, reason: "UpToDate",
		},
		"no segment": {
			s: pairState{unmatched: true, class: class, hasNodes: true, objects: objects(made("x", 0))}, remove: []string{"x"},
			reason: "NoSegment",
		},
		"no segment, and gone": {s: pairState{unmatched: true}, reason: "NoSegment"},
	} {
		t.Run(name, func(t *testing.T) {
			tt.s.now = testNow
			given := namesOf(tt.s.objects...)
			p := decide(tt.s)
			keep := ""
			if p.keep != nil {
				keep = p.keep.Name
			}
			if keep != tt.keep || !slices.Equal(namesOf(p.remove...), tt.remove) || p.getCapacity != tt.ask || !p.next.Equal(tt.next) ||
				p.reason != tt.reason {
				t.Errorf("got keep %q, remove %q, ask %v, next %v because %s", keep, namesOf(p.remove...), p.getCapacity, p.next, p.reason)
			}
			if !slices.Equal(namesOf(tt.s.objects...), given) {
				t.Error("the snapshot was changed")
			}
		})
	}
}

// FuzzDecide derives states from bits. For all of them, nothing is both kept and
// removed or neither, a desired pair never loses its last object, and a plan that was
// carried out leaves nothing to remove.
func FuzzDecide(f *testing.F) {
	for bits := range uint16(1 << 9) {
		f.Add(bits, int8(1), uint8(2), int8(0), int8(3), int8(0))
	}
	f.Add(uint16(6), int8(-1), uint8(5), int8(-3), int8(0), int8(2))
	f.Fuzz(func(t *testing.T, bits uint16, until int8, n uint8, first, second, due int8) {
		bit := func(i int) bool { return bits&(1<<i) != 0 }
		at := func(d int8) time.Time { return testNow.Add(time.Duration(d) * time.Second) }
		s := pairState{unmatched: bit(0), hasNodes: bit(2), now: testNow}
		if bit(1) {
			s.class = &storagev1.StorageClass{}
		}
		if bit(3) {
			s.removeAt = at(until)
		}
		s.refresh, s.failing = bit(4), bit(5)
		if bit(6) {
			s.due = at(due)
		}
		for i := range int(n % 6) {
			later := int(first)
			if i%2 == 1 {
				later = int(second)
			}
			s.objects = append(s.objects, made(fmt.Sprint("o", (i*7+int(bits>>7))%6), later)) // names in no order
		}
		p := decide(s)
		removed := map[types.UID]bool{}
		for _, o := range p.remove {
			if removed[o.UID] {
				t.Errorf("%q is removed twice", o.Name)
			}
			removed[o.UID] = true
		}
		if p.keep != nil && removed[p.keep.UID] {
			t.Errorf("%q is kept and removed", p.keep.Name)
		}
		left := len(s.objects) - len(p.remove)
		wanted := !s.unmatched && s.class != nil && (s.hasNodes || s.removeAt.After(s.now))
		switch {
		case p.keep == nil && left != 0, p.keep != nil && left != 1:
			t.Errorf("%d objects are left, and %v is kept", left, p.keep)
		case wanted && len(s.objects) > 0 && p.keep == nil:
			t.Error("a desired pair loses its object")
		case !wanted && (p.keep != nil || p.getCapacity):
			t.Error("a pair that is not desired keeps an object, or causes a call")
		case p.getCapacity && !s.hasNodes:
			t.Error("the driver is asked about a segment without nodes")
		case p.getCapacity && !p.next.IsZero(), wanted && !p.getCapacity && !p.next.After(s.now):
			t.Errorf("ask is %v, and the next look at %v", p.getCapacity, p.next)
		case p.reason == "":
			t.Error("there is no reason")
		}
		for _, o := range s.objects {
			if p.keep != nil && (o.CreationTimestamp.Before(&p.keep.CreationTimestamp) ||
				o.CreationTimestamp.Equal(&p.keep.CreationTimestamp) && o.Name < p.keep.Name) {
				t.Errorf("%q is kept, though %q is older", p.keep.Name, o.Name)
			}
		}
		slices.Reverse(s.objects)
		if again := decide(s); again.keep != p.keep {
			t.Errorf("in another order %v is kept instead of %v", again.keep, p.keep)
		}
		s.objects = nil
		if p.keep != nil {
			s.objects = []*storagev1.CSIStorageCapacity{p.keep}
		}
		if again := decide(s); len(again.remove) > 0 || again.keep != p.keep {
			t.Errorf("after the plan was carried out %q are to be removed", namesOf(again.remove...))
		}
	})
}

func TestNextPollIsSpreadAndNeverLate(t *testing.T) {
	const items, slots = 2000, 20
	for _, interval := range []time.Duration{time.Minute, time.Second, time.Nanosecond, 24 * time.Hour} {
		for rounds := range 2 * driftRounds {
			for n := range 50 {
				i := pair{Class: "fast", Segment: segment(fmt.Sprint("t/node=", n))}
				after := nextPoll(testNow, interval, i, rounds).Sub(testNow)
				if after > interval || after < interval/2 || after <= 0 || rounds >= driftRounds && after != interval {
					t.Errorf("round %d with an interval of %v: the next is after %v", rounds, interval, after)
				}
			}
		}
	}
	// Where in the interval the calls are once the drift is over.
	var calls [slots]int
	for n := range items {
		i := pair{Class: "fast", Segment: segment(fmt.Sprint("t/node=", n))}
		at := testNow
		for rounds := range driftRounds {
			at = nextPoll(at, time.Minute, i, rounds)
		}
		calls[at.Sub(testNow)%time.Minute/(time.Minute/slots)]++
	}
	for slot, n := range calls {
		if n < items/slots/4 || n > items/slots*4 {
			t.Errorf("%d of %d calls are in slot %d of %d: %v", n, items, slot, slots, calls)
		}
	}
}

func TestRequest(t *testing.T) {
	class := &storagev1.StorageClass{Parameters: map[string]string{"csi.storage.k8s.io/fstype": "xfs"}}
	r := request(class, "a=1,b=2")
	if len(r.Parameters) != 1 || r.Parameters["csi.storage.k8s.io/fstype"] != "xfs" || r.VolumeCapabilities != nil {
		t.Errorf("got %v", r)
	}
	if diff := cmp.Diff(map[string]string{"a": "1", "b": "2"}, r.AccessibleTopology.Segments); diff != "" {
		t.Error(diff)
	}
	if r := request(class, ""); r.AccessibleTopology == nil || len(r.AccessibleTopology.Segments) != 0 {
		t.Errorf("for the whole cluster: %v", r)
	}
}

func TestParse(t *testing.T) {
	for name, tt := range map[string]struct {
		response *csi.GetCapacityResponse
		want     string
	}{
		"no answer":    {nil, "0"},
		"nothing":      {&csi.GetCapacityResponse{}, "0"},
		"something":    {&csi.GetCapacityResponse{AvailableCapacity: 1 << 30}, "1Gi"},
		"uneven bytes": {&csi.GetCapacityResponse{AvailableCapacity: 1<<30 + 1}, "1073741825"},
		"most":         {&csi.GetCapacityResponse{AvailableCapacity: 1<<63 - 1}, "9223372036854775807"},
		"with a maximum": {
			&csi.GetCapacityResponse{AvailableCapacity: 1 << 30, MaximumVolumeSize: wrapperspb.Int64(1 << 20)}, "1Gi, each 1Mi",
		},
		"a maximum of 0":   {&csi.GetCapacityResponse{MaximumVolumeSize: wrapperspb.Int64(0)}, "0, each 0"},
		"with a minimum":   {&csi.GetCapacityResponse{AvailableCapacity: 1, MinimumVolumeSize: wrapperspb.Int64(5)}, "1"},
		"negative":         {&csi.GetCapacityResponse{AvailableCapacity: -1}, "error"},
		"negative maximum": {&csi.GetCapacityResponse{AvailableCapacity: 1, MaximumVolumeSize: wrapperspb.Int64(-1)}, "error"},
	} {
		a, err := parseResponse(tt.response)
		got := a.capacity.String()
		if a.maximum != nil {
			got += ", each " + a.maximum.String()
		}
		if err != nil {
			got = "error"
		}
		if got != tt.want {
			t.Errorf("%s: got %s (%v) instead of %s", name, got, err, tt.want)
		}
	}
}

func controls(kind, name string) metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: "apps/v1", Kind: kind, Name: name, UID: types.UID("uid-" + name), Controller: ptr.To(true)}
}

func TestObject(t *testing.T) {
	i := pair{Class: "fast", Segment: "t/zone=a"}
	p := template{labels: labels("drv", "")}
	want := &storagev1.CSIStorageCapacity{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName: "csisc-", Labels: map[string]string{labelDriver: "drv", labelManagedBy: "external-provisioner"},
		},
		StorageClassName: "fast", NodeTopology: &metav1.LabelSelector{MatchLabels: map[string]string{"t/zone": "a"}},
		Capacity: ptr.To(resource.MustParse("1Gi")), MaximumVolumeSize: ptr.To(resource.MustParse("1Mi")),
	}
	a := values{capacity: resource.MustParse("1Gi"), maximum: ptr.To(resource.MustParse("1Mi"))}
	if diff := cmp.Diff(want, p.newObject(i, a)); diff != "" {
		t.Error(diff)
	}
	p.owner = ptr.To(controls("Deployment", "d"))
	want.OwnerReferences, want.MaximumVolumeSize, a.maximum = []metav1.OwnerReference{*p.owner}, nil, nil
	if diff := cmp.Diff(want, p.newObject(i, a)); diff != "" {
		t.Error(diff)
	}
	if pairOf(p.newObject(i, a)) != i {
		t.Error("the object is for something else")
	}
}

// A change is right when its patch, applied as RFC 7386 says, makes the object say what
// the driver said and leaves the rest.
func TestChange(t *testing.T) {
	gi, ti := ptr.To(resource.MustParse("1Gi")), ptr.To(resource.MustParse("1Ti"))
	sameValue := ptr.To(resource.MustParse("1073741824"))
	us, other, friend := controls("Deployment", "d"), controls("ReplicaSet", "r"),
		metav1.OwnerReference{Kind: "ConfigMap", Name: "c", UID: "uid-c"}
	for name, tt := range map[string]struct {
		capacity, maximum *resource.Quantity
		refs              []metav1.OwnerReference
		owner             *metav1.OwnerReference
		answer            values
		patch             string // of what differs, without the identity of the object; "": nothing does
	}{
		"the same":                {capacity: gi, answer: values{capacity: *gi}},
		"the same in other words": {capacity: sameValue, maximum: sameValue, answer: values{capacity: *gi, maximum: gi}},
		"another capacity":        {capacity: gi, answer: values{capacity: *ti}, patch: `{"capacity":"1Ti","maximumVolumeSize":null}`},
		"no capacity":             {answer: values{capacity: *gi}, patch: `{"capacity":"1Gi","maximumVolumeSize":null}`},
		"nothing left":            {capacity: gi, answer: values{}, patch: `{"capacity":"0","maximumVolumeSize":null}`},
		"another maximum": {
			capacity: gi, maximum: gi, answer: values{capacity: *gi, maximum: ti},
			patch: `{"capacity":"1Gi","maximumVolumeSize":"1Ti"}`,
		},
		"a maximum": {
			capacity: gi, answer: values{capacity: *gi, maximum: ti}, patch: `{"capacity":"1Gi","maximumVolumeSize":"1Ti"}`,
		},
		"no maximum any more": {
			capacity: gi, maximum: ti, answer: values{capacity: *gi}, patch: `{"capacity":"1Gi","maximumVolumeSize":null}`,
		},
		"owned":                     {capacity: gi, refs: []metav1.OwnerReference{friend, us}, owner: &us, answer: values{capacity: *gi}},
		"owned by another, as told": {capacity: gi, refs: []metav1.OwnerReference{other}, answer: values{capacity: *gi}},
		"owned by another": {capacity: gi, refs: []metav1.OwnerReference{other, friend}, owner: &us, answer: values{capacity: *gi},
			patch: `{"capacity":"1Gi","maximumVolumeSize":null,"metadata":{` +
				`"ownerReferences":[{"apiVersion":"","kind":"ConfigMap","name":"c","uid":"uid-c"},{"apiVersion":"apps/v1","kind":"Deployment","name":"d","uid":"uid-d","controller":true}]}}`},
		"without owner": {capacity: gi, owner: &us, answer: values{capacity: *gi},
			patch: `{"capacity":"1Gi","maximumVolumeSize":null,"metadata":{` +
				`"ownerReferences":[{"apiVersion":"apps/v1","kind":"Deployment","name":"d","uid":"uid-d","controller":true}]}}`},
	} {
		t.Run(name, func(t *testing.T) {
			have := &storagev1.CSIStorageCapacity{
				ObjectMeta: metav1.ObjectMeta{
					Name: "x", UID: "uid-x", ResourceVersion: "7", OwnerReferences: tt.refs,
					Annotations: map[string]string{"a": "b"},
				},
				StorageClassName: "fast", Capacity: tt.capacity, MaximumVolumeSize: tt.maximum,
			}
			before := have.DeepCopy()
			want, differs := template{owner: tt.owner}.updated(have, tt.answer)
			if diff := cmp.Diff(before, have); diff != "" {
				t.Errorf("the shared value was changed: %s", diff)
			}
			if differs != (tt.patch != "") {
				t.Fatalf("it differs: %v", differs)
			}
			if !differs {
				return
			}
			if again, more := (template{owner: tt.owner}).updated(want, tt.answer); more {
				t.Errorf("after the change there is another: %+v", again)
			}
			data, err := updatePatch(have, want)
			if err != nil {
				t.Fatal(err)
			}
			var got, patch map[string]any
			if err := json.Unmarshal(data, &got); err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal([]byte(tt.patch), &patch); err != nil {
				t.Fatal(err)
			}
			if patch["metadata"] == nil {
				patch["metadata"] = map[string]any{}
			}
			metadata := patch["metadata"].(map[string]any)
			metadata["uid"], metadata["resourceVersion"] = "uid-x", "7" // it is for this very version
			if diff := cmp.Diff(patch, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestOwners(t *testing.T) {
	us, other := controls("Deployment", "d"), controls("ReplicaSet", "r")
	friend := metav1.OwnerReference{Kind: "ConfigMap", Name: "c", UID: "uid-c", Controller: ptr.To(false), BlockOwnerDeletion: ptr.To(true)}
	weak := us
	weak.Controller = nil
	for name, tt := range map[string]struct {
		have    []metav1.OwnerReference
		owner   *metav1.OwnerReference
		want    []metav1.OwnerReference
		changed bool
	}{
		"none, and none to be": {},
		"none to be":           {have: []metav1.OwnerReference{other, friend}, want: []metav1.OwnerReference{other, friend}},
		"none yet":             {owner: &us, want: []metav1.OwnerReference{us}, changed: true},
		"there":                {have: []metav1.OwnerReference{us}, owner: &us, want: []metav1.OwnerReference{us}},
		"there, among others":  {have: []metav1.OwnerReference{friend, us}, owner: &us, want: []metav1.OwnerReference{friend, us}},
		"another controller": {
			have: []metav1.OwnerReference{other, friend}, owner: &us, want: []metav1.OwnerReference{friend, us}, changed: true,
		},
		"others that do not": {
			have: []metav1.OwnerReference{friend}, owner: &us, want: []metav1.OwnerReference{friend, us}, changed: true,
		},
		"there, but not in control": {
			have: []metav1.OwnerReference{weak, friend}, owner: &us, want: []metav1.OwnerReference{friend, us}, changed: true,
		},
		"not in control of another's": {have: []metav1.OwnerReference{weak, other}, owner: &us,
			want: []metav1.OwnerReference{us}, changed: true},
	} {
		t.Run(name, func(t *testing.T) {
			given := slices.Clone(tt.have)
			got, changed := withOwner(tt.have, tt.owner)
			if diff := cmp.Diff(tt.want, got); diff != "" || changed != tt.changed {
				t.Errorf("changed is %v: %s", changed, diff)
			}
			if diff := cmp.Diff(given, tt.have); diff != "" {
				t.Errorf("the shared value was changed: %s", diff)
			}
			if again, changed := withOwner(got, tt.owner); changed {
				t.Errorf("and then it is %v", again)
			}
		})
	}
}
