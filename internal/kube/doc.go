// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package kube provides what the controllers share for the Kubernetes API: client configurations,
// one shared informer per resource with trimmed objects, caches of own writes ([MutationCache]), what such a cache may lack from
// before the term ([TermCache]), and patches of metadata.
package kube
