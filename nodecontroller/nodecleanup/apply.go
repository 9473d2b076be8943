package nodecleanup

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/volumelock"
)

// cleaner deletes for a term, or for a one-shot command.
type cleaner struct {
	policy  Policy
	gather  gatherer // with a live source
	live    live
	locks   *volumelock.Locks
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

// permit reports whether a target of hosts may be deleted now. read reads the target from the API
// server, and is called again if a record had to be written in between. Nothing is deleted without
// permit.
func (c *cleaner) permit(
	ctx context.Context, hosts []host, read func() (target, bool, error),
) (reasons []reason, ok bool, err error) {
	sanity := slices.ContainsFunc(hosts, func(h host) bool { return h.state == missing })
	for recorded := false; ; recorded = true {
		if err := c.confirm(ctx); err != nil {
			return nil, false, err
		}
		state, err := c.cluster(ctx, sanity)
		if err != nil {
			return nil, false, err
		}
		t, exists, err := read()
		if err != nil || !exists {
			return nil, false, err
		}
		state.now = time.Now()
		if reasons := c.policy.mayClean(t, state); len(reasons) > 0 {
			return reasons, false, nil
		}
		var values []string
		for _, h := range t.hosts {
			values = append(values, h.value)
		}
		if !recorded {
			if wrote, err := c.acts(ctx, values); err != nil {
				return nil, false, err
			} else if wrote {
				continue // time has passed since the reads
			}
		}
		if !c.allow() {
			return []reason{{checkRate, "RateLimited", "--node-cleanup-qps is used up"}}, false, nil
		}
		return nil, true, nil
	}
}

// remove takes the step want for a volume, if the API server agrees that it is the next one, and
// [Policy.mayClean] permits it. An empty want means any step that deletes. seen is the volume from
// the cache.
func (c *cleaner) remove(ctx context.Context, seen volume, want action) (r result, err error) {
	release, free := c.locks.TryExclusive(seen.pv.Spec.CSI.VolumeHandle)
	if !free {
		return result{reasons: []reason{{checkLock, "VolumeInUseByDriver", "a CSI call for the volume is running"}}}, nil
	}
	defer release()
	var v volume
	reasons, ok, err := c.permit(ctx, seen.hosts, func() (t target, exists bool, err error) {
		if v, err = c.gather.volume(ctx, seen.pv.Name); err != nil || v.pv == nil || v.pv.UID != seen.pv.UID {
			return t, false, err
		}
		v.sent = seen.sent
		r.step = c.policy.nextStep(v, time.Now())
		agreed := r.step.action == want || want == "" && r.step.action.deletes()
		return target{hosts: v.hosts, consent: v.consent, users: v.users}, agreed, nil
	})
	if r.reasons = reasons; err != nil || !ok {
		return r, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.live.timeout)
	defer cancel()
	switch r.step.action {
	case doDeleteClaim:
		err = c.deleteClaim(ctx, v.claim, v.pv, fmt.Sprintf("Claim %s was deleted: node %s, which had its volume, was deleted",
			kube.Key(v.claim), v.hosts[0].name()))
	case doDeleteVolume:
		err = c.deleteVolume(ctx, v)
	case doRemoveFinalizers:
		err = c.removeFinalizers(ctx, v.pv)
	}
	r.done = err == nil
	return r, err
}

// preconditions restricts a deletion to the version of obj that was read.
func (c *cleaner) preconditions(obj metav1.Object) metav1.DeleteOptions {
	return metav1.DeleteOptions{DryRun: c.dryRun(), Preconditions: &metav1.Preconditions{
		UID: ptr.To(obj.GetUID()), ResourceVersion: ptr.To(obj.GetResourceVersion()),
	}}
}

func (c *cleaner) dryRun() []string {
	if c.policy.dryRun {
		return []string{metav1.DryRunAll}
	}
	return nil
}

// deleteClaim deletes a claim, and sends message as an event about obj.
func (c *cleaner) deleteClaim(ctx context.Context, claim *corev1.PersistentVolumeClaim, obj object, message string) error {
	err := c.live.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Delete(ctx, claim.Name, c.preconditions(claim))
	c.metrics.action("claim_delete", c.policy, err)
	if err != nil && !kube.IsNotFound(err) {
		return fmt.Errorf("deleting PersistentVolumeClaim %q of a deleted node: %w", kube.Key(claim), err)
	}
	klog.FromContext(ctx).Info("Claim deleted", "persistentVolumeClaim", kube.Key(claim), "dryRun", c.policy.dryRun)
	c.notify.warn(obj, reasonClaimDeleted, "%s", message)
	return nil
}

func (c *cleaner) deleteVolume(ctx context.Context, v volume) error {
	const text = "PersistentVolume %s %s without its driver, which ran on node %s. Erase the disks of that node before you use them again"
	// The event precedes the deletion, after which the object may not exist.
	c.notify.seldom(v.pv, reasonForceRemoved, "", fmt.Sprintf(text, v.pv.Name, "is being removed", v.hosts[0].name()))
	err := c.live.client.CoreV1().PersistentVolumes().Delete(ctx, v.pv.Name, c.preconditions(v.pv))
	c.metrics.action("pv_delete", c.policy, err)
	if err != nil && !kube.IsNotFound(err) {
		return fmt.Errorf("deleting PersistentVolume %q of a deleted node: %w", v.pv.Name, err)
	}
	klog.FromContext(ctx).Info("Volume deleted without its driver", "persistentVolume", v.pv.Name,
		"volumeHandle", v.pv.Spec.CSI.VolumeHandle, "dryRun", c.policy.dryRun)
	if ref := v.pv.Spec.ClaimRef; ref != nil {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ref.Namespace, UID: v.namespace}}
		c.notify.warn(ns, reasonForceRemoved, text, v.pv.Name, "was removed", v.hosts[0].name())
	}
	return nil
}

// removeFinalizers removes the removable finalizers of the version of pv that was read.
func (c *cleaner) removeFinalizers(ctx context.Context, pv *corev1.PersistentVolume) error {
	data, err := kube.MetadataPatch{RemoveFinalizers: c.policy.PVRemovableFinalizers}.JSONPatch(pv)
	if err != nil || data == nil {
		return err
	}
	data = append([]byte(fmt.Sprintf(`[{"op":"test","path":"/metadata/resourceVersion","value":%q},`, pv.ResourceVersion)), data[1:]...)
	_, err = c.live.client.CoreV1().PersistentVolumes().Patch(ctx, pv.Name, types.JSONPatchType, data,
		metav1.PatchOptions{DryRun: c.dryRun()})
	c.metrics.action("finalizer_remove", c.policy, err)
	if err != nil && !kube.IsNotFound(err) {
		return fmt.Errorf("removing finalizers of PersistentVolume %q of a deleted node: %w", pv.Name, err)
	}
	klog.FromContext(ctx).Info("Finalizers of volume removed", "persistentVolume", pv.Name, "dryRun", c.policy.dryRun)
	return nil
}
