// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"
)

const (
	testDriver    = "local.example.com"
	testKey       = "topology.local.example.com/node"
	testFinalizer = "local.example.com/node"
	testNamespace = "ns"
	testClass     = "c"
	provisionerF  = "external-provisioner.volume.kubernetes.io/finalizer"
	attacherF     = "external-attacher/local-example-com"
	foreignF      = "example.com/backup"
)

var testAnnotation = CleanupAnnotation(testDriver)

// store has objects: those of the API server, or those in the caches of a process. Objects in it are not modified.
type store struct {
	nodes    map[string]*corev1.Node
	csiNodes map[string]*storagev1.CSINode
	volumes  map[string]*corev1.PersistentVolume
	claims   map[string]*corev1.PersistentVolumeClaim // by name: there is one Namespace
	users    map[string]*corev1.Pod                   // by the name of the claim
	attached map[string]bool                          // names of volumes
	custom   map[string]Resource
	classObj *storagev1.StorageClass
	ns       *corev1.Namespace
}

func newStore() *store {
	return &store{
		nodes: map[string]*corev1.Node{}, csiNodes: map[string]*storagev1.CSINode{}, volumes: map[string]*corev1.PersistentVolume{},
		claims: map[string]*corev1.PersistentVolumeClaim{}, users: map[string]*corev1.Pod{}, attached: map[string]bool{},
		custom: map[string]Resource{},
	}
}

func (s *store) volume(_ context.Context, name string) (*corev1.PersistentVolume, error) {
	return s.volumes[name], nil
}

func (s *store) class(_ context.Context, name string) (*storagev1.StorageClass, error) {
	if name != testClass {
		return nil, nil
	}
	return s.classObj, nil
}

func (s *store) namespace(context.Context, string) (*corev1.Namespace, error) { return s.ns, nil }

func (s *store) node(_ context.Context, name string) (*corev1.Node, error) { return s.nodes[name], nil }

func (s *store) csiNode(_ context.Context, name string) (*storagev1.CSINode, error) {
	return s.csiNodes[name], nil
}

func (s *store) resource(_ context.Context, name string) (*Resource, error) {
	if r, ok := s.custom[name]; ok {
		return &r, nil
	}
	return nil, nil
}

func (s *store) claim(_ context.Context, _, name string) (*corev1.PersistentVolumeClaim, error) {
	return s.claims[name], nil
}

func (s *store) labelled(_ context.Context, key, value string) (nodes []*corev1.Node, _ error) {
	for _, n := range s.nodes {
		if n.Labels[key] == value {
			nodes = append(nodes, n)
		}
	}
	return nodes, nil
}

func (s *store) pods(_ context.Context, claim *corev1.PersistentVolumeClaim) ([]*corev1.Pod, error) {
	if pod := s.users[claim.Name]; pod != nil {
		return []*corev1.Pod{pod}, nil
	}
	return nil, nil
}

func (s *store) attachments(_ context.Context, volume string) ([]string, error) {
	if s.attached[volume] {
		return []string{"va-" + volume}, nil
	}
	return nil, nil
}

// nodeEvent is a change of a Node or CSINode, which the caches of the processes observe later.
type nodeEvent struct {
	at      time.Time
	name    string
	csi     bool
	node    *corev1.Node // nil: deleted
	csiNode *storagev1.CSINode
}

// api is the model of the API server, and of the controllers of Kubernetes.
type api struct {
	*store
	now      time.Time
	versions int
	log      []nodeEvent
	cm       *corev1.ConfigMap
	aliveAt  map[string]time.Time // by host: when a Node of it was last there that was not being deleted
}

func newAPI() *api {
	a := &api{store: newStore(), now: time.Date(2026, 11, 22, 9, 0, 0, 0, time.UTC), aliveAt: map[string]time.Time{}}
	a.classObj = &storagev1.StorageClass{ObjectMeta: a.meta(testClass), Provisioner: testDriver}
	a.ns = &corev1.Namespace{ObjectMeta: a.meta(testNamespace)}
	return a
}

// meta returns the metadata of a new object.
func (a *api) meta(name string) metav1.ObjectMeta {
	a.versions++
	return metav1.ObjectMeta{Name: name, UID: types.UID(fmt.Sprint("uid-", a.versions)), ResourceVersion: fmt.Sprint(a.versions),
		CreationTimestamp: metav1.NewTime(a.now)}
}

// changed sets another resourceVersion.
func (a *api) changed(m *metav1.ObjectMeta) {
	a.versions++
	m.ResourceVersion = fmt.Sprint(a.versions)
}

// nodeSpec describes a node with the driver.
type nodeSpec struct {
	name, label, hostname, id string
	finalizer                 bool
}

