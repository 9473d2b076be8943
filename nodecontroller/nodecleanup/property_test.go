// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

var (
	histories = flag.Int("histories", 15_000, "number of random histories of TestPromises")
	firstSeed = flag.Uint64("history", 1, "first history of TestPromises")
)

// operation is one step of a history: what an actor does, to which host, with which variant.
type operation struct{ kind, host, variant uint8 }

// The kinds of operations.
const (
	opPass      uint8 = iota // the leader makes a pass
	opAdvance                // time passes, with passes of the leader
	opObserve                // caches receive events
	opDelete                 // a Node is deleted
	opCreate                 // a Node is created
	opNode                   // a Node changes
	opVolume                 // a volume, its claim, or its users change
	opApprove                // an administrator approves
	opLead                   // another process, or a new one, becomes the leader
	opDeposed                // the former leader makes a pass
	opRecords                // an administrator changes or deletes the ConfigMap
	opInterfere              // the next pass of the leader is interrupted by the operation that follows
	opFail                   // the next request to delete something fails
	kinds
)

var kindNames = [kinds]string{"pass", "advance", "observe", "delete", "create", "node", "volume", "approve", "lead", "deposed", "records",
	"interfere", "fail"}

func (o operation) String() string {
	return fmt.Sprintf("%s(h%d, %d)", kindNames[o.kind], o.host, o.variant)
}

var weights = [kinds]int{22, 16, 8, 12, 6, 7, 9, 5, 4, 2, 2, 6, 2}

// history is a configuration and operations. It is replayed without randomness.
type history struct {
	setup uint16
	ops   []operation
}

func (h history) String() string {
	s := settingsOf(h.setup)
	lines := []string{fmt.Sprintf("setup %d: mode %s, scope %s, retain %s, finalizer %s, min %d, fraction %v, grace %v, %v, skip %v",
		h.setup, s.NodeCleanup, s.NodeCleanupScope, s.NodeCleanupRetain, s.NodeFinalizerMode, s.NodeCleanupMinNodes,
		s.NodeCleanupMaxFraction, s.NodeMissingGrace, s.NodeDeleteGrace, s.SkipNodeFinalize)}
	for i, o := range h.ops {
		lines = append(lines, fmt.Sprintf("%2d %v", i+1, o))
	}
	return strings.Join(lines, "\n")
}

// settingsOf returns the settings of a setup.
func settingsOf(setup uint16) Settings {
	s := DefaultSettings()
	s.Driver, s.NodeFinalizer, s.NodeFinalizerMode, s.NodeFinalizerWaitForOthers = testDriver, testFinalizer, FinalizerRemove, setup&1 != 0
	s.NodeCleanup, s.NodeCleanupScope = ModeVolumes, ScopeAll
	if setup&2 != 0 {
		s.NodeCleanup = ModeClaims
	}
	if setup&4 != 0 {
		s.NodeCleanupMaxFraction = 0.4
	}
	if setup&8 != 0 {
		s.NodeCleanupMinNodes = 2
	}
	if setup&16 != 0 {
		s.NodeMissingGrace, s.NodeDeleteGrace = 3*time.Minute, 0 // shorter than the window of the breaker
	}
	if setup&32 != 0 {
		s.NodeCleanupRetain = RetainClaim
	}
	switch setup >> 6 & 15 {
	case 0, 1, 2:
		s.NodeCleanupScope = ScopeOptIn
	case 3:
		s.NodeCleanup = ModeReport
	case 4:
		s.NodeFinalizerMode = FinalizerOff
	case 5:
		s.SkipNodeFinalize = true
	case 6, 7:
		s.NodeFinalizerMode = FinalizerManage
	}
	if setup&(1<<10) != 0 {
		s.TopologyNodeKey = testKey
	}
	return s
}

const hosts = 4

func hostName(i int) string { return fmt.Sprint("h", i) }

// specOf returns the Node of a host: its value is the name of the Node, its node ID, or its host name.
func specOf(i int) nodeSpec {
	value := hostName(i)
	switch i % 3 {
	case 1:
		return nodeSpec{name: "w" + value, label: value, hostname: "w" + value, id: value, finalizer: i%2 == 0}
	case 2:
		return nodeSpec{name: "w" + value, label: value, hostname: value, id: "id-" + value, finalizer: i%2 == 0}
	}
	return nodeSpec{name: value, label: value, hostname: value, id: value, finalizer: i%2 == 0}
}

