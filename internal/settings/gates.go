// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
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

// gatesOfAPIServer are the feature gates of k8s.io/apiserver and k8s.io/component-base. The sidecars link these
// libraries and accept the gates, on which nothing in a sidecar depends.
var gatesOfAPIServer = strings.Fields(`
	APIResponseCompression APIServerIdentity APIServerTracing APIServerWebhookAuthenticationToken APIServingWithRoutine
	AggregatedDiscoveryRemoveBetaType AllowParsingUserUIDFromCertAuth AllowUnsafeMalformedObjectDeletion
	AnonymousAuthConfigurableEndpoints AuthorizeWithSelectors BtreeWatchCache CBORServingAndStorage ComponentFlagz ComponentStatusz
	ConcurrentWatchObjectDecode ConsistentListFromCache ConsistentListFromCacheSkipTimeoutFallback ConstrainedImpersonation
	ContextualLogging CoordinatedLeaderElection DeclarativeValidation DeclarativeValidationBeta DeclarativeValidationTakeover
	DetectCacheInconsistency EtcdRangeStream ExcludeAdmissionWebhookVirtualResources KMSv1 ListFromCacheSnapshot LoggingAlphaOptions
	LoggingBetaOptions LoggingStableOptions ManifestBasedAdmissionControlConfig MutatingAdmissionPolicy NativeHistograms OpenAPIEnums
	RemoteRequestHeaderUID ResilientWatchCacheInitialization RetryGenerateName SeparateCacheWatchRPC ShardedListAndWatch
	SizeBasedListCostEstimate StorageVersionAPI StorageVersionHash StreamingCollectionEncodingToJSON
	StreamingCollectionEncodingToProtobuf StructuredAuthenticationConfiguration StructuredAuthenticationConfigurationEgressSelector
	StructuredAuthenticationConfigurationJWKSMetrics TokenRequestServiceAccountUIDValidation UnauthenticatedHTTP2DOSMitigation
	UnknownVersionInteroperabilityProxy WatchCacheInitializationPostStartHook WatchList WatchListCompression
	WebhookRoundTripLoadBalancing`)

// withoutEffect reports whether the value of a known gate has no effect.
func withoutEffect(name string) bool {
	return knownGates[name].graduated || slices.Contains(gatesOfAPIServer, name)
}

// KnownGates returns the names of the feature gates, sorted.
func KnownGates() []string {
	return slices.Sorted(slices.Values(slices.AppendSeq(slices.Clone(gatesOfAPIServer), maps.Keys(knownGates))))
}

// gatesUsage returns the help text of --feature-gates.
var gatesUsage = sync.OnceValue(func() string {
	var items []string
	for _, name := range KnownGates() {
		if g := knownGates[name]; !withoutEffect(name) {
			items = append(items, fmt.Sprintf("%s=true|false (%s - default=%t)", name, g.stage, g.def))
		}
	}
	return "feature gates: " + strings.Join(items, ", ")
})

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
		if _, known := knownGates[name]; !known && !withoutEffect(name) {
			errs = append(errs, fmt.Errorf("--feature-gates: unknown gate %q; --help lists the known gates", name))
		}
	}
	return errors.Join(errs...)
}

// WithoutEffect returns the names of the feature gates in g without effect, sorted.
func (g Gates) WithoutEffect() []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(g)), func(name string) bool { return !withoutEffect(name) })
}
