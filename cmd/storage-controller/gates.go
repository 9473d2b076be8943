package main

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

// knownGates are the gates of all roles: a manifest that serves several of them
// sets the same list everywhere.
var knownGates = map[string]gate{
	"Topology":                       {stage: "GA", def: true},
	"VolumeAttributesClass":          {stage: "GA", def: true},
	"CrossNamespaceVolumeDataSource": {stage: "ALPHA"},
	"MutableCSINodeAllocatableCount": {stage: "GA", def: true},
	"ReleaseLeaderElectionOnExit":    {stage: "GA", def: true, graduated: true},
	"HonorPVReclaimPolicy":           {stage: "GA", def: true, graduated: true},
	"AllAlpha":                       {stage: "ALPHA"},
	"AllBeta":                        {stage: "BETA"},
}

func gatesUsage() string {
	var items []string
	for _, name := range slices.Sorted(maps.Keys(knownGates)) {
		if g := knownGates[name]; !g.graduated {
			items = append(items, fmt.Sprintf("%s=true|false (%s - default=%t)", name, g.stage, g.def))
		}
	}
	return "features to switch: " + strings.Join(items, ", ")
}

// enabled tells whether the gate called name is on.
func (g gates) enabled(name string) bool {
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

func (g gates) validate() error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(g)) {
		if _, known := knownGates[name]; !known {
			errs = append(errs, fmt.Errorf("--feature-gates: unknown gate %q; --help lists the known ones", name))
		}
	}
	return errors.Join(errs...)
}

// withoutEffect names the gates that were set although they have graduated.
func (g gates) withoutEffect() []string {
	var names []string
	for name := range g {
		if knownGates[name].graduated {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}
