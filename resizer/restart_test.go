// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"context"
	"fmt"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// TestRetryAfterRestart: operations that were infeasible before a restart are retried in seconds, and many of them one after the
// other, within the interval for infeasible operations.
func TestRetryAfterRestart(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	for name, tt := range map[string]struct {
		turn, retryMax time.Duration
		fraction       float64
		want           time.Duration
	}{
		"the first":         {0, 5 * time.Minute, 0, 0},
		"with jitter":       {0, 5 * time.Minute, .9, 9 * time.Second},
		"the thousandth":    {200 * time.Second, 5 * time.Minute, .5, 205 * time.Second},
		"too many":          {time.Hour, 5 * time.Minute, .5, 150 * time.Second},
		"a shorter maximum": {0, time.Second, .5, 500 * time.Millisecond},
	} {
		if got := retryAfterRestart(now, tt.turn, tt.retryMax, tt.fraction).Sub(now); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}

// roundTripper answers requests without a connection, which a bubble of testing/synctest cannot have.
type roundTripper func(*http.Request) *http.Response

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r), nil }

// TestClassesAreListedAgainSoon: an API server that starts refuses requests for some seconds.
func TestClassesAreListedAgainSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var attempts []time.Duration
		client, err := kubernetes.NewForConfig(&rest.Config{QPS: -1, Transport: roundTripper(func(r *http.Request) *http.Response {
			attempts = append(attempts, time.Since(start))
			return refusal(r, http.StatusForbidden, metav1.StatusReasonForbidden, "the API server starts")
		})})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Second)
		defer cancel()
		(&term{c: &Controller{deps: Deps{Client: client}}}).awaitClasses(ctx)
		if got, want := fmt.Sprint(attempts), "[0s 1s 3s 7s 15s 31s 1m1s 1m31s]"; got != want {
			t.Errorf("attempts after %s, want %s", got, want)
		}
	})
}
