package provisioner

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// Sources are kept by a finalizer from before the first call that copies them until
// nobody waits for a copy any more: neither a claim without a volume, nor a call
// whose outcome is in doubt.

// guard puts the finalizer on a source and takes up the attempt that copies it; from
// then on the attempt counts as a use of the source.
func (t *term) guard(ctx context.Context, key claimKey, named *found, a *attempt) error {
	source := *named.source
	t.sourceLocks.LockKey(source.DependencyKey())
	defer t.sourceLocks.UnlockKey(source.DependencyKey())
	if err := t.keepSource(ctx, source, named.uid); err != nil {
		return fmt.Errorf("data source %s: protecting it by a finalizer: %w", source, err)
	}
	// Whatever releases the source of a claim that was deleted meanwhile waits for the lock.
	if now := t.gather(key); now.claim != nil && waits(now.claim) {
		t.start(key, a)
	}
	return nil
}

func (t *term) keepSource(ctx context.Context, key sourceKey, uid types.UID) error {
	if key.Kind == kube.KindClaim {
		source, err := keep(ctx, t.c.deps.Client.CoreV1().PersistentVolumeClaims(key.Namespace), key.Name, uid, cloneFinalizer)
		if err == nil {
			t.claims.Observe(source) // so that syncSource knows
		}
		return err
	}
	_, err := keep(ctx, t.c.deps.Snapshots.VolumeSnapshots(key.Namespace), key.Name, uid, snapshotFinalizer)
	if apierrors.IsForbidden(err) {
		klog.FromContext(ctx).Info("No permission to protect the VolumeSnapshot while it is restored; grant update on volumesnapshots", "snapshot", klog.KRef(key.Namespace, key.Name), "err", err)
		return nil
	}
	return err
}

// keep puts a finalizer on the object that has both name and uid.
func keep[T metav1.Object](ctx context.Context, w kube.Writer[T], name string, uid types.UID, finalizer string) (T, error) {
	source, err := w.Get(ctx, name, metav1.GetOptions{})
	if err == nil && source.GetUID() != uid {
		err = fmt.Errorf("it was replaced by another one of its name, with UID %q instead of %q", source.GetUID(), uid)
	}
	if err != nil {
		return source, err
	}
	return kube.PatchMetadata(ctx, w, source, kube.MetadataPatch{AddFinalizers: []string{finalizer}})
}

// inUse tells whether somebody waits for a copy of a source.
func (t *term) inUse(key sourceKey) bool {
	t.mu.Lock()
	copies := t.copies[key]
	t.mu.Unlock()
	if copies > 0 {
		return true
	}
	for _, claim := range t.c.claims.ByIndex(kube.ByDependency, key.DependencyKey()) {
		newest, ok := t.claims.Get(kube.Key(claim))
		if !ok || newest.UID != claim.UID || !waits(newest) || t.progressOf(claim.UID).saved {
			continue
		}
		if source := copied(newest); source != nil && *source == key { // the index does not know API groups
			return true
		}
	}
	return false
}

// syncSource takes the finalizer from a source that nobody uses any more.
func (t *term) syncSource(ctx context.Context, key sourceKey) (time.Time, error) {
	t.sourceLocks.LockKey(key.DependencyKey())
	defer t.sourceLocks.UnlockKey(key.DependencyKey())
	if t.inUse(key) {
		return time.Time{}, nil // the end of the use comes by an event
	}
	var err error
	if key.Kind == kube.KindClaim {
		err = t.releaseClaim(ctx, key)
	} else {
		err = t.releaseSnapshot(ctx, key)
	}
	switch {
	case kube.IsNotFound(err):
		return time.Time{}, nil
	case apierrors.IsForbidden(err):
		klog.FromContext(ctx).Info("No permission to remove the finalizer that protected a source", "source", key.String(), "err", err)
		return time.Now().Add(t.c.cfg.RetryIntervalMax), nil
	case err != nil:
		return time.Time{}, fmt.Errorf("%s: removing the finalizer that protected it: %w", key, err)
	}
	return time.Time{}, nil
}

