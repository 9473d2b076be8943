// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package volumelock

import (
	"sync"
	"testing"
	"testing/synctest"
)

func TestSharedAndExclusive(t *testing.T) {
	var l Locks
	first, second := l.Share("v"), l.Share("v")
	if _, ok := l.TryExclusive("v"); ok {
		t.Error("exclusive during a call")
	}
	if release, ok := l.TryExclusive("w"); !ok {
		t.Error("another volume is locked")
	} else {
		release()
	}
	first()
	if _, ok := l.TryExclusive("v"); ok {
		t.Error("exclusive during the second call")
	}
	second()
	release, ok := l.TryExclusive("v")
	if !ok {
		t.Fatal("still locked after the calls")
	}
	if _, again := l.TryExclusive("v"); again {
		t.Error("two exclusive holders")
	}
	release()
	if len(l.held) != 0 {
		t.Errorf("locks left: %v", l.held)
	}
}

func TestShareWaitsForTheExclusiveHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Locks
		release, _ := l.TryExclusive("v")
		var wg sync.WaitGroup
		called := false
		wg.Go(func() { l.Share("v")(); called = true })
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

func TestNilLocks(t *testing.T) {
	var l *Locks
	l.Share("v")()
	if release, ok := l.TryExclusive("v"); !ok {
		t.Error("locked")
	} else {
		release()
	}
}
