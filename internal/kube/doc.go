// Package kube is what the loops share of the Kubernetes API: clients, one
// watch per kind with objects cut down to what is used, memory of the own
// writes, and patches of metadata.
package kube
