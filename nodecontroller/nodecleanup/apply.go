// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"fmt"
	"slices"
	"time"

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

// cleaner deletes for a term.
type cleaner struct {
	policy  Policy
	gather  gatherer // with a live source
	live    live
	locks   *keylock.Locks[string]
	notify  *notifier
	metrics *metrics
	// confirm returns an error unless this process may still delete.
	confirm func(ctx context.Context) error
	// cluster returns the state of the cluster. It reads the API server if sanity is set.
	cluster func(ctx context.Context, sanity bool) (cluster, error)
	// acts records that something of hosts is being deleted, and reports whether it wrote.
	acts func(ctx context.Context, hosts []string) (wrote bool, err error)
	// allow takes a token of the rate limit.
	allow func() bool
}

// result is what became of an attempt to delete.
type result struct {
	done    bool
	reasons []reason // against the deletion
	step    step     // of a volume, by the live read
}

// attempt deletes a target of hosts with act, if it may be deleted now. read reads the target from the API server,
// and is called again if a record had to be written in between. Nothing is deleted without attempt.
func (c *cleaner) attempt(
	ctx context.Context, hosts []host, read func() (t target, exists bool, err error), act func() error,
) (result, error) {
	sanity := slices.ContainsFunc(hosts, func(h host) bool { return h.state == missing })
	for recorded := false; ; recorded = true {
		if err := c.confirm(ctx); err != nil {
			return result{}, err
		}
		state, err := c.cluster(ctx, sanity)
		if err != nil {
			return result{}, err
		}
		began := election.Now()
		t, exists, err := read()
		if err != nil || !exists {
			return result{}, err
		}
		state.now = time.Now()
		if reasons := c.policy.mayClean(t, state); len(reasons) > 0 {
			return result{reasons: reasons}, nil
		}
		if !recorded {
			var values []string
			for _, h := range t.hosts {
				values = append(values, h.value)
			}
			if wrote, err := c.acts(ctx, values); err != nil {
				return result{}, err
			} else if wrote {
				continue // time has passed since the reads
			}
		}
		if limited(t.hosts) && !c.allow() {
			return result{reasons: []reason{{checkRate, "RateLimited", "--node-cleanup-qps is used up"}}}, nil
		}
		if err := election.MayCallNow(ctx, began); err != nil {
			return result{}, err
		}
		err = act()
		return result{done: err == nil}, err
	}
}

// limited reports whether [Settings.NodeCleanupQPS] limits the deletions because of hosts. It does not, if a request to the API
// server deleted their Nodes, or an administrator approved their clean-up. The breaker applies to all.
func limited(hosts []host) bool {
	return slices.ContainsFunc(hosts, func(h host) bool { return h.state == missing && h.record.Approved.IsZero() })
}

// actionFinalizer is the label action of the metric for removed finalizers. All other actions delete.
const actionFinalizer = "finalizer_remove"

// send sends a request that deletes obj or removes finalizers, counts it, and logs it with details.
func (c *cleaner) send(
	ctx context.Context, action, kind string, obj metav1.Object, request func(ctx context.Context) error, details ...any,
) error {
	ctx, cancel := context.WithTimeout(ctx, c.live.timeout)
	defer cancel()
	err := request(ctx)
	c.metrics.action(action, c.policy, err)
	if err != nil && !kube.IsNotFound(err) {
		what := "deleting"
		if action == actionFinalizer {
			what = "removing finalizers of"
		}
		return fmt.Errorf("%s %s %q of a deleted node: %w", what, kind, kube.Key(obj), err)
	}
	klog.FromContext(ctx).Info("Cleaned up after a deleted node",
		append([]any{"action", action, "kind", kind, "object", kube.Key(obj)}, details...)...)
	return nil
}

