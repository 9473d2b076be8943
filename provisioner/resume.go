// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/topology"
)

// decideResume returns the step that repeats the CreateVolume of an earlier process that exited before it knew the
// outcome. It applies to a claim that is being deleted, too.
func (d driver) decideResume(s claimState) step {
	class := storagehelpers.GetPersistentVolumeClaimClass(s.claim)
	cannot := func(a action, reason string, cause error, fix string) step {
		return step{action: a, reason: reason, err: cannotRetry(d.volumeName(s.claim.UID), cause, fix)}
	}
	switch {
	case d.NodeDeployment && recordedWithoutNode(s.claim):
		// Each instance reports it: with retries, hundreds of nodes would send too many events.
		cause := errors.New("the request was sent for no node, and each instance repeats those for its own")
		return cannot(doReport, "RecordWithoutNode", cause, "Run the provisioner without --node-deployment until it is resolved")
	case !d.isForThisNode(s.claim):
		return step{action: doForget, reason: "OfAnotherNode"}
	case s.class == nil || !d.is(s.class.Provisioner): // the request of a class of another driver would differ
		err := fmt.Errorf("StorageClass %q was deleted or belongs to another driver", class)
		return cannot(doFail, "ClassDeleted", err, "Recreate the StorageClass")
	case kube.WaitsForFirstConsumer(s.class) && nodeOf(s.claim) == "":
		cause, fix := "no node is selected", "Create a pod that uses this PVC"
		if hasRecord(s.claim) {
			cause, fix = "its record names no node", "Recreate the StorageClass with the volumeBindingMode that it had"
		}
		err := fmt.Errorf("%s, and StorageClass %q has volumeBindingMode WaitForFirstConsumer", cause, class)
		return cannot(doReport, "NoNode", err, fix) // the claim waits for a node
	case d.needsRefs(s.claim) && s.refs == nil:
		return step{action: doReadReferences, reason: "RecordFound"}
	case s.refs != nil && isReadError(s.refs.err):
		return step{action: doFail, reason: "CannotRead", err: s.refs.err}
	case s.refs != nil && s.refs.err != nil:
		return cannot(doFail, "SourceDeleted", s.refs.err, "Recreate the data source, its ReferenceGrant or the VolumeAttributesClass")
	}
	next, err := d.resume(s.claim, s.class, s.refs, s.known)
	switch {
	case errors.Is(err, errRequestChanged):
		return cannot(doFail, "RequestChanged", err, "Restore the StorageClass, the annotation, the referenced object or the flag")
	case err != nil:
		return cannot(doFail, "CannotResume", err, "Restore the annotation, or the objects that this PVC names")
	}
	return s.begin(intent.Resume, "RecordFound", next)
}

// isOfOtherDriver reports whether the claim has the record of another driver.
func (d driver) isOfOtherDriver(s claimState) bool {
	return isProtected(s.claim) && !d.is(cmp.Or(kube.RecordOwner(s.claim), d.name))
}

// decideOtherDriver returns the step for a claim with the record of another driver, which alone can repeat the request.
func (d driver) decideOtherDriver(s claimState) step {
	if s.call.Payload.saved {
		return d.decidePending(s)
	}
	return step{action: doFail, reason: "RecordOfAnotherDriver", err: cannotRetry(d.volumeName(s.claim.UID),
		fmt.Errorf("the request was sent to driver %q", kube.RecordOwner(s.claim)), "Run that driver")}
}

// isReadError reports whether err means that an object could not be read, rather than that it does not exist or cannot be used.
func isReadError(err error) bool {
	var answer apierrors.APIStatus
	var request *url.Error
	return !kube.IsNotFound(err) && (errors.As(err, &answer) || errors.As(err, &request) || errors.Is(err, context.Canceled))
}

// mustResume reports whether an earlier leader has protected the claim, perhaps after this one had finished with it.
func (l *claimLoop) mustResume(key claimKey) bool {
	newest, ok := l.claims.Get(key.String())
	if !ok || newest.UID != key.UID {
		return false
	}
	c, d := l.ops.Get(key), l.c.driver
	return !c.State.InProgress() && d.recordOn(newest, false, c) == intent.Other && d.isForThisNode(newest)
}

// errRequestChanged says that the recorded request cannot be prepared again.
var errRequestChanged = errors.New("CreateVolume request has changed")

