// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/client-go/util/cert"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// TestCertificateInFIPSMode runs the program with only the algorithms of FIPS 140-3, and a certificate whose files come after the start:
// until then a self-signed one answers the probes.
func TestCertificateInFIPSMode(t *testing.T) {
	t.Parallel()
	e := newEnv(t, csitest.Config{}, 0)
	dir := t.TempDir()
	certificate, key := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	cmd := e.command("all", "--http-endpoint=127.0.0.1:0", "--secure-metrics-server", "--tls-cert-file="+certificate,
		"--tls-private-key-file="+key, "--tls-min-version=VersionTLS13")
	cmd.Env = []string{"GODEBUG=fips140=only"}
	p := e.start(cmd)
	url := strings.Replace(p.address(), "http://127.0.0.1", "https://localhost", 1) + "/readyz?verbose"
	ready := func(client *http.Client, status int, text string) error {
		response, err := client.Get(url)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err != nil || response.StatusCode != status || !strings.Contains(string(body), text) {
			return fmt.Errorf("%s, %v, want %d and %q: %s", response.Status, err, status, text, body)
		}
		return nil
	}
	e.eventually("the missing certificate is reported", func(context.Context) error {
		return ready(selfSigned, http.StatusServiceUnavailable, "--tls-cert-file")
	})
	e.claim("data", e.class(false, nil))
	e.bound("data")
	chain, private, err := cert.GenerateSelfSignedCertKey("localhost", nil, nil)
	e.must(err)
	e.must(os.WriteFile(key, private, 0o600))
	e.must(os.WriteFile(certificate, chain, 0o600))
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(chain)
	client := func(most uint16) *http.Client {
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MaxVersion: most}, DisableKeepAlives: true}
		return &http.Client{Transport: transport}
	}
	e.eventually("the certificate is served", func(context.Context) error {
		return ready(client(tls.VersionTLS13), http.StatusOK, "[+]certificate ok")
	})
	if err := ready(client(tls.VersionTLS12), http.StatusOK, ""); err == nil || !strings.Contains(err.Error(), "protocol version") {
		t.Errorf("a client without TLS 1.3: %v", err)
	}
}
