package main

import (
	"errors"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/nodecontroller"
)

// sidecars is the base name of the image of what each role replaces.
var sidecars = map[string]string{
	provisionerRole.section: "csi-provisioner", attacherRole.section: "csi-attacher", capacityRole.section: "csi-provisioner",
	nodecontrollerSection: "topolvm-controller",
}

// plan is what "all" would do with s for driver. known tells whether the driver has said
// what it can do; else every role may run.
func (s settings) plan(fs *pflag.FlagSet, driver csiclient.Driver, known bool) doctor.Plan {
	roles := s.enabled(allRoles(), true)
	p := doctor.Plan{
		Selected: len(s.Common.Controllers) > 0, LeaderElection: s.Common.LeaderElection, LeaseNamespace: election.Namespace(s.Common.LeaseNamespace),
		PodNamespace: election.Namespace(""), Pod: os.Getenv("POD_NAME"),
	}
	p.Checks = append(p.Checks, checkOf("settings", "valid", s.validate(roles...), "correct the flag, the environment variable or the file; config print shows what is in effect"))
	chosen := slices.DeleteFunc(slices.Clone(roles), func(r role) bool { return !s.mayRun(r.section) })
	var skipped []error
	if known {
		chosen, skipped = s.choose(roles, true, driver)
	}
	p.Checks = append(p.Checks, rolesCheck(chosen, skipped, known)...)
	p.Checks = append(p.Checks, s.environmentChecks(chosen, s.inPod())...)
	p.Checks = append(p.Checks, ineffective(s.withoutEffect(fs, chosen, driver, known))...)
	cfg := s.Nodecontroller
	if driver.Name != "" && having(chosen, nodecontrollerSection) {
		resolved, _, err := cfg.Resolve(driver.Name)
		if err != nil {
			p.Checks = append(p.Checks, checkOf("settings nodecontroller", "", err, "correct the flag"))
		} else {
			cfg = resolved
		}
	}
	for _, r := range chosen {
		role := doctor.Role{Name: r.section, Sidecar: sidecars[r.section]}
		if driver.Name != "" {
			role.Lease = r.lease(s, driver.Name)
		}
		if r.section == nodecontrollerSection {
			role.Others = otherLeases(driver.Name, role.Lease)
		}
		p.Roles = append(p.Roles, role)
	}
	f := features{settings: s, driver: driver, known: known, nodecontroller: cfg, chosen: chosen}
	p.Grants, p.APIs = f.grants(p.LeaseNamespace), f.apis()
	p.Capacity = having(chosen, capacityRole.section)
	p.Topology = driver.Plugin.VolumeAccessibilityConstraints && s.Common.FeatureGates.enabled("Topology")
	return p
}

// otherLeases is under which names a node controller of driver may work besides.
func otherLeases(driver, own string) []string {
	var others []string
	if cfg, _, err := nodecontroller.DefaultConfig().Resolve(driver); err == nil {
		others = append(others, cfg.LeaderElectionID)
	}
	if strings.HasPrefix(driver, "topolvm.") {
		others = append(others, "topolvm") // that of its own controller
	}
	return slices.DeleteFunc(others, func(name string) bool { return name == own })
}

// checkOf is a check that failed with err, or went well.
func checkOf(name, message string, err error, hint string) doctor.Check {
	if err != nil {
		return doctor.Check{Name: name, Status: doctor.Failure, Message: oneLine(err), Hint: hint}
	}
	return doctor.Check{Name: name, Status: doctor.OK, Message: message}
}

// oneLine is err, which may be several, as the line of one check.
func oneLine(err error) string {
	return strings.ReplaceAll(err.Error(), "\n", "; ")
}

func rolesCheck(chosen []role, skipped []error, known bool) []doctor.Check {
	c := doctor.Check{Name: "roles", Status: doctor.OK, Message: strings.Join(sections(chosen), ", ")}
	switch {
	case len(chosen) == 0:
		c.Status, c.Message, c.Hint = doctor.Failure, "none would run", "is it the right driver? Else name the roles by --controllers"
	case !known:
		c.Message += " (those of them that the driver supports; it was not asked)"
	}
	checks := []doctor.Check{c}
	for _, err := range skipped {
		checks = append(checks, doctor.Check{Name: "roles", Status: doctor.Skipped, Message: oneLine(err)})
	}
	return checks
}

// environmentChecks looks for the variables that roles and Leases need. Outside of the pod
// their absence says little.
func (s settings) environmentChecks(chosen []role, inPod bool) []doctor.Check {
	var errs []error
	for _, r := range chosen {
		if r.environment != nil {
			errs = append(errs, r.environment(s))
		}
	}
	if s.nodeDeployment(chosen) && os.Getenv("NODE_NAME") == "" {
		errs = append(errs, errors.New("the environment variable NODE_NAME must name the node of this process; set it from spec.nodeName"))
	}
	missing := checkOf("environment", "everything that the roles need is set", errors.Join(errs...), "set it with valueFrom.fieldRef at the container")
	if missing.Status == doctor.Failure && !inPod {
		missing.Status = doctor.Warning
		missing.Hint += "; this process has a kubeconfig and may have another environment than the pod"
	}
	checks := []doctor.Check{missing}
	if s.Common.LeaderElection && os.Getenv("POD_NAME") == "" && inPod {
		checks = append(checks, doctor.Check{
			Name: "environment", Status: doctor.Warning, Message: "POD_NAME is not set: the host name tells replicas apart, which pods in the network of one host share",
			Hint: "set POD_NAME from metadata.name",
		})
	}
	for _, name := range unknownVariables(os.Environ()) {
		checks = append(checks, doctor.Check{
			Name: "environment", Status: doctor.Warning, Message: name + " sets no option, and has no effect",
			Hint: "correct its name: " + envPrefix + " and the name of the flag in capitals, with underscores",
		})
	}
	return checks
}

// unknownVariables is those of environ that have the prefix of options and set none. Those
// that Kubernetes makes for a Service called storage-controller are none of them.
func unknownVariables(environ []string) []string {
	known := map[string]bool{envName("config"): true}
	for _, o := range commonOptions(true, allRoles()...) {
		known[envName(o.name)] = true
	}
	for _, r := range allRoleOptions(true) {
		for _, o := range r.options {
			known[envName(o.name)], known[envName(r.section+"-"+o.name)] = true, true
		}
	}
	var unknown []string
	for _, item := range environ {
		name, _, _ := strings.Cut(item, "=")
		ofService := strings.HasPrefix(name, envPrefix+"SERVICE_") || name == envPrefix+"PORT" || strings.HasPrefix(name, envPrefix+"PORT_")
		if strings.HasPrefix(name, envPrefix) && !known[name] && !ofService {
			unknown = append(unknown, name)
		}
	}
	slices.Sort(unknown)
	return unknown
}
