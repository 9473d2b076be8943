// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/internal/tools/statusz"
)

// fakeReviews answers access reviews, and records their times. It grants everything but patches, and reviews no deletions.
type fakeReviews struct {
	mu    sync.Mutex
	times []time.Time
}

func (f *fakeReviews) RoundTrip(r *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.times = append(f.times, time.Now())
	w := httptest.NewRecorder()
	w.Header().Set("Content-Type", "application/json")
	if strings.HasSuffix(r.URL.Path, "/selfsubjectreviews") {
		err := json.NewEncoder(w).Encode(authenticationv1.SelfSubjectReview{
			TypeMeta: metav1.TypeMeta{APIVersion: "authentication.k8s.io/v1", Kind: "SelfSubjectReview"},
			Status: authenticationv1.SelfSubjectReviewStatus{
				UserInfo: authenticationv1.UserInfo{Username: "system:serviceaccount:ns:csi"},
			},
		})
		if err != nil {
			return nil, err
		}
		return w.Result(), nil
	}
	var review authorizationv1.SelfSubjectAccessReview
	if err := json.Unmarshal(body, &review); err != nil {
		return nil, err
	}
	a := review.Spec.ResourceAttributes
	if a.Verb == "delete" {
		http.Error(w, "no answer", http.StatusInternalServerError)
		return w.Result(), nil
	}
	review.Status.Allowed = a.Verb != "patch"
	err = json.NewEncoder(w).Encode(review)
	return w.Result(), err
}

// config returns the configuration of clients of f.
func (f *fakeReviews) config() *rest.Config {
	return &rest.Config{Host: "http://api.example.com", Transport: f, ContentConfig: rest.ContentConfig{ContentType: "application/json"}}
}

func (f *fakeReviews) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.times)
}

// reviewing returns the permissions of a process whose reviews f answers, and its plan.
func reviewing(t *testing.T, f *fakeReviews) (*permissions, func() doctor.Plan) {
	t.Helper()
	c := configOf(t, All, "--leader-election", "--leader-election-namespace=ns")
	c.API = f.config()
	plan := c.Plan(able(), true)
	return newPermissions(t.Context(), c), func() doctor.Plan { return plan }
}

// TestPermissionsAreReviewedOnceAMinute: for all clients together, and with at most ten requests a second.
func TestPermissionsAreReviewedOnceAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeReviews{}
		p, plan := reviewing(t, f)
		var clients sync.WaitGroup
		for range 5 {
			clients.Go(func() {
				if _, err := p.get(t.Context(), plan); err != nil {
					t.Error(err)
				}
			})
		}
		clients.Wait()
		once := f.count()
		for i := 10; i < len(f.times); i++ {
			if d := f.times[i].Sub(f.times[i-10]); d < time.Second-time.Millisecond {
				t.Fatalf("11 requests within %v", d)
			}
		}
		r, err := p.get(t.Context(), plan)
		if err != nil || f.count() != once {
			t.Fatalf("%v, %d requests for 6 answers, and %d for one", err, f.count(), once)
		}
		if r.permissions.User != "system:serviceaccount:ns:csi" || time.Since(r.permissions.Time) > time.Minute {
			t.Errorf("%+v", r.permissions)
		}
		patch := rbac.Access{Verb: "patch", Group: "storage.k8s.io", Resource: "volumeattachments/status"}
		if !slices.Contains(r.permissions.Missing, patch) || slices.ContainsFunc(r.permissions.Missing,
			func(a rbac.Access) bool { return a.Verb != "patch" || a.Resource == "persistentvolumeclaims" }) { // an update replaces it
			t.Errorf("missing: %s", rbac.Summary(r.permissions.Missing))
		}
		if i := slices.IndexFunc(r.permissions.Unknown, func(u doctor.Unreviewed) bool { return u.Access.Verb == "delete" }); i < 0 {
			t.Errorf("unknown: %+v", r.permissions.Unknown)
		}
		time.Sleep(permissionsTTL - time.Second)
		if _, err := p.get(t.Context(), plan); err != nil || f.count() != once {
			t.Errorf("%v, reviewed again after 59s", err)
		}
		time.Sleep(time.Second)
		if _, err := p.get(t.Context(), plan); err != nil || f.count() != 2*once {
			t.Errorf("%v, not reviewed again after a minute: %d requests instead of %d", err, f.count(), 2*once)
		}
	})
}

