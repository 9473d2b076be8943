// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/intent"
)

var now = time.Unix(1_700_000_000, 0)

const testDriver = "drv.example.com"

// testState returns the state of a claim of 1Gi that requests 2Gi, with changes.
func testState(changes ...func(*claimState)) claimState {
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c1", UID: "u"},
		Spec: corev1.PersistentVolumeClaimSpec{
			VolumeName: "pv1", Resources: corev1.VolumeResourceRequirements{Requests: storage("2Gi")},
		},
		Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, Capacity: storage("1Gi")},
	}
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv1", UID: "v"}, Spec: corev1.PersistentVolumeSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, Capacity: storage("1Gi"),
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: testDriver,
			VolumeHandle: "vol-1"}},
		ClaimRef: &corev1.ObjectReference{Namespace: "ns", Name: "c1", UID: "u"},
	}}
	s := claimState{claim: claim, volume: pv, confirmed: true, volumeConfirmed: true, classesServed: true, now: now}
	for _, change := range changes {
		change(&s)
	}
	return s
}

// decide returns what d decides about o in s, which has the call of the ledger. The record is that of this process unless s has another.
func decide(d driver, o operation, s claimState) step {
	if s.claim != nil {
		if m := &s.call.Payload; m.intended == "" {
			recorded, _ := o.inProgress(s.claim)
			m.intended = recorded.key
		}
		s.call, s.trigger = o.callOf(s.call, s.claim)
	}
	return d.decide(o, s)
}

// sizes sets the letters of the contract: R, C, A, S and P. Empty values are absent.
func sizes(r, c, a string, s corev1.ClaimResourceStatus, p string) func(*claimState) {
	return func(state *claimState) {
		claim := state.claim
		claim.Spec.Resources.Requests, claim.Status.Capacity, state.volume.Spec.Capacity = storage(r), nil, storage(p)
		if c != "" {
			claim.Status.Capacity = storage(c)
		}
		if a != "" {
			claim.Status.AllocatedResources = storage(a)
		}
		if s != "" {
			setResizeStatus(claim, s)
		}
	}
}

// size returns the target of an expansion.
func size(s string) target {
	q := resource.MustParse(s)
	return target{size: q, key: bytesOf(q)}
}

// in sets the call of the operation.
func in(state intent.State, t target) func(*claimState) {
	return func(s *claimState) { s.call.State, s.call.Args, s.call.Payload.target = state, t.key, t }
}

func settled(s string) func(*claimState) { return in(intent.Settled, size(s)) }

func unknown(s string) func(*claimState) { return in(intent.Unknown, size(s)) }

func expanding() driver {
	return driver{name: testDriver, expansion: expandsController, Config: Config{AnnotateFsResize: true, RetryIntervalMax: time.Minute}}
}

