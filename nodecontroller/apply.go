package nodecontroller

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/volumelock"
)

// maxRounds bounds the steps of one sync.
const maxRounds = 10

const (
	// soon is when to look again where the cache and the API server disagree.
	soon = 2 * time.Second
	// later is when to look again at what is blocked by something that is not watched.
	later = time.Minute
)

// syncVolume brings one volume as far as it goes.
func (t *term) syncVolume(ctx context.Context, name string) (time.Time, error) {
	log := klog.FromContext(ctx).WithValues("persistentVolume", name)
	ctx = klog.NewContext(ctx, log)
	for range maxRounds {
		s, st := t.gather(name)
		t.announce(s.now)
		log.V(2).Info("Decided", "action", st.action.String(), "state", string(st.state), "reason", st.reason)
		switch {
		case st.action == doNothing:
			return st.next, nil
		case st.action == doSkip: // the review comes back to it, in case that what is not watched has changed
			t.c.notify.skipped(s, st.reason, st.String())
			return time.Time{}, nil
		case st.action == doBlocked:
			t.c.notify.seldom(s.volume, st.reason, warning(reasonBlocked, "%s", st.message))
			return time.Time{}, nil
		case st.action == doForget:
			if err := t.forget(ctx, s, st); err != nil {
				return time.Time{}, t.failed(s.volume, err)
			}
			continue
		}
		next, again, err := t.confirmAndApply(ctx, s, st)
		if err != nil {
			return time.Time{}, t.failed(s.volume, err)
		}
		if !again {
			return next, nil
		}
	}
	return time.Time{}, fmt.Errorf("PersistentVolume %q is not settled after %d steps", name, maxRounds)
}

// confirmAndApply asks the API server about what was decided from the caches, decides
// once more, and does that. again tells that there may be a further step at once.
func (t *term) confirmAndApply(ctx context.Context, s snapshot, st step) (next time.Time, again bool, err error) {
	if st.action.destroys() {
		next, ok := t.takeToken(s.now)
		if !ok {
			t.ledger.mark(s.volume.Name, step{state: st.state, gate: gateRate})
			return next, false, nil
		}
		used := false
		defer func() {
			if !used {
				t.giveTokenBack()
			}
		}()
		used, next, again, err = t.destroy(ctx, s, st)
		return next, again, err
	}
	live, err := t.refresh(ctx, s, false)
	if err != nil {
		return time.Time{}, false, err
	}
	decided := t.c.policy.decide(live)
	if decided.change.SetAnnotations[t.c.policy.ann.hold] != "" {
		t.askNamespaces(ctx)
		live.open = t.isOpen(live)
		decided = t.c.policy.decide(live)
	}
	return t.follow(ctx, live, decided)
}

// follow does what was decided from live, unless that destroys. What has its place in no
// view of this controller, such as a class, may be known to the API server alone for a
// while: another look at once would find the same, and ask as much.
func (t *term) follow(ctx context.Context, live snapshot, st step) (next time.Time, again bool, err error) {
	switch st.action {
	case doChange:
		return time.Time{}, true, t.change(ctx, live, st)
	case doNotice:
		t.notice(live, st.next)
		return st.next, false, nil
	case doSkip, doBlocked:
		t.ledger.mark(live.volume.Name, st)
		if st.action == doSkip {
			t.c.notify.skipped(live, st.reason, st.String())
		} else {
			t.c.notify.seldom(live.volume, st.reason, warning(reasonBlocked, "%s", st.message))
		}
		return time.Now().Add(later), false, nil
	}
	// The cache will follow, and its event brings the volume here again.
	return earliest(st.next, t.patiently(live)), false, nil
}

// patiently is when to look at a volume again of which the cache knows less than the API server.
func (t *term) patiently(s snapshot) time.Time {
	now := time.Now()
	if s.volume == nil {
		return now.Add(soon)
	}
	return now.Add(t.memory.patience(s.volume.UID, now))
}

func earliest(a, b time.Time) time.Time {
	if a.IsZero() || b.Before(a) {
		return b
	}
	return a
}

