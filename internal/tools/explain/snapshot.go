// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"slices"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/snapshotter"
)

const (
	kindContent       = "VolumeSnapshotContent"
	kindSnapshotClass = "VolumeSnapshotClass"

	// reasonDeletePending is the reason of events that name what a deletion waits for.
	reasonDeletePending = "SnapshotDeletePending"

	componentSnapshotController = "snapshot-controller"

	// ifNot is the next step if the snapshot-controller does nothing and records no error.
	ifNot = "If this lasts, verify that it runs: `kubectl get pods -A`."
)

// snapshotFact is a VolumeSnapshot and the objects around it.
type snapshotFact struct {
	snapshot apiread.Result[*snapshotv1.VolumeSnapshot]
	content  apiread.Result[*snapshotv1.VolumeSnapshotContent]
	class    apiread.Result[*snapshotv1.VolumeSnapshotClass]
	events   []*corev1.Event // about the content, newest first
}

func (g *gatherer) gatherSnapshot(ctx context.Context) error {
	f, s := g.facts, &snapshotFact{}
	f.snapshot = s
	s.snapshot = g.snapshot(ctx, "snapshot", g.request.Namespace, g.request.Name)
	if !s.snapshot.Found {
		return g.request.wrap(s.snapshot.Err)
	}
	snapshot := s.snapshot.Value
	if name := contentOf(snapshot); name != "" {
		s.content = g.content(ctx, "content", name)
	}
	if name := ptr.Deref(snapshot.Spec.VolumeSnapshotClassName, ""); name != "" {
		s.class = get(ctx, g, "class", Request{Kind: kindSnapshotClass, Name: name},
			apiread.Typed[snapshotv1.VolumeSnapshotClass](g.Dynamic.Resource(apiread.SnapshotClasses)))
	}
	if name := ptr.Deref(snapshot.Spec.Source.PersistentVolumeClaimName, ""); name != "" {
		f.claim = g.claim(ctx, snapshot.Namespace, name)
		if f.claim.Found && f.claim.Value.Spec.VolumeName != "" {
			f.volume = g.volume(ctx, f.claim.Value.Spec.VolumeName)
		}
	}
	switch {
	case s.content.Found:
		f.driver = s.content.Value.Spec.Driver
	case s.class.Found:
		f.driver = s.class.Value.Driver
	case f.volume.Found:
		f.driver = migration.DriverOfVolume(f.volume.Value)
	}
	g.driver(ctx, roleSnapshotter)
	g.logicalVolume(ctx, "snapshot-"+string(snapshot.UID), s.handle())
	g.events(ctx, snapshot.Namespace, string(snapshot.UID))
	g.contentEvents(ctx)
	return nil
}

// contentOf returns the name of the VolumeSnapshotContent of a snapshot; "" if it has none yet.
func contentOf(s *snapshotv1.VolumeSnapshot) string {
	name := ptr.Deref(s.Spec.Source.VolumeSnapshotContentName, "")
	if s.Status != nil {
		name = cmp.Or(ptr.Deref(s.Status.BoundVolumeSnapshotContentName, ""), name)
	}
	return name
}

// handle returns the ID of the snapshot at the driver; "" if it is not known.
func (s *snapshotFact) handle() string {
	switch content := s.content.Value; {
	case !s.content.Found:
		return ""
	case content.Status != nil && ptr.Deref(content.Status.SnapshotHandle, "") != "":
		return *content.Status.SnapshotHandle
	default:
		return ptr.Deref(content.Spec.Source.SnapshotHandle, "")
	}
}

// contentEvents reads the events of the snapshotter, which are about the content.
func (g *gatherer) contentEvents(ctx context.Context) {
	s := g.facts.snapshot
	if !s.content.Found {
		return
	}
	content := s.content.Value
	about := g.about(Request{Kind: kindContent, Name: content.Name})
	about.events(ctx, metav1.NamespaceDefault, string(content.UID))
	s.events = about.facts.newestFirst()
}

func explainVolumeSnapshot(f *facts) Report {
	e, s := &explanation{facts: f}, f.snapshot
	snapshot := s.snapshot.Value
	state := "The snapshot is not ready"
	if snapshot.Status != nil && ptr.Deref(snapshot.Status.ReadyToUse, false) {
		state = "The snapshot is ready to use"
	}
	if snapshot.DeletionTimestamp == nil {
		explainSnapshotSource(e)
		explainSnapshotClass(e)
	}
	explainContent(e)
	explainLogicalVolume(e)
	if state == "The snapshot is not ready" || snapshot.DeletionTimestamp != nil {
		explainSnapshotEvents(e)
	}
	explainDriver(e)
	if e.driver != "" && s.content.Found {
		explainProcess(e, []string{"snapshotter"}, inQueues(s.content.Value.Name, "csi-snapshotter-content"),
			"snapshot-"+string(snapshot.UID))
	}
	rest := "The snapshotter of the driver sets the status of the content."
	switch {
	case snapshot.DeletionTimestamp != nil:
		rest = finalizersRemoved
	case state == "The snapshot is ready to use":
		rest = "Nothing to do: claims can restore the snapshot."
	}
	return e.report(kube.KindSnapshot, snapshot, state, rest, f.driver)
}