// TestExpansionTarget goes through the table of the sizes to request.
func TestExpansionTarget(t *testing.T) {
	const none = ""
	for name, tt := range map[string]struct {
		state    []func(*claimState)
		want     string // none: the claim waits
		nodeOnly string // none: the same
	}{
		"absent, larger request":            {state: []func(*claimState){sizes("2Gi", "1Gi", "", "", "1Gi")}, want: "2Gi"},
		"absent, without capacity":          {state: []func(*claimState){sizes("2Gi", "", "", "", "1Gi")}, want: "2Gi"},
		"absent, volume is larger":          {state: []func(*claimState){sizes("2Gi", "1Gi", "", "", "3Gi")}, want: "2Gi"},
		"absent, unfinished size":           {state: []func(*claimState){sizes("2Gi", "1Gi", "3Gi", "", "3Gi")}, want: "3Gi"},
		"absent, finished size, rounded up": {state: []func(*claimState){sizes("2900Mi", "2560Mi", "2560Mi", "", "3Gi")}, want: "2900Mi"},
		"absent, old size":                  {state: []func(*claimState){sizes("4Gi", "3Gi", "3Gi", "", "3Gi")}, want: "4Gi"},
		"absent, node expansion, old API":   {state: []func(*claimState){sizes("2Gi", "1Gi", "", "", "2Gi"), pendingOnNode}, want: none},
		"in progress": {state: []func(*claimState){sizes("4Gi", "1Gi", "11Gi", controllerInProgress, "1Gi")},
			want: "11Gi"},
		"in progress, raised": {state: []func(*claimState){sizes("20Gi", "1Gi", "11Gi", controllerInProgress, "1Gi")},
			want: "11Gi"},
		"in progress, final error": {state: []func(*claimState){sizes("4Gi", "1Gi", "11Gi", controllerInProgress, "1Gi"),
			settled("11Gi")}, want: "4Gi"},
		"in progress, final for another": {state: []func(*claimState){sizes("4Gi", "1Gi", "11Gi", controllerInProgress, "1Gi"),
			settled("9Gi")}, want: "11Gi"},
		"in progress, nothing allocated": {state: []func(*claimState){sizes("4Gi", "1Gi", "", controllerInProgress, "1Gi")},
			want: "4Gi"},
		"in progress, volume written": {state: []func(*claimState){sizes("4Gi", "1Gi", "11Gi", controllerInProgress, "11Gi")},
			want: "11Gi"},
		"infeasible": {state: []func(*claimState){sizes("4Gi", "1Gi", "11Gi", controllerInfeasible, "1Gi")},
			want: "4Gi"},
		"infeasible, final error": {state: []func(*claimState){
			sizes("4Gi", "1Gi", "11Gi", controllerInfeasible, "1Gi"), settled("11Gi")}, want: "4Gi"},
		"in progress, volume written, final error": {
			state: []func(*claimState){sizes("4Gi", "1Gi", "11Gi", controllerInProgress, "11Gi"), settled("11Gi")}, want: "11Gi"},
		"in progress, volume written, final error, raised": {
			state: []func(*claimState){sizes("20Gi", "1Gi", "11Gi", controllerInProgress, "11Gi"), settled("11Gi")}, want: "20Gi"},
		"infeasible, volume written": {state: []func(*claimState){sizes("5Gi", "1Gi", "9Gi", controllerInfeasible, "9Gi")},
			want: "9Gi"},
		"infeasible, volume written, raised": {state: []func(*claimState){sizes("20Gi", "1Gi", "9Gi", controllerInfeasible, "9Gi")},
			want: "20Gi"},
		"infeasible, volume was rounded up": {state: []func(*claimState){sizes("2600Mi", "2560Mi", "11Gi", controllerInfeasible, "3Gi")},
			want: "2600Mi"},
		"alpha API: infeasible": {state: []func(*claimState){sizes("4Gi", "1Gi", "11Gi", controllerFailed, "1Gi")},
			want: "4Gi"},
		"node pending":                     {state: []func(*claimState){sizes("2Gi", "1Gi", "3Gi", nodePending, "3Gi")}, want: none},
		"node pending, raised":             {state: []func(*claimState){sizes("10Gi", "1Gi", "3Gi", nodePending, "3Gi")}, want: none},
		"node in progress, raised":         {state: []func(*claimState){sizes("10Gi", "1Gi", "3Gi", nodeInProgress, "3Gi")}, want: none},
		"node pending, volume not written": {state: []func(*claimState){sizes("4Gi", "1Gi", "3Gi", nodePending, "1Gi")}, want: "3Gi"},
		"node pending, nothing allocated":  {state: []func(*claimState){sizes("4Gi", "1Gi", "", nodePending, "1Gi")}, want: "4Gi"},
		"node infeasible, lowered": {state: []func(*claimState){sizes("5Gi", "1Gi", "9Gi", nodeInfeasible, "9Gi")}, want: "9Gi",
			nodeOnly: "5Gi"},
		"node infeasible, raised":            {state: []func(*claimState){sizes("10Gi", "1Gi", "9Gi", nodeInfeasible, "9Gi")}, want: "9Gi"},
		"node infeasible, nothing allocated": {state: []func(*claimState){sizes("5Gi", "1Gi", "", nodeInfeasible, "9Gi")}, want: "5Gi"},
		"alpha API: node infeasible": {state: []func(*claimState){sizes("5Gi", "1Gi", "9Gi", nodeFailed, "9Gi")}, want: "9Gi",
			nodeOnly: "5Gi"},
		"unknown": {state: []func(*claimState){sizes("5Gi", "1Gi", "9Gi", "Foo", "9Gi")}, want: none},

		"node pending, old kubelet": {state: []func(*claimState){sizes("10Gi", "3Gi", "3Gi", nodePending, "3Gi")}, want: "10Gi"},
		"node in progress, old kubelet": {state: []func(*claimState){sizes("2900Mi", "2560Mi", "2560Mi", nodeInProgress, "3Gi")},
			want: "2900Mi"},
		"in progress, too large, lowered": {state: []func(*claimState){sizes("4Gi", "1Gi", "10E", controllerInProgress, "1Gi")},
			want: "4Gi"},
	} {
		for mode, want := range map[expansionMode]string{expandsController: tt.want, expandsNode: tt.nodeOnly} {
			if want == "" {
				want = tt.want
			}
			d := expanding()
			d.expansion = mode
			s := testState(tt.state...)
			s.call, _ = expand.callOf(s.call, s.claim)
			got, reason := d.wantedSize(s)
			got = s.only(target{size: got}).size
			if reason != "" && want != none || reason == "" && (want == none || got.String() != want) {
				t.Errorf("%s, mode %v: got %v (%s), want %q", name, mode, got.String(), reason, want)
			}
		}
	}
}

func pendingOnNode(s *claimState) {
	setCondition(s.claim, corev1.PersistentVolumeClaimFileSystemResizePending, "", "", now)
}

func stub(s *claimState) { s.stub = true }

func inherited(s *claimState) { s.call.Payload.intended = "of an earlier process" }

func unconfirmed(s *claimState) { s.confirmed = false }

func volumeUnread(s *claimState) { s.volumeConfirmed = false }

func recorded(s *claimState) { s.volume.Annotations = map[string]string{annPreResize: "1Gi"} }

