package capacity

import (
	"cmp"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// snapshot is everything that decide may look at.
type snapshot struct {
	odd     bool                            // the item is an object that is for no segment
	class   *storagev1.StorageClass         // nil: there is none that is published
	there   bool                            // the segment has nodes
	until   time.Time                       // without nodes: when its objects go
	objects []*storagev1.CSIStorageCapacity // for the item, in any order
	schedule
	now time.Time
}

// plan is what is to be done about an item.
type plan struct {
	remove []*storagev1.CSIStorageCapacity
	keep   *storagev1.CSIStorageCapacity // nil: there is none, or none should be
	ask    bool                          // the driver, and keep is made as it answers
	next   time.Time                     // otherwise: look again then; zero: only an event tells
	reason string
}

// decide is total: every snapshot has a plan. Of several objects for one item the oldest
// stays, which is the one that others have seen longest.
func decide(s snapshot) plan {
	objects := slices.SortedFunc(slices.Values(s.objects), func(a, b *storagev1.CSIStorageCapacity) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
	})
	if s.odd {
		return plan{remove: objects, reason: "NoSegment"}
	}
	if s.class == nil {
		return plan{remove: objects, reason: "NoClass"}
	}
	if !s.there && !s.until.After(s.now) {
		return plan{remove: objects, reason: "NoNode"}
	}
	p := plan{reason: "Due"}
	if len(objects) > 0 {
		p.keep, p.remove = objects[0], objects[1:]
	}
	switch {
	case !s.there:
		p.next, p.reason = s.until, "NodeLeft"
	case s.refresh, !s.due.After(s.now):
		p.ask = true
	default:
		p.next, p.reason = s.due, "Fresh"
	}
	return p
}

// driftRounds is how many of the first intervals of an item are shortened.
const driftRounds = 4

// nextPoll is when an item that has been asked about rounds times before now is due
// again. All items are asked about at the same time in the beginning; the first intervals
// are shortened, by up to a half and by each item otherwise, so that later calls
// are spread over the whole interval. No value gets older than the interval.
func nextPoll(now time.Time, interval time.Duration, i item, rounds int) time.Time {
	if rounds < driftRounds {
		h := fnv.New32a()
		fmt.Fprintf(h, "%s/%s/%d", i.Class, i.Segment, rounds)
		interval -= time.Duration(float64(interval) / 2 * float64(h.Sum32()) / (1 << 32))
	}
	return now.Add(interval)
}

// request asks how much there is for class in s. The parameters are those of the class
// as they are, since the driver gets them in the same way for a volume.
func request(class *storagev1.StorageClass, s segment) *csi.GetCapacityRequest {
	return &csi.GetCapacityRequest{Parameters: class.Parameters, AccessibleTopology: &csi.Topology{Segments: s.labels()}}
}

// answer is what the driver has said.
type answer struct {
	capacity resource.Quantity
	maximum  *resource.Quantity // of one volume; nil: not known
}

// parse checks what the driver has answered.
func parse(r *csi.GetCapacityResponse) (answer, error) {
	if r.GetAvailableCapacity() < 0 {
		return answer{}, fmt.Errorf("the driver has answered GetCapacity with available_capacity %d, which is less than nothing", r.GetAvailableCapacity())
	}
	a := answer{capacity: *resource.NewQuantity(r.GetAvailableCapacity(), resource.BinarySI)}
	if m := r.GetMaximumVolumeSize(); m != nil {
		if m.GetValue() < 0 {
			return answer{}, fmt.Errorf("the driver has answered GetCapacity with maximum_volume_size %d, which is less than nothing", m.GetValue())
		}
		a.maximum = resource.NewQuantity(m.GetValue(), resource.BinarySI)
	}
	return a, nil
}

// publisher is whose objects they are.
type publisher struct {
	labels map[string]string
	owner  *metav1.OwnerReference // nil: nobody
}

// object is a new one that says a of i.
func (p publisher) object(i item, a answer) *storagev1.CSIStorageCapacity {
	o := &storagev1.CSIStorageCapacity{
		ObjectMeta:       metav1.ObjectMeta{GenerateName: generateName, Labels: p.labels},
		StorageClassName: i.Class, NodeTopology: i.Segment.selector(), Capacity: &a.capacity, MaximumVolumeSize: a.maximum,
	}
	if p.owner != nil {
		o.OwnerReferences = []metav1.OwnerReference{*p.owner}
	}
	return o
}

// change makes have say a, and gives it its owner; false when both are so. What it
// returns is a copy.
func (p publisher) change(have *storagev1.CSIStorageCapacity, a answer) (*storagev1.CSIStorageCapacity, bool) {
	refs, newOwner := owners(have.OwnerReferences, p.owner)
	if sameQuantity(have.Capacity, &a.capacity) && sameQuantity(have.MaximumVolumeSize, a.maximum) && !newOwner {
		return have, false
	}
	want := have.DeepCopy()
	want.Capacity, want.MaximumVolumeSize, want.OwnerReferences = &a.capacity, a.maximum, refs
	return want, true
}

func sameQuantity(a, b *resource.Quantity) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Cmp(*b) == 0
}

// mergePatch is what makes want of have, which it differs from in what [publisher.change]
// changes. It applies only to the very version that have is.
func mergePatch(have, want *storagev1.CSIStorageCapacity) ([]byte, error) {
	metadata := map[string]any{"uid": have.UID, "resourceVersion": have.ResourceVersion}
	if !reflect.DeepEqual(have.OwnerReferences, want.OwnerReferences) {
		metadata["ownerReferences"] = want.OwnerReferences
	}
	return json.Marshal(map[string]any{"metadata": metadata, "capacity": want.Capacity, "maximumVolumeSize": want.MaximumVolumeSize})
}
