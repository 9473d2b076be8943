// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package apiserver is an API server in memory behind an [http.RoundTripper]. The real client-go
// (typed clients with JSON and protobuf, metadata and dynamic clients, informers) talks to it without
// a network, also inside bubbles of testing/synctest: it starts no goroutines, waits on channels only,
// and reads the time from package time.
//
// It has the semantics of the real API server for the resources in [resources]: resourceVersions,
// conflicts, preconditions, finalizers, graceful deletion of Pods, status subresources, patches, pages,
// watches, selectors, and the admission plugins for storage. The tests compare it with the real one,
// request by request.
//
// Differences: managedFields are not kept, tables have fewer columns, server-side apply is refused, and the schemas of custom
// resources are not enforced. Of the built-in resources, only the validation that a controller for
// storage can run into is implemented.
package apiserver
