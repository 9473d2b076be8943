// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import "github.com/prometheus/client_golang/prometheus"

// counts are the values of the gauges.
type counts struct {
	indeterminate, notReady float64
	blocked                 map[string]float64 // by reason
}

// The values of the label reason.
const (
	blockedRelease = "release" // the snapshot-controller has not released the deletion
	blockedOutcome = "outcome" // the creation is indeterminate
	blockedSecret  = "secret"  // the Secret does not exist
	blockedError   = "error"   // the deletion fails
)

var blockedReasons = []string{blockedRelease, blockedOutcome, blockedSecret, blockedError}

// count adds the contents of l to n.
func (l *loop) count(n *counts) {
	for _, c := range l.watches.contents.List() {
		e := l.call(c)
		row := l.c.driver.rowOf(c, e)
		if c.indeterminate(e) && row != notResponsible && row != deletionDone {
			n.indeterminate++
		}
		if row == check {
			n.notReady++
		}
		if c.terminating() && e.Payload.blocked != "" && row != deletionDone {
			n.blocked[e.Payload.blocked]++
		}
	}
}

// counts returns the values of the gauges, zero without the Lease.
func (c *Controller) counts() counts {
	n := counts{blocked: map[string]float64{}}
	for _, l := range []*loop{c.contentLoop.Load(), c.groupLoop.Load()} {
		if l != nil {
			l.count(&n)
		}
	}
	return n
}

func (c *Controller) registerMetrics(reg prometheus.Registerer) {
	gauge := func(name, help string, value func() float64) {
		reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value))
	}
	gauge("storage_controller_snapshotter_snapshots_indeterminate", "Snapshots and groups with a create call whose outcome is unknown.",
		func() float64 { return c.counts().indeterminate })
	gauge("storage_controller_snapshotter_snapshots_not_ready", "Snapshots and groups that exist at the driver and are not ready to use.",
		func() float64 { return c.counts().notReady })
	blocked := prometheus.NewDesc("storage_controller_snapshotter_deletions_blocked",
		"VolumeSnapshotContents and VolumeGroupSnapshotContents whose deletion waits, by reason: "+
			"release (snapshot-controller has not released it), outcome (creation is indeterminate), "+
			"secret (Secret not found), error (deletion failed).", []string{"reason"}, nil)
	reg.MustRegister(prometheus.CollectorFunc(func(values chan<- prometheus.Metric) {
		n := c.counts()
		for _, reason := range blockedReasons {
			values <- prometheus.MustNewConstMetric(blocked, prometheus.GaugeValue, n.blocked[reason], reason)
		}
	}))
}
