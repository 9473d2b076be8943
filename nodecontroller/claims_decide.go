package nodecontroller

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// claimRules is what the operator set, as far as it is about claims.
type claimRules struct {
	driver     string
	obsolete   []string          // finalizers that are removed wherever they are
	finalizer  string            // that has its pods deleted; empty: none has
	pods       PodDeletionPolicy // which of them
	nudge      bool              // has pods touched whose file system is to grow
	annotation string            // by which that is done
}

func newClaimRules(cfg Config, driver string) claimRules {
	r := claimRules{driver: driver, nudge: cfg.ResizeNudge, annotation: cfg.ResizeAnnotation}
	if cfg.PVCFinalizerMode == ClaimStrip || cfg.PVCFinalizerMode == ClaimEnforce {
		r.obsolete = slices.Clone(cfg.PVCObsoleteFinalizers)
	}
	if cfg.PVCFinalizerMode == ClaimEnforce {
		r.finalizer, r.pods = cfg.PVCFinalizer, cfg.PVCPodDeletion
		// What is worked with is not obsolete, even where both settings name it: a claim
		// would lose it before its pods are gone.
		r.obsolete = slices.DeleteFunc(r.obsolete, func(f string) bool { return f == r.finalizer })
	}
	return r
}

// idle tells whether there is nothing to do for any claim.
func (r claimRules) idle() bool { return len(r.obsolete) == 0 && r.finalizer == "" && !r.nudge }

// needPods tells whether something depends on who uses a claim.
func (r claimRules) needPods() bool {
	return r.nudge || r.finalizer != "" && r.pods != PodsNone
}

// needNodes tells whether something depends on whether the node of a pod exists.
func (r claimRules) needNodes() bool { return r.finalizer != "" && r.pods == PodsOrphaned }

// concern tells whether there may be something to do for pvc. For most claims of a cluster
// there is not, and they never come into the queue.
func (r claimRules) concern(pvc *corev1.PersistentVolumeClaim) bool {
	return r.strippable(pvc) || r.enforced(pvc) || r.nudge && pvc.DeletionTimestamp == nil && resizePending(pvc)
}

// claimSnapshot is everything that decide may look at.
type claimSnapshot struct {
	claim *corev1.PersistentVolumeClaim // nil: gone
	users []*corev1.Pod                 // the pods that use claim
	blind bool                          // there may be more of them
	// lost is the names of nodes of these pods that are gone, or being deleted.
	lost map[string]bool
	// ours tells whether the volume of claim is one of the driver.
	ours bool
	// confirmed tells that the API server itself has said that claim is as it is here.
	confirmed bool
	// handled is the pods for which everything was done in this sync.
	handled map[types.UID]bool
	// since is when the file system of claim had to grow, if it has to.
	since time.Time
	now   time.Time
}

// claimAction is the one next thing to do for a claim.
type claimAction int

const (
	claimNothing claimAction = iota
	claimStrip               // remove the obsolete finalizers
	claimConfirm             // ask the API server for the claim
	claimEvict               // delete pods
	claimRelease             // remove the finalizer that has pods deleted
	claimNudge               // touch pods
)

// String is the name of a in the log.
func (a claimAction) String() string {
	return [...]string{"nothing", "strip", "confirm", "evict", "release", "nudge"}[a]
}

// claimStep is what decide has chosen, and with what.
type claimStep struct {
	action claimAction
	reason string
	pods   []*corev1.Pod // of claimEvict and claimNudge
	again  time.Time     // with claimNothing: look again then; zero: when something changes
}

// enforceRecheck is the time between two looks at a claim that others still hold.
const enforceRecheck = 10 * time.Second

// decide names the one next step for a claim. It has no side effects, and is total:
// every snapshot, however odd, has an answer.
func (r claimRules) decide(s claimSnapshot) claimStep {
	switch {
	case s.claim == nil:
		return claimStep{reason: "Gone"}
	case r.strippable(s.claim):
		return claimStep{action: claimStrip, reason: "ObsoleteFinalizer"}
	case r.enforced(s.claim) && s.blind:
		return claimStep{reason: "PodsNotKnown"}
	case r.enforced(s.claim):
		return r.decideEnforced(s)
	case s.claim.DeletionTimestamp != nil:
		return claimStep{reason: "Deleting"}
	case s.blind:
		return claimStep{reason: "PodsNotKnown"}
	}
	return r.decideNudge(s)
}

// usesClaim tells whether pod uses pvc. The claim of a generic ephemeral volume has to be
// the own one of the pod: another claim may have its name, and the pod does not run then.
func usesClaim(pod *corev1.Pod, pvc *corev1.PersistentVolumeClaim) bool {
	return pod.Namespace == pvc.Namespace && slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
		switch {
		case v.PersistentVolumeClaim != nil:
			return v.PersistentVolumeClaim.ClaimName == pvc.Name
		case v.Ephemeral != nil:
			return pod.Name+"-"+v.Name == pvc.Name && metav1.IsControlledBy(pvc, pod)
		}
		return false
	})
}
