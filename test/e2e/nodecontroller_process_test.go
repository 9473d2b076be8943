package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

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

// TestNodecontrollerScenarioProcess is what the process as a whole does with its webhooks.
func TestNodecontrollerScenarioProcess(t *testing.T) {
	t.Run("081_084_ready_with_a_certificate_and_until_the_signal", func(t *testing.T) {
		e := newEnv(t, csitest.Config{}, 0)
		path, err := binary()
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		p := e.start(exec.Command(path, "nodecontroller", "--kubeconfig", e.cp.Kubeconfig(), "--driver-name", e.plugin.Name(), "--http-endpoint=127.0.0.1:0",
			"--enable-webhooks", "--webhook-addr=127.0.0.1:0", "--cert-dir", dir, "--leader-election-id=webhooks"))
		status := func(path string, want int) func(context.Context) error {
			return func(context.Context) error {
				if status, body := p.get(path); status != want {
					return fmt.Errorf("%s: %d %s", path, status, body)
				}
				return nil
			}
		}
		e.eventually("it waits for nothing but the certificate", func(ctx context.Context) error {
			return errors.Join(status("/readyz/informers", http.StatusOK)(ctx), status("/readyz/webhook", http.StatusServiceUnavailable)(ctx), status("/readyz", http.StatusServiceUnavailable)(ctx))
		})
		writePair(t, dir)
		e.eventually("it is ready", status("/readyz", http.StatusOK))
		e.eventually("it leads", func(ctx context.Context) error {
			l, err := e.client.CoordinationV1().Leases(e.ns).Get(ctx, "webhooks", metav1.GetOptions{})
			if err == nil && (l.Spec.HolderIdentity == nil || *l.Spec.HolderIdentity != p.pod) {
				err = fmt.Errorf("held by %v", l.Spec.HolderIdentity)
			}
			return err
		})

		p.signal(syscall.SIGTERM)
		p.says("Shutting down")
		if err := status("/readyz", http.StatusServiceUnavailable)(t.Context()); err != nil {
			t.Errorf("while it still serves: %v", err)
		}
		if code := p.codeWithin(30 * time.Second); code != 0 {
			t.Errorf("exit code %d, want 0", code)
		}
		l, err := e.client.CoordinationV1().Leases(e.ns).Get(t.Context(), "webhooks", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if l.Spec.HolderIdentity != nil && *l.Spec.HolderIdentity != "" {
			t.Errorf("after its end %s holds the Lease", *l.Spec.HolderIdentity)
		}
	})
}

// TestNodecontrollerWarnsOfCapacityTwice: two ways to tell the scheduler of capacity do not
// go together, which nobody would find out before pods stay Pending.
func TestNodecontrollerWarnsOfCapacityTwice(t *testing.T) {
	const warning = "the scheduler is told of capacity twice"
	e := newCapacityEnv(t, getsCapacity)
	args := slices.Concat(unowned, []string{"--controllers=capacity,nodecontroller", "--webhook-addr=127.0.0.1:0", "--cert-dir", t.TempDir(), "--http-endpoint=127.0.0.1:0"})
	e.start(e.publisher("all", append(args, "--enable-webhooks")...)).says(warning)
	without := e.start(e.publisher("all", args...))
	without.says("Working")
	if strings.Contains(without.logged(), warning) {
		t.Error("it warns without webhooks too")
	}
}

// TestNodecontrollerClusterDomain: a certificate that the process makes itself is for the
// names of its Service in a cluster whose domain is another one.
func TestNodecontrollerClusterDomain(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 0)
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	e.start(exec.Command(path, "nodecontroller", "--kubeconfig", e.cp.Kubeconfig(), "--driver-name", e.plugin.Name(), "--leader-election-id=domain",
		"--enable-webhooks", "--webhook-addr=127.0.0.1:0", "--webhook-cert-mode=self-signed", "--webhook-cert-secret=certs", "--webhook-service=hook",
		"--webhook-config-name="+e.ns, "--webhook-cluster-domain=corp.example"))
	want := "hook." + e.ns + ".svc.corp.example"
	e.eventually("the certificate is for "+want, func(ctx context.Context) error {
		secret, err := e.client.CoreV1().Secrets(e.ns).Get(ctx, "certs", metav1.GetOptions{})
		if err != nil {
			return err
		}
		block, _ := pem.Decode(secret.Data["tls.crt"])
		if block == nil {
			return errors.New("there is none")
		}
		leaf, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return err
		}
		return leaf.VerifyHostname(want)
	})
}

// writePair puts a certificate and its key into dir, as a mounted Secret has them.
func writePair(t *testing.T, dir string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for name, block := range map[string]*pem.Block{"tls.crt": {Type: "CERTIFICATE", Bytes: der}, "tls.key": {Type: "PRIVATE KEY", Bytes: secret}} {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
