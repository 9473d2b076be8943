// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/explain"
	"github.com/storage-controller/storage-controller/internal/tools/statusz"
)

// explainKinds maps the names of kinds on the command line.
var explainKinds = map[string]string{
	"po": explain.KindPod, "pod": explain.KindPod, "pods": explain.KindPod,
	"pvc": explain.KindClaim, "persistentvolumeclaim": explain.KindClaim, "persistentvolumeclaims": explain.KindClaim,
	"pv": explain.KindVolume, "persistentvolume": explain.KindVolume, "persistentvolumes": explain.KindVolume,
	"va": explain.KindAttachment, "volumeattachment": explain.KindAttachment, "volumeattachments": explain.KindAttachment,
	"vs": explain.KindSnapshot, "volumesnapshot": explain.KindSnapshot, "volumesnapshots": explain.KindSnapshot,
	"no": explain.KindNode, "node": explain.KindNode, "nodes": explain.KindNode,
}

// explainOptions are the flags of the command.
type explainOptions struct {
	namespace, output, kubeconfig, master string
	status                                statusFlags
}

// newExplainCommand returns the command explain.
func newExplainCommand() *cobra.Command {
	var o explainOptions
	cmd := &cobra.Command{
		Use:   "explain pod|pvc|pv|va|volumesnapshot|node NAME",
		Short: "Explain why a pod, claim, volume, attachment, snapshot or node is in its state, and the next step",
		Long: `Read a Pod, PersistentVolumeClaim (pvc), PersistentVolume (pv), VolumeAttachment (va),
VolumeSnapshot (vs) or Node and everything related to it, and report why it is in its
state, which component removes each of its finalizers, and the next step. Of a pod, the
claims, their volumes and attachments are explained.

--status-url adds what a running process knows: failed attempts with the last error and
the time of the next one, and running and failed calls to the driver. If the process runs with
--secure-metrics-server, use an https URL and --status-ca-file or
--status-insecure-skip-tls-verify. The bearer token of the kubeconfig or ServiceAccount
is sent, unless --status-token-file names another one.

The command changes nothing, and reads only the metadata of Secrets. Missing permissions
are reported as unknown. A finding is ok, unknown, waiting (in progress), failing
(retried automatically) or blocked (requires intervention).

The environment variable KUBECONFIG, which may list several files, takes precedence over
--kubeconfig. Without both, the ServiceAccount of the pod is used, or ~/.kube/config
outside of a pod.
The exit code is 0 if the object was found, 1 if not or if the API server cannot be read,
and 2 for a usage error.`,
		Example: `  storage-controller explain pod web-0 -n shop
  storage-controller explain pvc data -n shop
  storage-controller explain pvc shop/data
  storage-controller explain va csi-0123 --status-url http://localhost:8080
  storage-controller explain volumesnapshot backup -n shop
  storage-controller explain node worker-7 -o json`,
		Args: func(_ *cobra.Command, args []string) error {
			_, err := o.request(args)
			if err != nil {
				return &usageError{err}
			}
			return nil
		},
		ValidArgsFunction: completeObject,
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd, args) },
	}
	fs := cmd.Flags()
	fs.StringVarP(&o.namespace, "namespace", "n", "",
		"namespace of the pod, claim or snapshot; empty means that of the current context, or of the pod")
	fs.StringVarP(&o.output, "output", "o", outputText, "text or json")
	fs.StringVar(&o.kubeconfig, "kubeconfig", "", settings.UserKubeconfigUsage)
	fs.StringVar(&o.master, "master", "", "URL of the API server")
	o.status.add(fs)
	return cmd
}

// request returns the object that args name: KIND NAME or KIND/NAME; the name of a pod, claim or snapshot may be NAMESPACE/NAME.
func (o explainOptions) request(args []string) (explain.Request, error) {
	if len(args) == 1 {
		if kind, name, ok := strings.Cut(args[0], "/"); ok {
			args = []string{kind, name}
		}
	}
	if len(args) != 2 {
		return explain.Request{}, fmt.Errorf("two arguments are needed, a kind and a name, such as: explain pvc data; got %d", len(args))
	}
	kind, ok := explainKinds[strings.ToLower(args[0])]
	name, namespace, err := o.objectName(kind, args[1])
	invalid := errors.Join(o.status.validate(), checkOutput(o.output))
	switch {
	case !ok:
		return explain.Request{}, fmt.Errorf("kind %q cannot be explained: pod, pvc, pv, va, volumesnapshot and node can", args[0])
	case err != nil:
		return explain.Request{}, err
	case !explain.Namespaced(kind) && o.namespace != "":
		return explain.Request{}, fmt.Errorf("--namespace: a %s has no namespace; leave it out", kind)
	case invalid != nil:
		return explain.Request{}, invalid
	}
	return explain.Request{Kind: kind, Namespace: namespace, Name: name, StatusURL: o.status.url}, nil
}

// objectName returns the name in arg and its namespace; "" for the default one.
func (o explainOptions) objectName(kind, arg string) (name, namespace string, err error) {
	before, name, qualified := strings.Cut(arg, "/")
	switch {
	case arg == "":
		return "", "", errors.New("the name must not be empty, such as: explain pvc data")
	case !qualified:
		return arg, o.namespace, nil
	case !explain.Namespaced(kind):
		return "", "", fmt.Errorf("name %q: a %s has no namespace; leave out what stands before the slash", arg, kind)
	case before == "" || name == "" || strings.Contains(name, "/"):
		return "", "", fmt.Errorf("name %q: must be NAME, or NAMESPACE/NAME", arg)
	case o.namespace != "" && o.namespace != before:
		return "", "", fmt.Errorf("--namespace: is %s, and %s names another; leave one of them out", o.namespace, arg)
	}
	return name, before, nil
}

// explainTimeout bounds the whole command.
const explainTimeout = 2 * time.Minute

func (o explainOptions) run(cmd *cobra.Command, args []string) error {
	request, err := o.request(args)
	if err != nil {
		return err
	}
	cfg, namespace, err := kube.UserRESTConfig(o.kubeconfig, o.master)
	if err != nil {
		return err
	}
	if explain.Namespaced(request.Kind) && request.Namespace == "" {
		request.Namespace = cmp.Or(namespace, election.Namespace("")) // that of the context, of the pod, or default
	}
	var clients explain.Clients
	clients.Clients, err = apiread.NewClients(kube.ForRole(cfg, buildVersion(), "explain", 0, 0))
	if err != nil {
		return fmt.Errorf("creating the clients: %w", err)
	}
	clients.Status, err = statusz.NewClient(cfg, o.status.url, o.status.access)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), explainTimeout)
	defer cancel()
	report, err := explain.Explain(ctx, clients, request)
	if err != nil {
		return err
	}
	return writeReport(cmd, report, o.output)
}
