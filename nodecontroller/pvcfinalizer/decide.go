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
	obsolete  []string // finalizers that are removed from all claims
	finalizer string   // enforced; empty: none
}

// newRules returns the rules of cfg. The enforced finalizer is never obsolete, even if both settings
// name it: a claim would lose it before its pods are deleted.
func newRules(cfg Config) rules {
	var r rules
	if cfg.Mode == ModeStrip || cfg.Mode == ModeEnforce {
		r.obsolete = slices.Clone(cfg.Obsolete)
	}
	if cfg.Mode == ModeEnforce {
		r.finalizer = cfg.Finalizer
		r.obsolete = slices.DeleteFunc(r.obsolete, func(f string) bool { return f == r.finalizer })
	}
	return r
}

// idle reports whether no claim needs anything.
func (r rules) idle() bool { return len(r.obsolete) == 0 && r.finalizer == "" }

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

// claimState is everything that decide reads.
type claimState struct {
	claim *corev1.PersistentVolumeClaim
	pods  []*corev1.Pod // that use claim
	// podsUnknown means that other pods may use claim: the watch has not listed them yet.
	podsUnknown bool
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
		if pod.DeletionTimestamp == nil {
			next.reason, next.pods = "UsedByPods", append(next.pods, pod)
		}
	}
	return next
}
