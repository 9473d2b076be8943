// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
)

// bookmarkInterval is the time between two bookmarks of a watch.
const bookmarkInterval = time.Minute

// freshTimeout is the time that a request waits for a state of the future.
const freshTimeout = 3 * time.Second

// event is one of a watch, not yet encoded.
type event struct {
	kind watch.EventType
	obj  runtime.Object
}

// watcher is the body of the response of a watch. Reading it blocks until there is an event.
type watcher struct {
	server   *Server
	call     *call
	ctx      context.Context // of the request
	match    func(runtime.Object) bool
	since    uint64      // later changes are sent
	deadline *time.Timer // nil: none
	bookmark *time.Timer // nil: none
	wake     chan struct{}
	done     chan struct{} // closed by Close
	once     sync.Once

	buf []byte // read by one goroutine at a time

	queue []event // guarded by server.mu, as the next ones
	ended bool
	err   error // after ended; nil: the end of the body
}

// watch starts a watch.
func (s *Server) watch(ctx context.Context, c *call) (*watcher, error) {
	o, err := c.listOptions()
	if err != nil {
		return nil, err
	}
	match, err := c.matcher(o)
	if err == nil {
		err = validMatch(c, o)
	}
	if err != nil {
		return nil, err
	}
	version, err := parseVersion(o.ResourceVersion)
	if err != nil {
		return nil, statusError(err.Error()) // unlike a list
	}
	w := &watcher{server: s, call: c, ctx: ctx, match: match, since: version, wake: make(chan struct{}, 1), done: make(chan struct{})}
	if o.TimeoutSeconds != nil && *o.TimeoutSeconds > 0 {
		timeout := time.Duration(*o.TimeoutSeconds) * time.Second
		if s.hooks.WatchTimeout != nil {
			timeout = s.hooks.WatchTimeout(c.Request, timeout)
		}
		w.deadline = time.NewTimer(timeout)
	}
	if o.AllowWatchBookmarks {
		w.bookmark = time.NewTimer(bookmarkInterval)
	}
	if initial := o.SendInitialEvents; initial != nil && *initial && version > s.Version() {
		err := s.waitTooLarge(ctx, c)
		w.ended = true
		if o.TimeoutSeconds == nil || *o.TimeoutSeconds > int64(freshTimeout/time.Second) {
			w.queue = []event{{watch.Error, statusOf(err)}}
		}
		return w, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begin(w, o)
	s.watches = append(s.watches, w)
	return w, nil
}

// begin fills the queue with the initial events of w and with the changes since then.
func (s *Server) begin(w *watcher, o metav1.ListOptions) {
	all := o.SendInitialEvents != nil && *o.SendInitialEvents
	if w.since > 0 && !all {
		if w.since < s.compacted {
			gone := apierrors.NewResourceExpired(fmt.Sprintf("too old resource version: %d (%d)", w.since, s.compacted))
			w.queue, w.ended = append(w.queue, event{watch.Error, statusOf(gone)}), true
			return
		}
	} else if o.SendInitialEvents == nil || all {
		state := s.version
		if o.ResourceVersion != "" || !all {
			state = max(w.since, s.cached(w.call))
		}
		w.since = state
		objects := s.at(w.call.res, state)
		for _, key := range sortedKeys(objects) {
			if w.match(objects[key]) {
				w.queue = append(w.queue, event{watch.Added, objects[key]})
			}
		}
		if all && o.AllowWatchBookmarks {
			w.queue = append(w.queue, w.mark(state, map[string]string{metav1.InitialEventsAnnotationKey: "true"}))
		}
	} else {
		w.since = s.cached(w.call)
	}
	for _, c := range s.log {
		w.push(c)
	}
}

// mark returns a bookmark.
func (w *watcher) mark(version uint64, annotations map[string]string) event {
	obj := w.call.res.object()
	m := accessor(obj)
	m.SetResourceVersion(strconv.FormatUint(version, 10))
	m.SetAnnotations(annotations)
	return event{watch.Bookmark, obj}
}

// push appends the event for c, if w selects one of its states. The lock of the server must be held.
func (w *watcher) push(c change) {
	if c.res != w.call.res || w.ended || c.version <= w.since {
		return
	}
	was, is := c.before != nil && w.match(c.before), c.after != nil && w.match(c.after)
	switch {
	case was && is:
		w.queue = append(w.queue, event{watch.Modified, c.after})
	case is:
		w.queue = append(w.queue, event{watch.Added, c.after})
	case was:
		last := c.deleted
		if last == nil { // it exists, but is not selected any more
			last = withVersion(c.before, c.version)
		}
		w.queue = append(w.queue, event{watch.Deleted, last})
	default:
		return
	}
	w.signal()
}

// signal wakes the reader.
func (w *watcher) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// closeWatches ends the watches that match selects; nil means the end of the body. The lock must be held.
func (s *Server) closeWatches(match func(*watcher) bool, err error) {
	for _, w := range s.watches {
		if !w.ended && match(w) {
			w.queue, w.ended, w.err = nil, true, err
			w.signal()
		}
	}
}

// Read implements [io.Reader].
func (w *watcher) Read(p []byte) (int, error) {
	if len(w.buf) == 0 {
		e, err := w.next()
		if err != nil {
			return 0, err
		}
		if w.buf, err = w.server.frame(w.call, e); err != nil {
			return 0, err
		}
	}
	n := copy(p, w.buf)
	w.buf = w.buf[n:]
	return n, nil
}

// Close implements [io.Closer].
func (w *watcher) Close() error {
	w.once.Do(func() {
		close(w.done)
		for _, timer := range []*time.Timer{w.deadline, w.bookmark} {
			if timer != nil {
				timer.Stop()
			}
		}
		w.server.mu.Lock()
		defer w.server.mu.Unlock()
		w.server.watches = slices.DeleteFunc(w.server.watches, func(other *watcher) bool { return other == w })
	})
	return nil
}

// next waits for an event.
func (w *watcher) next() (event, error) {
	var deadline, bookmark <-chan time.Time
	if w.deadline != nil {
		deadline = w.deadline.C
	}
	if w.bookmark != nil {
		bookmark = w.bookmark.C
	}
	for {
		if e, ok, err := w.pop(); err != nil {
			return event{}, err
		} else if ok {
			return w.deliver(e)
		}
		select {
		case <-w.wake:
		case <-w.ctx.Done():
			return event{}, w.ctx.Err()
		case <-w.done:
			return event{}, http.ErrBodyReadAfterClose
		case <-deadline:
			w.server.mu.Lock()
			w.ended = true // after the events that are in the queue
			w.server.mu.Unlock()
		case <-bookmark:
			w.bookmark.Reset(bookmarkInterval)
			w.server.mu.Lock()
			if !w.ended {
				w.queue = append(w.queue, w.mark(w.server.version, nil))
			}
			w.server.mu.Unlock()
		}
	}
}

// pop removes the first event of the queue. Its error is the end of the watch.
func (w *watcher) pop() (event, bool, error) {
	w.server.mu.Lock()
	defer w.server.mu.Unlock()
	if len(w.queue) == 0 {
		if w.ended && w.err == nil {
			return event{}, false, io.EOF
		}
		return event{}, false, w.err
	}
	e := w.queue[0]
	w.queue = w.queue[1:]
	return e, true, nil
}

// deliver calls the hook for e and returns the event to send.
func (w *watcher) deliver(e event) (event, error) {
	hook := w.server.hooks.Deliver
	if hook == nil || e.kind == watch.Error {
		return e, nil
	}
	err := hook(w.ctx, w.call.Request, e.kind, accessor(e.obj))
	if err == nil {
		return e, nil
	}
	w.server.mu.Lock()
	defer w.server.mu.Unlock()
	w.queue, w.ended = nil, true
	if status := apierrors.APIStatus(nil); errors.As(err, &status) {
		return event{watch.Error, statusOf(err)}, nil
	}
	return event{}, err
}
