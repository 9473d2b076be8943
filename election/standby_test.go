// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// scriptedLock is a Lease of another replica.
type scriptedLock struct {
	resourcelock.Interface
	read func() resourcelock.LeaderElectionRecord
}

func (l scriptedLock) Get(context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record := l.read()
	return &record, []byte(record.HolderIdentity), nil
}

func (scriptedLock) Identity() string { return "second" }
func (scriptedLock) Describe() string { return "default/lease" }

// TestStandbyLock checks when a standby may acquire the Lease, which it reads each half second.
func TestStandbyLock(t *testing.T) {
	seconds := func(n float64) time.Duration { return time.Duration(n * float64(time.Second)) }
	for name, c := range map[string]struct {
		holder     string
		renewed    []time.Duration // after the begin
		released   time.Duration
		want       time.Duration
		wantHolder string
	}{
		"released":                        {holder: "first", released: seconds(3.2), want: seconds(3.5)},
		"not renewed":                     {holder: "first", want: seconds(15)},
		"renewed twice":                   {holder: "first", renewed: []time.Duration{seconds(4.8), seconds(9.8)}, want: seconds(25)},
		"held before a restart":           {holder: "second", wantHolder: "second"},
		"no holder when it is read first": {},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begin := time.Now()
				observed := &observedLock{metrics: NewMetrics(prometheus.NewRegistry()), Interface: scriptedLock{read: func() (
					r resourcelock.LeaderElectionRecord) {
					r.HolderIdentity, r.LeaseDurationSeconds, r.RenewTime = c.holder, 15, metav1.NewTime(begin)
					for _, at := range c.renewed {
						if time.Since(begin) >= at {
							r.RenewTime = metav1.NewTime(begin.Add(at))
						}
					}
					if c.released > 0 && time.Since(begin) >= c.released {
						r.HolderIdentity = ""
					}
					return r
				}}}
				record, _, err := (&standbyLock{observedLock: observed, period: DefaultConfig().RetryPeriod / 10}).Get(t.Context())
				if took := time.Since(begin); err != nil || record.HolderIdentity != c.wantHolder || took != c.want {
					t.Errorf("got %+v, %v after %v, want the holder %q after %v", record, err, took, c.wantHolder, c.want)
				}
				if holder := observed.holder.Load(); c.released == 0 && holder != c.holder {
					t.Errorf("the status names the holder %q, want %q", holder, c.holder)
				}
			})
		})
	}
}
