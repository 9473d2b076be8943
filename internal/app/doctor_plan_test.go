// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// able is a driver that can do everything.
func able() csiclient.Driver {
	return csiclient.Driver{
		Name: "drv.example.com", Plugin: csiclient.PluginCapabilities{ControllerService: true, VolumeAccessibilityConstraints: true},
		Controller: csiclient.ControllerCapabilities{
			CreateDeleteVolume: true, PublishUnpublishVolume: true, ListVolumes: true, ListVolumesPublishedNodes: true, GetCapacity: true,
			CreateDeleteSnapshot: true, CloneVolume: true, ModifyVolume: true, ExpandVolume: true,
		},
		Group: csiclient.GroupCapabilities{CreateDeleteGetVolumeGroupSnapshot: true},
	}
}

func filesOf(p doctor.Plan) []string {
	var files []string
	for _, g := range p.Grants {
		files = append(files, g.File)
	}
	slices.Sort(files)
	return files
}

// TestEveryFileOfPermissionsIsAskedFor turns everything on that has one.
func TestEveryFileOfPermissionsIsAskedFor(t *testing.T) {
	t.Setenv("NAMESPACE", "ns")
	t.Setenv("POD_NAME", "pod")
	asked := map[string]bool{}
	for _, args := range [][]string{
		{"topolvm", "--pvc-finalizer-mode=enforce"},
		{"--leader-election", "--feature-gates=CrossNamespaceVolumeDataSource=true", "--capacity-ownerref-level=2",
			"--node-finalizer-mode=manage", "--node-cleanup=volumes",
			"--resize-nudge", "--secure-metrics-server"},
		{"--controllers=capacity,nodecontroller", "--leader-election", "--pvc-finalizer-mode=strip"},
		{"--controllers=resizer"},
	} {
		selection, d := All, able()
		if args[0] == topolvmName {
			selection, args, d.Name = Topolvm(false), args[1:], "topolvm.io"
		}
		c := configOf(t, selection, args...)
		d.Controller.PublishUnpublishVolume = d.Controller.PublishUnpublishVolume && len(args) > 1
		for _, g := range c.Plan(d, true).Grants {
			asked[g.File] = true
			if slices.ContainsFunc(rbac.Of(g.File, "?"), func(a rbac.Access) bool { return a.Namespace != "" }) && g.Namespace == "" {
				t.Errorf("%s: in which namespace?", g.File)
			}
		}
	}
	files, err := filepath.Glob("../../deploy/rbac/*/rbac.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		file = filepath.Base(filepath.Dir(file))
		if secrets := strings.HasSuffix(file, "-secrets"); asked[file] == secrets { // these depend on the StorageClasses
			t.Errorf("%s: asked for: %t", file, asked[file])
		}
	}
}

func TestPlanFollowsTheDriver(t *testing.T) {
	t.Setenv("NAMESPACE", "ns")
	t.Setenv("POD_NAME", "pod")
	c := configOf(t, All)
	d := able()
	d.Controller = csiclient.ControllerCapabilities{CreateDeleteVolume: true}
	d.Plugin.VolumeAccessibilityConstraints = false
	p := c.Plan(d, true)
	if files := filesOf(p); !slices.Equal(files,
		[]string{"provisioner"}) || len(p.Roles) != 1 || p.Roles[0].Lease != "drv-example-com" || len(p.APIs) > 0 {
		t.Errorf("%v %+v", files, p)
	}
	if unknown := c.Plan(csiclient.Driver{}, false); len(unknown.Roles) != 6 || unknown.Roles[0].Lease != "" {
		t.Errorf("%+v", unknown.Roles)
	}
	c = configOf(t, Topolvm(false), "--controllers=nodecontroller")
	d.Name = "topolvm.io"
	p = c.Plan(d, true)
	if r := p.Roles[0]; r.Lease != "topolvm" || len(r.Others) > 0 || !slices.Contains(filesOf(p), topolvmName) {
		t.Errorf("%+v", r)
	}
	if !slices.ContainsFunc(p.APIs,
		func(a doctor.API) bool { return a.Resource == "logicalvolumes" && a.GroupVersion == "topolvm.io/v1" }) {
		t.Errorf("%+v", p.APIs)
	}
}

