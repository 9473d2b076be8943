// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// Settings holds the flags of the clean-up. They are validated by the caller.
type Settings struct {
	// TopologyNodeKey is the node label whose value volumes name in their node affinity. Empty
	// means the only topology key that the CSINodes report for the driver.
	TopologyNodeKey string `mapstructure:"topology-node-key"`

	NodeFinalizer     string        `mapstructure:"node-finalizer"` // a qualified name
	NodeFinalizerMode FinalizerMode `mapstructure:"node-finalizer-mode"`
	// NodeFinalizerTimeout is the time from the deletionTimestamp of a Node until the finalizer is removed in any case;
	// 0: at once.
	NodeFinalizerTimeout time.Duration `mapstructure:"node-finalizer-timeout"`
	// NodeFinalizerWaitForOthers delays the clean-up while the Node is ready and has other finalizers.
	NodeFinalizerWaitForOthers bool `mapstructure:"node-finalizer-wait-for-others"`
	// NodeDeleteGrace is the time from the deletionTimestamp of a Node until its clean-up; 0: no delay.
	NodeDeleteGrace time.Duration `mapstructure:"node-delete-grace"`
	// SkipNodeFinalize disables the clean-up. The finalizer is removed.
	SkipNodeFinalize bool `mapstructure:"skip-node-finalize"`

	NodeCleanup       Mode          `mapstructure:"node-cleanup"`
	NodeCleanupScope  Scope         `mapstructure:"node-cleanup-scope"`
	NodeCleanupRetain RetainPolicy  `mapstructure:"node-cleanup-retain"`
	NodeMissingGrace  time.Duration `mapstructure:"node-missing-grace"` // minimum time without a Node
	// NodeCleanupWindow is the time for which a cleaned-up node counts as lost; 0: not at all.
	NodeCleanupWindow time.Duration `mapstructure:"node-cleanup-window"`
	// NodeCleanupMaxFraction is the fraction of the nodes of the driver, from 0 to 1, above which lost nodes open the breaker.
	NodeCleanupMaxFraction float64 `mapstructure:"node-cleanup-max-fraction"`
	NodeCleanupMinNodes    int     `mapstructure:"node-cleanup-min-nodes"` // number of lost nodes that never opens the breaker
	NodeCleanupQPS         float64 `mapstructure:"node-cleanup-qps"`       // deletions per second for missing, unapproved Nodes; positive
	// NodeCleanupBurst is the number of deletions that may exceed NodeCleanupQPS at once; at least 1.
	NodeCleanupBurst    int      `mapstructure:"node-cleanup-burst"`
	NodeCleanupResource []string `mapstructure:"node-cleanup-resource"` // see [ParseResource]
	// NodeCleanupResourceSweep is the time between two lists of all custom resources; 0: they are not listed.
	NodeCleanupResourceSweep time.Duration `mapstructure:"-"`
	PVReleaseGrace           time.Duration `mapstructure:"pv-release-grace"` // for the driver to delete a released volume; 0: none

	// ClockGap is the time without a check of the lost nodes after which their grace starts again.
	ClockGap time.Duration `mapstructure:"-"`
	// LookInterval is the time between two checks of the lost nodes.
	LookInterval time.Duration `mapstructure:"-"`
}

// DefaultSettings returns the defaults. NodeFinalizer depends on the driver.
func DefaultSettings() Settings {
	return Settings{
		NodeFinalizerMode: FinalizerOff, NodeFinalizerTimeout: 15 * time.Minute, NodeFinalizerWaitForOthers: true,
		NodeDeleteGrace: 5 * time.Minute,
		NodeCleanup:     ModeReport, NodeCleanupScope: ScopeOptIn,
		NodeCleanupRetain: RetainSkip, NodeMissingGrace: 15 * time.Minute,
		NodeCleanupWindow: 10 * time.Minute, NodeCleanupMaxFraction: 0.1, NodeCleanupMinNodes: 1,
		NodeCleanupQPS: 0.5, NodeCleanupBurst: 10, NodeCleanupResourceSweep: 30 * time.Minute, PVReleaseGrace: 10 * time.Minute,
		ClockGap: 10 * time.Minute, LookInterval: 5 * time.Minute,
	}
}

// Config is the configuration of a [Controller].
type Config struct {
	Settings
	Workers                              int           // lost nodes that are processed concurrently
	Timeout                              time.Duration // of each request
	RetryIntervalStart, RetryIntervalMax time.Duration
}

// FinalizerMode selects how the finalizer of nodes is handled.
type FinalizerMode string

