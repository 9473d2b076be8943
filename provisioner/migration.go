package provisioner

import (
	"fmt"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	csitrans "k8s.io/csi-translation-lib"
)

// translator knows the volume plugins that were built into Kubernetes and the
// drivers that took their place (KEP-625). It has no state.
var translator = csitrans.New()

// inTreeName is the plugin whose volumes driver has taken over; "" for none.
func inTreeName(driver string) string {
	if !translator.IsMigratedCSIDriverByName(driver) {
		return ""
	}
	name, err := translator.GetInTreeNameFromCSIName(driver)
	if err != nil {
		return "" // it was found a line ago
	}
	return name
}

// is tells whether name is that of the driver, or of the plugin that it has replaced.
func (d driver) is(name string) bool { return name == d.name || name == d.inTree && name != "" }

// isMigrated tells whether the volumes of class have the source of a built-in plugin.
func (d driver) isMigrated(class *storagev1.StorageClass) bool {
	return d.inTree != "" && class.Provisioner == d.inTree
}

// translated is class with the parameters and topologies that the driver knows. Its
// provisioner stays as it is.
func (d driver) translated(class *storagev1.StorageClass) (*storagev1.StorageClass, error) {
	if !d.isMigrated(class) {
		return class, nil
	}
	translated, err := translator.TranslateInTreeStorageClassToCSI(logr.Discard(), d.inTree, class)
	if err != nil {
		return nil, fmt.Errorf("translating StorageClass %q of %s: %w", class.Name, d.inTree, err)
	}
	translated.Provisioner = class.Provisioner
	return translated, nil
}

// asCSI is pv with a CSI source, also where it has that of the built-in plugin.
func (d driver) asCSI(pv *corev1.PersistentVolume) (*corev1.PersistentVolume, error) {
	if pv.Spec.CSI != nil || d.inTree == "" || !translator.IsPVMigratable(pv) {
		return pv, nil
	}
	translated, err := translator.TranslateInTreePVToCSI(logr.Discard(), pv)
	if err != nil {
		return nil, fmt.Errorf("translating PersistentVolume %q of %s: %w", pv.Name, d.inTree, err)
	}
	return translated, nil
}

// asInTree is pv, which has a CSI source, with that of the built-in plugin.
func (d driver) asInTree(pv *corev1.PersistentVolume) (*corev1.PersistentVolume, error) {
	translated, err := translator.TranslateCSIPVToInTree(pv)
	if err != nil {
		return nil, fmt.Errorf("translating PersistentVolume %q to %s: %w", pv.Name, d.inTree, err)
	}
	return translated, nil
}

// sameHandle tells whether pv, whose source is that of the built-in plugin, is for the
// volume with an ID. Some plugins spell it in several ways.
func (d driver) sameHandle(pv *corev1.PersistentVolume, id string) bool {
	handle := func(pv *corev1.PersistentVolume) string {
		translated, err := d.asCSI(pv)
		if err != nil || translated.Spec.CSI == nil || translated.Spec.CSI.Driver != d.name {
			return ""
		}
		return translated.Spec.CSI.VolumeHandle
	}
	named := pv.DeepCopy()
	named.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: d.name, VolumeHandle: id}}
	named, err := d.asInTree(named)
	return err == nil && handle(pv) != "" && handle(pv) == handle(named)
}
