// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package statusz serves the state of a running process: version, health, queues, calls to the
// driver, roles and settings. It changes nothing and shows no secrets.
package statusz

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Page holds the content of /statusz.
type Page struct {
	Program string            `json:"program"`
	Version string            `json:"version"`
	Go      string            `json:"go"`
	Started time.Time         `json:"started"`
	Now     time.Time         `json:"now"`
	Checks  []Check           `json:"checks"` // of /livez and /readyz
	Roles   []Role            `json:"roles"`
	Driver  *csiclient.Status `json:"driver,omitempty"` // nil: no role needs the driver
	Loops   []workloop.Status `json:"loops"`
	// LostNodes are the nodes whose volumes are, or will be, cleaned up.
	LostNodes []LostNode `json:"lostNodes,omitempty"`
	Flags     []Flag     `json:"flags"` // those that differ from the default
	Metrics   string     `json:"-"`     // path of the metrics, without the leading slash
	// Plan is what the process does, and findings about its settings. Only the JSON has it.
	Plan *doctor.Plan `json:"plan,omitempty"`
	// Permissions are those of Plan, with ?permissions=1.
	Permissions *doctor.Permissions `json:"permissions,omitempty"`
}

// Check is the result of a health check.
type Check struct {
	Kind  string `json:"kind"` // livez or readyz
	Name  string `json:"name"`
	Error string `json:"error,omitempty"` // "" if it passed
}

// Role is a role of the process.
type Role struct {
	Name  string           `json:"name"`
	Lease *election.Status `json:"lease,omitempty"` // nil: the role does not use leader election
	// Disabled is the reason why the role does not run. It is started again with back-off. "" while it runs.
	Disabled string `json:"disabled,omitempty"`
}

// LostNode is the record of a node that was deleted, or is being deleted.
type LostNode struct {
	Node  string    `json:"node"`
	State string    `json:"state"`
	Since time.Time `json:"since,omitzero"` // no Node exists; zero: one may exist
	Next  string    `json:"next"`           // what happens next, or the command to run
}

// Flag is a setting and the source of its value.
type Flag struct {
	Name   string `json:"name"`
	Value  string `json:"value"`
	Origin string `json:"origin"`
}

// Describe returns the plan of the process, and the permissions if they are requested.
type Describe func(ctx context.Context, permissions bool) (*doctor.Plan, *doctor.Permissions, error)

// Handler serves the page that read returns as HTML, or with ?format=json as JSON, with the results of describe.
func Handler(read func() Page, describe Describe) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		// The page needs neither scripts nor external content, so an error text cannot inject any.
		w.Header().Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
		switch format := r.URL.Query().Get("format"); format {
		case "json":
			plan, permissions, err := describe(r.Context(), r.URL.Query().Get("permissions") == "1")
			if err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			p := read()
			p.Plan, p.Permissions = plan, permissions
			w.Header().Set("Content-Type", "application/json")
			encoder := json.NewEncoder(w)
			encoder.SetIndent("", "  ")
			_ = encoder.Encode(p) // the client closed the connection
		case "", "html":
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			_, _ = io.WriteString(w, render(read(), r.URL.Query().Get("refresh") != "off")) // as above
		default:
			http.Error(w, fmt.Sprintf("unknown format %q: use html or json", format), http.StatusBadRequest)
		}
	})
}

// human formats d with at most two units, and with milliseconds below a second.
func human(d time.Duration) string {
	switch {
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	}
	return duration.HumanDuration(d)
}

// ago formats the time from t to now.
func ago(now, t time.Time) string { return human(max(now.Sub(t), 0)) }

// until formats the time from now to t; "now" if t has passed.
func until(now, t time.Time) string {
	if !t.After(now) {
		return "now"
	}
	return "in " + human(t.Sub(now))
}
