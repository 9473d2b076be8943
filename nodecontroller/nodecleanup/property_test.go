// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/keylock"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// operation is one step of a history: what an actor does, to which host, with which variant.
type operation struct{ kind, host, variant uint8 }

// The kinds of operations. The first ones are more frequent.
const (
	opSync uint8 = iota // the leader reconciles a host
	opAdvance
	opObserve // caches receive events
	opDeleteNode
	opCheck // the leader reads the records
	opCreateNode
	opChangeNode
	opChangeVolume
	opApprove
	opLead // another process, or a new one, acquires the Lease
	opDeposed
	opRecords // an administrator changes or deletes the ConfigMap
	opCluster
	kinds
)

var kindNames = [kinds]string{
	"sync", "advance", "observe", "deleteNode", "check", "createNode", "changeNode", "changeVolume", "approve", "lead", "deposed",
	"records", "cluster",
}

func (o operation) String() string {
	return fmt.Sprintf("%s(h%d, %d)", kindNames[o.kind], o.host, o.variant)
}

// weights of the kinds.
var weights = [kinds]int{24, 14, 14, 12, 8, 5, 6, 5, 4, 4, 3, 1, 1}

// history is a configuration and operations. It is replayed without randomness.
type history struct {
	setup uint8
	ops   []operation
}

func (h history) String() string {
	lines := []string{fmt.Sprintf("setup %d: %+v", h.setup, describe(settingsOf(h.setup)))}
	for i, o := range h.ops {
		lines = append(lines, fmt.Sprintf("%2d %v", i+1, o))
	}
	return strings.Join(lines, "\n")
}

func describe(s Settings) string {
	return fmt.Sprintf("mode %s, scope %s, min %d, fraction %v, grace %v", s.NodeCleanup, s.NodeCleanupScope, s.NodeCleanupMinNodes,
		s.NodeCleanupMaxFraction, s.NodeMissingGrace)
}

// settingsOf returns the settings of a setup.
func settingsOf(setup uint8) Settings {
	s := DefaultSettings()
	s.NodeFinalizer, s.NodeFinalizerMode, s.NodeFinalizerWaitForOthers = worldDriver+"/node", FinalizerRemove, false
	s.NodeCleanup, s.NodeCleanupScope, s.NodeCleanupQPS, s.NodeCleanupBurst = ModeClaims, ScopeAll, 1e6, 1<<20
	if setup&1 != 0 {
		s.NodeCleanup = ModeVolumes
	}
	if setup&2 != 0 {
		s.NodeCleanupMaxFraction = 0.4
	}
	if setup&4 != 0 {
		s.NodeCleanupMinNodes = 2
	}
	if setup&8 != 0 && setup&16 != 0 {
		s.NodeCleanupScope = ScopeOptIn
	}
	switch {
	case setup&32 != 0 && setup&64 != 0 && setup&16 != 0:
		s.NodeCleanup = ModeReport
	case setup&32 != 0: // shorter than the window of the breaker
		s.NodeMissingGrace, s.NodeDeleteGrace = 3*time.Minute, 0
	}
	return s
}

func randomHistory(r *rand.Rand) history {
	h := history{setup: uint8(r.UintN(256)), ops: make([]operation, 6+r.IntN(18))}
	total := 0
	for _, w := range weights {
		total += w
	}
	hosts := 1 + r.IntN(worldHosts) // few hosts let operations meet
	for i := range h.ops {
		at, kind := r.IntN(total), uint8(0)
		for at >= weights[kind] {
			at -= weights[kind]
			kind++
		}
		h.ops[i] = operation{kind, uint8(r.IntN(hosts)), uint8(r.UintN(256))}
	}
	return h
}

// replica is a process with its caches.
type replica struct {
	c        *Controller
	view     *view
	position int // in the log of nodes
	// known is when the replica knows that a host last existed, alive the same without a deletion timestamp, and
	// optedOut what it knows of the Node that was deleted.
	known    map[string]time.Time
	alive    map[string]time.Time
	optedOut map[string]bool
}

