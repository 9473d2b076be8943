// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	groupv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/intent"
)

const driverName = "drv.example.com"

func testDriver() driver {
	return driver{Config: DefaultConfig(), name: driverName, listSnapshots: true}
}

// recorded is the value of [AnnRequest] for the content of [testState].
var recorded = createRequest{"snapshot-" + uid, map[string]string{"a": "b"}, "v1-uid"}.encode("")

// recordedArgs are the arguments of this request.
var recordedArgs = createRequest{Name: "snapshot-" + uid, Parameters: map[string]string{"a": "b"}}.args()

// testState returns the state of a dynamic content of the class c1 that was never processed.
func testState(changes ...func(*state)) state {
	s := state{
		content: &content{
			kind: snapshotKind, ObjectMeta: &metav1.ObjectMeta{Name: "v1", UID: "v1-uid", Finalizers: []string{Finalizer}},
			driver: driverName, policy: snapshotv1.VolumeSnapshotContentDelete, class: "c1", volumes: []string{"vol-1"},
			ref: corev1.ObjectReference{Kind: "VolumeSnapshot", Namespace: "ns", Name: "s1", UID: uid},
		},
		class: &class{&metav1.ObjectMeta{Name: "c1"}, driverName, map[string]string{"a": "b"}}, now: time.Unix(1000, 0),
		live: true,
	}
	for _, change := range changes {
		change(&s)
	}
	if s.content != nil {
		s.call = s.content.call(s.call)
	}
	return s
}

func set(annotations ...string) func(*state) {
	return func(s *state) {
		if s.content.Annotations == nil {
			s.content.Annotations = map[string]string{}
		}
		for _, a := range annotations {
			s.content.Annotations[a] = map[bool]string{true: recorded, false: "yes"}[a == AnnRequest]
		}
	}
}

func terminating(s *state) { s.content.DeletionTimestamp = ptr.To(metav1.Now()) }

func released(s *state) {
	terminating(s)
	set(AnnBeingDeleted)(s)
}

func withStatus(st contentStatus) func(*state) { return func(s *state) { s.content.status = &st } }

func isPreProvisioned(s *state) { s.content.volumes, s.content.handle = nil, "h" }

func unbound(s *state) { s.content.ref.UID = "" }

func noFinalizer(s *state) { s.content.Finalizers = nil }

func otherFinalizer(s *state) {
	s.content.Finalizers = append(s.content.Finalizers, "example.com/other")
}

func retained(s *state) { s.content.policy = snapshotv1.VolumeSnapshotContentRetain }

func live(s *state) { s.read = election.Now() }

func remember(change func(*memory)) func(*state) { return func(s *state) { change(&s.call.Payload) } }

// cached: the state is from the cache of a new leader.
func cached(s *state) { s.live, s.term = false, "another" }

// recordedBefore: an earlier leader has recorded the request.
func recordedBefore(s *state) { s.term = "another" }

func withCall(c intent.State) func(*state) {
	return func(s *state) { s.call.State, s.call.Args = c, recordedArgs }
}

func deleted(s *state) { s.call.State, s.call.Payload.deleted = intent.Settled, true }

// orphan: the content was deleted by force.
func orphan(s *state) {
	noFinalizer(s)
	s.orphan, s.call.Payload.orphan = true, s.content
}

func announced(causes ...string) func(*state) {
	return remember(func(m *memory) { m.announced = causes })
}

// answered: CreateSnapshot, or the check of a pre-provisioned snapshot, has returned a.
func answered(a answer) func(*state) {
	return func(s *state) {
		s.call.Payload.answer = &a
		if s.content.dynamic() {
			s.call.State = intent.Answered
		}
	}
}

func secret(s *state) {
	set()(s)
	maps.Copy(s.content.Annotations, map[string]string{AnnSecretName: "s", AnnSecretNamespace: "ns"})
}

func secretRead(s *state) { s.reads.secret, s.secrets = true, map[string]string{"k": "v"} }

func noClass(s *state) { s.class, s.classRead = nil, true }

func classUncached(s *state) { s.class = nil }

// shared: another content names the snapshot.
func shared(changes ...func(*state)) func(*state) {
	return func(s *state) { s.other = testState(changes...).content }
}