// TestResizerScenarioUnusualStates has the parts of the contract that a real API server does not permit.
func TestResizerScenarioUnusualStates(t *testing.T) {
	t.Run("021_unusual_states", func(t *testing.T) {
		if got := decide(expanding(), expand, testState(sizes("2Gi", "", "", "", "1Gi"))); got.action != doIntend {
			t.Errorf("without capacity: %v", got.action)
		}
		if got := decide(expanding(), expand, testState(sizes("2Gi", "1Gi", "2Gi", "Foo", "1Gi"))); got.action != doNothing ||
			got.reason != stageUnknown {
			t.Errorf("unknown status: %v", got.action)
		}
		if got := decide(expanding(), expand, testState(sizes("4Gi", "1Gi", "11Gi", controllerFailed, "1Gi"))); got.action != doIntend {
			t.Errorf("status of the alpha API: %v", got.action)
		}
	})
}

func TestDecideExpand(t *testing.T) {
	inUse := func(u usage, afterError bool) func(*claimState) {
		return func(s *claimState) { s.usage, s.call.Payload.inUseError = u, afterError }
	}
	withSecret := func(s *claimState) {
		s.volume.Spec.CSI.ControllerExpandSecretRef = &corev1.SecretReference{Namespace: "ns", Name: "s"}
	}
	intended := sizes("2Gi", "1Gi", "2Gi", controllerInProgress, "1Gi")
	infeasible2Gi := sizes("2Gi", "1Gi", "2Gi", controllerInfeasible, "1Gi")
	slow := func(until time.Duration) func(*claimState) {
		return func(s *claimState) {
			s.call.Payload.slow = delay{bytesOf(resource.MustParse("2Gi")), now.Add(until)}
		}
	}
	reset := func(before time.Duration) func(*claimState) {
		return func(s *claimState) {
			s.call.Payload.nodeReset = delay{bytesOf(requestedSize(s.claim)), now.Add(time.Minute - before)}
		}
	}
	for name, tt := range map[string]struct {
		driver func(*driver)
		state  []func(*claimState)
		want   action
		size   string // of the target
		err    string
	}{
		"deleted": {state: []func(*claimState){func(s *claimState) { s.claim = nil }}, want: doNothing},
		"not bound": {state: []func(*claimState){func(s *claimState) { s.claim.Status.Phase = corev1.ClaimLost }},
			want: doNothing},
		"without volume":          {state: []func(*claimState){func(s *claimState) { s.volume = nil }}, want: doNothing},
		"volume of another":       {state: []func(*claimState){func(s *claimState) { s.volume.Spec.ClaimRef.UID = "x" }}, want: doNothing},
		"volume of nothing":       {state: []func(*claimState){func(s *claimState) { s.volume.Spec.ClaimRef = nil }}, want: doNothing},
		"other driver":            {state: []func(*claimState){func(s *claimState) { s.volume.Spec.CSI.Driver = "x" }}, want: doNothing},
		"up to date":              {state: []func(*claimState){sizes("1Gi", "1Gi", "", "", "1Gi")}, want: doNothing},
		"cannot expand":           {driver: func(d *driver) { d.expansion = expandsNone }, want: doNothing},
		"requested":               {want: doIntend},
		"requested, stub":         {state: []func(*claimState){stub}, want: doReadClaim},
		"secret":                  {state: []func(*claimState){withSecret}, want: doReadSecret},
		"secret was read":         {state: []func(*claimState){withSecret, func(s *claimState) { s.secretRead = true }}, want: doIntend},
		"empty handle":            {state: []func(*claimState){func(s *claimState) { s.volume.Spec.CSI.VolumeHandle = "" }}, want: doFail},
		"no access mode":          {state: []func(*claimState){func(s *claimState) { s.volume.Spec.AccessModes = nil }}, want: doFail},
		"intended":                {state: []func(*claimState){intended}, want: doExpand},
		"intended, stale":         {state: []func(*claimState){intended, unconfirmed}, want: doReadClaim},
		"intended by another":     {state: []func(*claimState){intended, inherited}, want: doIntend, size: "2Gi"},
		"infeasible, new process": {state: []func(*claimState){infeasible2Gi}, want: doScheduleRetry},
		"infeasible, too early":   {state: []func(*claimState){infeasible2Gi, slow(time.Second)}, want: doWait},
		"infeasible, again":       {state: []func(*claimState){infeasible2Gi, slow(0)}, want: doIntend},
		"infeasible, lowered":     {state: []func(*claimState){sizes("2Gi", "1Gi", "9Gi", controllerInfeasible, "1Gi")}, want: doIntend},
		"infeasible, lowered, volume of the cache": {state: []func(*claimState){
			sizes("2Gi", "1Gi", "9Gi", controllerInfeasible, "1Gi"), volumeUnread}, want: doReadVolume},
		"on the node, volume of the cache": {state: []func(*claimState){
			sizes("5Gi", "1Gi", "5Gi", nodeInProgress, "1Gi"), volumeUnread}, want: doReadVolume},
		"indeterminate, raised": {state: []func(*claimState){sizes("9Gi", "1Gi", "2Gi", controllerInProgress, "1Gi"), unknown("2Gi")},
			want: doExpand, size: "2Gi"},
		"indeterminate, an earlier leader's record is written late": {state: []func(*claimState){
			sizes("9Gi", "1Gi", "5Gi", controllerInProgress, "1Gi"), unknown("2Gi")}, want: doIntend, size: "2Gi"},
		"indeterminate, an earlier leader's error is written late": {state: []func(*claimState){
			sizes("9Gi", "1Gi", "2Gi", controllerInfeasible, "1Gi"), slow(0), unknown("2Gi")}, want: doIntend, size: "2Gi"},
		"indeterminate, an earlier leader's result is written late": {state: []func(*claimState){
			sizes("9Gi", "1Gi", "2Gi", nodePending, "2Gi"), unknown("2Gi")}, want: doAbandon, size: "2Gi"},
		"indeterminate, record removed": {state: []func(*claimState){sizes("9Gi", "1Gi", "", "", "1Gi"), unknown("2Gi")},
			want: doIntend, size: "2Gi"},
		"indeterminate, status of another": {state: []func(*claimState){sizes("9Gi", "1Gi", "2Gi", "Foo", "1Gi"), unknown("2Gi")},
			want: doNothing},
		"in use, unknown": {driver: func(d *driver) { d.inUse = inUseAlways }, state: []func(*claimState){inUse(usageUnknown, false)},
			want: doWatchUsers},
		"in use": {driver: func(d *driver) { d.inUse = inUseAlways }, state: []func(*claimState){inUse(usageInUse, false)},
			want: doWaitUnused},
		"unused": {driver: func(d *driver) { d.inUse = inUseAlways }, state: []func(*claimState){inUse(usageUnused, false)},
			want: doIntend},
		"in use, first": {driver: func(d *driver) { d.inUse = inUseAfterError }, state: []func(*claimState){inUse(usageInUse, false)},
			want: doIntend},
		"in use, failed": {driver: func(d *driver) { d.inUse = inUseAfterError }, state: []func(*claimState){inUse(usageInUse, true)},
			want: doWaitUnused},
		"in use, online":  {state: []func(*claimState){inUse(usageInUse, true)}, want: doIntend},
		"node infeasible": {state: []func(*claimState){sizes("9Gi", "1Gi", "9Gi", nodeInfeasible, "9Gi")}, want: doIntend},
		"node infeasible, too early": {state: []func(*claimState){sizes("9Gi", "1Gi", "9Gi", nodeInfeasible, "9Gi"), reset(time.Second)},
			want: doWait},
		"node infeasible, again": {state: []func(*claimState){sizes("9Gi", "1Gi", "9Gi", nodeInfeasible, "9Gi"), reset(time.Minute)},
			want: doIntend},
		"record":             {state: []func(*claimState){sizes("2Gi", "2Gi", "2Gi", "", "2Gi"), recorded}, want: doRemoveRecord},
		"record, rounded up": {state: []func(*claimState){sizes("2Gi", "2Gi", "2Gi", "", "3Gi"), recorded}, want: doRemoveRecord},
		"record, unconfirmed": {state: []func(*claimState){sizes("2Gi", "2Gi", "2Gi", "", "2Gi"), recorded, unconfirmed},
			want: doReadClaim},
		"record, node works": {state: []func(*claimState){sizes("2Gi", "1Gi", "2Gi", nodePending, "2Gi"), recorded},
			want: doNothing},
		"record, rebound":             {state: []func(*claimState){sizes("1Gi", "1Gi", "", "", "2Gi"), recorded}, want: doNothing},
		"record before a new request": {state: []func(*claimState){sizes("4Gi", "2Gi", "2Gi", "", "2Gi"), recorded}, want: doRemoveRecord},

		"old kubelet, record": {state: []func(*claimState){sizes("2Gi", "2Gi", "2Gi", nodePending, "2Gi"), recorded}, want: doRemoveRecord},
		"old kubelet":         {state: []func(*claimState){sizes("4Gi", "2Gi", "2Gi", nodeInProgress, "2Gi")}, want: doIntend},

		"largest size": {state: []func(*claimState){sizes("9223372036854775807", "1Gi", "", "", "1Gi")}, want: doIntend},
		"too large": {state: []func(*claimState){sizes("10E", "1Gi", "", "", "1Gi")}, want: doFail,
			err: `spec.resources.requests.storage of PVC "ns/c1" is 10E, more than the 9223372036854775807 bytes`},
		"too large, stub": {state: []func(*claimState){sizes("12345678901234567890", "1Gi", "", "", "1Gi"), stub}, want: doFail,
			err: `PVC "ns/c1" is 12345678901234567890,`},
		"too large, node only": {driver: func(d *driver) { d.expansion = expandsNode },
			state: []func(*claimState){sizes("10E", "1Gi", "", "", "1Gi")}, want: doFail, err: "is 10E,"},
		"too large, after another": {state: []func(*claimState){sizes("10E", "1Gi", "2Gi", controllerInProgress, "1Gi")}, want: doExpand},
	} {
		d := expanding()
		if tt.driver != nil {
			tt.driver(&d)
		}
		got := decide(d, expand, testState(tt.state...))
		if got.action != tt.want || tt.err != "" && (got.err == nil || !strings.Contains(got.err.Error(), tt.err)) ||
			tt.size != "" && got.target != size(tt.size) {
			t.Errorf("%s: got %v %v (%s, %v), want %v %s", name, got.action, got.target, got.reason, got.err, tt.want, tt.size)
		}
	}
}

