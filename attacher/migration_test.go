// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
)

func gceDriver(d *driver) { d.name, d.finalizer = gcePD, Finalizer(gcePD) }

func inZones(zones string) func(*corev1.PersistentVolume) {
	return func(pv *corev1.PersistentVolume) {
		onGCE(pv)
		pv.Labels = map[string]string{corev1.LabelTopologyZone: zones}
	}
}

// TestResolveMigrated is that a volume is attached only by the driver that took the place
// of its plugin.
func TestResolveMigrated(t *testing.T) {
	pv := testVolume(inZones("z"))
	src, err := testDriver(gceDriver).resolve(testAttachment(), pv)
	if err != nil || !src.migrated || src.handle != "projects/UNSPECIFIED/zones/z/disks/disk" ||
		fmt.Sprint(src.spec.CSI.VolumeAttributes) != "map[partition:]" {
		t.Errorf("%+v, %v", src, err)
	}
	if _, err := testDriver(nil).resolve(testAttachment(), pv); err == nil ||
		!strings.Contains(err.Error(), `belongs to CSI driver "`+gcePD+`"`) {
		t.Errorf("error %v", err)
	}
	if _, err := testDriver(gceDriver).resolve(testAttachment(), testVolume(inZones("europe-west1-b__europe-west2-c"))); err == nil ||
		!strings.HasPrefix(err.Error(), "failed to translate in tree pv to CSI: ") {
		t.Errorf("error %v", err)
	}
}

func TestAbandoned(t *testing.T) {
	migratedTo := func(driver string) func(*corev1.PersistentVolume) {
		return func(pv *corev1.PersistentVolume) {
			pv.Annotations = map[string]string{storagehelpers.AnnMigratedTo: driver}
		}
	}
	for name, tt := range map[string]struct {
		changes []func(*corev1.PersistentVolume)
		want    bool
	}{
		"built-in":                          {[]func(*corev1.PersistentVolume){onGCE}, true},
		"built-in, migrated to us":          {[]func(*corev1.PersistentVolume){onGCE, migratedTo(gcePD)}, false},
		"built-in, migrated to another":     {[]func(*corev1.PersistentVolume){onGCE, migratedTo("other")}, true},
		"CSI":                               {nil, false},
		"CSI, migrated to another, somehow": {[]func(*corev1.PersistentVolume){migratedTo("other")}, false},
		"of no driver at all": {[]func(*corev1.PersistentVolume){func(pv *corev1.PersistentVolume) {
			pv.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{NFS: &corev1.NFSVolumeSource{Server: "s", Path: "/"}}
		}}, false},
	} {
		d, pv := testDriver(gceDriver), testVolume(tt.changes...)
		if got := d.abandoned(pv); got != tt.want {
			t.Errorf("%s: %t", name, got)
		}
		pv.Finalizers = []string{Finalizer(gcePD)}
		if got := d.releasable(pv, 0); got != tt.want {
			t.Errorf("%s: releasable %t", name, got)
		}
		if d.releasable(pv, 1) {
			t.Errorf("%s: releasable, though attached", name)
		}
		pv.DeletionTimestamp = &metav1.Time{Time: now}
		if !d.releasable(pv, 0) {
			t.Errorf("%s: not releasable, though being deleted", name)
		}
		pv.Finalizers = []string{theirs}
		if d.releasesUnused(pv) {
			t.Errorf("%s: leaving without our finalizer", name)
		}
	}
}

