// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/intent"
)

var now = time.Unix(1_700_000_000, 0)

// withoutPublish is a driver without PUBLISH_UNPUBLISH_VOLUME.
func withoutPublish(d *driver) { d.caps.PublishUnpublishVolume = false }

func testDriver(change func(*driver)) driver {
	d := driver{name: "drv.example.com", finalizer: Finalizer("drv.example.com")}
	d.caps.PublishUnpublishVolume = true
	if change != nil {
		change(&d)
	}
	return d
}

func testAttachment(changes ...func(*storagev1.VolumeAttachment)) *storagev1.VolumeAttachment {
	va := &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: "va1", UID: "1"}, Spec: storagev1.VolumeAttachmentSpec{
		Attacher: "drv.example.com", NodeName: "n1", Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To("pv1")},
	}}
	for _, change := range changes {
		change(va)
	}
	return va
}

func testVolume(changes ...func(*corev1.PersistentVolume)) *corev1.PersistentVolume {
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{
		Name: "pv1", Finalizers: []string{"kubernetes.io/pv-protection", Finalizer("drv.example.com")},
	},
		Spec: corev1.PersistentVolumeSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				CSI: &corev1.CSIPersistentVolumeSource{Driver: "drv.example.com", VolumeHandle: "vol-1"},
			}}}
	for _, change := range changes {
		change(pv)
	}
	return pv
}

func testNode(id string) *storagev1.CSINode {
	return &storagev1.CSINode{
		ObjectMeta: metav1.ObjectMeta{Name: "n1"},
		Spec:       storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: "drv.example.com", NodeID: id}}},
	}
}

func deleting(va *storagev1.VolumeAttachment) { va.DeletionTimestamp = &metav1.Time{Time: now} }
func attached(va *storagev1.VolumeAttachment) { va.Status.Attached = true }
func protected(va *storagev1.VolumeAttachment) {
	va.Finalizers = []string{Finalizer("drv.example.com")}
	va.Annotations = map[string]string{annNodeID: "id-1", annVolumeHandle: "vol-1"}
}
func withFormer(ids ...string) func(*storagev1.VolumeAttachment) {
	return func(va *storagev1.VolumeAttachment) {
		list, _ := json.Marshal(ids)
		va.Annotations[annFormerNodeIDs] = string(list)
	}
}
func withSecret(pv *corev1.PersistentVolume) {
	pv.Spec.CSI.ControllerPublishSecretRef = &corev1.SecretReference{Namespace: "ns", Name: "s"}
}

// called returns the memory of a call for a volume.
func called(handle string, state intent.State) intent.Entry[lastCall] {
	return intent.Entry[lastCall]{State: state, Args: handle, Payload: lastCall{testAttachment(), step{source: source{handle: handle}}}}
}

