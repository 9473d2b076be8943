// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// onNode0 is a driver on the only node of world(…) with one node.
func onNode0(d *driver) {
	d.topology, d.NodeDeployment, d.NodeName, d.segments = true, true, "node-0", map[string]string{"zone": "a"}
}

func TestDelayOf(t *testing.T) {
	none := func(time.Duration) time.Duration { return 0 }
	all := func(below time.Duration) time.Duration { return below - 1 }
	for name, tc := range map[string]struct {
		base, max time.Duration
		tries     int
		atLeast   time.Duration // a nanosecond less than that is never drawn
		atMost    time.Duration
	}{
		"the first try": {base: 20 * time.Second, max: time.Minute, atMost: 20 * time.Second},
		"the second doubles": {
			base: 20 * time.Second, max: time.Minute, tries: 1, atLeast: 20 * time.Second, atMost: 40 * time.Second,
		},
		"the third is bounded": {base: 20 * time.Second, max: time.Minute, tries: 2, atLeast: 40 * time.Second, atMost: time.Minute},
		"after very many": {
			base: 20 * time.Second, max: time.Minute, tries: 1 << 30, atLeast: 40 * time.Second, atMost: time.Minute,
		},
		"maximum less than the base": {base: 20 * time.Second, max: time.Second, tries: 3, atMost: time.Second},
		"both the same":              {base: time.Second, max: time.Second, tries: 3, atMost: time.Second},
		"longest possible":           {base: 1 << 62, max: 1<<63 - 1, tries: 5, atLeast: 1<<62 - 1, atMost: 1<<63 - 1},
	} {
		t.Run(name, func(t *testing.T) {
			d := testDriver(func(d *driver) { d.NodeDeploymentBaseDelay, d.NodeDeploymentMaxDelay = tc.base, tc.max })
			if got := d.claimDelay(tc.tries, none); got != tc.atMost {
				t.Errorf("at most %v, want %v", got, tc.atMost)
			}
			if got := d.claimDelay(tc.tries, all); got < tc.atLeast || got > tc.atLeast+1 {
				t.Errorf("at least %v, want %v", got, tc.atLeast)
			}
		})
	}
}

