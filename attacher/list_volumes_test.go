// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func TestOutOfSync(t *testing.T) {
	var o outOfSync
	has := func(uid types.UID) bool { _, ok := o.of(uid); return ok }
	if has("1") {
		t.Error("the zero value has an entry")
	}
	o.remove("1")
	o.recordChange("1") // ignored: no listing runs
	stop := o.trackChanges()
	if o.hasChanged("1") {
		t.Error("a change from before the listing counts")
	}
	for _, wantNew := range []bool{true, false} {
		if added, isNew := o.add("1", false); !added || isNew != wantNew || !has("1") {
			t.Errorf("added %t, new %t, has %t", added, isNew, has("1"))
		}
	}
	o.recordChange("1")
	if !o.hasChanged("1") || o.hasChanged("2") {
		t.Error("the wrong one has changed")
	}
	o.remove("1")
	if added, isNew := o.add("1", false); added || isNew || has("1") {
		t.Errorf("one that has changed: added %t, new %t", added, isNew)
	}
	stop()
	o.recordChange("2")
	stop = o.trackChanges()
	if o.hasChanged("1") || o.hasChanged("2") {
		t.Error("the second listing contains changes from before it")
	}
	if added, isNew := o.add("1", false); !added || !isNew {
		t.Errorf("in the second listing: added %t, new %t", added, isNew)
	}
	stop()
	if !has("1") {
		t.Error("an entry ended with its listing")
	}
	if _, isNew := o.add("1", true); !isNew {
		t.Error("another difference is not new")
	}
}

func TestReconcilePause(t *testing.T) {
	for name, tt := range map[string]struct{ configured, took, want time.Duration }{
		"fast":                           {time.Minute, 100 * time.Millisecond, time.Minute},
		"a tenth of the time":            {time.Minute, time.Minute / 9, time.Minute},
		"more than a tenth":              {time.Minute, 20 * time.Second, 3 * time.Minute},
		"bounded":                        {time.Minute, 5 * time.Minute, 10 * time.Minute},
		"longer interval than the bound": {time.Hour, 5 * time.Minute, time.Hour},
		"short interval":                 {time.Second, time.Second, 9 * time.Second},
	} {
		if got := reconcilePause(tt.configured, tt.took); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}

// entry is an entry of a report; no nodes but "?" is one without status.
func entry(handle string, nodes ...string) *csi.ListVolumesResponse_Entry {
	e := &csi.ListVolumesResponse_Entry{Volume: &csi.Volume{VolumeId: handle}}
	if !slices.Contains(nodes, "?") {
		e.Status = &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: nodes}
	}
	return e
}

func reportOf(entries ...*csi.ListVolumesResponse_Entry) publishedVolumes {
	r := publishedVolumes{}
	for _, e := range entries {
		r.add(e)
	}
	return r
}

func TestPublishedVolumes(t *testing.T) {
	for name, tt := range map[string]struct {
		entries          []*csi.ListVolumesResponse_Entry
		published, known bool
		size             int
	}{
		"no report":                        {nil, false, true, 0},
		"published here":                   {[]*csi.ListVolumesResponse_Entry{entry("vol-1", "id-1")}, true, true, 1},
		"published here and elsewhere":     {[]*csi.ListVolumesResponse_Entry{entry("vol-1", "id-2", "id-1")}, true, true, 1},
		"published elsewhere":              {[]*csi.ListVolumesResponse_Entry{entry("vol-1", "id-2")}, false, true, 1},
		"published nowhere":                {[]*csi.ListVolumesResponse_Entry{entry("vol-1")}, false, true, 0},
		"another volume":                   {[]*csi.ListVolumesResponse_Entry{entry("vol-2", "id-1")}, false, true, 1},
		"without status":                   {[]*csi.ListVolumesResponse_Entry{entry("vol-1", "?")}, false, false, 1},
		"without volume":                   {[]*csi.ListVolumesResponse_Entry{{Status: entry("", "id-1").Status}, nil}, false, true, 0},
		"twice, at last published":         {[]*csi.ListVolumesResponse_Entry{entry("vol-1"), entry("vol-1", "id-1")}, true, true, 1},
		"twice, at last published nowhere": {[]*csi.ListVolumesResponse_Entry{entry("vol-1", "id-1"), entry("vol-1")}, false, true, 0},
		"twice, at last without status": {
			[]*csi.ListVolumesResponse_Entry{entry("vol-1", "id-1"), entry("vol-1", "?")}, false, false, 1,
		},
		"twice, at first without status": {[]*csi.ListVolumesResponse_Entry{entry("vol-1", "?"), entry("vol-1", "id-1")}, true, true, 1},
	} {
		t.Run(name, func(t *testing.T) {
			r := reportOf(tt.entries...)
			published, known := r.isPublished("vol-1", "id-1")
			if published != tt.published || known != tt.known || len(r) != tt.size {
				t.Errorf("published %t, known %t, %d entries", published, known, len(r))
			}
		})
	}
}