func randomHistory(r *rand.Rand) history {
	h := history{setup: uint16(r.UintN(1 << 11)), ops: make([]operation, 6+r.IntN(20))}
	total := 0
	for _, w := range weights {
		total += w
	}
	few := 1 + r.IntN(hosts) // few hosts let operations meet
	for i := range h.ops {
		at, kind := r.IntN(total), uint8(0)
		for at >= weights[kind] {
			at -= weights[kind]
			kind++
		}
		h.ops[i] = operation{kind, uint8(r.IntN(few)), uint8(r.UintN(256))}
	}
	return h
}

// actor is one process of the controller, with its caches.
type actor struct {
	*observed
	holder string // of its term
	taken  bool   // the term holds the records
	ended  bool   // the term
	acting string // the term that makes a pass
	tried  attempts
	lists  lists
	listed time.Time         // see objects.Listed
	cm     *corev1.ConfigMap // as this term read or wrote it last
}

// lists are the last lists of all Nodes and CSINodes.
type lists struct {
	at       time.Time
	nodes    []*corev1.Node
	csiNodes []*storagev1.CSINode
	snapshot *store // what the API had then
}

// run is the execution of one history.
type run struct {
	*api
	settings  Settings
	processes [2]*actor
	leader    *actor
	former    *actor
	terms     int
	hosts     map[string]*truth
	seen      map[string]int
	inner     *operation // interrupts the next pass
	at        int        // where: the number of the interruptible point
	fails     string     // how the next deletion fails
	failure   error
}

// truth is what the test knows about one host.
type truth struct {
	held, approved time.Time // since when; zero: not
	approvedAll    bool
	acted          time.Time // last deletion that the breaker counts
	unwatched      time.Time // end of the last time without a check
}

func (r *run) truth(value string) *truth {
	if r.hosts[value] == nil {
		r.hosts[value] = &truth{}
	}
	return r.hosts[value]
}

func (r *run) fail(format string, args ...any) {
	if r.failure == nil {
		r.failure = fmt.Errorf(format, args...)
	}
}

// execute replays a history and returns the promise that it breaks. seen counts situations; it may be nil.
func execute(h history, seen map[string]int) error {
	if seen == nil {
		seen = map[string]int{}
	}
	r := &run{api: newAPI(), settings: settingsOf(h.setup), hosts: map[string]*truth{}, seen: seen}
	for i := range hosts {
		r.createNode(specOf(i))
		r.bind(fmt.Sprint("c", i), hostName(i))
		r.custom[fmt.Sprint("r", i)] = Resource{Name: fmt.Sprint("r", i), Node: specOf(i).name, Handle: fmt.Sprint("handle-c", i),
			UID: types.UID(fmt.Sprint("r", i)), Version: "1"}
	}
	r.bind("shared", hostName(0), hostName(1))
	r.bind("old", hostName(0)) // whose claim was deleted before
	delete(r.claims, "old")
	r.custom["leak"] = Resource{Name: "leak", Node: hostName(0), UID: "leak", Version: "1"}
	r.custom["snapshot"] = Resource{Name: "snapshot", Node: hostName(0), UID: "snapshot", Version: "1", Snapshot: true}
	r.createNode(nodeSpec{name: "keep", label: "keep", hostname: "keep", id: "keep"})
	r.settle()
	r.users["c1"] = r.pod("c1", specOf(1).name)
	for i := range r.processes {
		r.processes[i] = &actor{observed: r.list()}
	}
	r.lead(r.processes[0])
	for _, o := range h.ops {
		r.now = r.now.Add(1100 * time.Millisecond)
		r.apply(o)
		if r.failure != nil {
			return r.failure
		}
	}
	return nil
}

func (r *run) pod(claim, node string) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: r.meta("pod-" + claim)}
	pod.Namespace, pod.Spec.NodeName = testNamespace, node
	return pod
}

