// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// call returns the last CreateSnapshot of c, whose entry in the ledger is e. Before the first one of this process, c tells about those of
// earlier processes, and nothing else reads that from c.
func (c *content) call(e entry) entry {
	if e.State == intent.Idle && c.calledBefore() {
		e.State, e.Payload.inherited = intent.Unknown, true
	}
	return e
}

// calledBefore reports whether an earlier process may have called CreateSnapshot, without a definite result.
func (c *content) calledBefore() bool {
	switch {
	case c.member() || !c.dynamic() || !c.bound():
		return false
	case c.known().handle != "": // a check
		return !c.known().ready || c.has(c.creating) && c.has(AnnRequest)
	case c.has(c.creating):
		return true
	case !c.leaving() || c.status.cleared():
		return false
	case !c.has(AnnRequest): // the snapshot-controller replaces all annotations from its cache when it releases a deletion
		return c.policy == snapshotv1.VolumeSnapshotContentDelete
	}
	_, malformed := c.recordedRequest()
	return malformed == nil // and another writer has removed the other annotation
}

// unrecorded reports whether c has no record of a CreateSnapshot.
func (c *content) unrecorded() bool { return !c.has(c.creating) && !c.has(AnnRequest) }

// neverCalled reports whether no CreateSnapshot was sent for c, unless the cache lacks a record.
func (c *content) neverCalled(e entry) bool { return e.State == intent.Idle && c.unrecorded() }

// suspected reports whether nothing but the lack of a record speaks for a CreateSnapshot.
func (c *content) suspected(e entry) bool { return e.Payload.inherited && c.unrecorded() }

// indeterminate reports whether a CreateSnapshot may have created a snapshot that is not in the status of c.
func (c *content) indeterminate(e entry) bool { return c.known().handle == "" && e.State.Unanswered() }

// forced reports whether another writer has removed the annotation of an indeterminate CreateSnapshot,
// to end the wait for its outcome. A check has the annotation only during the wait. The last write of an earlier leader to a content that
// it has deleted removes the annotation, too.
func (c *content) forced(e entry) bool {
	return e.Payload.orphan == nil && e.State.Unanswered() && !c.has(c.creating) && c.has(AnnRequest) &&
		(c.known().handle == "" || slices.Contains(e.Payload.announced, blockedOutcome))
}

// endsWait reports whether another writer has removed the annotation of the call e since before, which ends the wait or is undone. This
// process removes it later.
func (c *content) endsWait(before *content, e entry) bool {
	return before.has(c.creating) && !c.has(c.creating) && e.State.Unanswered() && !(e.Payload.inherited && c.known().handle != "")
}

// recordTest returns the test that the record of the request is that of c.
func recordTest(c *content) map[string]any {
	path := kube.AnnotationPath(AnnRequest)
	if text, ok := c.Annotations[AnnRequest]; ok {
		return map[string]any{path: text}
	}
	return map[string]any{path: nil}
}

// recordRequest adds the record of r to change, which replaces a malformed record and that of another request.
func recordRequest(c *content, change *kube.MetadataPatch, r *createRequest) {
	if change.Tests == nil {
		change.Tests = map[string]any{}
	}
	maps.Copy(change.Tests, recordTest(c)) // another leader may have recorded another request
	if recorded, malformed := c.recordedRequest(); malformed != nil || recorded != nil && !recorded.equal(r) {
		change.SetAnnotations = map[string]string{AnnRequest: r.encode("")}
		return
	}
	change.InitAnnotations[AnnRequest] = r.encode("")
}

// encode returns the value of [AnnRequest]. That of a repetition during a deletion has the term of this process, so that it differs from
// the records of earlier leaders.
func (r createRequest) encode(term types.UID) string {
	return encoded(struct {
		createRequest
		Term types.UID `json:"id,omitempty"`
	}{r, term})
}

func encoded(record any) string {
	text, err := json.Marshal(record)
	if err != nil {
		panic(err) // strings have an encoding
	}
	return string(text)
}

// recordedRequest returns the request that is recorded on c, or nil if there is none.
func (c *content) recordedRequest() (*createRequest, error) {
	text, ok := c.Annotations[AnnRequest]
	if !ok {
		return nil, nil
	}
	var r createRequest
	err := json.Unmarshal([]byte(text), &r)
	switch {
	case err != nil:
	case r.Name == "":
		err = errors.New("it has no name")
	case r.UID != "" && r.UID != c.UID:
		err = fmt.Errorf("it is a copy from an object with UID %s", r.UID)
	}
	if err != nil {
		return nil, fmt.Errorf("annotation %s of %s %q is ignored: %w. The request is computed from the class and the settings",
			AnnRequest, c.kind.name, c.Name, err)
	}
	return &r, nil
}

// recorded reports whether c has the record that the first CreateSnapshot with r needs. The check of a snapshot that exists needs none.
func (c *content) recorded(r *createRequest) bool {
	record, malformed := c.recordedRequest()
	return !c.isNew() || c.has(c.creating) && malformed == nil && record != nil && record.equal(r)
}

// binds reports whether every call must repeat the recorded request of c: the snapshot exists, or may have been created by an
// earlier call. After a definite error, a changed class or name replaces the record.
func (c *content) binds(e entry) bool {
	return c.known().handle != "" || e.State != intent.Planned && e.State != intent.Settled
}

// record writes the finalizer and the request before the first call.
func (l *loop) record(ctx context.Context, c *content, step step) error {
	_, err := l.objects.Patch(ctx, l.writer, c, step.change)
	switch {
	case err == nil:
		if !c.leaving() && c.neverCalled(l.ledger.Get(c.UID)) {
			_, err = l.plan(c, intent.Plan, step.request)
		}
		return err
	case l.objects.Outdated(c, err):
		return nil // decide again
	}
	err = fmt.Errorf("failed to add %sBeingCreated annotation on the %s %s: %w",
		strings.TrimSuffix(c.kind.name, "Content"), c.object, c.Name, err)
	switch {
	case !c.leaving():
		return l.report(ctx, c, doReportCreation, err)
	case kube.RecordRefused(err): // the repetition does without
		l.eventOnce(c, "record", warning, c.deleted, err.Error())
		return l.happened(c.UID, intent.Refuse, nil)
	}
	return l.reportDeletion(ctx, c, err)
}
