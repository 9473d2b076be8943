package nodecontroller

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// register has the events of all watches keep the index and fill the queues.
func (t *term) register() *kube.Registrations {
	registrations := &kube.Registrations{}
	add := registrations.Add
	add(t.c.csiNodes.Handle(kube.Handlers[*storagev1.CSINode]{
		Add:    func(n *storagev1.CSINode) { t.csiNodeChanged(n.Name, n) },
		Update: t.csiNodeUpdated,
		Delete: func(n *storagev1.CSINode) { t.csiNodeChanged(n.Name, nil) },
	}))
	add(t.c.nodes.Handle(kube.Handlers[*corev1.Node]{Add: t.nodeAdded, Update: t.nodeUpdated, Delete: t.nodeDeleted}))
	add(t.c.volumes.Handle(kube.Handlers[*corev1.PersistentVolume]{
		Add: t.volumeChanged, Update: func(_, pv *corev1.PersistentVolume) { t.volumeChanged(pv) }, Delete: t.volumeDeleted,
	}))
	add(t.c.claims.Handle(kube.Handlers[*corev1.PersistentVolumeClaim]{
		Add: t.claimChanged, Update: func(_, claim *corev1.PersistentVolumeClaim) { t.claimChanged(claim) }, Delete: t.claimChanged,
	}))
	add(t.c.classes.Handle(kube.Handlers[*storagev1.StorageClass]{Add: t.classChanged, Update: func(_, class *storagev1.StorageClass) { t.classChanged(class) }}))
	if t.c.drivers != nil {
		add(t.c.drivers.Handle(kube.Handlers[*storagev1.CSIDriver]{Add: t.driverChanged, Update: func(_, d *storagev1.CSIDriver) { t.driverChanged(d) }, Delete: t.driverChanged}))
	}
	if t.c.attachments != nil {
		add(t.c.attachments.Handle(kube.Handlers[*storagev1.VolumeAttachment]{Delete: func(va *storagev1.VolumeAttachment) {
			if pv := va.Spec.Source.PersistentVolumeName; pv != nil && t.ready.Load() && t.ledger.has(*pv) {
				t.volumeQueue.Add(*pv)
			}
		}}))
	}
	return registrations
}

func (t *term) csiNodeUpdated(old, n *storagev1.CSINode) {
	if !equality.Semantic.DeepEqual(old.Spec.Drivers, n.Spec.Drivers) {
		t.csiNodeChanged(n.Name, n)
	}
}

// csiNodeChanged notes where the driver is; nil means that the CSINode is gone.
func (t *term) csiNodeChanged(name string, n *storagev1.CSINode) {
	before, bare := t.index.topologyKey(), t.index.unlabelled()
	volumes := t.index.volumesOf(name)
	moved, rekeyed := t.index.setCSINode(name, n)
	if rekeyed { // all nodes and volumes are found by other values now
		for _, node := range t.c.nodes.List() {
			t.index.setNode(node)
		}
		for _, pv := range t.c.volumes.List() {
			t.index.setVolume(pv)
		}
	}
	if moved {
		t.ledger.changed()
	}
	if !t.ready.Load() || t.keyed(before) {
		return
	}
	t.concern(name, mergeNames(volumes, t.index.volumesOf(name))) // of which it may be, or was, an alias
	t.labelled(bare)
}

// labelled looks again at all that waits where other nodes than before lack their label:
// one that does may be the node of any lost volume.
func (t *term) labelled(before []string) {
	if t.ready.Load() && !slices.Equal(before, t.index.unlabelled()) {
		t.review(t.volumeQueue.Add, t.nodeQueue.Add)
	}
}

// keyed looks at everything again where the topology key is another than before, and tells
// whether it is.
func (t *term) keyed(before string) bool {
	if !t.ready.Load() || t.index.topologyKey() == before {
		return false
	}
	t.tellKey()
	t.assessAll()
	return true
}

// tellKey tells that nothing can be cleaned up while nobody knows which label of a node
// its volumes name. Where nothing is to be cleaned up it is no news: most drivers have no
// volumes that live on one node.
func (t *term) tellKey() {
	if t.index.topologyKey() != "" || !t.c.policy.writes() {
		return
	}
	t.c.notify.seldom(t.csiDriver(), "TopologyKeyUnknown", warning(reasonSkipped,
		"TopologyKeyUnknown: the CSINodes report no topology key for the driver, or more than one, or one whose values are not those of single nodes, so nothing is cleaned up; set --topology-node-key"))
}

// nodeAdded ends the approval of a node that is back.
func (t *term) nodeAdded(node *corev1.Node) {
	if t.ready.Load() && t.c.spent.returned(node.Name, t.approved(time.Now())) {
		t.c.notify.send(t.csiDriver(), normal(reasonReturned,
			"Node %s is back: that it is approved in %s does not hold for its next loss; take its name out of there", node.Name, t.c.policy.ann.approve))
	}
	t.nodeChanged(node)
}

