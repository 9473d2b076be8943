package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/storage-controller/storage-controller/csiclient"
)

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
		skipped []string // what is in the reason for leaving out the role, nil when it is not left out
	}{
		"provision does not publish":                         {command: "provision", driver: can, runs: []string{"provisioner"}},
		"provision publishes when told to":                   {command: "provision", args: []string{"--enable-capacity"}, env: both, driver: can, runs: []string{"provisioner", "capacity"}},
		"… then it needs a namespace":                        {command: "provision", args: []string{"--enable-capacity"}, env: map[string]string{"POD_NAME": "pod"}, refused: "NAMESPACE"},
		"… and its pod":                                      {command: "provision", args: []string{"--enable-capacity"}, env: map[string]string{"NAMESPACE": "ns"}, refused: "POD_NAME"},
		"capacity needs no flag":                             {command: "capacity", env: both, driver: can, runs: []string{"capacity"}},
		"capacity cannot be told not to":                     {command: "capacity", args: []string{"--enable-capacity=false"}, env: both, driver: can, runs: []string{"capacity"}},
		"capacity runs whatever the driver can do":           {command: "capacity", env: both, driver: cannot, runs: []string{"capacity"}},
		"capacity needs a namespace":                         {command: "capacity", env: map[string]string{"POD_NAME": "pod"}, refused: "NAMESPACE"},
		"capacity needs its pod":                             {command: "capacity", env: map[string]string{"NAMESPACE": "ns"}, refused: "POD_NAME"},
		"… for any owner":                                    {command: "capacity", args: []string{"--capacity-ownerref-level=0"}, env: map[string]string{"NAMESPACE": "ns"}, refused: "POD_NAME"},
		"… but not without owner":                            {command: "capacity", args: []string{"--capacity-ownerref-level=-2"}, env: map[string]string{"NAMESPACE": "ns"}, driver: can, runs: []string{"capacity"}},
		"capacity without owner needs a namespace":           {command: "capacity", args: []string{"--capacity-ownerref-level=-1"}, refused: "NAMESPACE"},
		"capacity per node needs its node":                   {command: "capacity", args: []string{"--node-deployment"}, env: both, refused: "NODE_NAME"},
		"all publishes":                                      {command: "all", env: both, driver: can, runs: []string{"provisioner", "capacity"}},
		"all does not when told so":                          {command: "all", args: []string{"--enable-capacity=false"}, env: both, driver: can, runs: []string{"provisioner"}},
		"all leaves it out for a driver that cannot":         {command: "all", env: both, driver: cannot, runs: []string{"provisioner"}, skipped: []string{"GET_CAPACITY"}},
		"… and does not ask for more then":                   {command: "all", driver: cannot, runs: []string{"provisioner"}, skipped: []string{"GET_CAPACITY"}},
		"all leaves it out without a namespace":              {command: "all", env: map[string]string{"POD_NAME": "pod"}, driver: can, runs: []string{"provisioner"}, skipped: []string{"NAMESPACE"}},
		"all leaves it out without its pod":                  {command: "all", env: map[string]string{"NAMESPACE": "ns"}, driver: can, runs: []string{"provisioner"}, skipped: []string{"POD_NAME"}},
		"all says at once what is missing":                   {command: "all", driver: can, runs: []string{"provisioner"}, skipped: []string{"NAMESPACE", "POD_NAME"}},
		"all without owner does without its pod":             {command: "all", args: []string{"--capacity-ownerref-level=-1"}, env: map[string]string{"NAMESPACE": "ns"}, driver: can, runs: []string{"provisioner", "capacity"}},
		"all, asked for by name":                             {command: "all", args: []string{"--controllers=capacity"}, env: both, driver: can, runs: []string{"capacity"}},
		"… does not look at the driver":                      {command: "all", args: []string{"--controllers=capacity"}, env: both, driver: cannot, runs: []string{"capacity"}},
		"… wins over the flag":                               {command: "all", args: []string{"--controllers=capacity", "--enable-capacity=false"}, env: both, driver: can, runs: []string{"capacity"}},
		"… needs a namespace":                                {command: "all", args: []string{"--controllers=provisioner,capacity"}, env: map[string]string{"POD_NAME": "pod"}, refused: "NAMESPACE"},
		"all, something else asked for by name":              {command: "all", args: []string{"--controllers=provisioner"}, driver: can, runs: []string{"provisioner"}},
		"all per node, asked for by name, needs its node":    {command: "all", args: []string{"--controllers=capacity", "--node-deployment"}, env: both, refused: "NODE_NAME"},
		"provision per node needs its node without capacity": {command: "provision", args: []string{"--node-deployment"}, refused: "NODE_NAME"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, v := range []string{"NAMESPACE", "POD_NAME", "NODE_NAME"} {
				t.Setenv(v, tt.env[v])
			}
			all := tt.command == "all"
			roles := map[string][]role{"provision": {provisionerRole, capacityRole}, "capacity": {capacityRole}, "all": allRoles()}[tt.command]
			if tt.refused != "" {
				code, _, stderr := output(t, append([]string{"storage-controller", tt.command}, tt.args...)...)
				lines := strings.Split(strings.TrimSpace(stderr), "\n")
				if code != exitFailure || slices.ContainsFunc(lines, func(line string) bool { return !strings.Contains(line, tt.refused) }) {
					t.Errorf("exit code %d: %s", code, stderr)
				}
				return
			}
			cmd := newRoleCommand(tt.command, "x", all, roles...)
			if err := cmd.ParseFlags(tt.args); err != nil {
				t.Fatal(err)
			}
			s, err := readSettings(cmd.Flags(), all, roles)
			if err != nil {
				t.Fatal(err)
			}
			roles = s.enabled(roles, all)
			if err := s.environment(roles, all); err != nil {
				t.Fatal(err)
			}
			chosen, skipped := s.choose(roles, all, tt.driver)
			if got := sections(chosen); !slices.Equal(got, tt.runs) {
				t.Errorf("%q run, want %q", got, tt.runs)
			}
			skipped = slices.DeleteFunc(skipped, func(err error) bool { return !strings.HasPrefix(err.Error(), "capacity: ") })
			if (len(skipped) == 1) != (tt.skipped != nil) {
				t.Fatalf("left out: %v", skipped)
			}
			for _, v := range []string{"GET_CAPACITY", "NAMESPACE", "POD_NAME"} {
				if tt.skipped != nil && strings.Contains(skipped[0].Error(), v) != slices.Contains(tt.skipped, v) {
					t.Errorf("the reason is %q, want one about %q", skipped[0], tt.skipped)
				}
			}
		})
	}
}

