package provisioner

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tracing"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// removal is what is remembered of a volume from the begin of its deletion until
// its PersistentVolume is gone.
type removal struct {
	began   time.Time
	blocked time.Time // when an attachment was found for the first time; zero: never
	warned  time.Time // when that was told last
	volume  bool      // the volume is deleted at the driver
	object  bool      // the PersistentVolume is deleted, though others' finalizers may keep it
}

// volumeSnapshot is everything that decideVolume may look at.
type volumeSnapshot struct {
	volume      *corev1.PersistentVolume // nil: gone
	attachments []*storagev1.VolumeAttachment
	releasable  []string // finalizers of others that may go with ours
	removal     removal
	now         time.Time
}

// volumeAction is the one next thing to do for a PersistentVolume.
type volumeAction int

const (
	volumeNothing volumeAction = iota
	volumeChange               // of finalizers
	volumeWait                 // for the end of an attachment
	volumeFail
	volumeDelete // DeleteVolume
	volumeRemove // delete the PersistentVolume
)

// String is the name of a in the log.
func (a volumeAction) String() string {
	return [...]string{"nothing", "change finalizers", "wait", "fail", "delete", "remove"}[a]
}

type volumeStep struct {
	action volumeAction
	reason string
	err    error              // of volumeFail and volumeWait
	change kube.MetadataPatch // of volumeChange
}

// responsible tells whether pv is one of the driver, made by whomever, and of this node.
func (d driver) responsible(pv *corev1.PersistentVolume) bool {
	by, provisioned := pv.Annotations[storagehelpers.AnnDynamicallyProvisioned]
	to := pv.Annotations[storagehelpers.AnnMigratedTo]
	switch {
	case provisioned && !d.is(by) && !d.is(to),
		!provisioned && pv.Spec.CSI != nil && !d.is(pv.Spec.CSI.Driver),
		!provisioned && pv.Spec.CSI == nil && !d.is(to):
		return false
	}
	return d.reaches(pv)
}

// concerning tells whether there may be something to do for pv, so that the many
// that are simply in use are not even queued.
func (d driver) concerning(pv *corev1.PersistentVolume) bool {
	has := slices.Contains(pv.Finalizers, volumeFinalizer)
	switch {
	case !reclaims(pv):
		return has
	case pv.Status.Phase == corev1.VolumeReleased:
		return true
	}
	return pv.Status.Phase == corev1.VolumeBound && pv.DeletionTimestamp == nil && !has
}

// decideVolume names the one next step for a PersistentVolume of the driver.
//
// After DeleteVolume the finalizers go first and the object second. The other way
// round the object would be seen being deleted by everybody who has a finalizer on
// it, each of whom would write it once more. A crash between the two leaves a
// released volume without finalizer, for which DeleteVolume is repeated, as the
// CSI spec allows.
func (d driver) decideVolume(s volumeSnapshot) volumeStep {
	pv := s.volume
	if pv == nil || s.removal.object {
		return volumeStep{reason: "Gone"}
	}
	has, deleting := slices.Contains(pv.Finalizers, volumeFinalizer), pv.DeletionTimestamp != nil
	switch {
	case s.removal.volume && (has || len(s.releasable) > 0):
		return volumeStep{action: volumeChange, reason: "Deleted", change: kube.MetadataPatch{RemoveFinalizers: append([]string{volumeFinalizer}, s.releasable...)}}
	case s.removal.volume && !deleting:
		return volumeStep{action: volumeRemove, reason: "Deleted"}
	case s.removal.volume:
		return volumeStep{reason: "OthersKeepIt"}
	case !reclaims(pv) && has:
		return volumeStep{action: volumeChange, reason: "Retained", change: kube.MetadataPatch{RemoveFinalizers: []string{volumeFinalizer}}}
	case !reclaims(pv):
		return volumeStep{reason: "Retained"}
	case deleting && !has:
		return volumeStep{reason: "NotOurs"}
	case pv.Status.Phase == corev1.VolumeBound && !has:
		return volumeStep{action: volumeChange, reason: "Unprotected", change: kube.MetadataPatch{AddFinalizers: []string{volumeFinalizer}}}
	case pv.Status.Phase != corev1.VolumeReleased:
		return volumeStep{reason: "InUse"}
	}
	if translated, err := d.asCSI(pv); err != nil {
		return volumeStep{action: volumeFail, reason: "CannotTranslate", err: err}
	} else if translated.Spec.CSI == nil || translated.Spec.CSI.Driver != d.name {
		return volumeStep{action: volumeFail, reason: "NotCSI", err: fmt.Errorf("PersistentVolume %q has no source of CSI driver %q", pv.Name, d.name)}
	}
	switch {
	case !d.controllerService || !d.createsVolumes:
		return volumeStep{action: volumeFail, reason: "CannotDelete", err: fmt.Errorf("driver %q does not support deleting volumes: it does not report CONTROLLER_SERVICE and CREATE_DELETE_VOLUME", d.name)}
	case d.publishes && len(s.attachments) > 0:
		return volumeStep{action: volumeWait, reason: "Attached", err: fmt.Errorf("PersistentVolume %q is still attached to node %q (VolumeAttachment %q)", pv.Name, s.attachments[0].Spec.NodeName, s.attachments[0].Name)}
	}
	return volumeStep{action: volumeDelete, reason: "Released"}
}

