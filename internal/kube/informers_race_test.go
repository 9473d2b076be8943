// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"testing"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
)

// TestRequestedDuringStart requests an informer while another controller starts its own late. The race
// detector reports concurrent access.
func TestRequestedDuringStart(t *testing.T) {
	t.Parallel()
	cfg := &rest.Config{Host: "127.0.0.1:1"}
	i := NewInformers(kubernetes.NewForConfigOrDie(cfg), metadata.NewForConfigOrDie(cfg), "drv.example.com")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	requested, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-requested:
				return
			default:
				i.Start(ctx)
			}
		}
	}()
	for range 10000 {
		i.IfAllowed().ConfigMap("ns", "name")
	}
	close(requested)
	<-done
	i.Shutdown()
}

// TestScrapedDuringConstruction scrapes metrics while controllers request their informers. The
// race detector reports concurrent access.
func TestScrapedDuringConstruction(t *testing.T) {
	t.Parallel()
	cfg := &rest.Config{Host: "127.0.0.1:1"} // nothing is started
	i := NewInformers(kubernetes.NewForConfigOrDie(cfg), metadata.NewForConfigOrDie(cfg), "drv.example.com")
	begun, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for n := range 100 {
			_, _ = i.Forbidden(), i.Synced()
			if n == 0 {
				close(begun)
			}
		}
	}()
	<-begun
	i.Claims()
	i.IfAllowed().Pods()
	i.IfAllowed().Attachments()
	<-done
	if i.Synced() == nil {
		t.Error("resources are synced that are not watched yet")
	}
}
