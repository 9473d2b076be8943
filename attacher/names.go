package attacher

import (
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/storage-controller/storage-controller/election"
)

const (
	// annNodeID keeps the node ID of the driver on the attachment, for a detach
	// after the CSINode has gone. The name is that of csi-attacher.
	annNodeID = "csi.alpha.kubernetes.io/node-id"
	// annVolumeHandle, annSecret and annMigrated keep what an unpublish needs besides,
	// for a detach after the PersistentVolume has gone. A secret is namespace/name;
	// a volume of a built-in plugin is "true".
	annVolumeHandle = "storage-controller.io/volume-handle"
	annSecret       = "storage-controller.io/publish-secret"
	annMigrated     = "storage-controller.io/migrated"
)

// Finalizer is the finalizer of driver on attachments and volumes.
func Finalizer(driver string) string { return "external-attacher/" + election.Sanitize(driver) }

// LeaseName is the name of the Lease of csi-attacher for driver, so that the two
// never work at the same time. csi-attacher cannot run with leader election where that
// is no valid name; it is made one then.
func LeaseName(driver string) string {
	name := election.Sanitize("external-attacher-leader-" + driver)
	if len(validation.IsDNS1123Subdomain(name)) > 0 {
		name = strings.ToLower(name)
	}
	return name
}
