package nodecontroller

import (
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	testDriver = "Local.Example.com"
	testKey    = "topology.example.com/node"
)

// affinityTerm is one alternative of an affinity.
func affinityTerm(key string, values ...string) corev1.NodeSelectorTerm {
	return corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: corev1.NodeSelectorOpIn, Values: values}}}
}

func localVolume(terms ...corev1.NodeSelectorTerm) *corev1.PersistentVolume {
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}}
	pv.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: testDriver, VolumeHandle: "h"}
	pv.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: terms}}
	return pv
}

func TestLocalValues(t *testing.T) {
	for name, tt := range map[string]struct {
		pv   *corev1.PersistentVolume
		key  string
		want []string
	}{
		"one value":                       {localVolume(affinityTerm(testKey, "a")), testKey, []string{"a"}},
		"alternatives are put together":   {localVolume(affinityTerm(testKey, "b", "a"), affinityTerm(testKey, "c", "a")), testKey, []string{"a", "b", "c"}},
		"one alternative without the key": {localVolume(affinityTerm(testKey, "a"), affinityTerm("zone", "z")), testKey, nil},
		"an empty alternative":            {localVolume(affinityTerm(testKey, "a"), corev1.NodeSelectorTerm{}), testKey, nil},
		"no alternatives":                 {localVolume(), testKey, nil},
		"no values":                       {localVolume(affinityTerm(testKey)), testKey, nil},
		"the key is not known":            {localVolume(affinityTerm("", "a")), "", nil},
		"no affinity":                     {func() *corev1.PersistentVolume { pv := localVolume(); pv.Spec.NodeAffinity = nil; return pv }(), testKey, nil},
		"no required affinity":            {func() *corev1.PersistentVolume { pv := localVolume(); pv.Spec.NodeAffinity.Required = nil; return pv }(), testKey, nil},
		"other driver": {func() *corev1.PersistentVolume {
			pv := localVolume(affinityTerm(testKey, "a"))
			pv.Spec.CSI.Driver = "x"
			return pv
		}(), testKey, nil},
		"no CSI volume": {func() *corev1.PersistentVolume {
			pv := localVolume(affinityTerm(testKey, "a"))
			pv.Spec.CSI = nil
			return pv
		}(), testKey, nil},
		"another operator is no statement": {localVolume(corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: testKey, Operator: corev1.NodeSelectorOpNotIn, Values: []string{"a"}}}}), testKey, nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := localValues(tt.pv, testDriver, tt.key)
			if !slices.Equal(got, tt.want) && ok || ok != (tt.want != nil) {
				t.Errorf("got %v, %t, want %v", got, ok, tt.want)
			}
		})
	}
}

func testNode(name, label string, change ...func(*corev1.Node)) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: "uid"}}
	if label != "" {
		n.Labels = map[string]string{testKey: label}
	}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	for _, c := range change {
		c(n)
	}
	return n
}

func terminating(n *corev1.Node) { n.DeletionTimestamp = &metav1.Time{Time: testNow} }

func fenced(since time.Time) func(*corev1.Node) {
	return func(n *corev1.Node) {
		n.Annotations = map[string]string{annotationsOf(testDriver).localData: dataLost}
		n.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeOutOfService, TimeAdded: &metav1.Time{Time: since}}}
		n.Status.Conditions[0] = corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionUnknown, LastTransitionTime: metav1.NewTime(since.Add(-time.Hour))}
	}
}

func hostName(name string) func(*corev1.Node) {
	return func(n *corev1.Node) {
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: name}}
	}
}