func TestDecideOnANode(t *testing.T) {
	on := func(node string) *corev1.PersistentVolumeClaim {
		return testClaim(func(c *corev1.PersistentVolumeClaim) { c.Annotations[storagehelpers.AnnSelectedNode] = node })
	}
	left := func(record string) *corev1.PersistentVolumeClaim {
		return testClaim(func(c *corev1.PersistentVolumeClaim) {
			protected(c)
			c.Annotations[kube.AnnProvisioningRequest] = record
		})
	}
	due := func(at time.Time) race { return race{due: now.Add(-time.Hour), at: at} }
	elsewhere := func(c *storagev1.StorageClass) { c.AllowedTopologies = allow(in("zone", "b")) }
	for name, tc := range map[string]struct {
		driver func(*driver)
		claim  *corev1.PersistentVolumeClaim
		class  *storagev1.StorageClass
		race   race
		call   call
		want   action
		reason string
		until  time.Time
	}{
		"of this node":                       {claim: on("node-0"), want: doBegin, reason: "Wanted"},
		"of this node, late binding":         {claim: on("node-0"), class: testClass(late), want: doBegin, reason: "Wanted"},
		"of this node, after it competed":    {claim: on("node-0"), race: due(now.Add(time.Hour)), want: doBegin, reason: "Wanted"},
		"of another node":                    {claim: on("node-1"), want: doForget, reason: "OfAnotherNode"},
		"of another node, without its class": {claim: on("node-1"), want: doForget, reason: "OfAnotherNode"},
		"of another node, after it competed": {claim: on("node-1"), race: due(now), want: doForget, reason: "OfAnotherNode"},
		"of another node, late binding":      {claim: on("node-1"), class: testClass(late), want: doForget, reason: "OfAnotherNode"},
		"late binding, no node yet":          {claim: testClaim(nil), class: testClass(late), want: doForget, reason: "WaitsForPod"},
		"not to be competed for": {
			driver: func(d *driver) { d.NodeDeploymentImmediateBinding = false }, claim: testClaim(nil), want: doForget,
			reason: "WaitsForNode",
		},
		"not to be competed for, but of the node": {
			driver: func(d *driver) { d.NodeDeploymentImmediateBinding = false }, claim: on("node-0"), want: doBegin, reason: "Wanted",
		},
		"of a class that is not for this node": {
			claim: testClaim(nil), class: testClass(elsewhere), want: doForget, reason: "NotAllowedHere",
		},
		"new":                     {claim: testClaim(nil), want: doScheduleClaiming, reason: "NoOwner"},
		"new, with an empty node": {claim: on(""), want: doScheduleClaiming, reason: "NoOwner"},
		"new, class by annotation": {claim: testClaim(func(c *corev1.PersistentVolumeClaim) {
			c.Spec.StorageClassName, c.Annotations[corev1.BetaStorageClassAnnotation] = nil, "fast"
		}), want: doScheduleClaiming, reason: "NoOwner"},
		"new, driver without topology": {
			driver: func(d *driver) { d.topology, d.segments = false, nil }, claim: testClaim(nil), class: testClass(elsewhere),
			want: doScheduleClaiming, reason: "NoOwner",
		},
		"not due yet": {
			claim: testClaim(nil), race: due(now.Add(1)), want: doWait, reason: "NoOwner", until: now.Add(1),
		},
		"due":                     {claim: testClaim(nil), race: due(now), want: doSelectThisNode, reason: "NoOwner"},
		"lost, to be drawn again": {claim: testClaim(nil), race: race{tries: 3}, want: doScheduleClaiming, reason: "NoOwner"},
		"being deleted":           {claim: testClaim(deleting), race: due(now), want: doForget, reason: "ClaimDeleted"},
		"asked for, and of another by now": {
			claim: on("node-1"), call: testCall(intent.Planned, nil), want: doCreateVolume, reason: "Planned",
		},
		"recorded by another node": {
			claim: left(`{"request":"x","selectedNode":"node-1"}`), want: doForget, reason: "OfAnotherNode",
		},
		"recorded by another node, and the node taken away": {
			claim: left(`{"request":"x","selectedNode":"node-1"}`), race: due(now), want: doForget, reason: "OfAnotherNode",
		},
		"recorded by a central provisioner": {
			claim: left(`{"request":"x"}`), want: doReport, reason: "RecordWithoutNode",
		},
		"recorded here, and the request is another now": {
			claim: left(`{"request":"x","selectedNode":"node-0"}`), want: doFail, reason: "RequestChanged",
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := testDriver(onNode0)
			if tc.driver != nil {
				tc.driver(&d)
			}
			if tc.class == nil && name != "of another node, without its class" {
				tc.class = testClass(nil)
			}
			got := d.decide(claimState{
				claim: tc.claim, class: tc.class, race: tc.race, call: tc.call, now: now,
				known: world([]string{"zone"}, map[string]string{"zone": "a"}),
			})
			if got.action != tc.want || got.reason != tc.reason || !got.until.Equal(tc.until) {
				t.Errorf(
					"got %v, %s, until %v (%v); want %v, %s, until %v", got.action, got.reason, got.until, got.err, tc.want, tc.reason,
					tc.until,
				)
			}
		})
	}
}

func TestAllowedHere(t *testing.T) {
	known := world([]string{"zone", "rack"}, map[string]string{"zone": "a", "rack": "1", "other": "x"})
	for name, tc := range map[string]struct {
		driver  func(*driver)
		allowed []corev1.TopologySelectorTerm
		want    bool
	}{
		"anywhere":                    {want: true},
		"this zone":                   {allowed: allow(in("zone", "b", "a")), want: true},
		"this zone and rack":          {allowed: allow(in("zone", "a"), in("rack", "1")), want: true},
		"this zone, another rack":     {allowed: allow(in("zone", "a"), in("rack", "2"))},
		"another zone":                {allowed: allow(in("zone", "b"))},
		"one of two terms":            {allowed: append(allow(in("zone", "b")), allow(in("rack", "1"))...), want: true},
		"a label that is no topology": {allowed: allow(in("other", "x"))},
		"this zone, strictly": {
			driver: func(d *driver) { d.StrictTopology = true }, allowed: allow(in("zone", "a")), want: true,
		},
		"another zone, strictly":         {driver: func(d *driver) { d.StrictTopology = true }, allowed: allow(in("zone", "b"))},
		"another zone, without topology": {driver: func(d *driver) { d.topology = false }, allowed: allow(in("zone", "b")), want: true},
	} {
		t.Run(name, func(t *testing.T) {
			d := testDriver(onNode0)
			if tc.driver != nil {
				tc.driver(&d)
			}
			class := testClass(func(c *storagev1.StorageClass) { c.AllowedTopologies = tc.allowed })
			if got := d.allowedHere(claimState{claim: testClaim(nil), class: class, known: known}); got != tc.want {
				t.Errorf("got %v", got)
			}
		})
	}
}

