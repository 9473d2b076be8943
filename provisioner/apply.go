// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// apply returns the change of the call that follows from a step, and adds to r what the step has read. With an error the claim is retried
// after its back-off; the event was sent then, if the error concerns the user.
func (l *claimLoop) apply(ctx context.Context, key claimKey, s claimState, step step, r *reads) (change, error) {
	none := change{}
	switch step.action {
	case doRetry:
		l.c.metrics.claimFailed(s.claim)
		return none, step.err
	case doFail:
		return l.reportFailure(s, step.err)
	case doScheduleClaiming:
		l.ownership.schedule(key)
		return none, nil
	case doSelectThisNode:
		return none, l.ownership.selectThisNode(ctx, key, s)
	case doReschedule:
		return none, l.reschedule(ctx, key, s.claim, step.err)
	case doReadReferences:
		r.refs = l.c.readReferences(ctx, s.claim)
		return none, nil
	case doReadClaim:
		return none, l.readClaim(ctx, key, s.claim, r)
	case doBegin:
		return l.takeUp(ctx, s, step, r)
	case doAbandon:
		return abandon(ctx, s), nil
	case doRefetchClaim:
		return l.refetchClaim(ctx, key, s)
	case doReadSecrets:
		return l.readSecrets(ctx, s.call, r)
	case doProtect:
		return l.protect(ctx, s)
	case doUnprotect:
		return l.unprotect(ctx, s)
	case doCreateVolume:
		return l.createVolume(ctx, key, s)
	case doCreatePV:
		return l.createPV(ctx, l.c.deps.Client, key, s.call.Payload)
	case doDeleteRejected:
		return l.deleteRejected(ctx, key, s.call.Payload)
	}
	return none, fmt.Errorf("action %v has no implementation", step.action)
}

// reportFailure counts a failure before the driver was called and sends its event.
func (l *claimLoop) reportFailure(s claimState, err error) (c change, _ error) {
	if !s.call.State.InProgress() && errors.Is(err, errTopology) {
		// With a selected node, changes of other nodes do not retry the claim: such retries would reach maxTopologyFailures,
		// and the claim would be rescheduled.
		c = noTopology(s.claim.Annotations[storagehelpers.AnnSelectedNode] == "")
	}
	l.c.claimFailed(s.claim, failedEvent(storagehelpers.GetPersistentVolumeClaimClass(s.claim), err))
	return c, err
}

// readClaim reads a claim of which the cache may lack the record of an earlier leader, and its PersistentVolume.
func (l *claimLoop) readClaim(ctx context.Context, key claimKey, claim *corev1.PersistentVolumeClaim, r *reads) error {
	if _, _, err := l.claims.Refetch(ctx, l.c.deps.Client.CoreV1().PersistentVolumeClaims(key.Namespace), claim); err != nil {
		return fmt.Errorf("reading claim %s: %w", key, err)
	}
	name := l.c.driver.volumeName(key.UID)
	pv, err := l.c.deps.Client.CoreV1().PersistentVolumes().Get(ctx, name, metav1.GetOptions{})
	switch {
	case err == nil:
		l.volumes.Observe(pv)
	case !kube.IsNotFound(err):
		return fmt.Errorf("reading PersistentVolume %q: %w", name, err)
	}
	r.volumeRead, r.refs = true, nil // those of the live claim may be others
	return nil
}

// takeUp takes up a request once its source has the finalizer. A shared lock of the source is held until the request is in the ledger, and
// counts as a use of the source. The record of the request gets a new ID, if it is written.
func (l *claimLoop) takeUp(ctx context.Context, s claimState, st step, r *reads) (change, error) {
	if source := st.next.source; source != nil {
		unlock, err := l.sources.locks.Share(ctx, *source)
		if err != nil {
			return change{}, err
		}
		r.unlock = unlock
		if err := l.sources.protect(ctx, *source, s.refs.object); err != nil {
			return l.reportFailure(s, fmt.Errorf("data source %s: adding source finalizer: %w", source, err))
		}
	}
	r.failure = nil
	id := ""
	if st.trigger == intent.Plan || st.next.renewsRecord() {
		id = fmt.Sprintf("%s-%d", l.c.driver.identity, l.c.requests.Add(1))
	}
	return begin(st.trigger, id, st.next), nil
}

// reschedule has the scheduler select another node. cause is nil if its event was sent.
func (l *claimLoop) reschedule(ctx context.Context, key claimKey, claim *corev1.PersistentVolumeClaim, cause error) error {
	if cause != nil {
		l.c.claimFailed(claim, failedEvent(storagehelpers.GetPersistentVolumeClaimClass(claim), cause))
	}
	const ann = storagehelpers.AnnSelectedNode
	change := kube.MetadataPatch{RemoveAnnotations: []string{ann}, Tests: map[string]any{kube.AnnotationPath(ann): claim.Annotations[ann]}}
	err := l.patchClaim(ctx, l.c.deps.Client, claim, change)
	if err != nil && !kube.IsPatchTestFailed(err) { // else another node was selected meanwhile
		return fmt.Errorf("removing annotation %s from claim %s: %w", storagehelpers.AnnSelectedNode, key, err)
	}
	l.ownership.failed(key) // where nodes compete for the claim, those that have not failed go first
	return nil
}

// patchClaim changes metadata of a claim. A deleted claim is no error.
func (l *claimLoop) patchClaim(
	ctx context.Context, c kubernetes.Interface, claim *corev1.PersistentVolumeClaim, p kube.MetadataPatch,
) error {
	_, err := l.claims.Patch(ctx, c.CoreV1().PersistentVolumeClaims(claim.Namespace), claim, p)
	return err
}

// announce sends the event Provisioning, once per claim.
func (l *claimLoop) announce(key claimKey, o operation) {
	if l.ops.announce(key) {
		l.c.event(o.claim, provisioningEvent(o.claim))
	}
}
