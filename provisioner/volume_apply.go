// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validate/content"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/pressure"
	"github.com/storage-controller/storage-controller/internal/tracing"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// apply carries out what decideVolume chose: one call, or one write.
func (l *volumeLoop) apply(ctx context.Context, s pvState, step volumeStep) error {
	pv, volumes := s.pv, l.c.deps.Client.CoreV1().PersistentVolumes()
	switch step.action {
	case volumeChange:
		if _, err := l.volumes.Patch(ctx, volumes, pv, step.change); err != nil {
			err = fmt.Errorf("changing the finalizers of PersistentVolume %q: %w", pv.Name, err)
			if step.reason == "VolumeDeleted" {
				return l.refused(pv, err)
			}
			return err
		}
		return nil
	case volumeFail:
		return l.failed(pv, step.err)
	case volumeDelete:
		return l.deleteVolume(ctx, pv)
	case volumeRemove:
		err := volumes.Delete(ctx, pv.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: ptr.To(pv.UID)}})
		if err != nil && !kube.IsNotFound(err) { // also Conflict: until the watch shows that it was recreated
			return l.refused(pv, fmt.Errorf("deleting PersistentVolume %q: %w", pv.Name, err))
		}
		l.record(pv, func(r *removal) { r.object = true })
		return nil
	}
	return fmt.Errorf("action %v has no implementation", step.action)
}

// failed counts a failure, sends its event and returns err.
func (l *volumeLoop) failed(pv *corev1.PersistentVolume, err error) error {
	l.c.metrics.deleteFailed.WithLabelValues(pv.Spec.StorageClassName).Inc()
	l.c.event(pv, failedDeleteEvent(err))
	return err
}

// refused returns err, which a write to pv has returned. It counts and reports the failure if a retry alone does not help.
func (l *volumeLoop) refused(pv *corev1.PersistentVolume, err error) error {
	newest, exists := l.volumes.Newest(pv)
	if !exists || newest.ResourceVersion != pv.ResourceVersion || !kube.IsRefused(err) {
		return err // decideVolume has not seen the newest version
	}
	return l.failed(pv, fmt.Errorf("%w. Grant patch and delete on persistentvolumes, or correct the policy that denies it", err))
}

// deleteVolume calls DeleteVolume. That cannot be undone, so directly before the call the API server is asked
// whether it still has the PersistentVolume that decideVolume saw.
func (l *volumeLoop) deleteVolume(ctx context.Context, pv *corev1.PersistentVolume) error {
	if err := pressure.Enter(ctx, "DeleteVolume", storagehelpers.GetPersistentVolumeClass(pv)); err != nil {
		return err
	}
	l.record(pv, func(*removal) {})
	translated, err := l.c.driver.asCSI(pv)
	if err != nil {
		return l.failed(pv, err)
	}
	secrets, missing, err := l.deletionSecrets(ctx, pv)
	if err != nil {
		return l.failed(pv, err)
	}
	handle := translated.Spec.CSI.VolumeHandle
	release, err := l.c.deps.Locks.Share(ctx, handle) // may wait
	if err != nil {
		return err
	}
	defer release()
	read := election.Now()
	for _, other := range l.users.others(pv) { // the cache may show them as Released although they are bound again
		if _, _, err := l.volumes.Refetch(ctx, l.c.deps.Client.CoreV1().PersistentVolumes(), other); err != nil {
			return fmt.Errorf("reading PersistentVolume %q of the same volume: %w", other.Name, err)
		}
	}
	live, exists, err := l.volumes.Refetch(ctx, l.c.deps.Client.CoreV1().PersistentVolumes(), pv)
	switch {
	case err != nil:
		return fmt.Errorf("reading PersistentVolume %q before deleting its volume: %w", pv.Name, err)
	case !exists, live.ResourceVersion != pv.ResourceVersion:
		return nil // decideVolume has not seen this
	}
	// The cache may have received a change, an attachment or another PersistentVolume of the volume during the reads.
	if newest, ok := l.volumes.Get(pv.Name); !ok || newest.ResourceVersion != live.ResourceVersion || len(l.attachments(pv)) > 0 ||
		l.users.ofReleased(pv) != "" {
		return nil
	}
	call, cancel := context.WithTimeout(csiclient.WithMigrated(ctx, live.Spec.CSI == nil), l.c.cfg.Timeout)
	defer cancel()
	if err := intent.Must(isReleased(live), "DeleteVolume of %q: %s", handle, describe(live)); err != nil {
		return l.failed(live, err)
	}
	if err := election.MayCallNow(ctx, read); err != nil {
		return err
	}
	if _, err := l.c.deps.CSI.DeleteVolume(call, &csi.DeleteVolumeRequest{VolumeId: handle, Secrets: secrets}); err != nil {
		if missing != nil {
			err = fmt.Errorf("%w; DeleteVolume without secret: %w", err, missing)
		}
		return l.failed(live, err)
	}
	if missing != nil {
		l.c.event(live, deletionWithoutSecretEvent(handle, missing))
	}
	l.volumeDeletedByDriver(ctx, live, handle)
	return nil
}