// actors are what a worker reuses for its histories.
type actors struct {
	replicas [2]*replica
	w        *world
	seen     map[string]int // situations that the histories reached
}

func silent(apiruntime.Object, string, string, string) {}

func newActors() *actors {
	a := &actors{w: &world{}, seen: map[string]int{}}
	for i := range a.replicas {
		client := worldClient{w: a.w}
		informers := kube.NewInformers(client, nil, worldDriver)
		informers.Retain(kube.RetainedFields{Nodes: true, Claims: true})
		reg := prometheus.NewRegistry()
		a.replicas[i] = &replica{c: &Controller{
			deps: Deps{
				Driver: worldDriver, Client: client, Informers: informers, Locks: &keylock.Locks[string]{},
				Queues: workloop.NewMetrics(reg), Namespace: "ns",
			},
			volumes: informers.Volumes(), claims: informers.Claims(), classes: informers.Classes(), nodes: informers.FullNodes(),
			csiNodes: informers.CSINodes(), metrics: newMetrics(reg, func() counts { return counts{} }),
		}}
	}
	return a
}

// run is the execution of one history.
type run struct {
	*actors
	setup    uint8
	settings Settings
	leader   *replica
	term     *term // of the leader
	deposed  *term // of the leader before, which does not know
	actor    *term // that sends the current request
	acting   *replica
	hosts    map[string]*truth
	stored   map[string]LostNode // that a process stored last
	holder   string              // of the records
	checked  time.Time           // last check of a leader
	blind    time.Time           // first check after a time in which no leader checked
	edited   string              // record that an administrator changed during the operation
	failure  error
}

// truth is what the test knows about one host. It does not outlive the ConfigMap.
type truth struct {
	approvals int       // that an administrator gave, and that no loss has used
	approved  time.Time // of the current loss
	stored    time.Time // the approval as a process recorded it
	held      bool      // a process recorded the hold, and nothing released it
	since     time.Time // that a process recorded last
	acted     time.Time // last deletion that the breaker counts
}

func (r *run) fail(format string, args ...any) {
	if r.failure == nil {
		r.failure = fmt.Errorf(format, args...)
	}
}

// begin returns a run in a world without nodes.
func (a *actors) begin(setup uint8) *run {
	*a.w = world{view: newView(), class: &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "c"}, Provisioner: worldDriver},
		namespace: &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ns", UID: "ns"}}}
	r := &run{actors: a, setup: setup, settings: settingsOf(setup), hosts: map[string]*truth{},
		stored: map[string]LostNode{}, checked: time.Now()}
	a.w.watcher = r
	return r
}

// execute replays a history and returns the promise that it breaks.
func (a *actors) execute(h history) error {
	r := a.begin(h.setup)
	for i := range worldHosts {
		name := hostName(i)
		r.hosts[name] = &truth{}
		a.w.createNode(name, name, i%2 == 0)
		a.w.bind(fmt.Sprint("c", i), name)
	}
	a.w.bind("shared", hostName(0), hostName(1))
	a.w.bind("old", hostName(0)) // whose claim was deleted before
	a.w.editClaim("old", func(c *corev1.PersistentVolumeClaim) {
		now := metav1.Now()
		c.DeletionTimestamp, c.Finalizers = &now, nil
	})
	a.w.createNode("keep", "keep", false)
	if h.setup&128 != 0 {
		for i := range 3 {
			a.w.createNode(fmt.Sprint("more", i), fmt.Sprint("more", i), false)
		}
	}
	for _, rep := range a.replicas {
		rep.restart(a.w, r.settings)
	}
	r.lead(a.replicas[0])
	for _, o := range h.ops {
		time.Sleep(1100 * time.Millisecond) // virtual; records have whole seconds
		r.apply(o)
		if r.edited != "" && r.w.stored != nil { // a deletion that follows from an earlier read ignores it
			for _, n := range ParseLostNodes(r.w.stored) {
				r.stored[n.Value] = n
			}
		}
		if r.edited = ""; r.failure != nil {
			return r.failure
		}
	}
	return nil
}

