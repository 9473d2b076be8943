package nodecontroller

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"
)

// annotations are the keys under which the controller and the administrator leave notes.
// Their prefix is the name of the driver in lower case.
type annotations struct {
	cleanup     string // on classes, namespaces, claims, volumes and nodes: enabled or disabled
	localData   string // on nodes: lost
	missing     string // on volumes: since when the node is missing
	seenMissing string // on volumes: when that was last seen to be so
	lostNode    string // on volumes: the names of the missing nodes, separated by commas
	lostNodeUID string // on volumes
	lostMachine string // on volumes: of which machine the missing node was, see machineOf
	hold        string // on volumes: what keeps the clean-up from them
	approve     string // on the CSIDriver: names of nodes, or *
	until       string // on the CSIDriver: until when that holds; * needs it
}

const (
	enabled      = "enabled"
	disabled     = "disabled"
	dataLost     = "lost"
	heldByBreak  = "breaker"
	everyNode    = "*"
	nodeListMark = ","
)

func annotationsOf(driver string) annotations {
	d := strings.ToLower(driver) + "/"
	return annotations{
		cleanup: d + "node-cleanup", localData: d + "local-data", missing: d + "node-missing-since", seenMissing: d + "node-missing-seen",
		lostNode: d + "lost-node", lostNodeUID: d + "lost-node-uid", lostMachine: d + "lost-node-machine", hold: d + "node-cleanup-hold",
		approve: d + "node-cleanup-approve", until: d + "node-cleanup-approve-until",
	}
}

// bookkeeping is the annotations of a volume that end with the return of its node.
func (a annotations) bookkeeping() []string {
	return append(a.clock(), a.lostNode, a.lostNodeUID, a.lostMachine, a.hold)
}

// clock is those of them that belong to one absence.
func (a annotations) clock() []string { return []string{a.missing, a.seenMissing} }

// approval is which lost nodes the administrator has looked at and given free.
type approval struct {
	names map[string]bool
	all   bool
}

// parseApproval reads the annotations of a CSIDriver. The error says why a part of them
// has no effect; the rest of them has. An end that is set holds for names as well.
func (a annotations) parseApproval(have map[string]string, now time.Time) (approval, error) {
	result := approval{names: map[string]bool{}}
	text := have[a.until]
	until, bad := time.Parse(time.RFC3339, text)
	var err error
	for name := range strings.SplitSeq(have[a.approve], nodeListMark) {
		switch name = strings.TrimSpace(name); {
		case name == "":
		case name == everyNode && text == "": // a forgotten star would approve the next accident as well
			err = errors.New(a.approve + " is * and has no effect: set " + a.until + " to the time until which it shall hold")
		case text != "" && bad != nil:
			err = fmt.Errorf("%s is %s and has no effect: %s is no RFC 3339 time: %w", a.approve, have[a.approve], a.until, bad)
		case text != "" && !until.After(now):
			err = fmt.Errorf("%s is %s and has no effect any more: %s has passed at %s; remove or renew it", a.approve, have[a.approve], a.until, text)
		case name == everyNode:
			result.all = true
		default:
			result.names[name] = true
		}
	}
	return result, err
}

// spent remembers the nodes that came back while they were approved by name: what was
// approved is over, and they may go again, by accident then. It ends when the name is taken
// out of the annotation.
type spent struct {
	mu    sync.Mutex
	names map[string]bool
}

// returned tells whether a node that is back was approved by name until now.
func (s *spent) returned(node string, granted approval) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !granted.names[node] || s.names[node] {
		return false
	}
	if s.names == nil {
		s.names = map[string]bool{}
	}
	s.names[node] = true
	return true
}

// from is granted without what is spent.
func (s *spent) from(granted approval) approval {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(granted.names, func(name string, _ bool) bool { return s.names[name] })
	return granted
}

// written is for what stands in the annotation now.
func (s *spent) written(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	names := map[string]bool{}
	for name := range strings.SplitSeq(text, nodeListMark) {
		names[strings.TrimSpace(name)] = true
	}
	maps.DeleteFunc(s.names, func(name string, _ bool) bool { return !names[name] })
}

// covers tells whether all nodes are approved.
func (a approval) covers(nodes []string) bool {
	if a.all {
		return true
	}
	for _, n := range nodes {
		if !a.names[n] {
			return false
		}
	}
	return len(nodes) > 0
}
