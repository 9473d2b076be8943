// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package webhook serves the admission webhooks of the node controller, on every replica. The pod
// webhook adds the storage capacity that a pod needs, for a scheduler extender. The PVC webhook
// adds the finalizer that protects a claim until its pods are deleted.
//
//	server.go  the HTTP server      review.go  AdmissionReview: checks, the response
//	pod.go     the pod webhook      claim.go   the PVC webhook
//	certificate.go  the serving certificate, which is read again when its files change
//	lookup.go  reads of claims and StorageClasses
//	patch.go   JSON patches with the fewest operations
//
// An object is never encoded again from a Go type, which would remove the fields that the type does
// not know. A failed read is an HTTP error and not a denial, so that the failurePolicy applies.
package webhook
