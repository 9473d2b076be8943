// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package keylock

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// share takes a shared lock on v.
func share(t *testing.T, l *Locks[string]) (release func()) {
	t.Helper()
	release, err := l.Share(t.Context(), "v")
	if err != nil {
		t.Error(err)
	}
	return release
}

func TestSharedAndExclusive(t *testing.T) {
	var l Locks[string]
	first, second := share(t, &l), share(t, &l)
	if _, ok := l.TryExclusive("v"); ok {
		t.Error("exclusive during a use")
	}
	if release, ok := l.TryExclusive("w"); !ok {
		t.Error("another key is locked")
	} else {
		release()
	}
	first()
	if _, ok := l.TryExclusive("v"); ok {
		t.Error("exclusive during the second use")
	}
	second()
	release, ok := l.TryExclusive("v")
	if !ok {
		t.Fatal("still locked after the uses")
	}
	if _, again := l.TryExclusive("v"); again {
		t.Error("two exclusive holders")
	}
	if _, ok := l.TryShare("v"); ok {
		t.Error("a use beside an exclusive holder")
	}
	release()
	release, ok = l.TryShare("v")
	if _, exclusive := l.TryExclusive("v"); !ok || exclusive {
		t.Errorf("TryShare: %t, exclusive beside it: %t", ok, exclusive)
	}
	release()
	if len(l.held) != 0 {
		t.Errorf("locks left: %v", l.held)
	}
}

func TestShareWaitsForTheExclusiveHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Locks[string]
		release, _ := l.TryExclusive("v")
		var wg sync.WaitGroup
		called := false
		wg.Go(func() { share(t, &l)(); called = true })
		synctest.Wait()
		if called {
			t.Error("Share returned while another holder is exclusive")
		}
		release()
		wg.Wait()
		if !called || len(l.held) != 0 {
			t.Errorf("called %t, locks left: %v", called, l.held)
		}
	})
}

// TestExclusiveWaitsForEveryHolder: a goroutine that waits is blocked durably.
func TestExclusiveWaitsForEveryHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Locks[string]
		first, second := share(t, &l), share(t, &l)
		holders := 0
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				release := l.Exclusive("v")
				defer release()
				holders++
				if holders != 1 {
					t.Errorf("%d exclusive holders", holders)
				}
				time.Sleep(time.Second) // of the clock of synctest
				holders--
			})
		}
		l.Exclusive("w")()
		first()
		synctest.Wait()
		if holders != 0 {
			t.Error("exclusive during a use")
		}
		begin := time.Now()
		second()
		wg.Wait()
		if took := time.Since(begin); took != 2*time.Second || len(l.held) != 0 {
			t.Errorf("two uses of a second took %v, locks left: %v", took, l.held)
		}
	})
}

// TestExclusiveIsFirstInFirstOut: a holder that locks the key again gets it after those that wait.
func TestExclusiveIsFirstInFirstOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Locks[string]
		release := l.Exclusive("v")
		var order []int
		var wg sync.WaitGroup
		for i := range 3 {
			wg.Go(func() {
				release := l.Exclusive("v")
				order = append(order, i)
				release()
			})
			synctest.Wait()
		}
		release()
		l.Exclusive("v")()
		if want := []int{0, 1, 2}; !slices.Equal(order, want) {
			t.Errorf("got %v, want %v", order, want)
		}
		wg.Wait()
	})
}

// TestShareEndsWithItsContext: the end of ctx ends the wait, and no lock is left.
func TestShareEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Locks[string]
		release, _ := l.TryExclusive("v")
		shutdown := errors.New("shutting down")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel(shutdown) })
		begin := time.Now()
		if _, err := l.Share(ctx, "v"); !errors.Is(err, shutdown) || time.Since(begin) != time.Second {
			t.Errorf("got %v after %v", err, time.Since(begin))
		}
		release()
		if len(l.held) != 0 {
			t.Errorf("locks left: %v", l.held)
		}
		if free, err := l.Share(ctx, "v"); err != nil {
			t.Errorf("no wait is necessary, but got %v", err)
		} else {
			free()
		}
	})
}

func TestNilLocks(t *testing.T) {
	var l *Locks[string]
	share(t, l)()
	l.Exclusive("v")()
	if release, ok := l.TryExclusive("v"); !ok {
		t.Error("locked")
	} else {
		release()
	}
}
