// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// maxRounds bounds the steps of one sync.
const maxRounds = 10

const (
	soon  = 2 * time.Second  // retries what waits for a CSI call
	stale = 10 * time.Second // retries what the caches know differently from the API server
	later = time.Minute      // retries what a condition blocks that is not watched
)

// isRecordable reports whether a record can have this host as its key.
func isRecordable(host string) bool { return host != "" && len(validation.IsConfigMapKey(host)) == 0 }

// sync reconciles one host, or the ConfigMap.
func (t *term) sync(ctx context.Context, value string) (next time.Time, err error) {
	if value == recordsKey {
		return t.checkLost(ctx)
	}
	log := klog.FromContext(ctx).WithValues("host", value)
	ctx = klog.NewContext(ctx, log)
	cleaned := false
	for range maxRounds {
		h, err := t.gatherHost(ctx, value)
		if err != nil {
			return t.bounded(ctx, h, time.Time{}, err)
		}
		if t.policy.NodeCleanup != ModeOff && !t.kept.Load() { // checkLost enqueues it; the timeout applies before
			end, _ := t.policy.end(h)
			return t.bounded(ctx, h, end, nil)
		}
		c := t.cachedCluster(ctx)
		t.announce(ctx, c.open)
		st := t.policy.decideHost(h, c, cleaned)
		log.V(2).Info("Decided", "state", string(h.state), "action", string(st.action))
		again := false
		switch st.action {
		case hostNothing:
			if st.state == stateHeld { // the owners learn why an approval would not delete their volumes
				for _, v := range h.volumes {
					t.c.notify.step(v, t.policy.nextStep(v, c.now))
				}
			}
			err = t.protect(ctx, h)
			if !h.recorded && (h.state == present || !h.leaves()) {
				t.forget(value)
			}
			next = st.next
		case hostRecord, hostEnd:
			again, next, err = t.changeRecord(ctx, h, st)
		case hostCheckLost:
			t.queue.Resync(recordsKey) // which enqueues the host
		case hostRelease:
			again, err = t.release(ctx, h, st)
		case hostClean:
			next, err = pass{t, h}.clean(ctx)
			cleaned, again = true, err == nil && next.IsZero()
		}
		if err != nil || !again {
			return t.bounded(ctx, h, next, err)
		}
	}
	return time.Time{}, fmt.Errorf("reconciling host %q: not finished after %d steps", value, maxRounds)
}

// bounded returns the result of a sync. Neither a failure nor a wait keeps a Node that is being deleted for longer than
// the timeout of our finalizer, unless its opt-out cannot be recorded.
func (t *term) bounded(ctx context.Context, h host, next time.Time, err error) (time.Time, error) {
	t.report(ctx, "host "+h.value, err, h.nodes...)
	t.reportIgnored(h)
	end, ours := t.policy.end(h)
	now := time.Now()
	switch {
	case !ours || err == nil && next.IsZero():
		return next, err
	case !now.Before(end):
		unrecorded, failed := t.release(ctx, h, t.policy.timedOut())
		next = time.Time{}
		if unrecorded {
			next = now.Add(stale)
			t.c.notify.seldom(t.policy.waiting(h)[0], reasonBlocked, "unrecorded", "The Node has opted out of the cleanup. It keeps its "+
				"finalizer until the opt-out can be written to ConfigMap "+ConfigMapName(t.policy.driver))
		}
		return next, errors.Join(err, failed)
	case err != nil && now.Add(t.c.cfg.RetryIntervalMax).Before(end):
		return time.Time{}, err
	case err != nil:
		klog.FromContext(ctx).Error(err, "Cleanup of a node that is being deleted failed", "node", h.name())
		err = workloop.Waiting{Cause: err}
	}
	return earliest(earliest(next, now.Add(othersInterval)), end), err
}

// gatherHost reads a host from the caches, with its volumes unless its Node stays.
func (t *term) gatherHost(ctx context.Context, value string) (host, error) {
	h, err := t.cached.host(ctx, value)
	if err != nil || h.state == present && !h.recorded {
		return h, err
	}
	h.last, _ = t.c.index.lastSeen(value)
	m := t.recall(value)
	h.resources = m.resource
	for _, name := range t.c.index.volumes.with(value) {
		v, err := t.cached.volume(ctx, name)
		if err != nil && !isAnswer(err) {
			return h, err
		}
		if v.pv != nil {
			v.unread = err
			if err != nil {
				v.hosts = []host{h}
			}
			v.sent = m.sent[v.pv.UID]
			h.volumes = append(h.volumes, v)
		}
	}
	h.drained = t.drained(h)
	t.rememberHost(h)
	return h, nil
}

// drained reports whether no running pod uses a volume of h on its Nodes, which are being deleted. It returns false without a
// complete cache of pods.
func (t *term) drained(h host) bool {
	if h.state != deleting || t.c.pods == nil || !t.c.pods.Synced() {
		return false
	}
	return !slices.ContainsFunc(h.volumes, func(v volume) bool {
		ref := v.pv.Spec.ClaimRef // v.claim is nil once the claim is being deleted, which its pods delay
		return namesClaim(ref) && slices.ContainsFunc(t.c.pods.ByIndex(kube.ByClaim, ref.Namespace+"/"+ref.Name), func(p *corev1.Pod) bool {
			return runs(p) && slices.Contains(h.names(), p.Spec.NodeName)
		})
	})
}

