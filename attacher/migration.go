package attacher

import (
	"fmt"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	csitrans "k8s.io/csi-translation-lib"
)

// translator knows the volume plugins that were built into Kubernetes and the
// drivers that took their place (KEP-625). It has no state.
var translator = csitrans.New()

// asCSI is pv with a CSI source; migrated tells that it has that of a built-in plugin.
func asCSI(pv *corev1.PersistentVolume) (csi *corev1.PersistentVolume, migrated bool, err error) {
	if pv.Spec.CSI != nil || !translator.IsPVMigratable(pv) {
		return pv, false, nil
	}
	if csi, err = translator.TranslateInTreePVToCSI(logr.Discard(), pv); err != nil {
		return nil, true, fmt.Errorf("failed to translate in tree pv to CSI: %w", err)
	}
	return csi, true, nil
}

// abandoned tells whether a volume of a built-in plugin is none of the driver any more:
// its migration was turned off, and that plugin attaches it again.
func (d driver) abandoned(pv *corev1.PersistentVolume) bool {
	return pv.Spec.CSI == nil && pv.Annotations[storagehelpers.AnnMigratedTo] != d.name && translator.IsPVMigratable(pv)
}

// reportedHandle is how the driver calls the volume of src when it lists its volumes. The
// translation of some plugins leaves out what only the node ID tells.
func (d driver) reportedHandle(src source, nodeID string) (string, error) {
	if !src.migrated && !(src.inline && translator.IsMigratedCSIDriverByName(d.name)) {
		return src.handle, nil
	}
	handle, err := translator.RepairVolumeHandle(d.name, src.handle, nodeID)
	if err != nil {
		return "", fmt.Errorf("completing volume handle %q for node ID %q: %w", src.handle, nodeID, err)
	}
	return handle, nil
}
