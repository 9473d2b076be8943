// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"
)

// claimOfDriver returns a claim of the driver; change makes it large.
func claimOfDriver(change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	pvc := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: "data", UID: "u", ResourceVersion: "1", Finalizers: []string{"kubernetes.io/pvc-protection"},
		Annotations: map[string]string{storagehelpers.AnnStorageProvisioner: driver, "team": "storage"},
	}, Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: ptr.To("fast")}}
	change(pvc)
	return pvc
}

// heap returns the memory that count objects take in a cache.
func heap(t *testing.T, count int, object func() any) uint64 {
	t.Helper()
	used := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	cache, before := make([]any, count), used()
	for i := range cache {
		var err error
		if cache[i], err = Trim(driver)(object()); err != nil {
			t.Fatal(err)
		}
	}
	after := used()
	runtime.KeepAlive(cache)
	return max(after, before) - before
}

// TestLargeObjectsOfUsers: what a user of a namespace can make large does not stay in memory. The API server accepts 256 KiB of
// annotations, and objects of 1.5 MiB.
func TestLargeObjectsOfUsers(t *testing.T) {
	const count, size = 400, 250 << 10
	idle := heap(t, count, func() any { return claimOfDriver(func(*corev1.PersistentVolumeClaim) {}) })
	// 400 claims may take as much as 2,000 small ones; the process takes 42 MiB without any.
	limit := idle + count*4*maxTemplates
	long := func() string { return strings.Repeat("x", size) }
	many := func(n int) (list []string) {
		for i := range n {
			list = append(list, fmt.Sprintf("example.com/%0200d", i))
		}
		return list
	}
	for name, change := range map[string]func(*corev1.PersistentVolumeClaim){
		"an annotation":     func(c *corev1.PersistentVolumeClaim) { c.Annotations["a"] = long() },
		"a read annotation": func(c *corev1.PersistentVolumeClaim) { c.Annotations[storagehelpers.AnnSelectedNode] = long() },
		"a record":          func(c *corev1.PersistentVolumeClaim) { c.Annotations[AnnProvisioningRequest] = long() },
		"labels":            func(c *corev1.PersistentVolumeClaim) { c.Labels = map[string]string{"a": long()} },
		"the selector": func(c *corev1.PersistentVolumeClaim) {
			c.Spec.Selector = metav1.SetAsLabelSelector(map[string]string{"a": long()})
		},
		"finalizers": func(c *corev1.PersistentVolumeClaim) { c.Finalizers = many(1000) },
		"the source": func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSource = &corev1.TypedLocalObjectReference{Name: long()}
		},
		"a claim of another": func(c *corev1.PersistentVolumeClaim) {
			c.Annotations = nil
			c.Spec.DataSource = &corev1.TypedLocalObjectReference{Name: long()}
		},
		"the annotations": func(c *corev1.PersistentVolumeClaim) {
			for _, key := range many(1000) {
				c.Annotations[key] = "v"
			}
		},
		"owners": func(c *corev1.PersistentVolumeClaim) {
			for _, name := range many(1000) {
				c.OwnerReferences = append(c.OwnerReferences, metav1.OwnerReference{Name: name})
			}
		},
	} {
		if got := heap(t, count, func() any { return claimOfDriver(change) }); got > limit {
			t.Errorf("%s: %d KiB for %d claims, at most %d", name, got>>10, count, limit>>10)
		}
	}
	snapshot := func() any {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Labels: map[string]string{"a": long()}}}
	}
	if got := heap(t, count, snapshot); got > limit {
		t.Errorf("%d KiB for %d snapshots", got>>10, count)
	}
}

// TestTemplateAnnotations: a template of a Secret may name every annotation of an ordinary claim, and the annotations that
// controllers read are retained whatever else there is.
func TestTemplateAnnotations(t *testing.T) {
	obj, err := Trim(driver)(claimOfDriver(func(c *corev1.PersistentVolumeClaim) {
		for i := range 1000 {
			c.Annotations[fmt.Sprintf("a%03d", i)] = strings.Repeat("x", 100)
		}
		c.Annotations[storagehelpers.AnnSelectedNode], c.Annotations[AnnProvisioningRequest] = "n1", strings.Repeat("r", 10_000)
		c.Finalizers = append(make([]string, 100), ProvisioningFinalizer)
	}))
	if err != nil {
		t.Fatal(err)
	}
	got := obj.(*corev1.PersistentVolumeClaim)
	if got.Annotations[storagehelpers.AnnSelectedNode] != "n1" || len(got.Annotations[AnnProvisioningRequest]) != 10_000 ||
		got.Annotations["a000"] == "" || got.Annotations["a999"] != "" || got.Finalizers[0] != ProvisioningFinalizer {
		t.Errorf("%d annotations, finalizers %q", len(got.Annotations), got.Finalizers)
	}
	obj, _ = Trim(driver)(claimOfDriver(func(*corev1.PersistentVolumeClaim) {}))
	if got := obj.(*corev1.PersistentVolumeClaim); got.Annotations["team"] != "storage" {
		t.Errorf("annotations %v", got.Annotations)
	}
}
