// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package pvcfinalizer

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/claimloop"
)

// Mode says which finalizers of claims are removed.
type Mode string

// The modes.
const (
	ModeOff     Mode = "off"
	ModeStrip   Mode = "strip"   // obsolete finalizers
	ModeEnforce Mode = "enforce" // also the finalizer of the driver, after the pods were deleted
)

// Config holds the settings.
type Config struct {
	claimloop.Settings
	Mode      Mode
	Finalizer string   // of the driver
	Obsolete  []string // finalizers
}

// Controller removes finalizers from claims.
type Controller struct {
	*claimloop.Loop // nil: no claim needs anything
	cfg             Config
	deps            claimloop.Deps
	rules           rules
	actions         *prometheus.CounterVec
}

// The values of the metric label "action".
const (
	actionStrip     = "strip"
	actionDeletePod = "pod_delete"
	actionRelease   = "release"
)

// New requests the watches that cfg needs, and no others.
func New(cfg Config, deps claimloop.Deps) *Controller {
	c := &Controller{cfg: cfg, deps: deps, rules: newRules(cfg), actions: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "storage_controller_pvc_finalizer_actions_total",
		Help: "Writes for finalizers of PersistentVolumeClaims, by action (strip, pod_delete or release) and result " +
			"(ok, gone, conflict, forbidden or error).",
	}, []string{"action", "result"})}
	deps.Registry.MustRegister(c.actions)
	if c.rules.idle() {
		return c
	}
	c.Loop = claimloop.New(claimloop.Config{
		Name: "nodecontroller-pvc-finalizer", Settings: cfg.Settings, Pods: c.rules.finalizer != "",
		Concerns: c.rules.concerns, Sync: c.sync,
	}, deps)
	return c
}

// sync reconciles one claim.
func (c *Controller) sync(ctx context.Context, t *claimloop.Term, pvc *corev1.PersistentVolumeClaim) (time.Time, error) {
	next := c.rules.decide(c.gather(t, pvc))
	klog.FromContext(ctx).V(2).Info("Decided", "reason", next.reason, "pods", len(next.pods))
	return next.again, attempt{c, t, pvc}.apply(ctx, next)
}

// gather reads the caches.
func (c *Controller) gather(t *claimloop.Term, pvc *corev1.PersistentVolumeClaim) claimState {
	s := claimState{claim: pvc, now: time.Now()}
	if t.Pods != nil {
		var known bool
		s.pods, known = t.Pods.Of(pvc)
		s.podsUnknown = !known
	}
	return s
}
