// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/test/simulation/cluster"
)

// idle is the virtual time that passes in a step without anything to do.
const idle = time.Second

// restIdle is the same without faults.
const restIdle = 5 * time.Second

// chaos runs steps with faults and users.
func (s *simulation) chaos(steps int) {
	for range steps {
		s.nextStep()
		s.check()
		if s.isViolated() {
			return
		}
		s.restartReplicas()
		pending := s.eligible(s.gate.begin(s.step))
		steps := s.cluster.Steps()
		switch n := s.choices.Pick(100); {
		case n >= 100-s.scale.disasters:
			s.disaster()
		case n >= 88:
			if groups := s.cluster.UserSteps(s.scale.claims); len(groups) > 0 {
				s.do(groups[s.choices.Pick(len(groups))])
			}
		case n >= 82 && s.scale.features.Nodes && s.choices.Pick(2) == 0:
			steps := s.cluster.NodeSteps()
			if s.choices.Pick(3) == 2 {
				steps = s.cluster.ConsentSteps()
			}
			if len(steps) > 0 {
				s.do(steps)
			}
		case n >= 86 || n >= 82 && s.scale.features.Nodes:
			s.timePasses()
		case len(steps) > 0 && (n >= 65 || len(pending) == 0):
			s.do(steps)
		case len(pending) > 0:
			s.proceed(pending[s.choices.Pick(len(pending))])
		default:
			s.advance(idle)
		}
	}
}

// settle waits until every goroutine is blocked. Workers get one key after the other: which of them get a worker, and what their attempts
// find in locks and limits, would depend on the order of the goroutines.
func (s *simulation) settle() {
	synctest.Wait()
	for s.gate.release() {
		s.pass()
		synctest.Wait()
	}
}

// pass lets a moment pass, so that what begins one after the other has different deadlines: the order of equal ones is random.
func (s *simulation) pass() {
	if s.moment > 0 {
		time.Sleep(s.moment)
	}
}

// nextStep waits until every goroutine is blocked.
func (s *simulation) nextStep() {
	s.step++
	s.pass()
	s.settle()
	jitterStep.Store(uint64(s.step)) // not earlier: goroutines may still run at the same time
	for _, r := range s.replicas {
		if r != nil && r.partitioned > 0 && s.step >= r.partitioned {
			s.reconnected(r)
		}
		if r != nil && r.suspension.untilAt > 0 && !r.isSuspended(s.step) {
			s.resume(r)
		}
		if r != nil && s.step >= r.caughtUp {
			r.observed.Store(math.MaxUint64)
		}
	}
	s.permitAgain(s.step)
	s.stripNoMore(s.step)
	s.removeEnded()
}

// eligible returns the pending operations that are not held up.
func (s *simulation) eligible(pending []*operation) []*operation {
	var eligible []*operation
	running := map[string]bool{}
	for _, o := range pending {
		held := o.kind != call && o.kind != callResponse && s.step < o.replica.partitioned
		if o.kind == call { // a driver executes the calls for one volume in the order of their arrival
			held = running[o.volume]
			running[o.volume] = true
		}
		held = held || s.holdsCall(o) || !o.sent && o.replica.isSuspended(s.step)
		if !held && s.step >= s.frozen[o.replica.client+" "+o.watched()] {
			eligible = append(eligible, o)
		}
	}
	return eligible
}

// watched returns the resource of an event, for operations of other kinds "none".
func (o *operation) watched() string {
	if o.kind != event {
		return "none"
	}
	return strings.Fields(o.name)[1]
}

// do executes one of steps.
func (s *simulation) do(steps []cluster.Step) {
	s.perform(steps[s.choices.Pick(len(steps))])
}

// perform executes a step of a component or a user.
func (s *simulation) perform(step cluster.Step) {
	s.componentActed = true
	s.performed++
	s.record("%s%s", step.Name, suffix(step.Do(context.Background())))
}

// suffix returns how an operation has ended, for a line of the history.
func suffix(err error) string {
	if err == nil {
		return ""
	}
	return ": " + err.Error()
}

// advance lets time pass until an operation arrives at the gate or ends, at most d. One that does both at the same time is none: its
// request and the end of its context may come in any order.
func (s *simulation) advance(d time.Duration) {
	timer, before := time.NewTimer(d), s.gate.state()
	defer timer.Stop()
	for {
		select {
		case <-s.gate.changed:
		case <-timer.C:
			return
		}
		s.settle()
		if !slices.Equal(before, s.gate.state()) {
			return
		}
	}
}

