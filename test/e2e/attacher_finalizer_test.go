// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// TestRollbackOfTheAttachersFinalizer: "all" creates PersistentVolumes with the finalizer of the attacher. The
// sidecars and the separate roles complete the deletion of these volumes, whether or not they were ever attached.
func TestRollbackOfTheAttachersFinalizer(t *testing.T) {
	t.Parallel()
	for name, programs := range map[string]func(e *env) []*exec.Cmd{
		"sidecars": func(e *env) []*exec.Cmd { return []*exec.Cmd{e.sidecar("csi-provisioner"), e.sidecar("csi-attacher")} },
		"separate_roles": func(e *env) []*exec.Cmd {
			return []*exec.Cmd{e.command("provision", election...), e.command("attach", election...)}
		},
		"all": func(e *env) []*exec.Cmd { return []*exec.Cmd{e.command("all", election...)} },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, csitest.Config{}, 1)
			class := e.class(false, nil)
			retaining := e.class(false, func(c *storagev1.StorageClass) {
				c.ReclaimPolicy = ptr.To(corev1.PersistentVolumeReclaimRetain)
			})
			all := e.run("all", election...)
			for _, c := range []string{"unused", "used", "in-use"} {
				e.claim(c, class)
			}
			e.claim("retained", retaining)
			for _, c := range []string{"unused", "used", "in-use", "retained"} {
				if pv := e.pv(e.bound(c)); !slices.Contains(pv.Finalizers, e.attacherFinalizer()) {
					t.Errorf("the PersistentVolume of claim %s has the finalizers %q", c, pv.Finalizers)
				}
			}
			e.attach("used", e.bound("used"), e.nodes[0])
			e.attach("in-use", e.bound("in-use"), e.nodes[0])
			e.attached(2)
			e.detach("used")
			e.attached(1)
			all.signal(os.Interrupt)
			if code := all.code(); code != 0 {
				t.Errorf("exit code %d", code)
			}

			retained := e.bound("retained")
			for _, cmd := range programs(e) {
				e.start(cmd)
			}
			e.deleteClaim("unused")
			e.deleteClaim("used")
			e.detach("in-use")
			e.attached(0)
			e.deleteClaim("in-use")
			e.deleteClaim("retained")
			e.eventually("the retained volume is released", func(context.Context) error {
				if phase := e.pv(retained).Status.Phase; phase != corev1.VolumeReleased {
					return fmt.Errorf("it is %s", phase)
				}
				return nil
			})
			e.must(e.client.CoreV1().PersistentVolumes().Delete(t.Context(), retained, metav1.DeleteOptions{}))
			e.eventually("all PersistentVolumes are deleted", func(ctx context.Context) error {
				volumes, err := e.volumes(ctx)
				if err == nil && len(volumes) > 0 {
					err = fmt.Errorf("%s has the finalizers %q", volumes[0].Name, volumes[0].Finalizers)
				}
				return err
			})
			if left := e.plugin.Volumes(); len(left) != 1 { // csi-provisioner calls DeleteVolume more than once
				t.Errorf("the driver has %d volumes, want the retained one", len(left))
			}
		})
	}
}

// TestNoFinalizerWithoutAnAttacher: without an attacher in the process, nothing shows that one runs at all.
func TestNoFinalizerWithoutAnAttacher(t *testing.T) {
	t.Parallel()
	e := newEnv(t, csitest.Config{}, 0)
	e.run("all", "--controllers=provisioner")
	e.claim("c", e.class(false, nil))
	if pv := e.pv(e.bound("c")); slices.Contains(pv.Finalizers, e.attacherFinalizer()) {
		t.Errorf("it has the finalizers %q", pv.Finalizers)
	}
	e.leftovers("c")
}

// sidecar returns the command of a sidecar: the real one if SIDECARS names it, otherwise
// the program under its name.
func (e *env) sidecar(name string) *exec.Cmd {
	if real := realSidecar(e.t, name); real != "" {
		return exec.Command(real, slices.Concat([]string{"--kubeconfig=" + e.cp.Kubeconfig(), "--csi-address=" + e.plugin.Address(),
			"--leader-election-namespace=" + e.ns}, election)...)
	}
	return e.linked(name, election...)
}

func (e *env) pv(name string) *corev1.PersistentVolume {
	e.t.Helper()
	pv, err := e.client.CoreV1().PersistentVolumes().Get(e.t.Context(), name, metav1.GetOptions{})
	e.must(err)
	return pv
}

// attacherFinalizer returns the finalizer of the attacher of the driver.
func (e *env) attacherFinalizer() string { return "external-attacher/" + e.provisionerLease() }
