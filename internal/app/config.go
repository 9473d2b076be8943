package app

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/internal/tracing"
	"github.com/storage-controller/storage-controller/metrics"
	"github.com/storage-controller/storage-controller/nodecontroller"
)

// Config is everything that a command runs with.
type Config struct {
	settings.Settings
	Selection
	Version string
}

// UsageError is an error in the command line or the other sources of settings.
type UsageError struct{ Err error }

func (e *UsageError) Error() string { return e.Err.Error() }
func (e *UsageError) Unwrap() error { return e.Err }

// mayRun reports whether --controllers allows the role called name.
func mayRun(s settings.Settings, name string) bool {
	return len(s.Common.Controllers) == 0 || slices.Contains(s.Common.Controllers, name)
}

// named reports whether the command or --controllers names r. Such a role must start, and its errors end
// the process. The other roles of "all" are disabled while they cannot run.
func (c Config) named(r Role) bool { return !c.all || slices.Contains(c.Common.Controllers, r.Name) }

// Enabled returns c without the roles that the settings disable.
func (c Config) Enabled() Config {
	roles := c.roles
	c.roles = slices.DeleteFunc(slices.Clone(roles), func(r Role) bool {
		always := !c.all && r.Name == roles[0].Name || slices.Contains(c.Common.Controllers, r.Name)
		return !always && r.enabled != nil && !r.enabled(c.Settings)
	})
	return c
}

// Validate returns every error in the settings of the process and its roles.
func (c Config) Validate() error {
	errs := []error{c.Settings.Validate()}
	for _, name := range c.Common.Controllers {
		if !contains(c.roles, name) {
			errs = append(errs, fmt.Errorf("--controllers: unknown role %q; the roles are %s", name, strings.Join(c.Names(), ", ")))
		}
	}
	if c.perNode(c.roles) {
		if c.Common.LeaderElection {
			errs = append(errs, errors.New("--node-deployment and --leader-election: only one of them may be set, because the "+
				"instance of every node must work"))
		}
		for _, r := range c.roles {
			if mayRun(c.Settings, r.Name) && r.nodeDeployment == nil {
				errs = append(errs, fmt.Errorf("--node-deployment: the %s cannot run once per node. Set "+
					"--controllers=provisioner,capacity or one of these", r.Name))
				break
			}
		}
	}
	errs = append(errs, c.DriverConfig().Validate(), c.leaseConfig().Validate(), c.serverConfig().Validate(),
		c.tracingConfig("").Validate(), c.validateAudit())
	for _, r := range c.roles {
		if err := r.validate(c.Settings); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", r.Name, err))
		}
	}
	return errors.Join(errs...)
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
		if err := r.environment(c.Settings); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", r.Name, err))
		}
	}
	return errors.Join(errs...)
}

// skipped is a role that does not run, and why.
type skipped struct {
	role   string
	reason error
}

// choose returns the roles that run for a driver. Named roles run for every driver. The others run if
// the driver and the environment support them.
func (c Config) choose(d csiclient.Driver) (chosen []Role, others []skipped) {
	for _, r := range c.roles {
		switch {
		case c.named(r):
			chosen = append(chosen, r)
			continue
		case len(c.Common.Controllers) > 0:
			continue
		}
		err := r.supported(d)
		if err == nil && r.environment != nil {
			err = r.environment(c.Settings)
		}
		if err != nil {
			others = append(others, skipped{r.Name, err})
			continue
		}
		chosen = append(chosen, r)
	}
	return chosen, others
}

// nameWithoutConnection returns the name of the driver if the roles need no connection to it and none was
// requested, else "".
func (c Config) nameWithoutConnection() string {
	if c.Origin("csi-address") != "" || c.Origin("csi-socket") != "" || len(c.roles) > 1 && len(c.Common.Controllers) == 0 {
		return ""
	}
	name := ""
	for _, r := range c.roles {
		if len(c.roles) > 1 && !mayRun(c.Settings, r.Name) {
			continue
		}
		if r.driverName == nil {
			return ""
		}
		name = r.driverName(c.Settings)
	}
	return name
}

// DriverName returns the name of the driver in the settings, or "".
func (c Config) DriverName() string { return nodecontrollerConfig(c.Settings).Driver() }

// ResolveNodecontroller returns the valid configuration of the nodecontroller for a driver, and all of its
// settings with their origins.
func (c Config) ResolveNodecontroller(driver string) (nodecontroller.Config, []nodecontroller.Setting, error) {
	return resolveNodecontroller(c.Settings, driver)
}

// DriverConfig returns the configuration of the connection to the driver.
func (c Config) DriverConfig() csiclient.Config {
	cfg := csiclient.DefaultConfig()
	cfg.Address = c.Common.CSIAddress
	if c.Common.CSISocket != "" {
		cfg.Address = c.Common.CSISocket
	}
	cfg.ExitOnConnectionLoss = c.Common.ExitOnConnectionLoss
	cfg.MaxLogLength = c.Common.MaxGRPCLogLength
	cfg.Timeout = 0
	for i, r := range c.roles { // the longest timeout, but validation reports a negative one
		if timeout := r.timeout(c.Settings); i == 0 || timeout > cfg.Timeout {
			cfg.Timeout = timeout
		}
	}
	return cfg
}

func (c Config) leaseConfig() election.Config {
	return election.Config{
		LeaseDuration: c.Common.LeaseDuration, RenewDeadline: c.Common.RenewDeadline, RetryPeriod: c.Common.RetryPeriod,
	}
}

// tracingConfig returns the configuration of traces about driver; an empty endpoint means none.
func (c Config) tracingConfig(driver string) tracing.Config {
	return tracing.Config{
		Endpoint: c.Common.OTLPEndpoint, Ratio: c.Common.OTLPSamplingRatio,
		Service: "storage-controller/" + driver, Version: c.Version,
	}
}

// serverConfig returns the configuration of the HTTP server.
func (c Config) serverConfig() metrics.Config {
	cfg := metrics.Config{
		HealthAddress: settings.Address(c.Common.HealthBindAddress), ProfilingAddress: settings.Address(c.Common.ProfilingBindAddress),
		MetricsPath: c.Common.MetricsPath, Pprof: c.Common.EnablePprof, LeaderElection: c.Common.LeaderElection,
	}
	for _, a := range c.Common.Endpoints() { // at most one
		cfg.Address = a
	}
	return cfg
}
