// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package pvcfinalizer

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	testFinalizer = "local.example.com/pvc"
	testObsolete  = "old.example.com/pvc"
)

var testNow = time.Date(2026, 5, 6, 7, 8, 9, 0, time.UTC)

func testRules(change func(*Config)) rules {
	cfg := Config{Mode: ModeEnforce, Finalizer: testFinalizer, Obsolete: []string{testObsolete}}
	if change != nil {
		change(&cfg)
	}
	return newRules(cfg)
}

// claimWith returns a claim with finalizers.
func claimWith(finalizers ...string) *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c", UID: "u", Finalizers: finalizers}}
}

// deletingWith returns a claim with finalizers that is being deleted.
func deletingWith(finalizers ...string) *corev1.PersistentVolumeClaim {
	pvc := claimWith(finalizers...)
	pvc.DeletionTimestamp = &metav1.Time{Time: testNow}
	return pvc
}

// podOf returns a pod of the claim.
func podOf(name string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name)}}
}

func terminating(pod *corev1.Pod) *corev1.Pod {
	pod.DeletionTimestamp = &metav1.Time{Time: testNow}
	return pod
}

func TestDecide(t *testing.T) {
	pods := []*corev1.Pod{podOf("a"), podOf("b"), terminating(podOf("leaving"))}
	mode := func(m Mode) func(*Config) { return func(c *Config) { c.Mode = m } }
	enforced, shared := deletingWith(testFinalizer), deletingWith(testFinalizer, "x/y")
	others := testNow.Add(othersRecheck)
	tests := map[string]struct {
		rules func(*Config)
		s     claimState
		want  step
		pods  string
	}{
		"no finalizer":                       {s: claimState{claim: claimWith()}},
		"obsolete finalizer first":           {s: claimState{claim: deletingWith(testFinalizer, testObsolete)}, want: step{strip: true}},
		"obsolete finalizer of a live claim": {s: claimState{claim: claimWith(testObsolete)}, want: step{strip: true}},
		"off":                                {rules: mode(ModeOff), s: claimState{claim: deletingWith(testObsolete, testFinalizer)}},
		"strip does not enforce":             {rules: mode(ModeStrip), s: claimState{claim: enforced, pods: pods}},
		"the enforced finalizer is never obsolete": {rules: func(c *Config) { c.Obsolete = []string{testFinalizer} },
			s: claimState{claim: claimWith(testFinalizer)}},
		"deleted claim without our finalizer": {s: claimState{claim: deletingWith("x/y"), pods: pods}},
		"claim with our finalizer that stays": {s: claimState{claim: claimWith(testFinalizer), pods: pods}},
		"pods are not known yet": {s: claimState{claim: enforced, podsUnknown: true},
			want: step{again: testNow.Add(podsRecheck)}},
		"the last finalizer after the pods": {s: claimState{claim: enforced, pods: pods}, want: step{release: true}, pods: "[a b]"},
		"all pods but those that are being deleted": {s: claimState{claim: shared, pods: pods}, want: step{again: others},
			pods: "[a b]"},
		"other finalizers": {s: claimState{claim: deletingWith("x/y", testFinalizer)},
			want: step{again: others}},
		"ours is the last finalizer": {s: claimState{claim: enforced}, want: step{release: true}},
		"ours is the last finalizer and exists twice": {s: claimState{claim: deletingWith(testFinalizer, testFinalizer)},
			want: step{release: true}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			r := testRules(tt.rules)
			tt.s.now = testNow
			got := r.decide(tt.s)
			if tt.pods == "" {
				tt.pods = "[]"
			}
			if got.strip != tt.want.strip || got.release != tt.want.release || podNames(got.pods) != tt.pods ||
				!got.again.Equal(tt.want.again) || got.reason == "" {
				t.Errorf("got %+v, pods %s; want %+v, pods %s", got, podNames(got.pods), tt.want, tt.pods)
			}
			// A claim with a step must be enqueued by its events.
			if (got.strip || got.release || got.pods != nil || !got.again.IsZero()) && !r.concerns(tt.s.claim) {
				t.Error("the claim is never enqueued")
			}
		})
	}
}

func podNames(pods []*corev1.Pod) string {
	var names []string
	for _, p := range pods {
		names = append(names, p.Name)
	}
	return fmt.Sprint(names)
}

func TestNoWatchesWithoutWork(t *testing.T) {
	tests := map[string]struct {
		change func(*Config)
		idle   bool
	}{
		"off":                  {func(c *Config) { c.Mode = ModeOff }, true},
		"strip without a name": {func(c *Config) { c.Mode, c.Obsolete = ModeStrip, nil }, true},
		"strip":                {func(c *Config) { c.Mode = ModeStrip }, false},
		"enforce":              {nil, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if r := testRules(tt.change); r.idle() != tt.idle {
				t.Errorf("idle %v", r.idle())
			}
		})
	}
}

// FuzzFinalizerSteps checks the conditions of every deletion and release, for any finalizers of the claim and
// any state of its pod.
func FuzzFinalizerSteps(f *testing.F) {
	f.Add(uint8(0), false)
	f.Add(uint8(7), true)
	f.Fuzz(func(t *testing.T, flags uint8, leaving bool) {
		r := testRules(nil)
		pvc := claimWith()
		for i, name := range []string{testFinalizer, testObsolete, "x/y", testFinalizer} {
			if flags&(1<<i) != 0 {
				pvc.Finalizers = append(pvc.Finalizers, name)
			}
		}
		if flags&16 != 0 {
			pvc.DeletionTimestamp = &metav1.Time{Time: testNow}
		}
		pod := podOf("p")
		if leaving {
			terminating(pod)
		}
		s := claimState{claim: pvc, pods: []*corev1.Pod{pod}, podsUnknown: flags&32 != 0, now: testNow}
		got := r.decide(s)
		enforced := pvc.DeletionTimestamp != nil && slices.Contains(pvc.Finalizers, testFinalizer)
		if (len(got.pods) > 0 || got.release) && (!enforced || s.podsUnknown || got.strip) {
			t.Errorf("deletes pods or releases: %+v", s)
		}
		if len(got.pods) > 0 && pod.DeletionTimestamp != nil {
			t.Errorf("deletes a pod again: %+v", s)
		}
		if got.release && slices.Contains(pvc.Finalizers, "x/y") {
			t.Errorf("releases before other finalizers: %+v", s)
		}
	})
}