// explainSnapshotSource reports on the claim of a dynamic snapshot.
func explainSnapshotSource(e *explanation) {
	snapshot := e.snapshot.snapshot.Value
	name := ptr.Deref(snapshot.Spec.Source.PersistentVolumeClaimName, "")
	if name == "" || contentOf(snapshot) != "" {
		return // the snapshot no longer needs the claim
	}
	switch {
	case e.claim.Missing:
		e.blocked("source", "PersistentVolumeClaim %s/%s not found.", snapshot.Namespace, name).
			SetNext("Recreate the snapshot with an existing claim.")
	case e.claim.Found && e.claim.Value.Status.Phase != corev1.ClaimBound:
		e.waiting("source", "PersistentVolumeClaim %s/%s is %s, not Bound.", snapshot.Namespace, name,
			cmp.Or(string(e.claim.Value.Status.Phase), "new")).
			SetNext("The snapshot is created after the claim is bound. Run `storage-controller explain pvc -n %s %s`.", snapshot.Namespace,
				name)
	case e.claim.Found:
		e.ok("source", "PersistentVolumeClaim %s/%s is Bound.", snapshot.Namespace, name)
	}
}

func explainSnapshotClass(e *explanation) {
	s := e.snapshot
	snapshot := s.snapshot.Value
	name := ptr.Deref(snapshot.Spec.VolumeSnapshotClassName, "")
	switch {
	case snapshot.Spec.Source.VolumeSnapshotContentName != nil:
	case name == "" && contentOf(snapshot) == "":
		e.waiting("class", "volumeSnapshotClassName is not set.").
			SetNext("The snapshot-controller assigns the default VolumeSnapshotClass of the driver, if there is exactly one.")
	case s.class.Missing && s.content.Found && s.content.Value.Status != nil && s.content.Value.Status.SnapshotHandle != nil:
		e.ok("class", "VolumeSnapshotClass %q not found; the snapshot no longer needs it.", name)
	case s.class.Missing:
		e.blocked("class", "VolumeSnapshotClass %q not found.", name).
			SetNext("Create VolumeSnapshotClass %q, or recreate the snapshot with an existing class.", name)
	case s.class.Found:
		e.ok("class", "VolumeSnapshotClass %q: driver %s, deletionPolicy %s.", name, s.class.Value.Driver, s.class.Value.DeletionPolicy)
		if !e.volume.Found {
			return
		}
		if driver := migration.DriverOfVolume(e.volume.Value); driver != s.class.Value.Driver {
			e.blocked("class", "The volume of the claim belongs to driver %q, VolumeSnapshotClass %q to %q.", driver, name,
				s.class.Value.Driver).SetNext("Recreate the snapshot with a VolumeSnapshotClass of driver %q.", driver)
		}
	}
}

// explainContent reports on the VolumeSnapshotContent, which the snapshotter works on.
func explainContent(e *explanation) {
	s := e.snapshot
	snapshot, content := s.snapshot.Value, s.content.Value
	name := contentOf(snapshot)
	switch {
	case name == "":
		if status := snapshot.Status; status != nil && status.Error != nil {
			e.failed("content", failureOfSnapshot(status.Error, componentSnapshotController), "Last error of the snapshot")
			return
		}
		e.waiting("content", "The snapshot has no VolumeSnapshotContent yet.").SetNext("The snapshot-controller creates it. %s", ifNot)
	case s.content.Missing && snapshot.DeletionTimestamp != nil:
		e.waiting("content", "VolumeSnapshotContent %q was deleted.", name).
			SetNext("The snapshot-controller removes its finalizers from the snapshot. %s", ifNot)
	case s.content.Missing:
		e.blocked("content", "VolumeSnapshotContent %q not found.",
			name).SetNext("Recreate the snapshot, or restore its VolumeSnapshotContent.")
	case !s.content.Found:
	case content.Spec.VolumeSnapshotRef.UID != "" && content.Spec.VolumeSnapshotRef.UID != snapshot.UID:
		e.blocked("content", "VolumeSnapshotContent %q is bound to another snapshot, %s/%s with UID %s.", name,
			content.Spec.VolumeSnapshotRef.Namespace, content.Spec.VolumeSnapshotRef.Name, content.Spec.VolumeSnapshotRef.UID).
			SetNext("Recreate the snapshot.")
	case content.DeletionTimestamp != nil || snapshot.DeletionTimestamp != nil:
		explainContentDeletion(e)
	default:
		explainContentStatus(e)
	}
}

// failureOfSnapshot returns the error in the status of a snapshot or its content, which by wrote.
func failureOfSnapshot(err *snapshotv1.VolumeSnapshotError, by string) failure {
	return failure{text: ptr.Deref(err.Message, ""), at: ptr.Deref(err.Time, metav1.Time{}).Time, by: by}
}

