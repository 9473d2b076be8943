// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

// explainNode explains the Node name, which may be deleted as long as other objects reference it.
func explainNode(f *facts, name string) Report {
	drivers := f.driversOfNode(name)
	e := &explanation{facts: f}
	node, state := f.node.value, "The node exists"
	if !f.node.found {
		node = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		state = fmt.Sprintf("Node %q not found, but volumes, attachments or a CSINode reference it", name)
	}
	explainPresence(e, name)
	for _, d := range drivers {
		explainDriverOnNode(e, name, d)
	}
	finalizers := finalizersOf(KindNode, node.Finalizers, drivers...)
	if node.DeletionTimestamp != nil {
		for _, z := range finalizers {
			finding := e.add(Waiting, "deletion", "The node is being deleted; finalizer %s holds it.", z.Name)
			if z.When == "" {
				finding.next("Check with the owner of finalizer %s.", z.Name)
			} else {
				finding.next("Finalizer %s is removed by %s %s.", z.Name, z.By, z.When)
			}
		}
	}
	explainNodeAttachments(e, name)
	explainLeases(e)
	explainProcess(e, []string{"nodecontroller"}, attempts{nodecleanup.QueueName: func(key string) bool {
		return key == name || slices.ContainsFunc(e.lost, func(n lostNode) bool { return n.Node == name && n.Value == key })
	}})
	return e.report(KindNode, node, state, "Nothing to do: volumes can be attached to the node.", drivers...)
}

// explainPresence reports whether the node exists and is ready, and its taints.
func explainPresence(e *explanation, name string) {
	if !e.node.found {
		e.add(Failing, "node", "Node %q not found.", name).
			next("Bring the node back under the same name, or clean up the volumes that were accessible only from it.")
		return
	}
	for _, c := range e.node.value.Status.Conditions {
		switch {
		case c.Type != corev1.NodeReady:
		case c.Status == corev1.ConditionTrue:
			e.add(Fine, "node", "The node is Ready.")
		default:
			e.add(Failing, "node", "The node has not been Ready for %s: %s", e.age(c.LastTransitionTime.Time), sentence(c.Message)).
				next("Bring the node back, or delete it if it does not return. While the Node exists, the nodecontroller only reports.")
		}
	}
	for _, t := range e.node.value.Spec.Taints {
		switch t.Key {
		case corev1.TaintNodeOutOfService:
			e.add(Failing, "taint", "Taint %s: Kubernetes deletes the pods of the node and detaches its volumes immediately. "+
				"The taint does not declare the disks lost.", t.ToString()).
				next("Remove the taint when the node is back, or delete the node.")
		case corev1.TaintNodeUnreachable, corev1.TaintNodeNotReady:
			e.add(Waiting, "taint", "Taint %s.", t.ToString())
		case corev1.TaintNodeUnschedulable:
			e.add(Fine, "taint", "The node is cordoned (taint %s): new pods are not scheduled to it.", t.ToString())
		default:
			e.add(Fine, "taint", "Taint %s.", t.ToString())
		}
	}
}

// explainDriverOnNode reports the registration of a driver, its volumes on the node and their clean-up.
func explainDriverOnNode(e *explanation, name, driver string) {
	if e.node.found {
		explainRegistration(e, driver)
		if entry := kube.DriverOnNode(e.csiNode.value, driver); entry != nil && entry.Allocatable != nil && entry.Allocatable.Count != nil {
			e.add(Fine, "driver",
				"Driver %s: at most %s can be attached to the node.", driver, count(int(*entry.Allocatable.Count), "volume"))
		}
	}
	var names []string
	for _, pv := range e.volumesOfNode(name) {
		if migration.DriverOfVolume(pv) == driver {
			names = append(names, pv.Name)
			explainOptOut(e, driver, KindVolume, pv)
		}
	}
	if len(names) > 0 {
		e.add(Fine, "volume", "%s of driver %s accessible only from this node: %s.", count(len(names), "volume"), driver,
			kube.ShortList(names, 5))
	}
	if e.node.found {
		explainOptOut(e, driver, KindNode, e.node.value)
	}
	for _, n := range e.lost {
		if n.driver == driver && (n.Node == name || n.Value == name) {
			explainLostNode(e, n)
		}
	}
}

// explainCleanUp reports the opt-out of a volume and the records of its lost nodes.
func explainCleanUp(e *explanation, pv *corev1.PersistentVolume) {
	driver := migration.DriverOfVolume(pv)
	if driver == "" {
		return
	}
	explainOptOut(e, driver, KindVolume, pv)
	for _, n := range e.lostNodesOf(pv) {
		explainLostNode(e, n)
	}
}

// explainOptOut reports that an object opts out of the cleanup.
func explainOptOut(e *explanation, driver, kind string, obj metav1.Object) {
	if _, refusal := nodecleanup.Consent(nodecleanup.CleanupAnnotation(driver), kind, obj); refusal != "" {
		e.add(Fine, "cleanup", "Cleanup for driver %s is disabled: %s.", driver, refusal)
	}
}

// explainNodeAttachments reports the VolumeAttachments of the node.
func explainNodeAttachments(e *explanation, name string) {
	attached := 0
	for _, va := range e.attachments.value {
		if va.Status.Attached {
			attached++
		}
	}
	failed := explainAttachmentErrors(e)
	n := len(e.attachments.value)
	if n == 0 {
		return
	}
	const message = "%s for node %q: %d attached, %d with errors."
	if e.node.found {
		e.add(Fine, "attachment", message, count(n, "VolumeAttachment"), name, attached, failed)
		return
	}
	e.add(Waiting, "attachment", message, count(n, "VolumeAttachment"), name, attached, failed).
		next(
			"kube-controller-manager deletes the VolumeAttachments after the pods of the node; the attacher then detaches the volumes.")
}

// maxErrors bounds how many different errors of the attachments of a node are reported.
const maxErrors = 10

// explainAttachmentErrors reports the different errors of the attachments of a node. It returns the number of
// attachments with an error.
func explainAttachmentErrors(e *explanation) int {
	type failure struct{ operation, message string }
	attachments, last, order := map[failure][]string{}, map[failure]time.Time{}, []failure{}
	failed := 0
	for _, va := range e.attachments.value {
		err := lastFailure(va)
		if err == nil {
			continue
		}
		failed++
		f := failure{operation(va, "detached", "attached"), sentence(err.Message)}
		if attachments[f] == nil {
			order = append(order, f)
		}
		attachments[f] = append(attachments[f], va.Name)
		if err.Time.After(last[f]) {
			last[f] = err.Time.Time
		}
	}
	others := failed
	for _, f := range order[:min(len(order), maxErrors)] {
		names := attachments[f]
		others -= len(names)
		more := ""
		if len(names) > 1 {
			more = fmt.Sprintf(" and %d more", len(names)-1)
		}
		e.add(Failing, "attachment",
			"VolumeAttachment %s%s cannot be %s (%s ago): %s", names[0], more, f.operation, e.age(last[f]), f.message).
			next("Retries automatically. Run `storage-controller explain va %s`.", names[0])
	}
	if others > 0 {
		e.add(Failing, "attachment",
			"%s with other errors.", count(others, "more VolumeAttachment")).next("Run `kubectl get volumeattachments -o yaml`.")
	}
	return failed
}