func TestDecide(t *testing.T) {
	type changes = []func(*state)
	ready, created := contentStatus{handle: "h", hasReady: true, ready: true, created: true},
		contentStatus{handle: "h", hasReady: true, created: true}
	for name, test := range map[string]struct {
		changes changes
		want    action
		reason  string
	}{
		"deleted":      {changes{func(s *state) { s.content = nil }}, doNothing, "Deleted"},
		"other driver": {changes{func(s *state) { s.content.driver = "x" }}, doNothing, "OtherDriver"},
		"no source":    {changes{func(s *state) { s.content.volumes = nil }}, doReportCreation, "NoSource"},
		"no source, being deleted": {changes{func(s *state) { s.content.volumes = nil }, withStatus(ready), released}, doRemoveFinalizer,
			"NothingToDelete"},
		"no source, unbound, being deleted": {changes{func(s *state) { s.content.volumes = nil }, unbound, terminating}, doRemoveFinalizer,
			"NothingToDelete"},
		"new":                         {changes{}, doRecordRequest, "NotRecorded"},
		"new, without finalizer":      {changes{noFinalizer, set(AnnBeingCreated, AnnRequest)}, doRecordRequest, "NotRecorded"},
		"recorded":                    {changes{set(AnnBeingCreated, AnnRequest)}, doCreate, "Requested"},
		"recorded by another process": {changes{set(AnnBeingCreated, AnnRequest), cached}, doReadContent, "Unconfirmed"},
		"recorded, no class":          {changes{set(AnnBeingCreated, AnnRequest), noClass}, doCreate, "Requested"},
		"recorded, class of another driver": {changes{set(AnnBeingCreated, AnnRequest), func(s *state) { s.class.driver = "x" }},
			doCreate, "Requested"},
		"class of another driver": {changes{func(s *state) { s.class.driver = "x" }}, doNothing, "ClassOfOtherDriver"},
		"unanswered, record removed, class of another driver": {changes{withCall(intent.Unknown), func(s *state) { s.class.driver = "x" }},
			doRecordRequest, "NotRecorded"},
		"unanswered, record malformed, class of another driver": {changes{withCall(intent.Unknown), set(AnnBeingCreated, AnnRequest),
			func(s *state) { s.content.Annotations[AnnRequest], s.class.driver = "{}", "x" }, announced(malformedRecord)},
			doRecordRequest, "NotRecorded"},
		"class missing": {changes{noClass}, doReportCreation, "CannotCreate"},
		"no class":      {changes{noClass, func(s *state) { s.content.class = "" }}, doReportCreation, "CannotCreate"},
		"unbound":       {changes{unbound}, doReportCreation, "CannotCreate"},
		"reserved parameter": {changes{func(s *state) { s.class.parameters["csi.storage.k8s.io/x"] = "" }},
			doReportCreation, "CannotCreate"},
		"secret to read": {changes{secret}, doReadSecret, "SecretNeeded"},
		"secret read":    {changes{secret, secretRead}, doRecordRequest, "NotRecorded"},
		"malformed": {changes{set(AnnRequest), func(s *state) { s.content.Annotations[AnnRequest] = "{" }}, doAnnounce,
			"MalformedRequest"},
		"malformed, said so": {changes{set(AnnRequest), func(s *state) { s.content.Annotations[AnnRequest] = "{}" },
			announced(malformedRecord)}, doRecordRequest, "NotRecorded"},
		"answered": {changes{set(AnnBeingCreated, AnnRequest), answered(answer{handle: "h"})},
			doWriteAnswer, "Answered"},
		"created":                       {changes{set(AnnBeingCreated), withStatus(created)}, doEndCreation, "Created"},
		"not ready":                     {changes{set(AnnRequest), withStatus(created)}, doCreate, "NotReady"},
		"not ready, of another process": {changes{set(AnnRequest), withStatus(created), cached}, doReadContent, "Unconfirmed"},
		"not ready, not yet to be checked": {changes{withStatus(created), remember(func(m *memory) { m.nextCheck = time.Unix(1001, 0) })},
			doNothing, "NotReady"},
		"another handle than the source's":   {changes{isPreProvisioned, answered(answer{handle: "x"})}, doAskAgain, "Contradiction"},
		"another handle":                     {changes{withStatus(created), answered(answer{handle: "x"})}, doAskAgain, "Contradiction"},
		"ready":                              {changes{withStatus(ready)}, doNothing, "Ready"},
		"ready, being created":               {changes{withStatus(ready), set(AnnBeingCreated)}, doEndCreation, "Ready"},
		"pre-provisioned":                    {changes{isPreProvisioned, unbound}, doCheck, "NotReady"},
		"class of its secret":                {changes{isPreProvisioned, noClass}, doReportCheck, "CannotCheck"},
		"member without status":              {changes{set(AnnGroup)}, doNothing, "MemberWithoutStatus"},
		"pre-provisioned, of a copied group": {changes{set(AnnGroup), isPreProvisioned}, doCheck, "NotReady"},
		"member":                             {changes{set(AnnGroup), withStatus(created)}, doCheck, "NotReady"},

		"not released":          {changes{terminating}, doSettle, "NeverCalled"},
		"not released, settled": {changes{terminating, withCall(intent.Settled)}, doAnnounce, "NotReleased"},
		"not released, said so": {changes{terminating, withCall(intent.Settled), announced(blockedRelease)}, doNothing, "NotReleased"},
		"not released, indeterminate": {changes{terminating, announced(blockedRelease), set(AnnBeingCreated, AnnRequest)}, doCreate,
			"Requested"},
		"not released, answered": {changes{terminating, announced(blockedRelease), set(AnnBeingCreated, AnnRequest),
			answered(answer{handle: "h"})},
			doWriteAnswer, "Answered"},
		"not released, ready": {changes{terminating, announced(blockedRelease), withStatus(ready)}, doNothing, "Ready"},
		"not released, not ready": {changes{terminating, announced(blockedRelease), withStatus(created), set(AnnRequest)}, doCreate,
			"NotReady"},
		"done":          {changes{released, noFinalizer, withStatus(ready)}, doNothing, "Released"},
		"indeterminate": {changes{released, set(AnnBeingCreated, AnnRequest)}, doCreate, "Indeterminate"},
		"indeterminate, of another process": {changes{released, set(AnnBeingCreated, AnnRequest), cached}, doRecordRequest,
			"NotRecorded"},
		"indeterminate, record refused": {changes{released, withCall(intent.Unknown), set(AnnBeingCreated, AnnRequest), recordedBefore,
			func(s *state) { s.call.Refused = true }}, doCreate, "Indeterminate"},
		"indeterminate, record changed": {changes{withCall(intent.Unknown), set(AnnBeingCreated, AnnRequest), func(s *state) {
			s.content.Annotations[AnnRequest] = createRequest{Name: "other"}.encode("")
		}}, doRecordRequest, "NotRecorded"},
		"indeterminate, recorded by csi-snapshotter": {changes{released, set(AnnBeingCreated)}, doRecordRequest, "NotRecorded"},
		"indeterminate, of another process, read": {changes{released, set(AnnBeingCreated, AnnRequest), recordedBefore}, doRecordRequest,
			"NotRecorded"},
		"indeterminate, no class": {changes{released, set(AnnBeingCreated, AnnRequest), noClass}, doCreate,
			"Indeterminate"},
		"indeterminate, nothing recorded, no class": {changes{released, set(AnnBeingCreated), noClass}, doReportDeletion, "CannotRepeat"},
		"indeterminate, nothing recorded, class of another driver": {changes{released, set(AnnBeingCreated),
			func(s *state) { s.class.driver = "x" }}, doReportDeletion, "CannotRepeat"},
		"not ready, class of another driver": {changes{withStatus(created), func(s *state) { s.class.driver = "x" }}, doReportCheck,
			"CannotCheck"},
		"indeterminate, annotations replaced": {changes{released, withCall(intent.Unknown)}, doRecordRequest, "NotRecorded"},
		"indeterminate, annotation removed": {changes{released, withCall(intent.Unknown), set(AnnRequest)}, doCreate,
			"Indeterminate"},
		"indeterminate, annotation removed before a restart": {changes{released, set(AnnRequest)}, doCreate, "Indeterminate"},
		"annotations replaced before a restart":              {changes{released}, doRecordRequest, "NotRecorded"},
		"no annotations, secret, from the cache":             {changes{released, secret, cached}, doReadContent, "Unconfirmed"},
		"not released, from the cache":                       {changes{terminating, cached}, doReadContent, "Unconfirmed"},
		"not released, ready, from the cache":                {changes{terminating, withStatus(ready), cached}, doAnnounce, "NotReleased"},
		"annotations replaced after an error": {changes{released, withStatus(contentStatus{hasReady: true, hasErr: true})}, doRecordRequest,
			"NotRecorded"},
		"annotations replaced, secret":     {changes{released, secret}, doReadSecret, "SecretNeeded"},
		"no annotations, class not cached": {changes{released, classUncached}, doReadClass, "NotCached"},
		"check of an earlier leader, class not cached": {changes{released, withStatus(created), classUncached, live}, doReadClass,
			"NotCached"},
		"no annotations, no class":         {changes{released, noClass}, doRemoveFinalizer, "NothingToDelete"},
		"no annotations, retained":         {changes{released, retained}, doRemoveFinalizer, "NothingToDelete"},
		"no annotations, member":           {changes{released, set(AnnGroup)}, doRemoveFinalizer, "NothingToDelete"},
		"no annotations, unbound":          {changes{released, unbound}, doRemoveFinalizer, "NothingToDelete"},
		"no annotations, never called":     {changes{released, withCall(intent.Settled)}, doRemoveFinalizer, "NothingToDelete"},
		"no annotations, deleted, cleared": {changes{released, withStatus(contentStatus{})}, doRemoveFinalizer, "NothingToDelete"},
		"no annotations, half a secret": {changes{released, secret, func(s *state) { s.content.Annotations[AnnSecretName] = "" }},
			doRemoveFinalizer, "NothingToDelete"},
		"annotation removed before a restart, not released": {changes{terminating, announced(blockedRelease), set(AnnRequest)},
			doNothing, "NotReleased"},
		"recorded, then deleted at the driver": {changes{released, set(AnnRequest), withStatus(contentStatus{})}, doRemoveFinalizer,
			"NothingToDelete"},
		"recorded for another content": {changes{released, set(AnnRequest), func(s *state) {
			s.content.Annotations[AnnRequest] = `{"name":"n","uid":"other"}`
		}}, doRemoveFinalizer, "NothingToDelete"},
		"copied from another content": {changes{set(AnnRequest), func(s *state) {
			s.content.Annotations[AnnRequest] = `{"name":"n","uid":"other"}`
		}}, doAnnounce, "MalformedRequest"},
		"indeterminate, secret":       {changes{released, set(AnnBeingCreated, AnnRequest), secret}, doReadSecret, "SecretNeeded"},
		"indeterminate, but retained": {changes{released, retained, set(AnnBeingCreated, AnnRequest)}, doCreate, "Indeterminate"},
		"indeterminate, but unbound":  {changes{released, unbound, set(AnnBeingCreated)}, doRemoveFinalizer, "NothingToDelete"},
		"definite": {changes{released, withCall(intent.Settled), set(AnnBeingCreated, AnnRequest)}, doRemoveFinalizer,
			"NothingToDelete"},
		"has a handle, being created": {changes{released, set(AnnBeingCreated), withStatus(ready)}, doReadContent, "Unconfirmed"},
		"created again in a deletion": {changes{released, withStatus(ready), answered(answer{handle: "h2"}), live},
			doDelete, "Deleting"},
		"answered in a deletion": {changes{released, answered(answer{handle: "h"}), live}, doDelete,
			"Deleting"},
		"answered and retained": {changes{released, retained, answered(answer{handle: "h"})}, doRemoveFinalizer,
			"NothingToDelete"},
		"to delete":               {changes{released, withStatus(ready)}, doReadContent, "Unconfirmed"},
		"to delete, read":         {changes{released, withStatus(ready), live}, doDelete, "Deleting"},
		"to delete with a secret": {changes{released, withStatus(ready), secret}, doReadSecret, "SecretNeeded"},
		"half a secret": {changes{released, withStatus(ready), secret, live,
			func(s *state) { s.content.Annotations[AnnSecretName] = "" }},
			doReportDeletion, "CannotDelete"},
		"check indeterminate": {changes{released, withStatus(created), set(AnnRequest), withCall(intent.Unknown), live},
			doRecordRequest, "NotRecorded"},
		"check of an earlier leader": {changes{released, withStatus(created), set(AnnRequest), live}, doRecordRequest,
			"NotRecorded"},
		"check of an earlier leader, not recorded": {changes{released, withStatus(created), live}, doRecordRequest, "NotRecorded"},
		"check of an earlier leader, nothing recorded, no class": {changes{released, withStatus(created), noClass, live}, doDelete,
			"Deleting"},
		"deleted after an unanswered call, status with an error": {changes{released, otherFinalizer, set(AnnBeingCreated, AnnRequest),
			withStatus(contentStatus{hasReady: true, hasErr: true}), deleted}, doClearStatus,
			"SnapshotDeleted"},
		"check of an earlier leader, recorded by it": {changes{released, withStatus(ready), set(AnnBeingCreated, AnnRequest), live,
			recordedBefore}, doRecordRequest, "NotRecorded"},
		"check of an earlier leader, recorded": {changes{released, withStatus(ready), set(AnnBeingCreated, AnnRequest), live}, doCreate,
			"Indeterminate"},
		"check indeterminate, recorded": {changes{released, withStatus(created), set(AnnBeingCreated, AnnRequest),
			withCall(intent.Unknown), announced(blockedOutcome), live}, doCreate, "Indeterminate"},
		"check indeterminate, wait ended": {changes{released, withStatus(created), set(AnnRequest), withCall(intent.Unknown),
			announced(blockedOutcome), live}, doCreate, "Indeterminate"},
		"content deleted":       {changes{released, orphan, withCall(intent.Unknown)}, doReadContent, "Deleted"},
		"content deleted, read": {changes{released, orphan, withCall(intent.Unknown), live}, doCreate, "Indeterminate"},
		"content deleted, annotation removed": {changes{released, orphan, set(AnnRequest), withCall(intent.Unknown), live}, doCreate,
			"Indeterminate"},
		"content deleted, answered": {changes{released, orphan, answered(answer{handle: "h"}), live}, doDelete, "Deleting"},
		"content deleted, snapshot deleted": {changes{released, orphan, otherFinalizer, withStatus(ready), deleted, live},
			doRemoveFinalizer, "SnapshotDeleted"},
		"content deleted, another names the snapshot": {changes{released, orphan, withStatus(ready), withCall(intent.Unknown), live,
			shared()}, doRemoveFinalizer, "NothingToDelete"},
		"retained": {changes{released, retained, withStatus(ready)}, doRemoveFinalizer, "NothingToDelete"},
		"at the driver deleted": {changes{released, withStatus(ready), deleted},
			doRemoveFinalizer, "SnapshotDeleted"},
		"at the driver deleted, another finalizer": {changes{released, otherFinalizer, withStatus(ready),
			deleted}, doClearStatus, "SnapshotDeleted"},
		"cleared": {changes{released, otherFinalizer, withStatus(contentStatus{}), set(AnnBeingCreated),
			deleted}, doRemoveFinalizer, "SnapshotDeleted"},
		"at the driver deleted, another finalizer, being created": {changes{released, otherFinalizer, withStatus(ready),
			set(AnnBeingCreated), deleted}, doEndCreation, "SnapshotDeleted"},
		"member to delete": {changes{released, set(AnnGroup), withStatus(ready)}, doRemoveFinalizer,
			"NothingToDelete"},
		"unbound, pre-provisioned, never checked": {changes{terminating, isPreProvisioned, unbound,
			func(s *state) { s.content.class = "" }}, doCheck, "NotReady"},
		"unbound, pre-provisioned, unknown to the driver": {changes{terminating, isPreProvisioned, unbound,
			remember(func(m *memory) { m.absent = true })}, doRemoveFinalizer, "NothingToDelete"},
		"unbound, pre-provisioned, retained": {changes{terminating, isPreProvisioned, unbound, retained}, doRemoveFinalizer,
			"NothingToDelete"},
		"unbound, pre-provisioned, deleted and cleared": {changes{terminating, isPreProvisioned, unbound, withStatus(contentStatus{})},
			doRemoveFinalizer, "NothingToDelete"},
		"unbound, pre-provisioned": {changes{terminating, isPreProvisioned, unbound, live, withStatus(ready)},
			doDelete, "Deleting"},
		"unbound, pre-provisioned, answered": {changes{terminating, isPreProvisioned, unbound, live, answered(answer{handle: "h"})},
			doWriteAnswer, "Answered"},
		"pre-provisioned, of a copied group, to delete": {changes{released, isPreProvisioned, live, set(AnnGroup)}, doDelete, "Deleting"},
		"bound, never checked":                          {changes{released, isPreProvisioned, live}, doDelete, "Deleting"},
		"shared": {changes{released, withStatus(ready), live, shared()}, doReportDeletion,
			"Shared"},
		"shared with a content that is deleted, too": {changes{released, withStatus(ready), live, shared(released)}, doDelete, "Deleting"},
		"shared with a content whose deletion is not released": {changes{released, withStatus(ready), live, shared(terminating)},
			doReportDeletion, "Shared"},
		"response of another content, in a deletion": {changes{released, answered(answer{handle: "h"}), live,
			shared()}, doRemoveFinalizer, "NothingToDelete"},
		"response of another content": {changes{set(AnnBeingCreated, AnnRequest), answered(answer{handle: "h"}), shared(released)},
			doAskAgain, "Contradiction"},
		"created again with the snapshot of another content": {changes{released, withStatus(ready),
			answered(answer{handle: "h2"}), live, shared()}, doReportDeletion, "Shared"},
		"bound, not released": {changes{terminating, isPreProvisioned, withStatus(ready)}, doAnnounce,
			"NotReleased"},
	} {
		t.Run(name, func(t *testing.T) {
			step := testDriver().decide(testState(test.changes...))
			if step.action != test.want || step.reason != test.reason {
				t.Errorf("%v (%s) %v, want %v (%s)", step.action, step.reason, step.err, test.want, test.reason)
			}
			s := testState(test.changes...)
			if step.action == doCreate && !s.call.State.MayHaveEffect() && !s.content.recorded(step.request) {
				t.Error("the first call has no record")
			}
		})
	}
}

