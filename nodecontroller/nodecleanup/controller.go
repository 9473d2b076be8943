// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	expiring "k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/keylock"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Config configures a [Controller].
type Config struct {
	Settings
	// Workers is the number of deletions at the same time.
	Workers int
	// Timeout bounds each request.
	Timeout time.Duration
	// RetryIntervalStart is the delay after a failed pass or deletion. It doubles with each further failure up to
	// RetryIntervalMax.
	RetryIntervalStart, RetryIntervalMax time.Duration
}

// Deps holds the dependencies of a [Controller]. All fields are required unless noted.
type Deps struct {
	Driver    string
	Client    kubernetes.Interface
	Informers *kube.Informers        // retain nodes, claims and the annotation [CleanupAnnotation] of claims
	Locks     *keylock.Locks[string] // shared with the loops that call the driver; may be nil
	Events    record.EventRecorder
	Registry  prometheus.Registerer
	Queues    *workloop.Metrics
	Resources Resources // nil: the driver has no custom resources that belong to nodes
	// Namespace is the namespace of the process, which holds the records. Without it, nothing is recorded, and the mode must not
	// delete.
	Namespace string
}

// Resources are the custom resources of a driver that belong to one node each. They are deleted with the claims of the node.
type Resources interface {
	// List returns those in the cache that are not being deleted, or still have the finalizer of the driver.
	List() []Resource
	// Get reads one from the API server; nil and no error: it does not exist.
	Get(ctx context.Context, name string) (*Resource, error)
	// Remove marks r for the node agent of the driver, removes the finalizer of the driver, and deletes r, if it still has the
	// UID and the resourceVersion of r. It writes only after permitted has returned nil.
	Remove(ctx context.Context, r Resource, permitted func() error) error
	// OnChange registers a function that is called with the node of each one in the cache, and of each changed one. Nothing is
	// cleaned up before the registration is synced.
	OnChange(changed func(node string)) (kube.Registration, error)
}

// Controller cleans up after nodes that were deleted.
type Controller struct {
	cfg        Config
	deps       Deps
	metrics    *metrics
	limiter    *rate.Limiter // outlives a term
	departures departures
	changes    atomic.Int64 // deletions of Nodes and CSINodes, requests for them, and creations of volumes of lost nodes
	registered kube.Registrations
	resources  cache.DoneChecker                     // done when Resources are cached; nil: there are none
	optional   []cache.DoneChecker                   // of the caches without which passes plan, but nothing is deleted
	seen       atomic.Pointer[Plan]                  // the last one; nil without the Lease
	version    atomic.Value                          // resourceVersion of the ConfigMap, as this process last read or wrote it
	queue      atomic.Pointer[workloop.Loop[string]] // nil without the Lease

	volumes     kube.Informer[*corev1.PersistentVolume]
	claims      kube.Informer[*corev1.PersistentVolumeClaim]
	classes     kube.Informer[*storagev1.StorageClass]
	nodes       kube.Informer[*corev1.Node]
	csiNodes    kube.Informer[*storagev1.CSINode]
	attachments *kube.Informer[*storagev1.VolumeAttachment] // nil unless the mode deletes
	pods        *kube.Informer[*corev1.Pod]                 // nil unless the mode deletes
	configMap   *kube.Informer[*corev1.ConfigMap]           // nil without records
}

// New requests the informers that the controller needs. It starts nothing; see [Controller.Run].
func New(cfg Config, deps Deps) (*Controller, error) {
	cfg.Driver = deps.Driver
	if deps.Namespace == "" && cfg.mode() != ModeOff {
		why := fmt.Errorf("--node-cleanup=%s: the namespace of the process is unknown, and the records of lost nodes are stored there. "+
			"Set the environment variable POD_NAMESPACE", cfg.mode())
		if cfg.Deletes() {
			return nil, why
		}
		klog.ErrorS(why, "Lost nodes are not reported")
		cfg.NodeCleanup = ModeOff
	}
	c := &Controller{
		cfg: cfg, deps: deps, limiter: rate.NewLimiter(rate.Limit(cfg.NodeCleanupQPS), cfg.NodeCleanupBurst),
		volumes: deps.Informers.Volumes(), claims: deps.Informers.Claims(), classes: deps.Informers.Classes(),
		nodes: deps.Informers.FullNodes(), csiNodes: deps.Informers.CSINodes(),
	}
	optional := deps.Informers.IfAllowed()
	if cfg.Deletes() {
		attachments, pods := optional.Attachments(), optional.Pods()
		c.attachments, c.pods = &attachments, &pods
		c.optional = append(c.optional, attachments.SyncedChecker(), pods.SyncedChecker())
	}
	if cfg.mode() == ModeOff {
		c.deps.Resources = nil
	} else {
		configMap := optional.ConfigMap(deps.Namespace, ConfigMapName(deps.Driver))
		c.configMap = &configMap
	}
	c.metrics = newMetrics(deps.Registry, c.Plan)
	c.watch()
	return c, nil
}

