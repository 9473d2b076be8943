package kube

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Kinds that a claim may need.
const (
	KindSnapshot              = "VolumeSnapshot"
	KindClaim                 = "PersistentVolumeClaim"
	KindVolumeAttributesClass = "VolumeAttributesClass" // without a namespace
	KindReferenceGrant        = "ReferenceGrant"        // by the namespace of the source, without a name
)

// DependencyKey is the value of the index [ByDependency] for an object.
func DependencyKey(kind, namespace, name string) string {
	return strings.Join([]string{kind, namespace, name}, "/")
}

// dependencies is everything that pvc names and that has to be there before its volume
// can be: the source of its data, the permission to use that, and its
// VolumeAttributesClass.
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