// TestNoWriteShrinks: a write that makes a capacity smaller ends before its request.
func TestNoWriteShrinks(t *testing.T) {
	s, a := testState(), &attempt{t: &term{c: &Controller{driver: expanding()}}} // without a client
	shrink := step{volume: func(pv *corev1.PersistentVolume) { pv.Spec.Capacity = storage("1Mi") }}
	if _, err := a.writeVolume(t.Context(), s, shrink); !errors.Is(err, intent.ErrBug) {
		t.Error(err)
	}
	err := a.patchClaim(t.Context(), s, func(c *corev1.PersistentVolumeClaim) { c.Status.Capacity = storage("1Mi") })
	want := "PVC ns/c1: its capacity would shrink from 1Gi to 1Mi"
	if !errors.Is(err, intent.ErrBug) || !strings.Contains(err.Error(), want) {
		t.Error(err)
	}
}

func TestDecideExpandOnNode(t *testing.T) {
	for name, tt := range map[string]struct {
		state []func(*claimState)
		want  action
		size  string // of the PersistentVolume after doSaveVolume
	}{
		"requested":   {want: doIntend},
		"unconfirmed": {state: []func(*claimState){unconfirmed}, want: doIntend},
		"claim written before": {state: []func(*claimState){sizes("2Gi", "1Gi", "2Gi", nodePending, "1Gi"), unconfirmed},
			want: doReadClaim},
		"claim written": {state: []func(*claimState){sizes("2Gi", "1Gi", "2Gi", nodePending, "1Gi")}, want: doSaveVolume,
			size: "2Gi"},
		"volume written": {state: []func(*claimState){sizes("2Gi", "1Gi", "2Gi", nodePending, "2Gi")}, want: doNothing},
		"infeasible, lowered": {state: []func(*claimState){sizes("5Gi", "1Gi", "9Gi", nodeInfeasible, "9Gi")}, want: doSaveVolume,
			size: "5Gi"},
		"infeasible, lowered 2": {state: []func(*claimState){sizes("5Gi", "1Gi", "9Gi", nodeInfeasible, "5Gi")}, want: doIntend},
		"lowered too late":      {state: []func(*claimState){sizes("5Gi", "1Gi", "9Gi", nodePending, "9Gi")}, want: doNothing},
		"old kubelet":           {state: []func(*claimState){sizes("4Gi", "2Gi", "2Gi", nodePending, "2Gi")}, want: doIntend},
	} {
		d := expanding()
		d.expansion = expandsNode
		s := testState(tt.state...)
		got := decide(d, expand, s)
		if got.action != tt.want {
			t.Errorf("%s: got %v (%s), want %v", name, got.action, got.reason, tt.want)
			continue
		}
		if tt.size != "" {
			got.volume(s.volume)
			if size := volumeSize(s.volume); size.String() != tt.size {
				t.Errorf("%s: %s, want %s", name, size.String(), tt.size)
			}
		}
	}
}