func TestIsPublished(t *testing.T) {
	const gce = "pd.csi.storage.gke.io"
	ofGCE := func(d *driver) { d.name = gce }
	gceNode := func(id string) *storagev1.CSINode {
		n := testNode(id)
		n.Spec.Drivers[0].Name = gce
		return n
	}
	gceAttachment := testAttachment(func(va *storagev1.VolumeAttachment) { va.Spec.Attacher = gce })
	gceVolume := testVolume(func(pv *corev1.PersistentVolume) {
		pv.Labels = map[string]string{"topology.kubernetes.io/zone": "z"}
		pv.Spec.CSI, pv.Spec.GCEPersistentDisk = nil, &corev1.GCEPersistentDiskVolumeSource{PDName: "d"}
	})
	inline := func(driver, handle string) *storagev1.VolumeAttachment {
		return testAttachment(func(va *storagev1.VolumeAttachment) {
			spec := testVolume().Spec
			spec.CSI.Driver, spec.CSI.VolumeHandle = driver, handle
			va.Spec.Attacher = driver
			va.Spec.Source = storagev1.VolumeAttachmentSource{InlineVolumeSpec: &spec}
		})
	}
	released := func(va *storagev1.VolumeAttachment) { va.Finalizers = nil }
	const gceHandle, gceID = "projects/p/zones/z/disks/d", "projects/p/zones/z/instances/i"
	for name, tt := range map[string]struct {
		driver           func(*driver)
		va               *storagev1.VolumeAttachment
		pv               *corev1.PersistentVolume
		node             *storagev1.CSINode
		reported         publishedVolumes
		published, known bool
		atFormer         bool
		err              string
	}{
		"published": {
			va: testAttachment(), pv: testVolume(), node: testNode("id-1"), reported: reportOf(entry("vol-1", "id-1")),
			published: true, known: true,
		},
		"not published": {va: testAttachment(), pv: testVolume(), node: testNode("id-1"), known: true},
		"not known": {
			va: testAttachment(), pv: testVolume(), node: testNode("id-1"), reported: reportOf(entry("vol-1", "?")),
		},
		"no CSINode, noted": {
			va: testAttachment(protected), pv: testVolume(), reported: reportOf(entry("vol-1", "id-1")), published: true,
			known: true,
		},
		"no CSINode, not noted": {va: testAttachment(), pv: testVolume(), err: "not found"},
		"another node ID, published at the old": {
			va: testAttachment(protected), pv: testVolume(), node: testNode("id-2"), reported: reportOf(entry("vol-1", "id-1")),
			atFormer: true, known: true,
		},
		"another node ID, attached, published at the old": {
			va: testAttachment(protected, attached), pv: testVolume(), node: testNode("id-2"), reported: reportOf(entry("vol-1", "id-1")),
			atFormer: true, known: true,
		},
		"another node ID, attached, published nowhere": {
			va: testAttachment(protected, attached), pv: testVolume(), node: testNode("id-2"), known: true,
		},
		"another node ID, attached, published at both": {
			va: testAttachment(protected, attached), pv: testVolume(), node: testNode("id-2"),
			reported: reportOf(entry("vol-1", "id-1", "id-2")), published: true, known: true,
		},
		"no CSINode, attached, published at the old": {
			va: testAttachment(protected, attached), pv: testVolume(), reported: reportOf(entry("vol-1", "id-1")),
			published: true, known: true,
		},
		"another node ID, deleting, published at the old": {
			va: testAttachment(protected, attached, deleting), pv: testVolume(), node: testNode("id-2"),
			reported: reportOf(entry("vol-1", "id-1")), published: true, known: true,
		},
		"another node ID, released, published at the old": {
			va: testAttachment(protected, deleting, released), pv: testVolume(), node: testNode("id-2"),
			reported: reportOf(entry("vol-1", "id-1")), published: true, known: true,
		},
		"another node ID, released but attached, published at the old": {
			va: testAttachment(protected, attached, deleting, released), pv: testVolume(), node: testNode("id-2"),
			reported: reportOf(entry("vol-1", "id-1")), published: true, known: true,
		},
		"two recorded node IDs, deleting, published at the former": {
			va: testAttachment(protected, deleting, withFormer("id-0")), pv: testVolume(), node: testNode("id-2"),
			reported: reportOf(entry("vol-1", "id-0")), published: true, known: true,
		},
		"volume gone, noted, deleting": {
			va: testAttachment(protected, deleting), node: testNode("id-1"), reported: reportOf(entry("vol-1", "id-1")),
			published: true, known: true,
		},
		"attached, PersistentVolume replaced": {
			va: testAttachment(protected, attached), node: testNode("id-1"),
			pv:       testVolume(func(pv *corev1.PersistentVolume) { pv.Spec.CSI.VolumeHandle = "vol-2" }),
			reported: reportOf(entry("vol-1", "id-1"), entry("vol-2")), published: true, known: true,
		},
		"volume gone, not noted": {va: testAttachment(), node: testNode("id-1"), err: `persistentvolume "pv1" not found`},
		"volume of another driver": {
			va: testAttachment(), pv: testVolume(func(pv *corev1.PersistentVolume) { pv.Spec.CSI.Driver = "other" }),
			node: testNode("id-1"), err: `PersistentVolume "pv1" belongs to CSI driver "other"`,
		},
		"inline": {
			va: inline("drv.example.com", "vol-1"), node: testNode("id-1"), reported: reportOf(entry("vol-1", "id-1")),
			published: true, known: true,
		},
		"built-in plugin": {
			driver: ofGCE, va: gceAttachment, pv: gceVolume, node: gceNode(gceID), reported: reportOf(entry(gceHandle, gceID)),
			published: true, known: true,
		},
		"built-in plugin, bad node ID": {
			driver: ofGCE, va: gceAttachment, pv: gceVolume, node: gceNode("i"), reported: reportOf(entry(gceHandle, "i")),
			err: "volume handle",
		},
		"inline of a built-in plugin": {
			driver: ofGCE, va: inline(gce, "projects/UNSPECIFIED/zones/UNSPECIFIED/disks/d"), node: gceNode(gceID),
			reported: reportOf(entry(gceHandle, gceID)), published: true, known: true,
		},
		"CSI volume of a driver with a plugin": {
			driver: ofGCE, va: gceAttachment, pv: testVolume(func(pv *corev1.PersistentVolume) { pv.Spec.CSI.Driver = gce }),
			node: gceNode("i"), reported: reportOf(entry("vol-1", "i")), published: true, known: true,
		},
		"inline volume of another driver": {
			va: inline("other", "vol-1"), node: testNode("id-1"), err: `inline volume belongs to CSI driver "other"`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			published, atFormer, known, err := testDriver(tt.driver).isPublished(
				attachmentState{attachment: tt.va, volume: tt.pv, csiNode: tt.node}, tt.reported,
			)
			if published != tt.published || atFormer != tt.atFormer || known != tt.known || (err == nil) != (tt.err == "") || err != nil &&
				!strings.Contains(err.Error(), tt.err) {
				t.Errorf("published %t, known %t, %v; want %t, %t, %q", published, known, err, tt.published, tt.known, tt.err)
			}
		})
	}
}

