// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package simulation runs the real controllers against an API server, a driver and a cluster in memory, in
// virtual time. One seed decides everything random: the order in which requests, responses, events of watches
// and calls of the driver are processed, the faults, and what users do. The same seed gives the same history, except for
// about one seed in 1,000.
//
// A history must not depend on the order of goroutines, which is random, also that of timers with the same time. Therefore everything
// that begins waits until all goroutines are blocked, and continues in an order of its own: operations at the gate, and keys before they
// reach the queue of a loop. Random numbers depend on the virtual time, or on keys.
package simulation

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/attacher"
	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/app"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
	"github.com/storage-controller/storage-controller/test/simulation/cluster"
)

// History is the result of one seed.
type History struct {
	Seed      uint64
	Lines     []string
	Violation string // empty: none
	Choices   []uint16
	Steps     int
	Faults    int
	// Situations counts what invariants need, so that they cannot hold because it never happens.
	Situations map[string]int
	Duration   time.Duration // virtual
}

// simulation is one history.
type simulation struct {
	choices *choices
	configs []app.Config // by replica
	api     *apiserver.Server
	driver  *csitest.Plugin // nil with TopoLVM
	cluster *cluster.Cluster
	gate    *gate
	scale   scale
	swarm   swarm
	// throttle is that of the driver.
	throttle throttle
	history  History
	begin    time.Time

	replicas  []*replica // nil: not running
	started   int        // processes
	performed int        // steps of components and users
	step      int
	resting   bool
	// componentActed: a component or a user has acted since the last check.
	componentActed bool
	frozen         map[string]int // the step at which the watch of a replica continues
	moment         time.Duration  // that a step takes at least

	late      sync.Map // the IDs of requests of suspended processes: see isLate
	caches    sync.Map // the processes by client, for the hook that must not wait for mu
	mu        sync.Mutex
	socket    *socket
	processes map[string]*replica
	verdicts  map[uint64]verdict
	serving   []serving
	checker   *checker
	stripping stripping
	denials   map[string]denial // by verb and resource
	// secretsDenied: the processes could not read the Secret for a while.
	secretsDenied bool
}

// scale is the size of a history.
type scale struct {
	replicas, nodes, claims, steps int
	threads                        int // of each role; zero: three
	// faults and disasters are chances in percent: of each operation, and of each step.
	faults, disasters int

	features cluster.Features
	// controllers are the --controllers of each replica; nil: all.
	controllers []string
	// protection is the value of --provisioning-protection.
	protection string
	// nodeExpansion: an expansion needs the kubelet.
	nodeExpansion bool
	// prepared: the claims are bound before the first fault.
	prepared bool
	// adopted: csi-provisioner has provisioned these claims.
	adopted bool
	// cleanup and nodeFinalizer are the values of --node-cleanup and --node-finalizer-mode.
	cleanup       nodecleanup.Mode
	nodeFinalizer nodecleanup.FinalizerMode
	// clock: that of the API server jumps.
	clock bool
	// lists: the driver has ListVolumes, and loses publications.
	lists bool
	// oldServers: the API servers lack the feature WatchList, so that first lists may be served from caches that are stale.
	oldServers bool
	// impatient: users delete everything during the faults, too.
	impatient bool
}

// withTopolvm reports whether the processes of a seed serve the driver of TopoLVM: one in five.
func withTopolvm(seed uint64) bool { return seed%5 == 2 }

// Run runs the history of seed, or with a non-nil replay that of these choices.
func Run(t *testing.T, seed uint64, replay []uint16) (h History) {
	synctest.Test(t, func(*testing.T) {
		c := newChoices(seed)
		if replay != nil {
			c = &choices{replay: replay}
		}
		s := newSimulation(c)
		s.run(seed)
		h = s.history
		h.Seed = seed
		h.Choices, h.Steps, h.Duration = c.taken, s.step, time.Since(s.begin)
	})
	if finished.Add(1)%collectEvery == 0 {
		runtime.GC()
	}
	return h
}

func newSimulation(c *choices) *simulation {
	return &simulation{
		choices: c, gate: newGate(), begin: time.Now(), frozen: map[string]int{}, history: History{Situations: map[string]int{}},
		processes: map[string]*replica{}, verdicts: map[uint64]verdict{}, checker: newChecker(), denials: map[string]denial{},
	}
}