// calledFor is the PersistentVolume of the answers.
var calledFor = &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv1", UID: "v"}}

func expandAnswer(change func(*answer)) func(*claimState) {
	return func(s *claimState) {
		a := &answer{target: bytesOf(resource.MustParse("2Gi")), at: now, volume: calledFor, size: resource.MustParse("2Gi"),
			nodeExpansion: true, before: resource.MustParse("1Gi")}
		if change != nil {
			change(a)
		}
		answered(s, a)
	}
}

// answered: the driver has returned a.
func answered(s *claimState, a *answer) {
	s.call.Payload.answer = a
	if a.err == nil {
		s.call.State = intent.Answered
	}
}

func TestDecideExpandAnswer(t *testing.T) {
	intended := sizes("2Gi", "1Gi", "2Gi", controllerInProgress, "1Gi")
	saved := func(a *answer) { a.volumeSaved = true }
	failed := func(kind outcome) func(*answer) {
		return func(a *answer) { a.kind, a.err = kind, status.Error(codes.Internal, "x") }
	}
	before := func(text string, ago time.Duration) func(*claimState) {
		return func(s *claimState) {
			s.call.Payload.recorded = failureOf(answer{target: bytesOf(resource.MustParse("2Gi")), err: status.Error(codes.Internal, text),
				at: now.Add(-ago)})
		}
	}
	for name, tt := range map[string]struct {
		state []func(*claimState)
		want  action
	}{
		"expanded":                {[]func(*claimState){intended, expandAnswer(nil)}, doSaveVolume},
		"expanded, claim deleted": {[]func(*claimState){expandAnswer(nil), func(s *claimState) { s.claim = nil }}, doSaveVolume},
		"expanded, volume deleted": {[]func(*claimState){intended, expandAnswer(nil), func(s *claimState) { s.volume = nil }},
			doDiscard},
		"expanded, volume recreated": {[]func(*claimState){intended, expandAnswer(nil), func(s *claimState) { s.volume.UID = "x" }},
			doDiscard},
		"volume saved":                {[]func(*claimState){intended, expandAnswer(saved)}, doSaveClaim},
		"volume saved, stub":          {[]func(*claimState){intended, expandAnswer(saved), stub}, doReadClaim},
		"volume saved, claim deleted": {[]func(*claimState){expandAnswer(saved), func(s *claimState) { s.claim = nil }}, doDiscard},
		"volume saved, claim changed": {[]func(*claimState){sizes("2Gi", "1Gi", "3Gi", controllerInProgress, "2Gi"), expandAnswer(saved)},
			doDiscard},
		"failed":                   {[]func(*claimState){intended, expandAnswer(failed(final))}, doSaveError},
		"failed equally":           {[]func(*claimState){intended, expandAnswer(failed(final)), before("x", time.Hour)}, doDiscard},
		"failed with another text": {[]func(*claimState){intended, expandAnswer(failed(final)), before("y", time.Second)}, doDiscard},
		"failed with another text, later": {[]func(*claimState){intended, expandAnswer(failed(final)), before("y", time.Minute)},
			doSaveError},
		"infeasible equally": {[]func(*claimState){intended, expandAnswer(failed(infeasible)), before("x", time.Second)}, doSaveError},
	} {
		if got := decide(expanding(), expand, testState(tt.state...)); got.action != tt.want {
			t.Errorf("%s: got %v (%s), want %v", name, got.action, got.reason, tt.want)
		}
	}
}

