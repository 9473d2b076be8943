// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/storage-controller/storage-controller/internal/finalizers"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/topolvm"
)

// ClusterState holds the objects of the API server to compare with the driver. Objects of
// other drivers are ignored; they may be stubs.
type ClusterState struct {
	Volumes     []*corev1.PersistentVolume
	Attachments []*storagev1.VolumeAttachment
	Claims      []*corev1.PersistentVolumeClaim
	// Others are further objects that may be stuck, by their kind and name.
	Others map[string]metav1.Object
	// NodeIDs holds the IDs that the driver uses for nodes (CSINode.spec.drivers[].nodeID),
	// by the name of the Node. Nodes that are missing have an unknown ID.
	NodeIDs map[string]string
	// Attached reports whether Attachments is complete.
	Attached bool
	// Unread are the kinds of objects that were not read although they may use a volume.
	Unread []string
	// NotCompared are findings of severity unknown about objects that were not read.
	NotCompared []finding.Finding
	// Contents are the VolumeSnapshotContents of the driver; nil if they are not compared.
	Contents []Content
	// LogicalVolumes are those of a driver of TopoLVM, read before the other objects; nil if they are not compared.
	LogicalVolumes []*topolvm.LogicalVolume
	// Creating is the number of VolumeSnapshotContents of the driver without a snapshot handle.
	Creating int
}

// count returns the numbers of volumes and attachments of driver.
func (s ClusterState) count(driver string) (volumes, attachments int) {
	for _, pv := range s.Volumes {
		if _, _, ok := migration.HandleOf(driver, pv); ok {
			volumes++
		}
	}
	for _, va := range s.Attachments {
		if va.Spec.Attacher == driver {
			attachments++
		}
	}
	return volumes, attachments
}

// Content is a VolumeSnapshotContent with a snapshot handle.
type Content struct{ Name, UID, Handle string }

// Listed is the result of ListVolumes and ListSnapshots, or what stands for it.
type Listed struct {
	// Volumes holds the IDs of the nodes where a volume is published, by volume handle. It
	// is nil if the driver does not list its volumes.
	Volumes map[string][]string
	// Sizes holds the sizes of the volumes in bytes, by volume handle; 0 is unknown.
	Sizes map[string]int64
	// Snapshots holds the snapshot handles. It is nil if the driver does not list its snapshots.
	Snapshots map[string]bool
	// Nodes reports whether the driver lists the nodes where its volumes are published.
	Nodes bool
}

// Annotations in which an attacher records the node IDs and the volume handle of an attachment.
const (
	annNodeID        = "csi.alpha.kubernetes.io/node-id"
	annFormerNodeIDs = "storage-controller.io/former-node-ids"
	annVolumeHandle  = "storage-controller.io/volume-handle"
)

// comparison holds the input of one scan.
type comparison struct {
	driver     string
	cluster    ClusterState
	listed     Listed
	stuckAfter time.Duration
	now        time.Time
}

// findings returns all differences and all stuck objects.
func (c comparison) findings() []Finding {
	var found []Finding
	if c.listed.Volumes != nil {
		attached := c.attachedHandles()
		found = append(found, c.volumes(attached)...)
		if c.listed.Nodes && c.cluster.Attached {
			found = append(found, c.attachments(attached)...)
		}
	}
	if c.listed.Snapshots != nil && c.cluster.Contents != nil {
		found = append(found, c.snapshots()...)
	}
	return sorted(append(found, c.stuck()...))
}

// inlineID is the form of the volume IDs that the kubelet gives to inline volumes of pods, which have no PersistentVolume.
var inlineID = regexp.MustCompile(`^csi-[0-9a-f]{64}$`)

