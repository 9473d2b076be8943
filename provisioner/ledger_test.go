// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// TestEndOfProtection applies the end of a request and decides about its claim: only a request whose record is on
// the claim ends the protection.
func TestEndOfProtection(t *testing.T) {
	d, claim := testDriver(nil), testClaim(func(c *corev1.PersistentVolumeClaim) { recorded(c); deleting(c) })
	resumed, err := d.resume(claim, testClass(nil), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	next := testCall(intent.Planned, nil).Payload
	called := change{Event: intent.Send}
	for name, tt := range map[string]struct {
		changes []change
		want    action
	}{
		"own record, never called":     {[]change{begin(intent.Plan, recordID, next)}, doUnprotect},
		"own record, called":           {[]change{begin(intent.Plan, recordID, next), called, outcomeUnknown()}, doUnprotect},
		"another record, never called": {[]change{begin(intent.Plan, "process-2", next)}, doBegin},
		"another record, called":       {[]change{begin(intent.Plan, "process-2", next), called, outcomeUnknown()}, doBegin},
		"resumed from the record":      {[]change{begin(intent.Resume, "process-2", resumed)}, doUnprotect},
	} {
		o := newOperations()
		for _, c := range append(tt.changes, noVolume(nil)) {
			if _, _, err := o.Apply(keyOf(claim), c); err != nil {
				t.Fatal(err)
			}
		}
		if got := d.decide(claimState{claim: claim, class: testClass(nil), call: o.Get(keyOf(claim)), now: now}); got.action != tt.want {
			t.Errorf("%s: %v because %s, want %v", name, got.action, got.reason, tt.want)
		}
	}
}

// TestRecordOn: an event about the own record must not cut short a back-off; one about that of an earlier leader
// wakes the claim.
func TestRecordOn(t *testing.T) {
	saved := call{State: intent.Settled, Payload: operation{saved: true}}
	resumed := testCall(intent.Settled, ofEarlier)
	for name, tt := range map[string]struct {
		call  call
		claim *corev1.PersistentVolumeClaim
		want  intent.Recorded
	}{
		"of an earlier leader":                   {call{}, testClaim(recorded), intent.Other},
		"of an earlier leader, after its own":    {ended("other"), testClaim(recorded), intent.Other},
		"of an earlier leader, and resumed":      {testCall(intent.Unknown, ofEarlier), testClaim(recorded), intent.Other},
		"of an earlier leader, resumed, settled": {resumed, testClaim(recorded), intent.Own},
		"own, in progress":                       {testCall(intent.Unknown, nil), testClaim(recorded), intent.Own},
		"own, being removed":                     {ended(recordID), testClaim(recorded), intent.Own},
		"own, the PersistentVolume was saved":    {saved, testClaim(recorded), intent.Own},
		"the finalizer alone":                    {call{}, testClaim(protected), intent.Other},
		"the finalizer alone, resumed":           {call{State: intent.Unknown}, testClaim(protected), intent.Own},
		"none":                                   {ended(recordID), testClaim(nil), intent.None},
	} {
		if got := testDriver(nil).recordOn(tt.claim, false, tt.call); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}

// TestSourceOfCalls follows calls that copy a source.
func TestSourceOfCalls(t *testing.T) {
	source := volumerules.Source{Kind: kube.KindClaim, Namespace: "ns", Name: "source"}
	var released []volumerules.Source
	o := newOperations()
	o.sourceReleased = func(key *volumerules.Source) { released = append(released, *key) }
	do := func(key claimKey, c change) {
		t.Helper()
		if _, _, err := o.Apply(key, c); err != nil {
			t.Fatal(err)
		}
	}
	check := func(copied bool, releases int) {
		t.Helper()
		if got := o.copies(source); got != copied || len(released) != releases {
			t.Errorf("a call copies the source: %t, it was released %d times; want %t and %d", got, len(released), copied, releases)
		}
	}
	a, b := claimKey{"ns", "a", "a"}, claimKey{"ns", "b", "b"}
	do(a, begin(intent.Plan, "a", operation{source: &source}))
	do(b, begin(intent.Resume, "b", operation{source: &source}))
	check(true, 0)
	do(a, change{Event: intent.Send})
	do(a, outcomeUnknown())
	check(true, 0)
	if !o.Forget(a) {
		t.Error("an indeterminate call is forgotten")
	}
	do(a, noVolume(nil))
	check(true, 1)
	do(b, volumeCreated("", ourVolume()))
	do(b, pvSaved())
	check(false, 2)
	if o.Forget(a) || o.Forget(b) {
		t.Error("a settled call is kept")
	}
	for key := range o.All() {
		t.Errorf("the call of %s is left", key)
	}
}

// TestHolderOf: a volume that the driver returns for two claims belongs to the second once the call for the first has ended.
func TestHolderOf(t *testing.T) {
	o := newOperations()
	a, b := claimKey{"ns", "a", "a"}, claimKey{"ns", "b", "b"}
	for _, key := range []claimKey{a, b} {
		for _, c := range []change{begin(intent.Plan, "id", operation{}), {Event: intent.Send}, volumeCreated("v", ourVolume())} {
			if _, _, err := o.Apply(key, c); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, want := range []claimKey{a, b} {
		if holder, held := o.holderOf("v"); !held || holder != want {
			t.Errorf("%v, %v, want %v", holder, held, want)
		}
		if _, _, err := o.Apply(want, noVolume(nil)); err != nil {
			t.Fatal(err)
		}
	}
	if holder, held := o.holderOf("v"); held || len(o.byHandle) > 0 {
		t.Errorf("held by %v", holder)
	}
}

// TestChangeDuringARequest: a request that the driver calls invalid is repeated without delay if an object that it was
// prepared from has changed since.
func TestChangeDuringARequest(t *testing.T) {
	for changed, want := range map[bool]*infeasible{true: nil, false: {until: now}} {
		o, key := newOperations(), claimKey{"ns", "c", uid}
		for _, c := range []change{begin(intent.Plan, "a", operation{}), {Event: intent.Send}} {
			if _, _, err := o.Apply(key, c); err != nil {
				t.Fatal(err)
			}
		}
		if changed {
			o.allowRetry(key)
		}
		_, _, err := o.Apply(key, noVolume(&infeasible{until: now}))
		if got := o.Get(key).Payload.infeasible; err != nil || !cmp.Equal(got, want, cmp.AllowUnexported(infeasible{})) {
			t.Errorf("changed %t: %+v, %v", changed, got, err)
		}
	}
}
