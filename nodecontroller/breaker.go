package nodecontroller

import (
	"math"
	"slices"
)

// breaker limits how many nodes may be lost before somebody is asked: many nodes that
// vanish together are an accident of the inventory or the control plane more often than
// of the machines.
type breaker struct {
	minNodes    int
	maxFraction float64
}

// census is what the breaker judges by. All lists are sets of names, in any order.
type census struct {
	pending []string // lost or terminating nodes for which something is to be done
	acted   []string // nodes for which something was done lately
	held    []string // nodes whose clean-up was stopped by an earlier verdict
	drivers []string // nodes that have the driver
}

// verdict is what the breaker says.
type verdict struct {
	// open is that no node may be cleaned up that is not approved.
	open               bool
	lost, total, limit int
	names              []string // of the lost nodes, in order
}

// judge tells whether too many nodes are lost. While a node is held the answer stays the
// same, however many are lost then: time alone must not let the clean-up go on.
func (b breaker) judge(c census) verdict {
	lost := slices.Concat(c.pending, c.acted)
	slices.Sort(lost)
	lost = slices.Compact(lost)
	all := slices.Concat(c.drivers, lost)
	slices.Sort(all)
	v := verdict{lost: len(lost), total: len(slices.Compact(all)), names: lost}
	// The little more is for fractions such as 0.29 of 100, which is 28.999 in binary.
	v.limit = max(b.minNodes, int(math.Floor(float64(v.total)*b.maxFraction+1e-9)))
	v.open = v.lost > v.limit || len(c.held) > 0
	return v
}
