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

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// Settings holds the flags of the cleanup, and the name of the driver.
type Settings struct {
	// Driver is the name of the CSI driver.
	Driver string
	// TopologyNodeKey is the node label whose value volumes name in their node affinity. Empty means the only topology key that
	// the CSINodes report for the driver.
	TopologyNodeKey string

	NodeFinalizer     string // a qualified name
	NodeFinalizerMode FinalizerMode
	// NodeFinalizerTimeout is the time from the deletionTimestamp of a Node until the finalizer is removed in any case; 0: at once.
	NodeFinalizerTimeout time.Duration
	// NodeFinalizerWaitForOthers delays the cleanup while the Node is ready and has other finalizers.
	NodeFinalizerWaitForOthers bool
	// NodeDeleteGrace is the time from the deletionTimestamp of a Node until its cleanup; 0: no delay.
	NodeDeleteGrace time.Duration
	// SkipNodeFinalize disables the cleanup. The finalizer is removed.
	SkipNodeFinalize bool

	NodeCleanup       Mode
	NodeCleanupScope  Scope
	NodeCleanupRetain RetainPolicy
	NodeMissingGrace  time.Duration // minimum time without a Node
	// NodeCleanupWindow is the time for which a lost node counts that was cleaned up, or has nothing to delete; 0: not at all.
	NodeCleanupWindow time.Duration
	// NodeCleanupMaxFraction is the fraction of the nodes of the driver, from 0 to 1, above which lost nodes open the breaker.
	NodeCleanupMaxFraction float64
	NodeCleanupMinNodes    int     // number of lost nodes that never opens the breaker
	NodeCleanupQPS         float64 // deletions per second for missing, unapproved Nodes; positive
	// NodeCleanupBurst is the number of deletions that may exceed NodeCleanupQPS at once; at least 1.
	NodeCleanupBurst int
	PVReleaseGrace   time.Duration // for the driver to delete a released volume; 0: none

	// ClockGap is the time without a check of the lost nodes after which their grace starts again.
	ClockGap time.Duration
	// CheckInterval is the time between two checks of the lost nodes.
	CheckInterval time.Duration
	// MinMissingGrace is the least NodeMissingGrace.
	MinMissingGrace time.Duration
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

// AddFlags adds the flags of the settings to fs. Their defaults are the values in s.
func (s *Settings) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&s.TopologyNodeKey, "topology-node-key", s.TopologyNodeKey,
		"node label that identifies the node in the node affinity of a volume; "+
			"empty means that of TopoLVM, or the only topology key that the driver reports")
	fs.StringVar(&s.NodeFinalizer, "node-finalizer", s.NodeFinalizer, "finalizer that keeps a Node until its volumes are cleaned up")
	fs.StringVar((*string)(&s.NodeFinalizerMode), "node-finalizer-mode", string(s.NodeFinalizerMode),
		"off: ignore the finalizer; remove: remove it from a deleted Node after the cleanup, the driver adds it; manage: also add it")
	fs.DurationVar(&s.NodeFinalizerTimeout, "node-finalizer-timeout", s.NodeFinalizerTimeout,
		"maximum time that the finalizer delays the deletion of a Node; the cleanup continues without it")
	fs.BoolVar(&s.NodeFinalizerWaitForOthers, "node-finalizer-wait-for-others", s.NodeFinalizerWaitForOthers,
		"wait while a Node that is being deleted is ready and has other finalizers: it may still be drained")
	fs.DurationVar(&s.NodeDeleteGrace, "node-delete-grace", s.NodeDeleteGrace,
		"time between the deletion of a Node and the cleanup, during which the cleanup can be canceled")
	fs.BoolVar(&s.SkipNodeFinalize, "skip-node-finalize", s.SkipNodeFinalize,
		"clean up nothing: sets --node-cleanup=off; the finalizer of Nodes is still removed")
	fs.StringVar((*string)(&s.NodeCleanup), "node-cleanup", string(s.NodeCleanup),
		"cleanup of volumes whose node was deleted: off; report (events and metrics only); claims (delete their PVCs); "+
			"volumes (also remove PVs that no driver can delete any more). claims and volumes require --leader-election")
	fs.StringVar((*string)(&s.NodeCleanupScope), "node-cleanup-scope", string(s.NodeCleanupScope),
		"opt-in: volumes whose StorageClass or PVC opts in by an annotation; all: all volumes except those that opt out")
	fs.StringVar((*string)(&s.NodeCleanupRetain), "node-cleanup-retain", string(s.NodeCleanupRetain),
		"action for PVCs of volumes with reclaim policy Retain: skip, or claim (delete the PVC; the volume is always kept)")
	fs.DurationVar(&s.NodeMissingGrace, "node-missing-grace", s.NodeMissingGrace,
		"minimum time that a Node must have been missing; at least 1m")
	fs.DurationVar(&s.NodeCleanupWindow, "node-cleanup-window", s.NodeCleanupWindow,
		"how long the breaker counts a lost node without anything to delete, or one that was cleaned up")
	fs.Float64Var(&s.NodeCleanupMaxFraction, "node-cleanup-max-fraction", s.NodeCleanupMaxFraction,
		"fraction of the driver's nodes; the breaker stops the cleanup when more nodes are lost")
	fs.IntVar(&s.NodeCleanupMinNodes, "node-cleanup-min-nodes", s.NodeCleanupMinNodes,
		"number of lost nodes that never opens the breaker, regardless of --node-cleanup-max-fraction")
	fs.Float64Var(&s.NodeCleanupQPS, "node-cleanup-qps", s.NodeCleanupQPS,
		"maximum deletions per second for missing Nodes without an approval; a Node that is being deleted has no limit")
	fs.IntVar(&s.NodeCleanupBurst, "node-cleanup-burst", s.NodeCleanupBurst,
		"number of deletions that may exceed --node-cleanup-qps at once")
	fs.DurationVar(&s.PVReleaseGrace, "pv-release-grace", s.PVReleaseGrace,
		"with --node-cleanup=volumes: how long the driver may take to delete a released volume before its PV is removed")
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

