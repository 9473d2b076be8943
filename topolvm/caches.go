// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"cmp"
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// byValue is an index of Nodes: the value of the topology label.
const byValue = "topology-value"

// caches holds what the service reads without requests, and notifies the calls that wait for a change.
type caches struct {
	names           names
	lvs             *kube.MutationCache[*LogicalVolume]
	volumes         kube.Informer[*LogicalVolume] // without own writes
	nodes           kube.Informer[*corev1.Node]
	drivers         kube.Informer[*storagev1.CSIDriver]
	handlers        []cache.DoneChecker // done after the first lists
	waits           waits
	deletions       deletions
	capacityChanged func(node, class string)
	retryClaim      func(claim string)
}

// newCaches registers the informers and handlers. The informers must not have been started.
func newCaches(ctx context.Context, n names, client *Client, d Deps) (*caches, error) {
	c := &caches{names: n, capacityChanged: d.CapacityChanged, retryClaim: d.RetryClaim}
	c.volumes = kube.Custom[*LogicalVolume](d.Informers, source(n, client))
	c.lvs = kube.NewMutationCache(c.volumes)
	c.nodes, c.drivers = d.Informers.FullNodes(), d.Informers.Drivers()
	err := c.nodes.AddIndex(byValue, func(node *corev1.Node) string { return node.Labels[n.topologyKey()] })
	if err != nil {
		return nil, err
	}
	lvs, err := c.volumes.Handle(kube.Handlers[*LogicalVolume]{
		Add: c.volumeChanged, Update: func(_, lv *LogicalVolume) { c.volumeChanged(lv) },
		Delete: func(lv *LogicalVolume) {
			c.deletions.add(lv)
			c.waits.notify(volumeKey(lv.Name))
			c.settled(lv)
		},
	})
	if err != nil {
		return nil, err
	}
	nodes, err := c.nodes.Handle(kube.Handlers[*corev1.Node]{
		Add:    func(node *corev1.Node) { c.nodeChanged(ctx, nil, node) },
		Update: func(before, after *corev1.Node) { c.nodeChanged(ctx, before, after) },
		Delete: func(node *corev1.Node) { c.nodeChanged(ctx, node, nil) },
	})
	c.handlers = []cache.DoneChecker{lvs.Synced, nodes.Synced}
	return c, err
}

func (c *caches) volumeChanged(lv *LogicalVolume) {
	c.waits.notify(volumeKey(lv.Name))
	if lv.Status != (Status{}) {
		c.settled(lv)
	}
}

// settled has the claim of lv retried if its creation was left: topolvm-node has created the LVM volume, or failed, or lv was deleted.
func (c *caches) settled(lv *LogicalVolume) {
	if c.waits.takeLeft(lv.Name) && c.retryClaim != nil && lv.Claim() != "" {
		c.retryClaim(lv.Claim())
	}
}

// node returns the Node with a topology value, or nil. If there are several, it is one that is not being deleted, the first by name.
func (c *caches) node(value string) *corev1.Node {
	found := c.nodes.ByIndex(byValue, value)
	if len(found) == 0 {
		named, _ := c.nodes.Get(value)
		return named
	}
	return slices.MinFunc(found, func(a, b *corev1.Node) int {
		if (a.DeletionTimestamp == nil) != (b.DeletionTimestamp == nil) {
			if a.DeletionTimestamp == nil {
				return -1
			}
			return 1
		}
		return cmp.Compare(a.Name, b.Name)
	})
}

// withID returns the LogicalVolumes with this UID or volume ID, apart from those that are known to be deleted.
func (c *caches) withID(id string) []*LogicalVolume {
	return slices.DeleteFunc(c.lvs.ByIndex(byID, kube.Bucket(id)), func(lv *LogicalVolume) bool {
		return !lv.HasID(id)
	})
}

// waitKey is what calls wait for: a LogicalVolume by its name, or a Node by its topology value.
type waitKey struct{ kind, name string }

func volumeKey(name string) waitKey { return waitKey{"volume", name} }
func nodeKey(value string) waitKey  { return waitKey{"node", value} }

