// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvmtest

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strconv"
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

// Extent is the unit of sizes in bytes.
const Extent = 4 << 20

// gRPC codes that topolvm-node writes to the status.
const (
	codeUnimplemented = 12
	codeInternal      = 13
	codeExhausted     = 8
)

// Class is a device class of a node. The first class of a node is its default class.
type Class struct {
	Name string
	Thin bool
	Size int64 // bytes
}

// Classes returns a thick class ssd and a thin class thin of 100 GiB each.
func Classes() []Class {
	return []Class{{Name: "ssd", Size: 100 << 30}, {Name: "thin", Thin: true, Size: 100 << 30}}
}

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

// volume is an LVM volume.
type volume struct {
	class string
	size  int64
}

// Node does what topolvm-node does. Its methods are safe for concurrent use.
type Node struct {
	cfg    Config
	client kubernetes.Interface
	lvs    *topolvm.Client
	wake   chan struct{} // has an element if work may be due

	mu       sync.Mutex
	cancel   context.CancelFunc
	stopped  chan struct{}
	due      map[string]time.Time // names of LogicalVolumes
	volumes  map[types.UID]volume
	sizes    map[string]int64 // of classes
	reported map[string]string
	reportAt time.Time // zero: not due
	delay    time.Duration
	failures []topolvm.Status // for the next steps
	drop     int              // status updates to drop
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
		cfg: cfg, client: client, lvs: lvs, wake: make(chan struct{}, 1), volumes: map[types.UID]volume{}, sizes: map[string]int64{},
		failed: map[types.UID]attempt{},
	}
	for _, c := range cfg.Classes {
		n.sizes[c.Name] = c.Size
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
	n.change(func() {
		for _, code := range codes {
			n.failures = append(n.failures, topolvm.Status{Code: code, Message: "as told"})
		}
	})
}

// Recover forgets the failures of [Node.Fail] that have not happened.
func (n *Node) Recover() { n.change(func() { n.failures = nil }) }

// DropStatus drops the next status update after a creation, as if the process had exited before it.
func (n *Node) DropStatus() { n.change(func() { n.drop++ }) }

// RefuseRemoval makes removals of LVM volumes fail, or succeed again.
func (n *Node) RefuseRemoval(refuse bool) { n.change(func() { n.refuse = refuse }) }

// Resize sets the size of a device class in bytes.
func (n *Node) Resize(class string, size int64) { n.change(func() { n.sizes[class] = size }) }

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
	n.mu.Lock()
	defer n.mu.Unlock()
	sizes := map[types.UID]int64{}
	for uid, v := range n.volumes {
		sizes[uid] = v.size
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
	n.mu.Lock()
	defer n.mu.Unlock()
	values := map[string]string{}
	if n.cfg.NoCapacity {
		return values
	}
	for i, c := range n.cfg.Classes {
		free := strconv.FormatInt(n.free(c.Name), 10)
		values["capacity."+n.cfg.Driver+"/"+c.Name] = free
		if i == 0 {
			values["capacity."+n.cfg.Driver+"/00default"] = free
		}
	}
	return values
}

// free returns the free bytes of a class. It must be called with the lock held.
func (n *Node) free(class string) int64 {
	free := n.sizes[class]
	for _, v := range n.volumes {
		if v.class == class {
			free -= v.size
		}
	}
	return max(0, free)
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
	if n.patchMetadata(ctx, map[string]any{"annotations": values}, func(data []byte) error {
		_, err := n.client.CoreV1().Nodes().Patch(ctx, n.cfg.Name, types.MergePatchType, data, metav1.PatchOptions{})
		return err
	}) == nil {
		n.reported = values
	}
}

func (n *Node) patchMetadata(_ context.Context, metadata map[string]any, patch func([]byte) error) error {
	data, err := json.Marshal(map[string]any{"metadata": metadata})
	if err != nil {
		return err
	}
	return patch(data)
}

// patch patches the metadata of a LogicalVolume.
func (n *Node) patch(ctx context.Context, name string, metadata map[string]any) error {
	return n.patchMetadata(ctx, metadata, func(data []byte) error {
		_, err := n.lvs.Patch(ctx, name, types.MergePatchType, data, metav1.PatchOptions{})
		return err
	})
}

const createdBy = "app.kubernetes.io/created-by"

// reconcile does the next step for lv, and returns when to try again; zero means after the next change.
func (n *Node) reconcile(ctx context.Context, lv *topolvm.LogicalVolume) (retry time.Duration, err error) {
	finalizer := n.cfg.Driver + "/logicalvolume"
	held := slices.Contains(lv.Finalizers, finalizer)
	_, ignored := lv.Annotations[n.cfg.Driver+"/pendingdeletion"]
	switch {
	case ignored, lv.DeletionTimestamp != nil && !held:
		return 0, nil
	case lv.DeletionTimestamp != nil:
		return n.remove(ctx, lv, finalizer)
	case !held:
		return 0, n.patch(ctx, lv.Name, map[string]any{"finalizers": append(lv.Finalizers, finalizer), "uid": lv.UID})
	case lv.Labels[createdBy] == "":
		return 0, n.patch(ctx, lv.Name, map[string]any{"labels": map[string]string{createdBy: "topolvm-controller"}})
	case lv.Status.VolumeID == "":
		return n.create(ctx, lv)
	case lv.Spec.Size > lv.Status.CurrentSize:
		return n.expand(ctx, lv)
	}
	return 0, nil
}

