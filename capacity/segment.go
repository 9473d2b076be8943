package capacity

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/storage-controller/storage-controller/internal/topology"
)

// segment is a part of the cluster: the topology keys of a driver with their values, as
// key=value,key=value in the order of the keys. Neither can contain = or a comma, since
// both are those of a label. The empty segment is the whole cluster.
type segment string

// segmentOf returns the segment with these labels.
func segmentOf(labels map[string]string) segment { return segment(topology.SegmentOf(labels).String()) }

// labels is what [segmentOf] was given; never nil.
func (s segment) labels() map[string]string {
	labels := map[string]string{}
	if s == "" {
		return labels
	}
	for pair := range strings.SplitSeq(string(s), ",") {
		k, v, _ := strings.Cut(pair, "=")
		labels[k] = v
	}
	return labels
}

// validSegment reports what keeps topology, of a driver, from being the labels of nodes.
func validSegment(topology map[string]string) error {
	for _, k := range slices.Sorted(maps.Keys(topology)) {
		if problems := validation.IsQualifiedName(k); len(problems) > 0 {
			return fmt.Errorf("topology key %q: %s", k, problems[0])
		}
		if problems := validation.IsValidLabelValue(topology[k]); len(problems) > 0 {
			return fmt.Errorf("topology value %q of key %q: %s", topology[k], k, problems[0])
		}
	}
	return nil
}

// segmentOfTerm is the segment that term of the node affinity of a volume selects; false
// when it selects something else than one.
func segmentOfTerm(term corev1.NodeSelectorTerm) (segment, bool) {
	if len(term.MatchFields) > 0 {
		return "", false
	}
	labels := map[string]string{}
	for _, e := range term.MatchExpressions {
		if _, twice := labels[e.Key]; twice || e.Operator != corev1.NodeSelectorOpIn || len(e.Values) != 1 {
			return "", false
		}
		labels[e.Key] = e.Values[0]
	}
	return segmentOf(labels), true
}

// item is what has one object: a class in a segment. The objects that belong to no such
// pair are items of their own.
type item struct {
	Class   string
	Segment segment
	Odd     types.UID // of an object that is for no segment; "" for a pair
}

// String is for logs and pages.
func (i item) String() string {
	if i.Odd != "" {
		return "object " + string(i.Odd)
	}
	return i.Class + " in " + string(i.Segment)
}

// itemOf is what obj is for. A selector without labels selects every node, whether its
// map is empty or, as it comes back from the API server, nil; no selector selects none.
func itemOf(obj *storagev1.CSIStorageCapacity) item {
	if t := obj.NodeTopology; t != nil && len(t.MatchExpressions) == 0 {
		return item{Class: obj.StorageClassName, Segment: segmentOf(t.MatchLabels)}
	}
	return item{Odd: obj.UID}
}

// selector is the nodeTopology of the objects for s.
func (s segment) selector() *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: s.labels()}
}
