// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// Plan returns what a process with c would do for driver, as far as settings and environment determine it.
// known reports whether the capabilities of the driver are known; otherwise every role may run. A process that serves the driver
// does not need it.
func (c Config) Plan(driver csiclient.Driver, known bool) doctor.Plan {
	c = c.Enabled()
	if c.service {
		driver = c.topolvm.served()
	}
	p := doctor.Plan{
		Driver: driver, Known: known,
		Selected:     namesRoles(c.Settings) || !mayRun(c.Settings, attacherName) || !mayRun(c.Settings, capacityName),
		PodNamespace: election.Namespace(""), Pod: os.Getenv("POD_NAME"),
	}
	if p.Pod == "" && c.inPod() {
		p.Host, _ = os.Hostname() // after an error it is unknown
	}
	p.Findings = append(p.Findings, newCheck("settings", "valid", c.Validate(),
		"correct the flag, the environment variable or the file; config print shows the effective settings"))
	chosen, others, refusal := c.choose(driver, known)
	if refusal != nil {
		p.Findings = append(p.Findings, newCheck("roles", "", refusal, ""))
	}
	p.Findings = slices.Concat(p.Findings, rolesCheck(chosen, others, known), c.environmentChecks(chosen, c.inPod()),
		ineffectiveChecks(c.ineffective(chosen, driver, known), accepted(c)))
	for _, r := range chosen {
		p.Roles = append(p.Roles, c.planRole(r, driver.Name))
	}
	p.Grants, p.APIs = c.grants(chosen, driver), c.apis(chosen, driver)
	p.Capacity, p.SecretNamespaces = contains(chosen, capacityName), c.Common.SecretNamespaces
	p.Topology = driver.Plugin.VolumeAccessibilityConstraints && c.Role(provisionerName).Gates.Enabled("Topology")
	if driver.Name != "" && contains(chosen, nodecontrollerName) {
		if _, _, err := completeNodecontroller(c.Settings, driver.Name); err != nil {
			p.Findings = append(p.Findings, newCheck("settings nodecontroller", "", err, "correct the flag"))
		}
	}
	return p
}

// planRole returns a role of the plan; driver is "" if its name is unknown.
func (c Config) planRole(r Role, driver string) doctor.Role {
	e := c.Role(r.Name).Election
	role := doctor.Role{
		Name: r.Name, Sidecar: r.sidecar, Named: c.named(r), Elected: e.Enabled, LeaseNamespace: election.Namespace(e.Namespace),
	}
	if r.probe != nil && (r.environment == nil || r.environment(c.Settings) == nil) {
		role.Probe = func(ctx context.Context, config *rest.Config) error { return r.probe(ctx, c.Settings, config) }
	}
	if driver != "" {
		role.Lease = r.lease(c.Settings, driver)
	}
	if r.otherLeases != nil {
		role.Others = slices.DeleteFunc(r.otherLeases(driver), func(lease string) bool { return lease == role.Lease })
	}
	return role
}

// grants returns the directories of deploy/rbac that the chosen roles need. The permissions for Secrets
// depend on the StorageClasses and are not among them.
func (c Config) grants(chosen []Role, driver csiclient.Driver) []rbac.Grant {
	var grants []rbac.Grant
	seen := map[string]bool{}
	for _, r := range chosen {
		grants = append(grants, r.grants(c.Settings, driver)...)
		lease := r.lease(c.Settings, driver.Name)
		if e := c.Role(r.Name).Election; e.Enabled && !seen[lease] { // roles may share a Lease
			grants = append(grants, rbac.Grant{File: r.Name + "-leader-election", Namespace: election.Namespace(e.Namespace)})
		}
		seen[lease] = true
	}
	for i, g := range grants {
		grants[i].Accesses = doctor.OfDriver(rbac.Of(g.File, g.Namespace), driver.Name)
	}
	if c.service {
		grants = append(grants, serviceGrant(c.topolvm.driver()))
	}
	if c.Common.SecureMetrics {
		const file = "nodecontroller-secure-metrics"
		grants = append(grants, rbac.Grant{File: file, Accesses: rbac.Of(file, "")})
	}
	return grants
}