// restart discards the memory of a process and lists all objects.
func (p *replica) restart(w *world, s Settings) {
	p.c.cfg = Config{Settings: s, Workers: 1, Timeout: time.Minute}
	p.c.policy, p.c.notify = newPolicy(s, worldDriver), newNotifier(silent)
	p.c.index, p.c.limiter = newIndex(worldDriver, ""), rate.NewLimiter(rate.Inf, 1)
	p.view, p.position, p.known, p.optedOut = newView(), len(w.log), map[string]time.Time{}, map[string]bool{}
	p.alive = map[string]time.Time{}
	for _, name := range sortedKeys(w.csiNodes) {
		p.observe(nodeEvent{at: time.Now(), name: name, csi: true, csiNode: w.csiNodes[name]})
	}
	for _, name := range sortedKeys(w.nodes) {
		p.observe(nodeEvent{at: time.Now(), name: name, node: w.nodes[name]})
	}
	p.observeVolumes(w)
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// observe handles one event of Nodes or CSINodes as the handlers of the product do.
func (p *replica) observe(e nodeEvent) {
	c := p.c
	switch {
	case e.csi && e.csiNode != nil:
		p.view.csiNodes[e.name] = e.csiNode
		c.index.setCSINode(e.name, kube.DriverOnNode(e.csiNode, worldDriver), true)
		p.known[e.name] = e.at
	case e.csi:
		delete(p.view.csiNodes, e.name)
		c.index.setCSINode(e.name, nil, false)
		p.known[e.name] = e.at
	case e.node != nil:
		if old := p.view.nodes[e.name]; old != nil && old.UID != e.node.UID {
			c.index.dropNode(old, c.policy.annotation, time.Now())
		}
		p.view.nodes[e.name] = e.node
		c.index.setNode(e.node)
		p.known[e.name] = e.at
		if e.node.DeletionTimestamp == nil {
			p.optedOut[e.name], p.alive[e.name] = false, e.at
		}
	default:
		if p.alive[e.name] = e.at; e.deleted.DeletionTimestamp != nil {
			p.alive[e.name] = e.deleted.DeletionTimestamp.Time
		}
		delete(p.view.nodes, e.name)
		c.index.dropNode(e.deleted, c.policy.annotation, time.Now())
		p.known[e.name] = e.at
		p.optedOut[e.name] = e.deleted.Annotations[c.policy.annotation] == disabled
	}
}

// catchUp delivers all events.
func (p *replica) catchUp(w *world) {
	for ; p.position < len(w.log); p.position++ {
		p.observe(w.log[p.position])
	}
	p.observeVolumes(w)
}

// observeVolumes brings the caches of all other objects up to date.
func (p *replica) observeVolumes(w *world) {
	for name := range p.view.volumes {
		if w.volumes[name] == nil {
			p.c.index.setVolume(name, nil)
		}
	}
	for _, name := range sortedKeys(w.volumes) {
		p.c.index.setVolume(name, w.volumes[name])
	}
	p.view.volumes, p.view.claims, p.view.pods = cloneMap(w.volumes), cloneMap(w.claims), cloneMap(w.pods)
}

func cloneMap[V any](m map[string]V) map[string]V {
	next := make(map[string]V, len(m))
	for k, v := range m {
		next[k] = v
	}
	return next
}

// lead starts a term of a replica.
func (r *run) lead(p *replica) {
	r.deposed, r.leader = r.term, p
	t := p.c.newTerm(func(error) {})
	t.queue.Stop() // the history decides which host is next
	r.term = t
	if r.w.stored == nil { // nothing of it is left
		for _, h := range r.hosts {
			*h = truth{}
		}
		clear(r.stored)
	}
}

// as runs a part of the product as a process that has a term.
func (r *run) as(t *term, do func(ctx context.Context) (time.Time, error)) {
	r.actor, r.acting = t, r.replicaOf(t)
	defer func() { r.actor, r.acting = nil, nil }()
	t.cached.src = cacheSource(r.w, r.acting.view)
	_, _ = do(klog.NewContext(context.Background(), klog.Logger{}))
}

func (r *run) replicaOf(t *term) *replica {
	if r.replicas[0].c == t.c {
		return r.replicas[0]
	}
	return r.replicas[1]
}

func (r *run) sync(t *term, host string) {
	r.as(t, func(ctx context.Context) (time.Time, error) { return t.sync(ctx, host) })
}

func (r *run) checkLost(t *term) {
	if time.Since(r.checked) > r.settings.ClockGap {
		r.blind = time.Now()
	}
	r.sync(t, recordsKey)
	r.checked = time.Now()
}

var steps = []time.Duration{time.Minute, 4 * time.Minute, 8 * time.Minute, 11 * time.Minute, 16 * time.Minute, 6 * time.Minute}

// apply performs one operation.
func (r *run) apply(o operation) {
	host, w, v := hostName(int(o.host)), r.w, int(o.variant)
	switch o.kind {
	case opSync:
		if v%4 == 0 { // another actor writes during the sync
			inner := operation{[]uint8{opCreateNode, opChangeNode, opChangeVolume, opRecords}[v/4%4], o.host, o.variant / 16}
			w.interleave = func(request string) {
				// Not between the last read of an object and the write that follows from it, unless the write has preconditions.
				late := inner.kind == opChangeVolume && inner.variant%8 < 3
				if last := late && request == "delete claim"; last || !late &&
					(request == "get keep" || request == "write records") {
					if last {
						r.seen["changed before the deletion"]++
					}
					w.interleave = nil
					r.apply(inner)
				}
			}
		}
		if v&3 != 3 {
			r.leader.catchUp(w)
		}
		for i := range worldHosts {
			if i == int(o.host) || v&64 != 0 {
				r.sync(r.term, hostName(i))
			}
		}
		w.interleave = nil
	case opCheck:
		r.checkLost(r.term)
	case opAdvance:
		// The controller checks the records in between, unless it does not run for a while.
		for d := steps[v%len(steps)]; d > 0; d -= 4 * time.Minute {
			time.Sleep(min(d, 4*time.Minute))
			if v&64 == 0 {
				r.checkLost(r.term)
			}
		}
	case opObserve:
		p := r.replicas[v%2]
		for n := 1 + v/2%3; n > 0 && p.position < len(w.log); n-- {
			p.observe(w.log[p.position])
			p.position++
		}
		if v&32 != 0 {
			p.observeVolumes(w)
		}
		if v&64 != 0 {
			p.catchUp(w)
		}
	case opDeleteNode:
		r.deleteNode(host, v)
	case opCreateNode:
		r.createNode(host, v)
	case opChangeNode:
		r.changeNode(host, v)
	case opChangeVolume:
		r.changeVolume(int(o.host), v)
	case opApprove:
		r.approve(host, v)
	case opLead:
		p := r.replicas[v%2]
		if v&2 != 0 {
			p.restart(w, r.settings)
		}
		r.lead(p)
		r.checkLost(r.term)
	case opDeposed:
		if r.deposed != nil {
			r.seen["deposed"]++
			r.replicaOf(r.deposed).catchUp(w)
			for i := range worldHosts {
				if i == int(o.host) || v&64 != 0 {
					r.sync(r.deposed, hostName(i))
				}
			}
		}
	case opRecords:
		r.changeRecords(host, v)
	case opCluster:
		w.editNode("keep", func(n *corev1.Node) {
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady,
				Status: []corev1.ConditionStatus{corev1.ConditionTrue, corev1.ConditionUnknown}[v%2]}}
		})
	}
}