// TestPermissionsOfAClientThatDisconnects: the next client gets the result of the review that it started.
func TestPermissionsOfAClientThatDisconnects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeReviews{}
		p, plan := reviewing(t, f)
		first, disconnect := context.WithCancel(t.Context())
		go func() { _, _ = p.get(first, plan) }()
		time.Sleep(time.Second)
		waiting, leave := context.WithCancel(t.Context())
		left := make(chan error, 1)
		go func() {
			_, err := p.get(waiting, plan)
			left <- err
		}()
		time.Sleep(time.Second)
		disconnect()
		leave()
		if err := <-left; err == nil {
			t.Error("a client that waited and disconnected got an answer")
		}
		r, err := p.get(t.Context(), plan)
		if err != nil || len(r.permissions.Missing) == 0 {
			t.Fatalf("%v, or no result: %+v", err, r.permissions)
		}
		for _, u := range r.permissions.Unknown {
			if u.Access.Verb != "delete" {
				t.Errorf("not reviewed: %+v", u)
			}
		}
		alone := &fakeReviews{}
		other, plan := reviewing(t, alone)
		if _, err := other.get(t.Context(), plan); err != nil || f.count() != alone.count() {
			t.Errorf("%v, %d requests instead of the %d of one review", err, f.count(), alone.count())
		}
	})
}

// TestPermissionsEndWithTheProcess: a review does not delay the end of the process.
func TestPermissionsEndWithTheProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := configOf(t, All)
		c.API = new(fakeReviews).config()
		ctx, stop := context.WithCancel(t.Context())
		p := newPermissions(ctx, c)
		time.AfterFunc(time.Second, stop)
		began := time.Now()
		r, err := p.get(t.Context(), func() doctor.Plan { return c.Plan(able(), true) })
		if err != nil || time.Since(began) > 2*time.Second || len(r.permissions.Unknown) == 0 {
			t.Errorf("%v, after %v: %+v", err, time.Since(began), r.permissions)
		}
	})
}

// TestStatusPageHasThePlan: the page describes the process before and after the connection to the driver, as doctor would with its
// flags.
func TestStatusPageHasThePlan(t *testing.T) {
	t.Setenv("POD_NAME", "pod")
	t.Setenv("NAMESPACE", "ns")
	plugin := csitest.Run(t, csitest.Config{Segments: []map[string]string{{}}})
	c := configOf(t, All, "--csi-address="+plugin.Address(), "--http-endpoint=127.0.0.1:0", "--leader-election",
		"--otlp-sampling-ratio=0.5", "--node-cleanup=off", "--master=https://me:hidden@api.example.com", "--secret-namespaces=a,b")
	c.API = new(fakeReviews).config()
	p := newProcess(c.Enabled()) // as the command does
	ctx, stop := context.WithCancel(t.Context())
	server, err := p.serve(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer server.wait()
	defer stop()
	p.server = server
	check := func(query string, want doctor.Plan) statusz.Page {
		t.Helper()
		response, err := http.Get("http://" + server.server.Address() + "/statusz" + query)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err != nil || strings.Contains(string(body), "hidden") {
			t.Fatalf("%v, or a password in %s", err, body)
		}
		page, err := statusz.Decode(strings.NewReader(string(body)))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, *page.Plan, cmpopts.IgnoreFields(doctor.Role{}, "Probe")); diff != "" {
			t.Errorf("the plan of the page differs from that of the settings:\n%s", diff)
		}
		return page
	}
	if page := check("?format=json", c.Plan(csiclient.Driver{}, false)); page.Plan.Known || page.Permissions != nil {
		t.Errorf("before the connection: %+v", page)
	}
	if err := p.connect(ctx); err != nil {
		t.Fatal(err)
	}
	plan := c.Plan(p.driver, true)
	if plan.Driver.Name != plugin.Name() || len(plan.Roles) != 2 || len(plan.Grants) < 5 {
		t.Fatalf("driver %q, roles %+v", plan.Driver.Name, plan.Roles)
	}
	check("?format=json", plan)
}

// TestStatusPageHasThePermissions: with the plan for which they were reviewed, although the driver is known since then.
func TestStatusPageHasThePermissions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeReviews{}
		c := configOf(t, All)
		c.API = f.config()
		s := newStatus(c)
		s.granted, s.checks = newPermissions(t.Context(), c), func() []statusz.Check { return nil }
		read := func() statusz.Page {
			w := httptest.NewRecorder()
			s.pages("/metrics")["/statusz"].ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/statusz?format=json&permissions=1", nil))
			page, err := statusz.Decode(w.Body)
			if err != nil {
				t.Fatal(err)
			}
			return page
		}
		first := read()
		once := f.count()
		s.serving(able(), true)
		second := read()
		if diff := cmp.Diff(first.Permissions, second.Permissions); diff != "" || f.count() != once || second.Plan.Known {
			t.Errorf("known: %t, %d requests, then %d; the result differs:\n%s", second.Plan.Known, once, f.count(), diff)
		}
		if first.Permissions.User == "" || len(first.Permissions.Missing) == 0 || len(first.Permissions.Unknown) == 0 {
			t.Errorf("%+v", first.Permissions)
		}
		time.Sleep(permissionsTTL)
		if third := read(); !third.Plan.Known || len(third.Permissions.Missing) <= len(first.Permissions.Missing) {
			t.Errorf("known: %t, %d permissions are missing instead of %d", third.Plan.Known, len(third.Permissions.Missing),
				len(first.Permissions.Missing))
		}
	})
}
