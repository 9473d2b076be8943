// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/keylock"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// build creates the controllers of the chosen roles and starts the watches. What it starts lasts as long as
// services; ctx cancels its requests.
func (p *process) build(ctx, services context.Context, config *rest.Config) (_ *terms, err error) {
	chosen, others, err := p.choose(p.driver, true)
	if err != nil {
		return nil, err
	}
	for _, s := range others {
		klog.FromContext(ctx).Info("Role disabled", "role", s.role, "reason", s.reason.Error())
	}
	if finalizer := p.unreleased(chosen, p.driver.Name); finalizer != "" {
		klog.FromContext(ctx).Info("Nodes that are deleted keep the finalizer that topolvm-node adds, because this process does not run "+
			"the nodecontroller. Unless another process of this command does, add nodecontroller to --controllers", "finalizer", finalizer)
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("driver %q supports none of the roles", p.driver.Name)
	}
	client, meta, err := kube.NewClients(kube.ForWatches(config, p.Version))
	if err != nil {
		return nil, err
	}
	events, err := startEvents(ctx, config, p.Version, p.driver.Name)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			events.stop(eventsGrace)
		}
	}()
	queues, all := map[registry]*workloop.Metrics{}, []*workloop.Metrics{}
	for _, registry := range p.registries.all() {
		queues[registry] = workloop.NewMetrics(registry)
		queues[registry].Enqueue = p.Enqueue
		all = append(all, queues[registry])
	}
	b := &builder{process: p, config: config, queues: queues, shared: shared{
		settings: p.Settings, driver: p.driver, csi: p.csi, events: events, recorder: events.recorder, metadata: meta,
		watches:   kube.ForWatches(config, p.Version),
		informers: kube.NewInformers(client, meta, p.driver.Name), queues: queues[p.registries.first],
		locks: &keylock.Locks[string]{}, running: &running{},
	}}
	t := &terms{
		cfg: p.Config, informers: b.shared.informers, server: p.server,
		stopEvents: func() { events.stop(eventsGrace) }, limit: firstListLimit, retry: startRetry,
		startInformers: func() { b.shared.informers.Start(services) },
	}
	if p.csi != nil {
		t.driver = p.csi
	}
	if p.own != nil {
		if err := p.own.attach(ctx, &b.shared, config, p.Version); err != nil {
			return nil, err
		}
	}
	if err := b.addRoles(ctx, t, chosen); err != nil {
		return nil, err
	}
	if err := t.addCandidates(config, p.registries, events); err != nil {
		return nil, err
	}
	p.page.working(t, all)
	t.startInformers()
	p.server.ready("informers", t.synced)
	p.terms.Store(t)
	return t, nil
}

// builder creates the controllers of a process.
type builder struct {
	process *process
	config  *rest.Config
	queues  map[registry]*workloop.Metrics
	shared  shared
}

// addRoles adds the chosen roles to t and builds them in the order of their names, which puts those that the
// provisioner calls before it. The error of a named role is returned; another one is disabled and retried later.
func (b *builder) addRoles(ctx context.Context, t *terms, chosen []Role) error {
	chosen = slices.SortedFunc(slices.Values(chosen), func(a, b Role) int { return strings.Compare(a.Name, b.Name) })
	for _, r := range chosen {
		var unprepared error // until the process restarts: the caches lack the fields that the role retains
		m := newMember(r.Name, b.process.named(r), func(ctx context.Context) (controller, error) {
			if unprepared != nil {
				return nil, unprepared
			}
			return b.build(ctx, r)
		})
		m.callsDriver = r.driverName == nil
		lease := r.lease(b.process.Settings, b.process.driver.Name)
		t.add(lease, m)
		if r.prepare != nil {
			unprepared = r.prepare(&b.shared)
			m.failure = unprepared
		}
		if r.Name == provisionerName && b.process.Common.AuditInterval > 0 {
			t.add(lease, newMember(auditName, m.named, func(context.Context) (controller, error) { return b.buildAudit(m) }))
		}
	}
	for _, m := range t.members() {
		if m.failure == nil {
			m.failure = m.buildController(ctx)
		}
		if m.failure != nil && m.named {
			return fmt.Errorf("%s: %w", m.name, m.failure)
		}
	}
	return nil
}

// clientConfig returns the configuration of the clients of r in a process that runs with c.
func clientConfig(config *rest.Config, c Config, r Role) *rest.Config {
	limits := c.Role(r.Name).Limits
	qps, burst := limits.QPS, limits.Burst
	if r.limit != nil {
		qps, burst = r.limit(c.Settings)
	}
	return kube.ForRole(config, c.Version, r.Name, float32(qps), burst)
}

// build creates the controller of r.
func (b *builder) build(ctx context.Context, r Role) (controller, error) {
	ofRole := b.process.registries.of(r.Name)
	registry := &attempt{Registerer: ofRole}
	own := b.shared
	own.informers, own.registry, own.queues = own.informers.For(r.Name), registry, b.queues[ofRole]
	c, err := r.build(ctx, &own, clientConfig(b.config, b.process.Config, r))
	if err != nil {
		registry.undo()
		return nil, err
	}
	if c, ok := c.(checker); ok {
		b.process.server.ready(r.check, c.Ready)
	}
	return c, nil
}

// attempt records the collectors that a controller registers, so that building it can be repeated.
type attempt struct {
	prometheus.Registerer
	collectors []prometheus.Collector
}

func (a *attempt) Register(c prometheus.Collector) error {
	err := a.Registerer.Register(c)
	if err == nil {
		a.collectors = append(a.collectors, c)
	}
	return err
}

func (a *attempt) MustRegister(collectors ...prometheus.Collector) {
	for _, c := range collectors {
		if err := a.Register(c); err != nil {
			panic(err)
		}
	}
}

// undo unregisters the collectors.
func (a *attempt) undo() {
	for _, c := range a.collectors {
		a.Unregister(c)
	}
}
