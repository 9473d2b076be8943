// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
)

// noon is the time of the tables.
var noon = time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)

func ago(d time.Duration) time.Time { return noon.Add(-d) }

// permitted returns facts of a kind that all rules permit, about a volume of the missing host h, or, with a Node, the deleting one.
func permitted(kind Kind, isDeleting bool) (Settings, facts) {
	s := DefaultSettings()
	s.Driver, s.NodeCleanup, s.NodeCleanupScope = testDriver, ModeVolumes, ScopeAll
	s.NodeFinalizer, s.NodeFinalizerMode = testFinalizer, FinalizerRemove
	a := newAPI()
	a.now = ago(time.Hour)
	a.bind("c", "h")
	it, err := readItem(context.Background(), s, a.store, testKey, "pv-c")
	if err != nil {
		panic(err)
	}
	h := hostFacts{Value: "h", Presence: missing, Record: LostNode{Value: "h", UID: "u", Since: ago(time.Hour)}}
	if isDeleting {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "h", UID: "u", Finalizers: []string{testFinalizer}}}
		node.DeletionTimestamp = &metav1.Time{Time: ago(10 * time.Minute)}
		h.Presence, h.Nodes, h.Record.Since = deleting, []*corev1.Node{node}, time.Time{}
	}
	switch kind {
	case KindVolume, KindFinalizers:
		it.Claim = nil
		it.Volume.Status.Phase = corev1.VolumeReleased
		delete(it.Owners, "PersistentVolumeClaim")
	case KindResource:
		it.Resource = &Resource{Name: "r", Node: "h", Handle: "handle-c"}
		it.Claim.DeletionTimestamp = &metav1.Time{Time: ago(time.Minute)}
	}
	return s, facts{Now: noon, Checked: ago(time.Minute), Listed: ago(time.Minute), Kind: kind, Item: &it, Hosts: []hostFacts{h},
		Ready: true}
}

