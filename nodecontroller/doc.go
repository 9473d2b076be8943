// Package nodecontroller looks after the volumes of a driver that live on one node:
// it takes claims, volumes and finalizers away when the node has gone for good, helps
// claims and pods over what Kubernetes leaves undone, and in its subpackage answers
// admission requests.
//
// It owns, on objects (d is the name of the driver in lower case):
//
//   - the finalizer d/node on a Node, from when the driver is on it until its deletion
//     was dealt with, for the length of --node-finalizer-timeout at most; another
//     program may add it;
//   - the annotations d/node-missing-since, d/node-missing-seen, d/lost-node,
//     d/lost-node-uid, d/lost-node-machine and d/node-cleanup-hold on a
//     PersistentVolume, until its node is back;
//   - the annotation d/node-cleanup: disabled on a PersistentVolume whose Node had it
//     and is gone;
//   - the finalizer d/pvc on a PersistentVolumeClaim, and an annotation on pods whose
//     volume grows.
//
// People set d/node-cleanup on classes, namespaces, claims, volumes and nodes,
// d/local-data on nodes, and d/node-cleanup-approve on the CSIDriver.
//
// A volume whose nodes are gone goes through these states; at each arrow the process may
// die, since everything follows from the API again:
//
//	suspect ─► claim deleted ─► draining ─► released ─► volume deleted ─► finalizers removed
//
// Gathering reads caches, and decide, which has no side effects, names the one next step.
// Before a step that cannot be undone everything is read once more from the API server,
// decide and all gates are asked about that, and the deletion carries UID and
// resourceVersion of what was read. That a cache does not have a node never suffices.
//
// The breaker counts the nodes that are lost, and what it stops is written down on the
// volumes, so that neither time nor a restart lets it go on.
package nodecontroller