func (t *term) nodeChanged(node *corev1.Node) {
	t.index.setGoing(node.Name, node.DeletionTimestamp != nil)
	if t.memory.clear(t.memory.absent, node.Name); node.DeletionTimestamp == nil { // an absence after this is another one
		t.ledger.drop(keyOfRecords(node.Name))
	}
	before, bare := t.index.topologyKey(), t.index.unlabelled()
	volumes := t.index.setNode(node)
	t.keyed(before) // the node may have shown that the key does not tell nodes apart
	t.concern(node.Name, volumes)
	t.labelled(bare)
}

// concern has a node and its volumes looked at. What they contribute to the breaker is
// counted at once, and not when their turn comes.
func (t *term) concern(node string, volumes []string) {
	if !t.ready.Load() {
		return
	}
	t.noteClaims(node)
	for _, pv := range volumes {
		t.gather(pv)
		t.volumeQueue.Add(pv)
	}
	t.nodeQueue.Add(node)
}

// nodeUpdated leaves out what kubelets write all the time.
func (t *term) nodeUpdated(old, node *corev1.Node) {
	key := t.index.topologyKey()
	ann := t.c.policy.ann
	if old.UID == node.UID && old.DeletionTimestamp.Equal(node.DeletionTimestamp) &&
		slices.Equal(old.Finalizers, node.Finalizers) && slices.Equal(namesOfNode(old, key), namesOfNode(node, key)) &&
		equality.Semantic.DeepEqual(old.Labels, node.Labels) && equality.Semantic.DeepEqual(old.Spec.Taints, node.Spec.Taints) &&
		equality.Semantic.DeepEqual(old.Status.Conditions, node.Status.Conditions) &&
		old.Annotations[ann.cleanup] == node.Annotations[ann.cleanup] && old.Annotations[ann.localData] == node.Annotations[ann.localData] {
		return
	}
	if old.UID != node.UID {
		t.nodeAdded(node)
		return
	}
	t.nodeChanged(node)
}

func (t *term) nodeDeleted(node *corev1.Node) {
	t.nodeQueue.Forget(node.Name)
	t.c.departed.left(node) // which may hear of it later
	t.memory.clear(t.memory.ends, node.Name)
	t.index.setGoing(node.Name, false)
	before, bare := t.index.topologyKey(), t.index.unlabelled()
	volumes := t.index.dropNode(node)
	t.keyed(before)
	t.concern(node.Name, volumes)
	t.labelled(bare)
}

func (t *term) volumeChanged(pv *corev1.PersistentVolume) {
	local := t.index.setVolume(pv)
	if t.ready.Load() && (local || t.ledger.has(pv.Name)) {
		t.gather(pv.Name)
		if t.ledger.has(pv.Name) || !t.c.policy.notedNothing(pv) {
			t.volumeQueue.Add(pv.Name)
		}
	}
}

func (t *term) volumeDeleted(pv *corev1.PersistentVolume) {
	// Nodes that lost the driver wait for the end of their last volume, and custom
	// resources for that of the volumes of theirs.
	nodes := t.index.nodesOf(pv.Name)
	t.index.dropVolume(pv.Name)
	t.volumeQueue.Forget(pv.Name)
	t.ledger.drop(pv.Name)
	t.memory.forget(pv.UID)
	t.c.departed.forget(pv.UID)
	if t.ready.Load() && (t.c.nodePolicy.mode == NodeFinalizerManage || len(t.c.resources) > 0) {
		for _, node := range nodes {
			t.nodeQueue.Add(node)
		}
	}
}

func (t *term) claimChanged(claim *corev1.PersistentVolumeClaim) {
	if !t.ready.Load() {
		return
	}
	if pv := claim.Spec.VolumeName; pv != "" {
		if t.ledger.has(pv) {
			t.gather(pv)
			t.volumeQueue.Add(pv)
		}
		return
	}
	node := claim.Annotations[storagehelpers.AnnSelectedNode]
	if node == "" || t.c.cfg.NodeCleanupUnbound == UnboundIgnore {
		return
	}
	if found, ok := t.c.nodes.Get(node); !ok || found.DeletionTimestamp != nil {
		t.noteClaims(node)
		t.nodeQueue.Add(node)
	}
}

// classChanged looks at what waits: the class may have been what it waits for.
func (t *term) classChanged(class *storagev1.StorageClass) {
	if t.ready.Load() && class.Provisioner == t.c.deps.Driver {
		t.review(t.volumeQueue.Add, t.nodeQueue.Add)
	}
}

// driverChanged looks at what may have been approved.
func (t *term) driverChanged(d *storagev1.CSIDriver) {
	if d.Name != t.c.deps.Driver {
		return
	}
	t.c.spent.written(d.Annotations[t.c.policy.ann.approve])
	if t.ready.Load() {
		t.review(t.volumeQueue.Add, t.nodeQueue.Add)
	}
}

// notedNothing tells whether pv carries none of the notes that end with the return of its node.
func (p policy) notedNothing(pv *corev1.PersistentVolume) bool {
	return kube.MetadataPatch{RemoveAnnotations: p.ann.bookkeeping()}.AppliedTo(pv)
}
