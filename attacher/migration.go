package attacher

import (
	corev1 "k8s.io/api/core/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/migration"
)

// abandoned reports whether an in-tree volume no longer belongs to the driver: its CSI
// migration was disabled, and the in-tree plugin attaches it again.
func (d driver) abandoned(pv *corev1.PersistentVolume) bool {
	return pv.Annotations[storagehelpers.AnnMigratedTo] != d.name && migration.IsInTree(pv)
}

// reportedHandle returns the volume ID of src in ListVolumes. The translation of some
// in-tree plugins leaves placeholders that the node ID resolves.
func (d driver) reportedHandle(src source, nodeID string) (string, error) {
	if !src.migrated && !(src.inline && migration.PluginOf(d.name) != "") {
		return src.handle, nil
	}
	return migration.RepairHandle(d.name, src.handle, nodeID)
}
