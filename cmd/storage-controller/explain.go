package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/internal/tools/explain"
)

// explainKinds is what the kinds may be called.
var explainKinds = map[string]string{
	"pvc": explain.KindClaim, "persistentvolumeclaim": explain.KindClaim, "persistentvolumeclaims": explain.KindClaim,
	"pv": explain.KindVolume, "persistentvolume": explain.KindVolume, "persistentvolumes": explain.KindVolume,
	"va": explain.KindAttachment, "volumeattachment": explain.KindAttachment, "volumeattachments": explain.KindAttachment,
	"no": explain.KindNode, "node": explain.KindNode, "nodes": explain.KindNode,
}

// explainOptions are the flags of the command.
type explainOptions struct {
	namespace, output, kubeconfig, master, statusURL string
}

// newExplainCommand tells why an object is in its state.
func newExplainCommand() *cobra.Command {
	var o explainOptions
	cmd := &cobra.Command{
		Use:   "explain pvc|pv|va|node NAME",
		Short: "Say why a claim, volume, attachment or node is in its state, and what happens next",
		Long: `Read what the API server has about a claim (pvc), a PersistentVolume (pv), a
VolumeAttachment (va) or a node, and say in sentences why it is in its state, who removes
its finalizers and when, and what the next step is and whose.

With --status-url a running process is asked too, for the attempts that it counts, its
last error, the time of the next try, and calls of the driver that are under way.

Nothing is changed, and of secrets only is looked whether they are there. What may not be
read is said to be unknown. The findings are fine, unknown, waiting (goes on by itself),
failing (is tried again by itself) or blocked (until somebody does something).

The environment variable KUBECONFIG, which may list several files, wins over --kubeconfig;
without both, the service account of the pod is used, or outside of a pod ~/.kube/config. The exit code is 0 when the
object was found, 1 when it was not or the API server gave no answer, and 2 for a mistake
in the command line.`,
		Example: `  storage-controller explain pvc data -n shop
  storage-controller explain pvc shop/data
  storage-controller explain va csi-0123 --status-url http://localhost:8080
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
	fs.StringVarP(&o.namespace, "namespace", "n", "", "namespace of the claim; empty means that of the current context, or of the pod")
	fs.StringVarP(&o.output, "output", "o", "text", "text or json")
	fs.StringVar(&o.kubeconfig, "kubeconfig", "", settings.UserKubeconfigUsage)
	fs.StringVar(&o.master, "master", "", "URL of the API server")
	fs.StringVar(&o.statusURL, "status-url", "", "URL of the HTTP endpoint of a running process (--http-endpoint there), such as http://localhost:8080 after kubectl port-forward; empty means none")
	return cmd
}

// request is what the arguments name; KIND/NAME is taken too, and NAMESPACE/NAME for a claim.
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
	switch {
	case !ok:
		return explain.Request{}, fmt.Errorf("kind %q cannot be explained: pvc, pv, va and node can", args[0])
	case err != nil:
		return explain.Request{}, err
	case kind != explain.KindClaim && o.namespace != "":
		return explain.Request{}, fmt.Errorf("--namespace: a %s has no namespace; leave it out", kind)
	case !slices.Contains([]string{"text", "json"}, o.output):
		return explain.Request{}, fmt.Errorf("--output: must be text or json, got %q", o.output)
	}
	return explain.Request{Kind: kind, Namespace: namespace, Name: name, StatusURL: o.statusURL}, nil
}

// objectName is the name in arg, and the namespace that is meant; "" for the default one.
func (o explainOptions) objectName(kind, arg string) (name, namespace string, err error) {
	before, name, qualified := strings.Cut(arg, "/")
	switch {
	case arg == "":
		return "", "", errors.New("the name must not be empty, such as: explain pvc data")
	case !qualified:
		return arg, o.namespace, nil
	case kind != explain.KindClaim:
		return "", "", fmt.Errorf("name %q: a %s has no namespace; leave out what stands before the slash", arg, kind)
	case before == "" || name == "" || strings.Contains(name, "/"):
		return "", "", fmt.Errorf("name %q: must be NAME, or NAMESPACE/NAME", arg)
	case o.namespace != "" && o.namespace != before:
		return "", "", fmt.Errorf("--namespace: is %s, and the claim %s names another; leave one of them out", o.namespace, arg)
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
	cfg, namespace, err := o.connect()
	if err != nil {
		return err
	}
	if request.Kind == explain.KindClaim && request.Namespace == "" {
		request.Namespace = namespace
	}
	clients, err := explainClients(cfg)
	if err != nil {
		return fmt.Errorf("making the clients: %w", err)
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), explainTimeout)
	defer cancel()
	report, err := explain.Explain(ctx, clients, request)
	if err != nil {
		return err
	}
	if o.output == "json" {
		return report.WriteJSON(cmd.OutOrStdout())
	}
	return report.WriteText(cmd.OutOrStdout())
}

// connect is the connection to the API server, and the namespace where nobody names one.
func (o explainOptions) connect() (*rest.Config, string, error) {
	cfg, namespace, err := kube.UserRESTConfig(o.kubeconfig, o.master)
	if err == nil && namespace == "" {
		namespace = election.Namespace("") // that of the pod, or default
	}
	return cfg, namespace, err
}

func explainClients(cfg *rest.Config) (explain.Clients, error) {
	cfg = kube.ForRole(cfg, buildVersion(), "explain", 0, 0)
	var c explain.Clients
	var err, errDynamic, errMetadata error
	c.Kubernetes, err = kubernetes.NewForConfig(cfg)
	c.Dynamic, errDynamic = dynamic.NewForConfig(kube.ForCustomResources(cfg))
	c.Metadata, errMetadata = metadata.NewForConfig(cfg)
	return c, errors.Join(err, errDynamic, errMetadata)
}
