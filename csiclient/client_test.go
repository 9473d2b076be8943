// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csiclient

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/wrapperspb"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"))
}

const limit = time.Minute // of every wait: generous, since machines are busy

func newClient(t *testing.T, p *csitest.Plugin, change func(*Config)) (*Client, *prometheus.Registry) {
	t.Helper()
	cfg := DefaultConfig()
	cfg.Address = p.Address()
	if change != nil {
		change(&cfg)
	}
	reg := prometheus.NewPedanticRegistry()
	c, err := New(cfg, reg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c, reg
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

func connect(t *testing.T, c *Client) Driver {
	t.Helper()
	d, err := c.Connect(within(t))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestConfigValidate(t *testing.T) {
	tests := map[string]struct {
		change func(*Config)
		want   string
	}{
		"defaults are fine":        {func(*Config) {}, ""},
		"a URL of a socket":        {func(c *Config) { c.Address = "unix:///x" }, ""},
		"a short URL of a socket":  {func(c *Config) { c.Address = "unix:/x" }, ""},
		"another network":          {func(c *Config) { c.Address = "tcp://1.2.3.4:5" }, "--csi-address"},
		"a URL without a path":     {func(c *Config) { c.Address = "unix:x" }, "--csi-address"},
		"a relative path":          {func(c *Config) { c.Address = "x" }, "--csi-address"},
		"no address":               {func(c *Config) { c.Address = "" }, "--csi-address"},
		"no timeout":               {func(c *Config) { c.Timeout = 0 }, "--timeout"},
		"everything that is wrong": {func(c *Config) { c.Timeout, c.Address = -1, "" }, "--timeout"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			cfg := DefaultConfig()
			tt.change(&cfg)
			err := cfg.Validate()
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestConnectAsksOnceAndInOrder(t *testing.T) {
	p := csitest.Run(t, csitest.Config{Name: "d", Segments: []map[string]string{{"zone": "a"}}})
	p.Next("Probe",
		csitest.Alter(func(r *csi.ProbeResponse) { r.Ready = wrapperspb.Bool(false) }),
		csitest.Alter(func(r *csi.ProbeResponse) { r.Ready = nil }), // missing means ready
	)
	c, _ := newClient(t, p, nil)
	if c.CheckReady() == nil {
		t.Error("ready before Connect")
	}
	d := connect(t, c)
	want := Driver{Name: "d", VendorVersion: "1.0",
		Plugin:     PluginCapabilities{ControllerService: true, VolumeAccessibilityConstraints: true},
		Controller: ControllerCapabilities{CreateDeleteVolume: true, PublishUnpublishVolume: true}}
	if d != want {
		t.Errorf("got %+v, want %+v", d, want)
	}
	var methods []string
	calls := p.Calls("Probe", "GetPluginInfo", "GetPluginCapabilities", "ControllerGetCapabilities")
	for _, call := range calls {
		methods = append(methods, call.Method)
	}
	if got := strings.Join(methods, " "); got != "Probe Probe GetPluginInfo GetPluginCapabilities ControllerGetCapabilities" {
		t.Error(got)
	}
	if gap := calls[1].Began.Sub(calls[0].Began); gap < 900*time.Millisecond {
		t.Errorf("probed again after %v", gap)
	}
	if accepted, open := p.Connections(); accepted != 1 || open != 1 {
		t.Errorf("%d connections accepted, %d open; want one", accepted, open)
	}
	if err := c.CheckReady(); err != nil {
		t.Error(err)
	}
}

func TestProbeThatHangsIsRepeated(t *testing.T) {
	p := csitest.Run(t, csitest.Config{})
	p.Next("Probe", csitest.Hang())
	c, _ := newClient(t, p, func(c *Config) { c.Timeout = 2 * time.Second })
	connect(t, c)
	if n := p.Count("Probe"); n != 2 {
		t.Errorf("%d probes, want 2", n)
	}
}

// TestConnectRetries: a driver may return any error during its start.
func TestConnectRetries(t *testing.T) {
	tests := map[string]struct {
		method string
		step   csitest.Step
		want   string
	}{
		"probe fails":                  {"Probe", csitest.Fail(codes.Internal, "broken"), "Probe"},
		"probe is not available":       {"Probe", csitest.Fail(codes.Unavailable, "later"), "Probe"},
		"probe fails a precondition":   {"Probe", csitest.Fail(codes.FailedPrecondition, "no storage yet"), "Probe"},
		"name hangs":                   {"GetPluginInfo", csitest.Hang(), "GetPluginInfo"},
		"name is not available":        {"GetPluginInfo", csitest.Fail(codes.Unavailable, "later"), "GetPluginInfo"},
		"plugin capabilities fail":     {"GetPluginCapabilities", csitest.Fail(codes.Internal, "broken"), "GetPluginCapabilities"},
		"controller capabilities fail": {"ControllerGetCapabilities", csitest.Fail(codes.Unavailable, "x"), "ControllerGetCapabilities"},
		"controller capabilities hang": {"ControllerGetCapabilities", csitest.Hang(), "ControllerGetCapabilities"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := csitest.Run(t, csitest.Config{})
			p.Next(tt.method, tt.step)
			c, _ := newClient(t, p, func(c *Config) { c.Timeout = time.Second })
			connect(t, c)
			if n := p.Count(tt.method); n != 2 {
				t.Errorf("%s was called %d times, want twice", tt.method, n)
			}
			p.Always(tt.method, tt.step)
			again, _ := newClient(t, p, func(c *Config) { c.Timeout = time.Second })
			ctx, cancel := context.WithCancelCause(within(t))
			go func() {
				_ = p.Wait(ctx, tt.method, 4)
				cancel(errors.New("enough"))
			}()
			_, err := again.Connect(ctx)
			if err == nil || !strings.Contains(err.Error(), "enough; the last error was: ") || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("the error of a wait that ends is %v", err)
			}
			if reason := again.CheckReady(); reason == nil || !strings.Contains(reason.Error(), tt.want) {
				t.Errorf("the reason is %v", reason)
			}
		})
	}
}

func TestConnectFailsIfItNeedsAnotherDriver(t *testing.T) {
	named := func(name string) csitest.Step {
		return csitest.Alter(func(r *csi.GetPluginInfoResponse) { r.Name = name })
	}
	tests := map[string]struct {
		method string
		step   csitest.Step
		want   string
	}{
		"probe is not implemented": {"Probe", csitest.Fail(codes.Unimplemented, "unknown service"), "Probe"},
		"name is not implemented":  {"GetPluginInfo", csitest.Fail(codes.Unimplemented, "unknown service"), "GetPluginInfo"},
		"name is empty":            {"GetPluginInfo", named(""), "empty name"},
		"name has two lines":       {"GetPluginInfo", named("a\nb"), `the name "a\nb"`},
		"controller capabilities are not implemented": {"ControllerGetCapabilities", csitest.Fail(codes.Unimplemented, "x"),
			"ControllerGetCapabilities"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			p := csitest.Run(t, csitest.Config{})
			p.Next(tt.method, tt.step)
			c, _ := newClient(t, p, nil)
			_, err := c.Connect(within(t))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want an error with %q", err, tt.want)
			}
			if n := p.Count(tt.method); n != 1 {
				t.Errorf("%s was called %d times, want once", tt.method, n)
			}
		})
	}
}

func TestDriverWithoutControllerIsNotAskedForItsCapabilities(t *testing.T) {
	p := csitest.Run(t, csitest.Config{Plugin: []csi.PluginCapability_Service_Type{csi.PluginCapability_Service_UNKNOWN}})
	c, _ := newClient(t, p, nil)
	if d := connect(t, c); d.Controller != (ControllerCapabilities{}) || p.Count("ControllerGetCapabilities") != 0 {
		t.Errorf("%+v after %d questions", d, p.Count("ControllerGetCapabilities"))
	}
}

func TestConnectWaitsForTheSocket(t *testing.T) {
	dir, err := os.MkdirTemp("", "csi")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	cfg := DefaultConfig()
	cfg.Address = dir + "/s"
	c, err := New(cfg, prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	done := make(chan error, 1)
	go func() { _, err := c.Connect(within(t)); done <- err }()
	for ctx := within(t); !errors.Is(c.CheckReady(), fs.ErrNotExist); {
		select {
		case <-ctx.Done():
			t.Fatalf("the reason is %v", c.CheckReady())
		case <-time.After(time.Millisecond):
		}
	}
	p := csitest.New(csitest.Config{})
	if err := p.Start(dir + "/s"); err != nil {
		t.Fatal(err)
	}
	defer p.Stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	if _, err := c.Connect(ctx); err == nil || !strings.Contains(err.Error(), "enough") {
		t.Errorf("with an ended context: %v", err)
	}
}

// lateTimer is a context whose timer fires after its deadline, as on a busy machine.
type lateTimer struct {
	context.Context
	deadline time.Time
}

func (l lateTimer) Deadline() (time.Time, bool) { return l.deadline, true }

func TestConnectTakesNoDeadlineOfItsOwnForAnAnswer(t *testing.T) {
	p := csitest.Run(t, csitest.Config{})
	c, _ := newClient(t, p, nil)
	connect(t, c)
	p.Always("Probe", csitest.Fail(codes.DeadlineExceeded, "too late"))
	timer, cancel := context.WithTimeoutCause(t.Context(), 200*time.Millisecond, errors.New("enough"))
	defer cancel()
	_, err := c.Connect(lateTimer{timer, time.Now()})
	if err == nil || !strings.HasSuffix(err.Error(), "enough") || Answered(err) {
		t.Errorf("%v", err)
	}
}

// running is Run in the background; the function returned waits for its end.
func running(t *testing.T, c *Client) (stop func() error) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	return func() error { cancel(); return <-done }
}

func awaitNotReady(t *testing.T, c *Client) {
	t.Helper()
	ctx := within(t)
	for c.CheckReady() == nil {
		select {
		case <-ctx.Done():
			t.Fatal("still ready")
		case <-time.After(time.Millisecond):
		}
	}
}

func TestLostConnectionComesBack(t *testing.T) {
	p := csitest.Run(t, csitest.Config{})
	c, _ := newClient(t, p, nil)
	connect(t, c)
	stop := running(t, c)
	for round := 1; round <= 3; round++ {
		p.Stop()
		awaitNotReady(t, c)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if err := c.WaitReady(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("workers are not held: %v", err)
		}
		cancel()
		if err := c.WaitLost(within(t), time.Millisecond); !errors.Is(err, ErrConnectionLost) {
			t.Errorf("the reason is %v", err)
		}
		if err := p.Start(p.Address()); err != nil {
			t.Fatal(err)
		}
		if err := c.WaitReady(within(t)); err != nil {
			t.Fatal(err)
		}
		ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
		if err := c.WaitLost(ctx, 0); err != nil {
			t.Errorf("it is ready, and was lost: %v", err)
		}
		cancel()
		if n := p.Count("GetPluginInfo"); n != round+1 {
			t.Errorf("asked for the name %d times, want %d", n, round+1)
		}
		if n := testutil.ToFloat64(c.losses); n != float64(round) {
			t.Errorf("%v losses counted, want %d", n, round)
		}
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// TestRestartWhileTheDriverIsIdentified: Connect begins again.
func TestRestartWhileTheDriverIsIdentified(t *testing.T) {
	p := csitest.Run(t, csitest.Config{})
	p.Next("GetPluginCapabilities", csitest.Hang())
	c, _ := newClient(t, p, nil)
	go func() {
		if err := p.Wait(within(t), "GetPluginCapabilities", 1); err == nil {
			err = p.Restart(nil)
			if err != nil {
				t.Error(err)
			}
		}
	}()
	connect(t, c)
	if n := p.Count("GetPluginCapabilities"); n != 2 {
		t.Errorf("asked %d times", n)
	}
}

func TestDriverThatIsNotReadyAfterARestartIsAwaited(t *testing.T) {
	p := csitest.Run(t, csitest.Config{})
	c, _ := newClient(t, p, nil)
	connect(t, c)
	stop := running(t, c)
	p.Next("Probe", csitest.Fail(codes.Unavailable, "booting"), csitest.Fail(codes.Internal, "booting"))
	p.Next("GetPluginInfo", csitest.Fail(codes.Internal, "booting"))
	if err := p.Restart(nil); err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(within(t), "ControllerGetCapabilities", 2); err != nil {
		t.Fatal(err)
	}
	if err := c.WaitReady(within(t)); err != nil {
		t.Fatal(err)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

const groupCapabilities = "GroupControllerGetCapabilities"

var booting = csitest.Fail(codes.Internal, "booting")

func TestAnotherDriverEndsRun(t *testing.T) {
	tests := map[string]struct {
		first  []csitest.Step // the first answers to GroupControllerGetCapabilities
		change func(*csitest.Config)
		want   string
	}{
		"other name": {nil, func(c *csitest.Config) { c.Name = "other" }, `"other"`},
		"other controller capabilities": {nil, func(c *csitest.Config) {
			c.Controller = []csi.ControllerServiceCapability_RPC_Type{csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME}
		}, "controller capabilities"},
		"other plugin capabilities": {nil, func(c *csitest.Config) {
			c.Plugin = []csi.PluginCapability_Service_Type{csi.PluginCapability_Service_CONTROLLER_SERVICE}
		}, "plugin capabilities"},
		"other topology of the node": {nil, func(c *csitest.Config) { c.Segments = []map[string]string{{"zone": "b"}} },
			"topology of the node changed from map[zone:a] to map[zone:b]"},
		"capability that was unknown": {[]csitest.Step{booting}, nil, "group controller capabilities"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			p := csitest.Run(t, csitest.Config{Groups: true, Segments: []map[string]string{{"zone": "a"}}})
			p.Next(groupCapabilities, tt.first...)
			c, _ := newClient(t, p, nil)
			connect(t, c)
			if _, err := c.NodeInfo(within(t)); err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			go func() { done <- c.Run(within(t)) }()
			if err := p.Restart(tt.change); err != nil {
				t.Fatal(err)
			}
			if err := <-done; !errors.Is(err, ErrDriverChanged) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v", err)
			}
			if c.CheckReady() == nil {
				t.Error("ready although another driver answers")
			}
		})
	}
}

// TestUnknownGroupCapabilitiesAreNoOtherDriver: a driver may return any error during its start.
func TestUnknownGroupCapabilitiesAreNoOtherDriver(t *testing.T) {
	p := csitest.Run(t, csitest.Config{Groups: true})
	c, _ := newClient(t, p, nil)
	if d := connect(t, c); !d.Group.CreateDeleteGetVolumeGroupSnapshot {
		t.Errorf("capabilities %+v", d.Group)
	}
	stop := running(t, c)
	p.Next(groupCapabilities, booting)
	if err := p.Restart(nil); err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(within(t), "ControllerGetCapabilities", 2); err != nil {
		t.Fatal(err)
	}
	if err := c.WaitReady(within(t)); err != nil {
		t.Error(err)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func TestAnotherVersionIsNoOtherDriver(t *testing.T) {
	p := csitest.Run(t, csitest.Config{})
	c, _ := newClient(t, p, nil)
	connect(t, c)
	stop := running(t, c)
	if err := p.Restart(func(c *csitest.Config) { c.Version = "2.0" }); err != nil {
		t.Fatal(err)
	}
	ctx := within(t)
	if err := p.Wait(ctx, "ControllerGetCapabilities", 2); err != nil { // it was asked again
		t.Fatal(err)
	}
	if err := c.WaitReady(within(t)); err != nil {
		t.Error(err)
	}
	if got := c.Driver().VendorVersion; got != "2.0" {
		t.Errorf("version %q", got)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func TestExitOnConnectionLoss(t *testing.T) {
	p := csitest.Run(t, csitest.Config{})
	c, _ := newClient(t, p, func(c *Config) { c.ExitOnConnectionLoss = true })
	connect(t, c)
	done := make(chan error, 1)
	go func() { done <- c.Run(within(t)) }()
	p.Stop()
	if err := <-done; !errors.Is(err, ErrConnectionLost) {
		t.Errorf("got %v", err)
	}
}

func TestCallThatLosesItsConnectionIsIndeterminate(t *testing.T) {
	p := csitest.Run(t, csitest.Config{})
	c, _ := newClient(t, p, nil)
	connect(t, c)
	p.Next("CreateVolume", csitest.DoAndDrop())
	_, err := c.Controller().CreateVolume(within(t), createVolume("v", "s"))
	if err == nil || OutcomeOf(err) != Indeterminate {
		t.Errorf("got %v", err)
	}
	if n := p.VolumeCount(); n != 1 {
		t.Errorf("%d volumes, want the one whose creation is indeterminate", n)
	}
}

func createVolume(name, secret string) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name: name, Secrets: map[string]string{"password": secret},
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		}},
	}
}

func TestLogsHaveNoSecretsAndAreCapped(t *testing.T) {
	p := csitest.Run(t, csitest.Config{VolumeContext: map[string]string{"long": strings.Repeat("x", 500)}})
	c, _ := newClient(t, p, func(c *Config) { c.MaxLogLength = 100 })
	var out bytes.Buffer
	log := funcr.New(func(_, args string) { out.WriteString(args + "\n") }, funcr.Options{Verbosity: 10})
	ctx := klog.NewContext(within(t), log)
	if _, err := c.Connect(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Controller().CreateVolume(ctx, createVolume("named-so", "hunter2")); err != nil {
		t.Fatal(err)
	}
	p.Next("CreateVolume", csitest.Fail(codes.Internal, "broken"))
	if _, err := c.Controller().CreateVolume(ctx, createVolume("v", "hunter2")); err == nil {
		t.Fatal("no error")
	}
	got := out.String()
	if strings.Contains(got, "hunter2") {
		t.Errorf("a secret is in the log:\n%s", got)
	}
	for _, want := range []string{"named-so", "***stripped***", "log capped to 100 chars", "broken", "/csi.v1.Controller/CreateVolume"} {
		if !strings.Contains(got, want) {
			t.Errorf("the log lacks %q:\n%s", want, got)
		}
	}
	out.Reset()
	quiet := klog.NewContext(ctx, funcr.New(func(_, args string) { out.WriteString(args) }, funcr.Options{Verbosity: 4}))
	if _, err := c.Controller().CreateVolume(quiet, createVolume("w", "hunter2")); err != nil || out.Len() > 0 {
		t.Errorf("%v; below -v=5 there was %q", err, out.String())
	}
}

func TestMetrics(t *testing.T) {
	for name, driver := range map[string]string{"plain": "drv.example.com", "migrated": "ebs.csi.aws.com"} {
		t.Run(name, func(t *testing.T) {
			p := csitest.Run(t, csitest.Config{Name: driver})
			c, reg := newClient(t, p, nil)
			connect(t, c)
			p.Next("CreateVolume", csitest.Fail(codes.ResourceExhausted, "full"))
			_, _ = c.Controller().CreateVolume(WithMigrated(within(t), true), createVolume("v", ""))
			families, err := reg.Gather()
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, f := range families {
				if f.GetName() != "csi_sidecar_operations_seconds" {
					continue
				}
				if !strings.HasPrefix(f.GetHelp(), "[ALPHA] ") || len(f.Metric[0].Histogram.Bucket) != 13 {
					t.Errorf("help %q, %d buckets", f.GetHelp(), len(f.Metric[0].Histogram.Bucket))
				}
				for _, m := range f.Metric {
					var labels []string
					for _, l := range m.Label {
						labels = append(labels, l.GetName()+"="+l.GetValue())
					}
					got = append(got, fmt.Sprint(strings.Join(labels, " "), " ", m.Histogram.GetSampleCount()))
				}
			}
			migrated := func(value string) string {
				if driver == "ebs.csi.aws.com" {
					return " migrated=" + value
				}
				return ""
			}
			want := []string{
				"driver_name=" + driver + " grpc_status_code=OK method_name=/csi.v1.Controller/ControllerGetCapabilities" +
					migrated("false") + " 1",
				"driver_name=" + driver + " grpc_status_code=OK method_name=/csi.v1.Identity/GetPluginCapabilities" + migrated("false") +
					" 1",
				"driver_name=" + driver + " grpc_status_code=OK method_name=/csi.v1.Identity/GetPluginInfo" + migrated("false") + " 1",
				"driver_name=" + driver + " grpc_status_code=OK method_name=/csi.v1.Identity/Probe" + migrated("false") + " 1",
				"driver_name=" + driver + " grpc_status_code=ResourceExhausted method_name=/csi.v1.Controller/CreateVolume" +
					migrated("true") + " 1",
			}
			if strings.Join(got, "\n") != strings.Join(want, "\n") {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
		})
	}
}

func TestNodeInfo(t *testing.T) {
	p := csitest.Run(t, csitest.Config{NodeID: "n7"})
	c, _ := newClient(t, p, nil)
	connect(t, c)
	info, err := c.NodeInfo(within(t))
	if err != nil || info.GetNodeId() != "n7" {
		t.Errorf("%v, %v", info, err)
	}
}
