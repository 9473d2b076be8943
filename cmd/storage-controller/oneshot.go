package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/nodecontroller"
)

// newNodecontrollerCommand is the role, and what can be asked of it once.
func newNodecontrollerCommand(name string) *cobra.Command {
	cmd := newRoleCommand("nodecontroller", name, false, nodecontrollerRole)
	cmd.Example = `  # Report nodes that are gone, without a connection to the driver; change nothing:
  storage-controller nodecontroller --driver-name=local.example.com
  # Delete the claims of such nodes, where class or claim have the annotation local.example.com/node-cleanup: enabled
  storage-controller nodecontroller --driver-name=local.example.com --node-cleanup=claims
  # What topolvm-controller does for Kubernetes:
  storage-controller nodecontroller --profile=topolvm`
	cmd.AddCommand(newCleanupCommand(), newRemoveFinalizersCommand())
	return cmd
}

func newCleanupCommand() *cobra.Command {
	var request nodecontroller.CleanupRequest
	cmd := newOnceCommand("cleanup", "Clean up after one node that is gone, now", func(cmd *cobra.Command, o *once) error {
		request.Driver = o.driver
		return nodecontroller.Cleanup(o.ctx, o.cfg, o.client, request, cmd.OutOrStdout())
	})
	cmd.Long = `Delete the claims of the volumes of a node that does not exist any more, and with
--volumes the volumes as well, without waiting for the grace, an opt-in or the
approval of the breaker. What has opted out stays, as does what is in use. The
exit code is 0 when everything was done, 3 when something was refused, and 1 when
something failed.`
	cmd.Example = `  # What would be done, tried by the API server without effect:
  storage-controller nodecontroller cleanup --driver-name=local.example.com --node=worker-7 --volumes --dry-run
  # The same, and done:
  storage-controller nodecontroller cleanup --driver-name=local.example.com --node=worker-7 --volumes --yes`
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error { // before the driver is asked for its name
		if request.Node == "" {
			return &usageError{err: errors.New("--node: must name the node to clean up after"), text: cmd.UsageString()}
		}
		return nil
	}
	fs := cmd.Flags()
	fs.StringVar(&request.Node, "node", "", "name of the node")
	fs.BoolVar(&request.Volumes, "volumes", false, "remove the volumes too, once their claims are gone")
	fs.BoolVar(&request.DryRun, "dry-run", false, "have the API server try every deletion, without effect")
	fs.BoolVar(&request.Yes, "yes", false, "do it; without this the plan is printed and nothing is done")
	fs.DurationVar(&request.Wait, "wait", 5*time.Minute, "with --volumes: how long to wait for claims to be gone and volumes to be released")
	return cmd
}

func newRemoveFinalizersCommand() *cobra.Command {
	dryRun := false
	cmd := newOnceCommand("remove-finalizers", "Take the finalizer of the nodecontroller from all nodes, before it is uninstalled", func(cmd *cobra.Command, o *once) error {
		return nodecontroller.RemoveFinalizers(o.ctx, o.cfg, o.client, dryRun, cmd.OutOrStdout())
	})
	cmd.Example = `  # After the last replica has ended, or every later deletion of a node hangs:
  storage-controller nodecontroller remove-finalizers --driver-name=local.example.com`
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print which nodes would be changed, and change none")
	return cmd
}

// once is what a command that ends by itself works with.
type once struct {
	ctx    context.Context
	driver string
	cfg    nodecontroller.Config // resolved
	client kubernetes.Interface
}

// newOnceCommand makes a command that has the settings of the role and runs do once.
func newOnceCommand(use, short string, do func(*cobra.Command, *once) error) *cobra.Command {
	roles := []role{nodecontrollerRole}
	cmd := &cobra.Command{Use: use, Short: short, Args: noArguments, RunE: func(cmd *cobra.Command, _ []string) error {
		s, err := readSettings(cmd.Flags(), false, roles)
		if err != nil {
			return err
		}
		log, flush, err := setUpLogging(s.Common.Logging)
		if err != nil {
			return err
		}
		defer flush()
		ctx, stop := untilSignal(log)
		defer stop()
		o, err := (&process{settings: s, roles: roles}).once(ctx)
		if err != nil {
			return err
		}
		err = do(cmd, o)
		if errors.Is(err, nodecontroller.ErrRefused) {
			return &exitError{err, exitRefused}
		}
		return err
	}}
	registerFlags(cmd.Flags(), commonOptions(false, roles...), optionsOf(roles, false))
	forUser(cmd.Flags())
	return cmd
}

// once resolves the settings, and makes the client.
func (p *process) once(ctx context.Context) (*once, error) {
	driver, err := p.nameOfDriver(ctx)
	if err != nil {
		return nil, err
	}
	cfg, _, err := p.settings.Nodecontroller.Resolve(driver)
	if err != nil {
		return nil, err
	}
	if err := cfg.Validate(); err != nil {
		return nil, &usageError{err: err}
	}
	c := p.settings.Common
	restConfig, _, err := kube.UserRESTConfig(c.Kubeconfig, c.Master)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(kube.ForRole(restConfig, buildVersion(), nodecontrollerSection, float32(c.KubeAPIQPS), c.KubeAPIBurst))
	if err != nil {
		return nil, fmt.Errorf("making the client: %w", err)
	}
	return &once{ctx: ctx, driver: driver, cfg: cfg, client: client}, nil
}

// nameOfDriver is the name of the driver, which is asked only where nothing else tells it.
func (p *process) nameOfDriver(ctx context.Context) (string, error) {
	if driver := p.settings.Nodecontroller.Driver(); driver != "" {
		return driver, nil
	}
	ctx, cancel := context.WithTimeout(ctx, p.settings.driverConfig(p.roles...).Timeout)
	defer cancel()
	csi, answer, err := p.connect(ctx, prometheus.NewRegistry(), &diagnostics{}, &status{})
	if csi != nil {
		defer csi.Close()
	}
	if err != nil {
		return "", fmt.Errorf("asking the driver for its name, which --driver-name would tell: %w", err)
	}
	return answer.Name, nil
}
