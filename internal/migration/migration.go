// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package migration translates between the in-tree volume plugins of Kubernetes and the CSI
// drivers that replaced them (CSI migration, KEP-625). A StorageClass or a PersistentVolume
// keeps the name and the source of its plugin, and the driver does the work.
//
// The API objects that the functions receive are not changed: they may come from a cache.
package migration

import (
	"fmt"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	csitrans "k8s.io/csi-translation-lib"
	"k8s.io/utils/ptr"
)

// translator has no state.
var translator = csitrans.New()

// PluginOf returns the in-tree volume plugin that driver replaced, or "" if there is none.
func PluginOf(driver string) string {
	name, err := translator.GetInTreeNameFromCSIName(driver)
	if err != nil {
		return ""
	}
	return name
}

// DriverOf returns the driver that replaced an in-tree volume plugin, or "" if there is none.
func DriverOf(plugin string) string {
	name, err := translator.GetCSINameFromInTreeName(plugin)
	if err != nil {
		return ""
	}
	return name
}

// DriverOfVolume returns the driver that is responsible for pv, or "" if pv is no CSI volume. It
// is the driver that replaced the in-tree plugin also if pv has no annotation that says so, as
// a PersistentVolume that was created by hand.
func DriverOfVolume(pv *corev1.PersistentVolume) string {
	if pv.Spec.CSI != nil {
		return pv.Spec.CSI.Driver
	}
	if name := pv.Annotations[storagehelpers.AnnMigratedTo]; name != "" {
		return name
	}
	return DriverOf(PluginOfVolume(pv))
}

// PluginOfVolume returns the in-tree volume plugin of the source of pv, or "" if no driver replaced one.
func PluginOfVolume(pv *corev1.PersistentVolume) string {
	plugin, err := translator.GetInTreePluginNameFromSpec(pv, nil)
	if err != nil {
		return ""
	}
	return plugin
}

// IsInTree reports whether pv has the source of an in-tree plugin that a driver replaced.
func IsInTree(pv *corev1.PersistentVolume) bool {
	return pv.Spec.CSI == nil && translator.IsPVMigratable(pv)
}

// ToCSI returns pv with a CSI source. It returns pv itself if that has a CSI source already, or
// the source of a plugin that no driver replaced. Otherwise it reports migrated, also with an
// error.
func ToCSI(pv *corev1.PersistentVolume) (translated *corev1.PersistentVolume, migrated bool, err error) {
	if !IsInTree(pv) {
		return pv, false, nil
	}
	if translated, err = translator.TranslateInTreePVToCSI(logr.Discard(), pv); err != nil {
		return nil, true, fmt.Errorf("failed to translate in tree pv to CSI: PersistentVolume %q: %w", pv.Name, err)
	}
	return translated, true, nil
}

// ToInTree returns pv, which has a CSI source, with the source of the in-tree plugin.
func ToInTree(pv *corev1.PersistentVolume) (*corev1.PersistentVolume, error) {
	translated, err := translator.TranslateCSIPVToInTree(pv)
	if err != nil {
		return nil, fmt.Errorf("translating PersistentVolume %q to its in-tree plugin: %w", pv.Name, err)
	}
	return translated, nil
}

// ClassToCSI returns class, whose provisioner is an in-tree plugin, with the parameters and
// topologies of the driver. The provisioner of the class stays as it is.
func ClassToCSI(class *storagev1.StorageClass) (*storagev1.StorageClass, error) {
	translated, err := translator.TranslateInTreeStorageClassToCSI(logr.Discard(), class.Provisioner, class)
	if err != nil {
		return nil, fmt.Errorf("translating StorageClass %q of %s: %w", class.Name, class.Provisioner, err)
	}
	translated.Provisioner = class.Provisioner
	return translated, nil
}

// HandleOf returns the volume handle of pv, or false if pv is not a volume of driver. The handle
// of a migrated volume was translated: it may lack parts that only the driver knows, such as
// the project. See [RepairHandle].
func HandleOf(driver string, pv *corev1.PersistentVolume) (handle string, migrated, ok bool) {
	translated, migrated, err := ToCSI(pv)
	if err != nil || translated.Spec.CSI == nil || translated.Spec.CSI.Driver != driver || translated.Spec.CSI.VolumeHandle == "" {
		return "", false, false
	}
	return translated.Spec.CSI.VolumeHandle, migrated, true
}

// Handles returns the volume handles by which PersistentVolumes for the volume of pv are found: those that are for the same volume have
// one in common. It returns none if pv is not a volume of driver.
func Handles(driver string, pv *corev1.PersistentVolume) []string {
	handle, migrated, ok := HandleOf(driver, pv)
	switch {
	case !ok:
		return nil
	case !migrated && PluginOf(driver) == "":
		return []string{handle}
	}
	return []string{handle, commonHandle(driver, pv)}
}

// SameVolume reports whether a and b are for the same volume of driver. Equal handles are not required if one of them has the
// source of an in-tree plugin: some plugins have several notations for one, and vSphere takes the path from the attributes.
func SameVolume(driver string, a, b *corev1.PersistentVolume) bool {
	handleOfA, migratedA, isVolumeA := HandleOf(driver, a)
	handleOfB, migratedB, isVolumeB := HandleOf(driver, b)
	switch {
	case !isVolumeA || !isVolumeB:
		return false
	case handleOfA == handleOfB:
		return true
	case !migratedA && !migratedB:
		return false
	}
	common := commonHandle(driver, a)
	return common != "" && common == commonHandle(driver, b)
}

// commonHandle returns the handle that the in-tree source of the volume of pv is translated to, without what depends on the
// PersistentVolume instead of the volume; "" if pv cannot be translated.
func commonHandle(driver string, pv *corev1.PersistentVolume) string {
	inTree := pv
	if pv.Spec.CSI != nil {
		translated, err := ToInTree(pv)
		if err != nil {
			return ""
		}
		inTree = translated
	}
	const anyNamespace = "any"
	source := *inTree.Spec.PersistentVolumeSource.DeepCopy()
	if source.AzureFile != nil {
		source.AzureFile.SecretNamespace = ptr.To(anyNamespace)
	}
	handle, _, _ := HandleOf(driver, &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Labels: inTree.Labels},
		Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeSource: source, ClaimRef: &corev1.ObjectReference{Namespace: anyNamespace},
		},
	})
	return handle
}

// RepairHandle completes the translated handle of a volume with the parts that only the ID of a
// node has. Drivers without an in-tree plugin are an error.
func RepairHandle(driver, handle, nodeID string) (string, error) {
	repaired, err := translator.RepairVolumeHandle(driver, handle, nodeID)
	if err != nil {
		return "", fmt.Errorf("completing volume handle %q for node ID %q: %w", handle, nodeID, err)
	}
	return repaired, nil
}
