// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvmtest

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/storage-controller/storage-controller/topolvm"
)

// Config describes a node.
type Config struct {
	Driver  string
	Name    string
	Classes []Class
	// Lag is the time after which the capacity annotations follow a change. Zero means 50 ms.
	Lag time.Duration
	// NoCapacity reports no capacity annotations at all.
	NoCapacity bool
}

// Node does what topolvm-node does. Its methods are safe for concurrent use.
type Node struct {
	cfg    Config
	client kubernetes.Interface
	lvs    *topolvm.Client
	host   *Host
	wake   chan struct{} // has an element if work may be due

	mu       sync.Mutex
	cancel   context.CancelFunc
	stopped  chan struct{}
	due      map[string]time.Time // names of LogicalVolumes
	reported map[string]string
	reportAt time.Time // zero: not due
	delay    time.Duration
	failures []int64 // codes for the next tasks
	drop     int     // status updates to drop
	refuse   bool
	failed   map[types.UID]attempt // of expansions
}

// attempt is a failed expansion, which is repeated after a while, or at once if the request changes.
type attempt struct {
	size      topolvm.Bytes
	requested string // annotation
	count     int
	until     time.Time
}

// Start creates the Node and the CSINode with its requests going through cfg, and runs until the end of t.
func Start(t testing.TB, restConfig *rest.Config, cfg Config) *Node {
	t.Helper()
	if cfg.Lag == 0 {
		cfg.Lag = 50 * time.Millisecond
	}
	own := rest.CopyConfig(restConfig)
	own.UserAgent = "topolvm-node/" + cfg.Name
	client, err := kubernetes.NewForConfig(own)
	if err != nil {
		t.Fatal(err)
	}
	lvs, err := topolvm.NewClient(own, cfg.Driver)
	if err != nil {
		t.Fatal(err)
	}
	n := &Node{
		cfg: cfg, client: client, lvs: lvs, host: NewHost(cfg.Driver, lvs, cfg.Classes), wake: make(chan struct{}, 1),
		failed: map[types.UID]attempt{},
	}
	n.Create(t)
	n.Run()
	t.Cleanup(n.Stop)
	return n
}

// Name returns the name of the Node.
func (n *Node) Name() string { return n.cfg.Name }

// Create creates the Node and the CSINode, as a kubelet does on which the driver registers.
func (n *Node) Create(t testing.TB) {
	t.Helper()
	ctx, key := context.WithoutCancel(t.Context()), "topology."+n.cfg.Driver+"/node"
	object := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: n.cfg.Name, Labels: map[string]string{key: n.cfg.Name}, Annotations: n.annotations(),
			Finalizers: []string{n.cfg.Driver + "/node"},
		},
		Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
	}
	if _, err := n.client.CoreV1().Nodes().Create(ctx, object, metav1.CreateOptions{}); err != nil {
		t.Fatalf("creating Node %s: %v", n.cfg.Name, err)
	}
	csiNode := &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: n.cfg.Name}}
	csiNode.Spec.Drivers = []storagev1.CSINodeDriver{{Name: n.cfg.Driver, NodeID: n.cfg.Name, TopologyKeys: []string{key}}}
	_, err := n.client.StorageV1().CSINodes().Create(ctx, csiNode, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatalf("creating CSINode %s: %v", n.cfg.Name, err)
	}
	t.Cleanup(func() { n.Delete(t) })
}

