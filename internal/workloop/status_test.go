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
