// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// observer observes the cluster and the records for a term.
type observer struct {
	*memories
	c       *Controller
	live    live
	records *records
	queue   *workloop.Loop[string] // of hosts; recordsKey stands for the ConfigMap
	gather  func(ctx context.Context, host string) (host, error)
	tripped atomic.Bool   // the open breaker was reported
	kept    atomic.Bool   // keep has succeeded in this term; the records are not used before
	checked chan struct{} // closed with kept

	verdicts atomic.Int64 // begun by announce

	seen      sync.Mutex // guards the fields below
	listed    *index     // of all Nodes and CSINodes, at listedAt
	listedAt  time.Time
	forbidden map[string]bool // permissions that are missing
	announced int64           // the verdict that was reported last, as counted by verdicts
}

// key returns the topology key.
func (t *observer) key() string {
	key, _ := t.c.index.topologyKey()
	return key
}

// missingPermissions returns the number of permissions that are missing.
func (t *observer) missingPermissions() int {
	t.seen.Lock()
	defer t.seen.Unlock()
	return len(t.forbidden)
}

// aliases returns the names of Nodes and CSINodes that a value may mean, from the caches and from
// the last list of all of them.
func (t *observer) aliases(value string) []string {
	return sorted(t.c.index.names.with(value), t.lastListed().names.with(value))
}

// checkLost is the check of the lost nodes: it reads the records, consumes approvals, records the time, and
// enqueues all lost nodes. It runs at the start of a term, after a change of the ConfigMap, and
// every [Settings.LookInterval].
func (t *observer) checkLost(ctx context.Context) (next time.Time, err error) {
	defer func() { // a Node that waits for our finalizer has its timeout even if the records cannot be read
		for _, host := range t.lost() {
			t.queue.Resync(host)
		}
	}()
	first := t.policy.NodeCleanup == ModeOff || !t.kept.Load()
	var returned []string
	if t.policy.NodeCleanup != ModeOff {
		if err = t.records.load(ctx, t.policy.Deletes(), true); err == nil {
			returned, err = t.keep(ctx, first)
		}
		t.report(ctx, "the records of lost nodes", err)
		if err != nil {
			return time.Time{}, err
		}
		t.kept.Store(true)
		if first {
			close(t.checked)
		}
	}
	for _, host := range t.lost() { // all are counted before the first is cleaned up
		if h, err := t.gather(ctx, host); err != nil { // verdict counts it; its own sync retries
			klog.FromContext(ctx).Error(err, "Reading a lost node failed", "host", host)
		} else if slices.Contains(returned, host) {
			t.returned(ctx, h)
		}
	}
	t.announce(ctx, t.verdict(ctx).open)
	t.enqueueOthers(first)
	t.reportProblems(ctx)
	return time.Now().Add(t.policy.LookInterval), nil
}

// enqueueOthers enqueues hosts without a record and without volumes.
func (t *observer) enqueueOthers(first bool) {
	if first && t.policy.NodeFinalizerMode == FinalizerManage {
		key := t.key()
		for _, node := range t.c.nodes.List() {
			t.queue.Add(hostOf(node, key))
		}
	}
	for _, host := range t.withResources() {
		t.queue.Resync(host)
	}
}

// keep updates the records, and returns the hosts whose Nodes exist again. It lists all Nodes when the last check is
// old: a Node that exists ends the grace even if the caches miss it, and it may have existed during a gap.
func (t *observer) keep(ctx context.Context, first bool) (returned []string, err error) {
	records, annotations := t.records.all()
	if first {
		held := slices.ContainsFunc(records, LostNode.opens)
		t.tripped.Store(held)
		if t.c.index.remember(annotations[AnnotationTopologyKey]) {
			t.c.reindex()
		}
	}
	last := t.records.lastCheck()
	due := first || last.After(time.Now()) || time.Since(last) > t.policy.LookInterval-time.Second
	due = due && len(records) > 0
	if due {
		if err := t.list(ctx, 0); err != nil {
			return nil, err
		}
	}
	var problems []string
	err = t.records.change(ctx, func(s recordSet) {
		now := time.Now()
		t.annotate(s)
		if due {
			returned = t.recordCheck(s, last, now)
		}
		problems = s.approve(now, t.policy.Deletes()) // after recordCheck, which ends earlier approvals
	})
	for _, p := range problems {
		t.c.notify.seldom(t.live.csiDriver(ctx, t.policy.driver), reasonSkipped, p, p)
	}
	return returned, err
}

