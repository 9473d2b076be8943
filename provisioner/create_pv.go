// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tracing"
)

// createPV creates the PersistentVolume of a volume that the driver has created. If that
// fails, it is retried without another CreateVolume, unless the API server cannot store what the driver has returned. A volume
// that belongs to another object gets none.
func (l *claimLoop) createPV(ctx context.Context, client kubernetes.Interface, key claimKey, o operation) (change, error) {
	if user := l.users.ofCreated(key, o); user != "" && !o.pvMayExist {
		return l.c.keep(o, fmt.Errorf("CreateVolume returned volume %q, which belongs to %s; the volume is not deleted. "+
			"Delete that object if it is not needed, or correct the driver", o.handle, user))
	}
	pv, err := client.CoreV1().PersistentVolumes().Create(ctx, o.pv, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		var c change
		pv, c, err = l.existingPV(ctx, client, key, o)
		if pv == nil {
			return c, err
		}
	}
	if err != nil {
		err = fmt.Errorf("creating PersistentVolume %q for volume %q: %w", o.pv.Name, o.handle, err)
		refused, unstorable := kube.IsRefused(err), kube.IsUnstorable(err)
		if refused || unstorable {
			claim, ok := l.claims.Get(key.String())
			kept := ok && claim.UID == key.UID && claim.DeletionTimestamp != nil && isProtected(claim)
			l.c.claimFailed(o.claim, pvRefusedEvent(o, kept, err))
		}
		return pvNotSaved(!refused, unstorable), err
	}
	l.volumes.Observe(pv)
	if l.c.deps.VolumeObserver != nil {
		l.c.deps.VolumeObserver.VolumeProvisioned(pv)
	}
	l.c.metrics.claimDone(o.claim, time.Since(o.began))
	l.c.event(o.claim, succeededEvent(pv.Name))
	tracing.EndOperation(ctx, o.claim.CreationTimestamp.Time,
		"persistentVolumeClaim", klog.KObj(o.claim).String(), "persistentVolume", pv.Name, "volumeHandle", o.handle)
	klog.FromContext(ctx).Info("Volume provisioned", "persistentVolume", klog.KObj(pv), "volumeHandle", o.handle)
	return pvSaved(), nil
}

// keep ends an operation whose volume belongs to another object.
func (c *Controller) keep(o operation, reason error) (change, error) {
	c.notProvisioned(o)
	c.claimFailed(o.claim, failedEvent(o.plan.ClassName, reason))
	return noVolume(nil), reason
}

// existingPV returns the PersistentVolume that has the name of the one to create, if it is
// for the same volume and claim. Otherwise it returns what follows for the operation.
func (l *claimLoop) existingPV(
	ctx context.Context, client kubernetes.Interface, key claimKey, o operation,
) (*corev1.PersistentVolume, change, error) {
	name, handle := o.pv.Name, o.handle
	pv, err := client.CoreV1().PersistentVolumes().Get(ctx, name, metav1.GetOptions{})
	if err != nil { // also NotFound: it was deleted meanwhile
		return nil, pvNotSaved(kube.IsNotFound(err), false), fmt.Errorf("reading PersistentVolume %q, which already exists: %w", name, err)
	}
	same := l.c.driver.isVolume(pv, o.pv)
	ours := pv.Spec.ClaimRef != nil && pv.Spec.ClaimRef.UID == key.UID
	switch {
	case same && ours && (o.pvMayExist || !isReclaimed(pv, o.claim)):
		return pv, change{}, nil // as if the response had arrived: what follows its deletion is the same
	case same && ours:
		// Its volume is deleted with it. CreateVolume is repeated once it is.
		l.volumes.Observe(pv)
		err = fmt.Errorf("PersistentVolume %q of an earlier attempt is being deleted; waiting for its deletion", name)
		return nil, outcomeUnknown(), err
	case same:
		// Two claims have one volume name: the volume is that of the other claim.
		err = fmt.Errorf("volume %q belongs to PersistentVolume %q, which is not for this PVC. %s", handle, name, namesCollide)
		c, err := l.c.keep(o, err)
		return nil, c, err
	}
	err = fmt.Errorf("PersistentVolume %q already exists with another volumeHandle than %q", name, handle)
	return nil, volumeRejected(handle, o.pv, err), err
}
