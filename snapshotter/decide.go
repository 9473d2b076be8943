// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// driver holds the name of the driver, its capabilities and the settings that decisions depend on.
type driver struct {
	Config
	name          string
	listSnapshots bool // LIST_SNAPSHOTS
	getSnapshot   bool // GET_SNAPSHOT
}

// state is the input of [driver.decide].
type state struct {
	content *content // nil: deleted
	orphan  bool     // the content is deleted: see [orphanOf]
	class   *class   // of the content; nil: none is named, or it does not exist
	call    entry
	// live: this process has read or written the content at the API server in this term. The cache of a new leader may lag behind
	// the last writes of its predecessor.
	live bool
	// groupReady is the readiness of the group of a member.
	groupReady groupReadiness
	groupFound bool // the content of this group is in the cache
	// other names the snapshot that is written to the status or deleted next; nil: no other content does.
	other *content
	term  types.UID // in records of this process
	now   time.Time
	reads
}

// reads holds what earlier steps of the same sync read from the API server.
type reads struct {
	read      election.Moment // of the content; zero: not read
	ofOrphan  bool            // that read was of a content that the cache lacks
	secret    bool
	secrets   map[string]string
	noSecret  error // NotFound, of a deletion
	classRead bool
	class     *class // nil: it does not exist
	listed    bool   // the snapshots of the group
	snapshots []string
}

// groupReadiness is the readiness of the group of a member in the cache.
type groupReadiness int

const (
	groupUnknown  groupReadiness = iota // group snapshots are off for the whole run
	groupNotReady                       // or not found, or not watched yet
	groupIsReady
)

// action names the next step for a content.
type action int

const (
	doNothing         action = iota
	doReportCreation         // write status.error about the creation
	doReportCheck            // write status.error about a check
	doReportDeletion         // send an event
	doSettle                 // remember that CreateSnapshot was never called
	doAnnounce               // send an event about what the deletion waits for, once
	doReadSecret             // read the secret of the RPC
	doReadContent            // read the content from the API server
	doReadClass              // read the class of the content from the API server
	doRecordRequest          // patch finalizer and annotations of the content
	doCreate                 // CreateSnapshot
	doCheck                  // GetSnapshot, ListSnapshots or GetVolumeGroupSnapshot
	doWriteAnswer            // patch the status
	doAskAgain               // drop a response that cannot be written, and send an event
	doEndCreation            // remove the annotation volumesnapshot-being-created
	doReadMembers            // GetVolumeGroupSnapshot, for the snapshots of a group that is deleted
	doDelete                 // DeleteSnapshot
	doClearStatus            // patch the status after the deletion
	doRemoveFinalizer        // patch the content
)

// String returns the value of "action" in logs and the name of the step in traces.
func (a action) String() string {
	return [...]string{
		"nothing", "report creation error", "report check error", "report deletion error", "settle", "announce", "read secret",
		"read content", "read class", "record request", "create", "check", "write answer", "ask again", "end creation", "read members",
		"delete", "clear status", "remove finalizer",
	}[a]
}

// step is an action and its arguments.
type step struct {
	action  action
	reason  string
	next    time.Time // of doNothing: when to decide again; zero: after an event
	err     error     // of doReport… and doAskAgain, and of doAnnounce instead of cause
	cause   cause     // of doAnnounce, and of doReportDeletion if the deletion waits for it
	secret  *corev1.SecretReference
	report  action // of the reads: how an error is reported; doNothing: it is only returned
	request *createRequest
	answer  *answer
	deleted snapshot // of doDelete
	change  kube.MetadataPatch
	status  statusChange
	warning string // of doRemoveFinalizer: text of an event
}

// cause is what a deletion waits for.
type cause struct{ reason, text string }

// malformedRecord is the key of the event about a malformed record.
const malformedRecord = "malformed"

// row is a row of the decision table; the first that matches applies.
type row int

const (
	notResponsible row = iota
	deletionDone       // being deleted, without the finalizer
	createToDelete     // being deleted while the outcome of CreateSnapshot is unknown
	deleteSnapshot     // being deleted with policy Delete and a known snapshot
	release            // being deleted, nothing to delete at the driver
	noSource           // the handles in spec.source are empty
	create             // no snapshot yet
	waitForGroup       // a member without status
	complete           // ready
	check              // not ready
)

// released reports whether the snapshot-controller has released the deletion of c.
func (c *content) released() bool {
	return c.has(c.deleting) || !c.dynamic() && !c.bound()
}

// rowOf returns the row that applies to c.
func (d driver) rowOf(c *content, e entry) row {
	hasSource, m := c.dynamic() || c.preProvisioned(), e.Payload
	switch {
	case c.driver != d.name:
		return notResponsible
	case c.terminating() && !c.protected() && m.orphan == nil:
		return deletionDone
	case c.terminating() && c.released():
		switch {
		case !hasSource:
			return release
		case c.indeterminate(e):
			return createToDelete
		case m.awaitsCheck(c):
			return check
		case c.policy == snapshotv1.VolumeSnapshotContentDelete && !c.member() && c.deletedHandle(e) != "":
			return deleteSnapshot
		}
		return release
	case !hasSource:
		return noSource
	case c.isNew() && !c.member():
		return create
	case c.member() && c.known().handle == "":
		return waitForGroup
	case c.known().ready:
		return complete
	}
	return check
}