// volumes compares the listed volumes with the PersistentVolumes, and with the result of attachedHandles. It ignores case: some
// drivers, such as that of Azure Disk, do as well, and a volume that is in use must not count as unknown.
func (c comparison) volumes(attached map[string][]string) []Finding {
	var found []Finding
	known, knownNames, listedNames := map[string]bool{}, map[string]bool{}, map[string]bool{}
	folded := c.folded()
	for h := range c.listed.Volumes {
		listedNames[path.Base(h)] = true
	}
	for _, pv := range c.cluster.Volumes {
		h, inTree, ok := c.handleOfVolume(pv)
		if !ok {
			continue
		}
		as := c.listedAs(h, folded)
		listed := len(as) > 0
		known[strings.ToLower(h)] = true
		if inTree {
			knownNames[path.Base(h)] = true
			listed = listed || listedNames[path.Base(h)]
		}
		about := Finding{UID: string(pv.UID), VolumeHandle: h}
		capacity, size := pv.Spec.Capacity[corev1.ResourceStorage], int64(0)
		if len(as) == 1 {
			size = c.listed.Sizes[as[0]]
		}
		if size > 0 && capacity.Value() > size {
			found = append(found, about.of(VolumeTooSmall, "PersistentVolume "+pv.Name,
				"the volume has %d bytes in %s, the PersistentVolume has %s", size, c.source("ListVolumes"), capacity.String()))
		}
		if !listed {
			found = append(found, about.of(PVWithoutVolume, "PersistentVolume "+pv.Name,
				"its volume is not in %s; the PersistentVolume is %s", c.source("ListVolumes"), describe(pv)))
		}
	}
	if c.cluster.LogicalVolumes != nil {
		return append(found, c.unreferenced()...)
	}
	for _, handles := range attached {
		for _, h := range handles {
			known[strings.ToLower(h)] = true
		}
	}
	message := "no PersistentVolume or VolumeAttachment has this volume handle" + c.possibleUsers()
	for h := range c.listed.Volumes {
		if !known[strings.ToLower(h)] && !knownNames[path.Base(h)] && !inlineID.MatchString(h) {
			found = append(found, Finding{VolumeHandle: h}.of(VolumeWithoutPV, "", "%s", message))
		}
	}
	return found
}

// source returns what the volumes or snapshots are listed in: call, a call to the driver, unless TopoLVM has another list.
func (c comparison) source(call string) string {
	if c.cluster.LogicalVolumes != nil {
		return "the list of LogicalVolumes"
	}
	return call
}

// unreferenced returns the LogicalVolumes that no PersistentVolume and no pending claim names.
func (c comparison) unreferenced() []Finding {
	volumes := map[string][]*corev1.PersistentVolume{}
	for _, pv := range c.cluster.Volumes {
		if pv.Spec.CSI != nil {
			volumes[pv.Spec.CSI.VolumeHandle] = append(volumes[pv.Spec.CSI.VolumeHandle], pv)
		}
	}
	withHandle := func(handle string) []*corev1.PersistentVolume { return volumes[handle] }
	var found []Finding
	for _, lv := range topolvm.Unreferenced(c.driver, c.cluster.LogicalVolumes, withHandle, c.cluster.Claims, c.now) {
		message := "no PersistentVolume and no pending claim names it"
		if claim := lv.Claim(); claim != "" {
			message += ", it was created for claim " + claim
		}
		about := Finding{UID: string(lv.UID), VolumeHandle: string(lv.UID), Node: lv.Spec.NodeName}
		found = append(found, about.of(VolumeWithoutPV, "LogicalVolume "+lv.Name,
			"%s; its size is %s. A volume whose PersistentVolume was deleted with the policy Retain looks the same%s", message,
			lv.Spec.Size, c.possibleUsers()))
	}
	return found
}

// listOf returns LogicalVolumes as if the driver had listed them; nothing for nil.
func listOf(lvs []*topolvm.LogicalVolume) (l Listed) {
	if lvs == nil {
		return l
	}
	l = Listed{Volumes: map[string][]string{}, Sizes: map[string]int64{}, Snapshots: map[string]bool{}}
	for _, lv := range lvs {
		for _, id := range []string{string(lv.UID), lv.Status.VolumeID} {
			if id != "" {
				l.Volumes[id], l.Sizes[id] = nil, int64(lv.Status.CurrentSize)
			}
		}
		if lv.IsSnapshot() {
			l.Snapshots[string(lv.UID)] = true
		}
	}
	return l
}

// folded returns the listed handles by their form in lower case.
func (c comparison) folded() map[string][]string {
	folded := map[string][]string{}
	for h := range c.listed.Volumes {
		folded[strings.ToLower(h)] = append(folded[strings.ToLower(h)], h)
	}
	return folded
}

// listedAs returns the listed handles that may mean h: h, or else those that differ from it in case only.
func (c comparison) listedAs(h string, folded map[string][]string) []string {
	if _, listed := c.listed.Volumes[h]; listed {
		return []string{h}
	}
	return folded[strings.ToLower(h)]
}

