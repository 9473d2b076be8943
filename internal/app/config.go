// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tracing"
	"github.com/storage-controller/storage-controller/metrics"
	"github.com/storage-controller/storage-controller/nodecontroller"
)

// Config is everything that a command runs with.
type Config struct {
	Settings
	Selection
	Version string
	// Logs is the logging of the process. Nil means that its levels cannot change.
	Logs *Logs
	// API is the configuration of the clients of the API server. Nil means the one that the settings name.
	API *rest.Config
	// DialDriver is [csiclient.Config.Dial].
	DialDriver func(ctx context.Context, address string) (net.Conn, error)
	// FirstLimit is [csiclient.Config.FirstLimit].
	FirstLimit int
	// DriverCalls is called for each call of the roles, in memory, of the driver that the process serves. Not nil means that the
	// process does not serve the socket. It is for simulations.
	DriverCalls grpc.UnaryServerInterceptor
	// DelayExpiry is called when a Lease that the process holds has expired: see [election.Candidate.DelayExpiry]. It is for simulations.
	DelayExpiry func()
	// KeepMemory keeps the memory that the first lists have needed. It is for programs that run many of these processes.
	KeepMemory bool
	// Enqueue is [workloop.Metrics.Enqueue].
	Enqueue func(loop string, key any, add func())

	declared []Role                   // the roles of the command, also those that [Config.Enabled] has removed
	file     string                   // of --config; "": none
	reread   func() (Settings, error) // with the present content of the file
}

// restConfig returns the configuration of the clients of the API server.
func restConfig(c Config) (*rest.Config, error) {
	if c.API != nil {
		return c.API, nil
	}
	return kube.RESTConfig(c.Common.Kubeconfig, c.Common.Master)
}

// UsageError is an error in the command line or the other sources of settings.
type UsageError struct{ Err error }

func (e *UsageError) Error() string { return e.Err.Error() }
func (e *UsageError) Unwrap() error { return e.Err }

// Validate returns every error in the settings of the process and its roles.
func (c Config) Validate() error {
	errs := []error{c.Common.Validate(c.Origin("csi-address") != "")}
	for _, name := range c.Common.Controllers {
		if !contains(c.roles, strings.TrimPrefix(name, "-")) {
			errs = append(errs, fmt.Errorf("--controllers: unknown role %q; the roles are %s", name, strings.Join(c.Names(), ", ")))
		}
	}
	if c.perNode(c.roles) {
		for _, r := range c.roles {
			if mayRun(c.Settings, r.Name) && c.Role(r.Name).Election.Enabled {
				errs = append(errs, errors.New("--node-deployment and --leader-election: only one of them may be set, because the "+
					"instance of every node must work"))
				break
			}
		}
		for _, r := range c.roles {
			if mayRun(c.Settings, r.Name) && r.nodeDeployment == nil {
				errs = append(errs, fmt.Errorf("--node-deployment: the %s cannot run once per node. Set "+
					"--controllers=provisioner,capacity,snapshotter or some of these", r.Name))
				break
			}
			if mayRun(c.Settings, r.Name) && !r.nodeDeployment(c.Settings) {
				errs = append(errs, fmt.Errorf("--node-deployment: the %s would work on every node without a Lease. Set it for all roles, "+
					"or for none", r.Name))
			}
		}
	}
	if c.Common.DriverHealthEndpoint != "" && c.nameWithoutConnection() != "" {
		errs = append(errs, errors.New("--driver-health-endpoint: requires a connection to the driver. Set --csi-address"))
	}
	errs = append(errs, c.validateService(), c.DriverConfig().Validate(), c.validateEndpoints(), c.validateLeases(),
		c.tracingConfig("").Validate(), c.validateAudit(), validateLogging(c.Common.Logging), c.validateLivenessprobe())
	errs = split(errors.Join(errs...))
	roles := map[string][]string{} // the names of the roles that report an error
	for _, r := range c.roles {
		own := c.Role(r.Name)
		for _, err := range split(errors.Join(own.Validate(), metrics.CheckPath(own.Endpoint.MetricsPath), r.validate(c.Settings))) {
			text := err.Error()
			if !slices.ContainsFunc(errs, func(known error) bool { return known.Error() == text }) {
				errs = append(errs, err)
				roles[text] = []string{}
			}
			if names, ok := roles[text]; ok { // no error of the process
				roles[text] = append(names, r.Name)
			}
		}
	}
	for i, err := range errs {
		if names := roles[err.Error()]; len(names) > 0 && len(names) < len(c.roles) {
			errs[i] = fmt.Errorf("%s: %w", strings.Join(names, ", "), err)
		}
	}
	return errors.Join(errs...)
}

