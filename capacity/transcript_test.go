// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/looptest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// story is a transcript of the StorageClass "fast" and the node "n1" in the zone a.
type story struct {
	*fixture
	*looptest.Transcript
}

// newStory creates the node and starts the controller.
func newStory(t *testing.T, text string) *story {
	s := &story{fixture: prepare(t, csitest.Config{}, func(c *Config) { c.PollInterval = time.Hour })}
	s.Transcript = s.Record(text)
	s.available(1 << 30)
	s.node("n1", "a")
	s.start()
	return s
}

// available sets the available capacity in every segment.
func (s *story) available(bytes int64) {
	s.has("a", bytes)
	s.has("b", bytes)
}

func (s *story) class() {
	s.Helper()
	s.Step("StorageClass fast of the driver is created. Node n1 is in zone a.")
	s.fixture.class("fast", nil)
}

// volume returns a PersistentVolume in zone a.
func (s *story) volume() *corev1.PersistentVolume {
	return &corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{
		StorageClassName:       s.Unique("fast"),
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: s.Driver}},
		NodeAffinity: &corev1.VolumeNodeAffinity{
			Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{selects(in("t/zone", "a"))}},
		},
	}}
}

func TestTranscripts(t *testing.T) {
	t.Run("publish", func(t *testing.T) {
		s := newStory(
			t,
			"The capacity of each StorageClass in each segment is published, and updated after a volume\nwas provisioned there.",
		)
		s.class()
		s.published("fast t/zone=a 1Gi")
		s.Step("The provisioner creates a volume in zone a.")
		s.available(1 << 29)
		s.c.VolumeProvisioned(s.volume())
		s.published("fast t/zone=a 512Mi")
		s.Golden("publish")
	})
	t.Run("node_joins_and_leaves", func(t *testing.T) {
		s := newStory(t, "The first node of a segment creates an object, and the last one deletes it, after\n--capacity-removal-grace.")
		s.class()
		s.published("fast t/zone=a 1Gi")
		s.Step("Node n2 joins zone a, and then node n3 zone b.")
		s.node("n2", "a")
		s.node("n3", "b")
		s.published("fast t/zone=a 1Gi", "fast t/zone=b 1Gi")
		s.Step("Node n3 is deleted.")
		s.Must(s.Client.CoreV1().Nodes().Delete(t.Context(), s.Unique("n3"), metav1.DeleteOptions{}))
		s.published("fast t/zone=a 1Gi")
		s.Golden("node_joins_and_leaves")
	})
	t.Run("class_deleted", func(t *testing.T) {
		s := newStory(t, "The objects of a deleted StorageClass are deleted.")
		s.class()
		s.published("fast t/zone=a 1Gi")
		s.Step("The StorageClass is deleted.")
		s.Must(s.Client.StorageV1().StorageClasses().Delete(t.Context(), s.Unique("fast"), metav1.DeleteOptions{}))
		s.published()
		s.Golden("class_deleted")
	})
	t.Run("zero_capacity", func(t *testing.T) {
		s := newStory(
			t,
			"Without available capacity no object is created, because schedulers treat a missing object\nas zero capacity. An existing "+
				"object is updated to 0.",
		)
		s.available(0)
		s.class()
		s.Wait(getCapacity, 1)
		_ = s.Stop(workloop.ErrDrain)
		s.Step("Capacity becomes available. The process restarts.")
		s.available(1 << 30)
		s.start()
		s.published("fast t/zone=a 1Gi")
		_ = s.Stop(workloop.ErrDrain)
		s.Step("The capacity is used up. The process restarts and takes over the object.")
		s.available(0)
		s.start()
		s.published("fast t/zone=a 0")
		s.Golden("zero_capacity")
	})
}
