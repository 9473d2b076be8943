// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// deployment returns a Deployment with containers, each given as the lines of an item.
func deployment(containers ...string) string {
	return `apiVersion: apps/v1
kind: Deployment
metadata:
  name: d
spec:
  strategy: {type: Recreate}
  template:
    spec:
      securityContext: {runAsUser: 1}
      containers:
` + strings.Join(containers, "")
}

// sidecar returns the lines of a container with the socket /csi/csi.sock.
func sidecar(name string, args ...string) string {
	quoted := []string{}
	for _, a := range append([]string{"--csi-address=/csi/csi.sock"}, args...) {
		quoted = append(quoted, fmt.Sprintf("%q", a))
	}
	return fmt.Sprintf("      - name: %s\n        image: example/%[1]s:v9\n        args: [%s]\n", name, strings.Join(quoted, ", "))
}

func migrated(t *testing.T, manifest string, perRole bool) Result {
	t.Helper()
	r, err := Run([]byte(manifest), Options{Image: image, PerRole: perRole, Tables: tables()})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestErrors(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ manifest, want string }{
		"empty":            {"", "nothing to replace"},
		"only comments":    {"# nothing\n---\n# here\n", "nothing to replace"},
		"another object":   {"kind: ConfigMap\ndata: {image: csi-attacher}\n", "nothing to replace"},
		"other containers": {deployment("      - {name: node-driver-registrar, image: csi-node-driver-registrar}\n"), "nothing to replace"},
		"a provisioner of another kind": {deployment("      - {name: p, image: example/nfs-subdir-external-provisioner:v4}\n"),
			"nothing to replace"},
		"a driver whose name ends alike": {deployment("      - {name: p, image: example/my-csi-provisioner:v4}\n"),
			"nothing to replace"},
		"containers that are no list": {"kind: Deployment\nspec: {template: {spec: {containers: csi-attacher}}}\n",
			"nothing to replace"},
		"a template that parses": {"kind: Deployment\nmetadata: {name: \"{{ .Release.Name }}\"}\n",
			ErrNothing.Error() + ". The input looks like a template"},
		"a key that is there twice": {deployment("      - name: x\n        image: csi-attacher\n        image: other\n"),
			"line 13: the key image is there twice"},
		"a list of nothing":   {"kind: List\nitems:\n", "nothing to replace"},
		"not YAML":            {"a: b\n---\nkind: [\n", "document 2"},
		"a template":          {"kind: Deployment\nspec:\n  {{- if .Values.x }}\n", "helm template"},
		"an anchor in itself": {"kind: &a [*a]\n", "contains itself"},
		"an anchor in a container that is removed": {deployment(sidecar("csi-attacher")+
			"        volumeMounts: &m [{name: s, mountPath: /csi}]\n", "      - {name: x, image: y, volumeMounts: *m}\n"), "&m"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := Run([]byte(tt.manifest), Options{Image: image, Tables: tables()})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
			if nothing := strings.HasPrefix(tt.want, "nothing to replace"); errors.Is(err, ErrNothing) != nothing {
				t.Errorf("ErrNothing: %t, want %t", !nothing, nothing)
			}
		})
	}
}

