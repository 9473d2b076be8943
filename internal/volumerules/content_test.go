// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package volumerules

import (
	"strings"
	"testing"
	"time"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
)

var now = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func testClaim(change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	pvc := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "data"},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: ptr.To("fast"), AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{
				Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1500M")},
			},
		},
	}
	if change != nil {
		change(pvc)
	}
	return pvc
}

func deleting(c *corev1.PersistentVolumeClaim) { c.DeletionTimestamp = &metav1.Time{Time: now} }

func block(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeMode = ptr.To(corev1.PersistentVolumeBlock) }

func testSnapshot() *snapshotv1.VolumeSnapshot {
	return &snapshotv1.VolumeSnapshot{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "s", UID: "su"},
		Status: &snapshotv1.VolumeSnapshotStatus{
			BoundVolumeSnapshotContentName: ptr.To("content"), ReadyToUse: ptr.To(true), RestoreSize: ptr.To(resource.MustParse("1Gi")),
		},
	}
}

func testContent() *snapshotv1.VolumeSnapshotContent {
	return &snapshotv1.VolumeSnapshotContent{
		ObjectMeta: metav1.ObjectMeta{Name: "content"},
		Spec: snapshotv1.VolumeSnapshotContentSpec{
			Driver: "drv.example.com", VolumeSnapshotRef: corev1.ObjectReference{Namespace: "ns", Name: "s", UID: "su"},
		},
		Status: &snapshotv1.VolumeSnapshotContentStatus{SnapshotHandle: ptr.To("handle")},
	}
}

func size(s string) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) {
		c.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(s)}
	}
}

// fails reports whether err has the words of want; "" means no error.
func fails(err error, want ...string) bool {
	if len(want) == 0 || want[0] == "" {
		return err == nil
	}
	for _, w := range want {
		if err == nil || !strings.Contains(err.Error(), w) {
			return false
		}
	}
	return true
}

func TestSnapshotContent(t *testing.T) {
	type objects struct {
		snapshot *snapshotv1.VolumeSnapshot
		content  *snapshotv1.VolumeSnapshotContent
		claim    *corev1.PersistentVolumeClaim
	}
	for name, tt := range map[string]struct {
		anyMode bool
		change  func(objects)
		err     []string
	}{
		"ready":             {},
		"larger":            {change: func(o objects) { size("2Gi")(o.claim) }},
		"just as large":     {change: func(o objects) { size("1Gi")(o.claim) }},
		"smaller":           {change: func(o objects) { size("500Mi")(o.claim) }, err: []string{"500Mi", "1Gi"}},
		"no size asked for": {change: func(o objects) { o.claim.Spec.Resources.Requests = nil }, err: []string{"requests 0", "1Gi"}},
		"no restore size":   {change: func(o objects) { o.snapshot.Status.RestoreSize = nil; size("1")(o.claim) }},
		"another UID": {
			change: func(o objects) { o.content.Spec.VolumeSnapshotRef.UID = "x" }, err: []string{"bound to another snapshot", `"x"`},
		},
		"no UID yet": {
			change: func(o objects) { o.content.Spec.VolumeSnapshotRef.UID = "" }, err: []string{"bound to another snapshot"},
		},
		"another namespace":       {change: func(o objects) { o.content.Spec.VolumeSnapshotRef.Namespace = "x" }, err: []string{"x/s"}},
		"another name":            {change: func(o objects) { o.content.Spec.VolumeSnapshotRef.Name = "x" }, err: []string{"ns/x"}},
		"another driver":          {change: func(o objects) { o.content.Spec.Driver = "x" }, err: []string{`driver "x"`}},
		"not ready":               {change: func(o objects) { o.snapshot.Status.ReadyToUse = ptr.To(false) }, err: []string{"not ready"}},
		"not known whether ready": {change: func(o objects) { o.snapshot.Status.ReadyToUse = nil }, err: []string{"not ready"}},
		"no status":               {change: func(o objects) { o.snapshot.Status = nil }, err: []string{"not ready"}},
		"no content status":       {change: func(o objects) { o.content.Status = nil }, err: []string{"no snapshot handle"}},
		"no handle":               {change: func(o objects) { o.content.Status.SnapshotHandle = nil }, err: []string{"no snapshot handle"}},
		"empty handle": {
			change: func(o objects) { o.content.Status.SnapshotHandle = ptr.To("") }, err: []string{"no snapshot handle"},
		},
		"another mode": {change: func(o objects) {
			o.content.Spec.SourceVolumeMode = ptr.To(corev1.PersistentVolumeFilesystem)
			block(o.claim)
		}, err: []string{"Block", "Filesystem"}},
		"another mode, not looked": {anyMode: true, change: func(o objects) {
			o.content.Spec.SourceVolumeMode = ptr.To(corev1.PersistentVolumeFilesystem)
			block(o.claim)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			o := objects{testSnapshot(), testContent(), testClaim(nil)}
			if tt.change != nil {
				tt.change(o)
			}
			source, err := SnapshotContent("drv.example.com", o.snapshot, o.content, o.claim, !tt.anyMode)
			if !fails(err, tt.err...) {
				t.Errorf("error %v, want %q", err, tt.err)
			}
			if (err == nil) != (source.GetSnapshot().GetSnapshotId() == "handle") {
				t.Errorf("source %v", source)
			}
		})
	}
}