func TestReportedHandle(t *testing.T) {
	const node = "projects/p/zones/europe-west1-b/instances/n"
	for name, tt := range map[string]struct {
		driver func(*driver)
		source source
		nodeID string
		want   string // "" for an error
	}{
		"CSI":         {nil, source{handle: "vol-1"}, "id-1", "vol-1"},
		"CSI, inline": {nil, source{handle: "vol-1", inline: true}, "id-1", "vol-1"},
		"CSI volume of such a driver": {
			gceDriver, source{handle: "projects/UNSPECIFIED/zones/z/disks/d"}, node, "projects/UNSPECIFIED/zones/z/disks/d",
		},
		"migrated": {
			gceDriver, source{handle: "projects/UNSPECIFIED/zones/z/disks/d", migrated: true}, node,
			"projects/p/zones/z/disks/d",
		},
		"migrated, no zone": {
			gceDriver, source{handle: "projects/UNSPECIFIED/zones/UNSPECIFIED/disks/d", migrated: true}, node,
			"projects/p/zones/europe-west1-b/disks/d",
		},
		"migrated, no region": {
			gceDriver, source{handle: "projects/UNSPECIFIED/regions/UNSPECIFIED/disks/d", migrated: true}, node,
			"projects/p/regions/europe-west1/disks/d",
		},
		"migrated, complete": {
			gceDriver, source{handle: "projects/q/zones/z/disks/d", migrated: true}, node, "projects/q/zones/z/disks/d",
		},
		"migrated, inline": {
			gceDriver, source{handle: "projects/UNSPECIFIED/zones/z/disks/d", inline: true}, node, "projects/p/zones/z/disks/d",
		},
		"migrated, bad handle":  {gceDriver, source{handle: "d", migrated: true}, node, ""},
		"migrated, bad node ID": {gceDriver, source{handle: "projects/UNSPECIFIED/zones/z/disks/d", migrated: true}, "id-1", ""},
		"migrated, nothing to complete": {
			func(d *driver) { d.name = "ebs.csi.aws.com" }, source{handle: "vol-1", migrated: true}, "i-1", "vol-1",
		},
	} {
		got, err := testDriver(tt.driver).reportedHandle(tt.source, tt.nodeID)
		if got != tt.want || (err == nil) != (tt.want != "") {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

// TestNotes checks that the annotations of an attach lead to the same unpublish without the
// volume.
func TestNotes(t *testing.T) {
	for name, tt := range map[string]struct {
		driver func(*driver)
		volume func(*corev1.PersistentVolume)
	}{"CSI": {nil, func(*corev1.PersistentVolume) {}}, "with a secret": {nil, withSecret}, "migrated": {gceDriver, onGCE}} {
		d := testDriver(tt.driver)
		of := func(va *storagev1.VolumeAttachment) { va.Spec.Attacher = d.name }
		src, err := d.resolve(testAttachment(of), testVolume(tt.volume))
		if err != nil {
			t.Fatal(err)
		}
		// It was noted of another volume before, in all that there is.
		va := testAttachment(of, protected, func(va *storagev1.VolumeAttachment) {
			va.Annotations[annSecret], va.Annotations[annMigrated] = "old/old", "true"
		})
		change := detachAnnotations(src, nil, "id-1")
		change.Apply(va)
		got, err := d.detachSource(attachmentState{attachment: va})
		if err != nil || !equality.Semantic.DeepEqual(got.secrets, src.secrets) || got.handle != src.handle ||
			got.migrated != src.migrated {
			t.Errorf("%s: %+v, %v; want %+v", name, got, err, src)
		}
	}
}

// TestIsPublishedWithoutVolume checks that an attachment whose volume was deleted is not attached
// again, which could only fail, but is still detached.
func TestIsPublishedWithoutVolume(t *testing.T) {
	s := attachmentState{attachment: testAttachment(protected, attached), csiNode: testNode("id-1")}
	if _, _, _, err := testDriver(nil).isPublished(s, publishedVolumes{}); err == nil {
		t.Error("compared")
	}
	s.attachment = testAttachment(protected, attached, deleting)
	if published, _, known, err := testDriver(nil).isPublished(
		s, publishedVolumes{"vol-1": {PublishedNodeIds: []string{"id-1"}}},
	); !published || !known || err != nil {
		t.Errorf("%t, %t, %v", published, known, err)
	}
}