func (r *run) lead(p *actor) {
	if r.leader != p {
		r.former = r.leader
	}
	r.terms++
	r.leader = p
	if r.cm == nil { // nothing of it is left
		r.hosts = map[string]*truth{}
	}
	p.holder, p.taken, p.ended, p.tried, p.lists, p.cm = fmt.Sprint("term-", r.terms), false, false, attempts{}, lists{}, nil
	p.listed = time.Time{}
}

// point lets another actor act during a pass, if a history says so. The names of the operations that may happen here are given.
func (r *run) point(allowed ...uint8) {
	if r.inner == nil || !slices.Contains(allowed, r.inner.kind) {
		return
	}
	if r.at > 0 {
		r.at--
		return
	}
	o := *r.inner
	r.inner = nil
	r.seen["interrupted"]++
	r.apply(o)
}

var anything = []uint8{opObserve, opDelete, opCreate, opNode, opVolume, opApprove, opLead, opRecords}

// objects returns what a pass of p reads.
func (p *actor) objects(now time.Time, fresh, volumes bool, api *api) objects {
	o := objects{Now: now, Listed: p.listed, Departed: p.departed, VolumesListed: volumes}
	o.Nodes, o.CSINodes = maps.Clone(p.nodes), maps.Clone(p.csiNodes)
	if fresh {
		p.listed = time.Time{}
		if o.list(p.lists.at, p.lists.nodes, p.lists.csiNodes) {
			p.listed = p.lists.at
		}
	}
	all := maps.Clone(p.volumes)
	if volumes {
		all = api.volumes
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		o.Volumes = append(o.Volumes, all[name])
	}
	for _, name := range slices.Sorted(maps.Keys(p.custom)) {
		o.Resources = append(o.Resources, p.custom[name])
	}
	return o
}

// list lists all CSINodes, then all Nodes.
func (r *run) listNodes(p *actor) {
	l := lists{at: r.now, snapshot: newStore()}
	l.snapshot.csiNodes = maps.Clone(r.csiNodes)
	r.point(opDelete, opCreate, opNode)
	l.snapshot.nodes = maps.Clone(r.nodes)
	l.csiNodes, l.nodes = slices.Collect(maps.Values(l.snapshot.csiNodes)), slices.Collect(maps.Values(l.snapshot.nodes))
	p.lists = l
}

// pass is one pass of p: read, plan, write, delete, release. It does with the plan what the controller does.
func (r *run) pass(p *actor) {
	if p.ended {
		return
	}
	ctx, s := context.Background(), r.settings
	stored := r.cm
	records := parseRecords(stored)
	if p.taken && stored == nil { // it was deleted: the leader writes it again
		records = parseRecords(p.cm)
		records.Approve = nil
	}
	if p.taken && records.Holder != p.holder {
		p.ended = true
		r.seen["term ended"]++
		return
	}
	p.acting = p.holder
	caughtUp := p.position == len(r.log) && r.inner == nil
	r.point(anything...)
	fresh, volumes := false, false
	var lost int
	var w world
	var pl Plan
	for {
		lost = p.lost
		w = newWorld(ctx, s, p.objects(r.now, fresh, volumes, r.api), records, p.observed)
		pl = plan(s, w, records, p.tried)
		nodes, pvs := pl.needsLists()
		if !nodes && !pvs {
			break
		}
		if nodes {
			r.listNodes(p)
			fresh = true
		}
		volumes = volumes || pvs
		r.point(opObserve, opDelete, opCreate, opNode, opApprove, opLead, opRecords)
	}
	if len(pl.Problems) > 0 {
		r.seen["problem"]++
	}
	written := stored
	if s.mode() != ModeOff {
		var ok bool
		written, ok = r.write(p, pl, stored, records, fresh)
		if !ok {
			p.listed = time.Time{}
			return
		}
	}
	r.point(anything...)
	done := map[types.UID]bool{}
	for _, kind := range []Kind{KindClaim, KindVolume, KindFinalizers, KindResource} {
		for _, h := range pl.Hosts {
			for _, st := range h.Steps {
				if st.Kind == kind && st.due() && !done[st.Item.target(kind)] {
					done[st.Item.target(kind)] = true
					r.remove(ctx, p, w, pl, st, written, lost)
				}
			}
		}
	}
	for _, h := range pl.Hosts {
		for _, rel := range h.Releases {
			r.release(p, w, pl, h, rel)
		}
	}
	if caughtUp {
		r.checkProgress(p)
	}
}

