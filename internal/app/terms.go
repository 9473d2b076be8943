// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/util/wait"
	typedcoordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
	"github.com/storage-controller/storage-controller/metrics"
)

// firstListLimit bounds the wait for the first list of every kind that a role watches, while the API server refuses one.
const firstListLimit = 2 * time.Minute

// terms runs the controllers, each while this process holds the Lease of its role.
type terms struct {
	cfg            Config
	informers      *kube.Informers
	startInformers func() // starts the informers that do not run yet
	server         *diagnostics
	stopEvents     func()
	driver         driverConnection // nil if no role calls the driver
	limit          time.Duration    // of the first lists
	retry          wait.Backoff

	building sync.Mutex // held while a controller is built late: informers and collectors have one user at a time
	entries  []*entry
}

// entry holds the roles under one Lease.
type entry struct {
	lease     string
	members   []*member
	serving   sync.WaitGroup      // members that serve on every replica
	ready     chan struct{}       // closed when the caches of the first member are synced
	setReady  func()              // closes ready
	candidate *election.Candidate // nil without leader election
	driver    driverConnection    // nil without leader election, and if no member calls the driver
	patience  time.Duration       // how long it leads without its driver
	retry     wait.Backoff
}

// driverConnection is a [csiclient.Client].
type driverConnection interface {
	WaitReady(ctx context.Context) error
	WaitLost(ctx context.Context, limit time.Duration) error
}

// driverLimit is the number of Lease durations for which a process leads without its driver. By default it is two minutes, as most
// drivers restart faster, and what the process remembers about interrupted calls ends with the term.
const driverLimit = 8

// errDriverLost ends a term, so that a replica whose driver is ready can lead.
var errDriverLost = errors.New("the driver is not ready")

// add adds a role. Roles with the same Lease share its terms.
func (t *terms) add(lease string, m *member) {
	for _, e := range t.entries {
		if e.lease == lease {
			e.members = append(e.members, m)
			return
		}
	}
	e := &entry{lease: lease, members: []*member{m}, ready: make(chan struct{}), retry: t.retry}
	e.setReady = sync.OnceFunc(func() { close(e.ready) })
	t.entries = append(t.entries, e)
}

// members returns the roles of all Leases.
func (t *terms) members() []*member {
	var all []*member
	for _, e := range t.entries {
		all = append(all, e.members...)
	}
	return all
}

// addCandidates creates the candidates for the Leases. Their client has no rate limit, so that requests of the
// roles never delay a renewal.
func (t *terms) addCandidates(config *rest.Config, registries registries, events record.EventRecorder) error {
	client, err := typedcoordinationv1.NewForConfig(kube.ForRole(config, t.cfg.Version, "leader-election", 0, 0))
	if err != nil {
		return fmt.Errorf("creating the client for Leases: %w", err)
	}
	known := map[registry]*election.Metrics{}
	for _, e := range t.entries {
		role := e.members[0].name // the others have the same settings
		c := t.cfg.Role(role).Election
		if !c.Enabled {
			continue
		}
		registry := registries.of(role)
		if known[registry] == nil {
			known[registry] = election.NewMetrics(registry)
		}
		lock, err := election.NewLock(client, election.Namespace(c.Namespace), e.lease, c.Labels, events)
		if err != nil {
			return err
		}
		e.candidate, err = election.NewCandidate(c.Timing, lock, known[registry])
		if err != nil {
			return err
		}
		if t.cfg.DelayExpiry != nil {
			e.candidate.DelayExpiry(t.cfg.DelayExpiry)
		}
		if t.driver != nil && slices.ContainsFunc(e.members, func(m *member) bool { return m.callsDriver }) {
			e.driver, e.patience = t.driver, driverLimit*c.Timing.LeaseDuration
		}
		for _, member := range e.members {
			member.leased = true
			t.server.leaderElection(member.name, e.candidate.Check)
		}
	}
	return nil
}

// run runs the roles until ctx ends. It returns nil after draining, else the first error of a named role. Servers
// stop together with the workers, so that shutdown takes the longer of both times, not their sum. A Lease is
// released after both.
func (t *terms) run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	serving, stopServing := context.WithCancel(ctx)
	defer stopServing()
	var servers, workers errgroup.Group
	for _, e := range t.entries {
		for _, m := range e.members {
			e.serving.Add(1)
			servers.Go(func() error {
				defer e.serving.Done()
				return cancelOn(cancel, m.serve(serving, t.retry))
			})
			workers.Go(func() error { return cancelOn(cancel, t.start(ctx, e, m)) })
		}
		workers.Go(func() error { return cancelOn(cancel, e.work(ctx)) })
	}
	workers.Go(func() error {
		if !t.cfg.KeepMemory {
			saveMemory(ctx, t.members())
		}
		return nil
	})
	err := workers.Wait()
	stopServing()
	if failed := servers.Wait(); failed != nil {
		return failed
	}
	return err
}

// settled waits until each of members has synced its caches, or is disabled. It reports whether ctx has not ended.
func settled(ctx context.Context, members []*member) bool {
	for _, m := range members {
		select {
		case <-ctx.Done():
			return false
		case <-m.settled:
		}
	}
	return true
}

