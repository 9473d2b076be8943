// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/app"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/audit"
	"github.com/storage-controller/storage-controller/topolvm"
)

func newAuditCommand() *cobra.Command {
	var output string
	cfg := audit.DefaultConfig()
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Compare volumes and snapshots of the driver with their objects, and list stuck objects",
		Long: `Compare the volumes that the driver lists with the objects of the API server: volumes
without a PersistentVolume, PersistentVolumes without a volume or larger than it,
VolumeAttachments that differ from the nodes where the driver has the volume published,
snapshots without a VolumeSnapshotContent and the reverse, and objects of the driver that
have been terminating for long, with their finalizers and the component that removes each.
It changes nothing.

It compares twice, --settle apart, and reports only differences that both comparisons
find. For TopoLVM, it reads the LogicalVolumes instead of the list of the driver, and with
--driver-name=topolvm.io it needs no socket. For a driver that does not report LIST_VOLUMES or LIST_VOLUMES_PUBLISHED_NODES, it
leaves out the comparisons that need them.

It accepts every flag of "all", so that you can pass it the arguments of the container;
the help lists those that have an effect.

Exit code: 0 no findings; 3 findings; 2 usage error; 1 the audit failed. A running
provisioner audits periodically with --audit-interval.`,
		Example: `  kubectl exec -n kube-system deployment/my-csi-controller -c storage-controller -- /storage-controller audit --csi-address=/run/csi/csi.sock
  storage-controller audit --csi-address=/run/csi/csi.sock --stuck-after=1h -o json`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return auditCommand(cmd, cfg, output)
		},
	}
	registerUserFlags(cmd, app.All)
	shown := []string{"config", "csi-address", "csi-socket", "driver-name", "kubeconfig", "master", "timeout", "max-entries", "v",
		"logging-format"}
	cmd.Flags().VisitAll(func(f *pflag.Flag) { f.Hidden = !slices.Contains(shown, f.Name) })
	timeout := cmd.Flags().Lookup("timeout")
	timeout.Usage, timeout.DefValue = "timeout of each CSI call", cfg.Timeout.String()
	cmd.Flags().Lookup("driver-name").Usage = "topolvm.io or topolvm.cybozu.com audits this driver without calling it; " +
		"for other drivers it has no effect"
	cmd.Flags().StringVarP(&output, "output", "o", outputText, "text or json")
	cmd.Flags().DurationVar(&cfg.StuckAfter, "stuck-after", cfg.StuckAfter,
		"time since deletionTimestamp after which an object counts as stuck")
	cmd.Flags().DurationVar(&cfg.Settle, "settle", cfg.Settle,
		"time between the two comparisons; differences that only one of them finds are not reported")
	return cmd
}

// auditCommand writes the report of an audit with cfg.
func auditCommand(cmd *cobra.Command, cfg audit.Config, output string) error {
	if err := checkOutput(output); err != nil {
		return err
	}
	return withSettings(cmd, app.All, func(ctx context.Context, c app.Config) error {
		cfg, err := c.AuditConfig(cfg)
		if err != nil {
			return &app.UsageError{Err: err}
		}
		report, err := runAudit(ctx, c, cfg)
		if err != nil {
			return err
		}
		if err := writeReport(cmd, report, output); err != nil {
			return err
		}
		if n := report.Found(); n > 0 {
			return &exitError{fmt.Errorf("the audit found %d differences or stuck objects", n), exitFindings}
		}
		return nil
	})
}

// runAudit audits once. It fails if the driver does not answer within the timeout. It does not ask a driver of TopoLVM that
// --driver-name names.
func runAudit(ctx context.Context, c app.Config, cfg audit.Config) (audit.Report, error) {
	config, _, err := kube.UserRESTConfig(c.Common.Kubeconfig, c.Common.Master)
	if err != nil {
		return audit.Report{}, err
	}
	a := audit.Auditor{Config: cfg, Driver: csiclient.Driver{Name: c.DriverName()}, Snapshots: true}
	if !topolvm.IsDriver(a.Driver.Name) {
		csi, driver, err := connectOnce(ctx, c.DriverConfig())
		if err != nil {
			return audit.Report{}, err
		}
		defer csi.Close()
		a.CSI, a.Driver = csi.Controller(), driver
	}
	a.LogicalVolumes = topolvm.IsDriver(a.Driver.Name)
	clients, err := apiread.NewClients(kube.ForRole(config, c.Version, "audit", 0, 0))
	if err != nil {
		return audit.Report{}, fmt.Errorf("creating the clients: %w", err)
	}
	a.Read = audit.APIReader{Clients: clients, Driver: a.Driver.Name}.Read
	return a.Audit(ctx)
}

// connectOnce connects to the driver within the timeout of cfg.
func connectOnce(ctx context.Context, cfg csiclient.Config) (*csiclient.Client, csiclient.Driver, error) {
	csi, err := csiclient.New(cfg, prometheus.NewRegistry())
	if err != nil {
		return nil, csiclient.Driver{}, err
	}
	limited, cancel := context.WithTimeoutCause(ctx, cfg.Timeout, fmt.Errorf("not ready within --timeout=%v. Run doctor for details",
		cfg.Timeout))
	defer cancel()
	driver, err := csi.Connect(limited)
	if err != nil {
		_ = csi.Close() // the first error is the cause
		return nil, csiclient.Driver{}, err
	}
	return csi, driver, nil
}
