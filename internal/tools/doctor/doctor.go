// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package doctor checks an installation: the driver at its socket, the API server, the permissions
// of the process, and whether the API objects of the driver agree with its capabilities. It
// changes nothing.
package doctor

import (
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// Report holds the results of all checks.
type Report struct {
	Driver   string            `json:"driver,omitempty"`
	Version  string            `json:"version"` // of this program
	Time     time.Time         `json:"time"`
	Findings []finding.Finding `json:"findings"`
	Reached  bool              `json:"reached"` // the driver or the API server answered
	User     string            `json:"-"`       // whose permissions were checked; "" if unknown
	Missing  []Missing         `json:"-"`       // for WriteRBAC
}

// Role is a role that the process would run.
type Role struct {
	Name  string `json:"name"`
	Lease string `json:"lease,omitempty"`
	// Elected reports whether the role works only while the process holds the Lease, which is in LeaseNamespace.
	Elected        bool   `json:"elected"`
	LeaseNamespace string `json:"leaseNamespace,omitempty"`
	// Others are names of Leases with which another controller may do the same work.
	Others []string `json:"others,omitempty"`
	// Sidecar is the image name of the sidecar that the role replaces.
	Sidecar string `json:"sidecar,omitempty"`
	// Named reports whether --controllers names the role, so that the process exits if it cannot start.
	Named bool `json:"named"`
	// Probe reads what the role reads from the API server when it starts. Nil means nothing. A running process has no need of it: it
	// reports the roles that could not start.
	Probe func(context.Context, *rest.Config) error `json:"-"`
}

// API is an API resource that the process would use.
type API struct {
	GroupVersion string `json:"groupVersion"`
	Resource     string `json:"resource"`
	// Older is the GroupVersion that is used if GroupVersion is not served; "": none.
	Older string `json:"older,omitempty"`
	// For is the feature that uses the resource.
	For string `json:"for"`
	// Required reports whether the process does not work without the resource. Otherwise the
	// feature is disabled.
	Required bool   `json:"required"`
	Hint     string `json:"hint"`
}

// Input describes the installation to check.
type Input struct {
	Version string
	// CSI configures the connection to the driver. With an empty Address it is not checked.
	CSI csiclient.Config
	// DriverName is the driver name in the settings; "" if it must be read from the driver.
	DriverName string
	// Config configures the connection to the API server. If it is nil, ConfigError has the reason.
	Config      *rest.Config
	ConfigError error
	// Impersonate is the user whose permissions are checked; "" is the user of Config.
	Impersonate string
	// Plan returns what a process with these settings would do with driver. known reports
	// whether the capabilities of the driver are known.
	Plan func(driver csiclient.Driver, known bool) Plan
	// Process is the plan of a running process, which replaces Plan and the calls of the driver; nil without one. It is as
	// trustworthy as the container.
	Process *Plan
	// Namespace is that of the workload of Process; "" if unknown.
	Namespace string
	// Permissions are those of the process. Nil means that they are reviewed.
	Permissions *Permissions
}

// Plan describes what a process would do.
type Plan struct {
	Driver   csiclient.Driver  `json:"driver"`
	Known    bool              `json:"known"`    // the capabilities of Driver are known
	Findings []finding.Finding `json:"findings"` // about the settings and the environment
	Roles    []Role            `json:"roles"`
	Grants   []rbac.Grant      `json:"grants"`
	APIs     []API             `json:"apis"`
	// Capacity reports whether CSIStorageCapacity objects would be published.
	Capacity bool `json:"capacity"`
	// Topology reports whether volumes would have a topology.
	Topology bool `json:"topology"`
	// PodNamespace is the namespace to search for sidecars, Pod the name of the own pod if known.
	PodNamespace string `json:"podNamespace"`
	Pod          string `json:"pod,omitempty"`
	// Host is the host name, which identifies the process in Leases if Pod is unknown; "" otherwise.
	Host string `json:"host,omitempty"`
	// SecretNamespaces are the namespaces in which secrets of classes may be; empty means all.
	SecretNamespaces []string `json:"secretNamespaces,omitempty"`
	// Selected reports whether --controllers leaves roles out: other processes may run them.
	Selected bool `json:"selected"`
}

func (p Plan) runs(role string) bool {
	return slices.ContainsFunc(p.Roles, func(r Role) bool { return r.Name == role })
}

// examination is the state of one [Run].
type examination struct {
	*Report
	in     Input
	plan   Plan
	driver csiclient.Driver
	known  bool // the capabilities of the driver are known
	apiread.Clients
	reader *apiread.Reader
}

// readTimeout bounds each request to read objects.
const readTimeout = 15 * time.Second

// onlyThisCommand is about kinds that the roles need not read.
const onlyThisCommand = "Only this command needs the permission."

func newExamination(in Input) *examination {
	e := &examination{in: in, Report: &Report{
		Version: in.Version, Time: time.Now().UTC().Truncate(time.Second), User: in.Impersonate,
	}}
	e.reader = apiread.New(readTimeout, func(f finding.Finding) { e.Findings = append(e.Findings, f) })
	return e
}

// Run runs all checks. What cannot be checked is unknown, with the reason.
func Run(ctx context.Context, in Input) Report {
	e := newExamination(in)
	if in.Process != nil {
		e.adopt(*in.Process)
	} else {
		e.askDriver(ctx)
		e.plan = in.Plan(e.driver, e.known)
		if !e.known {
			e.plan.addFeatures(e.driver.Name, in.Plan)
		}
	}
	e.Driver = e.driver.Name
	e.Findings = append(e.Findings, e.plan.Findings...)
	if !e.connect(ctx) {
		return *e.Report
	}
	e.checkAPIs()
	e.checkRoles(ctx)
	e.checkGrants(ctx)
	for _, check := range []struct {
		name string
		run  func(context.Context)
	}{
		{"leases", e.checkLeases}, {sidecarsCheck, e.checkSidecars}, {"csidriver", e.checkCSIDriver},
		{"storageclasses", e.checkClasses}, {"volumesnapshotclasses", e.checkSnapshotClasses},
		{"nodes", e.checkNodes}, {"lost nodes", e.checkLostNodes},
	} {
		if e.driver.Name == "" && check.name != sidecarsCheck {
			e.unknown(check.name, "the name of the driver is unknown")
			continue
		}
		check.run(ctx)
	}
	return *e.Report
}

func (r *Report) add(topic string, s finding.Severity, next, format string, args ...any) {
	r.Findings = append(r.Findings, finding.Finding{Severity: s, Topic: topic, Next: next, Message: fmt.Sprintf(format, args...)})
}

func (r *Report) ok(topic, format string, args ...any) { r.add(topic, finding.OK, "", format, args...) }

func (r *Report) unknown(topic, format string, args ...any) {
	r.add(topic, finding.Unknown, "", format, args...)
}

// Text returns r as text.
func (r Report) Text() string {
	count := func(s finding.Severity) int { return finding.Count(r.Findings, s) }
	return fmt.Sprintf("%s\n%d ok, %s, %d failing, %d unknown\n", finding.Text(r.Findings), count(finding.OK),
		finding.Plural(count(finding.Warning), "warning"), count(finding.Failing), count(finding.Unknown))
}