// TestArguments migrates flags in all their spellings.
func TestArguments(t *testing.T) {
	t.Parallel()
	const (
		both = "--controllers=provisioner,attacher --csi-address=/csi/csi.sock"
		old  = " --provisioner-timeout=10s" // the default of csi-provisioner
	)
	for name, tt := range map[string]struct {
		provisioner, attacher []string
		want                  string
		note                  string // part of one, "" for no note about the container
	}{
		"nothing set": {nil, nil, both + old, ""},
		"old spellings": {[]string{"-v5", "-worker_threads", "7", "--leader_election"}, []string{"--v", "5"},
			both + " --v=5 --provisioner-worker-threads=7 --leader-election" + old, "had no leader election"},
		"equal for both":        {[]string{"--timeout=1m"}, []string{"-timeout=1m"}, both + " --timeout=1m", ""},
		"for one":               {nil, []string{"--timeout=1m"}, both + old + " --attacher-timeout=1m", ""},
		"the last one counts":   {[]string{"--timeout=1m", "--timeout=2m"}, nil, both + " --provisioner-timeout=2m", ""},
		"a switch that is off":  {[]string{"--immediate-topology=false"}, nil, both + " --immediate-topology=false" + old, ""},
		"of a role that is off": {[]string{"--capacity-threads=3"}, nil, both + old, "its role did not run"},
		"gates of both": {[]string{"--feature-gates=Topology=true"}, []string{"--feature-gates=Topology=false,Nope=true"},
			both + " --feature-gates=Topology=true" + old, "Nope"},
		"labels of both": {[]string{"--leader-election-labels=a:b"}, []string{"--leader-election-labels=c:d"}, both +
			" --leader-election-labels=a:b,c:d" + old, ""},
		"a limit without its burst": {[]string{"--kube-api-qps=9"}, nil, both + " --kube-api-qps=9" + old,
			"--kube-api-qps=9 applies to each role. The limits of requests per second to the API server were: csi-attacher 5"},
		"a limit and none": {[]string{"--kube-api-qps=9"}, []string{"--kube-api-qps=-1"}, both + " --kube-api-qps=-1" + old,
			"--kube-api-qps=-1 applies to each role. The limits of requests per second to the API server were: csi-provisioner 9"},
		"other logging": {[]string{"--logging-format=json"}, []string{"--logging-format=text"}, both + " --logging-format=json" + old,
			"applies to all roles"},
		"one endpoint": {[]string{"--http-endpoint=:1"}, []string{"--metrics-address=:2", "--metrics-path=/m"}, both +
			" --http-endpoint=:1" + old, "--metrics-path=/m"},
		"endpoint of the second": {[]string{"--http-endpoint="}, []string{"--http-endpoint=:2"}, both + " --http-endpoint=:2" + old, ""},
		"longest Lease": {[]string{"--leader-election", "--leader-election-retry-period=1s"},
			[]string{"--leader-election", "--leader-election-lease-duration=1m"},
			both + " --leader-election" + old + " --leader-election-lease-duration=1m", "timings of leader election differ"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := migrated(t, deployment(sidecar("csi-provisioner", tt.provisioner...), sidecar("csi-attacher", tt.attacher...)), false)
			if have := strings.Join(r.Commands[0], " "); have != "all "+tt.want || len(r.Commands) != 1 {
				t.Errorf("%q\nwant: all %s", r.Commands, tt.want)
			}
			about := slices.DeleteFunc(slices.Clone(r.Notes), func(n Note) bool {
				return n.Container == "" || strings.Contains(n.Text, "requests to the API server are") || // in every case
					strings.Contains(n.Text, "100 calls") || strings.Contains(n.Text, "a call may last") ||
					strings.Contains(n.Text, "written out")
			})
			if tt.note == "" && len(about) > 0 || !strings.Contains(fmt.Sprint(about), tt.note) {
				t.Errorf("notes %v, want %q", about, tt.note)
			}
		})
	}
}

func TestImageName(t *testing.T) {
	t.Parallel()
	for image, want := range map[string]string{
		"csi-provisioner": "csi-provisioner", "csi-provisioner:v5": "csi-provisioner",
		"host.example:5000/a/csi-attacher:v4.8.0": "csi-attacher", "host.example:5000/csi-attacher": "csi-attacher",
		"a/csi-attacher@sha256:0123": "csi-attacher", "a/csi-attacher:v4@sha256:01": "csi-attacher",
	} {
		if got := ImageName(image); got != want {
			t.Errorf("%s: %s, want %s", image, got, want)
		}
	}
}

// TestGroups expects two containers for sidecars that cannot share one.
func TestGroups(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		provisioner, attacher []string
		reason                string
	}{
		"another socket":  {nil, []string{"--csi-address=/other.sock"}, "its socket"},
		"another cluster": {nil, []string{"--kubeconfig=/k"}, "--kubeconfig"},
		"one per node":    {[]string{"--node-deployment"}, nil, "is distributed"},
		"Leases in two namespaces": {[]string{"--leader-election"}, []string{"--leader-election", "--leader-election-namespace=x"},
			"another namespace"},
		"a namespace that counts not":  {[]string{"--leader-election"}, []string{"--leader-election-namespace=x"}, ""},
		"the same socket with unix://": {nil, []string{"--csi-address=unix:///csi/csi.sock"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := migrated(t, deployment(sidecar("csi-provisioner", tt.provisioner...), sidecar("csi-attacher", tt.attacher...)), false)
			if want := map[bool]int{true: 1, false: 2}[tt.reason == ""]; len(r.Commands) != want ||
				!strings.Contains(fmt.Sprint(r.Notes), tt.reason) {
				t.Errorf("%q, want %d containers and the reason %q; notes: %v", r.Commands, want, tt.reason, r.Notes)
			}
		})
	}
}

