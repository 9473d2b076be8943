package provisioner

import (
	"context"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/tracing"
)

// save creates the PersistentVolume of a volume that was made. Only this is
// repeated when it fails.
func (t *term) save(ctx context.Context, key claimKey, a *attempt) error {
	return t.saveBy(ctx, t.c.deps.Client, key, a)
}

func (t *term) saveBy(ctx context.Context, client kubernetes.Interface, key claimKey, a *attempt) error {
	pv, err := client.CoreV1().PersistentVolumes().Create(ctx, a.volume, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		if pv, err = t.existing(ctx, key, a); pv == nil {
			return err
		}
	}
	if err != nil {
		err = fmt.Errorf("saving PersistentVolume %q for volume %q: %w", a.volume.Name, a.handle, err)
		if apierrors.IsInvalid(err) || apierrors.IsForbidden(err) { // nothing that passes by itself
			t.failed(a.claim, failedEvent(a.plan.ClassName, err))
		}
		return err
	}
	t.volumes.Observe(pv)
	if t.c.deps.VolumeObserver != nil {
		t.c.deps.VolumeObserver.VolumeProvisioned(pv)
	}
	var took time.Duration
	t.remember(key.UID, func(p *progress) { p.attempt, p.saved, took = nil, true, time.Since(p.began) })
	t.c.metrics.claimDone(a.claim, took)
	t.tell(a.claim, succeededEvent(pv.Name))
	tracing.EndOperation(ctx, a.claim.CreationTimestamp.Time, "persistentVolumeClaim", klog.KObj(a.claim).String(), "persistentVolume", pv.Name, "volumeHandle", a.handle)
	klog.FromContext(ctx).Info("Volume provisioned", "persistentVolume", klog.KObj(pv), "volumeHandle", a.handle)
	return nil
}

// existing is the PersistentVolume of the name that was to be created, if it is
// for this very volume; else nil, and what follows for the attempt is done.
func (t *term) existing(ctx context.Context, key claimKey, a *attempt) (*corev1.PersistentVolume, error) {
	name, handle := a.volume.Name, a.handle
	pv, err := t.c.deps.Client.CoreV1().PersistentVolumes().Get(ctx, name, metav1.GetOptions{})
	if err != nil { // NotFound too: it is created in the next attempt
		return nil, fmt.Errorf("reading PersistentVolume %q, which exists already: %w", name, err)
	}
	same := t.c.driver.isVolume(pv, handle, a.volume.Spec.NodeAffinity)
	ours := pv.Spec.ClaimRef != nil && pv.Spec.ClaimRef.UID == key.UID
	switch {
	case same && ours && !isReclaimed(pv, a.claim):
		return pv, nil
	case same && ours:
		// It is being deleted, and its volume with it: the driver has to be asked again, afterwards.
		t.volumes.Observe(pv)
		t.change(key, a, func(a *attempt) { a.volume, a.doubt = nil, true })
		return nil, fmt.Errorf("PersistentVolume %q of an earlier attempt is being deleted; waiting for its end", name)
	case same:
		// Two claims with one name of their volumes: the volume is the other's.
		err = fmt.Errorf("volume %q belongs to PersistentVolume %q, which is not for this claim; see --volume-name-uuid-length if the names of volumes are too short", handle, name)
		t.remember(key.UID, func(p *progress) { p.attempt, p.settled = nil, true })
		t.failed(a.claim, failedEvent(a.plan.ClassName, err))
		return nil, err
	}
	err = fmt.Errorf("PersistentVolume %q exists already, for another volume than %q", name, handle)
	t.change(key, a, func(a *attempt) {
		a.place, a.volume, a.handle, a.waste, a.wasteful, a.doubt = a.volume.Spec.NodeAffinity, nil, "", handle, err, true
	})
	return nil, err
}

// isVolume tells whether pv is for the volume with an ID that is in a place. Drivers that
// work on one node may give volumes of several nodes the same ID.
func (d driver) isVolume(pv *corev1.PersistentVolume, id string, place *corev1.VolumeNodeAffinity) bool {
	if csi := pv.Spec.CSI; csi == nil && !migration.SameVolume(d.name, pv, id) || csi != nil && (csi.Driver != d.name || csi.VolumeHandle != id) {
		return false
	}
	return !d.NodeDeployment || equality.Semantic.DeepEqual(pv.Spec.NodeAffinity, place)
}