func TestDecide(t *testing.T) {
	tests := map[string]struct {
		driver      func(*driver)
		va          *storagev1.VolumeAttachment
		pv          *corev1.PersistentVolume
		node        *storagev1.CSINode
		secretsRead bool
		unpublished []string
		detaching   *storagev1.VolumeAttachment
		call        intent.Entry[lastCall]
		forced      bool
		want        action
		reason      string
		err         string
		nodeID      string
		former      string
	}{
		"gone":               {want: doNothing, reason: "Deleted"},
		"gone, undetermined": {call: called("vol-1", intent.Unknown), want: doUndoPublish, reason: "DeletedWithoutDetach"},
		"gone, undo failed":  {call: called("vol-1", intent.Undoing), want: doUndoPublish, reason: "DeletedWithoutDetach"},
		"gone, not sent":     {call: called("vol-1", intent.Planned), want: doNothing, reason: "Deleted"},
		"of another driver": {
			va: testAttachment(func(va *storagev1.VolumeAttachment) { va.Spec.Attacher = "other" }), want: doNothing,
			reason: "OtherDriver",
		},
		"attached": {va: testAttachment(attached), want: doNothing, reason: "Attached"},
		"volume without finalizer": {
			va: testAttachment(), pv: testVolume(func(pv *corev1.PersistentVolume) { pv.Finalizers = nil }),
			node: testNode("id-1"), want: doAddVolumeFinalizer, reason: "VolumeWithoutFinalizer",
		},
		"new": {
			va: testAttachment(), pv: testVolume(), node: testNode("id-1"), want: doAddFinalizer, reason: "WithoutFinalizer",
			nodeID: "id-1",
		},
		"protected": {
			va: testAttachment(protected), pv: testVolume(), node: testNode("id-1"), want: doPublish, reason: "Requested",
			nodeID: "id-1",
		},
		"protected with another node ID": {
			va: testAttachment(protected), pv: testVolume(), node: testNode("id-2"), want: doUnpublishFormer,
			reason: "NodeIDChanged", nodeID: "id-1",
		},
		"protected with another node ID, unpublished": {
			va: testAttachment(protected), pv: testVolume(), node: testNode("id-2"), unpublished: []string{"id-1"}, want: doAddFinalizer,
			reason: "WithoutFinalizer", nodeID: "id-2",
		},
		"protected with another node ID, for many nodes": {
			va: testAttachment(protected), pv: testVolume(withModes(rwx)), node: testNode("id-2"), want: doAddFinalizer,
			reason: "WithoutFinalizer", nodeID: "id-2", former: `["id-1"]`,
		},
		"the former node ID again, for many nodes": {
			va: testAttachment(protected, withFormer("id-0")), pv: testVolume(withModes(rwx)), node: testNode("id-0"), want: doAddFinalizer,
			reason: "WithoutFinalizer", nodeID: "id-0", former: `["id-1"]`,
		},
		"too many former node IDs": {
			va: testAttachment(protected, withFormer("1", "2", "3", "4")), pv: testVolume(withModes(rwx)), node: testNode("id-2"),
			want: doUnpublishFormer, reason: "NodeIDChanged", nodeID: "1",
		},
		"former node IDs are no list": {
			va: testAttachment(protected, func(va *storagev1.VolumeAttachment) { va.Annotations[annFormerNodeIDs] = "id-0" }),
			pv: testVolume(), node: testNode("id-1"), want: doReportError, reason: "CannotAttach", err: annFormerNodeIDs,
		},
		"another node ID in an annotation of others": {
			va: testAttachment(protected, func(va *storagev1.VolumeAttachment) { va.Finalizers = nil }), pv: testVolume(),
			node: testNode("id-2"), want: doAddFinalizer, reason: "WithoutFinalizer", nodeID: "id-2",
		},
		"being detached from another node": {
			va: testAttachment(protected), pv: testVolume(), node: testNode("id-1"), want: doReportError, reason: "CannotAttach",
			detaching: testAttachment(protected, deleting), err: `may still be published to node n1: VolumeAttachment "va1" is being deleted`,
		},
		"another volume being detached": {
			va: testAttachment(protected), pv: testVolume(), node: testNode("id-1"), want: doPublish, reason: "Requested", nodeID: "id-1",
			detaching: testAttachment(protected, deleting, func(va *storagev1.VolumeAttachment) {
				va.Annotations[annVolumeHandle] = "vol-0"
			}),
		},
		"protected, volume replaced": {
			va: testAttachment(protected), pv: testVolume(func(pv *corev1.PersistentVolume) { pv.Spec.CSI.VolumeHandle = "vol-2" }),
			node: testNode("id-1"), want: doReportError, reason: "CannotAttach",
			err: `PersistentVolume "pv1" was replaced: it has volume "vol-2", but volume "vol-1" may be published`,
		},
		"volume replaced during a call, without a record": {
			va: testAttachment(), pv: testVolume(), node: testNode("id-1"), call: called("vol-0", intent.Unknown),
			want: doReportError, reason: "CannotAttach", err: `it has volume "vol-1", but volume "vol-0" may be published`,
		},
		"deleted, the volume is known from a call only": {
			va:   testAttachment(deleting, protected, func(va *storagev1.VolumeAttachment) { delete(va.Annotations, annVolumeHandle) }),
			call: called("vol-1", intent.Unknown), want: doUnpublish, reason: "Deleting", nodeID: "id-1",
		},
		"a finalizer without notes": {
			va: testAttachment(protected, func(va *storagev1.VolumeAttachment) { va.Annotations = nil }), pv: testVolume(),
			node: testNode("id-1"), want: doAddFinalizer, reason: "WithoutFinalizer", nodeID: "id-1",
		},
		"secret to be read": {
			va: testAttachment(), pv: testVolume(withSecret), node: testNode("id-1"), want: doReadSecrets,
			reason: "SecretsNeeded",
		},
		"secret that was read": {
			va: testAttachment(), pv: testVolume(withSecret), node: testNode("id-1"), secretsRead: true, want: doAddFinalizer,
			reason: "WithoutFinalizer", nodeID: "id-1",
		},
		"no volume": {
			va: testAttachment(), node: testNode("id-1"), want: doReportError, reason: "CannotAttach",
			err: `persistentvolume "pv1" not found`,
		},
		"volume being deleted": {
			va:   testAttachment(),
			pv:   testVolume(func(pv *corev1.PersistentVolume) { pv.DeletionTimestamp = &metav1.Time{Time: now}; pv.Finalizers = nil }),
			node: testNode("id-1"), want: doReportError, reason: "CannotAttach",
			err: `PersistentVolume "pv1" is marked for deletion`,
		},
		"volume without CSI source": {
			va: testAttachment(), pv: testVolume(func(pv *corev1.PersistentVolume) { pv.Spec.CSI = nil }),
			node: testNode("id-1"), want: doReportError, reason: "CannotAttach", err: "non-csi source",
		},
		"volume of another driver": {
			va: testAttachment(), pv: testVolume(func(pv *corev1.PersistentVolume) { pv.Spec.CSI.Driver = "other" }),
			node: testNode("id-1"), want: doReportError, reason: "CannotAttach", err: `belongs to CSI driver "other"`,
		},
		"no source": {
			va:   testAttachment(func(va *storagev1.VolumeAttachment) { va.Spec.Source.PersistentVolumeName = nil }),
			want: doReportError, reason: "CannotAttach", err: "neither InlineCSIVolumeSource",
		},
		"two sources": {
			va:   testAttachment(func(va *storagev1.VolumeAttachment) { va.Spec.Source.InlineVolumeSpec = &corev1.PersistentVolumeSpec{} }),
			want: doReportError, reason: "CannotAttach", err: "both InlineCSIVolumeSource",
		},
		"inline without CSI": {va: testAttachment(func(va *storagev1.VolumeAttachment) {
			va.Spec.Source = storagev1.VolumeAttachmentSource{InlineVolumeSpec: &corev1.PersistentVolumeSpec{}}
		}), want: doReportError, reason: "CannotAttach", err: "nil CSI source"},
		"inline": {va: testAttachment(func(va *storagev1.VolumeAttachment) {
			va.Spec.Source = storagev1.VolumeAttachmentSource{InlineVolumeSpec: &testVolume().Spec}
		}), node: testNode("id-1"), want: doAddFinalizer, reason: "WithoutFinalizer", nodeID: "id-1"},
		"modes that exclude each other": {va: testAttachment(), pv: testVolume(func(pv *corev1.PersistentVolume) {
			pv.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce, corev1.ReadOnlyMany}
		}), node: testNode("id-1"), want: doReportError, reason: "CannotAttach", err: "ReadOnlyMany and ReadWriteOnce"},
		"no CSINode": {
			va: testAttachment(), pv: testVolume(), want: doReportError, reason: "CannotAttach",
			err: `csinode.storage.k8s.io "n1" not found`,
		},
		"driver not on the node": {
			va: testAttachment(), pv: testVolume(), node: &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: "n1"}},
			want: doReportError, reason: "CannotAttach", err: "CSINode n1 does not contain driver drv.example.com",
		},
		"an attach does not use the notes": {
			va: testAttachment(protected), pv: testVolume(), want: doReportError, reason: "CannotAttach", err: "not found",
		},

		"deleted before it was protected": {
			va: testAttachment(deleting), pv: testVolume(), node: testNode("id-1"), want: doNothing, reason: "Detached",
		},
		"deleted, without finalizer, attached": {
			va: testAttachment(deleting, attached), pv: testVolume(), node: testNode("id-1"), want: doMarkDetached,
			reason: "Detached",
		},
		"deleted": {
			va: testAttachment(deleting, attached, protected), pv: testVolume(), node: testNode("id-1"), want: doUnpublish,
			reason: "Deleting", nodeID: "id-1",
		},
		"deleted, never attached": {
			va: testAttachment(deleting, protected), pv: testVolume(), node: testNode("id-1"), want: doUnpublish,
			reason: "Deleting", nodeID: "id-1",
		},
		"deleted, another node ID": {
			va: testAttachment(deleting, protected), pv: testVolume(), node: testNode("id-2"), want: doUnpublish,
			reason: "Deleting", nodeID: "id-1",
		},
		"deleted, no node ID recorded": {
			va: testAttachment(deleting, protected, func(va *storagev1.VolumeAttachment) { va.Annotations = nil }), pv: testVolume(),
			node: testNode("id-2"), want: doUnpublish, reason: "Deleting", nodeID: "id-2",
		},
		"deleted, former node IDs": {
			va: testAttachment(deleting, protected, withFormer("id-0", "id-1", "id-2")), pv: testVolume(), node: testNode("id-2"),
			want: doUnpublishFormer, reason: "Deleting", nodeID: "id-0",
		},
		"deleted, unpublished from the former node IDs": {
			va: testAttachment(deleting, protected, withFormer("id-0", "id-1", "id-2")), pv: testVolume(), node: testNode("id-2"),
			unpublished: []string{"id-0", "id-2"}, want: doUnpublish, reason: "Deleting", nodeID: "id-1",
		},
		"deleted, an empty former node ID, which would mean all nodes": {
			va: testAttachment(deleting, protected, withFormer("")), pv: testVolume(), node: testNode("id-1"), want: doUnpublish,
			reason: "Deleting", nodeID: "id-1",
		},
		"deleted, former node IDs are no list": {
			va: testAttachment(deleting, protected, func(va *storagev1.VolumeAttachment) { va.Annotations[annFormerNodeIDs] = "id-0" }),
			pv: testVolume(), node: testNode("id-1"), want: doReportError, reason: "CannotDetach", err: annFormerNodeIDs,
		},
		"deleted, no CSINode": {
			va: testAttachment(deleting, protected), pv: testVolume(), want: doUnpublish, reason: "Deleting", nodeID: "id-1",
		},
		"deleted, driver not on the node": {
			va: testAttachment(deleting, protected), pv: testVolume(),
			node: &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}, want: doUnpublish, reason: "Deleting",
			nodeID: "id-1",
		},
		"deleted, neither CSINode nor note": {
			va: testAttachment(deleting, protected, func(va *storagev1.VolumeAttachment) { va.Annotations = nil }),
			pv: testVolume(), want: doReportError, reason: "CannotDetach", err: "not found",
		},
		"deleted, volume being deleted": {
			va:   testAttachment(deleting, protected),
			pv:   testVolume(func(pv *corev1.PersistentVolume) { pv.DeletionTimestamp = &metav1.Time{Time: now} }),
			node: testNode("id-1"), want: doUnpublish, reason: "Deleting", nodeID: "id-1",
		},
		"deleted, volume gone": {
			va: testAttachment(deleting, protected), node: testNode("id-1"), want: doUnpublish, reason: "Deleting",
			nodeID: "id-1",
		},
		"deleted, volume gone, and no note": {
			va:   testAttachment(deleting, protected, func(va *storagev1.VolumeAttachment) { delete(va.Annotations, annVolumeHandle) }),
			node: testNode("id-1"), want: doReportError, reason: "CannotDetach", err: `persistentvolume "pv1" not found`,
		},
		"deleted, volume gone, secret noted": {
			va:   testAttachment(deleting, protected, func(va *storagev1.VolumeAttachment) { va.Annotations[annSecret] = "ns/s" }),
			node: testNode("id-1"), want: doReadSecrets, reason: "SecretsNeeded",
		},
		"deleted, unsupported access modes": {
			va: testAttachment(deleting, protected),
			pv: testVolume(func(pv *corev1.PersistentVolume) { pv.Spec.AccessModes = nil }), node: testNode("id-1"),
			want: doUnpublish, reason: "Deleting", nodeID: "id-1",
		},
		"deleted, another volume has its name": {
			va: testAttachment(deleting, protected),
			pv: testVolume(func(pv *corev1.PersistentVolume) { pv.Spec.CSI.Driver = "other" }), node: testNode("id-1"),
			want: doUnpublish, reason: "Deleting", nodeID: "id-1",
		},

		"attached with another node ID, not at the driver": {
			va: testAttachment(protected, attached), pv: testVolume(), node: testNode("id-2"), forced: true, want: doUnpublishFormer,
			reason: "NodeIDChanged", nodeID: "id-1",
		},
		"attached, but not at the driver": {
			va: testAttachment(protected, attached), pv: testVolume(), node: testNode("id-1"), forced: true, want: doPublish,
			reason: "Requested", nodeID: "id-1",
		},
		"attached, not at the driver, without finalizer": {
			va: testAttachment(attached), pv: testVolume(), node: testNode("id-1"), forced: true, want: doAddFinalizer,
			reason: "WithoutFinalizer", nodeID: "id-1",
		},
		"attached, not at the driver, volume unprotected": {
			va: testAttachment(protected, attached), pv: testVolume(func(pv *corev1.PersistentVolume) { pv.Finalizers = nil }),
			node: testNode("id-1"), forced: true, want: doAddVolumeFinalizer, reason: "VolumeWithoutFinalizer",
		},
		"attached, not at the driver, no CSINode": {
			va: testAttachment(protected, attached), pv: testVolume(), forced: true, want: doReportError,
			reason: "CannotAttach", err: "not found",
		},
		"attached, not at the driver, secret to be read": {
			va: testAttachment(protected, attached), pv: testVolume(withSecret), node: testNode("id-1"), forced: true,
			want: doReadSecrets, reason: "SecretsNeeded",
		},
		"at the driver, but not attached": {
			va: testAttachment(protected), pv: testVolume(), node: testNode("id-1"), forced: true, want: doPublish,
			reason: "Requested", nodeID: "id-1",
		},
		"deleted, but at the driver": {
			va: testAttachment(deleting, protected), pv: testVolume(), node: testNode("id-1"), forced: true, want: doUnpublish,
			reason: "Deleting", nodeID: "id-1",
		},
		"released, but at the driver": {
			va: testAttachment(deleting), pv: testVolume(), node: testNode("id-1"), forced: true, want: doUnpublish,
			reason: "Deleting", nodeID: "id-1",
		},
		"released, attached, but not at the driver": {
			va: testAttachment(deleting, attached), pv: testVolume(), node: testNode("id-1"), forced: true, want: doUnpublish,
			reason: "Deleting", nodeID: "id-1",
		},
		"released, at the driver, by its notes": {
			va: testAttachment(deleting, protected, func(va *storagev1.VolumeAttachment) { va.Finalizers = nil }), forced: true,
			want: doUnpublish, reason: "Deleting", nodeID: "id-1",
		},
		"released, at the driver, neither CSINode nor note": {
			va: testAttachment(deleting), pv: testVolume(), forced: true, want: doReportError, reason: "CannotDetach",
			err: "not found",
		},
		"of another driver, whatever the report": {
			va: testAttachment(func(va *storagev1.VolumeAttachment) { va.Spec.Attacher = "other" }), forced: true,
			want: doNothing, reason: "OtherDriver",
		},
		"a driver that does not publish, whatever the report": {
			driver: withoutPublish, va: testAttachment(attached), forced: true, want: doNothing,
			reason: "Attached",
		},

		"a driver that does not publish": {
			driver: withoutPublish, va: testAttachment(), want: doMarkAttached,
			reason: "NothingToAttach",
		},
		"a driver that does not publish, attached": {
			driver: withoutPublish, va: testAttachment(attached), want: doNothing, reason: "Attached",
		},
		"a driver that does not publish, deleted": {
			driver: withoutPublish, va: testAttachment(deleting), want: doNothing, reason: "Detached",
		},
		"a driver that does not publish any more, deleted": {
			driver: withoutPublish, va: testAttachment(deleting, protected), want: doRemoveFinalizer,
			reason: "NothingToDetach",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got := testDriver(tt.driver).decide(
				attachmentState{
					attachment: tt.va, volume: tt.pv, csiNode: tt.node, detaching: tt.detaching,
					liveReads: liveReads{secretsRead: tt.secretsRead, unpublished: tt.unpublished},
					outOfSync: tt.forced, call: tt.call,
				},
			)
			if former := got.change.SetAnnotations[annFormerNodeIDs]; former != tt.former {
				t.Errorf("former node IDs %q, want %q", former, tt.former)
			}
			if got.action != tt.want || got.reason != tt.reason || got.nodeID != tt.nodeID {
				t.Errorf(
					"got %v because %s, node %q (%v); want %v because %s, node %q", got.action, got.reason, got.nodeID, got.err,
					tt.want, tt.reason, tt.nodeID,
				)
			}
			if tt.err != "" && (got.err == nil || !strings.Contains(got.err.Error(), tt.err)) {
				t.Errorf("error %v, want one with %q", got.err, tt.err)
			}
		})
	}
}

