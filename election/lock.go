// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	typedcoordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// NewLock returns a lock for a Lease, which is created when it is first acquired. The holder sets
// labels on it. events, if not nil, receives an event for each change of the holder.
func NewLock(
	client typedcoordinationv1.LeasesGetter, namespace, name string, labels map[string]string, events resourcelock.EventRecorder,
) (*resourcelock.LeaseLock, error) {
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

// identity returns the holder identity of this replica: the environment variable POD_NAME, else the
// host name, which is usually the name of the pod. Pods with hostNetwork share the host name; two of
// them on one host would take each other's Lease without POD_NAME. A restarted container keeps its
// identity, so that it need not wait until its Lease expires.
func identity() (string, error) {
	if pod := os.Getenv("POD_NAME"); pod != "" {
		return Sanitize(pod), nil
	}
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("reading the host name, the identity of this replica: %w. Set POD_NAME", err)
	}
	return Sanitize(host), nil
}

var unsafeCharacters = regexp.MustCompile("[^a-zA-Z0-9-]")

// Sanitize returns name as the CSI sidecars use it in object names: characters other than letters,
// digits and dashes become dashes, and X is appended to a trailing dash.
func Sanitize(name string) string {
	name = unsafeCharacters.ReplaceAllString(name, "-")
	if strings.HasSuffix(name, "-") {
		name += "X"
	}
	return name
}

// LeaseName returns the name of the Lease that a CSI sidecar uses, given its unsanitized name, so that
// only one of the two is active. It is lower-cased if the sidecar's name is invalid; the sidecar
// cannot run with leader election then.
func LeaseName(name string) string {
	name = Sanitize(name)
	if len(validation.IsDNS1123Subdomain(name)) > 0 {
		name = strings.ToLower(name)
	}
	return name
}

// serviceAccountNamespace is the file with the namespace of the pod.
const serviceAccountNamespace = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// Namespace returns the namespace of Leases: configured, else the environment variable
// POD_NAMESPACE, else the namespace of the pod, else "default".
func Namespace(configured string) string {
	if configured != "" {
		return configured
	}
	if own := OwnNamespace(); own != "" {
		return own
	}
	return "default"
}

// OwnNamespace returns the namespace of the process: POD_NAMESPACE, or the namespace of its
// ServiceAccount, or an empty text if it does not run in a pod.
func OwnNamespace() string {
	if env := os.Getenv("POD_NAMESPACE"); env != "" {
		return env
	}
	data, err := os.ReadFile(serviceAccountNamespace)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// Metrics holds the collectors of all candidates of a process, with the names of client-go.
type Metrics struct {
	status   *prometheus.GaugeVec
	slowpath *prometheus.CounterVec
}

// NewMetrics registers the collectors with reg.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		status: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "leader_election_master_status", Help: "1 if this replica holds the Lease, else 0.",
		}, []string{"name"}),
		slowpath: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "leader_election_slowpath_total", Help: "Lease renewals on the slow path (get before update).",
		}, []string{"name"}),
	}
	reg.MustRegister(m.status, m.slowpath)
	return m
}

// observedLock adds metrics to a lock, and a limit to terms.
type observedLock struct {
	resourcelock.Interface
	metrics  *Metrics
	duration time.Duration // of the Lease
	delay    func()        // is called before a term expires
	leading  atomic.Bool
	since    atomic.Int64 // start of the term, in Unix nanoseconds
	holder   atomic.Value // of the Lease as last read or written, a string

	mu     sync.Mutex
	tried  bool        // a write was sent in this term
	sent   Moment      // when the last successful write of this term was sent; zero: none
	taken  bool        // another replica has acquired the Lease during this term
	expiry *time.Timer // ends the term; nil outside of terms
}

// Create creates the Lease.
func (l *observedLock) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	return l.write(record, func() error { return l.Interface.Create(ctx, record) })
}

// Update renews the Lease.
func (l *observedLock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	return l.write(record, func() error { return l.Interface.Update(ctx, record) })
}

// begin begins a term, in which nothing was written yet.
func (l *observedLock) begin() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tried, l.taken, l.sent = false, false, Moment{}
}

// written reports whether a write was sent in this term, and whether one succeeded: after that, client-go calls
// OnStartedLeading.
func (l *observedLock) written() (tried, acquired bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.tried, !l.sent.IsZero()
}

// write calls send, and extends the term if it succeeds.
func (l *observedLock) write(record resourcelock.LeaderElectionRecord, send func() error) error {
	sent := Now()
	l.mu.Lock()
	l.tried = true
	l.mu.Unlock()
	if err := send(); err != nil {
		return err
	}
	l.holder.Store(record.HolderIdentity)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent = sent
	if l.expiry != nil {
		l.expiry.Reset(l.rest())
	}
	return nil
}

// held returns a function that returns lost from the end of the term by the clock.
func (l *observedLock) held(lost error) func() error {
	return func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.rest() <= 0 {
			return lost
		}
		return nil
	}
}

// rest returns the time until the end of the term. It must be called with the lock held. A standby waits for the duration of the
// Lease after it has observed a renewal, and it cannot observe one before the leader has sent it. A fifteenth of the duration is
// left for cancellations and for clocks of different speed.
func (l *observedLock) rest() time.Duration {
	if l.taken {
		return 0
	}
	return l.duration - l.duration/15 - l.sent.age()
}

// limit calls expired at the end of the term, unless stop is called before. client-go counts from the response to the
// last renewal and would keep a leader whose renewals are slow for longer than standbys wait.
func (l *observedLock) limit(expired func()) (stop func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.expiry = time.AfterFunc(l.rest(), func() {
		l.delay()
		expired()
	})
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.expiry.Stop()
		l.expiry = nil
	}
}

// name returns the name of the Lease without its namespace.
func (l *observedLock) name() string {
	describe := l.Describe()
	return describe[strings.LastIndexByte(describe, '/')+1:]
}

// lead records the start of a term. Call end at its end.
func (l *observedLock) lead() (end func()) {
	l.since.Store(time.Now().UnixNano())
	l.leading.Store(true)
	l.metrics.status.WithLabelValues(l.name()).Set(1)
	return func() {
		l.leading.Store(false)
		l.metrics.status.WithLabelValues(l.name()).Set(0)
	}
}

// Get returns the record and its raw bytes. client-go compares the bytes to detect a renewal. Its own lock encodes times
// in whole seconds: two renewals within one second look equal, and a standby would acquire the Lease up to 1 s early. Get
// therefore appends the time with nanoseconds. If this replica does not hold the Lease any more, Get ends the term.
func (l *observedLock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	if l.leading.Load() {
		l.metrics.slowpath.WithLabelValues(l.name()).Inc()
	}
	record, raw, err := l.Interface.Get(ctx)
	if err != nil {
		return record, raw, err
	}
	l.holder.Store(record.HolderIdentity)
	if record.HolderIdentity != l.Identity() {
		l.expire()
	}
	return record, record.RenewTime.UTC().AppendFormat(raw, time.RFC3339Nano), nil
}

// expire ends the term now, if there is one.
func (l *observedLock) expire() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.expiry != nil {
		l.taken = true
		l.expiry.Reset(0)
	}
}