// explainSnapshotEvents reports the newest event about the snapshot and about its content that names an obstacle.
func explainSnapshotEvents(e *explanation) {
	deleted := e.snapshot.snapshot.Value.DeletionTimestamp
	explain := func(events []*corev1.Event, object, by string) {
		i := slices.IndexFunc(events, func(event *corev1.Event) bool {
			return event.Type != corev1.EventTypeNormal || event.Reason == reasonDeletePending
		})
		if i < 0 || deleted != nil && lastSeen(events[i]).Time.Before(deleted.Time) {
			return
		}
		event := events[i]
		added := e.failed("content", failureOfEvent(event, by), "Last event about %s (%s)", object, event.Reason)
		if event.Type == corev1.EventTypeNormal {
			added.Severity, added.Next = finding.Waiting, ""
		}
	}
	explain(e.newestFirst(), "the snapshot", componentSnapshotController)
	explain(e.snapshot.events, apiread.Name(kindContent, "", contentOf(e.snapshot.snapshot.Value)), roleSnapshotter)
}

func explainContentStatus(e *explanation) {
	content := e.snapshot.content.Value
	status := content.Status
	if status == nil {
		status = &snapshotv1.VolumeSnapshotContentStatus{}
	}
	handle := ptr.Deref(status.SnapshotHandle, "")
	switch {
	case status.Error != nil:
		e.failed("content", failureOfSnapshot(status.Error, roleSnapshotter), "Last error of VolumeSnapshotContent %q", content.Name)
	case ptr.Deref(status.ReadyToUse, false):
		e.ok("content", "VolumeSnapshotContent %q is ready, with snapshot handle %q.", content.Name, handle)
		if s := e.snapshot.snapshot.Value; s.Status == nil || !ptr.Deref(s.Status.ReadyToUse, false) {
			e.waiting("content", "The status of the snapshot does not show this yet.").
				SetNext("The snapshot-controller updates it. %s", ifNot)
		}
	case handle != "":
		e.waiting("content", "Driver %s has created snapshot %q, which is not ready to use.", e.driver, handle).
			SetNext("The snapshotter asks driver %s again until the snapshot is ready to use.", e.driver)
	case ptr.Deref(content.Spec.Source.SnapshotHandle, "") != "":
		e.waiting("content", "VolumeSnapshotContent %q names snapshot %q and has no status yet.", content.Name,
			*content.Spec.Source.SnapshotHandle).
			SetNext("The snapshotter of driver %s asks driver %[1]s for the snapshot and sets the status of the content.", e.driver)
	case isMember(content):
		e.waiting("content", "VolumeSnapshotContent %q belongs to a group snapshot and has no status yet.", content.Name).
			SetNext("The snapshot-controller sets its status after that of the group: `kubectl get volumegroupsnapshotcontents`. " +
				"A restored snapshot whose group is not listed gets no status: restore it by its snapshot handle.")
	default:
		e.waiting("content", "VolumeSnapshotContent %q has no snapshot handle yet.", content.Name).
			SetNext("The snapshotter of driver %s calls CreateSnapshot.", e.driver)
	}
}

// explainContentDeletion reports what holds a deleted snapshot.
func explainContentDeletion(e *explanation) {
	s := e.snapshot
	content := s.content.Value
	_, released := content.Annotations[snapshotter.AnnBeingDeleted]
	switch {
	case s.snapshot.Value.DeletionTimestamp == nil:
		e.blocked("content", "VolumeSnapshotContent %q has been Terminating for %s, but the snapshot exists: its data is kept until "+
			"the snapshot is deleted.", content.Name, e.age(content.DeletionTimestamp.Time)).
			SetNext("Delete the snapshot, if its data is no longer needed.")
	case !released:
		e.waiting("content", "The snapshot-controller has not released VolumeSnapshotContent %q for deletion.", content.Name).
			SetNext("The snapshot-controller releases it after claims that restore the snapshot are provisioned. %s", ifNot)
	case content.DeletionTimestamp == nil:
		e.waiting("content", "VolumeSnapshotContent %q (deletionPolicy %s) is not being deleted yet.", content.Name,
			content.Spec.DeletionPolicy).SetNext("The snapshot-controller deletes it. %s", ifNot)
	default:
		added := e.waiting("content", "VolumeSnapshotContent %q has been Terminating for %s.", content.Name,
			e.age(content.DeletionTimestamp.Time))
		switch {
		case isMember(content):
			added.SetNext("The snapshotter of driver %s removes its finalizer; the snapshot is deleted with its group, "+
				"or stays if there is none.", e.driver)
		case content.Spec.DeletionPolicy != snapshotv1.VolumeSnapshotContentDelete:
			added.SetNext("The snapshotter of driver %s removes its finalizer; the driver keeps the snapshot (deletionPolicy %s).",
				e.driver, content.Spec.DeletionPolicy)
		default:
			added.SetNext("The snapshotter of driver %s calls DeleteSnapshot and removes its finalizer.", e.driver)
		}
	}
}

// isMember reports whether content is a snapshot of a group, which is created and deleted with the group.
func isMember(content *snapshotv1.VolumeSnapshotContent) bool {
	_, annotated := content.Annotations[snapshotter.AnnGroup]
	return annotated && content.Spec.Source.VolumeHandle != nil || content.Status != nil && content.Status.VolumeGroupSnapshotHandle != nil
}
