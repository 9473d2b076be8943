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
		return t.look(ctx)
	}
	log := klog.FromContext(ctx).WithValues("host", value)
	ctx = klog.NewContext(ctx, log)
	cleaned := false
	for range maxRounds {
		h, err := t.gatherHost(ctx, value)
		if err != nil {
			return t.bounded(ctx, h, time.Time{}, err)
		}
		if t.policy.NodeCleanup != ModeOff && !t.kept.Load() {
			return t.withoutRecords(ctx, h)
		}
		c := t.cachedCluster(ctx)
		t.announce(ctx, c.open)
		st := t.policy.decideHost(h, c, cleaned)
		log.V(2).Info("Decided", "state", string(h.state), "action", string(st.action))
		again := false
		switch st.action {
		case hostNothing:
			t.remember(value, func(m *memory) { m.state = st.state })
			if st.state == stateHeld { // the owners learn why an approval would not delete their volumes
				for _, v := range h.volumes {
					t.c.notify.step(v, t.policy.nextStep(v, c.now))
				}
			}
			next, err = t.protect(ctx, h)
			if !h.recorded && (h.state == present || !h.leaves()) {
				t.forget(value)
			}
			next = earliest(next, st.next)
		case hostRecord:
			again, next, err = t.writeRecord(ctx, h)
		case hostReturn:
			again, next, err = t.endReturned(ctx, h)
		case hostEnd:
			again, err = t.endSettled(ctx, h)
		case hostRelease:
			again, err = t.release(ctx, h, st)
		case hostClean:
			t.remember(value, func(m *memory) { m.state = st.state }) // the grace is over
			next, err = pass{t, h}.clean(ctx)
			cleaned, again = true, err == nil && next.IsZero()
		}
		if err != nil || !again {
			return t.bounded(ctx, h, next, err)
		}
	}
	return time.Time{}, fmt.Errorf("reconciling host %q: not finished after %d steps", value, maxRounds)
}

// withoutRecords is for a host until the first look of a term has updated the records. Nothing is deleted.
func (t *term) withoutRecords(ctx context.Context, h host) (time.Time, error) {
	end, ours := t.policy.end(h)
	switch {
	case !ours:
		return time.Time{}, nil // look enqueues it
	case time.Now().Before(end):
		return earliest(end, time.Now().Add(othersInterval)), nil
	}
	_, err := t.release(ctx, h, t.policy.timedOut())
	return time.Time{}, err
}

// bounded returns the result of a sync. While a Node waits for our finalizer, neither a failure nor
// its back-off exceeds the timeout.
func (t *term) bounded(ctx context.Context, h host, next time.Time, err error) (time.Time, error) {
	err = t.failed(ctx, h, err)
	end, ours := t.policy.end(h)
	if now := time.Now(); ours && (err != nil || !next.IsZero()) {
		switch retry := earliest(next, now.Add(othersInterval)); {
		case !now.Before(end) && err != nil:
			_, failed := t.release(ctx, h, t.policy.timedOut())
			return time.Time{}, errors.Join(err, failed)
		case err != nil && now.Add(t.c.cfg.RetryIntervalMax).Before(end):
			return time.Time{}, err
		case err != nil:
			klog.FromContext(ctx).Error(err, "Cleanup of a node that is being deleted failed", "node", h.name())
			return earliest(retry, end), nil
		default:
			return earliest(retry, end), nil
		}
	}
	return next, err
}

// failed reports a missing permission in an event and the metric, and returns err.
func (t *term) failed(ctx context.Context, h host, err error) error {
	if !apierrors.IsForbidden(err) {
		return err
	}
	t.remember(h.value, func(m *memory) { m.forbidden = true })
	obj := object(t.live.csiDriver(ctx, t.policy.driver))
	if len(h.nodes) > 0 {
		obj = h.nodes[0]
	}
	t.c.notify.seldom(obj, reasonBlocked, "forbidden", "A permission is missing: "+err.Error())
	return err
}

// gatherHost reads a host from the caches, with its volumes unless its Node stays.
func (t *term) gatherHost(ctx context.Context, value string) (host, error) {
	h, err := t.cached.host(ctx, value)
	if err != nil || h.state == present && !h.recorded {
		return h, err
	}
	h.last, _ = t.c.index.lastSeen(value)
	m, _ := t.recall(value)
	h.resources = m.resources
	for _, name := range t.c.index.volumesOf(value) {
		v, err := t.cached.volume(ctx, name)
		if err != nil && !isAnswer(err) {
			return h, err
		}
		if v.pv != nil {
			if v.unread = err; err != nil {
				v.hosts = []host{h}
			}
			v.sent = m.sent[v.pv.UID]
			h.volumes = append(h.volumes, v)
		}
	}
	if h.unbound, err = t.unbound(ctx, h); err != nil {
		return h, err
	}
	h.drained = t.drained(h)
	t.rememberHost(h)
	return h, nil
}

