package main

import (
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/tools/statusz"
	"github.com/storage-controller/storage-controller/internal/workloop"
	"github.com/storage-controller/storage-controller/nodecontroller"
)

// status is what the page of the process is made of. Its parts come to be one after the
// other while the process starts.
type status struct {
	settings settings
	started  time.Time
	checks   func() []statusz.Check

	mu     sync.Mutex
	csi    *csiclient.Client // nil: none yet, or none is needed
	terms  *terms            // nil: not yet
	queues *workloop.Metrics // likewise
}

func (s *status) connecting(csi *csiclient.Client) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.csi = csi
}

func (s *status) working(t *terms, queues *workloop.Metrics) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.terms, s.queues = t, queues
}

// pages is what the HTTP server serves besides metrics and health. Its root leads to the
// page that has links to everything else.
func (s *status) pages() map[string]http.Handler {
	return map[string]http.Handler{
		"/{$}": http.RedirectHandler("/statusz", http.StatusFound), "/statusz": statusz.Handler(s.page), "/flagz": http.HandlerFunc(s.flags),
	}
}

func (s *status) page() statusz.Page {
	p := statusz.Page{
		Program: "storage-controller", Version: buildVersion(), Go: runtime.Version(), Started: s.started, Now: time.Now(),
		Checks: s.checks(),
		Flags: slices.DeleteFunc(slices.Clone(s.settings.flags), func(f statusz.Flag) bool {
			return f.Origin == string(nodecontroller.OriginDefault)
		}),
		Metrics: strings.TrimPrefix(s.settings.Common.MetricsPath, "/"), // without its slash the link works behind a proxy that adds a path
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.csi != nil {
		driver := s.csi.Status()
		p.Driver = &driver
	}
	if s.queues != nil {
		p.Loops = s.queues.Status()
	}
	if s.terms != nil {
		for _, e := range s.terms.entries {
			for _, r := range e.roles {
				role := statusz.Role{Name: r.section}
				if e.candidate != nil {
					lease := e.candidate.Status()
					role.Lease = &lease
				}
				p.Roles = append(p.Roles, role)
			}
		}
	}
	return p
}

// flags writes every setting, its value and where that comes from.
func (s *status) flags(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	table := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	for _, f := range s.settings.flags {
		fmt.Fprintf(table, "%s\t%s\t%s\n", f.Name, f.Value, f.Origin)
	}
	_ = table.Flush() // whoever asked has gone
}