func (r *run) deleteNode(host string, v int) {
	r.w.deleteNode(host)
	if v%3 > 0 { // without waiting for finalizers
		r.w.editNode(host, func(n *corev1.Node) { n.Finalizers = nil })
	}
	if v%5 > 0 && r.w.nodes[host] == nil {
		r.w.removeCSINode(host)
	}
	for _, p := range r.replicas {
		if v&(8<<(v%2)) != 0 {
			p.catchUp(r.w)
		}
	}
}

func (r *run) createNode(host string, v int) {
	switch v % 6 {
	case 0:
		r.w.createNode(host, "", v&8 != 0) // without its label yet
	case 1:
		if r.w.nodes[host] == nil {
			r.w.createNode("alias-"+host, host, false)
		}
	default:
		r.w.createNode(host, host, v&8 != 0)
	}
}

func (r *run) changeNode(host string, v int) {
	r.w.editNode(host, func(n *corev1.Node) {
		switch v % 6 {
		case 0, 1:
			if n.Annotations == nil {
				n.Annotations = map[string]string{}
			}
			n.Annotations[r.leader.c.policy.annotation] = []string{disabled, ""}[v%2]
		case 2:
			n.Spec.Unschedulable = !n.Spec.Unschedulable
		case 3:
			n.Labels = map[string]string{worldKey: host}
		case 4:
			n.Finalizers = []string{worldDriver + "/node"}
			if n.DeletionTimestamp != nil {
				n.Finalizers = nil
			}
		case 5:
			n.Labels = nil
		}
	})
	if v%6 == 4 {
		r.w.removeCSINode(host)
		if r.w.nodes[host] != nil {
			r.w.setCSINode(host)
		}
	}
}

