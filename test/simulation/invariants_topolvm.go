// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
	"github.com/storage-controller/storage-controller/test/simulation/cluster"
)

// topolvmChecker holds what the invariants of TopoLVM need to know about the past.
type topolvmChecker struct {
	lvm   map[string]cluster.LVMVolume // the volumes and snapshots of the last check with an LVM volume, by ID
	known map[string]string            // the node of each LVM volume that has ever existed, by ID
}

func newTopolvmChecker() topolvmChecker {
	return topolvmChecker{map[string]cluster.LVMVolume{}, map[string]string{}}
}

// topolvmSituations are the situations that histories with TopoLVM must have.
var topolvmSituations = []string{
	"CreateVolume succeeds on the first node of the request", "CreateVolume succeeds on another node of the request",
	"a LogicalVolume without an LVM volume is deleted", "DeleteVolume deletes a LogicalVolume", "DeleteSnapshot deletes a LogicalVolume",
	"the node cleanup releases a LogicalVolume", "an LVM volume is removed",
	"at rest, a claim has an LVM volume", "at rest, a content has an LVM volume", "at rest, a retained volume remains",
	"at rest, a node is lost",
}

// created checks that the volume that CreateVolume has returned exists where the response says, with its size. The lock must be held.
func (s *simulation) created(from *replica, r *csi.CreateVolumeRequest, v *csi.Volume) {
	fail := func(format string, args ...any) {
		s.violatedLocked("%s: CreateVolume %s returns %s: %s", from.client, r.GetName(), v.GetVolumeId(), fmt.Sprintf(format, args...))
	}
	on := cluster.NodeIn(v.GetAccessibleTopology()[0].GetSegments())
	node, known := s.checker.topolvm.known[v.GetVolumeId()]
	switch i := slices.IndexFunc(s.cluster.LVMVolumes(), func(o cluster.LVMVolume) bool { return o.ID == v.GetVolumeId() && o.Size > 0 }); {
	case i >= 0:
		node = s.cluster.LVMVolumes()[i].Node
		if size := s.cluster.LVMVolumes()[i].Size; size < r.GetCapacityRange().GetRequiredBytes() || v.GetCapacityBytes() == 0 {
			fail("the LVM volume has %d bytes, the response %d", size, v.GetCapacityBytes())
		}
	case !known:
		fail("it never had an LVM volume")
	}
	if node != on {
		fail("it is on %s, not on %s", node, on)
	}
	preferred := r.GetAccessibilityRequirements().GetPreferred()
	if len(preferred) > 0 && cluster.NodeIn(preferred[0].GetSegments()) == on {
		s.happensLocked("CreateVolume succeeds on the first node of the request")
	} else {
		s.happensLocked("CreateVolume succeeds on another node of the request")
	}
}

// deleted checks that nothing is left of the volume or snapshot for which DeleteVolume or DeleteSnapshot has succeeded. After a cleanup
// of its node, the LVM volume may be left. The lock must be held.
func (s *simulation) deleted(o *operation) {
	for _, v := range s.cluster.LVMVolumes() {
		if v.ID == o.volume && !s.checker.nodes.forced[v.ID] {
			s.violatedLocked("%s: %s succeeds, and %s is left on %s", o.replica.client, o.name, v.Name, v.Node)
		}
	}
}

