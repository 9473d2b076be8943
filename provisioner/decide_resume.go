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

// isReplaced reports whether the request is to be prepared again from a class that was recreated. Otherwise neither the state of the
// claim nor its deletion changes a request that was sent. The record on a protected claim is that of the first request, which must not
// be replaced.
func (d driver) isReplaced(s claimState) bool {
	if d.ProvisioningProtection != ProtectionOff || !s.call.State.Unanswered() || s.failure != nil || !s.classRecreated() {
		return false
	}
	node := selectedNode(s.claim)
	waitsForNode := kube.WaitsForFirstConsumer(s.class) && node == "" || d.NodeDeployment && node != d.NodeName
	return s.claim.DeletionTimestamp == nil && !isProtected(s.claim) && d.is(s.class.Provisioner) && !waitsForNode
}

// classRecreated reports whether the class of the claim is another object than the one the
// request was prepared from.
func (s claimState) classRecreated() bool {
	return s.class != nil && s.class.UID != s.call.Payload.classUID
}

// decideResume returns the step that repeats the CreateVolume of an earlier process that exited before it knew the
// outcome. It applies to a claim that is being deleted, too.
func (d driver) decideResume(s claimState) step {
	class := storagehelpers.GetPersistentVolumeClaimClass(s.claim)
	cannot := func(reason string, cause error, fix string) step {
		return step{action: doFail, reason: reason, err: cannotRetry(d.volumeName(s.claim.UID), cause, fix)}
	}
	switch {
	case d.NodeDeployment && recordedWithoutNode(s.claim):
		st := cannot("RecordWithoutNode", errors.New("the request was sent for no node, and each instance repeats those for its own"),
			"Run the provisioner without --node-deployment until it is resolved")
		st.action = doReport // by each instance: with retries, hundreds of nodes would send too many events
		return st
	case d.NodeDeployment && nodeOf(s.claim) != d.NodeName:
		return step{action: doForget, reason: "OfAnotherNode"}
	case s.class == nil || !d.is(s.class.Provisioner): // the request of a class of another driver would differ
		err := fmt.Errorf("StorageClass %q was deleted or belongs to another driver", class)
		return cannot("ClassDeleted", err, "Recreate the StorageClass")
	case kube.WaitsForFirstConsumer(s.class) && nodeOf(s.claim) == "":
		cause, fix := "no node is selected", "Create a pod that uses this PVC"
		if hasRecord(s.claim) {
			cause, fix = "its record names no node", "Recreate the StorageClass with the volumeBindingMode that it had"
		}
		st := cannot("NoNode", fmt.Errorf("%s, and StorageClass %q has volumeBindingMode WaitForFirstConsumer", cause, class), fix)
		st.action = doReport // the claim waits for a node
		return st
	case d.needsRefs(s.claim) && s.refs == nil:
		return step{action: doReadReferences, reason: "RecordFound"}
	case s.refs != nil && isReadError(s.refs.err):
		return step{action: doFail, reason: "CannotRead", err: s.refs.err}
	case s.refs != nil && s.refs.err != nil:
		return cannot("SourceDeleted", s.refs.err, "Recreate the data source, its ReferenceGrant or the VolumeAttributesClass")
	}
	next, err := d.resume(s.claim, s.class, s.refs, s.known)
	switch {
	case errors.Is(err, errRequestChanged):
		return cannot("RequestChanged", err, "Restore the StorageClass, the annotation, the referenced object or the flag")
	case err != nil:
		return cannot("CannotResume", err, "Restore the annotation, or the objects that this PVC names")
	}
	return d.begin(s, true, "RecordFound", next)
}

// isReadError reports whether err means that an object could not be read, rather than that it
// does not exist or cannot be used.
func isReadError(err error) bool {
	var answer apierrors.APIStatus
	var request *url.Error
	return !kube.IsNotFound(err) && (errors.As(err, &answer) || errors.As(err, &request) || errors.Is(err, context.Canceled))
}
