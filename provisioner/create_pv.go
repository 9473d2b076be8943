// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/intent"
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
	if err := intent.Must(o.pv.Name == l.c.driver.volumeName(key.UID) && o.pv.Spec.ClaimRef != nil && o.pv.Spec.ClaimRef.UID == key.UID,
		"PersistentVolume %q of volume %q would be a second one of claim %s", o.pv.Name, o.handle, key); err != nil {
		l.c.claimFailed(o.claim, failedEvent(o.plan.ClassName, err))
		return change{}, err
	}
	pv, err := client.CoreV1().PersistentVolumes().Create(ctx, o.pv, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		var c change
		pv, c, err = l.existingPV(ctx, client, o)
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
