// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/tools/audit"
)

// TestAuditPerNode: an instance of a node would report the volumes of the others as lost.
func TestAuditPerNode(t *testing.T) {
	for args, refused := range map[string]bool{"--node-deployment": true, "--controllers=provisioner": false} {
		_, err := configOf(t, All, "--csi-address=/csi.sock", args).AuditConfig(audit.DefaultConfig())
		if refused != (err != nil && strings.Contains(err.Error(), "lists only its own volumes")) {
			t.Errorf("%s: %v", args, err)
		}
	}
}

// TestCapacityIsAskedFor is about which command has the role, with which of its
// surroundings, for a driver that can tell its capacity and for one that cannot.
func TestCapacityIsAskedFor(t *testing.T) {
	both := map[string]string{"NAMESPACE": "ns", "POD_NAME": "pod"}
	can, cannot := csiclient.Driver{Name: "drv"}, csiclient.Driver{Name: "drv"}
	for _, d := range []*csiclient.Driver{&can, &cannot} {
		d.Controller.CreateDeleteVolume = true
	}
	can.Controller.GetCapacity = true
	for name, tt := range map[string]struct {
		command string
		args    []string
		env     map[string]string
		driver  csiclient.Driver
		runs    []string
		refused string   // why it does not start; "" when it does
		skipped []string // parts of the reason why the role is disabled; nil if it runs
	}{
		"provision does not publish": {command: "provision", driver: can, runs: []string{"provisioner"}},
		"provision publishes when told to": {command: "provision", args: []string{"--enable-capacity"}, env: both,
			driver: can, runs: []string{"provisioner", "capacity"}},
		"… then it needs a namespace": {command: "provision", args: []string{"--enable-capacity"},
			env: map[string]string{"POD_NAME": "pod"}, refused: "NAMESPACE"},
		"… and its pod": {command: "provision", args: []string{"--enable-capacity"},
			env: map[string]string{"NAMESPACE": "ns"}, refused: "POD_NAME"},
		"capacity needs no flag": {command: "capacity", env: both, driver: can, runs: []string{"capacity"}},
		"capacity cannot be told not to": {command: "capacity", args: []string{"--enable-capacity=false"}, env: both,
			driver: can, runs: []string{"capacity"}},
		"capacity runs whatever the driver can do": {command: "capacity", env: both, driver: cannot, runs: []string{"capacity"}},
		"capacity needs a namespace": {command: "capacity", env: map[string]string{"POD_NAME": "pod"},
			refused: "NAMESPACE"},
		"capacity needs its pod": {command: "capacity", env: map[string]string{"NAMESPACE": "ns"},
			refused: "POD_NAME"},
		"… for any owner": {command: "capacity", args: []string{"--capacity-ownerref-level=0"},
			env: map[string]string{"NAMESPACE": "ns"}, refused: "POD_NAME"},
		"… but not without owner": {command: "capacity", args: []string{"--capacity-ownerref-level=-2"},
			env: map[string]string{"NAMESPACE": "ns"}, driver: can, runs: []string{"capacity"}},
		"capacity without owner needs a namespace": {command: "capacity", args: []string{"--capacity-ownerref-level=-1"},
			refused: "NAMESPACE"},
		"capacity per node needs its node": {command: "capacity", args: []string{"--node-deployment"}, env: both,
			refused: "NODE_NAME"},
		"all publishes": {command: "all", env: both, driver: can,
			runs: []string{"provisioner", "capacity"}},
		"all does not when told so": {command: "all", args: []string{"--enable-capacity=false"}, env: both,
			driver: can, runs: []string{"provisioner"}},
		"all leaves it out for a driver that cannot": {command: "all", env: both, driver: cannot, runs: []string{"provisioner"},
			skipped: []string{"GET_CAPACITY"}},
		"… and does not ask for more then": {command: "all", driver: cannot, runs: []string{"provisioner"},
			skipped: []string{"GET_CAPACITY"}},
		"all leaves it out without a namespace": {command: "all", env: map[string]string{"POD_NAME": "pod"}, driver: can,
			runs: []string{"provisioner"}, skipped: []string{"NAMESPACE"}},
		"all leaves it out without its pod": {command: "all", env: map[string]string{"NAMESPACE": "ns"}, driver: can,
			runs: []string{"provisioner"}, skipped: []string{"POD_NAME"}},
		"all reports everything that is missing": {command: "all", driver: can, runs: []string{"provisioner"},
			skipped: []string{"NAMESPACE", "POD_NAME"}},
		"all without owner does without its pod": {command: "all", args: []string{"--capacity-ownerref-level=-1"},
			env: map[string]string{"NAMESPACE": "ns"}, driver: can, runs: []string{"provisioner", "capacity"}},
		"all, asked for by name": {command: "all", args: []string{"--controllers=capacity"}, env: both,
			driver: can, runs: []string{"capacity"}},
		"… does not look at the driver": {command: "all", args: []string{"--controllers=capacity"}, env: both,
			driver: cannot, runs: []string{"capacity"}},
		"… wins over the flag": {command: "all", args: []string{"--controllers=capacity",
			"--enable-capacity=false"}, env: both, driver: can, runs: []string{"capacity"}},
		"… needs a namespace": {command: "all", args: []string{"--controllers=provisioner,capacity"},
			env: map[string]string{"POD_NAME": "pod"}, refused: "NAMESPACE"},
		"all, something else asked for by name": {command: "all", args: []string{"--controllers=provisioner"}, driver: can,
			runs: []string{"provisioner"}},
		"all but one role": {command: "all", args: []string{"--controllers=-provisioner"}, env: both, driver: can,
			runs: []string{"capacity"}},
		"… of which the driver supports none": {command: "all", args: []string{"--controllers=-provisioner"}, env: both, driver: cannot,
			skipped: []string{"GET_CAPACITY"}},
		"all per node, asked for by name, needs its node": {command: "all", args: []string{"--controllers=capacity",
			"--node-deployment"}, env: both, refused: "NODE_NAME"},
		"all, one role per node": {command: "all", args: []string{"--controllers=provisioner,capacity",
			"--provisioner-node-deployment"}, env: map[string]string{"NAMESPACE": "ns", "POD_NAME": "pod", "NODE_NAME": "n"},
			refused: "the capacity would work on every node without a Lease"},
		"provision per node needs its node without capacity": {command: "provision", args: []string{"--node-deployment"},
			refused: "NODE_NAME"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, v := range []string{"NAMESPACE", "POD_NAME", "NODE_NAME"} {
				t.Setenv(v, tt.env[v])
			}
			selection := map[string]Selection{"provision": Provision, "capacity": Capacity, "all": All}[tt.command]
			c := configOf(t, selection, tt.args...).Enabled()
			err := errors.Join(c.Validate(), c.ValidateEnvironment())
			if (err != nil) != (tt.refused != "") || err != nil && !strings.Contains(err.Error(), tt.refused) {
				t.Fatalf("refused: %v, want %q", err, tt.refused)
			}
			if err != nil {
				return
			}
			chosen, others, err := c.choose(tt.driver, true)
			if err != nil {
				t.Fatal(err)
			}
			if got := names(chosen); !slices.Equal(got, tt.runs) {
				t.Errorf("%q run, want %q", got, tt.runs)
			}
			others = slices.DeleteFunc(others, func(s skipped) bool { return s.role != capacityName })
			if (len(others) == 1) != (tt.skipped != nil) {
				t.Fatalf("left out: %v", others)
			}
			for _, v := range []string{"GET_CAPACITY", "NAMESPACE", "POD_NAME"} {
				if tt.skipped != nil && strings.Contains(others[0].reason.Error(), v) != slices.Contains(tt.skipped, v) {
					t.Errorf("the reason is %q, want one about %q", others[0].reason, tt.skipped)
				}
			}
		})
	}
}

