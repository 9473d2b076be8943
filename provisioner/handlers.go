package provisioner

import (
	"context"
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// register has the events of all watches fill the queues.
func (t *term) register() *kube.Registrations {
	registrations := &kube.Registrations{}
	add := registrations.Add
	// Topology first, so that the first claim finds it.
	if t.c.watchesNodes() {
		add(t.c.nodes.Handle(kube.Handlers[metav1.Object]{
			Add: func(n metav1.Object) {
				t.nodeChanged(n.GetName(), t.topologies.SetNode(n.GetName(), n.GetLabels(), true))
			},
			Update: func(old, n metav1.Object) {
				if !maps.Equal(old.GetLabels(), n.GetLabels()) {
					t.nodeChanged(n.GetName(), t.topologies.SetNode(n.GetName(), n.GetLabels(), true))
				}
			},
			Delete: func(n metav1.Object) { t.nodeChanged(n.GetName(), t.topologies.SetNode(n.GetName(), nil, false)) },
		}))
		add(t.c.csiNodes.Handle(kube.Handlers[*storagev1.CSINode]{
			Add: func(n *storagev1.CSINode) {
				t.nodeChanged(n.Name, t.topologies.SetKeys(n.Name, t.c.driver.topologyKeys(n), true))
			},
			Update: func(_, n *storagev1.CSINode) {
				t.nodeChanged(n.Name, t.topologies.SetKeys(n.Name, t.c.driver.topologyKeys(n), true))
			},
			Delete: func(n *storagev1.CSINode) { t.nodeChanged(n.Name, t.topologies.SetKeys(n.Name, nil, false)) },
		}))
	}
	add(t.c.classes.Handle(kube.Handlers[*storagev1.StorageClass]{
		Add: t.classChanged, Update: func(_, class *storagev1.StorageClass) { t.classChanged(class) },
	}))
	add(t.c.claims.Handle(kube.Handlers[*corev1.PersistentVolumeClaim]{Add: t.claimAdded, Update: t.claimUpdated, Delete: t.claimDeleted}))
	add(t.c.volumes.Handle(kube.Handlers[*corev1.PersistentVolume]{
		Add: t.volumeChanged, Update: func(_, pv *corev1.PersistentVolume) { t.volumeChanged(pv) }, Delete: t.volumeDeleted,
	}))
	if t.c.driver.publishes {
		add(t.c.attachments.Handle(kube.Handlers[*storagev1.VolumeAttachment]{Delete: t.attachmentDeleted}))
	}
	return registrations
}

// topologyKeys returns the topology keys of the driver on a node, or nil if it is not registered there.
func (d driver) topologyKeys(node *storagev1.CSINode) []string {
	if entry := kube.DriverOnNode(node, d.name); entry != nil {
		return entry.TopologyKeys
	}
	return nil
}

func (t *term) claimAdded(claim *corev1.PersistentVolumeClaim) {
	t.wake(kube.DependencyKey(kube.KindClaim, claim.Namespace, claim.Name))
	t.claimChanged(claim)
}

// claimChanged queues a claim for which there may be something to do.
func (t *term) claimChanged(claim *corev1.PersistentVolumeClaim) {
	if isCloned(claim) {
		t.cloneQueue.Add(sourceKey{Kind: kube.KindClaim, Namespace: claim.Namespace, Name: claim.Name})
	}
	if claim.Spec.VolumeName != "" && !isProtected(claim) {
		t.forget(claim.UID)
		return
	}
	if kube.ClaimHandledBy(t.c.driver.name, claim) {
		t.claimQueue.Add(keyOf(claim))
	}
}

func (t *term) claimUpdated(old, claim *corev1.PersistentVolumeClaim) {
	t.ownedElsewhere(old, claim)
	if old.UID != claim.UID { // deleted and created again while the watch was interrupted
		t.claimDeleted(old)
	}
	if waits(old) && !waits(claim) {
		t.left(old) // not claim: see kube.Trim
	}
	if onlyOwnChanges(old, claim) {
		return
	}
	if isCloned(old) == isCloned(claim) { // else it is what this program does with a source
		t.wake(kube.DependencyKey(kube.KindClaim, claim.Namespace, claim.Name))
	}
	t.claimChanged(claim)
}

// onlyOwnChanges tells whether a claim has changed in nothing but its protection:
// that must not cut short the back-off of the attempt that caused it.
func onlyOwnChanges(old, claim *corev1.PersistentVolumeClaim) bool {
	return isProtected(old) != isProtected(claim) && old.UID == claim.UID && old.DeletionTimestamp.Equal(claim.DeletionTimestamp) &&
		old.Spec.VolumeName == claim.Spec.VolumeName && selectedNode(old) == selectedNode(claim)
}

func (t *term) claimDeleted(claim *corev1.PersistentVolumeClaim) {
	t.mu.Lock()
	delete(t.placeless, keyOf(claim))
	t.mu.Unlock()
	t.left(claim)
	if t.forget(claim.UID) {
		return // its key is queued until the outcome is known
	}
	t.claimQueue.Forget(keyOf(claim))
}

// classChanged wakes the claims that wait for the class, or for another one of its name.
func (t *term) classChanged(class *storagev1.StorageClass) {
	if !t.c.driver.is(class.Provisioner) {
		return
	}
	for _, claim := range t.c.claims.ByIndex(kube.ByClass, class.Name) {
		t.claimChanged(claim)
	}
}

// wake queues the claims that wait for what need names (see kube.Need). What the
// driver called infeasible may be feasible now.
func (t *term) wake(need string) {
	for _, claim := range t.c.claims.ByIndex(kube.ByDependency, need) {
		if !kube.ClaimHandledBy(t.c.driver.name, claim) || t.progressOf(claim.UID).attempt != nil {
			continue
		}
		if t.progressOf(claim.UID).infeasible != nil {
			t.remember(claim.UID, func(p *progress) { p.infeasible = nil })
		}
		t.claimQueue.Add(keyOf(claim))
	}
}

// watchOptional watches what claims may name besides their class, where such kinds
// exist, so that they need not wait for their back-off.
func (t *term) watchOptional(ctx context.Context, wg *sync.WaitGroup) {
	watch := func(o *kube.OptionalInformer, resource schema.GroupVersionResource, changed func(old, now *metav1.PartialObjectMetadata)) {
		wg.Go(func() {
			o.Run(ctx, t.c.deps.Metadata, resource, kube.Handlers[*metav1.PartialObjectMetadata]{
				Add: func(now *metav1.PartialObjectMetadata) { changed(nil, now) }, Update: changed,
			})
		})
	}
	if d := t.c.driver; d.restores {
		sweep := t.c.cfg.SnapshotOrphanSweepInterval
		watch(&t.snapshots, volumeSnapshots, func(old, s *metav1.PartialObjectMetadata) {
			key := sourceKey{Kind: kube.KindSnapshot, Namespace: s.Namespace, Name: s.Name}
			if old == nil || isRestored(old) == isRestored(s) { // else it is what this program does with a source
				t.wake(key.DependencyKey())
			}
			if sweep > 0 && isRestored(s) {
				t.snapshotQueue.Add(key)
			}
		})
		if sweep > 0 {
			wg.Go(func() { t.sweep(ctx, sweep) })
		}
	}
	if d := t.c.driver; d.modifies && d.VolumeAttributesClass {
		watch(&kube.OptionalInformer{}, attributesClasses, func(_, c *metav1.PartialObjectMetadata) {
			t.wake(kube.DependencyKey(kube.KindVolumeAttributesClass, "", c.Name))
		})
	}
	if t.c.cfg.CrossNamespaceVolumeDataSource {
		watch(&kube.OptionalInformer{}, referenceGrants, func(_, g *metav1.PartialObjectMetadata) {
			t.wake(kube.DependencyKey(kube.KindReferenceGrant, g.Namespace, ""))
		})
	}
}

// nodeChanged wakes the claims that wait for a topology: those of that node, and
// those that found none anywhere.
func (t *term) nodeChanged(node string, changed bool) {
	if !changed {
		return
	}
	for _, claim := range t.c.claims.ByIndex(kube.ByNode, node) {
		t.claimChanged(claim)
	}
	t.mu.Lock()
	waiting := slices.Collect(maps.Keys(t.placeless))
	clear(t.placeless)
	t.mu.Unlock()
	for _, key := range waiting {
		t.claimQueue.Add(key)
	}
}

func (t *term) volumeChanged(pv *corev1.PersistentVolume) {
	if t.c.driver.concerning(pv) && t.c.driver.responsible(pv) { // the cheaper question first
		t.pvQueue.Add(pv.Name)
	}
}

func (t *term) volumeDeleted(pv *corev1.PersistentVolume) {
	t.pvQueue.Forget(pv.Name)
	t.mu.Lock()
	delete(t.removals, pv.UID)
	t.mu.Unlock()
	if ref := pv.Spec.ClaimRef; ref != nil && t.progressOf(ref.UID).saved {
		t.remember(ref.UID, func(p *progress) { p.lost = true })
		t.claimQueue.Add(claimKey{ref.Namespace, ref.Name, ref.UID})
	}
}

// attachmentDeleted wakes a volume whose deletion waited for its end.
func (t *term) attachmentDeleted(va *storagev1.VolumeAttachment) {
	name := va.Spec.Source.PersistentVolumeName
	if name == nil {
		return
	}
	if pv, ok := t.c.volumes.Get(*name); ok {
		t.volumeChanged(pv)
	}
}

// tell sends an event about a claim or a volume.
func (t *term) tell(obj runtime.Object, e event) {
	t.c.deps.Events.Event(obj, e.kind, e.reason, e.message)
}
