// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"context"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Option adds components to etcd and the API server.
type Option func(*Config)

// WithControllerManager runs the kube-controller-manager.
func WithControllerManager() Option { return func(c *Config) { c.ControllerManager = true } }

// WithScheduler runs the kube-scheduler.
func WithScheduler() Option { return func(c *Config) { c.Scheduler = true } }

// WithAudit writes an audit log.
func WithAudit() Option { return func(c *Config) { c.Audit = true } }

// WithSnapshotController installs the CRDs of snapshots and runs the snapshot-controller. Its log is
// snapshot-controller.log in [ControlPlane.Dir].
func WithSnapshotController() Option { return func(c *Config) { c.SnapshotController = true } }

// Real asks for a real API server: the test needs etcd, RBAC, admission webhooks, server-side apply, CRDs that do not exist, or
// an API server that is stopped.
func Real() Option { return func(*Config) {} }

// NeedReal skips t unless the control plane of the tests is real, which KUBETEST=real selects.
func NeedReal(t testing.TB) {
	t.Helper()
	if !isReal() {
		t.Skip("needs a real control plane: set KUBETEST=real, or run make test-all")
	}
}

func isReal() bool { return os.Getenv("KUBETEST") == "real" }

var shared struct {
	sync.Mutex
	controlPlane *ControlPlane
	err          error
	config       Config
}

// Get returns the control plane of this test binary. With KUBETEST=real it is a real one: the first call starts it with its
// options, and a later call must not add options. Otherwise it is an API server in memory, and tests with options are skipped.
// With -short, all are skipped.
func Get(t testing.TB, opts ...Option) *ControlPlane {
	t.Helper()
	if testing.Short() {
		t.Skip("needs an API server, which -short excludes")
	}
	if len(opts) > 0 {
		NeedReal(t)
	}
	shared.Lock()
	defer shared.Unlock()
	var cfg Config
	for _, o := range opts {
		o(&cfg)
	}
	if shared.controlPlane == nil && shared.err == nil {
		shared.config = cfg
		cfg.Progress = firstBuild{}
		start := startInMemory
		if isReal() {
			start = Start
		}
		shared.controlPlane, shared.err = start(t.Context(), cfg)
	}
	if shared.err != nil {
		t.Fatalf("starting the control plane: %v", shared.err)
	}
	t.Cleanup(func() {
		if t.Failed() && isReal() {
			t.Log(shared.controlPlane.crashes())
		}
	})
	had := shared.config
	if cfg.ControllerManager && !had.ControllerManager || cfg.Scheduler && !had.Scheduler || cfg.Audit && !had.Audit ||
		cfg.SnapshotController && !had.SnapshotController {
		t.Fatal("kubetest: an earlier test of this binary started the control plane with less than this one asks for")
	}
	return shared.controlPlane
}

// crashes returns what the control plane has printed about components that crashed.
func (c *ControlPlane) crashes() string {
	var lines []string
	for line := range strings.Lines(c.output.String()) {
		if strings.Contains(line, "exited unexpectedly") {
			lines = append(lines, line)
		}
	}
	return fmt.Sprintf("crashes of the control plane: %d\n%s", len(lines), strings.Join(lines, ""))
}

// firstBuild forwards the messages about the compilation, which takes minutes, and drops the others.
type firstBuild struct{}

func (firstBuild) Write(p []byte) (int, error) {
	if strings.Contains(string(p), "ompil") {
		return os.Stderr.Write(p)
	}
	return len(p), nil
}

// Parallel lets at least n tests run at the same time, three times as many with an API server in memory, unless -parallel is given.
// It is for TestMain of tests that wait more than they compute.
func Parallel(n int) {
	if !isReal() {
		n *= 3
	}
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if given {
		return
	}
	if err := flag.Set("test.parallel", strconv.Itoa(max(n, runtime.GOMAXPROCS(0)))); err != nil {
		panic(err) // not a test binary
	}
}

// failures has a line for each wait of [Eventually] that failed.
var failures struct {
	sync.Mutex
	lines []string
}

// Main runs the tests, and stops the control plane after them. It repeats the failures of [Eventually] below the logs of later tests.
func Main(m *testing.M) {
	m.Run() // and its result is the exit status of the process, when TestMain returns
	failures.Lock()
	defer failures.Unlock()
	for _, line := range failures.lines {
		fmt.Fprintln(os.Stderr, line)
	}
	shared.Lock()
	defer shared.Unlock()
	if shared.controlPlane != nil {
		shared.controlPlane.Stop()
	}
}

// Namespace creates a namespace for t.
func Namespace(t testing.TB, c *ControlPlane) string {
	t.Helper()
	ns, err := c.Client().CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("creating a namespace: %v", err)
	}
	return ns.Name
}

// Eventually waits until check returns nil. After 90 s, it fails t with the last error.
func Eventually(t testing.TB, what string, check func(ctx context.Context) error) {
	t.Helper()
	if err := Await(t.Context(), check); err != nil {
		message := fmt.Sprintf("waiting until %s: %v", what, err)
		failures.Lock()
		failures.lines = append(failures.lines, t.Name()+" failed: "+message)
		failures.Unlock()
		t.Fatal(message)
	}
}

// checkCap bounds one check, so that a request without a response is repeated.
const checkCap = waitCap / 3

// Await waits until check returns nil. After 90 s, it returns the last error. The context of check ends after 30 s.
func Await(ctx context.Context, check func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, waitCap)
	defer cancel()
	begin := time.Now()
	var err error
	for {
		one, cancel := context.WithTimeout(ctx, checkCap)
		last := check(one)
		cancel()
		if last == nil {
			return nil
		}
		if err == nil || ctx.Err() == nil { // that the time is over tells less than what was found before
			err = last
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("gave up: %w", err)
		case <-time.After(PollInterval(time.Since(begin))):
		}
	}
}

// PollInterval returns the time until the next check of a wait that has lasted for waited. Tests of loops wait for
// states that the next retry replaces, so it is short. The tests of processes replace it in TestMain.
var PollInterval = func(time.Duration) time.Duration { return 20 * time.Millisecond }
