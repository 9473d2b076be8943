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

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestStatus(t *testing.T) {
	var held chan struct{} // created in the bubble of the test
	run(t, Config{RetryStart: time.Minute, RetryMax: time.Hour}, func(_ context.Context, key string) (time.Time, error) {
		switch key {
		case "slow":
			<-held
		case "bad":
			return time.Time{}, errors.New("no space")
		}
		time.Sleep(2 * time.Millisecond)
		return time.Time{}, nil
	}, func(l *Loop[string], m *Metrics, _ context.CancelCauseFunc) {
		held = make(chan struct{})
		l.ShowStage(func(key string) string { return "stage of " + key })
		begin := time.Now()
		for _, key := range []string{"good", "bad", "slow"} {
			l.Add(key)
			synctest.Wait()
			time.Sleep(time.Second)
		}
		all := m.Status()
		if len(all) != 1 {
			t.Fatalf("got %+v", all)
		}
		bad := Attempt{"bad", begin.Add(time.Second), 0, "no space"}
		good := Attempt{"good", begin.Add(2 * time.Millisecond), 2 * time.Millisecond, ""}
		want := Status{
			Name: "test", Failures: 1,
			Running: []Running{{"slow", "stage of slow", begin.Add(2 * time.Second)}},
			Failing: []Failing{{"bad", "stage of bad", 1, "no space", begin.Add(time.Second + time.Minute)}},
			Recent:  []Attempt{bad, good},
			Slowest: []Attempt{good, bad},
		}
		if diff := cmp.Diff(want, all[0]); diff != "" {
			t.Error(diff)
		}
		close(held)
	})
}

// TestStatusOfWaitingKeys: an object that fails and waits for an event is shown until an attempt succeeds, and has no back-off.
func TestStatusOfWaitingKeys(t *testing.T) {
	results := []struct {
		next time.Duration // from now; 0: none
		err  error
		want []Failing // Next is from now
	}{
		{err: Waiting{}},
		{err: Waiting{errors.New("full")}, want: []Failing{{Attempts: 1, Error: "full"}}},
		{err: Waiting{}, next: time.Hour, want: []Failing{{Attempts: 1, Error: "full", Next: time.Time{}.Add(time.Hour)}}},
		{err: Waiting{errors.New("full again")}, want: []Failing{{Attempts: 2, Error: "full again"}}},
		{err: errors.New("busy"), want: []Failing{{Attempts: 3, Error: "busy", Next: time.Time{}.Add(time.Minute)}}},
		{err: nil},
		{err: Waiting{}},
	}
	var n int
	run(t, Config{RetryStart: time.Minute, RetryMax: time.Hour}, func(context.Context, string) (next time.Time, err error) {
		if r := results[n]; r.next > 0 {
			next = time.Now().Add(r.next)
		}
		return next, results[n].err
	}, func(l *Loop[string], m *Metrics, _ context.CancelCauseFunc) {
		for n = range results {
			if n%2 == 0 {
				l.Add("key")
			} else {
				l.Resync("key")
			}
			if synctest.Wait(); n == 5 { // the back-off of the attempt before
				time.Sleep(time.Minute)
				synctest.Wait()
			}
			got := l.Status().Failing
			for i := range got {
				if got[i].Key = ""; !got[i].Next.IsZero() {
					got[i].Next = time.Time{}.Add(time.Until(got[i].Next))
				}
			}
			if diff := cmp.Diff(results[n].want, got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("after attempt %d: %s", n, diff)
			}
		}
	})
}

func TestHistoryKeepsTheLastAndTheLongest(t *testing.T) {
	var h history
	for i := range 100 {
		h.add(Attempt{Key: fmt.Sprint(i), Took: time.Duration(i * 37 % 100)})
	}
	if len(h.recent) != maxRecent || h.recent[0].Key != "80" || h.recent[maxRecent-1].Key != "99" {
		t.Errorf("recent: %v", h.recent)
	}
	for i, d := range h.slowest {
		if d.Took != time.Duration(99-i) || len(h.slowest) != maxSlowest {
			t.Errorf("slowest: %v", h.slowest)
		}
	}
}

func TestErrorTextIsCut(t *testing.T) {
	if got := errorText(errors.New(strings.Repeat("ä", 1000))); len(got) > maxErrorText+5 || !strings.HasSuffix(got, "ä…") {
		t.Errorf("got %q", got)
	}
}
