// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// withZone adds a variable with that value to the lines of a container.
func withZone(container, value string) string {
	return container + "        env: [{name: TZ, value: " + value + "}]\n"
}

// TestVariableThatNoFlagNames expects a note if one of two values is dropped.
func TestVariableThatNoFlagNames(t *testing.T) {
	t.Parallel()
	provisioner := withZone(sidecar("csi-provisioner"), "A")
	for value, note := range map[string]string{"A": "", "B": "the variable TZ of csi-attacher was dropped"} {
		r := migrated(t, deployment(provisioner, withZone(sidecar("csi-attacher"), value)), false)
		if strings.Contains(fmt.Sprint(r.Notes), "variable") != (note != "") || !strings.Contains(fmt.Sprint(r.Notes), note) {
			t.Errorf("%s: notes %v, want %q", value, r.Notes, note)
		}
		if strings.Contains(fmt.Sprint(r.Notes), "(B)") {
			t.Errorf("a note has the value, which may be a secret: %v", r.Notes)
		}
	}
	// The socket has one address for all, even if its variables differ.
	address := func(path string) string {
		return "      - name: csi-attacher\n        image: csi-attacher:v1\n        args: [--csi-address=$(A)]\n        env: [{name: A, " +
			"value: " + path + "}]\n        volumeMounts: [{name: s, mountPath: " + path + "}]\n"
	}
	first := strings.NewReplacer("csi-attacher", "csi-provisioner").Replace(address("/csi"))
	if r := migrated(t, deployment(first, address("/other")), false); strings.Contains(fmt.Sprint(r.Notes), "variable") {
		t.Errorf("notes %v", r.Notes)
	}
}

// TestNameInAnAnnotation migrates a pod with an AppArmor annotation. The API server rejects a pod
// whose annotation names a container that does not exist.
func TestNameInAnAnnotation(t *testing.T) {
	t.Parallel()
	manifest := strings.Replace(deployment(sidecar("csi-provisioner"), sidecar("csi-attacher")), "  template:\n",
		"  template:\n    metadata:\n      annotations: {container.apparmor.security.beta.kubernetes.io/csi-attacher: unconfined, "+
			"example.com/other: csi-attacher}\n", 1)
	const note = "container.apparmor.security.beta.kubernetes.io/csi-attacher names csi-attacher, which was removed"
	if r := migrated(t, manifest, false); !r.Incomplete() || !strings.Contains(fmt.Sprint(r.Notes), note) ||
		strings.Contains(fmt.Sprint(r.Notes), "example.com/other") {
		t.Errorf("notes %v", r.Notes)
	}
	if r := migrated(t, manifest, true); strings.Contains(fmt.Sprint(r.Notes), "apparmor") {
		t.Errorf("the name has stayed; notes %v", r.Notes)
	}
}

func TestArgumentsThatAreRejected(t *testing.T) {
	t.Parallel()
	manifest := []byte(deployment(sidecar("csi-provisioner", "--timeout=soon")))
	o := Options{Image: image, Tables: tables()}
	for _, why := range []error{nil, errors.New("no duration")} {
		o.Tables.Accept = func(_, _ []string) error { return why }
		r, err := Run(manifest, o)
		notes := fmt.Sprint(r.Notes)
		if err != nil || strings.Contains(notes, "does not accept") != (why != nil) ||
			!strings.Contains(string(r.Manifest), "--timeout=soon") {
			t.Errorf("%v: %v, notes %s\n%s", why, err, notes, r.Manifest)
		}
	}
}

// TestNamesOfBothLists expects unique names for containers and init containers.
func TestNamesOfBothLists(t *testing.T) {
	t.Parallel()
	stays := "      - name: storage-controller\n        image: other\n"
	for name, inits := range map[string]string{"one that stays": stays, "a new one": sidecar("csi-attacher")} {
		r := migrated(t, strings.Replace(deployment(sidecar("csi-provisioner")), "      containers:\n", "      initContainers:\n"+inits+
			"      containers:\n", 1), false)
		if strings.Count(string(r.Manifest), "- name: storage-controller\n") != 1 ||
			!strings.Contains(string(r.Manifest), "- name: storage-controller-provision\n") {
			t.Errorf("%s:\n%s", name, r.Manifest)
		}
	}
}

