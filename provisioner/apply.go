// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"errors"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// applier carries out what decide chose for a claim: one call, or one write.
type applier struct {
	c         *Controller
	claims    *kube.TermCache[*corev1.PersistentVolumeClaim]
	volumes   *kube.TermCache[*corev1.PersistentVolume]
	ops       *operations
	sources   *sourceProtector
	ownership *nodeOwnership
	users     volumeUsers
}

// apply returns the transition that follows from a step, and adds to r what the step has
// read. With an error the claim is retried after its back-off; the event was sent then,
// if the error concerns the user.
func (a *applier) apply(ctx context.Context, key claimKey, s claimState, step step, r *reads) (transition, error) {
	none := transition{}
	switch step.action {
	case doRetry:
		a.c.metrics.claimFailed(s.claim)
		return none, step.err
	case doFail:
		return a.reportFailure(s, step.err)
	case doScheduleClaiming:
		a.ownership.schedule(key)
		return none, nil
	case doSelectThisNode:
		return none, a.ownership.selectThisNode(ctx, key, s)
	case doReschedule:
		return none, a.reschedule(ctx, key, s.claim, step.err)
	case doReadReferences:
		r.refs = referenceReader{a.c}.resolve(ctx, s.claim)
		return none, nil
	case doReadClaim:
		return none, a.readClaim(ctx, key, s.claim, r)
	case doBegin:
		r.failure = nil
		return beginRequest(a.identified(step.next)), nil
	case doProtectSource:
		return a.protectSource(ctx, s, step.next)
	case doPrepareAgain:
		return prepareAgain(step.next), nil
	case doAbandon:
		return noVolume(nil), nil
	case doRefetchClaim:
		return a.refetchClaim(ctx, key, s.claim)
	case doReadSecrets:
		return a.readSecrets(ctx, s.op, r)
	case doProtect:
		return a.protect(ctx, s)
	case doUnprotect:
		return a.unprotect(ctx, s.claim)
	case doCreateVolume:
		return a.createVolume(ctx, key, s)
	case doCreatePV:
		return a.createPV(ctx, a.c.deps.Client, key, s.op)
	case doRepeat:
		return a.repeat(ctx, key, s.op)
	case doFindOwner:
		r.ownerRead = election.Now()
		owner, err := a.ownerOfRejected(ctx, key, s.op, s.complete)
		r.owner = &owner
		return none, err
	case doKeepRejected:
		return a.c.keep(s.op, step.err)
	case doDeleteRejected:
		return a.deleteRejected(ctx, key, s.op, s.ownerRead)
	}
	return none, fmt.Errorf("action %v has no implementation", step.action)
}

// reportFailure counts a failure before the driver was called and sends its event.
func (a *applier) reportFailure(s claimState, err error) (t transition, _ error) {
	if s.op.stage == pending && errors.Is(err, errTopology) {
		// With a selected node, changes of other nodes do not retry the claim: such retries would reach maxTopologyFailures,
		// and the claim would be rescheduled.
		t = noTopology(s.claim.Annotations[storagehelpers.AnnSelectedNode] == "")
	}
	a.c.claimFailed(s.claim, failedEvent(storagehelpers.GetPersistentVolumeClaimClass(s.claim), err))
	return t, err
}

// readClaim reads a claim of which the cache may lack the record of an earlier leader, and its PersistentVolume.
func (a *applier) readClaim(ctx context.Context, key claimKey, claim *corev1.PersistentVolumeClaim, r *reads) error {
	if _, _, err := a.claims.Refetch(ctx, a.c.deps.Client.CoreV1().PersistentVolumeClaims(key.Namespace), claim); err != nil {
		return fmt.Errorf("reading claim %s: %w", key, err)
	}
	name := a.c.driver.volumeName(key.UID)
	pv, err := a.c.deps.Client.CoreV1().PersistentVolumes().Get(ctx, name, metav1.GetOptions{})
	switch {
	case err == nil:
		a.volumes.Observe(pv)
	case !kube.IsNotFound(err):
		return fmt.Errorf("reading PersistentVolume %q: %w", name, err)
	}
	r.live, r.refs = true, nil // those of the live claim may be others
	return nil
}

