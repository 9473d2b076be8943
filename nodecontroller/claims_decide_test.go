package nodecontroller

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

const (
	testFinalizer = "local.example.com/pvc"
	testObsolete  = "old.example.com/pvc"
	testAnn       = "local.example.com/last-resizefs-requested-at"
)

var testNow = time.Date(2026, 5, 6, 7, 8, 9, 0, time.UTC)

func testRules(change func(*Config)) claimRules {
	cfg := Config{
		PVCFinalizerMode: ClaimEnforce, PVCFinalizer: testFinalizer, PVCObsoleteFinalizers: []string{testObsolete},
		PVCPodDeletion: PodsOrphaned, ResizeNudge: true, ResizeAnnotation: testAnn,
	}
	if change != nil {
		change(&cfg)
	}
	return newClaimRules(cfg, "local.example.com")
}

func testClaim(change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	pvc := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c", UID: "u"}}
	if change != nil {
		change(pvc)
	}
	return pvc
}

// deletingWith is a claim that is being deleted and has finalizers.
func deletingWith(finalizers ...string) *corev1.PersistentVolumeClaim {
	return testClaim(func(pvc *corev1.PersistentVolumeClaim) {
		pvc.DeletionTimestamp, pvc.Finalizers = &metav1.Time{Time: testNow}, finalizers
	})
}

// resizingSince is a claim whose file system is to grow.
func resizingSince(at time.Time) *corev1.PersistentVolumeClaim {
	return testClaim(func(pvc *corev1.PersistentVolumeClaim) {
		pvc.Status.Conditions = []corev1.PersistentVolumeClaimCondition{{
			Type: corev1.PersistentVolumeClaimFileSystemResizePending, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(at),
		}}
	})
}

// userOn is a pod that uses the claim of testClaim.
func userOn(node, name string, change func(*corev1.Pod)) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name)}}
	pod.Spec.NodeName, pod.Status.Phase = node, corev1.PodRunning
	pod.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}}}}
	if change != nil {
		change(pod)
	}
	return pod
}

func leaving(pod *corev1.Pod) { pod.DeletionTimestamp = &metav1.Time{Time: testNow} }

