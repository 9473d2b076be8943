package nodecontroller

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/storage-controller/storage-controller/election"
)

// provisionerFinalizer is what the provisioner keeps a volume with until the driver has
// deleted it.
const provisionerFinalizer = "external-provisioner.volume.kubernetes.io/finalizer"

// derived is the settings that follow from the driver where nobody sets them, by the
// names of their flags. What they name has to be a DNS subdomain in lower case, which
// the name of a driver need not be.
func derived(driver string) map[string]any {
	d := strings.ToLower(driver)
	return map[string]any{
		"node-finalizer":             d + "/node",
		"pvc-finalizer":              d + "/pvc",
		"capacity-resource":          d + "/capacity",
		"capacity-annotation-prefix": "capacity." + d + "/",
		"device-class-parameter":     d + "/device-class",
		"resize-annotation":          d + "/last-resizefs-requested-at",
		"webhook-optout-label":       d + "/webhook",
		"leader-election-id":         leaseName(d),
		"pv-removable-finalizers":    []string{provisionerFinalizer, attacherFinalizer(driver)},
		"cert-dir":                   filepath.Join(os.TempDir(), "k8s-webhook-server", "serving-certs"),
	}
}

var notInLease = regexp.MustCompile("[^a-z0-9-]")

// leaseName is the name of the Lease of a driver whose name is d in lower case.
func leaseName(d string) string {
	return "nodecontroller-leader-" + notInLease.ReplaceAllString(d, "-")
}

// attacherFinalizer is what the attacher keeps a volume of driver with while it is
// attached. It has the spelling of the driver, not that in lower case.
func attacherFinalizer(driver string) string { return "external-attacher/" + election.Sanitize(driver) }
