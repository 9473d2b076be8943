// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

// lostNode is a record of the nodecontroller about a lost node.
type lostNode struct {
	nodecleanup.LostNode
	driver, namespace string           // the namespace of the nodecontroller
	mode              nodecleanup.Mode // of the leader that wrote the record last; "" is unknown
}

// lostNodes reads the records of all drivers and namespaces.
func (g *gatherer) lostNodes(ctx context.Context) {
	query := apiread.Query{Topic: "cleanup", What: "ConfigMaps in all namespaces", Labels: nodecleanup.LabelDriver}
	all := g.Kubernetes.CoreV1().ConfigMaps(metav1.NamespaceAll)
	for _, cm := range apiread.List[*corev1.ConfigMap](ctx, g.reader, query, all.List).Value {
		driver := cm.Labels[nodecleanup.LabelDriver]
		if cm.Name != nodecleanup.ConfigMapName(driver) {
			continue
		}
		for _, n := range nodecleanup.ParseLostNodes(cm) {
			mode := nodecleanup.Mode(cm.Annotations[nodecleanup.AnnotationMode])
			g.facts.lost = append(g.facts.lost, lostNode{n, driver, cm.Namespace, mode})
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
	planned, lost := "", "is lost"
	if n.Planned {
		planned = " The removal was planned: the node was drained before."
	}
	if !n.Since.IsZero() {
		lost = "has been lost for " + e.age(n.Since)
	}
	switch n.State() {
	case nodecleanup.RecordUnparsable:
		e.blocked("cleanup", "The record of node %s of driver %s cannot be parsed: nothing is deleted, and further lost nodes are "+
			"held.", n.Name(), n.driver).
			SetNext("Correct or remove the record in ConfigMap %s/%s.", n.namespace, nodecleanup.ConfigMapName(n.driver))
	case nodecleanup.RecordOptedOut, nodecleanup.RecordOptedOutHeld:
		held := ""
		if n.Held != "" {
			held = " Without the opt-out in its record, its cleanup would be held by the " + n.Held + "."
		}
		e.ok("cleanup", "Node %s of driver %s opted out of the cleanup: nothing is deleted.%s", n.Name(), n.driver, held)
	case nodecleanup.RecordHeld:
		e.blocked("cleanup", "Node %s of driver %s %s. Its cleanup is held by the %s: too many nodes are lost.",
			n.Name(), n.driver, lost, n.Held).
			SetNext("Verify that the node does not return, then run `storage-controller nodecontroller approve --driver-name=%s "+
				"--namespace=%s "+
				"%s --yes`.", n.driver, n.namespace, n.Name())
	case nodecleanup.RecordReturned:
		e.ok("cleanup", "Node %s of driver %s exists again, after a cleanup %s ago.", n.Name(), n.driver, e.age(n.Acted))
	default:
		severity := finding.Waiting
		if n.mode == nodecleanup.ModeOff || n.mode == nodecleanup.ModeReport {
			severity = finding.Blocked
		}
		if n.State() == nodecleanup.RecordDeleting {
			lost = "is being deleted, or its deletion is not confirmed yet"
		}
		added := e.add(severity, "cleanup", "Node %s of driver %s %s.%s", n.Name(), n.driver, lost, planned)
		if n.Next != "" {
			added.SetNext("%s.", n.Next)
		}
	}
}