// TestRecorded: the first CreateSnapshot is not sent without its record.
func TestRecorded(t *testing.T) {
	recorded := testState(set(AnnBeingCreated, AnnRequest)).content
	r, err := recorded.recordedRequest()
	if err != nil {
		t.Fatal(err)
	}
	other := *r
	other.Name += "-other"
	for name, got := range map[string]bool{
		"without":                recorded.recorded(r) && !testState().content.recorded(r),
		"without the annotation": !testState(set(AnnRequest)).content.recorded(r),
		"of another request":     !recorded.recorded(&other),
		"of a check":             testState(withStatus(contentStatus{handle: "h"})).content.recorded(r),
	} {
		if !got {
			t.Error(name)
		}
	}
}

// TestDecideWithoutList: the driver can report no state of existing snapshots.
func TestDecideWithoutList(t *testing.T) {
	created := withStatus(contentStatus{handle: "h", hasReady: true, created: true})
	group := func(r groupReadiness) func(*state) { return func(s *state) { s.groupReady = r } }
	for name, test := range map[string]struct {
		changes []func(*state)
		want    action
	}{
		"pre-provisioned":      {[]func(*state){isPreProvisioned}, doWriteAnswer},
		"dynamic":              {[]func(*state){created, set(AnnRequest)}, doCreate},
		"group is not ready":   {[]func(*state){created, set(AnnGroup), group(groupNotReady)}, doNothing},
		"group is ready":       {[]func(*state){created, set(AnnGroup), group(groupIsReady)}, doWriteAnswer},
		"no groups are served": {[]func(*state){created, set(AnnGroup), group(groupUnknown)}, doWriteAnswer},
	} {
		t.Run(name, func(t *testing.T) {
			d := testDriver()
			d.listSnapshots = false
			if step := d.decide(testState(test.changes...)); step.action != test.want {
				t.Errorf("%v (%s)", step.action, step.reason)
			}
		})
	}
}