// destroy does what cannot be undone, if the API server and all gates agree. used tells
// whether the token was needed.
func (t *term) destroy(ctx context.Context, s snapshot, st step) (used bool, next time.Time, again bool, err error) {
	live, err := t.refresh(ctx, s, true)
	if err != nil {
		return false, time.Time{}, false, err
	}
	confirmed := t.c.policy.decide(live)
	if confirmed.action != st.action {
		klog.FromContext(ctx).V(2).Info("The API server disagrees with the cache", "action", confirmed.action.String(), "reason", confirmed.reason)
		if confirmed.action == doChange && live.approved != s.approved { // the next look would undo what is written now
			return false, t.patiently(live), false, nil
		}
		next, again, err = t.follow(ctx, live, confirmed)
		return false, next, again, err
	}
	closed := t.c.policy.gates(live)
	if len(closed) > 0 {
		t.ledger.mark(live.volume.Name, step{state: st.state, gate: closed[0].gate})
		t.c.notify.skipped(live, closed[0].reason, closed[0].String())
		return false, time.Now().Add(later), false, nil
	}
	// Noted before, so that an answer that does not come is no reason to forget it.
	t.ledger.act(live.nodes, live.now)
	if confirmed.action == doDeleteVolume {
		t.memory.change(live.volume.UID, func(r *remembered) { r.forced = true })
	}
	left, next, err := t.executor.execute(ctx, live, confirmed)
	if !next.IsZero() {
		t.ledger.mark(live.volume.Name, step{state: st.state, gate: gateLock})
		return false, next, false, nil
	}
	if err != nil {
		return true, time.Time{}, false, err
	}
	if t.c.policy.dryRun {
		t.memory.change(live.volume.UID, func(r *remembered) { r.tried = true })
		return true, time.Time{}, false, nil
	}
	if confirmed.action == doDeleteClaim { // its events bring the volume here again
		return true, time.Time{}, false, nil
	}
	if left == nil {
		t.volumes.MarkDeleted(live.volume)
	} else {
		t.volumes.Observe(left)
	}
	return true, time.Time{}, true, nil
}

// executor sends what cannot be undone. It has no gates of its own.
type executor struct {
	reader  *reader
	policy  policy
	locks   *volumelock.Locks
	notify  *notifier
	metrics *metrics
	timeout time.Duration
}

// execute carries out a step that destroys, on what live has read. volume is what is left
// of it after a step for the volume itself, nil when nothing is. next is when to try again
// because the driver is being called for the volume just now.
func (e *executor) execute(ctx context.Context, live snapshot, st step) (volume *corev1.PersistentVolume, next time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, e.timeout)
	defer cancel()
	done, ok := e.locks.TryExclusive(live.volume.Spec.CSI.VolumeHandle)
	if !ok {
		return nil, time.Now().Add(soon), nil
	}
	defer done()
	switch st.action {
	case doDeleteClaim:
		return nil, time.Time{}, e.deleteClaim(ctx, live)
	case doDeleteVolume:
		volume, err = e.deleteVolume(ctx, live)
		return volume, time.Time{}, err
	case doRemoveFinalizers:
		volume, err = e.removeFinalizers(ctx, live, st)
		return volume, time.Time{}, err
	}
	return nil, time.Time{}, fmt.Errorf("action %v has no implementation", st.action)
}

// deleteOptions let nothing be deleted but the very object that was looked at, as it was.
func (e *executor) deleteOptions(obj metav1.Object) metav1.DeleteOptions {
	opts := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: ptr.To(obj.GetUID()), ResourceVersion: ptr.To(obj.GetResourceVersion())}}
	if e.policy.dryRun {
		opts.DryRun = []string{metav1.DryRunAll}
	}
	return opts
}

func (e *executor) deleteClaim(ctx context.Context, live snapshot) error {
	claim := live.claim
	err := e.reader.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Delete(ctx, claim.Name, e.deleteOptions(claim))
	e.metrics.action("claim_delete", e.policy, err)
	if err != nil && !kube.IsNotFound(err) {
		return fmt.Errorf("deleting PersistentVolumeClaim %q, whose node %s is gone: %w", kube.Key(claim), list(live.nodes), err)
	}
	klog.FromContext(ctx).Info("Claim deleted, its node is gone", "persistentVolumeClaim", kube.Key(claim), "node", list(live.nodes), "dryRun", e.policy.dryRun)
	e.notify.send(live.volume, warning(reasonClaimDeleted, "Claim %s was deleted: node %s, which had its volume, is gone", kube.Key(claim), list(live.nodes)))
	return nil
}

