// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"fmt"
	"slices"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// driver holds the name of the driver, its capabilities and the settings that decisions
// depend on.
type driver struct {
	name          string
	finalizer     string
	defaultFSType string
	caps          csiclient.ControllerCapabilities
}

// action names the next step for a VolumeAttachment.
type action string

const (
	doNothing            action = "nothing"
	doReportError        action = "report error"                  // write status.attachError or status.detachError
	doReadSecrets        action = "read secrets"                  // read the secret of the RPC
	doReadAttachment     action = "read attachment"               // read the VolumeAttachment from the API server
	doReadVolume         action = "read volume"                   // read the PersistentVolume from the API server
	doAddVolumeFinalizer action = "add volume finalizer"          // patch the PersistentVolume
	doAddFinalizer       action = "add finalizer"                 // patch finalizer and annotations of the VolumeAttachment
	doPublish            action = "publish"                       // ControllerPublishVolume, then status.attached=true
	doUnpublish          action = "unpublish"                     // ControllerUnpublishVolume, then remove the finalizer
	doUnpublishFormer    action = "unpublish from former node ID" // ControllerUnpublishVolume for an ID that the node had
	doUndoPublish        action = "undo publish"                  // ControllerUnpublishVolume for a deleted VolumeAttachment
	doRemoveFinalizer    action = "remove finalizer"              // without an RPC
	doMarkAttached       action = "mark attached"                 // status.attached=true without an RPC
	doMarkDetached       action = "mark detached"                 // status.attached=false without an RPC
)

// step is an action and its arguments.
type step struct {
	action action
	reason string
	err    error // of doReportError
	source source
	nodeID string
	change kube.MetadataPatch // of doAddFinalizer
}

// decide returns the next step for a VolumeAttachment. It has no side effects and handles
// every state, also states that no correct component produces.
func (d driver) decide(s attachmentState) step {
	va := s.attachment
	switch {
	case va == nil && s.call.State.MayHaveEffect():
		return step{action: doUndoPublish, reason: "DeletedWithoutDetach"}
	case va == nil:
		return step{action: doNothing, reason: "Deleted"}
	case va.Spec.Attacher != d.name:
		return step{action: doNothing, reason: "OtherDriver"}
	case !d.caps.PublishUnpublishVolume:
		return d.decideWithoutPublish(s)
	case va.DeletionTimestamp != nil:
		return d.decideDetach(s)
	case s.showsResult() && !s.outOfSync:
		return step{action: doNothing, reason: "Attached"}
	}
	return d.decideAttach(s)
}

func (d driver) decideAttach(s attachmentState) step {
	src, err := d.resolve(s.attachment, s.volume)
	if err != nil {
		return cannotAttach(err)
	}
	if pv := s.volume; pv != nil {
		if pv.DeletionTimestamp != nil {
			return cannotAttach(fmt.Errorf("PersistentVolume %q is marked for deletion", pv.Name))
		}
		if next, replaced := d.decideReplaced(s, src); replaced {
			return next
		}
		if !slices.Contains(pv.Finalizers, d.finalizer) {
			return step{action: doAddVolumeFinalizer, reason: "VolumeWithoutFinalizer", source: src}
		}
	}
	// The checks that follow, and the secret, come before the finalizer of the VolumeAttachment, so that one
	// that cannot be attached can be deleted without a detach.
	if _, err := volumerules.AccessMode(src.spec.AccessModes, d.caps.SingleNodeMultiWriter); err != nil {
		return cannotAttach(err)
	}
	if err := s.waitsFor(src); err != nil {
		return cannotAttach(err)
	}
	nodeID, err := d.nodeID(s)
	if err != nil {
		return cannotAttach(err)
	}
	if s.volumeUnconfirmed {
		// The cache may be stale: an earlier leader may have removed the finalizer because the PersistentVolume is being deleted. It
		// is read before its handle is recorded.
		return step{action: doReadVolume, reason: "VolumeUnconfirmed"}
	}
	former, err := d.formerNodeIDs(s, nodeID)
	switch {
	case err != nil:
		return cannotAttach(err)
	case len(former) > 0 && (singleNode(src.spec.AccessModes) || len(former) > maxFormerNodeIDs):
		return d.decideFormer(s, src, former[0], nodeID)
	}
	change := detachAnnotations(src, former, nodeID)
	change.AddFinalizers, change.Tests = []string{d.finalizer}, sameRecord(s.attachment)
	return s.inOrder(change, step{action: doPublish, reason: "Requested", source: src, nodeID: nodeID})
}

func cannotAttach(err error) step {
	return step{action: doReportError, reason: "CannotAttach", err: err}
}

