// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/app"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/nodecontroller"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
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
	cmd.AddCommand(newApproveCommand(), newCleanupCommand(), newRemoveFinalizersCommand())
	return cmd
}

func newApproveCommand() *cobra.Command {
	request := nodecleanup.ApproveRequest{}
	cmd := newTaskCommand("approve [NODE...]", "Approve the cleanup after lost nodes that the breaker holds",
		func(ctx context.Context, cmd *cobra.Command, t task) (err error) {
			request.Driver, request.Nodes = t.driver, cmd.Flags().Args()
			if request.Namespace, err = t.recordNamespace(ctx, request.Namespace); err != nil {
				return err
			}
			return nodecleanup.Approve(ctx, t.client, request, cmd.OutOrStdout())
		})
	cmd.Args = cobra.ArbitraryArgs
	cmd.Long = `Print the lost nodes of the driver and what the approval of the named nodes
changes; with --yes, approve them. An approval ends the hold of the breaker and the
grace period. It is for one loss: if the node returns and is lost again, it needs
another approval. The leader moves the approval into the record of the node.`
	cmd.Example = `  # Print the lost nodes:
  storage-controller nodecontroller approve --driver-name=local.example.com
  # Approve the loss of two of them:
  storage-controller nodecontroller approve --driver-name=local.example.com worker-7 worker-8 --yes`
	recordFlags(cmd.Flags(), &request.Namespace, &request.Yes)
	return cmd
}

// recordFlags registers the flags of commands that read the records of lost nodes.
func recordFlags(fs *pflag.FlagSet, namespace *string, yes *bool) {
	fs.StringVarP(namespace, "namespace", "n", "", "namespace of the nodecontroller, which has the records of lost nodes; empty means all")
	fs.BoolVar(yes, "yes", false, "apply the plan; without this the plan is printed and nothing is changed")
}

func newCleanupCommand() *cobra.Command {
	var request nodecleanup.CleanupRequest
	cmd := newTaskCommand("cleanup", "Clean up after one deleted node now",
		func(ctx context.Context, cmd *cobra.Command, t task) (err error) {
			request.Driver = t.driver
			if request.Namespace, err = t.recordNamespace(ctx, request.Namespace); err != nil && !errors.Is(err, errNoRecords) {
				return err
			}
			return nodecleanup.Cleanup(ctx, t.cleanup(), t.client, request, cmd.OutOrStdout())
		})
	cmd.Long = `Print a plan to delete the PVCs of the volumes of a node that does not exist, and
with --volumes also the volumes; with --yes, do it. The opt-in is not required, nor the
grace period and the approval of the breaker, except for other nodes of a volume.
Volumes that have opted out or are in use are kept. Exit code: 0 everything was done,
or the plan was printed; 3 something was refused; 1 something failed.`
	cmd.Example = `  # Print the plan:
  storage-controller nodecontroller cleanup --driver-name=local.example.com --node=worker-7 --volumes
  # Apply it:
  storage-controller nodecontroller cleanup --driver-name=local.example.com --node=worker-7 --volumes --yes`
	cmd.PreRunE = func(*cobra.Command, []string) error { // before the driver is called for its name
		switch {
		case request.Node == "":
			return &usageError{errors.New("--node: must name the node to clean up after")}
		case request.Wait < 0:
			return &usageError{fmt.Errorf("--wait: must not be negative, got %v", request.Wait)}
		}
		return nil
	}
	fs := cmd.Flags()
	fs.StringVar(&request.Node, "node", "", "name of the node")
	fs.BoolVar(&request.Volumes, "volumes", false, "also remove the volumes, after their PVCs were deleted")
	fs.DurationVar(&request.Wait, "wait", 5*time.Minute, "with --volumes: how long to wait until PVCs are deleted and volumes are released")
	recordFlags(fs, &request.Namespace, &request.Yes)
	return cmd
}

func newRemoveFinalizersCommand() *cobra.Command {
	yes := false
	cmd := newTaskCommand("remove-finalizers", "Remove the finalizer of the nodecontroller from all nodes, before it is uninstalled",
		func(ctx context.Context, cmd *cobra.Command, t task) error {
			return nodecleanup.RemoveFinalizers(ctx, t.cleanup(), t.client, yes, cmd.OutOrStdout())
		})
	cmd.Example = `  # Print the nodes that have the finalizer:
  storage-controller nodecontroller remove-finalizers --driver-name=local.example.com
  # After the last replica has exited; otherwise every later deletion of a node hangs:
  storage-controller nodecontroller remove-finalizers --driver-name=local.example.com --yes`
	cmd.Flags().BoolVar(&yes, "yes", false, "remove the finalizers; without this the nodes are printed and nothing is changed")
	return cmd
}

// task is what a command needs that does something once and exits.
type task struct {
	driver string
	cfg    nodecontroller.Config // resolved
	client kubernetes.Interface
}

// cleanup returns the configuration of the cleanup.
func (t task) cleanup() nodecleanup.Config {
	return nodecleanup.Config{Settings: t.cfg.Settings, Workers: t.cfg.Workers, Timeout: t.cfg.Timeout}
}

// errNoRecords means that there are no records of lost nodes.
var errNoRecords = errors.New("no records of lost nodes")

// recordNamespace returns the namespace with the records of lost nodes: requested, or that of the only
// ConfigMap of the driver.
func (t task) recordNamespace(ctx context.Context, requested string) (string, error) {
	if requested != "" {
		return requested, nil
	}
	name := nodecleanup.ConfigMapName(t.driver)
	maps, err := t.client.CoreV1().ConfigMaps(metav1.NamespaceAll).List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()})
	switch {
	case err != nil:
		return "", fmt.Errorf("finding the records of lost nodes: ConfigMap %s: %w. Set --namespace", name, err)
	case len(maps.Items) == 0:
		return "", fmt.Errorf("%w: ConfigMap %s does not exist in any namespace. Either no node was lost since the nodecontroller "+
			"was installed, or it runs without a namespace", errNoRecords, name)
	case len(maps.Items) > 1:
		return "", fmt.Errorf("ConfigMap %s exists in the namespaces %s and %s. Set --namespace", name, maps.Items[0].Namespace,
			maps.Items[1].Namespace)
	}
	return maps.Items[0].Namespace, nil
}

// newTaskCommand returns a command that has the settings of the role and calls do once.
func newTaskCommand(use, short string, do func(context.Context, *cobra.Command, task) error) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: noArguments, RunE: func(cmd *cobra.Command, _ []string) error {
		return withSettings(cmd, app.Nodecontroller, func(ctx context.Context, c app.Config) error {
			t, err := newTask(ctx, c)
			if err != nil {
				return err
			}
			if err = do(ctx, cmd, t); errors.Is(err, nodecleanup.ErrRefused) {
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
	if err := c.Validate(); err != nil {
		return task{}, &app.UsageError{Err: err}
	}
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