// The modes of the finalizer of nodes.
const (
	FinalizerOff    FinalizerMode = "off"    // neither added nor removed
	FinalizerRemove FinalizerMode = "remove" // the driver adds it
	FinalizerManage FinalizerMode = "manage" // added to the nodes of the driver, and removed once they are deleted
)

// Mode selects how far the clean-up goes.
type Mode string

// The modes of the clean-up.
const (
	ModeOff     Mode = "off"
	ModeReport  Mode = "report"  // events, metrics and records only
	ModeClaims  Mode = "claims"  // claims are deleted
	ModeVolumes Mode = "volumes" // and volumes that the driver can no longer delete
)

// Scope selects the volumes that are cleaned up.
type Scope string

// The scopes of the clean-up.
const (
	ScopeOptIn Scope = "opt-in" // those whose class or claim opts in
	ScopeAll   Scope = "all"    // all that do not opt out
)

// RetainPolicy selects how the claims of volumes with reclaim policy Retain are handled.
type RetainPolicy string

// The policies for volumes with reclaim policy Retain.
const (
	RetainSkip  RetainPolicy = "skip"
	RetainClaim RetainPolicy = "claim" // the claim is deleted, the volume is kept
)

// Values of the annotation that [CleanupAnnotation] returns.
const (
	enabled  = "enabled"
	disabled = "disabled"
)

// CleanupAnnotation returns the annotation by which objects opt in or out.
func CleanupAnnotation(driver string) string { return strings.ToLower(driver) + "/node-cleanup" }

// Consent returns the value of the annotation of obj, which is of a kind: enabled, disabled, or "" if there is none. Any
// other value, such as a misspelled one, counts as disabled. refusal says why it is disabled.
func Consent(annotation, kind string, obj metav1.Object) (value, refusal string) {
	value, ok := obj.GetAnnotations()[annotation]
	if !ok || value == enabled {
		return value, ""
	}
	if value != disabled {
		return disabled, fmt.Sprintf("annotation %s of %s %s has the value %q, must be %s or %s, and is treated as %s", annotation, kind,
			kube.Key(obj), value, enabled, disabled, disabled)
	}
	return disabled, kind + " " + kube.Key(obj) + " has the annotation " + annotation + ": " + disabled
}

// optOut returns why one of nodes opts out, or "".
func optOut(annotation string, nodes ...*corev1.Node) (refusal string) {
	for _, n := range nodes {
		_, refusal = Consent(annotation, "Node", n)
		if refusal != "" {
			return refusal
		}
	}
	return ""
}

// Policy is what the operator has set, as far as it decides about deletions.
type Policy struct {
	Settings
	driver     string
	annotation string // see [CleanupAnnotation]
	// removable are the finalizers of volumes that only the provisioner and the attacher of the driver remove. They are removed
	// together with a volume that the driver can no longer delete.
	removable []string
}

// provisionerFinalizer keeps a PersistentVolume until the driver has deleted the volume.
const provisionerFinalizer = "external-provisioner.volume.kubernetes.io/finalizer"

func newPolicy(s Settings, driver string) Policy {
	p := Policy{Settings: s, driver: driver, annotation: CleanupAnnotation(driver),
		removable: []string{provisionerFinalizer, kube.AttacherFinalizerPrefix + election.Sanitize(driver)}}
	if s.SkipNodeFinalize {
		p.NodeCleanup = ModeOff
	}
	return p
}

// Deletes reports whether the mode may delete anything.
func (s Settings) Deletes() bool {
	return (s.NodeCleanup == ModeClaims || s.NodeCleanup == ModeVolumes) && !s.SkipNodeFinalize
}

// refusal returns why the owners of a volume, by kind, do not consent to its clean-up, or "". Only claims and classes can opt in.
// agreed means that an administrator agreed instead, who cannot overrule an opt-out.
func (p Policy) refusal(owners map[string]metav1.Object, agreed bool) string {
	consent := p.NodeCleanupScope != ScopeOptIn || agreed
	for _, kind := range []string{"PersistentVolume", "PersistentVolumeClaim", "StorageClass", "Namespace"} {
		obj, ok := owners[kind]
		if !ok {
			continue
		}
		switch value, refusal := Consent(p.annotation, kind, obj); {
		case value == disabled:
			return refusal
		case value == enabled && (kind == "PersistentVolumeClaim" || kind == "StorageClass"):
			consent = true
		}
	}
	if !consent {
		return p.noOptIn()
	}
	return ""
}

// noOptIn returns the refusal of a volume of which no owner opted out, and none opted in.
func (p Policy) noOptIn() string {
	return "neither its StorageClass nor its claim has the annotation " + p.annotation + ": " + enabled
}