// TestCommentsInsideContainers expects the comments of a replaced container in the result.
func TestCommentsInsideContainers(t *testing.T) {
	t.Parallel()
	container := func(name, comment string) string {
		return "      - name: " + name + "\n        image: " + name +
			":v1\n        args:\n        - --csi-address=/csi/csi.sock\n        # " + comment +
			"\n        #- --timeout=1m\n        env: []\n"
	}
	for _, perRole := range []bool{false, true} {
		r := migrated(t, deployment(container("csi-attacher", "of the first"), container("csi-provisioner", "of the second")), perRole)
		for _, want := range []string{"of the first", "of the second", "- --timeout=1m"} {
			if n := strings.Count(string(r.Manifest), want); n == 0 || n > 1 && want[0] != '-' {
				t.Errorf("%d times %q:\n%s", n, want, r.Manifest)
			}
		}
		if !perRole && !strings.Contains(string(r.Manifest), "# csi-provisioner: of the second") {
			t.Errorf("the comment lacks the name of its container:\n%s", r.Manifest)
		}
	}
}

// TestVariablesThatAreNotRead expects a note about the variables that neither a flag nor the program uses.
func TestVariablesThatAreNotRead(t *testing.T) {
	t.Parallel()
	for env, want := range map[string]string{
		"{name: ENABLE_FALLBACK, value: x}":                           "environment variables ENABLE_FALLBACK, and",
		"{name: LEVEL, value: x}":                                     "", // --v=$(LEVEL)
		"{name: HTTPS_PROXY, value: x}":                               "",
		"{name: POD_NAME, value: x}, {name: POD_NAMESPACE, value: x}": "",
		"{name: A, value: x}, {name: LEVEL, value: $(A)}":             "",
		"{name: A, value: x}, {name: B, value: x}":                    "environment variables A and B, and",
	} {
		r := migrated(t, deployment(sidecar("csi-provisioner", "--v=$(LEVEL)")+"        env: ["+env+"]\n"), false)
		if have := fmt.Sprint(r.Notes); !strings.Contains(have, want) || want == "" && strings.Contains(have, "environment variables") {
			t.Errorf("%s: notes %s, want %q", env, have, want)
		}
	}
}

// TestContainersThatAreKept expects a note about each sidecar that is not replaced.
func TestContainersThatAreKept(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		image, args string
		incomplete  bool // those that are replaced lack permissions
		want        string
	}{
		"a suffix":              {"host.example:5000/a/csi-attacher:v4.9.0_vendor.1", "", true, "the suffix _vendor.1 of its image"},
		"a digest":              {"csi-attacher@sha256:9f" + strings.Repeat("0a", 31), "", true, ""},
		"a release candidate":   {"csi-attacher:v4.9.0-rc1", "", true, ""},
		"a vendor's name":       {"ose-csi-external-attacher-rhel9:v4.9.0", "", true, ""},
		"another vendor's name": {"kubernetes-csi-attacher-fips:4.9.0", "", true, ""},
		"an unknown flag":       {"csi-attacher:v4.9.0", ", --more=1", true, "csi-attacher has no flag --more"},
		"a wrapper": {"our/attacher:v4.9.0\n        command: [/sbin/tini, --, /csi-attacher]", "", true,
			"tini starts csi-attacher and may do more than that. Call csi-attacher without tini"},
		"a wrapper, and its program in args": {"our/attacher:v4.9.0\n        command: [/tini]", ", --, csi-attacher", true,
			"tini starts csi-attacher"},
		"a shell":                     {"csi-attacher:v4.9.0\n        command: [sh, -c]", "", true, "sh starts csi-attacher"},
		"a name that is like another": {"sidecars/my-attacher-2:v4.9.0", "", false, "the name of its image is not that of a known sidecar"},
	} {
		manifest := deployment("      - name: a\n        image: " + tt.image + "\n        args: [--csi-address=/csi/csi.sock" + tt.args +
			"]\n")
		r, err := Run([]byte(manifest), Options{Image: image, Tables: tables()})
		if have := fmt.Sprint(r.Notes); errors.Is(err, ErrNothing) != (tt.want != "") || r.Incomplete() != tt.incomplete ||
			!strings.Contains(have, tt.want) {
			t.Errorf("%s: %v, notes %s, want %q", name, err, have, tt.want)
		}
	}
}