func TestClaimDecide(t *testing.T) {
	pods := []*corev1.Pod{userOn("", "pending", nil), userOn("gone", "orphan", nil), userOn("live", "running", nil), userOn("gone", "leaving", leaving)}
	lost := map[string]bool{"gone": true}
	policy := func(p PodDeletionPolicy) func(*Config) { return func(c *Config) { c.PVCPodDeletion = p } }
	told := func(at time.Time) func(*corev1.Pod) {
		return func(pod *corev1.Pod) { pod.Annotations = map[string]string{testAnn: at.Format(time.RFC3339Nano)} }
	}
	tests := map[string]struct {
		rules  func(*Config)
		s      claimSnapshot
		action claimAction
		pods   string
		again  time.Time
	}{
		"a claim that is gone":                            {},
		"a claim without anything":                        {s: claimSnapshot{claim: testClaim(nil)}},
		"an obsolete finalizer goes first":                {s: claimSnapshot{claim: deletingWith(testFinalizer, testObsolete)}, action: claimStrip},
		"an obsolete finalizer of a claim that stays":     {s: claimSnapshot{claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Finalizers = []string{testObsolete} })}, action: claimStrip},
		"nothing is obsolete in mode off":                 {rules: func(c *Config) { c.PVCFinalizerMode = ClaimOff }, s: claimSnapshot{claim: deletingWith(testObsolete, testFinalizer)}},
		"mode strip does not enforce":                     {rules: func(c *Config) { c.PVCFinalizerMode = ClaimStrip }, s: claimSnapshot{claim: deletingWith(testFinalizer), users: pods, lost: lost}},
		"the enforced finalizer is never obsolete":        {rules: func(c *Config) { c.PVCObsoleteFinalizers = []string{testFinalizer} }, s: claimSnapshot{claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Finalizers = []string{testFinalizer} })}},
		"a claim being deleted without our finalizer":     {s: claimSnapshot{claim: deletingWith("x/y"), users: pods, lost: lost}},
		"a claim with our finalizer that stays":           {s: claimSnapshot{claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Finalizers = []string{testFinalizer} }), users: pods, lost: lost}},
		"no pod is deleted before the claim is confirmed": {s: claimSnapshot{claim: deletingWith(testFinalizer), users: pods, lost: lost}, action: claimConfirm},
		"orphaned pods":                                   {s: claimSnapshot{claim: deletingWith(testFinalizer), users: pods, lost: lost, confirmed: true}, action: claimEvict, pods: "[pending orphan]"},
		"pending pods":                                    {rules: policy(PodsPending), s: claimSnapshot{claim: deletingWith(testFinalizer), users: pods, confirmed: true}, action: claimEvict, pods: "[pending]"},
		"all pods but those that are leaving":             {rules: policy(PodsAll), s: claimSnapshot{claim: deletingWith(testFinalizer), users: pods, confirmed: true}, action: claimEvict, pods: "[pending orphan running]"},
		"no pods":                                         {rules: policy(PodsNone), s: claimSnapshot{claim: deletingWith(testFinalizer, "x/y"), users: pods, now: testNow}, again: testNow.Add(enforceRecheck)},
		"an unknown policy deletes no pod":                {rules: policy("some"), s: claimSnapshot{claim: deletingWith(testFinalizer, "x/y"), users: pods, now: testNow}, again: testNow.Add(enforceRecheck)},
		"handled pods are not deleted again":              {s: claimSnapshot{claim: deletingWith(testFinalizer, "x/y"), users: pods, lost: lost, now: testNow, handled: map[types.UID]bool{"pending": true, "orphan": true}}, again: testNow.Add(enforceRecheck)},
		"others hold the claim":                           {s: claimSnapshot{claim: deletingWith("x/y", testFinalizer), now: testNow}, again: testNow.Add(enforceRecheck)},
		"ours is the last finalizer":                      {s: claimSnapshot{claim: deletingWith(testFinalizer)}, action: claimRelease},
		"ours is the last finalizer, and there twice":     {s: claimSnapshot{claim: deletingWith(testFinalizer, testFinalizer)}, action: claimRelease},
		"a resize touches running pods that were not told of it": {s: claimSnapshot{ours: true, claim: resizingSince(testNow), since: testNow, users: []*corev1.Pod{
			userOn("n", "told", told(testNow.Add(1))), userOn("n", "new", nil), userOn("n", "equal", told(testNow)), userOn("n", "older", told(testNow.Add(-time.Second))),
			userOn("n", "garbage", func(p *corev1.Pod) { p.Annotations = map[string]string{testAnn: "garbage"} }),
			userOn("", "unscheduled", nil), userOn("n", "leaving", leaving),
			userOn("n", "succeeded", func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }), userOn("n", "failed", func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }),
		}}, action: claimNudge, pods: "[new equal older garbage]"},
		"a resize touches no pod twice in a sync": {s: claimSnapshot{ours: true, claim: resizingSince(testNow), since: testNow, users: []*corev1.Pod{userOn("n", "p", nil)}, handled: map[types.UID]bool{"p": true}}},
		"a resize of a volume of another driver":  {s: claimSnapshot{claim: resizingSince(testNow), since: testNow, users: []*corev1.Pod{userOn("n", "p", nil)}}},
		"a resize where that is switched off":     {rules: func(c *Config) { c.ResizeNudge = false }, s: claimSnapshot{ours: true, claim: resizingSince(testNow), since: testNow, users: []*corev1.Pod{userOn("n", "p", nil)}}},
		"a resize of a claim that is being deleted": {s: claimSnapshot{ours: true, since: testNow, users: []*corev1.Pod{userOn("n", "p", nil)}, claim: func() *corev1.PersistentVolumeClaim {
			pvc := resizingSince(testNow)
			pvc.DeletionTimestamp = &metav1.Time{Time: testNow}
			return pvc
		}()}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			rules := testRules(tt.rules)
			step := rules.decide(tt.s)
			if tt.pods == "" {
				tt.pods = "[]"
			}
			if step.action != tt.action || podNames(step.pods) != tt.pods || !step.again.Equal(tt.again) || step.reason == "" {
				t.Errorf("decided to %v pods %s (%s), again at %v; want to %v pods %s, again at %v", step.action, podNames(step.pods), step.reason, step.again, tt.action, tt.pods, tt.again)
			}
			// What is to be done must bring the claim into the queue.
			if tt.s.claim != nil && (step.action != claimNothing || !step.again.IsZero()) && !rules.concern(tt.s.claim) {
				t.Error("the claim would never be looked at")
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

func TestResizePending(t *testing.T) {
	const pending = corev1.PersistentVolumeClaimNodeResizePending
	condition := func(kind corev1.PersistentVolumeClaimConditionType, status corev1.ConditionStatus, at time.Time) corev1.PersistentVolumeClaimCondition {
		return corev1.PersistentVolumeClaimCondition{Type: kind, Status: status, LastTransitionTime: metav1.NewTime(at)}
	}
	const resize = corev1.PersistentVolumeClaimFileSystemResizePending
	later := testNow.Add(time.Hour)
	tests := map[string]struct {
		status     corev1.ClaimResourceStatus
		conditions []corev1.PersistentVolumeClaimCondition
		want       bool
		since      time.Time
	}{
		"nothing":                       {},
		"the condition":                 {conditions: []corev1.PersistentVolumeClaimCondition{condition(resize, "True", testNow)}, want: true, since: testNow},
		"the latest of two":             {conditions: []corev1.PersistentVolumeClaimCondition{condition(resize, "True", later), condition(resize, "True", testNow)}, want: true, since: later},
		"one that is false":             {conditions: []corev1.PersistentVolumeClaimCondition{condition(resize, "False", testNow)}},
		"another condition":             {conditions: []corev1.PersistentVolumeClaimCondition{condition(corev1.PersistentVolumeClaimResizing, "True", testNow)}},
		"the condition without a time":  {conditions: []corev1.PersistentVolumeClaimCondition{condition(resize, "True", time.Time{})}, want: true},
		"only the status":               {status: pending, want: true},
		"the status and the condition":  {status: pending, conditions: []corev1.PersistentVolumeClaimCondition{condition(resize, "True", testNow)}, want: true, since: testNow},
		"the kubelet has begun":         {status: corev1.PersistentVolumeClaimNodeResizeInProgress, conditions: []corev1.PersistentVolumeClaimCondition{condition(resize, "True", testNow)}, since: testNow},
		"the kubelet found it does not": {status: corev1.PersistentVolumeClaimNodeResizeInfeasible, conditions: []corev1.PersistentVolumeClaimCondition{condition(resize, "True", testNow)}, since: testNow},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			pvc := testClaim(func(pvc *corev1.PersistentVolumeClaim) {
				pvc.Status.Conditions = tt.conditions
				if tt.status != "" {
					pvc.Status.AllocatedResourceStatuses = map[corev1.ResourceName]corev1.ClaimResourceStatus{corev1.ResourceStorage: tt.status}
				}
			})
			if got, since := resizePending(pvc), lastTransition(pvc); got != tt.want || !since.Equal(tt.since) {
				t.Errorf("got %v since %v, want %v since %v", got, since, tt.want, tt.since)
			}
		})
	}
}

