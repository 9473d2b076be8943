// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/capacity"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
	"github.com/storage-controller/storage-controller/metrics"
)

// replica is a controller that serves on every replica.
type replica struct {
	serve func(context.Context) error
	run   func(context.Context) error
}

func (r replica) Serve(ctx context.Context) error { return r.serve(ctx) }
func (r replica) Run(ctx context.Context) error   { return r.run(ctx) }

// TestServingEndsBesideTheWork has both hear of the end at once, and the Lease released after both.
func TestServingEndsBesideTheWork(t *testing.T) {
	var ended atomic.Int32
	serves, works, told := make(chan struct{}), make(chan struct{}), make(chan struct{})
	r := replica{
		serve: func(ctx context.Context) error {
			close(serves)
			<-ctx.Done()
			close(told)
			ended.Add(1)
			return nil
		},
		run: func(ctx context.Context) error {
			close(works)
			<-ctx.Done()
			<-told // which would hang if serving waited for the work
			ended.Add(1)
			return nil
		},
	}
	ctx, drain := context.WithCancelCause(t.Context())
	done := make(chan error, 1)
	go func() { done <- terms1(true, r).run(ctx) }()
	<-serves
	<-works
	drain(workloop.ErrDrain)
	if err := <-done; err != nil || ended.Load() != 2 {
		t.Errorf("%v, %d of 2 have ended", err, ended.Load())
	}
}

// TestLeaseOutlivesServing has the work end long before the last request is answered.
func TestLeaseOutlivesServing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := terms1(true, replica{run: func(ctx context.Context) error { <-ctx.Done(); return nil }}).entries[0]
		close(e.members[0].synced)
		e.serving.Add(1)
		ctx, drain := context.WithCancelCause(t.Context())
		done := make(chan error, 1)
		go func() { done <- e.lead(ctx) }()
		drain(workloop.ErrDrain)
		synctest.Wait()
		if len(done) > 0 {
			t.Error("the term ended before serving did")
		}
		e.serving.Done()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestServingThatFailsEndsTheProcess(t *testing.T) {
	broken := errors.New("the port is taken")
	r := replica{
		serve: func(context.Context) error { return broken },
		run:   func(ctx context.Context) error { <-ctx.Done(); return nil },
	}
	if err := terms1(true, r).run(t.Context()); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}

// TestRoleThatIsNotNamed: its errors disable it until the next try, and never end the process.
func TestRoleThatIsNotNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, drain := context.WithCancelCause(t.Context())
		defer drain(nil)
		builds, runs := 0, 0
		works := replica{
			serve: func(ctx context.Context) error { <-ctx.Done(); return nil },
			run: func(ctx context.Context) error {
				if runs++; runs == 1 {
					return errors.New("it cannot run yet")
				}
				<-ctx.Done()
				return nil
			},
		}
		terms := terms1(true, replica{serve: works.serve, run: func(ctx context.Context) error { <-ctx.Done(); return nil }})
		starts := 0
		terms.startInformers = func() { starts++ }
		m := newMember("late", false, func(context.Context) (controller, error) {
			if builds++; builds < 3 {
				return nil, errors.New("pods \"driver-0\" not found")
			}
			return works, nil
		})
		m.failure = m.buildController(ctx)
		terms.add("", m)
		done := make(chan error, 1)
		go func() { done <- terms.run(ctx) }()

		state := func(after time.Duration, want string) {
			t.Helper()
			time.Sleep(after) // of the clock of synctest
			synctest.Wait()
			var warning metrics.Warning
			switch err := terms.rolesReady(); {
			case want == "" && err != nil:
				t.Errorf("it is not ready: %v", err)
			case want != "" && (!errors.As(err, &warning) || !strings.Contains(err.Error(), "late is disabled: "+want)):
				t.Errorf("got %v, want a warning with %q", err, want)
			}
		}
		state(0, `pods "driver-0" not found`)
		state(6*time.Second, `pods "driver-0" not found`)
		state(12*time.Second, "it cannot run yet")
		state(6*time.Second, "")
		if builds != 3 || runs != 2 || starts != 1 || terms.status()[1].Disabled != "" {
			t.Errorf("%d builds, %d runs, %d starts of informers", builds, runs, starts)
		}
		drain(workloop.ErrDrain)
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestRoleThatIsNotPrepared: the caches lack what the role retains, so it is not built until the process restarts.
func TestRoleThatIsNotPrepared(t *testing.T) {
	fails := errors.New("no namespace")
	r := Role{
		Name:    "late",
		lease:   func(Settings, string) string { return "" },
		prepare: func(*shared) error { return fails },
		build: func(context.Context, *shared, *rest.Config) (controller, error) {
			t.Error("it is built")
			return replica{}, nil
		},
	}
	terms := &terms{}
	b := &builder{process: &process{Config: Config{Selection: Selection{all: true}}}}
	if err := b.addRoles(t.Context(), terms, []Role{r}); err != nil {
		t.Fatal(err)
	}
	m := terms.members()[0]
	if err := m.buildController(t.Context()); m.failure != fails || err != fails {
		t.Errorf("first %v, later %v", m.failure, err)
	}
}

