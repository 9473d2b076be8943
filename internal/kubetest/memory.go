// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"context"
	"net/http/httptest"
	"os"

	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
)

// startInMemory starts an API server in memory, over HTTP on loopback, without the other components. Its kubeconfig needs no
// authentication. Everything is permitted.
func startInMemory(_ context.Context, cfg Config) (*ControlPlane, error) {
	c := &ControlPlane{cfg: cfg, temp: true}
	dir, err := os.MkdirTemp("", "apiserver-")
	if err != nil {
		return nil, err
	}
	c.cfg.Dir = dir
	c.memory = httptest.NewServer(apiserver.New(apiserver.Hooks{UID: uuid.NewUUID}).Handler())
	c.rest = &rest.Config{Host: c.memory.URL, QPS: -1}
	c.client, err = kubernetes.NewForConfig(c.rest)
	if err == nil {
		err = SaveKubeconfig(c.Kubeconfig(), c.rest)
	}
	if err != nil {
		c.Stop()
		return nil, err
	}
	return c, nil
}