// split returns the errors that [errors.Join] has joined in err.
func split(err error) []error {
	joined, ok := err.(interface{ Unwrap() []error })
	switch {
	case err == nil:
		return nil
	case !ok:
		return []error{err}
	}
	var errs []error
	for _, err := range joined.Unwrap() {
		errs = append(errs, split(err)...)
	}
	return errs
}

// perNode reports whether one of roles is configured to run once per node.
func (c Config) perNode(roles []Role) bool {
	return slices.ContainsFunc(roles, func(r Role) bool { return r.nodeDeployment != nil && r.nodeDeployment(c.Settings) })
}

// ValidateEnvironment returns an error for each environment variable that a named role requires and that is
// not set. For the other roles, see choose.
func (c Config) ValidateEnvironment() error {
	var errs []error
	for _, r := range c.roles {
		if r.environment == nil || !c.named(r) {
			continue
		}
		for _, err := range split(r.environment(c.Settings)) {
			errs = append(errs, fmt.Errorf("%s: %w", r.Name, err))
		}
	}
	return errors.Join(errs...)
}

// DriverName returns the name of the driver in the settings, or "".
func (c Config) DriverName() string { return nodecontrollerConfig(c.Settings).DriverName }

// ResolveNodecontroller returns the valid configuration of the nodecontroller for a driver.
func (c Config) ResolveNodecontroller(driver string) (nodecontroller.Config, error) {
	return resolveNodecontroller(c.Settings, driver)
}

// DriverConfig returns the configuration of the connection to the driver.
func (c Config) DriverConfig() csiclient.Config {
	cfg := csiclient.DefaultConfig()
	cfg.Address = c.Common.CSIAddress
	// A command that serves the driver has no --csi-address, but its configuration file may set it.
	if c.service || c.Common.CSISocket != "" {
		cfg.Address = c.Common.CSISocket
	}
	cfg.ExitOnConnectionLoss = c.Common.ExitOnConnectionLoss
	cfg.MaxLogLength = c.Common.MaxGRPCLogLength
	cfg.AdaptiveConcurrency = c.Common.AdaptiveConcurrency
	cfg.Dial = c.DialDriver
	cfg.FirstLimit = c.FirstLimit
	cfg.NodeExpansion = contains(c.roles, resizerName) && mayRun(c.Settings, resizerName)
	cfg.Timeout = 0
	for i, r := range c.roles { // the longest timeout, but validation reports a negative one
		if r.slow && len(c.roles) > 1 {
			continue
		}
		if timeout := r.timeout(c.Settings); i == 0 || timeout > cfg.Timeout {
			cfg.Timeout = timeout
		}
	}
	return cfg
}

// HasLeasesIn reports whether the settings of a role name namespace as that of its Lease.
func (c Config) HasLeasesIn(namespace string) bool {
	return slices.ContainsFunc(c.roles, func(r Role) bool { return c.Role(r.Name).Election.Namespace == namespace })
}

// validateLeases returns an error for two roles that share a Lease, but not its settings.
func (c Config) validateLeases() error {
	var errs []error
	first := map[string]string{} // role by Lease
	for _, r := range c.Enabled().roles {
		if !mayRun(c.Settings, r.Name) {
			continue
		}
		lease := r.lease(c.Settings, "DRIVER")
		other, shared := first[lease]
		if !shared {
			first[lease] = r.Name
		} else if !c.Role(r.Name).Election.Equal(c.Role(other).Election) {
			errs = append(errs, fmt.Errorf("the roles %s and %s share a Lease: each option that begins with --leader-election must be "+
				"the same for both", other, r.Name))
		}
	}
	return errors.Join(errs...)
}

// tracingConfig returns the configuration of traces about driver; an empty endpoint means none.
func (c Config) tracingConfig(driver string) tracing.Config {
	return tracing.Config{
		Endpoint: c.Common.OTLPEndpoint, Ratio: c.Common.OTLPSamplingRatio,
		Service: "storage-controller/" + driver, Version: c.Version,
	}
}
