// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"go.uber.org/goleak"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// alone returns a fixture whose server has no API server, and a function that stops it.
func alone(t *testing.T, change ...func(*Config)) (f *fixture, stop func()) {
	t.Helper()
	unreachable := &rest.Config{Host: "127.0.0.1:1"}
	client, err := kubernetes.NewForConfig(unreachable)
	if err != nil {
		t.Fatal(err)
	}
	meta, err := metadata.NewForConfig(unreachable)
	if err != nil {
		t.Fatal(err)
	}
	informers := kube.NewInformers(client, meta, "d")
	f = &fixture{TB: t, cfg: testConfig("d"), ns: "n"}
	f.certificate()
	f.ca = servingPair().ca
	f.write(servingPair())
	for _, c := range change {
		c(&f.cfg)
	}
	f.s, err = New(f.cfg, Deps{
		Client: client, Claims: informers.Claims(), Classes: informers.Classes(), Registry: prometheus.NewRegistry(),
	})
	f.must(err)
	if err := f.s.Ready(); err == nil || !strings.Contains(err.Error(), "starting or stopping") {
		t.Errorf("before it serves: %v", err)
	}
	return f, f.serve()
}

// serve runs the server until stop.
func (f *fixture) serve() (stop func()) {
	ctx, cancel := context.WithCancel(f.Context())
	done := make(chan error, 1)
	go func() { done <- f.s.Serve(ctx) }()
	f.eventually("the server answers", func(context.Context) error { return f.dial() })
	return func() {
		cancel()
		if err := <-done; err != nil {
			f.Errorf("it ended with %v", err)
		}
	}
}

// TestServe checks that serving leaves no goroutine behind and can be repeated, as a role that is retried does.
func TestServe(t *testing.T) {
	before := goleak.IgnoreCurrent()
	f, stop := alone(t)
	stop()
	goleak.VerifyNone(t, before)
	if err := f.s.Ready(); err == nil || !strings.Contains(err.Error(), "starting or stopping") {
		t.Errorf("after its end: %v", err)
	}
	f.serve()()
}

// TestNotSynced expects an error while the caches are not synced: a class that is not cached means nothing.
func TestNotSynced(t *testing.T) {
	f, stop := alone(t)
	defer stop()
	if err := f.s.Ready(); err == nil || !strings.Contains(err.Error(), "persistentvolumeclaims, storageclasses") {
		t.Errorf("%v", err)
	}
	code, body := f.post("/pod/mutate", "application/json", reviewOf(t, "n", "pods", podOf("p", claimVolume("v", "c"))))
	if code != 500 || !strings.Contains(string(body), "storageclasses") {
		t.Errorf("%d %s", code, body)
	}
	if answer := f.ask("/pod/mutate", "pods", podOf("p")); answer.Patch != nil {
		t.Errorf("%v", answer)
	}
}

// TestMemoryIsBounded expects 503 while other requests are nearly as large as all of them may be, and a response afterwards.
func TestMemoryIsBounded(t *testing.T) {
	f, stop := alone(t)
	defer stop()
	const others = maxBodies - 10
	f.must(f.s.bodies.Acquire(t.Context(), others))
	review := reviewOf(t, "n", "pods", podOf("p"))
	if code, body := f.post("/pod/mutate", "application/json", review); code != 503 {
		t.Errorf("beside other requests: %d %s", code, body)
	}
	f.s.bodies.Release(others)
	if code, body := f.post("/pod/mutate", "application/json", review); code != 200 {
		t.Errorf("after them: %d %s", code, body)
	}
	if !f.s.bodies.TryAcquire(maxBodies) {
		t.Error("requests that have a response still count")
	}
}