func (r *run) changeVolume(i, v int) {
	claim, pv := fmt.Sprint("c", i), fmt.Sprint("pv-c", i)
	if v&128 != 0 {
		claim, pv = "shared", "pv-shared"
	}
	annotate := func(m *metav1.ObjectMeta, value string) {
		if m.Annotations == nil {
			m.Annotations = map[string]string{}
		}
		m.Annotations[r.leader.c.policy.annotation] = value
	}
	switch v % 8 {
	case 0: // the claim is recreated
		if c := r.w.claims[claim]; c != nil {
			delete(r.w.claims, claim)
			next := &corev1.PersistentVolumeClaim{ObjectMeta: r.w.meta(claim), Spec: c.Spec, Status: c.Status}
			next.Namespace = "ns"
			r.w.claims[claim] = next
		}
	case 1, 2:
		r.w.editClaim(claim, func(c *corev1.PersistentVolumeClaim) { annotate(&c.ObjectMeta, []string{enabled, disabled}[v%2]) })
	case 3:
		r.w.editVolume(pv, func(p *corev1.PersistentVolume) { annotate(&p.ObjectMeta, []string{"", disabled}[v/8%2]) })
	case 4: // Kubernetes ends the protection of a deleted claim
		r.w.editClaim(claim, func(c *corev1.PersistentVolumeClaim) {
			if c.DeletionTimestamp != nil {
				c.Finalizers = nil
			}
		})
	case 5:
		pod := &corev1.Pod{ObjectMeta: r.w.meta("p-" + claim), Spec: corev1.PodSpec{NodeName: "keep"}}
		pod.Namespace, pod.Status.Phase = "ns", corev1.PodRunning
		pod.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim},
		}}}
		r.w.pods[claim] = pod
	case 6:
		delete(r.w.pods, claim)
	case 7:
		r.w.editVolume(pv, func(p *corev1.PersistentVolume) {
			p.Spec.PersistentVolumeReclaimPolicy = []corev1.PersistentVolumeReclaimPolicy{
				corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRetain,
			}[v/8%2]
		})
	}
}