func TestIndeterminate(t *testing.T) {
	for name, test := range map[string]struct {
		changes []func(*state)
		want    bool
	}{
		"new":                         {nil, false},
		"recorded by another process": {[]func(*state){set(AnnBeingCreated)}, true},
		"final error":                 {[]func(*state){set(AnnBeingCreated), withCall(intent.Settled)}, false},
		"in this process":             {[]func(*state){withCall(intent.Unknown)}, true},
		"with a handle":               {[]func(*state){withCall(intent.Unknown), withStatus(contentStatus{handle: "h"})}, false},
		"member":                      {[]func(*state){set(AnnBeingCreated, AnnGroup)}, false},
		"pre-provisioned":             {[]func(*state){set(AnnBeingCreated), isPreProvisioned}, false},
		"annotations of a group replaced": {[]func(*state){terminating, set(AnnGroupBeingDeleted), func(s *state) {
			s.content.kind = groupKind
		}}, true},
	} {
		t.Run(name, func(t *testing.T) {
			if s := testState(test.changes...); s.content.indeterminate(s.call) != test.want {
				t.Errorf("got %v", !test.want)
			}
		})
	}
}

func TestDeletedHandle(t *testing.T) {
	for name, test := range map[string]struct {
		changes []func(*state)
		want    string
	}{
		"created":                          {[]func(*state){withStatus(contentStatus{handle: "s"})}, "s"},
		"answered":                         {[]func(*state){answered(answer{handle: "a"})}, "a"},
		"pre-provisioned":                  {[]func(*state){isPreProvisioned, answered(answer{handle: "a"})}, "h"},
		"pre-provisioned, other in status": {[]func(*state){isPreProvisioned, withStatus(contentStatus{handle: "s"})}, "h"},
		"unbound, never checked":           {[]func(*state){isPreProvisioned, unbound}, ""},
		"unbound, checked":                 {[]func(*state){isPreProvisioned, unbound, answered(answer{handle: "a"})}, "a"},
	} {
		t.Run(name, func(t *testing.T) {
			if s := testState(test.changes...); s.content.deletedHandle(s.call) != test.want {
				t.Errorf("got %q", s.content.deletedHandle(s.call))
			}
		})
	}
}

