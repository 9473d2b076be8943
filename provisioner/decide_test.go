// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"bytes"
	"compress/zlib"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/topology"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

const uid = "01234567-89ab-cdef-0123-456789abcdef"

var now = time.Unix(1_700_000_000, 0)

func testDriver(change func(*driver)) driver {
	d := driver{
		Config: DefaultConfig(), name: "drv.example.com", identity: "me",
		caps: csiclient.ControllerCapabilities{CreateDeleteVolume: true, PublishUnpublishVolume: true},
	}
	if change != nil {
		change(&d)
	}
	return d
}

func testClaim(change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	pvc := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "data", UID: uid, ResourceVersion: "7",
			Annotations: map[string]string{storagehelpers.AnnStorageProvisioner: "drv.example.com"}},
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

func testClass(change func(*storagev1.StorageClass)) *storagev1.StorageClass {
	c := &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: "fast", UID: "class-1", ResourceVersion: "1"}, Provisioner: "drv.example.com",
	}
	if change != nil {
		change(c)
	}
	return c
}

func late(c *storagev1.StorageClass) {
	c.VolumeBindingMode = ptr.To(storagev1.VolumeBindingWaitForFirstConsumer)
}

// testCall returns a call for testClaim in a state.
func testCall(s intent.State, change func(*call)) call {
	d := testDriver(nil)
	o, err := d.prepare(testClaim(nil), testClass(nil), "", nil, nil)
	if err != nil {
		panic(err)
	}
	c := call{State: s, Args: recordID, Payload: o}
	if change != nil {
		change(&c)
	}
	return c
}

// ended returns a call without a volume.
func ended(id string) call { return call{State: intent.Settled, Args: id} }

// savedCall returns a call whose PersistentVolume is saved.
func savedCall(pvDeleted bool) call {
	return call{State: intent.Settled, Payload: operation{saved: true, pvDeleted: pvDeleted}}
}

// infeasibleUntil returns a settled claim whose request the driver has called invalid.
func infeasibleUntil(until time.Time, claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass) call {
	return call{Payload: operation{infeasible: &infeasible{until, claim, class}}}
}

// remembers returns a claim without a call.
func remembers(o operation) call { return call{Payload: o} }

func protected(pvc *corev1.PersistentVolumeClaim) {
	pvc.Finalizers = []string{kube.ProvisioningFinalizer}
}

const recordID = "process-1" // of testCall

func ofAnother(c *call) { c.Args = "process-2" }

// afterLate is a request after another one whose record got no response.
func afterLate(c *call) { c.Args, c.Payload.lateRecords = "process-2", []string{recordID} }

// ofEarlier continues the request of an earlier process with an ID of its own.
func ofEarlier(c *call) { c.Args, c.Inherited, c.Payload.resumed = "process-2", true, recordID }

// recorded protects a claim and records the request of testCall.
func recorded(pvc *corev1.PersistentVolumeClaim) {
	change, err := testCall(intent.Planned, nil).Payload.protection(testDriver(nil).name, recordID, pvc)
	if err != nil {
		panic(err)
	}
	change.Apply(pvc)
}

func deleting(pvc *corev1.PersistentVolumeClaim) { pvc.DeletionTimestamp = &metav1.Time{Time: now} }

func ourVolume() *corev1.PersistentVolume {
	return &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "pvc-" + uid}, Spec: corev1.PersistentVolumeSpec{ClaimRef: &corev1.ObjectReference{UID: uid}},
	}
}

func releasedVolume() *corev1.PersistentVolume {
	pv := ourVolume()
	pv.Status.Phase = corev1.VolumeReleased
	return pv
}

