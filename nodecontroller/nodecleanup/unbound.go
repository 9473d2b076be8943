package nodecleanup

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// waitsFor reports whether a claim waits for a volume on one of the named Nodes.
func waitsFor(claim *corev1.PersistentVolumeClaim, nodes []string) bool {
	return claim.Spec.VolumeName == "" && claim.DeletionTimestamp == nil &&
		slices.Contains(nodes, claim.Annotations[storagehelpers.AnnSelectedNode])
}

// unbound returns the claims that wait for a volume of the driver on a Node of h, as the caches know
// them, if they are to be deleted.
func (t *term) unbound(ctx context.Context, h host) ([]*corev1.PersistentVolumeClaim, error) {
	if t.policy.NodeCleanupUnbound != UnboundDelete {
		return nil, nil
	}
	var claims []*corev1.PersistentVolumeClaim
	for _, claim := range t.selecting(h) {
		class, ok := t.c.classes.Get(storagehelpers.GetPersistentVolumeClaimClass(claim))
		if !ok || class.Provisioner != t.policy.driver || !waitsFor(claim, h.names()) {
			continue
		}
		owners := map[string]metav1.Object{"PersistentVolumeClaim": claim, "StorageClass": class}
		ns, err := t.cached.src.namespace(ctx, claim.Namespace)
		switch {
		case err != nil && !isAnswer(err):
			return nil, err
		case err != nil: // removeUnbound reads the Namespace again, and fails for this claim only
			claims = append(claims, claim)
			continue
		case ns != nil:
			owners["Namespace"] = ns
		}
		if why := t.policy.refusal(t.policy.consentOf(owners)); why != "" {
			t.c.notify.seldom(claim, reasonSkipped, "Scope", "Nothing is cleaned up: Scope: "+why)
			continue
		}
		claims = append(claims, claim)
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
func (c *cleaner) removeUnbound(ctx context.Context, h host, seen *corev1.PersistentVolumeClaim) (r result, err error) {
	var claim *corev1.PersistentVolumeClaim
	reasons, ok, err := c.permit(ctx, []host{h}, func() (t target, exists bool, err error) {
		claim, err = c.gather.src.claim(ctx, seen.Namespace, seen.Name)
		if err != nil || claim == nil || claim.UID != seen.UID || !waitsFor(claim, h.names()) {
			return t, false, err
		}
		owners := map[string]metav1.Object{"PersistentVolumeClaim": claim}
		if _, err = c.gather.owners(ctx, owners, claim.Namespace, storagehelpers.GetPersistentVolumeClaimClass(claim)); err != nil {
			return t, false, err
		}
		if c.gather.provisioner(owners) != c.policy.driver {
			return t, false, nil
		}
		t.consent = c.policy.consentOf(owners)
		if t.users, err = c.gather.users(ctx, claim, h.names()); err != nil {
			return t, false, err
		}
		t.hosts, err = c.gather.hosts(ctx, []string{h.value})
		return t, true, err
	})
	if r.reasons = reasons; err != nil || !ok {
		return r, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.live.timeout)
	defer cancel()
	err = c.deleteClaim(ctx, claim, claim, "The claim was deleted: it waited for a volume on node "+h.name()+", which was deleted")
	r.done = err == nil
	return r, err
}

// mismatched reports claims that select a Node of h, but have a volume elsewhere. The annotation is
// only a hint, and restored claims may carry that of another claim.
func (p pass) mismatched() {
	for _, claim := range p.selecting(p.h) {
		name := claim.Spec.VolumeName
		if name == "" || slices.Contains(p.c.index.valuesOf(name), p.h.value) {
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
