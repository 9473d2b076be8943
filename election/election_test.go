// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

// quick is a Lease that changes hands quickly enough for a test, and is renewed in time on a busy machine.
var quick = Config{LeaseDuration: 6 * time.Second, RenewDeadline: 5 * time.Second, RetryPeriod: 200 * time.Millisecond}

// replica is a candidate that counts its terms.
type replica struct {
	*Candidate
	metrics *Metrics
	terms   atomic.Int32
	leading atomic.Bool
	hold    chan struct{}         // lead returns no sooner than this is closed, after its context has ended
	cause   atomic.Pointer[error] // of the end of the last term
}

func newReplica(t *testing.T, c *kubetest.ControlPlane, namespace, name string) *replica {
	t.Helper()
	t.Setenv("POD_NAME", name)
	lock, err := NewLock(c.Client().CoordinationV1(), namespace, "lease", map[string]string{"team": "storage"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	r := &replica{metrics: NewMetrics(prometheus.NewRegistry()), hold: make(chan struct{})}
	if r.Candidate, err = NewCandidate(quick, lock, r.metrics); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *replica) lead(ctx context.Context) error {
	r.terms.Add(1)
	r.leading.Store(true)
	defer r.leading.Store(false)
	<-ctx.Done()
	cause := context.Cause(ctx)
	r.cause.Store(&cause)
	<-r.hold
	return ctx.Err()
}

// run campaigns; the function returned ends that with cause and returns the result.
func (r *replica) run(t *testing.T) (stop func(cause error) error) {
	ctx, cancel := context.WithCancelCause(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Campaign(ctx, r.lead) }()
	return func(cause error) error { cancel(cause); return <-done }
}

func (r *replica) leads(t *testing.T) {
	t.Helper()
	kubetest.Eventually(t, "it leads", func(context.Context) error {
		if !r.leading.Load() {
			return errors.New("it does not")
		}
		return nil
	})
}

func lease(t *testing.T, c *kubetest.ControlPlane, namespace string) *coordinationv1.Lease {
	t.Helper()
	l, err := c.Client().CoordinationV1().Leases(namespace).Get(t.Context(), "lease", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestReleasedOnlyAfterTheWorkHasStopped(t *testing.T) {
	c := kubetest.Get(t)
	ns := kubetest.Namespace(t, c)
	first, second := newReplica(t, c, ns, "first"), newReplica(t, c, ns, "second")
	close(second.hold)
	stop := first.run(t)
	first.leads(t)
	l := lease(t, c, ns)
	if *l.Spec.HolderIdentity != "first" || l.Labels["team"] != "storage" {
		t.Errorf("held by %q, labels %v", *l.Spec.HolderIdentity, l.Labels)
	}
	if n := testutil.ToFloat64(first.metrics.status.WithLabelValues("lease")); n != 1 {
		t.Errorf("leader_election_master_status is %v", n)
	}
	s := first.Status()
	if !s.Leader || s.Holder != "first" || s.Identity != "first" || s.Lease != ns+"/lease" || time.Since(s.Since) > time.Hour {
		t.Errorf("status: %+v", s)
	}
	stopSecond := second.run(t)
	kubetest.Eventually(t, "the second knows who leads", func(context.Context) error {
		if s := second.Status(); s.Leader || s.Holder != "first" {
			return fmt.Errorf("status: %+v", s)
		}
		return nil
	})
	ended := make(chan error, 1)
	drain := errors.New("drain")
	go func() { ended <- stop(drain) }()
	kubetest.Eventually(t, "the work is told to stop", func(context.Context) error {
		if first.cause.Load() == nil {
			return errors.New("it is not")
		}
		return nil
	})
	if got := *first.cause.Load(); !errors.Is(got, drain) {
		t.Errorf("told because of %v", got)
	}
	// Longer than the Lease lasts: it has to be renewed while draining.
	renewed := lease(t, c, ns).Spec.RenewTime.Time
	kubetest.Eventually(t, "the Lease is renewed for longer than it lasts", func(context.Context) error {
		if now := lease(t, c, ns).Spec.RenewTime.Sub(renewed); now < quick.LeaseDuration+time.Second {
			return fmt.Errorf("it was, for %v", now)
		}
		return nil
	})
	if second.terms.Load() != 0 {
		t.Error("the second works while the first does")
	}
	close(first.hold)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	second.leads(t)
	if n := testutil.ToFloat64(first.metrics.status.WithLabelValues("lease")); n != 0 {
		t.Errorf("leader_election_master_status is %v", n)
	}
	if err := stopSecond(nil); err != nil {
		t.Error(err)
	}
	if holder := lease(t, c, ns).Spec.HolderIdentity; holder != nil && *holder != "" {
		t.Errorf("held by %q after the end", *holder)
	}
}

func TestLosingTheLeaseKeepsTheProcess(t *testing.T) {
	for name, holder := range map[string]string{"held by another replica": "thief", "released by another replica": ""} {
		t.Run(name, func(t *testing.T) { loseLease(t, holder) })
	}
}

func loseLease(t *testing.T, holder string) {
	c := kubetest.Get(t)
	ns := kubetest.Namespace(t, c)
	r := newReplica(t, c, ns, "first")
	close(r.hold)
	stop := r.run(t)
	r.leads(t)
	kubetest.Eventually(t, "another replica takes the Lease", func(ctx context.Context) error {
		l := lease(t, c, ns)
		l.Spec.HolderIdentity, l.Spec.RenewTime = ptr.To(holder), &metav1.MicroTime{Time: time.Now()}
		_, err := c.Client().CoordinationV1().Leases(ns).Update(ctx, l, metav1.UpdateOptions{})
		return err
	})
	kubetest.Eventually(t, "the work is told to stop", func(context.Context) error {
		if r.cause.Load() == nil {
			return errors.New("it is not")
		}
		return nil
	})
	if got := *r.cause.Load(); !errors.Is(got, ErrLost) {
		t.Errorf("told because of %v", got)
	}
	if got := *lease(t, c, ns).Spec.HolderIdentity; holder != "" && got != holder {
		t.Errorf("the Lease of %q was released: held by %q", holder, got)
	}
	kubetest.Eventually(t, "it works again once it has acquired the Lease again", func(context.Context) error {
		if n := r.terms.Load(); n < 2 || !r.leading.Load() {
			return fmt.Errorf("%d terms", n)
		}
		return nil
	})
	if n := testutil.ToFloat64(r.metrics.slowpath.WithLabelValues("lease")); n < 1 {
		t.Errorf("leader_election_slowpath_total is %v", n)
	}
	if err := stop(nil); err != nil {
		t.Error(err)
	}
}

func TestAPIServerAway(t *testing.T) {
	kubetest.NeedReal(t)
	c, err := kubetest.Start(t.Context(), kubetest.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Stop()
	r := newReplica(t, c, "default", "first")
	close(r.hold)
	stop := r.run(t)
	r.leads(t)
	if err := c.Halt(t.Context(), kubetest.APIServer); err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, "the work is told to stop", func(context.Context) error {
		if r.leading.Load() {
			return errors.New("it is not")
		}
		return nil
	})
	if err := c.Resume(t.Context(), kubetest.APIServer); err != nil {
		t.Fatal(err)
	}
	r.leads(t)
	if err := r.Check(nil); err != nil {
		t.Errorf("unwell: %v", err)
	}
	if err := stop(nil); err != nil {
		t.Error(err)
	}
}

// TestRenewalWithinTheSameSecondIsNoticed: the time that others wait begins with the last
// renewal that they have seen.
func TestRenewalWithinTheSameSecondIsNoticed(t *testing.T) {
	c := kubetest.Get(t)
	ns := kubetest.Namespace(t, c)
	lock := newReplica(t, c, ns, "second").lock
	leases, second := c.Client().CoordinationV1().Leases(ns), time.Now().Truncate(time.Second)
	l, err := leases.Create(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "lease"}, Spec: coordinationv1.LeaseSpec{
		HolderIdentity: ptr.To("first"), LeaseDurationSeconds: ptr.To[int32](3),
		RenewTime: &metav1.MicroTime{Time: second.Add(100 * time.Millisecond)},
	}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	read := func() string {
		t.Helper()
		_, raw, err := lock.Get(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	before := read()
	if now := read(); now != before {
		t.Errorf("%s differs from %s although nothing has happened", now, before)
	}
	l.Spec.RenewTime.Time = second.Add(600 * time.Millisecond)
	if _, err := leases.Update(t.Context(), l, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if now := read(); now == before {
		t.Errorf("%s does not show the renewal", now)
	}
}

func TestWorkThatEndsByItselfReleases(t *testing.T) {
	c := kubetest.Get(t)
	ns := kubetest.Namespace(t, c)
	r := newReplica(t, c, ns, "first")
	broken := errors.New("broken")
	if err := r.Campaign(t.Context(), func(context.Context) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	if holder := lease(t, c, ns).Spec.HolderIdentity; holder != nil && *holder != "" {
		t.Errorf("still held by %q", *holder)
	}
}

// TestWorkGivesTheLeaseBack: a leader that may not work as leader campaigns again with the Lease released.
func TestWorkGivesTheLeaseBack(t *testing.T) {
	c := kubetest.Get(t)
	ns := kubetest.Namespace(t, c)
	r := newReplica(t, c, ns, "first")
	ctx, cancel := context.WithCancel(t.Context())
	var transitions []int32
	if err := r.Campaign(ctx, func(context.Context) error {
		if transitions = append(transitions, *lease(t, c, ns).Spec.LeaseTransitions); len(transitions) == 2 {
			cancel()
			return nil
		}
		return fmt.Errorf("%w to another component", ErrLost)
	}); err != nil {
		t.Error(err)
	}
	if len(transitions) != 2 || transitions[0] == transitions[1] {
		t.Errorf("the transitions of the Lease are %v in the terms", transitions)
	}
}

func TestStandbyEndsAtOnce(t *testing.T) {
	c := kubetest.Get(t)
	ns := kubetest.Namespace(t, c)
	first, second := newReplica(t, c, ns, "first"), newReplica(t, c, ns, "second")
	close(first.hold)
	stopFirst := first.run(t)
	first.leads(t)
	stopSecond := second.run(t)
	if err := stopSecond(nil); err != nil || second.terms.Load() != 0 {
		t.Errorf("%v after %d terms", err, second.terms.Load())
	}
	if err := stopFirst(nil); err != nil {
		t.Error(err)
	}
}

func TestConfigValidate(t *testing.T) {
	if err := DefaultConfig().Validate(); err != nil {
		t.Error(err)
	}
	for name, tt := range map[string]struct {
		cfg  Config
		want string
	}{
		"lease not longer than the renewal": {Config{10 * time.Second, 10 * time.Second, time.Second}, "--leader-election-lease-duration"},
		"lease in whole seconds not longer": {
			Config{10900 * time.Millisecond, 10500 * time.Millisecond, time.Second}, "--leader-election-lease-duration",
		},
		"renewal too short for the retry": {
			Config{15 * time.Second, 6 * time.Second, 5 * time.Second}, "--leader-election-renew-deadline",
		},
		"no retry": {Config{15 * time.Second, 10 * time.Second, 0}, "--leader-election-retry-period"},
	} {
		if err := tt.cfg.Validate(); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestNamespace(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "")
	if got := Namespace(""); got != "default" {
		t.Errorf("got %q", got)
	}
	t.Setenv("POD_NAMESPACE", "pod")
	if got := Namespace(""); got != "pod" {
		t.Errorf("got %q", got)
	}
	if got := Namespace("set"); got != "set" {
		t.Errorf("got %q", got)
	}
}

func TestSanitize(t *testing.T) {
	for name, want := range map[string]string{"ebs.csi.aws.com": "ebs-csi-aws-com", "foo.": "foo-X", "A_b/c": "A-b-c", "host": "host"} {
		if got := Sanitize(name); got != want {
			t.Errorf("%s: %s", name, got)
		}
	}
}
