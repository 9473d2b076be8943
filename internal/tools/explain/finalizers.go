package explain

import (
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/attacher"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/nodecontroller"
)

// removal names the component that removes a finalizer, and when.
type removal struct{ by, when string }

const (
	snapshotController = "the snapshot controller"
	garbageCollector   = "the garbage collector of kube-controller-manager"
	ourOrTopoLVM       = "the nodecontroller of storage-controller, or topolvm-controller"

	noClaimFromSource = "after all claims with this data source are provisioned"
	nodeCleanedUp     = "after the claims of the node are cleaned up, or the grace period has passed"
	podsDeleted       = "after the pods that use the claim are deleted; immediately if obsolete"
)

// removals holds the finalizers whose names do not depend on the driver.
var removals = map[string]removal{
	"kubernetes.io/pvc-protection":               {"kube-controller-manager", "when the claim is being deleted and no pod on a node uses it"},
	"kubernetes.io/pv-protection":                {"kube-controller-manager", "when the volume is being deleted and is not bound to a claim"},
	storagehelpers.PVDeletionProtectionFinalizer: {"the provisioner of the driver", "after DeleteVolume succeeded"},
	kube.ProvisioningFinalizer: {
		"the provisioner of storage-controller", "after CreateVolume returned a final response, and the PersistentVolume, if any, is created"},
	kube.CloningProtection: {"the provisioner of the driver", noClaimFromSource},
	"provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection": {"the provisioner of the driver", noClaimFromSource},
	"snapshot.storage.kubernetes.io/pvc-as-source-protection":               {snapshotController, "after all snapshots of the claim are created"},
	"snapshot.storage.kubernetes.io/volumesnapshot-bound-protection":        {snapshotController, "after the VolumeSnapshotContent is deleted"},
	"snapshot.storage.kubernetes.io/volumesnapshot-as-source-protection":    {snapshotController, noClaimFromSource},
	"topolvm.io/node":                {ourOrTopoLVM, nodeCleanedUp},
	"topolvm.cybozu.com/node":        {ourOrTopoLVM, nodeCleanedUp},
	"topolvm.io/pvc":                 {ourOrTopoLVM, podsDeleted},
	"topolvm.cybozu.com/pvc":         {ourOrTopoLVM, podsDeleted},
	metav1.FinalizerDeleteDependents: {garbageCollector, "after the dependents of the object are deleted"},
	metav1.FinalizerOrphanDependents: {garbageCollector, "after the dependents of the object are orphaned"},
}

// finalizersOf returns who removes each finalizer of an object, and when. drivers are those that the object may
// belong to.
func finalizersOf(kind string, finalizers []string, drivers ...string) []Finalizer {
	all := []Finalizer{}
	for _, name := range finalizers {
		r := removalOf(kind, name, drivers)
		all = append(all, Finalizer{Name: name, By: r.by, When: r.when})
	}
	return all
}

func removalOf(kind, name string, drivers []string) removal {
	if r, ok := removals[name]; ok {
		return r
	}
	for _, d := range drivers {
		node, claim := nodecontroller.Finalizers(d)
		switch name {
		case attacher.Finalizer(d):
			return removalByAttacher(kind, "the attacher of driver "+d)
		case node:
			return removal{"the nodecontroller for driver " + d, nodeCleanedUp}
		case claim:
			return removal{"the nodecontroller for driver " + d, "after the pods that use the claim are deleted and no other finalizer is left"}
		}
	}
	if driver, ok := strings.CutPrefix(name, "external-attacher/"); ok {
		return removalByAttacher(kind, "the attacher of the driver with the sanitized name "+driver)
	}
	owner, _, qualified := strings.Cut(name, "/")
	if !qualified {
		return removal{by: "unknown (not a finalizer of Kubernetes or this driver)"}
	}
	return removal{by: "unknown (owner of " + owner + "; not a finalizer of Kubernetes or this driver)"}
}

func removalByAttacher(kind, by string) removal {
	if kind == KindAttachment {
		return removal{by, "after ControllerUnpublishVolume succeeded"}
	}
	return removal{by, "when no VolumeAttachment references the volume"}
}