// blockedWarning is how long an attachment may delay a deletion before the user is
// told; detaching takes a while as a rule.
const blockedWarning = time.Minute

// syncVolume brings one PersistentVolume as far as it goes.
func (t *term) syncVolume(ctx context.Context, name string) (time.Time, error) {
	log := klog.FromContext(ctx).WithValues("persistentVolume", klog.KRef("", name))
	ctx = klog.NewContext(ctx, log)
	var known types.UID
	for range maxRounds {
		s := t.gatherVolume(name)
		if s.volume == nil && known != "" { // its event came before what was noted last
			t.mu.Lock()
			delete(t.removals, known)
			t.mu.Unlock()
		} else if s.volume != nil {
			known = s.volume.UID
		}
		if s.volume != nil && !t.c.driver.responsible(s.volume) {
			return time.Time{}, nil
		}
		step := t.c.driver.decideVolume(s)
		log.V(2).Info("Decided", "action", step.action.String(), "reason", step.reason)
		switch step.action {
		case volumeNothing:
			return time.Time{}, nil
		case volumeWait:
			return t.waitDetached(s, step.err), nil
		}
		traced, end := tracing.StartSpan(tracing.WithOperation(ctx, "Delete", s.volume.UID), step.action.String())
		err := t.applyVolume(traced, s, step)
		end(err)
		if err != nil {
			return time.Time{}, err
		}
	}
	return time.Time{}, fmt.Errorf("PersistentVolume %q is not settled after %d steps", name, maxRounds)
}

func (t *term) gatherVolume(name string) volumeSnapshot {
	s := volumeSnapshot{now: time.Now()}
	pv, ok := t.volumes.Get(name)
	if !ok {
		return s
	}
	s.volume = pv
	if t.c.driver.publishes {
		s.attachments = t.c.attachments.ByIndex(kube.ByVolume, name)
	}
	t.mu.Lock()
	if r := t.removals[pv.UID]; r != nil {
		s.removal = *r
	}
	t.mu.Unlock()
	if s.removal.volume && t.c.deps.RemovableFinalizers != nil {
		s.releasable = t.c.deps.RemovableFinalizers(pv)
	}
	return s
}

// removing changes what is remembered of a volume that is being deleted.
func (t *term) removing(pv *corev1.PersistentVolume, change func(*removal)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.removals[pv.UID]
	if r == nil {
		r = &removal{began: time.Now()}
		t.removals[pv.UID] = r
	}
	change(r)
}

// waitDetached is when to look again; the end of the attachment comes by an event.
func (t *term) waitDetached(s volumeSnapshot, err error) time.Time {
	next := s.now.Add(blockedWarning)
	t.removing(s.volume, func(r *removal) {
		if r.blocked.IsZero() {
			r.blocked, r.warned = s.now, s.now
		}
		if s.now.Sub(r.warned) >= blockedWarning {
			r.warned = s.now
			t.tell(s.volume, failedDeleteEvent(fmt.Errorf("%w, for %v now; the volume is deleted when that has ended", err, s.now.Sub(r.blocked).Round(time.Second))))
		}
	})
	return next
}

func (t *term) applyVolume(ctx context.Context, s volumeSnapshot, step volumeStep) error {
	pv, volumes := s.volume, t.c.deps.Client.CoreV1().PersistentVolumes()
	switch step.action {
	case volumeChange:
		changed, err := kube.PatchMetadata(ctx, volumes, pv, step.change)
		if err := t.volumes.RecordWrite(pv, changed, err); err != nil {
			return fmt.Errorf("changing the finalizers of PersistentVolume %q: %w", pv.Name, err)
		}
		return nil
	case volumeFail:
		return t.failedDelete(pv, step.err)
	case volumeDelete:
		return t.deleteVolume(ctx, pv)
	case volumeRemove:
		err := volumes.Delete(ctx, pv.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: ptr.To(pv.UID)}})
		if err != nil && !kube.IsNotFound(err) && !apierrors.IsConflict(err) { // Conflict: another one of its name
			return fmt.Errorf("deleting PersistentVolume %q: %w", pv.Name, err)
		}
		t.removing(pv, func(r *removal) { r.object = true })
		return nil
	}
	return fmt.Errorf("action %v has no implementation", step.action)
}

func (t *term) failedDelete(pv *corev1.PersistentVolume, err error) error {
	t.c.metrics.deleteFailed.WithLabelValues(pv.Spec.StorageClassName).Inc()
	t.tell(pv, failedDeleteEvent(err))
	return err
}

