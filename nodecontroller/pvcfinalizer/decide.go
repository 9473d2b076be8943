// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package pvcfinalizer

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// rules are the settings as decide uses them.
type rules struct {
	obsolete  []string    // finalizers that are removed from all claims
	finalizer string      // enforced; empty: none
	pods      PodDeletion // with finalizer
}

// newRules returns the rules of cfg. The enforced finalizer is never obsolete, even if both settings
// name it: a claim would lose it before its pods are deleted.
func newRules(cfg Config) rules {
	var r rules
	if cfg.Mode == ModeStrip || cfg.Mode == ModeEnforce {
		r.obsolete = slices.Clone(cfg.Obsolete)
	}
	if cfg.Mode == ModeEnforce {
		r.finalizer, r.pods = cfg.Finalizer, cfg.PodDeletion
		r.obsolete = slices.DeleteFunc(r.obsolete, func(f string) bool { return f == r.finalizer })
	}
	return r
}

// idle reports whether no claim needs anything.
func (r rules) idle() bool { return len(r.obsolete) == 0 && r.finalizer == "" }

// needPods reports whether the pods of a claim matter.
func (r rules) needPods() bool { return r.finalizer != "" && r.pods != PodsNone }

// needNodes reports whether the nodes of these pods matter.
func (r rules) needNodes() bool { return r.finalizer != "" && r.pods == PodsOrphaned }

// concerns reports whether pvc may need something. Other claims are not enqueued.
func (r rules) concerns(pvc *corev1.PersistentVolumeClaim) bool {
	return r.strippable(pvc) || r.enforced(pvc)
}

// strippable reports whether pvc has an obsolete finalizer. The driver of pvc does not matter.
func (r rules) strippable(pvc *corev1.PersistentVolumeClaim) bool {
	return slices.ContainsFunc(pvc.Finalizers, func(f string) bool { return slices.Contains(r.obsolete, f) })
}

// enforced reports whether pvc is being deleted and has the enforced finalizer.
func (r rules) enforced(pvc *corev1.PersistentVolumeClaim) bool {
	return r.finalizer != "" && pvc.DeletionTimestamp != nil && slices.Contains(pvc.Finalizers, r.finalizer)
}

// deletes reports whether pod, which uses a claim that is being deleted, must be deleted. lost
// means that the Node of pod does not exist or is being deleted.
func (r rules) deletes(pod *corev1.Pod, lost bool) bool {
	if pod.DeletionTimestamp != nil {
		return false
	}
	switch r.pods {
	case PodsPending:
		return pod.Spec.NodeName == ""
	case PodsOrphaned:
		return pod.Spec.NodeName == "" || lost
	case PodsAll:
		return true
	}
	return false
}

// claimState is everything that decide reads.
type claimState struct {
	claim *corev1.PersistentVolumeClaim
	pods  []*corev1.Pod // that use claim
	// podsUnknown means that other pods may use claim: the watch has not listed them yet.
	podsUnknown bool
	lost        map[string]bool // nodes of pods that do not exist or are being deleted
	now         time.Time
}

// step is what to do for a claim, in the order of the fields.
type step struct {
	reason  string
	strip   bool          // remove the obsolete finalizers; the resulting event enqueues the claim again
	pods    []*corev1.Pod // to delete
	release bool          // remove the enforced finalizer
	again   time.Time     // enqueue the claim again; zero: when it changes
}

const (
	// othersRecheck is the time between two reconciliations of a claim that other finalizers keep.
	othersRecheck = 10 * time.Second
	// podsRecheck is the time between two reconciliations while the pods are not known.
	podsRecheck = time.Second
)

// decide returns the next step for a claim. It has no side effects.
//
// The finalizer is removed only as the last one: until then, new pods may use the claim.
func (r rules) decide(s claimState) step {
	switch {
	case r.strippable(s.claim):
		return step{reason: "ObsoleteFinalizer", strip: true}
	case !r.enforced(s.claim):
		return step{reason: "NothingToDo"}
	case s.podsUnknown:
		return step{reason: "PodsUnknown", again: s.now.Add(podsRecheck)}
	}
	next := step{reason: "LastFinalizer", release: true}
	if slices.ContainsFunc(s.claim.Finalizers, func(f string) bool { return f != r.finalizer }) {
		next = step{reason: "OtherFinalizers", again: s.now.Add(othersRecheck)}
	}
	for _, pod := range s.pods {
		if r.deletes(pod, s.lost[pod.Spec.NodeName]) {
			next.reason, next.pods = "UsedByPods", append(next.pods, pod)
		}
	}
	return next
}