func TestFind(t *testing.T) {
	other := &csi.ListSnapshotsResponse_Entry{Snapshot: &csi.Snapshot{SnapshotId: "other", GroupSnapshotId: "g"}}
	if s := find(t.Context(), []*csi.ListSnapshotsResponse_Entry{other}, "h"); s.GetSnapshotId() != "h" || s.GetGroupSnapshotId() != "" {
		t.Errorf("the snapshot with another ID is %v", s)
	}
}

// TestSlowSnapshot: a snapshot that is ready after an hour costs one write and few calls.
func TestSlowSnapshot(t *testing.T) {
	d, s := testDriver(), testState(withStatus(contentStatus{handle: "h", hasReady: true, created: true}), set(AnnRequest))
	created, writes, calls := s.now, 0, 0
	for steps := 0; !s.content.status.ready; steps++ {
		if steps > 1000 {
			t.Fatal("it does not end")
		}
		switch step := d.decide(s); step.action {
		case doCreate:
			calls++
			answered(answer{handle: "h", ready: s.now.Sub(created) >= time.Hour})(&s)
		case doWriteAnswer:
			if len(step.status) > 0 {
				writes++
				s.content.status.ready = step.answer.ready
			}
			s.call.State = intent.Settled
			s.call.Payload.written(step.answer, s.now, d.Config)
		case doNothing:
			s.now = step.next
		default:
			t.Fatalf("%v", step.action)
		}
	}
	if took := s.now.Sub(created); writes != 1 || calls > 25 || took > time.Hour+d.RetryIntervalMax {
		t.Errorf("%d writes and %d calls in %v", writes, calls, took)
	}
}

