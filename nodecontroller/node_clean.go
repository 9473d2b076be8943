package nodecontroller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// cleanTerminating deletes the claims of a node that is being deleted, and its custom
// resources after them. next is when to go on, zero when everything was dealt with.
func (t *term) cleanTerminating(ctx context.Context, node *corev1.Node, pass *nodePass) (next time.Time, err error) {
	if pass.settled == nil {
		pass.settled = map[string]bool{}
	}
	var errs []error
	shuffle(pass.volumes)
	for _, s := range pass.volumes {
		if s.member.place != placeTerminating || pass.settled[s.volume.Name] || pass.refused[s.volume.Name] {
			continue
		}
		goal := t.c.policy.goal(s)
		if goal.action == doSkip {
			t.c.notify.skipped(s, goal.reason, goal.String())
		}
		if goal.action != doDeleteClaim {
			pass.settled[s.volume.Name] = true
			continue
		}
		busy, full, err := t.deleteTerminating(ctx, node, s, pass)
		switch {
		case !full.IsZero():
			return full, errors.Join(errs...)
		case !busy.IsZero():
			next = earliest(next, busy)
			continue
		case err != nil && !isAnswer(err):
			return time.Time{}, errors.Join(append(errs, err)...)
		case err != nil:
			errs = append(errs, t.failed(s.volume, err))
			continue
		}
		pass.settled[s.volume.Name] = true
	}
	full, err := t.cleanUnbound(ctx, node.Name, node, pass)
	if errs = append(errs, err); !full.IsZero() || err != nil && !isAnswer(err) {
		return full, errors.Join(errs...)
	}
	if pass.blocked == "" && next.IsZero() && len(t.c.resources) > 0 {
		next, err = t.cleanRecords(ctx, node.Name, func() ([]finding, error) { return t.gatesOfNode(ctx, node) }, WhenNodeTerminating)
		errs = append(errs, err)
	}
	err = errors.Join(errs...)
	pass.cleaned = err == nil && next.IsZero()
	return next, err
}

// shuffle puts items in random order: those that fail time and again must not always come
// before all others, and use up their tokens.
func shuffle[T any](items []T) {
	rand.Shuffle(len(items), func(i, j int) { items[i], items[j] = items[j], items[i] })
}

// deleteTerminating deletes the claim of one volume, if the API server and the gates agree.
// busy is when to try again because the driver is being called for the volume just now, full
// because there is no token for any volume.
func (t *term) deleteTerminating(ctx context.Context, node *corev1.Node, s snapshot, pass *nodePass) (busy, full time.Time, err error) {
	full, ok := t.takeToken(time.Now())
	if !ok {
		return time.Time{}, full, nil
	}
	used := false
	defer func() {
		if !used {
			t.giveTokenBack()
		}
	}()
	live, err := t.refresh(ctx, s, true)
	if err != nil || live.volume == nil {
		return time.Time{}, time.Time{}, err
	}
	goal := t.c.policy.goal(live)
	if goal.action != doDeleteClaim {
		if goal.action == doSkip {
			t.c.notify.skipped(live, goal.reason, goal.String())
		}
		return time.Time{}, time.Time{}, nil
	}
	closed, err := t.gatesOfNode(ctx, node)
	if err != nil {
		return time.Time{}, time.Time{}, err
	}
	if live.member.place != placeTerminating {
		closed = append(closed, finding{gateAbsence, "NodeExists", "a node that stays may have the volume"})
	}
	if live.volume.Annotations[t.c.policy.ann.hold] != "" && !live.approved {
		closed = append(closed, finding{gateBreaker, "TooManyNodesLost", "the volume is held until an administrator approves its clean-up"})
	}
	if len(live.facts.users) > 0 {
		closed = append(closed, finding{gateUse, "ClaimInUse", "pod " + strings.Join(live.facts.users, ", ") + " uses the claim on a node that exists"})
	}
	if len(closed) > 0 {
		t.c.notify.skipped(live, closed[0].reason, closed[0].String())
		pass.blocked = closed[0].String()
		return time.Time{}, time.Time{}, nil
	}
	t.ledger.act(live.nodes, live.now)
	used = true
	_, busy, err = t.executor.execute(ctx, live, goal)
	return busy, time.Time{}, err
}

