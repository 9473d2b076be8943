package volumelock

import (
	"sync"
	"testing"
	"testing/synctest"
)

func TestCallsShareAndOneIsAlone(t *testing.T) {
	var l Locks
	first, second := l.Call("v"), l.Call("v")
	if _, ok := l.TryAlone("v"); ok {
		t.Error("alone during a call")
	}
	if done, ok := l.TryAlone("w"); !ok {
		t.Error("another volume is refused")
	} else {
		done()
	}
	first()
	if _, ok := l.TryAlone("v"); ok {
		t.Error("alone during the second call")
	}
	second()
	done, ok := l.TryAlone("v")
	if !ok {
		t.Fatal("refused after the calls")
	}
	if _, again := l.TryAlone("v"); again {
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
		done, _ := l.TryAlone("v")
		var wg sync.WaitGroup
		called := false
		wg.Go(func() { l.Call("v")(); called = true })
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
	l.Call("v")()
	if done, ok := l.TryAlone("v"); !ok {
		t.Error("refused")
	} else {
		done()
	}
}
