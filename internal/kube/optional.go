package kube

import (
	"context"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// OptionalInformer is a watch, as metadata only, of a kind that may not exist in a cluster,
// or that the process may have no permission for. Nothing waits for it; what
// depends on it works without, if less promptly. The zero value has no objects.
type OptionalInformer struct {
	mu       sync.Mutex
	informer *Informer[*metav1.PartialObjectMetadata] // nil: not available so far
}

// optionalRetryInterval is the time between two looks whether a kind can be watched.
const optionalRetryInterval = 30 * time.Second

// Run waits until resource can be listed, and watches it then until ctx ends.
func (o *OptionalInformer) Run(ctx context.Context, client metadata.Interface, resource schema.GroupVersionResource, h Handlers[*metav1.PartialObjectMetadata]) {
	log := klog.FromContext(ctx).WithValues("resource", resource.GroupResource().String())
	warned := false
	for {
		_, err := client.Resource(resource).List(ctx, metav1.ListOptions{Limit: 1})
		switch {
		case err == nil:
			o.watch(ctx, client, resource, h)
			return
		case apierrors.IsForbidden(err) && !warned:
			warned = true
			log.Info("No permission to list and watch this kind: what depends on it is not watched for changes, claims that wait for it are retried with back-off", "err", err)
		default: // NotFound: nobody has installed it
			log.V(2).Info("This kind cannot be watched yet", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(optionalRetryInterval):
		}
	}
}

func (o *OptionalInformer) watch(ctx context.Context, client metadata.Interface, resource schema.GroupVersionResource, h Handlers[*metav1.PartialObjectMetadata]) {
	informer := metadatainformer.NewFilteredMetadataInformer(client, resource, metav1.NamespaceAll, 0, cache.Indexers{}, nil).Informer()
	kind := Informer[*metav1.PartialObjectMetadata]{informer}
	if err := informer.SetTransform(Trim("")); err != nil {
		panic("transform of " + resource.Resource + ": " + err.Error()) // already started: a mistake in this file
	}
	if _, err := kind.Handle(h); err != nil {
		panic("handlers of " + resource.Resource + ": " + err.Error()) // already stopped: likewise
	}
	o.mu.Lock()
	o.informer = &kind
	o.mu.Unlock()
	informer.RunWithContext(ctx)
}

// List is every object that is known, in no order.
func (o *OptionalInformer) List() []*metav1.PartialObjectMetadata {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.informer == nil {
		return nil
	}
	return o.informer.List()
}
