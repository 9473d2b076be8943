// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizenudge

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const testAnnotation = "local.example.com/last-resizefs-requested-at"

var testNow = time.Date(2026, 5, 6, 7, 8, 9, 0, time.UTC)

func condition(kind corev1.PersistentVolumeClaimConditionType, status corev1.ConditionStatus,
	at time.Time) corev1.PersistentVolumeClaimCondition {
	return corev1.PersistentVolumeClaimCondition{Type: kind, Status: status, LastTransitionTime: metav1.NewTime(at)}
}

const resize = corev1.PersistentVolumeClaimFileSystemResizePending

func claimWith(conditions ...corev1.PersistentVolumeClaimCondition) *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{Status: corev1.PersistentVolumeClaimStatus{Conditions: conditions}}
}

func podOn(node, name string, change func(*corev1.Pod)) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{NodeName: node},
		Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	if change != nil {
		change(pod)
	}
	return pod
}

func annotated(value string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Annotations = map[string]string{testAnnotation: value} }
}

func updated(at time.Time) func(*corev1.Pod) { return annotated(at.Format(time.RFC3339Nano)) }

func TestDecide(t *testing.T) {
	waiting := claimWith(condition(resize, "True", testNow))
	deleted := waiting.DeepCopy()
	deleted.DeletionTimestamp = &metav1.Time{Time: testNow}
	pods := []*corev1.Pod{
		podOn("n", "updated", updated(testNow.Add(1))), podOn("n", "new", nil), podOn("n", "equal", updated(testNow)),
		podOn("n", "older", updated(testNow.Add(-time.Second))), podOn("n", "garbage", annotated("garbage")), podOn("", "unscheduled", nil),
		podOn("n", "terminating", func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: testNow} }),
		podOn("n", "succeeded", func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }),
		podOn("n", "failed", func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }),
	}
	tests := map[string]struct {
		s    claimState
		want string
	}{
		"nothing to expand":           {claimState{claim: claimWith(), ours: true, pods: pods}, "NothingToDo [] false"},
		"claim that is being deleted": {claimState{claim: deleted, ours: true, pods: pods}, "NothingToDo [] false"},
		"pods are not known yet":      {claimState{claim: waiting, ours: true, podsUnknown: true}, "PodsUnknown [] true"},
		"volume of another driver":    {claimState{claim: waiting, pods: pods}, "OfAnotherDriver [] false"},
		"running pods without update": {claimState{claim: waiting, ours: true, pods: pods},
			"FileSystemResizePending [new equal older garbage] false"},
		"all pods were updated before": {claimState{claim: waiting, ours: true, pods: pods[:1]}, "Updated [] false"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			tt.s.since, tt.s.now = testNow, testNow
			next := decide(tt.s, testAnnotation)
			var names []string
			for _, p := range next.pods {
				names = append(names, p.Name)
			}
			if got := fmt.Sprint(next.reason, " ", names, " ", !next.again.IsZero()); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

func TestResizePending(t *testing.T) {
	const pending = corev1.PersistentVolumeClaimNodeResizePending
	later := testNow.Add(time.Hour)
	tests := map[string]struct {
		status corev1.ClaimResourceStatus
		claim  *corev1.PersistentVolumeClaim
		want   bool
		since  time.Time
	}{
		"nothing":         {"", claimWith(), false, time.Time{}},
		"condition":       {"", claimWith(condition(resize, "True", testNow)), true, testNow},
		"latest of two":   {"", claimWith(condition(resize, "True", later), condition(resize, "True", testNow)), true, later},
		"false condition": {"", claimWith(condition(resize, "False", testNow)), false, time.Time{}},
		"other condition": {"", claimWith(condition(corev1.PersistentVolumeClaimResizing, "True", testNow)), false,
			time.Time{}},
		"condition without a time": {"", claimWith(condition(resize, "True", time.Time{})), true, time.Time{}},
		"only the status":          {pending, claimWith(), true, time.Time{}},
		"status and condition":     {pending, claimWith(condition(resize, "True", testNow)), true, testNow},
		"the kubelet has started": {corev1.PersistentVolumeClaimNodeResizeInProgress, claimWith(condition(resize, "True", testNow)),
			false, testNow},
		"the kubelet has given it up ": {corev1.PersistentVolumeClaimNodeResizeInfeasible, claimWith(condition(resize, "True", testNow)),
			false, testNow},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if tt.status != "" {
				tt.claim.Status.AllocatedResourceStatuses = map[corev1.ResourceName]corev1.ClaimResourceStatus{
					corev1.ResourceStorage: tt.status}
			}
			if got, since := resizePending(tt.claim), lastTransition(tt.claim); got != tt.want || !since.Equal(tt.since) {
				t.Errorf("got %v since %v, want %v since %v", got, since, tt.want, tt.since)
			}
		})
	}
}

// TestRecreatedVolume: the deletion and the creation of a volume may arrive as one update, after the event of its claim.
func TestRecreatedVolume(t *testing.T) {
	volume := func(uid types.UID, class string) *corev1.PersistentVolume {
		return &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv", UID: uid}, Spec: corev1.PersistentVolumeSpec{
			StorageClassName: class, ClaimRef: &corev1.ObjectReference{Namespace: "ns", Name: "c"},
		}}
	}
	for uid, want := range map[types.UID]string{"1": "[]", "2": "[ns/c]"} {
		var enqueued []string
		volumeHandlers(func(claim string) { enqueued = append(enqueued, claim) }).Update(volume("1", "a"), volume(uid, "b"))
		if got := fmt.Sprint(enqueued); got != want {
			t.Errorf("UID %s: enqueued are %s, want %s", uid, got, want)
		}
	}
}

func TestAnnotationIsAfterTheTransition(t *testing.T) {
	zone := time.FixedZone("east", 7200)
	for name, tt := range map[string]struct {
		now, since time.Time
		want       string
	}{
		"now":                  {testNow.Add(time.Second + 5).In(zone), testNow, "2026-05-06T07:08:10.000000005Z"},
		"at the same time":     {testNow, testNow, "2026-05-06T07:08:09.000000001Z"},
		"our clock is behind ": {testNow.Add(-time.Hour), testNow, "2026-05-06T07:08:09.000000001Z"},
	} {
		t.Run(name, func(t *testing.T) {
			got := annotationValue(tt.now, tt.since)
			if got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
			if needsUpdate(podOn("n", "p", annotated(got)), testAnnotation, tt.since) {
				t.Error("it would be written again")
			}
		})
	}
}
