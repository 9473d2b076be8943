package nodecontroller

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// nodePolicy is what the operator has set, as far as it decides about nodes.
type nodePolicy struct {
	finalizer     string
	mode          NodeFinalizerMode
	ann           annotations
	writes        bool // notes on volumes
	deletes       bool // claims, when nodes are deleted
	why           string
	waitForOthers bool
	grace         time.Duration
	timeout       time.Duration
	unregistered  time.Duration
}

func nodePolicyOf(cfg Config, p policy) nodePolicy {
	n := nodePolicy{
		finalizer: cfg.NodeFinalizer, mode: cfg.NodeFinalizerMode, ann: p.ann, writes: p.writes(), waitForOthers: cfg.NodeFinalizerWaitForOthers,
		grace: cfg.NodeDeleteGrace, timeout: cfg.NodeFinalizerTimeout, unregistered: cfg.UnregisteredGrace,
	}
	switch {
	case cfg.SkipNodeFinalize:
		n.why = "--skip-node-finalize is set"
	case cfg.NodeCleanup == CleanupOff || cfg.NodeCleanup == CleanupReport || cfg.NodeCleanup == CleanupDryRun:
		n.why = "the mode of the clean-up is " + string(cfg.NodeCleanup)
	case !slices.Contains(cfg.NodeCleanupPaths, PathFinalizer):
		n.why = "--node-cleanup-paths leaves out " + PathFinalizer
	default:
		n.deletes = true
	}
	return n
}

// nodeAction is the one next thing to do for a node.
type nodeAction int

const (
	nodeNothing nodeAction = iota
	nodeProtect            // add the finalizer
	nodeNote               // write on its volumes that it goes
	nodeHold               // write on its volumes that they wait for an approval
	nodeClean              // delete its claims and custom resources
	nodeRelease            // remove the finalizer
	nodeAbsent             // clean up what only its name is left of
)

// nodeSnapshot is everything that decide may look at about a node.
type nodeSnapshot struct {
	node *corev1.Node // nil: gone
	// registered is that the driver is on the node; unregistered since when it is not, as
	// far as this process knows, zero when it has not seen that.
	registered   bool
	unregistered time.Time
	keyKnown     bool // the topology key of the driver
	// volumes is those of which the node is a host or alias.
	volumes int
	// mentioned is that a volume of the driver may be on the node, as far as that can be told
	// without the topology key of the driver.
	mentioned bool
	// unnoted is that one of its volumes lacks the notes that outlive the node.
	unnoted bool
	// pending is that something is to be done for one of its volumes or claims, unheld
	// that one of those volumes does not say that it is held.
	pending, unheld bool
	open, approved  bool // the breaker's verdict, and whether this node is approved
	// cleaned is that this sync has done what there is to do; blocked says why not all of
	// it could be done, and that it is worth trying again.
	cleaned bool
	blocked string
	now     time.Time
}

// nodeStep is what decide has chosen for a node.
type nodeStep struct {
	action nodeAction
	reason string
	// event is the reason of an event that tells of the step; "" for none.
	event, message string
	next           time.Time
}

const othersInterval = 10 * time.Second

// decide names the one next step for a node. It has no side effects, and is total. A node
// that is being deleted is held by our finalizer for no longer than the timeout,
// whatever is unfinished then.
func (p nodePolicy) decide(s nodeSnapshot) nodeStep {
	switch {
	case s.node == nil:
		return nodeStep{action: nodeAbsent, reason: "Gone"}
	case p.mode == NodeFinalizerOff:
		return nodeStep{reason: "Off"}
	case s.node.DeletionTimestamp == nil:
		return p.decideStaying(s)
	case !slices.Contains(s.node.Finalizers, p.finalizer):
		return nodeStep{reason: "NotOurs"}
	case s.unnoted && p.writes:
		return nodeStep{action: nodeNote, reason: "NodeIsTerminating"}
	}
	if why := p.idle(s); why != "" {
		return nodeStep{action: nodeRelease, reason: "NoCleanup", event: reasonSkipped, message: "The claims of the node are left as they are: " + why}
	}
	return p.decideTerminating(s)
}