// Validate returns all errors in s but those of its names, which the configuration of the role checks.
func (s Settings) Validate() error {
	errs := []error{
		OneOf("--node-finalizer-mode", s.NodeFinalizerMode, FinalizerOff, FinalizerRemove, FinalizerManage),
		OneOf("--node-cleanup-scope", s.NodeCleanupScope, ScopeOptIn, ScopeAll),
		OneOf("--node-cleanup-retain", s.NodeCleanupRetain, RetainSkip, RetainClaim),
	}
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	if s.NodeCleanup == "dry-run" {
		errs = append(errs, errors.New("--node-cleanup=dry-run was removed: use report, and doctor for permissions"))
	} else {
		errs = append(errs, OneOf("--node-cleanup", s.NodeCleanup, ModeOff, ModeReport, ModeClaims, ModeVolumes))
	}
	const notNegative = "--%s: must not be negative, got %v"
	check(s.NodeFinalizerTimeout >= 0, notNegative, "node-finalizer-timeout", s.NodeFinalizerTimeout)
	check(s.NodeDeleteGrace >= 0, notNegative, "node-delete-grace", s.NodeDeleteGrace)
	check(s.NodeCleanupWindow >= 0, notNegative, "node-cleanup-window", s.NodeCleanupWindow)
	check(s.PVReleaseGrace >= 0, notNegative, "pv-release-grace", s.PVReleaseGrace)
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

// OneOf returns an error unless the value of a flag is one of known.
func OneOf[T ~string](flag string, value T, known ...T) error {
	if slices.Contains(known, value) {
		return nil
	}
	names := strings.Trim(strings.ReplaceAll(fmt.Sprint(known), " ", ", "), "[]")
	return fmt.Errorf("%s: must be one of %s, got %q", flag, names, value)
}
