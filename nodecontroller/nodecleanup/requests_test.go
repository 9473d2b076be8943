// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// sent is a request of the controller, other than those of informers and events.
type sent struct {
	line string // METHOD kind/name, without the prefix of the names of the scenario
	at   time.Time
}

func (s sent) writes() bool { return !strings.HasPrefix(s.line, http.MethodGet+" ") }

// ofRecords reports whether the request is for the ConfigMap with the records.
func (s sent) ofRecords() bool { return strings.Contains(s.line, " configmaps") }

// requests holds all requests of the controllers of a scenario, in order.
type requests struct {
	mu   sync.Mutex
	sent []sent
	only []string // permitted writes; nil permits all
}

var apiPath = regexp.MustCompile(`^/(api/v1|apis/[^/]+/[^/]+)/(namespaces/[^/]+/)?`)

// record records a request and forwards it.
func (f *fixture) record(w http.ResponseWriter, r *http.Request, pass http.Handler) {
	line := r.Method + " " + strings.Replace(apiPath.ReplaceAllString(r.URL.Path, ""), "/"+f.ns+"-", "/", 1)
	if line != "POST events" && r.URL.Query().Get("watch") == "" { // the events of commands are checked elsewhere
		f.requests.mu.Lock()
		f.requests.sent = append(f.requests.sent, sent{line, time.Now()})
		f.requests.mu.Unlock()
	}
	pass.ServeHTTP(w, r)
}

// recorded returns a client for a command.
func (f *fixture) recorded() kubernetes.Interface {
	f.Helper()
	client, err := kubernetes.NewForConfig(kubetest.Proxy(f.T, f.user, f.record))
	f.must(err)
	return client
}

// asked returns the times of the requests with this line.
func (f *fixture) asked(line string) (times []time.Time) {
	for _, s := range f.allRequests() {
		if s.line == line {
			times = append(times, s.at)
		}
	}
	return times
}

func (f *fixture) allRequests() []sent {
	f.requests.mu.Lock()
	defer f.requests.mu.Unlock()
	return slices.Clone(f.requests.sent)
}

// onlyWrites names the writes that the scenario permits; every other one fails it. Records may always be
// written.
func (f *fixture) onlyWrites(lines ...string) {
	f.requests.mu.Lock()
	defer f.requests.mu.Unlock()
	f.requests.only = append([]string{}, lines...)
}

// checkWrites is called at the end of a scenario, after its controllers.
func (f *fixture) checkWrites() {
	f.requests.mu.Lock()
	defer f.requests.mu.Unlock()
	if f.requests.only == nil {
		return
	}
	for _, s := range f.requests.sent {
		if s.writes() && !s.ofRecords() && !slices.Contains(f.requests.only, s.line) {
			f.Errorf("the controller sent %q, permitted are only %q", s.line, f.requests.only)
		}
	}
}

// answer sends a status of the API server.
func answer(w http.ResponseWriter, code int, reason, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":%q,"message":%q,"code":%d}`, reason, message, code)
}

const denial = "admission webhook denied the request"

// denied refuses all requests of a method for paths with a suffix, as an admission webhook does. It
// returns the number of refused requests.
func (f *fixture) denied(method, suffix string) *atomic.Int32 {
	f.Helper()
	return f.deniedAs(http.StatusForbidden, "Forbidden", method, suffix)
}

// deniedAs likewise, with another status.
func (f *fixture) deniedAs(code int, reason, method, suffix string) *atomic.Int32 {
	f.Helper()
	n := new(atomic.Int32)
	f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.Method != method || !strings.HasSuffix(r.URL.Path, suffix) {
			pass.ServeHTTP(w, r)
			return
		}
		n.Add(1)
		answer(w, code, reason, denial)
	})
	return n
}

// atLeast waits until n has a value.
func (f *fixture) atLeast(n *atomic.Int32, want int32) {
	f.Helper()
	f.eventually(fmt.Sprintf("%d requests", want), func(context.Context) error {
		if got := n.Load(); got < want {
			return fmt.Errorf("there were %d", got)
		}
		return nil
	})
}