// FuzzDecide derives states from bits. Nothing is ever published before both
// finalizers are written, no call lacks its IDs or has other arguments than the one
// before, and a driver is never asked to detach what still is to be attached.
func FuzzDecide(f *testing.F) {
	for bits := range uint16(1 << 14) {
		f.Add(bits)
	}
	f.Fuzz(func(t *testing.T, bits uint16) {
		bit := func(i int) bool { return bits&(1<<i) != 0 }
		va := testAttachment()
		if bit(0) {
			deleting(va)
		}
		if bit(1) {
			attached(va)
		}
		if bit(2) {
			protected(va)
		}
		if bit(3) {
			va.Annotations = nil
		}
		s := attachmentState{attachment: va, liveReads: liveReads{secretsRead: bit(4)}, outOfSync: bit(11)}
		if bit(5) {
			s.volume = testVolume()
			if bit(6) {
				s.volume.Finalizers = nil
			}
			if bit(7) {
				withSecret(s.volume)
			}
			if bit(8) {
				s.volume.DeletionTimestamp = &metav1.Time{Time: now}
			}
		}
		if bit(9) {
			s.csiNode = testNode("id-1")
		}
		if bit(12) {
			s.call = called(map[bool]string{true: "vol-1", false: "replaced"}[bit(13)], intent.Unknown)
		}
		d := testDriver(func(d *driver) { d.caps.PublishUnpublishVolume = !bit(10) })
		step := d.decide(s)
		call := step.action == doPublish || step.action == doUnpublish
		switch {
		case call && (step.nodeID == "" || step.source.handle == ""):
			t.Errorf("%v without an ID: %+v", step.action, step)
		case call && va.Status.Attached && va.DeletionTimestamp == nil && !s.outOfSync:
			t.Errorf("publish of an attached volume: %+v", s)
		case call && s.calledForOther(step.source):
			t.Errorf("%v with other arguments than the call before: %+v", step.action, step)
		case call && !d.caps.PublishUnpublishVolume:
			t.Errorf("%v of a driver that cannot", step.action)
		case call && step.source.secrets != nil && !s.secretsRead:
			t.Errorf("%v without the secret", step.action)
		case step.action == doPublish && (!d.recorded(va, step) || len(s.volume.Finalizers) == 0 || va.DeletionTimestamp != nil):
			t.Errorf("publish without protection: %+v", s)
		case step.action == doUnpublish && va.DeletionTimestamp == nil:
			t.Errorf("unpublish of a volume to attach: %+v", s)
		case (step.action == doReportError) != (step.err != nil):
			t.Errorf("%v with error %v", step.action, step.err)
		}
	})
}

