// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// TestRollingChange exchanges two replicas of csi-provisioner and csi-attacher for two of
// storage-controller, as the rolling update of a Deployment does, and changes back, while
// users go on. The sidecars are this program under their names, with the flags of old manifests,
// except those that the environment variable SIDECARS names: they are the real ones.
func TestRollingChange(t *testing.T) {
	t.Parallel()
	for name, hard := range map[string]bool{"terminated": false, "killed": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newChange(t, hard)
			ctx, stop := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			wg.Go(func() { c.load.run(ctx) })
			wg.Go(func() { c.leases.run(ctx) })
			defer wg.Wait()
			defer stop()

			pods := []*pod{c.sidecars()}
			c.works()
			pods = append(pods, c.sidecars())
			pods = c.roll("there", pods, c.storageController)
			pods = c.roll("back", pods, c.sidecars)
			c.load.end()
			c.check()
			c.finish(pods)
		})
	}
}

// realSidecar returns the path of the real sidecar if the environment variable SIDECARS names it, in a list separated by commas, else
// "".
func realSidecar(t *testing.T, name string) string {
	t.Helper()
	if !slices.Contains(strings.Split(os.Getenv("SIDECARS"), ","), name) {
		return ""
	}
	return reference(t, name)
}

// change is a rolling change and its observations.
type change struct {
	*env
	load   *load
	leases *leaseHistory
	mark   int64 // of the audit log
	hard   bool  // a pod that leads is killed, not told to stop

	workers []*worker // all that ever ran
	doubt   sync.Map  // what of the parameter doubtful the driver does not yet know whether there is a volume
	gates   map[string]*gate
}

// worker is a process, by whichever name, with a socket of its own.
type worker struct {
	*process
	socket string
	real   bool // one of the real sidecars
	killed bool
	died   time.Time // zero while it runs
}

// pod is processes that begin and end together.
type pod struct{ workers []*worker }

// provisioning and attaching are the methods of the two roles.
var provisioning, attaching = []string{"CreateVolume", "DeleteVolume"}, []string{publish, unpublish}

func newChange(t *testing.T, hard bool) *change {
	e := newEnv(t, csitest.Config{Latency: 20 * time.Millisecond}, 1)
	c := &change{env: e, load: &load{env: e, class: e.class(false, nil), patient: hard || realSidecar(t, "csi-provisioner") != ""},
		leases: newLeaseHistory(e), mark: e.mark(), hard: hard, gates: map[string]*gate{}}
	for _, methods := range [][]string{provisioning, attaching} {
		g := &gate{}
		for _, m := range methods {
			c.gates[m] = g
			e.plugin.Always(m, c.answer(g))
		}
	}
	return c
}

// gate is where calls of the driver wait while it is closed.
type gate struct {
	mu     sync.RWMutex
	closed chan struct{} // nil while it is open
}

func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = make(chan struct{})
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed != nil {
		close(g.closed)
		g.closed = nil
	}
}

func (g *gate) pass() {
	g.mu.RLock()
	closed := g.closed
	g.mu.RUnlock()
	if closed != nil {
		<-closed
	}
}

// answer is what the driver does in a call. What was begun it finishes, whether or not
// a client waits for the response.
func (c *change) answer(g *gate) csitest.Step {
	return func(_ context.Context, _ *csitest.Plugin, request any, do func() (any, error)) (any, error) {
		g.pass()
		response, err := do()
		if r, ok := request.(*csi.CreateVolumeRequest); ok {
			if _, doubt := c.doubt.Load(r.Parameters[doubtful]); doubt {
				return nil, status.Error(codes.Aborted, "pending")
			}
		}
		return response, err
	}
}

// doubtful is the parameter by which the driver knows the claims of [change.doubts].
const doubtful = "doubtful"

// patience lets no call time out that waits at a gate.
const patience = "--timeout=1m"

// sidecars starts a pod of csi-provisioner and csi-attacher.
func (c *change) sidecars() *pod {
	c.t.Helper()
	p := &pod{}
	for _, name := range []string{"csi-provisioner", "csi-attacher"} {
		args := slices.Concat([]string{"-v=5", "--kube-api-qps=100", "--kube-api-burst=200", patience}, quick, election)
		real := realSidecar(c.t, name)
		if real == "" {
			for i, arg := range args { // csi-provisioner itself refuses what old manifests have
				args[i] = strings.Replace(arg, "--", "-", 1)
			}
			p.workers = append(p.workers, c.worker(c.linked(name, args...), false))
			continue
		}
		// They name themselves after their host. --leader-election-namespace is taken from the environment.
		host := fmt.Sprintf("%s-%d", name, len(c.workers))
		cmd := exec.Command("unshare", slices.Concat([]string{"--uts", "sh", "-c", `hostname "$0" && exec "$@"`, host, real,
			"--kubeconfig=" + c.cp.Kubeconfig(), "--csi-address=" + c.plugin.Address()}, args)...)
		w := c.worker(cmd, true)
		w.pod = host
		p.workers = append(p.workers, w)
	}
	c.stands(p)
	return p
}