// isSomeones tells whether the volume that cannot be used is that of a PersistentVolume, or
// about to be that of another claim: a driver that gives two claims one volume, or forgets
// what it has said of one, must not lead to its deletion.
func (t *term) isSomeones(ctx context.Context, key claimKey, a *attempt) (string, error) {
	pv, err := t.c.deps.Client.CoreV1().PersistentVolumes().Get(ctx, a.plan.VolumeName, metav1.GetOptions{})
	switch {
	case err == nil && t.c.driver.isVolume(pv, a.waste, a.place):
		return fmt.Sprintf("PersistentVolume %q", pv.Name), nil
	case err != nil && !kube.IsNotFound(err):
		return "", fmt.Errorf("reading PersistentVolume %q before deleting volume %q: %w", a.plan.VolumeName, a.waste, err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for claim, p := range t.claimProgress {
		if o := p.attempt; claim != key.UID && o != nil && o.plan.VolumeName == a.plan.VolumeName {
			return fmt.Sprintf("claim %s/%s", o.claim.Namespace, o.claim.Name), nil
		}
	}
	return "", nil
}

// cleanUp deletes a volume that was made and cannot be used, unless it is somebody's.
func (t *term) cleanUp(ctx context.Context, key claimKey, a *attempt) error {
	owner, err := t.isSomeones(ctx, key, a)
	if err != nil {
		return err
	}
	if owner != "" {
		err := fmt.Errorf("%w; it is not deleted, since it belongs to %s", a.wasteful, owner)
		t.remember(key.UID, func(p *progress) { p.attempt, p.settled = nil, true })
		t.failed(a.claim, failedEvent(a.plan.ClassName, err))
		return err
	}
	a = t.refreshSecrets(ctx, key, a)
	defer t.c.deps.Locks.Share(a.waste)()
	call, cancel := context.WithTimeout(csiclient.WithMigrated(ctx, a.plan.Migrated), t.c.cfg.Timeout)
	defer cancel()
	if _, err := t.c.deps.CSI.DeleteVolume(call, &csi.DeleteVolumeRequest{VolumeId: a.waste, Secrets: a.request.GetSecrets()}); err != nil {
		err = fmt.Errorf("%w; deleting volume %q again failed and is repeated: %w", a.wasteful, a.waste, err)
		t.failed(a.claim, failedEvent(a.plan.ClassName, err))
		return err
	}
	if t.c.deps.VolumeObserver != nil {
		t.c.deps.VolumeObserver.VolumeNotProvisioned(a.plan.ClassName)
	}
	t.announce(key, a)
	t.remember(key.UID, func(p *progress) { p.attempt, p.settled = nil, true })
	t.failed(a.claim, failedEvent(a.plan.ClassName, a.wasteful))
	if s := t.gather(key); s.claim != nil && isProtected(s.claim) {
		if err := t.unprotect(ctx, s.claim); err != nil {
			return err
		}
	}
	if _, exists := t.claims.Get(key.Namespace + "/" + key.Name); !exists {
		return nil
	}
	return a.wasteful
}

// saveAll is the last try to save what was made and is not saved, before the end.
func (t *term) saveAll(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), apiGrace) // ctx has ended
	defer cancel()
	t.mu.Lock()
	unsaved := map[claimKey]*attempt{}
	for uid, p := range t.claimProgress {
		if p.attempt != nil && p.attempt.volume != nil {
			unsaved[claimKey{p.attempt.claim.Namespace, p.attempt.claim.Name, uid}] = p.attempt
		}
	}
	t.mu.Unlock()
	var all errgroup.Group
	all.SetLimit(20)
	for key, a := range unsaved {
		all.Go(func() error {
			if err := t.saveBy(ctx, t.c.deps.UnthrottledClient, key, a); err != nil {
				klog.FromContext(ctx).Error(err, "A volume was made and its PersistentVolume is not saved; the next process finds it by its name as long as the claim exists",
					"persistentVolumeClaim", klog.KRef(key.Namespace, key.Name), "volumeHandle", a.handle)
			}
			return nil
		})
	}
	_ = all.Wait() // each has told its error
}
