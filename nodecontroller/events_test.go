package nodecontroller

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestMissingEvent(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*policy, *snapshot)
		want   string
	}{
		"report":            {func(p *policy, _ *snapshot) { p.mode = CleanupReport }, "in mode report nothing is done about it when its grace ends at "},
		"claims":            {func(p *policy, _ *snapshot) { p.mode = CleanupClaims }, "in mode claims the claim will be deleted, not before "},
		"volumes":           {nil, "the claim will be deleted, and the volume removed, not before "},
		"volumes, released": {func(p *policy, s *snapshot) { *s = lostVolume(*p) }, "in mode volumes the volume will be removed, not before "},
		"volumes, released just now": {func(p *policy, s *snapshot) {
			*s = lostVolume(*p)
			s.volume.Status.LastPhaseTransitionTime.Time = testNow
		}, "in mode volumes the volume will be removed, not before "},
		"volumes, of which this one is retained": {func(p *policy, s *snapshot) {
			p.retain, s.volume.Spec.PersistentVolumeReclaimPolicy = RetainClaim, corev1.PersistentVolumeReclaimRetain
		}, "in mode volumes the claim will be deleted, not before "},
		"not this way":     {func(p *policy, _ *snapshot) { p.orphanPath = false }, "nothing is done about it when its grace ends at 2026-05-06T07:08:09Z; --node-cleanup-paths leaves out orphan"},
		"nobody opted in":  {func(p *policy, _ *snapshot) { p.scope = ScopeOptIn }, "Z; Scope: neither its StorageClass nor its claim has the annotation "},
		"somebody has out": {func(_ *policy, s *snapshot) { s.wishes.optOut = "Node a" }, "Z; Scope: Node a has the annotation "},
		"nothing to do":    {func(p *policy, s *snapshot) { p.mode, s.claim = CleanupClaims, nil }, "Z; VolumeIsLeft"},
	} {
		t.Run(name, func(t *testing.T) {
			p := testPolicy()
			s := lostClaim(p)
			if tt.change != nil {
				tt.change(&p, &s)
			}
			e := missingEvent(s, p, testNow)
			if !strings.HasPrefix(e.message, "Node a, which has this volume, is missing; in mode ") || !strings.Contains(e.message, tt.want) || strings.HasSuffix(e.message, ": ") {
				t.Errorf("it says %q, want %q", e.message, tt.want)
			}
		})
	}
}