// snapshots compares the listed snapshots with the VolumeSnapshotContents.
func (c comparison) snapshots() []Finding {
	var found []Finding
	known := map[string]bool{}
	for _, content := range c.cluster.Contents {
		known[content.Handle] = true
		if !c.listed.Snapshots[content.Handle] {
			about := Finding{UID: content.UID, SnapshotHandle: content.Handle}
			found = append(found, about.of(ContentWithoutSnapshot, "VolumeSnapshotContent "+content.Name, "its snapshot is not in %s",
				c.source("ListSnapshots")))
		}
	}
	message := "no VolumeSnapshotContent has this snapshot handle"
	if c.cluster.Creating > 0 {
		message += fmt.Sprintf("; it may be a snapshot that is being created (VolumeSnapshotContents: %d)", c.cluster.Creating)
	}
	for h := range c.listed.Snapshots {
		if !known[h] {
			found = append(found, Finding{SnapshotHandle: h}.of(SnapshotWithoutContent, "", "%s", message))
		}
	}
	return found
}

// describe returns the phase of pv and its claim.
func describe(pv *corev1.PersistentVolume) string {
	text := string(pv.Status.Phase)
	if ref := pv.Spec.ClaimRef; ref != nil {
		text += fmt.Sprintf(", claim %s/%s", ref.Namespace, ref.Name)
	}
	return text
}

// possibleUsers returns remarks about the claims and pods to which an unknown volume may belong.
func (c comparison) possibleUsers() string {
	indeterminate, pending := 0, 0
	for _, pvc := range c.cluster.Claims {
		switch {
		case kube.HasProvisioningRecord(c.driver, pvc):
			indeterminate++
		case pvc.Spec.VolumeName == "" && kube.ClaimHandledBy(c.driver, pvc):
			pending++
		}
	}
	var remarks string
	if indeterminate > 0 {
		remarks += fmt.Sprintf("; it may belong to a claim whose CreateVolume outcome is unknown (claims: %d)", indeterminate)
	}
	if pending > 0 {
		remarks += fmt.Sprintf("; it may belong to a claim that is being provisioned (claims: %d)", pending)
	}
	if len(c.cluster.Unread) > 0 {
		remarks += "; it may be in use by objects that were not read: " + strings.Join(c.cluster.Unread, ", ")
	}
	if plugin := migration.PluginOf(c.driver); plugin != "" {
		remarks += fmt.Sprintf("; it may be an inline volume (%s) of a pod", plugin)
	}
	return remarks
}

// publication is a volume that is published at a node.
type publication struct{ handle, nodeID string }

// attachments compares the published nodes of volumes with the VolumeAttachments and the result of attachedHandles.
func (c comparison) attachments(attached map[string][]string) []Finding {
	var found []Finding
	expected := map[publication]bool{}
	unknown := map[string]bool{} // handles that are attached to a node with an unknown ID
	for _, va := range c.cluster.Attachments {
		handles, ids := attached[va.Name], c.nodeIDs(va)
		for _, h := range handles {
			unknown[h] = unknown[h] || len(ids) == 0
			for _, id := range ids {
				expected[publication{h, id}] = true
			}
		}
		if len(handles) != 1 || len(ids) == 0 {
			continue
		}
		h := handles[0]
		nodes, listed := c.listed.Volumes[h]
		published := slices.ContainsFunc(ids, func(id string) bool { return slices.Contains(nodes, id) })
		if va.Status.Attached && listed && nodes != nil && !published {
			about := Finding{UID: string(va.UID), VolumeHandle: h, Node: ids[0]}
			found = append(found, about.of(AttachedNotPublished, "VolumeAttachment "+va.Name,
				"status.attached is true for node %s, but the driver lists the volume as published %s", va.Spec.NodeName, at(nodes)))
		}
	}
	for h, nodes := range c.listed.Volumes {
		for _, id := range nodes {
			if !expected[publication{h, id}] && !unknown[h] {
				found = append(found, Finding{VolumeHandle: h, Node: id}.of(PublishedNotAttached, "",
					"the driver lists the volume as published at this node, but there is no VolumeAttachment"))
			}
		}
	}
	return found
}

func at(nodes []string) string {
	if len(nodes) == 0 {
		return "nowhere"
	}
	return fmt.Sprintf("at %q only", nodes)
}

