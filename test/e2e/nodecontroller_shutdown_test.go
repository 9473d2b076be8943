// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// TestNodecontrollerScenarioShutdown is scenario 84 with workers that take their time: a
// driver that does not answer holds up neither the webhooks nor the end.
func TestNodecontrollerScenarioShutdown(t *testing.T) {
	t.Parallel()
	t.Run("084_reviews_are_answered_while_the_driver_hangs", func(t *testing.T) {
		e := newEnv(t, csitest.Config{Segments: []map[string]string{{}}}, 1)
		e.plugin.Always("CreateVolume", csitest.Hang())
		// The live read of a claim that does not exist is held back.
		asked, answer := make(chan struct{}), make(chan struct{})
		once := sync.OnceFunc(func() { close(asked) })
		release := sync.OnceFunc(func() { close(answer) })
		t.Cleanup(release)
		proxy := kubetest.Proxy(t, e.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if strings.HasSuffix(r.URL.Path, "/persistentvolumeclaims/held") {
				once()
				<-answer
			}
			pass.ServeHTTP(w, r)
		})
		dir := t.TempDir()
		writePair(t, dir)
		p := e.run("all", "--kubeconfig", kubetest.WriteKubeconfig(t, proxy), "--controllers=provisioner,nodecontroller",
			"--leader-election", "--http-endpoint=127.0.0.1:0",
			"--leader-election-id=shutdown", "--enable-webhooks", "--webhook-addr=127.0.0.1:0", "--cert-dir", dir,
			"--shutdown-delay=5s") // half of what a review may take: the held one outlives the delay
		e.leads(p, "shutdown")
		e.eventually("it is ready", func(context.Context) error {
			if status, body := p.get("/readyz"); status != http.StatusOK {
				return fmt.Errorf("%d %s", status, body)
			}
			return nil
		})
		found := regexp.MustCompile(`admission webhooks.*?(127\.0\.0\.1:\d+)`).FindStringSubmatch(p.logged())
		if found == nil {
			t.Fatal("the address of the webhooks is not in the log")
		}
		address := found[1]
		e.claim("a", e.class(false, nil))
		e.wait("CreateVolume", 1)
		held := make(chan error, 1)
		go func() { held <- review(address, e.ns, "held") }()
		select {
		case <-asked:
		case err := <-held:
			t.Fatal("the review has ended: ", err)
		}

		began := time.Now()
		p.signal(syscall.SIGTERM)
		p.says("Shutting down")
		if status, _ := p.get("/readyz"); status != http.StatusServiceUnavailable {
			t.Errorf("/readyz after the signal: %d", status)
		}
		if err := review(address, e.ns, "new"); err != nil {
			t.Errorf("a review after the signal: %v", err)
		}
		e.eventually("the port is closed", func(context.Context) error {
			c, err := net.Dial("tcp", address)
			if err == nil {
				return errors.Join(errors.New("it is open"), c.Close())
			}
			return nil
		})
		if l, err := e.lease(t.Context(), "shutdown"); err != nil || l.Spec.HolderIdentity == nil || *l.Spec.HolderIdentity != p.pod {
			t.Errorf("the Lease is not held until the last review is answered: %v, %v", l, err)
		}
		if !e.plugin.Calls("CreateVolume")[0].Ended.IsZero() {
			t.Error("the webhooks went on for as long as the driver was called")
		}
		release()
		if err := <-held; err != nil {
			t.Errorf("the review that was running: %v", err)
		}
		if code := p.codeWithin(30*time.Second - time.Since(began)); code != 0 {
			t.Errorf("exit code %d, want 0", code)
		}
		if l, err := e.lease(t.Context(), "shutdown"); err != nil || l.Spec.HolderIdentity != nil && *l.Spec.HolderIdentity != "" {
			t.Errorf("the Lease after the end: %v, %v", l, err)
		}
	})
}

// review asks the webhook for pods about one that uses a claim; nil when it is allowed.
func review(address, namespace, claim string) error {
	body := fmt.Sprintf(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"1","operation":"CREATE","namespace":%q,"kind":{"version":"v1","kind":"Pod"},
		"resource":{"version":"v1","resource":"pods"},"object":{"metadata":{"name":"p"},"spec":{"containers":[{}],"volumes":[{"name":"v","persistentVolumeClaim":{"claimName":%q}}]}}}}`, namespace, claim)
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} // self-signed
	defer client.CloseIdleConnections()
	response, err := client.Post("https://"+address+"/pod/mutate", "application/json", bytes.NewBufferString(body))
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK || !strings.Contains(string(text), `"allowed":true`) {
		return fmt.Errorf("%s %s: %w", response.Status, text, err)
	}
	return nil
}