// returned reports that the Node of a host, which was missing, exists again.
func (t *observer) returned(ctx context.Context, h host) {
	klog.FromContext(ctx).Info("Node exists again", "node", h.name())
	for _, v := range h.volumes {
		t.c.notify.volume(v, corev1.EventTypeNormal, reasonReturned, "Node %s of this volume exists again. Nothing is cleaned up", h.name())
	}
}

// annotate remembers the topology key.
func (t *observer) annotate(s recordSet) {
	if key, problem := t.c.index.topologyKey(); problem == "" && (t.policy.Deletes() || len(s.lost) > 0) {
		s.annotations[AnnotationTopologyKey] = key
	}
}

// recordCheck records a check of the lost nodes, and starts the grace of those again that were not
// checked for too long, or that exist. It returns those that were missing and exist.
func (t *observer) recordCheck(s recordSet, last, now time.Time) (returned []string) {
	s.annotations[AnnotationLastLook] = now.UTC().Format(time.RFC3339)
	listed := t.lastListed()
	for value, r := range s.lost {
		node := listed.nodes[r.Node]
		switch gap := t.policy.unwatched(r, last, now); {
		case r.Since.IsZero() && (!gap || node != nil && node.UID == r.UID):
		case !r.Since.IsZero() && (listed.stays(value) || listed.stays(r.Node)):
			r, returned = r.interrupted(), append(returned, value)
		case gap:
			since := r.Since
			r = r.interrupted()
			if !since.IsZero() {
				r.Since = now.UTC().Truncate(time.Millisecond)
			}
		}
		s.lost[value] = r
	}
	return returned
}

// lost returns the hosts with a record, and those that the caches miss.
func (t *observer) lost() []string {
	records, _ := t.records.all()
	hosts := t.c.index.lost()
	for _, r := range records {
		hosts = append(hosts, r.Value)
	}
	return slices.DeleteFunc(sorted(hosts), func(h string) bool { return !isRecordable(h) })
}

// hostNamed returns the host of the Node with this name.
func (t *observer) hostNamed(name string) string {
	if host, ok := t.c.index.hostNamed(name); ok {
		return host
	}
	records, _ := t.records.all()
	for _, r := range records {
		if r.Node == name {
			return r.Value
		}
	}
	return name
}

// list lists all Nodes and CSINodes, unless the last list is younger than age.
func (t *observer) list(ctx context.Context, age time.Duration) error {
	t.seen.Lock()
	fresh := time.Since(t.listedAt) < age
	t.seen.Unlock()
	if fresh {
		return nil
	}
	began := time.Now()
	all, err := t.live.index(ctx, t.policy.driver, t.key())
	if err != nil {
		return err
	}
	t.seen.Lock()
	defer t.seen.Unlock()
	t.listed, t.listedAt = all, began
	return nil
}

// lastListed returns the result of the last list.
func (t *observer) lastListed() *index {
	t.seen.Lock()
	defer t.seen.Unlock()
	return t.listed
}

// cachedCluster returns the state of the cluster as the caches know it.
func (t *observer) cachedCluster(ctx context.Context) cluster {
	c := cluster{now: time.Now(), readyNode: len(t.c.index.driverNodes().ready) > 0, open: t.verdict(ctx).open,
		checked: t.records.lastCheck()}
	_, c.keyProblem = t.c.index.topologyKey()
	c.bare, _ = t.c.index.ambiguous()
	return c
}

// cluster reads the state of the cluster from the API server, if sanity is set.
func (t *observer) cluster(ctx context.Context, sanity bool) (cluster, error) {
	c := t.cachedCluster(ctx)
	c.readyNode = false
	if !sanity {
		return c, nil
	}
	listed := t.lastListed()
	bare, foreign := listed.ambiguous()
	c.bare = sorted(c.bare, bare)
	if len(foreign) > 0 && !t.c.index.fixed {
		c.keyProblem = notSingle(listed.nodes[foreign[0]], listed.key)
	}
	var err error
	c.readyNode, err = t.live.ready(ctx, t.c.index.driverNodes().ready, t.policy.driver)
	return c, err
}

// announce reports once that the breaker has opened, and once that it has closed. open may be outdated: another worker may have
// reported a later state.
func (t *observer) announce(ctx context.Context, open bool) {
	if t.policy.NodeCleanup == ModeOff || t.tripped.Load() == open {
		return
	}
	n := t.verdicts.Add(1)
	v := t.verdict(ctx)
	t.seen.Lock()
	isNews := n > t.announced && t.tripped.Load() != v.open
	if isNews {
		t.announced = n
		t.tripped.Store(v.open)
	}
	t.seen.Unlock()
	if !isNews {
		return
	}
	driver := t.live.csiDriver(ctx, t.policy.driver)
	if v.open {
		t.c.notify.warn(driver, reasonBreakerOpen, "%d of %d nodes are lost, and at most %d may be. Nothing more is cleaned up until they "+
			"return or you approve: storage-controller nodecontroller approve --driver-name=%s NODE... --yes. Lost: %s", v.lost, v.total,
			v.limit, t.policy.driver, kube.ShortList(v.names, 10))
	} else {
		t.c.notify.send(driver, corev1.EventTypeNormal, reasonBreakerClosed, "No cleanup waits for an approval any more")
	}
	for _, host := range t.lost() {
		t.queue.Add(host)
	}
}