func (e *executor) deleteVolume(ctx context.Context, live snapshot) (*corev1.PersistentVolume, error) {
	pv := live.volume
	const removed = "PersistentVolume %s is %s without its driver, which ran on node %s; scrub the disks of that node before they are used again"
	// Before: afterwards there may be nothing to tell of. An attempt that fails is made again.
	e.notify.seldom(pv, "", warning(reasonForceRemoved, removed, pv.Name, "about to be removed", list(live.nodes)))
	err := e.reader.client.CoreV1().PersistentVolumes().Delete(ctx, pv.Name, e.deleteOptions(pv))
	e.metrics.action("pv_delete", e.policy, err)
	if err != nil && !kube.IsNotFound(err) {
		return nil, fmt.Errorf("deleting PersistentVolume %q, whose node %s is gone: %w", pv.Name, list(live.nodes), err)
	}
	klog.FromContext(ctx).Info("Volume deleted without its driver, its node is gone", "node", list(live.nodes), "volumeHandle", pv.Spec.CSI.VolumeHandle, "dryRun", e.policy.dryRun)
	if ref := pv.Spec.ClaimRef; ref != nil {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ref.Namespace, UID: live.namespace}}
		e.notify.send(ns, warning(reasonForceRemoved, removed, pv.Name, "removed", list(live.nodes)))
	}
	left, exists, err := e.reader.volume(ctx, pv.Name)
	if err != nil || !exists || left.UID != pv.UID {
		return nil, err
	}
	return left, nil
}

func (e *executor) removeFinalizers(ctx context.Context, live snapshot, st step) (*corev1.PersistentVolume, error) {
	pv := live.volume
	data, err := st.change.JSONPatch(pv)
	if err != nil || data == nil {
		return pv, err
	}
	// Only the very version that was judged: nobody may have made it one to be retained.
	data = append([]byte(fmt.Sprintf(`[{"op":"test","path":"/metadata/resourceVersion","value":%q},`, pv.ResourceVersion)), data[1:]...)
	opts := metav1.PatchOptions{}
	if e.policy.dryRun {
		opts.DryRun = []string{metav1.DryRunAll}
	}
	left, err := e.reader.client.CoreV1().PersistentVolumes().Patch(ctx, pv.Name, types.JSONPatchType, data, opts)
	e.metrics.action("finalizer_remove", e.policy, err)
	if kube.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("removing finalizers of PersistentVolume %q, whose node %s is gone: %w", pv.Name, list(live.nodes), err)
	}
	klog.FromContext(ctx).Info("Finalizers removed", "finalizers", st.change.RemoveFinalizers, "dryRun", e.policy.dryRun)
	return left, nil
}

// change writes notes on a volume.
func (t *term) change(ctx context.Context, s snapshot, st step) error {
	if err := t.write(ctx, s.volume, st.change); err != nil {
		return err
	}
	if since := st.change.SetAnnotations[t.c.policy.ann.missing]; since != "" && s.noticed.IsZero() {
		t.memory.change(s.volume.UID, func(r *remembered) { r.noticed = s.now })
		t.tell(s, missingEvent(s, t.c.policy, s.now.Add(t.c.policy.missingGrace)))
	}
	return nil
}

func (t *term) write(ctx context.Context, pv *corev1.PersistentVolume, change kube.MetadataPatch) error {
	ctx, cancel := context.WithTimeout(ctx, t.c.cfg.Timeout)
	defer cancel()
	_, err := t.volumes.Patch(ctx, t.c.deps.Client.CoreV1().PersistentVolumes(), pv, change)
	if refused := isRefusal(err); (refused || err == nil) && refused != t.memory.unwritable(pv.UID) {
		t.memory.change(pv.UID, func(r *remembered) { r.unwritable = refused })
		t.gather(pv.Name) // which counts it, or not any more
	}
	if err != nil {
		return fmt.Errorf("writing notes on PersistentVolume %q: %w", pv.Name, err)
	}
	return nil
}

