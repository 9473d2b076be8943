// Package nodecontroller looks after the volumes of a driver that live on one node:
// it takes claims, volumes and finalizers away when the node has gone for good, helps
// claims and pods over what Kubernetes leaves undone, and in its subpackage answers
// admission requests.
package nodecontroller
