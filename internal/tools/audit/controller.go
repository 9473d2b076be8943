// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Controller audits a driver periodically.
type Controller struct {
	auditor   Auditor
	interval  time.Duration
	ready     func(context.Context) error
	findings  *prometheus.GaugeVec
	completed prometheus.Gauge
}

// NewController returns a controller that audits at each interval. ready blocks until the
// driver is connected; its error ends [Controller.Run].
func NewController(a Auditor, interval time.Duration, ready func(context.Context) error, reg prometheus.Registerer) (*Controller, error) {
	if err := a.Config.Validate(); err != nil {
		return nil, err
	}
	c := &Controller{
		auditor: a, interval: interval, ready: ready,
		findings: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "storage_controller_audit_findings",
			Help: "Findings of the last audit by kind: differences between driver and API server, and objects stuck in deletion. " +
				"Absent before the first audit and on standby replicas.",
		}, []string{"kind"}),
		completed: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "storage_controller_audit_timestamp_seconds",
			Help: "Unix time of the last completed audit; 0 before the first.",
		}),
	}
	reg.MustRegister(c.findings, c.completed)
	return c, nil
}

// Run audits until ctx ends. It varies the interval by up to a tenth, so that the controllers
// of several drivers do not all audit at the same time.
func (c *Controller) Run(ctx context.Context) error {
	log := klog.FromContext(ctx)
	defer func() { // the next leader may be another replica
		c.findings.Reset()
		c.completed.Set(0)
	}()
	if volumes, nodes := c.auditor.Lists(); !volumes || !nodes {
		log.Info("Audit is partial, the driver lacks capabilities", "listVolumes", volumes, "listVolumesPublishedNodes", nodes)
	}
	known := map[identity]bool{}
	for c.ready(ctx) == nil {
		report, err := c.audit(ctx)
		switch {
		case err == nil:
			known = c.publish(ctx, report, known)
		case ctx.Err() == nil:
			log.Error(err, "Audit failed", "retryIn", c.interval)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(c.interval + rand.N(c.interval/10+1)):
		}
	}
	return context.Cause(ctx)
}

// audit turns a panic into an error, so that it costs one audit and not the process.
func (c *Controller) audit(ctx context.Context) (report Report, err error) {
	defer workloop.Recover(&err)
	return c.auditor.Audit(ctx)
}

// publish sets the metrics, logs the findings that are not known yet, and returns the
// identities of the findings.
func (c *Controller) publish(ctx context.Context, report Report, known map[identity]bool) map[identity]bool {
	log := klog.FromContext(ctx)
	now, count := map[identity]bool{}, map[string]int{}
	for _, f := range report.Findings {
		if f.Severity == finding.Unknown { // Run has logged it
			continue
		}
		now[f.identity()] = true
		count[f.Topic]++
		if !known[f.identity()] {
			log.Info("Audit finding", "kind", f.Topic, "object", f.Object,
				"volumeHandle", f.VolumeHandle, "snapshotHandle", f.SnapshotHandle, "nodeID", f.Node, "message", f.Message)
		}
	}
	for _, k := range Kinds() {
		c.findings.WithLabelValues(k).Set(float64(count[k]))
	}
	c.completed.SetToCurrentTime()
	return now
}