// Plan returns the last plan, or nil without the Lease.
func (c *Controller) Plan() *Plan { return c.seen.Load() }

// LostNodes returns the records as this replica knows them, sorted by value.
func (c *Controller) LostNodes() (nodes []LostNode) {
	if p := c.Plan(); p != nil {
		for _, h := range p.Hosts {
			if _, recorded := p.Records.Lost[h.Value]; recorded {
				nodes = append(nodes, h.LostNode)
			}
		}
		return nodes
	}
	if c.configMap != nil {
		if cm, ok := c.configMap.Get(c.deps.Namespace + "/" + ConfigMapName(c.deps.Driver)); ok {
			return ParseLostNodes(cm)
		}
	}
	return nil
}

// term is the state between acquiring and releasing the Lease. It is discarded afterwards, because another replica may have worked
// in between.
type term struct {
	*Controller
	deleter *deleter
	caches  caches
	end     func(cause error)
	holder  string            // of this term
	cm      *corev1.ConfigMap // as read or written last; nil: none
	records Records           // of cm, or the last ones if it was deleted
	taken   bool              // this term is the holder
	nexts   time.Time         // when only the sentences were written last
	listed  time.Time         // see objects.Listed
	tried   attempts
	plan    Plan      // the last one
	ended   time.Time // the last pass
}

// QueueName is the name of the queue, whose only key is the driver.
const QueueName = "lostnodes"

const (
	// drainTime is the time in which a running pass may finish at the end of the process.
	drainTime = 10 * time.Second
	// passInterval is the least time between two passes.
	passInterval = time.Second
	// passTime is the time after which a pass begins no further deletion.
	passTime = 10 * time.Second
	// waitInterval is the time between two passes that fail while a Node waits for our finalizer, or that lack a permission or a cache.
	waitInterval = 10 * time.Second
)

// errNotHolder ends a term whose records have another holder: another process leads, or an administrator has changed
// [AnnotationHolder]. The next term, which begins with the Lease, takes the records over.
var errNotHolder = fmt.Errorf("%w: annotation %s of the records of lost nodes has changed", election.ErrLost, AnnotationHolder)

// Run works until ctx ends, or until the records have another holder, and returns after the last request. It may be called again
// while this process holds the Lease.
func (c *Controller) Run(ctx context.Context) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	// A node that is missing only in an incomplete cache would count as lost.
	if err := c.registered.Wait(ctx, "nodecontroller caches"); err != nil {
		return err
	}
	// A permission that is missing must not keep Nodes for longer.
	wait, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	cached := cache.WaitFor(klog.NewContext(wait, klog.FromContext(ctx).V(2)), "optional nodecontroller caches", c.optional...)
	cancel()
	if !cached && ctx.Err() == nil {
		klog.FromContext(ctx).Info("Nothing is cleaned up before pods, VolumeAttachments and custom resources of the driver are cached. " +
			"Nodes wait for --node-finalizer-timeout")
	}
	hostname, _ := os.Hostname()
	t := &term{Controller: c, end: end, holder: hostname + "_" + string(uuid.NewUUID()), records: parseRecords(nil), tried: attempts{}}
	live := apiServer{c.deps.Client, c.deps.Resources, c.cfg.Timeout}
	t.deleter = &deleter{
		apiServer: live, s: c.cfg.Settings, home: c.deps.Namespace, locks: c.deps.Locks, limiter: c.limiter, metrics: c.metrics,
		send: c.send, changes: c.changes.Load,
	}
	t.caches = caches{c, live, expiring.NewExpiring()}
	queue := workloop.New(workloop.Config{
		Name: QueueName, RetryStart: c.cfg.RetryIntervalStart, RetryMax: c.cfg.RetryIntervalMax, GracePeriod: drainTime,
	}, c.deps.Queues, t.pass)
	defer queue.Stop()
	c.queue.Store(queue)
	defer c.queue.Store(nil)
	defer c.seen.Store(nil)
	queue.Add(c.deps.Driver)
	queue.Run(ctx, 1)
	return context.Cause(ctx)
}