func TestDecide(t *testing.T) {
	foreign := ourVolume()
	foreign.Spec.ClaimRef.UID = "other"
	zones := world([]string{"zone"}, map[string]string{"zone": "a"})
	can := func(d *driver) {
		d.caps.CreateDeleteSnapshot, d.caps.CloneVolume, d.caps.ModifyVolume, d.topology = true, true, true, false
	}
	from := func(kind string, changes ...func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
		return testClaim(func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: kind, Name: "x"}
			if kind == kube.KindSnapshot {
				c.Spec.DataSource.APIGroup = ptr.To(volumerules.SnapshotGroup)
			}
			for _, change := range changes {
				change(c)
			}
		})
	}
	attributes := func(name string) *corev1.PersistentVolumeClaim {
		return testClaim(func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeAttributesClassName = &name })
	}
	alpha := func(c *corev1.PersistentVolumeClaim) { c.Annotations[kube.AnnSelectedNodeAlpha] = "node-9" }
	errGone := errors.New("not found")
	errTimeout := apierrors.NewTimeoutError("slow", 1)
	errUnreachable := &url.Error{Op: "Get", Err: errors.New("connection refused")}
	errFull := status.Error(codes.ResourceExhausted, "full")
	onNodeZero := func(c *corev1.PersistentVolumeClaim) { c.Annotations[storagehelpers.AnnSelectedNode] = "node-0" }
	recreated := func(c *storagev1.StorageClass) { c.UID = "class-2" }
	soon := now.Add(time.Second)
	protectionOff := func(d *driver) { d.ProvisioningProtection = ProtectionOff }
	withSecret := func(c *call) {
		c.Payload.plan.Secrets.Provisioner = &corev1.SecretReference{Name: "s"}
		c.Payload.request.Secrets = map[string]string{}
	}
	snapshotX := func(change func(*resolvedRefs)) *resolvedRefs {
		f := &resolvedRefs{source: &volumerules.Source{Kind: kube.KindSnapshot, Namespace: "ns", Name: "x"},
			content: &csi.VolumeContentSource{}}
		if change != nil {
			change(f)
		}
		return f
	}
	tests := map[string]struct {
		driver func(*driver)
		claim  *corev1.PersistentVolumeClaim
		class  *storagev1.StorageClass
		volume *corev1.PersistentVolume
		call   call
		refs   *resolvedRefs
		reads  reads
		stale  bool
		want   action
		reason string
		err    error
	}{
		"a deleted claim": {want: doForget, reason: "ClaimDeleted"},
		"a new claim":     {claim: testClaim(nil), class: testClass(nil), want: doBegin, reason: "Wanted"},
		"bound already": {
			claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "x" }), class: testClass(nil), want: doForget,
			reason: "Bound",
		},
		"its volume exists": {claim: testClaim(nil), class: testClass(nil), volume: ourVolume(), want: doNothing, reason: "PVExists"},
		"its volume was saved and is not in the cache": {
			claim: testClaim(nil), class: testClass(nil), call: savedCall(false), want: doNothing, reason: "PVCreated",
		},
		"the name of its volume is taken": {
			claim: testClaim(nil), class: testClass(nil), volume: foreign, want: doFail, reason: "NameTaken",
		},
		"deleted before anything began": {
			claim: testClaim(deleting), class: testClass(nil), want: doForget, reason: "ClaimDeleted",
		},
		"without an owner": {
			claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Annotations = nil }), class: testClass(nil), want: doForget,
			reason: "OfAnotherDriver",
		},
		"with the beta annotation alone": {claim: testClaim(func(c *corev1.PersistentVolumeClaim) {
			c.Annotations = map[string]string{storagehelpers.AnnBetaStorageProvisioner: "drv.example.com"}
		}), class: testClass(nil), want: doBegin, reason: "Wanted"},
		"of another owner, though the beta annotation is ours": {claim: testClaim(func(c *corev1.PersistentVolumeClaim) {
			c.Annotations = map[string]string{
				storagehelpers.AnnStorageProvisioner: "other", storagehelpers.AnnBetaStorageProvisioner: "drv.example.com",
			}
		}), class: testClass(nil), want: doForget, reason: "OfAnotherDriver"},
		"without its class": {claim: testClaim(nil), want: doRetry, reason: "NoClass"},
		"class of another driver": {
			claim: testClaim(nil), class: testClass(func(c *storagev1.StorageClass) { c.Provisioner = "other" }), want: doForget,
			reason: "ClassOfAnotherDriver",
		},
		"late binding, no node yet": {claim: testClaim(nil), class: testClass(late), want: doForget, reason: "WaitsForPod"},
		"late binding, empty node": {
			claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Annotations[storagehelpers.AnnSelectedNode] = "" }),
			class: testClass(late), want: doForget, reason: "WaitsForPod",
		},
		"late binding, node chosen": {
			claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Annotations[storagehelpers.AnnSelectedNode] = "node-0" }),
			class: testClass(late), want: doBegin, reason: "Wanted",
		},
		"the chosen node was deleted": {
			driver: func(d *driver) { d.topology = true },
			claim:  testClaim(func(c *corev1.PersistentVolumeClaim) { c.Annotations[storagehelpers.AnnSelectedNode] = "node-9" }),
			class:  testClass(late), want: doReschedule, reason: "NodeDeleted", err: errNodeNotFound,
		},
		"no topology on the chosen node": {driver: func(d *driver) { d.topology = true }, claim: testClaim(onNodeZero),
			class: testClass(func(c *storagev1.StorageClass) { late(c); c.AllowedTopologies = allow(in("zone", "b")) }),
			want:  doFail, reason: "CannotRequest", err: errTopology},
		"no topology on the chosen node, for the fifth time": {driver: func(d *driver) { d.topology = true }, claim: testClaim(onNodeZero),
			class: testClass(func(c *storagev1.StorageClass) { late(c); c.AllowedTopologies = allow(in("zone", "b")) }),
			call:  remembers(operation{topologyFailures: 4}),
			want:  doReschedule, reason: "NoTopologyForLong", err: errTopology},
		"a selector, even an empty one": {
			claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Spec.Selector = &metav1.LabelSelector{} }), class: testClass(nil),
			want: doFail, reason: "CannotRequest",
		},
		"data from a populator": {claim: testClaim(func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSourceRef = &corev1.TypedObjectReference{Kind: "Hello", Name: "x"}
		}), class: testClass(nil), want: doIgnore, reason: "Populator", err: volumerules.ErrPopulator},
		"late binding, node chosen by the alpha annotation": {
			claim: testClaim(alpha), class: testClass(late), want: doForget, reason: "WaitsForPod",
		},
		"the node of the alpha annotation was deleted": {
			driver: func(d *driver) { d.topology = true }, claim: testClaim(alpha), class: testClass(nil), want: doFail,
			reason: "CannotRequest", err: errNodeNotFound,
		},
		"no topology for long, with the alpha annotation": {driver: func(d *driver) { d.topology = true },
			claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Annotations[kube.AnnSelectedNodeAlpha] = "node-0" }),
			class: testClass(func(c *storagev1.StorageClass) { c.AllowedTopologies = allow(in("zone", "b")) }),
			call:  remembers(operation{topologyFailures: 4}),
			want:  doFail, reason: "CannotRequest", err: errTopology},

		"data from a snapshot": {
			driver: can, claim: from("VolumeSnapshot"), class: testClass(nil), want: doReadReferences, reason: "Wanted",
		},
		"data from a snapshot, a driver that cannot": {
			claim: from("VolumeSnapshot"), class: testClass(nil), want: doFail, reason: "CannotRequest",
		},
		"data from a snapshot that cannot be used": {
			driver: can, claim: from("VolumeSnapshot"), class: testClass(nil), refs: snapshotX(func(f *resolvedRefs) { f.err = errGone }),
			want: doFail, reason: "CannotRequest", err: errGone,
		},
		"data from a snapshot that is not kept yet": {
			driver: can, claim: from("VolumeSnapshot"), class: testClass(nil), refs: snapshotX(nil), want: doBegin,
			reason: "Wanted",
		},
		"a source is not kept for a request with a defect": {
			driver: can, claim: from("VolumeSnapshot"),
			class: testClass(parameters(map[string]string{volumerules.ParameterPrefix + "secret-name": "x"})), refs: snapshotX(nil),
			want:   doFail,
			reason: "CannotRequest",
		},
		"a source is not looked up for a driver that called it invalid": {driver: can, claim: from("VolumeSnapshot"), class: testClass(nil),
			call: infeasibleUntil(soon, testClaim(nil), testClass(nil)), want: doWait,
			reason: "Infeasible"},
		"data from a snapshot of another group": {
			driver: can,
			claim:  from("VolumeSnapshot", func(c *corev1.PersistentVolumeClaim) { c.Spec.DataSource.APIGroup = ptr.To("example.com") }),
			class:  testClass(nil), want: doFail, reason: "CannotRequest",
		},
		"data from a claim": {
			driver: can, claim: from("PersistentVolumeClaim"), class: testClass(nil), want: doReadReferences, reason: "Wanted",
		},
		"data from a claim, a driver that cannot": {
			driver: func(d *driver) { can(d); d.caps.CloneVolume = false }, claim: from("PersistentVolumeClaim"), class: testClass(nil),
			want:   doFail,
			reason: "CannotRequest",
		},
		"data from a claim of another group": {
			driver: can,
			claim: from(
				"PersistentVolumeClaim", func(c *corev1.PersistentVolumeClaim) { c.Spec.DataSource.APIGroup = ptr.To("example.com") },
			),
			class: testClass(nil), want: doIgnore, reason: "Populator", err: volumerules.ErrPopulator,
		},
		"data from another namespace, the gate is off": {driver: can, claim: testClaim(func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSourceRef = &corev1.TypedObjectReference{Kind: "PersistentVolumeClaim", Name: "x", Namespace: ptr.To("b")}
		}), class: testClass(nil), want: doFail, reason: "CannotRequest"},
		"an attributes class": {
			driver: can, claim: attributes("gold"), class: testClass(nil), want: doReadReferences, reason: "Wanted",
		},
		"an attributes class, read": {
			driver: can, claim: attributes("gold"), class: testClass(nil), refs: &resolvedRefs{mutable: map[string]string{"iops": "9"}},
			want: doBegin, reason: "Wanted",
		},
		"an attributes class that cannot be used": {
			driver: can, claim: attributes("gold"), class: testClass(nil), refs: &resolvedRefs{err: errGone}, want: doFail,
			reason: "CannotRequest", err: errGone,
		},
		"an attributes class, a driver without it": {
			claim: attributes("gold"), class: testClass(nil), want: doFail, reason: "CannotRequest",
		},
		"an attributes class, an in-tree class": {driver: func(d *driver) { can(d); ebsDriver(d) },
			claim: testClaim(func(c *corev1.PersistentVolumeClaim) {
				c.Annotations = map[string]string{storagehelpers.AnnStorageProvisioner: ebs}
				c.Spec.VolumeAttributesClassName = ptr.To("gold")
			}),
			class: testClass(func(c *storagev1.StorageClass) { c.Provisioner = ebsInTree }), want: doFail, reason: "CannotRequest",
		},
		"an attributes class, the gate is off": {
			driver: func(d *driver) { d.VolumeAttributesClass = false }, claim: attributes("gold"), class: testClass(nil), want: doBegin,
			reason: "Wanted",
		},
		"an attributes class without a name": {claim: attributes(""), class: testClass(nil), want: doBegin, reason: "Wanted"},
		"a driver that cannot": {
			driver: func(d *driver) { d.caps.CreateDeleteVolume = false }, claim: testClaim(nil), class: testClass(nil), want: doFail,
			reason: "CannotRequest",
		},

		"called invalid a moment ago": {
			claim: testClaim(nil), class: testClass(nil),
			call: infeasibleUntil(soon, testClaim(nil), testClass(nil)), want: doWait,
			reason: "Infeasible",
		},
		"called invalid long ago": {
			claim: testClaim(nil), class: testClass(nil),
			call: infeasibleUntil(now, testClaim(nil), testClass(nil)), want: doBegin, reason: "Wanted",
		},
		"called invalid, and the class is another": {
			claim: testClaim(nil), class: testClass(nil),
			call: infeasibleUntil(soon, testClaim(nil), testClass(recreated)), want: doBegin,
			reason: "Wanted",
		},
		"called invalid, and the class has changed": {
			claim: testClaim(nil), class: testClass(nil),
			call: infeasibleUntil(soon, testClaim(nil), testClass(func(c *storagev1.StorageClass) { c.ResourceVersion = "0" })),
			want: doBegin, reason: "Wanted",
		},
		"called invalid, and the attributes have changed": {
			driver: can, claim: attributes("gold"), class: testClass(nil),
			call: infeasibleUntil(soon, testClaim(nil), testClass(nil)), want: doReadReferences,
			reason: "Wanted",
		},
		"called invalid, and the size has changed": {
			claim: testClaim(nil), class: testClass(nil),
			call: infeasibleUntil(soon, testClaim(size("1")), testClass(nil)), want: doBegin, reason: "Wanted",
		},

		"called invalid for a node, and another one is selected": {
			claim: testClaim(selectNode("n2")), class: testClass(nil),
			call: infeasibleUntil(soon, testClaim(selectNode("n1")), testClass(nil)), want: doBegin, reason: "Wanted",
		},
		"asked for": {
			claim: testClaim(nil), class: testClass(nil), call: testCall(intent.Planned, nil), want: doCreateVolume, reason: "Planned",
		},
		"asked for, with protection always": {
			driver: func(d *driver) { d.ProvisioningProtection = ProtectionAlways }, claim: testClaim(nil),
			call: testCall(intent.Planned, nil), want: doProtect, reason: "Planned",
		},
		"indeterminate": {
			claim: testClaim(nil), call: testCall(intent.Unknown, nil), want: doProtect, reason: "Unknown",
		},
		"indeterminate, with protection off": {
			driver: func(d *driver) { d.ProvisioningProtection = ProtectionOff }, claim: testClaim(nil),
			call: testCall(intent.Unknown, nil), want: doCreateVolume, reason: "Unknown",
		},
		"indeterminate and protected": {
			claim: testClaim(protected), call: testCall(intent.Unknown, nil), want: doCreateVolume, reason: "Unknown",
		},
		"indeterminate, the claim was deleted": {
			call: testCall(intent.Unknown, nil), want: doCreateVolume, reason: "Unknown",
		},
		"indeterminate, the claim is being deleted": {
			claim: testClaim(deleting), call: testCall(intent.Unknown, nil), want: doCreateVolume, reason: "Unknown",
		},
		"indeterminate, the claim became another driver's": {
			claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Annotations = nil; protected(c) }),
			call:  testCall(intent.Unknown, nil), want: doCreateVolume, reason: "Unknown",
		},
		"indeterminate, the class was deleted": {
			claim: testClaim(protected), call: testCall(intent.Unknown, nil), want: doCreateVolume, reason: "Unknown",
		},
		"indeterminate, the claim was bound to something else": {
			claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "x"; protected(c) }),
			call:  testCall(intent.Unknown, nil), want: doCreateVolume, reason: "Unknown",
		},
		"a secret to be read": {
			claim: testClaim(nil),
			call:  testCall(intent.Planned, func(c *call) { c.Payload.plan.Secrets.Provisioner = &corev1.SecretReference{Name: "s"} }),
			want:  doReadSecrets, reason: "SecretsNeeded",
		},
		"an empty secret that was read": {claim: testClaim(nil), call: testCall(intent.Planned, func(c *call) {
			c.Payload.plan.Secrets.Provisioner = &corev1.SecretReference{Name: "s"}
			c.Payload.request.Secrets = map[string]string{}
		}), want: doCreateVolume, reason: "Planned"},
		"made and not saved": {
			claim: testClaim(nil), call: testCall(intent.Answered, func(c *call) { c.Payload.pv = ourVolume() }), want: doCreatePV,
			reason: "VolumeCreated",
		},
		"made and not saved, the claim was deleted": {
			call: testCall(intent.Answered, func(c *call) { c.Payload.pv = ourVolume() }), want: doCreatePV, reason: "VolumeCreated",
		},
		"made and of no use": {
			claim: testClaim(protected), call: testCall(intent.Undoing, nil), want: doDeleteRejected, reason: "Rejected",
		},
		"rejected, not protected yet": {
			claim: testClaim(nil), call: testCall(intent.Undoing, nil), want: doProtect, reason: "Undoing",
		},
		"rejected in this sync": {
			claim: testClaim(protected), call: testCall(intent.Undoing, nil), reads: reads{failure: &failure{err: errFull}},
			want:   doBackOff,
			reason: "CallFailed", err: errFull,
		},
		"indeterminate in this sync": {
			claim: testClaim(nil), call: testCall(intent.Unknown, nil), reads: reads{failure: &failure{err: errFull}}, want: doProtect,
			reason: "Unknown",
		},
		"indeterminate in this sync, and protected": {
			claim: testClaim(protected), call: testCall(intent.Unknown, nil), reads: reads{failure: &failure{err: errFull}},
			want: doBackOff, reason: "CallFailed", err: errFull,
		},
		"called by a sync that panicked": {
			call: testCall(intent.Sent, nil), want: doCreateVolume, reason: "Sent",
		},
		"called by a sync that panicked, not protected": {
			claim: testClaim(nil), call: testCall(intent.Sent, nil), want: doProtect,
			reason: "Sent",
		},
		"resumed from the record of an earlier process": {
			claim: testClaim(recorded), call: testCall(intent.Unknown, ofEarlier), want: doProtect, reason: "Unknown",
		},
		"resumed, and the claim was deleted without its finalizer": {
			call: testCall(intent.Unknown, ofEarlier), want: doAbandon, reason: "Unknown",
		},
		"resumed and repeated, and the claim was deleted": {
			call: testCall(intent.Unknown, func(c *call) { ofEarlier(c); c.Inherited = false }), want: doCreateVolume, reason: "Unknown",
		},
		"resumed, and the record cannot be written": {
			claim: testClaim(recorded), call: testCall(intent.Unknown, func(c *call) { ofEarlier(c); c.Refused = true }),
			want: doCreateVolume, reason: "Unknown",
		},
		"final error in this sync, the record is that of an earlier process": {
			claim: testClaim(recorded), class: testClass(nil), call: ended("process-1-2"),
			reads: reads{failure: &failure{err: errFull, node: "node-0"}}, want: doBackOff, reason: "CallFailed", err: errFull,
		},
		"final error in this sync": {
			claim: testClaim(nil), class: testClass(nil), call: ended(""),
			reads: reads{failure: &failure{err: errFull, node: "node-0"}}, want: doBackOff, reason: "CallFailed", err: errFull,
		},
		"final error in this sync, still protected": {
			claim: testClaim(protected), class: testClass(nil), call: ended(""),
			reads: reads{failure: &failure{err: errFull, node: "node-0"}}, want: doUnprotect, reason: "Settled",
		},
		"final error in this sync, the claim was deleted": {
			call: ended(""), reads: reads{failure: &failure{err: errFull}}, want: doForget, reason: "ClaimDeleted",
		},
		"exhausted on the selected node": {
			driver: func(d *driver) { d.topology = true }, claim: testClaim(onNodeZero), class: testClass(late),
			call: ended(""), reads: reads{failure: &failure{err: errFull, node: "node-0"}}, want: doReschedule,
			reason: "ResourceExhausted",
		},
		"exhausted on a node selected before": {
			driver: func(d *driver) { d.topology = true }, claim: testClaim(onNodeZero), class: testClass(late),
			call: ended(""), reads: reads{failure: &failure{err: errFull, node: "node-1"}}, want: doBackOff,
			reason: "CallFailed", err: errFull,
		},
		"exhausted and rescheduled": {
			driver: func(d *driver) { d.topology = true }, claim: testClaim(nil), class: testClass(late),
			call: ended(""), reads: reads{failure: &failure{err: errFull, node: "node-0"}}, want: doForget,
			reason: "WaitsForPod",
		},
		"exhausted on the node of the alpha annotation": {
			driver: func(d *driver) { d.topology = true }, claim: testClaim(alpha), class: testClass(nil),
			call: ended(""), reads: reads{failure: &failure{err: errFull, node: "node-9"}},
			want: doBackOff, reason: "CallFailed", err: errFull,
		},
		"exhausted, a driver without topology": {
			claim: testClaim(onNodeZero), class: testClass(late), call: ended(""),
			reads: reads{failure: &failure{err: errFull, node: "node-0"}}, want: doBackOff, reason: "CallFailed", err: errFull,
		},
		"secrets are read again before a retry": {
			claim: testClaim(protected), call: testCall(intent.Unknown, withSecret), want: doReadSecrets, reason: "SecretsNeeded",
		},
		"secrets were read again before a retry": {
			claim: testClaim(protected), call: testCall(intent.Unknown, withSecret), reads: reads{freshSecrets: true},
			want: doCreateVolume, reason: "Unknown",
		},
		"indeterminate, the class was recreated": {
			claim: testClaim(protected), class: testClass(recreated), call: testCall(intent.Unknown, nil), want: doCreateVolume,
			reason: "Unknown",
		},
		"indeterminate, the class was recreated, protection off": {
			driver: protectionOff, claim: testClaim(nil), class: testClass(recreated), call: testCall(intent.Unknown, nil),
			want: doCreateVolume, reason: "Unknown",
		},
		"saved and still protected": {
			claim: testClaim(protected), class: testClass(nil), call: savedCall(false), want: doUnprotect, reason: "Settled",
		},
		"bound to its volume and still protected": {
			claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "pvc-" + uid; protected(c) }), want: doUnprotect,
			reason: "Idle",
		},
		"bound to another volume, and the outcome of its own is unknown": {
			claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "x"; protected(c) }), class: testClass(nil),
			want: doBegin, reason: "RecordFound",
		},
		"recorded before the first call": {
			driver: func(d *driver) { d.ProvisioningProtection = ProtectionAlways }, claim: testClaim(recorded),
			call: testCall(intent.Planned, nil),
			want: doCreateVolume, reason: "Planned",
		},
		"not asked for yet, and an earlier process has recorded a request": {
			claim: testClaim(recorded), call: testCall(intent.Planned, ofAnother), want: doAbandon, reason: "RecordFound",
		},
		"not asked for yet, and the record of an ended request got no response": {
			claim: testClaim(nil), call: testCall(intent.Planned, afterLate), want: doProtect, reason: "Planned",
		},
		"not asked for yet, and the record of an ended request arrives late": {
			claim: testClaim(recorded), call: testCall(intent.Planned, afterLate), want: doProtect, reason: "Planned",
		},
		"indeterminate, and the record of an ended request arrives late": {
			claim: testClaim(recorded), call: testCall(intent.Unknown, afterLate), want: doProtect, reason: "Unknown",
		},
		"ended, and the record of the request before it arrives late": {
			claim: testClaim(recorded), class: testClass(nil), call: testCall(intent.Settled, afterLate), want: doUnprotect,
			reason: "Settled",
		},
		"rescheduled, and the record of an ended request arrives late": {
			claim: testClaim(recorded), class: testClass(nil), call: remembers(operation{lateRecords: []string{recordID}}),
			want: doUnprotect, reason: "Idle",
		},
		"recorded before the first call, although its record got no response at first": {
			claim: testClaim(recorded), call: testCall(intent.Planned, func(c *call) { c.Payload.lateRecords = []string{recordID} }),
			want: doCreateVolume, reason: "Planned",
		},
		"not asked for yet, recorded by an earlier process and deleted": {
			claim: testClaim(func(c *corev1.PersistentVolumeClaim) { recorded(c); deleting(c) }), call: testCall(intent.Planned, nil),
			want: doAbandon, reason: "Planned",
		},
		"not asked for yet, and the claim was deleted": {
			call: testCall(intent.Planned, nil), want: doAbandon, reason: "Planned",
		},
		"not asked for yet, and the claim is being deleted": {
			claim: testClaim(deleting), call: testCall(intent.Planned, nil), want: doAbandon, reason: "Planned",
		},
		"not asked for yet, and the claim was bound": {
			claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "x" }), call: testCall(intent.Planned, nil),
			want: doAbandon, reason: "Planned",
		},
		"asked for, and an earlier volume is being deleted": {
			claim: testClaim(protected), volume: releasedVolume(), call: testCall(intent.Unknown, nil), want: doWait,
			reason: "EarlierPVIsDeleted",
		},
		"asked for, and the claim was deleted": {
			call: testCall(intent.Unknown, nil), want: doCreateVolume, reason: "Unknown",
		},
		"indeterminate, and it cannot be recorded": {
			claim: testClaim(nil), call: testCall(intent.Unknown, func(c *call) { c.Refused = true }), want: doCreateVolume,
			reason: "Unknown",
		},
		"a secret is read before the claim is protected": {driver: func(d *driver) { d.ProvisioningProtection = ProtectionAlways },
			claim: testClaim(nil),
			call:  testCall(intent.Planned, func(c *call) { c.Payload.plan.Secrets.Provisioner = &corev1.SecretReference{Name: "s"} }),
			want:  doReadSecrets, reason: "SecretsNeeded"},
		"saved, and the PersistentVolume was deleted": {
			claim: testClaim(nil), class: testClass(nil), call: savedCall(true), want: doRefetchClaim,
			reason: "PVDeleted",
		},
		"saved by an earlier process, and the PersistentVolume was deleted": {
			claim: testClaim(nil), class: testClass(nil), call: remembers(operation{pvDeleted: true}),
			want: doRefetchClaim, reason: "PVDeleted",
		},
		"created, and the PersistentVolume of an earlier attempt was deleted": {
			claim: testClaim(nil), call: testCall(intent.Answered, func(c *call) { c.Payload.pvDeleted = true }), want: doCreatePV,
			reason: "VolumeCreated",
		},
		"created, and the PersistentVolume was deleted before the response to its creation": {
			claim: testClaim(nil), call: testCall(intent.Answered, func(c *call) {
				c.Payload.pvMayExist, c.Payload.pvDeleted = true,
					true
			}),
			want: doRefetchClaim, reason: "PVDeleted",
		},
		"created, and the PersistentVolume was not": {
			claim: testClaim(nil), call: testCall(intent.Answered, nil), reads: reads{failure: &failure{err: errFull}}, want: doProtect,
			reason: "Answered",
		},
		"created and recorded, and the PersistentVolume was not": {
			claim: testClaim(protected), call: testCall(intent.Answered, nil), reads: reads{failure: &failure{err: errFull}},
			want:   doBackOff,
			reason: "CallFailed",
		},
		"failed for good and still protected": {
			claim: testClaim(protected), class: testClass(nil), call: ended(""), want: doUnprotect, reason: "Settled",
		},
		"failed for good, and an earlier process has recorded another request": {
			claim: testClaim(func(c *corev1.PersistentVolumeClaim) { recorded(c); deleting(c) }), class: testClass(nil),
			call: ended("other"), want: doBegin, reason: "RecordFound",
		},
		"failed for good, and the record is still on the claim": {
			claim: testClaim(recorded), class: testClass(nil), call: ended(recordID),
			want: doUnprotect, reason: "Settled",
		},
		"recorded by the process of another driver": {
			driver: func(d *driver) { d.name = "other" }, claim: testClaim(recorded), volume: ourVolume(), want: doFail,
			reason: "RecordOfAnotherDriver",
		},
		"recorded illegibly, and the claim names another driver": {
			driver: func(d *driver) { d.name = "other" }, claim: testClaim(protected), want: doFail, reason: "RecordOfAnotherDriver",
			class: testClass(func(c *storagev1.StorageClass) { c.Provisioner = "other" }),
		},
		"not received since the term began": {
			claim: testClaim(nil), class: testClass(nil), stale: true, want: doReadClaim, reason: "Wanted",
		},
		"recorded by an earlier process, not received since the term began": {
			claim: testClaim(recorded), class: testClass(nil), stale: true, want: doReadClaim, reason: "RecordFound",
		},
		"recorded by an earlier process": {
			claim: testClaim(protected), class: testClass(nil), want: doBegin, reason: "RecordFound",
		},
		"recorded by an earlier process, being deleted": {
			claim: testClaim(func(c *corev1.PersistentVolumeClaim) { protected(c); deleting(c) }), class: testClass(nil), want: doBegin,
			reason: "RecordFound",
		},
		"recorded by the process of another driver, and its volume was saved": {
			driver: func(d *driver) { d.name = "other" }, claim: testClaim(recorded), call: savedCall(false), want: doNothing,
			reason: "PVCreated",
		},
		"recorded, and the class was deleted": {claim: testClaim(protected), want: doFail, reason: "ClassDeleted"},
		"recorded, and the class is another driver's now": {
			claim: testClaim(protected), class: testClass(func(c *storagev1.StorageClass) { c.Provisioner = "other" }), want: doFail,
			reason: "ClassDeleted",
		},
		"recorded, with a source": {
			driver: can, claim: from("VolumeSnapshot", protected), class: testClass(nil), want: doReadReferences, reason: "RecordFound",
		},
		"recorded, and the source was deleted": {
			driver: can, claim: from("VolumeSnapshot", protected), class: testClass(nil),
			refs: snapshotX(func(f *resolvedRefs) { f.err = errGone }), want: doFail, reason: "SourceDeleted", err: errGone,
		},
		"recorded, and the source cannot be read": {
			driver: can, claim: from("VolumeSnapshot", protected), class: testClass(nil),
			refs: snapshotX(func(f *resolvedRefs) { f.err = fmt.Errorf("x: %w", errTimeout) }), want: doFail, reason: "CannotRead",
			err: errTimeout,
		},
		"recorded, and the API server cannot be reached": {
			driver: can, claim: from("VolumeSnapshot", protected), class: testClass(nil),
			refs: snapshotX(func(f *resolvedRefs) { f.err = errUnreachable }), want: doFail, reason: "CannotRead", err: errUnreachable,
		},
		"recorded, and the source was deleted, being deleted": {
			driver: can, claim: from("VolumeSnapshot", protected, deleting), class: testClass(nil),
			refs: snapshotX(func(f *resolvedRefs) { f.err = errGone }), want: doFail, reason: "SourceDeleted", err: errGone,
		},
		"recorded, and the source is there": {
			driver: can, claim: from("VolumeSnapshot", protected), class: testClass(nil), refs: snapshotX(nil), want: doBegin,
			reason: "RecordFound",
		},
		"recorded, and the driver has lost a capability": {
			claim: from("VolumeSnapshot", protected), class: testClass(nil), refs: snapshotX(nil), want: doBegin,
			reason: "RecordFound",
		},
		"recorded, and it became another driver's": {
			claim: testClaim(func(c *corev1.PersistentVolumeClaim) { protected(c); c.Annotations = nil }), class: testClass(nil),
			want: doBegin, reason: "RecordFound",
		},
		"indeterminate, a populator took over": {
			claim: from("Hello", protected), call: testCall(intent.Unknown, nil), want: doCreateVolume, reason: "Unknown",
		},
		"failed for good, and the source was deleted": {
			driver: can, claim: from("VolumeSnapshot", protected), class: testClass(nil), call: ended(""),
			want: doUnprotect, reason: "Settled",
		},
		"recorded, and its volume was saved after all": {
			claim: testClaim(protected), class: testClass(nil), volume: ourVolume(), want: doUnprotect, reason: "Idle",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			s := claimState{claim: tt.claim, class: tt.class, volume: tt.volume, call: tt.call, reads: tt.reads, known: zones,
				now: now, stale: tt.stale}
			if tt.refs != nil {
				s.refs = tt.refs
			}
			got := testDriver(tt.driver).decide(s)
			if got.action != tt.want || got.reason != tt.reason {
				t.Errorf("got %v because %s (%v), want %v because %s", got.action, got.reason, got.err, tt.want, tt.reason)
			}
			if tt.err != nil && !errors.Is(got.err, tt.err) {
				t.Errorf("error %v, want %v", got.err, tt.err)
			}
			first := s.call.State == intent.Planned
			if got.action == doCreateVolume && !testDriver(tt.driver).mayBeFirst(s) && first {
				t.Error("the first call has no record, or is not wanted")
			}
			protected := testDriver(tt.driver)
			protected.ProvisioningProtection = ProtectionAlways
			if s.claim == nil && protected.mayBeFirst(s) {
				t.Error("the first call for a deleted claim")
			}
			switch got.action {
			case doBegin:
				if got.next.request.GetName() != "pvc-"+uid {
					t.Fatalf("operation %+v", got.next)
				}
				r := got.next.request
				if n := tt.refs; n != nil && (got.next.source != n.source || r.GetVolumeContentSource() != n.content ||
					!maps.Equal(r.GetMutableParameters(), n.mutable)) {
					t.Errorf("operation %+v lacks what was read, %+v", got.next, n)
				}
			case doIgnore, doBackOff, doRetry, doFail, doReschedule:
				if got.err == nil && tt.reads.failure == nil {
					t.Error("no error")
				}
			}
		})
	}
}