// storageController starts a pod as migrate makes it.
func (c *change) storageController() *pod {
	c.t.Helper()
	p := &pod{workers: []*worker{c.worker(c.command("all", slices.Concat([]string{patience}, quick, election)...), false)}}
	c.stands(p)
	return p
}

func (c *change) worker(cmd *exec.Cmd, real bool) *worker {
	c.t.Helper()
	socket := fmt.Sprintf("%s-%d", c.plugin.Address(), len(c.workers))
	if err := c.plugin.ListenOn(socket); err != nil {
		c.t.Fatal(err)
	}
	cmd.Args = append(cmd.Args, "--csi-address="+socket)
	w := &worker{process: c.start(cmd), socket: socket, real: real}
	c.workers = append(c.workers, w)
	return w
}

// stands waits until the pod stands for election, which makes it a ready one.
func (c *change) stands(p *pod) {
	c.t.Helper()
	for _, w := range p.workers {
		w.says("ttempting to acquire leader lease")
	}
}

// roll is the rolling update of a Deployment with maxSurge 1 and maxUnavailable 0. A claim
// whose volume is indeterminate goes through it, and so does one that is deleted meanwhile.
func (c *change) roll(name string, pods []*pod, start func() *pod) []*pod {
	c.t.Helper()
	doubts := c.doubts(name, pods)
	var next []*pod
	for _, old := range c.leadersFirst(pods) {
		next = append(next, start())
		c.replace(old)
	}
	c.works()
	for _, doubt := range doubts {
		c.asks(next, doubt)
		c.doubt.Delete(doubt)
	}
	for _, doubt := range doubts {
		c.resolved(doubt)
	}
	return next
}

// replace ends a pod that is not needed any more.
func (c *change) replace(old *pod) {
	c.t.Helper()
	s := syscall.SIGTERM
	if c.hard && len(c.leading(old)) > 0 {
		s = syscall.SIGKILL
	}
	c.endPod(old, s)
	if c.hard {
		c.works()
	}
}

const deletedIndeterminate = "-deleted"

// doubts makes claims whose volumes are indeterminate until they are taken from c.doubt.
func (c *change) doubts(name string, pods []*pod) []string {
	c.t.Helper()
	names := []string{name, name + deletedIndeterminate}
	if realSidecar(c.t, "csi-provisioner") != "" { // it does not finish what another process has begun (docs/migrate.md)
		names = names[:1]
		if !pods[0].workers[0].real {
			return nil
		}
	}
	for _, n := range names {
		c.doubt.Store(n, true)
		c.claim(n, c.class(false, func(class *storagev1.StorageClass) { class.Parameters = map[string]string{doubtful: n} }))
		c.asks(pods, n)
		if strings.HasSuffix(n, deletedIndeterminate) {
			c.eventually("claim "+n+" is kept", func(ctx context.Context) error {
				claim, err := c.client.CoreV1().PersistentVolumeClaims(c.ns).Get(ctx, n, metav1.GetOptions{})
				if err == nil && !slices.Contains(claim.Finalizers, "storage-controller.io/provisioning") {
					err = fmt.Errorf("its finalizers are %v", claim.Finalizers)
				}
				return err
			})
			c.deleteClaim(n)
		}
	}
	return names
}

// asks waits until one of the pods has asked the driver for the volume of an indeterminate claim
// and was not told.
func (c *change) asks(pods []*pod, doubt string) {
	c.t.Helper()
	c.eventually("a process calls CreateVolume for "+doubt, func(context.Context) error {
		for _, call := range c.plugin.Calls("CreateVolume") {
			asks := call.Request.(*csi.CreateVolumeRequest).Parameters[doubtful] == doubt && call.Err != nil
			if asks && slices.ContainsFunc(pods, func(p *pod) bool { return p.calls(call) }) {
				return nil
			}
		}
		return errors.New("no process did")
	})
}