// pass reads, decides, writes the records, and does the due steps.
func (t *term) pass(ctx context.Context, _ string) (next time.Time, err error) {
	if wait := t.ended.Add(passInterval); time.Now().Before(wait) {
		return wait, nil
	}
	defer func() { t.ended = time.Now() }()
	changes := t.changes.Load()
	err = t.readRecords(ctx)
	if errors.Is(err, errNotHolder) {
		t.end(err)
		return time.Time{}, err
	}
	p, unlisted := t.decide(ctx)
	p.changes = changes
	if err == nil {
		p.version, err = t.writeRecords(ctx, p)
	}
	t.publish(ctx, p, err, unlisted)
	if err != nil {
		t.listed = time.Time{} // the next plan does not have what the lists had
		for _, h := range p.Hosts {
			for _, release := range h.Releases {
				if release.Unrecorded {
					err = errors.Join(err, t.deleter.release(ctx, p.world.Key, release))
				}
			}
		}
		return t.retry(p, p.Next, err)
	}
	next, err = t.carryOut(ctx, p)
	return t.retry(p, next, errors.Join(err, unlisted))
}

// retry returns the result of a pass. A Node that waits for our finalizer does not wait for a back-off.
func (t *term) retry(p Plan, next time.Time, err error) (time.Time, error) {
	if err == nil || len(p.waiting(t.cfg.Settings)) == 0 {
		return next, err
	}
	if soon := time.Now().Add(waitInterval); soon.Before(next) {
		next = soon
	}
	return next, workloop.Waiting{Cause: err}
}

// waiting returns the Nodes that are being deleted and wait for our finalizer.
func (p Plan) waiting(s Settings) (nodes []*corev1.Node) {
	for _, node := range p.world.Nodes {
		if node.DeletionTimestamp != nil && s.holds(node) {
			nodes = append(nodes, node)
		}
	}
	return nodes
}

// readRecords reads the ConfigMap. If it was deleted, the records remain, and approvals end.
func (t *term) readRecords(ctx context.Context) error {
	if t.configMap == nil {
		return nil
	}
	cm, err := t.deleter.configMap(ctx, t.deps.Namespace, t.deps.Driver)
	switch {
	case err != nil:
		return err
	case cm == nil:
		t.records.Approve = nil
	case t.taken && cm.Annotations[AnnotationHolder] != t.holder:
		return errNotHolder
	default:
		t.records = parseRecords(cm)
	}
	if !t.taken && t.cm == nil { // an earlier term has reported its breaker
		t.plan.Breaker.Open = slices.ContainsFunc(slices.Collect(maps.Values(t.records.Lost)), LostNode.opens)
	}
	t.store(cm)
	return nil
}

// store remembers the ConfigMap.
func (t *term) store(cm *corev1.ConfigMap) {
	t.cm = cm
	version := ""
	if cm != nil {
		version = cm.ResourceVersion
	}
	t.version.Store(version)
}

// decide plans with the caches, and again with the lists that the plan needs. The plan is complete without them, if they fail with
// the error: nothing that depends on them is done.
func (t *term) decide(ctx context.Context) (p Plan, err error) {
	l, failed := listed{}, maps.Clone(t.tried)
	maps.DeleteFunc(failed, func(_ types.UID, a attempt) bool { return !a.Until.IsZero() })
	for {
		o := t.objects(l)
		for uid, a := range failed { // the plan has their reasons, however long the pass took
			a.Until = o.Now.Add(a.delay)
			t.tried[uid] = a
		}
		p = plan(t.cfg.Settings, newWorld(ctx, t.cfg.Settings, o, t.records, t.caches), t.records, t.tried)
		nodes, volumes := p.needsLists()
		if !nodes && !volumes {
			break
		}
		l, err = t.deleter.lists(ctx, l, nodes, volumes)
		if err != nil {
			break
		}
	}
	if len(t.deps.Informers.Forbidden()) > 0 || p.world.Incomplete != "" { // the end of either need not enqueue a pass
		p.before(p.world.Now.Add(waitInterval))
	}
	p.Records.Holder = t.holder
	for i, h := range p.Hosts {
		n, recorded := p.Records.Lost[h.Value]
		if !recorded {
			continue
		}
		n.Next = p.sentence(t.cfg.Settings, h)
		klog.FromContext(ctx).V(2).Info("Decided", "node", h.Name(), "next", n.Next)
		p.Hosts[i].Next, p.Records.Lost[h.Value] = n.Next, n
	}
	return p, err
}