// TestNamesOfSeveralDrivers expects the name of the driver in that of its container.
func TestNamesOfSeveralDrivers(t *testing.T) {
	t.Parallel()
	mounts := func(volume string) string { return "        volumeMounts: [{name: " + volume + ", mountPath: /csi}]\n" }
	driver := func(name, volume, path string) string {
		return "      - name: " + name + "\n        image: x\n        args: [\"--endpoint=$(E)\"]\n" +
			"        env: [{name: E, value: \"unix://" + path + "/csi.sock\"}]\n" + strings.Replace(mounts(volume), "/csi}", path+"}", 1)
	}
	a, b := sidecar("csi-provisioner")+mounts("a"), strings.Replace(sidecar("csi-attacher"), "csi.sock", "Block_x.sock", 1)+mounts("b")
	for _, tt := range []struct{ containers, want string }{
		{a + b, "storage-controller-csi storage-controller-block-x"},
		{a + b + driver("file", "a", "/run/file"), "storage-controller-file storage-controller-block-x"},
		{a + sidecar("csi-attacher") + mounts("a") + driver("file", "a", "/run/file"), "storage-controller"},
	} {
		r, names := migrated(t, deployment(tt.containers), false), []string{}
		for _, c := range r.Replacements {
			names = append(names, c.Container)
		}
		if have := strings.Join(names, " "); have != tt.want {
			t.Errorf("%q, want %q:\n%s", have, tt.want, r.Manifest)
		}
	}
}

func TestResources(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ first, second, want string }{
		"sums": {"requests: {cpu: 1m}, limits: {cpu: 2m}", "requests: {cpu: 1m}, limits: {cpu: 2m}",
			"requests: cpu: 2m limits: cpu: 4m"},
		"a request by its limit": {"limits: {cpu: 2m}", "requests: {cpu: 1m}, limits: {cpu: 2m}",
			"limits: cpu: 4m requests: cpu: 3m"},
		"requests by their limits":   {"limits: {cpu: 2m}", "limits: {cpu: 2m}", "limits: cpu: 4m"},
		"a limit that is dropped":    {"limits: {cpu: 2m}", "", "requests: cpu: 2m"},
		"a request without resource": {"requests: {cpu: 1m}", "", "requests: cpu: 1m"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			with := func(name, resources string) string {
				return sidecar(name) + "        resources: {" + resources + "}\n"
			}
			r := migrated(t, deployment(with("csi-provisioner", tt.first), with("csi-attacher", tt.second)), false)
			_, got, _ := strings.Cut(string(r.Manifest), "resources:")
			if got = strings.Join(strings.Fields(got), " "); got != tt.want {
				t.Errorf("%s, want %s", got, tt.want)
			}
		})
	}
}

// TestOldBooleans: kubectl reads YAML 1.1.
func TestOldBooleans(t *testing.T) {
	t.Parallel()
	r := migrated(t, `{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": {"template": {"spec": {"containers": [
		{"name": "csi-attacher", "image": "example/csi-attacher:v9", "args": ["--csi-address=/csi/csi.sock"],
		"env": [{"name": "A", "value": "off"}, {"name": "B", "value": "plain"}]}]}}}}`, false)
	if out := string(r.Manifest); !strings.Contains(out, `value: "off"`) || !strings.Contains(out, "value: plain") {
		t.Error(out)
	}
}

