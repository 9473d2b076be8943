// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"fmt"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	expiring "k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"

	"github.com/storage-controller/storage-controller/internal/keylock"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Deps holds the dependencies of a [Controller]. All fields are required unless noted.
type Deps struct {
	Driver    string
	Client    kubernetes.Interface
	Dynamic   dynamic.Interface      // for custom resources
	Informers *kube.Informers        // retain nodes, claims and the annotation [CleanupAnnotation] of claims
	Locks     *keylock.Locks[string] // shared with the loops that call the driver; may be nil
	Events    record.EventRecorder
	Registry  prometheus.Registerer
	Queues    *workloop.Metrics
	// Namespace is the namespace of the process, which holds the records. Without it, report is off, and the modes that delete are
	// not possible.
	Namespace string
}

// Controller cleans up after nodes that were deleted.
type Controller struct {
	cfg       Config
	deps      Deps
	policy    Policy
	resources []Resource
	notify    *notifier
	metrics   *metrics
	limiter   *rate.Limiter // outlives a term
	index     *index
	indexed   kube.Registrations
	term      atomic.Pointer[term] // nil without the Lease

	volumes     kube.Informer[*corev1.PersistentVolume]
	claims      kube.Informer[*corev1.PersistentVolumeClaim]
	classes     kube.Informer[*storagev1.StorageClass]
	nodes       kube.Informer[*corev1.Node]
	csiNodes    kube.Informer[*storagev1.CSINode]
	attachments *kube.Informer[*storagev1.VolumeAttachment] // nil unless the mode deletes
	pods        *kube.Informer[*corev1.Pod]                 // nil unless the mode deletes
	configMap   *kube.Informer[*corev1.ConfigMap]           // nil in mode off
}

