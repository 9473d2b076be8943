// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// TestDrawing compares the drawing in doc.go with the table of transitions.
func TestDrawing(t *testing.T) {
	text, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	type arrow struct{ from, transition, to string }
	var drawn, want []arrow
	for _, m := range regexp.MustCompile(`(?m)^//\t(\w+) +─ (\w+) ─+► (\w+)`).FindAllStringSubmatch(string(text), -1) {
		drawn = append(drawn, arrow{m[1], m[2], m[3]})
	}
	for name, stages := range transitions {
		for from, to := range stages {
			if from != to {
				want = append(want, arrow{from.String(), string(name), to.String()})
			}
		}
	}
	for _, a := range drawn {
		if !slices.Contains(want, a) {
			t.Errorf("doc.go draws %v, which is illegal", a)
		}
	}
	for _, a := range want {
		if !slices.Contains(drawn, a) {
			t.Errorf("doc.go does not draw %v", a)
		}
	}
	if len(drawn) != len(want) {
		t.Errorf("doc.go draws %d transitions, there are %d", len(drawn), len(want))
	}
}

// allTransitions has one value of each constructor.
func allTransitions() []transition {
	return []transition{
		noTopology(true), beginRequest(operation{}), beginRequest(operation{called: true}), prepareAgain(operation{}),
		secretsRead(&csi.CreateVolumeRequest{}, nil),
		createCalled(),
		outcomeUnknown(), recordNotWritten(""),
		volumeCreated(ourVolume(), nil), volumeRejected(nil, nil, errUnusable), noVolume(nil),
		pvNotSaved(true, true), pvSaved(),
		claimUnprotected(), claimRefetched(true), claimRefetched(false),
	}
}

// TestTransitions tries each transition in each stage: it leads where the table says, or is
// an error that changes nothing.
func TestTransitions(t *testing.T) {
	names := map[transitionName]bool{}
	for _, tr := range allTransitions() {
		names[tr.name] = true
		for from := pending; from <= pvCreated; from++ {
			o, key := newOperations(), claimKey{"ns", "c", uid}
			before := operation{stage: from, request: &csi.CreateVolumeRequest{}, announced: true}
			stored := before
			o.byClaim[key] = &stored
			_, after, err := o.transition(key, tr)
			to, legal := transitions[tr.name][from]
			switch {
			case legal && (err != nil || after != to || o.get(key).stage != to):
				t.Errorf("%s in %s leads to %s, %v, want %s", tr.name, from, o.get(key).stage, err, to)
			case legal && !o.get(key).announced:
				t.Errorf("%s in %s forgets that the claim was announced", tr.name, from)
			case !legal && (err == nil || o.get(key).stage != from || o.get(key).called != before.called):
				t.Errorf("%s in %s is not refused: %v, %+v", tr.name, from, err, o.get(key))
			}
		}
	}
	if got, want := slices.Sorted(maps.Keys(names)), slices.Sorted(maps.Keys(transitions)); !slices.Equal(got, want) {
		t.Errorf("constructors for %q, table of %q", got, want)
	}
}

