package kube

import (
	"fmt"
	"os"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// RESTConfig builds the connection to the API server: from kubeconfig and
// master (a URL) when one of them is set, else from the pod's service account.
// The environment variable KUBECONFIG, when not empty, replaces kubeconfig.
// The result speaks protobuf and has no rate limit; see [ForRole].
func RESTConfig(kubeconfig, master string) (*rest.Config, error) {
	if env := os.Getenv("KUBECONFIG"); env != "" {
		kubeconfig = env
	}
	var cfg *rest.Config
	var err error
	if kubeconfig == "" && master == "" {
		if cfg, err = rest.InClusterConfig(); err != nil {
			return nil, fmt.Errorf("using the service account of the pod (set --kubeconfig outside of a cluster): %w", err)
		}
	} else if cfg, err = clientcmd.BuildConfigFromFlags(master, kubeconfig); err != nil {
		return nil, fmt.Errorf("reading kubeconfig %q: %w", kubeconfig, err)
	}
	cfg.ContentType = runtime.ContentTypeProtobuf
	cfg.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	cfg.QPS = -1
	return cfg, nil
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

// Serves tells whether the API server has kind. When that cannot be found out, it has.
func Serves(client discovery.ServerResourcesInterface, version schema.GroupVersion, kind string) bool {
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
