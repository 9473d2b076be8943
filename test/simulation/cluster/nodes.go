// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
	"github.com/storage-controller/storage-controller/topolvm"
)

// The topology keys of the drivers.
const (
	nodeLabel    = "topology.example.com/node"
	topolvmLabel = "topology." + topolvm.Driver + "/node"
)

// Zone returns the topology segment of a node.
func (c *Cluster) Zone(node string) map[string]string {
	if c.features.Topolvm {
		return map[string]string{topolvmLabel: node}
	}
	return map[string]string{nodeLabel: node}
}

// NodeIn returns the node whose topology segment is given.
func NodeIn(segment map[string]string) string { return segment[nodeLabel] + segment[topolvmLabel] }

// Registered reports whether the driver is registered on a node.
func (c *Cluster) Registered(name string) bool {
	csi, ok := c.api.Get(CSINodes, "", name).(*storagev1.CSINode)
	return ok && c.Node(name) != nil && len(csi.Spec.Drivers) > 0
}

// join creates the Node and the CSINode of a node, which it does not have.
func (c *Cluster) join(name string) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: c.Zone(name)}}
	if c.features.NodeFinalizer {
		node.Finalizers = []string{c.driver + "/node"}
	}
	if h := c.hosts[name]; h != nil {
		h.down = false
	}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	if err := c.api.Create(Nodes, node); err != nil {
		return err
	}
	if c.api.Get(CSINodes, "", name) != nil { // that of the last Node
		return nil
	}
	return c.api.Create(CSINodes, &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: name}})
}

// Node returns the Node with that name, or nil.
func (c *Cluster) Node(name string) *corev1.Node {
	node, _ := c.api.Get(Nodes, "", name).(*corev1.Node)
	return node
}

// stays reports whether a node exists and is not being deleted.
func (c *Cluster) stays(name string) bool {
	node := c.Node(name)
	return node != nil && node.DeletionTimestamp == nil
}

// firstNode returns the first node that stays.
func (c *Cluster) firstNode() string { return c.Nodes[max(0, slices.IndexFunc(c.Nodes, c.stays))] }

// register returns the steps of kubelets whose driver is not registered.
func (c *Cluster) register() []Step {
	registration := storagev1.CSINodeDriver{Name: c.driver}
	if c.features.Topology {
		registration.TopologyKeys = slices.Collect(maps.Keys(c.Zone("")))
	}
	var steps []Step
	for _, node := range List[*storagev1.CSINode](c.api, CSINodes) {
		if len(node.Spec.Drivers) > 0 || c.Node(node.Name) == nil {
			continue
		}
		next := node.DeepCopy()
		registration.NodeID = "id-of-" + node.Name
		next.Spec.Drivers = []storagev1.CSINodeDriver{registration}
		steps = append(steps, Step{"kubelet registers the driver on " + node.Name, c.update(CSINodes, next)})
	}
	return steps
}

// unregister returns the steps of an administrator who updates the driver on a node.
func (c *Cluster) unregister() []Step {
	var steps []Step
	for _, node := range List[*storagev1.CSINode](c.api, CSINodes) {
		next := node.DeepCopy()
		next.Spec.Drivers = nil
		if len(node.Spec.Drivers) > 0 {
			steps = append(steps, Step{"the driver on " + node.Name + " is updated", func(context.Context) error {
				return c.api.Update(CSINodes, next, "")
			}})
		}
	}
	return steps
}

// nodes returns the steps that follow the deletion of Nodes, and those of the scheduler that show pods to the node
// controller.
func (c *Cluster) nodes(s state) []Step {
	if !c.features.Nodes {
		return nil
	}
	var steps []Step
	for _, csi := range List[*storagev1.CSINode](c.api, CSINodes) {
		if c.Node(csi.Name) == nil {
			steps = append(steps, Step{"garbage collector deletes CSINode " + csi.Name, func(context.Context) error {
				return c.api.Delete(CSINodes, "", csi.Name, metav1.NewUIDPreconditions(string(csi.UID)))
			}})
		}
	}
	for _, pod := range c.pods {
		switch claim := s.claim(pod.Claim); {
		case c.Node(pod.Node) == nil && (claim == nil || claim.Spec.VolumeName != ""): // else it is not on this node yet
			steps = append(steps, Step{"garbage collector deletes the pod of claim " + pod.Claim, func(context.Context) error {
				c.deletePod(pod.Claim)
				return nil
			}})
		case claim != nil && claim.Status.Phase == corev1.ClaimBound && c.api.Get(Pods, Namespace, podName(pod.Claim)) == nil:
			steps = append(steps, Step{"scheduler assigns the pod of claim " + pod.Claim + " to " + pod.Node, c.create(Pods, podOf(pod))})
		}
	}
	return steps
}

