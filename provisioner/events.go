// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// Reasons of events. All but the last are those of csi-provisioner, as are the words with
// which a message begins. docs/reference.md has the comments of reasons.
const (
	// Normal, PVC: an attempt failed or takes longer than a second; or another provisioner or populator is responsible
	reasonProvisioning = "Provisioning"
	// Normal, PVC: its PV was created, also if the PVC was deleted in the meantime
	reasonSucceeded = "ProvisioningSucceeded"
	// Warning, PVC: an attempt failed, or PVC or StorageClass are invalid; the message has the cause and any delay of the next attempt
	reasonFailed = "ProvisioningFailed"
	// Warning, PV: the PV or its volume was not deleted: refused, another PV names the volume, or attached for more than a minute
	reasonFailedDelete = "VolumeFailedDelete"
	// Warning, PVC: the driver has returned a capacity_bytes that is more than twice the request plus 4 TiB; the volume is used
	reasonUnlikelyCapacity = "UnlikelyCapacity"
	// Normal, PV: the volume was deleted although its Secret could not be read, for example because its namespace was deleted first
	reasonDeletionWithoutSecret = "DeletionWithoutSecret"
)

type event struct {
	kind, reason, message string
}

func provisioningEvent(claim *corev1.PersistentVolumeClaim) event {
	return event{corev1.EventTypeNormal, reasonProvisioning, fmt.Sprintf(
		"External provisioner is provisioning volume for claim \"%s/%s\"", claim.Namespace, claim.Name)}
}

func populatorEvent(err error) event {
	return event{corev1.EventTypeNormal, reasonProvisioning, fmt.Sprintf(
		"Assuming an external populator will provision the volume: %v", err)}
}

func succeededEvent(volume string) event {
	return event{corev1.EventTypeNormal, reasonSucceeded, "Successfully provisioned volume " + volume}
}

func failedEvent(class string, err error) event {
	return event{corev1.EventTypeWarning, reasonFailed, fmt.Sprintf("failed to provision volume with StorageClass %q: %v", class, err)}
}

func infeasibleEvent(class string, delay fmt.Stringer, err error) event {
	return event{corev1.EventTypeWarning, reasonFailed, fmt.Sprintf(
		"Volume provisioning failed with infeasible error. Retries will be delayed by %v. StorageClass %q: %v", delay, class, err)}
}

// indeterminateEvent names the volume and the finalizer, which keeps the claim and a namespace
// that is being deleted, and says what happens next. claim is nil if it is deleted.
func indeterminateEvent(p plan, protection Protection, claim *corev1.PersistentVolumeClaim, classRecreated bool, err error) event {
	text := fmt.Sprintf("%v. Volume %q may exist: "+
		"CreateVolume is repeated with the same request until the driver returns a definite result", err, p.VolumeName)
	switch {
	case protection == ProtectionOff || !recordable(claim):
	case isProtected(claim):
		text += fmt.Sprintf("; until then finalizer %s keeps this PVC", kube.ProvisioningFinalizer)
	default:
		text += fmt.Sprintf("; until then finalizer %s keeps this PVC, unless a later event says that it was not added",
			kube.ProvisioningFinalizer)
	}
	if classRecreated {
		text += fmt.Sprintf(". The first request is repeated although StorageClass %q was recreated since. "+
			"To use the new class, delete this PVC and create it again", p.ClassName)
	}
	if classRecreated && protection != ProtectionOff {
		text += fmt.Sprintf(". If you have verified on the storage backend that volume %q does not exist, "+
			"remove the finalizer to complete the deletion", p.VolumeName)
	}
	return failedEvent(p.ClassName, errors.New(text))
}

// pvRefusedEvent reports that the API server refuses the PersistentVolume of a volume. kept: the finalizer keeps the claim, which
// is being deleted.
func pvRefusedEvent(o operation, kept bool, err error) event {
	if kept {
		fix := "Correct the policy that denies it, or the driver, and restart the provisioner"
		if apierrors.IsForbidden(err) {
			fix = "Grant create on persistentvolumes, or correct the policy that denies it"
		}
		err = fmt.Errorf("%w. %s. If you have deleted volume %q on the storage backend, remove finalizer %s from this PVC instead",
			err, fix, o.handle, kube.ProvisioningFinalizer)
	}
	return failedEvent(o.plan.ClassName, err)
}

// namesCollide tells users how to avoid that two claims get the same volume name.
const namesCollide = "If volume names are too short, increase --volume-name-uuid-length"

// cannotRetry returns the error for a claim whose CreateVolume has no definite result and
// cannot be repeated for cause. fix is an imperative without a period.
func cannotRetry(volume string, cause error, fix string) error {
	return fmt.Errorf("CreateVolume is indeterminate and cannot be retried: %w. %s. "+
		"If you have verified on the storage backend that volume %q does not exist, remove finalizer %s from this PVC instead",
		cause, fix, volume, kube.ProvisioningFinalizer)
}

func failedDeleteEvent(err error) event {
	return event{corev1.EventTypeWarning, reasonFailedDelete, err.Error()}
}

func deletionWithoutSecretEvent(volumeID string, missing error) event {
	return event{corev1.EventTypeNormal, reasonDeletionWithoutSecret, fmt.Sprintf(
		"Volume %q was deleted without its secret: %v", volumeID, missing)}
}