// remove takes the step want for a volume, if the API server agrees that it is the next one, and
// [Policy.mayClean] permits it. seen is the volume from the cache.
func (c *cleaner) remove(ctx context.Context, seen volume, want action) (r result, err error) {
	release, free := c.locks.TryExclusive(seen.pv.Spec.CSI.VolumeHandle)
	if !free {
		return result{reasons: []reason{{checkLock, "VolumeInUseByDriver", "a CSI call for the volume is running"}}}, nil
	}
	defer release()
	var v volume
	var st step
	r, err = c.attempt(ctx, seen.hosts, func() (t target, exists bool, err error) {
		if v, err = c.gather.volume(ctx, seen.pv.Name); err != nil || v.pv == nil || v.pv.UID != seen.pv.UID {
			return t, false, err
		}
		v.sent = seen.sent
		st = c.policy.nextStep(v, time.Now())
		return v.target(), st.action == want, nil
	}, func() error {
		switch st.action {
		case doDeleteClaim:
			return c.deleteClaim(ctx, v.claim, v.pv, fmt.Sprintf("Claim %s was deleted: node %s, which had its volume, was deleted",
				kube.Key(v.claim), v.hosts[0].name()))
		case doDeleteVolume:
			return c.deleteVolume(ctx, v)
		default:
			return c.removeFinalizers(ctx, v.pv)
		}
	})
	r.step = st
	return r, err
}

// preconditions restricts a deletion to the version of obj that was read.
func (c *cleaner) preconditions(obj metav1.Object) metav1.DeleteOptions {
	return metav1.DeleteOptions{Preconditions: &metav1.Preconditions{
		UID: ptr.To(obj.GetUID()), ResourceVersion: ptr.To(obj.GetResourceVersion()),
	}}
}

// deleteClaim deletes a claim, and sends message as an event about obj.
func (c *cleaner) deleteClaim(ctx context.Context, claim *corev1.PersistentVolumeClaim, obj object, message string) error {
	err := c.send(ctx, "claim_delete", "PersistentVolumeClaim", claim, func(ctx context.Context) error {
		return c.live.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Delete(ctx, claim.Name, c.preconditions(claim))
	})
	if err == nil {
		c.notify.warn(obj, reasonClaimDeleted, "%s", message)
	}
	return err
}

func (c *cleaner) deleteVolume(ctx context.Context, v volume) error {
	const text = "PersistentVolume %s %s without its driver, which ran on node %s. Erase the disks of that node before you use them again"
	// The event precedes the deletion, after which the object may not exist.
	c.notify.seldom(v.pv, reasonForceRemoved, "", fmt.Sprintf(text, v.pv.Name, "is being removed", v.hosts[0].name()))
	err := c.send(ctx, "pv_delete", "PersistentVolume", v.pv, func(ctx context.Context) error {
		return c.live.client.CoreV1().PersistentVolumes().Delete(ctx, v.pv.Name, c.preconditions(v.pv))
	}, "volumeHandle", v.pv.Spec.CSI.VolumeHandle)
	if ref := v.pv.Spec.ClaimRef; err == nil && ref != nil {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ref.Namespace, UID: v.namespace}}
		c.notify.warn(ns, reasonForceRemoved, text, v.pv.Name, "was removed", v.hosts[0].name())
	}
	return err
}

// removeFinalizers removes the removable finalizers of the version of pv that was read.
func (c *cleaner) removeFinalizers(ctx context.Context, pv *corev1.PersistentVolume) error {
	data, err := kube.MetadataPatch{RemoveFinalizers: c.policy.removable}.JSONPatch(pv)
	if err != nil || data == nil {
		return err
	}
	data = append([]byte(fmt.Sprintf(`[{"op":"test","path":"/metadata/resourceVersion","value":%q},`, pv.ResourceVersion)), data[1:]...)
	return c.send(ctx, actionFinalizer, "PersistentVolume", pv, func(ctx context.Context) error {
		_, err := c.live.client.CoreV1().PersistentVolumes().Patch(ctx, pv.Name, types.JSONPatchType, data, metav1.PatchOptions{})
		if kube.IsPatchTestFailed(err) { // no refusal
			err = apierrors.NewConflict(corev1.Resource("persistentvolumes"), pv.Name, err)
		}
		return err
	})
}