// leads reports whether the term of p that makes a pass still has the Lease.
func (r *run) leads(p *actor) bool { return r.leader == p && p.holder == p.acting }

// write stores the records of a plan, unless they are stored already.
func (r *run) write(p *actor, pl Plan, stored *corev1.ConfigMap, before Records, fresh bool) (*corev1.ConfigMap, bool) {
	next := pl.Records
	next.Holder = p.holder
	p.cm = stored
	if stored != nil && next.equal(parseRecords(stored)) || stored == nil && !r.settings.Deletes() && len(next.Lost) == 0 {
		return stored, true
	}
	cm, err := next.configMap(stored, testNamespace, testDriver)
	if err != nil {
		r.fail("%v", err)
		return nil, false
	}
	if r.cm != stored || !r.leads(p) {
		r.seen["conflict"]++
		return nil, false
	}
	r.checkWrite(p, before, parseRecords(cm), fresh)
	r.changed(&cm.ObjectMeta)
	r.cm, p.cm, p.taken = cm, cm, true
	return cm, true
}

// liveReader reads the model, and lets other actors act before the Nodes are read.
type liveReader struct {
	*store
	r *run
}

func (l liveReader) labelled(ctx context.Context, key, value string) ([]*corev1.Node, error) {
	l.r.point(opDelete, opCreate, opNode, opObserve)
	return l.store.labelled(ctx, key, value)
}

// remove carries out one step, as the controller does.
func (r *run) remove(ctx context.Context, p *actor, w world, pl Plan, st Step, written *corev1.ConfigMap, lost int) {
	r.point(anything...)
	if !r.leads(p) {
		return
	}
	f, err := liveFacts(ctx, r.settings, liveReader{r.store, r}, pl, st)
	if err != nil || f.Kind != st.Kind {
		return
	}
	f.Now, f.Changed = r.now, p.lost != lost || r.cm != written
	if reasons := mayClean(r.settings, f); len(reasons) > 0 {
		r.seen["refused by live reads"]++
		return
	}
	r.checkDeletion(p, w, f)
	r.point(opVolume, opLead)
	if !r.leads(p) {
		return
	}
	fails := r.fails
	r.fails = ""
	if pv := f.Item.Volume; fails == "changed" && pv != nil { // by another client, after the live reads
		r.editVolume(pv.Name, func(*corev1.PersistentVolume) {})
		r.editClaim(pv.Spec.ClaimRef.Name, func(*corev1.PersistentVolumeClaim) {})
	} else if fails != "" {
		check := CheckFailed
		if fails == "refused" {
			check = CheckForbidden
		}
		r.seen["deletion "+fails]++
		p.tried[st.Item.target(st.Kind)] = attempt{Reason: Reason{Check: check, Name: "Failed"}, Failures: 1, Until: r.now.Add(time.Minute)}
		if fails != "unanswered" {
			return
		}
	}
	if err := r.request(f); err != nil {
		r.seen["changed before the deletion"]++
		p.tried[st.Item.target(st.Kind)] = attempt{Reason: Reason{Check: CheckFailed, Name: "Conflict"}, Failures: 1,
			Until: r.now.Add(time.Second)}
		return
	}
	r.seen[string(st.Kind)+" deleted"]++
}

var errConflict = errors.New("conflict")

// request deletes what f is about, if it is unchanged.
func (r *run) request(f facts) error {
	pv, claim := f.Item.Volume, f.Item.Claim
	switch f.Kind {
	case KindClaim:
		if now := r.claims[claim.Name]; now == nil || now.ResourceVersion != claim.ResourceVersion {
			return errConflict
		}
		r.editClaim(claim.Name, func(c *corev1.PersistentVolumeClaim) { c.DeletionTimestamp = &metav1.Time{Time: r.now} })
		return nil
	case KindResource:
		delete(r.custom, f.Item.Resource.Name)
		return nil
	}
	if now := r.volumes[pv.Name]; now == nil || now.ResourceVersion != pv.ResourceVersion {
		return errConflict
	}
	r.editVolume(pv.Name, func(pv *corev1.PersistentVolume) {
		if f.Kind == KindVolume {
			pv.DeletionTimestamp = &metav1.Time{Time: r.now}
		} else {
			pv.Finalizers = slices.DeleteFunc(pv.Finalizers, r.settings.isRemovable)
		}
	})
	if slices.Contains(pv.Finalizers, foreignF) && !slices.Contains(r.volumes[pv.Name].Finalizers, foreignF) {
		r.fail("promise 28: a foreign finalizer of %s was removed", pv.Name)
	}
	r.removeVolume(pv.Name)
	return nil
}