// acts records a deletion for the window of the breaker, at most once a minute.
func (t *observer) acts(ctx context.Context, hosts []string) (wrote bool, err error) {
	now := time.Now()
	old := slices.DeleteFunc(slices.Clone(hosts), func(h string) bool {
		r, _ := t.records.get(h)
		return now.Sub(r.Acted) < min(later, t.policy.NodeCleanupWindow/2)
	})
	if len(old) == 0 {
		return false, nil
	}
	return true, t.records.change(ctx, func(s recordSet) {
		for _, h := range old {
			if r, ok := s.lost[h]; ok {
				r.Acted = now.UTC().Truncate(time.Millisecond)
				s.lost[h] = r
			}
		}
	})
}

// report remembers whether a permission is missing, and reports a refusal by the API server in the log, and in an event
// about the first of nodes, or else the CSIDriver.
func (t *observer) report(ctx context.Context, what string, err error, nodes ...*corev1.Node) {
	t.seen.Lock()
	delete(t.forbidden, what)
	if apierrors.IsForbidden(err) {
		t.forbidden[what] = true
	}
	t.seen.Unlock()
	if !isRefusal(err) {
		return
	}
	klog.FromContext(ctx).Error(err, "Request refused by the API server", "for", what)
	if len(nodes) > 0 {
		t.c.notify.refused(nodes[0], what, err)
	} else {
		t.c.notify.refused(t.live.csiDriver(ctx, t.policy.driver), what, err)
	}
}

// reportIgnored reports our finalizer on the Nodes of h that are being deleted, in mode off, which never removes it.
func (t *observer) reportIgnored(h host) {
	if t.policy.NodeFinalizerMode != FinalizerOff {
		return
	}
	for _, n := range h.waiting(t.policy.NodeFinalizer) {
		t.c.notify.seldom(n, reasonBlocked, "finalizer", fmt.Sprintf("Finalizer %[1]s keeps the Node, and --node-finalizer-mode=off does "+
			"not remove it. Unless another component does, set --node-finalizer-mode=remove, or run storage-controller nodecontroller "+
			"remove-finalizers --driver-name=%[2]s --node-finalizer=%[1]s --yes", t.policy.NodeFinalizer, t.policy.driver))
	}
}

// reportProblems reports what keeps all lost nodes from being cleaned up.
func (t *observer) reportProblems(ctx context.Context) {
	var driver object = t.live.csiDriver(ctx, t.policy.driver)
	for resource, err := range t.c.deps.Informers.Forbidden() {
		klog.FromContext(ctx).Error(err, "List and watch are forbidden. Grant list and watch on the resource to the ServiceAccount",
			"resource", resource)
		t.c.notify.seldom(driver, reasonBlocked, "forbidden/"+resource,
			fmt.Sprintf("listing and watching %s for --node-cleanup=%s: %v%s", resource, t.policy.NodeCleanup, err, grantHint))
	}
	if !t.policy.Deletes() {
		return
	}
	if _, problem := t.c.index.topologyKey(); problem != "" {
		t.c.notify.seldom(driver, reasonSkipped, "TopologyKeyUnknown",
			"TopologyKeyUnknown: "+problem+", so nothing is cleaned up. Set --topology-node-key")
	}
	records, _ := t.records.all()
	for _, r := range records {
		if r.Unparsable {
			t.c.notify.seldom(driver, reasonBlocked, "unparsable "+r.Value, "The record of lost node "+r.Value+" cannot be parsed. "+
				"It is not cleaned up, and further lost nodes are held. Correct or remove the record in ConfigMap "+
				ConfigMapName(t.policy.driver))
		}
	}
	bare, _ := t.c.index.ambiguous()
	for _, name := range bare {
		message := "Node " + name + " has the driver, but lacks the label of topology key " + t.key() +
			". It may be any missing node, so nothing is cleaned up. Restore the label, or delete the Node"
		t.c.notify.seldom(driver, reasonBlocked, "bare "+name, message)
		if node, ok := t.c.nodes.Get(name); ok {
			t.c.notify.seldom((*corev1.Node)(node), reasonBlocked, "bare", message)
		}
	}
}