// vac sets V, K and M: the requested and the current class, and the status of the modification.
func vac(v, k string, m ...string) func(*claimState) {
	return func(s *claimState) {
		s.claim.Spec.VolumeAttributesClassName, s.claim.Status.CurrentVolumeAttributesClassName = &v, &k
		if len(m) == 2 {
			s.claim.Status.ModifyVolumeStatus = &corev1.ModifyVolumeStatus{
				Status: corev1.PersistentVolumeClaimModifyVolumeStatus(m[0]), TargetVolumeAttributesClassName: m[1],
			}
		}
	}
}

func TestDecideModify(t *testing.T) {
	read := func(names ...string) func(*claimState) {
		return func(s *claimState) {
			s.classes = classes{"missing": nil, "foreign": {DriverName: "other"}}
			for _, name := range names {
				s.classes[name] = &storagev1.VolumeAttributesClass{DriverName: testDriver}
			}
		}
	}
	all := read("gold", "bronze")
	class := func(name string) target { return target{key: name} }
	known := func(name string) func(*claimState) { return in(intent.Planned, class(name)) }
	slow := func(until time.Duration) func(*claimState) {
		return func(s *claimState) { s.call.Payload.slow = delay{"gold", now.Add(until)} }
	}
	modifying := func(s *claimState) {
		recorded, _ := modify.status(s.claim)
		startModification(s.claim, recorded.key, now)
		vac("", "", "Infeasible", "gold")(s)
	}
	missing := func(s *claimState) { s.call.Payload.missingClass = requestedClass(s.claim) }
	answered := func(change func(*answer)) func(*claimState) {
		return func(s *claimState) {
			a := &answer{target: "gold", at: now, volume: calledFor}
			if change != nil {
				change(a)
			}
			answered(s, a)
		}
	}
	for name, tt := range map[string]struct {
		state  []func(*claimState)
		want   action
		target string
	}{
		"no class":           {[]func(*claimState){vac("", "")}, doNothing, ""},
		"1: up to date":      {[]func(*claimState){vac("gold", "gold")}, doNothing, ""},
		"2: canceled":        {[]func(*claimState){modifying}, doCancel, ""},
		"2: canceled before": {[]func(*claimState){vac("", "", "Infeasible", "gold")}, doNothing, ""},
		"3: indeterminate":   {[]func(*claimState){vac("bronze", "", "InProgress", "gold"), all}, doModify, "gold"},
		"3: indeterminate, unconfirmed": {[]func(*claimState){vac("bronze", "", "InProgress", "gold"), all, unconfirmed},
			doReadClaim, ""},
		"3: indeterminate, an earlier leader's error is written late": {[]func(*claimState){vac("bronze", "", "Infeasible", "gold"), all,
			in(intent.Unknown, class("gold"))}, doIntend, "gold"},
		"3: indeterminate, an earlier leader's record is written late": {[]func(*claimState){
			vac("bronze", "", "InProgress", "bronze"), all, in(intent.Unknown, class("gold"))}, doIntend, "gold"},
		"3: indeterminate, an earlier leader's result is written late": {[]func(*claimState){vac("bronze", "gold"), all,
			in(intent.Unknown, class("gold"))}, doAbandon, "gold"},
		"3: indeterminate, record removed": {[]func(*claimState){vac("bronze", ""), all, in(intent.Unknown, class("gold"))}, doIntend,
			"gold"},
		"3: indeterminate, canceled": {[]func(*claimState){vac("", "", "InProgress", "gold"), all}, doModify, "gold"},
		"3: final, canceled": {[]func(*claimState){vac("", "", "InProgress", "gold"), all, known("gold")}, doModify,
			"gold"},
		"3: class not read":                    {[]func(*claimState){vac("bronze", "", "InProgress", "gold")}, doReadClass, ""},
		"3: class deleted":                     {[]func(*claimState){vac("bronze", "", "InProgress", "missing"), all}, doAbandon, ""},
		"3: class deleted, the other not read": {[]func(*claimState){vac("bronze", "", "InProgress", "missing"), read()}, doReadClass, ""},
		"3: both deleted":                      {[]func(*claimState){vac("foreign", "", "InProgress", "missing"), all}, doPend, ""},
		"3: deleted, canceled":                 {[]func(*claimState){vac("", "", "InProgress", "missing"), all}, doPend, ""},
		"4: missing":                           {[]func(*claimState){vac("missing", ""), all}, doPend, ""},
		"4: missing, known":                    {[]func(*claimState){vac("missing", "", "Pending", ""), all, missing}, doWait, ""},
		"4: of another driver":                 {[]func(*claimState){vac("foreign", ""), all}, doPend, ""},
		"4: missing before, of another driver": {[]func(*claimState){vac("foreign", "", "Pending", ""), all, missing}, doPend, ""},
		"5: requested":                         {[]func(*claimState){vac("gold", ""), all}, doIntend, "gold"},
		"5: requested, stub":                   {[]func(*claimState){vac("gold", ""), all, stub}, doReadClaim, ""},
		"5: final error": {[]func(*claimState){vac("bronze", "", "InProgress", "gold"), all, known("gold")}, doIntend,
			"bronze"},
		"5: final error, again":   {[]func(*claimState){vac("gold", "", "InProgress", "gold"), all, known("gold")}, doModify, "gold"},
		"5: rollback":             {[]func(*claimState){vac("bronze", "bronze", "Infeasible", "gold"), all}, doIntend, "bronze"},
		"5: pending before":       {[]func(*claimState){vac("gold", "", "Pending", ""), all}, doIntend, "gold"},
		"infeasible, new process": {[]func(*claimState){vac("gold", "", "Infeasible", "gold"), all}, doScheduleRetry, ""},
		"infeasible, too early":   {[]func(*claimState){vac("gold", "", "Infeasible", "gold"), all, slow(time.Second)}, doWait, ""},
		"infeasible, again":       {[]func(*claimState){vac("gold", "", "Infeasible", "gold"), all, slow(0)}, doIntend, "gold"},
		"infeasible, rejected":    {[]func(*claimState){vac("foreign", "", "Infeasible", "foreign"), all}, doPend, ""},
		"infeasible, recreated":   {[]func(*claimState){vac("gold", "", "Infeasible", "gold"), all, missing}, doIntend, "gold"},
		"infeasible, foreign":     {[]func(*claimState){vac("foreign", "", "Infeasible", "foreign"), all, missing}, doWait, ""},
		"classes not served":      {[]func(*claimState){vac("gold", ""), func(s *claimState) { s.classesServed = false }}, doNothing, ""},
		"in-tree volume":          {[]func(*claimState){vac("gold", ""), func(s *claimState) { s.volume.Spec.CSI = nil }}, doNothing, ""},
		"modified":                {[]func(*claimState){vac("gold", "", "InProgress", "gold"), answered(nil)}, doSaveVolume, ""},
		"modified, volume saved": {[]func(*claimState){vac("gold", "", "InProgress", "gold"),
			answered(func(a *answer) { a.volumeSaved = true })}, doSaveClaim, ""},
		"modified, claim changed": {[]func(*claimState){vac("gold", "", "InProgress", "bronze"),
			answered(func(a *answer) { a.volumeSaved = true })}, doDiscard, ""},
		"modified, volume deleted": {[]func(*claimState){vac("gold", "", "InProgress", "gold"), answered(nil),
			func(s *claimState) { s.volume = nil }}, doDiscard, ""},
		"failed": {[]func(*claimState){vac("gold", "", "InProgress", "gold"),
			answered(func(a *answer) { a.err = errors.New("x") })}, doSaveError, ""},
	} {
		d := driver{name: testDriver, modifies: true, Config: Config{RetryIntervalMax: time.Minute}}
		got := decide(d, modify, testState(tt.state...))
		if got.action != tt.want || tt.target != "" && got.target.key != tt.target {
			t.Errorf("%s: got %v %q (%s), want %v", name, got.action, got.target.key, got.reason, tt.want)
		}
	}
}