// resolved waits until the claim is bound, or gone if it was deleted.
func (c *change) resolved(doubt string) {
	c.t.Helper()
	if !strings.HasSuffix(doubt, deletedIndeterminate) {
		c.bound(doubt)
		return
	}
	c.eventually("claim "+doubt+" was deleted", func(ctx context.Context) error {
		_, err := c.client.CoreV1().PersistentVolumeClaims(c.ns).Get(ctx, doubt, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it is there: %v", err)
	})
}

// calls tells whether a call is one of the pod.
func (p *pod) calls(call csitest.Call) bool {
	return slices.ContainsFunc(p.workers, func(w *worker) bool { return w.socket == call.Socket })
}

// leading is the methods that the pod may call, by role, the last role in the life of a
// volume first: no volume is published while none is made.
func (c *change) leading(p *pod) (methods [][]string) {
	c.t.Helper()
	for _, name := range []string{c.attacherLease(), c.provisionerLease()} {
		lease, err := c.lease(c.t.Context(), name)
		if err != nil {
			c.t.Fatal(err)
		}
		holder := ptr.Deref(lease.Spec.HolderIdentity, "")
		if slices.ContainsFunc(p.workers, func(w *worker) bool { return w.pod == holder }) {
			methods = append(methods, c.roles()[name])
		}
	}
	return methods
}

// roles is the methods of each role by the Lease that the sidecars have for it.
func (c *change) roles() map[string][]string {
	return map[string][]string{c.provisionerLease(): provisioning, c.attacherLease(): attaching}
}

// leadersFirst begins with the pods that lead, so that none of them ends unnoticed.
func (c *change) leadersFirst(pods []*pod) []*pod {
	c.t.Helper()
	return slices.SortedStableFunc(slices.Values(pods), func(a, b *pod) int { return len(c.leading(b)) - len(c.leading(a)) })
}

// endPod sends s while a call of each role that the pod leads is under way. Who is told to
// stop finishes them, who is killed does not know that the driver did.
func (c *change) endPod(p *pod, s syscall.Signal) {
	c.t.Helper()
	leading := c.leading(p)
	for _, methods := range leading {
		c.gates[methods[0]].close()
		c.eventually("a call is under way", func(context.Context) error {
			if slices.ContainsFunc(c.underWay(methods), p.calls) {
				return nil
			}
			return errors.New("none is")
		})
	}
	for _, w := range p.workers {
		w.killed = s == syscall.SIGKILL || w.real
		w.signal(s)
		if !w.killed {
			w.says("Shutting down")
		}
		busy := slices.ContainsFunc(c.underWay(slices.Concat(leading...)), func(call csitest.Call) bool { return call.Socket == w.socket })
		if busy && !w.killed { // a standby has nothing to finish
			w.lives()
		}
	}
	for _, w := range p.workers {
		if w.killed {
			w.gone()
		}
	}
	for _, g := range c.gates {
		g.open()
	}
	c.ended(p)
}

// underWay returns the calls of methods that wait at a gate or are about to.
func (c *change) underWay(methods []string) []csitest.Call {
	if len(methods) == 0 {
		return nil
	}
	return slices.DeleteFunc(c.plugin.Calls(methods...), func(call csitest.Call) bool { return !call.Ended.IsZero() })
}

// ended waits for the end of a pod.
func (c *change) ended(p *pod) {
	c.t.Helper()
	for _, w := range p.workers {
		if code := w.gone(); code != 0 && !w.killed {
			c.t.Errorf("%s: exit code %d", w.pod, code)
		}
	}
}

// gone waits for the end of a process and returns its exit code.
func (w *worker) gone() int {
	w.t.Helper()
	code := w.code()
	if w.died.IsZero() {
		w.died = time.Now()
	}
	return code
}

// finish ends the last pods.
func (c *change) finish(pods []*pod) {
	c.t.Helper()
	for _, p := range pods {
		for _, w := range p.workers {
			w.killed = w.real
			w.signal(syscall.SIGTERM)
		}
		c.ended(p)
	}
	c.released()
}

// works waits until each role is at work.
func (c *change) works() {
	c.t.Helper()
	for _, methods := range c.roles() {
		before := len(c.plugin.Calls(methods...))
		c.eventually("a volume is made and published", func(context.Context) error {
			for _, call := range c.plugin.Calls(methods...)[before:] {
				if !call.Ended.IsZero() && call.Err == nil {
					return nil
				}
			}
			return fmt.Errorf("no call of %v", methods)
		})
	}
}
