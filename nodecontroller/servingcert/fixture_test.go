// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package servingcert

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

// fixture is one replica: a Manager, and a server with its certificate that allows everything.
type fixture struct {
	testing.TB
	cp      *kubetest.ControlPlane
	client  kubernetes.Interface // of the test
	ns      string
	cfg     Config
	api     *rest.Config   // of the manager; nil means that of the test
	hook    func(*Manager) // before it runs
	reg     *prometheus.Registry
	m       *Manager
	address string
}

func setup(t testing.TB, change func(*fixture)) *fixture {
	t.Helper()
	f := &fixture{TB: t, cp: kubetest.Get(t, kubetest.Real())}
	f.client, f.ns = f.cp.Client(), kubetest.Namespace(t, f.cp)
	f.cfg = Config{
		Mode: SelfSigned, Secret: "certs", Service: "hook", WebhookConfig: f.ns, Namespace: f.ns,
		Dir: t.TempDir(),
	}
	if change != nil {
		change(f)
	}
	f.start()
	return f
}

func (f *fixture) must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

// manager returns another manager with the configuration of f, which does not run.
func (f *fixture) manager(api *rest.Config) *Manager {
	f.Helper()
	if api == nil {
		api = f.cp.Config()
	}
	client, err := kubernetes.NewForConfig(api)
	f.must(err)
	f.reg = prometheus.NewRegistry()
	m, err := New(f.cfg, client, f.reg)
	f.must(err)
	m.poll, m.renewal = 20*time.Millisecond, time.Second
	return m
}

// start runs a replica until the end of the test.
func (f *fixture) start() {
	f.Helper()
	f.m = f.manager(f.api)
	if f.hook != nil {
		f.hook(f.m)
	}
	f.background(f.m.Run)
	server := httptest.NewUnstartedServer(http.HandlerFunc(allow))
	server.TLS = &tls.Config{GetCertificate: f.m.GetCertificate}
	server.Config.ErrorLog = log.New(os.Stderr, f.ns+" ", 0)
	listener := tls.NewListener(server.Listener, server.TLS) // httptest would add a certificate of its own
	go func() { _ = server.Config.Serve(listener) }()
	f.address = server.Listener.Addr().String()
	f.Cleanup(func() { _ = server.Config.Close() })
}

// background runs work until the end of the test, or until stop.
func (f *fixture) background(work func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(f.Context()))
	done := make(chan struct{})
	go func() { defer close(done); work(ctx) }()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	f.Cleanup(stop)
	return stop
}

// lead makes the replica leader until the end of the test, or until stop.
func (f *fixture) lead() (stop func()) {
	m := f.m
	return f.background(func(ctx context.Context) { _ = m.Lead(ctx) }) // it returns the end of ctx
}

// allow answers an AdmissionReview.
func allow(w http.ResponseWriter, r *http.Request) {
	review := admissionv1.AdmissionReview{}
	if json.NewDecoder(r.Body).Decode(&review) != nil || review.Request == nil {
		http.Error(w, "no review", http.StatusBadRequest)
		return
	}
	review.Response = &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true}
	_ = json.NewEncoder(w).Encode(review) // fails if the client closed the connection
}

func (f *fixture) eventually(what string, check func(context.Context) error) {
	f.Helper()
	kubetest.Eventually(f, what, check)
}

func (f *fixture) ready() {
	f.Helper()
	f.eventually("it is ready", func(context.Context) error { return f.m.Ready() })
}

// counts waits until the counter of result has reached n.
func (f *fixture) counts(name, result string, n float64) {
	f.Helper()
	f.eventually(fmt.Sprint(n, " of ", name), func(context.Context) error {
		if have := f.metric(name, result); have < n {
			return fmt.Errorf("there are %v", have)
		}
		return nil
	})
}

