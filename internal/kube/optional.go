// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// LongestRecheck is the longest time between two attempts to list resources that are not served, or may not be listed.
const LongestRecheck = 30 * time.Second

// Recheck calls list until it succeeds: after 1, 2, 4 seconds and so on, at most every longest. While an API server starts, a list
// may fail for a second. Recheck returns false if ctx ends before.
func Recheck(ctx context.Context, longest time.Duration, list func(context.Context) error) bool {
	backoff := &wait.Backoff{Duration: min(time.Second, longest), Factor: 2, Cap: longest, Steps: math.MaxInt}
	for list(ctx) != nil {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(backoff.Step()):
		}
	}
	return true
}

// Optional watches resources whose CRDs may be installed and removed while the process runs, or which the process may not be permitted
// to list. The watches are open while all of the resources can be listed. W holds their informers.
type Optional[W any] struct {
	resources string
	longest   time.Duration
	open      func(context.Context) (W, []Watch, error)
	refused   func(ctx context.Context, why error)
	limit     rate.Sometimes // of the log

	mu        sync.Mutex
	informers *W            // nil: the watches are not open
	why       error         // they are not
	changed   chan struct{} // closed when they are opened or closed
}

// NewOptional returns watches that are not open. Messages contain resources.
//
// open returns new informers and their watches, or why the resources cannot be listed. It is retried as in [Recheck]. The watches are
// closed after the API server has refused a list for a third of longest. refused is called with each new reason for which they are not
// open.
func NewOptional[W any](
	resources string, longest time.Duration, open func(context.Context) (W, []Watch, error), refused func(ctx context.Context, why error),
) *Optional[W] {
	return &Optional[W]{
		resources: resources, longest: longest, open: open, refused: refused, limit: rate.Sometimes{Interval: time.Minute},
		why: fmt.Errorf("the %s have not been listed yet", resources), changed: make(chan struct{}),
	}
}

// OptionalMetadata is an [Optional] watch of the metadata of one resource.
type OptionalMetadata = Optional[Informer[*metav1.PartialObjectMetadata]]

// NewOptionalMetadata returns the watch of a resource. It calls h, and again for all objects each time the watch is opened.
func NewOptionalMetadata(
	client metadata.Interface, resource schema.GroupVersionResource, h Handlers[*metav1.PartialObjectMetadata],
) *OptionalMetadata {
	source := Source[*metav1.PartialObjectMetadataList]{
		Resource: resource, Object: &metav1.PartialObjectMetadata{}, Transform: Trim(""),
		List: client.Resource(resource).List, Watch: client.Resource(resource).Watch,
	}
	open := func(ctx context.Context) (informer Informer[*metav1.PartialObjectMetadata], _ []Watch, err error) {
		err = source.Probe(ctx)
		if err != nil {
			return informer, nil, err
		}
		informer, watch := NewInformer[*metav1.PartialObjectMetadata](source)
		_, err = informer.Handle(h)
		return informer, []Watch{watch}, err
	}
	name := resource.GroupResource().String()
	return NewOptional(name, LongestRecheck, open, func(ctx context.Context, why error) {
		log := klog.FromContext(ctx).WithValues("resource", name)
		if apierrors.IsForbidden(why) {
			log.Info("List and watch are forbidden. Grant list and watch on the resource to the ServiceAccount", "err", why)
			return
		}
		log.V(2).Info("Resource not available, retrying", "err", why) // NotFound: the CRD is not installed
	})
}

// Get returns the informers, or nil and why the watches are not open. changed is closed when the watches are opened or closed.
func (o *Optional[W]) Get() (informers *W, changed <-chan struct{}, why error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.informers, o.changed, o.why
}

