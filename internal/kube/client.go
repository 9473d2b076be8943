// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// RESTConfig returns the client configuration of a controller process: from the files in the
// environment variable KUBECONFIG, else from kubeconfig, else from the service account of the pod.
// master, if set, replaces the URL of the server. Requests use protobuf and have no rate limit;
// see [ForRole].
func RESTConfig(kubeconfig, master string) (*rest.Config, error) {
	files := kubeconfigFiles(kubeconfig)
	if len(files) > 0 || master != "" {
		cfg, _, err := fromFiles(files, master)
		return cfg, err
	}
	cfg, err := rest.InClusterConfig()
	if err != nil {
		return nil, fmt.Errorf("reading the service account of the pod: %w. Set --kubeconfig outside of a cluster", err)
	}
	return withDefaults(cfg), nil
}

// UserRESTConfig returns the client configuration of a command that a user runs. Unlike [RESTConfig],
// it falls back to ~/.kube/config outside of a pod. namespace is the one of the current context,
// empty without a context.
func UserRESTConfig(kubeconfig, master string) (cfg *rest.Config, namespace string, err error) {
	files := kubeconfigFiles(kubeconfig)
	if len(files) == 0 && master == "" {
		cfg, err := rest.InClusterConfig()
		switch {
		case err == nil:
			return withDefaults(cfg), "", nil
		case !errors.Is(err, rest.ErrNotInCluster):
			return nil, "", fmt.Errorf("reading the service account of the pod: %w. Set --kubeconfig to use another", err)
		}
		files = []string{clientcmd.RecommendedHomeFile}
	}
	return fromFiles(files, master)
}

// NewClients returns a typed client and a metadata client.
func NewClients(cfg *rest.Config) (kubernetes.Interface, metadata.Interface, error) {
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, nil, fmt.Errorf("creating the client: %w", err)
	}
	meta, err := metadata.NewForConfig(cfg)
	if err != nil {
		return nil, nil, fmt.Errorf("creating the metadata client: %w", err)
	}
	return client, meta, nil
}

// kubeconfigFiles returns the kubeconfig files to read. KUBECONFIG takes precedence over the flag,
// as in the CSI sidecars.
func kubeconfigFiles(kubeconfig string) []string {
	if env := os.Getenv(clientcmd.RecommendedConfigPathEnvVar); env != "" {
		return filepath.SplitList(env)
	}
	if kubeconfig != "" {
		return []string{kubeconfig}
	}
	return nil
}

// fromFiles merges files as kubectl does. A single file must exist; of several, missing ones are
// skipped.
func fromFiles(files []string, master string) (cfg *rest.Config, namespace string, err error) {
	rules := &clientcmd.ClientConfigLoadingRules{Precedence: files}
	if len(files) == 1 {
		rules.ExplicitPath = files[0]
	}
	list := strings.Join(files, string(filepath.ListSeparator))
	merged, err := rules.Load()
	if err != nil {
		return nil, "", fmt.Errorf("reading kubeconfig %q: %w. Set --kubeconfig or KUBECONFIG", list, err)
	}
	overrides := &clientcmd.ConfigOverrides{ClusterInfo: clientcmdapi.Cluster{Server: master}}
	loaded := clientcmd.NewNonInteractiveClientConfig(*merged, "", overrides, rules)
	if cfg, err = loaded.ClientConfig(); err != nil {
		return nil, "", fmt.Errorf("loading kubeconfig %q: %w. Set --kubeconfig or KUBECONFIG", list, err)
	}
	if len(files) == 0 {
		return withDefaults(cfg), "", nil // there is no context
	}
	if namespace, _, err = loaded.Namespace(); err != nil {
		return nil, "", fmt.Errorf("reading the namespace of the current context of kubeconfig %q: %w", list, err)
	}
	return withDefaults(cfg), namespace, nil
}

// withDefaults sets protobuf as the content type and removes the rate limit.
func withDefaults(cfg *rest.Config) *rest.Config {
	cfg.ContentType = runtime.ContentTypeProtobuf
	cfg.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	cfg.QPS = -1
	return cfg
}

// requestTimeout bounds each request of [ForRole], so that workers do not wait for an API server
// that does not respond.
const requestTimeout = 30 * time.Second

// ForRole returns a copy of cfg for the requests of one role, except watches. It has a user agent
// that identifies the role in audit logs and flow schemas, a timeout, and a rate limit of its own
// unless qps is 0 or less. Otherwise a burst of 0 means 10, as in client-go. The network connection
// is shared.
func ForRole(cfg *rest.Config, version, role string, qps float32, burst int) *rest.Config {
	c := rest.CopyConfig(cfg)
	c.UserAgent = fmt.Sprintf("storage-controller/%s (%s)", version, role)
	c.Timeout = requestTimeout
	c.QPS, c.Burst = qps, burst
	switch {
	case qps <= 0:
		c.QPS, c.Burst = -1, 0
	case burst == 0: // a clientset refuses it
		c.Burst = rest.DefaultBurst
	}
	return c
}

// ForCustomResources returns a copy of cfg for custom resources, which have no protobuf encoding.
func ForCustomResources(cfg *rest.Config) *rest.Config {
	c := rest.CopyConfig(cfg)
	c.ContentType, c.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	return c
}

// ServerResources returns the resources of version that the API server serves. Unlike the methods of client, it ends with ctx.
func ServerResources(ctx context.Context, client discovery.DiscoveryInterface, version schema.GroupVersion) ([]metav1.APIResource, error) {
	path := "/apis/" + version.String()
	if version.Group == "" {
		path = "/api/" + version.Version
	}
	var list metav1.APIResourceList
	err := client.RESTClient().Get().AbsPath(path).Do(ctx).Into(&list)
	return list.APIResources, err
}

// ServesKind reports whether the API server serves kind. It returns true if discovery fails.
func ServesKind(ctx context.Context, client discovery.DiscoveryInterface, version schema.GroupVersion, kind string) bool {
	resources, err := ServerResources(ctx, client, version)
	return err != nil || slices.ContainsFunc(resources, func(r metav1.APIResource) bool { return r.Kind == kind })
}

// ForWatches returns a copy of cfg for informers, without a rate limit and without a timeout.
func ForWatches(cfg *rest.Config, version string) *rest.Config {
	c := ForRole(cfg, version, "watch", 0, 0)
	c.Timeout = 0
	return c
}