// gatesOfNode is what has to hold of the node itself right before anything of it is
// destroyed: that very node is still being deleted, waits for us, and wants it.
func (t *term) gatesOfNode(ctx context.Context, node *corev1.Node) ([]finding, error) {
	if !t.c.nodePolicy.deletes {
		return []finding{{gateMode, "ReportOnly", t.c.nodePolicy.why}}, nil
	}
	live, exists, err := t.reader.node(ctx, node.Name)
	if err != nil {
		return nil, err
	}
	if !exists || live.UID != node.UID || live.DeletionTimestamp == nil {
		return []finding{{gateAbsence, "NodeChanged", "the node is not the one that was being deleted"}}, nil
	}
	t.nodes.Observe(live)
	if !slices.Contains(live.Finalizers, t.c.nodePolicy.finalizer) {
		return []finding{{gateAbsence, "NodeReleased", "the node does not wait for its clean-up any more"}}, nil
	}
	if live.Annotations[t.c.policy.ann.cleanup] == disabled {
		return []finding{{gateScope, "Scope", "Node " + node.Name + " has the annotation " + t.c.policy.ann.cleanup + ": " + disabled}}, nil
	}
	granted, err := t.reader.approval(ctx, time.Now())
	if err != nil {
		return nil, err
	}
	if t.ledger.judgeWith(time.Now(), []string{node.Name}).open && !granted.covers([]string{node.Name}) {
		return []finding{{gateBreaker, "TooManyNodesLost", "too many nodes are lost"}}, nil
	}
	return nil, nil
}

// cleanUnbound deals with the claims that wait for a volume on a node that is going or
// gone, and tells of those that say so and have a volume elsewhere: the annotation is only
// a hint, and copies of claims carry a wrong one.
func (t *term) cleanUnbound(ctx context.Context, name string, node *corev1.Node, pass *nodePass) (next time.Time, err error) {
	unbound, bound := t.claimsSelecting(name)
	for _, claim := range bound {
		if node == nil {
			break // the name of a node that is long gone is no news
		}
		pv, ok := t.volumes.Get(claim.Spec.VolumeName)
		if ok && t.belongs(pv, name) {
			continue
		}
		e := warning(reasonSkipped, "AffinityMismatch: the claim names node %s in %s, but its volume %s is not local to that node", name, storagehelpers.AnnSelectedNode, claim.Spec.VolumeName)
		t.c.notify.seldom(claim, "AffinityMismatch", e)
		if ok {
			t.c.notify.seldom(pv, "AffinityMismatch", e)
		}
	}
	var errs []error
	for _, claim := range unbound { // in random order
		if t.c.cfg.NodeCleanupUnbound == UnboundIgnore || pass.settled[kube.Key(claim)] {
			continue
		}
		next, err := t.cleanClaim(ctx, name, node, claim)
		if err != nil {
			errs = append(errs, t.failed(claim, err))
		}
		if !next.IsZero() || err != nil && !isAnswer(err) {
			return next, errors.Join(errs...)
		}
		pass.settled[kube.Key(claim)] = err == nil
	}
	return time.Time{}, errors.Join(errs...)
}

// belongs tells whether pv is local to a node, as the caches say.
func (t *term) belongs(pv *corev1.PersistentVolume, node string) bool {
	s := t.look(pv.Name)
	for _, names := range [][]string{s.nodes, s.member.hosts, s.member.aliases} {
		for _, n := range names {
			if n == node {
				return true
			}
		}
	}
	return false
}

