// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// Source describes a watch of an [Optional].
type Source[L runtime.Object] struct {
	Resource  schema.GroupVersionResource
	Object    runtime.Object // an empty object of the resource
	List      func(context.Context, metav1.ListOptions) (L, error)
	Watch     func(context.Context, metav1.ListOptions) (watch.Interface, error)
	Selector  string // of labels; empty means all objects
	Transform cache.TransformFunc
	Indexers  cache.Indexers
}

// Watch is the watch of one resource, which has not been started.
type Watch struct {
	resource string
	probe    func(context.Context) error
	informer cache.SharedIndexInformer
}

// handleErrors calls failed with each error of a list or watch.
func (w Watch) handleErrors(failed func(error)) {
	_ = w.informer.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) { failed(err) })
}

// Probe returns the error of a list request for one object. Unlike a watch, it has the timeout of other
// requests, see [ForRole].
func (s Source[L]) Probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	_, err := s.List(ctx, metav1.ListOptions{Limit: 1, LabelSelector: s.Selector})
	return err
}

// NewInformer returns an informer for s and its watch.
func NewInformer[T metav1.Object, L runtime.Object](s Source[L]) (Informer[T], Watch) {
	source := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = s.Selector
			return s.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = s.Selector
			return s.Watch(ctx, o)
		},
	}
	informer := cache.NewSharedIndexInformer(source, s.Object, 0, s.Indexers)
	_ = informer.SetTransform(s.Transform) // fails only after the start
	return Informer[T]{informer}, Watch{s.Resource.GroupResource().String(), s.Probe, informer}
}
