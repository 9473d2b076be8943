// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/keylock"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// deleter deletes what a pass has found due.
type deleter struct {
	apiServer
	s       Settings
	home    string // namespace of the ConfigMap
	locks   *keylock.Locks[string]
	limiter *rate.Limiter
	send    func(news)
	metrics *metrics
	changes func() int64 // see Controller.changes
}

// sentError is the failure of a request that was sent.
type sentError struct{ error }

func (e sentError) Unwrap() error { return e.error }

// errLimited means that --node-cleanup-qps is used up.
var errLimited = errors.New("--node-cleanup-qps is used up")

// errOutdated means that the API server has something else than the plan. The next pass decides again.
var errOutdated = errors.New("the API server has another state than the caches")

// errChanged is the refusal of rule unchanged alone. The next pass decides again.
var errChanged = errors.New("the records have changed, another node was lost, or a volume of a lost node was created")

// refusedError is a refusal by [mayClean] with live facts.
type refusedError struct{ Reason }

func (e refusedError) Error() string { return e.String() }

// facts reads what decides about a step from the API server. moment precedes the first read.
func (d *deleter) facts(ctx context.Context, p Plan, st Step) (f facts, moment election.Moment, err error) {
	moment = election.Now()
	cm, err := d.configMap(ctx, d.home, d.s.Driver)
	if err != nil {
		return f, moment, err
	}
	if cm != nil && cm.Annotations[AnnotationHolder] != p.Records.Holder {
		return f, moment, errNotHolder
	}
	f, err = liveFacts(ctx, d.s, d.apiServer, p, st)
	f.Changed = cm == nil || cm.ResourceVersion != p.version || d.changes() != p.changes
	f.Now = time.Now()
	return f, moment, err
}

// delete does a due step. The error is nil if the request was accepted, or if the object does not exist.
func (d *deleter) delete(ctx context.Context, p Plan, st Step) error {
	if st.limited(p) && d.limiter.TokensAt(time.Now()) < 1 {
		return errLimited
	}
	handle := ""
	if st.Item.Volume != nil {
		handle = st.Item.Volume.Spec.CSI.VolumeHandle
	} else if st.Item.Resource != nil {
		handle = st.Item.Resource.Handle
	}
	if handle != "" {
		release, free := d.locks.TryExclusive(handle)
		if !free {
			return errors.New("a CSI call for the volume is running")
		}
		defer release()
	}
	return election.Reread(func() error { return d.deleteLocked(ctx, p, st) })
}

// deleteLocked is delete with the lock of the volume.
func (d *deleter) deleteLocked(ctx context.Context, p Plan, st Step) error {
	f, moment, err := d.facts(ctx, p, st)
	if err != nil {
		return err
	}
	switch reasons := mayClean(d.s, f); {
	case f.Item.Volume == nil && f.Item.Resource == nil:
		return nil
	case f.Kind != st.Kind || f.Item.target(f.Kind) != st.Item.target(st.Kind):
		return errOutdated
	case len(reasons) == 1 && f.Changed:
		return errChanged
	case len(reasons) > 0:
		return refusedError{reasons[0]}
	}
	if st.limited(p) && !d.limiter.Allow() {
		return errLimited
	}
	return d.request(ctx, f, st.Again, moment)
}

// limited reports whether --node-cleanup-qps limits a step. It does not if a request to the API server deleted the Nodes, or if
// an administrator approved the loss. The breaker applies to all.
func (st Step) limited(p Plan) bool {
	return slices.ContainsFunc(st.Item.Values, func(value string) bool {
		h := p.world.Hosts[value]
		return h != nil && h.Presence == missing && p.Records.Lost[value].Approved.IsZero()
	})
}