// Between two histories almost nothing is in use, so that a garbage collection is cheap. After a few histories it keeps
// their memory in the caches of the processor, and saves the system from clearing new pages.
const collectEvery = 5

var finished atomic.Int64

// run sets everything up, runs the three parts of a history, and ends all processes.
func (s *simulation) run(seed uint64) {
	s.moment = time.Microsecond
	s.swarm = s.pickSwarm()
	size := s.pickScale()
	if withTopolvm(seed) {
		size = s.pickTopolvm()
	}
	s.pickMore(&size)
	s.setUp(size)
	if s.scale.prepared {
		s.prepare()
		if s.scale.adopted {
			s.adopt()
		}
	}
	s.chaos(s.scale.steps)
	if s.scale.impatient {
		s.tearDown()
		s.chaos(s.scale.steps / 2)
	}
	s.rest("at rest")
	s.tearDown()
	s.rest("after users have deleted everything")
	s.end()
}

// setUp starts the API server, the cluster, the driver and the replicas.
func (s *simulation) setUp(size scale) {
	uuid.SetRand(&randReader{Rand: rand.New(rand.NewPCG(1, 1))})
	s.scale = size
	s.api = apiserver.New(s.hooks())
	for i := range s.scale.replicas {
		s.configs = append(s.configs, s.scale.configuration(s.scale.controllersOf(i)))
	}
	var err error
	if s.cluster, err = cluster.New(s.api, s.scale.driver(), s.scale.nodes, s.scale.features); err == nil {
		if !s.scale.features.Topolvm {
			s.startDriver()
			s.cluster.CreateVolume = s.createVolume
		}
		err = s.cluster.SetUp(context.Background())
	}
	if err != nil {
		s.violated("setting up the cluster: %v", err)
	}
	s.replicas = make([]*replica, s.scale.replicas)
	for i := range s.replicas {
		s.startReplica(i)
	}
}

// prepare has users create claims, and waits until they are bound.
func (s *simulation) prepare() {
	s.record("users create claims")
	if err := s.cluster.CreateClaims(context.Background(), s.scale.claims); err != nil {
		s.violated("creating claims: %v", err)
	}
	s.rest("before the first fault")
}

// adopt replaces all processes, and leaves the PersistentVolumes as csi-provisioner creates them: without the finalizer of
// the attacher.
func (s *simulation) adopt() {
	s.killReplicas()
	s.record("csi-provisioner has created the volumes")
	if err := s.cluster.RemoveVolumeFinalizer(attacher.Finalizer(s.scale.driver())); err != nil {
		s.violated("removing finalizers: %v", err)
	}
	for i := range s.replicas {
		s.startReplica(i)
	}
}

// tearDown has users delete everything.
func (s *simulation) tearDown() {
	if s.isViolated() {
		return
	}
	s.settle() // after the last operation
	s.record("users delete everything")
	if err := s.cluster.TearDown(context.Background()); err != nil {
		s.violated("deleting everything: %v", err)
	}
}

// pickScale chooses the size of the history.
func (s *simulation) pickScale() scale {
	pick := s.choices.Pick
	c := scale{
		replicas: 1 + pick(3), nodes: 2, claims: 1 + pick(3), steps: 20 + pick(100), faults: []int{0, 2, 6, 15}[pick(4)],
		disasters:     []int{0, 2, 2, 6}[pick(4)],
		features:      cluster.Features{Resize: pick(2) == 1, Snapshots: pick(2) == 1, Topology: pick(3) == 2},
		nodeExpansion: pick(2) == 1, prepared: pick(2) == 1, adopted: pick(2) == 1, impatient: pick(4) == 3,
		protection: []string{"always", "always", "on-retry"}[pick(3)],
	}
	if c.features.Topology && pick(2) == 1 {
		c.features.Nodes, c.nodes, c.steps = true, 3, c.steps+60
		c.cleanup = []nodecleanup.Mode{nodecleanup.ModeClaims, nodecleanup.ModeVolumes}[pick(2)]
		c.nodeFinalizer = []nodecleanup.FinalizerMode{nodecleanup.FinalizerOff, nodecleanup.FinalizerManage}[pick(2)]
	}
	c.clock = pick(4) == 3
	c.features.Copies = !c.features.Resize && pick(2) == 1 // after an expansion, copies would be smaller than their sources
	c.lists, c.features.Secrets, c.oldServers = pick(3) == 2, pick(3) == 2, pick(3) == 2
	c.features.Capacity = c.features.Topology && pick(2) == 1
	return c
}

