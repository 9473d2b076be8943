// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package servingcert

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
)

// Mode is the source of the serving certificate.
type Mode string

// The sources of the serving certificate.
const (
	Files      Mode = "files"       // tls.crt and tls.key in a directory
	Secret     Mode = "secret"      // the same in a Secret
	SelfSigned Mode = "self-signed" // the same, written by this program
)

// The keys of the pair that replicas load, in a Secret or as files.
const (
	certName = corev1.TLSCertKey
	keyName  = corev1.TLSPrivateKeyKey
)

// Config configures a [Manager]. Fields that the mode does not use may be empty.
type Config struct {
	Mode Mode
	Dir  string // for [Files]
	// Secret names the Secret of [Secret] and [SelfSigned], and Service the Service that the API
	// server calls, which only [SelfSigned] requires. Both are in Namespace.
	Secret    string
	Service   string
	Namespace string // of this process; may be unknown
	// WebhookConfig names the MutatingWebhookConfiguration in which [SelfSigned] publishes.
	WebhookConfig string
}

// Manager loads, renews and provides the serving certificate.
type Manager struct {
	cfg               Config
	client            kubernetes.Interface
	secret, service   types.NamespacedName
	hosts             []string // names of the Service
	reloads, renewals *prometheus.CounterVec
	poll, renewal     time.Duration // between two reads of a replica, and of the leader
	now               func() time.Time
	lifetime          time.Duration // of generated pairs; 0 means a year
	current           atomic.Pointer[tls.Certificate]

	renewing   sync.Mutex
	notRenewed string // logged problem of the last renewal
	written    bool   // this process has written the Secret
	announced  string // the certificate whose authority this process has published last

	mu       sync.Mutex
	outcome  string           // of the last read
	problem  error            // why the pair that was read last is not served
	rejected bool             // the pair that was read last exists and is not served
	warned   *tls.Certificate // whose expiry was logged
}

// expirySoon is the remaining lifetime below which a warning is logged.
const expirySoon = 7 * 24 * time.Hour

// New returns a Manager. [Manager.Run] loads the certificate.
func New(cfg Config, client kubernetes.Interface, registry prometheus.Registerer) (*Manager, error) {
	m := &Manager{
		cfg: cfg, client: client, poll: 5 * time.Second, renewal: 5 * time.Second, now: time.Now,
		problem: errors.New("it was not read yet"),
	}
	var err error
	if cfg.Mode != Files {
		if m.secret, err = nameIn(cfg.Namespace, cfg.Secret); err != nil {
			return nil, fmt.Errorf("--webhook-cert-secret: %w", err)
		}
	}
	if cfg.Mode == SelfSigned || cfg.Service != "" && cfg.Namespace != "" {
		if m.service, err = nameIn(cfg.Namespace, cfg.Service); err != nil {
			return nil, fmt.Errorf("--webhook-service: %w", err)
		}
		base := m.service.Name + "." + m.service.Namespace
		m.hosts = []string{m.service.Name, base, base + ".svc"}
	}
	byResult := func(name, help string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{"result"})
		for _, r := range []string{"ok", "error"} { // so that an alert sees the first increase
			c.WithLabelValues(r)
		}
		return c
	}
	m.reloads = byResult("storage_controller_webhook_cert_reload_total",
		"Serving certificates that were found, by result: ok, or error for one that was rejected.")
	m.renewals = byResult("storage_controller_webhook_cert_upkeep_total",
		"Writes to renew and publish a self-signed certificate (ok), and attempts that failed (error), by result.")
	registry.MustRegister(m.reloads, m.renewals, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "storage_controller_webhook_cert_expiry_seconds",
		Help: "Seconds until the serving certificate expires; negative after that, 0 without one.",
	}, func() float64 { return m.remaining().Seconds() }), prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "storage_controller_webhook_cert_rejected",
		Help: "1 if the serving certificate that was read last is rejected, else 0.",
	}, func() float64 {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.rejected {
			return 1
		}
		return 0
	}))
	return m, nil
}

// nameIn returns name in namespace. Both must be set.
func nameIn(namespace, name string) (types.NamespacedName, error) {
	switch {
	case name == "":
		return types.NamespacedName{}, errors.New("must be set")
	case namespace == "":
		return types.NamespacedName{}, fmt.Errorf("the namespace of %q is unknown. Set the environment variable POD_NAMESPACE "+
			"from metadata.namespace", name)
	}
	return types.NamespacedName{Namespace: namespace, Name: name}, nil
}

// GetCertificate implements the callback of [tls.Config]. It also returns an expired
// certificate, which clients with a late clock accept.
func (m *Manager) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	if pair := m.current.Load(); pair != nil {
		return pair, nil
	}
	return nil, errors.New("no serving certificate is loaded")
}

