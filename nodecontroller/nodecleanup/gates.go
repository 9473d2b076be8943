package nodecleanup

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// check is a condition for a deletion. It is the label gate of the metric cleanup_blocked.
type check string

const (
	checkMode      check = "mode"
	checkScope     check = "scope"
	checkAbsence   check = "absence"
	checkGrace     check = "grace"
	checkBreaker   check = "breaker"
	checkSanity    check = "sanity"
	checkUse       check = "use"
	checkRate      check = "rate"
	checkLock      check = "lock"
	checkPolicy    check = "policy"
	checkAttached  check = "attached"
	checkFinalizer check = "finalizer"
	checkForbidden check = "forbidden"
)

// reason is a failed check. name is constant.
type reason struct {
	check         check
	name, message string
}

func (r reason) String() string { return r.name + ": " + r.message }

// target is one object that is to be deleted because of its hosts.
type target struct {
	hosts   []host
	refusal string   // of its owners, see [Policy.refusal]
	users   []string // pods that use the claim on other nodes that exist
}

// mayClean returns every reason why target must not be deleted now; none means that it may be. It
// is the only function that permits a deletion, it has no side effects, and before each deletion it
// is called with a target and a cluster that were read from the API server.
func (p Policy) mayClean(t target, c cluster) (reasons []reason) {
	no := func(ck check, name, format string, args ...any) {
		reasons = append(reasons, reason{ck, name, fmt.Sprintf(format, args...)})
	}
	if !p.Deletes() {
		no(checkMode, "ReportOnly", "the mode of the cleanup is %s", p.mode())
	}
	if t.refusal != "" {
		no(checkScope, "Scope", "%s", t.refusal)
	}
	if c.keyProblem != "" {
		no(checkAbsence, "TopologyKeyUnknown", "%s. Set --topology-node-key", c.keyProblem)
	}
	if len(t.hosts) == 0 {
		no(checkAbsence, "NotLocal", "it belongs to no node")
	}
	for _, h := range t.hosts {
		switch h.state {
		case missing:
			reasons = append(reasons, p.mayCleanMissing(h, c)...)
		case deleting:
			reasons = append(reasons, p.mayCleanDeleting(h, c)...)
		default:
			no(checkAbsence, "NodeExists", "a Node or CSINode that may be %s exists", h.value)
		}
		if h.record.OptedOut {
			no(checkScope, "Scope", "Node %s had the annotation %s: %s when it was deleted", h.name(), p.annotation, disabled)
		}
		if (h.record.Held != "" || c.open) && h.record.Approved.IsZero() && !h.record.Planned && !p.command {
			no(checkBreaker, "TooManyNodesLost", "too many nodes are lost. The cleanup of %s waits for an approval", h.name())
		}
	}
	if len(t.users) > 0 {
		no(checkUse, "ClaimInUse", "pod %s uses the claim on a node that exists", strings.Join(t.users, ", "))
	}
	return reasons
}

// mayCleanMissing holds the conditions for a host without any Node.
func (p Policy) mayCleanMissing(h host, c cluster) (reasons []reason) {
	no := func(ck check, name, format string, args ...any) {
		reasons = append(reasons, reason{ck, name, fmt.Sprintf(format, args...)})
	}
	if !p.command {
		switch {
		case !p.path(PathOrphan):
			no(checkMode, "PathOff", "--node-cleanup-paths does not include %s", PathOrphan)
		case !h.recorded || h.record.Since.IsZero():
			no(checkGrace, "NotRecorded", "there is no record that %s is missing", h.name())
		case c.now.Before(p.due(h)):
			no(checkGrace, "Grace", "node %s has not been missing for %v", h.name(), p.NodeMissingGrace)
		}
	}
	if len(c.bare) > 0 {
		no(checkAbsence, "NodeWithoutLabel", "Node %s lacks the label of the topology key and may be %s",
			strings.Join(c.bare, ", "), h.value)
	}
	if !c.readyNode {
		no(checkSanity, "NoReadyNode", "no node with the driver is ready, so the cluster itself may be broken")
	}
	if !c.sameCluster {
		no(checkSanity, "OtherCluster", "the namespace kube-system has changed since the start, so this may be another cluster")
	}
	return reasons
}

// mayCleanDeleting holds the conditions for a host whose Nodes are being deleted. They wait for our
// finalizer, so --node-missing-grace and the state of the cluster do not matter.
func (p Policy) mayCleanDeleting(h host, c cluster) (reasons []reason) {
	if p.command {
		return []reason{{checkAbsence, "NodeExists", "Node " + h.name() + " exists"}}
	}
	if !p.path(PathFinalizer) {
		return []reason{{checkMode, "PathOff", "--node-cleanup-paths does not include " + PathFinalizer}}
	}
	for _, n := range h.nodes {
		switch {
		case n.DeletionTimestamp == nil || !h.recorded ||
			!slices.ContainsFunc(h.nodes, func(n *corev1.Node) bool { return n.UID == h.record.UID }):
			reasons = append(reasons, reason{checkAbsence, "NodeChanged", "Node " + n.Name + " is not the one that was being deleted"})
		case !slices.Contains(n.Finalizers, p.NodeFinalizer):
			reasons = append(reasons, reason{checkAbsence, "NodeReleased", "Node " + n.Name + " does not wait for finalizer " +
				p.NodeFinalizer})
		case c.now.Before(n.DeletionTimestamp.Add(p.NodeDeleteGrace)),
			p.NodeFinalizerWaitForOthers && slices.ContainsFunc(n.Finalizers, p.isOther) && isReady(n):
			reasons = append(reasons, reason{checkGrace, "DeleteGrace", "Node " + n.Name + " may still be drained"})
		case n.Annotations[p.annotation] == disabled:
			reasons = append(reasons, reason{checkScope, "Scope", "Node " + n.Name + " has the annotation " + p.annotation + ": " +
				disabled})
		}
	}
	return reasons
}
