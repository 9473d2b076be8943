package pvcfinalizer

import "time"

// Mode says which finalizers of claims are removed.
type Mode string

// The modes.
const (
	ModeOff     Mode = "off"
	ModeStrip   Mode = "strip"   // obsolete finalizers
	ModeEnforce Mode = "enforce" // also the finalizer of the driver, after the pods were deleted
)

// PodDeletion says which pods of a claim that is being deleted are deleted.
type PodDeletion string

// The policies for pods.
const (
	PodsNone     PodDeletion = "none"
	PodsPending  PodDeletion = "pending"  // pods without a node
	PodsOrphaned PodDeletion = "orphaned" // also pods whose Node does not exist or is being deleted
	PodsAll      PodDeletion = "all"
)

// Config holds the settings.
type Config struct {
	Mode        Mode
	Finalizer   string   // of the driver
	Obsolete    []string // finalizers
	PodDeletion PodDeletion
	// PodDeletionGrace is the termination grace period of deleted pods; -1 means that of the pod.
	PodDeletionGrace time.Duration

	Workers                              int
	Timeout                              time.Duration // of each request
	RetryIntervalStart, RetryIntervalMax time.Duration
}
