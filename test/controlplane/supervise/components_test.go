// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"flag"
	"io"
	"net"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

var testPorts = ports{Etcd: 1, peer: 2, APIServer: 3, ControllerManager: 4, Scheduler: 5}

func TestArguments(t *testing.T) {
	tests := map[string]struct {
		options    Options
		component  string
		has, lacks []string
	}{
		"etcd serves clients and peers on loopback only": {
			component: Etcd,
			has: []string{"--listen-client-urls=http://127.0.0.1:1", "--listen-peer-urls=http://127.0.0.1:2", "--data-dir=/d/etcd",
				"--unsafe-no-fsync"},
		},
		"the API server has RBAC and no audit log unless asked": {
			component: APIServer,
			has: []string{"--etcd-servers=http://127.0.0.1:1", "--secure-port=3", "--bind-address=127.0.0.1",
				"--authorization-mode=RBAC", "--token-auth-file=/d/tokens.csv"},
			lacks: []string{"audit"},
		},
		"the audit log is there when the response is": {
			options:   Options{Audit: true},
			component: APIServer,
			has: []string{"--audit-log-path=/d/audit.log", "--audit-policy-file=/d/audit-policy.yaml",
				"--audit-log-mode=blocking-strict"},
		},
		"the controller manager runs volume controllers": {
			component: ControllerManager,
			has: []string{"--kubeconfig=/d/kubeconfig", "--secure-port=4", "--leader-elect=false", "--controllers=" +
				strings.Join(controllers, ",")},
		},
		"the scheduler knows no controllers": {
			component: Scheduler,
			has:       []string{"--config=/d/scheduler.yaml", "--secure-port=5"},
			lacks:     []string{"--controllers", "binder"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			test.options.Dir = "/d"
			args := test.options.arguments(test.component, testPorts)
			for _, want := range test.has {
				if !slices.Contains(args, want) {
					t.Errorf("%s is missing in %q", want, args)
				}
			}
			for _, unwanted := range test.lacks {
				if strings.Contains(strings.Join(args, " "), unwanted) {
					t.Errorf("%q has %s", args, unwanted)
				}
			}
		})
	}
}

func TestFreePortsDifferAndCanBeUsed(t *testing.T) {
	p, err := freePorts()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[int]bool{}
	for name, port := range p {
		if port < firstPort || port > lastPort || seen[port] {
			t.Errorf("port %d of %s is out of range or not its own: %v", port, name, p)
		}
		seen[port] = true
		l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(port))
		if err != nil {
			t.Errorf("port of %s: %v", name, err)
			continue
		}
		l.Close()
	}
	if len(p) != 5 {
		t.Errorf("ports for five listeners wanted, got %v", p)
	}
}

func TestOptionsSurviveTheirFlags(t *testing.T) {
	for name, o := range map[string]Options{
		"everything": {Dir: "/some dir", Components: []string{Scheduler}, Audit: true, StopWithStdin: true, RemoveDir: true},
		"nothing":    {Dir: "/d"},
	} {
		t.Run(name, func(t *testing.T) {
			fs := flag.NewFlagSet("up", flag.ContinueOnError)
			fs.SetOutput(io.Discard)
			var got Options
			fs.StringVar(&got.Dir, "dir", "", "")
			got.AddFlags(fs)
			if err := fs.Parse(o.flags()); err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, o) {
				t.Errorf("got %+v, want %+v", got, o)
			}
		})
	}
}

func TestValidate(t *testing.T) {
	for name, test := range map[string]struct {
		options Options
		wrong   []string
	}{
		"fine":                     {options: Options{Dir: "d", Components: []string{ControllerManager, Scheduler}}},
		"no directory":             {options: Options{}, wrong: []string{"--dir"}},
		"every mistake is told":    {options: Options{Components: []string{"kubelet"}}, wrong: []string{"--dir", `"kubelet"`}},
		"etcd is not for choosing": {options: Options{Dir: "d", Components: []string{Etcd}}, wrong: []string{`"etcd"`}},
		"a component is started once ": {options: Options{Dir: "d", Components: []string{Scheduler, Scheduler}},
			wrong: []string{"scheduler is given twice"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := test.options.Validate()
			if (err == nil) != (len(test.wrong) == 0) {
				t.Fatalf("got %v, want mention of %q", err, test.wrong)
			}
			for _, want := range test.wrong {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q is not mentioned in %v", want, err)
				}
			}
		})
	}
}

func TestFilesKeepIdentityAndFollowPorts(t *testing.T) {
	o := Options{Dir: t.TempDir()}
	read := func(name string) string {
		t.Helper()
		data, err := os.ReadFile(o.file(name))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	if err := o.writeFiles(ports{APIServer: 1111}); err != nil {
		t.Fatal(err)
	}
	tokens, key := read("tokens.csv"), read("service-account.key")
	if err := o.writeFiles(ports{APIServer: 2222}); err != nil {
		t.Fatal(err)
	}
	if read("tokens.csv") != tokens || read("service-account.key") != key {
		t.Error("token or key changed, but the data in the directory belongs to them")
	}
	var config struct {
		Clusters []struct{ Cluster struct{ Server string } }
		Users    []struct{ User struct{ Token string } }
	}
	if err := yaml.Unmarshal([]byte(read("kubeconfig")), &config); err != nil {
		t.Fatal(err)
	}
	if got := config.Clusters[0].Cluster.Server; got != "https://127.0.0.1:2222" {
		t.Errorf("the kubeconfig leads to %s", got)
	}
	if got := config.Users[0].User.Token; got == "" || !strings.HasPrefix(tokens, got+",") {
		t.Errorf("the kubeconfig has token %q, the API server %q", got, tokens)
	}
	var scheduler struct {
		ClientConnection         struct{ Kubeconfig string }
		LeaderElection           struct{ LeaderElect *bool }
		PodInitialBackoffSeconds int
		PodMaxBackoffSeconds     int
	}
	if err := yaml.Unmarshal([]byte(read("scheduler.yaml")), &scheduler); err != nil {
		t.Fatal(err)
	}
	if got := scheduler.ClientConnection.Kubeconfig; got != o.file("kubeconfig") {
		t.Errorf("the scheduler reads %q", got)
	}
	if e := scheduler.LeaderElection.LeaderElect; e == nil || *e {
		t.Error("the scheduler waits for a Lease")
	}
	if scheduler.PodMaxBackoffSeconds != 1 || scheduler.PodInitialBackoffSeconds != 1 {
		t.Errorf("the scheduler waits %d to %d seconds before it tries again", scheduler.PodInitialBackoffSeconds,
			scheduler.PodMaxBackoffSeconds)
	}
	info, err := os.Stat(o.file("tokens.csv"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("others can read the token: %v %v", info.Mode(), err)
	}
}