// TestCapacitySharesTheLease: csi-provisioner provisions and publishes under one Lease. A process
// that only publishes must not keep that from one that provisions.
func TestCapacitySharesTheLease(t *testing.T) {
	var leases terms
	for _, r := range buildOrder(allRoles()) {
		leases.add(r, r.lease(settings{}, "drv.example.com/x"), nil)
	}
	for _, e := range leases.entries {
		if e.lease == "drv-example-com-x" && !slices.Equal(sections(e.roles), []string{"capacity", "provisioner"}) {
			t.Errorf("the Lease %q is that of %q", e.lease, sections(e.roles))
		}
	}
	if alone := capacityAlone.lease(settings{}, "drv.example.com"); alone != "drv-example-com-capacity" {
		t.Errorf("alone it has the Lease %q", alone)
	}
	if len(leases.entries) != 3 || capacityRole.lease(settings{}, "drv.example.com/x") != "drv-example-com-x" {
		t.Errorf("%d Leases", len(leases.entries))
	}
}

// TestFlagsOfTheCapacity: the defaults are those of csi-provisioner, and in "all" nothing limits the requests.
func TestFlagsOfTheCapacity(t *testing.T) {
	for command, want := range map[string]map[string]string{
		"provision": {"enable-capacity": "false", "kube-api-capacity-qps": "1", "kube-api-capacity-burst": "5"},
		"capacity":  {"enable-capacity": "false", "kube-api-capacity-qps": "1", "kube-api-capacity-burst": "5"},
		"all":       {"enable-capacity": "true", "kube-api-capacity-qps": "0", "kube-api-capacity-burst": "0"},
	} {
		cmd, _, err := newRoot("storage-controller").Find([]string{command})
		if err != nil {
			t.Fatal(err)
		}
		for name, def := range map[string]string{
			"capacity-threads": "1", "capacity-poll-interval": "1m0s", "capacity-ownerref-level": "1", "capacity-for-immediate-binding": "false",
			"node-deployment": "false", "timeout": "15s", "retry-interval-start": "1s", "retry-interval-max": "5m0s",
		} {
			want[name] = def
		}
		for name, def := range want {
			if f := cmd.Flags().Lookup(name); f == nil || f.DefValue != def {
				t.Errorf("%s --%s: got %+v, want the default %q", command, name, f, def)
			}
		}
	}
}