// deletesLogicalVolume checks a request that deletes a LogicalVolume, or with which the node controller removes its finalizer, when it is
// executed.
func (s *simulation) deletesLogicalVolume(from *replica, r apiserver.Request) {
	obj := s.api.Get(cluster.LogicalVolumes, "", r.Name)
	releases := isOf("nodecontroller", r) && r.Verb == "patch"
	if r.Resource != cluster.LogicalVolumes || r.Verb != "delete" && !releases || obj == nil {
		return
	}
	lvs := s.cluster.LVMVolumes()
	lv := lvs[slices.IndexFunc(lvs, func(v cluster.LVMVolume) bool { return v.LV != nil && v.Name == r.Name })]
	p := r.Preconditions()
	if string(ptr.Deref(p.UID, lv.LV.UID)) != lv.ID || ptr.Deref(p.ResourceVersion, lv.LV.ResourceVersion) != lv.LV.ResourceVersion {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var err error
	switch {
	case isOf("nodecontroller", r):
		err = s.mayCleanUpLogicalVolume(from, lv)
	case lv.Snapshot && s.servesCall(from, "DeleteSnapshot", lv.ID):
		s.happensLocked("DeleteSnapshot deletes a LogicalVolume")
	case !lv.Snapshot && s.servesCall(from, "DeleteVolume", lv.ID):
		s.happensLocked("DeleteVolume deletes a LogicalVolume")
	case len(s.volumesWith(lv.ID)) > 0:
		err = errors.New("a PersistentVolume names it")
	case s.contentWith(lv.ID) != "":
		err = errors.New("a content names it")
	case lv.LV.Status.VolumeID != "":
		err = errors.New("it has an LVM volume")
	default:
		s.happensLocked("a LogicalVolume without an LVM volume is deleted")
	}
	if err != nil {
		s.violatedLocked("%s %s: %v", from.client, describe(r), err)
	}
}

// contentWith returns the name of the content of a snapshot, or "".
func (s *simulation) contentWith(handle string) string {
	for name, content := range s.contents() {
		if content.Status != nil && ptr.Deref(content.Status.SnapshotHandle, "") == handle {
			return name
		}
	}
	return ""
}

// mayCleanUpLogicalVolume returns an error unless the node of lv is lost, and the claim of its volume is being deleted.
func (s *simulation) mayCleanUpLogicalVolume(from *replica, lv cluster.LVMVolume) error {
	if claim := s.claimOf(lv.ID); claim != nil && claim.DeletionTimestamp == nil {
		return fmt.Errorf("claim %s of its volume is not being deleted", claim.Name)
	}
	reads := s.checker.nodes.reads[from]
	read := func(resource string) runtime.Object { return reads[readKey(resource, "", lv.Node)].obj }
	return s.mayCleanUpAfter(lv.Node, read("nodes"), read("csinodes"))
}

// checkTopolvm checks that each PersistentVolume names the node of its LogicalVolume, and that an LVM volume is removed only if its
// PersistentVolume and its content permit it.
func (s *simulation) checkTopolvm() {
	if s.driver != nil {
		return
	}
	c, now := s.checker.topolvm, map[string]cluster.LVMVolume{}
	for _, v := range s.cluster.LVMVolumes() {
		for _, pv := range s.volumesWith(v.ID) {
			if on := cluster.NodeOf(pv); on != v.Node {
				s.violated("volume %s is on %s, and its PersistentVolume %s says %s", v.ID, v.Node, pv.Name, on)
			}
		}
		if v.Size > 0 {
			now[v.ID] = v
			s.mu.Lock()
			c.known[v.ID] = v.Node
			s.mu.Unlock()
		}
	}
	for _, id := range slices.Sorted(maps.Keys(c.lvm)) {
		if _, exists := now[id]; !exists {
			s.removed(c.lvm[id])
		}
	}
	s.checker.topolvm.lvm = now
}

// removed checks that the LVM volume v, which was removed, was to be deleted.
func (s *simulation) removed(v cluster.LVMVolume) {
	s.happens("an LVM volume is removed")
	content := s.contents()[s.contentWith(v.ID)]
	for _, pv := range s.volumesWith(v.ID) {
		claim := s.claimOf(v.ID)
		if pv.Status.Phase != corev1.VolumeReleased && (claim == nil || claim.DeletionTimestamp == nil) {
			s.violated("the LVM volume %s was removed, and PersistentVolume %s is %s", v.ID, pv.Name, pv.Status.Phase)
		}
	}
	if content != nil && content.DeletionTimestamp == nil {
		s.violated("the snapshot %s was removed, and its content %s is not being deleted", v.ID, content.Name)
	}
}

// waitsForNode reports whether v may have no PersistentVolume: its node does not exist, and it is an LVM volume only, or the owner of the
// node forbids the cleanup.
func (s *simulation) waitsForNode(v csitest.Volume) bool {
	if s.driver != nil || s.cluster.Node(cluster.NodeIn(v.Segment)) != nil {
		return false
	}
	return s.api.Get(cluster.LogicalVolumes, "", v.Name) == nil || s.cluster.KeepsLogicalVolume(v.Name)
}

// checkTopolvmAtRest checks that no claim has two LVM volumes, and counts what the invariants of a rest are about.
func (s *simulation) checkTopolvmAtRest(when string) {
	if s.driver != nil {
		return
	}
	first := map[string]string{}
	for _, v := range s.cluster.LVMVolumes() {
		if s.checker.nodes.forced[v.ID] || s.cluster.Node(v.Node) == nil {
			s.happens("at rest, a node is lost")
			continue
		}
		if other, ok := first[v.Name]; ok {
			s.violated("%s: %s has two LVM volumes: %s and %s", when, v.Name, other, v.ID)
		}
		first[v.Name] = v.ID
		switch {
		case s.contentWith(v.ID) != "":
			s.happens("at rest, a content has an LVM volume")
		case s.claimNamed(v.Name) != nil:
			s.happens("at rest, a claim has an LVM volume")
		case s.checker.retained(v.ID) && len(s.volumesWith(v.ID)) == 0:
			s.happens("at rest, a retained volume remains")
		}
		if v.LV == nil {
			s.violated("%s: the LVM volume %s of %s has no LogicalVolume", when, v.ID, strings.TrimPrefix(v.Name, "pvc-"))
		}
	}
}