// Wait waits until the watches are open, or until ctx ends.
func (o *Optional[W]) Wait(ctx context.Context) {
	for {
		informers, changed, _ := o.Get()
		if informers != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// Do calls work if the watches are open. The context of work ends when they are closed. Do returns the cause of ctx if they are not
// open, or not any more; else the error of work.
func (o *Optional[W]) Do(ctx context.Context, work func(context.Context, *W) error) error {
	informers, closed, _ := o.Get()
	if informers == nil || ctx.Err() != nil {
		return context.Cause(ctx)
	}
	open, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() {
		select {
		case <-open.Done():
		case <-closed:
			cancel(fmt.Errorf("the %s cannot be listed any more", o.resources))
		}
	})
	err := work(open, informers)
	if now, _, _ := o.Get(); now != informers {
		return context.Cause(ctx)
	}
	return err
}

// Run opens and closes the watches until ctx ends. Then the informers remain, without updates.
func (o *Optional[W]) Run(ctx context.Context) {
	for ctx.Err() == nil {
		var informers W
		var watches []Watch
		listed := Recheck(ctx, o.longest, func(ctx context.Context) (err error) {
			informers, watches, err = o.open(ctx)
			if err != nil && ctx.Err() == nil && o.set(nil, err) {
				o.refused(ctx, err)
			}
			return err
		})
		if listed {
			o.watch(ctx, &informers, watches)
		}
	}
}

// watch runs watches until ctx ends, or until the API server refuses them.
func (o *Optional[W]) watch(ctx context.Context, informers *W, watches []Watch) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	suspected := make(chan struct{}, 1) // has an element after an error that closes the watches if it lasts
	var listed []cache.DoneChecker
	for _, w := range watches {
		listed = append(listed, w.informer.HasSyncedChecker())
		var before error
		w.handleErrors(func(err error) {
			if isUnavailable(err) {
				select {
				case suspected <- struct{}{}:
				default:
				}
			}
			o.failed(ctx, w.resource, before, err)
			before = err
		})
		wg.Go(func() { w.informer.RunWithContext(ctx) })
	}
	synced := make(chan struct{})
	wg.Go(func() {
		if cache.WaitFor(ctx, "", listed...) {
			close(synced)
		}
	})
	for {
		select {
		case <-ctx.Done():
			return
		case <-suspected:
			if why := o.lasting(ctx, watches); why != nil {
				o.set(nil, why) // before the informers stop
				return
			}
		case <-synced: // here, so that watches that are closed are not opened
			o.set(informers, nil)
			synced = nil
		}
	}
}

// isUnavailable reports whether err means that a resource is not served, or may not be listed. Informers retry after other errors.
func isUnavailable(err error) bool { return apierrors.IsNotFound(err) || apierrors.IsForbidden(err) }

// lasting returns why a resource is not available, or nil once all of them can be listed.
func (o *Optional[W]) lasting(ctx context.Context, watches []Watch) error {
	patience := o.longest / 3
	for began := time.Now(); ; {
		var err error
		for _, w := range watches {
			err = errors.Join(err, w.probe(ctx))
		}
		switch {
		case ctx.Err() != nil || !isUnavailable(err):
			return nil
		case time.Since(began) >= patience:
			return fmt.Errorf("a watched resource is not available any more: %w", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(patience / 10):
		}
	}
}

// failed logs an error of a list or watch, which the informer retries: one per minute, but not that a watch has expired.
func (o *Optional[W]) failed(ctx context.Context, resource string, before, err error) {
	level := 2
	switch {
	case apierrors.IsForbidden(err):
		reportForbidden(ctx, resource, before, err)
		return
	case !apierrors.IsNotFound(err) && !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err):
		o.limit.Do(func() { level = 0 })
		o.mu.Lock()
		if o.informers == nil {
			o.why = fmt.Errorf("listing and watching the %s: %w", o.resources, err)
		}
		o.mu.Unlock()
	}
	klog.FromContext(ctx).V(level).Info("List or watch failed, retrying", "resource", resource, "err", err)
}

// set sets the informers, or why there are none. It reports whether the reason is a new one.
func (o *Optional[W]) set(informers *W, why error) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	isNew := why != nil && (o.why == nil || o.why.Error() != why.Error())
	if informers != o.informers {
		close(o.changed)
		o.changed = make(chan struct{})
	}
	o.informers, o.why = informers, why
	return isNew
}