// watched sends the watches of a resource through hook. The informer lists first.
func (f *fixture) watched(resource string, hook func(w http.ResponseWriter, r *http.Request, pass http.Handler)) {
	f.Helper()
	f.watch = kubetest.Proxy(f.T, f.watch, func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		switch query := r.URL.Query(); {
		case !strings.HasSuffix(r.URL.Path, "/"+resource):
			pass.ServeHTTP(w, r)
		case query.Get("sendInitialEvents") != "":
			answer(w, http.StatusUnprocessableEntity, "Invalid", "WatchList is not supported")
		default:
			hook(w, r, pass)
		}
	})
}

// frozen keeps the caches of a resource as they are at the start.
func (f *fixture) frozen(resource string) {
	f.Helper()
	f.watched(resource, func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.URL.Query().Get("watch") != "" {
			<-r.Context().Done()
			return
		}
		pass.ServeHTTP(w, r)
	})
}

// stale returns a connection whose informers have a resource as it is now, until release is called.
func (f *fixture) stale(resource string) (use, release func()) {
	f.Helper()
	request := f.client.CoreV1().RESTClient().Get().AbsPath("/api/v1/"+resource).SetHeader("Accept", "application/json")
	body, err := request.DoRaw(f.Context())
	f.must(err)
	list := httptest.NewRecorder()
	_, _ = list.Write(body)
	released := make(chan struct{})
	return func() {
		f.watched(resource, func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.URL.Query().Get("watch") == "" {
				w.Header().Set("Content-Type", "application/json")
				_, _ = w.Write(list.Body.Bytes())
				return
			}
			select {
			case <-released:
				pass.ServeHTTP(w, r)
			case <-r.Context().Done():
			}
		})
	}, sync.OnceFunc(func() { close(released) })
}

// lateWriter forwards a watch, every chunk of it late.
type lateWriter struct {
	http.ResponseWriter
	ctx   context.Context
	delay time.Duration
}

func (w lateWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w lateWriter) Write(data []byte) (int, error) {
	select {
	case <-time.After(w.delay):
	case <-w.ctx.Done():
	}
	return w.ResponseWriter.Write(data)
}

// late delays the watch events of a resource.
func (f *fixture) late(resource string, delay time.Duration) {
	f.Helper()
	f.watched(resource, func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		pass.ServeHTTP(lateWriter{w, r.Context(), delay}, r)
	})
}

// value returns the sum of a metric over the series whose labels contain all of labels.
func (p process) value(name string, labels ...string) (sum float64, err error) {
	families, err := p.reg.Gather()
	for _, family := range families {
		for _, m := range family.GetMetric() {
			text := fmt.Sprint(m.GetLabel())
			if family.GetName() == name && !slices.ContainsFunc(labels, func(l string) bool { return !strings.Contains(text, `"`+l+`"`) }) {
				sum += m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	return sum, err
}

const (
	breakerOpen  = "storage_controller_breaker_open"
	blockedGauge = "storage_controller_cleanup_blocked"
	actionsTotal = "storage_controller_cleanup_actions_total"
)

// metric waits until a metric has a value.
func (f *fixture) metric(want float64, name string, labels ...string) {
	f.Helper()
	f.eventually(fmt.Sprintf("%s %q is %v", name, labels, want), func(context.Context) error {
		got, err := f.value(name, labels...)
		if err == nil && got != want {
			err = fmt.Errorf("it is %v", got)
		}
		return err
	})
}

// failures returns how many steps of the controller failed.
func (f *fixture) failures() (n float64) {
	f.Helper()
	for _, result := range []string{"conflict", "forbidden", "error"} {
		failed, err := f.value(actionsTotal, result)
		f.must(err)
		n += failed
	}
	retries, err := f.value("workqueue_retries_total")
	f.must(err)
	return n + retries
}

// once returns a hook that calls do before the first request that match accepts is forwarded.
func once(match func(r *http.Request) bool, do func()) func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
	var first sync.Once
	return func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if match(r) {
			first.Do(do)
		}
		pass.ServeHTTP(w, r)
	}
}

func deletes(r *http.Request) bool { return r.Method == http.MethodDelete }

var errNone = errors.New("there is none")
