// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// sample makes states at random. Few values make equal ones likely.
type sample struct{ *rand.Rand }

func (r sample) bool() bool { return r.IntN(2) == 0 }

func pick[T any](r sample, values ...T) T { return values[r.IntN(len(values))] }

var start = time.Unix(1_700_000_000, 0)

func (r sample) volume(name string) *LogicalVolume {
	lv := &LogicalVolume{ObjectMeta: metav1.ObjectMeta{Name: name, UID: pick(r, types.UID("1"), "2"), ResourceVersion: pick(r, "7", "8")}}
	lv.CreationTimestamp = metav1.NewTime(start.Add(-pick(r, time.Second, time.Hour)))
	if r.IntN(4) == 0 {
		at := metav1.NewTime(start.Add(-pick(r, time.Second, time.Hour)))
		lv.DeletionTimestamp = &at
	}
	lv.Spec = Spec{
		Name: name, NodeName: pick(r, "a", "b"), Size: pick(r, Bytes(4096), 8192), DeviceClass: pick(r, "", "ssd"),
		Source: pick(r, "", "src"),
	}
	if lv.Spec.Source != "" {
		lv.Spec.AccessType = pick(r, "ro", "rw")
	}
	lv.Status = Status{
		VolumeID: pick(r, "", string(lv.UID)), Code: pick[int64](r, 0, 0, 8, 99), CurrentSize: pick(r, Bytes(0), 4096, 8192, 16384),
	}
	if lv.Status.VolumeID == "" {
		lv.Status.CurrentSize = 0
	}
	return lv
}

func (r sample) node(value string) nodeState {
	if r.IntN(4) == 0 {
		return nodeState{value: value, read: r.bool()}
	}
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: value, Labels: map[string]string{names(Driver).topologyKey(): value}}}
	n.Annotations = map[string]string{"capacity.topolvm.io/" + pick(r, "ssd", "00default"): pick(r, "4096", "1000000", "x")}
	if r.IntN(4) == 0 {
		n.DeletionTimestamp = &metav1.Time{Time: start}
	}
	ready := corev1.NodeCondition{Type: corev1.NodeReady, Status: pick(r, corev1.ConditionTrue, corev1.ConditionUnknown)}
	n.Status.Conditions = []corev1.NodeCondition{ready}
	return nodeState{value: value, object: n}
}

func (r sample) state(lv *LogicalVolume) volumeState {
	s := volumeState{now: start, lv: lv, awaited: pick(r, types.UID(""), "", "1")}
	if lv != nil {
		s.seen, s.node = seen{r.bool(), r.bool(), r.IntN(4) == 0}, r.node(lv.Spec.NodeName)
	}
	return s
}

// TestDecideCreation checks for states of every kind what must hold for each step.
func TestDecideCreation(t *testing.T) {
	r := sample{rand.New(rand.NewPCG(1, 2))}
	decided := map[action]int{}
	for range 300_000 {
		request := creation{
			requested: "v", name: "v", size: pick(r, Bytes(4096), 8192), limit: pick(r, Bytes(0), 8192), class: pick(r, "", "ssd"),
			sourceID: pick(r, "", "id"), require: pick(r, nil, requirement{"a"}, requirement{"b", "a"}), snapshot: r.IntN(4) == 0,
		}
		var s creationState
		if r.bool() {
			s.volumeState = r.state(r.volume("v"))
		} else {
			s.volumeState = r.state(nil)
			s.node = r.node("a")
		}
		if request.snapshot {
			request.sourceID, request.size, request.limit, request.class, request.require = "id", 0, 0, "", nil
		}
		if r.IntN(3) > 0 {
			s.source, s.sourceName = r.volume("src"), "src"
		}
		if s.lv == nil {
			if request.sourceID == "" {
				s.source = nil
			}
			s.place, s.placeErr = place(names(Driver), request, s.source, func() []*corev1.Node {
				if s.node.object == nil {
					return nil
				}
				return []*corev1.Node{s.node.object}
			})
		}
		s.sourceRead = r.bool()
		got := decideCreation(names(Driver), request, s)
		decided[got.action]++
		bad := ""
		switch got.action {
		case doCreate:
			switch {
			case s.lv != nil || s.awaited != "":
				bad = "creates a second one"
			case len(got.lv.Finalizers) != 1 || !request.require.allows(got.lv.Spec.NodeName):
				bad = "creates it without the finalizer, or on another node"
			case s.node.object == nil || s.node.object.DeletionTimestamp != nil:
				bad = "creates it on a node that does not exist, or is being deleted"
			}
		case doDelete:
			switch {
			case !got.exact || !s.read || s.terminating():
				bad = "deletes what it has not read"
			case s.lv.exists() && (!s.began || request.limit == 0 || s.lv.Status.CurrentSize <= request.limit):
				bad = "deletes a volume"
			}
		case doAnswer:
			if got.err == nil && (!s.read || s.terminating() || !s.lv.exists() || s.lv.Status.CurrentSize == 0 ||
				!request.require.allows(s.lv.Spec.NodeName) || request.differs(s.lv, s.sourceName) != "") {
				bad = "succeeds without the requested volume"
			}
		case doWait:
			if s.node.object == nil {
				bad = "waits for a node that does not exist"
			}
		case doResize:
			bad = "changes the size"
		}
		if bad != "" {
			t.Fatalf("%s: step %+v, state %+v, LogicalVolume %+v, request %+v", bad, got, s, s.lv, request)
		}
	}
	for _, a := range []action{doAnswer, doWait, doReadVolume, doReadNode, doReadSource, doCreate, doDelete} {
		if decided[a] < 100 {
			t.Errorf("%v was decided %d times", a, decided[a])
		}
	}
}

