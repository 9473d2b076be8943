// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/tools/statusz"
)

// TestStatusPageOfAWorkingProcess has one claim fail and one call hang, and finds both on
// the page, with when and why.
func TestStatusPageOfAWorkingProcess(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 1)
	e.plugin.Next("CreateVolume", csitest.Fail(codes.Unavailable, "the pool is full of <b>water</b>"))
	_, err := e.client.CoreV1().Secrets(e.ns).Create(t.Context(),
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: map[string]string{"k": "hidden-value"}},
		metav1.CreateOptions{})
	e.must(err)
	p := e.run("all", "--leader-election", "--leader-election-namespace="+e.ns, "--retry-interval-start=1h", "--retry-interval-max=1h",
		"--worker-threads=7", "--http-endpoint=127.0.0.1:0")
	class := e.class(false, func(c *storagev1.StorageClass) {
		c.Parameters = map[string]string{"csi.storage.k8s.io/provisioner-secret-name": "s",
			"csi.storage.k8s.io/provisioner-secret-namespace": e.ns}
	})
	e.claim("failing", class)
	e.wait("CreateVolume", 1)
	e.plugin.Always("CreateVolume", csitest.Hang())
	t.Cleanup(e.plugin.Release)
	e.claim("hanging", class)
	e.wait("CreateVolume", 2)
	var page statusz.Page
	e.eventually("the page shows both", func(context.Context) error {
		code, body := p.get("/statusz?format=json")
		page = statusz.Page{}
		if err := json.Unmarshal([]byte(body), &page); err != nil || code != http.StatusOK {
			return fmt.Errorf("%d: %w", code, err)
		}
		for _, l := range page.Loops {
			if l.Failures == 1 && len(l.Running) == 1 {
				if f := l.Failing[0]; f.Key != e.ns+"/failing" || f.Attempts != 1 || !strings.Contains(f.Error, "water") {
					t.Fatalf("got %+v", l)
				}
				return nil
			}
		}
		return fmt.Errorf("the loops are %+v", page.Loops)
	})
	if d := page.Driver; d == nil || d.Driver.Name != e.plugin.Name() || len(d.Running) != 1 || d.Running[0].Method != "CreateVolume" ||
		len(d.Failed) != 1 || d.Failed[0].Code != "Unavailable" {
		t.Errorf("the driver: %+v", d)
	}
	if len(page.Roles) < 2 || page.Roles[0].Lease == nil || !strings.HasPrefix(page.Roles[0].Lease.Lease, e.ns+"/") {
		t.Errorf("the roles: %+v", page.Roles)
	}
	if len(page.Checks) == 0 {
		t.Error("there are no checks")
	}
	origins := map[string]string{}
	for _, f := range page.Flags {
		origins[f.Name+"="+f.Value] = f.Origin
	}
	if origins["provisioner.worker-threads=7"] != "flag" || origins["provisioner.leader-election=true"] != "flag" {
		t.Errorf("the flags: %v", origins)
	}
	code, html := p.get("/statusz")
	wants := []string{"1 failing", "&lt;b&gt;water&lt;/b&gt;", e.ns + "/hanging", e.plugin.Name(), "--provisioner.leader-election"}
	for _, want := range wants {
		if code != http.StatusOK || !strings.Contains(html, want) {
			t.Errorf("%d: %q is not on the page", code, want)
		}
	}
	for _, path := range []string{"/statusz", "/statusz?format=json", "/flagz", "/metrics"} {
		if _, body := p.get(path); strings.Contains(body, "hidden-value") || body == "" {
			t.Errorf("%s shows a secret: %s", path, body)
		}
	}
	if log := p.logged(); strings.Contains(log, "hidden-value") {
		t.Errorf("the log shows a secret: %s", log)
	}
	if code, body := p.get("/flagz"); code != http.StatusOK || !strings.Contains(body, "metrics-path") ||
		!strings.Contains(body, "default") {
		t.Errorf("/flagz: %d %s", code, body)
	}
}

// TestPagesOfTheServer finds every page, with the metrics at a path of their own.
func TestPagesOfTheServer(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 0)
	p := e.run("all", "--http-endpoint=127.0.0.1:0", "--metrics-path=/numbers/of-it")
	for path, want := range map[string]string{
		"/": "<h2>Health", "/statusz": `href="./numbers/of-it"`, "/flagz": "/numbers/of-it", "/livez?verbose": "ok",
		"/readyz?verbose": "driver", "/numbers/of-it": "csi_sidecar_operations_seconds",
	} {
		e.eventually(path+" shows "+want, func(context.Context) error {
			if code, body := p.get(path); code != http.StatusOK || !strings.Contains(body, want) {
				return fmt.Errorf("%d %s", code, body)
			}
			return nil
		})
	}
	if code, body := p.send(http.MethodPut, "/debug/flags/v", "5"); code != http.StatusOK {
		t.Errorf("changing the verbosity: %d %s", code, body)
	}
	p.says("Verbosity changed")
	if code, body := p.get("/flagz"); code != http.StatusOK || !strings.Contains(body, "debug endpoint") {
		t.Errorf("/flagz after the verbosity has changed: %d %s", code, body)
	}
	for _, path := range []string{"/metrics", "/elsewhere"} {
		if code, _ := p.get(path); code != http.StatusNotFound {
			t.Errorf("%s: %d", path, code)
		}
	}
}
