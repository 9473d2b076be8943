// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// Settings holds the flags of the cleanup, and the name of the driver.
type Settings struct {
	// Driver is the name of the CSI driver.
	Driver string `mapstructure:"-"`
	// TopologyNodeKey is the node label whose value volumes name in their node affinity. Empty means the only topology key that
	// the CSINodes report for the driver.
	TopologyNodeKey string `mapstructure:"topology-node-key"`

	NodeFinalizer     string        `mapstructure:"node-finalizer"` // a qualified name
	NodeFinalizerMode FinalizerMode `mapstructure:"node-finalizer-mode"`
	// NodeFinalizerTimeout is the time from the deletionTimestamp of a Node until the finalizer is removed in any case; 0: at once.
	NodeFinalizerTimeout time.Duration `mapstructure:"node-finalizer-timeout"`
	// NodeFinalizerWaitForOthers delays the cleanup while the Node is ready and has other finalizers.
	NodeFinalizerWaitForOthers bool `mapstructure:"node-finalizer-wait-for-others"`
	// NodeDeleteGrace is the time from the deletionTimestamp of a Node until its cleanup; 0: no delay.
	NodeDeleteGrace time.Duration `mapstructure:"node-delete-grace"`
	// SkipNodeFinalize disables the cleanup. The finalizer is removed.
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
	NodeCleanupBurst int           `mapstructure:"node-cleanup-burst"`
	PVReleaseGrace   time.Duration `mapstructure:"pv-release-grace"` // for the driver to delete a released volume; 0: none

	// ClockGap is the time without a check of the lost nodes after which their grace starts again.
	ClockGap time.Duration `mapstructure:"-"`
	// CheckInterval is the time between two checks of the lost nodes.
	CheckInterval time.Duration `mapstructure:"-"`
	// MinMissingGrace is the least NodeMissingGrace.
	MinMissingGrace time.Duration `mapstructure:"-"`
}

// DefaultSettings returns the defaults. NodeFinalizer and Driver depend on the driver.
func DefaultSettings() Settings {
	return Settings{
		NodeFinalizerMode: FinalizerOff, NodeFinalizerTimeout: 15 * time.Minute, NodeFinalizerWaitForOthers: true,
		NodeDeleteGrace: 5 * time.Minute, NodeCleanup: ModeReport, NodeCleanupScope: ScopeOptIn, NodeCleanupRetain: RetainSkip,
		NodeMissingGrace: 15 * time.Minute, NodeCleanupWindow: 10 * time.Minute, NodeCleanupMaxFraction: 0.1, NodeCleanupMinNodes: 1,
		NodeCleanupQPS: 0.5, NodeCleanupBurst: 10, PVReleaseGrace: 10 * time.Minute,
		ClockGap: 10 * time.Minute, CheckInterval: 5 * time.Minute, MinMissingGrace: time.Minute,
	}
}

// FinalizerMode selects how the finalizer of nodes is handled.
type FinalizerMode string

// The modes of the finalizer of nodes.
const (
	FinalizerOff    FinalizerMode = "off"    // neither added nor removed
	FinalizerRemove FinalizerMode = "remove" // the driver adds it
	FinalizerManage FinalizerMode = "manage" // added to the nodes of the driver, and removed
)

// Mode selects how far the cleanup goes.
type Mode string

// The modes of the cleanup.
const (
	ModeOff     Mode = "off"
	ModeReport  Mode = "report"  // plans as volumes, and deletes nothing
	ModeClaims  Mode = "claims"  // claims are deleted, then custom resources
	ModeVolumes Mode = "volumes" // and volumes that the driver can no longer delete
)

// Scope selects the volumes that are cleaned up.
type Scope string

// The scopes of the cleanup.
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

// optOut returns why obj, which is of a kind, opts out of the cleanup, or "".
func (s Settings) optOut(kind string, obj metav1.Object) (refusal string) {
	_, refusal = Consent(CleanupAnnotation(s.Driver), kind, obj)
	return refusal
}

// mode returns the mode in effect.
func (s Settings) mode() Mode {
	if s.SkipNodeFinalize {
		return ModeOff
	}
	return s.NodeCleanup
}

// Deletes reports whether the mode may delete anything.
func (s Settings) Deletes() bool { return s.mode() == ModeClaims || s.mode() == ModeVolumes }

// provisionerFinalizer is the finalizer of the provisioner on a PersistentVolume.
const provisionerFinalizer = "external-provisioner.volume.kubernetes.io/finalizer"

