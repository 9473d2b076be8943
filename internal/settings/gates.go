package settings

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// gate is a feature gate.
type gate struct {
	stage string // ALPHA, BETA or GA
	def   bool
	// graduated gates are accepted for old manifests; their value has no effect.
	graduated bool
}

// knownGates are the feature gates of all roles: a manifest with several sidecars sets the same list
// in all of them.
var knownGates = map[string]gate{
	"Topology":                       {stage: "GA", def: true},
	"VolumeAttributesClass":          {stage: "GA", def: true},
	"CSIVolumeGroupSnapshot":         {stage: "GA", def: true},
	"CrossNamespaceVolumeDataSource": {stage: "ALPHA"},
	"MutableCSINodeAllocatableCount": {stage: "GA", def: true},
	"ReleaseLeaderElectionOnExit":    {stage: "GA", def: true, graduated: true},
	"AnnotateFsResize":               {stage: "BETA", def: true},
	"RecoverVolumeExpansionFailure":  {stage: "GA", def: true, graduated: true},
	"HonorPVReclaimPolicy":           {stage: "GA", def: true, graduated: true},
	"AllAlpha":                       {stage: "ALPHA"},
	"AllBeta":                        {stage: "BETA"},
}

// KnownGates returns the names of the feature gates, sorted.
func KnownGates() []string { return slices.Sorted(maps.Keys(knownGates)) }

// gatesUsage returns the help text of --feature-gates.
func gatesUsage() string {
	var items []string
	for _, name := range KnownGates() {
		if g := knownGates[name]; !g.graduated {
			items = append(items, fmt.Sprintf("%s=true|false (%s - default=%t)", name, g.stage, g.def))
		}
	}
	return "feature gates: " + strings.Join(items, ", ")
}

// Enabled reports whether a feature gate is on.
func (g Gates) Enabled(name string) bool {
	if on, set := g[name]; set {
		return on
	}
	known := knownGates[name]
	if on, set := g["AllAlpha"]; set && known.stage == "ALPHA" {
		return on
	}
	if on, set := g["AllBeta"]; set && known.stage == "BETA" {
		return on
	}
	return known.def
}

// validate returns an error for each unknown feature gate.
func (g Gates) validate() error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(g)) {
		if _, known := knownGates[name]; !known {
			errs = append(errs, fmt.Errorf("--feature-gates: unknown gate %q; --help lists the known gates", name))
		}
	}
	return errors.Join(errs...)
}

// Graduated returns the names of the feature gates in g that have graduated, sorted.
func (g Gates) Graduated() []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(g)), func(name string) bool { return !knownGates[name].graduated })
}
