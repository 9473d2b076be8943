// Package migrate rewrites the manifest of a CSI driver so that storage-controller takes
// the place of the sidecars csi-provisioner and csi-attacher, and of the Kubernetes side
// of topolvm-controller. It reads and writes text and does nothing else.
//
// Lines that do not belong to a replaced container are kept byte for byte: the tree of
// a document says where the containers are, and only their lines are exchanged. Where
// that is not possible, as in JSON, the document is written anew from its tree.
//
//	text ─split─► documents ─find─► sources (one per sidecar) ─group─► containers ─render─► text
//
// Which flags there are is told by the caller in [Tables], so that the result always
// matches the program.
package migrate
