// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"

	"github.com/storage-controller/storage-controller/internal/keylock"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

func TestMain(m *testing.M) {
	kubetest.Parallel(4)
	kubetest.Main(m)
}

// shortGrace replaces the graces of minutes. checkInterval is much shorter: after shortGrace the
// controller has checked every lost node several times.
const (
	shortGrace    = 2 * time.Second
	checkInterval = 300 * time.Millisecond
)

const (
	protectionOfClaims  = "kubernetes.io/pvc-protection"
	protectionOfVolumes = "kubernetes.io/pv-protection"
)

// fixture holds a driver with one node that stays, the real API server and the controller. Names of
// cluster-scoped objects and of the driver begin with the namespace: scenarios run in parallel.
type fixture struct {
	*testing.T
	cp            *kubetest.ControlPlane
	client        kubernetes.Interface // of the test, as an administrator
	ns            string
	driver, key   string
	optOut        string // annotation by which objects opt in or out
	cfg           Config
	user          *rest.Config // of the controller
	watch         *rest.Config // of its informers
	locks         keylock.Locks[string]
	withResources bool // the driver has custom resources that belong to nodes
	// resourcesCached is closed when their cache is complete; nil: from the start.
	resourcesCached signal
	requests
	process // that was started last
}

// process is one running controller.
type process struct {
	c         *Controller
	reg       *prometheus.Registry
	events    record.EventRecorder
	informers *kube.Informers
	stop      func() // as SIGTERM does
}

// scenario returns a fixture in mode claims for all volumes, with graces of seconds. change sets what
// differs. The controller does not run yet.
func scenario(t *testing.T, change func(f *fixture)) *fixture {
	t.Helper()
	t.Parallel()
	f := &fixture{T: t, cp: kubetest.Get(t)}
	f.client, f.ns, f.user, f.watch = f.cp.Client(), kubetest.Namespace(t, f.cp), f.cp.Config(), f.cp.Config()
	f.driver = f.ns + ".example.com"
	f.key, f.optOut = "topology."+f.driver+"/node", CleanupAnnotation(f.driver)
	s := DefaultSettings()
	s.NodeFinalizer, s.NodeFinalizerMode, s.NodeDeleteGrace, s.NodeFinalizerWaitForOthers = f.driver+"/node", FinalizerRemove, 0, false
	s.NodeCleanup, s.NodeCleanupScope, s.NodeMissingGrace, s.PVReleaseGrace = ModeClaims, ScopeAll, shortGrace, shortGrace
	s.CheckInterval = checkInterval
	f.cfg = Config{Settings: s, Workers: 4, Timeout: 15 * time.Second, RetryIntervalStart: 100 * time.Millisecond,
		RetryIntervalMax: time.Second}
	if change != nil {
		change(f)
	}
	_, err := f.client.StorageV1().CSIDrivers().Create(t.Context(), &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: f.driver}},
		metav1.CreateOptions{})
	f.must(err)
	f.class("c", nil)
	f.node("keep")
	f.Cleanup(f.removeNodes)
	f.Cleanup(f.checkWrites)
	f.Cleanup(f.explain)
	return f
}

// explain logs the last requests of the controller before a failure.
func (f *fixture) explain() {
	if sent := f.allRequests(); f.Failed() {
		for _, s := range sent[max(0, len(sent)-30):] {
			f.Logf("%s %s", s.at.Format(time.StampMilli), s.line)
		}
	}
}

// removeNodes removes the nodes with their finalizers, because other scenarios list them.
func (f *fixture) removeNodes() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	nodes, err := f.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return
	}
	for _, n := range nodes.Items {
		if strings.HasPrefix(n.Name, f.ns+"-") {
			_ = f.client.CoreV1().Nodes().Delete(ctx, n.Name, metav1.DeleteOptions{})
			_, _ = f.client.CoreV1().Nodes().Patch(ctx, n.Name, types.MergePatchType, []byte(noFinalizers), metav1.PatchOptions{})
			_ = f.client.StorageV1().CSINodes().Delete(ctx, n.Name, metav1.DeleteOptions{})
		}
	}
}

const noFinalizers = `{"metadata":{"finalizers":null}}`

func (f *fixture) must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

// name returns the name of a cluster-scoped object of this scenario.
func (f *fixture) name(s string) string { return f.ns + "-" + s }

// start runs a controller until stop, and waits until its term has begun.
func (f *fixture) start() {
	f.Helper()
	before := f.holder(f.Context())
	f.process = f.run(f.user)
	if f.cfg.Deletes() {
		f.eventually("the controller holds the records", func(ctx context.Context) error {
			if h := f.holder(ctx); h == before {
				return fmt.Errorf("they are held by %q", h)
			}
			return nil
		})
	}
}

// holder returns the term that writes the records.
func (f *fixture) holder(ctx context.Context) string {
	cm, err := f.client.CoreV1().ConfigMaps(f.ns).Get(ctx, ConfigMapName(f.driver), metav1.GetOptions{})
	if err != nil {
		return ""
	}
	return cm.Annotations[AnnotationHolder]
}