// TestObjectWithAnOwner expects a note that names the owner.
func TestObjectWithAnOwner(t *testing.T) {
	t.Parallel()
	manifest := strings.Replace(deployment(sidecar("csi-attacher")), "  name: d\n",
		"  name: d\n  ownerReferences: [{kind: Operator, name: o}]\n", 1)
	if r := migrated(t, manifest, false); !strings.Contains(fmt.Sprint(r.Notes), "Operator o creates this object and reverts changes") {
		t.Errorf("notes %v", r.Notes)
	}
}

// TestSharedGate expects a note if a feature gate of csi-provisioner is now one of the resizer, too.
func TestSharedGate(t *testing.T) {
	t.Parallel()
	const gate = "--feature-gates=VolumeAttributesClass=false"
	for _, tt := range []struct {
		resizer []string
		want    bool
	}{{nil, true}, {[]string{gate}, false}} {
		r := migrated(t, deployment(sidecar("csi-provisioner", gate), sidecar("csi-resizer", tt.resizer...)), false)
		if have := strings.Contains(fmt.Sprint(r.Notes), "VolumeAttributesClass=false also applies to the resizer"); have != tt.want {
			t.Errorf("%v: %t, want %t: %v", tt.resizer, have, tt.want, r.Notes)
		}
		resizer := strings.Replace(sidecar("csi-resizer", tt.resizer...), ":v9", ":v1", 1)
		notes := fmt.Sprint(migrated(t, deployment(sidecar("csi-provisioner", gate), resizer), false).Notes)
		if strings.Contains(notes, "MODIFY_VOLUME, the") {
			t.Errorf("%v: a second note about the gate: %s", tt.resizer, notes)
		}
	}
}

// TestGatesThatWereOff expects notes about feature gates that the sidecar had off, by default or by a flag, and that are on.
func TestGatesThatWereOff(t *testing.T) {
	t.Parallel()
	const recover, annotate, honor, attributes = "(RecoverVolumeExpansionFailure)", "(AnnotateFsResize)", "(HonorPVReclaimPolicy)",
		"set --feature-gates=VolumeAttributesClass=false"
	const create, restore = "Before snapshots are created, install the CRDs", "Before volumes are restored from snapshots, install the CRDs"
	const groups = "differs from that of csi-snapshotter: --feature-gates=CSIVolumeGroupSnapshot=false"
	for _, tt := range []struct{ sidecar, version, gates, want string }{
		{"csi-provisioner", "v5.0.0", "Topology=true", honor + attributes},
		{"csi-provisioner", "v5.1.0", "Topology=true", attributes},
		{"csi-provisioner", "v5.3.0", "HonorPVReclaimPolicy=false", honor + attributes},
		{"csi-provisioner", "v5.0.0", "HonorPVReclaimPolicy=true,VolumeAttributesClass=true", ""},
		{"csi-provisioner", "v6.0.0", "Topology=true", ""},
		{"csi-resizer", "v1.12.0", "", recover + annotate + attributes},
		{"csi-resizer", "v1.13.0", "VolumeAttributesClass=true", annotate},
		{"csi-resizer", "v2.2.1", "RecoverVolumeExpansionFailure=false,AnnotateFsResize=true", recover},
		{"csi-resizer", "v2.3.0", "", ""},
		{"csi-provisioner", "v2.2.0", "Topology=true,VolumeAttributesClass=true", honor + restore},
		{"csi-snapshotter", "v3.0.3", "CSIVolumeGroupSnapshot=true", create},
		{"csi-snapshotter", "v8.6.0", "ReleaseLeaderElectionOnExit=true", groups},
		{"csi-snapshotter", "v8.6.0", "CSIVolumeGroupSnapshot=true", ""},
		{"csi-snapshotter", "v8.7.0", "", ""},
	} {
		manifest := strings.Replace(deployment(sidecar(tt.sidecar, "--feature-gates="+tt.gates)), ":v9", ":"+tt.version, 1)
		notes, have := fmt.Sprint(migrated(t, manifest, false).Notes), ""
		for _, note := range []string{recover, annotate, honor, attributes, groups, create, restore} {
			if strings.Contains(notes, note) {
				have += note
			}
		}
		if have != tt.want {
			t.Errorf("%s %s with %q: notes %q, want %q", tt.sidecar, tt.version, tt.gates, have, tt.want)
		}
	}
}