// release removes the finalizer of a Node, as the controller does: it reads the Node, and the patch tests the opt-out.
func (r *run) release(p *actor, w world, pl Plan, h HostPlan, rel Release) {
	node := r.nodes[rel.Node.Name]
	if node == nil || !rel.permits(r.settings, w.Key, node) || !r.leads(p) {
		return
	}
	r.checkRelease(p, w, pl, h, node)
	r.seen["released"]++
	r.editNode(node.Name, func(n *corev1.Node) {
		n.Finalizers = slices.DeleteFunc(n.Finalizers, func(f string) bool { return f == testFinalizer })
	})
}

var steps = []time.Duration{time.Minute, 4 * time.Minute, 8 * time.Minute, 11 * time.Minute, 16 * time.Minute, 6 * time.Minute}

// apply performs one operation.
func (r *run) apply(o operation) {
	host, v := int(o.host), int(o.variant)
	switch o.kind {
	case opPass:
		r.lead1(v)
	case opAdvance: // the leader checks the records in between, unless it does not run for a while
		for d := steps[v%len(steps)]; d > 0; d -= 4 * time.Minute {
			r.now = r.now.Add(min(d, 4*time.Minute))
			r.remember()
			r.settle()
			if v&64 == 0 {
				r.lead1(1)
			}
		}
	case opObserve:
		p := r.processes[v%2]
		p.observe(r.api, 1+v/2%3)
		if v&32 != 0 {
			p.observeOthers(r.api)
		}
	case opDelete:
		r.deleteSome(host, v)
	case opCreate:
		r.createSome(host, v)
	case opNode:
		r.changeNode(host, v)
	case opVolume:
		r.changeVolume(host, v)
	case opApprove:
		r.approve(host, v)
	case opLead:
		p := r.processes[v%2]
		if v&2 != 0 {
			*p = actor{observed: r.list()}
		}
		r.lead(p)
	case opDeposed:
		if r.former != nil && r.former != r.leader {
			r.seen["pass of a former leader"]++
			r.pass(r.former)
		}
	case opRecords:
		r.changeRecords(host, v)
	case opInterfere:
		r.inner, r.at = &operation{anything[v%len(anything)], o.host, uint8(v/8*11 + v%8)}, v/8%5
	case opFail:
		r.fails = []string{"refused", "not sent", "unanswered", "changed"}[v%4]
	}
}

// lead1 is a pass of the leader, with caches that are up to date or not.
func (r *run) lead1(v int) {
	if r.leader.ended {
		r.lead(r.leader)
	}
	if v&3 != 3 {
		r.leader.observe(r.api, len(r.log))
	}
	if v&12 != 12 {
		r.leader.observeOthers(r.api)
	}
	r.pass(r.leader)
	r.inner = nil
}

func (r *run) deleteSome(host, v int) {
	name := specOf(host).name
	r.deleteNode(name)
	if v%3 == 1 { // without waiting for finalizers
		r.editNode(name, func(n *corev1.Node) { n.Finalizers = nil })
	}
	if v%5 > 0 && r.nodes[name] == nil {
		r.removeCSINode(name)
	}
}

func (r *run) createSome(host, v int) {
	spec := specOf(host)
	switch v % 6 {
	case 0:
		spec.label = "" // not yet
	case 1:
		spec.name = "alias-" + spec.name
	case 2:
		spec.finalizer = true
	case 3:
		r.setCSINode(spec.name, spec.id, testKey)
		return
	}
	r.createNode(spec)
}

