package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tools/audit"
)

func newAuditCommand() *cobra.Command {
	var output string
	cfg := audit.DefaultConfig()
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Compare the volumes of the driver with PersistentVolumes and attachments, and list what is stuck",
		Long: `Compare what the driver lists with what the API server knows: volumes without a
PersistentVolume, PersistentVolumes without a volume, attachments that differ
from where the driver has volumes published, and objects of the driver that are
being deleted for long, with the finalizers that hold them and who removes each.
Nothing is changed.

It looks twice, --settle apart, and reports what was so both times: what is
under way differs. A driver that does not report LIST_VOLUMES, or
LIST_VOLUMES_PUBLISHED_NODES, is compared as far as it can be.

Every flag of "all" is accepted, so that the arguments of the container can be
used; those that matter here are listed.

Exit code: 0 nothing was found; 3 something was; 2 wrong usage; 1 the audit could
not be made. A running provisioner does the same with --audit-interval.`,
		Example: `  kubectl exec -n kube-system deployment/my-csi-controller -c storage-controller -- /storage-controller audit
  storage-controller audit --csi-address=/run/csi/socket --stuck-after=1h -o json`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runAudit(cmd, cfg, output)
		},
	}
	registerFlags(cmd.Flags(), commonOptions(true, allRoles()...), allRoleOptions(true))
	forUser(cmd.Flags())
	shown := []string{"config", "csi-address", "csi-socket", "kubeconfig", "master", "timeout", "max-entries", "v", "logging-format"}
	cmd.Flags().VisitAll(func(f *pflag.Flag) { f.Hidden = !slices.Contains(shown, f.Name) })
	cmd.Flags().StringVarP(&output, "output", "o", outputText, "text or json")
	cmd.Flags().DurationVar(&cfg.StuckAfter, "stuck-after", cfg.StuckAfter, "age of a deletion from which on an object counts as stuck")
	cmd.Flags().DurationVar(&cfg.Settle, "settle", cfg.Settle, "time between the two looks; what was under way in one of them is not reported")
	return cmd
}

// runAudit is the command: it writes what an audit with cfg has found.
func runAudit(cmd *cobra.Command, cfg audit.Config, output string) error {
	if err := checkOutput(cmd, output); err != nil {
		return err
	}
	s, err := readSettings(cmd.Flags(), true, allRoles())
	if err != nil {
		return err
	}
	cfg.Timeout, cfg.MaxEntries = s.Attacher.Timeout, s.Attacher.MaxEntries
	if err := errors.Join(cfg.Validate(), s.driverConfig(allRoles()...).Validate()); err != nil {
		return &usageError{err: err}
	}
	log, flush, err := setUpLogging(s.Common.Logging)
	if err != nil {
		return err
	}
	defer flush()
	ctx, stop := untilSignal(log)
	defer stop()
	report, err := s.audit(ctx, cfg)
	if err != nil {
		return err
	}
	write := report.WriteText
	if output == outputJSON {
		write = report.WriteJSON
	}
	if err := write(cmd.OutOrStdout()); err != nil {
		return err
	}
	if n := len(report.Findings); n > 0 {
		return &exitError{fmt.Errorf("the audit found %d differences or stuck objects", n), exitRefused}
	}
	return nil
}

// audit compares once. A driver that cannot be reached within the timeout is an error.
func (s settings) audit(ctx context.Context, cfg audit.Config) (audit.Report, error) {
	config, _, err := kube.UserRESTConfig(s.Common.Kubeconfig, s.Common.Master)
	if err != nil {
		return audit.Report{}, err
	}
	csi, driver, err := s.connectOnce(ctx)
	if err != nil {
		return audit.Report{}, err
	}
	defer csi.Close()
	live, err := newLiveWorld(kube.ForRole(config, buildVersion(), "audit", 0, 0), driver)
	if err != nil {
		return audit.Report{}, err
	}
	a := audit.Auditor{Config: cfg, Driver: driver, CSI: csi.Controller(), Read: live.Read}
	report := audit.Report{Driver: driver.Name, Time: time.Now().UTC().Truncate(time.Second)}
	if report.Findings, err = a.Audit(ctx); err != nil {
		return audit.Report{}, err
	}
	switch volumes, nodes := a.Lists(); {
	case !volumes:
		report.Notes = append(report.Notes, "the driver does not report LIST_VOLUMES: its volumes were not compared, only what is stuck was looked for")
	case !nodes:
		report.Notes = append(report.Notes, "the driver does not report LIST_VOLUMES_PUBLISHED_NODES: attachments were not compared")
	}
	report.Notes = append(report.Notes, live.Notes()...)
	report.Volumes, report.Attachments = live.Counts()
	return report, nil
}

// connectOnce is a connection to the driver, for which it does not wait longer than the timeout.
func (s settings) connectOnce(ctx context.Context) (*csiclient.Client, csiclient.Driver, error) {
	cfg := s.driverConfig(allRoles()...)
	csi, err := csiclient.New(cfg, prometheus.NewRegistry())
	if err != nil {
		return nil, csiclient.Driver{}, err
	}
	within, cancel := context.WithTimeoutCause(ctx, cfg.Timeout, fmt.Errorf("no answer within --timeout=%v; doctor tells more", cfg.Timeout))
	defer cancel()
	driver, err := csi.Connect(within)
	if err != nil {
		_ = csi.Close() // it was of no use
		return nil, csiclient.Driver{}, err
	}
	return csi, driver, nil
}

func newLiveWorld(config *rest.Config, driver csiclient.Driver) (*audit.APIReader, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("making the client: %w", err)
	}
	meta, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("making the client: %w", err)
	}
	return audit.NewAPIReader(client, meta, driver.Name), nil
}

// auditRole stands for the audit where roles are listed.
var auditRole = role{section: "audit"}

// auditSettle is the time between the two looks of the audits of a process, which nobody
// waits for.
const auditSettle = time.Minute

// addAudit has the audit work in the term of the provisioner, of whose volumes it tells.
func (s *shared) addAudit(t *terms, lease string) error {
	interval := s.settings.Common.AuditInterval
	if interval <= 0 {
		return nil
	}
	cfg := audit.DefaultConfig()
	cfg.Timeout, cfg.MaxEntries = s.settings.Provisioner.Timeout, s.settings.Attacher.MaxEntries
	cfg.Settle = min(auditSettle, interval)
	// Only kinds that are watched anyhow: the audit makes no requests to the API server.
	cached := audit.CacheReader{Driver: s.driver.Name, Volumes: s.informers.Volumes(), Claims: s.informers.Claims()}
	if s.driver.Controller.PublishUnpublishVolume {
		attachments := s.informers.Attachments()
		cached.Attachments = &attachments
	}
	if s.attacher != nil {
		nodes := s.informers.CSINodes()
		cached.Nodes = &nodes
	}
	c, err := audit.NewController(audit.Auditor{Config: cfg, Driver: s.driver, CSI: s.csi.Controller(), Read: cached.Read},
		interval, s.csi.WaitReady, s.registry)
	if err != nil {
		return err
	}
	t.add(auditRole, lease, c)
	return nil
}

// validateAudit reports what is wrong with the settings of the audit of a process.
func (s settings) validateAudit(roles []role) error {
	switch interval := s.Common.AuditInterval; {
	case interval < 0:
		return fmt.Errorf("--audit-interval: must not be negative, got %v", interval)
	case interval > 0 && s.nodeDeployment(roles):
		return errors.New("--audit-interval and --node-deployment: only one of them may be set, since an instance of a node knows its own volumes only")
	}
	return nil
}
