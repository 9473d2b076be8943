// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package browser

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"
)

// raw is JSON as it was received.
type raw struct{ json.RawMessage }

// into sets v to what r says; when that is nothing it leaves v alone.
func (r raw) into(v any) error {
	if len(r.RawMessage) == 0 {
		return nil
	}
	return json.Unmarshal(r.RawMessage, v)
}

// wire is the DevTools protocol on two pipes, where a zero byte ends each message.
type wire struct {
	to   io.Writer
	gone chan struct{} // closed when nothing more can be read
	end  error         // why; it is set before gone is closed

	mu        sync.Mutex
	last      int
	answers   map[int]chan answer
	listeners map[string]func(method string, params raw) // by session
}

type answer struct {
	Result raw
	Error  *struct{ Message string }
}

func newWire(to io.Writer, from io.Reader) *wire {
	w := &wire{to: to, gone: make(chan struct{}), answers: map[int]chan answer{}, listeners: map[string]func(string, raw){}}
	go w.read(from)
	return w
}

// listen hands the events of a session to f, one at a time.
func (w *wire) listen(session string, f func(method string, params raw)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.listeners[session] = f
}

// call does one command and sets result, which may be nil, to its answer.
func (w *wire) call(session, method string, params, result any) error {
	got := make(chan answer, 1)
	if err := w.send(session, method, params, got); err != nil {
		return fmt.Errorf("%s: telling the browser: %w", method, err)
	}
	select {
	case a := <-got:
		if a.Error != nil {
			return fmt.Errorf("%s: the browser says: %s", method, a.Error.Message)
		}
		if result == nil {
			return nil
		}
		if err := a.Result.into(result); err != nil {
			return fmt.Errorf("%s: reading the answer: %w", method, err)
		}
		return nil
	case <-w.gone:
		return fmt.Errorf("%s: the browser has gone: %w", method, w.end)
	case <-time.After(patience):
		return fmt.Errorf("%s: no answer for %v", method, patience)
	}
}

func (w *wire) send(session, method string, params any, got chan answer) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.last++
	command := map[string]any{"id": w.last, "method": method}
	if params != nil {
		command["params"] = params
	}
	if session != "" {
		command["sessionId"] = session
	}
	data, err := json.Marshal(command)
	if err != nil {
		return err
	}
	w.answers[w.last] = got
	_, err = w.to.Write(append(data, 0))
	return err
}

// read hands on what the browser says until it says no more.
func (w *wire) read(from io.Reader) {
	defer close(w.gone)
	for r := bufio.NewReader(from); ; {
		data, err := r.ReadBytes(0)
		if err != nil {
			w.end = err
			return
		}
		var m struct {
			ID                int
			SessionID, Method string
			Params            raw
			answer
		}
		if err := json.Unmarshal(data[:len(data)-1], &m); err != nil {
			w.end = err
			return
		}
		w.mu.Lock()
		got, listener := w.answers[m.ID], w.listeners[m.SessionID]
		delete(w.answers, m.ID)
		w.mu.Unlock()
		switch {
		case got != nil:
			got <- m.answer
		case listener != nil:
			listener(m.Method, m.Params)
		}
	}
}
