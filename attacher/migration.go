package attacher

import (
	"fmt"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	csitrans "k8s.io/csi-translation-lib"
)

// translator converts in-tree volumes to CSI (KEP-625). It has no state.
var translator = csitrans.New()

// asCSI returns pv with a CSI source. migrated reports whether pv has an in-tree source.
func asCSI(pv *corev1.PersistentVolume) (csi *corev1.PersistentVolume, migrated bool, err error) {
	if pv.Spec.CSI != nil || !translator.IsPVMigratable(pv) {
		return pv, false, nil
	}
	if csi, err = translator.TranslateInTreePVToCSI(logr.Discard(), pv); err != nil {
		return nil, true, fmt.Errorf("failed to translate in tree pv to CSI: %w", err)
	}
	return csi, true, nil
}

// abandoned reports whether an in-tree volume no longer belongs to the driver: its CSI
// migration was disabled, and the in-tree plugin attaches it again.
func (d driver) abandoned(pv *corev1.PersistentVolume) bool {
	return pv.Spec.CSI == nil && pv.Annotations[storagehelpers.AnnMigratedTo] != d.name && translator.IsPVMigratable(pv)
}

// reportedHandle returns the volume ID of src in ListVolumes. The translation of some
// in-tree plugins leaves placeholders that the node ID resolves.
func (d driver) reportedHandle(src source, nodeID string) (string, error) {
	if !src.migrated && !(src.inline && translator.IsMigratedCSIDriverByName(d.name)) {
		return src.handle, nil
	}
	handle, err := translator.RepairVolumeHandle(d.name, src.handle, nodeID)
	if err != nil {
		return "", fmt.Errorf("resolving volume handle %q for node ID %q: %w", src.handle, nodeID, err)
	}
	return handle, nil
}
