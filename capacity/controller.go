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
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Capacities is what is called of the driver.
type Capacities interface {
	GetCapacity(context.Context, *csi.GetCapacityRequest, ...grpc.CallOption) (*csi.GetCapacityResponse, error)
}

// Deps is what the program hands to the controller. All fields but Owner and Topology are
// required.
type Deps struct {
	Driver csiclient.Driver
	// Client is for the objects alone: it has the rate limit of [Config].
	Client    kubernetes.Interface
	Informers *kube.Informers
	CSI       Capacities
	// Ready returns when the driver can be called.
	Ready    func(context.Context) error
	Registry prometheus.Registerer
	Queues   *workloop.Metrics
	// Namespace is that of the objects.
	Namespace string
	// Owner is the reference that the objects get; nil for none. See [FindOwner].
	Owner *metav1.OwnerReference
	// Beta tells that the API server has only v1beta1 of the objects. See [Beta].
	Beta bool
	// Topology is where this node is, in a node deployment (CSI spec, "NodeGetInfo").
	Topology map[string]string
}

// apiGrace is what a drain allows for the write after the last call.
const apiGrace = 10 * time.Second

// Controller publishes the capacity of a driver.
type Controller struct {
	cfg       Config
	deps      Deps
	publisher publisher
	objects   objects

	published kube.Informer[*storagev1.CSIStorageCapacity]
	classes   kube.Informer[*storagev1.StorageClass]
	nodes     kube.Informer[metav1.Object]      // not in a node deployment
	csiNodes  kube.Informer[*storagev1.CSINode] // likewise

	// idle is why nothing is published, whatever happens; "" when it is.
	idle string

	current atomic.Pointer[term] // nil between terms
}

// New checks cfg and asks for the watches that the controller needs. Nothing runs
// before [Controller.Run].
func New(cfg Config, deps Deps) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	c := &Controller{cfg: cfg, deps: deps, publisher: publisher{labels: labels(deps.Driver.Name, ""), owner: deps.Owner}}
	newMetrics(deps.Registry, c.counts)
	switch {
	case !deps.Driver.Controller.GetCapacity:
		c.idle = "the driver does not report the controller capability GET_CAPACITY"
	case cfg.NodeDeployment && len(deps.Topology) == 0:
		c.idle = "the driver does not say where its node is (NodeGetInfo has no accessible_topology), so that what is on one node would be published for all of them"
	case cfg.NodeDeployment:
		if err := validSegment(deps.Topology); err != nil {
			c.idle = "NodeGetInfo has an accessible_topology that cannot be the labels of a node: " + err.Error()
		}
	}
	if c.idle != "" {
		return c, nil
	}
	if cfg.NodeDeployment {
		c.publisher.labels = labels(deps.Driver.Name, cfg.NodeName)
	} else {
		c.nodes, c.csiNodes = deps.Informers.Nodes(), deps.Informers.CSINodes()
	}
	c.classes = deps.Informers.Classes()
	c.published = deps.Informers.Capacities(deps.Namespace, c.publisher.labels, deps.Beta)
	c.objects = newObjects(deps.Client, deps.Namespace, deps.Beta)
	return c, nil
}

// term is the work between winning a Lease and losing it. Nothing that it
// remembers outlives it: another replica may have worked meanwhile.
type term struct {
	c         *Controller
	world     *world
	published *kube.MutationCache[*storagev1.CSIStorageCapacity]
	queue     *workloop.Loop[item]
	changed   changedClasses
}

// Run works until ctx ends, and returns after the last worker has stopped. It may
// be called again then.
func (c *Controller) Run(ctx context.Context) (err error) {
	if c.idle != "" {
		klog.FromContext(ctx).Error(nil, "No capacity is published", "reason", c.idle)
		<-ctx.Done()
		return context.Cause(ctx)
	}
	t := &term{c: c, world: newWorld(c.deps.Driver.Name, c.cfg, time.Now)}
	if t.published, err = kube.NewMutationCache(c.published); err != nil {
		return err
	}
	defer t.published.Close()
	t.queue = workloop.NewRanked(workloop.Config{
		Name: "csistoragecapacity", RetryStart: c.cfg.RetryIntervalStart, RetryMax: c.cfg.RetryIntervalMax,
		WaitReady: c.deps.Ready, GracePeriod: c.cfg.Timeout + apiGrace,
	}, c.deps.Queues, t.sync, t.world.rank)
	defer t.queue.Stop()
	t.changed.wake = make(chan struct{}, 1)
	registrations := t.register()
	defer registrations.Remove()
	// Without all caches an object would go for a node or a class that is merely late.
	if err := registrations.Wait(ctx, "capacity caches"); err != nil {
		return err
	}
	c.current.Store(t)
	defer c.current.Store(nil)
	var wg sync.WaitGroup
	wg.Go(func() { t.queue.Run(ctx, c.cfg.Threads) })
	wg.Go(func() { t.refreshClasses(ctx) })
	wg.Wait()
	return context.Cause(ctx)
}

