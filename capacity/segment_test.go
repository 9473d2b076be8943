// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func in(key string, values ...string) corev1.NodeSelectorRequirement {
	return corev1.NodeSelectorRequirement{Key: key, Operator: corev1.NodeSelectorOpIn, Values: values}
}

func selects(expressions ...corev1.NodeSelectorRequirement) corev1.NodeSelectorTerm {
	return corev1.NodeSelectorTerm{MatchExpressions: expressions}
}

func TestCapacityScenarioTerms(t *testing.T) {
	t.Run("058_terms", func(t *testing.T) {
		fields := selects(in("t/rack", "1"), in("t/zone", "a"))
		fields.MatchFields = []corev1.NodeSelectorRequirement{in("metadata.name", "n1")}
		notIn := in("t/zone", "a")
		notIn.Operator = corev1.NodeSelectorOpNotIn
		exists := corev1.NodeSelectorRequirement{Key: "t/zone", Operator: corev1.NodeSelectorOpExists}
		w := newState("drv", DefaultConfig(), nil)
		w.setSegment("t/rack=1,t/zone=a")
		w.setSegment("t/rack=2,t/zone=a")
		for name, tt := range map[string]struct {
			terms []corev1.NodeSelectorTerm
			want  []segment
		}{
			"the very pairs": {
				[]corev1.NodeSelectorTerm{selects(in("t/rack", "1"), in("t/zone", "a"))}, []segment{"t/rack=1,t/zone=a"},
			},
			"in another order": {
				[]corev1.NodeSelectorTerm{selects(in("t/zone", "a"), in("t/rack", "1"))}, []segment{"t/rack=1,t/zone=a"},
			},
			"two terms": {
				[]corev1.NodeSelectorTerm{selects(in("t/zone", "a"), in("t/rack", "2")), selects(in("t/zone", "a"), in("t/rack", "1"))},
				[]segment{"t/rack=2,t/zone=a", "t/rack=1,t/zone=a"},
			},
			"one term twice": {
				[]corev1.NodeSelectorTerm{selects(in("t/rack", "1"), in("t/zone", "a")), selects(in("t/zone", "a"), in("t/rack", "1"))},
				[]segment{"t/rack=1,t/zone=a"},
			},
			"an unusable one, too": {
				[]corev1.NodeSelectorTerm{fields, selects(in("t/rack", "1"), in("t/zone", "a"))}, []segment{"t/rack=1,t/zone=a"},
			},
			"fields too":  {[]corev1.NodeSelectorTerm{fields}, nil},
			"not in":      {[]corev1.NodeSelectorTerm{selects(in("t/rack", "1"), notIn)}, nil},
			"exists":      {[]corev1.NodeSelectorTerm{selects(in("t/rack", "1"), exists)}, nil},
			"two values":  {[]corev1.NodeSelectorTerm{selects(in("t/rack", "1", "2"), in("t/zone", "a"))}, nil},
			"no value":    {[]corev1.NodeSelectorTerm{selects(in("t/rack"), in("t/zone", "a"))}, nil},
			"a key twice": {[]corev1.NodeSelectorTerm{selects(in("t/rack", "1"), in("t/zone", "a"), in("t/zone", "b"))}, nil},
			"truncated":   {[]corev1.NodeSelectorTerm{selects(in("t/zone", "a"))}, nil},
			"deeper":      {[]corev1.NodeSelectorTerm{selects(in("t/rack", "1"), in("t/zone", "a"), in("t/node", "n1"))}, nil},
			"unknown":     {[]corev1.NodeSelectorTerm{selects(in("t/rack", "3"), in("t/zone", "a"))}, nil},
			"empty":       {[]corev1.NodeSelectorTerm{{}}, nil},
			"no terms":    {nil, nil},
		} {
			if diff := cmp.Diff(tt.want, w.knownSegments(tt.terms)); diff != "" {
				t.Errorf("%s: %s", name, diff)
			}
		}
	})
}