// proceed continues o, perhaps with a fault.
func (s *simulation) proceed(o *operation) {
	suspended := o.replica.isSuspended(s.step)
	if !suspended && s.refusesCall(o) {
		return
	}
	v, text := verdict{}, ""
	if suspended {
		v, text = verdict{delay: true}, ", while it is suspended"
	} else if s.choices.Chance(s.scale.faults) {
		s.history.Faults++
		v, text = s.fault(o)
	} else if (o.kind == request || o.kind == call) && s.choices.Chance(15) && s.swarm.has(responseDelayed) {
		v, text = verdict{delay: true}, ", the response is delayed"
	}
	if o.canceled() {
		text = ", which was canceled" + text
	}
	s.record("%s %s%s", o.replica.client, o.name, text)
	if o.canceled() {
		if v.err == nil {
			o.late()
		}
		s.gate.remove(o)
		return
	}
	s.gate.proceed(o, v)
}

// fault returns a fault of o, or none if the history has none for it.
func (s *simulation) fault(o *operation) (verdict, string) {
	has := s.swarm.has
	switch {
	case o.kind == request:
		return s.requestFault(o)
	case o.kind == event && has(watchFault):
		return s.watchFault()
	case o.kind == call && s.driver != nil:
		return s.callFault(o)
	case o.kind == call: // the roles call it in memory, and their deadlines are before its own
		return verdict{lost: status.Error(codes.DeadlineExceeded, "simulated")}, ", whose response is late"
	case o.kind == response && has(responseLost):
		return verdict{lost: errNetwork}, ", which is lost"
	case o.kind == callResponse && has(callResponseLost):
		return verdict{lost: status.Error(codes.Unavailable, "simulated")}, ", which is lost"
	}
	return verdict{}, ""
}

// requestFault returns a fault of an API request.
func (s *simulation) requestFault(o *operation) (verdict, string) {
	server := apierrors.NewInternalError(fmt.Errorf("simulated"))
	faults := []struct {
		v    verdict
		text string
	}{
		{verdict{err: errNetwork}, ", which is lost"},
		{verdict{lost: errNetwork}, ", whose response is lost"},
		{verdict{err: server}, ", which fails with InternalError"},
		{verdict{lost: apierrors.NewTimeoutError("simulated", 0)}, ", whose response is Timeout"},
		{verdict{err: apierrors.NewConflict(schema.GroupResource{}, "simulated", fmt.Errorf("simulated"))}, ", which fails with Conflict"},
	}
	switch o.verb {
	case "get", "list":
		faults = faults[:3]
	case "create":
		faults = faults[:4]
	}
	kind := s.choices.Pick(len(faults))
	if !s.swarm.has(fault(kind)) {
		return verdict{}, ""
	}
	return faults[kind].v, faults[kind].text
}

// watchFault returns a fault of a watch.
func (s *simulation) watchFault() (verdict, string) {
	if s.choices.Pick(2) == 0 {
		return verdict{err: errNetwork}, ", and the connection is lost"
	}
	return verdict{err: apierrors.NewResourceExpired("simulated")}, ", and the watch expires instead"
}

// callFault returns a fault of a call of the driver.
func (s *simulation) callFault(o *operation) (verdict, string) {
	all := []codes.Code{
		codes.Unavailable, codes.DeadlineExceeded, codes.Aborted, codes.Internal, codes.ResourceExhausted, codes.Unknown,
		codes.InvalidArgument, codes.PermissionDenied,
	}
	if o.method == "ControllerExpandVolume" {
		all = append(all, codes.OutOfRange)
	} else { // after which the resizer waits until the volume is not in use
		all = append(all, codes.FailedPrecondition)
	}
	if !strings.Contains(o.method, "Delete") && !strings.Contains(o.method, "Unpublish") { // for which it means success
		all = append(all, codes.NotFound)
	}
	if o.method == "CreateSnapshot" && s.choices.Pick(3) == 0 {
		return verdict{unready: true}, ", whose snapshot is not ready"
	}
	all = s.swarm.codes(all)
	if len(all) == 0 {
		return verdict{}, ""
	}
	code := all[s.choices.Pick(len(all))]
	err := status.Error(code, "simulated")
	// Most codes mean that the call has no effect. After such an error of CreateVolume or CreateSnapshot, the product assumes
	// that nothing exists, so that a driver that has the volume or snapshot must not respond with it.
	ends := csiclient.OutcomeOf(err) == csiclient.Final
	final := ends && code != codes.Internal && code != codes.Unknown
	if ends && (o.method == "CreateVolume" || o.method == "CreateSnapshot") {
		final = !s.has(o.volume)
		if !final {
			code, err = codes.Unavailable, status.Error(codes.Unavailable, "simulated")
		}
	}
	if final || s.choices.Pick(2) == 0 || !s.swarm.has(callTakesEffect) {
		return verdict{err: err}, ", which fails with " + code.String()
	}
	return verdict{lost: err}, ", which takes effect and fails with " + code.String()
}

