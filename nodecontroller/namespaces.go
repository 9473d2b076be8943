package nodecontroller

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// readNamespaces asks the namespaces that matter just now whether they have said no, so
// that the breaker counts no node for which nobody wants anything done. What one said last
// holds until it can be read again.
func (t *term) readNamespaces(ctx context.Context) {
	if !t.c.policy.writes() {
		return
	}
	for _, name := range t.concernedNamespaces() {
		ns, exists, err := t.reader.namespace(ctx, name)
		if err != nil { // the others would take as long to fail
			t.tried("namespaces", err)
			klog.FromContext(ctx).Info("Whether namespaces have opted out of the clean-up could not be read; it is read again before anything of theirs is deleted", "err", err)
			return
		}
		t.namespaces.note(name, exists && ns.Annotations[t.c.policy.ann.cleanup] == disabled)
	}
	t.tried("namespaces", nil)
}

// concernedNamespaces is those that have said no, and those of the claims that wait for
// the clean-up of a node.
func (t *term) concernedNamespaces() []string {
	names := t.namespaces.list()
	for _, key := range t.ledger.keys() {
		if _, ok := nodeOfKey(key); ok {
			continue
		}
		if pv, ok := t.volumes.Get(key); ok && pv.Spec.ClaimRef != nil {
			names = append(names, pv.Spec.ClaimRef.Namespace)
		}
	}
	if t.c.cfg.NodeCleanupUnbound == UnboundIgnore {
		return mergeNames(names, nil)
	}
	for _, claim := range t.c.claims.List() {
		node := claim.Annotations[kube.AnnSelectedNode]
		if node == "" || claim.Spec.VolumeName != "" {
			continue
		}
		if found, ok := t.c.nodes.Get(node); !ok || found.DeletionTimestamp != nil {
			names = append(names, claim.Namespace)
		}
	}
	return mergeNames(names, nil)
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
