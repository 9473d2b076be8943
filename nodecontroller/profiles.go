package nodecontroller

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// The profiles.
const (
	ProfileNone           = "none"
	ProfileTopoLVM        = "topolvm"         // TopoLVM from v0.40 on
	ProfileTopoLVMClassic = "topolvm-classic" // TopoLVM up to v0.39
	ProfileTopoLVMLegacy  = "topolvm-legacy"  // TopoLVM under its first name
)

// profile is the settings that fit a driver as its own controller would have them.
type profile struct {
	// driver is the name that the driver has to have; empty means any.
	driver string
	// presets are settings by the names of their flags. What makes the clean-up safe
	// (breaker, live reads, preconditions, veto) is no setting, so no profile turns it off.
	presets map[string]any
}

var profiles = map[string]profile{
	ProfileNone:    {},
	ProfileTopoLVM: topolvm("topolvm.io", nil),
	ProfileTopoLVMClassic: topolvm("topolvm.io", map[string]any{
		"pvc-finalizer-mode":      ClaimEnforce,
		"pvc-obsolete-finalizers": []string{"topolvm.cybozu.com/pvc"},
		"pvc-pod-deletion":        PodsAll,
		"pvc-pod-deletion-grace":  time.Second,
	}),
	ProfileTopoLVMLegacy: topolvm("topolvm.cybozu.com", nil),
}

// topolvm is the profile of the driver called d, which is also the prefix of its names,
// with what differs from the current generation.
func topolvm(d string, differences map[string]any) profile {
	presets := map[string]any{
		"node-finalizer":      d + "/node",
		"node-finalizer-mode": NodeFinalizerRemove,
		// These two names never changed with the name of the driver.
		"pvc-finalizer":                  "topolvm.io/pvc",
		"resize-annotation":              "topolvm.io/last-resizefs-requested-at",
		"pvc-finalizer-mode":             ClaimStrip,
		"pvc-obsolete-finalizers":        []string{"topolvm.io/pvc", "topolvm.cybozu.com/pvc"},
		"pvc-pod-deletion":               PodsNone,
		"capacity-resource":              d + "/capacity",
		"capacity-annotation-prefix":     "capacity." + d + "/",
		"device-class-parameter":         d + "/device-class",
		"default-device-class":           "00default",
		"default-volume-size":            "1Gi",
		"topology-node-key":              "topology." + d + "/node",
		"webhook-optout-label":           d + "/webhook",
		"enable-webhooks":                true,
		"webhook-strip-foreign-capacity": false,
		"node-cleanup":                   CleanupClaims,
		"node-cleanup-scope":             ScopeAll,
		"node-cleanup-unbound":           UnboundDelete,
		"node-cleanup-retain":            RetainClaim,
		"node-delete-grace":              time.Duration(0),
		"node-finalizer-wait-for-others": false,
		"node-cleanup-resource": []string{fmt.Sprintf("resource=logicalvolumes.v1.%s,node-field=spec.nodeName,finalizer=%s/logicalvolume,mark=%s/pendingdeletion=true,when=%s",
			d, d, d, WhenNodeTerminating)},
		// That of TopoLVM's own controller, so that the two never work at the same time.
		"leader-election-id": "topolvm",
	}
	maps.Copy(presets, differences)
	return profile{driver: d, presets: presets}
}

// ProfileNames are the profiles that there are.
func ProfileNames() []string { return slices.Sorted(maps.Keys(profiles)) }

// profile is the one that c names; none where it names none.
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
