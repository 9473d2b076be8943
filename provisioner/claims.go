// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/topology"
	"github.com/storage-controller/storage-controller/internal/tracing"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// claimLoop provisions volumes for claims. It lives as long as this replica leads: another
// one may have provisioned meanwhile.
type claimLoop struct {
	c          *Controller
	claims     *kube.TermCache[*corev1.PersistentVolumeClaim]
	volumes    *kube.TermCache[*corev1.PersistentVolume]
	ops        *operations
	sources    *sourceProtector
	ownership  *nodeOwnership
	users      volumeUsers
	queue      *workloop.Loop[claimKey]
	topologies *topology.Aggregate
	began      time.Time // of the term
}

func newClaimLoop(c *Controller) *claimLoop {
	claims, volumes, ops := kube.NewTermCache(c.claims), kube.NewTermCache(c.volumes), newOperations()
	l := &claimLoop{
		c: c, claims: claims, volumes: volumes, ops: ops, sources: newSourceProtector(c, claims, volumes, ops),
		ownership: newNodeOwnership(c, claims), users: volumeUsers{c.driver, volumes, ops}, topologies: topology.NewAggregate(),
		began: time.Now(),
	}
	l.queue = workloop.NewFair(c.loopConfig("claims"), c.deps.Queues, l.sync, l.groupOf, nil)
	l.queue.ShowStage(func(key claimKey) string { return stageOf(l.ops.Get(key)) })
	if cfg := c.cfg; cfg.NodeDeployment {
		segments := c.driver.segments
		l.topologies.SetNode(cfg.NodeName, segments, true)
		l.topologies.SetKeys(cfg.NodeName, slices.Collect(maps.Keys(segments)), true)
	}
	return l
}

// groupOf returns the group of a claim for [workloop.NewFair]: its StorageClass. A claim that was deleted has that of its volume
// in progress.
func (l *claimLoop) groupOf(key claimKey) string {
	claim, ok := l.c.claims.Get(key.String())
	if !ok || claim.UID != key.UID {
		return l.ops.Get(key).Payload.plan.ClassName
	}
	return storagehelpers.GetPersistentVolumeClaimClass(claim)
}

// begin reads which versions of claims and volumes an earlier leader has left. If it fails, all claims are read before their
// first request.
func (l *claimLoop) begin(ctx context.Context) {
	err := errors.Join(
		kube.BeginTerm(ctx, l.claims, l.c.deps.Client.CoreV1().PersistentVolumeClaims("").List),
		kube.BeginTerm(ctx, l.volumes, l.c.deps.Client.CoreV1().PersistentVolumes().List),
	)
	if err != nil {
		klog.FromContext(ctx).Error(err,
			"Reading the latest resourceVersion failed. Each PVC is read from the API server before CreateVolume")
	}
}

// maxSteps bounds the steps of one sync. A claim takes up to twenty.
const maxSteps = 30

// sync takes the steps that decide names for one claim, until none is left or one fails.
func (l *claimLoop) sync(ctx context.Context, key claimKey) (time.Time, error) {
	log := klog.FromContext(ctx).WithValues("persistentVolumeClaim", klog.KRef(key.Namespace, key.Name))
	ctx = tracing.WithOperation(klog.NewContext(ctx, log), "Provision", key.UID)
	var r reads
	var rescheduled error
	for range maxSteps {
		s := l.gather(key, r)
		step := l.c.driver.decide(s)
		log.V(2).Info("Decided", "stage", stageOf(s.call), "action", step.action, "reason", step.reason)
		switch step.action {
		case doNothing:
			return time.Time{}, nil
		case doForget:
			if step.reason == waitsForPod { // a failure that is rescheduled again and again
				l.ops.forgetUntilScheduled(key)
				l.ownership.forget(key)
				return time.Time{}, workloop.Waiting{Cause: rescheduled}
			}
			l.forget(key)
			return time.Time{}, nil
		case doIgnore:
			l.forget(key)
			l.c.event(s.claim, populatorEvent(step.err))
			return time.Time{}, nil
		case doReport:
			l.forget(key)
			l.c.claimFailed(s.claim, failedEvent(storagehelpers.GetPersistentVolumeClaimClass(s.claim), step.err))
			return time.Time{}, workloop.Waiting{Cause: step.err}
		case doBackOff:
			return time.Time{}, step.err
		case doWait:
			return step.until, workloop.Waiting{Cause: rescheduled}
		case doReschedule:
			rescheduled = step.err
			if r.failure != nil {
				rescheduled = r.failure.err
			}
		}
		if err := l.take(ctx, key, s, step, &r); err != nil {
			return time.Time{}, err
		}
	}
	return time.Time{}, fmt.Errorf("claim %s: not done after %d steps: %w", key, maxSteps, intent.ErrBug)
}

