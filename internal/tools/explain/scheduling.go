// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/topology"
)

// explainScheduling reports the node that the scheduler selected for a claim, and the capacity there.
func explainScheduling(e *explanation) {
	selected := e.claim.Value.Annotations[storagehelpers.AnnSelectedNode]
	switch {
	case e.waitsForPod():
		explainFirstConsumer(e)
	case selected == "":
	case e.node.Missing:
		added := e.failing("node", "Selected node %q not found.", selected)
		if slices.Contains(e.claim.Value.Finalizers, kube.ProvisioningFinalizer) {
			return // see explainIndeterminate
		}
		added.SetNext("The provisioner removes the selected node from the claim on its next attempt; the scheduler selects another one.")
	case e.node.Found:
		e.ok("node", "The scheduler selected node %q.", selected)
		explainRegistration(e, e.driver)
	}
	if e.capacities.Found {
		explainCapacity(e)
	}
}

// explainFirstConsumer reports why no node is selected yet.
func explainFirstConsumer(e *explanation) {
	using := e.podsUsing()
	switch {
	case !e.pods.Found:
		e.waiting("node", "No node is selected yet.").SetNext("The scheduler selects a node for the first pod that uses the claim.")
		return
	case len(using) == 0:
		e.waiting("node", "No pod uses the claim.").SetNext("Create a pod that uses the claim.")
		return
	}
	if direct := slices.IndexFunc(using, func(p *corev1.Pod) bool { return p.Spec.NodeName != "" }); direct >= 0 {
		p := using[direct]
		e.blocked("node", "No node is selected, because pod %q was created with spec.nodeName, or was bound by another scheduler.", p.Name).
			SetNext("Recreate pod %q without spec.nodeName, for example with a nodeSelector; or set annotation %s of the claim to %q.",
				p.Name, storagehelpers.AnnSelectedNode, p.Spec.NodeName)
		return
	}
	for _, p := range using {
		if explainUnscheduled(e, p) {
			return
		}
	}
	e.waiting("node", "No node is selected yet; the claim is used by %s.", podNames(using)).
		SetNext("The scheduler selects a node for pod %q.", using[0].Name)
}

// explainUnscheduled reports why a pod is not scheduled, if the scheduler has recorded that.
func explainUnscheduled(e *explanation, p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		switch {
		case c.Type != corev1.PodScheduled || c.Status != corev1.ConditionFalse:
		case c.Reason == corev1.PodReasonSchedulingGated:
			e.waiting("node", "Pod %q has scheduling gates.", p.Name).
				SetNext("The controllers of the scheduling gates remove them: `kubectl -n %s get pod %s -o yaml`.", p.Namespace, p.Name)
			return true
		default:
			e.failing("node", "Pod %q is unschedulable: %s", p.Name, sentence(c.Message)).
				SetNext("The scheduler retries automatically. Fix what its message names, or change the scheduling constraints of pod %q.",
					p.Name)
			return true
		}
	}
	return false
}

func podNames(pods []*corev1.Pod) string {
	if len(pods) == 1 {
		return "pod " + pods[0].Name
	}
	return "pods " + kube.ShortList(namesOf(pods), 5)
}

// explainRegistration reports whether driver is registered on the node, and whether the node has its topology labels.
func explainRegistration(e *explanation, driver string) {
	node := e.node.Value
	entry := kube.DriverOnNode(e.csiNode.Value, driver)
	switch {
	case !e.csiNode.Found && !e.csiNode.Missing:
		return
	case entry == nil:
		e.failing("node", "Driver %s is not registered on node %q (no entry in CSINode).", driver, node.Name).
			SetNext("Retries automatically. Check that the node plugin of driver %s runs and registers on node %q.", driver, node.Name)
		return
	}
	segment, missing := topology.OfNode(node.Labels, entry.TopologyKeys)
	if len(missing) > 0 {
		e.failing("topology", "Node %q lacks topology labels of driver %s: %s.", node.Name, driver, strings.Join(missing, ", ")).
			SetNext("Label node %q, or restart the node plugin of driver %s there: its registration sets the labels.", node.Name, driver)
		return
	}
	e.ok("node", "Driver %s is registered on node %q: node ID %q, topology segment {%v}.", driver, node.Name, entry.NodeID, segment)
}

// explainCapacity compares the published capacity with the request of the claim.
func explainCapacity(e *explanation) {
	requested := e.claim.Value.Spec.Resources.Requests[corev1.ResourceStorage]
	where := "in the cluster"
	if e.node.Found {
		where = fmt.Sprintf("for node %q", e.node.Value.Name)
	}
	available, n := e.availableCapacity()
	switch {
	case n == 0:
		e.failing("capacity", "No CSIStorageCapacity of StorageClass %q %s: the scheduler assumes no capacity.", e.class.Value.Name, where).
			SetNext("Verify that the capacity role runs for driver %s. A topology segment without capacity may have no object.", e.driver)
	case available.Cmp(requested) < 0:
		e.failing("capacity",
			"Insufficient capacity %s: the claim requests %s, the available capacity for one volume is %s (CSIStorageCapacity "+
				"objects: %d).", where, requested.String(), available.String(), n).
			SetNext("Add storage, delete unused volumes, or recreate the claim with a smaller request.")
	default:
		e.ok("capacity",
			"Sufficient capacity %s: the claim requests %s, the available capacity is %s.", where, requested.String(), available.String())
	}
}

// availableCapacity returns the largest volume that can be provisioned, on the selected node if there is one, and the
// number of CSIStorageCapacities that apply.
func (e *explanation) availableCapacity() (largest resource.Quantity, n int) {
	for _, c := range e.capacities.Value {
		if c.NodeTopology == nil { // accessible from no node
			continue
		}
		if e.node.Found {
			selector, err := metav1.LabelSelectorAsSelector(c.NodeTopology)
			if err != nil || !selector.Matches(labels.Set(e.node.Value.Labels)) {
				continue
			}
		}
		n++
		size := c.MaximumVolumeSize
		if size == nil {
			size = c.Capacity
		}
		if size != nil && size.Cmp(largest) > 0 {
			largest = *size
		}
	}
	return largest, n
}
