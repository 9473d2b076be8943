// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

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
	Name:          nodecontrollerName,
	sidecar:       "topolvm-controller",
	options:       nodecontrollerOptions,
	commonOptions: nodecontrollerCommonOptions,
	// As in topolvm-controller, and unlike the sidecars: two replicas must not delete at the same time.
	defaults: map[string]any{"leader-election": true, "leader-election-retry-period": 2 * time.Second},
	config:   func() any { return nodecontroller.Empty() },
	enabled: func(s settings.Settings) bool {
		return nodecontrollerOf(s, nodecontrollerConfig(s).DriverName).HasWork()
	},
	switches: []string{"node-cleanup", "skip-node-finalize", "node-finalizer-mode", "pvc-finalizer-mode", "resize-nudge",
		"enable-webhooks"},
	preset:   nodecontroller.MayBeDerived,
	validate: validateNodecontroller,
	timeout:  func(s settings.Settings) time.Duration { return nodecontrollerConfig(s).Timeout },
	lease: func(s settings.Settings, driver string) string {
		cfg, _, err := nodecontrollerConfig(s).Resolve(driver)
		if err != nil { // prepare reports it
			cfg, _, _ = nodecontroller.DefaultConfig().Resolve(driver)
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
	driverName:  func(s settings.Settings) string { return nodecontrollerConfig(s).DriverName },
	ineffective: nodecontrollerConditions,
	grants:      nodecontrollerGrants,
	prepare: func(s *shared) error {
		cfg, _, err := resolveNodecontroller(s.settings, s.driver.Name)
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

// nodecontrollerConfig returns the configuration of the role with the origins of its settings, before
// the name of the driver is applied. A process that serves the driver knows its name.
func nodecontrollerConfig(s settings.Settings) nodecontroller.Config {
	cfg := settings.Of[nodecontroller.Config](s, nodecontrollerName)
	cfg.Explicit = map[string]nodecontroller.Origin{}
	for name, origin := range s.Origins(nodecontrollerName) {
		cfg.Explicit[name] = nodecontroller.Origin(origin)
	}
	if served := settings.Of[serviceConfig](s, topolvmName).driver(); served != "" && cfg.DriverName == "" {
		cfg.DriverName, cfg.Explicit["driver-name"] = served, nodecontroller.OriginDerived
	}
	return cfg
}

// resolveNodecontroller returns the valid configuration of the role for a driver, and all of its settings with
// their origins.
func resolveNodecontroller(s settings.Settings, driver string) (nodecontroller.Config, []nodecontroller.Setting, error) {
	cfg, values, err := nodecontrollerConfig(s).Resolve(driver)
	if err != nil {
		return cfg, values, err
	}
	if err := cfg.Validate(); err != nil {
		return cfg, values, &UsageError{err}
	}
	return cfg, values, nil
}

// nodecontrollerOf returns the configuration of the role for driver; "": its name is unknown.
func nodecontrollerOf(s settings.Settings, driver string) nodecontroller.Config {
	c := nodecontrollerConfig(s)
	if resolved, _, err := c.Resolve(driver); err == nil {
		return resolved
	}
	return c
}

// validateNodecontroller returns every error in the settings of the role that does not depend on the
// name that the driver reports.
func validateNodecontroller(s settings.Settings) error {
	driver := nodecontrollerConfig(s).DriverName
	cfg := nodecontrollerOf(s, driver)
	errs := []error{cfg.Validate()}
	runs := mayRun(s, nodecontrollerName) && unserved(s, driver) == nil
	if deletes := cfg.DeletingFlags(); len(deletes) > 0 && !s.Common.LeaderElection && runs {
		errs = append(errs, fmt.Errorf("--leader-election: must be set with %s, or several replicas delete at the same time",
			strings.Join(deletes, " and ")))
	}
	if err := errors.Join(errs...); err != nil {
		return &UsageError{err}
	}
	return nil
}

func nodecontrollerConditions(s settings.Settings, _ *csiclient.Driver) []condition {
	return []condition{{nodecontrollerConfig(s).EnableWebhooks, "--enable-webhooks is off", []string{
		"nodecontroller.webhook-addr", "nodecontroller.cert-dir", "nodecontroller.webhook-client-ca",
	}}}
}

func nodecontrollerGrants(s settings.Settings, d csiclient.Driver) []rbac.Grant {
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
	cfg, _, err := resolveNodecontroller(s.settings, s.driver.Name)
	if err != nil {
		return nil, err
	}
	if cfg.EnableWebhooks && s.running.capacity.Load() != nil {
		klog.FromContext(ctx).Info("The scheduler gets capacity twice: from CSIStorageCapacity objects and from the pod webhook. "+
			"Without a scheduler extender "+
			"for the resource of the webhook, pods stay Pending. Set --enable-webhooks=false or --enable-capacity=false",
			"resource", cfg.CapacityResource)
	}
	if cfg.NodeCleanup == nodecleanup.ModeReport && election.OwnNamespace() == "" {
		klog.FromContext(ctx).Info("Lost nodes are not reported: the namespace of the process, which stores their records, is unknown. " +
			"Set the environment variable POD_NAMESPACE from metadata.namespace")
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
	deps := nodecontroller.Deps{UnthrottledClient: unthrottled, Deps: nodecleanup.Deps{
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