// take applies one step and records its change of the call. An error with a change ends the
// sync only after decide has seen the new state, and the claim is protected or unprotected.
func (l *claimLoop) take(ctx context.Context, key claimKey, s claimState, step step, r *reads) error {
	defer r.release()
	traced, end := tracing.StartSpan(ctx, string(step.action))
	c, err := l.apply(traced, key, s, step, r)
	end(err)
	if c.Event == 0 && c.Set == nil {
		return err
	}
	before, after, illegal := l.ops.Apply(key, c)
	if illegal != nil {
		return errors.Join(illegal, err)
	}
	if before != after {
		klog.FromContext(ctx).V(2).Info("Stage changed", "stage", stageOf(l.ops.Get(key)), "from", stageOf(s.call), "event", c.Event)
	}
	if err != nil {
		r.failure = &failure{err, s.call.Payload.plan.SelectedNode}
	}
	return nil
}

// forget drops everything that is kept of a claim, unless a volume is in progress for it.
func (l *claimLoop) forget(key claimKey) (inProgress bool) {
	if l.ops.Forget(key) {
		return true
	}
	l.ownership.forget(key)
	return false
}

// register has the events of claims, and of all objects that claims wait for, fill the queue.
func (l *claimLoop) register(registrations *kube.Registrations) {
	add := registrations.Add
	// Topology first, so that the first claim finds it.
	if l.c.watchesNodes() {
		node := func(n metav1.Object) {
			l.nodeChanged(n.GetName(), l.topologies.SetNode(n.GetName(), n.GetLabels(), true))
		}
		add(l.c.nodes.Handle(kube.Handlers[metav1.Object]{
			Add: node,
			Update: func(old, n metav1.Object) {
				if !maps.Equal(old.GetLabels(), n.GetLabels()) {
					node(n)
				}
			},
			Delete: func(n metav1.Object) { l.nodeChanged(n.GetName(), l.topologies.SetNode(n.GetName(), nil, false)) },
		}))
		csiNode := func(n *storagev1.CSINode) {
			l.nodeChanged(n.Name, l.topologies.SetKeys(n.Name, l.topologyKeys(n), true))
		}
		add(l.c.csiNodes.Handle(kube.Handlers[*storagev1.CSINode]{
			Add: csiNode, Update: func(_, n *storagev1.CSINode) { csiNode(n) },
			Delete: func(n *storagev1.CSINode) { l.nodeChanged(n.Name, l.topologies.SetKeys(n.Name, nil, false)) },
		}))
	}
	add(l.c.classes.Handle(kube.Handlers[*storagev1.StorageClass]{
		Add: l.classChanged, Update: func(_, class *storagev1.StorageClass) { l.classChanged(class) },
	}))
	add(l.c.claims.Handle(kube.Handlers[*corev1.PersistentVolumeClaim]{Add: l.claimAdded, Update: l.claimUpdated, Delete: l.claimDeleted}))
}

// topologyKeys returns the topology keys of the driver on a node, or nil if it is not registered there.
func (l *claimLoop) topologyKeys(node *storagev1.CSINode) []string {
	if entry := kube.DriverOnNode(node, l.c.driver.name); entry != nil {
		return entry.TopologyKeys
	}
	return nil
}

func (l *claimLoop) claimAdded(claim *corev1.PersistentVolumeClaim) {
	l.wake(kube.DependencyKey(kube.KindClaim, claim.Namespace, claim.Name))
	l.sources.claimChanged(claim, true)
	l.claimChanged(claim)
}

// claimChanged enqueues a claim for which there may be something to do.
func (l *claimLoop) claimChanged(claim *corev1.PersistentVolumeClaim) {
	switch {
	case claim.Spec.VolumeName != "" && !isProtected(claim):
		l.forget(keyOf(claim))
		l.queue.Forget(keyOf(claim))
	case kube.ClaimHandledBy(l.c.driver.name, claim):
		l.queue.Add(keyOf(claim))
	}
}

func (l *claimLoop) claimUpdated(old, claim *corev1.PersistentVolumeClaim) {
	l.ownership.claimUpdated(old, claim)
	if old.UID != claim.UID { // deleted and created again while the watch was interrupted
		l.claimDeleted(old)
	}
	if waits(old) && !waits(claim) {
		l.sources.enqueueSourceOf(old) // not claim: see kube.Trim
	}
	listedAgain := old.ResourceVersion == claim.ResourceVersion
	if (listedAgain || onlyOwnChanges(old, claim)) && !l.mustResume(keyOf(claim)) {
		// The node may have been removed and selected again while the watch was interrupted. Instances on nodes leave a claim to the
		// one that has recorded it.
		ended := l.c.cfg.NodeDeployment && isProtected(old) && !isProtected(claim)
		if (selectedNode(claim) != "" || ended) && kube.ClaimHandledBy(l.c.driver.name, claim) {
			l.queue.Resync(keyOf(claim))
		}
		return
	}
	if isCloned(old) == isCloned(claim) { // else the change is that of a sourceProtector
		l.wake(kube.DependencyKey(kube.KindClaim, claim.Namespace, claim.Name))
	}
	l.sources.claimChanged(claim, false)
	l.claimChanged(claim)
}

