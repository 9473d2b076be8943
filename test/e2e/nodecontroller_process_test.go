// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

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
	p := e.start(exec.Command(path, "nodecontroller", "--kubeconfig", e.kubeconfig("nodecontroller"), "--driver-name", e.plugin.Name(),
		"--http-endpoint=127.0.0.1:0",
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
		t.Errorf("%d connections to a driver that no flag names", accepted)
	}
	p.says("Starting controller") // it knows of its Lease
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
	t.Parallel()
	t.Run("081_084_ready_with_a_certificate_and_until_the_signal", func(t *testing.T) {
		e := newEnv(t, csitest.Config{}, 0)
		path, err := binary()
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		p := e.start(exec.Command(path, "nodecontroller", "--kubeconfig", e.kubeconfig("nodecontroller"), "--driver-name", e.plugin.Name(),
			"--http-endpoint=127.0.0.1:0",
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
			return errors.Join(status("/readyz/informers", http.StatusOK)(ctx),
				status("/readyz/webhook", http.StatusServiceUnavailable)(ctx), status("/readyz", http.StatusServiceUnavailable)(ctx))
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
	t.Run("083_without_the_Lease", func(t *testing.T) {
		e := newEnv(t, csitest.Config{}, 0)
		path, err := binary()
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		writePair(t, dir)
		start := func() *process {
			return e.start(exec.Command(path, "nodecontroller", "--kubeconfig", e.cp.Kubeconfig(), "--driver-name", e.plugin.Name(),
				"--http-endpoint=127.0.0.1:0",
				"--enable-webhooks", "--webhook-addr=127.0.0.1:0", "--cert-dir", dir, "--leader-election-id=webhooks"))
		}
		e.leads(start(), "webhooks")
		standby := start()
		e.eventually("the other one is ready", func(context.Context) error {
			if status, body := standby.get("/readyz"); status != http.StatusOK {
				return fmt.Errorf("%d %s", status, body)
			}
			return nil
		})
		pod := map[string]any{"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": "p"},
			"spec": map[string]any{"containers": []any{map[string]any{"name": "c"}}}}
		status, answer := standby.review(t, pod)
		if status != http.StatusOK || answer.Response == nil || answer.Response.UID != "u1" || !answer.Response.Allowed {
			t.Errorf("it answers %d %+v", status, answer)
		}
		l, err := e.lease(t.Context(), "webhooks")
		if err != nil {
			t.Fatal(err)
		}
		if holder := ptr.Deref(l.Spec.HolderIdentity, ""); holder == "" || holder == standby.pod {
			t.Errorf("%q holds the Lease, so it answered as the leader or while there was none", holder)
		}
	})
	t.Run("047_next_after_a_kill", func(t *testing.T) {
		// One node more than is lost stays, and the claim goes with its node at once.
		kind := cleanupKinds["finalizer"]
		s := &cleanup{local: newCluster(t, 2, false), kind: kind}
		s.bind()
		args := slices.Concat(quick, election, kind.args)
		first := s.run("nodecontroller", args...)
		name := s.somebodyLeadsOf(first)
		second := s.run("nodecontroller", append(args, "--http-endpoint=127.0.0.1:0")...)
		s.eventually("nodes have the finalizer", func(ctx context.Context) error {
			for _, n := range s.nodes {
				node, err := s.client.CoreV1().Nodes().Get(ctx, n, metav1.GetOptions{})
				if err != nil || len(node.Finalizers) == 0 {
					return errors.Join(err, fmt.Errorf("%s has none", n))
				}
			}
			return nil
		})
		s.eventually("the second one is ready", func(context.Context) error {
			if status, body := second.get("/readyz"); status != http.StatusOK {
				return fmt.Errorf("%d %s", status, body)
			}
			return nil
		})
		first.kill()
		killed := time.Now()
		if l, err := s.lease(t.Context(), name); err != nil || ptr.Deref(l.Spec.HolderIdentity, "") != first.pod {
			t.Fatalf("the one that was killed has let its Lease go: %v, %v", l, err)
		}
		s.must(s.client.CoreV1().Nodes().Delete(t.Context(), s.nodes[0], metav1.DeleteOptions{}))
		s.eventually("the claim is deleted", func(ctx context.Context) error {
			claim, err := s.pvc(ctx, "c")
			if apierrors.IsNotFound(err) {
				return nil
			}
			if err == nil && claim.DeletionTimestamp == nil {
				err = errors.New("it is there")
			}
			return err
		})
		// The second one looks at the Lease at times that vary by a fifth, and once it has it,
		// the claim follows after some twenty requests, of which it makes five a second. The rest is for a busy machine.
		const requests = 30 * time.Second
		if d, limit := time.Since(killed), leaseDuration+retryPeriod*12/10+requests; d > limit {
			t.Errorf("deleted %v after the end of the first one, want %v at most", d, limit)
		}
		s.leads(second, name)
	})
}

// TestNodecontrollerWarnsOfCapacityTwice: two ways to tell the scheduler of capacity do not
// are used together, which shows only when pods stay Pending.
func TestNodecontrollerWarnsOfCapacityTwice(t *testing.T) {
	const warning = "The scheduler gets capacity twice"
	e := newCapacityEnv(t, getsCapacity)
	args := slices.Concat(unowned, []string{"--controllers=capacity,nodecontroller", "--webhook-addr=127.0.0.1:0", "--cert-dir",
		t.TempDir(), "--http-endpoint=127.0.0.1:0"})
	e.start(e.publisher("all", append(args, "--enable-webhooks")...)).says(warning)
	without := e.start(e.publisher("all", args...))
	without.says("Starting controller")
	if strings.Contains(without.logged(), warning) {
		t.Error("it warns without webhooks too")
	}
}

// writePair puts a certificate and its key into dir, as a mounted Secret has them.
func writePair(t *testing.T, dir string) {
	t.Helper()
	writePairUntil(t, dir, time.Now().Add(30*24*time.Hour))
}

// writePairUntil does so for one that expires then.
func writePairUntil(t *testing.T, dir string, expires time.Time) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: expires}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for name, block := range map[string]*pem.Block{"tls.crt": {Type: "CERTIFICATE", Bytes: der},
		"tls.key": {Type: "PRIVATE KEY", Bytes: secret}} {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// somebodyLeadsOf waits until p, which is alone, leads, and is the name of its Lease.
func (e *env) somebodyLeadsOf(p *process) (name string) {
	e.t.Helper()
	e.eventually(p.pod+" leads", func(ctx context.Context) error {
		leases, err := e.client.CoordinationV1().Leases(e.ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, l := range leases.Items {
			if ptr.Deref(l.Spec.HolderIdentity, "") == p.pod {
				name = l.Name
				return nil
			}
		}
		return errors.New("it does not")
	})
	return name
}

var admits = regexp.MustCompile(`Serving admission webhooks.*"address": "([^"]+)"`)

// review asks the webhooks of the process about a pod, and is what it answers.
func (p *process) review(t *testing.T, pod map[string]any) (status int, answer admissionv1.AdmissionReview) {
	t.Helper()
	p.says("Serving admission webhooks")
	address := admits.FindStringSubmatch(p.logged())
	if address == nil {
		t.Fatal("it does not say where it admits")
	}
	raw, err := json.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	body, err := json.Marshal(map[string]any{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": map[string]any{
		"uid": "u1", "operation": "CREATE", "namespace": "default",
		"resource": map[string]string{"group": "", "version": "v1", "resource": "pods"}, "object": json.RawMessage(raw),
	}})
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Timeout: 20 * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
	response, err := client.Post("https://"+address[1]+"/pod/mutate", "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		t.Errorf("the answer: %v", err)
	}
	return response.StatusCode, answer
}
