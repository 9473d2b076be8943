// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// TestNodecontrollerWithoutPermissions: with the permissions of the base alone, what needs
// others is disabled, the rest works, and all of it works once they are granted.
func TestNodecontrollerWithoutPermissions(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 0)
	for _, name := range []string{"nodecontroller", "nodecontroller-leader-election", "nodecontroller-pvc-strip"} {
		e.applyRBAC(name)
	}
	kubeconfig, _, _ := e.as("storage-controller-nodecontroller")
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	finalizer := e.plugin.Name() + "/obsolete"
	pvc := newClaim("a", "none")
	pvc.Finalizers = []string{finalizer}
	if _, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Create(t.Context(), pvc, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p := e.start(exec.Command(path, "nodecontroller", "--kubeconfig", kubeconfig, "--driver-name", e.plugin.Name(),
		"--http-endpoint=127.0.0.1:0",
		"--leader-election-id=permissions", "--node-cleanup=claims", "--pvc-finalizer-mode=strip", "--pvc-obsolete-finalizers="+finalizer))
	blocked := func(want float64) func(context.Context) error {
		return func(context.Context) error {
			if have := p.value("storage_controller_cleanup_blocked", "gate=forbidden"); have != want {
				return fmt.Errorf("cleanup_blocked of the gate forbidden is %v, want %v", have, want)
			}
			return nil
		}
	}
	e.eventually("it is ready, and counts both kinds", func(ctx context.Context) error {
		if status, body := p.get("/readyz"); status != http.StatusOK {
			return fmt.Errorf("/readyz: %d %s", status, body)
		}
		return blocked(2)(ctx)
	})
	e.eventually("the events name the missing permissions", func(ctx context.Context) error {
		events, err := e.client.CoreV1().Events("default").List(ctx,
			metav1.ListOptions{FieldSelector: "reason=NodeCleanupBlocked,involvedObject.kind=CSIDriver,involvedObject.name=" +
				e.plugin.Name()})
		if err != nil {
			return err
		}
		var said strings.Builder
		for _, event := range events.Items {
			said.WriteString(event.Message)
		}
		for _, want := range []string{"watching pods", "watching volumeattachments", "--node-cleanup=claims"} {
			if !strings.Contains(said.String(), want) {
				return fmt.Errorf("%q is not in %q", want, said.String())
			}
		}
		return nil
	})
	e.eventually("what needs none of them works", func(ctx context.Context) error {
		pvc, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Get(ctx, "a", metav1.GetOptions{})
		if err == nil && strings.Contains(strings.Join(pvc.Finalizers, " "), finalizer) {
			err = errors.New("the obsolete finalizer is still there")
		}
		return err
	})

	e.applyRBAC("nodecontroller-resize-nudge")
	e.applyRBAC("nodecontroller-cleanup")
	e.eventually("the permissions are noticed", blocked(0))
	p.signal(syscall.SIGTERM)
	if code := p.code(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
}