func podName(claim string) string { return "pod-of-" + claim }

// podOf returns the object of a pod. It has no grace period.
func podOf(pod Pod) *corev1.Pod {
	volume := corev1.Volume{Name: "data", VolumeSource: corev1.VolumeSource{
		PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: pod.Claim},
	}}
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: podName(pod.Claim)}, Spec: corev1.PodSpec{
		NodeName: pod.Node, TerminationGracePeriodSeconds: ptr.To[int64](0), Volumes: []corev1.Volume{volume},
		Containers: []corev1.Container{{Name: "main", Image: "main"}},
	}}
}

// NodeSteps returns the steps of administrators who delete Nodes, except the last one, and of nodes that join again.
func (c *Cluster) NodeSteps() []Step {
	var steps []Step
	staying := slices.DeleteFunc(slices.Clone(c.Nodes), func(n string) bool { return !c.stays(n) })
	for _, name := range c.Nodes {
		switch {
		case c.Node(name) == nil:
			steps = append(steps, Step{name + " joins again", func(context.Context) error { return c.join(name) }})
		case c.stays(name) && len(staying) > 1:
			steps = append(steps, Step{"administrator deletes Node " + name, func(context.Context) error {
				return c.api.Delete(Nodes, "", name, nil)
			}})
		}
	}
	if name := staying[len(c.pods)%len(staying)]; len(staying) > 1 && !OptedOut(c.Node(name), c.driver) {
		what := "administrator forbids the cleanup of Node " + name + ", and deletes it"
		steps = append(steps, Step{what, func(ctx context.Context) error {
			if err := c.consent("Node", Nodes, c.Node(name).DeepCopy()).Do(ctx); err != nil {
				return err
			}
			return c.api.Delete(Nodes, "", name, nil)
		}})
	}
	return append(steps, c.Approvals()...)
}

// ConsentSteps returns the steps of owners who forbid the cleanup of any claim, and of one object of each other kind, or permit
// it again.
func (c *Cluster) ConsentSteps() []Step {
	s := c.read()
	var steps []Step
	for _, claim := range s.claims {
		steps = append(steps, c.consent("claim", Claims, claim.DeepCopy()))
	}
	if len(s.volumes) > 0 {
		steps = append(steps, c.consent("volume", Volumes, s.volumes[len(s.claims)%len(s.volumes)].DeepCopy()))
	}
	if len(s.classes) > 0 {
		steps = append(steps, c.consent("StorageClass", Classes, s.classes[len(s.claims)%len(s.classes)].DeepCopy()))
	}
	if nodes := List[*corev1.Node](c.api, Nodes); len(nodes) > 0 {
		i := slices.IndexFunc(nodes, func(n *corev1.Node) bool { return n.DeletionTimestamp != nil })
		if i < 0 {
			i = len(s.claims) % len(nodes)
		}
		steps = append(steps, c.consent("Node", Nodes, nodes[i].DeepCopy()))
	}
	namespace := c.api.Get(Namespaces, "", Namespace).(*corev1.Namespace)
	return append(steps, c.consent("Namespace", Namespaces, namespace.DeepCopy()))
}

// consent returns the step of the owner of obj, a copy, who changes whether the node controller may clean up.
func (c *Cluster) consent(kind string, gvr schema.GroupVersionResource, obj interface {
	metav1.Object
	runtime.Object
}) Step {
	annotations, annotation, what := maps.Clone(obj.GetAnnotations()), nodecleanup.CleanupAnnotation(c.driver), "forbids"
	if OptedOut(obj, c.driver) {
		what = "permits"
		delete(annotations, annotation)
	} else {
		if annotations == nil {
			annotations = map[string]string{}
		}
		annotations[annotation] = "disabled"
	}
	obj.SetAnnotations(annotations)
	return Step{fmt.Sprintf("user %s the cleanup of %s %s", what, kind, obj.GetName()), c.update(gvr, obj)}
}