// metric returns the counter of result, or the gauge if result is "".
func (f *fixture) metric(name, result string) float64 {
	f.Helper()
	families, err := f.reg.Gather()
	f.must(err)
	for _, family := range families {
		for _, m := range family.Metric {
			if family.GetName() == "storage_controller_webhook_cert_"+name && (result == "" || m.Label[0].GetValue() == result) {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	f.Fatalf("no metric %s %s", name, result)
	return 0
}

// dial returns the certificate that is served, verified as the API server does.
func (f *fixture) dial(host string, bundle []byte) (*x509.Certificate, error) {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(bundle)
	conn, err := tls.Dial("tcp", f.address, &tls.Config{RootCAs: pool, ServerName: host})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return conn.ConnectionState().PeerCertificates[0], nil
}

// serves waits until p is served.
func (f *fixture) serves(what string, p *pair) {
	f.Helper()
	f.eventually(what, func(context.Context) error {
		got, err := f.dial("hook", p.ca)
		if err == nil && !got.Equal(p.Leaf) {
			err = errors.New("another certificate is served")
		}
		return err
	})
}

// pair is a serving certificate with its source.
type pair struct {
	*tls.Certificate
	cert, key []byte
	ca        []byte // bundle with its authority
}

// parsed returns the pair of cert and key, nil if it is unusable.
func parsed(certs, key []byte) *pair {
	p := parsePair(certs, key)
	if p == nil {
		return nil
	}
	bundle, _, err := bundleWith(nil, time.Now(), p)
	if err != nil {
		panic(err) // the authority was parsed
	}
	return &pair{p, certs, key, bundle}
}

// newPair generates a pair for hosts that is valid for so long from an hour ago.
func newPair(t testing.TB, lifetime time.Duration, hosts ...string) *pair {
	t.Helper()
	certs, key, err := generate(hosts, lifetime)
	if err != nil {
		t.Fatal(err)
	}
	return parsed(certs, key)
}

// pair generates a pair of the Service that is valid for so long from an hour ago.
func (f *fixture) pair(lifetime time.Duration) *pair {
	f.Helper()
	base := "hook." + f.ns
	return newPair(f, lifetime, "hook", base, base+".svc", base+".svc.cluster.local")
}

// publishFiles replaces the files as the kubelet does: a directory per version, behind a link that is replaced.
func (f *fixture) publishFiles(version string, cert, key []byte) {
	f.Helper()
	dir := filepath.Join(f.cfg.Dir, version)
	f.must(os.MkdirAll(dir, 0o700))
	f.must(os.WriteFile(filepath.Join(dir, certName), cert, 0o600))
	f.must(os.WriteFile(filepath.Join(dir, keyName), key, 0o600))
	f.must(os.Symlink(version, filepath.Join(f.cfg.Dir, "..new")))
	f.must(os.Rename(filepath.Join(f.cfg.Dir, "..new"), filepath.Join(f.cfg.Dir, "..data")))
	for _, name := range []string{certName, keyName} {
		_ = os.Symlink(filepath.Join("..data", name), filepath.Join(f.cfg.Dir, name)) // fails if it is there
	}
}

// createSecret creates the Secret with p, as a leader does.
func (f *fixture) createSecret(p *pair) {
	f.Helper()
	_, err := f.client.CoreV1().Secrets(f.ns).Create(f.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "certs", Annotations: map[string]string{annService: f.ns + "/hook"}},
		Data:       map[string][]byte{certName: p.cert, keyName: p.key},
	}, metav1.CreateOptions{})
	f.must(err)
}

func (f *fixture) secret() *corev1.Secret {
	f.Helper()
	secret, err := f.client.CoreV1().Secrets(f.ns).Get(f.Context(), "certs", metav1.GetOptions{})
	f.must(err)
	return secret
}

// stored returns the pair in the Secret, nil if it is unusable.
func (f *fixture) stored() *pair {
	f.Helper()
	data := f.secret().Data
	return parsed(data[certName], data[keyName])
}

func (f *fixture) service() *admissionregistrationv1.ServiceReference {
	return &admissionregistrationv1.ServiceReference{Namespace: f.ns, Name: "hook", Path: ptr.To("/")}
}

// configure creates a configuration with one webhook for each of clients. Without any, it has the own one.
func (f *fixture) configure(clients ...admissionregistrationv1.WebhookClientConfig) {
	f.Helper()
	if clients == nil {
		clients = []admissionregistrationv1.WebhookClientConfig{{Service: f.service()}}
	}
	config := &admissionregistrationv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: f.ns}}
	for i, c := range clients {
		config.Webhooks = append(config.Webhooks, admissionregistrationv1.MutatingWebhook{
			Name: fmt.Sprintf("hook-%d.example.com", i), ClientConfig: c, AdmissionReviewVersions: []string{"v1"},
			SideEffects:       ptr.To(admissionregistrationv1.SideEffectClassNone),
			NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: f.ns}},
			Rules: []admissionregistrationv1.RuleWithOperations{{
				Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Create},
				Rule:       admissionregistrationv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}},
			}},
		})
	}
	configs := f.client.AdmissionregistrationV1().MutatingWebhookConfigurations()
	_, err := configs.Create(f.Context(), config, metav1.CreateOptions{})
	f.must(err)
	// the control plane ends soon
	f.Cleanup(func() { _ = configs.Delete(context.WithoutCancel(f.Context()), f.ns, metav1.DeleteOptions{}) })
}