func TestBoundContent(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*snapshotv1.VolumeSnapshot)
		err    string
	}{
		"bound": {change: func(*snapshotv1.VolumeSnapshot) {}},
		"being deleted": {change: func(s *snapshotv1.VolumeSnapshot) {
			s.DeletionTimestamp, s.Finalizers = &metav1.Time{Time: now}, []string{
				"snapshot.storage.kubernetes.io/volumesnapshot-as-source-protection",
			}
		}, err: "being deleted"},
		"being deleted, kept by us": {change: func(s *snapshotv1.VolumeSnapshot) {
			s.DeletionTimestamp, s.Finalizers = &metav1.Time{Time: now}, []string{kube.SnapshotProtection}
		}},
		"no status":      {change: func(s *snapshotv1.VolumeSnapshot) { s.Status = nil }, err: "not bound"},
		"no content yet": {change: func(s *snapshotv1.VolumeSnapshot) { s.Status.BoundVolumeSnapshotContentName = nil }, err: "not bound"},
		"empty name": {
			change: func(s *snapshotv1.VolumeSnapshot) { s.Status.BoundVolumeSnapshotContentName = ptr.To("") }, err: "not bound",
		},
	} {
		s := testSnapshot()
		tt.change(s)
		content, err := BoundContent(s)
		if !fails(err, tt.err) || (err == nil) != (content == "content") {
			t.Errorf("%s: content %q, error %v, want %q", name, content, err, tt.err)
		}
	}
}

func TestCheckModeChange(t *testing.T) {
	file, blk := ptr.To(corev1.PersistentVolumeFilesystem), ptr.To(corev1.PersistentVolumeBlock)
	for name, tt := range map[string]struct {
		from, to   *corev1.PersistentVolumeMode
		annotation *string
		err        string
	}{
		"the same":         {from: file, to: file},
		"source not known": {to: blk},
		"claim not known":  {from: blk},
		"not allowed":      {from: file, to: blk, err: "lacks annotation"},
		"allowed":          {from: file, to: blk, annotation: ptr.To("true")},
		"allowed, short":   {from: blk, to: file, annotation: ptr.To("t")},
		"forbidden":        {from: file, to: blk, annotation: ptr.To("false"), err: "forbids"},
		"nonsense":         {from: file, to: blk, annotation: ptr.To("maybe"), err: `"maybe"`},
		"empty":            {from: blk, to: file, annotation: ptr.To(""), err: "neither true nor false"},
	} {
		content := testContent()
		content.Spec.SourceVolumeMode = tt.from
		if tt.annotation != nil {
			content.Annotations = map[string]string{AnnAllowModeChange: *tt.annotation}
		}
		err := checkModeChange(content, testClaim(func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeMode = tt.to }))
		if !fails(err, tt.err) {
			t.Errorf("%s: error %v, want %q", name, err, tt.err)
		}
	}
}

// cloned is a claim that can be cloned, and its volume.
func cloned() (*corev1.PersistentVolumeClaim, *corev1.PersistentVolume) {
	source := testClaim(func(c *corev1.PersistentVolumeClaim) {
		c.Name, c.UID, c.Spec.VolumeName, c.Status.Phase = "source", "source-uid", "pv", corev1.ClaimBound
		c.Spec.StorageClassName = ptr.To("slow")
	})
	return source, &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "pv"},
		Spec: corev1.PersistentVolumeSpec{
			ClaimRef: &corev1.ObjectReference{Namespace: source.Namespace, Name: source.Name, UID: source.UID},
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				CSI: &corev1.CSIPersistentVolumeSource{Driver: "drv.example.com", VolumeHandle: "handle"},
			},
		},
		Status: corev1.PersistentVolumeStatus{Phase: corev1.VolumeBound},
	}
}