// has reports whether the driver has a volume or snapshot with that name.
func (s *simulation) has(name string) bool {
	return slices.ContainsFunc(s.volumes(), func(v csitest.Volume) bool { return v.Name == name }) ||
		slices.ContainsFunc(s.snapshots(), func(v csitest.Snapshot) bool { return v.Name == name })
}

// disaster kills or stops a replica, restarts the driver, or holds up requests or events for a while.
func (s *simulation) disaster() {
	i := s.choices.Pick(len(s.replicas))
	r := s.replicas[i]
	if r == nil || r.isSuspended(s.step) {
		return
	}
	n, ok := s.pickDisaster()
	if !ok {
		return
	}
	s.history.Faults++
	switch {
	case n == stopsReplica && !r.stopping:
		s.record("%s is told to stop", r.client)
		s.stop(r)
		s.perhapsTakeover()
	case n < freezes:
		s.crash(i)
		s.perhapsTakeover()
	case n < partitions:
		resources := []string{"persistentvolumeclaims", "persistentvolumes", "volumeattachments", "storageclasses"}
		if s.scale.features.Topolvm {
			resources[2] = cluster.LogicalVolumes.Resource
		}
		if s.scale.features.Snapshots {
			resources = append(resources, "volumesnapshotcontents", "volumesnapshotclasses")
		}
		if s.scale.features.Topology {
			resources = append(resources, "nodes", "csinodes")
		}
		if s.scale.features.Capacity {
			resources = append(resources, "csistoragecapacities")
		}
		if s.scale.features.Nodes {
			resources = append(resources, "pods", "configmaps")
		}
		resource := resources[s.choices.Pick(len(resources))]
		s.record("%s gets no events of %s for a while", r.client, resource)
		s.frozen[r.client+" "+resource] = s.step + 10 + s.choices.Pick(150)
	case n < clockJumps:
		s.record("%s cannot reach the API server for a while", r.client)
		s.loses(r)
		r.partitioned = math.MaxInt
		r.unreachable.Store(true)
		s.advance(idle)
		s.perhapsTakeover()
		r.partitioned = s.step + 5 + s.choices.Pick(30)
	case n == clockJumps && s.scale.clock:
		ahead := time.Duration(s.choices.Pick(7)-3) * 40 * time.Second
		s.record("the clock of the API server jumps, and is %v ahead", ahead)
		s.api.SetClock(ahead)
	case n == suspends:
		s.suspend(r)
	case n == strips:
		s.strip()
	case n == denies:
		s.deny()
	case n == unpublishes && s.scale.lists && s.unpublish():
	case s.driver == nil: // the cluster has the faults of topolvm-node
	default:
		s.record("the driver restarts")
		s.restartDriver()
	}
}

// takeover is the virtual time until another replica has acquired a Lease that is not renewed.
const takeover = 80 * time.Second

// perhapsTakeover may let so much time pass that another replica acquires the Leases of one that was killed or cannot
// reach the API server. Only requests for Leases continue, so that the caches of the new holder are stale.
func (s *simulation) perhapsTakeover() {
	if len(s.replicas) == 1 || s.choices.Pick(2) == 0 {
		return
	}
	s.onlyLeases(takeover)
}

// timePasses lets a second pass, or with a node controller sometimes its longest grace period.
func (s *simulation) timePasses() {
	if s.scale.features.Nodes && s.choices.Pick(2) == 1 {
		s.onlyLeases(missingGrace)
		return
	}
	s.record("time passes")
	s.advance(idle)
}

// onlyLeases lets time pass in which only requests for Leases continue.
func (s *simulation) onlyLeases(d time.Duration) {
	s.record("only Leases are renewed for %v", d)
	for end := time.Now().Add(d); !s.isViolated() && time.Now().Before(end); {
		s.nextStep()
		s.check()
		pending := s.gate.begin(s.step)
		renews := func(o *operation) bool { return o.lease && !o.canceled() && (o.sent || !o.replica.isSuspended(s.step)) }
		switch i := slices.IndexFunc(pending, renews); {
		case i < 0:
			s.advance(min(time.Until(end), restIdle))
		case s.step < pending[i].replica.partitioned:
			s.record("%s %s, which is lost", pending[i].replica.client, pending[i].name)
			s.gate.proceed(pending[i], verdict{err: errNetwork, lost: errNetwork})
		default:
			s.record("%s %s", pending[i].replica.client, pending[i].name)
			s.gate.proceed(pending[i], verdict{})
		}
	}
}

