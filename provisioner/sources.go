// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"golang.org/x/sync/singleflight"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/keylock"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/volumerules"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// sourceProtector keeps the sources of clones and of restored snapshots by a finalizer,
// from before the first CreateVolume until no claim waits for a copy and no operation
// makes one.
type sourceProtector struct {
	c         *Controller
	claims    *kube.TermCache[*corev1.PersistentVolumeClaim]
	volumes   *kube.TermCache[*corev1.PersistentVolume]
	ops       *operations
	snapshots *kube.OptionalMetadata            // nil unless snapshots are restored
	locks     keylock.Locks[volumerules.Source] // shared while a source is protected, exclusive while it is released
	protects  singleflight.Group                // claims that protect a source at the same time share the requests

	cloneQueue, snapshotQueue *workloop.Loop[volumerules.Source] // sources to release
}

func newSourceProtector(
	c *Controller, claims *kube.TermCache[*corev1.PersistentVolumeClaim], volumes *kube.TermCache[*corev1.PersistentVolume],
	ops *operations,
) *sourceProtector {
	p := &sourceProtector{c: c, claims: claims, volumes: volumes, ops: ops}
	config := c.loopConfig("clone-protection")
	config.WaitReady = nil // no call of the driver
	p.cloneQueue = workloop.New(config, c.deps.Queues, p.sync)
	config.Name = "snapshot-protection"
	p.snapshotQueue = workloop.New(config, c.deps.Queues, p.sync)
	ops.sourceReleased = p.enqueue
	return p
}

// protect adds the finalizer to a source. The caller holds a shared lock of it.
//
// Several callers share the requests of the first one. Its lock keeps the finalizer from being removed until they end, and
// from then on that of each caller. The contexts of all callers end with the same term.
func (p *sourceProtector) protect(ctx context.Context, key volumerules.Source, source metav1.Object) error {
	_, err, _ := p.protects.Do(fmt.Sprintf("%s %s", key, source.GetUID()), func() (any, error) {
		return nil, p.addProtection(ctx, source)
	})
	return err
}

// addProtection adds the finalizer to a source.
func (p *sourceProtector) addProtection(ctx context.Context, source metav1.Object) error {
	if claim, ok := source.(*corev1.PersistentVolumeClaim); ok {
		protected, err := addFinalizer(ctx, p.c.deps.Client.CoreV1().PersistentVolumeClaims(claim.Namespace), claim, kube.CloningProtection)
		if err == nil {
			p.claims.Observe(protected) // for releaseClaim
		}
		return err
	}
	snapshot, ok := source.(*snapshotv1.VolumeSnapshot)
	if !ok {
		return fmt.Errorf("unknown kind of source: %T", source)
	}
	_, err := addFinalizer(ctx, p.c.deps.Snapshots.VolumeSnapshots(snapshot.Namespace), snapshot, kube.SnapshotProtection)
	if apierrors.IsForbidden(err) {
		klog.FromContext(ctx).Info("VolumeSnapshot is restored without finalizer: no permission. Grant patch on volumesnapshots",
			"volumeSnapshot", klog.KObj(snapshot), "err", err)
		return nil
	}
	return err
}

// addFinalizer adds a finalizer to a source. It was read before its lock was held: the finalizer that it had may have been removed since.
func addFinalizer[T metav1.Object](ctx context.Context, w kube.Writer[T], source T, finalizer string) (T, error) {
	if slices.Contains(source.GetFinalizers(), finalizer) {
		live, err := w.Get(ctx, source.GetName(), metav1.GetOptions{})
		if err == nil && live.GetUID() != source.GetUID() {
			err = fmt.Errorf("it was recreated, with UID %q instead of %q", live.GetUID(), source.GetUID())
		}
		if err != nil {
			return source, err
		}
		source = live
	}
	return kube.PatchMetadata(ctx, w, source, kube.MetadataPatch{AddFinalizers: []string{finalizer}})
}

// inUse reports whether a claim waits for a copy of a source, or an operation makes one.
func (p *sourceProtector) inUse(key volumerules.Source) bool {
	if p.ops.copies(key) {
		return true
	}
	for _, claim := range p.c.claims.ByIndex(kube.ByDependency, key.DependencyKey()) {
		newest, exists := p.claims.Newest(claim)
		if !exists || !waits(newest) || p.ops.Get(keyOf(claim)).Payload.saved {
			continue
		}
		if source := dataSourceOf(newest); source != nil && *source == key { // the index ignores API groups
			return true
		}
	}
	return false
}

