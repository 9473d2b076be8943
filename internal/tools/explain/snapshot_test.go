// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"slices"
	"strings"
	"testing"
	"time"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/snapshotter"
)

// snapshotOf returns facts about a snapshot of a bound claim, with a class and a content without status.
func snapshotOf(change func(*facts, *snapshotFact)) *facts {
	f := claimOf("5Gi")
	f.claim.Value.Status.Phase = corev1.ClaimBound
	s := &snapshotFact{
		snapshot: apiread.Found(&snapshotv1.VolumeSnapshot{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "s", UID: "u"},
			Spec: snapshotv1.VolumeSnapshotSpec{Source: snapshotv1.VolumeSnapshotSource{PersistentVolumeClaimName: ptr.To("c")},
				VolumeSnapshotClassName: ptr.To("snap")},
			Status: &snapshotv1.VolumeSnapshotStatus{BoundVolumeSnapshotContentName: ptr.To("content")},
		}),
		content: apiread.Found(&snapshotv1.VolumeSnapshotContent{ObjectMeta: metav1.ObjectMeta{Name: "content"},
			Spec: snapshotv1.VolumeSnapshotContentSpec{Driver: "d", DeletionPolicy: "Delete",
				Source:            snapshotv1.VolumeSnapshotContentSource{VolumeHandle: ptr.To("vol")},
				VolumeSnapshotRef: corev1.ObjectReference{UID: "u"}}}),
		class: apiread.Found(&snapshotv1.VolumeSnapshotClass{Driver: "d", DeletionPolicy: "Delete"}),
	}
	f.snapshot = s
	change(f, s)
	return f
}

