package nodecontroller

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/volumelock"
	"github.com/storage-controller/storage-controller/internal/workloop"
	"github.com/storage-controller/storage-controller/nodecontroller/webhook"
)

// Deps is what the program hands to the controller. Where nothing else is said, all fields
// are required.
type Deps struct {
	Driver  string // its name, as it reports it or as the operator set it
	Client  kubernetes.Interface
	Dynamic dynamic.Interface // for custom resources
	// Informers must keep [kube.RetainedFields] as [Config.Details] says.
	Informers *kube.Informers
	Locks     *volumelock.Locks // shared with the loops that call the driver
	Events    record.EventRecorder
	Registry  prometheus.Registerer
	Queues    *workloop.Metrics
	// UnthrottledClient is a client without a rate limit, for what pods wait for; nil means Client.
	UnthrottledClient kubernetes.Interface
	// Namespace is that of the process itself; it may be unknown.
	Namespace string
}

// Controller looks after the volumes of nodes that go.
type Controller struct {
	cfg        Config
	deps       Deps
	policy     policy
	nodePolicy nodePolicy
	resources  []Resource
	notify     *notifier
	metrics    *metrics

	volumes     kube.Informer[*corev1.PersistentVolume]
	claims      kube.Informer[*corev1.PersistentVolumeClaim]
	classes     kube.Informer[*storagev1.StorageClass]
	nodes       kube.Informer[*corev1.Node]
	csiNodes    kube.Informer[*storagev1.CSINode]
	drivers     *kube.Informer[*storagev1.CSIDriver]        // nil where nothing is written: there is nothing to approve
	attachments *kube.Informer[*storagev1.VolumeAttachment] // nil where nothing is cleaned up

	ownClaims *claims
	webhooks  *webhook.Server // nil where they are off

	tokens sync.Mutex // of bucket, which outlives a term: losing a Lease is no fresh start
	bucket bucket

	unknownKinds sync.Map // of resources, of which the log has told that nobody has installed them

	system   atomic.Value // by what the cluster is known again, see [reader]
	departed *departed
	spent    spent
	current  atomic.Pointer[term] // nil between terms
	leads    atomic.Bool          // also while the caches of a term are not complete yet
}

// New checks cfg, which is resolved, and asks for the watches that the controller needs.
// Nothing runs before [Controller.Run] and [Controller.Serve].
func New(cfg Config, deps Deps) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	p := policyOf(cfg, deps.Driver)
	c := &Controller{
		cfg: cfg, deps: deps, policy: p, nodePolicy: nodePolicyOf(cfg, p), notify: newNotifier(deps.Events, p.dryRun),
		bucket:  bucket{qps: cfg.NodeCleanupQPS, burst: cfg.NodeCleanupBurst},
		volumes: deps.Informers.Volumes(), claims: deps.Informers.Claims(), classes: deps.Informers.Classes(),
		nodes: deps.Informers.FullNodes(), csiNodes: deps.Informers.CSINodes(),
	}
	for _, text := range cfg.NodeCleanupResource {
		r, err := ParseResource(text)
		if err != nil {
			return nil, fmt.Errorf("--node-cleanup-resource: %q: %w", text, err)
		}
		c.resources = append(c.resources, r)
	}
	if p.writes() {
		attachments := deps.Informers.AttachmentsIfAllowed()
		c.attachments = &attachments
		drivers := deps.Informers.DriversIfAllowed()
		c.drivers = &drivers
	}
	c.metrics = newMetrics(deps.Registry, c.tally, c.notReady)
	c.ownClaims = newClaims(cfg, deps)
	var err error
	if c.webhooks, err = c.newWebhooks(); err != nil {
		return nil, err
	}
	// The last step: a role that cannot be built is built again, and must not watch twice.
	c.departed = newDeparted(p.ann.cleanup)
	return c, c.departed.watch(c.nodes)
}

