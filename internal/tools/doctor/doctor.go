// Package doctor examines what a process would find: the driver at its socket, the API
// server and its permissions there, and whether the objects about the driver agree with
// what it says. It changes nothing.
package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/csiclient"
)

// Status is how a check came out.
type Status string

// The outcomes of a check.
const (
	OK      Status = "ok"
	Warning Status = "warning" // it works, and not as well as it could
	Failure Status = "failure" // it does not work
	Skipped Status = "skipped" // it could not be told, or does not matter here
)

// Check is one thing that was looked at.
type Check struct {
	Name    string `json:"name"`
	Status  Status `json:"status"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"` // what to do; never empty for a warning and a failure
}

// Report is everything that was looked at.
type Report struct {
	Driver  string    `json:"driver,omitempty"`
	Version string    `json:"version"` // of this program
	Time    time.Time `json:"time"`
	Checks  []Check   `json:"checks"`
	// Reached tells whether the driver or the API server could be asked at all.
	Reached bool `json:"reached"`
}

// Count is how many checks came out as s.
func (r Report) Count(s Status) int {
	n := 0
	for _, c := range r.Checks {
		if c.Status == s {
			n++
		}
	}
	return n
}

// Role is one of the controllers that would run.
type Role struct {
	Name  string
	Lease string
	// Others are names of Leases under which a controller for the same works besides.
	Others []string
	// Sidecar is the base name of the image of what the role replaces.
	Sidecar string
}

// Grant is the permissions of one directory of deploy/rbac that would be used.
type Grant struct {
	File string // the name of the directory
	// Namespace is that of what the file grants by a Role.
	Namespace string
	// Names are those of objects that settings have changed, by the ones in the file.
	Names map[string]string
	// Rules, where not nil, take the place of those of the file, which are an example.
	Rules []Rule
	// Without is what does not work without it; empty means the role itself.
	Without string
}

// API is a kind that has to be served.
type API struct {
	GroupVersion, Resource string
	// For is what needs it.
	For string
	// Required tells that For does not work without it, else that it is left out.
	Required bool
	Hint     string
}

// Input is what is examined.
type Input struct {
	Version string
	// CSI is how to reach the driver; its Address is empty where that was not asked for.
	CSI csiclient.Config
	// DriverName is what the settings say of it; empty means that it has to be asked.
	DriverName string
	// Config is the way to the API server; where it is nil, ConfigError says why.
	Config      *rest.Config
	ConfigError error
	// Impersonate is the user whose permissions are checked; empty means that of Config.
	Impersonate string
	// Plan is what a process with these settings would do with driver. known tells
	// whether the driver has said what it can do.
	Plan func(driver csiclient.Driver, known bool) Plan
}

// Plan is what a process would do.
type Plan struct {
	Checks []Check // of the settings themselves
	Roles  []Role
	Grants []Grant
	APIs   []API
	// Capacity tells that a CSIStorageCapacity would be written.
	Capacity bool
	// Topology tells that volumes belong to segments of nodes.
	Topology bool
	// LeaderElection tells whether the Leases are used.
	LeaderElection bool
	LeaseNamespace string
	// PodNamespace is where the old sidecars would be, Pod the name of the own pod if known.
	PodNamespace, Pod string
	// Selected tells that roles were left out by hand: other processes may have them.
	Selected bool
}

func (p Plan) runs(role string) bool {
	for _, r := range p.Roles {
		if r.Name == role {
			return true
		}
	}
	return false
}

// examination is one run.
type examination struct {
	in     Input
	plan   Plan
	driver csiclient.Driver
	known  bool // what the driver can do
	client kubernetes.Interface
	meta   metadata.Interface
	report *Report
	skew   time.Duration // of the own clock; positive means that it is ahead
	said   string        // the HTTP status of the answer of the API server to /version
}

// Run examines everything. What cannot be asked is said in the report.
func Run(ctx context.Context, in Input) Report {
	e := &examination{in: in, report: &Report{Version: in.Version, Time: time.Now().UTC().Truncate(time.Second)}}
	e.askDriver(ctx)
	e.report.Driver = e.driver.Name
	e.plan = in.Plan(e.driver, e.known)
	e.report.Checks = append(e.report.Checks, e.plan.Checks...)
	if !e.connect(ctx) {
		return *e.report
	}
	e.checkAPIs()
	e.checkGrants(ctx)
	e.checkLeases(ctx)
	e.checkSidecars(ctx)
	e.checkCSIDriver(ctx)
	e.checkClasses(ctx)
	e.checkTopology(ctx)
	return *e.report
}

func (e *examination) add(name string, s Status, hint, format string, args ...any) {
	e.report.Checks = append(e.report.Checks, Check{Name: name, Status: s, Hint: hint, Message: fmt.Sprintf(format, args...)})
}

func (e *examination) ok(name, format string, args ...any) { e.add(name, OK, "", format, args...) }
func (e *examination) skip(name, format string, args ...any) {
	e.add(name, Skipped, "", format, args...)
}

// widest is the longest name that the messages are aligned after; that of a Lease may be longer.
const widest = 34

// WriteText writes r for people: a line per check, and one for each hint.
func (r Report) WriteText(w io.Writer) error {
	var b strings.Builder
	width := 0
	for _, c := range r.Checks {
		width = max(width, min(len(c.Name), widest))
	}
	for _, c := range r.Checks {
		fmt.Fprintf(&b, "%-7s  %-*s  %s\n", c.Status, width, c.Name, c.Message)
		if c.Hint != "" {
			fmt.Fprintf(&b, "%-7s  %-*s  → %s\n", "", width, "", c.Hint)
		}
	}
	fmt.Fprintf(&b, "\n%d ok, %d warnings, %d failures, %d skipped\n", r.Count(OK), r.Count(Warning), r.Count(Failure), r.Count(Skipped))
	_, err := io.WriteString(w, b.String())
	return err
}

// WriteJSON writes r for programs.
func (r Report) WriteJSON(w io.Writer) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(r)
}
