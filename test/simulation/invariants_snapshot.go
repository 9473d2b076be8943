// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/snapshotter"
	"github.com/storage-controller/storage-controller/test/simulation/cluster"
)

// snapshotChecker holds what invariants of snapshots need to know about the past.
type snapshotChecker struct {
	contents map[string]*snapshotv1.VolumeSnapshotContent // the last state of all that have ever existed, by name
	read     reads[*snapshotv1.VolumeSnapshotContent]
	requests map[string]*csi.CreateSnapshotRequest // the one that binds, by name of the content
	recorded map[string]bool                       // contents that have recorded a request
}

func newSnapshotChecker() snapshotChecker {
	return snapshotChecker{
		map[string]*snapshotv1.VolumeSnapshotContent{}, newReads[*snapshotv1.VolumeSnapshotContent](),
		map[string]*csi.CreateSnapshotRequest{}, map[string]bool{},
	}
}

// contents returns the VolumeSnapshotContents by name.
func (s *simulation) contents() map[string]*snapshotv1.VolumeSnapshotContent {
	byName := map[string]*snapshotv1.VolumeSnapshotContent{}
	for _, content := range cluster.Typed[snapshotv1.VolumeSnapshotContent](s.cluster, cluster.Contents) {
		byName[content.Name] = content
	}
	return byName
}

// contentOf returns the name of the content of a snapshot with that name.
func contentOf(snapshot string) string {
	return cluster.ContentName(types.UID(strings.TrimPrefix(snapshot, "snapshot-")))
}

// readContent records that a replica has read a content.
func (s *simulation) readContent(from *replica, name string, content *snapshotv1.VolumeSnapshotContent, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.checker.taken.read.received(from, name, content, at)
}

// mayCreateSnapshot returns an error unless a content records the call, and all calls for it since the last definite error are
// equal. The snapshot-controller may have removed the record since.
func (s *simulation) mayCreateSnapshot(r *csi.CreateSnapshotRequest) error {
	content := s.contents()[contentOf(r.GetName())]
	if content == nil {
		content = s.orphaning(contentOf(r.GetName()))
	}
	removed := func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.checker.taken.recorded[content.Name] && metav1.HasAnnotation(content.ObjectMeta, snapshotter.AnnBeingDeleted)
	}
	switch {
	case content == nil:
		return errors.New("there is no content")
	case !slices.Contains(content.Finalizers, snapshotter.Finalizer):
		return fmt.Errorf("content %s lacks the finalizer", content.Name)
	case removed():
	case !metav1.HasAnnotation(content.ObjectMeta, snapshotter.AnnRequest):
		return fmt.Errorf("content %s does not record the request", content.Name)
	case content.Status == nil && !metav1.HasAnnotation(content.ObjectMeta, snapshotter.AnnBeingCreated):
		return fmt.Errorf("content %s does not record that its snapshot is being created", content.Name)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	first := s.checker.taken.requests[content.Name]
	if first == nil {
		s.checker.taken.requests[content.Name] = r
	} else if !proto.Equal(first, r) {
		return fmt.Errorf("the request differs from the first one: %v, %v", first, r)
	}
	return nil
}

// orphaning returns the last state of a content that does not exist any more, if its snapshot was to be deleted with it, else nil.
// A late write of an earlier leader may have removed its finalizer before the snapshot was deleted.
func (s *simulation) orphaning(name string) *snapshotv1.VolumeSnapshotContent {
	s.mu.Lock()
	last := s.checker.taken.contents[name]
	s.mu.Unlock()
	if last == nil || s.contents()[name] != nil || last.Spec.DeletionPolicy != snapshotv1.VolumeSnapshotContentDelete ||
		!metav1.HasAnnotation(last.ObjectMeta, snapshotter.AnnBeingDeleted) {
		return nil
	}
	return last
}

// mayDeleteSnapshot returns an error unless the replica has read from the API server since its last call that the snapshot
// is released and to be deleted.
func (s *simulation) mayDeleteSnapshot(from *replica, r *csi.DeleteSnapshotRequest) error {
	for _, snapshot := range s.snapshots() {
		if snapshot.ID != r.GetSnapshotId() {
			continue
		}
		name := contentOf(snapshot.Name)
		s.mu.Lock()
		content := s.checker.taken.read.live[from][name]
		old := s.checker.taken.read.use(from, name)
		s.mu.Unlock()
		if content == nil {
			content = s.orphaning(name)
		}
		switch {
		case old != nil && s.orphaning(name) == nil:
			return old
		case content == nil:
			return errors.New("it has not read a content with this snapshot")
		case content.DeletionTimestamp == nil:
			return fmt.Errorf("content %s is not being deleted", content.Name)
		case content.Spec.DeletionPolicy != snapshotv1.VolumeSnapshotContentDelete:
			return fmt.Errorf("content %s has the policy %s", content.Name, content.Spec.DeletionPolicy)
		case !metav1.HasAnnotation(content.ObjectMeta, snapshotter.AnnBeingDeleted):
			return fmt.Errorf("the snapshot-controller has not released content %s", content.Name)
		}
	}
	return nil
}

// checkSnapshots checks that no content has two snapshots.
func (s *simulation) checkSnapshots() {
	if !s.scale.features.Snapshots {
		return
	}
	contents := s.contents()
	for _, name := range slices.Sorted(maps.Keys(contents)) {
		content := contents[name]
		last := s.checker.taken.contents[name]
		if last != nil && last.Status != nil && content.Status != nil {
			was, is := ptr.Deref(last.Status.SnapshotHandle, ""), ptr.Deref(content.Status.SnapshotHandle, "")
			if was != "" && is != "" && was != is {
				s.violated("content %s has two snapshots: %s and %s", name, was, is)
			}
		}
		s.mu.Lock() // a call of the driver may begin
		s.checker.taken.contents[name] = content
		if metav1.HasAnnotation(content.ObjectMeta, snapshotter.AnnRequest) {
			s.checker.taken.recorded[name] = true
		}
		s.mu.Unlock()
	}
}

// checkSnapshotsAtRest checks that the driver has the snapshots that the contents say.
func (s *simulation) checkSnapshotsAtRest(when string) {
	if !s.scale.features.Snapshots {
		return
	}
	contents, exists := s.contents(), map[string]bool{}
	for _, snapshot := range s.snapshots() {
		name := contentOf(snapshot.Name)
		exists[snapshot.ID] = true
		last := s.checker.taken.contents[name]
		retained := last != nil && last.Spec.DeletionPolicy == snapshotv1.VolumeSnapshotContentRetain
		if contents[name] == nil && !retained {
			s.violated("%s: snapshot %s (%s) has no content", when, snapshot.ID, snapshot.Name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(contents)) {
		content := contents[name]
		if content.Status != nil && content.Status.SnapshotHandle != nil && !exists[*content.Status.SnapshotHandle] {
			s.violated("%s: snapshot %s does not exist, but its content %s does", when, *content.Status.SnapshotHandle, name)
		}
	}
}