// attachedHandles returns the handles that ListVolumes may have for the volume of each VolumeAttachment
// of the driver, by the name of the VolumeAttachment. A translated handle, or one in another case, may match several.
func (c comparison) attachedHandles() map[string][]string {
	volumes := map[string]*corev1.PersistentVolume{}
	for _, pv := range c.cluster.Volumes {
		volumes[pv.Name] = pv
	}
	byName := map[string][]string{}
	if migration.PluginOf(c.driver) != "" {
		for h := range c.listed.Volumes {
			byName[path.Base(h)] = append(byName[path.Base(h)], h)
		}
	}
	attached, folded := map[string][]string{}, c.folded()
	for _, va := range c.cluster.Attachments {
		h, translated := c.handleOf(va, volumes)
		if h == "" {
			continue
		}
		handles := c.listedAs(h, folded)
		if handles == nil && translated {
			handles = byName[path.Base(h)]
		}
		if handles == nil {
			handles = []string{h}
		}
		attached[va.Name] = handles
	}
	return attached
}

// handleOf returns the handle of the volume that va attaches, or "" for an unknown volume and
// for one of another driver. A translated handle may lack parts that only the driver knows.
func (c comparison) handleOf(va *storagev1.VolumeAttachment, volumes map[string]*corev1.PersistentVolume) (handle string, translated bool) {
	source := va.Spec.Source
	switch {
	case va.Spec.Attacher != c.driver:
		return "", false
	case source.InlineVolumeSpec != nil && source.InlineVolumeSpec.CSI != nil:
		return source.InlineVolumeSpec.CSI.VolumeHandle, true
	case va.Annotations[annVolumeHandle] != "": // also after the PersistentVolume was deleted or recreated
		h := va.Annotations[annVolumeHandle]
		return h, strings.Contains(h, "UNSPECIFIED")
	case source.PersistentVolumeName == nil || volumes[*source.PersistentVolumeName] == nil:
		return "", false
	}
	handle, translated, _ = c.handleOfVolume(volumes[*source.PersistentVolumeName])
	return handle, translated
}

// handleOfVolume returns the handle of pv like [migration.HandleOf]. If labels or node affinity
// prevent the translation, it translates the source alone.
func (c comparison) handleOfVolume(pv *corev1.PersistentVolume) (handle string, inTree, ok bool) {
	handle, inTree, ok = migration.HandleOf(c.driver, pv)
	if ok {
		return handle, inTree, true
	}
	source := corev1.PersistentVolumeSpec{PersistentVolumeSource: pv.Spec.PersistentVolumeSource}
	return migration.HandleOf(c.driver, &corev1.PersistentVolume{Spec: source})
}

// nodeIDs returns the possible IDs of the node of va: those recorded by the attacher and
// the current one. They differ if the node was recreated.
func (c comparison) nodeIDs(va *storagev1.VolumeAttachment) []string {
	ids := map[string]bool{va.Annotations[annNodeID]: true, c.cluster.NodeIDs[va.Spec.NodeName]: true}
	var former []string
	_ = json.Unmarshal([]byte(va.Annotations[annFormerNodeIDs]), &former) // the attacher reports an error
	for _, id := range former {
		ids[id] = true
	}
	delete(ids, "")
	return slices.Sorted(maps.Keys(ids))
}

// stuck returns a finding for each object of the driver that was deleted longer than
// stuckAfter ago.
func (c comparison) stuck() []Finding {
	var found []Finding
	check := func(name string, obj metav1.Object) {
		since := obj.GetDeletionTimestamp()
		if since == nil || c.now.Sub(since.Time) < c.stuckAfter {
			return
		}
		kind, _, _ := strings.Cut(name, " ")
		f := Finding{UID: string(obj.GetUID()), Finalizers: finalizers.Of(kind, obj.GetFinalizers(), c.driver)}
		f = f.of(Stuck, name, "deleted %s ago, held by its finalizers", duration.HumanDuration(c.now.Sub(since.Time)))
		f.Next = finalizers.Text(f.Finalizers)
		found = append(found, f)
	}
	own := map[string]bool{}
	for _, pv := range c.cluster.Volumes {
		if _, _, ok := c.handleOfVolume(pv); ok {
			own[pv.Name] = true
			check("PersistentVolume "+pv.Name, pv)
		}
	}
	for _, va := range c.cluster.Attachments {
		if va.Spec.Attacher == c.driver {
			check("VolumeAttachment "+va.Name, va)
		}
	}
	for _, pvc := range c.cluster.Claims {
		if kube.ClaimHandledBy(c.driver, pvc) || own[pvc.Spec.VolumeName] {
			check("PersistentVolumeClaim "+kube.Key(pvc), pvc)
		}
	}
	for _, lv := range c.cluster.LogicalVolumes {
		check("LogicalVolume "+lv.Name, lv)
	}
	for name, obj := range c.cluster.Others {
		check(name, obj)
	}
	return found
}
