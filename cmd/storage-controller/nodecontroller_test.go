package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// settingsOf is what a command makes of its arguments.
func settingsOf(t *testing.T, roles []role, args ...string) settings {
	t.Helper()
	cmd := newRoleCommand("x", "x", len(roles) > 1, roles...)
	if err := cmd.ParseFlags(args); err != nil {
		t.Fatal(err)
	}
	s, err := readSettings(cmd.Flags(), len(roles) > 1, roles)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestOriginsOfSettings(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	text := `apiVersion: storage-controller/v1alpha1
kind: Configuration
timeout: 7s
nodecontroller:
  profile: topolvm
  node-cleanup: report
  pvc-pod-deletion-grace: -1
  pvc-obsolete-finalizers: [a.b/c, d.e/f]
  node-cleanup-resource: "resource=a.v1.x.y,node-field=spec.node"
`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(envPrefix+"NODE_CLEANUP_SCOPE", "opt-in")
	t.Setenv(envPrefix+"NODECONTROLLER_NODE_CLEANUP_PATHS", "orphan,finalizer")
	compare(t, printed(t, "--config="+file, "--node-cleanup-retain=skip", "--node-missing-grace", "20m", "--pvc-finalizer="), map[string][2]string{
		"profile":                 {"topolvm", "file"},
		"timeout":                 {"7s", "file"},
		"node-cleanup":            {"report", "file"},
		"pvc-pod-deletion-grace":  {"-1ns", "file"},
		"pvc-obsolete-finalizers": {"a.b/c, d.e/f", "file"},
		"node-cleanup-resource":   {"resource=a.v1.x.y,node-field=spec.node", "file"},
		"node-cleanup-scope":      {"opt-in", "environment"},
		"node-cleanup-paths":      {"orphan, finalizer", "environment"},
		"node-cleanup-retain":     {"skip", "flag"},
		"node-missing-grace":      {"20m0s", "flag"},
		"node-cleanup-unbound":    {"delete", "profile"},
		"pvc-finalizer":           {"topolvm.io/pvc", "profile"}, // a name that was set to nothing was not set
		"webhook-cert-mode":       {"files", "default"},
		"driver-name":             {"topolvm.io", "profile"},
		"pv-removable-finalizers": {"external-provisioner.volume.kubernetes.io/finalizer, external-attacher/topolvm-io", "derived"},
	})
}

func TestListsOfFlags(t *testing.T) {
	const one, two = "resource=a.v1.x.y,node-field=spec.node", "resource=b.v1.x.y,node-field=spec.node,when=node-gone"
	alone := []role{nodecontrollerRole}
	want := func(have []string, want ...string) {
		t.Helper()
		if !slices.Equal(have, want) {
			t.Errorf("got %q, want %q", have, want)
		}
	}
	s := settingsOf(t, alone, "--node-cleanup-resource="+one, "--node-cleanup-resource", two, "--node-cleanup-paths=orphan", "--pvc-obsolete-finalizers=a/b,c/d", "--pvc-pod-deletion-grace=-1")
	want(s.Nodecontroller.NodeCleanupResource, one, two)
	want(s.Nodecontroller.NodeCleanupPaths, "orphan")
	want(s.Nodecontroller.PVCObsoleteFinalizers, "a/b", "c/d")
	if d := s.Nodecontroller.PVCPodDeletionGrace; d >= 0 {
		t.Errorf("got %v, want that of the pod", d)
	}
	want(settingsOf(t, alone, "--node-cleanup-resource=").Nodecontroller.NodeCleanupResource)
	want(settingsOf(t, alone).Nodecontroller.NodeCleanupPaths, "finalizer", "orphan")
	want(settingsOf(t, []role{provisionerRole}, "--secret-namespaces=a,b").Provisioner.SecretNamespaces, "a", "b")
	t.Setenv(envPrefix+"NODE_CLEANUP_RESOURCE", one+"\n"+two+"\n")
	want(settingsOf(t, alone).Nodecontroller.NodeCleanupResource, one, two)
	if d := settingsOf(t, alone, "--pvc-pod-deletion-grace=1s").Nodecontroller.PVCPodDeletionGrace; d != time.Second {
		t.Errorf("got %v", d)
	}
}

func TestDefaultsOfTheCommands(t *testing.T) {
	alone, all := settingsOf(t, []role{nodecontrollerRole}), settingsOf(t, allRoles())
	if !alone.Common.LeaderElection || alone.Common.RetryPeriod != 2*time.Second || !alone.Nodecontroller.ResizeNudge {
		t.Errorf("alone: %+v, nudge %t", alone.Common, alone.Nodecontroller.ResizeNudge)
	}
	if all.Common.LeaderElection || all.Common.RetryPeriod != 5*time.Second || all.Nodecontroller.ResizeNudge {
		t.Errorf("all: %+v, nudge %t", all.Common, all.Nodecontroller.ResizeNudge)
	}
	if other := settingsOf(t, []role{attacherRole}); other.Common.LeaderElection || other.Common.RetryPeriod != 5*time.Second {
		t.Errorf("another role: %+v", other.Common)
	}
}

// TestWhatIsPrintedForAFile: a printed configuration presets nothing that was not set.
func TestWhatIsPrintedForAFile(t *testing.T) {
	before := settingsOf(t, allRoles(), "--profile=topolvm", "--node-cleanup-scope=opt-in")
	text, err := marshalSettings(before)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	after := settingsOf(t, allRoles(), "--config="+file)
	have, _, err := after.Nodecontroller.Resolve("topolvm.io")
	if err != nil {
		t.Fatal(err)
	}
	if have.NodeCleanup != "claims" || have.NodeCleanupScope != "opt-in" || have.LeaderElectionID != "topolvm" || after.origins["csi-address"] != "" {
		t.Errorf("%+v\n%s", have, text)
	}
}

func TestRefusals(t *testing.T) {
	tests := map[string]struct {
		argv []string
		code int
		want []string
	}{
		"unknown profile":                    {[]string{"nodecontroller", "--profile=zfs"}, 2, []string{`"zfs"`, "none, topolvm, topolvm-classic, topolvm-legacy"}},
		"unknown profile in all":             {[]string{"all", "--profile=zfs"}, 2, []string{`"zfs"`, "topolvm-classic"}},
		"driver of another profile":          {[]string{"nodecontroller", "--profile=topolvm", "--driver-name=a.example.com"}, 2, []string{`"topolvm.io"`, `"a.example.com"`}},
		"deleting without leader election":   {[]string{"nodecontroller", "--driver-name=a.b", "--leader-election=false", "--node-cleanup=claims"}, 2, []string{"--leader-election: must be set with --node-cleanup=claims"}},
		"a profile that deletes":             {[]string{"all", "--profile=topolvm-classic"}, 2, []string{"--leader-election", "--node-cleanup=claims and --pvc-finalizer-mode=enforce with --pvc-pod-deletion=all"}},
		"a flag of the driver":               {[]string{"nodecontroller", "--minimum-allocation-ext4=1Mi"}, 2, []string{"unknown flag", "belongs to the driver"}},
		"a flag of the driver with one dash": {[]string{"nodecontroller", "-zap-log-level=5"}, 2, []string{"belongs to the driver", "--logging-format"}},
		"a flag that nobody knows":           {[]string{"nodecontroller", "--minimum"}, 2, []string{"unknown flag: --minimum"}},
		"two sockets":                        {[]string{"nodecontroller", "--csi-socket=/a", "--csi-address=/b"}, 1, []string{"--csi-address and --csi-socket"}},
		"three addresses":                    {[]string{"all", "--http-endpoint=:1", "--metrics-bind-address=:2", "--metrics-address=:3"}, 1, []string{"--http-endpoint and --metrics-address and --metrics-bind-address: only one"}},
		"metrics that are secure and off":    {[]string{"nodecontroller", "--secure-metrics-server", "--metrics-bind-address=0"}, 1, []string{"--secure-metrics-server: needs an address"}},
		"socket of another network":          {[]string{"nodecontroller", "--csi-socket=tcp://x"}, 1, []string{"--csi-address", "tcp://x"}},
		"grace that is none":                 {[]string{"nodecontroller", "--pvc-pod-deletion-grace=-2"}, 2, []string{"--pvc-pod-deletion-grace"}},
		"nobody knows the driver":            {[]string{"nodecontroller", "--print-config", "--csi-socket=/does/not/exist", "--timeout=10ms"}, 1, []string{"--driver-name"}},
		"secure metrics without a cluster":   {[]string{"nodecontroller", "--driver-name=a.b", "--secure-metrics-server", "--metrics-bind-address=127.0.0.1:0"}, 1, []string{"--secure-metrics-server", "--kubeconfig"}},
	}
	t.Setenv("KUBECONFIG", "")
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			code, _, stderr := output(t, append([]string{"storage-controller"}, tt.argv...)...)
			for _, want := range tt.want {
				if code != tt.code || !strings.Contains(stderr, want) {
					t.Errorf("exit code %d, want %d; %q is missing in %s", code, tt.code, want, stderr)
				}
			}
		})
	}
	// What is refused of one role is no matter where that does not run.
	s := settingsOf(t, allRoles(), "--controllers=attacher", "--node-cleanup=claims", "--driver-name=a.b")
	if err := s.validate(allRoles()...); err != nil {
		t.Error(err)
	}
}

