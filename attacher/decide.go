package attacher

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// driver is what is fixed for the life of a process: who the driver is, what it
// can do, and what the operator set.
type driver struct {
	name                  string
	finalizer             string
	defaultFSType         string
	publishes             bool // PUBLISH_UNPUBLISH_VOLUME
	publishReadonly       bool // PUBLISH_READONLY
	singleNodeMultiWriter bool // SINGLE_NODE_MULTI_WRITER
}

// action is the one next thing to do for an attachment.
type action int

const (
	doNothing action = iota
	doReportAttach
	doReportDetach
	doReadSecrets
	doProtectVolume // write the finalizer of the volume
	doProtect       // write the finalizer and the notes of the attachment
	doPublish
	doUnpublish
	doRelease      // remove the finalizer, without a call
	doMarkAttached // write the status, without a call
	doMarkDetached // likewise
	doConfirm      // ask the API server for the attachment
)

// step is what decide has chosen, and with what.
type step struct {
	action action
	reason string
	err    error // of doReport…
	source source
	nodeID string
	change kube.MetadataPatch // of doProtect
}

// decide names the one next step for an attachment. It has no side effects, and is
// total: every snapshot, however odd, has an answer.
func (d driver) decide(s snapshot) step {
	va := s.attachment
	switch {
	case va == nil:
		return step{reason: "Gone"}
	case va.Spec.Attacher != d.name:
		return step{reason: "OfAnotherDriver"}
	case !d.publishes:
		return d.decideTrivial(s)
	case va.DeletionTimestamp != nil:
		return d.decideDetach(s)
	case va.Status.Attached && !s.forced:
		return step{reason: "Attached"}
	}
	return d.decideAttach(s)
}

func (d driver) decideAttach(s snapshot) step {
	fail := func(err error) step { return step{action: doReportAttach, reason: "CannotAttach", err: err} }
	src, err := d.resolve(s.attachment, s.volume)
	if err != nil {
		return fail(err)
	}
	if pv := s.volume; pv != nil {
		if pv.DeletionTimestamp != nil {
			return fail(fmt.Errorf("PersistentVolume %q is marked for deletion", pv.Name))
		}
		if !slices.Contains(pv.Finalizers, d.finalizer) {
			return step{action: doProtectVolume, reason: "VolumeUnprotected", source: src}
		}
	}
	// What follows is checked before the attachment has its finalizer, so that one
	// that cannot work can be deleted at once.
	if _, err := d.accessMode(src.spec.AccessModes); err != nil {
		return fail(err)
	}
	if src.secrets != nil && !s.secretsRead {
		return step{action: doReadSecrets, reason: "SecretsNeeded", source: src}
	}
	nodeID, err := d.nodeID(s, false)
	if err != nil {
		return fail(err)
	}
	change := notes(src, nodeID)
	change.AddFinalizers = []string{d.finalizer}
	if !change.AppliedTo(s.attachment) {
		// Before the first call: a crash after the call would leak the attachment.
		return step{action: doProtect, reason: "Unprotected", source: src, nodeID: nodeID, change: change}
	}
	if s.unconfirmed {
		return step{action: doConfirm, reason: "Requested"}
	}
	return step{action: doPublish, reason: "Requested", source: src, nodeID: nodeID}
}

// decideDetach is for an attachment that is being deleted. That it is not attached
// does not matter: an earlier publish may have timed out.
func (d driver) decideDetach(s snapshot) step {
	fail := func(err error) step { return step{action: doReportDetach, reason: "CannotDetach", err: err} }
	if !slices.Contains(s.attachment.Finalizers, d.finalizer) && !s.forced {
		if detachedStatus(s.attachment) != nil { // that write failed
			return step{action: doMarkDetached, reason: "Detached"}
		}
		return step{reason: "Detached"}
	}
	src, err := d.detachSource(s)
	if err != nil {
		return fail(err)
	}
	if src.secrets != nil && !s.secretsRead {
		return step{action: doReadSecrets, reason: "SecretsNeeded", source: src}
	}
	nodeID, err := d.nodeID(s, true)
	if err != nil {
		return fail(err)
	}
	if s.unconfirmed {
		return step{action: doConfirm, reason: "Deleting"}
	}
	return step{action: doUnpublish, reason: "Deleting", source: src, nodeID: nodeID}
}

// decideTrivial is for a driver that has nothing to attach.
func (d driver) decideTrivial(s snapshot) step {
	va := s.attachment
	switch {
	case va.DeletionTimestamp != nil && slices.Contains(va.Finalizers, d.finalizer):
		return step{action: doRelease, reason: "NothingToDetach"}
	case va.DeletionTimestamp != nil:
		return step{reason: "Detached"}
	case va.Status.Attached:
		return step{reason: "Attached"}
	}
	return step{action: doMarkAttached, reason: "NothingToAttach"}
}

// leaving tells whether a volume with our finalizer is to lose it when nothing
// attaches it any more: it is on its way out, or is none of ours any more.
func (d driver) leaving(pv *corev1.PersistentVolume) bool {
	return slices.Contains(pv.Finalizers, d.finalizer) && (pv.DeletionTimestamp != nil || d.abandoned(pv))
}

// releasable tells whether the finalizer of pv may go. attachments is how many name it,
// of any driver.
//
// The cache is enough to decide that. Only this process, or one that led before
// it, attaches volumes of the driver; what such a one did is in the first list. What
// is created later finds a volume that is being deleted, and is refused.
func (d driver) releasable(pv *corev1.PersistentVolume, attachments int) bool {
	return attachments == 0 && d.leaving(pv)
}

// String is the name of a in the log.
func (a action) String() string {
	return [...]string{
		"nothing", "report attach error", "report detach error", "read secrets", "protect volume", "protect", "publish",
		"unpublish", "release", "mark attached", "mark detached", "confirm",
	}[a]
}
