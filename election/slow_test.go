// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
)

// TestSlowRenewal: the API server executes a renewal and responds to it late, and then responds to nothing. The
// leader's term ends before a standby that has observed the renewal may acquire the Lease.
func TestSlowRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		t.Setenv("POD_NAME", "slow")
		var updates atomic.Int32
		var observed atomic.Pointer[time.Time] // the last renewal, by a standby at the earliest
		hang := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
		server := apiserver.New(apiserver.Hooks{
			Before: func(ctx context.Context, r apiserver.Request) error {
				if updates.Load() >= 3 {
					return hang(ctx)
				}
				return nil
			},
			After: func(ctx context.Context, r apiserver.Request) error {
				if r.Verb != "update" || updates.Add(1) < 3 {
					return nil
				}
				now := time.Now()
				observed.Store(&now)
				time.Sleep(7 * time.Second) // less than the renew deadline
				return nil
			},
		})
		client, err := kubernetes.NewForConfig(server.Config("slow"))
		if err != nil {
			t.Fatal(err)
		}
		lock, err := NewLock(client.CoordinationV1(), "default", "lease", nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		cfg := DefaultConfig()
		candidate, err := NewCandidate(cfg, lock, NewMetrics(prometheus.NewRegistry()))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		err = candidate.Campaign(ctx, func(term context.Context) error {
			<-term.Done()
			defer cancel()
			if since := time.Since(*observed.Load()); since >= cfg.LeaseDuration || since < cfg.RenewDeadline {
				t.Errorf("the term ended %v after the last renewal, want %v to %v", since, cfg.RenewDeadline, cfg.LeaseDuration)
			}
			return context.Cause(term)
		})
		if err != nil {
			t.Error(err)
		}
	})
}