func TestConnectionOnlyWhereOneIsNeeded(t *testing.T) {
	for name, tt := range map[string]struct {
		roles []role
		args  []string
		want  string
	}{
		"name by flag":                {[]role{nodecontrollerRole}, []string{"--driver-name=a.b"}, "a.b"},
		"name by profile":             {[]role{nodecontrollerRole}, []string{"--profile=topolvm"}, "topolvm.io"},
		"no name":                     {[]role{nodecontrollerRole}, nil, ""},
		"name and address":            {[]role{nodecontrollerRole}, []string{"--driver-name=a.b", "--csi-address=/run/csi/socket"}, ""},
		"name and socket":             {[]role{nodecontrollerRole}, []string{"--driver-name=a.b", "--csi-socket=/x"}, ""},
		"role that calls the driver":  {[]role{attacherRole}, nil, ""},
		"all":                         {allRoles(), []string{"--driver-name=a.b"}, ""},
		"all, and only this role":     {allRoles(), []string{"--driver-name=a.b", "--controllers=nodecontroller"}, "a.b"},
		"all, and this role and more": {allRoles(), []string{"--driver-name=a.b", "--controllers=nodecontroller,attacher"}, ""},
	} {
		if got := settingsOf(t, tt.roles, tt.args...).unconnected(tt.roles); got != tt.want {
			t.Errorf("%s: got %q, want %q", name, got, tt.want)
		}
	}
	plugin := csitest.Run(t, csitest.Config{Name: "c.example.com"})
	compare(t, printed(t, "--csi-socket="+plugin.Address()), map[string][2]string{"node-finalizer": {"c.example.com/node", "derived"}})
}