// bundles returns the CA bundle of each webhook.
func (f *fixture) bundles() (all [][]byte) {
	f.Helper()
	config, err := f.client.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(f.Context(), f.ns, metav1.GetOptions{})
	f.must(err)
	for _, w := range config.Webhooks {
		all = append(all, w.ClientConfig.CABundle)
	}
	return all
}

// trusts returns an error unless API servers trust p.
func (f *fixture) trusts(p *pair) error {
	f.Helper()
	if p == nil {
		return errors.New("there is no pair")
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(f.bundles()[0])
	_, err := p.Leaf.Verify(x509.VerifyOptions{Roots: pool, DNSName: "hook." + f.ns + ".svc"})
	return err
}

// published waits until the pair in the Secret is served, trusted, and another one than not.
func (f *fixture) published(what string, not *pair) (p *pair) {
	f.Helper()
	f.eventually(what, func(context.Context) error {
		secret, err := f.client.CoreV1().Secrets(f.ns).Get(f.Context(), "certs", metav1.GetOptions{})
		if err != nil {
			return err
		}
		p = parsed(secret.Data[certName], secret.Data[keyName])
		if p == nil || not != nil && p.Leaf.Equal(not.Leaf) {
			return errors.New("there is no new pair")
		}
		for _, host := range f.m.hosts {
			if got, err := f.dial(host, f.bundles()[0]); err != nil || !got.Equal(p.Leaf) {
				return fmt.Errorf("another certificate is served, or it is not trusted: %w", err)
			}
		}
		return f.m.Ready()
	})
	return p
}

// admitted returns an error unless the API server creates a pod through the replica.
func (f *fixture) admitted(ctx context.Context) error {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "p-"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "a", Image: "a"}}},
	}
	_, err := f.client.CoreV1().Pods(f.ns).Create(ctx, pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	return err
}

// reachable creates the Service, under whose name the API server reaches the replica.
func (f *fixture) reachable() *admissionregistrationv1.ServiceReference {
	f.Helper()
	_, err := f.client.CoreV1().Services(f.ns).Create(f.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "hook"},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "localhost"},
	}, metav1.CreateOptions{})
	f.must(err)
	tcp, err := net.ResolveTCPAddr("tcp", f.address)
	f.must(err)
	service := f.service()
	service.Port = ptr.To(int32(tcp.Port))
	return service
}

// isSecret reports whether r writes the Secret.
func isSecretWrite(r *http.Request) bool {
	return (r.Method == http.MethodPost || r.Method == http.MethodPut) && strings.Contains(r.URL.Path, "/secrets")
}
