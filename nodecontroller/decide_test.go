package nodecontroller

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
)

func testPolicy() policy {
	return policy{
		driver: testDriver, ann: annotationsOf(testDriver), mode: CleanupVolumes, orphanPath: true, scope: ScopeAll, retain: RetainSkip,
		removable: []string{"prov/f"}, missingGrace: 15 * time.Minute, fencedGrace: time.Hour, releaseGrace: 10 * time.Minute, clockGap: 10 * time.Minute,
	}
}

// lostClaim is a snapshot of a bound pair whose node has been missing for long enough.
func lostClaim(p policy) snapshot {
	pv := localVolume(affinityTerm(testKey, "a"))
	pv.Annotations = map[string]string{
		p.ann.missing: testNow.Add(-time.Hour).Format(time.RFC3339), p.ann.lostNode: "a", storagehelpers.AnnDynamicallyProvisioned: testDriver,
		p.ann.seenMissing: testNow.Add(-time.Minute).Format(time.RFC3339),
	}
	pv.Spec.PersistentVolumeReclaimPolicy, pv.Status.Phase = corev1.PersistentVolumeReclaimDelete, corev1.VolumeBound
	pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "ns", Name: "c", UID: "claim"}
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c", UID: "claim"}}
	claim.Spec.VolumeName, claim.Status.Phase = pv.Name, corev1.ClaimBound
	return snapshot{volume: pv, claim: claim, member: membership{place: placeOrphan}, nodes: []string{"a"}, now: testNow}
}

// lostVolume is the same after its claim has gone and its release was long ago.
func lostVolume(p policy) snapshot {
	s := lostClaim(p)
	s.claim, s.volume.Status.Phase = nil, corev1.VolumeReleased
	s.volume.Status.LastPhaseTransitionTime = &metav1.Time{Time: testNow.Add(-time.Hour)}
	return s
}