func (a *api) createNode(spec nodeSpec) {
	if a.nodes[spec.name] != nil {
		return
	}
	n := &corev1.Node{ObjectMeta: a.meta(spec.name)}
	n.Labels = map[string]string{corev1.LabelHostname: spec.hostname}
	if spec.label != "" {
		n.Labels[testKey] = spec.label
	}
	if spec.finalizer {
		n.Finalizers = []string{testFinalizer}
	}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	a.setCSINode(spec.name, spec.id, testKey)
	a.putNode(n)
}

func (a *api) setCSINode(name, id string, keys ...string) {
	c := &storagev1.CSINode{ObjectMeta: a.meta(name)}
	c.Spec.Drivers = []storagev1.CSINodeDriver{{Name: testDriver, NodeID: id, TopologyKeys: keys}}
	a.csiNodes[name] = c
	a.log = append(a.log, nodeEvent{at: a.now, name: name, csi: true, csiNode: c})
	a.remember()
}

func (a *api) removeCSINode(name string) {
	if a.csiNodes[name] != nil {
		delete(a.csiNodes, name)
		a.log = append(a.log, nodeEvent{at: a.now, name: name, csi: true})
	}
}

func (a *api) putNode(n *corev1.Node) {
	if n.DeletionTimestamp != nil && len(n.Finalizers) == 0 {
		delete(a.nodes, n.Name)
		a.log = append(a.log, nodeEvent{at: a.now, name: n.Name})
		return
	}
	a.nodes[n.Name] = n
	a.log = append(a.log, nodeEvent{at: a.now, name: n.Name, node: n})
	a.remember()
}

// remember records which hosts have a Node.
func (a *api) remember() {
	for _, n := range a.nodes {
		if n.DeletionTimestamp == nil {
			for _, value := range a.namesOf(n) {
				a.aliveAt[value] = a.now
			}
		}
	}
}

func (a *api) editNode(name string, edit func(*corev1.Node)) {
	if n := a.nodes[name]; n != nil {
		a.remember()
		n = n.DeepCopy()
		edit(n)
		a.changed(&n.ObjectMeta)
		a.putNode(n)
	}
}

func (a *api) deleteNode(name string) {
	a.editNode(name, func(n *corev1.Node) {
		if n.DeletionTimestamp == nil {
			n.DeletionTimestamp = &metav1.Time{Time: a.now}
		}
	})
}

// namesOf returns the values that mean a Node, as the documentation has them.
func (s *store) namesOf(n *corev1.Node) []string {
	names := []string{n.Name, n.Labels[corev1.LabelHostname], n.Labels[testKey]}
	for _, address := range n.Status.Addresses {
		if address.Type == corev1.NodeHostName {
			names = append(names, address.Address)
		}
	}
	if c := s.csiNodes[n.Name]; c != nil {
		names = append(names, c.Spec.Drivers[0].NodeID)
	}
	return slices.DeleteFunc(names, func(n string) bool { return n == "" })
}

// nodesOf returns the Nodes that value means.
func (s *store) nodesOf(value string) (nodes []*corev1.Node) {
	for _, name := range slices.Sorted(maps.Keys(s.nodes)) {
		if slices.Contains(s.namesOf(s.nodes[name]), value) {
			nodes = append(nodes, s.nodes[name])
		}
	}
	return nodes
}

// alive reports whether a Node that value means exists and is not being deleted.
func (s *store) alive(value string) bool {
	return slices.ContainsFunc(s.nodesOf(value), func(n *corev1.Node) bool { return n.DeletionTimestamp == nil })
}

// bind creates a claim and its volume on hosts.
func (a *api) bind(name string, hosts ...string) {
	c := &corev1.PersistentVolumeClaim{ObjectMeta: a.meta(name)}
	c.Namespace, c.Finalizers = testNamespace, []string{"kubernetes.io/pvc-protection"}
	c.Spec.VolumeName, c.Spec.StorageClassName, c.Status.Phase = "pv-"+name, new(string), corev1.ClaimBound
	*c.Spec.StorageClassName = testClass
	a.claims[name] = c
	pv := &corev1.PersistentVolume{ObjectMeta: a.meta("pv-" + name)}
	pv.Annotations = map[string]string{storagehelpers.AnnDynamicallyProvisioned: testDriver}
	pv.Finalizers = []string{"kubernetes.io/pv-protection", provisionerF, attacherF}
	pv.Spec.StorageClassName, pv.Spec.PersistentVolumeReclaimPolicy = testClass, corev1.PersistentVolumeReclaimDelete
	pv.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: testDriver, VolumeHandle: "handle-" + name}
	pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: testNamespace, Name: name, UID: c.UID}
	pv.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: testKey, Operator: corev1.NodeSelectorOpIn, Values: hosts}},
	}}}}
	pv.Status.Phase, pv.Status.LastPhaseTransitionTime = corev1.VolumeBound, &metav1.Time{Time: a.now}
	a.volumes[pv.Name] = pv
}

func (a *api) editVolume(name string, edit func(*corev1.PersistentVolume)) {
	if pv := a.volumes[name]; pv != nil {
		pv = pv.DeepCopy()
		edit(pv)
		a.changed(&pv.ObjectMeta)
		a.volumes[name] = pv
	}
}

