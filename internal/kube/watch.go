// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// Source describes a watch that one controller starts and stops, for a resource whose CRD may be
// installed and removed while the process runs.
type Source[L runtime.Object] struct {
	Object    runtime.Object // an empty object of the resource
	List      func(context.Context, metav1.ListOptions) (L, error)
	Watch     func(context.Context, metav1.ListOptions) (watch.Interface, error)
	Selector  string // of labels; empty means all objects
	Transform cache.TransformFunc
	Indexers  cache.Indexers
	// Failed is called with each error of a list or watch that the informer retries.
	Failed func(error)
}

// Probe returns the error of a list request for one object. Unlike a watch, it has the timeout of other
// requests, see [ForRole].
func (s Source[L]) Probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	_, err := s.List(ctx, metav1.ListOptions{Limit: 1, LabelSelector: s.Selector})
	return err
}

// NewInformer returns an informer for s, and the function that runs it until ctx ends.
func NewInformer[T metav1.Object, L runtime.Object](s Source[L]) (Informer[T], func(ctx context.Context)) {
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
	err := informer.SetTransform(s.Transform)
	if err == nil {
		err = informer.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) { s.Failed(err) })
	}
	if err != nil {
		panic(fmt.Sprintf("informer for %T: %v", s.Object, err)) // the informer is new: neither started nor stopped
	}
	return Informer[T]{informer}, informer.RunWithContext
}