func TestAllChoosesTheRoleByTheDriver(t *testing.T) {
	for _, local := range []bool{false, true} {
		d := csiclient.Driver{Name: "a.b", Plugin: csiclient.PluginCapabilities{VolumeAccessibilityConstraints: local}}
		chosen, _ := settingsOf(t, allRoles()).choose(allRoles(), true, d)
		if has := slices.ContainsFunc(chosen, func(r role) bool { return r.section == nodecontrollerSection }); has != local {
			t.Errorf("volumes belong to nodes: %t, the role is chosen: %t", local, has)
		}
	}
}

func TestAddressesOfTheServer(t *testing.T) {
	for args, want := range map[string][3]string{
		"":                          {"", "", ""},
		"--metrics-bind-address=:1": {":1", "", ""},
		"--metrics-bind-address=0":  {"", "", ""},
		"--http-endpoint=:1":        {":1", "", ""},
		"--http-endpoint=:1 --metrics-bind-address=0 --health-probe-bind-address=:2 --profiling-bind-address=:3": {":1", ":2", ":3"},
		"--health-probe-bind-address=0": {"", "", ""},
	} {
		cfg := settingsOf(t, []role{nodecontrollerRole}, strings.Fields(args)...).serverConfig()
		if got := [3]string{cfg.Address, cfg.HealthAddress, cfg.ProfilingAddress}; got != want {
			t.Errorf("%s: got %q, want %q", args, got, want)
		}
	}
}

// replica is a controller that serves on every replica.
type replica struct {
	serve func(context.Context) error
	run   func(context.Context) error
}

func (r replica) Serve(ctx context.Context) error { return r.serve(ctx) }
func (r replica) Run(ctx context.Context) error   { return r.run(ctx) }

// TestServingEndsBesideTheWork has both hear of the end at once, and the Lease released after both.
func TestServingEndsBesideTheWork(t *testing.T) {
	var ended atomic.Int32
	begun, told := make(chan struct{}), make(chan struct{})
	r := replica{
		serve: func(ctx context.Context) error {
			<-ctx.Done()
			close(told)
			ended.Add(1)
			return nil
		},
		run: func(ctx context.Context) error {
			close(begun)
			<-ctx.Done()
			<-told // which would hang if serving waited for the work
			ended.Add(1)
			return nil
		},
	}
	ctx, drain := context.WithCancelCause(t.Context())
	done := make(chan error, 1)
	go func() { done <- terms1(r).run(ctx) }()
	<-begun
	drain(workloop.ErrDrain)
	if err := <-done; err != nil || ended.Load() != 2 {
		t.Errorf("%v, %d of 2 have ended", err, ended.Load())
	}
}

// TestLeaseOutlivesServing has the work end long before the last request is answered.
func TestLeaseOutlivesServing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := terms1(replica{run: func(ctx context.Context) error { <-ctx.Done(); return nil }}).entries[0]
		e.served = make(chan struct{})
		ctx, drain := context.WithCancelCause(t.Context())
		done := make(chan error, 1)
		go func() { done <- e.lead(ctx) }()
		drain(workloop.ErrDrain)
		synctest.Wait()
		if len(done) > 0 {
			t.Error("the term ended before serving did")
		}
		close(e.served)
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestServingThatFailsEndsTheProcess(t *testing.T) {
	broken := errors.New("the port is taken")
	r := replica{
		serve: func(context.Context) error { return broken },
		run:   func(ctx context.Context) error { <-ctx.Done(); return nil },
	}
	if err := terms1(r).run(t.Context()); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}

// terms1 are the terms of one controller, without watches and leader election.
func terms1(c controller) *terms {
	return &terms{informers: kube.NewInformers(nil, nil, "a.b"), entries: []*entry{{roles: []role{nodecontrollerRole}, controllers: []controller{c}}}}
}