// identified returns next with the ID that its record will have.
func (a *applier) identified(next operation) operation {
	if !next.called || next.inherited {
		next.recordID = fmt.Sprintf("%s-%d", a.c.driver.identity, a.c.requests.Add(1))
	}
	return next
}

// protectSource begins an operation once its source has the finalizer. A shared lock of the
// source is held until the operation is recorded, and counts as a use of the source.
func (a *applier) protectSource(ctx context.Context, s claimState, next operation) (transition, error) {
	t := beginRequest(a.identified(next))
	unlock, err := a.sources.locks.Share(ctx, *next.source)
	if err != nil {
		return transition{}, err
	}
	defer func() {
		if t.release == nil { // an error or a panic
			unlock()
		}
	}()
	if err := a.sources.protect(ctx, *next.source, s.refs.uid); err != nil {
		return a.reportFailure(s, fmt.Errorf("data source %s: adding source finalizer: %w", next.source, err))
	}
	t.release = unlock
	return t, nil
}

// readSecrets reads the secret of a request, whose values are kept no longer than the
// operation. Before CreateVolume is repeated the secret is read again, because a wrong one
// may be why the driver does not answer. If that fails, the last values are used.
func (a *applier) readSecrets(ctx context.Context, o operation, r *reads) (transition, error) {
	values, err := kube.ReadSecret(ctx, a.c.deps.Client, o.plan.Secrets.Provisioner)
	switch {
	case err == nil && o.request.Secrets != nil && maps.Equal(values, o.request.Secrets):
		r.freshSecrets = true
		return transition{}, nil
	case err == nil:
		r.freshSecrets = true
		return secretsRead(o.request, values), nil
	case o.request.Secrets != nil:
		r.freshSecrets = true
		klog.FromContext(ctx).Error(err, "Reading the secret again failed, retrying with the previous values",
			"secret", klog.KRef(o.plan.Secrets.Provisioner.Namespace, o.plan.Secrets.Provisioner.Name), "stage", o.stage)
		return transition{}, nil
	case o.called:
		if kube.IsNotFound(err) {
			err = cannotRetry(o.plan.VolumeName, err, "Recreate the secret")
		}
		a.c.claimFailed(o.claim, failedEvent(o.plan.ClassName, err))
		return transition{}, err
	}
	// The request is prepared again once the secret or the class is fixed.
	a.c.claimFailed(o.claim, failedEvent(o.plan.ClassName, err))
	return noVolume(nil), err
}

// protect records the request on the claim. An operation whose outcome is unknown continues
// if that fails: the result of the call ends it, too. That of an earlier process waits, because late writes of that process
// could remove its record during the call, unless the API server refuses the new one or a webhook changes it.
func (a *applier) protect(ctx context.Context, s claimState) (transition, error) {
	change, err := s.op.protection(a.c.driver.name, s.claim)
	wait := !s.op.called
	if err == nil {
		client := a.c.deps.Client
		if s.op.called {
			client = a.c.deps.UnthrottledClient
		}
		err = a.patchClaim(ctx, client, s.claim, change)
		wait = wait || s.op.inherited && err != nil && !kube.IsRefused(err) && !apierrors.IsInvalid(err)
	}
	newest, exists := a.claims.Get(kube.Key(s.claim))
	exists = exists && newest.UID == s.claim.UID
	switch {
	case a.outdated(s.claim, err), err == nil && (!exists || change.AppliedTo(newest)):
		return transition{}, nil
	case err == nil:
		err = kube.ErrNotStored
	}
	err = fmt.Errorf("adding finalizer %s: %w", kube.ProvisioningFinalizer, err)
	if !apierrors.IsInvalid(err) || !a.isDeleted(ctx, s.claim) { // Invalid: from a policy, or because the claim is deleted
		a.c.claimFailed(s.claim, failedEvent(s.op.plan.ClassName, err))
	}
	if wait {
		return transition{}, err
	}
	klog.FromContext(ctx).Error(err, "Adding the finalizer to the PVC failed", "stage", s.op.stage)
	if !exists {
		newest = s.claim
	}
	return recordNotWritten(recordIDOf(newest)), nil
}

