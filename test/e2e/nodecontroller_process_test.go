package e2e

import (
	"context"
	"fmt"
	"net/http"
	"os/exec"
	"syscall"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// TestNodecontrollerWithoutConnection: where every node has a provisioner of its own,
// there is no driver beside the one central nodecontroller.
func TestNodecontrollerWithoutConnection(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 0)
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	p := e.start(exec.Command(path, "nodecontroller", "--kubeconfig", e.cp.Kubeconfig(), "--driver-name", e.plugin.Name(), "--http-endpoint=127.0.0.1:0",
		"--leader-election-id=own-name"))
	e.eventually("it is ready", func(context.Context) error {
		for _, path := range []string{"/readyz", "/readyz/informers", "/healthz"} {
			if status, body := p.get(path); status != http.StatusOK {
				return fmt.Errorf("%s: %d %s", path, status, body)
			}
		}
		return nil
	})
	lease := func(ctx context.Context) (*coordinationv1.Lease, error) {
		return e.client.CoordinationV1().Leases(e.ns).Get(ctx, "own-name", metav1.GetOptions{})
	}
	e.eventually("it holds the Lease without being asked to", func(ctx context.Context) error {
		l, err := lease(ctx)
		if err == nil && (l.Spec.HolderIdentity == nil || *l.Spec.HolderIdentity != p.pod) {
			err = fmt.Errorf("held by %v", l.Spec.HolderIdentity)
		}
		return err
	})
	if accepted, _ := e.plugin.Connections(); accepted > 0 {
		t.Errorf("%d connections to a driver that nobody named", accepted)
	}
	p.signal(syscall.SIGTERM)
	if code := p.code(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	l, err := lease(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if l.Spec.HolderIdentity != nil && *l.Spec.HolderIdentity != "" {
		t.Errorf("after its end %s holds the Lease", *l.Spec.HolderIdentity)
	}
}