// kept reports whether an owner forbids the cleanup of pv. claim may be nil.
func (c *Cluster) kept(s state, pv *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) bool {
	owners := []metav1.Object{pv, c.api.Get(Namespaces, "", Namespace).(*corev1.Namespace)}
	for _, class := range s.classes {
		if class.Name == pv.Spec.StorageClassName {
			owners = append(owners, class)
		}
	}
	if claim != nil {
		owners = append(owners, claim)
	}
	return c.optedOutNode(NodeOf(pv)) || slices.ContainsFunc(owners, func(obj metav1.Object) bool { return OptedOut(obj, c.driver) })
}

// optedOutNode reports whether the owner of a lost node forbids its cleanup.
func (c *Cluster) optedOutNode(node string) bool {
	if exists := c.Node(node); exists != nil && exists.DeletionTimestamp == nil {
		return false
	}
	cm := c.LostNodes()
	return cm != nil && slices.ContainsFunc(nodecleanup.ParseLostNodes(cm), func(lost nodecleanup.LostNode) bool {
		return lost.OptedOut && lost.Value == node
	})
}

// OptedOut reports whether the owner of obj does not permit the node controller to delete it.
func OptedOut(obj metav1.Object, driver string) bool {
	return obj.GetAnnotations()[nodecleanup.CleanupAnnotation(driver)] == "disabled"
}

// LostNodes returns the ConfigMap with the records of the node controller, or nil.
func (c *Cluster) LostNodes() *corev1.ConfigMap {
	cm, _ := c.api.Get(ConfigMaps, metav1.NamespaceSystem, nodecleanup.ConfigMapName(c.driver)).(*corev1.ConfigMap)
	return cm
}

// Approvals returns the step of an administrator who approves the losses that the node controller holds.
func (c *Cluster) Approvals() []Step {
	cm := c.LostNodes()
	if cm == nil {
		return nil
	}
	var held []string
	for _, lost := range nodecleanup.ParseLostNodes(cm) {
		if lost.Held != "" {
			held = append(held, lost.Name())
		}
	}
	names, next := strings.Join(held, ","), cm.DeepCopy()
	if names == "" || cm.Annotations[nodecleanup.AnnotationApprove] == names {
		return nil
	}
	metav1.SetMetaDataAnnotation(&next.ObjectMeta, nodecleanup.AnnotationApprove, names)
	return []Step{{"administrator approves the loss of " + names, c.update(ConfigMaps, next)}}
}

// NodeOf returns the node whose topology segment pv is accessible from, or "".
func NodeOf(pv *corev1.PersistentVolume) string {
	if pv == nil || pv.Spec.NodeAffinity == nil {
		return ""
	}
	for _, term := range pv.Spec.NodeAffinity.Required.NodeSelectorTerms {
		for _, e := range term.MatchExpressions {
			if (e.Key == nodeLabel || e.Key == topolvmLabel) && len(e.Values) == 1 {
				return e.Values[0]
			}
		}
	}
	return ""
}

// busyNodes returns which Nodes are being deleted, and what the node controller has to delete.
func (c *Cluster) busyNodes(s state) []string {
	if !c.features.Nodes {
		return nil
	}
	var busy []string
	for _, name := range c.Nodes {
		if node := c.Node(name); node != nil && node.DeletionTimestamp != nil {
			busy = append(busy, "Node "+name+" is being deleted")
		}
	}
	for _, claim := range s.claims {
		pv, pod := s.volume(claim.Spec.VolumeName), c.pod(claim.Name)
		elsewhere := pod != nil && c.Node(pod.Node) != nil
		switch node := NodeOf(pv); {
		case node == "" || c.Node(node) != nil, claim.DeletionTimestamp != nil, claim.Status.Phase != corev1.ClaimBound, elsewhere,
			c.kept(s, pv, claim), pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete:
		default:
			busy = append(busy, fmt.Sprintf("claim %s of the lost %s is not deleted", claim.Name, node))
		}
	}
	if c.features.Topolvm {
		busy = append(busy, c.lostLogicalVolumes(s)...)
	}
	return busy
}
