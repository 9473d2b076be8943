package nodecontroller

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
)

// place is where a volume is, as far as its nodes tell.
type place int

const (
	placeElsewhere   place = iota // not bound to nodes by the key of the driver: never touched
	placeHealthy                  // some node that can have it is there and stays
	placeFenced                   // its only node is there, fenced, and its data declared lost
	placeTerminating              // every node that has it is being deleted
	placeUnclear                  // something that may be its node is there or not gone yet
	placeOrphan                   // nothing that may be its node is there
)

// membership is which nodes a volume belongs to.
type membership struct {
	place   place
	hosts   []string // nodes whose labels satisfy its affinity
	aliases []string // what else may be one of its nodes: by its name, label, host name or ID
	// recorded is that only the name that is written on the volume tells of what stays, or
	// what this process has seen of its node.
	recorded bool
	// guessed is that nothing tells of a node of it but that another one lacks its label.
	guessed bool
	// unwritten is the names of recorded nodes that are not written there yet.
	unwritten []string
	// fencedSince is from when on the node of a fenced volume is taken for lost.
	fencedSince time.Time
}

// localValues is the values of key that the node affinity of pv names, when it is a
// volume of driver that can be used nowhere else. The terms of an affinity are
// alternatives: one without key means that the volume may be usable on other nodes.
func localValues(pv *corev1.PersistentVolume, driver, key string) ([]string, bool) {
	if key == "" || pv.Spec.CSI == nil || pv.Spec.CSI.Driver != driver || pv.Spec.NodeAffinity == nil || pv.Spec.NodeAffinity.Required == nil {
		return nil, false
	}
	var values []string
	for _, term := range pv.Spec.NodeAffinity.Required.NodeSelectorTerms {
		bound := false
		for _, e := range term.MatchExpressions {
			if e.Key == key && e.Operator == corev1.NodeSelectorOpIn && len(e.Values) > 0 {
				values, bound = append(values, e.Values...), true
			}
		}
		if !bound {
			return nil, false
		}
	}
	slices.Sort(values)
	values = slices.Compact(values)
	if slices.Contains(values, "") { // nothing is called that: nobody could tell that its node is gone
		return nil, false
	}
	return values, len(values) > 0
}

// mentioned is all values that the affinity of pv names, whatever their keys; nil for a
// volume of another driver.
func mentioned(pv *corev1.PersistentVolume, driver string) []string {
	if pv.Spec.CSI == nil || pv.Spec.CSI.Driver != driver || pv.Spec.NodeAffinity == nil || pv.Spec.NodeAffinity.Required == nil {
		return nil
	}
	var values []string
	for _, term := range pv.Spec.NodeAffinity.Required.NodeSelectorTerms {
		for _, e := range term.MatchExpressions {
			if e.Operator == corev1.NodeSelectorOpIn {
				values = append(values, e.Values...)
			}
		}
	}
	slices.Sort(values)
	return slices.Compact(values)
}

// namesOfNode is everything by which an affinity with key may mean a node, but for the ID
// that the driver has for it: its name, its label, and its host name, which some drivers
// take for the label.
func namesOfNode(node *corev1.Node, key string) []string {
	names := slices.DeleteFunc(append(ownNames(node), node.Labels[key]), func(n string) bool { return n == "" })
	slices.Sort(names)
	return slices.Compact(names)
}

// registration is what a CSINode says of a driver.
func registration(n *storagev1.CSINode, driver string) (found storagev1.CSINodeDriver, ok bool) {
	for _, d := range n.Spec.Drivers {
		if d.Name == driver {
			found, ok = d, true
		}
	}
	return found, ok
}

// unlabelled tells whether a node should have a value of key, since its driver reports that,
// and has none: it may be the node of any volume whose value no other node has.
func unlabelled(value, key string, d storagev1.CSINodeDriver) bool {
	return value == "" && key != "" && slices.Contains(d.TopologyKeys, key)
}

