// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"slices"
	"strings"

	storagev1 "k8s.io/api/storage/v1"
)

// WaitsForFirstConsumer reports whether the binding mode of class is WaitForFirstConsumer.
func WaitsForFirstConsumer(class *storagev1.StorageClass) bool {
	return class.VolumeBindingMode != nil && *class.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer
}

// AttributesClasses is the resource of VolumeAttributesClasses, which a cluster may not serve.
var AttributesClasses = storagev1.SchemeGroupVersion.WithResource("volumeattributesclasses")

const (
	// AnnotationDefaultClass is "true" on the default StorageClass.
	AnnotationDefaultClass = "storageclass.kubernetes.io/is-default-class"
	// annBetaDefaultClass is the former name of storageclass.kubernetes.io/is-default-class.
	annBetaDefaultClass = "storageclass.beta.kubernetes.io/is-default-class"
)

// DefaultClass returns the name of the default among classes, nil if there is none: like Kubernetes the newest, or
// the first by name.
func DefaultClass(classes []*storagev1.StorageClass) *string {
	defaults := slices.DeleteFunc(slices.Clone(classes), func(c *storagev1.StorageClass) bool {
		return c.Annotations[AnnotationDefaultClass] != "true" && c.Annotations[annBetaDefaultClass] != "true"
	})
	if len(defaults) == 0 {
		return nil
	}
	return &slices.MinFunc(defaults, func(a, b *storagev1.StorageClass) int {
		return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
	}).Name
}
