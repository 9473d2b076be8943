package nodecontroller

import (
	"fmt"
	"strings"
	"time"
)

// gate is one condition of everything that cannot be undone, or another reason why
// something is not done. It is a label of a metric.
type gate string

const (
	gateMode      gate = "mode"
	gateScope     gate = "scope"
	gateAbsence   gate = "absence"
	gateGrace     gate = "grace"
	gateBreaker   gate = "breaker"
	gateSanity    gate = "sanity"
	gateUse       gate = "use"
	gateRate      gate = "rate"
	gateLock      gate = "lock"
	gatePolicy    gate = "policy"
	gateAttached  gate = "attached"
	gateFinalizer gate = "finalizer"
	gateForbidden gate = "forbidden"
	gateRefused   gate = "refused"
)

// finding is a gate that is closed. reason is constant, message tells the case.
type finding struct {
	gate    gate
	reason  string
	message string
}

func (f finding) String() string { return f.reason + ": " + f.message }

// facts is what the API server, not the cache, says right before something that cannot
// be undone.
type facts struct {
	// present is everything that exists under a name of the lost nodes.
	present []string
	// readyNode is a ready node that has the driver; "" when there is none.
	readyNode string
	// sameCluster is that this is the cluster in which the work began.
	sameCluster bool
	// users is the pods on other nodes that use the claim.
	users []string
}

// gates is every gate that is closed for the step that destroys which decide has chosen
// for s. It repeats what decide has looked at: this is the last time that anybody does.
func (p policy) gates(s snapshot) []finding {
	var closed []finding
	add := func(g gate, reason, format string, args ...any) {
		closed = append(closed, finding{g, reason, fmt.Sprintf(format, args...)})
	}
	if s.facts == nil {
		add(gateAbsence, "NotRead", "the API server has not been asked")
		return closed
	}
	if !p.writes() || !p.orphanPath && !p.command {
		add(gateMode, "ReportOnly", "the mode of the clean-up is %s", p.mode)
	}
	if why := p.outOfScope(s.wishes); why != "" {
		add(gateScope, "Scope", "%s", why)
	}
	closed = append(closed, p.absence(s)...)
	if since, clocked := p.clock(s); s.member.place == placeOrphan && !p.command && !s.approved && (!clocked || s.now.Before(since.Add(p.missingGrace))) {
		add(gateGrace, "Grace", "the node has not been missing for %v", p.missingGrace)
	}
	if !p.command && !s.approved && (s.open || s.volume.Annotations[p.ann.hold] != "") {
		add(gateBreaker, "TooManyNodesLost", "the clean-up is held until an administrator approves it")
	}
	return append(closed, s.facts.findings()...)
}

// absence is whether the node of s is really gone, or fenced and declared lost.
func (p policy) absence(s snapshot) []finding {
	switch s.member.place {
	case placeFenced:
		due := s.member.fencedSince.Add(p.fencedGrace)
		if !p.outOfService || s.now.Before(due) && !p.command {
			return []finding{{gateAbsence, "NotFencedLongEnough", "the node is out of service, but not for long enough"}}
		}
		if p.command { // which is for nodes that do not exist
			return []finding{{gateAbsence, "NodeExists", "the node exists"}}
		}
	case placeOrphan:
		if len(s.facts.present) > 0 {
			return []finding{{gateAbsence, "NodeExists", "there is still " + strings.Join(s.facts.present, ", ")}}
		}
	default:
		return []finding{{gateAbsence, "NodeExists", "a node that may have the volume exists"}}
	}
	return nil
}

// findings is the gates that do not depend on the volume.
func (f *facts) findings() []finding {
	var closed []finding
	if f.readyNode == "" {
		closed = append(closed, finding{gateSanity, "NoReadyNode", "no node with the driver is ready: the cluster itself may be what is broken"})
	}
	if !f.sameCluster {
		closed = append(closed, finding{gateSanity, "OtherCluster", "the namespace kube-system is not the one seen at the start: this may be another cluster"})
	}
	if len(f.users) > 0 {
		closed = append(closed, finding{gateUse, "ClaimInUse", "pod " + strings.Join(f.users, ", ") + " uses the claim on a node that exists"})
	}
	return closed
}

// bucket limits how often something is destroyed. Its caller has to lock it.
type bucket struct {
	qps    float64
	burst  int
	tokens float64
	last   time.Time
	// waiting is how many were refused since and will come again, so that they do not all
	// come for the same token.
	waiting float64
}

// longestWait is when those that were refused come again at the latest.
const longestWait = time.Minute

// take takes a token, or says when there will be one.
func (b *bucket) take(now time.Time) (next time.Time, ok bool) {
	if b.last.IsZero() {
		b.tokens = float64(b.burst)
	} else if passed := now.Sub(b.last).Seconds(); passed > 0 {
		b.tokens = min(float64(b.burst), b.tokens+passed*b.qps)
	}
	b.last = now
	if b.tokens < 1 {
		wait := longestWait.Seconds()
		if b.qps > 0 {
			wait = min(wait, (1-b.tokens+b.waiting)/b.qps)
		}
		b.waiting++
		return now.Add(time.Duration(wait * float64(time.Second))), false
	}
	b.tokens--
	b.waiting = max(0, b.waiting-1)
	return time.Time{}, true
}

// giveBack returns a token that was not used.
func (b *bucket) giveBack() { b.tokens = min(float64(b.burst), b.tokens+1) }