// request sends the request of a step, whose facts were read after moment.
func (d *deleter) request(ctx context.Context, f facts, again bool, moment election.Moment) error {
	it, node := f.Item, f.Hosts[0].Record.Name()
	switch f.Kind {
	case KindClaim:
		about := fmt.Sprintf("Claim %s was deleted: node %s, which had its volume, was deleted", kube.Key(it.Claim), node)
		err := d.call(ctx, moment, "claim_delete", it.Claim, func(ctx context.Context) error {
			return d.client.CoreV1().PersistentVolumeClaims(it.Claim.Namespace).Delete(ctx, it.Claim.Name, preconditions(it.Claim))
		})
		if err == nil {
			d.send(warn(it.Volume, reasonClaimDeleted, about))
		}
		return err
	case KindVolume:
		// The event precedes the deletion, after which the object may not exist.
		if !again {
			d.send(warn(it.Volume, reasonForceRemoved, fmt.Sprintf(forceRemoved, it.Volume.Name, "is being removed", node)))
		}
		err := d.call(ctx, moment, "pv_delete", it.Volume, func(ctx context.Context) error {
			return d.client.CoreV1().PersistentVolumes().Delete(ctx, it.Volume.Name, preconditions(it.Volume))
		})
		if ns, ok := it.Owners["Namespace"].(*corev1.Namespace); ok && err == nil {
			d.send(warn(ns, reasonForceRemoved, fmt.Sprintf(forceRemoved, it.Volume.Name, "was removed", node)))
		}
		return err
	case KindFinalizers:
		return d.removeFinalizers(ctx, it.Volume, moment)
	}
	return d.call(ctx, moment, "cr_delete", &metav1.ObjectMeta{Name: it.Resource.Name}, func(ctx context.Context) error {
		return d.resources.Remove(ctx, *it.Resource, func() error { return election.MayCallNow(ctx, moment) })
	})
}

// preconditions restricts a deletion to the version of obj that was read.
func preconditions(obj metav1.Object) metav1.DeleteOptions {
	return metav1.DeleteOptions{Preconditions: &metav1.Preconditions{
		UID: ptr.To(obj.GetUID()), ResourceVersion: ptr.To(obj.GetResourceVersion()),
	}}
}

// forceRemoved is the message of events about a volume that is removed.
const forceRemoved = "PersistentVolume %s %s without its driver, which ran on node %s. Erase the disks of that node before you use " +
	"them again"

// removeFinalizers removes the removable finalizers of the version of pv that was read.
func (d *deleter) removeFinalizers(ctx context.Context, pv *corev1.PersistentVolume, moment election.Moment) error {
	change := kube.MetadataPatch{
		RemoveFinalizers: d.s.removableFinalizers(), Tests: map[string]any{"/metadata/resourceVersion": pv.ResourceVersion},
	}
	data, err := change.JSONPatch(pv)
	if err != nil || data == nil {
		return err
	}
	return d.call(ctx, moment, "finalizer_remove", pv, func(ctx context.Context) error {
		_, err := d.client.CoreV1().PersistentVolumes().Patch(ctx, pv.Name, types.JSONPatchType, data, metav1.PatchOptions{})
		if kube.IsPatchTestFailed(err) { // no refusal
			err = apierrors.NewConflict(corev1.Resource("persistentvolumes"), pv.Name, err)
		}
		return err
	})
}

// call sends a request that deletes obj or removes finalizers, counts it, and logs it. It sends nothing unless this process holds
// its Lease and moment, which precedes the reads on which the request is based, is recent.
func (d *deleter) call(
	ctx context.Context, moment election.Moment, action string, obj metav1.Object, request func(context.Context) error,
) error {
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	defer cancel()
	err := election.MayCallNow(ctx, moment)
	if err != nil {
		return err
	}
	err = request(ctx)
	d.metrics.actions.WithLabelValues(action, string(d.s.mode()), kube.WriteResult(err)).Inc()
	if err != nil && !kube.IsNotFound(err) {
		return sentError{fmt.Errorf("%s of %q of a deleted node: %w", action, kube.Key(obj), err)}
	}
	klog.FromContext(ctx).Info("Cleaned up after a deleted node", "action", action, "object", kube.Key(obj), "uid", obj.GetUID())
	return nil
}

const (
	// minBackoff is the least time between two attempts.
	minBackoff = 2 * passInterval
	// staleBackoff is the time after an attempt at what the caches know differently from the API server.
	staleBackoff = 10 * time.Second
)