// objects returns what the caches have, or the lists of this pass. They count however long they took: rule absence permits nothing by
// lists of another minute.
func (t *term) objects(l listed) objects {
	now := time.Now()
	o := objects{
		Now: now, Listed: t.listed, Nodes: byName(t.nodes.List()), CSINodes: byName(t.csiNodes.List()),
		VolumesListed: l.volumesListed, Volumes: t.volumes.List(),
	}
	o.Departed, o.Incomplete = t.departures.since(now)
	if !l.at.IsZero() {
		t.listed = time.Time{}
		if o.list(l.at, l.nodes, l.csiNodes) { // the next passes may do without lists
			t.listed = l.at
		}
	}
	if l.volumesListed {
		o.Volumes = l.volumes
	}
	if t.deps.Resources != nil {
		select {
		case <-t.resources.Done():
		default:
			o.Incomplete = resourcesUnknown
		}
		o.Resources = t.deps.Resources.List()
	}
	return o
}

// writeRecords writes the records of a plan if they differ, and takes them over in the first pass. A change of only the
// sentences is written once a minute. It returns the resourceVersion of the ConfigMap.
func (t *term) writeRecords(ctx context.Context, p Plan) (version string, err error) {
	next, now := p.Records, time.Now()
	same, sentences := next.equal(t.records), next.withoutNext().equal(t.records.withoutNext())
	switch {
	case t.configMap == nil || t.cm == nil && !t.cfg.Deletes() && len(next.Lost) == 0:
		t.taken = true
		return "", nil
	case t.cm != nil && (same || sentences && now.Sub(t.nexts) < time.Minute):
		return t.cm.ResourceVersion, nil
	}
	cm, err := next.configMap(t.cm, t.deps.Namespace, t.deps.Driver)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, t.cfg.Timeout)
	defer cancel()
	err = election.MayCall(ctx)
	if err != nil {
		return "", err
	}
	if client := t.deps.Client.CoreV1().ConfigMaps(t.deps.Namespace); t.cm == nil {
		cm, err = client.Create(ctx, cm, metav1.CreateOptions{})
	} else {
		cm, err = client.Update(ctx, cm, metav1.UpdateOptions{})
	}
	if err != nil {
		return "", fmt.Errorf("writing the records of lost nodes to ConfigMap \"%s/%s\": %w", t.deps.Namespace,
			ConfigMapName(t.deps.Driver), err)
	}
	t.store(cm)
	t.records, t.taken, t.nexts = parseRecords(cm), true, now
	return cm.ResourceVersion, nil
}

// publish adds the problems of this pass to its plan, and publishes the plan with its events.
func (t *term) publish(ctx context.Context, p Plan, failed, unlisted error) {
	planned := p.Problems
	p.Problems = nil
	for _, err := range []error{failed, unlisted} {
		if isRefusal(err) {
			p.Problems = append(p.Problems, refusal(err))
		}
	}
	for resource, err := range t.deps.Informers.Forbidden() {
		p.problem(CheckForbidden, "Forbidden/"+resource, "", "listing and watching %s for --node-cleanup=%s: %v%s", resource, t.cfg.mode(),
			err, grantHint)
	}
	for _, name := range slices.Sorted(maps.Keys(p.world.Nodes)) {
		if a, failed := t.waits(p, p.world.Nodes[name]); failed {
			a.Reason.Node = name
			p.Problems = append(p.Problems, a.Reason)
		}
	}
	if failed != nil {
		for _, node := range p.waiting(t.cfg.Settings) {
			if t.cfg.overdue(node, p.world.Now) && t.cfg.optOut("Node", node) != "" {
				p.problem(CheckForbidden, "Unrecorded", node.Name, "The Node has opted out of the cleanup. It keeps its finalizer until "+
					"the opt-out can be written to ConfigMap %s", ConfigMapName(t.cfg.Driver))
			}
		}
	}
	p.Problems = bounded(append(p.Problems, planned...))
	var driver runtime.Object
	for _, e := range events(t.cfg.Settings, t.plan, p) {
		if e.object == nil && e.node == "" {
			if driver == nil {
				driver = t.csiDriver(ctx)
			}
			e.object = driver
		}
		t.send(e)
	}
	p.world = world{Key: p.world.Key, stays: p.world.stays} // the rest would keep the lists of this pass in memory
	t.plan = p
	t.seen.Store(&p)
}

