// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/topolvm"
)

// logicalFact is the LogicalVolume of a volume or a snapshot of TopoLVM.
type logicalFact struct {
	name   string // that the driver gives it
	handle string // its ID at the driver; "" is not known
	lv     apiread.Result[*topolvm.LogicalVolume]
	node   apiread.Result[*corev1.Node] // of lv
}

// logicalVolume reads the LogicalVolume of a volume or snapshot of TopoLVM, and its Node. name is the one in the CSI request, if it is
// known: a PersistentVolume that a user has created may have another one. handle is "" before CreateVolume has succeeded.
func (g *gatherer) logicalVolume(ctx context.Context, name, handle string) {
	f := g.facts
	if !topolvm.IsDriver(f.driver) {
		return
	}
	l := &logicalFact{name: topolvm.ObjectName(name), handle: handle}
	f.logical = l
	client := g.Dynamic.Resource(topolvm.Resource(f.driver))
	l.lv = get(ctx, g, "volume", Request{Kind: "LogicalVolume", Name: l.name}, apiread.Typed[topolvm.LogicalVolume](client))
	isOther := l.lv.Missing && !l.lv.Unserved || l.lv.Found && !l.lv.Value.HasID(handle)
	if handle != "" && isOther {
		l.lv = withID(apiread.List[*unstructured.Unstructured](ctx, g.reader, apiread.Query{Topic: "volume", What: "LogicalVolumes"},
			client.List), handle)
	}
	if l.lv.Found {
		l.node = g.nodeOf(ctx, l.lv.Value.Spec.NodeName)
	}
}

// withID returns the LogicalVolume with an ID. It is missing only if all others are readable.
func withID(all apiread.Result[[]*unstructured.Unstructured], id string) apiread.Result[*topolvm.LogicalVolume] {
	missing := all.Found
	for _, object := range all.Value {
		lv, err := apiread.Decode[topolvm.LogicalVolume](object.Object)
		switch {
		case err != nil:
			missing = false
		case lv.HasID(id):
			return apiread.Found(lv)
		}
	}
	return apiread.Result[*topolvm.LogicalVolume]{Missing: missing}
}

// nodeOf reads the Node that a LogicalVolume names: by its name, which topolvm-node uses as the value of its label, or else by the label.
func (g *gatherer) nodeOf(ctx context.Context, value string) apiread.Result[*corev1.Node] {
	nodes := g.Kubernetes.CoreV1().Nodes()
	node := get(ctx, g, "node", Request{Kind: KindNode, Name: value}, nodes.Get)
	if !node.Missing {
		return node
	}
	selector := labels.Set{topolvm.TopologyKey(g.facts.driver): value}.String()
	query := apiread.Query{Topic: "node", What: "Nodes with label " + selector, Labels: selector}
	labeled := apiread.List[*corev1.Node](ctx, g.reader, query, nodes.List)
	if len(labeled.Value) > 0 {
		return apiread.Found(labeled.Value[0])
	}
	return apiread.Result[*corev1.Node]{Missing: labeled.Found}
}

// explainLogicalVolume reports what topolvm-node does, or has to do, for the volume or the snapshot.
func explainLogicalVolume(e *explanation) {
	l := e.logical
	switch {
	case l == nil:
	case l.lv.Unserved:
		e.blocked("volume", "The cluster does not serve LogicalVolumes of %s.", e.driver).
			SetNext("Install the CustomResourceDefinition of TopoLVM.")
	case l.lv.Missing && l.handle != "":
		explainLostVolume(e)
	case l.lv.Missing && e.awaitsVolume():
		e.waiting("volume", "LogicalVolume %q does not exist: it was not requested yet, or it was deleted after a failure.", l.name)
	case l.lv.Found:
		explainWork(e)
	}
}

// awaitsVolume reports whether the driver has been asked, or is being asked, for the volume of the claim or for the snapshot.
func (f *facts) awaitsVolume() bool {
	return f.snapshot != nil || f.claim.Found && f.claim.Value.Spec.VolumeName == "" && !f.waitsForPod()
}

