package nodecontroller

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// policy is what the operator has set, as far as it decides about volumes and claims.
type policy struct {
	driver string
	ann    annotations
	// mode is report, claims or volumes; dryRun has what destroys only tried.
	mode         CleanupMode
	dryRun       bool
	orphanPath   bool
	scope        CleanupScope
	retain       RetainPolicy
	static       bool // also volumes that the driver has not provisioned
	outOfService bool
	removable    []string // finalizers of volumes that may be taken away
	missingGrace time.Duration
	fencedGrace  time.Duration
	releaseGrace time.Duration
	// clockGap is for how long the clock of a missing node counts without being kept up.
	clockGap time.Duration
	// command is that an administrator has asked for one node by name: there is nothing
	// to wait for, nobody else to ask, and nothing to remember.
	command bool
}

func policyOf(cfg Config, driver string) policy {
	p := policy{
		driver: driver, ann: annotationsOf(driver), mode: cfg.NodeCleanup, orphanPath: slices.Contains(cfg.NodeCleanupPaths, PathOrphan),
		scope: cfg.NodeCleanupScope, retain: cfg.NodeCleanupRetain, static: cfg.NodeCleanupStatic, outOfService: cfg.NodeCleanupOutOfService,
		removable: cfg.PVRemovableFinalizers, missingGrace: cfg.NodeMissingGrace, fencedGrace: cfg.NodeOutOfServiceGrace, releaseGrace: cfg.PVReleaseGrace,
		clockGap: cfg.ClockGap,
	}
	switch {
	case cfg.SkipNodeFinalize:
		p.mode = CleanupOff
	case cfg.NodeCleanup == CleanupDryRun:
		p.mode, p.dryRun = CleanupClaims, true
	}
	return p
}

// writes tells whether anything may be changed.
func (p policy) writes() bool { return p.mode == CleanupClaims || p.mode == CleanupVolumes }

// snapshot is everything that decide may look at about a volume.
type snapshot struct {
	volume *corev1.PersistentVolume // nil: gone
	member membership
	// nodes is the names of its lost, fenced or terminating nodes, as well as they are known.
	nodes []string
	// former is nodes that had one of its values, as far as this process has seen.
	former []string
	// tombstone is what was last seen of the node that is gone; nil when nobody saw it.
	tombstone *tombstone
	claim     *corev1.PersistentVolumeClaim // of the name in claimRef, whatever its UID; nil: none
	noClaim   string                        // the name of the claim that was read and is not there
	wishes    wishes
	namespace types.UID // of that of the claim, where it has been read
	refused   bool      // by that namespace
	// hostRefuses is that a node of the volume that is there, fenced or going, has opted out.
	hostRefuses bool
	// attachments is the VolumeAttachments of the volume.
	attachments []string
	// noticed is since when this process knows that the node is missing; zero: it does
	// not. It serves where nothing may be written.
	noticed time.Time
	// present is when this process last saw what may be its node; zero: it did not, or
	// nothing was written about an absence then.
	present time.Time
	// kept is the clock on the volume that has run since this process took over the work.
	kept     string
	open     bool // the breaker's verdict
	approved bool // of all its nodes
	// forced is that this process has already deleted the volume.
	forced bool
	// unwritable is that the API server has refused, for its own sake, what has to be written
	// on the volume before anything is done for it.
	unwritable bool
	// tried is that the step which destroys was sent in dry-run mode already.
	tried bool
	now   time.Time
	facts *facts // nil: s comes from the caches
}

// wishes is what the people who own a volume have said about its clean-up.
type wishes struct {
	// optIn and optOut name the object with the annotation; "" for none.
	optIn, optOut string
}

// wishesOf collects the annotations of the objects that have a say, by what they are called.
func (a annotations) wishesOf(objects map[string]metav1.Object) wishes {
	var w wishes
	for _, kind := range []string{"PersistentVolume", "PersistentVolumeClaim", "StorageClass", "Namespace", "Node"} {
		obj, ok := objects[kind]
		if !ok {
			continue
		}
		switch value := obj.GetAnnotations()[a.cleanup]; {
		case value == disabled && w.optOut == "":
			w.optOut = kind + " " + kube.Key(obj)
		// Only who asked for the volume, or offers volumes of its class, says yes.
		case value == enabled && w.optIn == "" && (kind == "PersistentVolumeClaim" || kind == "StorageClass"):
			w.optIn = kind + " " + kube.Key(obj)
		}
	}
	return w
}

// outOfScope says why a clean-up is not wanted; "" when it is.
func (p policy) outOfScope(w wishes) string {
	switch {
	case w.optOut != "":
		return w.optOut + " has the annotation " + p.ann.cleanup + ": " + disabled
	case p.scope == ScopeOptIn && w.optIn == "" && !p.command:
		return "neither its StorageClass nor its claim has the annotation " + p.ann.cleanup + ": " + enabled
	}
	return ""
}

// counts tells whether anything is to be done for volumes that are at a place.
func (p policy) counts(where place) bool {
	switch where {
	case placeOrphan:
		return p.writes() && p.orphanPath
	case placeFenced:
		return p.writes() && p.orphanPath && p.outOfService
	case placeTerminating:
		return p.writes()
	}
	return false
}

// tombstone is what is left of a node that was seen going.
type tombstone struct {
	name, uid string
	machine   string // see machineOf
	optedOut  bool
}

func tombstoneOf(node *corev1.Node) tombstone {
	return tombstone{name: node.Name, uid: string(node.UID), machine: machineOf(node)}
}
