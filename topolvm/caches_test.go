// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// TestTopolvmScenario041 looks up 200 unknown IDs at the same time: with two lists. A call that begins during a list needs a later one.
func TestTopolvmScenario041(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lists := 0
		stored := map[types.UID]string{"1": "v"}
		l := lookup{list: func(context.Context) (map[types.UID]string, error) {
			lists++
			read := map[types.UID]string{}
			for uid, name := range stored {
				read[uid] = name
			}
			time.Sleep(time.Second)
			return read, nil
		}}
		var calls sync.WaitGroup
		look := func(id, want string) {
			calls.Go(func() {
				if got, err := l.name(t.Context(), id); got != want || err != nil {
					t.Errorf("%s: %q %v, want %q", id, got, err, want)
				}
			})
		}
		look("1", "v")
		synctest.Wait()
		stored["2"] = "w"
		for i := range 199 {
			look(fmt.Sprint("none-", i), "")
		}
		look("2", "w")
		calls.Wait()
		if lists != 2 {
			t.Errorf("%d lists", lists)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if _, err := l.name(ctx, "1"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a call whose deadline ends: %v", err)
		}
		time.Sleep(time.Minute)
	})
}

// TestLookupPanics: a panic in a list is an error of the calls that wait for it, and of no other.
func TestLookupPanics(t *testing.T) {
	panics := true
	l := lookup{list: func(context.Context) (map[types.UID]string, error) {
		if panics {
			panic("injected")
		}
		return map[types.UID]string{"1": "v"}, nil
	}}
	if name, err := l.name(t.Context(), "1"); err == nil || !strings.Contains(err.Error(), "injected") {
		t.Errorf("%q %v", name, err)
	}
	panics = false
	if name, err := l.name(t.Context(), "1"); name != "v" || err != nil {
		t.Errorf("%q %v", name, err)
	}
}

// TestDeletions remembers one deletion more than there is space for.
func TestDeletions(t *testing.T) {
	var d deletions
	for i := range maxDeletions + 1 {
		for range 2 { // the watch may be interrupted
			d.add(&metav1.ObjectMeta{Name: fmt.Sprint("v", i), UID: types.UID(fmt.Sprint(i))})
		}
	}
	if _, known := d.name("0"); known || len(d.names) != maxDeletions {
		t.Errorf("the oldest is known: %t, %d names", known, len(d.names))
	}
	if name, known := d.name(fmt.Sprint(maxDeletions)); name != fmt.Sprint("v", maxDeletions) || !known {
		t.Errorf("the latest: %q %t", name, known)
	}
}