func TestSettingsWithoutEffect(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		args []string
		want []string
	}{
		"nothing is set": {nil, nil},
		"everything has an effect": {[]string{"--timeout=1s", "--leader-election", "--leader-election-lease-duration=20s",
			"--kube-api-qps=5", "--kube-api-burst=9"}, nil},
		"no leader election": {[]string{"--leader-election-lease-duration=20s"}, []string{"leader-election-lease-duration (flag)"}},
		"no limit, no endpoint": {[]string{"--kube-api-burst=9", "--enable-pprof"},
			[]string{"enable-pprof (flag)", "kube-api-burst (flag)"}},
		"a role that does not run": {[]string{"--controllers=provisioner", "--reconcile-sync=1m", "--audit-interval=1h"},
			[]string{"attacher.reconcile-sync (flag)"}},
		"options that disable their roles": {[]string{"--node-cleanup=off", "--enable-capacity=false", "--driver-name=a.b"}, nil},
		"other options of a disabled role": {[]string{"--node-cleanup=off", "--node-missing-grace=5m"},
			[]string{"nodecontroller.node-missing-grace (flag)"}},
		"an option that would enable a role that does not run": {[]string{"--controllers=provisioner", "--node-cleanup=claims"},
			[]string{"nodecontroller.node-cleanup (flag)"}},
		"an alias":                {[]string{"--controllers=attacher", "--worker-threads=20", "--resync=5m"}, nil},
		"no provisioner to audit": {[]string{"--controllers=attacher", "--audit-interval=1h"}, []string{"audit-interval (flag)"}},
		"old flags": {[]string{"--logtostderr", "--feature-gates=HonorPVReclaimPolicy=true", "--automaxprocs"},
			[]string{"accepted: --logtostderr, --automaxprocs, feature gate HonorPVReclaimPolicy"}},
	} {
		c := configOf(t, All, tt.args...)
		enabled := c.Enabled()
		chosen, _, _ := enabled.choose(able(), true)
		var have []string
		for _, check := range ineffectiveChecks(enabled.ineffective(chosen, able(), true), accepted(enabled)) {
			if settings, is := strings.CutPrefix(check.Message, "accepted from manifests of the sidecars, without effect: "); is {
				have = append(have, "accepted: "+settings)
			}
			if check.Severity == finding.Warning {
				name, _, _ := strings.Cut(check.Message, " has no effect: ")
				have = append(have, name)
			}
		}
		if !slices.Equal(have, tt.want) {
			t.Errorf("%s: %q, want %q", name, have, tt.want)
		}
	}
}

func TestEnvironmentOfThePodCounts(t *testing.T) {
	t.Setenv("NAMESPACE", "")
	t.Setenv("POD_NAME", "")
	c := configOf(t, All, "--leader-election")
	for inPod, want := range map[bool]finding.Severity{true: finding.Failing, false: finding.Warning} {
		checks := c.environmentChecks([]Role{capacityRole}, inPod)
		if checks[0].Severity != want || !strings.Contains(checks[0].Message, "NAMESPACE") || len(checks) > 1 {
			t.Errorf("%t: %+v", inPod, checks)
		}
	}
	unknown := All.Options().UnknownVariables([]string{"STORAGE_CONTROLLER_TIMEOUT=1s", "STORAGE_CONTROLLER_ATTACHER_TIMEOUT=1s",
		"STORAGE_CONTROLLER_CONFIG=f", "STORAGE_CONTROLLER_PORT=tcp://10.0.0.1:80", "STORAGE_CONTROLLER_SERVICE_PORT=80",
		"STORAGE_CONTROLLER_WEBHOOK_SERVICE_HOST=10.0.0.1", "STORAGE_CONTROLLER_WEBHOOK_PORT_443_TCP_ADDR=10.0.0.1",
		"STORAGE_CONTROLLER_WEBHOOK_SERVICE_PORT_HTTPS=443", "STORAGE_CONTROLLER_WEBHOOK_PORT=tcp://10.0.0.1:443",
		"STORAGE_CONTROLLER_TIMEOT=1s", "OTHER=1"})
	if !slices.Equal(unknown, []string{"STORAGE_CONTROLLER_TIMEOT"}) {
		t.Errorf("%q", unknown)
	}
}

// TestDoctorHasALinePerCheck: a role that lacks several things says all of them in one.
func TestDoctorHasALinePerCheck(t *testing.T) {
	t.Setenv("NAMESPACE", "")
	t.Setenv("POD_NAME", "")
	c := configOf(t, All)
	i := slices.IndexFunc(c.Plan(able(), true).Findings, func(c finding.Finding) bool {
		return strings.Contains(c.Message, "NAMESPACE") && strings.Contains(c.Message, "POD_NAME")
	})
	if i < 0 {
		t.Fatal("nothing is said about both variables")
	}
	if m := c.Plan(able(), true).Findings[i].Message; strings.Contains(m, "\n") {
		t.Errorf("several lines: %q", m)
	}
}
