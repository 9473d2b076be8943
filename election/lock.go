package election

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typedcoordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// NewLock is the lock of a Lease, which is created when it is won for the first
// time. labels are put on it while this replica holds it. events receives who
// became the holder; nil means nobody.
func NewLock(client typedcoordinationv1.LeasesGetter, namespace, name string, labels map[string]string, events resourcelock.EventRecorder) (resourcelock.Interface, error) {
	identity, err := identity()
	if err != nil {
		return nil, err
	}
	return &resourcelock.LeaseLock{
		LeaseMeta:  metav1.ObjectMeta{Namespace: namespace, Name: name},
		Client:     client,
		LockConfig: resourcelock.ResourceLockConfig{Identity: identity, EventRecorder: events},
		Labels:     labels,
	}, nil
}

// identity tells this replica from others: the name of its pod, from the environment
// variable POD_NAME, else the host name, which is the same as a rule. Pods in the
// network of their host share its name; without POD_NAME two of them on one host
// would take each other for themselves. A restarted container has the identity that
// it had before, and need not wait for the end of its own Lease.
func identity() (string, error) {
	if pod := os.Getenv("POD_NAME"); pod != "" {
		return Sanitize(pod), nil
	}
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("reading the host name, by which a replica is told from others: %w", err)
	}
	return Sanitize(host), nil
}

var unsafeCharacters = regexp.MustCompile("[^a-zA-Z0-9-]")

// Sanitize makes a name of a driver, or of a host, a part of the name of an
// object as the CSI sidecars do: what is no letter, digit or dash becomes a dash,
// and a name that ends in a dash gets an X.
func Sanitize(name string) string {
	name = unsafeCharacters.ReplaceAllString(name, "-")
	if strings.HasSuffix(name, "-") {
		name += "X"
	}
	return name
}

// serviceAccountNamespace is where a pod finds its namespace.
const serviceAccountNamespace = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// Namespace is where Leases are: configured where that is not empty, else that of
// the environment variable POD_NAMESPACE, else that of the pod, else "default".
func Namespace(configured string) string {
	if configured != "" {
		return configured
	}
	if env := os.Getenv("POD_NAMESPACE"); env != "" {
		return env
	}
	if data, err := os.ReadFile(serviceAccountNamespace); err == nil {
		if ns := strings.TrimSpace(string(data)); ns != "" {
			return ns
		}
	}
	return "default"
}

// Metrics are the collectors of all candidates of a process, under the names that
// client-go has for them.
type Metrics struct {
	status   *prometheus.GaugeVec
	slowpath *prometheus.CounterVec
}

// NewMetrics makes the collectors and registers them.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		status: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "leader_election_master_status", Help: "1 if this replica holds the Lease, else 0.",
		}, []string{"name"}),
		slowpath: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "leader_election_slowpath_total", Help: "Renewals of the Lease that had to read it first.",
		}, []string{"name"}),
	}
	reg.MustRegister(m.status, m.slowpath)
	return m
}

// observedLock is a lock whose use is measured.
type observedLock struct {
	resourcelock.Interface
	metrics *Metrics
	leading atomic.Bool
	since   atomic.Int64 // in nanoseconds; when it began to lead
}

// name is that of the Lease, without its namespace.
func (l *observedLock) name() string {
	describe := l.Describe()
	return describe[strings.LastIndexByte(describe, '/')+1:]
}

// lead marks the begin of a term; the function returned its end.
func (l *observedLock) lead() (end func()) {
	l.since.Store(time.Now().UnixNano())
	l.leading.Store(true)
	l.metrics.status.WithLabelValues(l.name()).Set(1)
	return func() {
		l.leading.Store(false)
		l.metrics.status.WithLabelValues(l.name()).Set(0)
	}
}

// Get is called by a holder only when renewing without it did not work. client-go tells
// by the bytes whether the Lease was renewed since the last look. Those of its own lock
// have times in seconds; a second renewal within one went unnoticed, and the Lease was
// taken up to a second before its end.
func (l *observedLock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	if l.leading.Load() {
		l.metrics.slowpath.WithLabelValues(l.name()).Inc()
	}
	record, raw, err := l.Interface.Get(ctx)
	if err == nil {
		raw = record.RenewTime.UTC().AppendFormat(raw, time.RFC3339Nano)
	}
	return record, raw, err
}
