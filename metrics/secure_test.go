// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/storage-controller/storage-controller/internal/serving"
)

// fakeReviewer answers like the API server and counts the reviews.
type fakeReviewer struct {
	authentications, authorizations atomic.Int32
	unavailable                     atomic.Bool
}

var errUnavailable = errors.New("the API server is unavailable")

func (a *fakeReviewer) Authenticate(_ context.Context, token string) (User, bool, error) {
	a.authentications.Add(1)
	if a.unavailable.Load() {
		return User{}, false, errUnavailable
	}
	return User{Name: token}, token != "invalid", nil
}

func (a *fakeReviewer) Authorize(_ context.Context, u User, verb, path string) (bool, error) {
	a.authorizations.Add(1)
	if u.Name == "half" {
		return false, errUnavailable
	}
	return u.Name == "reader" && verb == "get" && path == "/metrics", nil
}

// guarded returns the reviewer of a guard, and a function that returns the status of a request.
func guarded() (*fakeReviewer, func(method, path, header string) int) {
	a := &fakeReviewer{}
	handler := NewGuard(a).protect(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	return a, func(method, path, header string) int {
		r := httptest.NewRequest(method, path, nil)
		if header != "" {
			r.Header.Set("Authorization", header)
		}
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return w.Code
	}
}

func TestGuard(t *testing.T) {
	for name, tt := range map[string]struct {
		method, path, header string
		want                 int
	}{
		"no token":                     {"GET", "/metrics", "", 401},
		"empty token":                  {"GET", "/metrics", "Bearer ", 401},
		"another scheme":               {"GET", "/metrics", "Basic reader", 401},
		"invalid token":                {"GET", "/metrics", "Bearer invalid", 401},
		"permitted":                    {"GET", "/metrics", "Bearer reader", 200},
		"scheme in lower case":         {"GET", "/metrics", "bearer reader", 200},
		"another user":                 {"GET", "/metrics", "Bearer writer", 403},
		"another verb":                 {"POST", "/metrics", "Bearer reader", 403},
		"another path":                 {"GET", "/debug/pprof/heap", "Bearer reader", 403},
		"authorization is unavailable": {"GET", "/metrics", "Bearer half", 500},
	} {
		_, ask := guarded()
		if got := ask(tt.method, tt.path, tt.header); got != tt.want {
			t.Errorf("%s: got %d, want %d", name, got, tt.want)
		}
	}
	a, ask := guarded()
	a.unavailable.Store(true)
	if got := ask("GET", "/metrics", "Bearer reader"); got != 500 {
		t.Errorf("authentication is unavailable: got %d", got)
	}
	a.unavailable.Store(false)
	if got := ask("GET", "/metrics", "Bearer reader"); got != 200 {
		t.Errorf("authentication is available again: got %d", got)
	}
}

// TestUnknownTokens: many invalid tokens do not keep a client with a valid one from the metrics.
func TestUnknownTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, ask := guarded()
		ask("GET", "/metrics", "Bearer reader")
		time.Sleep(tokenTTL + time.Second)
		codes := map[int]int{}
		for range 100 {
			codes[ask("GET", "/metrics", "Bearer invalid")]++
		}
		if want := map[int]int{401: unknownBurst, 429: 100 - unknownBurst}; !maps.Equal(codes, want) {
			t.Errorf("answers %v, want %v", codes, want)
		}
		if got := ask("GET", "/metrics", "Bearer reader"); got != 200 || a.authentications.Load() != unknownBurst+2 {
			t.Errorf("got %d after %d authentications", got, a.authentications.Load())
		}
		time.Sleep(time.Second)
		if got := ask("GET", "/metrics", "Bearer invalid"); got != 401 {
			t.Errorf("a second later: got %d", got)
		}
	})
}

func TestGuardCaches(t *testing.T) {
	type step struct {
		after                           time.Duration // the previous step
		token                           string
		authentications, authorizations int32 // so far
	}
	for name, steps := range map[string][]step{
		"a token for a minute, a permission for five": {
			{0, "reader", 1, 1}, {tokenTTL, "reader", 1, 1}, {1, "reader", 2, 1},
			{allowTTL - tokenTTL - 1, "reader", 3, 1}, {1, "reader", 3, 2},
		},
		"a denial for half a minute": {{0, "writer", 1, 1}, {denyTTL, "writer", 1, 1}, {1, "writer", 1, 2}},
		"no invalid token":           {{0, "invalid", 1, 0}, {0, "invalid", 2, 0}},
		"no error":                   {{0, "half", 1, 1}, {0, "half", 1, 2}},
		"each user separately":       {{0, "reader", 1, 1}, {0, "writer", 2, 2}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, ask := guarded()
				for i, s := range steps {
					time.Sleep(s.after)
					ask("GET", "/metrics", "Bearer "+s.token)
					if a.authentications.Load() != s.authentications || a.authorizations.Load() != s.authorizations {
						t.Errorf("step %d: %d authentications and %d authorizations, want %d and %d",
							i, a.authentications.Load(), a.authorizations.Load(), s.authentications, s.authorizations)
					}
				}
			})
		})
	}
}

func TestSecureServer(t *testing.T) {
	e := local()
	e.Pprof = true
	secure, err := serving.TLS{}.Config(new(serving.SelfSigned).Get)
	if err != nil {
		t.Fatal(err)
	}
	s, _ := serve(t, Config{
		Guard: NewGuard(&fakeReviewer{}), TLS: secure, Endpoints: []Endpoint{e}, ProfilingAddress: "127.0.0.1:0",
		HealthAddress: "127.0.0.1:0",
	})
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	defer client.CloseIdleConnections()
	get := func(url, token string) int {
		t.Helper()
		r, err := http.NewRequest(http.MethodGet, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+token)
		response, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		_, _ = io.Copy(io.Discard, response.Body)
		return response.StatusCode
	}
	address := func(endpoint int) string { return s.endpoints[endpoint].listener.Addr().String() }
	main, health, profiling := "https://"+address(0), "http://"+address(1), "http://"+address(2)
	for _, tt := range []struct {
		url, token string
		want       int
	}{
		{main + "/metrics", "reader", 200}, {main + "/metrics", "writer", 403}, {main + "/metrics", "invalid", 401},
		{main + "/debug/pprof/", "reader", 403}, {main + "/readyz", "invalid", 200}, {main + "/healthz", "invalid", 200},
		{"http://" + s.Address() + "/metrics", "reader", 400},
		{health + "/readyz", "invalid", 200}, {health + "/livez", "invalid", 200}, {health + "/metrics", "reader", 404},
		{profiling + "/debug/pprof/", "invalid", 200}, {profiling + "/metrics", "reader", 404}, {profiling + "/readyz", "reader", 404},
	} {
		if got := get(tt.url, tt.token); got != tt.want {
			t.Errorf("%s by %s: got %d, want %d", tt.url, tt.token, got, tt.want)
		}
	}
}