// counts is that of the running term; nothing between terms.
func (c *Controller) counts() counts {
	if t := c.current.Load(); t != nil {
		return t.world.counts()
	}
	return counts{}
}

// sync brings the objects of one item to what they should be.
func (t *term) sync(ctx context.Context, i item) (time.Time, error) {
	log := klog.FromContext(ctx).WithValues("storageClass", i.Class, "segment", i.Segment)
	ctx = klog.NewContext(ctx, log)
	s := t.gather(i)
	p := decide(s)
	log.V(2).Info("Decided", "ask", p.ask, "remove", len(p.remove), "reason", p.reason)
	var left error // what stays although it should not does not keep the rest from being right
	for _, obj := range p.remove {
		left = errors.Join(left, t.remove(ctx, obj))
	}
	switch {
	case !p.ask && s.there:
		return p.next, left
	case !p.ask:
		t.world.vacate(i.Segment)
		if p.next.IsZero() && s.until.After(s.now) {
			p.next = s.until
		}
		return p.next, left
	}
	t.world.asking(i)
	a, err := t.ask(ctx, i, s.class)
	if err == nil {
		err = t.publish(ctx, i, a)
	}
	if err != nil {
		t.world.failed(i)
		return time.Time{}, err
	}
	next := nextPoll(s.now, t.c.cfg.PollInterval, i, s.rounds)
	t.world.answered(i, next)
	return next, left
}

// gather is what is known of i, own writes that no event has told of yet included.
func (t *term) gather(i item) snapshot {
	names, s := t.world.look(i)
	for name, uid := range names {
		obj, ok := t.published.Get(t.c.deps.Namespace + "/" + name)
		if !ok || itemOf(obj) != i {
			t.world.forget(i, name, uid)
			s.refresh = true // it is needed again, and no event tells
			continue
		}
		s.objects = append(s.objects, obj)
	}
	return s
}

// register has the events of all watches fill the queue.
func (t *term) register() *kube.Registrations {
	registrations := &kube.Registrations{}
	add := registrations.Add
	if t.c.cfg.NodeDeployment {
		t.world.setSegment(segmentOf(t.c.deps.Topology))
	} else {
		add(t.c.nodes.Handle(kube.Handlers[metav1.Object]{
			Add:    func(n metav1.Object) { t.add(t.world.setNode(n.GetName(), n.GetLabels(), true)) },
			Update: func(_, n metav1.Object) { t.add(t.world.setNode(n.GetName(), n.GetLabels(), true)) },
			Delete: func(n metav1.Object) { t.add(t.world.setNode(n.GetName(), nil, false)) },
		}))
		add(t.c.csiNodes.Handle(kube.Handlers[*storagev1.CSINode]{
			Add:    func(n *storagev1.CSINode) { t.add(t.world.setCSINode(n.Name, n)) },
			Update: func(_, n *storagev1.CSINode) { t.add(t.world.setCSINode(n.Name, n)) },
			Delete: func(n *storagev1.CSINode) { t.add(t.world.setCSINode(n.Name, nil)) },
		}))
	}
	add(t.c.classes.Handle(kube.Handlers[*storagev1.StorageClass]{
		Add: func(class *storagev1.StorageClass) { t.add(t.world.setClass(class)) },
		Update: func(old, class *storagev1.StorageClass) {
			if old.ResourceVersion != class.ResourceVersion {
				t.add(t.world.setClass(class))
			}
		},
		Delete: func(class *storagev1.StorageClass) { t.add(t.world.removeClass(class.Name)) },
	}))
	add(t.c.published.Handle(kube.Handlers[*storagev1.CSIStorageCapacity]{
		Add: func(obj *storagev1.CSIStorageCapacity) { t.add(t.world.seen(obj)) },
		Update: func(old, obj *storagev1.CSIStorageCapacity) {
			if old.UID == obj.UID {
				return // what an object is for never changes; what it says is compared at the next poll
			}
			t.add(t.world.lost(old))
			t.add(t.world.seen(obj))
		},
		Delete: func(obj *storagev1.CSIStorageCapacity) { t.add(t.world.lost(obj)) },
	}))
	return registrations
}

func (t *term) add(items []item) {
	for _, i := range items {
		t.queue.Add(i)
	}
}

// refresh has the driver asked again about items, but those that it has just failed for.
func (t *term) refresh(items []item) {
	for _, i := range t.world.refresh(items) {
		t.queue.Resync(i)
	}
}
