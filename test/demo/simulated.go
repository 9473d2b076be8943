// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
	"github.com/storage-controller/storage-controller/test/simulation/cluster"
)

// plane is the API server of the demo and the components around it: a [kubetest.ControlPlane], or simulated.
type plane interface {
	Config() *rest.Config
	Kubeconfig() string
	Client() kubernetes.Interface
	Stop()
}

// program is how the user agent of storage-controller begins.
const program = "storage-controller/"

// simulated is an API server in memory, over HTTP on loopback, with simulated components.
type simulated struct {
	dir    string
	server *httptest.Server
	client kubernetes.Interface
	stop   func() // ends the components

	mu              sync.Mutex
	watches, writes int // of storage-controller
}

func startSimulated(dir string) (*simulated, error) {
	s := &simulated{dir: dir}
	api := apiserver.New(apiserver.Hooks{UID: uuid.NewUUID, After: s.count})
	s.server = httptest.NewServer(api.Handler())
	client, err := kubernetes.NewForConfig(s.Config())
	if err != nil {
		return nil, err
	}
	s.client = client
	components, err := cluster.NewLive(api, driverName)
	if err != nil {
		return nil, err
	}
	running, end := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	ended.Go(func() { components.Run(running) })
	s.stop = func() { end(); ended.Wait() }
	return s, kubetest.SaveKubeconfig(s.Kubeconfig(), s.Config())
}

// count is [apiserver.Hooks].After.
func (s *simulated) count(_ context.Context, r apiserver.Request, _ apiserver.Result) error {
	if !strings.HasPrefix(r.UserAgent, program) {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case r.Verb == "watch":
		s.watches++
	case r.Verb != "get" && r.Verb != "list" && counts(r.Resource.Resource):
		s.writes++
	}
	return nil
}

// counts reports whether a write of the resource belongs to the life of a volume. doctor's questions about permissions do not.
func counts(resource string) bool {
	return !slices.Contains([]string{"events", "leases", "selfsubjectaccessreviews"}, resource)
}

// Config implements plane.
func (s *simulated) Config() *rest.Config { return &rest.Config{Host: s.server.URL, QPS: -1} }

// Kubeconfig implements plane.
func (s *simulated) Kubeconfig() string { return filepath.Join(s.dir, "kubeconfig") }

// Client implements plane.
func (s *simulated) Client() kubernetes.Interface { return s.client }

// Stop implements plane.
func (s *simulated) Stop() {
	if s.stop != nil {
		s.stop()
	}
	s.server.CloseClientConnections() // watches go on else
	s.server.Close()
}