func (a *api) editClaim(name string, edit func(*corev1.PersistentVolumeClaim)) {
	if c := a.claims[name]; c != nil {
		c = c.DeepCopy()
		edit(c)
		a.changed(&c.ObjectMeta)
		a.claims[name] = c
	}
}

// settle lets the controllers of Kubernetes act: pods of deleted Nodes are deleted, then claims that no pod uses, then their
// volumes are released, and volumes without finalizers disappear.
func (a *api) settle() {
	for _, name := range slices.Sorted(maps.Keys(a.users)) {
		pod := a.users[name]
		if a.nodes[pod.Spec.NodeName] == nil {
			delete(a.users, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(a.claims)) {
		if a.claims[name].DeletionTimestamp != nil && a.users[name] == nil {
			delete(a.claims, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(a.volumes)) {
		pv := a.volumes[name]
		claim := a.claims[pv.Spec.ClaimRef.Name]
		if pv.Status.Phase == corev1.VolumeBound && (claim == nil || claim.UID != pv.Spec.ClaimRef.UID) {
			a.editVolume(name, func(pv *corev1.PersistentVolume) {
				pv.Status.Phase, pv.Status.LastPhaseTransitionTime = corev1.VolumeReleased, &metav1.Time{Time: a.now}
			})
		}
		a.removeVolume(name)
	}
}

// removeVolume removes a volume that is being deleted, if no finalizer keeps it.
func (a *api) removeVolume(name string) {
	pv := a.volumes[name]
	rest := slices.DeleteFunc(slices.Clone(pv.Finalizers), func(f string) bool {
		return f == "kubernetes.io/pv-protection" && pv.Status.Phase != corev1.VolumeBound
	})
	if pv.DeletionTimestamp != nil && len(rest) == 0 {
		delete(a.volumes, name)
	}
}

// observed are the caches of a process, and what its handlers have remembered.
type observed struct {
	*store
	position int // in the log
	departed []departed
	lost     int                  // deletions of Nodes and CSINodes that were observed
	known    map[string]time.Time // when the process knows that a host last had a Node
	optedOut map[string]bool      // whether the deleted Node of a host had opted out
}

// list fills the caches of a new process.
func (a *api) list() *observed {
	o := &observed{store: newStore(), position: len(a.log), known: map[string]time.Time{}, optedOut: map[string]bool{}}
	o.nodes, o.csiNodes = maps.Clone(a.nodes), maps.Clone(a.csiNodes)
	for name := range o.nodes {
		o.see(name, a.now)
	}
	o.observeOthers(a)
	return o
}

// see records that the hosts of a Node had it at a time, if it was not being deleted.
func (o *observed) see(name string, at time.Time) {
	if n := o.nodes[name]; n != nil && n.DeletionTimestamp == nil {
		for _, value := range o.namesOf(n) {
			o.known[value], o.optedOut[value] = at, false
		}
	}
}

// observe delivers up to n events of Nodes and CSINodes.
func (o *observed) observe(a *api, n int) {
	for ; n > 0 && o.position < len(a.log); n-- {
		e := a.log[o.position]
		o.position++
		o.see(e.name, e.at)
		switch old := o.nodes[e.name]; {
		case e.csi && e.csiNode == nil:
			delete(o.csiNodes, e.name)
			o.lost++
		case e.csi:
			o.csiNodes[e.name] = e.csiNode
		case e.node == nil || old != nil && old.UID != e.node.UID:
			o.depart(a.now, old, true)
			delete(o.nodes, e.name)
			if e.node != nil {
				o.nodes[e.name] = e.node
			}
			o.lost++
		default:
			if old != nil && hostOf(old.Name, old.Labels, testKey) != hostOf(e.name, e.node.Labels, testKey) {
				o.depart(a.now, old, false)
			}
			if old != nil && old.DeletionTimestamp == nil && e.node.DeletionTimestamp != nil {
				o.lost++
			}
			o.nodes[e.name] = e.node
		}
		o.see(e.name, e.at)
	}
}

func (o *observed) depart(now time.Time, n *corev1.Node, deleted bool) {
	optedOut := n.Annotations[testAnnotation] != "" && n.Annotations[testAnnotation] != enabled
	o.departed = append(o.departed, departed{Name: n.Name, UID: n.UID, Labels: n.Labels, Created: n.CreationTimestamp.Time,
		OptedOut: optedOut, Deleted: deleted, At: now})
	if value := hostOf(n.Name, n.Labels, testKey); optedOut {
		o.optedOut[value] = true
	}
}

// observeOthers brings the caches of all other objects up to date.
func (o *observed) observeOthers(a *api) {
	o.volumes, o.claims, o.users = maps.Clone(a.volumes), maps.Clone(a.claims), maps.Clone(a.users)
	o.attached, o.custom, o.classObj, o.ns = maps.Clone(a.attached), maps.Clone(a.custom), a.classObj, a.ns
}
