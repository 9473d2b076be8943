// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
)

// presence is what the API knows about the nodes that a value of the topology key may mean.
type presence string

const (
	present  presence = "present"  // a Node exists and is not being deleted
	deleting presence = "deleting" // every such Node is being deleted
	unclear  presence = "unclear"  // only a CSINode, a Node of another host, or one that is being deleted for another host
	missing  presence = "missing"  // nothing exists
)

// affinityOf returns the terms of the node affinity of pv, which are alternatives, if pv is a volume of driver.
func affinityOf(pv *corev1.PersistentVolume, driver string) []corev1.NodeSelectorTerm {
	if pv.Spec.CSI == nil || pv.Spec.CSI.Driver != driver || pv.Spec.NodeAffinity == nil || pv.Spec.NodeAffinity.Required == nil {
		return nil
	}
	return pv.Spec.NodeAffinity.Required.NodeSelectorTerms
}

// localValues returns the sorted values of key that the node affinity of pv names, if pv is a volume
// of driver that no other node can use: each term must name key.
func localValues(pv *corev1.PersistentVolume, driver, key string) ([]string, bool) {
	var values []string
	for _, term := range affinityOf(pv, driver) {
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
	values = sorted(values)
	return values, key != "" && len(values) > 0 && values[0] != "" // no node can be found by the empty value
}

// mentions reports whether the affinity of pv, a volume of driver, names one of values by any key.
func mentions(pv *corev1.PersistentVolume, driver string, values []string) bool {
	for _, term := range affinityOf(pv, driver) {
		for _, e := range slices.Concat(term.MatchExpressions, term.MatchFields) {
			if slices.ContainsFunc(e.Values, func(v string) bool { return slices.Contains(values, v) }) {
				return true
			}
		}
	}
	return false
}

// sorted returns the distinct elements of all, sorted.
func sorted(all ...[]string) []string {
	names := slices.Concat(all...)
	slices.Sort(names)
	return slices.Compact(names)
}

// hostOf returns the host of a Node: its value of key, or its name if it has none.
func hostOf(node *corev1.Node, key string) string {
	if v := node.Labels[key]; key != "" && v != "" {
		return v
	}
	return node.Name
}

// ownNames returns the name and the host names of a Node.
func ownNames(node *corev1.Node) []string {
	names := []string{node.Name}
	if h := node.Labels[corev1.LabelHostname]; h != "" {
		names = append(names, h)
	}
	for _, a := range node.Status.Addresses {
		if a.Type == corev1.NodeHostName && a.Address != "" {
			names = append(names, a.Address)
		}
	}
	return names
}

// namesOf returns all values by which a volume may mean a Node. d is its CSINode entry, or nil.
func namesOf(node *corev1.Node, d *storagev1.CSINodeDriver, key string) []string {
	names := append(ownNames(node), hostOf(node, key))
	if d != nil && d.NodeID != "" {
		names = append(names, d.NodeID)
	}
	return sorted(names)
}

// unlabelled reports whether a Node lacks the label that its driver registered. Such a node may be
// the node of any volume.
func unlabelled(node *corev1.Node, d *storagev1.CSINodeDriver, key string) bool {
	return d != nil && key != "" && node.Labels[key] == "" && slices.Contains(d.TopologyKeys, key)
}

// foreign reports whether the value of a Node is not one of its own names or its node ID. Then the
// values of key are not those of single nodes, but for example zones.
func foreign(node *corev1.Node, d *storagev1.CSINodeDriver, key string) bool {
	v := node.Labels[key]
	return d != nil && key != "" && v != "" && v != d.NodeID && !slices.Contains(ownNames(node), v)
}

// notSingle returns the problem of a Node that is [foreign].
func notSingle(node *corev1.Node, key string) string {
	return "label " + key + "=" + node.Labels[key] + " of Node " + node.Name + " does not identify a single node"
}

// isReady reports whether the condition Ready of a Node is True.
func isReady(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}
