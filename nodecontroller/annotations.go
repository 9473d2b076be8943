package nodecontroller

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// annotations are the keys under which the controller and the administrator leave notes.
// Their prefix is the name of the driver in lower case.
type annotations struct {
	cleanup     string // on classes, namespaces, claims, volumes and nodes: enabled or disabled
	localData   string // on nodes: lost
	missing     string // on volumes: since when the node is missing
	lostNode    string // on volumes: the names of the missing nodes, separated by commas
	lostNodeUID string // on volumes
	lostMachine string // on volumes: of which machine the missing node was, see machineOf
	hold        string // on volumes: what keeps the clean-up from them
	approve     string // on the CSIDriver: names of nodes, or *
	until       string // on the CSIDriver: until when * holds
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
		cleanup: d + "node-cleanup", localData: d + "local-data", missing: d + "node-missing-since",
		lostNode: d + "lost-node", lostNodeUID: d + "lost-node-uid", lostMachine: d + "lost-node-machine", hold: d + "node-cleanup-hold",
		approve: d + "node-cleanup-approve", until: d + "node-cleanup-approve-until",
	}
}

// bookkeeping is the annotations of a volume that end with the return of its node.
func (a annotations) bookkeeping() []string {
	return []string{a.missing, a.lostNode, a.lostNodeUID, a.lostMachine, a.hold}
}

// approval is which lost nodes the administrator has looked at and given free.
type approval struct {
	names map[string]bool
	all   bool
}

// parseApproval reads the annotations of a CSIDriver. The error says why a part of them
// has no effect; the rest of them has.
func (a annotations) parseApproval(have map[string]string, now time.Time) (approval, error) {
	result := approval{names: map[string]bool{}}
	var err error
	for name := range strings.SplitSeq(have[a.approve], nodeListMark) {
		switch name = strings.TrimSpace(name); name {
		case "":
		case everyNode:
			// A forgotten star would approve the next accident as well.
			until, bad := time.Parse(time.RFC3339, have[a.until])
			switch {
			case have[a.until] == "":
				err = errors.New(a.approve + " is * and has no effect: set " + a.until + " to the time until which it shall hold")
			case bad != nil:
				err = fmt.Errorf("%s is * and has no effect: %s is no RFC 3339 time: %w", a.approve, a.until, bad)
			case !until.After(now):
				err = fmt.Errorf("%s is * and has no effect any more: %s has passed at %s", a.approve, a.until, have[a.until])
			default:
				result.all = true
			}
		default:
			result.names[name] = true
		}
	}
	return result, err
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