// apis returns the optional kinds that the chosen roles use.
func (c Config) apis(chosen []Role, driver csiclient.Driver) []doctor.API {
	var apis []doctor.API
	for _, r := range chosen {
		if r.apis != nil {
			apis = append(apis, r.apis(c.Settings, driver)...)
		}
	}
	if c.service {
		apis = append(apis, serviceAPI(c.topolvm.driver()))
	}
	return apis
}

// newCheck returns a check that failed with err, or passed with message.
func newCheck(name, message string, err error, hint string) finding.Finding {
	if err != nil {
		return finding.New(finding.Failing, name, oneLine(err), hint)
	}
	return finding.New(finding.OK, name, message, "")
}

// oneLine returns the text of err, which may join several errors, as one line.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// rolesCheck lists the roles that would run, and those that would not.
func rolesCheck(chosen []Role, others []skipped, known bool) []finding.Finding {
	c := finding.New(finding.OK, "roles", strings.Join(names(chosen), ", "), "")
	switch {
	case len(chosen) == 0:
		c.Severity, c.Message, c.Next = finding.Failing, "no role would run", "check that this is the right driver, or set --controllers"
	case !known:
		c.Message += " (as far as the driver supports them; its capabilities are unknown)"
	}
	checks := []finding.Finding{c}
	for _, s := range others {
		checks = append(checks, finding.New(finding.Unknown, "roles", s.role+": "+oneLine(s.reason), ""))
	}
	return checks
}

// inPod reports whether the settings lead to the API server of the pod of this process, so that the
// environment is the one of the roles.
func (c Config) inPod() bool {
	return c.Common.Kubeconfig == "" && c.Common.Master == "" && os.Getenv("KUBECONFIG") == "" && os.Getenv("KUBERNETES_SERVICE_HOST") != ""
}

// environmentChecks checks the environment variables of roles and Leases. Outside of the pod, a missing
// variable is only a warning.
func (c Config) environmentChecks(chosen []Role, inPod bool) []finding.Finding {
	var errs []error
	for _, r := range chosen {
		if r.environment != nil {
			errs = append(errs, r.environment(c.Settings))
		}
	}
	if c.perNode(chosen) && os.Getenv("NODE_NAME") == "" {
		errs = append(errs, errors.New("the environment variable NODE_NAME must name the node of this process. Set it from spec.nodeName"))
	}
	missing := newCheck("environment", "all variables that the roles require are set", errors.Join(errs...),
		"set it with valueFrom.fieldRef at the container")
	if missing.Severity == finding.Failing && !inPod {
		missing.Severity = finding.Warning
		missing.Next += "; this process uses a kubeconfig, so the environment of the pod may differ"
	}
	checks := []finding.Finding{missing}
	for _, name := range All.Options().UnknownVariables(os.Environ()) {
		checks = append(checks, finding.New(finding.Warning, "environment",
			"environment variable "+name+" matches no option and has no effect",
			"correct the name: "+settings.EnvPrefix+" and the name of the flag in capitals, with underscores"))
	}
	return checks
}

// ineffectiveChecks returns a warning for each setting without effect, except those that are accepted from manifests of the
// sidecars. reasons is by setting.
func ineffectiveChecks(reasons map[string]string, accepted []string) []finding.Finding {
	var checks []finding.Finding
	switch {
	case len(accepted) > 0:
		checks = append(checks, finding.New(finding.OK, "flags",
			"accepted from manifests of the sidecars, without effect: "+strings.Join(accepted, ", "), ""))
	case len(reasons) == 0:
		checks = append(checks, finding.New(finding.OK, "flags", "every setting has an effect", ""))
	}
	for _, name := range slices.Sorted(maps.Keys(reasons)) {
		checks = append(checks, finding.New(finding.Warning, "flags", name+" has no effect: "+reasons[name],
			"remove it, or set the option that it requires"))
	}
	return checks
}