// TestRoleGivesTheLeaseBack: a role that may not lead ends the term, and is not disabled. Without a Lease, it is run
// again, and does not end the process.
func TestRoleGivesTheLeaseBack(t *testing.T) {
	for _, leased := range []bool{true, false} {
		t.Run(fmt.Sprintf("leased=%t", leased), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				runs := 0
				m := newMember("x", true, nil)
				m.leased = leased
				m.controller = replica{run: func(context.Context) error {
					if runs++; runs > 3 {
						return nil
					}
					return fmt.Errorf("%w to another component", election.ErrLost)
				}}
				close(m.synced)
				e, begin := &entry{members: []*member{m}, retry: startRetry}, time.Now()
				err := e.lead(t.Context())
				switch {
				case m.disabled() != "":
					t.Errorf("it is disabled: %s", m.disabled())
				case leased && (!errors.Is(err, election.ErrLost) || runs != 1 || time.Since(begin) > 0):
					t.Errorf("got %v after %d runs and %v", err, runs, time.Since(begin))
				case !leased && (err != nil || runs != 4):
					t.Errorf("got %v after %d runs", err, runs)
				}
			})
		})
	}
}

// TestAllRolesAreDisabled: a process in which nothing runs is not ready, and is not ended.
func TestAllRolesAreDisabled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, drain := context.WithCancelCause(t.Context())
		terms := terms1(false, replica{
			serve: func(context.Context) error { return errors.New("the port is taken") },
			run:   func(ctx context.Context) error { <-ctx.Done(); return nil },
		})
		m := terms.members()[0]
		done := make(chan error, 1)
		go func() { done <- m.serve(ctx, startRetry) }()
		time.Sleep(time.Minute)
		var warning metrics.Warning
		if err := terms.rolesReady(); err == nil || errors.As(err, &warning) || len(done) > 0 {
			t.Errorf("got %v", err)
		}
		drain(workloop.ErrDrain)
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// terms1 returns the terms of one controller, without watches and leader election.
func terms1(named bool, c controller) *terms {
	t := &terms{informers: kube.NewInformers(nil, nil, "a.b"), limit: time.Minute, retry: startRetry}
	m := newMember("x", named, nil)
	m.controller = c
	close(m.built)
	t.add("", m)
	return t
}

// TestServingFailsApartFromTheWork checks that a role stays disabled while only serving fails, and no longer.
func TestServingFailsApartFromTheWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		attempts := 0
		terms := terms1(false, replica{
			serve: func(ctx context.Context) error {
				if attempts++; attempts == 1 {
					return errors.New("the port is taken")
				}
				<-ctx.Done()
				return nil
			},
			run: func(ctx context.Context) error { <-ctx.Done(); return nil },
		})
		m := terms.members()[0]
		go func() { _ = m.serve(ctx, startRetry) }()
		synctest.Wait()
		m.enable(ctx, working) // the Lease is acquired
		if err := terms.rolesReady(); err == nil || !strings.Contains(err.Error(), "the port is taken") {
			t.Errorf("got %v while serving fails", err)
		}
		time.Sleep(time.Minute) // of the clock of synctest
		synctest.Wait()
		if err := terms.rolesReady(); err != nil || attempts != 2 {
			t.Errorf("got %v after %d attempts to serve", err, attempts)
		}
	})
}

// TestLateBuildsEndWithTheProcess: roles are built late, one after the other, and the API server does not answer. At the end
// of ctx the request of the first one ends, and no other build begins.
func TestLateBuildsEndWithTheProcess(t *testing.T) {
	arrived := make(chan struct{}, 10)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		arrived <- struct{}{}
		<-r.Context().Done() // the client gives up
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	meta, err := metadata.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	terms := &terms{informers: kube.NewInformers(nil, nil, "a.b"), limit: time.Minute, retry: wait.Backoff{Duration: time.Millisecond}}
	var builds atomic.Int32
	for _, name := range []string{"a", "b", "c"} {
		m := newMember(name, false, func(ctx context.Context) (controller, error) {
			builds.Add(1)
			_, err := capacity.FindOwner(ctx, meta, client.Discovery(), "namespace", "pod", 0)
			return nil, err
		})
		m.failure = errors.New("the API server did not answer")
		terms.add("", m)
	}
	ctx, drain := context.WithCancelCause(t.Context())
	done := make(chan error, 1)
	go func() { done <- terms.run(ctx) }()
	<-arrived
	drain(workloop.ErrDrain)
	if err := <-done; err != nil {
		t.Errorf("the roles ended with %v", err)
	}
	if n := builds.Load(); n != 1 || len(arrived) > 0 {
		t.Errorf("%d builds have begun, and %d requests were sent after the end", n, len(arrived))
	}
}

// TestFirstListsWaitForTheAPIServer: an outage does not end the wait, a missing permission does.
func TestFirstListsWaitForTheAPIServer(t *testing.T) {
	for want, answer := range map[string]http.HandlerFunc{
		"gave up": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}`)
		},
		"still waiting": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	} {
		server := httptest.NewServer(answer)
		defer server.Close()
		client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
		if err != nil {
			t.Fatal(err)
		}
		wait := map[string]time.Duration{"gave up": time.Minute, "still waiting": time.Second}
		ctx, cancel := context.WithTimeoutCause(t.Context(), wait[want], errors.New("still waiting"))
		defer cancel()
		terms := &terms{informers: kube.NewInformers(client, nil, "a.b"), limit: 100 * time.Millisecond}
		terms.informers.For("x").Attachments()
		terms.informers.Start(ctx)
		if err := terms.firstLists(ctx, newMember("x", true, nil)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
		cancel()
		terms.informers.Shutdown()
	}
}