func TestLocate(t *testing.T) {
	ab := localVolume(affinityTerm(testKey, "a", "b"))
	a := localVolume(affinityTerm(testKey, "a"))
	narrow := localVolume(affinityTerm(testKey, "a"))
	narrow.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions = append(narrow.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions,
		corev1.NodeSelectorRequirement{Key: "disk", Operator: corev1.NodeSelectorOpExists})
	lost := localVolume(affinityTerm(testKey, "a"))
	lost.Annotations = map[string]string{annotationsOf(testDriver).lostNode: "n"}
	for name, tt := range map[string]struct {
		pv       *corev1.PersistentVolume
		nodes    []*corev1.Node
		csiNodes []string
		want     place
	}{
		"nothing is there":                                 {a, nil, nil, placeOrphan},
		"other nodes are there":                            {a, []*corev1.Node{testNode("x", "x")}, []string{"x"}, placeOrphan},
		"the host is there":                                {a, []*corev1.Node{testNode("x", "a")}, nil, placeHealthy},
		"the host is not ready":                            {a, []*corev1.Node{testNode("a", "a", func(n *corev1.Node) { n.Status.Conditions = nil })}, nil, placeHealthy},
		"the host is going":                                {a, []*corev1.Node{testNode("a", "a", terminating)}, []string{"a"}, placeTerminating},
		"one of two hosts is going":                        {ab, []*corev1.Node{testNode("a", "a", terminating), testNode("b", "b")}, nil, placeHealthy},
		"both hosts are going":                             {ab, []*corev1.Node{testNode("a", "a", terminating), testNode("b", "b", terminating)}, nil, placeTerminating},
		"the host is going, and one of its name stays":     {a, []*corev1.Node{testNode("x", "a", terminating), testNode("a", "")}, nil, placeHealthy},
		"the host is going, and a CSINode of its value":    {a, []*corev1.Node{testNode("x", "a", terminating)}, []string{"a"}, placeUnclear},
		"a node of its name without its label":             {a, []*corev1.Node{testNode("a", "")}, nil, placeHealthy},
		"a node of its name with another label":            {a, []*corev1.Node{testNode("a", "z")}, nil, placeHealthy},
		"a node of its host name":                          {a, []*corev1.Node{testNode("x", "", hostName("a"))}, nil, placeHealthy},
		"a node with its label that lacks another":         {narrow, []*corev1.Node{testNode("x", "a")}, nil, placeHealthy},
		"an alias is going":                                {a, []*corev1.Node{testNode("a", "", terminating)}, nil, placeUnclear},
		"only the CSINode is left":                         {a, nil, []string{"a"}, placeUnclear},
		"the lost node is back with another label":         {lost, []*corev1.Node{testNode("n", "z")}, []string{"n"}, placeHealthy},
		"the lost node is back, and going again":           {lost, []*corev1.Node{testNode("n", "z", terminating)}, []string{"n"}, placeUnclear},
		"only the CSINode of the lost node is there":       {lost, nil, []string{"n"}, placeUnclear},
		"another node has the lost node as its label":      {lost, []*corev1.Node{testNode("x", "n")}, nil, placeOrphan},
		"the host is fenced":                               {a, []*corev1.Node{testNode("a", "a", fenced(testNow))}, []string{"a"}, placeFenced},
		"the host is fenced, and has another alias":        {ab, []*corev1.Node{testNode("a", "a", fenced(testNow)), testNode("b", "")}, nil, placeHealthy},
		"the host is fenced, and a second one is not":      {ab, []*corev1.Node{testNode("a", "a", fenced(testNow)), testNode("b", "b")}, nil, placeHealthy},
		"the host is fenced and going":                     {a, []*corev1.Node{testNode("a", "a", fenced(testNow), terminating)}, nil, placeTerminating},
		"an affinity that cannot be understood is no loss": {localVolume(affinityTerm(testKey, "not valid as a label")), nil, nil, placeElsewhere},
	} {
		t.Run(name, func(t *testing.T) {
			values, _ := localValues(tt.pv, testDriver, testKey)
			got := annotationsOf(testDriver).locate(tt.pv, values, testKey, tt.nodes, tt.csiNodes)
			if got.place != tt.want {
				t.Errorf("got %+v, want place %d", got, tt.want)
			}
			slices.Reverse(tt.nodes)
			if again := annotationsOf(testDriver).locate(tt.pv, values, testKey, tt.nodes, tt.csiNodes); again.place != tt.want {
				t.Errorf("in another order %+v", again)
			}
		})
	}
}

func TestFencedSince(t *testing.T) {
	early, late := testNow.Add(-time.Hour), testNow
	for name, tt := range map[string]struct {
		change func(*corev1.Node)
		want   time.Time
	}{
		"all of it":                  {func(*corev1.Node) {}, late},
		"not ready later":            {func(n *corev1.Node) { n.Spec.Taints[0].TimeAdded.Time = early.Add(-time.Hour) }, early},
		"the taint has no time":      {func(n *corev1.Node) { n.Spec.Taints[0].TimeAdded = nil }, early},
		"ready":                      {func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionTrue }, time.Time{}},
		"nothing is known of it":     {func(n *corev1.Node) { n.Status.Conditions = nil }, time.Time{}},
		"another taint":              {func(n *corev1.Node) { n.Spec.Taints[0].Key = corev1.TaintNodeUnreachable }, time.Time{}},
		"its data are not declared":  {func(n *corev1.Node) { n.Annotations = nil }, time.Time{}},
		"its data are said to exist": {func(n *corev1.Node) { n.Annotations[annotationsOf(testDriver).localData] = "there" }, time.Time{}},
	} {
		t.Run(name, func(t *testing.T) {
			n := testNode("a", "a", fenced(late), tt.change)
			if got := annotationsOf(testDriver).fencedSince(n); !got.Equal(tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}
