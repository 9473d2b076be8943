package audit

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"
)

// Controller audits again and again.
type Controller struct {
	auditor  Auditor
	interval time.Duration
	ready    func(context.Context) error
	findings *prometheus.GaugeVec
	done     prometheus.Gauge
}

// NewController makes one that audits at each interval, while ready returns nil.
func NewController(a Auditor, interval time.Duration, ready func(context.Context) error, reg prometheus.Registerer) (*Controller, error) {
	if err := a.Config.Validate(); err != nil {
		return nil, err
	}
	c := &Controller{
		auditor: a, interval: interval, ready: ready,
		findings: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "storage_controller_audit_findings",
			Help: "What the last audit found that driver and API server do not agree on, or that is stuck, by kind. There is none before the first audit, and on replicas that do not lead.",
		}, []string{"kind"}),
		done: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "storage_controller_audit_timestamp_seconds",
			Help: "When the last audit ended that was not broken off, in seconds since 1970; 0 before the first.",
		}),
	}
	reg.MustRegister(c.findings, c.done)
	return c, nil
}

// Run audits until ctx ends. Its interval differs a little each time, so that the
// controllers of many drivers do not all ask at once.
func (c *Controller) Run(ctx context.Context) error {
	log := klog.FromContext(ctx)
	defer func() { // another replica may go on
		c.findings.Reset()
		c.done.Set(0)
	}()
	if volumes, nodes := c.auditor.Lists(); !volumes || !nodes {
		log.Info("The driver does not list all that could be compared; the rest is", "volumes", volumes, "publishedNodes", nodes)
	}
	known := map[identity]bool{}
	for c.ready(ctx) == nil {
		found, err := c.audit(ctx)
		switch {
		case err == nil:
			known = c.tell(ctx, found, known)
		case ctx.Err() == nil:
			log.Error(err, "The audit was broken off; the next one starts afresh", "in", c.interval)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(c.interval + rand.N(c.interval/10+1)):
		}
	}
	return context.Cause(ctx)
}

// audit turns a panic into an error: it costs one audit, not the process.
func (c *Controller) audit(ctx context.Context) (found []Finding, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return c.auditor.Audit(ctx)
}

// tell sets the metrics, logs what was not known, and returns what is now.
func (c *Controller) tell(ctx context.Context, found []Finding, known map[identity]bool) map[identity]bool {
	log := klog.FromContext(ctx)
	now, count := map[identity]bool{}, map[Kind]int{}
	for _, f := range found {
		now[f.identity()] = true
		count[f.Kind]++
		if !known[f.identity()] {
			log.Info("The audit found something", "kind", f.Kind, "object", f.Object, "volumeHandle", f.VolumeHandle, "nodeID", f.Node, "message", f.Message)
		}
	}
	for _, k := range Kinds() {
		c.findings.WithLabelValues(string(k)).Set(float64(count[k]))
	}
	c.done.SetToCurrentTime()
	return now
}