func (l *volumeLoop) volumeDeletedByDriver(ctx context.Context, pv *corev1.PersistentVolume, handle string) {
	if l.c.deps.VolumeObserver != nil {
		l.c.deps.VolumeObserver.VolumeDeleted(pv)
	}
	var took time.Duration
	l.record(pv, func(r *removal) { r.volume, took = true, time.Since(r.began) })
	l.c.metrics.deleted.WithLabelValues(pv.Spec.StorageClassName).Inc()
	l.c.metrics.deleteSeconds.WithLabelValues(pv.Spec.StorageClassName).Observe(took.Seconds())
	klog.FromContext(ctx).Info("Volume deleted", "volumeHandle", handle)
	tracing.EndOperation(ctx, time.Now().Add(-took), "persistentVolume", pv.Name, "volumeHandle", handle)
}

// deletionSecrets returns the secrets for DeleteVolume; nil for none. missing is why there is no secret although the
// volume has one, which does not stop the deletion: the driver decides whether it needs it.
func (l *volumeLoop) deletionSecrets(ctx context.Context, pv *corev1.PersistentVolume) (values map[string]string, missing, err error) {
	class, exists := l.c.classes.Get(storagehelpers.GetPersistentVolumeClass(pv))
	if _, _, annotated := deletionAnnotations(pv); exists && !annotated {
		if class, err = l.c.driver.translated(class); err != nil {
			return nil, nil, err
		}
	}
	ref, missing := l.c.driver.deletionSecret(pv, class)
	if missing == nil {
		missing = volumerules.Secrets{Provisioner: ref}.Permitted(l.c.cfg.SecretNamespaces)
	}
	if missing != nil || ref == nil {
		return nil, missing, nil
	}
	if len(content.IsPathSegmentName(ref.Name)) > 0 || len(content.IsPathSegmentName(ref.Namespace)) > 0 {
		return nil, fmt.Errorf("secret \"%s/%s\": invalid name", ref.Namespace, ref.Name), nil
	}
	values, err = kube.ReadSecret(ctx, l.c.deps.Client, ref)
	if kube.IsNotFound(err) || apierrors.IsForbidden(err) { // with its namespace, the permission may be deleted, too
		return nil, err, nil
	}
	return values, nil, err
}

// deletionAnnotations returns the secret that the annotations of pv name, both empty for
// none. Unless both annotations exist, the class of pv counts instead.
func deletionAnnotations(pv *corev1.PersistentVolume) (name, namespace string, both bool) {
	name, hasName := pv.Annotations[volumerules.AnnDeletionSecretName]
	namespace, hasNamespace := pv.Annotations[volumerules.AnnDeletionSecretNamespace]
	return name, namespace, hasName && hasNamespace
}

// deletionSecret returns the secret that the annotations of pv name or, without annotations,
// that of its class, which may be nil.
func (d driver) deletionSecret(pv *corev1.PersistentVolume, class *storagev1.StorageClass) (*corev1.SecretReference, error) {
	if name, namespace, annotated := deletionAnnotations(pv); annotated {
		switch {
		case name == "" && namespace == "":
			return nil, nil
		case name == "" || namespace == "":
			return nil, fmt.Errorf("annotations %s and %s: one of them is empty",
				volumerules.AnnDeletionSecretName, volumerules.AnnDeletionSecretNamespace)
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
