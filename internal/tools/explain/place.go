package explain

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/topology"
)

// aboutPlace is where the volume of a claim is to be, and whether it can be there.
func (f *facts) aboutPlace() findings {
	var l findings
	selected := f.claim.value.Annotations[storagehelpers.AnnSelectedNode]
	switch {
	case selected == "" && f.class.found && isLate(f.class.value):
		f.aboutFirstConsumer(&l)
	case selected == "":
	case f.node.why != "":
		l.add(Unknown, "node", "", "The selected node is %q: %s.", selected, f.node.why)
	case f.node.absent():
		l.add(Failing, "node", "The provisioner has the scheduler select another node with the next attempt.",
			"The selected node %q does not exist any more.", selected)
	default:
		l.add(Fine, "node", "", "The scheduler has selected node %q.", selected)
		f.aboutEntry(&l, Failing, "The provisioner asks again until then, or has the scheduler select another node; if it stays so, "+lower(admin)+" looks why the node part of driver "+f.driver+" does not run on "+selected+".")
	}
	return append(l, f.aboutCapacity(selected)...)
}

// aboutFirstConsumer is for a claim that waits for a pod.
func (f *facts) aboutFirstConsumer(l *findings) {
	if f.pods.why != "" {
		l.add(Waiting, "node", "The scheduler selects a node once a pod that uses the claim can be scheduled.",
			"No node is selected yet; which pods use the claim is %s.", f.pods.why)
		return
	}
	using := f.podsUsing()
	if len(using) == 0 {
		l.add(Waiting, "node", ownerOf+" creates a pod that uses it; nothing happens before that.", "No pod uses the claim yet, so that no node is selected for its volume.")
		return
	}
	for _, p := range using {
		if why := unschedulable(p); why != "" {
			l.add(Failing, "node", "The scheduler tries again when something changes; "+lower(admin)+" makes room, or changes what keeps the pod from the nodes.",
				"Pod %q, which uses the claim, cannot be scheduled: %s", p.Name, sentence(why))
			return
		}
	}
	l.add(Waiting, "node", fmt.Sprintf("The scheduler selects a node for pod %q.", using[0].Name), "No node is selected yet; the claim is used by %s.", podNames(using))
}

// podsUsing is the pods that have not ended and use the claim.
func (f *facts) podsUsing() []corev1.Pod {
	var using []corev1.Pod
	for _, p := range f.pods.value {
		if p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		if slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool {
			return v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == f.claim.value.Name ||
				v.Ephemeral != nil && metav1.IsControlledBy(f.claim.value, &p) && p.Name+"-"+v.Name == f.claim.value.Name
		}) {
			using = append(using, p)
		}
	}
	slices.SortFunc(using, func(a, b corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	return using
}

func podNames(pods []corev1.Pod) string {
	var names []string
	for _, p := range pods {
		names = append(names, p.Name)
	}
	if len(names) == 1 {
		return "pod " + names[0]
	}
	return "pods " + list(names)
}

// unschedulable is why the scheduler has no node for p; "" when it does not say that.
func unschedulable(p corev1.Pod) string {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return c.Message
		}
	}
	return ""
}

// aboutEntry is whether the driver is on the node, and the node has its topology labels.
func (f *facts) aboutEntry(l *findings, severity Severity, next string) {
	name := f.node.value.Name
	if f.csiNode.why != "" {
		l.add(Unknown, "node", "", "Whether driver %s is on node %q is %s.", f.driver, name, f.csiNode.why)
		return
	}
	entry := kube.DriverOnNode(f.csiNode.value, f.driver)
	if entry == nil {
		l.add(severity, "node", next, "Driver %s is not registered on node %q (no entry in its CSINode).", f.driver, name)
		return
	}
	segment, missing := topology.OfNode(f.node.value.Labels, entry.TopologyKeys)
	if missing != nil {
		l.add(severity, "topology", admin+fmt.Sprintf(" labels node %q, or restarts the node part of driver %s there, which does.", name, f.driver),
			"Node %q lacks the topology labels of driver %s: %s.", name, f.driver, strings.Join(missing, ", "))
		return
	}
	l.add(Fine, "node", "", "Driver %s is registered on node %q as %q%s.", f.driver, name, entry.NodeID, topologyText(segment))
}

