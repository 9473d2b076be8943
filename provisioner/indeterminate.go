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

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// isReplaced reports whether the request is to be prepared again from a class that was recreated. Otherwise neither the state of the
// claim nor its deletion changes a request that was sent. The record on a protected claim is that of the first request, which must not
// be replaced.
func (d decision) isReplaced() bool {
	unknown := d.call.State == intent.Sent || d.call.State == intent.Unknown
	if d.ProvisioningProtection != ProtectionOff || !unknown || d.failure != nil || !d.classRecreated() {
		return false
	}
	node := selectedNode(d.claim)
	waitsForNode := kube.WaitsForFirstConsumer(d.class) && node == "" || d.NodeDeployment && node != d.NodeName
	return d.claim.DeletionTimestamp == nil && !isProtected(d.claim) && d.is(d.class.Provisioner) && !waitsForNode
}

// classRecreated reports whether the class of the claim is another object than the one the
// request was prepared from.
func (s claimState) classRecreated() bool {
	return s.class != nil && s.class.UID != s.call.Payload.classUID
}

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
	return d.begin(intent.Resume, "RecordFound", next)
}

// isReadError reports whether err means that an object could not be read, rather than that it
// does not exist or cannot be used.
func isReadError(err error) bool {
	var answer apierrors.APIStatus
	var request *url.Error
	return !kube.IsNotFound(err) && (errors.As(err, &answer) || errors.As(err, &request) || errors.Is(err, context.Canceled))
}
