package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/app"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/nodecontroller"
)

// newNodecontrollerCommand returns the command that runs the role, with the commands that do one of its tasks once.
func newNodecontrollerCommand(name string) *cobra.Command {
	cmd := newRoleCommand("nodecontroller", name,
		"Clean up PVCs and PVs of deleted nodes (replaces the Kubernetes controllers of topolvm-controller)", app.Nodecontroller)
	cmd.Example = `  # Report deleted nodes, without a connection to the driver; change nothing:
  storage-controller nodecontroller --driver-name=local.example.com
  # Delete the PVCs of such nodes whose StorageClass or PVC has the annotation local.example.com/node-cleanup: enabled
  storage-controller nodecontroller --driver-name=local.example.com --node-cleanup=claims
  # Replace the Kubernetes controllers of topolvm-controller:
  storage-controller nodecontroller --profile=topolvm`
	cmd.AddCommand(newCleanupCommand(), newRemoveFinalizersCommand())
	return cmd
}

func newCleanupCommand() *cobra.Command {
	var request nodecontroller.CleanupRequest
	cmd := newTaskCommand("cleanup", "Clean up after one deleted node now", func(ctx context.Context, cmd *cobra.Command, t task) error {
		request.Driver = t.driver
		return nodecontroller.Cleanup(ctx, t.cfg, t.client, request, cmd.OutOrStdout())
	})
	cmd.Long = `Delete the PVCs of the volumes of a node that does not exist, and with --volumes
also the volumes. The grace period, the opt-in and the approval of the breaker are
not required. Volumes that have opted out or are in use are kept. Exit code: 0
everything was done; 3 something was refused; 1 something failed.`
	cmd.Example = `  # Print the plan, and try it with server-side dry run:
  storage-controller nodecontroller cleanup --driver-name=local.example.com --node=worker-7 --volumes --dry-run
  # Apply it:
  storage-controller nodecontroller cleanup --driver-name=local.example.com --node=worker-7 --volumes --yes`
	cmd.PreRunE = func(*cobra.Command, []string) error { // before the driver is called for its name
		if request.Node == "" {
			return &usageError{errors.New("--node: must name the node to clean up after")}
		}
		return nil
	}
	fs := cmd.Flags()
	fs.StringVar(&request.Node, "node", "", "name of the node")
	fs.BoolVar(&request.Volumes, "volumes", false, "also remove the volumes, after their PVCs were deleted")
	fs.BoolVar(&request.DryRun, "dry-run", false, "try every deletion with server-side dry run")
	fs.BoolVar(&request.Yes, "yes", false, "apply the plan; without this the plan is printed and nothing is changed")
	fs.DurationVar(&request.Wait, "wait", 5*time.Minute, "with --volumes: how long to wait until PVCs are deleted and volumes are released")
	return cmd
}

func newRemoveFinalizersCommand() *cobra.Command {
	dryRun := false
	cmd := newTaskCommand("remove-finalizers", "Remove the finalizer of the nodecontroller from all nodes, before it is uninstalled",
		func(ctx context.Context, cmd *cobra.Command, t task) error {
			return nodecontroller.RemoveFinalizers(ctx, t.cfg, t.client, dryRun, cmd.OutOrStdout())
		})
	cmd.Example = `  # After the last replica has exited; otherwise every later deletion of a node hangs:
  storage-controller nodecontroller remove-finalizers --driver-name=local.example.com`
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print the nodes that would be changed, and change nothing")
	return cmd
}

// task is what a command needs that does something once and exits.
type task struct {
	driver string
	cfg    nodecontroller.Config // resolved
	client kubernetes.Interface
}

// newTaskCommand returns a command that has the settings of the role and calls do once.
func newTaskCommand(use, short string, do func(context.Context, *cobra.Command, task) error) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: noArguments, RunE: func(cmd *cobra.Command, _ []string) error {
		return withSettings(cmd, app.Nodecontroller, func(ctx context.Context, c app.Config) error {
			t, err := newTask(ctx, c)
			if err != nil {
				return err
			}
			if err = do(ctx, cmd, t); errors.Is(err, nodecontroller.ErrRefused) {
				return &exitError{err, exitFindings}
			}
			return err
		})
	}}
	registerUserFlags(cmd, app.Nodecontroller)
	return cmd
}

// newTask resolves the settings and creates the client.
func newTask(ctx context.Context, c app.Config) (task, error) {
	driver, err := c.AskDriverName(ctx)
	if err != nil {
		return task{}, err
	}
	cfg, _, err := c.ResolveNodecontroller(driver)
	if err != nil {
		return task{}, err
	}
	config, _, err := kube.UserRESTConfig(c.Common.Kubeconfig, c.Common.Master)
	if err != nil {
		return task{}, err
	}
	client, err := kubernetes.NewForConfig(kube.ForRole(config, c.Version, "nodecontroller", float32(c.Common.KubeAPIQPS),
		c.Common.KubeAPIBurst))
	if err != nil {
		return task{}, fmt.Errorf("creating the client: %w", err)
	}
	return task{driver, cfg, client}, nil
}
