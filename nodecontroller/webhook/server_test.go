package webhook

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net/http"
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

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// alone is a server without an API server, and the end of it.
func alone(t *testing.T, change func(*Config)) (s *Server, ca testCA, stop func()) {
	t.Helper()
	nobody := &rest.Config{Host: "127.0.0.1:1"}
	client, err := kubernetes.NewForConfig(nobody)
	if err != nil {
		t.Fatal(err)
	}
	meta, err := metadata.NewForConfig(nobody)
	if err != nil {
		t.Fatal(err)
	}
	informers := kube.NewInformers(client, meta, "d")
	cfg := testConfig("d")
	cfg.CertDir = t.TempDir()
	if change != nil {
		change(&cfg)
	}
	f := &fixture{TB: t, cfg: cfg, ca: makeCA(t)}
	f.writePair(f.ca.pair(t))
	s, err = New(cfg, Deps{Client: client, Claims: informers.Claims(), Classes: informers.Classes(), Registry: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Ready(); err == nil || !strings.Contains(err.Error(), "not started") {
		t.Errorf("before it serves: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx) }()
	f.eventually("a certificate is loaded", func(context.Context) error { return s.keeper.ready() })
	return s, f.ca, func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("it ended with %v", err)
		}
	}
}

func TestServeLeavesNothingBehind(t *testing.T) {
	before := goleak.IgnoreCurrent()
	s, ca, stop := alone(t, nil)
	if _, err := dial(s.Address(), "localhost", ca.cert); err != nil {
		t.Error(err)
	}
	stop()
	goleak.VerifyNone(t, before)
	if err := s.Ready(); err == nil || !strings.Contains(err.Error(), "stopping") {
		t.Errorf("after its end: %v", err)
	}
}

// TestServeAgain serves once more after serving has ended, as a role that is retried does.
func TestServeAgain(t *testing.T) {
	s, ca, stop := alone(t, nil)
	stop()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx) }()
	kubetest.Eventually(t, "the server answers", func(context.Context) error {
		_, err := dial(s.Address(), "localhost", ca.cert)
		return err
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Before the caches are filled, a class that is not there means nothing.
func TestNotSynced(t *testing.T) {
	s, ca, stop := alone(t, nil)
	defer stop()
	if err := s.Ready(); err == nil || !strings.Contains(err.Error(), "persistentvolumeclaims, storageclasses") {
		t.Errorf("%v", err)
	}
	f := &fixture{TB: t, s: s, ca: ca, ns: "n"}
	code, body := f.post("/pod/mutate", "application/json", reviewOf(t, "n", "pods", podOf("p", claimVolume("v", "c"))))
	if code != 500 || !strings.Contains(string(body), "storageclasses") {
		t.Errorf("%d %s", code, body)
	}
	if answer := f.ask("/pod/mutate", "pods", podOf("p")); answer.Patch != nil {
		t.Errorf("%v", answer)
	}
}

func TestProtocols(t *testing.T) {
	for name, c := range map[string]struct {
		off    bool
		offers []string
		want   string
	}{
		"HTTP/2 is taken": {false, []string{"h2", "http/1.1"}, "h2"}, "or HTTP/1.1": {false, []string{"http/1.1"}, "http/1.1"},
		"HTTP/2 is off": {true, []string{"h2", "http/1.1"}, "http/1.1"},
	} {
		t.Run(name, func(t *testing.T) {
			s, ca, stop := alone(t, func(c2 *Config) { c2.DisableHTTP2 = c.off })
			defer stop()
			pool := x509.NewCertPool()
			pool.AddCert(ca.cert)
			conn, err := tls.Dial("tcp", s.Address(), &tls.Config{RootCAs: pool, NextProtos: c.offers})
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if got := conn.ConnectionState().NegotiatedProtocol; got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
			if _, err := tls.Dial("tcp", s.Address(), &tls.Config{RootCAs: pool, MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10}); err == nil {
				t.Error("TLS 1.1 is taken")
			}
			plain, err := http.Post("http://"+s.Address()+"/pod/mutate", "application/json", strings.NewReader("{}"))
			if err != nil {
				t.Fatal(err)
			}
			defer plain.Body.Close()
			if body, _ := io.ReadAll(plain.Body); plain.StatusCode != 400 {
				t.Errorf("without TLS: %d %s", plain.StatusCode, body)
			}
		})
	}
}

func TestAddressInUse(t *testing.T) {
	s, _, stop := alone(t, nil)
	defer stop()
	cfg := testConfig("d")
	cfg.Address = s.Address()
	if _, err := New(cfg, Deps{Registry: prometheus.NewRegistry()}); err == nil || !strings.Contains(err.Error(), s.Address()) {
		t.Errorf("%v", err)
	}
}

func TestKeeper(t *testing.T) {
	now := time.Now()
	ca := makeCA(t)
	k := &keeper{now: func() time.Time { return now }}
	k.reloads = newMetrics(prometheus.NewRegistry(), k.left).reloads
	count := func(result string) float64 { return testutil.ToFloat64(k.reloads.WithLabelValues(result)) }
	early := ca.pair(t, func(c *x509.Certificate) { c.NotBefore = now.Add(10 * time.Minute) })
	for i := range 3 {
		if taken, err := k.offer(early.cert, early.key); taken || (err != nil) != (i == 0) {
			t.Errorf("a pair that is not valid yet: %v %v", taken, err)
		}
	}
	if err := k.ready(); err == nil || !strings.Contains(err.Error(), "not valid before") || count("error") != 1 {
		t.Errorf("%v, %v errors", err, count("error"))
	}
	now = now.Add(11 * time.Minute)
	if taken, err := k.offer(early.cert, early.key); !taken || err != nil {
		t.Errorf("and now it is: %v %v", taken, err)
	}
	for range 3 { // of the same there is nothing to say
		if taken, err := k.offer(early.cert, early.key); taken || err != nil {
			t.Errorf("%v %v", taken, err)
		}
	}
	if err := k.ready(); err != nil || count("ok") != 1 || k.left() != early.leaf.NotAfter.Sub(now) {
		t.Errorf("%v, %v taken, %v left", err, count("ok"), k.left())
	}
	now = now.Add(time.Hour)
	if err := k.ready(); err == nil || !strings.Contains(err.Error(), "expired") || k.left() >= 0 {
		t.Errorf("%v, %v left", err, k.left())
	}
	if pair, err := k.get(nil); err != nil || pair == nil {
		t.Errorf("an expired pair is served all the same, for clients whose clocks are behind: %v", err)
	}
}

func TestMetricNames(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := newMetrics(reg, func() time.Duration { return time.Minute })
	m.answered("/pod/mutate", 200, true, time.Millisecond)
	m.upkeep.WithLabelValues("ok").Inc()
	families, err := reg.Gather()
	if err != nil || len(families) != 7 {
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