// accepted returns the settings of sidecars that have no effect here and need none: the program always does what they set, or
// never needs it.
func accepted(c Config) []string {
	var all []string
	for _, name := range c.NoOps {
		all = append(all, "--"+name)
	}
	if c.Origin("automaxprocs") != "" {
		all = append(all, "--automaxprocs")
	}
	for _, gate := range c.gatesWithoutEffect() {
		all = append(all, "feature gate "+gate)
	}
	return all
}

// ineffective returns the settings from flags, environment and file that have no effect, and why.
func (c Config) ineffective(chosen []Role, driver csiclient.Driver, known bool) map[string]string {
	found := map[string]string{}
	conditions := []condition{{c.Common.OTLPEndpoint != "", "--otlp-endpoint is not set", []string{"otlp-sampling-ratio"}}}
	var d *csiclient.Driver
	if known {
		d = &driver
		conditions = append(conditions, condition{contains(chosen, provisionerName), "the provisioner does not run",
			[]string{"audit-interval"}})
	}
	for _, r := range c.roles {
		if r.ineffective != nil {
			conditions = append(conditions, r.ineffective(c.Settings, d)...)
		}
	}
	for _, condition := range conditions {
		for _, key := range condition.keys {
			if origin := c.Origin(key); !condition.met && origin != "" {
				found[fmt.Sprintf("%s (%s)", key, origin)] = condition.unmet
			}
		}
	}
	for _, condition := range everyRoleConditions {
		for _, option := range condition.options {
			for _, setting := range c.withoutEffect(option, condition.met) {
				found[setting] = condition.unmet
			}
		}
	}
	for key, origin := range c.OfOthers(names(chosen)) {
		role, name, _ := strings.Cut(key, ".")
		isDisabled := !contains(c.roles, role)
		isSwitch := slices.ContainsFunc(c.declared, func(r Role) bool { return r.Name == role && slices.Contains(r.switches, name) })
		if name == "driver-name" || isDisabled && isSwitch { // doctor needs the name; the switch is what disables the role
			continue
		}
		found[fmt.Sprintf("%s (%s)", key, origin)] = "the role " + role + " does not run"
	}
	return found
}

// everyRoleConditions are the conditions of the settings that every role has.
var everyRoleConditions = []struct {
	met     func(settings.Role) bool
	unmet   string
	options []string
}{
	{func(r settings.Role) bool { return r.Election.Enabled }, "--leader-election is off", []string{"leader-election-lease-duration",
		"leader-election-renew-deadline", "leader-election-retry-period", "leader-election-labels"}},
	{func(r settings.Role) bool { return r.Limits.QPS > 0 }, "--kube-api-qps sets no limit", []string{"kube-api-burst"}},
	{func(r settings.Role) bool { return r.Endpoint.Address() != "" }, "--http-endpoint is not set",
		[]string{"metrics-path", "enable-pprof"}},
}

// withoutEffect returns the settings of an option that every role has, for roles whose settings do not meet its condition: one
// setting if that are all roles.
func (c Config) withoutEffect(option string, met func(settings.Role) bool) []string {
	var found []string
	var last settings.Origin
	for _, r := range c.roles {
		key := r.Name + "." + option
		if origin := c.Origin(key); origin != "" && !met(c.Role(r.Name)) {
			found, last = append(found, fmt.Sprintf("%s (%s)", key, origin)), origin
		}
	}
	if len(found) == len(c.roles) {
		return []string{fmt.Sprintf("%s (%s)", option, last)}
	}
	return found
}

// gatesWithoutEffect returns the names of the feature gates that are set for a role, but have no effect, sorted.
func (c Config) gatesWithoutEffect() []string {
	var names []string
	for _, r := range c.roles {
		names = append(names, c.Role(r.Name).Gates.WithoutEffect()...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}