func (r *run) changeNode(host, v int) {
	name := specOf(host).name
	annotate := func(n *corev1.Node, value string) { n.Annotations = map[string]string{testAnnotation: value} }
	switch v % 12 {
	case 0, 1:
		r.editNode(name, func(n *corev1.Node) { annotate(n, []string{disabled, "disbled", enabled}[v/12%3]) })
	case 2:
		r.editNode(name, func(n *corev1.Node) { n.Annotations = nil })
	case 3, 4:
		r.editNode(name, func(n *corev1.Node) { n.Spec.Unschedulable = true })
		for claim, pod := range r.users {
			if pod.Spec.NodeName == name && v&32 == 0 {
				delete(r.users, claim)
			}
		}
	case 5:
		r.editNode(name, func(n *corev1.Node) {
			n.Labels = map[string]string{corev1.LabelHostname: n.Labels[corev1.LabelHostname]}
		})
	case 6:
		r.editNode(name, func(n *corev1.Node) {
			n.Labels = map[string]string{corev1.LabelHostname: n.Labels[corev1.LabelHostname], testKey: hostName((host + 1) % hosts)}
		})
	case 7:
		r.editNode(name, func(n *corev1.Node) { n.Finalizers = append(slices.Clone(n.Finalizers), "example.com/drain") })
	case 8:
		r.editNode(name, func(n *corev1.Node) {
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}}
		})
	case 9: // the kubelets are cut off, or connected again
		for _, name := range slices.Sorted(maps.Keys(r.nodes)) {
			r.editNode(name, func(n *corev1.Node) {
				n.Status.Conditions[0].Status = []corev1.ConditionStatus{corev1.ConditionTrue, corev1.ConditionUnknown}[v/12%2]
			})
		}
	case 10: // a second topology key, or none
		r.setCSINode("keep", "keep", [][]string{{testKey, "zone"}, {testKey}, nil}[v/12%3]...)
	case 11:
		r.editNode(name, func(n *corev1.Node) {
			if !slices.Contains(n.Finalizers, testFinalizer) && n.DeletionTimestamp == nil {
				n.Finalizers = append(slices.Clone(n.Finalizers), testFinalizer)
			}
		})
	}
}

func (r *run) changeVolume(host, v int) {
	claim := []string{fmt.Sprint("c", host), "shared", "old"}[min(2, v/16%5)]
	value := []string{enabled, disabled, "other"}[v/16%3]
	annotated := func(m *metav1.ObjectMeta) {
		m.Annotations = maps.Clone(m.Annotations)
		if m.Annotations == nil {
			m.Annotations = map[string]string{}
		}
		m.Annotations[testAnnotation] = value
	}
	switch v % 16 {
	case 0, 1:
		r.editClaim(claim, func(c *corev1.PersistentVolumeClaim) { annotated(&c.ObjectMeta) })
	case 2:
		r.editVolume("pv-"+claim, func(pv *corev1.PersistentVolume) { annotated(&pv.ObjectMeta) })
	case 3, 4:
		r.classObj = r.classObj.DeepCopy()
		annotated(&r.classObj.ObjectMeta)
		if v%16 == 4 {
			r.classObj.Annotations = nil
		}
	case 5:
		r.ns = r.ns.DeepCopy()
		annotated(&r.ns.ObjectMeta)
		if v&64 != 0 {
			r.ns.Annotations = nil
		}
	case 6:
		if c := r.claims[claim]; c != nil { // another claim of this name, which is not bound
			c = c.DeepCopy()
			c.ObjectMeta, c.Spec.VolumeName = r.meta(claim), ""
			c.Namespace = testNamespace
			r.claims[claim] = c
		}
	case 7:
		r.editVolume("pv-"+claim, func(pv *corev1.PersistentVolume) {
			pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
		})
	case 8:
		r.editVolume("pv-"+claim, func(pv *corev1.PersistentVolume) {
			pv.Status.Phase = []corev1.PersistentVolumePhase{corev1.VolumeFailed, corev1.VolumeReleased}[v/16%2]
		})
	case 9:
		r.editVolume("pv-"+claim, func(pv *corev1.PersistentVolume) { pv.Annotations = nil })
	case 10:
		if r.claims[claim] != nil {
			r.users[claim] = r.pod(claim, []string{"keep", specOf(host).name}[v/16%2])
		}
	case 11:
		delete(r.users, claim)
	case 12, 13:
		r.attached["pv-"+claim] = v/16%2 == 0
	case 14:
		r.editClaim(claim, func(c *corev1.PersistentVolumeClaim) {
			switch v / 16 % 3 {
			case 0:
				c.Status.Phase = corev1.ClaimLost
			case 1:
				c.DeletionTimestamp = &metav1.Time{Time: r.now}
			case 2:
				c.Spec.VolumeName = "another"
			}
		})
	case 15:
		r.editVolume("pv-"+claim, func(pv *corev1.PersistentVolume) { pv.Finalizers = append(slices.Clone(pv.Finalizers), foreignF) })
		name := fmt.Sprint("new", r.versions) // a volume that the caches may not have
		r.bind(name, hostName(host))
		r.custom[name] = Resource{Name: name, Node: specOf(host).name, Handle: "handle-" + name, UID: types.UID(name), Version: "1"}
		for _, p := range r.processes {
			p.custom = maps.Clone(r.custom)
		}
	}
}