func (n *Node) remove(ctx context.Context, lv *topolvm.LogicalVolume, finalizer string) (retry time.Duration, err error) {
	delay, refuse, _ := n.step(false)
	if refuse {
		return time.Second, nil
	}
	if !sleep(ctx, delay) {
		return 0, nil
	}
	n.mu.Lock()
	delete(n.volumes, lv.UID)
	n.reportLater()
	n.mu.Unlock()
	others := slices.DeleteFunc(lv.Finalizers, func(f string) bool { return f == finalizer })
	err = n.patch(ctx, lv.Name, map[string]any{"finalizers": others, "uid": lv.UID})
	if apierrors.IsNotFound(err) {
		return 0, nil
	}
	return 0, err
}

// step returns the settings of a step, and takes the next failure if the step may fail.
func (n *Node) step(mayFail bool) (delay time.Duration, refuse bool, failure *topolvm.Status) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if mayFail && len(n.failures) > 0 {
		failure = &n.failures[0]
		n.failures = n.failures[1:]
	}
	return n.delay, n.refuse, failure
}

func (n *Node) create(ctx context.Context, lv *topolvm.LogicalVolume) (retry time.Duration, err error) {
	n.mu.Lock()
	existing, exists := n.volumes[lv.UID]
	n.mu.Unlock()
	if exists { // the status update got lost: as topolvm-node does, in two updates
		lv.Status = topolvm.Status{VolumeID: string(lv.UID)}
		updated, err := n.lvs.UpdateStatus(ctx, lv, metav1.UpdateOptions{})
		if err != nil {
			return 0, err
		}
		updated.Status.CurrentSize = topolvm.Bytes(existing.size)
		_, err = n.lvs.UpdateStatus(ctx, updated, metav1.UpdateOptions{})
		return 0, err
	}
	if lv.Status.Code != 0 {
		return 0, nil // no second attempt
	}
	delay, _, failure := n.step(true)
	if !sleep(ctx, delay) {
		return 0, nil
	}
	if failure == nil {
		if failure, err = n.allocate(ctx, lv); err != nil {
			return 100 * time.Millisecond, nil
		}
	}
	if failure != nil {
		lv.Status.Code, lv.Status.Message = failure.Code, failure.Message
		_, err := n.lvs.UpdateStatus(ctx, lv, metav1.UpdateOptions{})
		return 0, err
	}
	n.mu.Lock()
	drop := n.drop > 0
	n.drop -= min(n.drop, 1)
	n.mu.Unlock()
	if drop {
		return 300 * time.Millisecond, nil
	}
	lv.Status = topolvm.Status{VolumeID: string(lv.UID), CurrentSize: topolvm.Bytes(n.Volumes()[lv.UID])}
	_, err = n.lvs.UpdateStatus(ctx, lv, metav1.UpdateOptions{})
	return 0, err
}

// errNoSource is a failure that topolvm-node does not report.
var errNoSource = errors.New("the source does not exist, or is larger")

// allocate creates the LVM volume of lv, or returns the failure that topolvm-node reports.
func (n *Node) allocate(ctx context.Context, lv *topolvm.LogicalVolume) (*topolvm.Status, error) {
	name := lv.Spec.DeviceClass
	if name == "" && len(n.cfg.Classes) > 0 {
		name = n.cfg.Classes[0].Name
	}
	i := slices.IndexFunc(n.cfg.Classes, func(c Class) bool { return c.Name == name })
	if i < 0 {
		return &topolvm.Status{Code: codeInternal, Message: "failed to check volume existence"}, nil
	}
	if lv.Spec.Source != "" {
		if !n.cfg.Classes[i].Thin {
			return &topolvm.Status{Code: codeUnimplemented, Message: "Thick snapshots are not implemented yet"}, nil
		}
		source, err := n.lvs.Get(ctx, lv.Spec.Source, metav1.GetOptions{})
		if err != nil || source.Status.CurrentSize > lv.Spec.Size {
			return nil, errNoSource
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	size := roundUp(int64(lv.Spec.Size))
	if n.free(name) < size {
		return &topolvm.Status{Code: codeExhausted, Message: "no enough space left on VG"}, nil
	}
	n.volumes[lv.UID] = volume{name, size}
	n.reportLater()
	return nil, nil
}

func (n *Node) expand(ctx context.Context, lv *topolvm.LogicalVolume) (retry time.Duration, err error) {
	n.mu.Lock()
	last := n.failed[lv.UID]
	now := attempt{size: lv.Spec.Size, requested: lv.Annotations[n.cfg.Driver+"/resize-requested-at"]}
	n.mu.Unlock()
	if wait := time.Until(last.until); wait > 0 && last.size == now.size && last.requested == now.requested {
		return wait, nil
	}
	delay, _, failure := n.step(true)
	if !sleep(ctx, delay) {
		return 0, nil
	}
	n.mu.Lock()
	v, size := n.volumes[lv.UID], roundUp(int64(lv.Spec.Size))
	if failure == nil && n.free(v.class) < size-v.size {
		failure = &topolvm.Status{Code: codeExhausted, Message: "no enough space left on VG"}
	}
	if failure == nil {
		v.size = size
		n.volumes[lv.UID] = v
		n.reportLater()
	}
	now.count = last.count + 1
	backoff := 50 * time.Millisecond << min(now.count, 6)
	now.until = time.Now().Add(backoff)
	n.failed[lv.UID] = now
	n.mu.Unlock()
	if failure != nil {
		lv.Status.Code, lv.Status.Message, retry = failure.Code, failure.Message, backoff
	} else {
		lv.Status.Code, lv.Status.Message, lv.Status.CurrentSize = 0, "", topolvm.Bytes(size)
	}
	_, err = n.lvs.UpdateStatus(ctx, lv, metav1.UpdateOptions{})
	return retry, err
}

func roundUp(size int64) int64 { return (size + Extent - 1) / Extent * Extent }

// sleep waits, and returns false if ctx ends before.
func sleep(ctx context.Context, d time.Duration) bool {
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
