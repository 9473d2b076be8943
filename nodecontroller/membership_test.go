package nodecontroller

import (
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
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
		"an empty value names no node":    {localVolume(affinityTerm(testKey, "")), testKey, nil},
		"an empty value beside another":   {localVolume(affinityTerm(testKey, "a", "")), testKey, nil},
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

func testCSINode(name, id string, keys ...string) *storagev1.CSINode {
	return &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: testDriver, NodeID: id, TopologyKeys: keys}}}}
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
		csiNodes []*storagev1.CSINode
		want     place
		former   []string
	}{
		"nothing is there":                                 {a, nil, nil, placeOrphan, nil},
		"other nodes are there":                            {a, []*corev1.Node{testNode("x", "x")}, []*storagev1.CSINode{testCSINode("x", "")}, placeOrphan, nil},
		"the host is there":                                {a, []*corev1.Node{testNode("x", "a")}, nil, placeHealthy, nil},
		"the host is not ready":                            {a, []*corev1.Node{testNode("a", "a", func(n *corev1.Node) { n.Status.Conditions = nil })}, nil, placeHealthy, nil},
		"the host is going":                                {a, []*corev1.Node{testNode("a", "a", terminating)}, []*storagev1.CSINode{testCSINode("a", "")}, placeTerminating, nil},
		"one of two hosts is going":                        {ab, []*corev1.Node{testNode("a", "a", terminating), testNode("b", "b")}, nil, placeHealthy, nil},
		"both hosts are going":                             {ab, []*corev1.Node{testNode("a", "a", terminating), testNode("b", "b", terminating)}, nil, placeTerminating, nil},
		"the host is going, and one of its name stays":     {a, []*corev1.Node{testNode("x", "a", terminating), testNode("a", "")}, nil, placeHealthy, nil},
		"the host is going, and a CSINode of its value":    {a, []*corev1.Node{testNode("x", "a", terminating)}, []*storagev1.CSINode{testCSINode("a", "")}, placeUnclear, nil},
		"a node of its name without its label":             {a, []*corev1.Node{testNode("a", "")}, nil, placeHealthy, nil},
		"a node of its name with another label":            {a, []*corev1.Node{testNode("a", "z")}, nil, placeHealthy, nil},
		"a node of its host name":                          {a, []*corev1.Node{testNode("x", "", hostName("a"))}, nil, placeHealthy, nil},
		"a node with its label that lacks another":         {narrow, []*corev1.Node{testNode("x", "a")}, nil, placeHealthy, nil},
		"an alias is going":                                {a, []*corev1.Node{testNode("a", "", terminating)}, nil, placeUnclear, nil},
		"only the CSINode is left":                         {a, nil, []*storagev1.CSINode{testCSINode("a", "")}, placeUnclear, nil},
		"the lost node is back with another label":         {lost, []*corev1.Node{testNode("n", "z")}, []*storagev1.CSINode{testCSINode("n", "")}, placeHealthy, nil},
		"the lost node is back, and going again":           {lost, []*corev1.Node{testNode("n", "z", terminating)}, []*storagev1.CSINode{testCSINode("n", "")}, placeUnclear, nil},
		"only the CSINode of the lost node is there":       {lost, nil, []*storagev1.CSINode{testCSINode("n", "")}, placeUnclear, nil},
		"another node has the lost node as its label":      {lost, []*corev1.Node{testNode("x", "n")}, nil, placeOrphan, nil},
		"the host is fenced":                               {a, []*corev1.Node{testNode("a", "a", fenced(testNow))}, []*storagev1.CSINode{testCSINode("a", "")}, placeFenced, nil},
		"the host is fenced, and has another alias":        {ab, []*corev1.Node{testNode("a", "a", fenced(testNow)), testNode("b", "")}, nil, placeHealthy, nil},
		"the host is fenced, and a second one is not":      {ab, []*corev1.Node{testNode("a", "a", fenced(testNow)), testNode("b", "b")}, nil, placeHealthy, nil},
		"the host is fenced and going":                     {a, []*corev1.Node{testNode("a", "a", fenced(testNow), terminating)}, nil, placeTerminating, nil},
		"an affinity that cannot be understood is no loss": {localVolume(affinityTerm(testKey, "not valid as a label")), nil, nil, placeElsewhere, nil},
		"a node of its ID, without its label":              {a, []*corev1.Node{testNode("x", "z")}, []*storagev1.CSINode{testCSINode("x", "a")}, placeHealthy, nil},
		"a node of its ID is going":                        {a, []*corev1.Node{testNode("x", "", terminating)}, []*storagev1.CSINode{testCSINode("x", "a")}, placeUnclear, nil},
		"only a CSINode of its ID is there":                {a, nil, []*storagev1.CSINode{testCSINode("x", "a")}, placeUnclear, nil},
		"the host is going, its CSINode has its ID":        {a, []*corev1.Node{testNode("x", "a", terminating)}, []*storagev1.CSINode{testCSINode("x", "a")}, placeTerminating, nil},
		"a node of its host label":                         {a, []*corev1.Node{testNode("x", "", func(n *corev1.Node) { n.Labels = map[string]string{corev1.LabelHostname: "a"} })}, nil, placeHealthy, nil},
		"a node of the driver that lacks its label":        {a, []*corev1.Node{testNode("x", "")}, []*storagev1.CSINode{testCSINode("x", "y", testKey)}, placeUnclear, nil},
		"a node of the driver that needs no label":         {a, []*corev1.Node{testNode("x", "")}, []*storagev1.CSINode{testCSINode("x", "y", "other")}, placeOrphan, nil},
		"a node of the driver with another label":          {a, []*corev1.Node{testNode("x", "z")}, []*storagev1.CSINode{testCSINode("x", "y", testKey)}, placeOrphan, nil},
		"the host is going, another node lacks its label":  {a, []*corev1.Node{testNode("a", "a", terminating), testNode("x", "")}, []*storagev1.CSINode{testCSINode("x", "y", testKey)}, placeTerminating, nil},
		"a node that had its value":                        {a, []*corev1.Node{testNode("x", "z")}, nil, placeHealthy, []string{"x"}},
		"a node that had its value is gone":                {a, []*corev1.Node{testNode("y", "z")}, nil, placeOrphan, []string{"x"}},
	} {
		t.Run(name, func(t *testing.T) {
			values, _ := localValues(tt.pv, testDriver, testKey)
			got := annotationsOf(testDriver).locate(tt.pv, values, testKey, tt.nodes, tt.csiNodes, tt.former)
			if got.place != tt.want {
				t.Errorf("got %+v, want place %d", got, tt.want)
			}
			slices.Reverse(tt.nodes)
			if again := annotationsOf(testDriver).locate(tt.pv, values, testKey, tt.nodes, tt.csiNodes, tt.former); again.place != tt.want {
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
