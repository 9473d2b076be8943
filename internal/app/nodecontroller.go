// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/nodecontroller"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
	"github.com/storage-controller/storage-controller/nodecontroller/pvcfinalizer"
)

const nodecontrollerName = "nodecontroller"

var nodecontrollerRole = Role{
	Name:    nodecontrollerName,
	sidecar: "topolvm-controller",
	enabled: func(s Settings) bool {
		return nodecontrollerOf(s, nodecontrollerConfig(s).DriverName).HasWork()
	},
	switches: []string{"node-cleanup", "skip-node-finalize", "node-finalizer-mode", "pvc-finalizer-mode", "resize-nudge",
		"enable-webhooks"},
	validate: validateNodecontroller,
	timeout:  func(s Settings) time.Duration { return nodecontrollerConfig(s).Timeout },
	lease: func(s Settings, driver string) string {
		cfg, _, err := completeNodecontroller(s, driver)
		if err != nil { // prepare reports it
			return nodecontroller.LeaseName(driver)
		}
		return cfg.LeaderElectionID
	},
	otherLeases: func(driver string) []string { return []string{nodecontroller.LeaseName(driver)} },
	refused:     unserved,
	supported: func(d csiclient.Driver) error {
		if d.Plugin.VolumeAccessibilityConstraints {
			return nil
		}
		return fmt.Errorf("driver %q does not report the plugin capability VOLUME_ACCESSIBILITY_CONSTRAINTS: its volumes do not "+
			"belong to nodes", d.Name)
	},
	driverName:  func(s Settings) string { return nodecontrollerConfig(s).DriverName },
	ineffective: nodecontrollerConditions,
	grants:      nodecontrollerGrants,
	prepare: func(s *shared) error {
		cfg, err := resolveNodecontroller(s.settings, s.driver.Name)
		if err != nil {
			return err
		}
		if cfg.Deletes() && election.OwnNamespace() == "" {
			return &UsageError{fmt.Errorf("--node-cleanup=%s: requires the namespace of the process, which stores the records of lost "+
				"nodes. Set the environment variable POD_NAMESPACE from metadata.namespace", cfg.NodeCleanup)}
		}
		s.informers.Retain(cfg.RetainedFields())
		return nil
	},
	check: "webhook",
	build: buildNodecontroller,
}

// nodecontrollerConfig returns the configuration of the role before the name of the driver is applied. A process that serves the
// driver knows its name.
func nodecontrollerConfig(s Settings) nodecontroller.Config {
	cfg := s.Nodecontroller
	cfg.DriverName = cmp.Or(cfg.DriverName, s.topolvm.driver())
	return cfg
}

// completeNodecontroller returns the configuration of the role for a driver, and the names of the flags whose settings follow from
// its name.
func completeNodecontroller(s Settings, driver string) (nodecontroller.Config, []string, error) {
	return nodecontrollerConfig(s).Complete(driver, func(flag string) bool { return s.Origin(nodecontrollerName+"."+flag) != "" })
}

// resolveNodecontroller returns the valid configuration of the role for a driver.
func resolveNodecontroller(s Settings, driver string) (nodecontroller.Config, error) {
	cfg, _, err := completeNodecontroller(s, driver)
	if err != nil {
		return cfg, err
	}
	if err := cfg.Validate(); err != nil {
		return cfg, &UsageError{err}
	}
	return cfg, nil
}

// nodecontrollerOf returns the configuration of the role for driver; "": its name is unknown.
func nodecontrollerOf(s Settings, driver string) nodecontroller.Config {
	cfg, _, _ := completeNodecontroller(s, driver) // after an error it is incomplete
	return cfg
}

// NodecontrollerValues returns every setting of the nodecontroller for a driver, by name.
func (c Config) NodecontrollerValues(driver string) ([]settings.Value, error) {
	if _, err := c.ResolveNodecontroller(driver); err != nil {
		return nil, err
	}
	cfg, derived, _ := completeNodecontroller(c.Settings, driver) // checked above
	var values []settings.Value
	flags := settings.NewFlags(cfg.AddFlags)
	flags.SortFlags = true
	flags.VisitAll(func(f *pflag.Flag) {
		origin := cmp.Or(c.Origin(nodecontrollerName+"."+f.Name), settings.OriginDefault)
		if slices.Contains(derived, f.Name) {
			origin = settings.OriginDerived
		}
		text := f.Value.String()
		if list, ok := f.Value.(pflag.SliceValue); ok {
			text = strings.Join(list.GetSlice(), ", ")
		}
		values = append(values, settings.Value{Name: f.Name, Value: text, Origin: string(origin)})
	})
	return values, nil
}

