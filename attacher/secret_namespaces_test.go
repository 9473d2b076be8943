// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/looptest"
)

// restricted runs an attacher of a process with --secret-namespaces.
type restricted struct {
	*Controller
	namespaces []string
}

// Run runs the attacher until ctx ends.
func (r restricted) Run(ctx context.Context) error {
	return r.Controller.Run(kube.WithSecretNamespaces(ctx, r.namespaces))
}

// TestSecretNamespaces: --secret-namespaces also holds for the Secrets of PersistentVolumes.
func TestSecretNamespaces(t *testing.T) {
	f := scenario(t, csitest.Config{}, nil)
	f.Crash()
	f.Start(func(p looptest.Process) (looptest.Loop, error) {
		c, err := New(f.cfg, Deps{
			Driver: p.Driver, Client: p.Client, Informers: p.Informers, CSI: p.CSI.Controller(), Ready: p.CSI.WaitReady,
			Registry: p.Registry, Queues: p.Queues,
		})
		return restricted{c, []string{"another"}}, err
	})
	f.node("id-1")
	f.secret(map[string]string{"k": "v"})
	f.volume(func(pv *corev1.PersistentVolume) { f.withSecret(pv) })
	f.attach("va1", nil)
	f.until("is refused", attachError("its namespace is not in --secret-namespaces"))
	f.Calls(publish, 0)
}