func TestProtocols(t *testing.T) {
	f, stop := alone(t)
	defer stop()
	for _, protocols := range [][]string{{"h2", "http/1.1"}, {"http/1.1"}} {
		conn, err := tls.Dial("tcp", f.s.Address(), &tls.Config{RootCAs: f.roots(), ServerName: "localhost", NextProtos: protocols})
		f.must(err)
		if got := conn.ConnectionState().NegotiatedProtocol; got != protocols[0] {
			t.Errorf("%q, want %q", got, protocols[0])
		}
		conn.Close()
	}
	old := &tls.Config{RootCAs: f.roots(), ServerName: "localhost", MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10}
	if _, err := tls.Dial("tcp", f.s.Address(), old); err == nil {
		t.Error("TLS 1.1 is accepted")
	}
	if _, err := tls.Dial("tcp", f.s.Address(), &tls.Config{ServerName: "localhost"}); err == nil {
		t.Error("a client without the authority trusts the certificate")
	}
	f.eventually("it is counted", func(context.Context) error {
		if n := testutil.ToFloat64(f.s.metrics.untrusted); n != 1 {
			return fmt.Errorf("%v rejections", n)
		}
		return nil
	})
	plain, err := http.Post("http://"+f.s.Address()+"/pod/mutate", "application/json", strings.NewReader("{}"))
	f.must(err)
	defer plain.Body.Close()
	if body, _ := io.ReadAll(plain.Body); plain.StatusCode != 400 {
		t.Errorf("without TLS: %d %s", plain.StatusCode, body)
	}
}

// TestClientCertificates: with --webhook-client-ca only clients with a certificate of that authority get an answer.
func TestClientCertificates(t *testing.T) {
	authority, other := newAuthority(t), newAuthority(t)
	file := filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(file, authority.pem, 0o600); err != nil {
		t.Fatal(err)
	}
	f, stop := alone(t, func(c *Config) { c.ClientCA = file })
	defer stop()
	answered := func(certificates ...tls.Certificate) bool {
		web := f.web()
		web.Transport.(*http.Transport).TLSClientConfig.Certificates = certificates
		response, err := web.Post("https://"+f.s.Address()+"/pod/mutate", "application/json", strings.NewReader("{}"))
		if err == nil {
			response.Body.Close()
		}
		return err == nil
	}
	client := authority.sign(t, x509.ExtKeyUsageClientAuth)
	for name, refused := range map[string]bool{
		"none":                 answered(),
		"of another authority": answered(other.sign(t, x509.ExtKeyUsageClientAuth)),
		"for servers":          answered(authority.sign(t, x509.ExtKeyUsageServerAuth)),
	} {
		if refused {
			t.Errorf("a client with the certificate %q gets an answer", name)
		}
	}
	if !answered(client) {
		t.Error("the API server gets no answer")
	}
	f.must(os.WriteFile(file, other.pem, 0o600))
	if answered(client) || !answered(other.sign(t, x509.ExtKeyUsageClientAuth)) {
		t.Error("the file was replaced, and the former authority counts")
	}
	cfg := testConfig("d")
	cfg.ClientCA = file + ".none"
	if _, err := New(cfg, Deps{Registry: prometheus.NewRegistry()}); err == nil || !strings.Contains(err.Error(), "--webhook-client-ca: ") {
		t.Errorf("a file that does not exist: %v", err)
	}
}

// authority signs certificates of clients.
type authority struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	pem  []byte
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ca, err := cert.NewSelfSignedCACert(cert.Config{CommonName: "clients"}, key)
	if err != nil {
		t.Fatal(err)
	}
	encoded, err := cert.EncodeCertificates(ca)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{key, ca, encoded}
}

func (a *authority) sign(t *testing.T, usage x509.ExtKeyUsage) tls.Certificate {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(2), NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{usage},
	}, a.cert, a.key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: a.key}
}

func TestAddressInUse(t *testing.T) {
	f, stop := alone(t)
	defer stop()
	cfg := testConfig("d")
	cfg.Address = f.s.Address()
	if _, err := New(cfg, Deps{Registry: prometheus.NewRegistry()}); err == nil || !strings.Contains(err.Error(), f.s.Address()) {
		t.Errorf("%v", err)
	}
}

func TestMetricNames(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := newMetrics(reg)
	m.served("/pod/mutate", 200, true, time.Millisecond)
	families, err := reg.Gather()
	if err != nil || len(families) != 5 {
		t.Errorf("%d families, %v", len(families), err)
	}
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "storage_controller_webhook_") {
			t.Errorf("%s", f.GetName())
		}
	}
	if problems, err := promlint.NewWithMetricFamilies(families).Lint(); err != nil || len(problems) > 0 {
		t.Errorf("%v %v", problems, err)
	}
}