// refusals are, by rule, changes of permitted facts that only this rule refuses.
var refusals = []struct {
	name     string
	rule     string
	kind     Kind
	deleting bool
	change   func(s *Settings, f *facts)
}{
	{"mode report", "mode", KindClaim, false, func(s *Settings, _ *facts) { s.NodeCleanup = ModeReport }},
	{"mode off", "mode", KindClaim, true, func(s *Settings, _ *facts) { s.NodeCleanup = ModeOff }},
	{"an unknown mode", "mode", KindClaim, false, func(s *Settings, _ *facts) { s.NodeCleanup = "dry-run" }},
	{"nothing is cleaned up", "mode", KindClaim, true, func(s *Settings, _ *facts) { s.SkipNodeFinalize = true }},
	{"a volume in mode claims", "mode", KindVolume, false, func(s *Settings, _ *facts) { s.NodeCleanup = ModeClaims }},
	{"finalizers in mode claims", "mode", KindFinalizers, false, func(s *Settings, _ *facts) { s.NodeCleanup = ModeClaims }},
	{"no opt-in", "consent", KindClaim, false, func(s *Settings, _ *facts) { s.NodeCleanupScope = ScopeOptIn }},
	{"an approval without --all", "consent", KindClaim, false, func(s *Settings, f *facts) {
		s.NodeCleanupScope, f.Hosts[0].Record.Approved = ScopeOptIn, noon
	}},
	{"an opt-in of the volume", "consent", KindClaim, false, func(s *Settings, f *facts) {
		s.NodeCleanupScope, f.Item.Volume.Annotations[testAnnotation] = ScopeOptIn, enabled
	}},
	{"--all for one of two hosts", "consent", KindClaim, false, func(s *Settings, f *facts) {
		s.NodeCleanupScope = ScopeOptIn
		f.Hosts = append(f.Hosts, f.Hosts[0])
		f.Hosts[1].Record.Approved, f.Hosts[1].Record.ApprovedAll = noon, true
	}},
	{"a custom resource without a volume", "consent", KindResource, false, func(s *Settings, f *facts) {
		s.NodeCleanupScope, f.VolumesListed = ScopeOptIn, true
		annotate(f.Item.Claim, enabled)
		f.Item = &item{Resource: f.Item.Resource, Owners: map[string]metav1.Object{"PersistentVolumeClaim": f.Item.Claim}}
	}},
	{"the volume opts out", "opt-out", KindVolume, false, func(_ *Settings,
		f *facts) {
		f.Item.Volume.Annotations[testAnnotation] = disabled
	}},
	{"the claim opts out", "opt-out", KindClaim, false, func(_ *Settings, f *facts) { annotate(f.Item.Claim, disabled) }},
	{"the claim has an unknown value", "opt-out", KindClaim, false, func(_ *Settings, f *facts) { annotate(f.Item.Claim, "disbled") }},
	{"the class opts out", "opt-out", KindResource, false, func(_ *Settings, f *facts) {
		annotate(f.Item.Owners["StorageClass"], disabled)
	}},
	{"the Namespace opts out, with an approval of all", "opt-out", KindClaim, false, func(_ *Settings, f *facts) {
		annotate(f.Item.Owners["Namespace"], "")
		f.Hosts[0].Record.Approved, f.Hosts[0].Record.ApprovedAll = noon, true
	}},
	{"the Node opts out", "opt-out", KindClaim, true, func(_ *Settings, f *facts) { annotate(f.Hosts[0].Nodes[0], disabled) }},
	{"the record opts out", "record", KindClaim, false, func(_ *Settings, f *facts) { f.Hosts[0].Record.OptedOut = true }},
	{"the record cannot be parsed", "record", KindClaim, false, func(_ *Settings, f *facts) { f.Hosts[0].Record.Unparsable = true }},
	{"the claim names another volume", "bound", KindClaim, false, func(_ *Settings, f *facts) { f.Item.Claim.Spec.VolumeName = "other" }},
	{"the volume names another claim", "bound", KindClaim, false, func(_ *Settings,
		f *facts) {
		f.Item.Volume.Spec.ClaimRef.UID = "other"
	}},
	{"the volume does not name the UID", "bound", KindVolume, false, func(_ *Settings, f *facts) { f.Item.Volume.Spec.ClaimRef.UID = "" }},
	{"no claim", "bound", KindClaim, false, func(_ *Settings, f *facts) { f.Item.Claim = nil }},
	{"a claimRef with an invalid name", "bound", KindVolume, false, func(_ *Settings,
		f *facts) {
		f.Item.Volume.Spec.ClaimRef.Name = "a/b"
	}},
	{"the claim is Lost", "bound", KindClaim, false, func(_ *Settings, f *facts) { f.Item.Claim.Status.Phase = corev1.ClaimLost }},
	{"the volume is Failed", "bound", KindClaim, false, func(_ *Settings, f *facts) { f.Item.Volume.Status.Phase = corev1.VolumeFailed }},
	{"a custom resource of an unbound volume", "bound", KindResource, false, func(_ *Settings, f *facts) {
		f.Item.Claim, f.Item.Volume.Spec.ClaimRef = nil, nil
	}},
	{"a claim without a volume", "bound", KindClaim, false, func(_ *Settings, f *facts) { f.Item.Volume = nil }},
	{"the claim of a retained volume", "retain", KindClaim, false, func(_ *Settings, f *facts) { reclaim(f, "Retain") }},
	{"a retained volume", "retain", KindVolume, false, func(s *Settings, f *facts) {
		reclaim(f, "Retain")
		s.NodeCleanupRetain = RetainClaim
	}},
	{"the custom resource of a retained volume", "retain", KindResource, false, func(s *Settings, f *facts) {
		reclaim(f, "Retain")
		s.NodeCleanupRetain = RetainClaim
	}},
	{"a snapshot", "snapshot", KindResource, false, func(_ *Settings, f *facts) { f.Item.Resource.Snapshot = true }},
	{"the claim of a recycled volume", "retain", KindClaim, false, func(s *Settings, f *facts) {
		reclaim(f, "Recycle")
		s.NodeCleanupRetain = RetainClaim
	}},
	{"a static volume", "provisioned", KindVolume, false, func(_ *Settings, f *facts) { f.Item.Volume.Annotations = nil }},
	{"finalizers of a volume of another driver", "provisioned", KindFinalizers, false, func(_ *Settings, f *facts) {
		f.Item.Volume.Annotations[storagehelpers.AnnDynamicallyProvisioned] = "other"
	}},
	{"the topology key is unknown", "key", KindClaim, false, func(_ *Settings, f *facts) { f.KeyProblem = "unknown" }},
	{"a node lacks its label", "unlabelled", KindClaim, false, func(_ *Settings, f *facts) { f.Unlabelled = []string{"n"} }},
	{"a Node exists", "absence", KindClaim, false, func(_ *Settings, f *facts) { f.Hosts[0].Presence = present }},
	{"a CSINode exists", "absence", KindClaim, false, func(_ *Settings, f *facts) { f.Hosts[0].Presence = unclear }},
	{"the cache has a Node that the lists lack", "absence", KindClaim, false, func(_ *Settings, f *facts) { f.Hosts[0].Stale = true }},
	{"one of two hosts exists", "absence", KindVolume, false, func(_ *Settings, f *facts) {
		f.Hosts = append(f.Hosts, hostFacts{Value: "other", Presence: present})
	}},
	{"the Nodes were not listed", "absence", KindClaim, false, func(_ *Settings, f *facts) { f.Listed = ago(61 * time.Second) }},
	{"the custom resources are not cached", "absence", KindClaim, true, func(_ *Settings, f *facts) { f.Incomplete = resourcesUnknown }},
	{"no host", "absence", KindClaim, false, func(_ *Settings, f *facts) { f.Hosts = nil }},
	{"an object cannot be read", "absence", KindClaim, false, func(_ *Settings, f *facts) { f.Item.Unread = errors.New("timeout") }},
	{"the Node lacks our finalizer", "deleting", KindClaim, true, func(_ *Settings, f *facts) { f.Hosts[0].Nodes[0].Finalizers = nil }},
	{"the finalizer is not ours in mode off", "deleting", KindClaim, true, func(s *Settings,
		_ *facts) {
		s.NodeFinalizerMode = FinalizerOff
	}},
	{"the Node is another one", "deleting", KindClaim, true, func(_ *Settings, f *facts) { f.Hosts[0].Nodes[0].UID = "other" }},
	{"a second Node", "deleting", KindClaim, true, func(_ *Settings, f *facts) {
		f.Hosts[0].Nodes = append(f.Hosts[0].Nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "second"}})
	}},
	{"the grace of the deletion", "deleting", KindClaim, true, func(_ *Settings, f *facts) {
		f.Hosts[0].Nodes[0].DeletionTimestamp.Time = ago(time.Minute)
	}},
	{"the grace of the deletion has started again", "deleting", KindClaim, true, func(_ *Settings, f *facts) {
		f.Hosts[0].Record.Restarted = ago(time.Minute)
	}},
	{"the Node drains", "deleting", KindClaim, true, func(_ *Settings, f *facts) {
		f.Hosts[0].Nodes[0].Finalizers = append(f.Hosts[0].Nodes[0].Finalizers, "example.com/drain")
		f.Hosts[0].Nodes[0].Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	}},
	{"no record", "grace", KindClaim, false, func(_ *Settings, f *facts) {
		f.Hosts[0].Record = LostNode{Value: "h", Approved: noon}
	}},
	{"missing for less than the grace", "grace", KindClaim, false, func(_ *Settings, f *facts) {
		f.Hosts[0].Record.Since = ago(14 * time.Minute)
	}},
	{"a since in the future", "grace", KindClaim, false, func(_ *Settings, f *facts) { f.Hosts[0].Record.Since = ago(-time.Hour) }},
	{"not watched", "watched", KindClaim, false, func(_ *Settings, f *facts) { f.Checked = ago(11 * time.Minute) }},
	{"the last check is in the future", "watched", KindClaim, false, func(_ *Settings, f *facts) { f.Checked = ago(-time.Hour) }},
	{"held", "breaker", KindClaim, false, func(_ *Settings, f *facts) { f.Hosts[0].Record.Held = HeldByBreaker }},
	{"held and planned", "breaker", KindClaim, true, func(_ *Settings, f *facts) {
		f.Hosts[0].Record.Held, f.Hosts[0].Record.Planned = HeldByBreaker, true
	}},
	{"the breaker is open", "breaker", KindClaim, true, func(_ *Settings, f *facts) { f.Open = true }},
	{"no node is ready", "ready", KindClaim, false, func(_ *Settings, f *facts) { f.Ready = false }},
	{"a pod on another Node", "use", KindClaim, false, func(_ *Settings, f *facts) { f.Item.Users = []string{"ns/pod"} }},
	{"attached", "attached", KindVolume, false, func(_ *Settings, f *facts) { f.Item.Attachments = []string{"va"} }},
	{"finalizers of an attached volume", "attached", KindFinalizers, false, func(_ *Settings, f *facts) {
		f.Item.Attachments = []string{"va"}
	}},
	{"the claim exists", "order", KindVolume, false, func(_ *Settings, f *facts) { f.Item.Claim = boundClaim(f) }},
	{"a volume while the Node is being deleted", "order", KindVolume, true, func(*Settings, *facts) {}},
	{"the volume is Bound", "order", KindVolume, false, func(_ *Settings, f *facts) { f.Item.Volume.Status.Phase = corev1.VolumeBound }},
	{"the driver may delete the volume", "order", KindVolume, false, func(_ *Settings, f *facts) {
		f.Item.Volume.Status.LastPhaseTransitionTime = &metav1.Time{Time: ago(9 * time.Minute)}
	}},
	{"the release is not recorded, and the loss is new", "order", KindVolume, false, func(s *Settings, f *facts) {
		f.Item.Volume.Status.LastPhaseTransitionTime = nil
		s.NodeMissingGrace, f.Hosts[0].Record.Since = time.Minute, ago(9*time.Minute)
	}},
	{"the custom resource of a volume with a claim", "order", KindResource, false, func(_ *Settings, f *facts) {
		f.Item.Claim.DeletionTimestamp = nil
	}},
	{"the volumes were not listed", "order", KindResource, false, func(_ *Settings,
		f *facts) {
		f.Item = &item{Resource: f.Item.Resource}
	}},
	{"another node was lost", "unchanged", KindClaim, true, func(_ *Settings, f *facts) { f.Changed = true }},
}

