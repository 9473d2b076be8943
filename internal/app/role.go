// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package app runs the roles of the program. A role is declared in a file of its own and listed in
// roles.go: its options, permissions, Lease and controller. The rest of the package reads these
// declarations: which roles run for a driver, under which Lease, and the findings of doctor.
package app

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"

	"github.com/storage-controller/storage-controller/attacher"
	"github.com/storage-controller/storage-controller/capacity"
	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/keylock"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/internal/workloop"
	"github.com/storage-controller/storage-controller/provisioner"
	"github.com/storage-controller/storage-controller/topolvm"
)

// Role declares one of the controllers that a process can run. Functions that are marked optional may
// be nil.
type Role struct {
	// Name is the name of the role in the configuration, in --controllers, and in user agents.
	Name string
	// sidecar is the base name of the image that the role replaces.
	sidecar string

	// options returns the flags of the role. all reports whether the command is "all".
	options func(all bool) []settings.Option
	// config returns a pointer to the struct that the options are decoded into.
	config func() any
	// commonOptions are options of the process that only commands with this role have.
	commonOptions []settings.Option
	// defaults are the defaults of options of the process in the command that runs this role only.
	defaults map[string]any
	// preset is [settings.Section.Preset]. Optional.
	preset func(option string) bool
	// enabled reports whether the settings enable the role. Optional: it is enabled.
	enabled func(settings.Settings) bool
	// switches are the options that decide whether the settings enable the role. Optional.
	switches []string
	// validate returns every error in the settings of the role.
	validate func(settings.Settings) error
	// environment returns an error for each missing environment variable. Optional.
	environment func(settings.Settings) error
	// ineffective lists settings that have no effect, as conditions under which they have one. driver is
	// nil when its capabilities are unknown. Optional.
	ineffective func(s settings.Settings, driver *csiclient.Driver) []condition

	// timeout returns the deadline of a CSI call of the role.
	timeout func(settings.Settings) time.Duration
	// slow reports that a CSI call of the role may last long: its deadline is not one for identity calls,
	// unless the role runs alone.
	slow bool
	// limit returns the rate limit of API requests of the role. Optional: the common one.
	limit func(settings.Settings) (qps float64, burst int)
	// nodeDeployment reports whether the settings request an instance per node. Optional: the role
	// cannot run once per node.
	nodeDeployment func(settings.Settings) bool
	// driverName returns the name of the driver in the settings. Optional: only roles that can run
	// without a connection to the driver have it.
	driverName func(settings.Settings) string

	// lease returns the name of the Lease. It is the Lease of the sidecar that the role replaces, so
	// that both never work at the same time.
	lease func(s settings.Settings, driver string) string
	// otherLeases returns the names of Leases under which another controller with the same task may
	// work. Optional.
	otherLeases func(driver string) []string
	// grants returns the directories of deploy/rbac that the role needs, without leader election.
	grants func(settings.Settings, csiclient.Driver) []rbac.Grant
	// apis returns the optional kinds of the API that the role uses. Optional.
	apis func(settings.Settings, csiclient.Driver) []doctor.API

	// refused returns why the role must not run for a driver in a process with these settings, even if it is named. It is called
	// as soon as the name of the driver is known, before anything is built. Optional: it may run for every driver.
	refused func(s settings.Settings, driver string) error
	// supported returns an error when the driver lacks a capability that the role requires.
	supported func(csiclient.Driver) error
	// probe reads from the API server whatever build requires of it, for doctor. Optional.
	probe func(context.Context, settings.Settings, *rest.Config) error
	// prepare is called for every chosen role before the first one is built. Optional.
	prepare func(*shared) error
	// build creates the controller, with clients for config. It is called before the watches start, and
	// again after an error.
	build func(ctx context.Context, s *shared, config *rest.Config) (controller, error)
	// check is the name of the readiness check of the controller, if it is a [checker].
	check string
}

// condition lists settings that have an effect only if it is met.
type condition struct {
	met   bool
	unmet string   // why the settings have no effect
	keys  []string // as in [settings.Settings.Origin]
}

// controller is the loop of a role. Run works for one term of the Lease and may be called again
// after it has returned.
type controller interface {
	Run(ctx context.Context) error
}

// waiter is a controller that cannot work at times, for example while a CRD is not installed. It does not
// compete for its Lease then. Its Run returns nil when it cannot work any more.
type waiter interface {
	WaitAvailable(ctx context.Context) error
}

// server is a controller that also serves requests on every replica, from the start to the end of the process.
type server interface {
	Serve(ctx context.Context) error
}

// checker is a controller with a readiness check of its own.
type checker interface {
	Ready() error
}