// resume prepares the request again that an earlier process recorded on a protected claim. Users can write the finalizer and the
// record, and compute its hash. Therefore each check of a new request is repeated whose inputs cannot have changed since; other
// inputs are checked in the record ([topologyRequest.check]) or in the response (checkVolume).
func (d driver) resume(
	claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, refs *resolvedRefs, known *topology.Aggregate,
) (o operation, err error) {
	if class, err = d.translated(class); err != nil {
		return o, err
	}
	if err = checkSpec(claim); err != nil {
		return o, err
	}
	record, err := recordOf(claim)
	if err != nil {
		return o, err
	}
	if record == nil { // the best that is known is what would be requested now
		node := selectedNode(claim)
		return d.prepare(claim, class, node, refs, d.requirementFor(claim, class, node, known))
	}
	resuming.Lock()
	defer resuming.Unlock()
	var topology *csi.TopologyRequirement
	if record.Topology != nil {
		if topology, err = record.unpack(); err != nil {
			return o, fmt.Errorf("annotation %s: %w", kube.AnnProvisioningRequest, err)
		}
	}
	recorded := func() (*csi.TopologyRequirement, error) {
		if record.Recompute {
			return d.requirementFor(claim, class, record.SelectedNode, known)()
		}
		return topology, topologyRequest{
			strict: d.StrictTopology, allowed: class.AllowedTopologies, node: record.SelectedNode,
		}.check(topology, known)
	}
	hash := ""
	prepare := func(d driver) {
		o, err = d.prepare(claim, class, record.SelectedNode, refs, recorded)
		if err == nil {
			hash, err = fingerprint(o.request, record.Recompute)
		}
	}
	prepare(d)
	if err == nil && hash != record.Request && d.caps.SingleNodeMultiWriter { // an earlier version of the driver may lack the capability
		before := d
		before.caps.SingleNodeMultiWriter = false
		prepare(before)
	}
	o.resumed = record.ID
	secret := ptr.Deref(o.plan.Secrets.Provisioner, corev1.SecretReference{})
	switch {
	case err != nil:
	case hash != record.Request:
		err = fmt.Errorf("%w: StorageClass %q, an object that this PVC references, or a flag of the provisioner has changed",
			errRequestChanged, class.Name)
	case record.Secret != secret:
		err = fmt.Errorf("%w: its secret was %s, and StorageClass %q or an annotation of this PVC now names %s",
			errRequestChanged, secretName(record.Secret), class.Name, secretName(secret))
	}
	return o, err
}

// check returns an error if a request with r cannot have the topology t. A node that was deleted since, or on which the driver is
// not registered any more, is not checked.
func (r topologyRequest) check(t *csi.TopologyRequirement, known *topology.Aggregate) error {
	restricts := func(s corev1.TopologySelectorTerm) bool { return len(s.MatchLabelExpressions) > 0 }
	switch {
	case t == nil && slices.ContainsFunc(r.allowed, restricts):
		return fmt.Errorf("%w: it has no topology, and the StorageClass has allowedTopologies", errRequestChanged)
	case t == nil:
		return nil
	}
	keys := known.AllKeys()
	anyKey := len(keys) == 0
	for _, s := range r.allowed {
		for _, e := range s.MatchLabelExpressions {
			keys[e.Key] = true
		}
	}
	for _, s := range t.GetRequisite() {
		if len(r.allowed) > 0 && !admits(r.allowed, s.GetSegments()) {
			return fmt.Errorf("%w: allowedTopologies of the StorageClass do not admit segment %q", errRequestChanged, s.GetSegments())
		}
		for key := range s.GetSegments() {
			if !anyKey && !keys[key] {
				return fmt.Errorf("the driver has the recorded topology key %q on no CSINode", key)
			}
		}
	}
	if r.node == "" {
		return nil
	}
	return r.checkNode(t, known)
}

// checkNode returns an error if t does not prefer the segment of the node, or is not that segment with --strict-topology.
func (r topologyRequest) checkNode(t *csi.TopologyRequirement, known *topology.Aggregate) error {
	_, selected, err := segmentOfNode(r.node, known)
	if err != nil {
		return nil
	}
	first := topology.SegmentOf(t.GetPreferred()[0].GetSegments())
	switch {
	case !first.SubsetOf(selected):
		return fmt.Errorf("%w: its first preferred segment is %q, and node %q is in segment %q", errRequestChanged, first, r.node, selected)
	case r.strict && (len(t.GetRequisite()) > 1 || len(first) < len(selected)):
		return fmt.Errorf("%w: with --strict-topology, only the segment %q of node %q is requested", errRequestChanged, selected, r.node)
	}
	return nil
}

// classRecreated reports whether the class of the claim is another object than the one the request was prepared from.
func (s claimState) classRecreated() bool {
	return s.class != nil && s.class.UID != s.call.Payload.class.UID
}

// abandon ends a request that this process has not sent. One that was resumed lost its record before it was repeated: the earlier process
// removed it after a result, or a user did.
func abandon(ctx context.Context, s claimState) change {
	if o := s.call.Payload; s.call.State == intent.Unknown {
		klog.FromContext(ctx).Info("The request of an earlier process is not repeated, because its record was removed from the claim. "+
			"If no provisioner removed it, the volume may exist at the storage system", "claim", klog.KObj(o.claim),
			"volumeName", o.request.GetName())
	}
	return noVolume(nil)
}