// start builds the controller of m, unless it is built, and waits for its caches.
func (t *terms) start(ctx context.Context, e *entry, m *member) error {
	if err := m.retry(ctx, working, t.retry, m.failure,
		func(ctx context.Context) error { return t.buildLate(ctx, m) }); err != nil || ctx.Err() != nil {
		return err
	}
	lists := func(ctx context.Context) error { return t.firstLists(ctx, m) }
	if err := m.retry(ctx, working, t.retry, lists(ctx), lists); err != nil || ctx.Err() != nil {
		return err
	}
	m.enable(ctx, working)
	close(m.synced)
	m.settle()
	e.setReady()
	return nil
}

// buildLate builds the controller of m after the others have started.
func (t *terms) buildLate(ctx context.Context, m *member) error {
	t.building.Lock()
	defer t.building.Unlock()
	if ctx.Err() != nil { // the wait for another controller was long
		return context.Cause(ctx)
	}
	err := m.buildController(ctx)
	if err == nil {
		t.startInformers()
	}
	return err
}

// firstLists waits until every kind that m watches has been listed. A standby waits as well, so that its caches
// are synced when it becomes leader.
func (t *terms) firstLists(ctx context.Context, m *member) error {
	limit := time.NewTimer(t.limit)
	defer limit.Stop()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := t.informers.Synced(m.name)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-limit.C:
			if !kube.IsListRefused(err) { // an outage of the API server
				limit.Reset(t.limit)
				continue
			}
			return fmt.Errorf("%w: gave up after %v. Check that the ClusterRole grants list and watch on them", err, t.limit)
		case <-tick.C:
		}
	}
}

// synced returns an error that names the resources whose first list is missing. It ignores those of disabled roles.
func (t *terms) synced() error {
	var active []string
	for _, m := range t.members() {
		if m.disabled() == "" {
			active = append(active, m.name)
		}
	}
	if len(active) == 0 {
		return nil // see rolesReady
	}
	return t.informers.Synced(active...)
}

// rolesReady returns a [metrics.Warning] that names the disabled roles, and an error if all are disabled.
func (t *terms) rolesReady() error {
	var disabled []string
	members := t.members()
	for _, m := range members {
		if reason := m.disabled(); reason != "" {
			disabled = append(disabled, m.name+" is disabled: "+reason)
		}
	}
	switch text := strings.Join(disabled, "; "); len(disabled) {
	case 0:
		return nil
	case len(members):
		return errors.New(text)
	default:
		return metrics.Warning(text)
	}
}

// work runs the roles of e while this process holds the Lease. It campaigns for the Lease once each role is
// ready or disabled, and at least one is ready.
func (e *entry) work(ctx context.Context) error {
	if !settled(ctx, e.members) {
		return nil
	}
	select {
	case <-ctx.Done():
		return nil
	case <-e.ready:
	}
	for {
		if err := e.waitAvailable(ctx); err != nil {
			return ignoreDrain(ctx, err)
		}
		lead := e.lead
		if e.candidate != nil {
			lead = func(ctx context.Context) error { return e.candidate.Campaign(ctx, e.lead) }
		}
		switch err := lead(ctx); {
		case ctx.Err() == nil && errors.Is(err, errDriverLost):
			klog.FromContext(ctx).Info("Released the Lease, so that a replica whose driver is ready can lead",
				"lease", e.lease, "cause", err)
		case err != nil || ctx.Err() != nil || !e.waits():
			return ignoreDrain(ctx, err)
		}
	}
}

// waitAvailable waits until the driver is ready and the controllers of e can work. It returns the cause of ctx if that ends first.
func (e *entry) waitAvailable(ctx context.Context) error {
	if e.driver != nil {
		if err := e.driver.WaitReady(ctx); err != nil {
			return err
		}
	}
	for _, m := range e.members {
		if w, ok := m.waiter(); ok {
			if err := w.WaitAvailable(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// waits reports whether a controller of e is a [waiter].
func (e *entry) waits() bool {
	return slices.ContainsFunc(e.members, func(m *member) bool { _, ok := m.waiter(); return ok })
}

// lead runs the controllers of e until ctx ends, until a named one fails, or until the driver is lost.
func (e *entry) lead(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if e.driver != nil {
		go func() {
			if reason := e.driver.WaitLost(ctx, e.patience); reason != nil {
				cancel(fmt.Errorf("%w for %v: %w", errDriverLost, e.patience, reason))
			}
		}()
	}
	var group errgroup.Group
	for _, m := range e.members {
		group.Go(func() error { return cancelOn(cancel, m.run(ctx, e.retry)) })
	}
	err := group.Wait()
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, workloop.ErrDrain):
		e.serving.Wait()
	case err == nil && errors.Is(cause, errDriverLost):
		return cause
	}
	return err
}

// stop stops the informers, whose context has ended, and sends the last events. No controller runs any more.
func (t *terms) stop() {
	t.informers.Shutdown()
	t.stopEvents()
}