// TestTimeoutsOfCalls: csi-resizer v2.3 has a timeout for each call. Without --timeout, the other keeps its default.
func TestTimeoutsOfCalls(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ args, want string }{
		{"--resize-timeout=5m", "--resize-timeout=5m --modify-timeout=10s"},
		{"--modify-timeout=5m --leader-election", "--modify-timeout=5m --leader-election --resize-timeout=10s"},
		{"--resize-timeout=5m --timeout=1m", "--resize-timeout=5m --timeout=1m"},
	} {
		for mode, perRole := range modes {
			r := migrated(t, deployment(sidecar("csi-resizer", strings.Fields(tt.args)...)), perRole)
			if have := strings.Join(r.Commands[0], " "); !strings.HasSuffix(have, " --csi-address=/csi/csi.sock "+tt.want) {
				t.Errorf("%s, %s: %q, want %q", tt.args, mode, have, tt.want)
			}
			elects, notes := strings.Contains(tt.args, "--leader-election"), fmt.Sprint(r.Notes)
			if elects && !strings.Contains(notes, "a call may last 5m0s (--modify-timeout)") {
				t.Errorf("notes %s", notes)
			}
		}
	}
}

// TestReportJoins expects one entry for the same note about several containers.
func TestReportJoins(t *testing.T) {
	t.Parallel()
	r := Result{Notes: []Note{{Changed, "d", "a", "x"}, {Changed, "d", "b", "y"}, {Changed, "d", "b", "x"}, {Required, "", "", "z"}}}
	const want = "You must do, before the rollout:\n  the manifest\n    - z\n" +
		"Changed meaning:\n  d, container a and b\n    - x\n  d, container b\n    - y\n"
	if have := r.Report(); have != want {
		t.Errorf("%s, want:\n%s", have, want)
	}
}

// TestFlagTable expects the flags of a sidecar before and after.
func TestFlagTable(t *testing.T) {
	t.Parallel()
	r := migrated(t, deployment(sidecar("csi-provisioner", "--v=2", "--worker-threads=3", "--leader-election=true"),
		sidecar("csi-attacher", "--v=5", "--leader-election", "--resync=1m", "--dummy")), false)
	for _, want := range []string{
		"container storage-controller replaces csi-provisioner and csi-attacher\n  csi-provisioner (example/csi-provisioner:v9)\n",
		"\n    --v=2                        → --v=5\n", "\n    --worker-threads=3           → --provisioner-worker-threads=3\n",
		"\n    (default)                    → --provisioner-timeout=10s\n", "\n    --leader-election            → same\n",
		"\n    --dummy=true                 → (dropped)\n", "\n    --resync=1m                  → same\n",
		"\nInformation:\n  Deployment d, container storage-controller\n    - written out",
	} {
		if !strings.Contains(r.Report(), want) {
			t.Errorf("want %q:\n%s", want, r.Report())
		}
	}
}

// TestAliases expects that a flag of the other sidecars does not set the resizer, which has its name as an alias.
func TestAliases(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		provisioner, attacher, resizer []string
		want                           string
	}{
		"workers": {[]string{"--worker-threads=7"}, []string{"--worker-threads=7"}, nil,
			" --provisioner-worker-threads=7 --attacher-worker-threads=7 "},
		"resync": {nil, []string{"--resync=0"}, nil, " --attacher-resync=0 "},
		"workers of the resizer": {nil, []string{"--worker-threads=7"}, []string{"--worker-threads=7", "--resync=1m"},
			" --attacher-worker-threads=7 --workers=7 --resync-period=1m "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := migrated(t, deployment(sidecar("csi-provisioner", tt.provisioner...), sidecar("csi-attacher", tt.attacher...),
				sidecar("csi-resizer", tt.resizer...)), false)
			have := strings.Join(r.Commands[0], " ") + " "
			for _, other := range []string{"provisioner", "attacher", "resizer"} { // their default timeouts are written out
				have = strings.ReplaceAll(have, " --"+other+"-timeout=10s", "")
			}
			if !strings.HasSuffix(have, "/csi/csi.sock"+tt.want) {
				t.Errorf("%s\nwant: %s", have, tt.want)
			}
		})
	}
}

