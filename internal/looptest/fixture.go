// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package looptest runs one loop of the program (provisioner, attacher, capacity) as a
// process does, against an API server and a scripted CSI plugin. [New] returns the
// fixture of a test, and [Conformance] checks the behaviour that all loops share.
package looptest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Fixture holds a namespace, a CSI driver and one loop for a test. Names of cluster-scoped
// objects and of the driver begin with the namespace, so that tests run in parallel.
type Fixture struct {
	*testing.T
	ControlPlane *kubetest.ControlPlane
	Client       kubernetes.Interface // of the test, as an administrator
	Plugin       *csitest.Plugin
	Namespace    string
	Driver       string // name that the plugin reports
	// API is the client of the loop; nil means Client.
	API kubernetes.Interface
	// Watch is the connection of the loop's informers; nil means that of the control plane.
	Watch *rest.Config
	// NodeExpansion is [csiclient.Config.NodeExpansion].
	NodeExpansion bool
	// FirstLimit is [csiclient.Config.FirstLimit].
	FirstLimit int
	// Requests is the connection of the loop's requests; nil means that of the control plane.
	Requests *rest.Config
	// Registry has the metrics of the loop that was started last.
	Registry *prometheus.Registry
	// Stop ends the loop with cause and returns the error of its Run. It may be called again.
	Stop  func(cause error) error
	lease *lease
	csi   *csiclient.Client
}

// Process is what the program hands to the loop at a start.
type Process struct {
	Driver    csiclient.Driver
	Client    kubernetes.Interface
	Metadata  metadata.Interface
	Informers *kube.Informers
	// Requests and Watches are the connections of the clients, for clients of custom resources.
	Requests, Watches *rest.Config
	CSI               *csiclient.Client
	Registry          *prometheus.Registry
	Queues            *workloop.Metrics
}

// Loop is a controller of this program.
type Loop interface {
	Run(ctx context.Context) error
}

// New creates a namespace and a driver; an empty plugin.Name is derived from the namespace.
// It marks t as parallel. [Fixture.Start] starts the loop.
func New(t *testing.T, plugin csitest.Config) *Fixture {
	t.Helper()
	t.Parallel()
	return newSerial(t, plugin)
}

func newSerial(t *testing.T, plugin csitest.Config) *Fixture {
	t.Helper()
	f := &Fixture{T: t, ControlPlane: kubetest.Get(t)}
	f.Client, f.Namespace = f.ControlPlane.Client(), kubetest.Namespace(t, f.ControlPlane)
	if plugin.Name == "" {
		plugin.Name = f.Namespace + ".example.com"
	}
	f.Driver = plugin.Name
	f.Plugin = csitest.Run(t, plugin)
	return f
}

// Start runs the loop that build returns until [Fixture.Stop] or the end of the test.
func (f *Fixture) Start(build func(Process) (Loop, error)) {
	f.Helper()
	p := Process{Client: f.API, Registry: prometheus.NewRegistry(), Requests: f.Requests}
	f.Registry, p.Queues = p.Registry, workloop.NewMetrics(p.Registry)
	if p.Client == nil {
		p.Client = f.Client
	}
	cfg := csiclient.DefaultConfig()
	cfg.Address, cfg.NodeExpansion, cfg.AdaptiveConcurrency = f.Plugin.Address(), f.NodeExpansion, true
	var err error
	cfg.FirstLimit = f.FirstLimit
	p.CSI, err = csiclient.New(cfg, p.Registry)
	f.Must(err)
	f.csi = p.CSI
	p.Driver, err = p.CSI.Connect(f.Context())
	f.Must(err)
	watch, config := f.Client, f.ControlPlane.Config()
	if f.Watch != nil {
		config = f.Watch
		watch, err = kubernetes.NewForConfig(config)
		f.Must(err)
	}
	p.Watches = config
	if p.Requests == nil {
		p.Requests = f.ControlPlane.Config()
	}
	p.Metadata, err = metadata.NewForConfig(config)
	f.Must(err)
	p.Informers = kube.NewInformers(watch, p.Metadata, p.Driver.Name)
	loop, err := build(p)
	f.Must(err)
	f.lease = &lease{}
	run := func(ctx context.Context) error { return loop.Run(p.CSI.Limited(f.lease.term(ctx))) }
	f.Stop = kubetest.RunTerm(f, p.Informers, run, func() { p.CSI.Close() })
}

// Crash ends the loop without a grace period.
func (f *Fixture) Crash() { _ = f.Stop(errors.New("crash")) }

// In returns a copy of f for the subtest t.
func (f *Fixture) In(t *testing.T) *Fixture {
	inner := *f
	inner.T = t
	return &inner
}

// Must fails the test if err is not nil.
func (f *Fixture) Must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

// Unique returns the name of a cluster-scoped object for this test.
func (f *Fixture) Unique(s string) string { return f.Namespace + "-" + s }

// Waits waits until n calls of method wait for others.
func (f *Fixture) Waits(method string, n int) {
	f.Helper()
	kubetest.Eventually(f.T, "calls of "+method+" wait", func(context.Context) error {
		limits := f.csi.Status().Limits
		for _, l := range limits {
			if l.Method == method && l.Waiting == n {
				return nil
			}
		}
		return fmt.Errorf("the limits are %+v", limits)
	})
}

// Calls fails the test unless method was called n times so far.
func (f *Fixture) Calls(method string, n int) {
	f.Helper()
	if got := f.Plugin.Count(method); got != n {
		f.Errorf("%s was called %d times, want %d", method, got, n)
	}
}

// Wait returns when n calls of method have begun.
func (f *Fixture) Wait(method string, n int) {
	f.Helper()
	ctx, cancel := context.WithTimeout(f.Context(), time.Minute)
	defer cancel()
	f.Must(f.Plugin.Wait(ctx, method, n))
}
