package nodecontroller

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"
)

// readNamespaces asks the namespaces that matter just now whether they have said no, so
// that the breaker counts no node for which nobody wants anything done. What one said last
// holds until it can be read again.
func (t *term) readNamespaces(ctx context.Context) {
	if !t.c.policy.writes() {
		return
	}
	var errs []error
	for _, name := range t.concernedNamespaces() {
		ns, exists, err := t.reader.namespace(ctx, name)
		if err == nil {
			t.namespaces.note(name, exists && ns.Annotations[t.c.policy.ann.cleanup] == disabled)
			continue
		}
		if errs = append(errs, err); !isAnswer(err) { // the others would take as long to fail
			break
		}
	}
	err := errors.Join(errs...)
	if t.tried("namespaces", err); err != nil {
		klog.FromContext(ctx).Info("Whether namespaces have opted out of the clean-up could not be read; it is read again before anything of theirs is deleted", "err", err)
	}
}

// concernedNamespaces is those that have said no, and those of the claims that wait for
// the clean-up of a node.
func (t *term) concernedNamespaces() []string {
	names := t.namespaces.list()
	for _, key := range t.ledger.keys() {
		if _, ok := nodeOfKey(key); ok {
			continue
		}
		if pv, ok := t.volumes.Get(key); ok && namesClaim(pv.Spec.ClaimRef) {
			names = append(names, pv.Spec.ClaimRef.Namespace)
		}
	}
	if t.c.cfg.NodeCleanupUnbound == UnboundIgnore {
		return mergeNames(names, nil)
	}
	for _, claim := range t.c.claims.List() {
		node := claim.Annotations[storagehelpers.AnnSelectedNode]
		if node == "" || claim.Spec.VolumeName != "" {
			continue
		}
		if found, ok := t.c.nodes.Get(node); !ok || found.DeletionTimestamp != nil {
			names = append(names, claim.Namespace)
		}
	}
	return mergeNames(names, nil)
}

// namesClaim tells whether ref is the name of a claim that can exist. The API server takes
// any text, even none, for the names in a volume.
func namesClaim(ref *corev1.ObjectReference) bool {
	return ref != nil && ref.Namespace != "" && ref.Name != "" && len(content.IsPathSegmentName(ref.Namespace)) == 0 && len(content.IsPathSegmentName(ref.Name)) == 0
}

// recount has the ledger follow what was read: all of it, before the first of what it is
// about has its turn.
func (t *term) recount() {
	for _, key := range t.ledger.keys() {
		if node, ok := nodeOfKey(key); !ok {
			t.gather(key)
		} else if key == keyOfClaims(node) {
			t.noteClaims(node)
		}
	}
	t.ledger.changed()
}