// TestEndOfProtection applies the end of a request and decides about its claim: only a request whose record is on
// the claim ends the protection.
func TestEndOfProtection(t *testing.T) {
	d, claim := testDriver(nil), testClaim(func(c *corev1.PersistentVolumeClaim) { recorded(c); deleting(c) })
	resumed, err := d.resume(claim, testClass(nil), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	own, others := testOperation(requested, nil), testOperation(requested, ofAnother)
	for name, tt := range map[string]struct {
		transitions []transition
		want        action
	}{
		"own record, never called":     {[]transition{beginRequest(own)}, doUnprotect},
		"own record, called":           {[]transition{beginRequest(own), createCalled(), outcomeUnknown()}, doUnprotect},
		"another record, never called": {[]transition{beginRequest(others)}, doBegin},
		"another record, called":       {[]transition{beginRequest(others), createCalled(), outcomeUnknown()}, doBegin},
		"resumed from the record":      {[]transition{beginRequest(resumed)}, doUnprotect},
	} {
		o := newOperations()
		for _, tr := range append(tt.transitions, noVolume(nil)) {
			if _, _, err := o.transition(keyOf(claim), tr); err != nil {
				t.Fatal(err)
			}
		}
		if got := d.decide(claimState{claim: claim, class: testClass(nil), op: o.get(keyOf(claim)), now: now}); got.action != tt.want {
			t.Errorf("%s: %v because %s, want %v", name, got.action, got.reason, tt.want)
		}
	}
}

// TestLeavesRecord: an event about the own record must not cut short a back-off; one about that of an earlier leader
// wakes the claim.
func TestLeavesRecord(t *testing.T) {
	for name, tt := range map[string]struct {
		op    operation
		claim *corev1.PersistentVolumeClaim
		want  bool
	}{
		"of an earlier leader":                {operation{}, testClaim(recorded), true},
		"of an earlier leader, after its own": {operation{finalResult: true, recordID: "other"}, testClaim(recorded), true},
		"own, in progress":                    {testOperation(indeterminate, nil), testClaim(recorded), false},
		"own, being removed":                  {operation{finalResult: true, recordID: recordID}, testClaim(recorded), false},
		"own, the PersistentVolume was saved": {operation{stage: pvCreated}, testClaim(recorded), false},
		"none":                                {operation{}, testClaim(nil), false},
	} {
		if got := tt.op.leavesRecord(tt.claim); got != tt.want {
			t.Errorf("%s: %t, want %t", name, got, tt.want)
		}
	}
}

// TestSourceIsCounted follows an operation that copies a source.
func TestSourceIsCounted(t *testing.T) {
	source := volumerules.Source{Kind: kube.KindClaim, Namespace: "ns", Name: "source"}
	var released []volumerules.Source
	o := newOperations()
	o.sourceReleased = func(key *volumerules.Source) { released = append(released, *key) }
	do := func(key claimKey, tr transition) {
		t.Helper()
		if _, _, err := o.transition(key, tr); err != nil {
			t.Fatal(err)
		}
	}
	check := func(copying, releases int) {
		t.Helper()
		if got := o.copying(source); got != copying || len(released) != releases {
			t.Errorf("%d operations copy the source, it was released %d times; want %d and %d", got, len(released), copying, releases)
		}
	}
	a, b := claimKey{"ns", "a", "a"}, claimKey{"ns", "b", "b"}
	do(a, beginRequest(operation{source: &source}))
	do(b, beginRequest(operation{source: &source, called: true}))
	check(2, 0)
	do(a, createCalled())
	do(a, outcomeUnknown())
	do(b, prepareAgain(operation{}))
	check(2, 0)
	if !o.forget(a) {
		t.Error("an indeterminate operation is forgotten")
	}
	do(a, noVolume(nil))
	check(1, 1)
	do(b, volumeCreated(ourVolume(), nil))
	do(b, pvSaved())
	check(0, 2)
	if o.forget(a) || o.forget(b) || len(o.byClaim) != 0 || len(o.copies) != 0 {
		t.Errorf("%d operations and %d counts are left", len(o.byClaim), len(o.copies))
	}
}

// TestChangeDuringARequest: a request that the driver calls invalid is repeated without delay if an object that it was
// prepared from has changed since.
func TestChangeDuringARequest(t *testing.T) {
	for changed, want := range map[bool]*infeasible{true: nil, false: {attributes: "gold"}} {
		o, key := newOperations(), claimKey{"ns", "c", uid}
		for _, tr := range []transition{beginRequest(operation{}), createCalled()} {
			if _, _, err := o.transition(key, tr); err != nil {
				t.Fatal(err)
			}
		}
		if changed {
			o.allowRetry(key)
		}
		_, _, err := o.transition(key, noVolume(&infeasible{attributes: "gold"}))
		if got := o.get(key).infeasible; err != nil || !cmp.Equal(got, want, cmp.AllowUnexported(infeasible{})) {
			t.Errorf("changed %t: %+v, %v", changed, got, err)
		}
	}
}

// TestIllegalTransition has a sync fail, and not panic, and a lock released.
func TestIllegalTransition(t *testing.T) {
	o := newOperations()
	released := false
	tr := pvSaved()
	tr.release = func() { released = true }
	if _, _, err := o.transition(claimKey{"ns", "c", uid}, tr); err == nil || !released {
		t.Errorf("error %v, released %t", err, released)
	}
	if o.unresolved(nil) != 0 || len(o.byClaim) != 0 {
		t.Error("an illegal transition leaves an operation")
	}
}
