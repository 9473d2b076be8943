// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package statusz

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/pressure"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func example() Page {
	return Page{
		Program: "storage-controller", Version: "v1", Go: "go1", Started: now.Add(-time.Hour), Now: now,
		Checks: []Check{{"livez", "lease", ""}, {"readyz", "driver", "not connected"}},
		Roles: []Role{{Name: "provisioner", Lease: &election.Status{Lease: "ns/drv", Identity: "me", Leader: true,
			Since: now.Add(-time.Minute)}},
			{Name: "attacher", Lease: &election.Status{Lease: "ns/att", Identity: "me", Holder: "pod-2"}}, {Name: "capacity"}},
		Driver: &csiclient.Status{Address: "/s", Driver: csiclient.Driver{Name: "drv"}, NotReady: "away",
			Running: []csiclient.Call{{Method: "CreateVolume", Volume: "pvc-1", Began: now.Add(-3 * time.Second)}},
			Limits:  []pressure.Limit{{Method: "CreateVolume", Limit: 4, Waiting: 71, Since: now.Add(-time.Minute), Reason: "<slow>"}},
			Failed: []csiclient.Call{{
				Method: "DeleteVolume", Volume: "v", Began: now, Took: time.Second, Code: "Internal", Error: "<script>alert(1)</script>",
			}}},
		Loops: []workloop.Status{{
			Name: "claims", Waiting: 7, Failures: 1,
			Failing: []workloop.Failing{{Key: "ns/c", Attempts: 4, Error: "pool is full", Next: now.Add(90 * time.Second)}},
		}},
		LostNodes: []LostNode{{"n7", "held", now.Add(-time.Hour), "storage-controller nodecontroller approve n7 --yes"}},
		Flags:     []Flag{{"worker-threads", "7", "flag"}}, Metrics: "a/numbers",
		Plan: &doctor.Plan{Driver: csiclient.Driver{Name: "drv"}, Roles: []doctor.Role{{Name: "attacher", Elected: true}}},
	}
}

func get(t *testing.T, p Page, path string) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	describe := func(_ context.Context, permissions bool) (*doctor.Plan, *doctor.Permissions, error) {
		if permissions {
			return &doctor.Plan{}, nil, errors.New("no turn")
		}
		return p.Plan, nil, nil
	}
	Handler(func() Page { return p }, describe).ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return w
}

func TestPageSaysWhatThereIs(t *testing.T) {
	w := get(t, example(), "/statusz")
	body := w.Body.String()
	if w.Code != http.StatusOK || !strings.HasPrefix(w.Header().Get("Content-Type"), "text/html") {
		t.Fatalf("%d %v", w.Code, w.Header())
	}
	for _, want := range []string{
		"checks fail", "not connected", "up 60m", "this process", "pod-2", "standby", "not ready: away", "pvc-1", "3s", "71",
		"&lt;slow&gt;", "7 waiting", "1 failing", "in 90s", "pool is full", "--worker-threads", `href="./a/numbers"`, `http-equiv="refresh"`,
		"&lt;script&gt;", "Lost nodes", ">held<", "60m", "approve n7 --yes",
	} {
		if !strings.Contains(body, want) {
			t.Errorf("%q is missing", want)
		}
	}
	for _, not := range []string{"<script", "http://", "https://", "src="} {
		if strings.Contains(body, not) {
			t.Errorf("%q is there", not)
		}
	}
	if strings.Contains(get(t, example(), "/statusz?refresh=off").Body.String(), "http-equiv") {
		t.Error("it refreshes itself although it should not")
	}
}

func TestPageOfNothing(t *testing.T) {
	if w := get(t, Page{}, "/statusz"); w.Code != http.StatusOK || !strings.Contains(w.Body.String(), ">ok</span></h2>") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// TestFailuresAreInTheHeadline has something fail while all checks pass.
func TestFailuresAreInTheHeadline(t *testing.T) {
	p := example()
	p.Checks = p.Checks[:1]
	p.Loops = append(p.Loops, p.Loops[0])
	body := get(t, p, "/statusz").Body.String()
	if !strings.Contains(body, `checks pass</span>, <span class="bad">2 failing`) || strings.Contains(body, ">ok</span></h2>") {
		t.Error(body)
	}
}

func TestJSON(t *testing.T) {
	w := get(t, example(), "/statusz?format=json")
	var p Page
	if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil {
		t.Fatal(err)
	}
	want := example()
	want.Metrics = "" // for the links of the page only
	if diff := cmp.Diff(want, p); diff != "" {
		t.Error(diff)
	}
	if w := get(t, example(), "/statusz?format=xml"); w.Code != http.StatusBadRequest {
		t.Errorf("another format: %d", w.Code)
	}
	if w := get(t, example(), "/statusz?format=json&permissions=1"); w.Code != http.StatusServiceUnavailable ||
		strings.TrimSpace(w.Body.String()) != "no turn" {
		t.Errorf("no permissions: %d %s", w.Code, w.Body)
	}
}

func TestDurations(t *testing.T) {
	for d, want := range map[time.Duration]string{
		12345 * time.Microsecond: "12ms", 1234 * time.Millisecond: "1.2s", 61 * time.Second: "61s",
		3*time.Hour + 5*time.Minute: "3h5m", 50 * time.Hour: "2d2h",
	} {
		if got := human(d); got != want {
			t.Errorf("%v: got %q, want %q", d, got, want)
		}
	}
	if ago(now, now.Add(time.Second)) != "0s" || until(now, now) != "now" {
		t.Error("a time on the wrong side")
	}
}
