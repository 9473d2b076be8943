package snapshotter

import (
	"fmt"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
)

//lint:file-ignore ST1005 the texts of csi-snapshotter are capitalized

// decideReplay handles a content that is being deleted while a CreateSnapshot is indeterminate. The
// call is repeated until its outcome is known, because only then the snapshot can be deleted.
func (d driver) decideReplay(s state) step {
	c := s.content
	fail := func(err error, waitsFor cause) step {
		return step{action: doReportDeletion, reason: "CannotRepeat", err: err, cause: waitsFor}
	}
	request, err := d.createRequest(c, s.class, s.memory)
	if err != nil {
		return fail(fmt.Errorf("Failed to delete %s: CreateSnapshot is indeterminate and cannot be repeated: %w", c.noun, err),
			cause{"outcome", fmt.Sprintf("the request of the indeterminate CreateSnapshot: %v", err)})
	}
	secret, err := d.annotatedSecret(c)
	if err != nil {
		return fail(credentials(c, err), cause{})
	}
	if secret != nil && !s.reads.secret {
		return step{action: doReadSecret, reason: "SecretNeeded", secret: secret, report: doReportDeletion}
	}
	if !c.has(AnnRequest) { // another writer has replaced all annotations, or csi-snapshotter has sent the request
		change := kube.MetadataPatch{InitAnnotations: map[string]string{c.creating: "yes"}}
		recordRequest(c, &change, request)
		return step{action: doRecordRequest, reason: "NotRecorded", change: change, request: request}
	}
	return s.confirmed(step{action: doCreate, reason: "Indeterminate", request: request})
}

// forced reports whether another writer has removed the annotation of an indeterminate CreateSnapshot,
// to end the wait for its outcome.
func (c *content) forced(m memory) bool {
	return m.outcome == indeterminate && !c.has(c.creating) && c.has(AnnRequest)
}

// decideDelete handles a content whose snapshot is deleted at the driver.
func (d driver) decideDelete(s state) step {
	c := s.content
	if s.memory.deleted {
		if change := c.clearedStatus(); c.foreignFinalizer() && len(change) > 0 {
			return step{action: doClearStatus, reason: "SnapshotDeleted", status: change}
		}
		return step{action: doRemoveFinalizer, reason: "SnapshotDeleted"}
	}
	secret, err := d.annotatedSecret(c)
	if err != nil {
		return step{action: doReportDeletion, reason: "CannotDelete", err: credentials(c, err)}
	}
	switch {
	case secret != nil && !s.reads.secret:
		return step{action: doReadSecret, reason: "SecretNeeded", secret: secret, report: doReportDeletion}
	case !s.live: // a policy that was changed recently may not be in the cache
		return step{action: doReadContent, reason: "Unconfirmed", report: doReportDeletion}
	}
	handle := c.driverHandle()
	if handle == "" {
		handle = s.memory.answer.handle
	}
	return step{action: doDelete, reason: "Deleting", handle: handle}
}

// decideRelease handles a content that is being deleted and has no snapshot to delete.
func (c *content) decideRelease(m memory) step {
	if change := c.clearedStatus(); m.deleted && c.foreignFinalizer() && len(change) > 0 {
		return step{action: doClearStatus, reason: "SnapshotDeleted", status: change}
	}
	s := step{action: doRemoveFinalizer, reason: "NothingToDelete"}
	if !m.deleted {
		s.change.Tests = map[string]any{"/spec/deletionPolicy": c.policy} // the cache may be outdated
	}
	if m.answer != nil && c.policy == snapshotv1.VolumeSnapshotContentRetain {
		s.warning = fmt.Sprintf("The %s %q of the driver is retained and has no %s. Delete it at the storage system if it is not needed",
			c.noun, m.answer.handle, c.kind.name)
	}
	return s
}

// credentials returns the error for a secret that a deletion needs.
func credentials(c *content, err error) error {
	return fmt.Errorf("Failed to get %s credentials: %w", c.noun, err)
}
