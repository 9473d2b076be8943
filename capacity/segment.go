// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/storage-controller/storage-controller/internal/topology"
)

// segment is a topology segment in comparable form: key=value,key=value, sorted by key.
// Keys and values are valid labels, so that neither contains = or a comma. The empty
// segment is the whole cluster.
type segment string

// segmentOf returns the segment with these labels.
func segmentOf(labels map[string]string) segment { return segment(topology.SegmentOf(labels).String()) }

// labels returns the labels of s, never nil.
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

// validSegment returns an error if topology, from the driver, is not valid as node labels.
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

// segmentOfTerm returns the segment that a node affinity term selects, or false if it does
// not select exactly one.
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

// selector returns the nodeTopology of the objects of s.
func (s segment) selector() *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: s.labels()}
}
