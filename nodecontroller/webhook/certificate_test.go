// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"
)

// TestCertificateFiles loads files one after another, each of them three times: a pair that cannot be used never replaces a
// usable one, and each result is logged and counted once.
func TestCertificateFiles(t *testing.T) {
	f := &fixture{TB: t, reg: prometheus.NewRegistry()}
	f.certificate()
	first, second, expired := newPair(0), newPair(0), newPair(time.Minute)
	c := f.cfg.Certificate
	registerCertificate(c, f.reg)
	var logged []string
	ctx := klog.NewContext(t.Context(), funcr.New(func(_, line string) { logged = append(logged, line) }, funcr.Options{}))
	for _, step := range []struct {
		name       string
		pair       pair
		lacks      string // a file that is removed
		served     *pair
		problem    string // in the log
		ok, errors float64
	}{
		{"no files", pair{}, "..data", nil, "no such file", 0, 1},
		{"expired before the first one", expired, "", nil, "expired at", 0, 2},
		{"usable", first, "", &first, "", 1, 2},
		{"no PEM", pair{cert: []byte("x"), key: []byte("x")}, "", &first, "PEM", 1, 3},
		{"key of another one", pair{cert: first.cert, key: second.key}, "", &first, "does not match", 1, 4},
		{"usable again", first, "", &first, "", 2, 4},
		{"expired", expired, "", &first, "expired at", 2, 5},
		{"the next one", second, "", &second, "", 3, 5},
		{"no key", second, "..data/tls.key", &second, "tls.key: no such file", 3, 6},
	} {
		f.write(step.pair)
		if step.lacks != "" {
			f.must(os.Remove(filepath.Join(f.certs, step.lacks)))
		}
		logged = nil
		for range 3 {
			c.Load(ctx)
		}
		if len(logged) != 1 || !strings.Contains(logged[0], step.problem) || strings.Contains(logged[0], "failed") != (step.problem != "") {
			t.Errorf("%s: the log is %q", step.name, logged)
		}
		served, err := c.Get(nil)
		ready := c.Ready()
		switch {
		case step.served == nil && (err == nil || ready == nil || !strings.Contains(ready.Error(), step.problem)):
			t.Errorf("%s: served %v, ready %v", step.name, served, ready)
		case step.served != nil && (err != nil || ready != nil || !served.Leaf.Equal(step.served.leaf(t))):
			t.Errorf("%s: another pair is served, or none: %v, ready %v", step.name, err, ready)
		}
		const prefix = "storage_controller_webhook_cert_"
		ok, failed := f.metric(prefix+"reload_total", "result", "ok"), f.metric(prefix+"reload_total", "result", "error")
		if ok != step.ok || failed != step.errors {
			t.Errorf("%s: counted %v ok and %v errors, want %v and %v", step.name, ok, failed, step.ok, step.errors)
		}
		rejected, left := f.metric(prefix+"rejected"), f.metric(prefix+"expiry_seconds")
		if rejected != 0 != (step.problem != "") || left > 0 != (step.served != nil) {
			t.Errorf("%s: rejected %v, %v s left", step.name, rejected, left)
		}
	}
}

func (p pair) leaf(t *testing.T) *x509.Certificate {
	t.Helper()
	parsed, err := tls.X509KeyPair(p.cert, p.key)
	if err != nil {
		t.Fatal(err)
	}
	return parsed.Leaf
}

// TestCertificateIsReplaced replaces the files of a server that serves.
func TestCertificateIsReplaced(t *testing.T) {
	t.Parallel()
	f, stop := alone(t)
	defer stop()
	next := newPair(0)
	f.ca = next.ca
	if err := f.dial(); err == nil {
		t.Error("the next pair is served before the files have it")
	}
	f.write(next)
	f.eventually("the next pair is served", func(context.Context) error { return f.dial() })
}
