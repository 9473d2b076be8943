// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestProbeTimeout: the API server accepts the request and does not respond.
func TestProbeTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		source := Source[*corev1.NodeList]{List: func(ctx context.Context, _ metav1.ListOptions) (*corev1.NodeList, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}}
		if err := source.Probe(t.Context()); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != requestTimeout {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}
