package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/storage-controller/storage-controller/csiclient"
)

// mayRun tells whether a process with s runs the role of section if the driver supports it.
func (s settings) mayRun(section string) bool {
	return len(s.Common.Controllers) == 0 || slices.Contains(s.Common.Controllers, section)
}

// unconnected is the name of the driver where roles need no connection to it and none
// was asked for, else empty.
func (s settings) unconnected(roles []role) string {
	if s.origins["csi-address"] != "" || s.origins["csi-socket"] != "" || len(roles) > 1 && len(s.Common.Controllers) == 0 {
		return ""
	}
	name := ""
	for _, r := range roles {
		if len(roles) > 1 && !s.mayRun(r.section) {
			continue
		}
		if r.nameOfDriver == nil {
			return ""
		}
		name = r.nameOfDriver(s)
	}
	return name
}

// sections is the names of roles, in their order.
func sections(roles []role) []string {
	var names []string
	for _, r := range roles {
		names = append(names, r.section)
	}
	return names
}

// validate reports everything that is wrong with s for a process that runs roles.
func (s settings) validate(roles ...role) error {
	c := s.Common
	var errs []error
	if set := slices.Sorted(maps.Keys(s.endpoints())); len(set) > 1 {
		errs = append(errs, fmt.Errorf("%s: only one of them may be set", strings.Join(set, " and ")))
	}
	if s.origins["csi-address"] != "" && c.CSISocket != "" && c.CSISocket != c.CSIAddress {
		errs = append(errs, errors.New("--csi-address and --csi-socket: only one of them may be set"))
	}
	if c.SecureMetrics && len(s.endpoints()) == 0 {
		errs = append(errs, errors.New("--secure-metrics-server: needs an address, by --metrics-bind-address or --http-endpoint"))
	}
	if c.KubeAPIQPS < 0 {
		errs = append(errs, fmt.Errorf("--kube-api-qps: must not be negative, got %v", c.KubeAPIQPS))
	}
	if c.KubeAPIQPS > 0 && c.KubeAPIBurst < 1 {
		errs = append(errs, fmt.Errorf("--kube-api-burst: must be at least 1, got %d", c.KubeAPIBurst))
	}
	for _, name := range c.Controllers {
		if !slices.ContainsFunc(roles, func(r role) bool { return r.section == name }) {
			errs = append(errs, fmt.Errorf("--controllers: unknown role %q; the roles are %s", name, strings.Join(sections(roles), ", ")))
		}
	}
	if s.nodeDeployment(roles) {
		if c.LeaderElection {
			errs = append(errs, errors.New("--node-deployment and --leader-election: only one of them may be set, since every node has an instance that works"))
		}
		if central := s.central(roles); central != "" {
			errs = append(errs, fmt.Errorf("--node-deployment: the %s cannot run once per node; set --controllers=provisioner,capacity or one of these", central))
		}
	}
	errs = append(errs, c.FeatureGates.validate(), s.driverConfig(roles...).Validate(), s.leaseConfig().Validate(), s.serverConfig().Validate(), s.tracingConfig("").Validate(), s.validateAudit(roles))
	for _, r := range roles {
		if err := r.validate(s); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", r.section, err))
		}
	}
	return errors.Join(errs...)
}

// nodeDeployment tells whether one of roles is to run once per node.
func (s settings) nodeDeployment(roles []role) bool {
	return having(roles, provisionerRole.section) && s.Provisioner.NodeDeployment || having(roles, capacityRole.section) && s.Capacity.NodeDeployment
}

// central names a role that may run and looks after the whole cluster, "" for none.
func (s settings) central(roles []role) string {
	for _, r := range roles {
		asked := len(s.Common.Controllers) == 0 || slices.Contains(s.Common.Controllers, r.section)
		if asked && r.section != provisionerRole.section && r.section != capacityRole.section {
			return r.section
		}
	}
	return ""
}

// enabled is those of roles that are not turned off. all is as for newRoleCommand.
func (s settings) enabled(roles []role, all bool) []role {
	return slices.DeleteFunc(slices.Clone(roles), func(r role) bool {
		always := !all && r.section == roles[0].section || slices.Contains(s.Common.Controllers, r.section)
		return !always && r.enabled != nil && !r.enabled(s)
	})
}

// environment reports what those of roles lack that were asked for. The rest of "all" is
// left out instead; see choose.
func (s settings) environment(roles []role, all bool) error {
	var errs []error
	for _, r := range roles {
		asked := !all || slices.Contains(s.Common.Controllers, r.section)
		if !asked || r.environment == nil {
			continue
		}
		if err := r.environment(s); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", r.section, err))
		}
	}
	return errors.Join(errs...)
}

// choose is which of roles run for a driver. Those that were asked for by name
// run whatever the driver can do; of all, those that it supports and that have what they
// need.
func (s settings) choose(roles []role, all bool, d csiclient.Driver) (chosen []role, skipped []error) {
	if !all {
		return roles, nil
	}
	for _, r := range roles {
		if len(s.Common.Controllers) > 0 {
			if slices.Contains(s.Common.Controllers, r.section) {
				chosen = append(chosen, r)
			}
			continue
		}
		err := r.supported(d)
		if err == nil && r.environment != nil {
			err = r.environment(s)
		}
		if err != nil {
			skipped = append(skipped, fmt.Errorf("%s: %w", r.section, err))
			continue
		}
		chosen = append(chosen, r)
	}
	return chosen, skipped
}
