// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package claimtest runs a controller of PersistentVolumeClaims and pods as a process does, against an
// API server and behind a proxy that records its requests.
package claimtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"

	"github.com/storage-controller/storage-controller/internal/claimloop"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Cluster creates objects in the namespace of a test. All names contain that of the namespace:
// tests run in parallel, and each controller watches the claims of the whole cluster.
type Cluster struct {
	*testing.T
	ControlPlane *kubetest.ControlPlane
	Client       kubernetes.Interface // of the test, as an administrator
	Namespace    string
	Driver       string
}

// Fixture runs one controller for a test.
type Fixture struct {
	Cluster
	User  *rest.Config // of the writes and live reads of the controller
	Watch *rest.Config // of its informers
	Stop  func()       // stops the process
	Lose  func()       // makes the process lose the Lease

	build   func(claimloop.Deps) Controller
	current Controller
	settled int

	mu sync.Mutex
	// hook may answer a request instead of the API server, or do something before it.
	hook     func(w http.ResponseWriter, r *http.Request) (answered bool)
	requests []Request
}

// Controller is the controller under test.
type Controller interface {
	Run(ctx context.Context) error
}

// Request is a request of the controller.
type Request struct{ Line, ContentType, Body string }

// New creates a namespace and marks t as parallel. [Fixture.Start] starts the controller.
func New(t *testing.T) *Fixture {
	t.Helper()
	t.Parallel()
	f := &Fixture{Cluster: Cluster{T: t, ControlPlane: kubetest.Get(t)}}
	f.Client, f.Namespace = f.ControlPlane.Client(), kubetest.Namespace(t, f.ControlPlane)
	f.User, f.Watch = f.ControlPlane.Config(), f.ControlPlane.Config()
	f.Driver = f.Namespace + ".example.com"
	return f
}

// Settings returns the settings of a controller with one worker.
func (f *Fixture) Settings() claimloop.Settings {
	return claimloop.Settings{
		Workers: 1, Timeout: 15 * time.Second, RetryIntervalStart: 50 * time.Millisecond, RetryIntervalMax: time.Second,
	}
}

// Start runs the controller that build returns; nil means that of the last start.
func (f *Fixture) Start(retained kube.RetainedFields, build func(claimloop.Deps) Controller) {
	f.Helper()
	if build != nil {
		f.build = build
	}
	registry := prometheus.NewRegistry()
	p := claimloop.Deps{Registry: registry, Queues: workloop.NewMetrics(registry)}
	var err error
	p.Client, err = kubernetes.NewForConfig(kubetest.Proxy(f.T, f.User, f.record))
	f.Must(err)
	watches, err := kubernetes.NewForConfig(f.Watch)
	f.Must(err)
	meta, err := metadata.NewForConfig(f.Watch)
	f.Must(err)
	p.Informers = kube.NewInformers(watches, meta, f.Driver)
	p.Informers.Retain(retained)
	broadcaster := record.NewBroadcaster()
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: f.Client.CoreV1().Events("")})
	p.Events = broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: f.Driver})
	f.current = f.build(p)
	watch, endWatch := context.WithCancel(context.WithoutCancel(f.Context()))
	p.Informers.Start(watch)
	f.Lead()
	f.Stop = sync.OnceFunc(func() {
		f.Lose()
		endWatch()
		p.Informers.Shutdown()
		broadcaster.Shutdown()
	})
	f.Cleanup(f.Stop)
}

// Lead runs the controller until [Fixture.Lose].
func (f *Fixture) Lead() {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(f.Context()))
	done := make(chan error, 1)
	go func() { done <- f.current.Run(ctx) }()
	f.Lose = sync.OnceFunc(func() {
		over := errors.New("the Lease was lost")
		cancel(over)
		if err := <-done; !errors.Is(err, over) {
			f.Errorf("the controller returned %v", err)
		}
	})
}

func (f *Fixture) record(w http.ResponseWriter, r *http.Request, pass http.Handler) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r.Body = io.NopCloser(strings.NewReader(string(body)))
	line := r.Method + " " + strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, "/api/v1/"), "namespaces/"+f.Namespace+"/")
	f.mu.Lock()
	if !strings.Contains(line, "/"+last) {
		f.requests = append(f.requests, Request{line, r.Header.Get("Content-Type"), string(body)})
	}
	hook := f.hook
	f.mu.Unlock()
	if hook == nil || !hook(w, r) {
		pass.ServeHTTP(w, r)
	}
}

// last is the prefix of the names of objects whose requests are not recorded.
const last = "last-"

// Settle creates, by make, an object with a new name that begins with last-. The controller has one
// worker, so that it has processed all earlier events when it has processed this object.
func (f *Fixture) Settle(make func(name string)) {
	f.Helper()
	f.settled++
	make(fmt.Sprint(last, f.settled))
}

// On calls hook before each request is passed on.
func (f *Fixture) On(hook func(w http.ResponseWriter, r *http.Request) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hook = hook
}

// Requests returns the requests of the controller so far. Their lines are METHOD path-in-the-namespace.
func (f *Fixture) Requests() []Request {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.requests)
}

// Requested fails the test unless the controller sent these requests so far, in any order.
func (f *Fixture) Requested(want ...string) {
	f.Helper()
	var got []string
	for _, r := range f.Requests() {
		got = append(got, r.Line)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		f.Errorf("the controller sent %q, want %q", got, want)
	}
}

// Must fails the test if err is not nil.
func (f *Cluster) Must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

// HasEvent waits for an event with a reason about an object, and returns its message.
func (f *Cluster) HasEvent(kind, name, reason string) (message string) {
	f.Helper()
	kubetest.Eventually(f.T, fmt.Sprintf("event %s about %s %s", reason, kind, name), func(ctx context.Context) error {
		list, err := f.Client.CoreV1().Events(f.Namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.InvolvedObject.Kind == kind && e.InvolvedObject.Name == name && e.Reason == reason {
				message = e.Message
				return nil
			}
		}
		return fmt.Errorf("there are only %d others", len(list.Items))
	})
	return message
}

// Counted waits until counter is at least want.
func (f *Fixture) Counted(counter prometheus.Counter, want int) {
	f.Helper()
	kubetest.Eventually(f.T, fmt.Sprintf("%v is %d", counter.Desc(), want), func(context.Context) error {
		if n := testutil.ToFloat64(counter); int(n) < want {
			return fmt.Errorf("it is %v", n)
		}
		return nil
	})
}

// Grant grants the user that is named like the namespace permissions in the namespace.
func (f *Cluster) Grant(name string, resources []string, verbs ...string) {
	f.Helper()
	rbac := f.Client.RbacV1()
	_, err := rbac.Roles(f.Namespace).Create(f.Context(), &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: resources, Verbs: verbs}},
	}, metav1.CreateOptions{})
	f.Must(err)
	_, err = rbac.RoleBindings(f.Namespace).Create(f.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: f.Namespace}},
	}, metav1.CreateOptions{})
	f.Must(err)
}
