// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
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
		"Clean up PVCs and PVs of deleted nodes", app.Nodecontroller)
	cmd.Example = `  # Report deleted nodes, without a connection to the driver; change nothing:
  storage-controller nodecontroller --driver-name=local.example.com
  # Delete the PVCs of such nodes whose StorageClass or PVC has the annotation local.example.com/node-cleanup: enabled
  storage-controller nodecontroller --driver-name=local.example.com --node-cleanup=claims`
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
			return nodecleanup.Approve(ctx, t.cleanup(), t.client, request, cmd.OutOrStdout())
		})
	cmd.Args = cobra.ArbitraryArgs
	cmd.Long = `Print the lost nodes of the driver and what the approval of the named nodes
changes; with --yes, approve them. An approval ends the hold of the breaker and the
grace period. It is for one loss: if the node returns and is lost again, it needs
another approval. With --all, it takes the place of the opt-in, and the plan lists the
PVCs that did not opt in. Opt-outs remain. The leader moves the approval into the
record of the node. Exit code 3: the node is not lost, or the mode deletes nothing.`
	cmd.Example = `  # Print the lost nodes:
  storage-controller nodecontroller approve --driver-name=local.example.com
  # Approve the loss of two of them:
  storage-controller nodecontroller approve --driver-name=local.example.com worker-7 worker-8 --yes`
	fs := cmd.Flags()
	fs.BoolVar(&request.Held, "held", false, "also approve all lost nodes that the breaker holds")
	fs.BoolVar(&request.All, "all", false, "also delete PVCs and volumes whose owners did not opt in")
	fs.StringVarP(&request.Namespace, "namespace", "n", "",
		"namespace of the nodecontroller, which has the records of lost nodes; empty means all")
	fs.BoolVar(&request.Yes, "yes", false, "apply the plan; without this the plan is printed and nothing is changed")
	return cmd
}

// newCleanupCommand returns the command that approve replaces.
func newCleanupCommand() *cobra.Command {
	return &cobra.Command{Use: "cleanup", Hidden: true, DisableFlagParsing: true, RunE: func(*cobra.Command, []string) error {
		const instead = "use nodecontroller approve, with --node-cleanup=claims or volumes"
		return &exitError{errors.New("nodecontroller cleanup was removed: " + instead), exitUsage}
	}}
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
		return "", fmt.Errorf("no records of lost nodes: ConfigMap %s does not exist in any namespace. Either no node was lost since the "+
			"nodecontroller was installed, or it runs without a namespace", name)
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
	cfg, err := c.ResolveNodecontroller(driver)
	if err != nil {
		return task{}, err
	}
	config, _, err := kube.UserRESTConfig(c.Common.Kubeconfig, c.Common.Master)
	if err != nil {
		return task{}, err
	}
	client, err := c.NodecontrollerClient(config)
	if err != nil {
		return task{}, fmt.Errorf("creating the client: %w", err)
	}
	return task{driver, cfg, client}, nil
}