// waits holds the calls that wait for changes. The zero value is ready for use.
type waits struct {
	mu      sync.Mutex
	waiting map[waitKey]map[chan struct{}]bool
	left    map[string]bool // names of LogicalVolumes whose creation was answered before topolvm-node has done its work
}

// leave records that the creation of a LogicalVolume was left, until takeLeft. It returns false if that is recorded already.
func (w *waits) leave(name string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.left == nil {
		w.left = map[string]bool{}
	}
	before := w.left[name]
	w.left[name] = true
	return !before
}

// takeLeft reports whether the creation of a LogicalVolume was left, and forgets it.
func (w *waits) takeLeft(name string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	left := w.left[name]
	delete(w.left, name)
	return left
}

// add makes changed receive an element after each change of key, unless it has one.
func (w *waits) add(key waitKey, changed chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waiting == nil {
		w.waiting = map[waitKey]map[chan struct{}]bool{}
	}
	if w.waiting[key] == nil {
		w.waiting[key] = map[chan struct{}]bool{}
	}
	w.waiting[key][changed] = true
}

// remove ends an add.
func (w *waits) remove(key waitKey, changed chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.waiting[key], changed)
	if len(w.waiting[key]) == 0 {
		delete(w.waiting, key)
	}
}

// notify wakes the calls that wait for key.
func (w *waits) notify(key waitKey) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for changed := range w.waiting[key] {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
}

// maxDeletions is the number of remembered deletions.
const maxDeletions = 10_000

// deletions remembers the names of the last LogicalVolumes whose deletion the watch has shown, by UID. The zero value is ready for use.
type deletions struct {
	mu     sync.Mutex
	names  map[types.UID]string
	oldest []types.UID // first in, first out
}

func (d *deletions) add(lv metav1.Object) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.names == nil {
		d.names = map[types.UID]string{}
	}
	if _, known := d.names[lv.GetUID()]; known {
		return
	}
	if len(d.oldest) == maxDeletions {
		delete(d.names, d.oldest[0])
		d.oldest = d.oldest[1:]
	}
	d.names[lv.GetUID()] = lv.GetName()
	d.oldest = append(d.oldest, lv.GetUID())
}

// name returns the name that the deleted LogicalVolume had, or false if its deletion is not remembered.
func (d *deletions) name(id string) (string, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	name, ok := d.names[types.UID(id)]
	return name, ok
}

// lookup finds LogicalVolumes that the cache lacks by their UID, with one list for all calls that wait for it.
type lookup struct {
	// list returns the names of all LogicalVolumes by UID, from a live read.
	list func(context.Context) (map[types.UID]string, error)

	mu      sync.Mutex
	running bool          // run is
	next    *lookupResult // of the list that has not begun; nil: no call waits for one
}

// lookupResult is the result of a list. The fields are set when done is closed.
type lookupResult struct {
	done  chan struct{}
	names map[types.UID]string
	err   error
}

// name returns the name of the LogicalVolume with this UID, or "" if there was none after the begin of the call.
func (l *lookup) name(ctx context.Context, id string) (string, error) {
	l.mu.Lock()
	if l.next == nil {
		l.next = &lookupResult{done: make(chan struct{})}
	}
	result := l.next
	if !l.running {
		l.running = true
		// The lists are for other calls, too, which may wait longer than this one.
		go l.run(context.WithoutCancel(ctx))
	}
	l.mu.Unlock()
	select {
	case <-result.done:
		return result.names[types.UID(id)], result.err
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
}

// run lists until no call waits. A call that comes after the begin of a list needs a later one.
func (l *lookup) run(ctx context.Context) {
	for {
		l.mu.Lock()
		result := l.next
		l.next, l.running = nil, result != nil
		l.mu.Unlock()
		if result == nil {
			return
		}
		result.names, result.err = l.listRecovering(ctx)
		close(result.done)
	}
}

// listRecovering returns a panic as an error.
func (l *lookup) listRecovering(ctx context.Context) (names map[types.UID]string, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
			klog.FromContext(ctx).Error(err, "List of LogicalVolumes panicked. Report it with this line", "stack", string(debug.Stack()))
		}
	}()
	return l.list(ctx)
}