func TestTopolvm(t *testing.T) {
	t.Parallel()
	controller := func(image string, more string) string {
		return deployment("      - name: c\n        image: " + image + "\n        command: [/topolvm-controller" + more + "]\n")
	}
	const provisioner = "      - name: p\n        image: topolvm-with-sidecar:0.41.0\n        command: [/csi-provisioner, " +
		"--csi-address=/run/topolvm/csi-topolvm.sock, --leader-election=false]\n"
	for name, tt := range map[string]struct {
		manifest, want, note string
		level                Level
	}{
		"current": {controller("topolvm:0.40.1", ""), "topolvm --controllers=nodecontroller --leader-election=true", "written out",
			Information},
		"before v0.40": {controller("example/topolvm-with-sidecar:v0.39.0", ""), "--enable-webhooks=true --driver-health-endpoint=",
			"set --pvc-finalizer-mode=enforce", Changed},
		"of a digest":       {controller("topolvm@sha256:0", ""), "topolvm ", "set --pvc-finalizer-mode=enforce", Changed},
		"with a Lease":      {controller("topolvm:1.0.0", ", --leader-election-id=x"), "--leader-election-id=x ", "", Information},
		"its own socket":    {controller("topolvm:1.0.0", ", --csi-socket=/a/b.sock"), "--csi-socket=/a/b.sock ", "", Information},
		"a minimum size":    {controller("topolvm:1.0.0", ", --minimum-allocation-xfs=1Gi"), "-xfs=1Gi ", "takes effect now", Changed},
		"a flag of zap":     {controller("topolvm:1.0.0", ", --zap-devel"), "--zap-devel ", "has no effect", Changed},
		"an unknown flag":   {controller("topolvm:1.0.0", ", --nonsense"), "", "has no flag --nonsense", Required},
		"a patched program": {controller("topolvm:1.0.0-vendor.1", ""), "", "patched topolvm-controller", Required},
		"one with a Lease": {controller("topolvm-with-sidecar:0.41.0", "") + provisioner, "--controllers=provisioner,nodecontroller",
			"p had no leader election", Required},
		"the other way round": {controller("topolvm-with-sidecar:0.41.0", ", --leader-election=false") +
			strings.Replace(provisioner, "=false", "=true", 1), "--leader-election=true", "c had no leader election", Required},
		"without metrics": {controller("topolvm:1.0.0", ", --metrics-bind-address=0"), "--metrics-bind-address=0", "", Information},
		"old sidecars": {controller("topolvm-with-sidecar:0.30.0", "") + strings.Replace(provisioner, "0.41", "0.30", 1), "topolvm ",
			"names no version", Required},
		"sidecars of a release": {controller("topolvm-with-sidecar:0.41.0", "") + provisioner, "topolvm ", "names no version", Information},
		"with an attacher": {controller("topolvm-with-sidecar:0.41.0", "") + strings.Replace(provisioner, "provisioner", "attacher", 1),
			"all --controllers=attacher --csi-address=", "has no attacher", Information},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, err := Run([]byte(tt.manifest), Options{Image: image, Tables: tables()})
			if errors.Is(err, ErrNothing) != (tt.want == "") || err != nil && !errors.Is(err, ErrNothing) {
				t.Fatal(err)
			}
			noted := slices.ContainsFunc(r.Notes, func(n Note) bool { return n.Level == tt.level && strings.Contains(n.Text, tt.note) })
			if !strings.Contains(strings.Join(slices.Concat(r.Commands...), " "), tt.want) || !noted {
				t.Errorf("%q, want %q; notes %v, want %q", r.Commands, tt.want, r.Notes, tt.note)
			}
		})
	}
}

// TestOldProgram keeps a sidecar that this version does not replace, and notes it.
func TestOldProgram(t *testing.T) {
	t.Parallel()
	without := tables()
	delete(without.Commands, "attach")
	r, err := Run([]byte(deployment(sidecar("csi-attacher"))), Options{Image: image, Tables: without})
	if !errors.Is(err, ErrNothing) || !strings.Contains(fmt.Sprint(r.Notes), "csi-attacher was kept") {
		t.Errorf("%v, %v", err, r.Notes)
	}
}

func TestArgumentsThatAreNotAccepted(t *testing.T) {
	t.Parallel()
	strict := tables()
	strict.Accept = func(args, _ []string) error { return fmt.Errorf("got %s", strings.Join(args, " ")) }
	r, err := Run([]byte(deployment(sidecar("csi-attacher", "--v=${LEVEL}", "--timeout=x"))), Options{Image: image, Tables: strict})
	want := "got all --controllers=attacher --csi-address=/csi/csi.sock --timeout=x"
	if err != nil || !strings.Contains(fmt.Sprint(r.Notes), want) {
		t.Errorf("%v, %v", err, r.Notes)
	}
}

