// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"fmt"
	"slices"
	"strings"
	"time"

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

// findings are failed checks.
type findings []reason

// target is one object that is to be deleted because of its hosts.
type target struct {
	hosts   []host
	refusal string   // of its owners, see [Policy.refusal]
	users   []string // pods that use the claim on other nodes that exist
}

// add adds a failed check.
func (f *findings) add(failed bool, ck check, name, format string, args ...any) {
	if failed {
		*f = append(*f, reason{ck, name, fmt.Sprintf(format, args...)})
	}
}

// mayClean returns every reason why target must not be deleted now; none means that it may be. It
// is the only function that permits a deletion, it has no side effects, and before each deletion it
// is called with a target and a cluster that were read from the API server.
func (p Policy) mayClean(t target, c cluster) (found findings) {
	found.add(!p.Deletes(), checkMode, "ReportOnly", "the mode of the cleanup is %s", p.NodeCleanup)
	found.add(t.refusal != "", checkScope, "Scope", "%s", t.refusal)
	found.add(c.keyProblem != "", checkAbsence, "TopologyKeyUnknown", "%s. Set --topology-node-key", c.keyProblem)
	found.add(len(t.hosts) == 0, checkAbsence, "NotLocal", "it belongs to no node")
	for _, h := range t.hosts {
		switch h.state {
		case missing:
			p.checkMissing(&found, h, c)
		case deleting:
			p.checkDeleting(&found, h, c)
		default:
			found.add(true, checkAbsence, "NodeExists", "a Node or CSINode that may be %s exists", h.value)
		}
		found.add(h.record.Unparsable, checkScope, "Unparsable", "the record of node %s cannot be parsed. Correct or remove it in "+
			"ConfigMap %s", h.name(), ConfigMapName(p.driver))
		found.add(h.record.OptedOut && !h.record.Unparsable, checkScope, "Scope", "Node %s had the annotation %s: %s, or an invalid "+
			"value, when it was deleted", h.name(), p.annotation, disabled)
		held := h.record.Held != "" || c.open && !h.record.exempt() // an open breaker holds it with the next write of the records
		found.add(held, checkBreaker, "TooManyNodesLost",
			"too many nodes are lost, and the cleanup of %s is not approved. If it does not return, run %s", h.name(), p.approveCommand(h))
	}
	found.add(len(t.users) > 0, checkUse, "ClaimInUse", "pod %s uses the claim on a node that exists", strings.Join(t.users, ", "))
	return found
}

// checkMissing adds the failed checks of a host without any Node.
func (p Policy) checkMissing(found *findings, h host, c cluster) {
	since := h.recorded && !h.record.Since.IsZero()
	found.add(!since, checkGrace, "NotRecorded", "there is no record that %s is missing", h.name())
	found.add(since && c.now.Before(p.due(h)), checkGrace, "Grace", "node %s has been missing for less than %v", h.name(),
		p.NodeMissingGrace)
	found.add(since && p.unwatched(h.record, c.checked, c.now), checkGrace, "NotWatched",
		"no process has watched node %s for %v, so its grace period starts again", h.name(), p.ClockGap)
	found.add(len(c.bare) > 0, checkAbsence, "NodeWithoutLabel", "Node %s lacks the label of the topology key and may be %s",
		strings.Join(c.bare, ", "), h.value)
	found.add(!c.readyNode, checkSanity, "NoReadyNode", "no node with the driver is ready, so the cluster itself may be broken")
}

// unwatched reports whether no process has checked a lost node for so long that it may have existed meanwhile. last is the
// time of the last check. A clock that was set forward for as long has the same effect: the grace may not have passed.
func (p Policy) unwatched(r LostNode, last, now time.Time) bool {
	seen := r.Since
	if last.After(seen) && !last.After(now) {
		seen = last
	}
	return now.Sub(seen) > p.ClockGap
}

// checkDeleting adds the failed checks of a host whose Nodes are being deleted. Their deletion was requested, so
// --node-delete-grace replaces --node-missing-grace, and the state of the cluster does not matter.
func (p Policy) checkDeleting(found *findings, h host, c cluster) {
	known := h.recorded && slices.ContainsFunc(h.nodes, func(n *corev1.Node) bool { return n.UID == h.record.UID })
	for _, n := range h.nodes {
		if n.DeletionTimestamp == nil || !known {
			found.add(true, checkAbsence, "NodeChanged", "Node %s is not the one that was being deleted", n.Name)
			continue
		}
		found.add(!slices.Contains(n.Finalizers, p.NodeFinalizer), checkAbsence, "NodeReleased",
			"Node %s does not wait for finalizer %s", n.Name, p.NodeFinalizer)
		drains := c.now.Before(n.DeletionTimestamp.Add(p.NodeDeleteGrace)) ||
			p.NodeFinalizerWaitForOthers && slices.ContainsFunc(n.Finalizers, p.isOther) && isReady(n)
		found.add(drains, checkGrace, "DeleteGrace", "pods may still be draining from Node %s (--node-delete-grace, or finalizers of "+
			"other components)", n.Name)
		refusal := optOut(p.annotation, n)
		found.add(refusal != "", checkScope, "Scope", "%s", refusal)
	}
}