func TestVolumeSnapshots(t *testing.T) {
	deleted := ptr.To(metav1.NewTime(now.Add(-time.Minute)))
	unbound := func(_ *facts, s *snapshotFact) {
		s.snapshot.Value.Status, s.content = nil, apiread.Result[*snapshotv1.VolumeSnapshotContent]{}
	}
	status := func(status snapshotv1.VolumeSnapshotContentStatus) func(*facts, *snapshotFact) {
		return func(_ *facts, s *snapshotFact) { s.content.Value.Status = &status }
	}
	terminating := func(annotations map[string]string, events ...*corev1.Event) func(*facts, *snapshotFact) {
		return func(_ *facts, s *snapshotFact) {
			s.snapshot.Value.DeletionTimestamp, s.content.Value.DeletionTimestamp = deleted, deleted
			s.content.Value.Annotations, s.events = annotations, events
		}
	}
	released := map[string]string{snapshotter.AnnBeingDeleted: "yes"}
	for name, tt := range map[string]struct {
		change     func(*facts, *snapshotFact)
		severity   finding.Severity
		want, next string
	}{
		"new": {unbound, finding.Waiting, "has no VolumeSnapshotContent yet", "verify that it runs"},
		"no claim": {func(f *facts, s *snapshotFact) {
			unbound(f, s)
			f.claim = apiread.Result[*corev1.PersistentVolumeClaim]{Missing: true}
		}, finding.Blocked, "ns/c not found", "Recreate the snapshot"},
		"claim is pending": {func(f *facts, s *snapshotFact) { unbound(f, s); f.claim.Value.Status.Phase = "Pending" }, finding.Waiting,
			"ns/c is Pending, not Bound", "explain pvc -n ns c"},
		"no class": {func(_ *facts, s *snapshotFact) {
			s.class = apiread.Result[*snapshotv1.VolumeSnapshotClass]{Missing: true}
		}, finding.Blocked,
			`VolumeSnapshotClass "snap" not found`, "Create"},
		"class of another driver": {func(f *facts, s *snapshotFact) {
			f.volume = apiread.Found(&corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{
				PersistentVolumeSource: corev1.PersistentVolumeSource{
					CSI: &corev1.CSIPersistentVolumeSource{Driver: "other"}}}})
		}, finding.Blocked, `belongs to driver "other"`, "Recreate"},
		"no content": {func(_ *facts, s *snapshotFact) {
			s.content = apiread.Result[*snapshotv1.VolumeSnapshotContent]{Missing: true}
		},
			finding.Blocked,
			`VolumeSnapshotContent "content" not found`, ""},
		"other bound": {func(_ *facts, s *snapshotFact) { s.content.Value.Spec.VolumeSnapshotRef.UID = "v" }, finding.Blocked,
			"bound to another snapshot", "Recreate"},
		"not started": {func(*facts, *snapshotFact) {}, finding.Waiting, "has no snapshot handle yet", "calls CreateSnapshot"},
		"pre-provisioned": {func(_ *facts, s *snapshotFact) {
			s.content.Value.Spec.Source = snapshotv1.VolumeSnapshotContentSource{SnapshotHandle: ptr.To("h")}
			s.content.Value.Annotations = map[string]string{snapshotter.AnnGroup: "g"} // a copy
		}, finding.Waiting, `names snapshot "h"`, "asks driver d for the snapshot"},
		"of a group": {func(_ *facts, s *snapshotFact) {
			s.content.Value.Annotations = map[string]string{snapshotter.AnnGroup: "g"}
		}, finding.Waiting, "belongs to a group snapshot", "kubectl get volumegroupsnapshotcontents"},
		"restored, of a group": {func(_ *facts, s *snapshotFact) {
			s.content.Value.Annotations = map[string]string{snapshotter.AnnGroup: "g"}
			s.events = []*corev1.Event{{Reason: "GroupMissing", Message: "no group g", LastTimestamp: *deleted}}
		}, finding.Failing, "VolumeSnapshotContent \"content\" (GroupMissing) 60s ago: no group g.", "the log of the snapshotter"},
		"not released, with a warning": {func(_ *facts, s *snapshotFact) {
			terminating(nil, &corev1.Event{Reason: "SnapshotDeletePending", Message: "in a group", LastTimestamp: *deleted})(nil, s)
		}, finding.Failing, "(SnapshotDeletePending) 60s ago: in a group.", "Retries"},
		"failed": {status(snapshotv1.VolumeSnapshotContentStatus{Error: &snapshotv1.VolumeSnapshotError{Message: ptr.To("full"),
			Time: deleted}}), finding.Failing, "60s ago: full.", "Retries"},
		"not ready": {status(snapshotv1.VolumeSnapshotContentStatus{SnapshotHandle: ptr.To("h")}), finding.Waiting, `has created snapshot "h"`,
			"asks driver d again"},
		"content only": {status(snapshotv1.VolumeSnapshotContentStatus{SnapshotHandle: ptr.To("h"), ReadyToUse: ptr.To(true)}),
			finding.Waiting,
			"does not show this yet", "snapshot-controller"},
		"deleted content": {func(_ *facts, s *snapshotFact) { s.content.Value.DeletionTimestamp = deleted }, finding.Blocked,
			"but the snapshot exists",
			"Delete the snapshot"},
		"not released": {terminating(nil), finding.Waiting, "has not released", "restore the snapshot are"},
		"deleting":     {terminating(released), finding.Waiting, "has been Terminating for 60s", "calls DeleteSnapshot"},
		"deleting one of a group": {func(f *facts, s *snapshotFact) {
			terminating(released)(f, s)
			s.content.Value.Status = &snapshotv1.VolumeSnapshotContentStatus{VolumeGroupSnapshotHandle: ptr.To("g")}
		}, finding.Waiting, "has been Terminating", "is deleted with its group"},
		"keeping": {func(f *facts, s *snapshotFact) {
			terminating(released)(f, s)
			s.content.Value.Spec.DeletionPolicy = snapshotv1.VolumeSnapshotContentRetain
		}, finding.Waiting, "has been Terminating", "the driver keeps the snapshot"},
		"deletion fails": {terminating(released, &corev1.Event{Message: "in use", LastTimestamp: *deleted}), finding.Failing,
			`VolumeSnapshotContent "content" () 60s ago: in use.`, "Retries"},
	} {
		t.Run(name, func(t *testing.T) {
			f := snapshotOf(tt.change)
			r := explainVolumeSnapshot(f)
			if !slices.ContainsFunc(r.Findings, func(f finding.Finding) bool {
				return f.Severity == tt.severity && strings.Contains(f.Message, tt.want) && strings.Contains(f.Next, tt.next)
			}) {
				t.Errorf("got %+v", r.Findings)
			}
		})
	}
	ready := snapshotOf(func(f *facts, s *snapshotFact) {
		s.snapshot.Value.Status.ReadyToUse = ptr.To(true)
		status(snapshotv1.VolumeSnapshotContentStatus{SnapshotHandle: ptr.To("h"), ReadyToUse: ptr.To(true)})(f, s)
	})
	if r := explainVolumeSnapshot(ready); !strings.HasSuffix(r.Next, "claims can restore the snapshot.") {
		t.Errorf("got %+v", r)
	}
}

func TestSnapshotOfTheCluster(t *testing.T) {
	s := newScene(t)
	kubetest.InstallCRDs(t, s.cp)
	s.object(apiread.Snapshots, s.ns, map[string]any{"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
		"metadata": map[string]any{"name": "backup"},
		"spec":     map[string]any{"source": map[string]any{"persistentVolumeClaimName": "data"}, "volumeSnapshotClassName": "none"}})
	s.says(s.explain(KindSnapshot, "backup"),
		"blocked  source      PersistentVolumeClaim SCENE/data not found.",
		`blocked  class       VolumeSnapshotClass "none" not found.`,
		"waiting  content     The snapshot has no VolumeSnapshotContent yet.")
}
