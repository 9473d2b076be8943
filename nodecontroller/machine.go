package nodecontroller

import (
	"crypto/sha256"
	"encoding/hex"

	corev1 "k8s.io/api/core/v1"
)

// machineOf tells apart the machines behind nodes of one name; "" when the kubelet reports
// none. It is a digest, since whoever may read volumes need not know the ID of a machine.
func machineOf(node *corev1.Node) string {
	if node.Status.NodeInfo.MachineID == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(node.Status.NodeInfo.MachineID))
	return hex.EncodeToString(sum[:8])
}

// otherMachine is the node of a volume that has come back, but not on the machine that is
// noted; "" when it has, or when that is not known. A system that was installed anew has
// another ID as well, and may have kept its data: so nothing follows from it but a warning.
func (t *term) otherMachine(s snapshot) string {
	ann := t.c.policy.ann
	noted, names := s.volume.Annotations[ann.lostMachine], ann.lostNodes(s.volume)
	if noted == "" || len(names) != 1 { // of several nodes nobody could tell whose it is
		return ""
	}
	node, ok := t.c.nodes.Get(names[0])
	if !ok {
		return ""
	}
	if is := machineOf(node); is == "" || is == noted {
		return ""
	}
	return node.Name
}
