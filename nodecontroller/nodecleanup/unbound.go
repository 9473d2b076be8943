// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// unbound reads a claim that waits for a volume of the driver on a Node of h, and why its owners do not
// consent to its deletion. It returns nil if the claim does not wait for such a volume.
func (g gatherer) unbound(
	ctx context.Context, h host, seen *corev1.PersistentVolumeClaim,
) (claim *corev1.PersistentVolumeClaim, refusal string, err error) {
	claim, err = g.src.claim(ctx, seen.Namespace, seen.Name)
	if err != nil || claim == nil || claim.UID != seen.UID || claim.Spec.VolumeName != "" || claim.DeletionTimestamp != nil ||
		!slices.Contains(h.names(), claim.Annotations[storagehelpers.AnnSelectedNode]) {
		return nil, "", err
	}
	name := storagehelpers.GetPersistentVolumeClaimClass(claim)
	if name == "" {
		return nil, "", nil
	}
	class, err := g.src.class(ctx, name)
	if err != nil || class == nil || class.Provisioner != g.policy.driver {
		return nil, "", err
	}
	owners := map[string]metav1.Object{"PersistentVolumeClaim": claim, "StorageClass": class}
	_, err = g.owners(ctx, owners, claim.Namespace, "")
	return claim, g.policy.refusal(owners), err
}

// unbound returns the claims that wait for a volume of the driver on a Node of h, as the caches know
// them, if they are to be deleted.
func (t *term) unbound(ctx context.Context, h host) (claims []*corev1.PersistentVolumeClaim, err error) {
	if t.policy.NodeCleanupUnbound != UnboundDelete {
		return nil, nil
	}
	for _, seen := range t.selecting(h) {
		claim, refusal, err := t.cached.unbound(ctx, h, seen)
		switch {
		case err != nil && !isAnswer(err):
			return nil, err
		case claim != nil && err == nil && refusal != "":
			t.c.notify.seldom(claim, reasonSkipped, "Scope", "Nothing is cleaned up: Scope: "+refusal)
		case claim != nil: // after an error, removeUnbound reads the Namespace again, and fails for this claim only
			claims = append(claims, claim)
		}
	}
	return claims, nil
}

// selecting returns the claims whose annotation selects a Node of h.
func (t *term) selecting(h host) (claims []*corev1.PersistentVolumeClaim) {
	for _, name := range h.names() {
		for _, cached := range t.c.claims.ByIndex(kube.BySelectedNode, name) {
			if claim, ok := t.claims.Get(kube.Key(cached)); ok {
				claims = append(claims, claim)
			}
		}
	}
	return claims
}

// removeUnbound deletes a claim that waits for a volume on a Node of h.
func (c *cleaner) removeUnbound(ctx context.Context, h host, seen *corev1.PersistentVolumeClaim) (result, error) {
	var claim *corev1.PersistentVolumeClaim
	return c.attempt(ctx, []host{h}, func() (t target, exists bool, err error) {
		if claim, t.refusal, err = c.gather.unbound(ctx, h, seen); err != nil || claim == nil {
			return t, false, err
		}
		if t.users, err = c.gather.users(ctx, claim, h.names()); err != nil {
			return t, false, err
		}
		t.hosts, err = c.gather.hosts(ctx, []string{h.value})
		return t, true, err
	}, func() error {
		return c.deleteClaim(ctx, claim, claim, "The claim was deleted: it waited for a volume on node "+h.name()+", which was deleted")
	})
}

// mismatched reports claims that select a Node of h, but have a volume elsewhere. The annotation is
// only a hint, and restored claims may carry that of another claim.
func (p pass) mismatched() {
	for _, claim := range p.selecting(p.h) {
		name := claim.Spec.VolumeName
		if name == "" || slices.Contains(p.c.index.volumes.of(name), p.h.value) {
			continue
		}
		message := "AffinityMismatch: the claim selects node " + p.h.name() + " in " + storagehelpers.AnnSelectedNode +
			", but its volume " + name + " is not local to that node"
		p.c.notify.seldom(claim, reasonSkipped, "AffinityMismatch", message)
		if pv, ok := p.volumes.Get(name); ok {
			p.c.notify.seldom(pv, reasonSkipped, "AffinityMismatch", message)
		}
	}
}
