// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"
)

// objectsOf returns a claim, a volume and an attachment, decoded as the watch decodes them: they share no memory with those of
// another call.
func objectsOf(t *testing.T, of string, size string) (
	pvc *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume, va *storagev1.VolumeAttachment,
) {
	t.Helper()
	sizes := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}
	modes := []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
	meta := metav1.ObjectMeta{Name: "n", Namespace: "ns", Finalizers: []string{"f", "g"}}
	inPVC := &corev1.PersistentVolumeClaim{ObjectMeta: *meta.DeepCopy(), Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: modes, Resources: corev1.VolumeResourceRequirements{Requests: sizes}, StorageClassName: ptr.To("c"), VolumeName: "v",
		VolumeMode: ptr.To(corev1.PersistentVolumeFilesystem),
	}, Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, AccessModes: modes, Capacity: sizes}}
	inPVC.Annotations = map[string]string{storagehelpers.AnnStorageProvisioner: of}
	annotated := *meta.DeepCopy()
	annotated.Annotations = map[string]string{storagehelpers.AnnDynamicallyProvisioned: of}
	inPV := &corev1.PersistentVolume{ObjectMeta: annotated, Spec: corev1.PersistentVolumeSpec{
		Capacity: sizes, AccessModes: modes, ClaimRef: &corev1.ObjectReference{Kind: "k", APIVersion: "v1", Namespace: "ns", Name: "n"},
		NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
			{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "zone", Operator: corev1.NodeSelectorOpIn, Values: []string{"a"}}}},
		}}},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
			Driver: of, VolumeHandle: "h", VolumeAttributes: map[string]string{"pool": "p"},
			ControllerPublishSecretRef: &corev1.SecretReference{Name: "s", Namespace: "ns"},
		}},
	}}
	inVA := &storagev1.VolumeAttachment{ObjectMeta: *meta.DeepCopy(), Spec: storagev1.VolumeAttachmentSpec{Attacher: of, NodeName: "node"},
		Status: storagev1.VolumeAttachmentStatus{AttachmentMetadata: map[string]string{"device": "sda"}}}
	pvc, pv, va = &corev1.PersistentVolumeClaim{}, &corev1.PersistentVolume{}, &storagev1.VolumeAttachment{}
	recode(t, inPVC, pvc)
	recode(t, inPV, pv)
	recode(t, inVA, va)
	return pvc, pv, va
}

