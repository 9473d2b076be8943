package explain

import (
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/attacher"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/nodecontroller"
)

// who removes a finalizer, and when.
type removal struct{ by, when string }

// finalizersOfAll are the finalizers that have the same name whatever the driver is. KIND
// stands for the kind of the object.
var finalizersOfAll = map[string]removal{
	"kubernetes.io/pvc-protection":                                          {"kube-controller-manager", "when the claim is being deleted and no pod on a node uses it any more"},
	"kubernetes.io/pv-protection":                                           {"kube-controller-manager", "when the volume is being deleted and is not bound to a claim any more"},
	"external-provisioner.volume.kubernetes.io/finalizer":                   {"the provisioner of the driver", "when the driver has deleted the volume (DeleteVolume)"},
	kube.ProvisioningFinalizer:                                              {"the provisioner of storage-controller", "when the driver has given a final answer to CreateVolume, and the PersistentVolume is saved if there is a volume"},
	kube.CloningProtection:                                                  {"the provisioner of the driver", "when no claim waits for a clone of this one any more"},
	"provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection": {"the provisioner of the driver", "when no claim waits for a volume from this snapshot any more"},
	"snapshot.storage.kubernetes.io/pvc-as-source-protection":               {"the snapshot controller", "when no snapshot is being taken of the claim any more"},
	"snapshot.storage.kubernetes.io/volumesnapshot-bound-protection":        {"the snapshot controller", "when the content of the snapshot is gone"},
	"snapshot.storage.kubernetes.io/volumesnapshot-as-source-protection":    {"the snapshot controller", "when no claim waits for a volume from this snapshot any more"},
	"topolvm.io/node":                {"the nodecontroller of storage-controller, or topolvm-controller", "when the claims of the node are cleaned up, or the time for that is over"},
	"topolvm.cybozu.com/node":        {"the nodecontroller of storage-controller, or topolvm-controller", "when the claims of the node are cleaned up, or the time for that is over"},
	"topolvm.io/pvc":                 {"the nodecontroller of storage-controller, or topolvm-controller", "at once where it is obsolete, else when the pods that use the claim are gone"},
	"topolvm.cybozu.com/pvc":         {"the nodecontroller of storage-controller, or topolvm-controller", "at once where it is obsolete, else when the pods that use the claim are gone"},
	metav1.FinalizerDeleteDependents: {"the garbage collector of kube-controller-manager", "when what the object owns is deleted"},
	metav1.FinalizerOrphanDependents: {"the garbage collector of kube-controller-manager", "when what the object owns has no owner any more"},
}

// attacherPrefix begins the finalizers of the attachers of all drivers.
const attacherPrefix = "external-attacher/"

// finalizersOf says of each finalizer of an object who removes it and when. drivers are
// those that the object may belong to.
func finalizersOf(kind string, finalizers []string, drivers ...string) []Finalizer {
	result := []Finalizer{}
	for _, name := range finalizers {
		r := removalOf(kind, name, drivers)
		result = append(result, Finalizer{Name: name, By: r.by, When: r.when})
	}
	return result
}

func removalOf(kind, name string, drivers []string) removal {
	if r, ok := finalizersOfAll[name]; ok {
		return r
	}
	for _, d := range drivers {
		node, claim := nodecontroller.Finalizers(d)
		switch name {
		case attacher.Finalizer(d):
			return removalByAttacher(kind, fmt.Sprintf("the attacher of driver %s", d))
		case node:
			return removal{"the nodecontroller for driver " + d, "when the claims of the node are cleaned up, or the time for that is over"}
		case claim:
			return removal{"the nodecontroller for driver " + d, "when the pods that use the claim are gone, and no other finalizer is left"}
		}
	}
	if of, ok := strings.CutPrefix(name, attacherPrefix); ok {
		return removalByAttacher(kind, "the attacher of the driver whose name is written "+of+" there")
	}
	owner, _, qualified := strings.Cut(name, "/")
	if !qualified {
		owner = "whoever has added it"
	}
	return removal{"unknown: belongs to " + owner, "nobody but its owner can tell"}
}

func removalByAttacher(kind, by string) removal {
	if kind == KindAttachment {
		return removal{by, "when the driver has detached the volume (ControllerUnpublishVolume)"}
	}
	return removal{by, "when no VolumeAttachment names the volume any more"}
}

func attacherFinalizer(driver string) string { return attacher.Finalizer(driver) }