// knowsClaims reports whether the cache has all claims that an earlier leader may have provisioned.
func (p *sourceProtector) knowsClaims(ctx context.Context) (bool, error) {
	if !p.claims.Begun() { // several workers may list then: a lock would make them wait for one request
		if err := kube.BeginTerm(ctx, p.claims, p.c.deps.Client.CoreV1().PersistentVolumeClaims("").List); err != nil {
			return false, fmt.Errorf("listing one claim before removing source finalizers: %w", err)
		}
	}
	return p.claims.Complete(), nil
}

// sync removes the finalizer from a source that is no longer in use.
func (p *sourceProtector) sync(ctx context.Context, key volumerules.Source) (time.Time, error) {
	complete, err := p.knowsClaims(ctx)
	if err != nil {
		return time.Time{}, err
	}
	release, free := p.locks.TryExclusive(key)
	if !free { // a claim that fails to protect the source does not enqueue it
		return time.Now().Add(p.c.cfg.RetryIntervalStart), workloop.Waiting{}
	}
	defer release()
	switch {
	case p.inUse(key):
		return time.Time{}, nil // the end of the use enqueues the source
	case !complete: // until the next event or bookmark of PVCs, about a minute
		return time.Now().Add(p.c.cfg.RetryIntervalStart), workloop.Waiting{}
	}
	if key.Kind == kube.KindClaim {
		err = p.releaseClaim(ctx, key)
	} else {
		err = p.releaseSnapshot(ctx, key)
	}
	switch {
	case kube.IsNotFound(err):
		return time.Time{}, nil
	case apierrors.IsForbidden(err):
		const message = "Removing the source finalizer is forbidden. Grant get and patch on persistentvolumeclaims and volumesnapshots"
		klog.FromContext(ctx).Info(message, "source", key.String(), "err", err)
		return time.Now().Add(p.c.cfg.RetryIntervalMax), workloop.Waiting{Cause: err}
	case err != nil:
		return time.Time{}, fmt.Errorf("removing source finalizer from %s: %w", key, err)
	}
	return time.Time{}, nil
}

// releaseClaim skips claims of other drivers, whose calls are not known here.
func (p *sourceProtector) releaseClaim(ctx context.Context, key volumerules.Source) error {
	// A finalizer that is new to the cache comes with an event.
	source, ok := p.claims.Get(key.Namespace + "/" + key.Name)
	if !ok || !isCloned(source) {
		return nil
	}
	others, err := p.ofAnotherDriver(ctx, source)
	if err != nil || others {
		return err
	}
	_, err = p.claims.Patch(ctx, p.c.deps.Client.CoreV1().PersistentVolumeClaims(key.Namespace), source,
		kube.MetadataPatch{RemoveFinalizers: []string{kube.CloningProtection}})
	return err
}

// ofAnotherDriver reports whether the volume of a claim is one of another driver. A claim
// without a volume cannot be cloned by any driver.
func (p *sourceProtector) ofAnotherDriver(ctx context.Context, claim *corev1.PersistentVolumeClaim) (bool, error) {
	if claim.Spec.VolumeName == "" {
		return false, nil
	}
	pv, known := p.volumes.Get(claim.Spec.VolumeName)
	if !known {
		var err error
		pv, err = p.c.deps.Client.CoreV1().PersistentVolumes().Get(ctx, claim.Spec.VolumeName, metav1.GetOptions{})
		if kube.IsNotFound(err) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
	}
	pv, err := p.c.driver.asCSI(pv)
	if err != nil {
		return false, err
	}
	return pv.Spec.CSI == nil || pv.Spec.CSI.Driver != p.c.driver.name, nil
}

func isCloned(claim *corev1.PersistentVolumeClaim) bool {
	return slices.Contains(claim.Finalizers, kube.CloningProtection)
}

func isRestored(s metav1.Object) bool {
	return slices.Contains(s.GetFinalizers(), kube.SnapshotProtection)
}

