// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package workloop

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/intent"
)

// TestFailuresAreLoggedOnce: at the default verbosity, a failing key is logged once per text of its error until it succeeds.
func TestFailuresAreLoggedOnce(t *testing.T) {
	full := errors.New("the pool is full")
	refused := apierrors.NewForbidden(schema.GroupResource{Resource: "volumeattachments"}, "va", errors.New("no permission"))
	conflict := apierrors.NewConflict(schema.GroupResource{Resource: "persistentvolumes"}, "pv", errors.New("changed"))
	var numbered []error
	for i := range maxLogged + 1 {
		numbered = append(numbered, fmt.Errorf("error %d", i))
	}
	for name, tt := range map[string]struct {
		results []error // of the attempts
		want    []string
	}{
		"the same text":       {[]error{full, full, full}, []string{"the pool is full"}},
		"another text":        {[]error{full, refused, full}, []string{"the pool is full", "no permission"}},
		"after a success":     {[]error{full, nil, full}, []string{"the pool is full", "the pool is full"}},
		"a conflict passes":   {[]error{conflict, fmt.Errorf("changing: %w", conflict), election.ErrLost}, nil},
		"violated invariants": {[]error{intent.Must(false, "twice"), intent.Must(false, "twice")}, []string{"twice", "twice"}},
		"a long text":         {[]error{errors.New(strings.Repeat("x", 1<<20))}, []string{"xxx"}},
		"many texts":          {append(numbered, numbered[len(numbered)-1]), strings.Fields("0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16")},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var lines []string
				log := funcr.New(func(_, line string) { lines = append(lines, line) }, funcr.Options{})
				ctx, stop := context.WithCancel(klog.NewContext(t.Context(), log))
				attempt := 0
				l := New(Config{Name: "test", RetryStart: time.Second, RetryMax: time.Second}, NewMetrics(prometheus.NewRegistry()),
					func(context.Context, string) (time.Time, error) {
						if attempt++; attempt > len(tt.results) {
							return time.Time{}, nil
						}
						return time.Now().Add(time.Second), tt.results[attempt-1]
					})
				done := make(chan struct{})
				go func() { l.Run(ctx, 1); close(done) }()
				l.Add("k")
				time.Sleep(time.Minute)
				stop()
				<-done
				var got []string
				for i, line := range lines {
					if i < len(tt.want) && strings.Contains(line, tt.want[i]) && strings.Contains(line, `"key"="k"`) &&
						strings.Contains(line, `"retryIn"`) && strings.Contains(line, `"error"=`) && len(line) < 2*maxLoggedText {
						line = tt.want[i]
					}
					got = append(got, line)
				}
				if diff := cmp.Diff(tt.want, got); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
}
