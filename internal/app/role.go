// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package app runs the roles of the program. A role is declared in a file of its own and listed in
// roles.go: its permissions, Lease and controller. The rest of the package reads these
// declarations: which roles run for a driver, under which Lease, and the findings of doctor.
package app

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
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

	// enabled reports whether the settings enable the role. Optional: it is enabled.
	enabled func(Settings) bool
	// switches are the options that decide whether the settings enable the role. Optional.
	switches []string
	// validate returns every error in the settings of the role.
	validate func(Settings) error
	// environment returns an error for each missing environment variable. Optional.
	environment func(Settings) error
	// ineffective lists settings that have no effect, as conditions under which they have one. driver is
	// nil when its capabilities are unknown. Optional.
	ineffective func(s Settings, driver *csiclient.Driver) []condition

	// timeout returns the deadline of a CSI call of the role.
	timeout func(Settings) time.Duration
	// slow reports that a CSI call of the role may last long: its deadline is not one for identity calls,
	// unless the role runs alone.
	slow bool
	// limit returns the rate limit of API requests of the role. Optional: the common one.
	limit func(Settings) (qps float64, burst int)
	// nodeDeployment reports whether the settings request an instance per node. Optional: the role
	// cannot run once per node.
	nodeDeployment func(Settings) bool
	// driverName returns the name of the driver in the settings. Optional: only roles that can run
	// without a connection to the driver have it.
	driverName func(Settings) string

	// lease returns the name of the Lease. It is the Lease of the sidecar that the role replaces, so
	// that both never work at the same time.
	lease func(s Settings, driver string) string
	// otherLeases returns the names of Leases under which another controller with the same task may
	// work. Optional.
	otherLeases func(driver string) []string
	// grants returns the directories of deploy/rbac that the role needs, without leader election.
	grants func(Settings, csiclient.Driver) []rbac.Grant
	// apis returns the optional kinds of the API that the role uses. Optional.
	apis func(Settings, csiclient.Driver) []doctor.API

	// refused returns why the role must not run for a driver in a process with these settings, even if it is named. It is called
	// as soon as the name of the driver is known, before anything is built. Optional: it may run for every driver.
	refused func(s Settings, driver string) error
	// supported returns an error when the driver lacks a capability that the role requires.
	supported func(csiclient.Driver) error
	// probe reads from the API server whatever build requires of it, for doctor. Optional.
	probe func(context.Context, Settings, *rest.Config) error
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
	keys  []string // as in [settings.Set.Origin]
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
	settings  Settings
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

// Selection is the set of roles of a command.
type Selection struct {
	roles []Role
	// all reports whether the capabilities of the driver decide which roles run, unless --controllers
	// does. Otherwise the first role always runs, and flags enable the others.
	all bool
	// service reports that the process serves the CSI service that its roles call.
	service bool
	// defaults changes the defaults of the settings. Optional.
	defaults func(*Settings)
}

// hasSections reports whether the command line may have sections.
func (c Selection) hasSections() bool { return c.all && !c.service }

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
