// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// OptionalInformer watches the metadata of a resource whose CRD may not be installed, or for which
// the process may lack permissions. Until then it has no objects, and controllers that depend on
// them retry with back-off.
type OptionalInformer struct {
	mu       sync.Mutex
	informer *Informer[*metav1.PartialObjectMetadata] // nil until the resource could be listed
}

// longestRecheck is the longest time between two attempts of [Recheck].
const longestRecheck = 30 * time.Second

// RecheckBackoff returns the times between attempts to list a resource that is not served, or may not be listed: 1 s, doubled up
// to longest. While an API server starts, either may be so for a second.
func RecheckBackoff(longest time.Duration) *wait.Backoff {
	return &wait.Backoff{Duration: min(time.Second, longest), Factor: 2, Cap: longest, Steps: math.MaxInt}
}

// Recheck calls list until it succeeds, at most every 30 s. It returns false if ctx ends before.
func Recheck(ctx context.Context, list func(context.Context) error) bool {
	for backoff := RecheckBackoff(longestRecheck); list(ctx) != nil; {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(backoff.Step()):
		}
	}
	return true
}

// Run waits until resource can be listed, then watches it until ctx ends.
func (o *OptionalInformer) Run(
	ctx context.Context, client metadata.Interface, resource schema.GroupVersionResource, h Handlers[*metav1.PartialObjectMetadata],
) {
	log := klog.FromContext(ctx).WithValues("resource", resource.GroupResource().String())
	warned := false
	listed := Recheck(ctx, func(ctx context.Context) error {
		_, err := client.Resource(resource).List(ctx, metav1.ListOptions{Limit: 1})
		switch {
		case err == nil:
		case apierrors.IsForbidden(err) && !warned:
			warned = true
			log.Info("List and watch are forbidden. Grant list and watch on the resource to the ServiceAccount", "err", err)
		default: // NotFound: the CRD is not installed
			log.V(2).Info("Resource not available, retrying", "err", err)
		}
		return err
	})
	if listed {
		o.watch(ctx, client, resource, h)
	}
}

func (o *OptionalInformer) watch(
	ctx context.Context, client metadata.Interface, resource schema.GroupVersionResource, h Handlers[*metav1.PartialObjectMetadata],
) {
	shared := metadatainformer.NewFilteredMetadataInformer(client, resource, metav1.NamespaceAll, 0, cache.Indexers{}, nil).Informer()
	informer := Informer[*metav1.PartialObjectMetadata]{shared}
	var before error // of the list or watch
	err := shared.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
		reportWatchError(ctx, r, resource.GroupResource().String(), before, err)
		before = err
	})
	if err == nil {
		err = shared.SetTransform(Trim(""))
	}
	if err == nil {
		_, err = informer.Handle(h)
	}
	if err != nil {
		panic(fmt.Sprintf("informer for %s: %v", resource.Resource, err)) // the informer is new: neither started nor stopped
	}
	o.mu.Lock()
	o.informer = &informer
	o.mu.Unlock()
	shared.RunWithContext(ctx)
}

// List returns all cached objects, in no particular order.
func (o *OptionalInformer) List() []*metav1.PartialObjectMetadata {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.informer == nil {
		return nil
	}
	return o.informer.List()
}