func TestDecide(t *testing.T) {
	ago := func(d time.Duration) string { return testNow.Add(-d).Format(time.RFC3339) }
	type change func(p *policy, s *snapshot)
	for name, tt := range map[string]struct {
		from   func(policy) snapshot
		change change
		action action
		reason string
	}{
		"gone":                           {lostClaim, func(_ *policy, s *snapshot) { s.volume = nil }, doNothing, "Gone"},
		"due":                            {lostClaim, nil, doDeleteClaim, "NodeIsGone"},
		"grace is not over":              {lostClaim, func(p *policy, s *snapshot) { s.volume.Annotations[p.ann.missing] = ago(time.Minute) }, doNothing, "Grace"},
		"grace is over to the second":    {lostClaim, func(p *policy, s *snapshot) { s.volume.Annotations[p.ann.missing] = ago(p.missingGrace) }, doDeleteClaim, "NodeIsGone"},
		"the clock has not begun":        {lostClaim, func(p *policy, s *snapshot) { delete(s.volume.Annotations, p.ann.missing) }, doChange, "NodeIsMissing"},
		"the clock is in the future":     {lostClaim, func(p *policy, s *snapshot) { s.volume.Annotations[p.ann.missing] = ago(-time.Minute) }, doChange, "NodeIsMissing"},
		"the clock cannot be read":       {lostClaim, func(p *policy, s *snapshot) { s.volume.Annotations[p.ann.missing] = "yesterday" }, doChange, "NodeIsMissing"},
		"the clock was not kept up":      {lostClaim, func(p *policy, s *snapshot) { s.volume.Annotations[p.ann.seenMissing] = ago(11 * time.Minute) }, doChange, "NodeIsMissing"},
		"the clock was never kept up":    {lostClaim, func(p *policy, s *snapshot) { delete(s.volume.Annotations, p.ann.seenMissing) }, doChange, "NodeIsMissing"},
		"the clock is kept up in future": {lostClaim, func(p *policy, s *snapshot) { s.volume.Annotations[p.ann.seenMissing] = ago(-time.Hour) }, doChange, "NodeIsMissing"},
		"the clock was kept up all along, after its grace": {lostClaim, func(p *policy, s *snapshot) {
			s.kept = s.volume.Annotations[p.ann.missing]
			s.volume.Annotations[p.ann.seenMissing] = ago(11 * time.Minute)
		}, doChange, "ClockRuns"},
		"the clock is to be kept up": {lostClaim, func(p *policy, s *snapshot) {
			s.volume.Annotations[p.ann.missing], s.volume.Annotations[p.ann.seenMissing] = ago(10*time.Minute), ago(5*time.Minute)
		}, doChange, "ClockRuns"},
		"the clock of what is held was not kept up": {lostClaim, func(p *policy, s *snapshot) {
			s.open, s.volume.Annotations[p.ann.hold] = true, heldByBreak
			s.volume.Annotations[p.ann.seenMissing] = ago(11 * time.Minute)
		}, doNothing, "TooManyNodesLost"},
		"the clock of what was held and is not any more was not kept up": {lostClaim, func(p *policy, s *snapshot) {
			s.volume.Annotations[p.ann.seenMissing] = ago(11 * time.Minute)
		}, doChange, "NodeIsMissing"},
		"another clock was kept up": {lostClaim, func(p *policy, s *snapshot) {
			s.kept = ago(2 * time.Hour)
			delete(s.volume.Annotations, p.ann.seenMissing)
		}, doChange, "NodeIsMissing"},
		"the clock is older than the volume": {lostClaim, func(p *policy, s *snapshot) {
			s.volume.CreationTimestamp = metav1.NewTime(testNow.Add(-time.Hour))
			s.volume.Annotations[p.ann.missing] = "1970-01-01T00:00:00Z"
		}, doChange, "NodeIsMissing"},
		"the clock is as old as the volume": {lostClaim, func(p *policy, s *snapshot) {
			s.volume.CreationTimestamp = metav1.NewTime(testNow.Add(-time.Hour))
		}, doDeleteClaim, "NodeIsGone"},
		"the clock runs behind that of the volume": {lostClaim, func(p *policy, s *snapshot) {
			s.volume.CreationTimestamp = metav1.NewTime(testNow.Add(time.Minute))
			s.volume.Annotations[p.ann.missing] = ago(0)
			delete(s.volume.Annotations, p.ann.seenMissing)
		}, doNothing, "Clock"},
		"the clock is older than a return": {lostClaim, func(_ *policy, s *snapshot) { s.present = testNow.Add(-30 * time.Minute) }, doChange, "NodeIsMissing"},
		"the clock is newer than a return": {lostClaim, func(_ *policy, s *snapshot) { s.present = testNow.Add(-2 * time.Hour) }, doDeleteClaim, "NodeIsGone"},
		"the name is not written":          {lostClaim, func(p *policy, s *snapshot) { delete(s.volume.Annotations, p.ann.lostNode) }, doChange, "NodeIsMissing"},
		"too many are lost":                {lostClaim, func(_ *policy, s *snapshot) { s.open = true }, doChange, "NodeIsMissing"},
		"held":                             {lostClaim, func(p *policy, s *snapshot) { s.open, s.volume.Annotations[p.ann.hold] = true, heldByBreak }, doNothing, "TooManyNodesLost"},
		"held, whatever is lost now":       {lostClaim, func(p *policy, s *snapshot) { s.volume.Annotations[p.ann.hold] = heldByBreak }, doNothing, "TooManyNodesLost"},
		"held by something else":           {lostClaim, func(p *policy, s *snapshot) { s.volume.Annotations[p.ann.hold] = "x" }, doNothing, "TooManyNodesLost"},
		"held and approved": {lostClaim, func(p *policy, s *snapshot) {
			s.open, s.approved, s.volume.Annotations[p.ann.hold] = true, true, heldByBreak
		}, doChange, "NodeIsMissing"},
		"approved before its grace": {lostClaim, func(p *policy, s *snapshot) {
			s.open, s.approved, s.volume.Annotations[p.ann.missing] = true, true, ago(0)
		}, doDeleteClaim, "NodeIsGone"},
		"mode off":                 {lostClaim, func(p *policy, _ *snapshot) { p.mode = CleanupOff }, doNothing, "Off"},
		"report, and not told yet": {lostClaim, func(p *policy, s *snapshot) { p.mode, s.volume.Annotations = CleanupReport, nil }, doNotice, "NodeIsMissing"},
		"report, and told": {lostClaim, func(p *policy, s *snapshot) {
			p.mode, s.volume.Annotations, s.noticed = CleanupReport, nil, testNow.Add(-time.Hour)
		}, doNothing, "ReportOnly"},
		"the path is off": {lostClaim, func(p *policy, s *snapshot) { p.orphanPath, s.volume.Annotations = false, nil }, doNotice, "NodeIsMissing"},
		"not opted in":    {lostClaim, func(p *policy, _ *snapshot) { p.scope = ScopeOptIn }, doChange, "OptedOut"},
		"not opted in, without notes": {lostClaim, func(p *policy, s *snapshot) {
			p.scope, s.volume.Annotations, s.noticed = ScopeOptIn, nil, testNow.Add(-time.Hour)
		}, doSkip, "Scope"},
		"opted out while it is held": {lostClaim, func(p *policy, s *snapshot) {
			s.wishes.optOut, s.noticed = "x", testNow.Add(-time.Hour)
			s.volume.Annotations = map[string]string{p.ann.hold: heldByBreak}
		}, doSkip, "Scope"},
		"opted in":               {lostClaim, func(p *policy, s *snapshot) { p.scope, s.wishes.optIn = ScopeOptIn, "x" }, doDeleteClaim, "NodeIsGone"},
		"opted in and out":       {lostClaim, func(p *policy, s *snapshot) { p.scope, s.wishes = ScopeOptIn, wishes{"x", "y"} }, doChange, "OptedOut"},
		"opted out and approved": {lostClaim, func(_ *policy, s *snapshot) { s.approved, s.wishes.optOut = true, "y" }, doChange, "OptedOut"},
		"retain": {lostClaim, func(_ *policy, s *snapshot) {
			s.volume.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
		}, doSkip, "Retain"},
		"retain, but the claim goes": {lostClaim, func(p *policy, s *snapshot) {
			p.retain, s.volume.Spec.PersistentVolumeReclaimPolicy = RetainClaim, corev1.PersistentVolumeReclaimRetain
		}, doDeleteClaim, "NodeIsGone"},
		"recycle": {lostClaim, func(p *policy, s *snapshot) {
			p.retain, s.volume.Spec.PersistentVolumeReclaimPolicy = RetainClaim, corev1.PersistentVolumeReclaimRecycle
		}, doSkip, "Retain"},
		"claim is lost":            {lostClaim, func(_ *policy, s *snapshot) { s.claim.Status.Phase = corev1.ClaimLost }, doSkip, "ClaimLost"},
		"claim has another volume": {lostClaim, func(_ *policy, s *snapshot) { s.claim.Spec.VolumeName = "x" }, doSkip, "NotBound"},
		"claim that cannot be":     {lostClaim, func(_ *policy, s *snapshot) { s.claim, s.volume.Spec.ClaimRef.Namespace = nil, "" }, doSkip, "NotBound"},
		"claim that is a path":     {lostVolume, func(_ *policy, s *snapshot) { s.volume.Spec.ClaimRef.Name = "x/y" }, doSkip, "NotBound"},
		"failed": {lostVolume, func(_ *policy, s *snapshot) {
			s.volume.Status.Phase, s.noticed = corev1.VolumeFailed, testNow.Add(-time.Hour)
		}, doBlocked, "Failed"},
		"failed, while too many are lost": {lostVolume, func(_ *policy, s *snapshot) {
			s.volume.Status.Phase, s.noticed, s.open = corev1.VolumeFailed, testNow.Add(-time.Hour), true
		}, doBlocked, "Failed"},
		"claim has another UID":        {lostClaim, func(_ *policy, s *snapshot) { s.claim.UID = "x" }, doNothing, reasonWaiting},
		"bound, but its claim is gone": {lostClaim, func(_ *policy, s *snapshot) { s.claim = nil }, doNothing, reasonWaiting},
		"claim is going":               {lostClaim, func(_ *policy, s *snapshot) { s.claim.DeletionTimestamp = &metav1.Time{Time: testNow} }, doNothing, reasonWaiting},
		"claim is going, volume stays": {lostClaim, func(p *policy, s *snapshot) {
			p.mode, s.claim.DeletionTimestamp = CleanupClaims, &metav1.Time{Time: testNow}
		}, doNothing, "ClaimIsGoing"},
		"tried in dry-run": {lostClaim, func(_ *policy, s *snapshot) { s.tried = true }, doNothing, "Tried"},
		"the claim goes before a volume that is being deleted": {lostClaim, func(_ *policy, s *snapshot) { s.volume.DeletionTimestamp = &metav1.Time{Time: testNow} }, doDeleteClaim, "NodeIsGone"},

		"released":              {lostVolume, nil, doDeleteVolume, "NotReclaimed"},
		"released, mode claims": {lostVolume, func(p *policy, _ *snapshot) { p.mode = CleanupClaims }, doNothing, "VolumeIsLeft"},
		"released and held":     {lostVolume, func(p *policy, s *snapshot) { p.mode, s.volume.Annotations[p.ann.hold] = CleanupClaims, heldByBreak }, doNothing, "VolumeIsLeft"},
		"released, held and approved": {lostVolume, func(p *policy, s *snapshot) {
			p.mode, s.approved, s.volume.Annotations[p.ann.hold] = CleanupClaims, true, heldByBreak
		}, doChange, "Approved"},
		"released at a time that nobody has noted": {lostVolume, func(p *policy, s *snapshot) {
			s.volume.Status.LastPhaseTransitionTime = nil
			s.volume.Annotations[p.ann.missing] = ago(20 * time.Minute)
			p.releaseGrace = 30 * time.Minute
		}, doNothing, reasonWaiting},
		"released before its node was lost for long": {lostVolume, func(_ *policy, s *snapshot) { s.volume.Status.LastPhaseTransitionTime = nil }, doDeleteVolume, "NotReclaimed"},
		"released just now":                          {lostVolume, func(_ *policy, s *snapshot) { s.volume.Status.LastPhaseTransitionTime.Time = testNow }, doNothing, reasonWaiting},
		"released and retained": {lostVolume, func(_ *policy, s *snapshot) {
			s.volume.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
		}, doSkip, "Retain"},
		"retained and being deleted": {lostVolume, func(_ *policy, s *snapshot) {
			s.volume.Spec.PersistentVolumeReclaimPolicy, s.volume.DeletionTimestamp = corev1.PersistentVolumeReclaimRetain, &metav1.Time{}
		}, doSkip, "Retain"},
		"of nobody": {lostVolume, func(_ *policy, s *snapshot) { delete(s.volume.Annotations, storagehelpers.AnnDynamicallyProvisioned) }, doSkip, "Static"},
		"of nobody, but included": {lostVolume, func(p *policy, s *snapshot) {
			p.static = true
			delete(s.volume.Annotations, storagehelpers.AnnDynamicallyProvisioned)
		}, doDeleteVolume, "NotReclaimed"},
		"never used": {lostVolume, func(_ *policy, s *snapshot) {
			s.volume.Spec.ClaimRef, s.volume.Status.Phase = nil, corev1.VolumeAvailable
		}, doDeleteVolume, "NotReclaimed"},
		"never used and of nobody": {lostVolume, func(p *policy, s *snapshot) {
			p.static, s.volume.Status.Phase = true, corev1.VolumeAvailable
			delete(s.volume.Annotations, storagehelpers.AnnDynamicallyProvisioned)
		}, doSkip, "Static"},
		"attached":                  {lostVolume, func(_ *policy, s *snapshot) { s.attachments = []string{"va"} }, doBlocked, "Attached"},
		"its claim has come again":  {lostVolume, func(p *policy, s *snapshot) { s.claim = lostClaim(*p).claim }, doDeleteClaim, "NodeIsGone"},
		"reserved for a claim":      {lostVolume, func(p *policy, s *snapshot) { s.volume.Spec.ClaimRef.UID, s.claim = "", lostClaim(*p).claim }, doSkip, "NotBound"},
		"being deleted by somebody": {lostVolume, func(_ *policy, s *snapshot) { s.volume.DeletionTimestamp = &metav1.Time{Time: testNow} }, doNothing, reasonWaiting},
		"being deleted by this process": {lostVolume, func(_ *policy, s *snapshot) {
			s.forced, s.volume.DeletionTimestamp, s.volume.Finalizers = true, &metav1.Time{Time: testNow}, []string{"prov/f", pvProtection}
		}, doRemoveFinalizers, "NotReclaimed"},
		"being deleted for long": {lostVolume, func(_ *policy, s *snapshot) {
			s.volume.DeletionTimestamp, s.volume.Finalizers = &metav1.Time{Time: testNow.Add(-time.Hour)}, []string{"prov/f"}
		}, doRemoveFinalizers, "NotReclaimed"},
		"kept by its protection": {lostVolume, func(_ *policy, s *snapshot) {
			s.volume.DeletionTimestamp, s.volume.Finalizers = &metav1.Time{Time: testNow.Add(-time.Hour)}, []string{pvProtection}
		}, doNothing, "Deleted"},
		"kept by a stranger": {lostVolume, func(_ *policy, s *snapshot) {
			s.volume.DeletionTimestamp, s.volume.Finalizers = &metav1.Time{Time: testNow.Add(-time.Hour)}, []string{pvProtection, "x/y"}
		}, doBlocked, "ForeignFinalizer"},

		"node is back": {lostClaim, func(_ *policy, s *snapshot) { s.member.place = placeHealthy }, doForget, "NodeIsBack"},
		"node is back, held": {lostClaim, func(p *policy, s *snapshot) {
			s.member.place = placeHealthy
			s.volume.Annotations = map[string]string{p.ann.hold: heldByBreak}
		}, doForget, "NodeIsBack"},
		"node is back, in report":       {lostClaim, func(p *policy, s *snapshot) { p.mode, s.member.place, s.noticed = CleanupReport, placeHealthy, testNow }, doForget, "NodeIsBack"},
		"node is there":                 {lostClaim, func(_ *policy, s *snapshot) { s.member.place, s.volume.Annotations = placeHealthy, nil }, doNothing, "NodeExists"},
		"not local, as far as is known": {lostClaim, func(_ *policy, s *snapshot) { s.member.place, s.noticed = placeElsewhere, testNow }, doNothing, "NotLocal"},
		"something may be there":        {lostClaim, func(_ *policy, s *snapshot) { s.member.place = placeUnclear }, doChange, "OutdatedNotes"},
		"something may be there, held": {lostClaim, func(p *policy, s *snapshot) {
			s.member.place = placeUnclear
			s.volume.Annotations = map[string]string{p.ann.hold: heldByBreak}
		}, doNothing, "MayStillExist"},
		"only its recorded name is back": {lostClaim, func(_ *policy, s *snapshot) { s.member = membership{place: placeHealthy, recorded: true} }, doForget, "NodeIsBack"},
		"only its recorded name is left": {lostClaim, func(p *policy, s *snapshot) {
			s.member = membership{place: placeHealthy, recorded: true}
			s.volume.Annotations = map[string]string{p.ann.lostNode: "n", p.ann.lostNodeUID: "u"}
		}, doNothing, "NodeExists"},
		"node is terminating": {lostClaim, func(_ *policy, s *snapshot) { s.member.place = placeTerminating }, doChange, "OutdatedNotes"},
		"terminating, held": {lostClaim, func(p *policy, s *snapshot) {
			s.member.place = placeTerminating
			s.volume.Annotations = map[string]string{p.ann.hold: heldByBreak}
		}, doNothing, "NodeIsTerminating"},
		"terminating, held, approved": {lostClaim, func(p *policy, s *snapshot) {
			s.member.place, s.approved = placeTerminating, true
			s.volume.Annotations = map[string]string{p.ann.hold: heldByBreak}
		}, doChange, "OutdatedNotes"},
		"fenced, not asked for": {lostClaim, func(_ *policy, s *snapshot) { s.member, s.volume.Annotations = membership{place: placeFenced}, nil }, doNothing, "NodeExists"},
		"fenced for too short": {lostClaim, func(p *policy, s *snapshot) {
			p.outOfService, s.volume.Annotations = true, nil
			s.member = membership{place: placeFenced, fencedSince: testNow}
		}, doNothing, "NodeExists"},
		"fenced": {lostClaim, func(p *policy, s *snapshot) {
			p.outOfService, s.volume.Annotations = true, nil
			s.member = membership{place: placeFenced, fencedSince: testNow.Add(-time.Hour)}
		}, doDeleteClaim, "NodeIsGone"},
		"fenced, too many are lost": {lostClaim, func(p *policy, s *snapshot) {
			p.outOfService, s.open = true, true
			s.member = membership{place: placeFenced, fencedSince: testNow.Add(-time.Hour)}
		}, doChange, "NodeIsMissing"},

		"asked for by command": {lostClaim, func(p *policy, s *snapshot) {
			p.command, p.scope, s.open, s.volume.Annotations = true, ScopeOptIn, true, nil
		}, doDeleteClaim, "NodeIsGone"},
		"asked for by command, but opted out": {lostClaim, func(p *policy, s *snapshot) { p.command, s.wishes.optOut = true, "x" }, doSkip, "Scope"},
	} {
		t.Run(name, func(t *testing.T) {
			p := testPolicy()
			s := tt.from(p)
			if tt.change != nil {
				tt.change(&p, &s)
			}
			got := p.decide(s)
			if got.action != tt.action || got.reason != tt.reason {
				t.Errorf("got %v %q (%+v), want %v %q", got.action, got.reason, got, tt.action, tt.reason)
			}
		})
	}
}

