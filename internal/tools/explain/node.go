// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/finalizers"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

func (g *gatherer) gatherNode(ctx context.Context) error {
	f := g.facts
	name, uid := g.request.Name, g.request.Name // the kubelet writes the name of its node as UID
	g.node(ctx, name)
	switch {
	case f.node.Found:
		uid = string(f.node.Value.UID)
	case !f.node.Missing || f.node.Unserved:
		return g.request.wrap(f.node.Err)
	}
	g.listNodes(ctx)
	f.volumes = apiread.List[*corev1.PersistentVolume](ctx, g.reader, apiread.Query{Topic: "volume", What: "PersistentVolumes"},
		g.Kubernetes.CoreV1().PersistentVolumes().List)
	g.attachments(ctx, func(va *storagev1.VolumeAttachment) bool { return va.Spec.NodeName == name })
	if f.node.Missing || f.node.Value.DeletionTimestamp != nil {
		g.lostNodes(ctx)
	}
	// A deleted node is explained as long as another object names it.
	isNamed := f.csiNode.Found || len(f.attachments.Value) > 0 || len(f.volumesOfNode(name)) > 0 ||
		slices.ContainsFunc(f.lost, func(n lostNode) bool { return n.Node == name || n.Value == name })
	if f.node.Missing && !isNamed {
		return nodeNotFound(f, g.request)
	}
	drivers := f.driversOfNode(name)
	if len(drivers) == 1 {
		f.driver = drivers[0]
	}
	for _, d := range drivers {
		g.lease(ctx, roleNodecontroller, d)
	}
	g.events(ctx, metav1.NamespaceDefault, uid)
	return nil
}

// nodeNotFound returns the error of a node that does not exist, and that no object names as far as it was read. The volumes of
// a deleted node may name only its zone.
func nodeNotFound(f *facts, request Request) error {
	var failures, stranded []string
	for _, unread := range f.unread {
		failures = append(failures, unread.Message)
	}
	if failures != nil {
		return fmt.Errorf("%v: not found, and objects that refer to it may exist: %s Retry, or ask the cluster administrator for "+
			"permission", request, strings.Join(failures, " "))
	}
	for _, pv := range f.volumes.Value {
		if requiredAffinity(pv) != nil && len(f.nodesOf(pv)) == 0 {
			stranded = append(stranded, pv.Name)
		}
	}
	err := request.wrap(f.node.Err)
	if stranded == nil {
		return fmt.Errorf("%w: no object names it", err)
	}
	return fmt.Errorf("%w: no object names it. If the node was deleted, it may be that of a volume whose node affinity no node "+
		"matches (%s): run `storage-controller explain pv %s`", err, kube.ShortList(stranded, 5), stranded[0])
}

// explainNode explains the Node name, which may be deleted as long as other objects reference it.
func explainNode(f *facts, name string) Report {
	drivers := f.driversOfNode(name)
	e := &explanation{facts: f}
	node, state := f.node.Value, "The node exists"
	if !f.node.Found {
		node = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		state = fmt.Sprintf("Node %q not found, but volumes, attachments or a CSINode reference it", name)
	}
	explainPresence(e, name)
	for _, d := range drivers {
		explainDriverOnNode(e, name, d)
	}
	if e.node.Found && (e.csiNode.Missing || e.csiNode.Found && len(e.csiNode.Value.Spec.Drivers) == 0) {
		e.unknown("driver", "No CSI driver is registered on the node.").
			SetNext("If volumes of a driver are needed there, check that its node plugin runs on the node.")
	}
	if node.DeletionTimestamp != nil {
		for _, z := range finalizers.Of(KindNode, node.Finalizers, drivers...) {
			added := e.waiting("deletion", "The node is being deleted; finalizer %s holds it.", z.Name)
			if z.When == "" {
				added.SetNext("Check with the owner of finalizer %s.", z.Name)
			} else {
				added.SetNext("Finalizer %s is removed by %s %s.", z.Name, z.By, z.When)
			}
		}
	}
	explainNodeAttachments(e, name)
	explainLeases(e)
	explainProcess(e, []string{"nodecontroller"}, attempts{nodecleanup.QueueName: func(key string) bool {
		return slices.ContainsFunc(e.lost, func(n lostNode) bool { return (n.Node == name || n.Value == name) && n.driver == key })
	}})
	return e.report(KindNode, node, state, "Nothing to do: volumes can be attached to the node.", drivers...)
}

