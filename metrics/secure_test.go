package metrics

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"
)

// asked answers like the API server, and counts.
type asked struct {
	users, permissions atomic.Int32
	broken             atomic.Bool
}

var errBroken = errors.New("nobody is there")

func (a *asked) Authenticate(_ context.Context, token string) (User, bool, error) {
	a.users.Add(1)
	if a.broken.Load() {
		return User{}, false, errBroken
	}
	return User{Name: token}, token != "nobody", nil
}

func (a *asked) Authorize(_ context.Context, u User, verb, path string) (bool, error) {
	a.permissions.Add(1)
	if u.Name == "half" {
		return false, errBroken
	}
	return u.Name == "reader" && verb == "get" && path == "/metrics", nil
}

// guarded is a guard, its clock, and how it answers a request.
func guarded() (*asked, *time.Time, func(method, path, header string) int) {
	a, now := &asked{}, time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	g := newGuard(a, func() time.Time { return now })
	handler := g.protect(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	return a, &now, func(method, path, header string) int {
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
		"no token":                       {"GET", "/metrics", "", 401},
		"empty token":                    {"GET", "/metrics", "Bearer ", 401},
		"another scheme":                 {"GET", "/metrics", "Basic reader", 401},
		"token that is nobody's":         {"GET", "/metrics", "Bearer nobody", 401},
		"permitted":                      {"GET", "/metrics", "Bearer reader", 200},
		"scheme in lower case":           {"GET", "/metrics", "bearer reader", 200},
		"somebody else":                  {"GET", "/metrics", "Bearer writer", 403},
		"another verb":                   {"POST", "/metrics", "Bearer reader", 403},
		"another path":                   {"GET", "/debug/pprof/heap", "Bearer reader", 403},
		"permission cannot be found out": {"GET", "/metrics", "Bearer half", 500},
	} {
		_, _, ask := guarded()
		if got := ask(tt.method, tt.path, tt.header); got != tt.want {
			t.Errorf("%s: got %d, want %d", name, got, tt.want)
		}
	}
	a, _, ask := guarded()
	a.broken.Store(true)
	if got := ask("GET", "/metrics", "Bearer reader"); got != 500 {
		t.Errorf("nobody can be asked: got %d", got)
	}
	a.broken.Store(false)
	if got := ask("GET", "/metrics", "Bearer reader"); got != 200 {
		t.Errorf("asking works again: got %d", got)
	}
}

func TestWhatTheGuardRemembers(t *testing.T) {
	type step struct {
		after              time.Duration // the step before
		token              string
		users, permissions int32 // questions so far
	}
	for name, steps := range map[string][]step{
		"a token for a minute, a permission for five": {
			{0, "reader", 1, 1}, {tokenTTL - 1, "reader", 1, 1}, {1, "reader", 2, 1},
			{allowTTL - tokenTTL - 1, "reader", 3, 1}, {1, "reader", 3, 2},
		},
		"a refusal for half a minute":     {{0, "writer", 1, 1}, {denyTTL - 1, "writer", 1, 1}, {1, "writer", 1, 2}},
		"a token that is nobody's: never": {{0, "nobody", 1, 0}, {0, "nobody", 2, 0}},
		"an error: never":                 {{0, "half", 1, 1}, {0, "half", 1, 2}},
		"of each user by itself":          {{0, "reader", 1, 1}, {0, "writer", 2, 2}},
	} {
		a, now, ask := guarded()
		for i, s := range steps {
			*now = now.Add(s.after)
			ask("GET", "/metrics", "Bearer "+s.token)
			if a.users.Load() != s.users || a.permissions.Load() != s.permissions {
				t.Errorf("%s: after step %d %d and %d questions, want %d and %d", name, i, a.users.Load(), a.permissions.Load(), s.users, s.permissions)
			}
		}
	}
	var m memory[string, bool]
	for i := range maxRemembered + 10 {
		m.put(fmt.Sprint(i), true, time.Time{}, time.Hour)
	}
	if len(m.answers) > maxRemembered {
		t.Errorf("%d answers are remembered", len(m.answers))
	}
}

func TestSecureServer(t *testing.T) {
	s, _ := serve(t, Config{Guard: NewGuard(&asked{}), Pprof: true, ProfilingAddress: "127.0.0.1:0", HealthAddress: "127.0.0.1:0"})
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
	main, health, profiling := "https://"+s.Address(), "http://"+s.endpoints[1].listener.Addr().String(), "http://"+s.endpoints[2].listener.Addr().String()
	for _, tt := range []struct {
		url, token string
		want       int
	}{
		{main + "/metrics", "reader", 200}, {main + "/metrics", "writer", 403}, {main + "/metrics", "nobody", 401},
		{main + "/debug/pprof/", "reader", 403}, {main + "/readyz", "nobody", 200}, {main + "/healthz", "nobody", 200},
		{"http://" + s.Address() + "/metrics", "reader", 400},
		{health + "/readyz", "nobody", 200}, {health + "/livez", "nobody", 200}, {health + "/metrics", "reader", 404},
		{profiling + "/debug/pprof/", "nobody", 200}, {profiling + "/metrics", "reader", 404}, {profiling + "/readyz", "reader", 404},
	} {
		if got := get(tt.url, tt.token); got != tt.want {
			t.Errorf("%s by %s: got %d, want %d", tt.url, tt.token, got, tt.want)
		}
	}
}

func TestCertificateIsRenewed(t *testing.T) {
	_, now, _ := guarded()
	g := newGuard(nil, func() time.Time { return *now })
	serial := func() string {
		c, err := g.tlsConfig().GetCertificate(nil)
		if err != nil {
			t.Fatal(err)
		}
		if now.Before(c.Leaf.NotBefore) || !now.Before(c.Leaf.NotAfter) {
			t.Errorf("the certificate is valid from %v to %v, and it is %v", c.Leaf.NotBefore, c.Leaf.NotAfter, now)
		}
		return c.Leaf.SerialNumber.String()
	}
	first := serial()
	*now = now.Add(certificateLife - renewBefore)
	if serial() != first {
		t.Error("renewed too early")
	}
	*now = now.Add(time.Second)
	if serial() == first {
		t.Error("not renewed before its end")
	}
}