// Delete deletes the Node and the CSINode, and removes the finalizer of the Node.
func (n *Node) Delete(t testing.TB) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	_ = n.client.StorageV1().CSINodes().Delete(ctx, n.cfg.Name, metav1.DeleteOptions{})
	err := n.client.CoreV1().Nodes().Delete(ctx, n.cfg.Name, metav1.DeleteOptions{})
	if err == nil {
		_, err = n.client.CoreV1().Nodes().Patch(ctx, n.cfg.Name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`),
			metav1.PatchOptions{})
	}
	if err != nil && !apierrors.IsNotFound(err) {
		t.Errorf("deleting Node %s: %v", n.cfg.Name, err)
	}
}

// SetReady sets the condition Ready of the Node.
func (n *Node) SetReady(t testing.TB, ready bool) {
	t.Helper()
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	conditions := []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status}}
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": conditions}})
	if err == nil {
		_, err = n.client.CoreV1().Nodes().PatchStatus(t.Context(), n.cfg.Name, patch)
	}
	if err != nil {
		t.Fatalf("patching Node %s: %v", n.cfg.Name, err)
	}
}

// Run starts the work, after [Node.Stop].
func (n *Node) Run() {
	ctx, cancel := context.WithCancel(context.Background())
	n.mu.Lock()
	n.cancel, n.stopped, n.due = cancel, make(chan struct{}), map[string]time.Time{}
	stopped := n.stopped
	n.mu.Unlock()
	informer := cache.NewSharedIndexInformer(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return n.lvs.List(ctx, o) },
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return n.lvs.Watch(ctx, o)
		},
	}, &topolvm.LogicalVolume{}, 0, nil)
	enqueue := func(obj any) {
		if lv, ok := obj.(*topolvm.LogicalVolume); ok && lv.Spec.NodeName == n.cfg.Name {
			n.enqueue(lv.Name, 0)
		}
	}
	_, _ = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: enqueue, UpdateFunc: func(_, obj any) { enqueue(obj) }})
	var running sync.WaitGroup
	running.Go(func() { informer.RunWithContext(ctx) })
	running.Go(func() { n.work(ctx, informer.GetStore()) })
	go func() {
		running.Wait()
		close(stopped)
	}()
}

// Stop ends the work. The LVM volumes remain.
func (n *Node) Stop() {
	n.mu.Lock()
	cancel, stopped := n.cancel, n.stopped
	n.mu.Unlock()
	cancel()
	<-stopped
}

// Delay makes each creation, expansion and removal take that long.
func (n *Node) Delay(d time.Duration) { n.change(func() { n.delay = d }) }

// Fail makes the next creations or expansions fail with these codes of gRPC, one each.
func (n *Node) Fail(codes ...int64) {
	n.change(func() { n.failures = append(n.failures, codes...) })
}

// Recover forgets the failures of [Node.Fail] that have not happened.
func (n *Node) Recover() { n.change(func() { n.failures = nil }) }

// DropStatus drops the next status update after a creation, as if the process had exited before it.
func (n *Node) DropStatus() { n.change(func() { n.drop++ }) }

// RefuseRemoval makes removals of LVM volumes fail, or succeed again.
func (n *Node) RefuseRemoval(refuse bool) { n.change(func() { n.refuse = refuse }) }

// Resize sets the size of a device class in bytes.
func (n *Node) Resize(class string, size int64) { n.change(func() { n.host.Resize(class, size) }) }

// change changes the settings, and has everything reconciled again.
func (n *Node) change(f func()) {
	n.mu.Lock()
	f()
	for name := range n.due {
		n.due[name] = time.Time{}
	}
	n.reportLater()
	n.mu.Unlock()
	n.signal()
}

// Volumes returns the sizes of the LVM volumes in bytes.
func (n *Node) Volumes() map[types.UID]int64 {
	sizes := map[types.UID]int64{}
	for uid, v := range n.host.Volumes() {
		sizes[uid] = v.Size
	}
	return sizes
}

func (n *Node) signal() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// enqueue has a LogicalVolume reconciled after a time.
func (n *Node) enqueue(name string, after time.Duration) {
	n.mu.Lock()
	if at := time.Now().Add(after); after == 0 || n.due[name].IsZero() || at.Before(n.due[name]) {
		n.due[name] = at
	}
	n.mu.Unlock()
	n.signal()
}

// work reconciles one LogicalVolume after the other until ctx ends.
func (n *Node) work(ctx context.Context, store cache.Store) {
	for ctx.Err() == nil {
		name, next := n.next()
		if name == "" {
			select {
			case <-ctx.Done():
			case <-n.wake:
			case <-time.After(next):
			}
			n.report(ctx)
			continue
		}
		obj, exists, _ := store.GetByKey(name)
		if !exists {
			continue
		}
		retry, err := n.reconcile(ctx, obj.(*topolvm.LogicalVolume).DeepCopyObject().(*topolvm.LogicalVolume))
		if err != nil { // mostly a conflict
			retry = 20 * time.Millisecond
		}
		if retry > 0 {
			n.enqueue(name, retry)
		}
	}
}

// next returns a LogicalVolume that is due, or the time until one is.
func (n *Node) next() (string, time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now, wait := time.Now(), time.Hour
	if !n.reportAt.IsZero() {
		wait = n.reportAt.Sub(now)
	}
	for _, name := range slices.Sorted(maps.Keys(n.due)) {
		until := n.due[name].Sub(now)
		if until <= 0 {
			delete(n.due, name)
			return name, 0
		}
		wait = min(wait, until)
	}
	return "", wait
}

// reportLater has the capacity annotations written after the lag. It must be called with the lock held.
func (n *Node) reportLater() {
	if n.reportAt.IsZero() {
		n.reportAt = time.Now().Add(n.cfg.Lag)
	}
}

// annotations returns the capacity annotations.
func (n *Node) annotations() map[string]string {
	if n.cfg.NoCapacity {
		return nil
	}
	return n.host.Capacities()
}

// report writes the capacity annotations if that is due, unless the Node is being deleted.
func (n *Node) report(ctx context.Context) {
	n.mu.Lock()
	due := !n.reportAt.IsZero() && !time.Now().Before(n.reportAt)
	if due {
		n.reportAt = time.Time{}
	}
	n.mu.Unlock()
	if !due {
		return
	}
	values := n.annotations()
	if maps.Equal(values, n.reported) {
		return
	}
	node, err := n.client.CoreV1().Nodes().Get(ctx, n.cfg.Name, metav1.GetOptions{})
	if err != nil || node.DeletionTimestamp != nil {
		return
	}
	data, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": values}})
	if err == nil {
		_, err = n.client.CoreV1().Nodes().Patch(ctx, n.cfg.Name, types.MergePatchType, data, metav1.PatchOptions{})
	}
	if err == nil {
		n.reported = values
	}
}

// reconcile does the next task for lv, and returns when to try again; zero means after the next change.
func (n *Node) reconcile(ctx context.Context, lv *topolvm.LogicalVolume) (retry time.Duration, err error) {
	var source *topolvm.LogicalVolume
	if lv.Spec.Source != "" && lv.Status.VolumeID == "" {
		if source, err = n.lvs.Get(ctx, lv.Spec.Source, metav1.GetOptions{}); err != nil {
			source = nil
		}
	}
	task := n.host.Next(lv, source)
	switch wait := n.backoff(lv); {
	case task == Retry:
		return 100 * time.Millisecond, nil
	case task == Expand && wait > 0:
		return wait, nil
	}
	fault, again := n.begin(task)
	if again > 0 {
		return again, nil
	}
	if (task == Create || task == Expand || task == Remove) && !n.sleep(ctx) {
		return 0, nil
	}
	failed, err := n.host.Do(ctx, task, lv, fault)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.reportLater()
	if task == Expand {
		next := attempt{size: lv.Spec.Size, requested: n.requested(lv), count: n.failed[lv.UID].count + 1}
		backoff := 50 * time.Millisecond << min(next.count, 6)
		next.until = time.Now().Add(backoff)
		n.failed[lv.UID] = next
		if failed {
			retry = backoff
		}
	}
	if fault.Exits {
		retry = 300 * time.Millisecond
	}
	return retry, err
}

// requested returns the annotation that requests an expansion.
func (n *Node) requested(lv *topolvm.LogicalVolume) string {
	return lv.Annotations[n.cfg.Driver+"/resize-requested-at"]
}

// backoff returns the time until the next attempt to expand lv.
func (n *Node) backoff(lv *topolvm.LogicalVolume) time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	last := n.failed[lv.UID]
	if last.size != lv.Spec.Size || last.requested != n.requested(lv) {
		return 0
	}
	return time.Until(last.until)
}

// begin returns the fault that the settings have for a task, or the time after which to try again.
func (n *Node) begin(task Task) (fault Fault, again time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case task == Remove && n.refuse:
		return fault, time.Second
	case (task == Create || task == Expand) && len(n.failures) > 0:
		fault.Code = n.failures[0]
		n.failures = n.failures[1:]
	case task == Create && n.drop > 0:
		fault.Exits = true
		n.drop--
	}
	return fault, 0
}

// sleep waits for the time that a change of LVM takes, and returns false if ctx ends before.
func (n *Node) sleep(ctx context.Context) bool {
	n.mu.Lock()
	d := n.delay
	n.mu.Unlock()
	if d == 0 {
		return true
	}
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