// crash kills a replica. Each of its requests may still have been processed.
func (s *simulation) crash(i int) {
	r := s.replicas[i]
	s.record("%s is killed", r.client)
	for _, o := range s.gate.begin(s.step) {
		if o.replica != r || o.kind != request && o.kind != call || o.canceled() || s.choices.Pick(2) == 0 {
			continue
		}
		s.record("%s %s takes effect", r.client, o.name)
		s.gate.proceed(o, verdict{delay: true})
		s.settle()
	}
	s.kill(r)
	s.replicas[i] = nil
}

// restartReplicas starts replicas that were killed.
func (s *simulation) restartReplicas() {
	for i, r := range s.replicas {
		if r == nil && s.choices.Pick(10) == 0 {
			s.startReplica(i)
		}
	}
}

// startAll starts the replicas that do not run.
func (s *simulation) startAll() {
	for i, r := range s.replicas {
		if r == nil {
			s.startReplica(i)
		}
	}
}

func (s *simulation) startReplica(i int) {
	name := fmt.Sprintf("r%d", i)
	s.replicas[i] = s.start(name, s.configs[i])
	s.record("%s starts", s.replicas[i].client)
}

// Limits of a rest: the longest time and the most steps until all objects have reached their final states, and the time
// for which they are watched afterwards.
const (
	restLimit = 10 * time.Minute
	restSteps = 5000
	restAfter = 20 * time.Second
	// restoreAfter is the time after which a claim that is not done may need other parameters of its class.
	restoreAfter = 20 * time.Second
)

// rest lets everything continue without faults until nothing is left to do, and checks the result.
func (s *simulation) rest(when string) {
	if s.isViolated() {
		return
	}
	s.settle() // after the last operation
	s.record("no more faults")
	s.resting = true
	defer func() { s.resting = false }()
	clear(s.frozen)
	s.permitAgain(math.MaxInt)
	s.stripNoMore(math.MaxInt)
	for _, r := range s.replicas {
		if r != nil {
			r.caughtUp = 0
			s.reconnected(r)
			if r.suspension.untilAt > 0 {
				s.resume(r)
			}
		}
	}
	limit, steps, quiet, restored := time.Now().Add(restLimit), s.step+restSteps, time.Time{}, time.Now()
	for !s.isViolated() {
		s.nextStep()
		s.check()
		s.startAll()
		switch pending, possible := s.eligible(s.gate.begin(s.step)), s.cluster.Steps(); {
		case s.step > steps:
			s.violated("%s: not done after %d steps: %s", when, restSteps, strings.Join(s.busy(), ", "))
		case len(pending) > 0 && s.refusesCall(pending[0]):
		case len(pending) > 0:
			s.record("%s %s", pending[0].replica.client, pending[0].name)
			if pending[0].canceled() {
				s.gate.remove(pending[0])
			} else {
				s.gate.proceed(pending[0], verdict{})
			}
		case len(possible) > 0:
			s.perform(possible[0])
		case len(s.cluster.Approvals()) > 0:
			s.perform(s.cluster.Approvals()[0])
		case time.Now().After(limit):
			s.violated("%s: not done after %v: %s", when, restLimit, strings.Join(s.busy(), ", "))
		case len(s.busy()) > 0 && time.Since(restored) > restoreAfter:
			for _, step := range append(s.cluster.Restorations(s.mayConflict), s.releasesOfUnrecorded()...) {
				s.perform(step)
			}
			restored = time.Now()
		case len(s.busy()) > 0:
			quiet = time.Time{}
			s.advance(restIdle)
		case quiet.IsZero():
			quiet = time.Now()
			s.advance(restIdle)
		case time.Since(quiet) < restAfter:
			s.advance(restIdle)
		default:
			s.checkRest(when)
			return
		}
	}
}

// busy returns the objects that components still work on.
func (s *simulation) busy() []string {
	busy := append(s.cluster.Busy(), s.deletedVolumes()...)
	for _, r := range s.replicas {
		if r != nil && r.stopping {
			busy = append(busy, r.client+" was told to stop and runs")
		}
	}
	if s.scale.lists {
		busy = append(busy, s.unattached()...)
	}
	if s.scale.features.Capacity {
		busy = append(busy, s.wrongCapacities()...)
	}
	return busy
}