func annotate(obj metav1.Object, value string) {
	obj.SetAnnotations(map[string]string{testAnnotation: value})
}

func reclaim(f *facts, policy corev1.PersistentVolumeReclaimPolicy) {
	f.Item.Volume.Spec.PersistentVolumeReclaimPolicy = policy
}

func boundClaim(f *facts) *corev1.PersistentVolumeClaim {
	c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: testNamespace, Name: "c",
		UID: f.Item.Volume.Spec.ClaimRef.UID}}
	c.Spec.VolumeName = f.Item.Volume.Name
	return c
}

// without runs f without a rule.
func without(name string, f func() bool) bool {
	all := rules
	defer func() { rules = all }()
	rules = slices.DeleteFunc(slices.Clone(all), func(r rule) bool { return r.name == name })
	return f()
}

// TestRules checks that all rules permit a deletion, and that each of them refuses something that no other rule refuses.
func TestRules(t *testing.T) {
	for _, kind := range []Kind{KindClaim, KindVolume, KindFinalizers, KindResource} {
		for _, isDeleting := range []bool{false, true} {
			volume := kind == KindVolume || kind == KindFinalizers
			s, f := permitted(kind, isDeleting)
			if reasons := mayClean(s, f); len(reasons) > 0 && !(volume && isDeleting) {
				t.Errorf("%s, deleting %v: refused: %v", kind, isDeleting, reasons)
			}
		}
	}
	rows := map[string]int{}
	for _, c := range refusals {
		s, f := permitted(c.kind, c.deleting)
		c.change(&s, &f)
		reasons := mayClean(s, f)
		rows[c.rule]++
		if len(reasons) == 0 {
			t.Errorf("%s: rule %s does not refuse it", c.name, c.rule)
		}
		if !without(c.rule, func() bool { return len(mayClean(s, f)) == 0 }) {
			t.Errorf("%s: not only rule %s refuses it: %v", c.name, c.rule, reasons)
		}
	}
	for _, r := range rules {
		if rows[r.name] == 0 {
			t.Errorf("rule %s has no row", r.name)
		}
	}
}