// Ready returns an error unless a valid certificate is loaded.
func (m *Manager) Ready() error {
	if pair := m.current.Load(); pair != nil {
		return validAt(pair, m.now())
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return fmt.Errorf("no serving certificate is loaded: %w", m.problem)
}

// Warning returns why API servers may reject the loaded certificate, or "". If the Service is not known, it may be any.
func (m *Manager) Warning() string {
	pair := m.current.Load()
	switch {
	case pair == nil:
	case m.hosts != nil && pair.Leaf.VerifyHostname(m.hosts[2]) != nil:
		return fmt.Sprintf("the serving certificate is for %q, not for %s. Add that name", pair.Leaf.DNSNames, m.hosts[2])
	case !slices.ContainsFunc(pair.Leaf.DNSNames, func(name string) bool { return strings.HasSuffix(name, ".svc") }):
		return fmt.Sprintf("the serving certificate is for %q, no name of a Service. Add SERVICE.NAMESPACE.svc", pair.Leaf.DNSNames)
	}
	return ""
}

// Run keeps the newest usable pair loaded until ctx ends. Every replica runs it. It polls, because the kubelet
// updates a mounted Secret by replacing a symbolic link, which a watch of the files misses.
func (m *Manager) Run(ctx context.Context) {
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithName("serving-certificate"))
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		if cert, key, err := m.read(ctx); ctx.Err() == nil {
			m.load(ctx, cert, key, err)
		}
		if m.cfg.Mode == SelfSigned && m.Ready() != nil {
			// The leader may be a process without webhooks, which a rollout replaces only when this replica is ready.
			m.renewLogged(ctx)
		}
	}, m.poll)
}

// read returns the pair from its source.
func (m *Manager) read(ctx context.Context) (cert, key []byte, err error) {
	if m.cfg.Mode == Files {
		return readFiles(m.cfg.Dir)
	}
	secret, err := m.client.CoreV1().Secrets(m.secret.Namespace).Get(ctx, m.secret.Name, metav1.GetOptions{})
	if err != nil {
		return nil, nil, fmt.Errorf("reading Secret %q: %w", m.secret, err)
	}
	cert, key = secret.Data[certName], secret.Data[keyName]
	if len(cert) == 0 && len(key) == 0 {
		err = fmt.Errorf("reading Secret %q: it has no %s and %s", m.secret, certName, keyName)
	}
	return cert, key, err
}

// readFiles reads both files. It fails if they are replaced meanwhile: an old certificate and a new key
// do not match.
func readFiles(dir string) (cert, key []byte, err error) {
	var content [3][]byte
	for i, name := range []string{certName, keyName, certName} {
		if content[i], err = os.ReadFile(filepath.Join(dir, name)); err != nil {
			return nil, nil, err
		}
	}
	if !bytes.Equal(content[0], content[2]) {
		return nil, nil, fmt.Errorf("%s was replaced while it was read", filepath.Join(dir, certName))
	}
	return content[0], content[1], nil
}

// load serves the pair of cert and key if it is usable; otherwise the pair before stays. missing is why there
// is none. A result is logged and counted once, however often it is the same.
func (m *Manager) load(ctx context.Context, cert, key []byte, missing error) {
	log := klog.FromContext(ctx).WithValues("mode", m.cfg.Mode)
	var pair tls.Certificate
	err := missing
	if missing == nil {
		if pair, err = tls.X509KeyPair(cert, key); err == nil {
			err = validAt(&pair, m.now())
		}
		if err == nil && m.cfg.Mode == SelfSigned { // it may be that of another Service
			err = pair.Leaf.VerifyHostname(m.hosts[2])
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if outcome := fmt.Sprintf("%x %x %v", sha256.Sum256(cert), sha256.Sum256(key), err); outcome != m.outcome {
		m.outcome, m.problem, m.rejected = outcome, err, missing == nil && err != nil
		switch {
		case missing != nil:
			log.Info("Waiting for a serving certificate", "cause", err.Error())
		case err != nil:
			m.reloads.WithLabelValues("error").Inc()
			log.Error(err, "Serving certificate rejected, the previous one stays")
		default:
			m.current.Store(&pair)
			m.reloads.WithLabelValues("ok").Inc()
			log.Info("Serving certificate loaded", "notAfter", pair.Leaf.NotAfter)
			if warning := m.Warning(); warning != "" {
				log.Info("Serving certificate does not name the Service", "cause", warning)
			}
		}
	}
	if served := m.current.Load(); served != m.warned && m.remaining() < expirySoon {
		m.warned = served
		log.Info("Serving certificate expires in less than 7 days. Renew it", "notAfter", served.Leaf.NotAfter)
	}
}

// remaining returns for how long the loaded certificate is valid.
func (m *Manager) remaining() time.Duration {
	if pair := m.current.Load(); pair != nil {
		return pair.Leaf.NotAfter.Sub(m.now())
	}
	return 0
}