// explainLostVolume reports that the ID of a volume or snapshot has no LogicalVolume.
func explainLostVolume(e *explanation) {
	pv, isDeleted := e.volume.Value, false
	switch {
	case e.snapshot != nil:
		isDeleted = e.snapshot.snapshot.Value.DeletionTimestamp != nil
	case e.volume.Found:
		isDeleted = pv.DeletionTimestamp != nil || pv.Status.Phase == corev1.VolumeReleased &&
			pv.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete
	}
	if isDeleted {
		e.ok("volume", "LogicalVolume with ID %s does not exist any more.", e.logical.handle)
		return
	}
	e.blocked("volume", "No LogicalVolume has the ID %s: it was deleted, and the driver cannot use the LVM volume.", e.logical.handle).
		SetNext("Recreate the object, and restore its data from a backup.")
}

// explainWork reports an existing LogicalVolume, and the Node on which topolvm-node has to work for it.
func explainWork(e *explanation) {
	lv := e.logical.lv.Value
	size := fmt.Sprintf("requested size %s, current size %s", lv.Spec.Size, lv.Status.CurrentSize)
	node, code, message := lv.Spec.NodeName, "", ""
	var state, work string
	switch {
	case lv.IsIgnored(e.driver):
		e.waiting("volume", "The node cleanup deletes %s, and topolvm-node ignores it.", lv.Describe()).
			SetNext("The node cleanup removes the finalizer of the LogicalVolume.")
		return
	case lv.DeletionTimestamp != nil:
		state = fmt.Sprintf("has been Terminating for %s", e.age(lv.DeletionTimestamp.Time))
		work = "removes the LVM volume and the finalizer of the LogicalVolume"
	case lv.Status.VolumeID == "" || lv.Status.CurrentSize == 0:
		state, work = "has no LVM volume yet", "creates the LVM volume"
		code, message = lv.Failure()
	case lv.Spec.Size > lv.Status.CurrentSize:
		state, work = "is being expanded", "expands the LVM volume"
		code, message = lv.Failure()
	default:
		e.ok("volume", "%s exists: %s.", lv.Describe(), size)
		return
	}
	explainNodeOfWork(e)
	if code == "" {
		e.waiting("volume", "%s %s: %s.", lv.Describe(), state, size).SetNext("topolvm-node on node %q %s.", node, work)
		return
	}
	again := "Retries automatically."
	if lv.Status.VolumeID == "" {
		again = "The driver deletes the LogicalVolume, and creates it again."
	}
	f := failure{text: message, code: code, by: "topolvm-node"}
	e.failed("volume", f, "%s %s (%s). topolvm-node failed with code %s", lv.Describe(), state, size, code).
		SetNext("%s Fix the error shown above; the logs of topolvm-node and lvmd on node %q have the details.", again, node)
}

// explainNodeOfWork reports whether topolvm-node can work for the LogicalVolume.
func explainNodeOfWork(e *explanation) {
	l, lv := e.logical, e.logical.lv.Value
	value, node := lv.Spec.NodeName, l.node.Value
	switch {
	case l.node.Missing:
		e.failing("node", "Node %q of the LogicalVolume does not exist.", value).
			SetNext("Bring the node back, or have its LogicalVolumes deleted by the node cleanup: see docs/nodecontroller.md.")
		return
	case !l.node.Found:
		return
	case node.DeletionTimestamp != nil:
		e.waiting("node", "Node %q of the LogicalVolume is being deleted.", node.Name).
			SetNext("The node cleanup deletes the LogicalVolumes of node %q.", node.Name)
		return
	case !topolvm.Ready(node):
		e.failing("node", "The LogicalVolume waits for topolvm-node on node %q, which is not Ready.", node.Name).
			SetNext("Bring node %q back, or delete its Node object if it does not return. Run `storage-controller explain node %[1]s`.",
				node.Name)
		return
	}
	free, reported := topolvm.Available(e.driver, node, lv.Spec.DeviceClass)
	switch {
	case reported:
		e.ok("node", "Node %q of the LogicalVolume is Ready, and has %s available in its device class.", node.Name, free)
	case lv.DeletionTimestamp == nil:
		e.failing("node", "Node %q of the LogicalVolume reports no capacity of its device class.", node.Name).
			SetNext("Check that topolvm-node runs on node %q, and that its lvmd has the device class.", node.Name)
	}
}