// editMap changes the ConfigMap as an administrator does.
func (r *run) editMap(edit func(cm *corev1.ConfigMap)) {
	if r.cm != nil {
		r.cm = r.cm.DeepCopy()
		edit(r.cm)
		r.changed(&r.cm.ObjectMeta)
	}
}

func (r *run) approve(host, v int) {
	r.editMap(func(cm *corev1.ConfigMap) {
		name, all := []string{hostName(host), specOf(host).name, "*"}[min(2, v/3%8)%3], []string{"", "", approveAll}[v%3]
		cm.Annotations[AnnotationApprove] = name + all
	})
}

// changeRecords changes the ConfigMap as an administrator may by accident.
func (r *run) changeRecords(host, v int) {
	value := hostName(host)
	if v%6 == 0 {
		r.cm = nil
		r.seen["records deleted"]++
		return
	}
	r.editMap(func(cm *corev1.ConfigMap) {
		if cm.Data[value] == "" {
			return
		}
		switch v % 6 {
		case 1:
			cm.Data[value] = `{"since":"` + r.now.Add(time.Hour).UTC().Format(time.RFC3339) + `"}`
		case 2, 3:
			cm.Data[value] = "garbage"
		case 4:
			cm.Data[value] = `{"optedOut":true,` + strings.TrimPrefix(cm.Data[value], "{")
		case 5:
			delete(cm.Data, value)
		}
		if v%6 < 4 || v%6 == 5 {
			*r.truth(value) = truth{} // the record does not have it any more
			for _, p := range r.processes {
				p.optedOut[value] = false
			}
		}
	})
}

// TestPromises asserts the promises in every state of random histories. A failure prints a minimal history.
func TestPromises(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(600))
	number := *histories
	if testing.Short() {
		number /= 10
	}
	seen := map[string]int{}
	for n := *firstSeed; n < *firstSeed+uint64(number); n++ {
		h := randomHistory(rand.New(rand.NewPCG(7, n)))
		if err := execute(h, seen); err != nil {
			h = shrink(h)
			t.Fatalf("history %d breaks a promise: %v\n%v", n, execute(h, nil), h)
		}
	}
	t.Logf("%d histories reached %v", number, seen)
	for _, k := range situations {
		if seen[k] == 0 && !testing.Short() {
			t.Errorf("no history of %d reached: %s", number, k)
		}
	}
}

// shrink removes operations as long as the history breaks a promise.
func shrink(h history) history {
	for smaller := true; smaller; {
		smaller = false
		for size := len(h.ops) / 2; size > 0; size /= 2 {
			for i := 0; i+size <= len(h.ops); {
				next := history{h.setup, slices.Concat(h.ops[:i], h.ops[i+size:])}
				if execute(next, nil) != nil {
					h, smaller = next, true
				} else {
					i++
				}
			}
		}
		for i, o := range h.ops {
			for variant := range min(o.variant, 16) {
				next := history{h.setup, slices.Clone(h.ops)}
				next.ops[i].variant = variant
				if execute(next, nil) != nil {
					h, smaller = next, true
					break
				}
			}
		}
	}
	return h
}