func (c *Controller) tally() (all tally) {
	if t := c.current.Load(); t != nil {
		all = t.ledger.tally()
	}
	if n := len(c.deps.Informers.Forbidden()); n > 0 && c.leads.Load() {
		blocked := map[gate]int{gateForbidden: n}
		for g, m := range all.blocked {
			blocked[g] += m
		}
		all.blocked = blocked
	}
	return all
}

// notReady is the number of nodes that have the driver and are not ready.
func (c *Controller) notReady() (n int) {
	t := c.current.Load()
	if t == nil {
		return 0
	}
	for _, name := range t.index.driverNodes() {
		if node, ok := c.nodes.Get(name); ok && !isReady(node) {
			n++
		}
	}
	return n
}

// term is the work between winning a Lease and losing it. Nothing that it remembers
// outlives it: another replica may have worked meanwhile.
type term struct {
	c           *Controller
	volumes     *kube.MutationCache[*corev1.PersistentVolume]
	claims      *kube.MutationCache[*corev1.PersistentVolumeClaim]
	nodes       *kube.MutationCache[*corev1.Node]
	volumeQueue *workloop.Loop[string]
	nodeQueue   *workloop.Loop[string]
	index       *index
	ledger      *ledger
	memory      *memory
	namespaces  namespaces
	reader      *reader
	executor    *executor
	rolled      lastRoll
	// ready is that the caches are complete: before, everything looks lost.
	ready atomic.Bool
	// tripped is that the administrator was told that the breaker is open.
	tripped atomic.Bool
}

// drain is what running work is given when the process ends.
const drain = 10 * time.Second

// jitter spreads what a failure of the API server has made fail together.
const jitter = 0.2

func (c *Controller) newTerm() (*term, error) {
	t := &term{c: c, memory: newMemory(), index: newIndex(c.deps.Driver, c.cfg.TopologyNodeKey, c.policy.ann)}
	t.ledger = newLedger(breaker{c.cfg.NodeCleanupMinNodes, c.cfg.NodeCleanupMaxFraction}, c.cfg.NodeCleanupWindow, t.index.driverNodes)
	t.reader = &reader{client: c.deps.Client, policy: c.policy, timeout: c.cfg.Timeout, system: &c.system, spent: &c.spent, tried: t.tried}
	t.executor = &executor{reader: t.reader, policy: c.policy, locks: c.deps.Locks, notify: c.notify, metrics: c.metrics, timeout: c.cfg.Timeout}
	loop := workloop.Config{RetryStart: c.cfg.RetryIntervalStart, RetryMax: c.cfg.RetryIntervalMax, Jitter: jitter, GracePeriod: drain}
	loop.Name = "nodecontroller-pv"
	t.volumeQueue = workloop.New(loop, c.deps.Queues, t.syncVolume)
	loop.Name = "nodecontroller-node"
	t.nodeQueue = workloop.New(loop, c.deps.Queues, t.syncNode)
	var err error
	if t.volumes, err = kube.NewMutationCache(c.volumes); err != nil {
		return nil, err
	}
	if t.claims, err = kube.NewMutationCache(c.claims); err != nil {
		return nil, err
	}
	t.nodes, err = kube.NewMutationCache(c.nodes)
	return t, err
}

// close ends the views of a term; they fail only when their watches have ended.
func (t *term) close() {
	_ = t.volumes.Close()
	_ = t.claims.Close()
	_ = t.nodes.Close()
}

// Run works for one term of the Lease, until ctx ends, and returns after the last worker
// has stopped. It may be called again then.
func (c *Controller) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.clean(ctx) })
	group.Go(func() error { return c.ownClaims.run(ctx) })
	group.Go(func() error { return c.tellForbidden(ctx) })
	if c.webhooks != nil {
		group.Go(func() error { return c.webhooks.Lead(ctx) })
	}
	return group.Wait()
}