// holds reports whether our finalizer keeps node, and a pass may remove it.
func (s Settings) holds(node *corev1.Node) bool {
	return s.NodeFinalizerMode != FinalizerOff && slices.Contains(node.Finalizers, s.NodeFinalizer)
}

// protects reports whether a pass adds our finalizer to node, whose CSINode may be nil.
func (s Settings) protects(node *corev1.Node, csiNode *storagev1.CSINode) bool {
	return s.NodeFinalizerMode == FinalizerManage && node.DeletionTimestamp == nil && !slices.Contains(node.Finalizers, s.NodeFinalizer) &&
		kube.DriverOnNode(csiNode, s.Driver) != nil
}

// removableFinalizers returns the finalizers that are removed from a PersistentVolume: those of the provisioner and of the
// attacher of the driver.
func (s Settings) removableFinalizers() []string {
	return []string{provisionerFinalizer, "external-attacher/" + election.Sanitize(s.Driver)}
}

// isRemovable reports whether a finalizer of a PersistentVolume may be removed.
func (s Settings) isRemovable(finalizer string) bool {
	return slices.Contains(s.removableFinalizers(), finalizer)
}

// Validate returns all errors in s. Names that are still empty are not checked.
func (s Settings) Validate() error {
	errs := []error{
		oneOf("--node-finalizer-mode", s.NodeFinalizerMode, FinalizerOff, FinalizerRemove, FinalizerManage),
		oneOf("--node-cleanup-scope", s.NodeCleanupScope, ScopeOptIn, ScopeAll),
		oneOf("--node-cleanup-retain", s.NodeCleanupRetain, RetainSkip, RetainClaim),
	}
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	if s.NodeCleanup == "dry-run" {
		errs = append(errs, errors.New("--node-cleanup=dry-run was removed: use report, and doctor for permissions"))
	} else {
		errs = append(errs, oneOf("--node-cleanup", s.NodeCleanup, ModeOff, ModeReport, ModeClaims, ModeVolumes))
	}
	if name := s.NodeFinalizer; name != "" {
		problems := validation.IsQualifiedName(name)
		if !strings.Contains(name, "/") {
			problems = []string{"must have a prefix, as in example.com/name"}
		}
		check(len(problems) == 0, "--node-finalizer: %s, got %q", strings.Join(problems, "; "), name)
	}
	if problems := validation.IsQualifiedName(s.TopologyNodeKey); s.TopologyNodeKey != "" && len(problems) > 0 {
		check(false, "--topology-node-key: %s, got %q", strings.Join(problems, "; "), s.TopologyNodeKey)
	}
	for _, d := range []struct {
		flag  string
		value time.Duration
	}{
		{"node-finalizer-timeout", s.NodeFinalizerTimeout}, {"node-delete-grace", s.NodeDeleteGrace},
		{"node-cleanup-window", s.NodeCleanupWindow}, {"pv-release-grace", s.PVReleaseGrace},
	} {
		check(d.value >= 0, "--%s: must not be negative, got %v", d.flag, d.value)
	}
	check(s.NodeMissingGrace >= s.MinMissingGrace, "--node-missing-grace: must be at least %v, got %v", s.MinMissingGrace,
		s.NodeMissingGrace)
	// NaN is not in the range either.
	check(s.NodeCleanupMaxFraction >= 0 && s.NodeCleanupMaxFraction <= 1,
		"--node-cleanup-max-fraction: must be between 0 and 1, got %v", s.NodeCleanupMaxFraction)
	check(s.NodeCleanupMinNodes >= 0, "--node-cleanup-min-nodes: must not be negative, got %d", s.NodeCleanupMinNodes)
	check(s.NodeCleanupQPS > 0 && !math.IsInf(s.NodeCleanupQPS, 0), "--node-cleanup-qps: must be positive, got %v", s.NodeCleanupQPS)
	check(s.NodeCleanupBurst >= 1, "--node-cleanup-burst: must be at least 1, got %d", s.NodeCleanupBurst)
	return errors.Join(errs...)
}

// oneOf returns an error unless value is one of known.
func oneOf[T ~string](flag string, value T, known ...T) error {
	if slices.Contains(known, value) {
		return nil
	}
	names := strings.Trim(strings.ReplaceAll(fmt.Sprint(known), " ", ", "), "[]")
	return fmt.Errorf("%s: must be one of %s, got %q", flag, names, value)
}