// run starts a controller for user, beside others that may run already.
func (f *fixture) run(user *rest.Config) process {
	f.Helper()
	p := f.prepare(user)
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(f.Context()))
	done := make(chan error, 1)
	go func() { done <- p.c.Run(ctx) }()
	end := p.stop
	p.stop = sync.OnceFunc(func() {
		over := errors.New("the process was stopped")
		cancel(over)
		if err := <-done; !errors.Is(err, over) {
			f.Errorf("the controller returned %v", err)
		}
		end()
	})
	f.Cleanup(p.stop)
	return p
}

// prepare returns a controller whose informers run, as on a standby.
func (f *fixture) prepare(user *rest.Config) process {
	f.Helper()
	user = kubetest.Proxy(f.T, user, f.record)
	api, err := kubernetes.NewForConfig(user)
	f.must(err)
	resources, err := f.customResources(user)
	f.must(err)
	watches, err := kubernetes.NewForConfig(f.watch)
	f.must(err)
	meta, err := metadata.NewForConfig(f.watch)
	f.must(err)
	p := process{reg: prometheus.NewRegistry(), informers: kube.NewInformers(watches, meta, f.driver)}
	p.informers.Retain(kube.RetainedFields{Nodes: true, Claims: true, ClaimAnnotations: []string{f.optOut}})
	broadcaster := record.NewBroadcaster()
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: f.client.CoreV1().Events("")})
	p.events = broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: f.driver})
	p.c, err = New(f.cfg, Deps{
		Driver: f.driver, Client: api, Resources: resources, Informers: p.informers, Locks: &f.locks, Events: p.events, Registry: p.reg,
		Queues: workloop.NewMetrics(p.reg), Namespace: f.ns,
	})
	f.must(err)
	watch, endWatch := context.WithCancel(context.WithoutCancel(f.Context()))
	p.informers.Start(watch)
	p.stop = sync.OnceFunc(func() {
		endWatch()
		p.informers.Shutdown()
		broadcaster.Shutdown()
	})
	f.Cleanup(p.stop)
	return p
}

// proxied sends the requests of the controller, apart from those of its informers, through hook.
func (f *fixture) proxied(hook func(w http.ResponseWriter, r *http.Request, pass http.Handler)) {
	f.Helper()
	f.user = kubetest.Proxy(f.T, f.user, hook)
}

func (f *fixture) eventually(what string, check func(ctx context.Context) error) {
	f.Helper()
	kubetest.Eventually(f.T, what, check)
}

// passed waits until d has passed since a time, for assertions about what did not happen.
func (f *fixture) passed(since time.Time, d time.Duration) {
	f.Helper()
	f.eventually(fmt.Sprintf("%v have passed", d), func(context.Context) error {
		if left := time.Until(since.Add(d)); left > 0 {
			return fmt.Errorf("%v are left", left)
		}
		return nil
	})
}

// stays checks that objects are not changed for d, and several checks of the controller.
func (f *fixture) stays(d time.Duration, objects ...metav1.Object) {
	f.Helper()
	f.passed(time.Now(), d)
	f.untouched(objects...)
}

// cached waits until the caches of the controller have the object that get returns, or do not have it.
func cached[T metav1.Object](f *fixture, informer kube.Informer[T], key string, check func(obj T, exists bool) bool) {
	f.Helper()
	f.eventually("the cache is current for "+key, func(context.Context) error {
		if obj, ok := informer.Get(key); !check(obj, ok) {
			return fmt.Errorf("it has %v", obj)
		}
		return nil
	})
}

// observed waits until the caches have a bound pair and the nodes that exist.
func (f *fixture) observed(name string) {
	f.Helper()
	cached(f, f.informers.Volumes(), f.name("pv-"+name), func(pv *corev1.PersistentVolume, ok bool) bool {
		return ok && pv.Status.Phase == corev1.VolumeBound
	})
	cached(f, f.informers.Claims(), f.ns+"/"+name, func(_ *corev1.PersistentVolumeClaim, ok bool) bool { return ok })
	f.observedNodes()
}

// observedNodes waits until the caches have every Node and CSINode as it is.
func (f *fixture) observedNodes() {
	f.Helper()
	nodes, err := f.client.CoreV1().Nodes().List(f.Context(), metav1.ListOptions{})
	f.must(err)
	for _, n := range nodes.Items {
		if strings.HasPrefix(n.Name, f.ns+"-") {
			cached(f, f.informers.FullNodes(), n.Name,
				func(is *corev1.Node, ok bool) bool { return ok && is.ResourceVersion == n.ResourceVersion })
			cached(f, f.informers.CSINodes(), n.Name, func(_ *storagev1.CSINode, _ bool) bool { return true })
		}
	}
}

// observedDeletion waits until the caches do not have a node.
func (f *fixture) observedDeletion(node string) {
	f.Helper()
	cached(f, f.informers.FullNodes(), f.name(node), func(_ *corev1.Node, ok bool) bool { return !ok })
	cached(f, f.informers.CSINodes(), f.name(node), func(_ *storagev1.CSINode, ok bool) bool { return !ok })
}