// TestCapacitySharesTheLease: csi-provisioner provisions and publishes under one Lease. A process
// that only publishes must not keep replicas that provision from becoming leader.
func TestCapacitySharesTheLease(t *testing.T) {
	roles := map[string][]string{}
	for _, r := range All.roles {
		lease := r.lease(Settings{}, "drv.example.com/x")
		roles[lease] = append(roles[lease], r.Name)
	}
	if got := roles["drv-example-com-x"]; len(roles) != 5 || !slices.Equal(got, []string{"provisioner", "capacity"}) {
		t.Errorf("the Leases are those of %q", roles)
	}
	var without Settings
	without.Common.Controllers = []string{attacherName, capacityName}
	for _, lease := range []string{capacityAlone.lease(Settings{}, "a.b"), capacityRole.lease(without, "a.b")} {
		if lease != "a-b-capacity" {
			t.Errorf("without the provisioner it has the Lease %q", lease)
		}
	}
}

// TestFlagsOfTheCapacity: the defaults are those of csi-provisioner, but nothing limits the requests.
func TestFlagsOfTheCapacity(t *testing.T) {
	for command, want := range map[string]map[string]string{
		"provision": {"enable-capacity": "false", "timeout": "15s"},
		"capacity":  {"enable-capacity": "false", "timeout": "15s"},
		"all": {"timeout": "0", // --help shows the default of each role
			"enable-capacity": "true"},
	} {
		fs := pflag.NewFlagSet(command, pflag.ContinueOnError)
		map[string]Selection{"provision": Provision, "capacity": Capacity, "all": All}[command].Register(fs)
		for name, def := range map[string]string{
			"capacity-threads": "1", "capacity-poll-interval": "1m0s", "capacity-ownerref-level": "1",
			"capacity-for-immediate-binding": "false", "kube-api-capacity-qps": "0", "kube-api-capacity-burst": "5",
			"node-deployment": "false", "retry-interval-start": "1s", "retry-interval-max": "5m0s",
		} {
			want[name] = def
		}
		for name, def := range want {
			if f := fs.Lookup(name); f == nil || f.DefValue != def {
				t.Errorf("%s --%s: got %+v, want the default %q", command, name, f, def)
			}
		}
	}
}