// New requests the informers that the controller needs. It starts nothing; see [Controller.Run].
func New(cfg Config, deps Deps) (*Controller, error) {
	p := newPolicy(cfg.Settings, deps.Driver)
	if p.Deletes() && deps.Namespace == "" {
		return nil, fmt.Errorf("--node-cleanup=%s: the namespace of the process is unknown, and the records of lost nodes are stored "+
			"there. "+
			"Set the environment variable POD_NAMESPACE", p.NodeCleanup)
	}
	if deps.Namespace == "" {
		p.NodeCleanup = ModeOff
	}
	c := &Controller{
		cfg: cfg, deps: deps, policy: p, notify: newNotifier(deps.Events.Event),
		index:   newIndex(deps.Driver, cfg.TopologyNodeKey),
		limiter: rate.NewLimiter(rate.Limit(cfg.NodeCleanupQPS), cfg.NodeCleanupBurst),
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
	optional := deps.Informers.IfAllowed()
	if p.Deletes() {
		attachments, pods := optional.Attachments(), optional.Pods()
		c.attachments, c.pods = &attachments, &pods
	}
	if p.NodeCleanup != ModeOff {
		configMap := optional.ConfigMap(deps.Namespace, ConfigMapName(deps.Driver))
		c.configMap = &configMap
	}
	c.metrics = newMetrics(deps.Registry, c.counts)
	c.watch()
	return c, nil
}

// LostNodes returns the records as this replica knows them, sorted by value.
func (c *Controller) LostNodes() []LostNode {
	if t := c.term.Load(); t != nil {
		nodes, _ := t.records.all()
		return nodes
	}
	if c.configMap != nil {
		if cm, ok := c.configMap.Get(c.deps.Namespace + "/" + ConfigMapName(c.deps.Driver)); ok {
			return ParseLostNodes(cm)
		}
	}
	return nil
}

// term holds the state between acquiring and releasing the Lease. It is discarded afterwards,
// because another replica may have worked in between.
type term struct {
	*observer
	volumes    *kube.MutationCache[*corev1.PersistentVolume]
	claims     *kube.MutationCache[*corev1.PersistentVolumeClaim]
	nodes      *kube.MutationCache[*corev1.Node]
	cached     gatherer
	cleaner    *cleaner
	namespaces *expiring.Expiring // Namespaces that were read lately
}

// QueueName is the name of the queue, whose keys are hosts.
const QueueName = "nodecontroller-node"

// recordsKey is the key of the queue for the ConfigMap.
const recordsKey = ""

// drainTime is the time in which a running sync may finish at the end of the process.
const drainTime = 10 * time.Second

// retryJitter spreads the retries of hosts that failed at the same time.
const retryJitter = 0.2

// newTerm returns a term that calls end once it is not the holder of the records any more.
func (c *Controller) newTerm(end func(cause error)) (t *term) {
	hostname, _ := os.Hostname()
	t = &term{namespaces: expiring.NewExpiring()}
	t.observer = &observer{
		memories: &memories{policy: c.policy, hosts: map[string]*memory{}}, c: c, live: newLive(c.deps.Client, c.cfg.Timeout),
		records: newRecords(c.deps, c.policy.NodeCleanup, hostname+"_"+string(uuid.NewUUID()), c.cfg.Timeout, end,
			func() { t.queue.Add(recordsKey) }),
		gather: t.gatherHost, listed: newIndex("", ""), forbidden: map[string]bool{}, checked: make(chan struct{}),
	}
	t.queue = workloop.New(workloop.Config{
		Name: QueueName, RetryStart: c.cfg.RetryIntervalStart, RetryMax: c.cfg.RetryIntervalMax, Jitter: retryJitter,
		GracePeriod: drainTime,
	}, c.deps.Queues, t.sync)
	t.cleaner = &cleaner{
		policy: t.policy, live: t.live, locks: c.deps.Locks, notify: c.notify, metrics: c.metrics,
		gather:  gatherer{t.policy, t.key, t.live.source, t.records.get, t.aliases},
		confirm: t.records.confirm, cluster: t.cluster, acts: t.acts, allow: c.limiter.Allow,
	}
	t.volumes, t.claims, t.nodes = kube.NewMutationCache(c.volumes), kube.NewMutationCache(c.claims), kube.NewMutationCache(c.nodes)
	t.cached = gatherer{t.policy, t.key, t.caches(), t.records.get, c.index.names.with}
	return t
}

// Run reconciles until ctx ends, or until the records have another holder, and returns after the last
// worker has stopped. It may be called again while this process holds the Lease.
func (c *Controller) Run(ctx context.Context) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	t := c.newTerm(end)
	defer t.queue.Stop()
	// A node that is missing only in an incomplete cache would count as lost.
	if err := c.indexed.Wait(ctx, "nodecontroller caches"); err != nil {
		return err
	}
	c.term.Store(t)
	defer c.term.Store(nil)
	t.queue.Add(recordsKey) // enqueues the hosts
	var wg sync.WaitGroup
	wg.Go(func() { t.queue.Run(ctx, max(1, c.cfg.Workers)) })
	wg.Go(func() { t.sweep(ctx) })
	wg.Wait()
	return context.Cause(ctx)
}

// tokens returns zero if a deletion is permitted by the rate limit, or the time of the next attempt.
func (c *Controller) tokens(now time.Time) time.Time {
	missing := 1 - c.limiter.TokensAt(now)
	switch {
	case missing <= 0:
		return time.Time{}
	case c.cfg.NodeCleanupQPS <= 0:
		return now.Add(later)
	}
	return now.Add(time.Duration(math.Ceil(missing / c.cfg.NodeCleanupQPS * float64(time.Second))))
}

// counts returns the values of the gauges.
func (c *Controller) counts() counts {
	n := counts{states: map[state]int{}, blocked: map[check]int{}}
	t := c.term.Load()
	if t == nil {
		return n
	}
	records, _ := t.records.all()
	for _, r := range records {
		if r.opens() {
			n.held++
		}
	}
	if k := len(c.deps.Informers.Forbidden()) + t.missingPermissions(); k > 0 {
		n.blocked[checkForbidden] = k
	}
	_, problem := c.index.topologyKey()
	t.count(&n, cluster{now: time.Now(), keyProblem: problem})
	return n
}
