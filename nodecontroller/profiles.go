// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecontroller

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
	"github.com/storage-controller/storage-controller/nodecontroller/pvcfinalizer"
)

// The profiles.
const (
	ProfileNone           = "none"
	ProfileTopoLVM        = "topolvm"         // TopoLVM v0.40 and later
	ProfileTopoLVMClassic = "topolvm-classic" // TopoLVM up to v0.39
	ProfileTopoLVMLegacy  = "topolvm-legacy"  // TopoLVM under its first name
)

// profile presets the settings with which a driver's own node controller works.
type profile struct {
	driver string // required name of the driver; empty: any
	// presets are settings by the names of their flags. The safety rules are not settings, so that no
	// profile can turn them off.
	presets map[string]any
}

var profiles = map[string]profile{
	ProfileNone:    {},
	ProfileTopoLVM: topolvm("topolvm.io", nil),
	ProfileTopoLVMClassic: topolvm("topolvm.io", map[string]any{
		"pvc-finalizer-mode":      pvcfinalizer.ModeEnforce,
		"pvc-obsolete-finalizers": []string{"topolvm.cybozu.com/pvc"},
		"pvc-pod-deletion":        pvcfinalizer.PodsAll,
		"pvc-pod-deletion-grace":  time.Second,
	}),
	ProfileTopoLVMLegacy: topolvm("topolvm.cybozu.com", nil),
}

// topolvm returns the profile of driver d, with differences from the profile of current releases.
func topolvm(d string, differences map[string]any) profile {
	presets := map[string]any{
		"node-finalizer":      d + "/node",
		"node-finalizer-mode": nodecleanup.FinalizerRemove,
		// these two names did not change with the name of the driver
		"pvc-finalizer":                  "topolvm.io/pvc",
		"resize-annotation":              "topolvm.io/last-resizefs-requested-at",
		"pvc-finalizer-mode":             pvcfinalizer.ModeStrip,
		"pvc-obsolete-finalizers":        []string{"topolvm.io/pvc", "topolvm.cybozu.com/pvc"},
		"pvc-pod-deletion":               pvcfinalizer.PodsNone,
		"capacity-resource":              d + "/capacity",
		"capacity-annotation-prefix":     "capacity." + d + "/",
		"device-class-parameter":         d + "/device-class",
		"default-device-class":           "00default",
		"topology-node-key":              "topology." + d + "/node",
		"node-cleanup":                   nodecleanup.ModeClaims,
		"node-cleanup-scope":             nodecleanup.ScopeAll,
		"node-cleanup-retain":            nodecleanup.RetainClaim,
		"node-delete-grace":              time.Duration(0),
		"node-finalizer-wait-for-others": false,
		// the Lease of topolvm-controller, so that the two never work at the same time
		"leader-election-id": "topolvm",
	}
	maps.Copy(presets, differences)
	return profile{driver: d, presets: presets}
}

// ProfileNames returns the names of the profiles, sorted.
func ProfileNames() []string { return slices.Sorted(maps.Keys(profiles)) }

// profile returns the profile of c.
func (c Config) profile() (profile, error) {
	if c.Profile == "" {
		return profiles[ProfileNone], nil
	}
	p, known := profiles[c.Profile]
	if !known {
		return profile{}, fmt.Errorf("--profile: unknown profile %q; the profiles are %s", c.Profile, strings.Join(ProfileNames(), ", "))
	}
	return p, nil
}