// TestDecideSettles has every change that decide asks for made, and checks that decide
// does not ask for it again.
func TestDecideSettles(t *testing.T) {
	for place := placeElsewhere; place <= placeOrphan; place++ {
		for _, mode := range []CleanupMode{CleanupOff, CleanupReport, CleanupClaims, CleanupVolumes} {
			for bits := range 32 {
				p := testPolicy()
				p.mode, p.outOfService = mode, true
				s := lostClaim(p)
				s.member.place, s.open, s.approved = place, bits&1 != 0, bits&2 != 0
				if bits&4 != 0 {
					s.wishes.optOut = "x"
				}
				if bits&8 != 0 {
					s.volume.Annotations = map[string]string{p.ann.hold: heldByBreak, p.ann.missing: "odd"}
				}
				if bits&16 != 0 {
					s.tombstone = &tombstone{name: "a", uid: "u", optedOut: bits&4 != 0}
				}
				for round := 0; ; round++ {
					st := p.decide(s)
					if st.action.destroys() && (mode == CleanupOff || mode == CleanupReport || s.wishes.optOut != "" || s.open && !s.approved || place != placeOrphan && place != placeFenced) {
						t.Fatalf("%d %s %b: %v", place, mode, bits, st.action)
					}
					if st.action != doChange && st.action != doForget {
						break
					}
					if round > 2 {
						t.Fatalf("%d %s %b: %v again and again: %+v", place, mode, bits, st.action, st.change)
					}
					s.volume = s.volume.DeepCopy()
					st.change.Apply(s.volume)
					s.noticed = time.Time{}
				}
			}
		}
	}
}