// TestRulesPermit checks approvals and settings that end a refusal.
func TestRulesPermit(t *testing.T) {
	for name, change := range map[string]func(s *Settings, f *facts){
		"an opt-in of the claim": func(s *Settings, f *facts) {
			s.NodeCleanupScope = ScopeOptIn
			annotate(f.Item.Claim, enabled)
		},
		"an opt-in of the class": func(s *Settings, f *facts) {
			s.NodeCleanupScope = ScopeOptIn
			annotate(f.Item.Owners["StorageClass"], enabled)
		},
		"an approval of all": func(s *Settings, f *facts) {
			s.NodeCleanupScope = ScopeOptIn
			f.Hosts[0].Record.Approved, f.Hosts[0].Record.ApprovedAll = noon, true
		},
		"an approval in the grace": func(_ *Settings, f *facts) {
			f.Hosts[0].Record.Since, f.Hosts[0].Record.Approved = ago(time.Minute), noon
		},
		"an approval while the breaker is open": func(_ *Settings, f *facts) {
			f.Open, f.Hosts[0].Record.Approved = true, noon
		},
		"a planned removal while the breaker is open": func(_ *Settings, f *facts) {
			f.Open, f.Hosts[0].Record.Planned = true, true
		},
		"the claim of a retained volume": func(s *Settings, f *facts) {
			reclaim(f, "Retain")
			s.NodeCleanupRetain = RetainClaim
		},
		"a check before the loss": func(_ *Settings, f *facts) {
			f.Hosts[0].Record.Since, f.Hosts[0].Record.Approved, f.Checked = ago(time.Minute), noon, ago(time.Hour)
		},
	} {
		s, f := permitted(KindClaim, false)
		change(&s, &f)
		if reasons := mayClean(s, f); len(reasons) > 0 {
			t.Errorf("%s: refused: %v", name, reasons)
		}
	}
}

// foundByHistories are the rules without which a random history breaks a promise. All but "watched", for which a process would have
// to be suspended after it has listed the Nodes: TestRules has its rows.
var foundByHistories = []string{
	"mode", "consent", "opt-out", "record", "bound", "retain", "snapshot", "provisioned", "key", "unlabelled", "absence", "deleting",
	"grace", "breaker", "ready", "use", "attached", "order", "unchanged",
}

// TestDroppedRules checks that TestPromises finds the absence of a rule.
func TestDroppedRules(t *testing.T) {
	const limit = 20_000
	for _, name := range foundByHistories {
		n := uint64(0)
		for ; n < limit; n++ {
			h := randomHistory(rand.New(rand.NewPCG(11, n)))
			if without(name, func() bool { return execute(h, nil) != nil }) {
				if err := execute(h, nil); err != nil {
					t.Errorf("history %d also breaks a promise with rule %s: %v", n, name, err)
				}
				break
			}
		}
		t.Logf("without rule %s, history %d breaks a promise", name, n)
		if n == limit {
			t.Errorf("without rule %s, none of %d histories breaks a promise", name, limit)
		}
	}
}
