// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"math"
	"slices"
	"time"
)

// verdict is the decision of the breaker, which limits how many nodes may be lost at the same time without an approval.
// Many nodes that disappear together are an accident of the control plane more often than of the machines.
type verdict struct {
	open               bool // no host may be cleaned up unless it is approved or its removal was planned
	lost, total, limit int
	names              []string // of the lost hosts, sorted
}

// evaluate decides by the hosts with something to delete or a recent deletion, and the hosts of
// all driver nodes. It stays open while any host is held, however many are lost then.
func (p Policy) evaluate(lost, drivers []string, held bool) verdict {
	lost = sorted(lost)
	v := verdict{lost: len(lost), total: len(sorted(drivers, lost)), names: lost}
	// The small addend is for fractions such as 0.29 of 100, which is 28.999 in binary.
	v.limit = max(p.NodeCleanupMinNodes, int(math.Floor(float64(v.total)*p.NodeCleanupMaxFraction+1e-9)))
	v.open = p.Deletes() && (held || v.lost > v.limit)
	return v
}

// verdict evaluates the breaker.
func (t *observer) verdict(ctx context.Context) verdict {
	now, held := time.Now(), false
	var lost []string
	for _, host := range t.lost() {
		r, _ := t.records.get(host)
		held = held || r.opens()
		m := t.recall(host)
		unkept := !m.pending && slices.ContainsFunc(m.keepers, func(h string) bool { return !t.c.index.stays(h) })
		if m.host == nil || unkept {
			_, err := t.gather(ctx, host)
			m = t.recall(host)
			if err != nil {
				m.pending = true
			}
		}
		if !r.Planned && !m.planned && (m.pending || now.Before(r.Acted.Add(t.policy.NodeCleanupWindow))) {
			lost = append(lost, host)
		}
	}
	return t.policy.evaluate(lost, t.c.index.driverNodes().hosts, held)
}