// renewDeadline is the time without a response after which a process gives up a Lease.
const renewDeadline = 41 * time.Second // not when it retries to renew it

// configuration returns the configuration of the processes that run these roles.
func (c scale) configuration(controllers string) app.Config {
	var args []string
	if c.features.Capacity {
		args = append(args, "--capacity-ownerref-level=-1", "--capacity-threads=3")
	}
	if c.features.Nodes {
		args = append(args, "--node-cleanup-scope=all", fmt.Sprint("--node-cleanup=", c.cleanup),
			fmt.Sprint("--node-missing-grace=", missingGrace), fmt.Sprint("--node-delete-grace=", deleteGrace),
			fmt.Sprint("--node-cleanup-window=", breakerWindow), "--pv-release-grace=10s",
			fmt.Sprint("--node-finalizer-mode=", c.nodeFinalizer), fmt.Sprint("--node-finalizer-timeout=", finalizerTimeout),
			"--node-cleanup-qps=10")
	}
	args = append(args,
		"--controllers="+controllers, fmt.Sprint("--worker-threads=", cmp.Or(c.threads, 3)),
		"--retry-interval-max="+longestBackOff.String(),
		"--provisioning-protection="+c.protection, "--leader-election", "--leader-election-namespace=kube-system",
		// Four times the default, so that renewals are a smaller part of each history.
		"--leader-election-lease-duration=60s", fmt.Sprint("--leader-election-renew-deadline=", renewDeadline),
		"--leader-election-retry-period=20s",
	)
	if c.features.Topolvm {
		args = append(args, "--metrics-bind-address=", "--health-probe-bind-address=", "--driver-health-endpoint=")
		return configuration(app.Topolvm(false), args...)
	}
	return configuration(app.All, append(args, "--reconcile-sync=15s")...)
}

func (s *simulation) killReplicas() {
	for i, r := range s.replicas {
		if r != nil {
			s.kill(r)
			s.replicas[i] = nil
		}
	}
}

// end kills all processes and waits until they have returned.
func (s *simulation) end() {
	s.killReplicas()
	for _, o := range s.gate.begin(s.step) { // late calls
		s.gate.proceed(o, verdict{err: errDead})
	}
	for _, r := range s.processes {
		select {
		case <-r.ended:
		case <-time.After(restLimit):
			panic(fmt.Sprintf("%s was killed and has not ended after %v", r.client, restLimit)) // the bubble cannot end either
		}
	}
	if s.driver != nil {
		s.driver.Stop()
	}
	time.Sleep(outlasting) // no time passes after the end of the history
	synctest.Wait()
}

// randReader is an [io.Reader] of random bytes for several goroutines.
type randReader struct {
	mu sync.Mutex
	*rand.Rand
}

func (r *randReader) Read(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range p {
		p[i] = byte(r.Uint32())
	}
	return len(p), nil
}

// record adds a line to the history.
func (s *simulation) record(format string, args ...any) {
	at := fmt.Sprintf("%4d %8.3fs  ", s.step, time.Since(s.begin).Seconds())
	s.history.Lines = append(s.history.Lines, at+fmt.Sprintf(format, args...))
}

// violated records the first violation of an invariant.
func (s *simulation) violated(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.violatedLocked(format, args...)
}

// isViolated reports whether an invariant was violated.
func (s *simulation) isViolated() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.history.Violation != ""
}

func (s *simulation) violatedLocked(format string, args ...any) {
	if s.history.Violation == "" {
		s.history.Violation = fmt.Sprintf(format, args...)
	}
}

// version returns the resourceVersion of obj.
func version(obj metav1.Object) uint64 {
	v, _ := strconv.ParseUint(obj.GetResourceVersion(), 10, 64) // the server has set it
	return v
}