// shared holds the dependencies that the controllers of a process have in common.
type shared struct {
	settings  settings.Settings
	driver    csiclient.Driver
	csi       *csiclient.Client // nil if no role calls the driver
	service   *topolvm.Service  // nil if another process serves the driver
	informers *kube.Informers
	metadata  metadata.Interface // for watches of optional kinds
	watches   *rest.Config       // for watches of custom resources
	events    record.EventRecorder
	recorder  func(component string) record.EventRecorder // for a role whose sidecar has an event source of its own
	registry  prometheus.Registerer
	queues    *workloop.Metrics
	locks     *keylock.Locks[string]
	running   *running
}

// running refers to controllers that others call. A role may be built after the others have started.
type running struct {
	attacher    atomic.Pointer[attacher.Controller]
	capacity    atomic.Pointer[capacity.Controller]
	provisioner atomic.Pointer[provisioner.Controller]
}

// unthrottledClient returns a client of the same role without a rate limit.
func unthrottledClient(config *rest.Config) (kubernetes.Interface, error) {
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = -1, 0
	return kubernetes.NewForConfig(config)
}

// requireCapability returns an error unless the driver has a controller capability.
func requireCapability(d csiclient.Driver, capability string, has bool) error {
	if has {
		return nil
	}
	return fmt.Errorf("driver %q does not report the controller capability %s", d.Name, capability)
}

// retryOptions returns the options that every role with a queue has.
func retryOptions(timeout, start, longest time.Duration, timeoutUsage string) []settings.Option {
	return []settings.Option{
		{Name: "timeout", Default: timeout, Usage: timeoutUsage},
		{Name: "retry-interval-start", Default: start, Usage: "first delay after a failure; doubles with each further failure"},
		{Name: "retry-interval-max", Default: longest, Usage: "longest delay after a failure"},
	}
}

// Selection is the set of roles of a command.
type Selection struct {
	roles []Role
	// all reports whether the capabilities of the driver decide which roles run, unless --controllers
	// does. Otherwise the first role always runs, and flags enable the others.
	all bool
	// service reports that the process serves the CSI service that its roles call.
	service bool
	// defaults replace those of options of the process, and of options of a role after its name and a dot.
	defaults map[string]any
}

// Names returns the names of the roles.
func (c Selection) Names() []string { return names(c.roles) }

// names returns the names of roles in their order.
func names(roles []Role) []string {
	var list []string
	for _, r := range roles {
		list = append(list, r.Name)
	}
	return list
}

func contains(roles []Role, name string) bool { return slices.Contains(names(roles), name) }

// Schema returns the options of a command that runs c.
func (c Selection) Schema() settings.Schema {
	schema := settings.Schema{Common: settings.CommonOptions(c.all), Shared: sharedOptions(), Prefixed: c.all}
	for _, r := range c.roles {
		schema.Common = append(schema.Common, r.commonOptions...)
		if !c.all && r.Name == c.roles[0].Name {
			for i, o := range schema.Common {
				if def, ok := r.defaults[o.Name]; ok {
					schema.Common[i].Default = def
				}
			}
		}
	}
	if c.all {
		schema.Common = append(schema.Common, controllersOption)
	}
	for _, r := range All.roles {
		section := settings.Section{Name: r.Name, Options: r.options(c.all), Config: r.config, Preset: r.preset,
			Unused: !contains(c.roles, r.Name)}
		schema.Sections = append(schema.Sections, section)
	}
	schema.Sections = append(schema.Sections, topolvmSection(!c.service))
	if c.service {
		schema.Common, schema.Shared = servingOptions(schema.Common, schema.Shared)
	}
	c.setDefaults("", schema.Common)
	for _, section := range schema.Sections {
		c.setDefaults(section.Name+".", section.Options)
	}
	return schema
}

// setDefaults replaces the defaults of options, whose names in c.defaults have a prefix.
func (c Selection) setDefaults(prefix string, options []settings.Option) {
	for i, o := range options {
		if def, ok := c.defaults[prefix+o.Name]; ok {
			options[i].Default = def
		}
	}
}

// sharedOptions returns the options of the process that some commands do not have.
func sharedOptions() []settings.Option {
	options := []settings.Option{controllersOption}
	for _, r := range All.roles {
		options = append(options, r.commonOptions...)
	}
	return options
}

var controllersOption = settings.Option{
	Name: "controllers", Default: "", Usage: "roles to run, such as provisioner,attacher, or not to run, such as -capacity. " +
		"Without roles to run, the driver decides",
}

// Read reads the settings of a command that runs c. version is that of the program.
func (c Selection) Read(fs *pflag.FlagSet, version string) (Config, error) {
	read := func() (settings.Settings, error) { return settings.Read(fs, c.Schema()) }
	s, err := read()
	if err == nil && c.service {
		s.Common.Logging, err = settings.Of[serviceConfig](s, topolvmName).logging(s.Common.Logging, s.Origin)
	}
	return Config{Settings: s, Selection: c, Version: version, file: settings.ConfigFile(fs), reread: read}, err
}
