package nodecontroller

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

func TestDecideNode(t *testing.T) {
	const ours = "d/node"
	deleted := func(finalizers ...string) *corev1.Node {
		return testNode("a", "a", terminating, func(n *corev1.Node) { n.Finalizers = finalizers })
	}
	staying := func(finalizers ...string) *corev1.Node {
		return testNode("a", "a", func(n *corev1.Node) { n.Finalizers = finalizers })
	}
	type change func(p *nodePolicy, s *nodeSnapshot)
	for name, tt := range map[string]struct {
		node   *corev1.Node
		change change
		action nodeAction
		reason string
		next   time.Duration // from now; 0: none
	}{
		"gone":                 {nil, nil, nodeAbsent, "Gone", 0},
		"off":                  {deleted(ours), func(p *nodePolicy, _ *nodeSnapshot) { p.mode = NodeFinalizerOff }, nodeNothing, "Off", 0},
		"staying, not managed": {staying(), func(_ *nodePolicy, s *nodeSnapshot) { s.registered = true }, nodeNothing, "NotManaged", 0},
		"managed, unprotected": {staying(), func(p *nodePolicy, s *nodeSnapshot) { p.mode, s.registered = NodeFinalizerManage, true }, nodeProtect, "Unprotected", 0},
		"managed, protected":   {staying(ours), func(p *nodePolicy, s *nodeSnapshot) { p.mode, s.registered = NodeFinalizerManage, true }, nodeNothing, "Protected", 0},
		"managed, terminating": {deleted("x/y"), func(p *nodePolicy, s *nodeSnapshot) { p.mode, s.registered = NodeFinalizerManage, true }, nodeNothing, "NotOurs", 0},
		"without the driver":   {staying(), func(p *nodePolicy, _ *nodeSnapshot) { p.mode = NodeFinalizerManage }, nodeNothing, "Protected", 0},
		"left, with volumes": {staying(ours), func(p *nodePolicy, s *nodeSnapshot) {
			p.mode, s.volumes, s.unregistered = NodeFinalizerManage, 1, testNow.Add(-time.Hour)
		}, nodeNothing, "HasVolumes", 0},
		"left just now": {staying(ours), func(p *nodePolicy, s *nodeSnapshot) { p.mode, s.unregistered = NodeFinalizerManage, testNow }, nodeNothing, "Unregistered", 10 * time.Minute},
		"left by the driver everywhere": {staying(ours), func(p *nodePolicy, s *nodeSnapshot) {
			p.mode, s.keyKnown, s.unregistered = NodeFinalizerManage, false, testNow.Add(-time.Hour)
		}, nodeRelease, "Unregistered", 0},
		"left by the driver everywhere, but not by its volumes": {staying(ours), func(p *nodePolicy, s *nodeSnapshot) {
			p.mode, s.keyKnown, s.mentioned, s.unregistered = NodeFinalizerManage, false, true, testNow.Add(-time.Hour)
		}, nodeNothing, "TopologyKeyUnknown", later},
		"left by the driver everywhere just now": {staying(ours), func(p *nodePolicy, s *nodeSnapshot) {
			p.mode, s.keyKnown, s.unregistered = NodeFinalizerManage, false, testNow
		}, nodeNothing, "Unregistered", 10 * time.Minute},
		"left for long": {staying(ours), func(p *nodePolicy, s *nodeSnapshot) {
			p.mode, s.unregistered = NodeFinalizerManage, testNow.Add(-time.Hour)
		}, nodeRelease, "Unregistered", 0},
		"unnoted": {deleted(ours), func(_ *nodePolicy, s *nodeSnapshot) { s.unnoted = true }, nodeNote, "NodeIsTerminating", 0},
		"unnoted, in report": {deleted(ours), func(p *nodePolicy, s *nodeSnapshot) {
			s.unnoted, p.writes, p.deletes, p.why = true, false, false, "report"
		}, nodeRelease, "NoCleanup", 0},
		"clean-up is off":          {deleted(ours), func(p *nodePolicy, _ *nodeSnapshot) { p.deletes, p.why = false, "off" }, nodeRelease, "NoCleanup", 0},
		"opted out":                {deleted(ours), func(p *nodePolicy, s *nodeSnapshot) { s.node.Annotations = map[string]string{p.ann.cleanup: disabled} }, nodeRelease, "NoCleanup", 0},
		"key is unknown":           {deleted(ours), func(_ *nodePolicy, s *nodeSnapshot) { s.keyKnown = false }, nodeRelease, "NoCleanup", 0},
		"drained":                  {deleted(ours, "x/drain"), nil, nodeNothing, "OtherFinalizers", 10 * time.Second},
		"drained, not ready":       {deleted(ours, "x/drain"), func(_ *nodePolicy, s *nodeSnapshot) { s.node.Status.Conditions = nil }, nodeNothing, "Grace", 5 * time.Minute},
		"drained, nobody waits":    {deleted(ours, "x/drain"), func(p *nodePolicy, _ *nodeSnapshot) { p.waitForOthers, p.grace = false, 0 }, nodeClean, "NodeIsTerminating", 0},
		"grace":                    {deleted(ours), nil, nodeNothing, "Grace", 5 * time.Minute},
		"grace beyond the timeout": {deleted(ours), func(p *nodePolicy, _ *nodeSnapshot) { p.grace = time.Hour }, nodeNothing, "Grace", 15 * time.Minute},
		"grace is over":            {deleted(ours), func(_ *nodePolicy, s *nodeSnapshot) { s.now = testNow.Add(5 * time.Minute) }, nodeClean, "NodeIsTerminating", 0},
		"timeout":                  {deleted(ours, "x/drain"), func(_ *nodePolicy, s *nodeSnapshot) { s.now = testNow.Add(15 * time.Minute) }, nodeRelease, "Timeout", 0},
		"too many are lost":        {deleted(ours), func(p *nodePolicy, s *nodeSnapshot) { p.grace, s.pending, s.open, s.unheld = 0, true, true, true }, nodeHold, "TooManyNodesLost", 0},
		"held":                     {deleted(ours), func(p *nodePolicy, s *nodeSnapshot) { p.grace, s.pending, s.open = 0, true, true }, nodeRelease, "TooManyNodesLost", 0},
		"held and approved":        {deleted(ours), func(p *nodePolicy, s *nodeSnapshot) { p.grace, s.pending, s.open, s.approved = 0, true, true, true }, nodeClean, "NodeIsTerminating", 0},
		"cleaned":                  {deleted(ours), func(p *nodePolicy, s *nodeSnapshot) { p.grace, s.cleaned = 0, true }, nodeRelease, "Cleaned", 0},
		"blocked":                  {deleted(ours), func(p *nodePolicy, s *nodeSnapshot) { p.grace, s.cleaned, s.blocked = 0, true, "in use" }, nodeNothing, "Blocked", 10 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			p := nodePolicy{
				finalizer: ours, mode: NodeFinalizerRemove, ann: annotationsOf(testDriver), writes: true, deletes: true, waitForOthers: true,
				grace: 5 * time.Minute, timeout: 15 * time.Minute, unregistered: 10 * time.Minute,
			}
			s := nodeSnapshot{node: tt.node, keyKnown: true, now: testNow}
			if tt.change != nil {
				tt.change(&p, &s)
			}
			got := p.decide(s)
			if got.action != tt.action || got.reason != tt.reason {
				t.Errorf("got %v %q, want %v %q", got.action, got.reason, tt.action, tt.reason)
			}
			if want := testNow.Add(tt.next); tt.next == 0 && !got.next.IsZero() || tt.next != 0 && !got.next.Equal(want) {
				t.Errorf("looks again at %v", got.next)
			}
		})
	}
}
