// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"errors"
	"fmt"
	"net/url"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// decideIndeterminate returns the step that repeats the call. Neither the state of the claim nor its deletion
// changes the request.
func (d decision) decideIndeterminate() step {
	switch {
	case d.mustRecord():
		return step{action: doProtect, reason: "Indeterminate"}
	case d.op.inherited && !d.op.recordFailed && d.claim != nil && isProtected(d.claim) && !d.op.recordedOn(d.claim):
		return step{action: doProtect, reason: "Resumed"}
	case d.failure != nil:
		return d.backOff()
	case d.ProvisioningProtection == ProtectionOff && d.classRecreated() && d.canRequest():
		// As csi-provisioner does. If the new class permits no request, the first one is repeated.
		if st := d.decideRequest("ClassRecreated"); st.action == doPrepareAgain || st.action == doReadReferences {
			return st
		}
	}
	if st, blocked := d.beforeCall(); blocked {
		return st
	}
	return step{action: doCreateVolume, reason: "Indeterminate"}
}

// canRequest reports whether the claim would be provisioned if it were new. The record on a
// protected claim is that of the first request, which must not be replaced.
func (d decision) canRequest() bool {
	node := selectedNode(d.claim)
	waitsForNode := kube.WaitsForFirstConsumer(d.class) && node == "" || d.NodeDeployment && node != d.NodeName
	return d.claim.DeletionTimestamp == nil && !isProtected(d.claim) && d.is(d.class.Provisioner) && !waitsForNode
}

// classRecreated reports whether the class of the claim is another object than the one the
// request was prepared from.
func (s claimState) classRecreated() bool { return s.class != nil && s.class.UID != s.op.classUID }

// decideResume returns the step that repeats the CreateVolume of an earlier process that exited before it knew the
// outcome. It applies to a claim that is being deleted, too.
func (d decision) decideResume() step {
	class := storagehelpers.GetPersistentVolumeClaimClass(d.claim)
	cannot := func(reason string, cause error, fix string) step {
		return step{action: doFail, reason: reason, err: cannotRetry(d.volumeName(d.claim.UID), cause, fix)}
	}
	switch {
	case d.NodeDeployment && recordedWithoutNode(d.claim):
		st := cannot("RecordWithoutNode", errors.New("the request was sent for no node, and each instance repeats those for its own"),
			"Run the provisioner without --node-deployment until it is resolved")
		st.action = doReport // by each instance: with retries, hundreds of nodes would send too many events
		return st
	case d.NodeDeployment && nodeOf(d.claim) != d.NodeName:
		return step{action: doForget, reason: "OfAnotherNode"}
	case d.class == nil || !d.is(d.class.Provisioner): // the request of a class of another driver would differ
		err := fmt.Errorf("StorageClass %q was deleted or belongs to another driver", class)
		return cannot("ClassDeleted", err, "Recreate the StorageClass")
	case kube.WaitsForFirstConsumer(d.class) && nodeOf(d.claim) == "":
		cause, fix := "no node is selected", "Create a pod that uses this PVC"
		if hasRecord(d.claim) {
			cause, fix = "its record names no node", "Recreate the StorageClass with the volumeBindingMode that it had"
		}
		st := cannot("NoNode", fmt.Errorf("%s, and StorageClass %q has volumeBindingMode WaitForFirstConsumer", cause, class), fix)
		st.action = doReport // the claim waits for a node
		return st
	case d.needsRefs(d.claim) && d.refs == nil:
		return step{action: doReadReferences, reason: "RecordFound"}
	case d.refs != nil && isReadError(d.refs.err):
		return step{action: doFail, reason: "CannotRead", err: d.refs.err}
	case d.refs != nil && d.refs.err != nil:
		return cannot("SourceDeleted", d.refs.err, "Recreate the data source, its ReferenceGrant or the VolumeAttributesClass")
	}
	next, err := d.resume(d.claim, d.class, d.refs, d.known)
	switch {
	case errors.Is(err, errRequestChanged):
		return cannot("RequestChanged", err, "Restore the StorageClass, the annotation, the referenced object or the flag")
	case err != nil:
		return cannot("CannotResume", err, "Restore the annotation, or the objects that this PVC names")
	}
	return d.begin("RecordFound", next)
}

// isReadError reports whether err means that an object could not be read, rather than that it
// does not exist or cannot be used.
func isReadError(err error) bool {
	var answer apierrors.APIStatus
	var request *url.Error
	return !kube.IsNotFound(err) && (errors.As(err, &answer) || errors.As(err, &request) || errors.Is(err, context.Canceled))
}

// canProtect reports whether the claim can be given the finalizer, and lacks it.
func (d decision) canProtect() bool {
	return d.claim != nil && d.claim.DeletionTimestamp == nil && !isProtected(d.claim)
}

// mustRecord reports whether the request must be recorded on the claim at once: a volume
// may exist that the next leader does not know.
func (d decision) mustRecord() bool {
	return d.canProtect() && !d.op.recordFailed && d.ProvisioningProtection != ProtectionOff
}