// changeRecord writes or ends the record of a host, if the API server confirms its state.
func (t *term) changeRecord(ctx context.Context, h host, st hostStep) (again bool, next time.Time, err error) {
	if h.state == missing && t.c.index.stays(h.value) { // the record needs the last state of the Node
		return false, time.Now().Add(stale), nil
	}
	seen, err := t.cleaner.gather.host(ctx, h.value)
	switch {
	case err != nil:
		return false, time.Time{}, err
	case seen.state != h.state:
		return false, time.Now().Add(stale), nil
	case st.action == hostEnd:
		again, err = t.endRecord(ctx, h)
	default:
		h.nodes = seen.nodes
		err = t.writeRecord(ctx, h)
		again = err == nil
	}
	return again, time.Time{}, err
}

// writeRecord writes the record of a host, unless the record was changed since h was read.
func (t *term) writeRecord(ctx context.Context, h host) error {
	c, before, current := t.cachedCluster(ctx), h.record, false
	record, wanted := t.policy.recordOf(h, c)
	if !wanted {
		return nil
	}
	err := t.records.change(ctx, func(s recordSet) {
		current = s.lost[h.value] == before
		if !current {
			return // an approval, a hold or a check of the lost nodes has changed it
		}
		if len(s.lost) == 0 { // without records there are no checks
			s.annotations[AnnotationLastLook] = c.now.UTC().Format(time.RFC3339)
		}
		s.lost[h.value] = record
		t.annotate(s)
		t.hold(s, c)
	})
	switch {
	case err != nil || !current:
	case !record.Since.IsZero() && !before.Since.Equal(record.Since):
		h.record, _ = t.records.get(h.value)
		klog.FromContext(ctx).Info("Node is missing", "node", h.name(), "volumes", len(h.volumes), "mode", string(t.policy.NodeCleanup))
		for _, v := range h.volumes {
			t.c.notify.missing(t.policy, h, v, t.policy.due(h))
		}
	case record.returned():
		if !before.Since.IsZero() {
			t.returned(ctx, h)
		}
		t.forget(h.value)
		t.queue.Add(recordsKey) // the breaker may have closed
	case !before.Since.IsZero() && h.hasOtherValue():
		t.returned(ctx, h)
	}
	return err
}

// hold holds every pending host while the breaker is open, in the write that finds it open.
func (t *term) hold(s recordSet, c cluster) {
	if !c.open {
		return
	}
	for value, r := range s.lost {
		if t.recall(value).pending && !r.exempt() {
			r.Held = HeldByBreaker
			s.lost[value] = r
		}
	}
}

// endRecord ends the record of a host whose Node exists, or of which nothing is left.
func (t *term) endRecord(ctx context.Context, h host) (again bool, err error) {
	if h.state != present {
		if left, again, err := t.leaves(ctx, h); left || err != nil {
			return again, err
		}
	}
	if err := t.records.change(ctx, func(s recordSet) { delete(s.lost, h.value) }); err != nil {
		return false, err
	}
	if h.state == present && !h.record.Since.IsZero() {
		t.returned(ctx, h)
	}
	t.forget(h.value)
	t.queue.Add(recordsKey) // the breaker may have closed
	return h.state == present, nil
}

// leaves reports whether anything of a host is left that the last listing has missed: volumes that name it by another
// key, such as the former one, or that the cache misses, or custom resources, which are to be cleaned up.
func (t *term) leaves(ctx context.Context, h host) (left, again bool, err error) {
	named := func(pv *corev1.PersistentVolume) bool { return mentions(pv, t.policy.driver, h.names()) }
	left = slices.ContainsFunc(t.c.volumes.List(), named)
	if !left && (h.record.OptedOut || h.record.Held != "") { // a later record would not prevent the cleanup
		volumes, err := t.live.listVolumes(ctx)
		if err != nil {
			return false, false, err
		}
		left = slices.ContainsFunc(volumes, named)
	}
	if left {
		return true, false, nil
	}
	if !t.policy.Deletes() || h.hasOtherValue() {
		return false, false, nil
	}
	nodes, err := t.customResources(ctx, "")
	left = slices.ContainsFunc(h.names(), func(name string) bool { return len(nodes[name]) > 0 })
	if left {
		t.remember(h.value, func(m *memory) { m.resource = true })
	}
	return left, left, err
}

// shuffled returns items in random order, so that items that always fail do not precede the others. The order depends on
// the time only: simulated histories are repeatable.
func shuffled[T any](items []T) []T {
	items = slices.Clone(items)
	rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0)).Shuffle(len(items), func(i, j int) { items[i], items[j] = items[j], items[i] })
	return items
}

// isAnswer reports whether err is a response of the API server to one request, so that another
// request may succeed.
func isAnswer(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status)
}

// isRefusal reports whether err is a response of the API server that further attempts may get as well, for example because
// of a missing permission, an admission webhook or a policy.
func isRefusal(err error) bool {
	return isAnswer(err) && !apierrors.IsConflict(err) && !kube.IsNotFound(err) && !apierrors.IsTooManyRequests(err) &&
		!apierrors.IsTimeout(err) && !apierrors.IsServerTimeout(err) && !apierrors.IsServiceUnavailable(err) &&
		!apierrors.IsUnexpectedServerError(err)
}