// TestMatters: what others do with the annotation of a call ends a back-off, what this process does leaves it alone.
func TestMatters(t *testing.T) {
	handle := withStatus(contentStatus{handle: "h", created: true})
	leaving := func(s *state) { handle(s); released(s) }
	ready := withStatus(contentStatus{handle: "h", created: true, ready: true, hasReady: true})
	type changes = []func(*state)
	for name, tt := range map[string]struct {
		before, after changes
		call          intent.State
		want          bool
	}{
		"a label":                   {changes{handle}, changes{handle}, intent.Settled, false},
		"restored":                  {changes{handle}, changes{handle, set(AnnBeingCreated)}, intent.Settled, true},
		"restored before":           {changes{handle, set(AnnBeingCreated)}, changes{handle, set(AnnBeingCreated)}, intent.Settled, false},
		"ready, restored meanwhile": {changes{ready, set(AnnBeingCreated)}, changes{ready, set(AnnBeingCreated)}, intent.Settled, true},
		"set for a check":           {changes{leaving}, changes{leaving, set(AnnBeingCreated)}, intent.Unknown, false},
		"removed, outcome unknown":  {changes{leaving, set(AnnBeingCreated)}, changes{leaving}, intent.Unknown, true},
		"removed after the outcome": {changes{leaving, set(AnnBeingCreated)}, changes{leaving}, intent.Settled, false},
	} {
		var h loop
		h.c = &Controller{driver: testDriver()}
		h.ledger = intent.NewLedger[types.UID, memory](nil)
		event := map[intent.State]intent.Event{intent.Unknown: intent.Resume, intent.Settled: intent.Settle}[tt.call]
		if err := h.happened("v1-uid", event, nil); err != nil {
			t.Fatal(err)
		}
		if got := h.matters(testState(tt.before...).content, testState(tt.after...).content); got != tt.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func TestChange(t *testing.T) {
	now := time.Unix(1000, 0)
	at := time.Unix(500, 0)
	info := groupv1.VolumeSnapshotInfo{VolumeHandle: "vol-1", SnapshotHandle: "s", ReadyToUse: ptr.To(false),
		CreationTime: ptr.To(at.UnixNano())}
	inGroup := func(s *state) { s.content.kind = groupKind }
	for name, test := range map[string]struct {
		changes []func(*state)
		answer  answer
		want    string // members of the change
	}{
		"first": {nil, answer{handle: "h", ready: true, created: at, size: 5},
			"creationTime readyToUse restoreSize snapshotHandle"},
		"no size": {nil, answer{handle: "h"}, "creationTime readyToUse snapshotHandle"},
		"same":    {[]func(*state){withStatus(contentStatus{handle: "h", created: true})}, answer{handle: "h"}, ""},
		"ready": {[]func(*state){withStatus(contentStatus{handle: "h", created: true})},
			answer{handle: "h", ready: true}, "readyToUse"},
		"ready stays": {[]func(*state){withStatus(contentStatus{handle: "h", created: true, ready: true})},
			answer{handle: "h"}, ""},
		"size later": {[]func(*state){withStatus(contentStatus{handle: "h", created: true})}, answer{handle: "h", size: 5},
			"restoreSize"},
		"size once": {[]func(*state){withStatus(contentStatus{handle: "h", created: true, size: ptr.To(int64(4))})},
			answer{handle: "h", size: 5}, ""},
		"error removed": {[]func(*state){withStatus(contentStatus{handle: "h", created: true, hasErr: true})},
			answer{handle: "h"}, "error"},
		"group of a dynamic content": {[]func(*state){withStatus(contentStatus{handle: "h", created: true})},
			answer{handle: "h", group: "g"}, ""},
		"group of a pre-provisioned content": {[]func(*state){isPreProvisioned, withStatus(contentStatus{handle: "h", created: true})},
			answer{handle: "h", group: "g"}, "volumeGroupSnapshotHandle"},
		"group": {[]func(*state){inGroup}, answer{handle: "g", snapshots: []groupv1.VolumeSnapshotInfo{info}},
			"creationTime readyToUse volumeGroupSnapshotHandle volumeSnapshotInfoList"},
		"group, fewer snapshots": {[]func(*state){inGroup, withStatus(contentStatus{handle: "g", created: true, hasErr: true,
			snapshots: []groupv1.VolumeSnapshotInfo{info}})}, answer{handle: "g", problem: errors.New("fewer")}, ""},
		"group, same": {[]func(*state){inGroup, withStatus(contentStatus{handle: "g", created: true,
			snapshots: []groupv1.VolumeSnapshotInfo{info}})},
			answer{handle: "g", snapshots: []groupv1.VolumeSnapshotInfo{{VolumeHandle: "vol-1", SnapshotHandle: "s",
				ReadyToUse: ptr.To(false)}}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			change, err := testState(test.changes...).content.change(test.answer, now)
			if got := strings.Join(slices.Sorted(maps.Keys(change)), " "); err != nil || got != test.want {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
	for name, s := range map[string]state{
		"status": testState(withStatus(contentStatus{handle: "h"})), "source": testState(isPreProvisioned),
		"source of a group": testState(isPreProvisioned, inGroup),
	} {
		if _, err := s.content.change(answer{handle: "x"}, now); err == nil {
			t.Errorf("another handle than that of the %s is no error", name)
		}
	}
}

func TestReadSecret(t *testing.T) {
	key := func(s string) string { return "csi.storage.k8s.io/snapshotter-list-secret-" + s }
	for name, test := range map[string]struct {
		parameters map[string]string
		allowed    []string
		want       string // namespace/name, or a part of the error after "error: "
	}{
		"none": {nil, nil, ""},
		"templates": {map[string]string{key("name"): "${volumesnapshot.name}-${volumesnapshotcontent.name}",
			key("namespace"): "${volumesnapshot.namespace}"}, nil, "ns/s1-v1"},
		"half":  {map[string]string{key("name"): "s"}, nil, `error: secret-namespace": set both or none`},
		"empty": {map[string]string{key("name"): "s", key("namespace"): ""}, nil, "error: set both or none"},
		"unknown token": {map[string]string{key("name"): "${pvc.name}", key("namespace"): "ns"}, nil,
			`error: secret-name": template "${pvc.name}" has unknown tokens`},
		"name in the namespace": {map[string]string{key("name"): "s", key("namespace"): "${volumesnapshot.name}"}, nil,
			"error: unknown tokens"},
		"invalid name":  {map[string]string{key("name"): "S_", key("namespace"): "ns"}, nil, `error: secret-name": template "S_" resolves to the invalid name`},
		"not permitted": {map[string]string{key("name"): "s", key("namespace"): "ns"}, []string{"other"}, "error: --secret-namespaces"},
		"permitted":     {map[string]string{key("name"): "s", key("namespace"): "ns"}, []string{"ns"}, "ns/s"},
	} {
		t.Run(name, func(t *testing.T) {
			d := testDriver()
			d.SecretNamespaces = test.allowed
			ref, err := d.checkSecret(testState(isPreProvisioned).content, &class{driver: driverName, parameters: test.parameters})
			got := ""
			switch {
			case err != nil:
				got = "error: " + err.Error()
			case ref != nil:
				got = ref.Namespace + "/" + ref.Name
			}
			want := strings.TrimPrefix(test.want, "error: ")
			if (err != nil) != (want != test.want) || !strings.Contains(got, want) || want == "" && got != "" {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestFailureID(t *testing.T) {
	call := func(code string) error { return failure{errors.New("text"), fmt.Errorf("code %s", code)} }
	if a, b := doReportCreation.id(call("1")), doReportCreation.id(call("2")); a != b {
		t.Errorf("%v, %v", a, b)
	}
	if a, b := doReportCreation.id(errors.New("1")), doReportCreation.id(errors.New("2")); a == b {
		t.Errorf("%v", a)
	}
}

func TestStatusPatch(t *testing.T) {
	const uid = `[{"op":"test","path":"/metadata/uid","value":"v1-uid"},`
	for name, test := range map[string]struct {
		status *contentStatus
		change statusChange
		want   string
	}{
		"ready": {&contentStatus{}, statusChange{"readyToUse": true, "error": nil},
			`{"op":"remove","path":"/status/error","value":null},{"op":"add","path":"/status/readyToUse","value":true}]`},
		"no status": {nil, statusChange{"readyToUse": true, "error": nil},
			`{"op":"test","path":"/status","value":null},{"op":"add","path":"/status","value":{"readyToUse":true}}]`},
		"error": {&contentStatus{}, statusChange{"readyToUse": false},
			`{"op":"test","path":"/status/readyToUse","value":null},{"op":"add","path":"/status/readyToUse","value":false}]`},
		"another error": {&contentStatus{hasReady: true}, statusChange{"readyToUse": false},
			`{"op":"test","path":"/status/readyToUse","value":false},{"op":"add","path":"/status/readyToUse","value":false}]`},
		"error of a snapshot that is ready": {&contentStatus{hasReady: true, ready: true}, statusChange{"readyToUse": false},
			`{"op":"test","path":"/status/readyToUse","value":false},{"op":"add","path":"/status/readyToUse","value":false}]`},
		"list of a group": {&contentStatus{hasReady: true}, statusChange{"volumeSnapshotInfoList": nil},
			`{"op":"test","path":"/status/readyToUse","value":false},{"op":"remove","path":"/status/volumeSnapshotInfoList","value":null}]`},
	} {
		c := testState().content
		c.status = test.status
		if got, err := test.change.patch(c); err != nil || string(got) != uid+test.want {
			t.Errorf("%s: %s, %v", name, got, err)
		}
	}
}