// drained reports whether no pod uses a volume of h on its Node. Without a complete cache of pods it
// returns false.
func (t *term) drained(h host) bool {
	if t.c.pods == nil || !t.c.pods.Synced() {
		return false
	}
	return !slices.ContainsFunc(h.volumes, func(v volume) bool {
		return v.claim != nil && slices.ContainsFunc(t.c.pods.ByIndex(kube.ByClaim, kube.Key(v.claim)), func(p *corev1.Pod) bool {
			return runs(p) && slices.Contains(h.names(), p.Spec.NodeName)
		})
	})
}

// writeRecord writes the record of a host whose state the API server confirms.
func (t *term) writeRecord(ctx context.Context, h host) (again bool, next time.Time, err error) {
	if h.state == missing && t.c.index.stays(h.value) { // the record needs the last state of the Node
		return false, time.Now().Add(stale), nil
	}
	seen, err := t.cleaner.gather.host(ctx, h.value)
	if err != nil {
		return false, time.Time{}, err
	}
	if seen.state != h.state {
		return false, time.Now().Add(stale), nil
	}
	h.nodes = seen.nodes
	c, before := t.cachedCluster(ctx), h.record
	record, wanted := t.policy.recordOf(h, c)
	if !wanted {
		return true, time.Time{}, nil
	}
	current := false
	err = t.records.change(ctx, func(s recordSet) {
		if current = s.lost[h.value] == before; !current {
			return // an approval, a hold or a look has changed it in between
		}
		if s.lost[h.value] = record; s.annotations[AnnotationLastLook] == "" {
			s.annotations[AnnotationLastLook] = c.now.UTC().Format(time.RFC3339)
		}
		t.annotate(s)
		t.hold(s, c)
		s.approve(c.now)
	})
	if err != nil || !current {
		return err == nil, time.Time{}, err
	}
	if !record.Since.IsZero() && !before.Since.Equal(record.Since) {
		h.record, _ = t.records.get(h.value)
		klog.FromContext(ctx).Info("Node is missing", "node", h.name(), "volumes", len(h.volumes), "mode", string(t.policy.mode()))
		for _, v := range h.volumes {
			t.c.notify.missing(t.policy, h, v, t.policy.due(h))
		}
	}
	return true, time.Time{}, nil
}

// hold holds every pending host while the breaker is open, in the write that finds it open.
func (t *term) hold(s recordSet, c cluster) {
	if !c.open {
		return
	}
	for value, r := range s.lost {
		if m, _ := t.recall(value); m.pending && r.Approved.IsZero() && !r.Planned {
			r.Held = HeldByBreaker
			s.lost[value] = r
		}
	}
}

// endReturned ends the record of a host whose Node exists, if the API server confirms it.
func (t *term) endReturned(ctx context.Context, h host) (again bool, next time.Time, err error) {
	seen, err := t.cleaner.gather.host(ctx, h.value)
	if err != nil {
		return false, time.Time{}, err
	}
	if seen.state != present {
		return false, time.Now().Add(stale), nil
	}
	if err := t.records.change(ctx, func(s recordSet) { delete(s.lost, h.value) }); err != nil {
		return false, time.Time{}, err
	}
	klog.FromContext(ctx).Info("Node exists again", "node", h.name())
	if !h.record.Since.IsZero() {
		for _, v := range h.volumes {
			t.c.notify.volume(v, corev1.EventTypeNormal, reasonReturned,
				"Node %s, which has this volume, exists again: nothing is cleaned up", h.name())
		}
	}
	t.forget(h.value)
	t.queue.Add(recordsKey) // the breaker may have closed
	return true, time.Time{}, nil
}

// endSettled ends the record of a host of which nothing is left. A volume that names the host by another key, such
// as the former one, is found again with that key.
func (t *term) endSettled(ctx context.Context, h host) (again bool, err error) {
	if slices.ContainsFunc(t.c.volumes.List(), func(pv *corev1.PersistentVolume) bool {
		return mentions(pv, t.policy.driver, h.names())
	}) {
		return false, nil
	}
	if t.policy.Deletes() {
		nodes, err := t.customResources(ctx, "")
		if err != nil {
			return false, err
		}
		for _, name := range h.names() {
			if len(nodes[name]) > 0 {
				t.remember(h.value, func(m *memory) { m.resources = true })
				return true, nil
			}
		}
	}
	if err := t.records.change(ctx, func(s recordSet) { delete(s.lost, h.value) }); err != nil {
		return false, err
	}
	t.forget(h.value)
	t.queue.Add(recordsKey)
	return false, nil
}

// shuffled returns items in random order, so that items that always fail do not precede the others.
func shuffled[T any](items []T) []T {
	items = slices.Clone(items)
	rand.Shuffle(len(items), func(i, j int) { items[i], items[j] = items[j], items[i] })
	return items
}

// isAnswer reports whether err is a response of the API server to one request, so that another
// request may succeed.
func isAnswer(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status)
}