// waits returns the last attempt at an object, if the next one is not due yet.
func (t *term) waits(p Plan, obj metav1.Object) (a attempt, waits bool) {
	a, failed := t.tried[obj.GetUID()]
	return a, failed && p.world.Now.Before(a.Until)
}

// carryOut does the due steps, then the releases, and adds the missing finalizers, several at a time. The next pass decides about
// what it does not reach.
func (t *term) carryOut(ctx context.Context, p Plan) (next time.Time, err error) {
	work := []map[types.UID]func() error{{}, {}, {}}
	for _, h := range p.Hosts {
		for _, st := range h.Steps {
			phase := 0
			if st.Kind == KindResource {
				phase = 1
			}
			if st.due() { // a volume of several hosts has one step
				work[phase][st.Item.target(st.Kind)] = func() error { return t.deleter.delete(ctx, p, st) }
			}
		}
		for _, release := range h.Releases {
			if _, waits := t.waits(p, release.Node); !waits {
				work[2][release.Node.UID] = func() error { return t.deleter.release(ctx, p.world.Key, release) }
			}
		}
	}
	for _, name := range p.Protect {
		node := p.world.Nodes[name]
		if _, waits := t.waits(p, node); !waits {
			work[2][node.UID] = func() error { return t.deleter.protect(ctx, node) }
		}
	}
	next, end := p.Next, p.world.Now.Add(passTime)
	for _, phase := range work {
		if len(phase) > 0 {
			next, err = t.do(ctx, phase, next, end)
		}
		if err != nil {
			return next, err
		}
	}
	maps.DeleteFunc(t.tried, func(_ types.UID, a attempt) bool {
		return !a.Until.IsZero() && p.world.Now.Sub(a.Until) > departedAge
	})
	return next, nil
}

// do does the work for each object, and remembers what has failed. It returns the time of the next pass, which is soon unless
// the rate limit delays all of it, and an error if this term is over.
func (t *term) do(ctx context.Context, work map[types.UID]func() error, next, end time.Time) (time.Time, error) {
	var mu sync.Mutex
	var over error
	limited := 0
	var workers errgroup.Group
	workers.SetLimit(max(1, t.cfg.Workers))
	for _, uid := range slices.Sorted(maps.Keys(work)) {
		if ctx.Err() != nil || !time.Now().Before(end) {
			break
		}
		workers.Go(func() error {
			err := recovered(work[uid])
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				delete(t.tried, uid)
			case errors.Is(err, errLimited):
				limited++
			case errors.Is(err, errChanged):
			case errors.Is(err, election.ErrLost):
				over = err
			default:
				klog.FromContext(ctx).Error(err, "Cleanup after a lost node failed", "uid", uid)
				t.tried[uid] = t.tried[uid].next(err, t.cfg.RetryIntervalStart, t.cfg.RetryIntervalMax)
			}
			return nil
		})
	}
	_ = workers.Wait()
	at := time.Now().Add(passInterval)
	if limited == len(work) {
		at = time.Now().Add(time.Duration((1 - t.limiter.TokensAt(time.Now())) / t.cfg.NodeCleanupQPS * float64(time.Second)))
	}
	if at.Before(next) {
		next = at
	}
	if errors.Is(over, errNotHolder) {
		t.end(over)
	}
	return next, over
}

// recovered calls act, and returns its panic as an error.
func recovered(act func() error) (err error) {
	defer workloop.Recover(&err)
	return act()
}