func TestOutcomeOf(t *testing.T) {
	for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
		want := [operations]outcome{final, final}
		switch code {
		case codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.Aborted:
			want = [operations]outcome{indeterminate, indeterminate}
		case codes.InvalidArgument:
			want = [operations]outcome{infeasible, infeasible}
		case codes.OutOfRange, codes.NotFound:
			want[expand] = infeasible
		}
		for o := range operations {
			if got := outcomeOf(o, status.Error(code, "x")); got != want[o] {
				t.Errorf("%v of %v: %v, want %v", code, o, got, want[o])
			}
		}
	}
	if got := outcomeOf(expand, errors.New("connection closed")); got != indeterminate {
		t.Errorf("without status: %v", got)
	}
}

func TestModesOfDrivers(t *testing.T) {
	for name, tt := range map[string]struct {
		driver csiclient.Driver
		config func(*Config)
		want   string // expansion, modifies, policy for volumes in use
	}{
		"controller": {driver: csiclient.Driver{Controller: csiclient.ControllerCapabilities{ExpandVolume: true}}, want: "1 false 1"},
		"node":       {driver: csiclient.Driver{Node: csiclient.NodeCapabilities{ExpandVolume: true}}, want: "2 false 0"},
		"neither":    {want: "0 false 0"},
		"modifies":   {driver: csiclient.Driver{Controller: csiclient.ControllerCapabilities{ModifyVolume: true}}, want: "0 true 0"},
		"modifies, gate off": {driver: csiclient.Driver{Controller: csiclient.ControllerCapabilities{ModifyVolume: true}},
			config: func(c *Config) { c.VolumeAttributesClass = false }, want: "0 false 0"},
		"online": {driver: csiclient.Driver{Controller: csiclient.ControllerCapabilities{ExpandVolume: true},
			Plugin: csiclient.PluginCapabilities{ExpandOnline: true, ExpandOffline: true}}, want: "1 false 0"},
		"offline": {driver: csiclient.Driver{Controller: csiclient.ControllerCapabilities{ExpandVolume: true},
			Plugin: csiclient.PluginCapabilities{ExpandOffline: true}}, want: "1 false 2"},
		"offline, not handled": {driver: csiclient.Driver{Controller: csiclient.ControllerCapabilities{ExpandVolume: true},
			Plugin: csiclient.PluginCapabilities{ExpandOffline: true}}, config: func(c *Config) { c.HandleVolumeInUseError = false },
			want: "1 false 0"},
	} {
		cfg := DefaultConfig()
		if tt.config != nil {
			tt.config(&cfg)
		}
		d := newDriver(cfg, tt.driver)
		if got := fmt.Sprint(int(d.expansion), d.modifies, int(d.inUse)); got != tt.want {
			t.Errorf("%s: got %s, want %s", name, got, tt.want)
		}
		_, err := New(cfg, Deps{Driver: csiclient.Driver{Name: testDriver}})
		if err == nil || !strings.Contains(err.Error(), "EXPAND_VOLUME") || !strings.Contains(err.Error(), "MODIFY_VOLUME") {
			t.Errorf("a driver without capabilities: %v", err)
		}
	}
}

