// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

// lostNode is a record of the nodecontroller about a lost node.
type lostNode struct {
	nodecleanup.LostNode
	driver, namespace string // the namespace of the nodecontroller
}

// name returns the name of the Node as far as it is known.
func (n lostNode) name() string {
	if n.Node != "" {
		return n.Node
	}
	return n.Value
}

// lostNodes reads the records of all drivers and namespaces.
func (g *gatherer) lostNodes(ctx context.Context) {
	request := func(ctx context.Context, o metav1.ListOptions) (*corev1.ConfigMapList, error) {
		o.LabelSelector = nodecleanup.LabelDriver
		return g.Kubernetes.CoreV1().ConfigMaps(metav1.NamespaceAll).List(ctx, o)
	}
	for _, cm := range list[*corev1.ConfigMap](ctx, g.facts, "cleanup", "ConfigMaps in all namespaces", request).value {
		driver := cm.Labels[nodecleanup.LabelDriver]
		if cm.Name != nodecleanup.ConfigMapName(driver) {
			continue
		}
		for _, n := range nodecleanup.ParseLostNodes(cm) {
			g.facts.lost = append(g.facts.lost, lostNode{n, driver, cm.Namespace})
		}
	}
}

// lostNodesOf returns the records of the nodes of pv.
func (f *facts) lostNodesOf(pv *corev1.PersistentVolume) []lostNode {
	return slices.DeleteFunc(slices.Clone(f.lost), func(n lostNode) bool {
		return n.driver != migration.DriverOfVolume(pv) || requiredAffinity(pv) == nil || !affinityNames(pv, n.Value)
	})
}

// explainLostNode reports the record of a lost node.
func explainLostNode(e *explanation, n lostNode) {
	planned := ""
	if n.Planned {
		planned = " The removal was planned: the node was drained before."
	}
	switch {
	case n.OptedOut:
		e.add(Fine, "cleanup", "Node %s of driver %s opted out of the cleanup before it was deleted: nothing is deleted.",
			n.name(), n.driver)
	case n.Since.IsZero():
		e.add(Waiting, "cleanup", "Node %s of driver %s is being deleted, or its deletion is not confirmed yet.%s",
			n.name(), n.driver, planned).next("The nodecontroller cleans up when the Node and its CSINode are deleted.")
	case n.Held != "":
		e.add(Blocked, "cleanup", "Node %s of driver %s is lost for %s. Its cleanup is held by the %s: too many nodes are lost.",
			n.name(), n.driver, e.age(n.Since), n.Held).
			next("Verify that the node does not return, then run `storage-controller nodecontroller approve --driver-name=%s "+
				"--namespace=%s "+
				"%s --yes`.", n.driver, n.namespace, n.name())
	case !n.Approved.IsZero():
		e.add(Waiting, "cleanup", "Node %s of driver %s is lost for %s; its cleanup was approved %s ago.",
			n.name(), n.driver, e.age(n.Since), e.age(n.Approved)).next("The nodecontroller deletes what its mode and the opt-in allow.")
	default:
		e.add(Waiting, "cleanup", "Node %s of driver %s is lost for %s.%s", n.name(), n.driver, e.age(n.Since), planned).
			next("The nodecontroller cleans up after --node-missing-grace, if its mode and the opt-in allow that, unless the node returns.")
	}
}