func TestNudgeTimeIsAfterTheTransition(t *testing.T) {
	zone := time.FixedZone("east", 7200)
	for name, tt := range map[string]struct {
		now, since time.Time
		want       string
	}{
		"usually now":             {testNow.Add(time.Second + 5).In(zone), testNow, "2026-05-06T07:08:10.000000005Z"},
		"at the same time":        {testNow, testNow, "2026-05-06T07:08:09.000000001Z"},
		"where a clock is behind": {testNow.Add(-time.Hour), testNow, "2026-05-06T07:08:09.000000001Z"},
	} {
		t.Run(name, func(t *testing.T) {
			got := nudgeTime(tt.now, tt.since)
			if got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
			pod := userOn("n", "p", func(p *corev1.Pod) { p.Annotations = map[string]string{testAnn: got} })
			if testRules(nil).nudgeable(pod, tt.since) {
				t.Error("it would be written again")
			}
		})
	}
}

func TestUsesClaim(t *testing.T) {
	ephemeral := func(p *corev1.Pod) {
		p.Name = "p"
		p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}}}
	}
	owned := func(uid types.UID, controller bool) func(*corev1.PersistentVolumeClaim) {
		return func(pvc *corev1.PersistentVolumeClaim) {
			pvc.Name = "p-v"
			pvc.OwnerReferences = []metav1.OwnerReference{{Kind: "Pod", Name: "p", UID: uid, Controller: ptr.To(controller)}}
		}
	}
	tests := map[string]struct {
		pod  func(*corev1.Pod)
		pvc  func(*corev1.PersistentVolumeClaim)
		want bool
	}{
		"directly":                          {want: true},
		"another claim":                     {pvc: func(c *corev1.PersistentVolumeClaim) { c.Name = "d" }},
		"in another namespace":              {pvc: func(c *corev1.PersistentVolumeClaim) { c.Namespace = "other" }},
		"as its ephemeral volume":           {pod: ephemeral, pvc: owned("u1", true), want: true},
		"the ephemeral one of an older pod": {pod: ephemeral, pvc: owned("u0", true)},
		"one that the pod only owns":        {pod: ephemeral, pvc: owned("u1", false)},
		"one that merely has the name":      {pod: ephemeral, pvc: func(c *corev1.PersistentVolumeClaim) { c.Name = "p-v" }},
		"no volume":                         {pod: func(p *corev1.Pod) { p.Spec.Volumes = nil }},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			pod := userOn("n", "u1", tt.pod)
			if got := usesClaim(pod, testClaim(tt.pvc)); got != tt.want {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

func TestClaimRulesAskOnlyForWhatTheyNeed(t *testing.T) {
	tests := map[string]struct {
		change            func(*Config)
		idle, pods, nodes bool
	}{
		"everything off":        {func(c *Config) { c.PVCFinalizerMode, c.ResizeNudge = ClaimOff, false }, true, false, false},
		"strip without a name":  {func(c *Config) { c.PVCFinalizerMode, c.ResizeNudge, c.PVCObsoleteFinalizers = ClaimStrip, false, nil }, true, false, false},
		"strip":                 {func(c *Config) { c.PVCFinalizerMode, c.ResizeNudge = ClaimStrip, false }, false, false, false},
		"nudge":                 {func(c *Config) { c.PVCFinalizerMode = ClaimOff }, false, true, false},
		"enforce without pods":  {func(c *Config) { c.PVCPodDeletion, c.ResizeNudge = PodsNone, false }, false, false, false},
		"enforce with all":      {func(c *Config) { c.PVCPodDeletion, c.ResizeNudge = PodsAll, false }, false, true, false},
		"enforce with orphaned": {func(c *Config) { c.ResizeNudge = false }, false, true, true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			r := testRules(tt.change)
			if r.idle() != tt.idle || r.needPods() != tt.pods || r.needNodes() != tt.nodes {
				t.Errorf("idle %v, pods %v, nodes %v", r.idle(), r.needPods(), r.needNodes())
			}
		})
	}
}

// FuzzClaimDecide looks for what must never happen, whatever finalizers a claim has and
// wherever its pod is.
func FuzzClaimDecide(f *testing.F) {
	f.Add(uint8(0), uint8(0), "all")
	f.Add(uint8(7), uint8(255), "orphaned")
	f.Fuzz(func(t *testing.T, flags, podFlags uint8, policy string) {
		r := testRules(func(c *Config) { c.PVCPodDeletion = PodDeletionPolicy(policy) })
		pvc := testClaim(nil)
		for i, name := range []string{testFinalizer, testObsolete, "x/y", testFinalizer} {
			if flags&(1<<i) != 0 {
				pvc.Finalizers = append(pvc.Finalizers, name)
			}
		}
		if flags&16 != 0 {
			pvc.DeletionTimestamp = &metav1.Time{Time: testNow}
		}
		pod := userOn("", "p", nil)
		if podFlags&1 != 0 {
			pod.Spec.NodeName = "n"
		}
		if podFlags&2 != 0 {
			leaving(pod)
		}
		s := claimSnapshot{
			claim: pvc, users: []*corev1.Pod{pod}, confirmed: flags&32 != 0, lost: map[string]bool{"n": podFlags&4 != 0},
			handled: map[types.UID]bool{"p": podFlags&8 != 0}, ours: true, now: testNow, since: testNow,
		}
		step := r.decide(s)
		switch step.action {
		case claimEvict:
			if pvc.DeletionTimestamp == nil || !s.confirmed || !slices.Contains(pvc.Finalizers, testFinalizer) || pod.DeletionTimestamp != nil {
				t.Errorf("deletes a pod of %+v", s)
			}
		case claimRelease:
			if pvc.DeletionTimestamp == nil || slices.Contains(pvc.Finalizers, "x/y") {
				t.Errorf("releases %+v", s)
			}
		case claimNudge:
			t.Errorf("nudges without a resize: %+v", s)
		}
	})
}