// TestRecorded: the first ControllerPublishVolume is not sent without what its detach needs.
func TestRecorded(t *testing.T) {
	publish := step{source: source{handle: "vol-1"}, nodeID: "id-1"}
	for name, tt := range map[string]struct {
		va   *storagev1.VolumeAttachment
		want bool
	}{
		"recorded":    {testAttachment(protected), true},
		"no record":   {testAttachment(), false},
		"no handle":   {testAttachment(protected, func(va *storagev1.VolumeAttachment) { delete(va.Annotations, annVolumeHandle) }), false},
		"other node":  {testAttachment(protected, func(va *storagev1.VolumeAttachment) { va.Annotations[annNodeID] = "id-2" }), false},
		"unprotected": {testAttachment(protected, func(va *storagev1.VolumeAttachment) { va.Finalizers = nil }), false},
	} {
		if got := testDriver(nil).recorded(tt.va, publish); got != tt.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func TestPublishRequest(t *testing.T) {
	pv := testVolume(func(pv *corev1.PersistentVolume) {
		pv.Spec.CSI.VolumeAttributes, pv.Spec.CSI.ReadOnly, pv.Spec.CSI.FSType = map[string]string{"a": "b"}, true, "xfs"
		pv.Spec.MountOptions = []string{"o1", "o2"}
	})
	d := testDriver(nil)
	src, err := d.resolve(testAttachment(), pv)
	if err != nil {
		t.Fatal(err)
	}
	r, err := d.publishRequest(src, "id-1", map[string]string{"k": "v"})
	if err != nil {
		t.Fatal(err)
	}
	mount := r.GetVolumeCapability().GetMount()
	if r.VolumeId != "vol-1" || r.NodeId != "id-1" || r.Readonly || r.VolumeContext["a"] != "b" || r.Secrets["k"] != "v" ||
		mount.GetFsType() != "xfs" || strings.Join(mount.GetMountFlags(), " ") != "o1 o2" {
		t.Errorf("got %v", r)
	}
	d.caps.PublishReadonly, d.defaultFSType = true, "ext4"
	pv.Spec.CSI.FSType = ""
	if r, err = d.publishRequest(src, "id-1", nil); err != nil || !r.Readonly || r.GetVolumeCapability().GetMount().GetFsType() != "ext4" {
		t.Errorf("%v: %v", err, r)
	}
	pv.Spec.VolumeMode = ptr.To(corev1.PersistentVolumeBlock)
	if r, err = d.publishRequest(src, "id-1", nil); err != nil || r.GetVolumeCapability().GetBlock() == nil {
		t.Errorf("%v: %v", err, r)
	}
}

func TestNames(t *testing.T) {
	for driver, want := range map[string]string{
		"ebs.csi.aws.com": "ebs-csi-aws-com", `trailing\`: "trailing-X", "s!a@n#i$t(i%z^e&d*": "s-a-n-i-t-i-z-e-d-X",
	} {
		if got := Finalizer(driver); got != "external-attacher/"+want {
			t.Errorf("%s: %s", driver, got)
		}
	}
	for driver, want := range map[string]string{
		"ebs.csi.aws.com": "external-attacher-leader-ebs-csi-aws-com", "Foo.": "external-attacher-leader-foo-x",
	} {
		if got := LeaseName(driver); got != want {
			t.Errorf("%s: %s", driver, got)
		}
	}
}

func TestConfigValidate(t *testing.T) {
	if err := DefaultConfig().Validate(); err != nil {
		t.Error(err)
	}
	err := Config{Timeout: -1, Resync: -1}.Validate()
	for _, flag := range []string{"--timeout", "--retry-interval-start", "--retry-interval-max", "--worker-threads", "--resync"} {
		if err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("%v lacks %s", err, flag)
		}
	}
}

func TestDecideAsksBeforeTheFirstCall(t *testing.T) {
	for name, va := range map[string]*storagev1.VolumeAttachment{
		"attach": testAttachment(protected), "detach": testAttachment(deleting, protected),
		"forced": testAttachment(protected, attached),
	} {
		s := attachmentState{
			attachment: va, volume: testVolume(), csiNode: testNode("id-1"), outOfSync: name == "forced", unconfirmed: true,
		}
		if got := testDriver(nil).decide(s); got.action != doReadAttachment {
			t.Errorf("%s: %v because %s", name, got.action, got.reason)
		}
	}
	s := attachmentState{
		attachment: testAttachment(protected), volume: testVolume(), csiNode: testNode("id-1"), volumeUnconfirmed: true,
	}
	if got := testDriver(nil).decide(s); got.action != doReadVolume {
		t.Errorf("%v because %s", got.action, got.reason)
	}
	s.volume = testVolume(func(pv *corev1.PersistentVolume) { pv.Spec.CSI.VolumeHandle = "of-the-replaced" })
	if got := testDriver(nil).decide(s); got.action != doReadVolume {
		t.Errorf("another volume in the cache: %v because %s", got.action, got.reason)
	}
	s.volume = testVolume(withSecret)
	if got := testDriver(nil).decide(s); got.action != doReadVolume {
		t.Errorf("the Secret of a volume that may have been replaced: %v because %s", got.action, got.reason)
	}
	// A state that leads to a write needs no live read of the VolumeAttachment.
	s = attachmentState{
		attachment: testAttachment(),
		volume:     testVolume(func(pv *corev1.PersistentVolume) { pv.Finalizers = []string{testDriver(nil).finalizer} }),
		csiNode:    testNode("id-1"), unconfirmed: true,
	}
	if got := testDriver(nil).decide(s); got.action != doAddFinalizer {
		t.Errorf("%v because %s", got.action, got.reason)
	}
	s.volumeUnconfirmed = true // the handle that is recorded must be that of the PersistentVolume
	if got := testDriver(nil).decide(s); got.action != doReadVolume {
		t.Errorf("before the handle is recorded: %v because %s", got.action, got.reason)
	}
}