// TestLinesStay migrates a manifest with carriage returns, and one whose last line has no newline.
func TestLinesStay(t *testing.T) {
	t.Parallel()
	manifest := deployment(sidecar("csi-attacher")) + "      volumes:   # here"
	want := string(migrated(t, manifest+"\n", false).Manifest)
	if have := string(migrated(t, manifest, false).Manifest); have != want {
		t.Errorf("without a last newline: %s", Diff("want", "have", want, have))
	}
	have := string(migrated(t, strings.ReplaceAll(manifest+"\n", "\n", "\r\n"), false).Manifest)
	if have != strings.ReplaceAll(want, "\n", "\r\n") {
		t.Errorf("with carriage returns: %q, want %q", have, strings.ReplaceAll(want, "\n", "\r\n"))
	}
	if !strings.Contains(want, "volumes:   # here\n") {
		t.Errorf("the last line has changed: %s", want)
	}
}

// FuzzRun searches for a panic, and for a result that is invalid or can be migrated again.
func FuzzRun(f *testing.F) {
	f.Add(deployment(sidecar("csi-provisioner", "--v=5"), sidecar("csi-attacher")), false)
	f.Add("kind: List\nitems: [{kind: DaemonSet, spec: {template: {spec: {containers: [{image: csi-attacher, args: [-v]}]}}}}]", true)
	f.Add(deployment("      - &a {name: x, image: csi-attacher}\n      - *a\n"), false)
	f.Fuzz(func(t *testing.T, manifest string, perRole bool) {
		o := Options{Image: image, PerRole: perRole, Tables: tables()}
		r, err := Run([]byte(manifest), o)
		if err != nil {
			return
		}
		if again, err := Run(r.Manifest, o); !errors.Is(err, ErrNothing) {
			t.Errorf("the result can be migrated again (%v):\n%s\nfrom\n%s\nto\n%s", err, r.Manifest, manifest, again.Manifest)
		}
	})
}

func TestHealthCheck(t *testing.T) {
	t.Parallel()
	const other = "      - name: liveness-probe\n        image: livenessprobe:v2\n        args: [--csi-address=/other/csi.sock]\n"
	for name, tt := range map[string]struct {
		containers []string
		want, not  string
	}{
		"default port": {[]string{sidecar("livenessprobe"), sidecar("csi-attacher")}, "--driver-health-endpoint=:9808",
			"livenessprobe:v9"},
		"its own values": {[]string{sidecar("csi-attacher"), sidecar("livenessprobe", "--health-port", "1234", "--probe-timeout=3s")},
			"--driver-health-endpoint=:1234", "livenessprobe"},
		"variables": {[]string{sidecar("csi-attacher"), sidecar("livenessprobe", "--health-port=$(PORT)") +
			"        env: [{name: PORT, value: \"1\"}]\n"}, "PORT", "livenessprobe"},
		"metrics": {[]string{sidecar("csi-attacher"), sidecar("livenessprobe", "--http-endpoint=:1", "--metrics-path=/m")},
			"--driver-health-endpoint=:1", "/m"},
		"another driver": {[]string{sidecar("csi-attacher"), other}, "image: livenessprobe:v2", "--driver-health-endpoint"},
		"two of them": {[]string{sidecar("csi-attacher"), sidecar("livenessprobe"), sidecar("livenessprobe", "--health-port=1")},
			"image: example/livenessprobe:v9", "--driver-health-endpoint=:1"},
	} {
		for _, perRole := range []bool{false, true} {
			r := migrated(t, deployment(tt.containers...), perRole)
			got := string(r.Manifest)
			if !strings.Contains(got, tt.want) || strings.Contains(got, tt.not) {
				t.Errorf("%s: want %q and not %q:\n%s", name, tt.want, tt.not, got)
			}
		}
	}
	if _, err := Run([]byte(deployment(sidecar("livenessprobe"))), Options{Image: image, Tables: tables()}); !errors.Is(err, ErrNothing) {
		t.Errorf("livenessprobe without a sidecar that is replaced: %v", err)
	}
}
