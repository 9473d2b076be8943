package audit

import (
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// SnapshotFinalizer keeps a VolumeSnapshot while volumes are made from it.
const SnapshotFinalizer = "provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection"

// removers is who takes away the finalizers that are known, and when.
var removers = map[string]string{
	"kubernetes.io/pv-protection":                                           "kube-controller-manager, when no claim is bound to it any more",
	"kubernetes.io/pvc-protection":                                          "kube-controller-manager, when no pod that could still run uses it",
	"external-provisioner.volume.kubernetes.io/finalizer":                   "the provisioner, when DeleteVolume has succeeded; its events on the volume tell what the driver answers",
	kube.ProvisioningFinalizer:                                              "the provisioner, when the driver has given its last answer to the CreateVolume in doubt",
	kube.CloningProtection:                                                  "the provisioner, when no claim waits for a copy of it any more",
	SnapshotFinalizer:                                                       "the provisioner, when no claim waits for a volume from it any more",
	"snapshot.storage.kubernetes.io/pvc-as-source-protection":               "the snapshot controller, when no snapshot of the claim is being taken any more",
	"snapshot.storage.kubernetes.io/volumesnapshot-as-source-protection":    "the snapshot controller, when no volume is made from it any more",
	"snapshot.storage.kubernetes.io/volumesnapshot-bound-protection":        "the snapshot controller, when its content is deleted",
	"snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection": "the snapshot controller and csi-snapshotter, when the snapshot is deleted at the driver",
	"storage.kubernetes.io/backup-protection":                               "the backup software that has set it",
	metav1.FinalizerDeleteDependents:                                        "kube-controller-manager (garbage collector), when everything that it owns is deleted",
	metav1.FinalizerOrphanDependents:                                        "kube-controller-manager (garbage collector), when nothing names it as its owner any more",
}

// remover is who takes a finalizer away, and when.
func (c comparison) remover(finalizer string) string {
	driver, isAttacher := strings.CutPrefix(finalizer, "external-attacher/")
	lower := strings.ToLower(c.driver)
	switch {
	case removers[finalizer] != "":
		return removers[finalizer]
	case isAttacher:
		return "the attacher of " + driver + ", when ControllerUnpublishVolume has succeeded, and from a volume when nothing attaches it any more; status.detachError of the attachment tells what the driver answers"
	case finalizer == lower+"/node":
		return "the nodecontroller, when the volumes of the node are cleaned up"
	case finalizer == lower+"/pvc", strings.HasPrefix(finalizer, "topolvm.") && strings.HasSuffix(finalizer, "/pvc"):
		return "the nodecontroller with --pvc-finalizer-mode=strip or enforce"
	}
	return "not known here: whoever has set it, by the part before the slash"
}