// locate finds the place of pv, whose local values are values. nodes is at least all nodes,
// and csiNodes all CSINodes, that have one of values as a name; what does not belong to pv
// among them is left out. A node that came back without its label, or only as a CSINode so
// far, counts as an alias. So does one that came back under the name that is written on pv,
// with whatever label: nobody can tell whether its disks are the same. former is the names
// of further such nodes, which had one of values once.
func (a annotations) locate(pv *corev1.PersistentVolume, values []string, key string, nodes []*corev1.Node, csiNodes []*storagev1.CSINode, former []string) membership {
	var m membership
	selector, err := nodeaffinity.NewNodeSelector(pv.Spec.NodeAffinity.Required)
	if err != nil {
		return m // nobody knows what it means
	}
	drivers := map[string]storagev1.CSINodeDriver{}
	for _, n := range csiNodes {
		if d, ok := registration(n, pv.Spec.CSI.Driver); ok {
			drivers[n.Name] = d
		}
	}
	means := func(names ...string) bool {
		return slices.ContainsFunc(names, func(n string) bool { return slices.Contains(values, n) })
	}
	lost := mergeNames(a.lostNodes(pv), former)
	staying, leaving, recorded := 0, 0, 0
	var host *corev1.Node
	var mayBe []string
	for _, node := range nodes {
		switch {
		case selector.Match(node):
			m.hosts, host = append(m.hosts, node.Name), node
		case means(drivers[node.Name].NodeID), means(namesOfNode(node, key)...):
			m.aliases = append(m.aliases, node.Name)
		case slices.Contains(lost, node.Name):
			m.aliases = append(m.aliases, node.Name)
			if node.DeletionTimestamp == nil {
				recorded++
				if !slices.Contains(a.lostNodes(pv), node.Name) {
					m.unwritten = append(m.unwritten, node.Name)
				}
			}
		case unlabelled(node.Labels[key], key, drivers[node.Name]):
			mayBe = append(mayBe, node.Name)
			continue
		default:
			continue
		}
		if node.DeletionTimestamp == nil {
			staying++
		} else {
			leaving++
		}
	}
	for _, n := range csiNodes {
		if (means(n.Name, drivers[n.Name].NodeID) || slices.Contains(lost, n.Name)) && !slices.Contains(m.hosts, n.Name) && !slices.Contains(m.aliases, n.Name) {
			m.aliases = append(m.aliases, n.Name)
		}
	}
	if len(m.hosts) == 0 { // of a volume whose node is known, no other one can be it
		m.guessed = len(m.aliases) == 0 && len(mayBe) > 0
		m.aliases = append(m.aliases, mayBe...)
	}
	if m.recorded = recorded > 0 && recorded == staying; !m.recorded {
		m.unwritten = nil
	}
	m.place = placeOf(len(m.hosts), len(m.aliases), staying, leaving)
	if m.place == placeHealthy && len(m.hosts) == 1 && len(m.aliases) == 0 && staying == 1 && !a.fencedSince(host).IsZero() {
		m.place, m.fencedSince = placeFenced, a.fencedSince(host)
	}
	return m
}

// placeOf is the place of a volume that has so many hosts and aliases, of which so many
// stay and leave; a CSINode alone does neither.
func placeOf(hosts, aliases, staying, leaving int) place {
	switch {
	case staying > 0:
		return placeHealthy
	case hosts > 0 && aliases == 0:
		return placeTerminating
	case leaving > 0 || aliases > 0:
		return placeUnclear
	}
	return placeOrphan
}

// fencedSince is since when node is out of service, not ready and declared by the
// administrator to have lost its data; zero when it is not all of that. That a node is
// out of service alone says that nothing runs there, not that its disks are gone.
func (a annotations) fencedSince(node *corev1.Node) time.Time {
	if node.Annotations[a.localData] != dataLost {
		return time.Time{}
	}
	t := slices.IndexFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeOutOfService })
	c := slices.IndexFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeReady })
	if t < 0 || c < 0 || node.Status.Conditions[c].Status == corev1.ConditionTrue {
		return time.Time{}
	}
	since := node.Status.Conditions[c].LastTransitionTime.Time
	if added := node.Spec.Taints[t].TimeAdded; added != nil && added.After(since) {
		since = added.Time
	}
	return since
}

func isReady(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}