func TestDecideVolume(t *testing.T) {
	pv := func(change func(*corev1.PersistentVolume)) *corev1.PersistentVolume {
		v := &corev1.PersistentVolume{
			ObjectMeta: metav1.ObjectMeta{Name: "pv", UID: "1", Finalizers: []string{storagehelpers.PVDeletionProtectionFinalizer}},
			Spec: corev1.PersistentVolumeSpec{PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
				PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "drv.example.com",
					VolumeHandle: "vol-1"}}},
			Status: corev1.PersistentVolumeStatus{Phase: corev1.VolumeReleased},
		}
		if change != nil {
			change(v)
		}
		return v
	}
	phase := func(p corev1.PersistentVolumePhase) func(*corev1.PersistentVolume) {
		return func(v *corev1.PersistentVolume) { v.Status.Phase = p }
	}
	bare := func(v *corev1.PersistentVolume) { v.Finalizers = nil }
	retain := func(v *corev1.PersistentVolume) {
		v.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
	}
	gone := func(v *corev1.PersistentVolume) { v.DeletionTimestamp = &metav1.Time{Time: now} }
	all := func(changes ...func(*corev1.PersistentVolume)) func(*corev1.PersistentVolume) {
		return func(v *corev1.PersistentVolume) {
			for _, c := range changes {
				c(v)
			}
		}
	}
	attached := []*storagev1.VolumeAttachment{
		{ObjectMeta: metav1.ObjectMeta{Name: "va"}, Spec: storagev1.VolumeAttachmentSpec{NodeName: "n"}},
	}
	tests := map[string]struct {
		driver     func(*driver)
		volume     *corev1.PersistentVolume
		attached   []*storagev1.VolumeAttachment
		releasable []string
		removal    removal
		want       volumeAction
		reason     string
		remove     []string // finalizers
	}{
		"gone":                           {want: volumeNothing, reason: "Deleted"},
		"released":                       {volume: pv(nil), want: volumeDelete, reason: "Released"},
		"released without finalizer":     {volume: pv(bare), want: volumeDelete, reason: "Released"},
		"released and deleted by a user": {volume: pv(gone), want: volumeDelete, reason: "Released"},
		"deleted without our finalizer":  {volume: pv(all(gone, bare)), want: volumeNothing, reason: "NotOurs"},
		"retained":                       {volume: pv(all(retain, bare)), want: volumeNothing, reason: "Retained"},
		"retained with finalizer": {
			volume: pv(retain), want: volumeChange, reason: "Retained", remove: []string{storagehelpers.PVDeletionProtectionFinalizer},
		},
		"bound with finalizer":    {volume: pv(phase(corev1.VolumeBound)), want: volumeNothing, reason: "InUse"},
		"bound without finalizer": {volume: pv(all(phase(corev1.VolumeBound), bare)), want: volumeChange, reason: "Unprotected"},
		"bound, deleted, without finalizer": {
			volume: pv(all(phase(corev1.VolumeBound), bare, gone)), want: volumeNothing, reason: "NotOurs",
		},
		"bound and deleted": {volume: pv(all(phase(corev1.VolumeBound), gone)), want: volumeNothing, reason: "InUse"},
		"failed":            {volume: pv(phase(corev1.VolumeFailed)), want: volumeNothing, reason: "InUse"},
		"available":         {volume: pv(phase(corev1.VolumeAvailable)), want: volumeNothing, reason: "InUse"},
		"no policy counts as Delete": {
			volume: pv(func(v *corev1.PersistentVolume) { v.Spec.PersistentVolumeReclaimPolicy = "" }), want: volumeDelete,
			reason: "Released",
		},
		"attached": {volume: pv(nil), attached: attached, want: volumeWait, reason: "Attached"},
		"attached, a driver without publish": {
			driver: func(d *driver) { d.caps.PublishUnpublishVolume = false }, volume: pv(nil), attached: attached, want: volumeDelete,
			reason: "Released",
		},
		"source of another driver": {
			volume: pv(func(v *corev1.PersistentVolume) { v.Spec.CSI.Driver = "other" }), want: volumeFail, reason: "NotCSI",
		},
		"no CSI source": {
			volume: pv(func(v *corev1.PersistentVolume) { v.Spec.CSI = nil }), want: volumeFail, reason: "NotCSI",
		},
		"a driver that cannot delete": {
			driver: func(d *driver) { d.caps.CreateDeleteVolume = false }, volume: pv(nil), want: volumeFail, reason: "CannotDelete",
		},
		"deleted at the driver": {
			volume: pv(nil), removal: removal{volume: true}, want: volumeChange, reason: "VolumeDeleted",
			remove: []string{storagehelpers.PVDeletionProtectionFinalizer},
		},
		"deleted at the driver, with another role's finalizer": {
			volume: pv(nil), releasable: []string{"other/fin"}, removal: removal{volume: true}, want: volumeChange, reason: "VolumeDeleted",
			remove: []string{storagehelpers.PVDeletionProtectionFinalizer, "other/fin"},
		},
		"deleted at the driver, finalizer removed": {
			volume: pv(bare), removal: removal{volume: true}, want: volumeRemove, reason: "VolumeDeleted",
		},
		"deleted everywhere but for others' finalizers": {
			volume: pv(all(bare, gone)), removal: removal{volume: true}, want: volumeNothing, reason: "OtherFinalizers",
		},
		"object deleted, cache is late": {
			volume: pv(bare), removal: removal{volume: true, object: true}, want: volumeNothing, reason: "Deleted",
		},
		"object deleted, the finalizer was added late": {
			volume: pv(gone), removal: removal{volume: true, object: true}, want: volumeChange, reason: "VolumeDeleted",
			remove: []string{storagehelpers.PVDeletionProtectionFinalizer},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got := testDriver(tt.driver).decideVolume(pvState{
				pv: tt.volume, attachments: tt.attached, removable: tt.releasable, removal: tt.removal, now: now,
			})
			if got.action != tt.want || got.reason != tt.reason {
				t.Errorf("got %v because %s (%v), want %v because %s", got.action, got.reason, got.err, tt.want, tt.reason)
			}
			if len(tt.remove) > 0 && len(got.change.RemoveFinalizers) != len(tt.remove) {
				t.Errorf("removes %v, want %v", got.change.RemoveFinalizers, tt.remove)
			}
		})
	}
}