// deleteVolume has the driver delete a volume. That cannot be undone, so that the
// API server is asked first whether it is still to be done.
func (t *term) deleteVolume(ctx context.Context, pv *corev1.PersistentVolume) error {
	t.removing(pv, func(*removal) {})
	live, err := t.c.deps.Client.CoreV1().PersistentVolumes().Get(ctx, pv.Name, metav1.GetOptions{})
	switch {
	case kube.IsNotFound(err), err == nil && live.UID != pv.UID:
		t.volumes.MarkDeleted(pv)
		return nil
	case err != nil:
		return fmt.Errorf("reading PersistentVolume %q before deleting its volume: %w", pv.Name, err)
	case live.ResourceVersion != pv.ResourceVersion:
		t.volumes.Observe(live)
		if s := (volumeSnapshot{volume: live}); !t.c.driver.responsible(live) || t.c.driver.decideVolume(s).action != volumeDelete {
			return nil // the next round sees why not
		}
	}
	secrets, err := t.deletionSecrets(ctx, live)
	if err != nil {
		return t.failedDelete(live, err)
	}
	translated, err := t.c.driver.asCSI(live)
	if err != nil {
		return t.failedDelete(live, err)
	}
	handle := translated.Spec.CSI.VolumeHandle
	defer t.c.deps.Locks.Share(handle)()
	call, cancel := context.WithTimeout(csiclient.WithMigrated(ctx, live.Spec.CSI == nil), t.c.cfg.Timeout)
	defer cancel()
	if _, err := t.c.deps.CSI.DeleteVolume(call, &csi.DeleteVolumeRequest{VolumeId: handle, Secrets: secrets}); err != nil {
		return t.failedDelete(live, err)
	}
	if t.c.deps.VolumeObserver != nil {
		t.c.deps.VolumeObserver.VolumeDeleted(live)
	}
	var took time.Duration
	t.removing(pv, func(r *removal) { r.volume, took = true, time.Since(r.began) })
	t.c.metrics.deleted.WithLabelValues(pv.Spec.StorageClassName).Inc()
	t.c.metrics.deleteSeconds.WithLabelValues(pv.Spec.StorageClassName).Observe(took.Seconds())
	klog.FromContext(ctx).Info("Volume deleted", "volumeHandle", handle)
	tracing.EndOperation(ctx, time.Now().Add(-took), "persistentVolume", pv.Name, "volumeHandle", handle)
	return nil
}

// deletionSecrets is the secrets for DeleteVolume. One that is missing does not
// stop a deletion: the driver says whether it needs it. The user is told.
func (t *term) deletionSecrets(ctx context.Context, pv *corev1.PersistentVolume) (map[string]string, error) {
	class, exists := t.c.classes.Get(classOfVolume(pv))
	if _, _, annotated := deletionAnnotations(pv); exists && !annotated {
		translated, err := t.c.driver.translated(class)
		if err != nil {
			return nil, err
		}
		class = translated
	}
	ref, err := t.c.driver.deletionSecret(pv, class)
	if err == nil {
		err = volumerules.Secrets{Provisioner: ref}.Permitted(t.c.cfg.SecretNamespaces)
	}
	if err == nil && ref == nil {
		return nil, nil
	}
	var values map[string]string
	if err == nil {
		values, err = kube.ReadSecret(ctx, t.c.deps.Client, ref)
	}
	if err != nil {
		if ctx.Err() != nil {
			return nil, err
		}
		t.tell(pv, failedDeleteEvent(fmt.Errorf("deleting the volume without its secret: %w", err)))
	}
	return values, nil
}

func classOfVolume(pv *corev1.PersistentVolume) string {
	if name, ok := pv.Annotations[corev1.BetaStorageClassAnnotation]; ok {
		return name
	}
	return pv.Spec.StorageClassName
}

// deletionAnnotations is the secret that the annotations of pv name, both empty for
// none; both is false when they do not count, and the class of pv does instead.
func deletionAnnotations(pv *corev1.PersistentVolume) (name, namespace string, both bool) {
	name, hasName := pv.Annotations[annDeletionSecretName]
	namespace, hasNamespace := pv.Annotations[annDeletionSecretNamespace]
	return name, namespace, hasName && hasNamespace
}

// deletionSecret is the secret for the deletion of pv: that of its annotations,
// or, for a volume that has none, that of its class, which may be nil.
func (d driver) deletionSecret(pv *corev1.PersistentVolume, class *storagev1.StorageClass) (*corev1.SecretReference, error) {
	if name, namespace, annotated := deletionAnnotations(pv); annotated {
		switch {
		case name == "" && namespace == "":
			return nil, nil
		case name == "" || namespace == "":
			return nil, fmt.Errorf("annotations %s and %s: one of them is empty", annDeletionSecretName, annDeletionSecretNamespace)
		}
		return &corev1.SecretReference{Namespace: namespace, Name: name}, nil
	}
	if class == nil || pv.Spec.ClaimRef == nil {
		return nil, nil
	}
	return volumerules.ResolveSecret(volumerules.Provisioner, class.Parameters, volumerules.SecretScope{
		Volume: pv.Name, Claim: pv.Spec.ClaimRef.Name, Namespace: pv.Spec.ClaimRef.Namespace,
	})
}
