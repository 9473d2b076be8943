package kube

import (
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
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// RESTConfig builds the connection of a process to the API server: from the files that
// the environment variable KUBECONFIG lists, else from kubeconfig, either with master (a
// URL) in the place of the server it names; without any of them from the service account
// of the pod. The result speaks protobuf and has no rate limit; see [ForRole].
func RESTConfig(kubeconfig, master string) (*rest.Config, error) {
	files := kubeconfigFiles(kubeconfig)
	if len(files) > 0 || master != "" {
		cfg, _, err := fromFiles(files, master)
		return cfg, err
	}
	cfg, err := rest.InClusterConfig()
	if err != nil {
		return nil, fmt.Errorf("using the service account of the pod (set --kubeconfig outside of a cluster): %w", err)
	}
	return unlimited(cfg), nil
}

// UserRESTConfig is [RESTConfig] for a command that a person runs: outside of a pod it
// finds the file that kubectl finds. namespace is that of the current context, and empty
// where there is none.
func UserRESTConfig(kubeconfig, master string) (cfg *rest.Config, namespace string, err error) {
	files := kubeconfigFiles(kubeconfig)
	if len(files) == 0 && master == "" {
		cfg, err := rest.InClusterConfig()
		switch {
		case err == nil:
			return unlimited(cfg), "", nil
		case !errors.Is(err, rest.ErrNotInCluster):
			return nil, "", fmt.Errorf("using the service account of the pod (set --kubeconfig to use another): %w", err)
		}
		files = []string{clientcmd.RecommendedHomeFile}
	}
	return fromFiles(files, master)
}

// kubeconfigFiles are the files that are named; KUBECONFIG wins, as in the sidecars.
func kubeconfigFiles(kubeconfig string) []string {
	if env := os.Getenv(clientcmd.RecommendedConfigPathEnvVar); env != "" {
		return filepath.SplitList(env)
	}
	if kubeconfig != "" {
		return []string{kubeconfig}
	}
	return nil
}

// fromFiles merges files as kubectl does. A single one must exist; of several it is enough
// that one does.
func fromFiles(files []string, master string) (cfg *rest.Config, namespace string, err error) {
	rules := &clientcmd.ClientConfigLoadingRules{Precedence: files}
	if len(files) == 1 {
		rules.ExplicitPath = files[0]
	}
	list := strings.Join(files, string(filepath.ListSeparator))
	merged, err := rules.Load()
	if err != nil {
		return nil, "", fmt.Errorf("reading kubeconfig %q (set --kubeconfig or KUBECONFIG): %w", list, err)
	}
	overrides := &clientcmd.ConfigOverrides{ClusterInfo: clientcmdapi.Cluster{Server: master}}
	loaded := clientcmd.NewNonInteractiveClientConfig(*merged, "", overrides, rules)
	if cfg, err = loaded.ClientConfig(); err != nil {
		return nil, "", fmt.Errorf("using kubeconfig %q (set --kubeconfig or KUBECONFIG): %w", list, err)
	}
	if len(files) == 0 {
		return unlimited(cfg), "", nil // there is no context
	}
	if namespace, _, err = loaded.Namespace(); err != nil {
		return nil, "", fmt.Errorf("reading the namespace of the current context of kubeconfig %q: %w", list, err)
	}
	return unlimited(cfg), namespace, nil
}

// unlimited has cfg speak protobuf, and no rate limit.
func unlimited(cfg *rest.Config) *rest.Config {
	cfg.ContentType = runtime.ContentTypeProtobuf
	cfg.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	cfg.QPS = -1
	return cfg
}

// requestTimeout bounds each request of the clients made by [ForRole]: a hanging
// API server must not pin the workers. Watches use a client without it.
const requestTimeout = 30 * time.Second

// ForRole is a copy of cfg for the requests of one role: an own user agent, by
// which audit log and flow schemas tell the roles apart, an own rate limit, and
// a bound for each request, so that it is not for watches. A qps that is not
// positive means no limit. The network connection stays shared.
func ForRole(cfg *rest.Config, version, role string, qps float32, burst int) *rest.Config {
	c := rest.CopyConfig(cfg)
	c.UserAgent = fmt.Sprintf("storage-controller/%s (%s)", version, role)
	c.Timeout = requestTimeout
	c.QPS, c.Burst = qps, burst
	if qps <= 0 {
		c.QPS, c.Burst = -1, 0
	}
	return c
}

// ForCustomResources is a copy of cfg for kinds that the API server itself does not
// know, of which it has no protobuf.
func ForCustomResources(cfg *rest.Config) *rest.Config {
	c := rest.CopyConfig(cfg)
	c.ContentType, c.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	return c
}

// ServesKind tells whether the API server has kind. When that cannot be found out, it has.
func ServesKind(client discovery.ServerResourcesInterface, version schema.GroupVersion, kind string) bool {
	list, err := client.ServerResourcesForGroupVersion(version.String())
	return err != nil || slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Kind == kind })
}

// ForWatches is a copy of cfg for lists and watches: without a rate limit, since
// there is one watch per kind, and without a bound of the time, which a watch has
// from the server.
func ForWatches(cfg *rest.Config, version string) *rest.Config {
	c := ForRole(cfg, version, "watch", 0, 0)
	c.Timeout = 0
	return c
}