func TestReaches(t *testing.T) {
	affine := func(terms ...corev1.NodeSelectorTerm) *corev1.VolumeNodeAffinity {
		return &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: terms}}
	}
	zone := func(values ...string) corev1.NodeSelectorTerm {
		return corev1.NodeSelectorTerm{
			MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "zone", Operator: corev1.NodeSelectorOpIn, Values: values}},
		}
	}
	for name, tc := range map[string]struct {
		driver   func(*driver)
		affinity *corev1.VolumeNodeAffinity
		want     bool
	}{
		"this node":                       {affinity: affine(zone("a")), want: true},
		"another node":                    {affinity: affine(zone("b"))},
		"either":                          {affinity: affine(zone("b"), zone("a")), want: true},
		"everywhere":                      {want: true},
		"nothing is required":             {affinity: &corev1.VolumeNodeAffinity{}, want: true},
		"a node without topology":         {driver: func(d *driver) { d.segments = nil }, affinity: affine(zone("b")), want: true},
		"another node, one for all nodes": {driver: func(d *driver) { d.NodeDeployment = false }, affinity: affine(zone("b")), want: true},
	} {
		t.Run(name, func(t *testing.T) {
			d := testDriver(onNode0)
			if tc.driver != nil {
				tc.driver(&d)
			}
			pv := &corev1.PersistentVolume{
				ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{storagehelpers.AnnDynamicallyProvisioned: d.name}},
				Spec:       corev1.PersistentVolumeSpec{NodeAffinity: tc.affinity},
			}
			if got := d.reaches(pv); got != tc.want {
				t.Errorf("got %v", got)
			}
			if got := d.responsible(pv); got != tc.want {
				t.Errorf("responsible: %v", got)
			}
		})
	}
}

func testOwnership(change func(*driver)) *nodeOwnership {
	d := testDriver(change)
	return newNodeOwnership(&Controller{driver: d, cfg: d.Config}, nil)
}

func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const base, pace = 50 * time.Second, 10 * time.Second
		o := testOwnership(func(d *driver) { d.NodeDeploymentBaseDelay, d.NodeDeploymentMaxDelay = base, time.Minute })
		a, b, c := claimKey{UID: "a"}, claimKey{UID: "b"}, claimKey{UID: "c"}
		begin := time.Now()
		for _, key := range []claimKey{a, b, c} {
			o.schedule(key)
			o.races[key] = race{due: begin, at: begin}
		}
		if wait := o.next.Sub(begin); wait < 0 || wait >= pace {
			t.Errorf("the first turn is after %v", wait)
		}
		try := func(key claimKey, want bool, what string) {
			t.Helper()
			now := time.Now()
			if got := o.beginTry(key, now); got != want {
				t.Errorf("%s: %v, want %v", what, got, want)
			}
			if wait := o.raceOf(key).at.Sub(now); !want && (wait < 0 || wait > 2*pace) {
				t.Errorf("%s: put off by %v", what, wait)
			}
		}
		o.othersWon = true
		time.Sleep(pace)
		try(a, true, "the first turn")
		try(b, false, "two at the same time")
		o.endTry(false)
		try(b, true, "at once after one that was lost")
		o.endTry(true)
		try(c, false, "at once after one that was won")
		time.Sleep(pace)
		try(c, true, "after the pause")
		o.endTry(true)
		time.Sleep(time.Until(begin.Add(base - 1)))
		try(c, true, "long after")
		o.endTry(true)
		try(a, false, "a claim that was put off for less than the base delay")
		time.Sleep(time.Nanosecond)
		try(a, true, "a claim that was put off for the base delay")
		for _, key := range []claimKey{a, b, c} {
			o.forget(key)
		}
		if o.competing != 0 || len(o.races) != 0 {
			t.Errorf("still competing for %d claims, %d races", o.competing, len(o.races))
		}
	})
}

func TestFirstPause(t *testing.T) {
	o := testOwnership(nil)
	o.competing = 1
	o.endTry(true)
	first := o.next
	if first.IsZero() {
		t.Error("no pause after the first claim, which would show whether there are others")
	}
	o.endTry(true)
	if o.next != first {
		t.Error("a single instance waits for others")
	}
}
