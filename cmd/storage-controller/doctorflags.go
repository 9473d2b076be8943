package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
)

// ineffective is a warning for each of settings, which have no effect for a reason.
func ineffective(reasons map[string]string) []doctor.Check {
	if len(reasons) == 0 {
		return []doctor.Check{{Name: "flags", Status: doctor.OK, Message: "everything that was set has an effect"}}
	}
	var checks []doctor.Check
	for _, name := range slices.Sorted(maps.Keys(reasons)) {
		checks = append(checks, doctor.Check{Name: "flags", Status: doctor.Warning, Message: name + " has no effect: " + reasons[name], Hint: "remove it, or set what it needs"})
	}
	return checks
}

// withoutEffect is what was set by flag, environment or file and changes nothing, and why.
func (s settings) withoutEffect(fs *pflag.FlagSet, chosen []role, driver csiclient.Driver, known bool) map[string]string {
	found := map[string]string{}
	for _, gate := range s.Common.FeatureGates.withoutEffect() {
		found["the feature gate "+gate] = "it has graduated"
	}
	fs.Visit(func(f *pflag.Flag) {
		if _, no := f.Value.(noOp); no {
			found["--"+f.Name] = "it is accepted for old manifests only"
		}
	})
	c := s.Common
	s.unless(found, c.LeaderElection, "--leader-election is off", "leader-election-lease-duration", "leader-election-renew-deadline", "leader-election-retry-period", "leader-election-labels")
	s.unless(found, c.KubeAPIQPS > 0, "--kube-api-qps sets no limit", "kube-api-burst")
	s.unless(found, len(s.endpoints()) > 0, "there is no --http-endpoint", "metrics-path", "enable-pprof")
	s.unless(found, c.OTLPEndpoint != "", "there is no --otlp-endpoint", "otlp-sampling-ratio")
	s.unless(found, false, "the number of threads always follows the CPU limit of the container", "automaxprocs")
	s.unless(found, s.Provisioner.NodeDeployment, "--node-deployment is off", "provisioner.node-deployment-immediate-binding", "provisioner.node-deployment-base-delay", "provisioner.node-deployment-max-delay")
	s.unless(found, s.Nodecontroller.EnableWebhooks, "--enable-webhooks is off", "nodecontroller.webhook-addr", "nodecontroller.webhook-cert-mode", "nodecontroller.webhook-cert-secret", "nodecontroller.cert-dir")
	if known {
		caps := driver.Controller
		s.unless(found, having(chosen, provisionerRole.section), "the provisioner does not run", "audit-interval")
		s.unless(found, caps.PublishUnpublishVolume && caps.ListVolumes && caps.ListVolumesPublishedNodes, "the driver does not report LIST_VOLUMES and LIST_VOLUMES_PUBLISHED_NODES", "attacher.reconcile-sync", "attacher.max-entries")
		s.unless(found, driver.Plugin.VolumeAccessibilityConstraints, "the driver does not report VOLUME_ACCESSIBILITY_CONSTRAINTS", "provisioner.strict-topology", "provisioner.immediate-topology")
	}
	s.ofOthers(found, chosen)
	return found
}

// unless notes those of keys that were set, unless they have an effect.
func (s settings) unless(found map[string]string, effect bool, why string, keys ...string) {
	for _, key := range keys {
		if origin := s.origins[key]; !effect && origin != "" {
			found[fmt.Sprintf("%s (%s)", key, origin)] = why
		}
	}
}

// ofOthers notes what was set for roles that do not run, and for no other.
func (s settings) ofOthers(found map[string]string, chosen []role) {
	for key, origin := range s.origins {
		section, name, nested := strings.Cut(key, ".")
		if !nested || having(chosen, section) || sectionsWith(optionsOf(chosen, true), name) != nil {
			continue
		}
		found[fmt.Sprintf("%s (%s)", key, origin)] = "the role " + section + " does not run"
	}
}