// validateNodecontroller returns every error in the settings of the role that does not depend on the
// name that the driver reports.
func validateNodecontroller(s Settings) error {
	driver := nodecontrollerConfig(s).DriverName
	cfg := nodecontrollerOf(s, driver)
	errs := []error{cfg.Validate()}
	runs := mayRun(s, nodecontrollerName) && unserved(s, driver) == nil
	if deletes := cfg.DeletingFlags(); len(deletes) > 0 && !s.Role(nodecontrollerName).Election.Enabled && runs {
		errs = append(errs, fmt.Errorf("--leader-election: must be set with %s, or several replicas delete at the same time",
			strings.Join(deletes, " and ")))
	}
	if err := errors.Join(errs...); err != nil {
		return &UsageError{err}
	}
	return nil
}

func nodecontrollerConditions(s Settings, _ *csiclient.Driver) []condition {
	return []condition{{nodecontrollerConfig(s).EnableWebhooks, "--enable-webhooks is off", []string{
		"nodecontroller.webhook-addr", "nodecontroller.cert-dir", "nodecontroller.webhook-client-ca",
	}}}
}

func nodecontrollerGrants(s Settings, d csiclient.Driver) []rbac.Grant {
	c := nodecontrollerOf(s, d.Name)
	grants := []rbac.Grant{{File: nodecontrollerName, Namespace: election.Namespace("")}}
	for _, file := range []struct {
		needed bool
		name   string
	}{
		{c.NodeFinalizerMode != nodecleanup.FinalizerOff, "nodecontroller-node-finalizer"},
		{c.Deletes(), "nodecontroller-cleanup"},
		{c.NodeCleanup == nodecleanup.ModeVolumes, "nodecontroller-cleanup-volumes"},
		{c.PVCFinalizerMode == pvcfinalizer.ModeStrip, "nodecontroller-pvc-strip"},
		{c.PVCFinalizerMode == pvcfinalizer.ModeEnforce, "nodecontroller-pvc-enforce"},
		{c.ResizeNudge, "nodecontroller-resize-nudge"},
	} {
		if file.needed {
			grants = append(grants, rbac.Grant{File: file.name})
		}
	}
	return grants
}

func buildNodecontroller(ctx context.Context, s *shared, config *rest.Config) (controller, error) {
	cfg, err := resolveNodecontroller(s.settings, s.driver.Name)
	if err != nil {
		return nil, err
	}
	if cfg.EnableWebhooks && s.running.capacity.Load() != nil {
		klog.FromContext(ctx).Info("The scheduler gets capacity twice: from CSIStorageCapacity objects and from the pod webhook. "+
			"Without a scheduler extender "+
			"for the resource of the webhook, pods stay Pending. Set --enable-webhooks=false or --enable-capacity=false",
			"resource", cfg.CapacityResource)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	// The creation of a pod waits for the webhooks, and must not wait for the rate limit of the cleanup.
	unthrottled, err := unthrottledClient(config)
	if err != nil {
		return nil, err
	}
	deps := nodecontroller.Deps{UnthrottledClient: unthrottled, TLS: s.settings.Common.TLS, Deps: nodecleanup.Deps{
		Driver:    s.driver.Name,
		Client:    client,
		Informers: s.informers,
		Locks:     s.locks,
		Events:    s.events,
		Registry:  s.registry,
		Queues:    s.queues,
		Namespace: election.OwnNamespace(), // independent of --leader-election-namespace
	}}
	if s.service != nil {
		deps.Resources, err = s.service.Resources(config)
		if err != nil {
			return nil, err
		}
	}
	return nodecontroller.New(cfg, deps)
}

// NodecontrollerClient returns a client for config with the limits of the role.
func (c Config) NodecontrollerClient(config *rest.Config) (kubernetes.Interface, error) {
	return kubernetes.NewForConfig(clientConfig(config, c, nodecontrollerRole))
}
