// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"path/filepath"
	"testing"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Proxy starts a proxy to the API server until the end of t. hook is called concurrently for every
// request. It may answer the request, or forward it, also modified, with pass. The proxy acts as the
// user of cfg and does not authenticate its clients.
func Proxy(t testing.TB, cfg *rest.Config, hook func(w http.ResponseWriter, r *http.Request, pass http.Handler)) *rest.Config {
	t.Helper()
	transport, err := rest.TransportFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	host, err := url.Parse(cfg.Host)
	if err != nil {
		t.Fatal(err)
	}
	pass := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(host) },
		Transport:     transport,
		FlushInterval: -1, // watches
		// A client that was killed is what some tests are about.
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			http.Error(w, err.Error(), http.StatusBadGateway)
		},
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			// Copying to a client that went away ends in a panic, which is no news here.
			if p := recover(); p != nil && p != http.ErrAbortHandler {
				panic(p)
			}
		}()
		hook(w, r, pass)
	}))
	t.Cleanup(func() {
		server.CloseClientConnections() // watches go on else
		server.Close()
	})
	return &rest.Config{Host: server.URL, QPS: -1}
}

// WriteKubeconfig writes a kubeconfig for the server of cfg, which must need no
// authentication, and returns its path.
func WriteKubeconfig(t testing.TB, cfg *rest.Config) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := SaveKubeconfig(path, cfg); err != nil {
		t.Fatalf("writing a kubeconfig: %v", err)
	}
	return path
}

// SaveKubeconfig writes a kubeconfig for the server of cfg, which must need no authentication.
func SaveKubeconfig(path string, cfg *rest.Config) error {
	config := clientcmdapi.NewConfig()
	config.Clusters["c"] = &clientcmdapi.Cluster{Server: cfg.Host}
	config.Contexts["c"] = &clientcmdapi.Context{Cluster: "c"}
	config.CurrentContext = "c"
	return clientcmd.WriteToFile(*config, path)
}