func TestCheckClone(t *testing.T) {
	kept := func(s, _ *corev1.PersistentVolumeClaim) { deleting(s); s.Finalizers = []string{kube.CloningProtection} }
	for name, tt := range map[string]struct {
		change func(source, claim *corev1.PersistentVolumeClaim)
		err    []string
	}{
		"bound": {},
		"being deleted": {
			change: func(s, _ *corev1.PersistentVolumeClaim) { deleting(s) }, err: []string{"being deleted"},
		},
		"being deleted, kept": {change: kept},
		"pending": {
			change: func(s, _ *corev1.PersistentVolumeClaim) { s.Status.Phase = corev1.ClaimPending }, err: []string{"Pending"},
		},
		"lost": {
			change: func(s, _ *corev1.PersistentVolumeClaim) { s.Status.Phase = corev1.ClaimLost }, err: []string{"Lost"},
		},
		"source without class": {
			change: func(s, _ *corev1.PersistentVolumeClaim) { s.Spec.StorageClassName = nil }, err: []string{"storageClassName"},
		},
		"claim without class": {
			change: func(_, c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = nil }, err: []string{"storageClassName"},
		},
		"source with the empty class": {change: func(s, _ *corev1.PersistentVolumeClaim) { s.Spec.StorageClassName = ptr.To("") }},
		"larger":                      {change: func(_, c *corev1.PersistentVolumeClaim) { size("2Gi")(c) }},
		"smaller": {
			change: func(_, c *corev1.PersistentVolumeClaim) { size("1G")(c) }, err: []string{"1G", "1500M"},
		},
		"without volume": {
			change: func(s, _ *corev1.PersistentVolumeClaim) { s.Spec.VolumeName = "" }, err: []string{"no volume"},
		},
		"the claim itself being deleted": {change: func(_, c *corev1.PersistentVolumeClaim) { deleting(c) }},
	} {
		t.Run(name, func(t *testing.T) {
			source, _ := cloned()
			claim := testClaim(nil)
			if tt.change != nil {
				tt.change(source, claim)
			}
			if err := CheckClone(source, claim); !fails(err, tt.err...) {
				t.Errorf("error %v, want %q", err, tt.err)
			}
		})
	}
}

func TestCloneContent(t *testing.T) {
	blk := ptr.To(corev1.PersistentVolumeBlock)
	file := ptr.To(corev1.PersistentVolumeFilesystem)
	for name, tt := range map[string]struct {
		change func(pv *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim)
		err    string
	}{
		"bound": {},
		"not CSI": {
			change: func(pv *corev1.PersistentVolume, _ *corev1.PersistentVolumeClaim) { pv.Spec.CSI = nil }, err: "not a CSI volume",
		},
		"another driver": {
			change: func(pv *corev1.PersistentVolume, _ *corev1.PersistentVolumeClaim) { pv.Spec.CSI.Driver = "x" }, err: `driver "x"`,
		},
		"bound to no claim": {
			change: func(pv *corev1.PersistentVolume, _ *corev1.PersistentVolumeClaim) { pv.Spec.ClaimRef = nil }, err: "not bound to it",
		},
		"another UID": {
			change: func(pv *corev1.PersistentVolume, _ *corev1.PersistentVolumeClaim) { pv.Spec.ClaimRef.UID = "x" },
			err:    "not bound to it",
		},
		"another namespace": {
			change: func(pv *corev1.PersistentVolume, _ *corev1.PersistentVolumeClaim) { pv.Spec.ClaimRef.Namespace = "x" },
			err:    "not bound to it",
		},
		"another name": {
			change: func(pv *corev1.PersistentVolume, _ *corev1.PersistentVolumeClaim) { pv.Spec.ClaimRef.Name = "x" },
			err:    "not bound to it",
		},
		"released": {change: func(pv *corev1.PersistentVolume, _ *corev1.PersistentVolumeClaim) {
			pv.Status.Phase = corev1.VolumeReleased
		}, err: "Released"},
		"block to file": {
			change: func(pv *corev1.PersistentVolume, _ *corev1.PersistentVolumeClaim) { pv.Spec.VolumeMode = blk }, err: "volume modes",
		},
		"file to block": {change: func(pv *corev1.PersistentVolume, c *corev1.PersistentVolumeClaim) {
			pv.Spec.VolumeMode = file
			block(c)
		}, err: "volume modes"},
		"block to block": {
			change: func(pv *corev1.PersistentVolume, c *corev1.PersistentVolumeClaim) { pv.Spec.VolumeMode = blk; block(c) },
		},
		"nil is file": {change: func(pv *corev1.PersistentVolume, c *corev1.PersistentVolumeClaim) { c.Spec.VolumeMode = file }},
	} {
		t.Run(name, func(t *testing.T) {
			source, pv := cloned()
			claim := testClaim(nil)
			if tt.change != nil {
				tt.change(pv, claim)
			}
			content, err := CloneContent("drv.example.com", source, pv, claim)
			if !fails(err, tt.err) {
				t.Errorf("error %v, want %q", err, tt.err)
			}
			if (err == nil) != (content.GetVolume().GetVolumeId() == "handle") {
				t.Errorf("content %v", content)
			}
		})
	}
}