// decide returns the next step for a content. It has no side effects and handles every state, also
// states that no correct component produces.
func (d driver) decide(s state) step {
	c := s.content
	switch {
	case c == nil:
		return step{reason: "Deleted"}
	case s.orphan && s.read.IsZero(): // also after a call, which may have taken long
		return step{action: doReadContent, reason: "Deleted", report: doReportDeletion}
	}
	row := d.rowOf(c, s.call)
	if c.terminating() && !c.released() && row > release {
		pending := cause{blockedRelease, fmt.Sprintf("the snapshot-controller to set annotation %s after the deletion of %s %s/%s",
			c.deleting, c.ref.Kind, c.ref.Namespace, c.ref.Name)}
		switch {
		case row == create && c.neverCalled(s.call) && !s.live:
			return step{action: doReadContent, reason: "Unconfirmed"}
		case row == create && c.neverCalled(s.call): // before the release, no record is lost
			return step{action: doSettle, reason: "NeverCalled"}
		case !slices.Contains(s.call.Payload.announced, pending.reason):
			return step{action: doAnnounce, reason: "NotReleased", cause: pending}
		case row == create && !s.call.State.MayHaveEffect():
			return step{reason: "NotReleased"} // a creation that was never sent is not started
		}
	}
	switch row {
	case notResponsible:
		return step{reason: "OtherDriver"}
	case deletionDone:
		return step{reason: "Released"}
	case createToDelete:
		return d.decideReplay(s)
	case deleteSnapshot:
		return d.decideDelete(s)
	case release:
		return s.decideRelease()
	case noSource:
		return step{action: doReportCreation, reason: "NoSource",
			err: fmt.Errorf("spec.source of %s %s has empty handles. Recreate it with handles", c.kind.name, c.Name)}
	case create:
		return d.decideCreate(s)
	case waitForGroup:
		return step{reason: "MemberWithoutStatus"}
	case complete:
		if c.has(c.creating) {
			return step{action: doEndCreation, reason: "Ready"}
		}
		return step{reason: "Ready"}
	}
	return d.decideNotReady(s)
}

// decideCreate handles a content without a snapshot.
func (d driver) decideCreate(s state) step {
	c := s.content
	fail := func(err error) step { return step{action: doReportCreation, reason: "CannotCreate", err: err} }
	_, malformed := c.recordedRequest()
	switch {
	case s.call.State == intent.Answered:
		return s.decideWrite(*s.call.Payload.answer)
	case malformed != nil && !slices.Contains(s.call.Payload.announced, malformedRecord):
		return step{action: doAnnounce, reason: "MalformedRequest", err: malformed}
	case !c.bound():
		return fail(fmt.Errorf("cannot create %s. %s%s content %s not bound to a %[1]s",
			c.noun, strings.ToUpper(c.noun[:1]), c.noun[1:], c.Name))
	}
	request, err := d.createRequest(c, s.class, s.call)
	_, ofOther := errors.AsType[classOfOther](err)
	switch {
	case ofOther:
		return step{reason: "ClassOfOtherDriver"}
	case err != nil:
		return fail(err)
	}
	secret, err := d.annotatedSecret(c)
	if err != nil {
		return fail(inputsError(c, err.Error()))
	}
	change := kube.MetadataPatch{InitAnnotations: map[string]string{c.creating: "yes"}}
	if !c.terminating() {
		change.AddFinalizers = []string{c.finalizer}
		change.Tests = map[string]any{"/metadata/deletionTimestamp": nil} // the cache may be outdated
	}
	recordRequest(c, &change, request)
	return s.decideCall(step{reason: "Requested", request: request, change: change, secret: secret, report: doReportCreation},
		intent.BeforeCall)
}

// decideCall returns call, a CreateSnapshot, or the step that has to be taken before it. The change of call records it.
func (s state) decideCall(call step, when intent.When) step {
	record := intent.None
	if call.change.AppliedTo(s.content) {
		record = intent.Own
	}
	switch intent.NextOfCall(intent.Policy{Record: when}, s.call.State, intent.Facts{
		Record: record, Refused: s.call.Refused, Writable: !s.orphan, Wanted: true,
		Ready: call.secret == nil || s.reads.secret, Stale: !s.live,
	}) {
	case intent.DoPrepare:
		return step{action: doReadSecret, reason: "SecretNeeded", secret: call.secret, report: call.report}
	case intent.DoConfirm: // the snapshot may have been created and deleted, together with the content, by an earlier leader
		return step{action: doReadContent, reason: "Unconfirmed"}
	case intent.DoRecord:
		call.action, call.reason = doRecordRequest, "NotRecorded"
	default:
		call.action = doCreate
	}
	return call
}