// onlyOwnChanges reports whether a claim has changed in nothing but its protection, which
// must not cut short the back-off of the call that caused it.
func onlyOwnChanges(old, claim *corev1.PersistentVolumeClaim) bool {
	return isProtected(old) != isProtected(claim) && old.UID == claim.UID && old.DeletionTimestamp.Equal(claim.DeletionTimestamp) &&
		old.Spec.VolumeName == claim.Spec.VolumeName && selectedNode(old) == selectedNode(claim)
}

func (l *claimLoop) claimDeleted(claim *corev1.PersistentVolumeClaim) {
	l.sources.enqueueSourceOf(claim)
	if l.forget(keyOf(claim)) {
		return // its key stays queued until the outcome is known
	}
	l.queue.Forget(keyOf(claim))
}

// classChanged wakes the claims that wait for the class, or for another one of its name.
func (l *claimLoop) classChanged(class *storagev1.StorageClass) {
	if !l.c.driver.is(class.Provisioner) {
		return
	}
	for _, claim := range l.c.claims.ByIndex(kube.ByClass, class.Name) {
		l.claimChanged(claim)
	}
}

// wake enqueues the claims that wait for a dependency (see [kube.DependencyKey]). A request
// that the driver called infeasible may be feasible now.
func (l *claimLoop) wake(dependency string) {
	for _, claim := range l.c.claims.ByIndex(kube.ByDependency, dependency) {
		key := keyOf(claim)
		if !kube.ClaimHandledBy(l.c.driver.name, claim) {
			continue
		}
		l.ops.allowRetry(key)
		if !l.ops.Get(key).State.InProgress() {
			l.queue.Add(key)
		}
	}
}

// nodeChanged wakes the claims that wait for a topology: those of that node, and those for
// which no topology was found anywhere.
func (l *claimLoop) nodeChanged(node string, changed bool) {
	if !changed {
		return
	}
	for _, claim := range l.c.claims.ByIndex(kube.ByNode, node) {
		l.claimChanged(claim)
	}
	var waiting []claimKey
	for key, c := range l.ops.All() {
		if c.Payload.awaitsTopology {
			waiting = append(waiting, key)
		}
	}
	for _, key := range waiting {
		l.queue.Add(key)
	}
}

// watchOptional watches what claims may reference besides their class, where such kinds
// exist, so that the claims need not wait for their back-off.
func (l *claimLoop) watchOptional(ctx context.Context, wg *sync.WaitGroup) {
	watch := func(resource schema.GroupVersionResource, changed func(old, now *metav1.PartialObjectMetadata)) *kube.OptionalMetadata {
		o := kube.NewOptionalMetadata(l.c.deps.Metadata, resource, kube.Handlers[*metav1.PartialObjectMetadata]{
			Add: func(now *metav1.PartialObjectMetadata) { changed(nil, now) },
			Update: func(old, now *metav1.PartialObjectMetadata) {
				if old.ResourceVersion != now.ResourceVersion { // else it was listed again
					changed(old, now)
				}
			},
		})
		wg.Go(func() { o.Run(ctx) })
		return o
	}
	d := l.c.driver
	if d.caps.CreateDeleteSnapshot {
		l.sources.snapshots = watch(volumeSnapshots, func(old, s *metav1.PartialObjectMetadata) {
			if old == nil || isRestored(old) == isRestored(s) { // else the change is that of a sourceProtector
				l.wake(kube.DependencyKey(kube.KindSnapshot, s.Namespace, s.Name))
			}
			l.sources.snapshotChanged(s, old == nil)
		})
	}
	if d.caps.ModifyVolume && d.VolumeAttributesClass {
		watch(kube.AttributesClasses, func(_, c *metav1.PartialObjectMetadata) {
			l.wake(kube.DependencyKey(kube.KindVolumeAttributesClass, "", c.Name))
		})
	}
	if d.CrossNamespaceVolumeDataSource {
		watch(referenceGrants, func(_, g *metav1.PartialObjectMetadata) {
			l.wake(kube.DependencyKey(kube.KindReferenceGrant, g.Namespace, ""))
		})
	}
}
