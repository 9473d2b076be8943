// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Kinds on which the provisioning of a claim may depend, for [DependencyKey].
const (
	KindSnapshot              = "VolumeSnapshot"
	KindClaim                 = "PersistentVolumeClaim"
	KindVolumeAttributesClass = "VolumeAttributesClass" // cluster-scoped
	KindReferenceGrant        = "ReferenceGrant"        // any name in the namespace of the source
)

// DependencyKey returns the value of the index [ByDependency] for an object.
func DependencyKey(kind, namespace, name string) string {
	return strings.Join([]string{kind, namespace, name}, "/")
}

// dependencies returns the keys of the objects that must exist before the volume of pvc can be
// created: its data source, the ReferenceGrant for it, and its VolumeAttributesClass.
func dependencies(pvc *corev1.PersistentVolumeClaim) []string {
	var values []string
	if s := pvc.Spec.DataSource; s != nil {
		values = append(values, DependencyKey(s.Kind, pvc.Namespace, s.Name))
	} else if s := pvc.Spec.DataSourceRef; s != nil {
		namespace := pvc.Namespace
		if s.Namespace != nil && *s.Namespace != "" && *s.Namespace != namespace {
			namespace = *s.Namespace
			values = append(values, DependencyKey(KindReferenceGrant, namespace, ""))
		}
		values = append(values, DependencyKey(s.Kind, namespace, s.Name))
	}
	if name := pvc.Spec.VolumeAttributesClassName; name != nil && *name != "" {
		values = append(values, DependencyKey(KindVolumeAttributesClass, "", *name))
	}
	return values
}
