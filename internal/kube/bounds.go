// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
)

// Limits of what the caches retain of fields that users of a namespace can make large. The API server limits only the size of the
// whole object. Decisions that need more start from a live read, and a patch whose test fails reads the object.
const (
	// maxValue is the longest valid name of a node, class or Secret.
	maxValue = 253
	// maxTemplates is the size of the annotations of a claim that templates of Secrets may name.
	maxTemplates = 4096
	// MaxProvisioningRequest is the size of [AnnProvisioningRequest]. All annotations of an object have 256 KiB together.
	MaxProvisioningRequest = 128 << 10
	// maxEntries is the number of finalizers, and of owners.
	maxEntries = 32
)

// AnnSelectedNodeAlpha is the former annotation for the node that the scheduler has selected.
const AnnSelectedNodeAlpha = "volume.alpha.kubernetes.io/selected-node"

// retainedAnnotations returns the annotations of a claim of the driver that are retained: those that controllers read, more, and
// the first others that a template of a Secret may name.
func retainedAnnotations(pvc *corev1.PersistentVolumeClaim, more []string) map[string]string {
	kept := only(pvc.Annotations, append([]string{
		storagehelpers.AnnStorageProvisioner, storagehelpers.AnnBetaStorageProvisioner, storagehelpers.AnnMigratedTo,
		storagehelpers.AnnSelectedNode, AnnSelectedNodeAlpha, corev1.BetaStorageClassAnnotation, AnnStorageResizer,
	}, more...)...)
	if kept == nil {
		kept = map[string]string{}
	}
	if record, ok := pvc.Annotations[AnnProvisioningRequest]; ok && len(record) <= MaxProvisioningRequest {
		kept[AnnProvisioningRequest] = record
	}
	size := 0
	for _, k := range slices.Sorted(maps.Keys(pvc.Annotations)) {
		v := pvc.Annotations[k]
		if _, known := kept[k]; known || k == AnnProvisioningRequest || len(v) > maxValue || size+len(k)+len(v) > maxTemplates {
			continue
		}
		size += len(k) + len(v)
		kept[k] = v
	}
	return kept
}

// boundClaim limits the fields of a trimmed claim that are neither annotations nor validated names.
func boundClaim(pvc *corev1.PersistentVolumeClaim) *corev1.PersistentVolumeClaim {
	boundMeta(&pvc.ObjectMeta)
	if pvc.Spec.Selector != nil { // only its presence is read
		pvc.Spec.Selector = &metav1.LabelSelector{}
	}
	if ref := pvc.Spec.DataSource; ref != nil {
		boundNames(&ref.Kind, &ref.Name, ref.APIGroup)
	}
	if ref := pvc.Spec.DataSourceRef; ref != nil {
		boundNames(&ref.Kind, &ref.Name, ref.APIGroup)
		boundNames(ref.Namespace)
	}
	return pvc
}

// boundMeta limits the metadata of an object of a namespace. Nothing reads its labels.
func boundMeta(m *metav1.ObjectMeta) {
	m.Labels = nil
	if len(m.Finalizers) > maxEntries { // those of this program first
		own := slices.DeleteFunc(slices.Clone(m.Finalizers), func(f string) bool {
			return f != ProvisioningFinalizer && f != CloningProtection && f != SnapshotProtection
		})
		m.Finalizers = slices.Clone(slices.Concat(own, m.Finalizers)[:maxEntries])
	}
	if len(m.OwnerReferences) > maxEntries {
		m.OwnerReferences = slices.Clone(m.OwnerReferences[:maxEntries])
	}
}

// boundNames cuts names that are too long. They stay invalid: no object has such a name. It does not write to a name that it has cut
// before, which objects may share.
func boundNames(names ...*string) {
	for _, name := range names {
		if name != nil && len(*name) > maxValue+1 {
			*name = strings.Clone((*name)[:maxValue+1])
		}
	}
}