// notice remembers in memory that the node is missing, where nothing may be written.
func (t *term) notice(s snapshot, due time.Time) {
	t.memory.change(s.volume.UID, func(r *remembered) { r.noticed = s.now })
	t.tell(s, missingEvent(s, t.c.policy, due))
}

// forget is for a volume whose node is back.
func (t *term) forget(ctx context.Context, s snapshot, st step) error {
	was := !s.noticed.IsZero() || s.volume.Annotations[t.c.policy.ann.missing] != ""
	if err := t.write(ctx, s.volume, st.change); err != nil {
		return err
	}
	t.memory.forget(s.volume.UID)
	if was {
		t.tell(s, normal(reasonReturned, "Node %s, which has this volume, is back: nothing is cleaned up", list(s.nodes)))
	}
	if node := t.otherMachine(s); node != "" {
		t.tell(s, warning(reasonIdentity, "Node %s, which has this volume, is back as another machine: its data may be gone, and nothing is cleaned up. Look at the disks of the node; if the data are not there, delete the claim", node))
	}
	return nil
}

// tell sends e about a volume and its claim.
func (t *term) tell(s snapshot, e event) {
	t.c.notify.send(s.volume, e)
	if s.claim != nil {
		t.c.notify.send(s.claim, e)
	}
}

// skipped tells why nothing is done about a volume.
func (n *notifier) skipped(s snapshot, cause, message string) {
	e := warning(reasonSkipped, "Nothing is cleaned up: %s", message)
	n.seldom(s.volume, cause, e)
	if s.claim != nil {
		n.seldom(s.claim, cause, e)
	}
}

// failed is err, told where the API server refuses what was asked of it: no retry repairs that.
func (t *term) failed(obj object, err error) error {
	why, text := gateForbidden, "A permission is missing: %v"
	switch {
	case apierrors.IsForbidden(err):
	case isRefusal(err):
		why, text = gateRefused, "The API server refuses it: %v"
	default:
		return err
	}
	if pv, ok := obj.(*corev1.PersistentVolume); ok {
		t.ledger.block(pv.Name, why)
	}
	t.c.notify.seldom(obj, string(why), warning(reasonBlocked, text, err))
	return err
}

// isRefusal tells whether err is about the very object that was to be written: it does not
// fit, or a policy is against it. A missing permission is none, which is about all of them,
// and neither is what another attempt may repair.
func isRefusal(err error) bool {
	status, ok := statusOf(err)
	switch code := status.Code; {
	case !ok || code < http.StatusBadRequest || code >= http.StatusInternalServerError:
		return false
	case code == http.StatusUnprocessableEntity:
		return !kube.IsPatchTestFailed(err)
	default:
		return !slices.Contains([]int32{http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound, http.StatusRequestTimeout, http.StatusConflict, http.StatusGone, http.StatusTooManyRequests}, code)
	}
}

// isAnswer tells whether err is what the API server has said about one request, so that
// another one may well do better than that.
func isAnswer(err error) bool {
	_, ok := statusOf(err)
	return ok
}

func statusOf(err error) (metav1.Status, bool) {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return metav1.Status{}, false
	}
	return status.Status(), true
}

// tried notes how something has ended that is about no single volume or node.
func (t *term) tried(what string, err error) {
	missing := apierrors.IsForbidden(err)
	if t.ledger.forbid(what, missing); missing {
		t.c.notify.seldom(t.csiDriver(), "forbidden/"+what, warning(reasonBlocked, "A permission is missing: %v", err))
	}
}

func (t *term) takeToken(now time.Time) (time.Time, bool) {
	t.c.tokens.Lock()
	defer t.c.tokens.Unlock()
	return t.c.bucket.take(now)
}

func (t *term) giveTokenBack() {
	t.c.tokens.Lock()
	defer t.c.tokens.Unlock()
	t.c.bucket.giveBack()
}