// TestMergedContainer merges fields that have no value, or one that only looks the same.
func TestMergedContainer(t *testing.T) {
	t.Parallel()
	container := func(name, fields string, args ...string) string {
		joined := strings.Join(args, ", ")
		return fmt.Sprintf("      - name: %s\n        image: example/%[1]s:v9\n        args: [%s]\n%s", name, joined, fields)
	}
	const variable = "        env: [{name: T, valueFrom: {configMapKeyRef: {name: c, key: %s}}}]\n"
	port := "        ports: [{name: http, containerPort: %d%s}]\n"
	for name, tt := range map[string]struct{ provisioner, attacher, want, not string }{
		"OpenShift's version": {"      - name: a\n        image: ose-csi-external-provisioner-rhel9:v4.19\n", sidecar("csi-attacher"),
			"names no version", "Topology=false"},
		"OKD's version": {"      - name: a\n        image: openshift/origin-csi-external-provisioner:4.20.0\n" +
			"        args: [--csi-address=/csi/csi.sock]\n", sidecar("csi-attacher"),
			"names no version", "Topology=false"},
		"no security context": {container("csi-provisioner", "        securityContext:\n"), container("csi-attacher", ""),
			"runAsUser: 0", "null"},
		"the default protocol": {
			container("csi-provisioner", fmt.Sprintf(port, 8080, ", protocol: TCP"), `"--http-endpoint=:8080"`),
			container("csi-attacher", fmt.Sprintf(port, 8081, ", hostPort: 8081"), `"--http-endpoint=:8081"`),
			"containerPort: 8080, protocol: TCP}", "hostPort",
		},
		"the port of the host": {
			container("csi-provisioner", "", `"--http-endpoint=:8080"`),
			container("csi-attacher", fmt.Sprintf(port, 8081, ", hostPort: 8081"), `"--http-endpoint=:8081"`),
			"containerPort: 8080, hostPort: 8080", "hostPort: 8081",
		},
		"ports of one name": {
			container("csi-provisioner", "        ports: [{name: healthz, containerPort: 8080}]\n"),
			container("livenessprobe", "        ports: [{name: healthz, containerPort: 9808}]\n"+
				"        livenessProbe: {httpGet: {path: /healthz, port: healthz}}\n"),
			"- {containerPort: 9808}\n        livenessProbe: {httpGet: {path: /healthz, port: 9808}}", "port: healthz",
		},
		"a moved port of one name": {
			container("csi-provisioner", "        ports: [{name: http, containerPort: 9000}]\n", `"--http-endpoint=:8080"`),
			container("csi-attacher", "        ports: [{name: http, containerPort: 8081}]\n"+
				"        livenessProbe: {tcpSocket: {port: http}}\n", `"--http-endpoint=:8081"`),
			"- {containerPort: 8080}\n        livenessProbe: {tcpSocket: {port: 8080}}", "port: http}}",
		},
		"an address that the kubelet does not reach": {
			container("csi-provisioner", "", `"--http-endpoint=127.0.0.1:8080"`),
			container("csi-attacher", "        livenessProbe: {httpGet: {path: /healthz, port: 8081}}\n", `"--http-endpoint=:8081"`),
			"- \"--http-endpoint=:8081\"", "port: 8080",
		},
		"addresses that the kubelet does not reach": {
			container("csi-provisioner", "", `"--http-endpoint=localhost:8080"`),
			container("csi-attacher", "        livenessProbe: {tcpSocket: {port: 8081, host: localhost}}\n", `"--http-endpoint=[::1]:8081"`),
			"tcpSocket: {port: 8080, host", "port: 8081",
		},
		"the default socket": {
			container("csi-provisioner", "        volumeMounts: [{name: s, mountPath: /run/csi}]\n"),
			container("csi-attacher", "        volumeMounts: [{name: s, mountPath: /csi}]\n", "--csi-address=/csi/socket"),
			"mountPath: /run/csi", "/csi/socket",
		},
		"the namespace of Leases without election": {
			sidecar("csi-provisioner", "--leader-election"), sidecar("csi-attacher", "--leader-election-namespace=x"),
			"--leader-election", "=x",
		},
		"a renamed variable": {
			container("csi-provisioner", fmt.Sprintf(variable, "a"), "--timeout=$(T)"),
			container("csi-attacher", fmt.Sprintf(variable, "b"), "--timeout=$(T)"),
			"--attacher-timeout=$(ATTACHER_T)", "--timeout=$(ATTACHER_T)",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			manifest := strings.Replace(deployment(tt.provisioner, tt.attacher), "{runAsUser: 1}", "{}", 1)
			got := string(migrated(t, manifest, false).Manifest)
			if !strings.Contains(got, tt.want) || strings.Contains(got, tt.not) {
				t.Errorf("want %q and not %q in\n%s", tt.want, tt.not, got)
			}
		})
	}
}
