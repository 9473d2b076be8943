package main

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	typedcoordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// terms runs the controllers, each while the Lease of its role is held.
type terms struct {
	settings   settings
	informers  *kube.Informers
	server     *diagnostics
	stopEvents func()
	entries    []*entry
}

// entry is the controllers that work under one Lease.
type entry struct {
	lease       string
	roles       []role
	controllers []controller // of the roles
	// served is closed when those of controllers that serve on every replica have ended;
	// nil where none of them does.
	served    chan struct{}
	candidate *election.Candidate // nil without leader election
}

// add takes the controller of a role. Roles with the same Lease share its term.
func (t *terms) add(r role, lease string, c controller) {
	for _, e := range t.entries {
		if e.lease == lease {
			e.roles, e.controllers = append(e.roles, r), append(e.controllers, c)
			return
		}
	}
	t.entries = append(t.entries, &entry{lease: lease, roles: []role{r}, controllers: []controller{c}})
}

// buildOrder puts the attacher before the provisioner, which asks it about finalizers.
func buildOrder(roles []role) []role {
	return slices.SortedFunc(slices.Values(roles), func(a, b role) int { return strings.Compare(a.section, b.section) })
}

// prepare makes the candidates for the Leases. Their client is no role's, so that
// renewing never waits for the rate limit of the work.
func (t *terms) prepare(restConfig *rest.Config, registry prometheus.Registerer, events record.EventRecorder, driver string) error {
	c := t.settings.Common
	if !c.LeaderElection {
		return nil
	}
	client, err := typedcoordinationv1.NewForConfig(kube.ForRole(restConfig, buildVersion(), "leader-election", 0, 0))
	if err != nil {
		return fmt.Errorf("making the client for Leases: %w", err)
	}
	m := election.NewMetrics(registry)
	for _, e := range t.entries {
		lock, err := election.NewLock(client, election.Namespace(c.LeaseNamespace), e.lease, c.LeaseLabels, events)
		if err != nil {
			return err
		}
		if e.candidate, err = election.NewCandidate(t.settings.leaseConfig(), lock, m); err != nil {
			return err
		}
		for _, r := range e.roles {
			t.server.leaderElection(r.section, e.candidate.Check)
		}
	}
	return nil
}

// run works until ctx ends. It returns nil after draining, else the first error
// that no retry repairs. What serves on every replica begins before anything else. It
// ends as ctx does, beside the workers, so that the time for both is the longer one and not
// their sum; and a Lease is released after both.
func (t *terms) run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	serving, stopServing := context.WithCancel(ctx)
	defer stopServing()
	var servers errgroup.Group
	for _, e := range t.entries {
		var own sync.WaitGroup
		for i, c := range e.controllers {
			s, ok := c.(server)
			if !ok {
				continue
			}
			section := e.roles[i].section
			own.Add(1)
			servers.Go(func() error {
				defer own.Done()
				err := s.Serve(klog.NewContext(serving, klog.FromContext(ctx).WithName(section)))
				if err != nil && serving.Err() == nil {
					err = fmt.Errorf("%s: %w", section, err)
					cancel(err) // without which the process would go on and not serve
					return err
				}
				return nil
			})
			e.served = make(chan struct{})
		}
		if e.served != nil {
			go func() {
				own.Wait()
				close(e.served)
			}()
		}
	}
	err := t.work(ctx)
	stopServing()
	if failed := servers.Wait(); failed != nil {
		return failed
	}
	return err
}

// work runs the controllers until ctx ends.
func (t *terms) work(ctx context.Context) error {
	if err := t.firstLists(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var group errgroup.Group
	for _, e := range t.entries {
		group.Go(func() error {
			err := t.term(ctx, e)
			if err != nil {
				cancel(err)
			}
			return err
		})
	}
	return group.Wait()
}

// firstLists waits until every watch has its first list. Replicas that do not
// lead wait too, so that they are warm when they do.
func (t *terms) firstLists(ctx context.Context) error {
	limit := time.NewTimer(firstList)
	defer limit.Stop()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := t.informers.Synced()
		if err == nil {
			// The lists have left several times what was kept of them; a process that
			// then only watches would hold on to that for a long time.
			debug.FreeOSMemory()
			return nil
		}
		select {
		case <-ctx.Done():
			return ignoreDrain(ctx, context.Cause(ctx))
		case <-limit.C:
			return fmt.Errorf("%w: gave up after %v; does the ClusterRole grant list and watch on them?", err, firstList)
		case <-tick.C:
		}
	}
}

// term works while the Lease of e is held.
func (t *terms) term(ctx context.Context, e *entry) error {
	if e.candidate == nil {
		return ignoreDrain(ctx, e.lead(ctx))
	}
	return ignoreDrain(ctx, e.candidate.Campaign(ctx, e.lead))
}

// lead runs the controllers of e until ctx ends, or one of them cannot go on.
func (e *entry) lead(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var group errgroup.Group
	for i, r := range e.roles {
		group.Go(func() error {
			log := klog.FromContext(ctx).WithName(r.section)
			log.Info("Working")
			err := e.controllers[i].Run(klog.NewContext(ctx, log))
			log.Info("Stopped working", "cause", context.Cause(ctx))
			if ctx.Err() != nil {
				return nil // the end was asked for; by whom is the caller's to know
			}
			if err != nil {
				err = fmt.Errorf("%s: %w", r.section, err)
				cancel(err)
			}
			return err
		})
	}
	err := group.Wait()
	if e.served != nil && errors.Is(context.Cause(ctx), workloop.ErrDrain) {
		<-e.served
	}
	return err
}

// ignoreDrain is err unless ctx ended because the process is to stop.
func ignoreDrain(ctx context.Context, err error) error {
	if ctx.Err() != nil && errors.Is(context.Cause(ctx), workloop.ErrDrain) {
		return nil
	}
	return err
}

// stop ends what the controllers used, after they have returned and the watches
// were told to end.
func (t *terms) stop() {
	t.informers.Shutdown()
	t.stopEvents()
}
