// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/storage-controller/storage-controller/election"
)

// Role holds the settings that every role has, each its own.
type Role struct {
	Election Election
	Limits   Limits
	Gates    Gates
	Endpoint Endpoint
}

// Election holds the settings of the Lease of a role.
type Election struct {
	Enabled   bool   // the role works only while the process holds its Lease
	Namespace string // empty: see [election.Namespace]
	Timing    election.Config
	Labels    Pairs // of the Lease while this replica is the leader
}

// Limits holds the limit of the requests of a role to the API server.
type Limits struct {
	QPS   float64 // requests per second; 0 or less: no limit
	Burst int     // requests that may exceed QPS at once; 0: 10
}

// Endpoint holds the settings of the address that serves metrics, health and debug endpoints.
type Endpoint struct {
	HTTPEndpoint       string // host:port; empty: none
	MetricsAddress     string // deprecated name of HTTPEndpoint
	MetricsBindAddress string // alias of HTTPEndpoint; "0": none
	MetricsPath        string
	Pprof              bool // serves profiles, too
}

// DefaultRole returns the defaults.
func DefaultRole() Role {
	return Role{
		Election: Election{Timing: election.DefaultConfig()}, Limits: Limits{Burst: 10}, Gates: Gates{},
		Endpoint: Endpoint{MetricsPath: "/metrics"},
	}
}

// AddFlags adds the flags of the settings to fs. Their defaults are the values in r.
func (r *Role) AddFlags(fs *pflag.FlagSet) {
	e := &r.Election
	fs.BoolVar(&e.Enabled, "leader-election", e.Enabled, "work only while holding the Lease of a role, so that several replicas can run")
	fs.StringVar(&e.Namespace, "leader-election-namespace", e.Namespace,
		"namespace of the Leases; empty means POD_NAMESPACE, else the namespace of the ServiceAccount, else default")
	fs.DurationVar(&e.Timing.LeaseDuration, "leader-election-lease-duration", e.Timing.LeaseDuration,
		"how long a standby waits before it acquires a Lease that is not renewed")
	fs.DurationVar(&e.Timing.RenewDeadline, "leader-election-renew-deadline", e.Timing.RenewDeadline,
		"how long the leader keeps working while it cannot renew its Lease")
	fs.DurationVar(&e.Timing.RetryPeriod, "leader-election-retry-period", e.Timing.RetryPeriod,
		"time between two renewals of a Lease; a standby reads it ten times as often")
	fs.Var(&e.Labels, "leader-election-labels", "labels of the Lease while this replica is the leader")
	fs.Float64Var(&r.Limits.QPS, "kube-api-qps", r.Limits.QPS,
		"maximum requests per second of each role to the API server; 0 and negative values mean no limit")
	fs.IntVar(&r.Limits.Burst, "kube-api-burst", r.Limits.Burst,
		"number of requests to the API server that may exceed --kube-api-qps at once; 0 means 10")
	fs.Var(&r.Gates, "feature-gates", gatesUsage())
	r.Endpoint.AddFlags(fs)
}

// ofEveryRole has the options that every role has.
var ofEveryRole = sync.OnceValue(func() *pflag.FlagSet { return NewFlags(new(Role).AddFlags) })

// everyRole reports whether every role has the option of that name.
func everyRole(option string) bool { return ofEveryRole().Lookup(option) != nil }

// AddFlags adds the flags of the settings to fs. Their defaults are the values in e.
func (e *Endpoint) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&e.HTTPEndpoint, "http-endpoint", e.HTTPEndpoint,
		"address of the server for metrics, health and debug endpoints, such as :8080; empty means none")
	fs.StringVar(&e.MetricsAddress, "metrics-address", e.MetricsAddress, "deprecated name of --http-endpoint; only one of them may be set")
	fs.StringVar(&e.MetricsPath, "metrics-path", e.MetricsPath, "path of the metrics")
	fs.BoolVar(&e.Pprof, "enable-pprof", e.Pprof, "serve profiles under /debug/pprof/ at the HTTP endpoint")
}

// AddTopolvmFlags adds the flags of topolvm-controller to fs.
func (e *Endpoint) AddTopolvmFlags(fs *pflag.FlagSet) {
	fs.StringVar(&e.MetricsBindAddress, "metrics-bind-address", e.MetricsBindAddress, `alias of --http-endpoint; "0" or empty means none`)
}

// Validate returns every error in r.
func (r Role) Validate() error {
	errs := []error{r.Endpoint.Validate(), r.Gates.validate(), r.Election.validate()}
	if math.IsNaN(r.Limits.QPS) {
		errs = append(errs, errors.New("--kube-api-qps: must be a number, got NaN"))
	}
	if r.Limits.QPS > 0 && r.Limits.Burst < 0 {
		errs = append(errs, fmt.Errorf("--kube-api-burst: must not be negative, got %d", r.Limits.Burst))
	}
	return errors.Join(errs...)
}

// validate returns an error for each setting that would be invalid in a Lease.
func (e Election) validate() error {
	var errs []error
	fail := func(flag, value string, problems []string) {
		if len(problems) > 0 {
			errs = append(errs, fmt.Errorf("%s: %s, got %q", flag, strings.Join(problems, "; "), value))
		}
	}
	if e.Namespace != "" {
		fail("--leader-election-namespace", e.Namespace, validation.IsDNS1123Label(e.Namespace))
	}
	for _, key := range slices.Sorted(maps.Keys(e.Labels)) {
		fail("--leader-election-labels", key, validation.IsQualifiedName(key))
		fail("--leader-election-labels", e.Labels[key], validation.IsValidLabelValue(e.Labels[key]))
	}
	if e.Enabled {
		errs = append(errs, e.Timing.Validate())
	}
	return errors.Join(errs...)
}

// Equal reports whether two roles with these settings can share a Lease.
func (e Election) Equal(other Election) bool {
	return e.Enabled == other.Enabled && e.Namespace == other.Namespace && e.Timing == other.Timing && maps.Equal(e.Labels, other.Labels)
}

// Validate returns every error in e but those of the path.
func (e Endpoint) Validate() error {
	var errs []error
	set := e.set()
	names := slices.Sorted(maps.Keys(set))
	if len(names) > 1 {
		errs = append(errs, fmt.Errorf("%s: only one of them may be set", strings.Join(names, " and ")))
	}
	for _, name := range names {
		errs = append(errs, checkAddress(name, set[name]))
	}
	return errors.Join(errs...)
}

// Address returns the address, "" for none. e must be valid.
func (e Endpoint) Address() string {
	for _, address := range e.set() {
		return address
	}
	return ""
}

// set returns the addresses by the names of their flags. Valid settings have at most one.
func (e Endpoint) set() map[string]string {
	set := map[string]string{"--http-endpoint": e.HTTPEndpoint, "--metrics-address": e.MetricsAddress,
		"--metrics-bind-address": Address(e.MetricsBindAddress)}
	maps.DeleteFunc(set, func(_, address string) bool { return address == "" })
	return set
}
