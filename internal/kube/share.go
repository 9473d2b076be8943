// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"hash/maphash"
	"maps"
	"reflect"
	"slices"
	"sync"
	"unique"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Decoded objects share nothing: each has its own copy of the name of its driver, and a map of one size takes 700 bytes. So the
// cached objects share the values that most of them have in common. This is safe because cached objects are not modified.

// shared returns s from memory that all equal strings share. It is for values of which there are few, such as names of drivers,
// classes, nodes and namespaces.
func shared[T ~string](s T) T { return unique.Make(s).Value() }

const (
	// poolSize is the number of values of a [pool].
	poolSize = 4096
	// maxPooled is the size in bytes, and maxPooledEntries the number of entries, of the largest value in a pool. A pool keeps values of
	// objects that were deleted.
	maxPooled, maxPooledEntries = 1024, 16
)

// pool has values that objects may share. Its size is fixed: a value replaces another one with the same hash, modulo the size.
type pool[V any] struct {
	mu     sync.Mutex
	values [poolSize]V
}

var (
	stringMaps  pool[map[string]string]
	resources   pool[corev1.ResourceList]
	stringLists pool[[]string]
	accessModes pool[[]corev1.PersistentVolumeAccessMode]
	volumeModes pool[*corev1.PersistentVolumeMode]
	names       pool[*string]
	secretRefs  pool[*corev1.SecretReference]
	affinities  pool[*corev1.VolumeNodeAffinity]
)

var hashSeed = maphash.MakeSeed()

// share replaces v by an equal value of p, or adds v to p.
func (p *pool[V]) share(v *V, hash uint64, equal func(a, b V) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pooled := &p.values[hash%poolSize]
	if equal(*pooled, *v) {
		*v = *pooled
	} else {
		*pooled = *v
	}
}

func shareMap[M ~map[K]V, K, V comparable](p *pool[M], m *M) {
	type entry struct {
		key   K
		value V
	}
	hash := uint64(0)
	for k, v := range *m { // the order is random
		hash += maphash.Comparable(hashSeed, entry{k, v})
	}
	if len(*m) > 0 && len(*m) <= maxPooledEntries {
		p.share(m, hash, maps.Equal[M, M])
	}
}

func shareStrings(m *map[string]string) {
	size := 0
	for k, v := range *m {
		size += len(k) + len(v)
	}
	if size <= maxPooled {
		shareMap(&stringMaps, m)
	}
}

// shareList shares s without capacity, so that an append copies it.
func shareList[E comparable](p *pool[[]E], s *[]E) {
	var hash maphash.Hash
	hash.SetSeed(hashSeed)
	for _, e := range *s {
		maphash.WriteComparable(&hash, e)
	}
	if len(*s) > 0 && len(*s) <= maxPooledEntries {
		*s = slices.Clip(*s)
		p.share(s, hash.Sum64(), slices.Equal[[]E])
	}
}

func sharePointer[T comparable](p *pool[*T], v **T) {
	if *v != nil {
		p.share(v, maphash.Comparable(hashSeed, **v), func(a, b *T) bool { return a != nil && *a == *b })
	}
}

func shareAffinity(affinity **corev1.VolumeNodeAffinity) {
	if *affinity == nil {
		return
	}
	encoded, err := (*affinity).Marshal()
	if err == nil && len(encoded) <= maxPooled {
		affinities.share(affinity, maphash.Bytes(hashSeed, encoded), func(a, b *corev1.VolumeNodeAffinity) bool {
			return reflect.DeepEqual(a, b)
		})
	}
}

func shareMeta(m *metav1.ObjectMeta) {
	m.Namespace = shared(m.Namespace)
	shareStrings(&m.Annotations)
	shareStrings(&m.Labels)
	shareList(&stringLists, &m.Finalizers)
}

func shareVolume(pv *corev1.PersistentVolume) *corev1.PersistentVolume {
	shareMeta(&pv.ObjectMeta)
	spec := &pv.Spec
	shareMap(&resources, &spec.Capacity)
	shareList(&accessModes, &spec.AccessModes)
	shareList(&stringLists, &spec.MountOptions)
	spec.StorageClassName = shared(spec.StorageClassName)
	spec.PersistentVolumeReclaimPolicy = shared(spec.PersistentVolumeReclaimPolicy)
	sharePointer(&volumeModes, &spec.VolumeMode)
	sharePointer(&names, &spec.VolumeAttributesClassName)
	shareAffinity(&spec.NodeAffinity)
	if ref := spec.ClaimRef; ref != nil {
		ref.Kind, ref.APIVersion, ref.Namespace = shared(ref.Kind), shared(ref.APIVersion), shared(ref.Namespace)
	}
	pv.Status.Phase = shared(pv.Status.Phase)
	return pv
}

// shareSource must not be called for the source of a stub, which is shared already: see [sharedSource].
func shareSource(csi *corev1.CSIPersistentVolumeSource) {
	csi.Driver, csi.FSType = shared(csi.Driver), shared(csi.FSType)
	shareStrings(&csi.VolumeAttributes)
	for _, ref := range []**corev1.SecretReference{
		&csi.ControllerPublishSecretRef, &csi.NodeStageSecretRef, &csi.NodePublishSecretRef, &csi.ControllerExpandSecretRef,
		&csi.NodeExpandSecretRef,
	} {
		sharePointer(&secretRefs, ref)
	}
}

func shareClaim(pvc *corev1.PersistentVolumeClaim) *corev1.PersistentVolumeClaim {
	shareMeta(&pvc.ObjectMeta)
	spec, status := &pvc.Spec, &pvc.Status
	shareList(&accessModes, &spec.AccessModes)
	shareMap(&resources, &spec.Resources.Requests)
	sharePointer(&names, &spec.StorageClassName)
	sharePointer(&volumeModes, &spec.VolumeMode)
	sharePointer(&names, &spec.VolumeAttributesClassName)
	status.Phase = shared(status.Phase)
	shareList(&accessModes, &status.AccessModes)
	shareMap(&resources, &status.Capacity)
	shareMap(&resources, &status.AllocatedResources)
	sharePointer(&names, &status.CurrentVolumeAttributesClassName)
	return pvc
}

func shareAttachment(va *storagev1.VolumeAttachment) *storagev1.VolumeAttachment {
	shareMeta(&va.ObjectMeta)
	va.Spec.Attacher, va.Spec.NodeName = shared(va.Spec.Attacher), shared(va.Spec.NodeName)
	shareStrings(&va.Status.AttachmentMetadata)
	return va
}