func TestGates(t *testing.T) {
	fine := func() *facts { return &facts{readyNode: "keep", sameCluster: true} }
	for name, tt := range map[string]struct {
		change func(p *policy, s *snapshot)
		want   []gate
	}{
		"all open":              {func(*policy, *snapshot) {}, nil},
		"nobody was asked":      {func(_ *policy, s *snapshot) { s.facts = nil }, []gate{gateAbsence}},
		"report":                {func(p *policy, _ *snapshot) { p.mode = CleanupReport }, []gate{gateMode}},
		"path":                  {func(p *policy, _ *snapshot) { p.orphanPath = false }, []gate{gateMode}},
		"scope":                 {func(p *policy, _ *snapshot) { p.scope = ScopeOptIn }, []gate{gateScope}},
		"opted out":             {func(_ *policy, s *snapshot) { s.wishes.optOut, s.approved = "x", true }, []gate{gateScope}},
		"a node of its name":    {func(_ *policy, s *snapshot) { s.facts.present = []string{"Node a"} }, []gate{gateAbsence}},
		"approved, but a node":  {func(_ *policy, s *snapshot) { s.approved, s.facts.present = true, []string{"Node a"} }, []gate{gateAbsence}},
		"healthy":               {func(_ *policy, s *snapshot) { s.member.place = placeHealthy }, []gate{gateAbsence}},
		"unclear":               {func(_ *policy, s *snapshot) { s.member.place = placeUnclear }, []gate{gateAbsence}},
		"fenced, not asked for": {func(_ *policy, s *snapshot) { s.member = membership{place: placeFenced} }, []gate{gateAbsence}},
		"fenced":                {func(p *policy, s *snapshot) { p.outOfService, s.member = true, membership{place: placeFenced} }, nil},
		"fenced, by command": {func(p *policy, s *snapshot) {
			p.outOfService, p.command, s.member = true, true, membership{place: placeFenced}
		}, []gate{gateAbsence}},
		"grace":                   {func(p *policy, s *snapshot) { s.volume.Annotations[p.ann.missing] = testNow.Format(time.RFC3339) }, []gate{gateGrace}},
		"no clock":                {func(p *policy, s *snapshot) { delete(s.volume.Annotations, p.ann.missing) }, []gate{gateGrace}},
		"no clock, but approved":  {func(p *policy, s *snapshot) { s.approved = true; delete(s.volume.Annotations, p.ann.missing) }, nil},
		"breaker":                 {func(_ *policy, s *snapshot) { s.open = true }, []gate{gateBreaker}},
		"held":                    {func(p *policy, s *snapshot) { s.volume.Annotations[p.ann.hold] = heldByBreak }, []gate{gateBreaker}},
		"held, but approved":      {func(p *policy, s *snapshot) { s.approved, s.volume.Annotations[p.ann.hold] = true, heldByBreak }, nil},
		"no node is ready":        {func(_ *policy, s *snapshot) { s.approved, s.facts.readyNode = true, "" }, []gate{gateSanity}},
		"another cluster":         {func(_ *policy, s *snapshot) { s.facts.sameCluster = false }, []gate{gateSanity}},
		"in use, though approved": {func(_ *policy, s *snapshot) { s.approved, s.facts.users = true, []string{"ns/p"} }, []gate{gateUse}},
		"everything":              {func(p *policy, s *snapshot) { p.mode, s.facts, s.open = CleanupReport, &facts{}, true }, []gate{gateMode, gateBreaker, gateSanity, gateSanity}},
	} {
		t.Run(name, func(t *testing.T) {
			p := testPolicy()
			s := lostClaim(p)
			s.facts = fine()
			tt.change(&p, &s)
			var got []gate
			for _, f := range p.gates(s) {
				got = append(got, f.gate)
				if f.reason == "" || strings.TrimSpace(f.message) == "" {
					t.Errorf("%+v says nothing", f)
				}
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("closed are %v, want %v", got, tt.want)
			}
		})
	}
}

// A hold ends with an approval or the return of the node, not because its owner opts out for a moment.
func TestOptingOutKeepsAHold(t *testing.T) {
	p := testPolicy()
	s := lostClaim(p)
	s.volume.Annotations[p.ann.hold], s.wishes.optOut = heldByBreak, "x"
	if got := p.decide(s); got.reason != "OptedOut" || slices.Contains(got.change.RemoveAnnotations, p.ann.hold) {
		t.Errorf("got %v %q %+v", got.action, got.reason, got.change)
	}
}