// releaseSnapshot skips snapshots of other drivers.
func (p *sourceProtector) releaseSnapshot(ctx context.Context, key volumerules.Source) error {
	snapshots := p.c.deps.Snapshots.VolumeSnapshots(key.Namespace)
	source, err := snapshots.Get(ctx, key.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil // also without the CRDs; if a proxy returns it for an existing snapshot, the periodic sweep catches that
	}
	if err != nil || !isRestored(source) {
		return err
	}
	if name, err := volumerules.BoundContent(source); err == nil {
		content, err := p.c.deps.Snapshots.VolumeSnapshotContents().Get(ctx, name, metav1.GetOptions{})
		if err == nil && content.Spec.Driver != p.c.driver.name {
			return nil
		}
		if err != nil && !kube.IsNotFound(err) { // a snapshot without content cannot be restored
			return err
		}
	}
	_, err = kube.PatchMetadata(ctx, snapshots, source, kube.MetadataPatch{RemoveFinalizers: []string{kube.SnapshotProtection}})
	return err
}

// run releases sources until ctx ends.
func (p *sourceProtector) run(ctx context.Context, wg *sync.WaitGroup) {
	wg.Go(func() { p.cloneQueue.Run(ctx, int(p.c.cfg.CloningProtectionThreads)) })
	wg.Go(func() { p.snapshotQueue.Run(ctx, int(p.c.cfg.CloningProtectionThreads)) })
	if p.sweeps() {
		wg.Go(func() { workloop.Every(ctx, p.c.cfg.SnapshotOrphanSweepInterval, p.sweep) })
	}
}

// stop ends the queues, after run or in its place.
func (p *sourceProtector) stop() {
	p.cloneQueue.Stop()
	p.snapshotQueue.Stop()
}

func (p *sourceProtector) sweeps() bool {
	return p.c.driver.caps.CreateDeleteSnapshot && p.c.cfg.SnapshotOrphanSweepInterval > 0
}

// sweep enqueues the snapshots that still have the finalizer of a process that exited before it removed it. The first list of the watch
// has done so, too.
func (p *sourceProtector) sweep() {
	if snapshots, _, _ := p.snapshots.Get(); snapshots != nil {
		for _, s := range snapshots.List() {
			p.snapshotChanged(s, true)
		}
	}
}

func (p *sourceProtector) snapshotChanged(s metav1.Object, added bool) {
	if isRestored(s) && p.sweeps() && p.mayRelease(added) {
		p.snapshotQueue.Add(volumerules.Source{Kind: kube.KindSnapshot, Namespace: s.GetNamespace(), Name: s.GetName()})
	}
}

func (p *sourceProtector) claimChanged(claim *corev1.PersistentVolumeClaim, added bool) {
	if isCloned(claim) && p.mayRelease(added) {
		p.cloneQueue.Add(volumerules.Source{Kind: kube.KindClaim, Namespace: claim.Namespace, Name: claim.Name})
	}
}

// mayRelease reports whether an event, of a new object or of an update, may lead to the removal of a finalizer. With
// distributed provisioning, the instance of another node may have just added it for a claim that this cache still lacks.
func (p *sourceProtector) mayRelease(added bool) bool { return added || !p.c.cfg.NodeDeployment }

// enqueueSourceOf enqueues the source of a claim that does not wait for a copy any more.
func (p *sourceProtector) enqueueSourceOf(claim *corev1.PersistentVolumeClaim) {
	source := dataSourceOf(claim)
	d := p.c.driver
	if source != nil && source.Kind == kube.KindSnapshot && (!d.caps.CreateDeleteSnapshot || !kube.ClaimHandledBy(d.name, claim)) {
		return // likely another driver's, or never restored; skip the live GET, the periodic sweep catches the rest
	}
	p.enqueue(source)
}

// dataSourceOf returns the source that the volume of a claim copies; nil for an empty volume.
func dataSourceOf(claim *corev1.PersistentVolumeClaim) *volumerules.Source {
	source, err := volumerules.SourceOf(claim, true) // also across namespaces: that was permitted when the copy began
	if err != nil {
		return nil
	}
	return source
}

// enqueue enqueues the source of a copy that has ended. A nil key is ignored.
func (p *sourceProtector) enqueue(key *volumerules.Source) {
	switch {
	case key == nil:
	case key.Kind == kube.KindClaim:
		p.cloneQueue.Add(*key)
	default:
		p.snapshotQueue.Add(*key)
	}
}
