// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package pvcfinalizer

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/claimloop"
	"github.com/storage-controller/storage-controller/internal/claimtest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

type fixture struct {
	*claimtest.Fixture
	cfg Config
	c   *Controller // of the last start
}

func newFixture(t *testing.T, change func(f *fixture)) *fixture {
	t.Helper()
	f := &fixture{Fixture: claimtest.New(t)}
	f.cfg = Config{
		Settings: f.Settings(),
		Mode:     ModeOff, Finalizer: f.Driver + "/pvc",
	}
	change(f)
	f.start()
	return f
}

func (f *fixture) start() {
	f.Helper()
	f.Fixture.Start(kube.RetainedFields{Nodes: true, Claims: true}, func(p claimloop.Deps) claimtest.Controller {
		f.c = New(f.cfg, p)
		return f.c
	})
}

// settles waits until the controller has processed all earlier events. It must have one worker.
func (f *fixture) settles() {
	f.Helper()
	f.Settle(func(name string) {
		if f.cfg.Mode == ModeStrip {
			f.Claim(name, withFinalizers(f.cfg.Obsolete...))
			f.HasFinalizers(name, claimtest.PVCProtection)
			return
		}
		f.Claim(name, withFinalizers(f.cfg.Finalizer))
		f.DeleteClaim(name)
		f.Unprotect(name)
		f.ClaimGone(name)
	})
}

func withFinalizers(names ...string) func(*corev1.PersistentVolumeClaim) {
	return func(pvc *corev1.PersistentVolumeClaim) { pvc.Finalizers = names }
}
