// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	typedstoragev1 "k8s.io/client-go/kubernetes/typed/storage/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/pressure"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// CapacityClient declares the RPC of the driver that this package calls.
type CapacityClient interface {
	GetCapacity(context.Context, *csi.GetCapacityRequest, ...grpc.CallOption) (*csi.GetCapacityResponse, error)
}

// Deps holds the dependencies of a [Controller]. All fields but Owner and Topology are
// required.
type Deps struct {
	Driver csiclient.Driver
	// Client writes the CSIStorageCapacity objects. It has the rate limit of [Config].
	Client    kubernetes.Interface
	Informers *kube.Informers
	CSI       CapacityClient
	// Ready blocks until the driver can be called.
	Ready    func(context.Context) error
	Registry prometheus.Registerer
	Queues   *workloop.Metrics
	// Namespace of the objects.
	Namespace string
	// Owner reference of the objects; nil for none. See [FindOwner].
	Owner *metav1.OwnerReference
	// Topology of this node in distributed provisioning (CSI spec, "NodeGetInfo").
	Topology map[string]string
}

// Controller publishes the capacity of a driver.
type Controller struct {
	cfg      Config
	deps     Deps
	template template
	client   typedstoragev1.CSIStorageCapacityInterface

	published kube.Informer[*storagev1.CSIStorageCapacity]
	classes   kube.Informer[*storagev1.StorageClass]
	nodes     kube.Informer[metav1.Object]      // not in distributed provisioning
	csiNodes  kube.Informer[*storagev1.CSINode] // likewise

	// disabledReason is empty if the driver supports capacity tracking.
	disabledReason string

	term atomic.Pointer[term] // nil without the Lease
}

// New validates cfg and requests the informers that the controller needs. It starts
// nothing; see [Controller.Run].
func New(cfg Config, deps Deps) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	c := &Controller{cfg: cfg, deps: deps, template: template{labels: labels(deps.Driver.Name, ""), owner: deps.Owner}}
	newMetrics(deps.Registry, c.counts)
	switch {
	case !deps.Driver.Controller.GetCapacity:
		c.disabledReason = "the driver does not report the controller capability GET_CAPACITY"
	case cfg.NodeDeployment && len(deps.Topology) == 0:
		c.disabledReason = "NodeGetInfo returned no accessible_topology"
	case cfg.NodeDeployment:
		if err := validSegment(deps.Topology); err != nil {
			c.disabledReason = "NodeGetInfo returned an accessible_topology that is not valid as node labels: " + err.Error()
		}
	}
	if c.disabledReason != "" {
		return c, nil
	}
	if cfg.NodeDeployment {
		c.template.labels = labels(deps.Driver.Name, cfg.NodeName)
	} else {
		c.nodes, c.csiNodes = deps.Informers.Nodes(), deps.Informers.CSINodes()
	}
	c.classes = deps.Informers.Classes()
	c.published = deps.Informers.Capacities(deps.Namespace, c.template.labels)
	c.client = deps.Client.StorageV1().CSIStorageCapacities(deps.Namespace)
	return c, nil
}

// term holds the state between acquiring and releasing the Lease. It is discarded
// afterwards, because another replica may have changed the objects in between.
type term struct {
	c         *Controller
	state     *state
	published *kube.MutationCache[*storagev1.CSIStorageCapacity]
	queue     *workloop.Loop[pair]
	refreshes classRefreshes
}

// Run reconciles until ctx ends and returns after the last worker has stopped. It may be
// called again afterwards.
func (c *Controller) Run(ctx context.Context) error {
	if c.disabledReason != "" {
		klog.FromContext(ctx).Info("Capacity publishing is disabled", "reason", c.disabledReason)
		<-ctx.Done()
		return context.Cause(ctx)
	}
	t := &term{c: c, state: newState(c.deps.Driver.Name, c.cfg, time.Now), published: kube.NewMutationCache(c.published)}
	t.queue = workloop.NewRanked(workloop.Config{
		Name: "csistoragecapacity", RetryStart: c.cfg.RetryIntervalStart, RetryMax: c.cfg.RetryIntervalMax,
		WaitReady: c.deps.Ready, GracePeriod: c.cfg.Timeout + workloop.APIGrace,
	}, c.deps.Queues, t.sync, t.state.rank)
	defer t.queue.Stop()
	t.refreshes.wake = make(chan struct{}, 1)
	registrations := t.register()
	defer registrations.Remove()
	// With incomplete caches, objects would be deleted for a node or a class that was not
	// listed yet.
	if err := registrations.Wait(ctx, "capacity caches"); err != nil {
		return err
	}
	c.term.Store(t)
	defer c.term.Store(nil)
	var wg sync.WaitGroup
	wg.Go(func() { t.queue.Run(ctx, int(c.cfg.Threads)) })
	wg.Go(func() { t.refreshClasses(ctx) })
	wg.Wait()
	return context.Cause(ctx)
}

// counts returns the counts of the running term, or zeros without the Lease.
func (c *Controller) counts() counts {
	if t := c.term.Load(); t != nil {
		return t.state.counts()
	}
	return counts{}
}

// sync deletes the surplus objects of p and, when due, calls the driver and publishes its
// response.
func (t *term) sync(ctx context.Context, p pair) (time.Time, error) {
	log := klog.FromContext(ctx).WithValues("storageClass", p.Class, "segment", p.Segment)
	ctx = klog.NewContext(ctx, log)
	t.dropMissing(p)
	s := t.gather(p)
	plan := decide(s)
	log.V(2).Info("Decided", "getCapacity", plan.getCapacity, "delete", len(plan.remove), "reason", plan.reason)
	var failed error // a failed deletion does not prevent the rest
	for _, obj := range plan.remove {
		failed = errors.Join(failed, t.deleteObject(ctx, obj))
	}
	if !plan.getCapacity {
		t.state.prune(p)
		return plan.next, failed
	}
	if err := pressure.Enter(ctx, "GetCapacity", p.Class); err != nil {
		return time.Time{}, err
	}
	t.state.callStarted(p)
	var object types.UID
	v, err := t.getCapacity(ctx, p, s.class)
	if err == nil {
		object, err = t.publish(ctx, p, v)
	}
	if err != nil {
		t.state.callFailed(p)
		return time.Time{}, err
	}
	next := nextPoll(s.now, t.c.cfg.PollInterval, p, s.rounds)
	t.state.callSucceeded(p, object, next)
	return next, failed
}
