package servingcert

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
)

// Mode is the source of the serving certificate.
type Mode string

// The sources of the serving certificate.
const (
	Files      Mode = "files"       // tls.crt and tls.key in a directory
	Secret     Mode = "secret"      // the same in a Secret
	SelfSigned Mode = "self-signed" // the same, written by the leader
)

// Config configures a [Manager]. Fields that the mode does not use may be empty.
type Config struct {
	Mode Mode
	Dir  string // for [Files]; empty means the directory that controller-runtime uses
	// Secret names the Secret of [Secret] and [SelfSigned], and Service the Service that the API
	// server calls. Both are namespace/name, or a name in Namespace.
	Secret    string
	Service   string
	Namespace string // of this process; may be unknown
	// WebhookConfig names the MutatingWebhookConfiguration in which [SelfSigned] publishes.
	WebhookConfig string
}

// Manager loads, renews and provides the serving certificate.
type Manager struct {
	cfg      Config
	client   kubernetes.Interface
	secret   types.NamespacedName
	service  types.NamespacedName
	hosts    []string // names of the Service
	metrics  metrics
	pace     pace
	now      func() time.Time
	lifetime time.Duration // of generated pairs; 0 means a year
	current  atomic.Pointer[tls.Certificate]
	changed  chan struct{} // wakes the leader when the Secret changed

	mu      sync.Mutex
	content [sha256.Size]byte // of the pair that was found last
	problem error             // why that pair is not served
}

// pace holds the intervals between two looks at what no event reports.
type pace struct {
	files   time.Duration
	missing time.Duration // while there is no pair
	renew   time.Duration
	settle  time.Duration // until API servers trust a published authority
}

// New returns a Manager. [Manager.Run] loads the certificate.
func New(cfg Config, client kubernetes.Interface, registry prometheus.Registerer) (*Manager, error) {
	m := &Manager{
		cfg: cfg, client: client, changed: make(chan struct{}, 1), now: time.Now,
		pace: pace{files: 10 * time.Second, missing: time.Second, renew: 10 * time.Second, settle: 5 * time.Second},
	}
	if m.cfg.Dir == "" {
		m.cfg.Dir = filepath.Join(os.TempDir(), "k8s-webhook-server", "serving-certs")
	}
	var err error
	if cfg.Mode != Files {
		if m.secret, err = nameIn(cfg.Namespace, cfg.Secret); err != nil {
			return nil, fmt.Errorf("--webhook-cert-secret: %w", err)
		}
	}
	if cfg.Mode == SelfSigned {
		if m.service, err = nameIn(cfg.Namespace, cfg.Service); err != nil {
			return nil, fmt.Errorf("--webhook-service: %w", err)
		}
		base := m.service.Name + "." + m.service.Namespace
		m.hosts = []string{m.service.Name, base, base + ".svc"}
	}
	m.metrics = newMetrics(registry, m.remaining)
	return m, nil
}

// nameIn parses namespace/name, or a name in namespace.
func nameIn(namespace, text string) (types.NamespacedName, error) {
	name := text
	if before, after, both := strings.Cut(text, "/"); both {
		namespace, name = before, after
	}
	switch {
	case name == "" || strings.Contains(name, "/"):
		return types.NamespacedName{}, fmt.Errorf("must be namespace/name or a name, got %q", text)
	case namespace == "":
		return types.NamespacedName{}, fmt.Errorf(
			"%q has no namespace, and the namespace of this process is unknown. Write namespace/name, or set POD_NAMESPACE", text)
	}
	return types.NamespacedName{Namespace: namespace, Name: name}, nil
}

// Run keeps the newest usable pair loaded until ctx ends. Every replica runs it.
func (m *Manager) Run(ctx context.Context) {
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithName("serving-certificate"))
	if m.cfg.Mode == Files {
		m.followFiles(ctx)
	} else {
		m.followSecret(ctx)
	}
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
	if m.problem != nil {
		return fmt.Errorf("no serving certificate is loaded: %w", m.problem)
	}
	return errors.New("no serving certificate is loaded yet")
}

// load serves the pair of cert and key if it is usable; otherwise the pair before stays. A
// result is logged and counted once, however often the same pair is found.
func (m *Manager) load(ctx context.Context, source string, cert, key []byte) {
	pair, err := tls.X509KeyPair(cert, key)
	if err == nil {
		err = validAt(&pair, m.now())
	}
	if err == nil {
		m.current.Store(&pair)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	content := sha256.Sum256(append(append([]byte{}, cert...), key...))
	if content == m.content && (err == nil) == (m.problem == nil) {
		return
	}
	m.content, m.problem = content, err
	m.metrics.reloads.WithLabelValues(result(err)).Inc()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Serving certificate rejected, the previous one stays", "source", source)
		return
	}
	klog.FromContext(ctx).Info("Serving certificate loaded", "source", source, "notAfter", pair.Leaf.NotAfter)
}

// unavailable records why there is no pair to load. The pair before stays.
func (m *Manager) unavailable(ctx context.Context, why error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.problem != nil && m.problem.Error() == why.Error() {
		return
	}
	m.content, m.problem = [sha256.Size]byte{}, why
	klog.FromContext(ctx).Info("Waiting for a serving certificate", "cause", why.Error())
}

// remaining returns for how long the loaded certificate is valid.
func (m *Manager) remaining() time.Duration {
	if pair := m.current.Load(); pair != nil {
		return pair.Leaf.NotAfter.Sub(m.now())
	}
	return 0
}

// wait returns after d, or when ctx ends.
func wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
