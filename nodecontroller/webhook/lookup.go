// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"cmp"
	"context"
	"fmt"
	"net/http"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/storage-controller/storage-controller/internal/kube"
)

const (
	// maxReads bounds the live reads that one request makes at the same time.
	maxReads = 10
	// maxLiveReads bounds those of all requests. Others wait: every client that reaches the port may cause reads.
	maxLiveReads = 50
)

// lookup reads claims and StorageClasses for one request: from the caches, and live what they do
// not have. Nothing is read live twice.
type lookup struct {
	*Server
	ctx         context.Context
	namespace   string
	liveClaims  map[string]*corev1.PersistentVolumeClaim // nil: not found
	liveClasses map[string]*storagev1.StorageClass
}

func (s *Server) newLookup(ctx context.Context, namespace string) *lookup {
	return &lookup{
		s, ctx, namespace, map[string]*corev1.PersistentVolumeClaim{}, map[string]*storagev1.StorageClass{},
	}
}

// claim returns the claim of that name, nil if it is not found. It may be stale unless it was read live.
func (l *lookup) claim(name string) *corev1.PersistentVolumeClaim {
	if live, read := l.liveClaims[name]; read {
		return live
	}
	cached, _ := l.deps.Claims.Get(l.namespace + "/" + name)
	return cached
}

// read reads the claims of names live, up to [maxReads] at the same time.
func (l *lookup) read(names []string) error {
	claims := make([]*corev1.PersistentVolumeClaim, len(names))
	group, ctx := errgroup.WithContext(l.ctx)
	group.SetLimit(maxReads)
	for i, name := range names {
		if live, read := l.liveClaims[name]; read {
			claims[i] = live
			continue
		}
		group.Go(func() (err error) {
			defer recoverAs(ctx, &err) // in this goroutine a panic would end the process
			claims[i], err = l.readClaim(ctx, name)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	for i, name := range names {
		l.liveClaims[name] = claims[i]
	}
	return nil
}

// beginRead waits until one more live read may begin, and counts it. Call end after it.
func (s *Server) beginRead(ctx context.Context) (end func(), err error) {
	if !s.reads.TryAcquire(1) && s.reads.Acquire(ctx, 1) != nil {
		return nil, refuse(http.StatusServiceUnavailable, "%d reads from the API server for other requests are running", maxLiveReads)
	}
	s.metrics.liveReads.Inc()
	return func() { s.reads.Release(1) }, nil
}

func (l *lookup) readClaim(ctx context.Context, name string) (*corev1.PersistentVolumeClaim, error) {
	end, err := l.beginRead(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	claim, err := l.deps.Client.CoreV1().PersistentVolumeClaims(l.namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case kube.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("reading PersistentVolumeClaim %q: %w", l.namespace+"/"+name, err)
	}
	return claim, nil
}

// class returns the StorageClass of that name, nil if it is not found. A class that the cache does
// not have is read live: it is often created together with its claims.
func (l *lookup) class(name string) (*storagev1.StorageClass, error) {
	if len(validation.IsDNS1123Subdomain(name)) > 0 {
		return nil, nil // no class, or no name of an object
	}
	if cached, ok := l.deps.Classes.Get(name); ok {
		return cached, nil
	}
	if live, read := l.liveClasses[name]; read {
		return live, nil
	}
	end, err := l.beginRead(l.ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	class, err := l.deps.Client.StorageV1().StorageClasses().Get(l.ctx, name, metav1.GetOptions{})
	if kube.IsNotFound(err) {
		class, err = nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading StorageClass %q: %w", name, err)
	}
	l.liveClasses[name] = class
	return class, nil
}

// deviceClass returns the device class of a claim with the StorageClass name, which is nil for a
// claim without one. It returns "" if the StorageClass is none of the driver.
func (l *lookup) deviceClass(name *string) (string, error) {
	if name == nil {
		name = kube.DefaultClass(l.deps.Classes.List())
	}
	if name == nil {
		return "", nil
	}
	class, err := l.class(*name)
	if class == nil || err != nil || class.Provisioner != l.cfg.Driver {
		return "", err
	}
	// the driver treats an empty parameter like a missing one
	return cmp.Or(class.Parameters[l.cfg.DeviceClassParameter], l.cfg.DefaultDeviceClass), nil
}

// className returns the StorageClass that a claim or its template names, nil for none.
func className(annotations map[string]string, field *string) *string {
	if name, ok := annotations[corev1.BetaStorageClassAnnotation]; ok {
		return &name
	}
	return field
}