// A user deletes a PersistentVolume that is bound or has the finalizer, while the provisioner does not know yet that it was created:
// it stays until the claim is deleted, and the claim would wait for it with its finalizer. Found by the simulation.
func TestVolumeThatStaysIsNotWaitedFor(t *testing.T) {
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{UID: uid}}
	pv := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: ptr.To(metav1.Now())},
		Spec:       corev1.PersistentVolumeSpec{ClaimRef: &corev1.ObjectReference{UID: uid}},
	}
	for phase, want := range map[corev1.PersistentVolumePhase]bool{
		corev1.VolumePending: true, corev1.VolumeBound: false, corev1.VolumeReleased: true,
	} {
		pv.Status.Phase = phase
		if got := isReclaimed(pv, claim); got != want {
			t.Errorf("%s: reclaimed = %v", phase, got)
		}
	}
	pv.Status.Phase, pv.Finalizers = corev1.VolumePending, []string{storagehelpers.PVDeletionProtectionFinalizer}
	if isReclaimed(pv, claim) {
		t.Error("the finalizer stays until the claim is deleted")
	}
}

func TestResume(t *testing.T) {
	zones := world([]string{"zone"}, map[string]string{"zone": "a"}, map[string]string{"zone": "b"})
	d := testDriver(func(d *driver) { d.topology = true })
	claim := testClaim(func(c *corev1.PersistentVolumeClaim) {
		c.Annotations[storagehelpers.AnnSelectedNode], c.Annotations["login"] = "node-1", "a"
	})
	const secretName, secretNamespace = volumerules.ParameterPrefix + "provisioner-secret-name", volumerules.ParameterPrefix +
		"provisioner-secret-namespace"
	class := testClass(func(c *storagev1.StorageClass) {
		late(c)
		c.Parameters = map[string]string{secretName: "${pvc.annotations['login']}", secretNamespace: "ns"}
	})
	first := d.decide(claimState{claim: claim, class: class, known: zones, now: now})
	if first.action != doBegin {
		t.Fatal(first)
	}
	first.next.request.Secrets = map[string]string{"password": "hunter2"}
	change, err := first.next.protection(d.name, recordID, claim)
	if err != nil {
		t.Fatal(err)
	}
	left := claim.DeepCopy()
	change.Apply(left)
	if !isProtected(left) {
		t.Fatal("not protected")
	}
	for _, v := range left.Annotations {
		if len(v) > 500 || strings.Contains(v, "hunter2") {
			t.Errorf("annotation %q", v)
		}
	}
	// Everything that the request was made of has changed or gone, but for claim and class.
	delete(left.Annotations, storagehelpers.AnnSelectedNode)
	nothing := topology.NewAggregate()
	resumed, err := d.resume(left, class, nil, nothing)
	if err != nil {
		t.Fatal(err)
	}
	first.next.request.Secrets = nil
	if resumed.request.String() != first.next.request.String() || resumed.resumed != recordID || resumed.plan.SelectedNode != "node-1" {
		t.Errorf("got %v, want %v", resumed.request, first.next.request)
	}
	upgraded := testDriver(func(d *driver) { d.topology, d.caps.SingleNodeMultiWriter = true, true })
	if resumed, err = upgraded.resume(left, class, nil, nothing); err != nil || resumed.request.String() != first.next.request.String() {
		t.Errorf("after the driver has gained SINGLE_NODE_MULTI_WRITER: %v, %v", resumed.request, err)
	}
	other := testClass(func(c *storagev1.StorageClass) { late(c); c.Parameters = map[string]string{"pool": "stolen"} })
	if st := d.decide(claimState{
		claim: left, class: other, known: nothing, now: now,
	}); st.action != doFail || !strings.Contains(st.err.Error(), kube.ProvisioningFinalizer) {
		t.Errorf("with another class: %v, %v", st.action, st.err)
	}
	record := left.Annotations[kube.AnnProvisioningRequest]
	const secret = `,"secret":{"name":"a","namespace":"ns"}`
	for name, tt := range map[string]struct {
		record string
		class  *storagev1.StorageClass
		login  string // annotation of the claim
		err    string
	}{
		"another secret": {record, class, "b",
			`its secret was "ns/a", and StorageClass "fast" or an annotation of this PVC now names "ns/b"`},
		"no secret":    {record, testClass(late), "a", `was "ns/a"`},
		"first secret": {strings.Replace(record, secret, `,"secret":{}`, 1), class, "a", `was none`},
	} {
		left.Annotations[kube.AnnProvisioningRequest], left.Annotations["login"] = tt.record, tt.login
		_, err := d.resume(left, tt.class, nil, nothing)
		if errors.Is(err, errRequestChanged) != (tt.err != "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	packed := func(data []byte) string {
		var b bytes.Buffer
		w := zlib.NewWriter(&b)
		_, _ = w.Write(data)
		_ = w.Close()
		text, _ := json.Marshal(requestRecord{Driver: "drv.example.com", Topology: b.Bytes()})
		return string(text)
	}
	long := packed(make([]byte, maxTopology+1))
	many := packed(bytes.Repeat([]byte{0x0a, 0x00}, maxTopologies+1)) // each takes 56 bytes when it is decoded
	for broken, text := range map[string]string{long: "more than 4194304 bytes", many: "more than 100000 segments"} {
		left.Annotations[kube.AnnProvisioningRequest] = broken
		if _, err := d.resume(left, class, nil, nothing); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want %s", err, text)
		}
	}
	for _, broken := range []string{"{", `{"topology":3}`, `{"topology":"AAAA"}`, `{"request":"x"}`, ""} {
		left.Annotations[kube.AnnProvisioningRequest] = broken
		if _, err := d.resume(left, class, nil, nothing); err == nil {
			t.Errorf("annotation %q is accepted", broken)
		}
	}
	unprotection(left).Apply(left)
	if isProtected(left) || left.Annotations[kube.AnnProvisioningRequest] != "" {
		t.Errorf("left behind: %v %v", left.Finalizers, left.Annotations)
	}
}