// TestDecideOthers does the same for deletions and expansions.
func TestDecideOthers(t *testing.T) {
	r := sample{rand.New(rand.NewPCG(3, 4))}
	decided := map[action]int{}
	for range 300_000 {
		s := r.state(r.volume("v"))
		snapshot := r.bool()
		got := decideDeletion(s, snapshot)
		decided[got.action]++
		if got.action == doDelete && (s.lv.IsSnapshot() != snapshot || s.terminating()) ||
			got.action == doAnswer && got.err == nil && s.lv.IsSnapshot() == snapshot {
			t.Fatalf("deletion, snapshot %t: step %+v, state %+v, LogicalVolume %+v", snapshot, got, s, s.lv)
		}
		if r.bool() {
			s.before, s.since = &Status{VolumeID: s.lv.Status.VolumeID, Code: pick[int64](r, 0, 8)}, start.Add(-pick(r, 0, time.Minute))
		}
		target := pick[int64](r, 4096, 8192, 16384)
		request := &csi.ControllerExpandVolumeRequest{VolumeId: "id", CapacityRange: &csi.CapacityRange{RequiredBytes: target}}
		got = decideExpansion(names(Driver), request, s)
		decided[got.action]++
		switch {
		case got.action == doCreate || got.action == doDelete,
			got.action == doResize && (got.size < s.lv.Status.CurrentSize || s.terminating() || s.lv.IsSnapshot()),
			got.action == doResize && got.err != nil && (s.lv.Status.Code == 0 || s.before == nil),
			got.action == doResize && got.retry && got.size != Bytes(target),
			got.action == doAnswer && got.err == nil && s.lv.size() < Bytes(target),
			got.action == doAnswer && got.err == nil && s.lv.Status.CurrentSize == 0 && s.before != nil,
			got.action == doAnswer && got.err == nil && s.lv.Spec.Size > s.lv.size():
			t.Fatalf("expansion to %d: step %+v, state %+v, LogicalVolume %+v", target, got, s, s.lv)
		}
	}
	for _, a := range []action{doAnswer, doWait, doReadNode, doDelete, doResize} {
		if decided[a] < 100 {
			t.Errorf("%v was decided %d times", a, decided[a])
		}
	}
}

// TestSizes compares all combinations of scenario 15 with the rules.
func TestSizes(t *testing.T) {
	minimum := DefaultConfig().Minimum
	minimum.Btrfs = -5 // means none
	values := []int64{-1, 0, 1, 4095, 4097, 10 << 20, 1 << 30, 1<<30 + 1, math.MaxInt64}
	for fsType, least := range map[string]int64{"block": 8 << 20, "ext4": 32 << 20, "": 32 << 20, "xfs": 300 << 20, "btrfs": 0, "foo": 0} {
		mount := &csi.VolumeCapability_MountVolume{FsType: fsType}
		capability := &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{Mount: mount}}
		if fsType == "block" {
			capability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
		}
		for _, required := range values {
			for _, limit := range values {
				size, err := sizeOf(subject{lv: "v"}, &csi.CapacityRange{RequiredBytes: required, LimitBytes: limit},
					minimum.of([]*csi.VolumeCapability{capability}))
				needed, ok := max(required, least), codes.OK
				if needed == 0 {
					needed = 1 << 30
					if limit > 0 && limit < needed {
						needed = limit / 4096 * 4096
					}
				}
				switch {
				case required < 0 || limit < 0:
					ok = codes.InvalidArgument
				case needed == 0 || needed > math.MaxInt64-4096 || limit > 0 && (needed+4095)/4096*4096 > limit:
					ok = codes.OutOfRange
				}
				if status.Code(err) != ok || err == nil && int64(size) != (needed+4095)/4096*4096 {
					t.Errorf("%q, required %d, limit %d: %d %v, want code %v", fsType, required, limit, size, err, ok)
				}
			}
		}
	}
}