func recode(t *testing.T, in interface{ Marshal() ([]byte, error) }, out interface{ Unmarshal([]byte) error }) {
	t.Helper()
	data, err := in.Marshal()
	if err == nil {
		err = out.Unmarshal(data)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestCachedObjectsShare: what many objects have in common is in memory once.
func TestCachedObjectsShare(t *testing.T) {
	parts := func() map[string]any {
		pvc, pv, va := objectsOf(t, driver, "3Gi")
		for _, obj := range []any{pvc, pv, va} {
			if _, err := Trim(driver)(obj); err != nil {
				t.Fatal(err)
			}
		}
		csi := pv.Spec.CSI
		return map[string]any{
			"annotations of a claim": pvc.Annotations, "finalizers": pvc.Finalizers, "class": pvc.Spec.StorageClassName,
			"request": pvc.Spec.Resources.Requests, "volume mode": pvc.Spec.VolumeMode, "size of a claim": pvc.Status.Capacity,
			"access modes": pvc.Status.AccessModes, "namespace": pvc.Namespace, "size of a volume": pv.Spec.Capacity,
			"node affinity": pv.Spec.NodeAffinity, "driver": csi.Driver, "volume attributes": csi.VolumeAttributes,
			"secret": csi.ControllerPublishSecretRef, "kind": pv.Spec.ClaimRef.Kind, "node": va.Spec.NodeName,
			"attachment metadata": va.Status.AttachmentMetadata,
		}
	}
	a, b := parts(), parts()
	for part := range a {
		if address(a[part]) != address(b[part]) {
			t.Errorf("each object has its own %s", part)
		}
	}
}

func address(of any) unsafe.Pointer {
	if s, ok := of.(string); ok {
		return unsafe.Pointer(unsafe.StringData(s))
	}
	return reflect.ValueOf(of).UnsafePointer()
}

// TestSharedValuesAreEqual: an object has the same values as without sharing, whatever the pools have seen before.
func TestSharedValuesAreEqual(t *testing.T) {
	for i := range 3 * poolSize {
		size := fmt.Sprintf("%dMi", i)
		pvc, pv, va := objectsOf(t, driver, size)
		pv.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Values[0] = size
		pv.Finalizers = append(pv.Finalizers, size)
		*pvc.Spec.StorageClassName, va.Status.AttachmentMetadata["device"], pvc.Annotations["a"] = size, size, size
		wantPVC, wantPV, wantVA := pvc.DeepCopy(), pv.DeepCopy(), va.DeepCopy()
		shareClaim(pvc)
		shareVolume(pv)
		shareAttachment(va)
		// Quantities contain how they were written.
		for _, values := range [][2]any{{wantPVC, pvc}, {wantPV, pv}, {wantVA, va}} {
			if !reflect.DeepEqual(values[0], values[1]) {
				t.Fatal(cmp.Diff(values[0], values[1]))
			}
		}
	}
}

// TestAppendCopiesSharedList: an object of which a caller has extended a list does not change the lists of others.
func TestAppendCopiesSharedList(t *testing.T) {
	first, second := append(make([]string, 0, 8), "shared-f"), append(make([]string, 0, 8), "shared-f")
	shareList(&stringLists, &first)
	shareList(&stringLists, &second)
	longer := append(first, "a")
	_ = append(second, "b")
	if &first[0] != &second[0] || longer[1] != "a" {
		t.Errorf("%q, shared: %t", longer, &first[0] == &second[0])
	}
}

// TestCompactObjectsAreComplete: the cache returns each object as it was received, whichever objects it has received before.
func TestCompactObjectsAreComplete(t *testing.T) {
	now := metav1.Now().Rfc3339Copy()
	changes := []func(*corev1.PersistentVolumeClaim, *corev1.PersistentVolume, *storagev1.VolumeAttachment){
		func(pvc *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume, va *storagev1.VolumeAttachment) {
			pvc.Name, pv.Name, va.Name, pvc.UID, pv.UID, va.UID = "m", "m", "m", "u", "u", "u"
			pvc.ResourceVersion, pv.ResourceVersion, va.ResourceVersion = "7", "7", "7"
		},
		func(pvc *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume, va *storagev1.VolumeAttachment) {
			pvc.DeletionTimestamp, pv.DeletionTimestamp, va.DeletionTimestamp = &now, &now, &now
		},
		func(pvc *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume, va *storagev1.VolumeAttachment) {
			pvc.Annotations, pv.Annotations, va.Annotations = nil, map[string]string{"a": "b"}, map[string]string{"a": "c"}
			pvc.CreationTimestamp, pv.CreationTimestamp, va.CreationTimestamp = now, now, now
		},
		func(pvc *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume, va *storagev1.VolumeAttachment) {
			pvc.Finalizers, pv.Finalizers, va.Finalizers, pvc.Namespace = nil, nil, []string{"h"}, "other"
		},
		func(pvc *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume, va *storagev1.VolumeAttachment) {
			pvc.Status.Phase, pv.Status.Phase, va.Status.Attached = corev1.ClaimLost, corev1.VolumeReleased, true
		},
		func(pvc *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume, va *storagev1.VolumeAttachment) {
			pvc.Spec.VolumeName, pvc.Spec.Resources.Requests, pvc.Status.Capacity = "", nil, nil
			pv.Spec.Capacity, pv.Spec.NodeAffinity = nil, nil
			va.Spec.NodeName, va.Spec.Source.PersistentVolumeName, va.Status.AttachmentMetadata = "other", ptr.To("pv"), nil
		},
		func(_ *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume, va *storagev1.VolumeAttachment) {
			pv.Spec.ClaimRef.Name, pv.Spec.ClaimRef.UID, pv.Spec.ClaimRef.ResourceVersion = "other", "u", "8"
			va.Status.DetachError = &storagev1.VolumeError{Message: "m"}
		},
		func(pvc *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume, va *storagev1.VolumeAttachment) {
			pvc.Spec.DataSource = &corev1.TypedLocalObjectReference{Name: "s"}
			pv.Spec.CSI, pv.Spec.GCEPersistentDisk = nil, &corev1.GCEPersistentDiskVolumeSource{PDName: "d"}
			va.Spec.Attacher = "other"
		},
		func(_ *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume, _ *storagev1.VolumeAttachment) {
			pv.Spec.ClaimRef = nil
			if csi := pv.Spec.CSI; csi != nil {
				csi.VolumeHandle, csi.VolumeAttributes, csi.ReadOnly = "other", nil, true
			}
		},
	}
	cached := compacting(func(obj any) (any, error) { return obj, nil })
	for range 2 { // in the second round, most have a template
		for set := range 1 << len(changes) {
			pvc, pv, va := objectsOf(t, driver, "3Gi")
			for i, change := range changes {
				if set>>i&1 == 1 {
					change(pvc, pv, va)
				}
			}
			for _, obj := range []metav1.Object{pvc, pv, va} {
				want := obj.(runtime.Object).DeepCopyObject()
				in, err := cached(obj)
				if err != nil {
					t.Fatal(err)
				}
				got, ok := typedObject[metav1.Object](in)
				if !ok || !reflect.DeepEqual(want, got) {
					t.Fatalf("changes %b: %s", set, cmp.Diff(want, got))
				}
				m, err := meta.Accessor(in)
				if err != nil || m.GetUID() != obj.GetUID() || m.GetResourceVersion() != obj.GetResourceVersion() || Key(m) != Key(obj) {
					t.Fatalf("changes %b: %s %s %s, %v", set, Key(m), m.GetUID(), m.GetResourceVersion(), err)
				}
			}
		}
	}
}

// TestQuietObjectsAreCompact: of many objects that differ in names, sizes, annotations and attributes, the cache has all but the first
// as compact ones.
func TestQuietObjectsAreCompact(t *testing.T) {
	cached := compacting(Trim(driver))
	for _, of := range []string{driver, "other"} {
		for i := range 3 {
			pvc, pv, va := objectsOf(t, of, fmt.Sprintf("%dGi", i))
			name := fmt.Sprintf("quiet-%d", i)
			pvc.Name, pv.Name, va.Name = name, name, name
			pvc.Annotations["a"], pv.Spec.CSI.VolumeAttributes["image"], va.Spec.NodeName = name, name, name
			pv.Spec.CSI.VolumeHandle, pvc.Spec.VolumeName, pv.Spec.ClaimRef.Name = name, name, name
			for _, obj := range []any{pvc, pv, va} {
				in, err := cached(obj)
				if _, ok := in.(compact); err != nil || !ok && i > 0 {
					t.Errorf("%T %d of driver %q is not compact: %v", obj, i, of, err)
				}
				again, err := cached(in)
				if _, ok := again.(compact); err != nil || !ok && i > 0 {
					t.Errorf("%T %d of driver %q is not compact after another transform: %v", obj, i, of, err)
				}
			}
		}
	}
}

// TestTransformAgain: client-go may transform an object again, whose values other objects share. A write to a map that another goroutine
// reads ends the process.
func TestTransformAgain(t *testing.T) {
	_, pv, _ := objectsOf(t, driver, "3Gi")
	cached := Trim(driver)
	if _, err := cached(pv); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	_, other, _ := objectsOf(t, driver, "3Gi")
	if _, err := cached(other); err != nil {
		t.Fatal(err)
	}
	wg.Go(func() {
		for ctx.Err() == nil {
			_ = other.Annotations["key"]
		}
	})
	for range 100_000 {
		if _, err := cached(pv); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCutAgain: a name that was cut is in memory as it was, because objects may share it.
func TestCutAgain(t *testing.T) {
	name := strings.Repeat("n", 2*maxValue)
	boundNames(&name)
	cut := name
	boundNames(&name)
	if unsafe.StringData(name) != unsafe.StringData(cut) || len(cut) != maxValue+1 {
		t.Errorf("%d and %d characters, again in other memory", len(cut), len(name))
	}
}

// TestLargeValuesAreNotPooled: users of a namespace can write large annotations. The memory of the pools is limited.
func TestLargeValuesAreNotPooled(t *testing.T) {
	large := func() map[string]string { return map[string]string{"a": strings.Repeat("l", maxPooled)} }
	a, b := large(), large()
	shareStrings(&a)
	shareStrings(&b)
	if address(a) == address(b) {
		t.Error("large maps are pooled")
	}
	first, second := make([]string, maxPooledEntries+1), make([]string, maxPooledEntries+1)
	shareList(&stringLists, &first)
	shareList(&stringLists, &second)
	if &first[0] == &second[0] {
		t.Error("long lists are pooled")
	}
	cached := compacting(Trim(driver))
	for range 2 {
		pvc, _, _ := objectsOf(t, driver, "3Gi")
		pvc.Status.Conditions = []corev1.PersistentVolumeClaimCondition{{Message: strings.Repeat("l", maxPooled)}}
		in, err := cached(pvc)
		if _, ok := in.(compact); ok || err != nil {
			t.Errorf("a large claim is a template, %v", err)
		}
	}
}

// TestSharedSourceIsNotWritten: handlers read the source that the stubs of a driver share, while the next one is cached. The race
// detector fails this test.
func TestSharedSourceIsNotWritten(t *testing.T) {
	stubOf := func() *corev1.PersistentVolume {
		_, pv, _ := objectsOf(t, "other", "3Gi")
		stub, err := Trim(driver)(pv)
		if err != nil {
			t.Fatal(err)
		}
		return stub.(*corev1.PersistentVolume)
	}
	first := stubOf()
	var reading sync.WaitGroup
	reading.Go(func() {
		if name := first.Spec.CSI.Driver; name != "other" {
			t.Errorf("driver %q", name)
		}
	})
	second := stubOf()
	reading.Wait()
	if first.Spec.CSI != second.Spec.CSI {
		t.Error("the stubs have sources of their own")
	}
}