func TestIndeterminate(t *testing.T) {
	failed := func(va *storagev1.VolumeAttachment) {
		va.Status.AttachError = &storagev1.VolumeError{Message: "x"}
	}
	for name, tt := range map[string]struct {
		va   *storagev1.VolumeAttachment
		want bool
	}{
		"attached": {testAttachment(attached), false}, "failed": {testAttachment(failed), false},
		"attached and failed": {testAttachment(attached, failed), true},
		"being deleted":       {testAttachment(attached, failed, deleting), false},
	} {
		if got := needsRepublish(tt.va); got != tt.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func TestDecideForced(t *testing.T) {
	for name, tt := range map[string]struct {
		driver      func(*driver)
		va          *storagev1.VolumeAttachment
		pv          *corev1.PersistentVolume
		node        *storagev1.CSINode
		secretsRead bool
		want        action
		err         string
	}{
		"gone": {want: doNothing},
		"of another driver": {
			va: testAttachment(func(va *storagev1.VolumeAttachment) { va.Spec.Attacher = "other" }), want: doNothing,
		},
		"attached": {
			va: testAttachment(attached, protected), pv: testVolume(), node: testNode("id-1"), want: doPublish,
		},
		"attached, with another node ID": {
			va: testAttachment(attached, protected), pv: testVolume(), node: testNode("id-2"), want: doUnpublishFormer,
		},
		"attached, unprotected": {
			va: testAttachment(attached), pv: testVolume(), node: testNode("id-1"), want: doAddFinalizer,
		},
		"attached, volume unprotected": {
			va: testAttachment(attached, protected), pv: testVolume(func(pv *corev1.PersistentVolume) { pv.Finalizers = nil }),
			node: testNode("id-1"), want: doAddVolumeFinalizer,
		},
		"attached, no CSINode": {
			va: testAttachment(attached, protected), pv: testVolume(), want: doReportError, err: "not found",
		},
		"attached, no volume": {
			va: testAttachment(attached, protected), node: testNode("id-1"), want: doReportError, err: "not found",
		},
		"attached, volume being deleted": {
			va:   testAttachment(attached, protected),
			pv:   testVolume(func(pv *corev1.PersistentVolume) { pv.DeletionTimestamp = &metav1.Time{Time: now} }),
			node: testNode("id-1"), want: doReportError, err: "marked for deletion",
		},
		"attached, secret": {
			va: testAttachment(attached, protected), pv: testVolume(withSecret), node: testNode("id-1"), want: doReadSecrets,
		},
		"not attached": {va: testAttachment(protected), pv: testVolume(), node: testNode("id-1"), want: doPublish},
		"deleted": {
			va: testAttachment(deleting, attached, protected), pv: testVolume(), node: testNode("id-1"), want: doUnpublish,
		},
		"deleted and released": {va: testAttachment(deleting), pv: testVolume(), node: testNode("id-1"), want: doUnpublish},
		"deleted and released, attached": {
			va: testAttachment(deleting, attached), pv: testVolume(), node: testNode("id-1"), want: doUnpublish,
		},
		"deleted and released, secret": {
			va: testAttachment(deleting), pv: testVolume(withSecret), node: testNode("id-1"), want: doReadSecrets,
		},
		"deleted and released, secret read": {
			va: testAttachment(deleting), pv: testVolume(withSecret), node: testNode("id-1"), secretsRead: true,
			want: doUnpublish,
		},
		"deleted and released, no volume": {
			va: testAttachment(deleting), node: testNode("id-1"), want: doReportError, err: "not found",
		},
		"deleted and released, no node": {
			va: testAttachment(deleting), pv: testVolume(), want: doReportError, err: "not found",
		},
		"a driver that does not publish": {
			driver: withoutPublish, va: testAttachment(attached), want: doNothing,
		},
		"a driver that does not publish, gone": {
			driver: withoutPublish, va: testAttachment(deleting), want: doNothing,
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := testDriver(tt.driver).decide(
				attachmentState{
					attachment: tt.va, volume: tt.pv, csiNode: tt.node, liveReads: liveReads{secretsRead: tt.secretsRead},
					outOfSync: true,
				},
			)
			if got.action != tt.want || (got.err == nil) != (tt.err == "") || got.err != nil && !strings.Contains(got.err.Error(), tt.err) {
				t.Errorf("got %v because %s: %v", got.action, got.reason, got.err)
			}
			if call := got.action == doPublish || got.action == doUnpublish; call &&
				fmt.Sprint(got.source.handle, " ", got.nodeID) != "vol-1 id-1" {
				t.Errorf("of %q at %q", got.source.handle, got.nodeID)
			}
		})
	}
}
