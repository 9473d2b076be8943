// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// TestAlertsWhereHalfOfTheNodesAreLost: nothing is cleaned up until a node is approved, and
// then the API server refuses it.
func TestAlertsWhereHalfOfTheNodesAreLost(t *testing.T) {
	l := newCluster(t, 4, false)
	p, h := l.keep("claims"), newHistory()
	p.leadsInAll(2)
	for i, name := range []string{"c2", "c3"} {
		l.onNode(name, l.class, l.key(), l.nodes[2+i])
	}
	for range 2 {
		h.minute(p, "a")
	}
	h.fires(t)

	l.lose(l.nodes[2], l.nodes[3])
	l.eventually("it waits for an approval", func(context.Context) error {
		if open, missing := p.value("storage_controller_breaker_open", ""), p.value("storage_controller_nodes_missing", ""); open != 1 ||
			missing != 2 {
			return fmt.Errorf("breaker_open is %v, nodes_missing %v", open, missing)
		}
		return nil
	})
	h.minute(p, "a")
	h.fires(t, "BreakerOpen", "CleanupBlocked", "NodesMissing")

	allow := l.forbids(admissionv1.Delete, "", "persistentvolumeclaims", fmt.Sprintf("oldObject.metadata.namespace == %q", l.ns))
	l.eventually("the deletion of claims is refused", func(ctx context.Context) error {
		return refused(l.client.CoreV1().PersistentVolumeClaims(l.ns).Delete(ctx, "c2",
			metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}))
	})
	l.approved(l.nodes[2])
	failed := func() (n float64) {
		for _, m := range p.metrics()["storage_controller_cleanup_actions_total"].GetMetric() {
			if !strings.Contains(labelsOf(m), "result=ok") {
				n += m.GetCounter().GetValue()
			}
		}
		return n
	}
	for range 2 { // a counter has grown only if it was there before
		before := failed()
		l.eventually("it has tried", func(context.Context) error {
			if n := failed(); n == before {
				return fmt.Errorf("%v times", n)
			}
			return nil
		})
		h.minute(p, "a")
	}
	h.fires(t, "BreakerOpen", "CleanupBlocked", "CleanupFails", "NodesMissing")
	allow()
	l.terminating("c2")
}

// webhooks runs the nodecontroller with its webhooks, and without a driver.
func (e *env) webhooks(args ...string) *process {
	e.t.Helper()
	path, err := binary()
	e.must(err)
	p := e.start(exec.Command(path, append([]string{"nodecontroller", "--kubeconfig", e.kubeconfig("nodecontroller"), "--driver-name",
		e.plugin.Name(),
		"--http-endpoint=127.0.0.1:0", "--enable-webhooks", "--webhook-addr=127.0.0.1:0", "--leader-election-id=webhooks"}, args...)...))
	e.eventually("it is ready", func(context.Context) error {
		if status, body := p.get("/readyz"); status != http.StatusOK {
			return fmt.Errorf("%d %s", status, body)
		}
		return nil
	})
	p.leadsInAll(1)
	return p
}

// TestAlertsAboutWebhooks: requests that cannot be read, and certificates that are no good or
// will not be for long.
func TestAlertsAboutWebhooks(t *testing.T) {
	t.Parallel()
	e, dir, h := newEnv(t, csitest.Config{}, 0), t.TempDir(), newHistory()
	writePairUntil(t, dir, time.Now().AddDate(1, 0, 0))
	p := e.webhooks("--cert-dir", dir)
	pod := map[string]any{"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": "p"},
		"spec": map[string]any{"containers": []any{map[string]any{"name": "c"}}}}
	for range 3 {
		if status, _ := p.review(t, pod); status != http.StatusOK {
			t.Errorf("it answers %d", status)
		}
		h.minute(p, "a")
	}
	h.fires(t)

	other := t.TempDir()
	writePairUntil(t, other, time.Now().AddDate(1, 0, 0))
	key, err := os.ReadFile(filepath.Join(other, "tls.key"))
	e.must(err)
	e.must(os.WriteFile(filepath.Join(dir, "tls.key"), key, 0o600))
	e.eventually("the pair is not taken", func(context.Context) error {
		if p.value("storage_controller_webhook_cert_reload_total", "result=error") == 0 {
			return errors.New("nothing was found")
		}
		return nil
	})
	h.minute(p, "a")
	h.minute(p, "a")
	h.fires(t, "WebhookCertificateFails")

	writePairUntil(t, dir, time.Now().AddDate(0, 0, 7))
	e.eventually("the other pair is taken", func(context.Context) error {
		if left := p.value("storage_controller_webhook_cert_expiry_seconds", ""); left > (7 * 24 * time.Hour).Seconds() {
			return fmt.Errorf("it has %vs", left)
		}
		return nil
	})
	for range 3 { // a counter has grown only if it was there before
		response, err := selfSigned.Post("https://"+admits.FindStringSubmatch(p.logged())[1]+"/pod/mutate", "application/json",
			strings.NewReader("none"))
		e.must(err)
		e.must(response.Body.Close())
		h.minute(p, "a")
	}
	h.fires(t, "WebhookCertificateExpires", "WebhookFails")
}