// cleanClaim deletes a claim without a volume, or has its node chosen again.
func (t *term) cleanClaim(ctx context.Context, name string, node *corev1.Node, cached *corev1.PersistentVolumeClaim) (next time.Time, err error) {
	reschedule := t.c.cfg.NodeCleanupUnbound == UnboundReschedule
	if !reschedule {
		var ok bool
		if next, ok = t.takeToken(time.Now()); !ok {
			return next, nil
		}
	}
	used := reschedule
	defer func() {
		if !used {
			t.giveTokenBack()
		}
	}()
	claim, exists, err := t.reader.claim(ctx, cached.Namespace, cached.Name)
	switch {
	case err != nil:
		return time.Time{}, err
	case !exists || claim.UID != cached.UID:
		t.claims.MarkDeleted(cached)
		return time.Time{}, nil
	}
	t.claims.Observe(claim)
	if claim.Spec.VolumeName != "" || claim.DeletionTimestamp != nil || claim.Annotations[storagehelpers.AnnSelectedNode] != name {
		return time.Time{}, nil
	}
	closed, err := t.gatesOfClaim(ctx, name, node, claim)
	if err != nil {
		return time.Time{}, err
	}
	if len(closed) > 0 {
		t.c.notify.seldom(claim, closed[0].reason, warning(reasonSkipped, "Nothing is cleaned up: %s", closed[0]))
		return time.Time{}, nil
	}
	if reschedule {
		return time.Time{}, t.reschedule(ctx, claim)
	}
	used = true
	t.ledger.act([]string{name}, time.Now())
	ctx, cancel := context.WithTimeout(ctx, t.c.cfg.Timeout)
	defer cancel()
	err = t.c.deps.Client.CoreV1().PersistentVolumeClaims(claim.Namespace).Delete(ctx, claim.Name, t.executor.deleteOptions(claim))
	t.c.metrics.action("claim_delete", t.c.policy, err)
	if err != nil && !kube.IsNotFound(err) {
		return time.Time{}, fmt.Errorf("deleting PersistentVolumeClaim %q, which waits for node %s: %w", kube.Key(claim), name, err)
	}
	klog.FromContext(ctx).Info("Claim deleted, it waited for a volume on a node that is gone", "persistentVolumeClaim", kube.Key(claim), "dryRun", t.c.policy.dryRun)
	t.c.notify.send(claim, warning(reasonClaimDeleted, "The claim was deleted: it waited for a volume on node %s, which is gone", name))
	return time.Time{}, nil
}

// gatesOfClaim is the gates of a claim without a volume. Those of an absent node itself
// were passed before.
func (t *term) gatesOfClaim(ctx context.Context, name string, node *corev1.Node, claim *corev1.PersistentVolumeClaim) ([]finding, error) {
	say := map[string]metav1.Object{"PersistentVolumeClaim": claim}
	class, ok, err := t.reader.class(ctx, storagehelpers.GetPersistentVolumeClaimClass(claim))
	if err != nil {
		return nil, err
	}
	if !ok || class.Provisioner != t.c.deps.Driver {
		return []finding{{gatePolicy, "OtherClass", "its class is not one of the driver any more"}}, nil
	}
	say["StorageClass"] = class
	ns, ok, err := t.reader.namespace(ctx, claim.Namespace)
	if err != nil {
		return nil, err
	}
	if ok {
		say["Namespace"] = ns
		t.namespaces.note(claim.Namespace, ns.Annotations[t.c.policy.ann.cleanup] == disabled)
	}
	wishes := t.c.policy.ann.wishesOf(say)
	if why := t.c.policy.outOfScope(wishes); why != "" {
		return []finding{{gateScope, "Scope", why}}, nil
	}
	users, err := t.reader.users(ctx, claim.Namespace, claim.Name, []string{name})
	if err != nil {
		return nil, err
	}
	if len(users) > 0 {
		return []finding{{gateUse, "ClaimInUse", "pod " + strings.Join(users, ", ") + " uses the claim"}}, nil
	}
	if node != nil {
		return t.gatesOfNode(ctx, node)
	}
	return t.gatesOfAbsent(ctx, name)
}

// reschedule takes the selected node away, so that the scheduler chooses another one. The
// patch applies only to the claim as it was read.
func (t *term) reschedule(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	data, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": claim.UID, "resourceVersion": claim.ResourceVersion, "annotations": map[string]any{storagehelpers.AnnSelectedNode: nil},
	}})
	if err != nil {
		return err
	}
	opts := metav1.PatchOptions{}
	if t.c.policy.dryRun {
		opts.DryRun = []string{metav1.DryRunAll}
	}
	ctx, cancel := context.WithTimeout(ctx, t.c.cfg.Timeout)
	defer cancel()
	changed, err := t.c.deps.Client.CoreV1().PersistentVolumeClaims(claim.Namespace).Patch(ctx, claim.Name, types.MergePatchType, data, opts)
	if err != nil || t.c.policy.dryRun {
		changed = claim
	}
	if err = t.claims.RecordWrite(claim, changed, err); err != nil {
		return fmt.Errorf("removing the selected node of PersistentVolumeClaim %q: %w", kube.Key(claim), err)
	}
	return nil
}