func TestSegmentOf(t *testing.T) {
	for _, tt := range []struct {
		labels map[string]string
		want   segment
	}{
		{nil, ""},
		{map[string]string{}, ""},
		{map[string]string{"t/zone": "a"}, "t/zone=a"},
		{map[string]string{"t/zone": ""}, "t/zone="},
		{map[string]string{"t/zone": "a", "t/rack": "1", "t/region": "x"}, "t/rack=1,t/region=x,t/zone=a"},
	} {
		got := segmentOf(tt.labels)
		if got != tt.want {
			t.Errorf("the segment of %v is %q instead of %q", tt.labels, got, tt.want)
		}
		back := got.labels()
		if back == nil || !maps.Equal(back, tt.labels) {
			t.Errorf("the labels of %q are %#v instead of %v", got, back, tt.labels)
		}
		if selector := got.selector(); selector == nil || selector.MatchLabels == nil || len(selector.MatchExpressions) > 0 {
			t.Errorf("the selector of %q is %+v", got, selector)
		}
	}
}

func TestValidSegment(t *testing.T) {
	for name, tt := range map[string]struct {
		topology map[string]string
		problem  string
	}{
		"good":                  {map[string]string{"t/zone": "a", "rack": ""}, ""},
		"no topology":           {nil, ""},
		"a key that is none":    {map[string]string{"a=b": "x"}, `topology key "a=b"`},
		"an empty key":          {map[string]string{"": "x"}, `topology key ""`},
		"a value that is none":  {map[string]string{"t/zone": "a,b=c"}, `topology value "a,b=c" of key "t/zone"`},
		"a value that is long":  {map[string]string{"t/zone": strings.Repeat("a", 64)}, "topology value"},
		"a key with two slashs": {map[string]string{"t/zone/x": "a"}, "topology key"},
	} {
		err := validSegment(tt.topology)
		if (err != nil) != (tt.problem != "") || err != nil && !strings.Contains(err.Error(), tt.problem) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestPairOf(t *testing.T) {
	object := func(s *metav1.LabelSelector) *storagev1.CSIStorageCapacity {
		return &storagev1.CSIStorageCapacity{ObjectMeta: metav1.ObjectMeta{UID: "u"}, StorageClassName: "fast", NodeTopology: s}
	}
	for name, tt := range map[string]struct {
		selector *metav1.LabelSelector
		want     pair
	}{
		"a segment": {
			&metav1.LabelSelector{MatchLabels: map[string]string{"b": "2", "a": "1"}}, pair{Class: "fast", Segment: "a=1,b=2"},
		},
		"every node, empty map": {&metav1.LabelSelector{MatchLabels: map[string]string{}}, pair{Class: "fast"}},
		"every node, no map":    {&metav1.LabelSelector{}, pair{Class: "fast"}},
		"no node":               {nil, pair{UnmatchedUID: "u"}},
		"an expression": {&metav1.LabelSelector{MatchLabels: map[string]string{"a": "1"},
			MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "b", Operator: metav1.LabelSelectorOpExists}}},
			pair{UnmatchedUID: "u"}},
	} {
		if got := pairOf(object(tt.selector)); got != tt.want {
			t.Errorf("%s: got %+v instead of %+v", name, got, tt.want)
		}
	}
}

// FuzzSegment holds that labels survive being a segment, whenever they can be labels.
func FuzzSegment(f *testing.F) {
	f.Add("t/zone", "a", "t/rack", "1")
	f.Add("t/zone", "", "zone", "a")
	f.Add("a", "b,c=d", "", "=")
	f.Fuzz(func(t *testing.T, k1, v1, k2, v2 string) {
		labels := map[string]string{k1: v1, k2: v2}
		if validSegment(labels) != nil {
			return
		}
		if back := segmentOf(labels).labels(); !maps.Equal(back, labels) {
			t.Errorf("%v came back as %v", labels, back)
		}
		got, ok := segmentOfTerm(selects(in(k2, v2), in(k1, v1)))
		if ok != (k1 != k2) || ok && got != segmentOf(labels) {
			t.Errorf("the term of %v is %q, %v", labels, got, ok)
		}
	})
}
