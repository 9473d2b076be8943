// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecontroller

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// derived returns the settings that follow from the name of the driver, by the names of their flags. They
// are lower-case DNS subdomains, which the name of a driver need not be.
func derived(driver string) map[string]any {
	d := strings.ToLower(driver)
	node, claim := Finalizers(driver)
	return map[string]any{
		"node-finalizer":             node,
		"pvc-finalizer":              claim,
		"capacity-resource":          d + "/capacity",
		"capacity-annotation-prefix": "capacity." + d + "/",
		"device-class-parameter":     d + "/device-class",
		"resize-annotation":          d + "/last-resizefs-requested-at",
		"leader-election-id":         LeaseName(driver),
		"cert-dir":                   filepath.Join(os.TempDir(), "k8s-webhook-server", "serving-certs"),
	}
}

var notInLease = regexp.MustCompile("[^a-z0-9-]")

// LeaseName returns the default name of the Lease for driver.
func LeaseName(driver string) string {
	return "nodecontroller-leader-" + notInLease.ReplaceAllString(strings.ToLower(driver), "-")
}

// Finalizers returns the default finalizers of nodes and of claims for driver.
func Finalizers(driver string) (node, claim string) {
	d := strings.ToLower(driver)
	return d + "/node", d + "/pvc"
}
