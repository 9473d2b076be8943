// Package statusz is the page of a running process for whoever is on call: what it is,
// what it works on, what fails and why. It changes nothing and shows no secrets.
package statusz

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Page is everything that is shown.
type Page struct {
	Program string            `json:"program"`
	Version string            `json:"version"`
	Go      string            `json:"go"`
	Started time.Time         `json:"started"`
	Now     time.Time         `json:"now"`
	Checks  []Check           `json:"checks"` // of /livez and /readyz
	Roles   []Role            `json:"roles"`
	Driver  *csiclient.Status `json:"driver,omitempty"` // nil: no connection to a driver is needed
	Loops   []workloop.Status `json:"loops"`
	Flags   []Flag            `json:"flags"` // that are not at their default
	Metrics string            `json:"-"`     // the path of the metrics, without its first slash
}

// Check is one of the checks of health.
type Check struct {
	Kind  string `json:"kind"` // livez or readyz
	Name  string `json:"name"`
	Error string `json:"error,omitempty"` // "" when it is well
}

// Role is one of the controllers of the process.
type Role struct {
	Name  string           `json:"name"`
	Lease *election.Status `json:"lease,omitempty"` // nil: it works without one
}

// Flag is a setting and where its value comes from.
type Flag struct {
	Name   string `json:"name"`
	Value  string `json:"value"`
	Origin string `json:"origin"`
}

// Handler serves what read returns, as a page, or as JSON with ?format=json.
func Handler(read func() Page) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p := read()
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		// Nothing may be loaded from anywhere, and nothing run, whatever the text of an error is.
		w.Header().Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
		switch format := r.URL.Query().Get("format"); format {
		case "json":
			w.Header().Set("Content-Type", "application/json")
			encoder := json.NewEncoder(w)
			encoder.SetIndent("", "  ")
			_ = encoder.Encode(p) // whoever asked has gone
		case "", "html":
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			_, _ = io.WriteString(w, render(p, r.URL.Query().Get("refresh") != "off")) // likewise
		default:
			http.Error(w, fmt.Sprintf("format %q is not known: html or json", format), http.StatusBadRequest)
		}
	})
}

// took is d for people: two units at most.
func took(d time.Duration) string {
	switch {
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	case d < time.Hour:
		return d.Round(time.Second).String()
	case d < 48*time.Hour:
		return strings.TrimSuffix(d.Round(time.Minute).String(), "0s")
	}
	return fmt.Sprintf("%dd%dh", int(d.Hours())/24, int(d.Hours())%24)
}

// ago is how long before now t is.
func ago(now, t time.Time) string { return took(max(now.Sub(t), 0)) }

// until is how long after now t is; "now" when it is not.
func until(now, t time.Time) string {
	if !t.After(now) {
		return "now"
	}
	return "in " + took(t.Sub(now))
}