func topologyText(s topology.Segment) string {
	if len(s) == 0 {
		return ""
	}
	return ", with " + s.String()
}

// aboutCapacity is whether there is room for the claim, as far as that is published.
func (f *facts) aboutCapacity(selected string) findings {
	var l findings
	published := f.csiDriver.found && f.csiDriver.value.Spec.StorageCapacity != nil && *f.csiDriver.value.Spec.StorageCapacity
	if f.capacities.why != "" {
		if published {
			l.add(Unknown, "capacity", "", "How much room there is: %s.", f.capacities.why)
		}
		return l
	}
	asked := f.claim.value.Spec.Resources.Requests[corev1.ResourceStorage]
	if !f.capacities.asked || !published && len(f.capacities.value) == 0 {
		return l
	}
	where := "in the cluster"
	if f.node.found && selected != "" {
		where = fmt.Sprintf("for node %q", selected)
	}
	best, n := f.room(selected)
	next := admin + " adds storage, or deletes volumes that are not needed; or " + lower(ownerOf) + " makes the claim anew for less."
	switch {
	case n == 0:
		l.add(Failing, "capacity", "The capacity role publishes it; "+lower(admin)+" looks whether that runs.",
			"Driver %s is to publish its capacity, and there is no CSIStorageCapacity of StorageClass %q %s: the scheduler takes that for no room.", f.driver, f.class.value.Name, where)
	case best.Cmp(asked) < 0:
		l.add(Failing, "capacity", next, "There is not enough room %s: the claim requests %s, and the most that CSIStorageCapacity tells of for one volume is %s, in %s.",
			where, asked.String(), best.String(), count(n, "object"))
	default:
		l.add(Fine, "capacity", "", "There is room %s: the claim requests %s, and CSIStorageCapacity tells of %s.", where, asked.String(), best.String())
	}
	return l
}

// room is the most that one volume can have, on the selected node where there is one, and of
// how many objects that is the most.
func (f *facts) room(selected string) (best resource.Quantity, n int) {
	for _, c := range f.capacities.value {
		if c.NodeTopology == nil { // which means nowhere
			continue
		}
		if f.node.found && selected != "" {
			selector, err := metav1.LabelSelectorAsSelector(c.NodeTopology)
			if err != nil || !selector.Matches(labels.Set(f.node.value.Labels)) {
				continue
			}
		}
		n++
		size := c.MaximumVolumeSize
		if size == nil {
			size = c.Capacity
		}
		if size != nil && size.Cmp(best) > 0 {
			best = *size
		}
	}
	return best, n
}

// nodesOf is the nodes on which pv can be used; nil when it says nothing of nodes. It is
// false when that is not known.
func (f *facts) nodesOf(pv *corev1.PersistentVolume) ([]string, bool) {
	if pv.Spec.NodeAffinity == nil || pv.Spec.NodeAffinity.Required == nil || !f.nodes.found {
		return nil, false
	}
	var names []string
	for i := range f.nodes.value {
		if ok, err := corev1helpers.MatchNodeSelectorTerms(&f.nodes.value[i], pv.Spec.NodeAffinity.Required); err == nil && ok {
			names = append(names, f.nodes.value[i].Name)
		}
	}
	return names, true
}

// affinityText is the node affinity of pv for people.
func affinityText(pv *corev1.PersistentVolume) string {
	var alternatives []string
	for _, t := range pv.Spec.NodeAffinity.Required.NodeSelectorTerms {
		var all []string
		for _, e := range t.MatchExpressions {
			all = append(all, fmt.Sprintf("%s %s (%s)", e.Key, strings.ToLower(string(e.Operator)), strings.Join(e.Values, ", ")))
		}
		alternatives = append(alternatives, strings.Join(all, " and "))
	}
	return strings.Join(alternatives, ", or ")
}