// TestRecordOfManyNodes has a note that fits into an annotation, with a topology per node.
func TestRecordOfManyNodes(t *testing.T) {
	a := testCall(intent.Planned, nil).Payload
	a.request.AccessibilityRequirements = &csi.TopologyRequirement{}
	for i := range 5000 {
		topology := &csi.Topology{
			Segments: map[string]string{"topology.example.com/node": fmt.Sprintf("worker-%04d.region.example.com", i)},
		}
		a.request.AccessibilityRequirements.Requisite = append(a.request.AccessibilityRequirements.Requisite, topology)
	}
	r := a.request.AccessibilityRequirements
	r.Preferred = append(append(r.Preferred, r.Requisite[1234:]...), r.Requisite[:1234]...)
	change, err := a.protection("drv.example.com", recordID, testClaim(nil))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes", len(change.SetAnnotations[kube.AnnProvisioningRequest]))
	left := testClaim(nil)
	change.Apply(left)
	record, err := recordOf(left)
	if err != nil {
		t.Fatal(err)
	}
	back, err := record.unpack()
	if err != nil || !proto.Equal(back, r) {
		t.Errorf("it does not come back: %v", err)
	}
	for _, first := range []int{-1, 5000} {
		record.First = first
		if _, err = record.unpack(); err == nil {
			t.Errorf("index %d is accepted", first)
		}
	}
	if !kube.HasProvisioningRecord("drv.example.com", left) || kube.HasProvisioningRecord("other", left) {
		t.Error("HasProvisioningRecord does not distinguish the drivers")
	}
}

// FuzzResume reads whatever a user may write into the annotation.
func FuzzResume(f *testing.F) {
	f.Add(`{"driver":"drv.example.com","request":"","topology":"eJziYuRKAgQAAP//AmUAvA==","selectedNode":"n"}`)
	f.Fuzz(func(t *testing.T, annotation string) {
		d := testDriver(func(d *driver) { d.topology = true })
		claim := testClaim(func(c *corev1.PersistentVolumeClaim) {
			protected(c)
			c.Annotations[kube.AnnProvisioningRequest] = annotation
		})
		a, err := d.resume(claim, testClass(nil), nil, topology.NewAggregate())
		if err == nil && (a.request.GetName() != "pvc-"+uid || len(a.request.GetParameters()) > 0) {
			t.Errorf("%q gives %v", annotation, a.request)
		}
	})
}
