// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/internal/tools/statusz"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// status collects what the debug endpoints show. Its parts are added while the process starts.
type status struct {
	cfg     Config
	started time.Time
	checks  func() []statusz.Check
	granted *permissions

	mu      sync.Mutex
	plan    func() doctor.Plan        // for the driver as far as it is known
	csi     *csiclient.Client         // nil: not yet, or not needed
	terms   *terms                    // nil: not yet
	queues  []*workloop.Metrics       // none: not yet
	changed map[string]settings.Value // settings that changed since the start, by name
}

// change records that the value of a setting has changed.
func (s *status) change(v settings.Value) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changed == nil {
		s.changed = map[string]settings.Value{}
	}
	s.changed[v.Name] = v
}

// values returns the settings that are in effect.
func (s *status) values() []settings.Value {
	s.mu.Lock()
	defer s.mu.Unlock()
	values := slices.Clone(s.cfg.Values)
	for i, v := range values {
		if now, ok := s.changed[v.Name]; ok {
			values[i] = now
		}
	}
	return values
}

func newStatus(c Config) *status {
	s := &status{cfg: c, started: time.Now()}
	s.serving(csiclient.Driver{Name: c.DriverName()}, false)
	return s
}

// serving sets the driver of the plan. known reports whether its capabilities are known.
func (s *status) serving(driver csiclient.Driver, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.plan = sync.OnceValue(func() doctor.Plan { return s.cfg.Plan(driver, known) })
}

// describe implements [statusz.Describe].
func (s *status) describe(ctx context.Context, permissions bool) (*doctor.Plan, *doctor.Permissions, error) {
	s.mu.Lock()
	plan := s.plan
	s.mu.Unlock()
	if !permissions {
		p := plan()
		return &p, nil, nil
	}
	r, err := s.granted.get(ctx, plan)
	if err != nil {
		return nil, nil, err
	}
	return &r.plan, &r.permissions, nil
}

func (s *status) connecting(csi *csiclient.Client) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.csi = csi
}

func (s *status) working(t *terms, queues []*workloop.Metrics) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.terms, s.queues = t, queues
}

// pages returns the debug endpoints. The root redirects to /statusz, which links to everything else.
func (s *status) pages(metricsPath string) map[string]http.Handler {
	page := func() statusz.Page {
		p := s.page()
		p.Metrics = strings.TrimPrefix(metricsPath, "/") // a relative link works behind a proxy that adds a path
		return p
	}
	return map[string]http.Handler{
		"/{$}": http.RedirectHandler("/statusz",
			http.StatusFound), "/statusz": statusz.Handler(page, s.describe), "/flagz": http.HandlerFunc(s.flags),
	}
}

// actions returns the endpoints that change the process.
func (s *status) actions() map[string]http.Handler {
	if s.cfg.Logs == nil {
		return nil
	}
	return map[string]http.Handler{"/debug/flags/v": http.HandlerFunc(s.putVerbosity)}
}

// putVerbosity sets the verbosity of the logs to the number in the body, as components of Kubernetes do.
func (s *status) putVerbosity(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 16))
	verbosity, invalid := strconv.Atoi(strings.TrimSpace(string(body)))
	if err != nil || invalid != nil || verbosity < 0 {
		http.Error(w, "the body must be the verbosity, such as 4", http.StatusBadRequest)
		return
	}
	if verbosity, err = s.cfg.Logs.SetVerbosity(verbosity); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	s.change(settings.Value{Name: "v", Value: strconv.Itoa(verbosity), Origin: "debug endpoint"})
	klog.FromContext(r.Context()).Info("Verbosity changed", "v", verbosity, "origin", "debug endpoint")
	fmt.Fprintf(w, "verbosity set to %d\n", verbosity)
}

// page returns the content of /statusz.
func (s *status) page() statusz.Page {
	p := statusz.Page{
		Program: "storage-controller", Version: s.cfg.Version, Go: runtime.Version(), Started: s.started, Now: time.Now(),
		Checks: s.checks(),
	}
	for _, v := range s.values() {
		if v.Origin != string(settings.OriginDefault) {
			p.Flags = append(p.Flags, statusz.Flag(v))
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.csi != nil {
		driver := s.csi.Status()
		p.Driver = &driver
	}
	for _, q := range s.queues {
		p.Loops = append(p.Loops, q.Status()...)
	}
	slices.SortFunc(p.Loops, func(a, b workloop.Status) int { return strings.Compare(a.Name, b.Name) })
	if s.terms != nil {
		p.Roles = s.terms.status()
		p.LostNodes = s.terms.lostNodes()
	}
	return p
}

// status returns the state of each role.
func (t *terms) status() []statusz.Role {
	var roles []statusz.Role
	for _, e := range t.entries {
		for _, m := range e.members {
			role := statusz.Role{Name: m.name, Disabled: m.disabled()}
			if e.candidate != nil {
				lease := e.candidate.Status()
				role.Lease = &lease
			}
			roles = append(roles, role)
		}
	}
	return roles
}

// flags writes the name, value and origin of every setting.
func (s *status) flags(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	table := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	for _, v := range s.values() {
		fmt.Fprintf(table, "%s\t%s\t%s\n", v.Name, v.Value, v.Origin)
	}
	_ = table.Flush() // the client has disconnected
}