// approve writes the annotation as an administrator does.
func (r *run) approve(host string, v int) {
	if r.w.stored == nil {
		return
	}
	cm := r.w.stored.DeepCopy()
	cm.ObjectMeta = r.w.changed(cm.ObjectMeta)
	if cm.Annotations == nil {
		cm.Annotations = map[string]string{}
	}
	delete(cm.Annotations, annotationApproveUntil)
	switch v % 8 {
	case 0:
		cm.Annotations[AnnotationApprove] = "*" // has no effect
	case 1: // nor has this
		cm.Annotations[AnnotationApprove], cm.Annotations[annotationApproveUntil] = host, time.Now().Add(time.Minute).Format(time.RFC3339)
	default:
		cm.Annotations[AnnotationApprove] = host
		r.hosts[host].approvals = 1
	}
	r.w.stored = cm
}

// changeRecords changes the ConfigMap as an administrator may by accident.
func (r *run) changeRecords(host string, v int) {
	if r.w.stored == nil {
		return
	}
	cm := r.w.stored.DeepCopy()
	cm.ObjectMeta = r.w.changed(cm.ObjectMeta)
	if _, recorded := cm.Data[host]; !recorded {
		v = 0
	}
	switch v % 4 {
	case 0:
		r.seen["records deleted"]++
		r.w.stored = nil
		return
	case 1:
		cm.Data[host] = `{"since":"` + time.Now().Add(time.Hour).UTC().Format(time.RFC3339) + `"}`
	case 2:
		cm.Data[host] = "garbage"
	case 3:
		return
	}
	r.w.stored, r.edited = cm, host
	r.hosts[host].held = false
}

// TestPromises checks the safety promises in every state of random histories. A failure prints a minimal
// history. The race detector makes it five times slower; see the target test of the Makefile.
func TestPromises(t *testing.T) {
	const seed = 14
	defer debug.SetGCPercent(debug.SetGCPercent(600))
	var next atomic.Int64
	var failed atomic.Pointer[history]
	var wg sync.WaitGroup
	var mu sync.Mutex
	seen := map[string]int{}
	for range runtime.GOMAXPROCS(0) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			synctest.Test(t, func(t *testing.T) {
				a := newActors()
				defer func() {
					mu.Lock()
					defer mu.Unlock()
					for k, n := range a.seen {
						seen[k] += n
					}
				}()
				for failed.Load() == nil {
					n := next.Add(1)
					if n > histories {
						return
					}
					h := randomHistory(rand.New(rand.NewPCG(seed, uint64(n))))
					if err := a.execute(h); err != nil {
						h = a.shrink(h)
						failed.CompareAndSwap(nil, &h)
						t.Errorf("history %d breaks a promise: %v\n%v", n, a.execute(h), h)
					}
				}
			})
		}()
	}
	wg.Wait()
	t.Logf("%d histories reached %v", histories, seen)
	for _, k := range situations {
		if seen[k] < histories/5000 && !t.Failed() {
			t.Errorf("%d of %d histories reached: %s", seen[k], histories, k)
		}
	}
}

// shrink removes operations as long as the history breaks a promise.
func (a *actors) shrink(h history) history {
	for smaller := true; smaller; {
		smaller = false
		for size := len(h.ops) / 2; size > 0; size /= 2 {
			for i := 0; i+size <= len(h.ops); {
				next := history{h.setup, slices.Concat(h.ops[:i], h.ops[i+size:])}
				if a.execute(next) != nil {
					h, smaller = next, true
				} else {
					i++
				}
			}
		}
		for bit := range 8 {
			if next := (history{h.setup &^ (1 << bit), h.ops}); next.setup != h.setup && a.execute(next) != nil {
				h = next
			}
		}
		for i, o := range h.ops {
			for _, variant := range []uint8{0, 1, 2, 3, 4, 5, 6, 7, 8} {
				if variant >= o.variant {
					break
				}
				next := history{h.setup, slices.Clone(h.ops)}
				next.ops[i].variant = variant
				if a.execute(next) != nil {
					h = next
					break
				}
			}
		}
	}
	return h
}