// explainPresence reports whether the node exists and is ready, and its taints.
func explainPresence(e *explanation, name string) {
	if !e.node.Found {
		e.failing("node", "Node %q not found.", name).
			SetNext("Bring the node back under the same name, or clean up the volumes that were accessible only from it.")
		return
	}
	for _, c := range e.node.Value.Status.Conditions {
		switch {
		case c.Type != corev1.NodeReady:
		case c.Status == corev1.ConditionTrue:
			e.ok("node", "The node is Ready.")
		default:
			added := e.failing("node", "The node has not been Ready for %s: %s", e.age(c.LastTransitionTime.Time), sentence(c.Message))
			if e.node.Value.DeletionTimestamp == nil {
				added.SetNext("Bring the node back, or delete it if it does not return: until then, the nodecontroller only reports.")
			}
		}
	}
	for _, t := range e.node.Value.Spec.Taints {
		switch t.Key {
		case corev1.TaintNodeOutOfService:
			e.failing("taint", "Taint %s: Kubernetes deletes the pods of the node and detaches its volumes immediately. "+
				"The taint does not declare the disks lost.", t.ToString()).
				SetNext("Remove the taint when the node is back, or delete the node.")
		case corev1.TaintNodeUnreachable, corev1.TaintNodeNotReady:
			e.waiting("taint", "Taint %s.", t.ToString())
		case corev1.TaintNodeUnschedulable:
			e.ok("taint", "The node is cordoned (taint %s): new pods are not scheduled to it.", t.ToString())
		default:
			e.ok("taint", "Taint %s.", t.ToString())
		}
	}
}

// explainDriverOnNode reports the registration of a driver, its volumes on the node and their clean-up.
func explainDriverOnNode(e *explanation, name, driver string) {
	if e.node.Found {
		explainRegistration(e, driver)
		if entry := kube.DriverOnNode(e.csiNode.Value, driver); entry != nil && entry.Allocatable != nil && entry.Allocatable.Count != nil {
			e.ok("driver",
				"Driver %s: at most %s can be attached to the node.", driver, finding.Plural(int(*entry.Allocatable.Count), "volume"))
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
		e.ok("volume", "%s of driver %s accessible only from this node: %s.", finding.Plural(len(names), "volume"), driver,
			kube.ShortList(names, 5))
	}
	if e.node.Found {
		explainOptOut(e, driver, KindNode, e.node.Value)
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
		e.ok("cleanup", "Cleanup for driver %s is disabled: %s.", driver, refusal)
	}
}

// explainNodeAttachments reports the VolumeAttachments of the node.
func explainNodeAttachments(e *explanation, name string) {
	attached := 0
	for _, va := range e.attachments.Value {
		if va.Status.Attached {
			attached++
		}
	}
	failed := explainAttachmentErrors(e)
	n := len(e.attachments.Value)
	if n == 0 {
		return
	}
	const message = "%s for node %q: %d attached, %d with errors."
	if e.node.Found {
		e.ok("attachment", message, finding.Plural(n, "VolumeAttachment"), name, attached, failed)
		return
	}
	e.waiting("attachment", message, finding.Plural(n, "VolumeAttachment"), name, attached, failed).SetNext(
		"kube-controller-manager deletes the VolumeAttachments after the pods of the node; the attacher then detaches the volumes.")
}

// maxErrors bounds how many different errors of the attachments of a node are reported.
const maxErrors = 10

// explainAttachmentErrors reports the different errors of the attachments of a node. It returns the number of
// attachments with an error.
func explainAttachmentErrors(e *explanation) int {
	type key struct{ operation, message string }
	attachments, newest, order := map[key][]string{}, map[key]failure{}, []key{}
	failed := 0
	for _, va := range e.attachments.Value {
		err := lastFailure(va)
		if err == nil {
			continue
		}
		failed++
		k := key{operation(va, "detached", "attached"), sentence(err.Message)}
		if attachments[k] == nil {
			order = append(order, k)
		}
		attachments[k] = append(attachments[k], va.Name)
		if err.Time.After(newest[k].at) || newest[k].text == "" {
			newest[k] = failureOfStatus(err)
		}
	}
	others := failed
	for _, k := range order[:min(len(order), maxErrors)] {
		names := attachments[k]
		others -= len(names)
		more := ""
		if len(names) > 1 {
			more = fmt.Sprintf(" and %d more", len(names)-1)
		}
		e.failed("attachment", newest[k], "VolumeAttachment %s%s cannot be %s, last attempt", names[0], more, k.operation).
			SetNext("Retries automatically. Run `storage-controller explain va %s`.", names[0])
	}
	if others > 0 {
		e.failing("attachment",
			"%s with other errors.", finding.Plural(others, "more VolumeAttachment")).SetNext("Run `kubectl get volumeattachments -o yaml`.")
	}
	return failed
}
