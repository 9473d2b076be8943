package provisioner

import (
	"context"
	"fmt"
	"hash/fnv"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// Sources are kept by a finalizer from before the first call that copies them until
// nobody waits for a copy any more: neither a claim without a volume, nor a call
// whose outcome is in doubt.

// stripes are locks for sources: one that is being released is not taken into use
// meanwhile. Two sources may share a lock.
type stripes [64]sync.Mutex

func (s *stripes) lock(key sourceKey) (unlock func()) {
	h := fnv.New32a()
	_, _ = h.Write([]byte(key.need())) // a hash cannot fail
	m := &s[h.Sum32()%uint32(len(s))]
	m.Lock()
	return m.Unlock
}

// guard puts the finalizer on a source.
func (t *term) guard(ctx context.Context, key sourceKey) error {
	defer t.sourceLocks.lock(key)()
	if key.Kind == kube.KindClaim {
		claims := t.c.deps.Client.CoreV1().PersistentVolumeClaims(key.Namespace)
		source, err := claims.Get(ctx, key.Name, metav1.GetOptions{})
		if err == nil {
			_, err = kube.Change(ctx, claims, source, kube.MetaChange{AddFinalizers: []string{cloneFinalizer}})
		}
		if err != nil {
			return fmt.Errorf("data source %s: protecting it by a finalizer: %w", key, err)
		}
		return nil
	}
	snapshots := t.c.deps.Snapshots.VolumeSnapshots(key.Namespace)
	source, err := snapshots.Get(ctx, key.Name, metav1.GetOptions{})
	if err == nil {
		_, err = kube.Change(ctx, snapshots, source, kube.MetaChange{AddFinalizers: []string{snapshotFinalizer}})
	}
	if apierrors.IsForbidden(err) {
		klog.FromContext(ctx).Info("No permission to protect the VolumeSnapshot while it is restored; grant update on volumesnapshots", "snapshot", klog.KRef(key.Namespace, key.Name), "err", err)
		return nil
	}
	if err != nil {
		return fmt.Errorf("data source %s: protecting it by a finalizer: %w", key, err)
	}
	return nil
}

// inUse tells whether somebody waits for a copy of a source.
func (t *term) inUse(key sourceKey) bool {
	t.mu.Lock()
	copies := t.copies[key]
	t.mu.Unlock()
	if copies > 0 {
		return true
	}
	for _, claim := range t.c.claims.Select(kube.ByNeed, key.need()) {
		newest, ok := t.claims.Get(kube.Key(claim))
		if !ok || newest.UID != claim.UID || newest.Spec.VolumeName != "" || t.progressOf(claim.UID).saved {
			continue
		}
		if newest.DeletionTimestamp == nil || isProtected(newest) {
			return true
		}
	}
	return false
}

// syncSource takes the finalizer from a source that nobody uses any more.
func (t *term) syncSource(ctx context.Context, key sourceKey) (time.Time, error) {
	defer t.sourceLocks.lock(key)()
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
	case apierrors.IsNotFound(err):
		return time.Time{}, nil
	case apierrors.IsForbidden(err):
		klog.FromContext(ctx).Info("No permission to remove the finalizer that protected a source", "source", key.String(), "err", err)
		return time.Time{}, nil
	case err != nil:
		return time.Time{}, fmt.Errorf("%s: removing the finalizer that protected it: %w", key, err)
	}
	return time.Time{}, nil
}

// releaseClaim leaves alone what belongs to another driver, whose calls are not known here.
func (t *term) releaseClaim(ctx context.Context, key sourceKey) error {
	claims := t.c.deps.Client.CoreV1().PersistentVolumeClaims(key.Namespace)
	source, err := claims.Get(ctx, key.Name, metav1.GetOptions{})
	if err != nil || !slices.Contains(source.Finalizers, cloneFinalizer) {
		return err
	}
	if pv, ok := t.volumes.Get(source.Spec.VolumeName); ok {
		if pv, err = t.c.driver.asCSI(pv); err != nil || pv.Spec.CSI == nil || pv.Spec.CSI.Driver != t.c.driver.name {
			return err
		}
	} else if !t.c.driver.owns(source) {
		return nil
	}
	changed, err := kube.Change(ctx, claims, source, kube.MetaChange{RemoveFinalizers: []string{cloneFinalizer}})
	return t.claims.Note(source, changed, err)
}

// releaseSnapshot leaves alone snapshots of other drivers.
func (t *term) releaseSnapshot(ctx context.Context, key sourceKey) error {
	snapshots := t.c.deps.Snapshots.VolumeSnapshots(key.Namespace)
	source, err := snapshots.Get(ctx, key.Name, metav1.GetOptions{})
	if err != nil || !slices.Contains(source.Finalizers, snapshotFinalizer) {
		return err
	}
	if name, err := checkSnapshot(source); err == nil {
		content, err := t.c.deps.Snapshots.VolumeSnapshotContents().Get(ctx, name, metav1.GetOptions{})
		if err == nil && content.Spec.Driver != t.c.driver.name {
			return nil
		}
		if err != nil && !apierrors.IsNotFound(err) { // without content nobody can restore it
			return err
		}
	}
	_, err = kube.Change(ctx, snapshots, source, kube.MetaChange{RemoveFinalizers: []string{snapshotFinalizer}})
	return err
}

// sweep looks, at once and then periodically, for snapshots that were left with the
// finalizer by a process that did not live to remove it.
func (t *term) sweep(ctx context.Context, interval time.Duration) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		for _, s := range t.snapshots.List() {
			if slices.Contains(s.Finalizers, snapshotFinalizer) {
				t.snapshotQueue.Add(sourceKey{kube.KindSnapshot, s.Namespace, s.Name})
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
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
