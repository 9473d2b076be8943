// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecontroller

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
	"github.com/storage-controller/storage-controller/nodecontroller/pvcfinalizer"
	"github.com/storage-controller/storage-controller/topolvm"
)

// derived returns the settings that follow from the name of the driver, by the names of their flags. They
// are lower-case DNS subdomains, which the name of a driver need not be. For TopoLVM, they are the names and the behavior of
// topolvm-controller. mode is that of finalizers of claims, if it was set.
func derived(driver string, mode pvcfinalizer.Mode) map[string]string {
	d := strings.ToLower(driver)
	values := map[string]string{
		"driver-name":                driver,
		"node-finalizer":             NodeFinalizer(driver),
		"pvc-finalizer":              d + "/pvc",
		"capacity-resource":          d + "/capacity",
		"capacity-annotation-prefix": "capacity." + d + "/",
		"device-class-parameter":     d + "/device-class",
		"resize-annotation":          d + "/last-resizefs-requested-at",
		"leader-election-id":         LeaseName(driver),
		"cert-dir":                   filepath.Join(os.TempDir(), "k8s-webhook-server", "serving-certs"),
	}
	if !topolvm.IsDriver(driver) {
		return values
	}
	// The names for claims and pods did not change with the name of the driver.
	obsolete := "topolvm.io/pvc,topolvm.cybozu.com/pvc"
	if mode == pvcfinalizer.ModeEnforce {
		obsolete = "topolvm.cybozu.com/pvc"
	}
	maps.Copy(values, map[string]string{
		"pvc-finalizer":                  "topolvm.io/pvc",
		"resize-annotation":              "topolvm.io/last-resizefs-requested-at",
		"pvc-finalizer-mode":             string(pvcfinalizer.ModeStrip),
		"pvc-obsolete-finalizers":        obsolete,
		"topology-node-key":              "topology." + d + "/node",
		"node-finalizer-mode":            string(nodecleanup.FinalizerRemove),
		"node-finalizer-wait-for-others": "false",
		"node-cleanup":                   string(nodecleanup.ModeClaims),
		"node-cleanup-scope":             string(nodecleanup.ScopeAll),
		"node-cleanup-retain":            string(nodecleanup.RetainClaim),
		"node-delete-grace":              "0s",
	})
	return values
}

var notInLease = regexp.MustCompile("[^a-z0-9-]")

// LeaseName returns the default name of the Lease for driver. For TopoLVM it is the Lease of topolvm-controller, so that both
// never work at the same time.
func LeaseName(driver string) string {
	if topolvm.IsDriver(driver) {
		return "topolvm"
	}
	return "nodecontroller-leader-" + notInLease.ReplaceAllString(strings.ToLower(driver), "-")
}

// NodeFinalizer returns the default finalizer of nodes for driver.
func NodeFinalizer(driver string) string { return strings.ToLower(driver) + "/node" }