// idle is why nothing is cleaned up with a node; "" when something is.
func (p nodePolicy) idle(s nodeSnapshot) string {
	switch {
	case !p.deletes:
		return p.why
	case s.node.Annotations[p.ann.cleanup] == disabled:
		return "it has the annotation " + p.ann.cleanup + ": " + disabled
	case !s.keyKnown:
		return "TopologyKeyUnknown, set --topology-node-key"
	}
	return ""
}

func (p nodePolicy) decideTerminating(s nodeSnapshot) nodeStep {
	deleted := s.node.DeletionTimestamp.Time
	end := deleted.Add(p.timeout)
	wait := func(reason string, until time.Time) nodeStep {
		if until.After(end) {
			until = end
		}
		return nodeStep{reason: reason, next: until}
	}
	others := slices.ContainsFunc(s.node.Finalizers, func(f string) bool { return f != p.finalizer })
	switch {
	case !s.now.Before(end):
		return p.timedOut()
	case p.waitForOthers && others && isReady(s.node):
		return wait("OtherFinalizers", s.now.Add(othersInterval))
	case s.now.Before(deleted.Add(p.grace)):
		return wait("Grace", deleted.Add(p.grace))
	case s.pending && s.open && !s.approved && s.unheld:
		return nodeStep{action: nodeHold, reason: "TooManyNodesLost"}
	case s.pending && s.open && !s.approved:
		return nodeStep{action: nodeRelease, reason: "TooManyNodesLost", event: reasonSkipped,
			message: "The node is let go, its claims are held until an administrator approves their clean-up: too many nodes are lost"}
	case !s.cleaned:
		return nodeStep{action: nodeClean, reason: "NodeIsTerminating"}
	case s.blocked != "":
		return wait("Blocked", s.now.Add(othersInterval))
	}
	return nodeStep{action: nodeRelease, reason: "Cleaned"}
}

// timedOut lets go a node that has waited long enough.
func (p nodePolicy) timedOut() nodeStep {
	return nodeStep{action: nodeRelease, reason: "Timeout", event: reasonTimeout,
		message: "The node is let go after " + p.timeout.String() + ", before its claims were cleaned up; what is left follows once it is gone and the grace has passed"}
}

// decideStaying is for a node that is not being deleted.
func (p nodePolicy) decideStaying(s nodeSnapshot) nodeStep {
	has := slices.Contains(s.node.Finalizers, p.finalizer)
	switch {
	case p.mode != NodeFinalizerManage:
		return nodeStep{reason: "NotManaged"}
	case s.registered && !has:
		return nodeStep{action: nodeProtect, reason: "Unprotected"}
	case s.registered || !has:
		return nodeStep{reason: "Protected"}
	case !s.keyKnown && s.mentioned: // nobody knows which volumes are on it, nor hears of their end
		return nodeStep{reason: "TopologyKeyUnknown", next: s.now.Add(later)}
	case s.volumes > 0:
		return nodeStep{reason: "HasVolumes"} // the end of the last one brings it here again
	case s.unregistered.IsZero():
		return nodeStep{reason: "Unregistered", next: s.now.Add(p.unregistered)}
	case s.now.Before(s.unregistered.Add(p.unregistered)):
		return nodeStep{reason: "Unregistered", next: s.unregistered.Add(p.unregistered)}
	}
	return nodeStep{action: nodeRelease, reason: "Unregistered"}
}

// releases is the change that lets a node go: every occurrence of the finalizer.
func (p nodePolicy) releases() kube.MetadataPatch {
	return kube.MetadataPatch{RemoveFinalizers: []string{p.finalizer}}
}

// String is the name of a in the log.
func (a nodeAction) String() string {
	return [...]string{"nothing", "protect", "note", "hold", "clean", "release", "absent"}[a]
}
