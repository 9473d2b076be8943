// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
)

// Custom returns the informer for the custom resource of s, which all controllers of the process share: a later call for the same
// resource returns the informer of the first one. While the CustomResourceDefinition is not installed, the list is retried, and
// [Informers.Synced] names the resource. Unlike an [Optional] watch, the informer stays the same, with its handlers and caches.
func Custom[T metav1.Object, L runtime.Object](i *Informers, s Source[L]) Informer[T] {
	indexers := s.Indexers
	get := func() cache.SharedIndexInformer {
		s.Indexers = cache.Indexers{}
		informer, _ := NewInformer[T](s)
		i.filtered = append(i.filtered, &single{informer: informer.informer})
		return informer.informer
	}
	return informerFor[T](i, s.Resource.GroupResource().String(), get, indexers)
}

// single is the factory of one informer. [Informers.Start] calls it with a lock held.
type single struct {
	informer cache.SharedIndexInformer
	started  bool
	running  sync.WaitGroup
}

// StartWithContext runs the informer until ctx ends.
func (s *single) StartWithContext(ctx context.Context) {
	if s.started {
		return
	}
	s.started = true
	s.running.Go(func() { s.informer.RunWithContext(ctx) })
}

// Shutdown waits until the informer has stopped.
func (s *single) Shutdown() { s.running.Wait() }