// TestModificationIsOff: the error of a driver that modifies volumes only names why they are not modified.
func TestModificationIsOff(t *testing.T) {
	cfg := DefaultConfig()
	cfg.VolumeAttributesClass = false // also if the API server does not serve the classes
	_, err := New(cfg, Deps{Driver: csiclient.Driver{Name: testDriver, Controller: csiclient.ControllerCapabilities{ModifyVolume: true}}})
	if err == nil || !strings.Contains(err.Error(), "the API server does not serve VolumeAttributesClasses") ||
		strings.Contains(err.Error(), "MODIFY_VOLUME") {
		t.Errorf("got %v", err)
	}
}

func TestConfigValidate(t *testing.T) {
	for flag, change := range map[string]func(*Config){
		"--timeout": func(c *Config) { c.Timeout = 0 }, "--workers": func(c *Config) { c.Workers = 0 },
		"--retry-interval-start": func(c *Config) { c.RetryIntervalStart = -1 },
		"--retry-interval-max":   func(c *Config) { c.RetryIntervalMax = 0 },
		"--resync-period":        func(c *Config) { c.ResyncPeriod = -1 },
		"--resize-timeout":       func(c *Config) { c.ResizeTimeout = -1 },
		"--modify-timeout":       func(c *Config) { c.ModifyTimeout = -1 },
	} {
		c := DefaultConfig()
		if err := c.Validate(); err != nil {
			t.Error(err)
		}
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("%s: %v", flag, err)
		}
	}
}

func TestTimeoutsOfCalls(t *testing.T) {
	for name, tt := range map[string]struct {
		c                       Config
		expand, modify, longest time.Duration
	}{
		"timeout":        {Config{Timeout: 3}, 3, 3, 3},
		"of expansions":  {Config{Timeout: 3, ResizeTimeout: 2}, 2, 3, 3},
		"of both":        {Config{Timeout: 3, ResizeTimeout: 1, ModifyTimeout: 2}, 1, 2, 2},
		"longer for one": {Config{Timeout: 3, ModifyTimeout: 9}, 3, 9, 9},
	} {
		e, m, l := tt.c.callTimeout(expand), tt.c.callTimeout(modify), tt.c.LongestTimeout()
		if e != tt.expand || m != tt.modify || l != tt.longest {
			t.Errorf("%s: %d for expansions, %d for modifications, %d at most", name, e, m, l)
		}
	}
}

// TestEventsOfTheResizerAreIgnored: its writes must not end a back-off.
func TestEventsOfTheResizerAreIgnored(t *testing.T) {
	for name, tt := range map[string]struct {
		before, after corev1.ClaimResourceStatus
		want          bool
	}{
		"intent":          {"", controllerInProgress, false},
		"infeasible":      {controllerInProgress, controllerInfeasible, false},
		"expanded":        {controllerInProgress, nodePending, false},
		"node begins":     {nodePending, nodeInProgress, true},
		"node ends":       {nodeInProgress, "", true},
		"node infeasible": {nodeInProgress, nodeInfeasible, true},
		"unchanged":       {nodeInfeasible, nodeInfeasible, false},
	} {
		before, after := testState(sizes("2Gi", "1Gi", "2Gi", tt.before, "1Gi")).claim,
			testState(sizes("2Gi", "1Gi", "2Gi", tt.after, "1Gi")).claim
		if got := isNewsOfNode(before, after); got != tt.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