// next returns the attempt after a failed one, which waits from start to longest after the next plan.
func (a attempt) next(err error, start, longest time.Duration) attempt {
	var refused refusedError
	var sent sentError
	a.Sent = a.Sent || errors.As(err, &sent)
	switch {
	case errors.As(err, &refused):
		a.Reason = refused.Reason
	case isRefusal(err):
		a.Reason = refusal(err)
	default:
		a.Reason = Reason{Check: CheckFailed, Name: "Failed", Message: err.Error()}
	}
	delay := start
	for range min(a.Failures, 32) {
		delay = min(2*delay, longest)
	}
	delay = max(delay, minBackoff)
	if errors.Is(err, errOutdated) {
		delay = staleBackoff
	}
	a.Failures, a.Until, a.delay = a.Failures+1, time.Time{}, delay
	return a
}

// grantHint completes the message of a missing permission.
const grantHint = ". Grant the missing permission to the ServiceAccount; storage-controller doctor --print-rbac prints the missing rules"

// refusal returns the reason of an error that the API server has answered with.
func refusal(err error) Reason {
	r := Reason{Check: CheckForbidden, Name: string(apierrors.ReasonForError(err)), Message: err.Error()}
	if strings.Contains(r.Message, `is forbidden: User "`) { // the response of an authorizer, not of admission
		r.Message += grantHint
	}
	return r
}

// isRefusal reports whether err is a response of the API server that further attempts may get as well, for example because of a
// missing permission, an admission webhook or a policy.
func isRefusal(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && !apierrors.IsConflict(err) && !kube.IsNotFound(err) && !apierrors.IsTooManyRequests(err) &&
		!apierrors.IsTimeout(err) && !apierrors.IsServerTimeout(err) && !apierrors.IsServiceUnavailable(err) &&
		!apierrors.IsUnexpectedServerError(err)
}

// release removes our finalizer from a Node that is being deleted. Nothing is written if the Node has another opt-out, or another
// host by the topology key, than in the plan: the next pass records that first.
func (d *deleter) release(ctx context.Context, key string, r Release) error {
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	defer cancel()
	moment := election.Now()
	live, err := d.node(ctx, r.Node.Name)
	switch {
	case err != nil:
		return fmt.Errorf("before its finalizer is removed: %w", err)
	case live == nil || live.UID != r.Node.UID:
		return nil
	case !r.permits(d.s, key, live):
		return errOutdated
	}
	var consent any // as it was read: the owner may opt out meanwhile
	annotation := CleanupAnnotation(d.s.Driver)
	if value, ok := live.Annotations[annotation]; ok {
		consent = value
	}
	change := kube.MetadataPatch{
		RemoveFinalizers: []string{d.s.NodeFinalizer}, Tests: map[string]any{kube.AnnotationPath(annotation): consent},
	}
	if change.AppliedTo(live) {
		return nil
	}
	err = election.MayCallNow(ctx, moment)
	if err != nil {
		return err
	}
	_, err = kube.PatchMetadata(ctx, d.client.CoreV1().Nodes(), live, change)
	if err != nil && !kube.IsNotFound(err) {
		return fmt.Errorf("removing finalizer %s of Node %q: %w", d.s.NodeFinalizer, live.Name, err)
	}
	if r.Reason != "" {
		d.send(warn(live, r.Reason, r.Message))
	}
	d.metrics.hold.Observe(time.Since(live.DeletionTimestamp.Time).Seconds())
	klog.FromContext(ctx).Info("Finalizer removed from Node", "node", live.Name, "reason", r.Reason, "message", r.Message)
	return nil
}

// protect adds our finalizer to a Node. A Node that is being deleted cannot get it.
func (d *deleter) protect(ctx context.Context, node *corev1.Node) error {
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	defer cancel()
	change := kube.MetadataPatch{
		AddFinalizers: []string{d.s.NodeFinalizer}, Tests: map[string]any{"/metadata/deletionTimestamp": nil},
	}
	err := election.MayCall(ctx)
	if err != nil {
		return err
	}
	_, err = kube.PatchMetadata(ctx, d.client.CoreV1().Nodes(), node, change)
	if err == nil || kube.IsNotFound(err) || kube.IsPatchTestFailed(err) {
		return nil
	}
	return fmt.Errorf("adding finalizer %s to Node %q: %w", d.s.NodeFinalizer, node.Name, err)
}