// clean is [Controller.Run] for the clean-up after nodes.
func (c *Controller) clean(ctx context.Context) error {
	t, err := c.newTerm()
	if err != nil {
		return err
	}
	defer t.volumeQueue.Stop()
	defer t.nodeQueue.Stop()
	defer t.close()
	registrations := t.register()
	defer registrations.Remove()
	// A node that is merely late in its cache would count as lost.
	if err := registrations.Wait(ctx, "nodecontroller caches"); err != nil {
		return err
	}
	t.begin(ctx)
	c.current.Store(t)
	defer c.current.Store(nil)
	var wg sync.WaitGroup
	wg.Go(func() { t.volumeQueue.Run(ctx, c.cfg.Workers) })
	wg.Go(func() { t.nodeQueue.Run(ctx, c.cfg.Workers) })
	wg.Go(func() { t.reader.identify(ctx) })
	wg.Go(func() { t.resync(ctx) })
	wg.Go(func() { t.sweep(ctx) })
	wg.Wait()
	return context.Cause(ctx)
}

// begin counts what is lost before the first worker runs: the breaker must know of all of
// it before anything is cleaned up, and of no more than that.
func (t *term) begin(ctx context.Context) {
	for _, pv := range t.c.volumes.List() {
		if t.index.setVolume(pv) {
			t.gather(pv.Name)
		}
	}
	t.readNamespaces(ctx)
	t.ready.Store(true)
	t.tellKey()
	t.assessAll()
	_, held := t.ledger.judge(time.Now())
	t.tripped.Store(held) // and was told of by whoever led then
}

// assessAll looks at every volume of the driver and every node once.
func (t *term) assessAll() {
	volumes := slices.DeleteFunc(t.c.volumes.List(), func(pv *corev1.PersistentVolume) bool {
		return !t.index.setVolume(pv) && !t.ledger.has(pv.Name)
	})
	for _, pv := range volumes { // all are counted before the first of them has its turn
		t.gather(pv.Name)
	}
	for _, pv := range volumes {
		t.volumeQueue.Add(pv.Name)
	}
	for _, node := range t.c.nodes.List() {
		if node.DeletionTimestamp != nil || t.c.nodePolicy.mode == NodeFinalizerManage {
			t.noteClaims(node.Name)
			t.nodeQueue.Add(node.Name)
		}
	}
	for _, claim := range t.c.claims.List() {
		t.claimChanged(claim)
	}
}

// reviewInterval is the time between two looks at everything that is not as it should be.
const reviewInterval = 5 * time.Minute

func (t *term) resync(ctx context.Context) {
	tick := time.NewTicker(reviewInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		t.reassess(ctx)
	}
}

// reassess looks at everything that is not as it should be, and at what is not watched.
func (t *term) reassess(ctx context.Context) {
	t.readNamespaces(ctx)
	t.recount()
	t.review(t.volumeQueue.Resync, t.nodeQueue.Resync)
}

// review queues everything that the ledger knows of.
func (t *term) review(volume, node func(string)) {
	for _, key := range t.ledger.keys() {
		if name, ok := nodeOfKey(key); ok {
			node(name)
		} else {
			volume(key)
		}
	}
	for _, name := range t.index.goingNodes() {
		node(name)
	}
}

// announce tells once that the breaker has opened, and once that it has closed, and has
// everything looked at again then.
func (t *term) announce(now time.Time) {
	v, held := t.ledger.judge(now)
	if t.tripped.Load() == held || !t.tripped.CompareAndSwap(!held, held) {
		return
	}
	e := normal(reasonBreakerClosed, "No clean-up waits for an approval any more")
	if held {
		e = breakerEvent(v)
	}
	t.c.notify.send(t.csiDriver(), e)
	t.review(t.volumeQueue.Add, t.nodeQueue.Add)
}

func (t *term) csiDriver() *storagev1.CSIDriver { return t.c.csiDriver() }

// csiDriver is what events are about that concern no single volume or node.
func (c *Controller) csiDriver() *storagev1.CSIDriver {
	if c.drivers != nil {
		if driver, ok := c.drivers.Get(c.deps.Driver); ok {
			return driver
		}
	}
	driver := &storagev1.CSIDriver{} // it need not exist
	driver.Name = c.deps.Driver
	return driver
}