// outdated reports whether a write has failed because claim is outdated. The newest version is known then.
func (a *applier) outdated(claim *corev1.PersistentVolumeClaim, err error) bool {
	newest, ok := a.claims.Get(kube.Key(claim))
	return kube.IsPatchTestFailed(err) && (!ok || newest.UID != claim.UID || newest.ResourceVersion != claim.ResourceVersion)
}

// isDeleted reads a claim and reports whether it is deleted, or being deleted.
func (a *applier) isDeleted(ctx context.Context, claim *corev1.PersistentVolumeClaim) bool {
	live, exists, err := a.claims.Refetch(ctx, a.c.deps.Client.CoreV1().PersistentVolumeClaims(claim.Namespace), claim)
	return err == nil && (!exists || live.DeletionTimestamp != nil)
}

func (a *applier) unprotect(ctx context.Context, claim *corev1.PersistentVolumeClaim) (transition, error) {
	err := a.patchClaim(ctx, a.c.deps.Client, claim, unprotection(claim))
	switch {
	case err != nil && a.outdated(claim, err):
		return transition{}, nil
	case err != nil:
		err = fmt.Errorf("removing finalizer %s from claim %s/%s: %w", kube.ProvisioningFinalizer, claim.Namespace, claim.Name, err)
		if kube.IsRefused(err) {
			a.c.event(claim, failedEvent(storagehelpers.GetPersistentVolumeClaimClass(claim), err))
		}
		return transition{}, err
	}
	return claimUnprotected(), nil
}

// refetchClaim reads a claim whose PersistentVolume was saved and deleted since. The cache
// may not show yet that the claim was bound, or deleted.
func (a *applier) refetchClaim(ctx context.Context, key claimKey, claim *corev1.PersistentVolumeClaim) (transition, error) {
	live, exists, err := a.claims.Refetch(ctx, a.c.deps.Client.CoreV1().PersistentVolumeClaims(key.Namespace), claim)
	switch {
	case err != nil:
		return transition{}, fmt.Errorf("reading claim %s, whose PersistentVolume was deleted: %w", key, err)
	case !exists:
		return transition{}, nil
	}
	return claimRefetched(live.Spec.VolumeName != ""), nil
}

// reschedule has the scheduler select another node. cause is nil if its event was sent.
func (a *applier) reschedule(ctx context.Context, key claimKey, claim *corev1.PersistentVolumeClaim, cause error) error {
	if cause != nil {
		a.c.claimFailed(claim, failedEvent(storagehelpers.GetPersistentVolumeClaimClass(claim), cause))
	}
	const ann = storagehelpers.AnnSelectedNode
	change := kube.MetadataPatch{RemoveAnnotations: []string{ann}, Tests: map[string]any{kube.AnnotationPath(ann): claim.Annotations[ann]}}
	err := a.patchClaim(ctx, a.c.deps.Client, claim, change)
	if err != nil && !kube.IsPatchTestFailed(err) { // else another node was selected meanwhile
		return fmt.Errorf("removing annotation %s from claim %s: %w", storagehelpers.AnnSelectedNode, key, err)
	}
	a.ownership.failed(key) // where nodes compete for the claim, those that have not failed go first
	return nil
}

// patchClaim changes metadata of a claim. A deleted claim is no error.
func (a *applier) patchClaim(ctx context.Context, c kubernetes.Interface, claim *corev1.PersistentVolumeClaim, p kube.MetadataPatch) error {
	_, err := a.claims.Patch(ctx, c.CoreV1().PersistentVolumeClaims(claim.Namespace), claim, p)
	return err
}

// announce sends the event Provisioning, once per claim.
func (a *applier) announce(key claimKey, o operation) {
	if a.ops.announce(key) {
		a.c.event(o.claim, provisioningEvent(o.claim))
	}
}