// inOrder returns call, or the step that comes before it: change is recorded first, because a crash after the call would leave the
// volume published for good, and the cache may be stale. A repetition needs the same as the first call.
func (s attachmentState) inOrder(change kube.MetadataPatch, call step) step {
	facts := intent.Facts{Writable: true, Wanted: true, Ready: call.source.secrets == nil || s.secretsRead, Stale: s.unconfirmed}
	if change.AppliedTo(s.attachment) {
		facts.Record = intent.Own
	}
	switch intent.NextOfCall(intent.Policy{Record: intent.BeforeCall}, s.call.State, facts) {
	case intent.DoCall:
		return call
	case intent.DoPrepare:
		return step{action: doReadSecrets, reason: "SecretsNeeded", source: call.source}
	case intent.DoRecord:
		return step{action: doAddFinalizer, reason: "WithoutFinalizer", source: call.source, nodeID: call.nodeID, change: change}
	}
	return step{action: doReadAttachment, reason: "Unconfirmed"}
}

// decideFormer returns the step before the volume is published to nodeID: it may still be published to the former ID, and the
// record must not lose that ID. The volume of a pod that may be running on the machine with that ID is not unpublished.
func (d driver) decideFormer(s attachmentState, src source, former, nodeID string) step {
	va := s.attachment
	if va.Status.Attached && s.publishedAtFormer {
		return step{action: doReportError, reason: "PublishedAtFormer", err: fmt.Errorf("volume %q is published with the former "+
			"node ID %q, but node %s has ID %q now. Delete the pods on the node that use the volume, so that it is attached again",
			src.handle, former, va.Spec.NodeName, nodeID)}
	}
	return s.inOrder(kube.MetadataPatch{}, step{action: doUnpublishFormer, reason: "NodeIDChanged", source: src, nodeID: former})
}

// waitsFor returns an error if src may still be published to another node, but is for a single one.
func (s attachmentState) waitsFor(src source) error {
	first := s.detaching
	if first == nil || recordsOther(first, src) {
		return nil
	}
	reason := ""
	if failed := first.Status.DetachError; failed != nil {
		reason = fmt.Sprintf(" (%.300s)", failed.Message)
	}
	return fmt.Errorf("volume %q may still be published to node %s: VolumeAttachment %q is being deleted, and "+
		"ControllerUnpublishVolume has not succeeded%s. The volume is attached after that. If the node is shut down and the call "+
		"cannot succeed, detach the volume at the storage system, then remove the finalizer of that VolumeAttachment", src.handle,
		first.Spec.NodeName, first.Name, reason)
}

// decideDetach handles a VolumeAttachment that is being deleted. It ignores
// status.attached, because an earlier publish may be indeterminate.
func (d driver) decideDetach(s attachmentState) step {
	fail := func(err error) step { return step{action: doReportError, reason: "CannotDetach", err: err} }
	if !slices.Contains(s.attachment.Finalizers, d.finalizer) && !s.outOfSync {
		if detachedStatus(s.attachment) != nil { // the write of an earlier detach failed
			return step{action: doMarkDetached, reason: "Detached"}
		}
		return step{action: doNothing, reason: "Detached"}
	}
	src, err := d.detachSource(s)
	if err != nil {
		return fail(err)
	}
	nodeIDs, err := d.detachNodeIDs(s)
	if err != nil {
		return fail(err)
	}
	call := step{action: doUnpublish, reason: "Deleting", source: src, nodeID: nodeIDs[0]}
	if len(nodeIDs) > 1 {
		call.action = doUnpublishFormer
	}
	return s.inOrder(kube.MetadataPatch{}, call)
}

// decideWithoutPublish handles a driver without PUBLISH_UNPUBLISH_VOLUME.
func (d driver) decideWithoutPublish(s attachmentState) step {
	va := s.attachment
	switch {
	case va.DeletionTimestamp != nil && slices.Contains(va.Finalizers, d.finalizer):
		return step{action: doRemoveFinalizer, reason: "NothingToDetach"}
	case va.DeletionTimestamp != nil:
		return step{action: doNothing, reason: "Detached"}
	case va.Status.Attached:
		return step{action: doNothing, reason: "Attached"}
	}
	return step{action: doMarkAttached, reason: "NothingToAttach"}
}

// nodeID returns the driver's ID of the node, from the CSINode.
func (d driver) nodeID(s attachmentState) (string, error) {
	if entry := kube.DriverOnNode(s.csiNode, d.name); entry != nil {
		return entry.NodeID, nil
	}
	if s.csiNode == nil {
		return "", fmt.Errorf("csinode.storage.k8s.io %q not found", s.attachment.Spec.NodeName)
	}
	return "", fmt.Errorf("CSINode %s does not contain driver %s", s.csiNode.Name, d.name)
}
