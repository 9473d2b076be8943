package volumelock

import (
	"sync"
	"testing"
	"testing/synctest"
)

func TestCallsShareAndOneIsAlone(t *testing.T) {
	var l Locks
	first, second := l.Share("v"), l.Share("v")
	if _, ok := l.TryExclusive("v"); ok {
		t.Error("alone during a call")
	}
	if done, ok := l.TryExclusive("w"); !ok {
		t.Error("another volume is refused")
	} else {
		done()
	}
	first()
	if _, ok := l.TryExclusive("v"); ok {
		t.Error("alone during the second call")
	}
	second()
	done, ok := l.TryExclusive("v")
	if !ok {
		t.Fatal("refused after the calls")
	}
	if _, again := l.TryExclusive("v"); again {
		t.Error("two are alone")
	}
	done()
	if len(l.held) != 0 {
		t.Errorf("kept %v", l.held)
	}
}

func TestCallWaitsForWhoIsAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Locks
		done, _ := l.TryExclusive("v")
		var wg sync.WaitGroup
		called := false
		wg.Go(func() { l.Share("v")(); called = true })
		synctest.Wait()
		if called {
			t.Error("a call ran beside")
		}
		done()
		wg.Wait()
		if !called || len(l.held) != 0 {
			t.Errorf("called %t, kept %v", called, l.held)
		}
	})
}

func TestNilNeverRefuses(t *testing.T) {
	var l *Locks
	l.Share("v")()
	if done, ok := l.TryExclusive("v"); !ok {
		t.Error("refused")
	} else {
		done()
	}
}