// releaseClaim leaves alone what belongs to another driver, whose calls are not known here.
func (t *term) releaseClaim(ctx context.Context, key sourceKey) error {
	// When the finalizer is new to the cache, an event comes with it.
	if known, ok := t.claims.Get(key.Namespace + "/" + key.Name); !ok || !isCloned(known) {
		return nil
	}
	claims := t.c.deps.Client.CoreV1().PersistentVolumeClaims(key.Namespace)
	source, err := claims.Get(ctx, key.Name, metav1.GetOptions{})
	if err != nil || !isCloned(source) {
		return err
	}
	if others, err := t.ofAnotherDriver(ctx, source); err != nil || others {
		return err
	}
	changed, err := kube.PatchMetadata(ctx, claims, source, kube.MetadataPatch{RemoveFinalizers: []string{cloneFinalizer}})
	return t.claims.RecordWrite(source, changed, err)
}

// ofAnotherDriver tells whether the volume of a claim is one of another driver. Where
// there is no volume, nobody can copy it.
func (t *term) ofAnotherDriver(ctx context.Context, claim *corev1.PersistentVolumeClaim) (bool, error) {
	if claim.Spec.VolumeName == "" {
		return false, nil
	}
	pv, known := t.volumes.Get(claim.Spec.VolumeName)
	if !known {
		var err error
		pv, err = t.c.deps.Client.CoreV1().PersistentVolumes().Get(ctx, claim.Spec.VolumeName, metav1.GetOptions{})
		if kube.IsNotFound(err) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
	}
	pv, err := t.c.driver.asCSI(pv)
	if err != nil {
		return false, err
	}
	return pv.Spec.CSI == nil || pv.Spec.CSI.Driver != t.c.driver.name, nil
}

func isCloned(claim *corev1.PersistentVolumeClaim) bool {
	return slices.Contains(claim.Finalizers, cloneFinalizer)
}

func isRestored(s metav1.Object) bool { return slices.Contains(s.GetFinalizers(), snapshotFinalizer) }

// releaseSnapshot leaves alone snapshots of other drivers.
func (t *term) releaseSnapshot(ctx context.Context, key sourceKey) error {
	snapshots := t.c.deps.Snapshots.VolumeSnapshots(key.Namespace)
	source, err := snapshots.Get(ctx, key.Name, metav1.GetOptions{})
	if err != nil || !isRestored(source) {
		return err
	}
	if name, err := volumerules.BoundContent(source); err == nil {
		content, err := t.c.deps.Snapshots.VolumeSnapshotContents().Get(ctx, name, metav1.GetOptions{})
		if err == nil && content.Spec.Driver != t.c.driver.name {
			return nil
		}
		if err != nil && !kube.IsNotFound(err) { // without content nobody can restore it
			return err
		}
	}
	_, err = kube.PatchMetadata(ctx, snapshots, source, kube.MetadataPatch{RemoveFinalizers: []string{snapshotFinalizer}})
	return err
}

// sweep looks, at once and then periodically, for snapshots that were left with the
// finalizer by a process that did not live to remove it.
func (t *term) sweep(ctx context.Context, interval time.Duration) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		for _, s := range t.snapshots.List() {
			if isRestored(s) {
				t.snapshotQueue.Add(sourceKey{Kind: kube.KindSnapshot, Namespace: s.Namespace, Name: s.Name})
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// left queues the source of a claim that does not wait any more.
func (t *term) left(claim *corev1.PersistentVolumeClaim) {
	source := copied(claim)
	if source != nil && source.Kind == kube.KindSnapshot && !kube.ClaimHandledBy(t.c.driver.name, claim) {
		return // of another driver, as a rule, and a read for each would not be: the sweep finds the others
	}
	t.released(source)
}

// copied is what the volume of a claim is to be a copy of; nil for nothing.
func copied(claim *corev1.PersistentVolumeClaim) *sourceKey {
	source, err := volumerules.SourceOf(claim, true) // also what was allowed once
	if err != nil {
		return nil
	}
	return source
}

// released queues a source that one user has left.
func (t *term) released(key *sourceKey) {
	switch {
	case key == nil:
	case key.Kind == kube.KindClaim:
		t.cloneQueue.Add(*key)
	default:
		t.snapshotQueue.Add(*key)
	}
}

// countCopies keeps the number of attempts that copy a source when one of a claim
// begins or ends; the caller holds mu. It returns the source that has lost one.
func (t *term) countCopies(before, after *attempt) (lost *sourceKey) {
	if before != nil && before.source != nil && after == nil {
		if t.copies[*before.source]--; t.copies[*before.source] == 0 {
			delete(t.copies, *before.source)
		}
		lost = before.source
	}
	if after != nil && after.source != nil && before == nil {
		t.copies[*after.source]++
	}
	return lost
}
