// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/storage-controller/storage-controller/internal/tools/migrate"
)

func TestErrors(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ manifest, want string }{
		"empty":          {"", "nothing to replace"},
		"only comments":  {"# nothing\n---\n# here\n", "nothing to replace"},
		"another object": {"kind: ConfigMap\ndata: {image: csi-attacher}\n", "nothing to replace"},
		"other containers": {deployment("      - {name: node-driver-registrar, image: csi-node-driver-registrar}\n"),
			"nothing to replace"},
		"a provisioner of another kind": {deployment("      - {name: p, image: example/nfs-subdir-external-provisioner:v4}\n"),
			"nothing to replace"},
		"a driver whose name ends alike": {deployment("      - {name: p, image: example/my-csi-provisioner:v4}\n"),
			"nothing to replace"},
		"a livenessprobe alone": {deployment(sidecar("livenessprobe")), "nothing to replace"},
		"containers that are no list": {"kind: Deployment\nspec: {template: {spec: {containers: csi-attacher}}}\n",
			"nothing to replace"},
		"a template that parses": {"kind: Deployment\nmetadata: {name: \"{{ .Release.Name }}\"}\n",
			migrate.ErrNothing.Error() + ". The input looks like a template"},
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
			_, err := migrate.Run([]byte(tt.manifest), migrate.Options{Image: image, Tables: tables()})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
			if nothing := strings.HasPrefix(tt.want, "nothing to replace"); errors.Is(err, migrate.ErrNothing) != nothing {
				t.Errorf("ErrNothing: %t, want %t", !nothing, nothing)
			}
		})
	}
}

// TestSection checks the section of one sidecar. Its arguments are copied; the flags after them are appended.
func TestSection(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		sidecar, version, args, appended, note string
	}{
		"defaults":      {"csi-provisioner", "v9", "", "--timeout=10s", ""},
		"old spellings": {"csi-provisioner", "v9", "-v5 -worker_threads 7 --leader_election word", "--timeout=10s", ""},
		"retired flags": {"csi-resizer", "v9", "--csiTimeout 3s --enable-leader-election --connection-timeout=5s", "", ""},
		"another lock": {"csi-attacher", "v9", "--timeout=1s --leader-election-type=configmaps", "--worker-threads=10",
			"used configmaps"},
		"a burst without its limit": {"csi-attacher", "v9", "--kube-api-burst=50", "--worker-threads=10 --kube-api-qps=5",
			""},
		"distributed, with a Lease": {"csi-snapshotter", "v9", "--node-deployment --leader-election", "--leader-election=false", ""},
		"two timeouts of calls":     {"csi-resizer", "v9", "--resize-timeout=5m", "--modify-timeout=10s", ""},
		"the timeout of all calls":  {"csi-resizer", "v9", "--resize-timeout=5m --timeout=1m", "", ""},
		"the longest call": {"csi-resizer", "v9", "--modify-timeout=5m --leader-election", "--resize-timeout=10s",
			"may last 5m0s (--modify-timeout)"},
		"csi-attacher v3": {"csi-attacher", "v3.5.0", "", "--default-fstype=ext4 --worker-threads=10", ""},
		"csi-provisioner v1": {"csi-provisioner", "v1.6.0", "",
			"--timeout=10s --prevent-volume-mode-conversion=false --default-fstype=ext4 " +
				"--feature-gates=Topology=false,VolumeAttributesClass=false",
			"Before volumes are restored from snapshots, install the CRDs"},
		"csi-provisioner v5.0": {"csi-provisioner", "v5.0.0", "--timeout=1s --feature-gates=Topology=true",
			"--feature-gates=VolumeAttributesClass=false", "HonorPVReclaimPolicy"},
		"csi-provisioner v5.1": {"csi-provisioner", "v5.1.0", "--timeout=1s", "--feature-gates=VolumeAttributesClass=false",
			"not HonorPVReclaimPolicy"},
		"a gate that cannot be turned off": {"csi-provisioner", "v6.0.0", "--timeout=1s --feature-gates=HonorPVReclaimPolicy=false", "",
			"--feature-gates=HonorPVReclaimPolicy=false has no effect"},
		"csi-resizer v1.12": {"csi-resizer", "v1.12.0", "--timeout=1s", "--feature-gates=VolumeAttributesClass=false",
			"(feature gate RecoverVolumeExpansionFailure)"},
		"csi-resizer v2.2": {"csi-resizer", "v2.2.1", "--timeout=1s", "", "(AnnotateFsResize)"},
		"csi-resizer v2.3": {"csi-resizer", "v2.3.0", "--timeout=1s", "", "not AnnotateFsResize"},
		"csi-snapshotter v3": {"csi-snapshotter", "v3.0.3", "--enable-volume-group-snapshots", "",
			"Before snapshots are created, install"},
		"csi-snapshotter v8.6": {"csi-snapshotter", "v8.6.0", "", "--feature-gates=CSIVolumeGroupSnapshot=false", ""},
		"csi-snapshotter v8.7": {"csi-snapshotter", "v8.7.0", "", "", ""},
		"no version":           {"csi-resizer", "latest", "--timeout=1s", "", "names no version"},
		"a rebuild of Amazon EBS": {"csi-resizer", "v1.14.0-eksbuild.4", "--timeout=1s",
			"--feature-gates=VolumeAttributesClass=false", ""},
		"a rebuild of EKS Distro": {"csi-resizer", "v1.14.0-eks-1-31-5", "--timeout=1s",
			"--feature-gates=VolumeAttributesClass=false", ""},
		"an argument after the last": {"csi-snapshotter", "v9", "--v=1 -- csi-attacher", "", `from "--" on were dropped`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			args := strings.Fields(tt.args)
			r := migrated(t, strings.Replace(deployment(sidecar(tt.sidecar, args...)), ":v9", ":"+tt.version, 1), false)
			copied, _, _ := strings.Cut(tt.args, " -- ")
			want := strings.Fields("- all - -- - " + tt.sidecar + " - --csi-address=/csi/csi.sock")
			for _, arg := range slices.Concat(strings.Fields(copied), strings.Fields(tt.appended)) {
				want = append(want, "-", arg)
			}
			_, after, _ := strings.Cut(string(r.Manifest), "args:\n")
			have := strings.Fields(strings.ReplaceAll(after, `"`, ""))
			if !slices.Equal(have, want) {
				t.Errorf("%q, want %q", have, want)
			}
			unwanted, isUnwanted := strings.CutPrefix(tt.note, "not ")
			if notes := fmt.Sprint(r.Notes); isUnwanted == strings.Contains(notes, unwanted) {
				t.Errorf("notes %s, want %q", notes, tt.note)
			}
		})
	}
}

// TestGroups migrates two sidecars that share a container unless there is a reason.
func TestGroups(t *testing.T) {
	t.Parallel()
	const address = "--csi-address=/csi/csi.sock"
	from := func(key string) string {
		return "        env: [{name: T, valueFrom: {configMapKeyRef: {name: c, key: " + key + "}}}]\n"
	}
	value := func(name, value string) string { return "        env: [{name: " + name + ", value: " + value + "}]\n" }
	mount := func(volume, path string) string {
		return "        volumeMounts: [{name: " + volume + ", mountPath: " + path + "}]\n"
	}
	for name, tt := range map[string]struct {
		first, second string
		reason        string // why they do not share a container, "" if they do
		want          string // part of the manifest
	}{
		"nothing special": {sidecar("csi-provisioner"), sidecar("csi-attacher"), "", ""},
		"another socket":  {sidecar("csi-provisioner"), container("csi-attacher", "", "--csi-address=/other.sock"), "its socket", ""},
		"the same socket with unix://": {sidecar("csi-provisioner"), container("csi-attacher", "", "--csi-address=unix:///csi/csi.sock"),
			"", "--csi-address=unix:///csi/csi.sock"},
		"another cluster": {sidecar("csi-provisioner"), sidecar("csi-attacher", "--kubeconfig=/k"), "--kubeconfig", ""},
		"another log format": {sidecar("csi-provisioner", "--logging-format=json"), sidecar("csi-attacher",
			"--logging-format=text"), "--logging-format", ""},
		"one per node": {sidecar("csi-provisioner", "--node-deployment"), sidecar("csi-attacher"), "is distributed", ""},
		"twice": {sidecar("csi-attacher"), strings.Replace(sidecar("csi-attacher"), "name: csi", "name: second-csi",
			1), "another csi-attacher", ""},
		"Leases in namespaces": {sidecar("csi-provisioner", "--leader-election"), sidecar("csi-attacher", "--leader-election",
			"--leader-election-namespace=x"), "", ""},
		"another volume": {sidecar("csi-provisioner") + mount("s", "/csi"), sidecar("csi-attacher") +
			"        volumeMounts: [{name: s, mountPath: /csi}, {name: s, mountPath: /x}]\n", "", "/x"},
		"another volume at a path": {sidecar("csi-provisioner") +
			"        volumeMounts: [{name: s, mountPath: /csi}, {name: a, mountPath: /x}]\n",
			sidecar("csi-attacher") + "        volumeMounts: [{name: s, mountPath: /csi}, {name: b, mountPath: /x}]\n",
			"mounts another volume at /x", ""},
		"another variable": {container("csi-provisioner", value("T", "1s"), address, "--timeout=$(T)"),
			container("csi-attacher", value("T", "2s"), address, "-timeout", "$(T)"), "", "-timeout\"\n        - \"2s\"\n"},
		"a variable in another": {container("csi-provisioner", value("T", "1"), address, "--timeout=$(T)s"), container("csi-attacher",
			"        env: [{name: U, value: 2}, {name: T, value: $(U)0}]\n", address, "--timeout=$(T)s"), "", "--timeout=$(U)0s"},
		"another variable of a ConfigMap": {container("csi-provisioner", from("a"), address, "--timeout=$(T)"),
			container("csi-attacher", from("b"), address, "--timeout=$(T)"), "its variable T differs", ""},
		"a variable of envFrom": {container("csi-provisioner", value("T", "1s"), address, "--timeout=$(T)"), container("csi-attacher",
			"        envFrom: [{configMapRef: {name: c}}]\n", address, "--timeout=$(T)"), "its variable T differs", ""},
		"another envFrom": {sidecar("csi-provisioner") + "        envFrom: [{configMapRef: {name: c}}]\n", sidecar("csi-attacher") +
			"        envFrom: [{configMapRef: {name: d}}]\n", "its envFrom differs", ""},
		"a variable that the program reads": {sidecar("csi-provisioner") + value("NODE_NAME", "a"), sidecar("csi-attacher") +
			value("NODE_NAME", "b"), "its variable NODE_NAME differs", ""},
		"a variable without use": {sidecar("csi-provisioner") + value("TZ", "a"), sidecar("csi-attacher") + value("TZ", "b"), "",
			"the variable TZ of csi-attacher was dropped"},
		"another mount path": {container("csi-provisioner", mount("s", "/csi"), address), container("csi-attacher", mount("s", "/other"),
			"--csi-address=/other/csi.sock"), "", "- --\n        - csi-attacher\n        - \"--csi-address=/csi/csi.sock\""},
		"the default socket": {container("csi-provisioner", mount("s", "/run/csi")), container("csi-attacher", mount("s", "/csi"),
			"-csi-address", "/csi/socket"), "", "-csi-address\"\n        - \"/run/csi/socket\""},
		"the default socket of the second": {container("csi-provisioner", mount("s", "/csi"), "--csi-address=/csi/socket"),
			container("csi-attacher", mount("s", "/run/csi")), "",
			"csi-attacher\n        - --worker-threads=10\n        - --csi-address=/csi/socket"},
		"a livenessprobe": {sidecar("livenessprobe", "--health-port", "1234"), sidecar("csi-attacher"), "",
			"- all\n        - --\n        - livenessprobe\n        - \"--csi-address=/csi/csi.sock\"\n        - \"--health-port\""},
		"a livenessprobe with another path": {sidecar("csi-attacher") + mount("s", "/csi"), container("livenessprobe", mount("s", "/l"),
			"--csi-address=/l/csi.sock"), "", "mountPath: /l}"},
		"a livenessprobe of another driver": {sidecar("csi-attacher"), container("livenessprobe", "", "--csi-address=/other.sock"), "",
			"image: example/livenessprobe:v9"},
		"OpenShift's version": {"      - name: a\n        image: ose-csi-external-provisioner-rhel9:v4.19\n" +
			"        args: [--csi-address=/csi/csi.sock]\n", sidecar("csi-attacher"), "", "names no version"},
		"OKD's version": {"      - name: a\n        image: openshift/origin-csi-external-provisioner:4.20.0\n" +
			"        args: [--csi-address=/csi/csi.sock]\n", sidecar("csi-attacher"), "", "names no version"},
		"no security context": {sidecar("csi-provisioner") + "        securityContext:\n", sidecar("csi-attacher"), "", "runAsUser: 0"},
		"ports of one name": {sidecar("csi-provisioner") + "        ports: [{name: h, containerPort: 8080}]\n", sidecar("csi-attacher") +
			"        ports: [{name: h, containerPort: 81}]\n        livenessProbe: {httpGet: {path: /healthz, port: h}}\n", "",
			"- {containerPort: 81}\n        livenessProbe: {httpGet: {path: /healthz, port: 81}}"},
		"a port of the host": {sidecar("csi-provisioner") + "        ports: [{containerPort: 80, protocol: TCP}]\n",
			sidecar("csi-attacher") +
				"        ports: [{containerPort: 80}, {containerPort: 80, protocol: UDP, hostPort: 1}]\n", "",
			"- {containerPort: 80, protocol: TCP}\n        - {containerPort: 80, protocol: UDP, hostPort: 1}\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := migrated(t, strings.Replace(deployment(tt.first, tt.second), "{runAsUser: 1}", "{}", 1), false)
			containers := map[bool]int{true: 1, false: 2}[tt.reason == ""]
			manifest := strings.ReplaceAll(string(r.Manifest), "\n      #  ", "")
			if len(r.Commands) != containers || !strings.Contains(fmt.Sprint(r.Notes), tt.reason) || !strings.Contains(manifest,
				tt.want) {
				t.Errorf("%q, want %d containers, the reason %q, and %q in:\n%s", r.Commands, containers, tt.reason, tt.want, r.Manifest)
			}
			if strings.Contains(fmt.Sprint(r.Notes), "(b)") {
				t.Errorf("a note has a value, which may be a secret: %v", r.Notes)
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

// TestNamesOfBothLists expects unique names for containers and init containers.
func TestNamesOfBothLists(t *testing.T) {
	t.Parallel()
	stays := "      - name: storage-controller\n        image: other\n"
	for name, inits := range map[string]string{"one that stays": stays, "a new one": sidecar("csi-attacher")} {
		r := migrated(t, strings.Replace(deployment(sidecar("csi-provisioner")), "      containers:\n", "      initContainers:\n"+inits+
			"      containers:\n", 1), false)
		if strings.Count(string(r.Manifest), "- name: storage-controller\n") != 1 ||
			!strings.Contains(string(r.Manifest), "- name: storage-controller-provisioner\n") {
			t.Errorf("%s:\n%s", name, r.Manifest)
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
		with := func(name, resources string) string {
			return sidecar(name) + "        resources: {" + resources + "}\n"
		}
		r := migrated(t, deployment(with("csi-provisioner", tt.first), with("csi-attacher", tt.second)), false)
		_, got, _ := strings.Cut(string(r.Manifest), "resources:")
		got = strings.Join(strings.Fields(got), " ")
		if got != tt.want {
			t.Errorf("%s: %s, want %s", name, got, tt.want)
		}
	}
}

// TestText checks the text around and in the new containers.
func TestText(t *testing.T) {
	t.Parallel()
	annotated := strings.Replace(deployment(sidecar("csi-provisioner"), sidecar("csi-attacher")), "  template:\n",
		"  template:\n    metadata:\n      annotations: {container.apparmor.security.beta.kubernetes.io/csi-attacher: unconfined, "+
			"example.com/other: csi-attacher}\n", 1)
	commented := func(name, comment string) string {
		return "      - name: " + name + "\n        image: " + name +
			":v9\n        args:\n        - --csi-address=/csi/csi.sock\n        # " +
			comment + "\n        #- --timeout=1m\n        env: []\n"
	}
	both := deployment(commented("csi-attacher", "of the first"), commented("csi-provisioner", "of the second"))
	for name, tt := range map[string]struct {
		manifest   string
		perRole    bool
		wants, not string // parts of the manifest, separated by |
	}{
		"old booleans in JSON": {`{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": {"template": {"spec":
			{"containers": [{"name": "csi-attacher", "image": "example/csi-attacher:v9", "args": ["--csi-address=/csi/csi.sock"],
			"env": [{"name": "A", "value": "off"}, {"name": "B", "value": "plain"}]}]}}}}`, false, `value: "off"|value: plain`, ""},
		"comments inside":           {both, false, "# csi-attacher: of the first|# csi-provisioner: of the second|: - --timeout=1m", ""},
		"comments inside, per role": {both, true, ": of the first|: of the second|: - --timeout=1m", ""},
		"an annotation with a name": {annotated, false, "kubernetes.io/csi-attacher names csi-attacher, which was removed",
			"other names"},
		"a name that stays": {annotated, true, "name: csi-attacher", "was removed"},
		"an owner": {strings.Replace(deployment(sidecar("csi-attacher")), "  name: d\n",
			"  name: d\n  ownerReferences: [{kind: Operator, name: o}]\n", 1),
			false, "Operator o creates this object", ""},
		"a livenessprobe, per role": {deployment(sidecar("livenessprobe", "--v=4"), sidecar("csi-attacher")), true,
			"- name: livenessprobe\n        image: " + image +
				"\n        args:\n        - livenessprobe\n        - \"--csi-address=/csi/csi.sock\"\n" +
				"        - \"--v=4\"\n|- name: csi-attacher\n        image: " + image +
				"\n        args:\n        - all\n        - --\n        - csi-attacher\n", ""},
		"a variable that nothing reads": {deployment(sidecar("csi-attacher") +
			"        env: [{name: A, value: x}, {name: B, value: x}]\n"), false,
			"environment variables A and B,", ""},
		"variables that are read": {deployment(sidecar("csi-attacher", "--v=$(LEVEL)") +
			"        env: [{name: A, value: x}, {name: LEVEL, value: $(A)}, {name: HTTPS_PROXY, value: x}, " +
			"{name: POD_NAME, value: x}]\n"), false,
			"", "environment variables"},
		"the variable of a rebuild": {strings.Replace(deployment(sidecar("csi-resizer")+
			"        env: [{name: ENABLE_VAC_FALLBACK, value: x}]\n"),
			":v9", ":v2.1.0-eksbuild.2", 1), false, "ENABLE_VAC_FALLBACK", "environment variables"},
		"a result that is refused": {deployment(sidecar("csi-attacher", "--v=${LEVEL}", "--timeout=x")), false, "--timeout=x", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			have := strings.ReplaceAll(string(migrated(t, tt.manifest, tt.perRole).Manifest), "\n      #  ", "")
			for want := range strings.SplitSeq(tt.wants, "|") {
				if !strings.Contains(have, want) {
					t.Errorf("want %q:\n%s", want, have)
				}
			}
			if tt.not != "" && strings.Contains(have, tt.not) {
				t.Errorf("want no %q:\n%s", tt.not, have)
			}
		})
	}
}

// TestLinesStay migrates a manifest with carriage returns, and one whose last line has no newline.
func TestLinesStay(t *testing.T) {
	t.Parallel()
	manifest := deployment(sidecar("csi-attacher")) + "      volumes:   # here"
	want := string(migrated(t, manifest+"\n", false).Manifest)
	if have := string(migrated(t, manifest, false).Manifest); have != want {
		t.Errorf("without a last newline: %s", migrate.Diff("want", "have", want, have))
	}
	have := string(migrated(t, strings.ReplaceAll(manifest+"\n", "\n", "\r\n"), false).Manifest)
	if have != strings.ReplaceAll(want, "\n", "\r\n") {
		t.Errorf("with carriage returns: %q, want %q", have, strings.ReplaceAll(want, "\n", "\r\n"))
	}
	if !strings.Contains(want, "volumes:   # here\n") {
		t.Errorf("the last line has changed: %s", want)
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
		"a suffix":                {"host.example:5000/a/csi-attacher:v4.9.0_vendor.1", "", true, "the suffix _vendor.1 of its image"},
		"like that of a rebuild":  {"csi-attacher:v4.9.0-eksbuild.1.patched", "", true, "the suffix -eksbuild.1.patched of its image"},
		"a rebuild of Amazon EBS": {"public.ecr.aws/csi-components/csi-attacher:v4.9.0-eksbuild.4", "", true, ""},
		"a rebuild of EKS Distro": {"public.ecr.aws/eks-distro/kubernetes-csi/external-attacher:v4.9.0-eks-1-33-6", "", true, ""},
		"a digest":                {"csi-attacher@sha256:9f" + strings.Repeat("0a", 31), "", true, ""},
		"a release candidate":     {"csi-attacher:v4.9.0-rc1", "", true, ""},
		"a vendor's name":         {"ose-csi-external-attacher-rhel9:v4.9.0", "", true, ""},
		"another vendor's name":   {"kubernetes-csi-attacher-fips:4.9.0", "", true, ""},
		"an unknown flag":         {"csi-attacher:v4.9.0", ", --more=1", true, "csi-attacher has no flag --more"},
		"an unknown gate": {"csi-attacher:v4.9.0", ", '--feature-gates=Topology=true,Nope=true'", true,
			"csi-attacher has no feature gate Nope"},
		"a gate of a variable": {"csi-attacher:v4.9.0", ", --feature-gates=$(GATES)", true, ""},
		"a wrapper": {"our/attacher:v4.9.0\n        command: [/sbin/tini, --, /csi-attacher]", "", true,
			"tini starts csi-attacher and may do more than that. Call csi-attacher without tini"},
		"a wrapper, and its program in args": {"our/attacher:v4.9.0\n        command: [/tini]", ", --, csi-attacher", true,
			"tini starts csi-attacher"},
		"a shell": {"csi-attacher:v4.9.0\n        command: [sh, -c]", "", true, "sh starts csi-attacher"},
		"a name that is like another": {"sidecars/my-attacher-2:v4.9.0", "", false,
			"the name of its image is not that of a known sidecar"},
	} {
		manifest := deployment("      - name: a\n        image: " + tt.image + "\n        args: [--csi-address=/csi/csi.sock" + tt.args +
			"]\n")
		r, err := migrate.Run([]byte(manifest), migrate.Options{Image: image, Tables: tables()})
		if have := fmt.Sprint(r.Notes); errors.Is(err, migrate.ErrNothing) != (tt.want != "") || r.Incomplete() != tt.incomplete ||
			!strings.Contains(have, tt.want) {
			t.Errorf("%s: %v, notes %s, want %q", name, err, have, tt.want)
		}
	}
}

func TestTopolvm(t *testing.T) {
	t.Parallel()
	controller := func(image string, more string) string {
		return deployment("      - name: c\n        image: " + image + "\n        command: [/topolvm-controller" + more + "]\n")
	}
	const provisioner = "      - name: p\n        image: topolvm-with-sidecar:0.41.0\n        command: [/csi-provisioner, " +
		"--csi-address=/run/topolvm/csi-topolvm.sock, --leader-election=false]\n"
	probe := container("livenessprobe", "", "--csi-address=/run/topolvm/csi-topolvm.sock", "--health-port=1", "--probe-timeout=4s")
	for name, tt := range map[string]struct {
		manifest, want, note string
		level                migrate.Level
	}{
		"current": {controller("topolvm:0.40.1", ""), "topolvm --controllers=nodecontroller --leader-election=true", "",
			migrate.Information},
		"before v0.40": {controller("example/topolvm-with-sidecar:v0.39.0", ""), "--enable-webhooks=true --driver-health-endpoint=",
			"set --pvc-finalizer-mode=enforce", migrate.Changed},
		"of a digest": {controller("topolvm@sha256:0", ""), "topolvm ", "set --pvc-finalizer-mode=enforce", migrate.Changed},
		"with a Lease": {controller("topolvm:1.0.0", ", --leader-election-id=x"), "--leader-election-id=x ", "",
			migrate.Information},
		"its own socket": {controller("topolvm:1.0.0", ", --csi-socket=/a/b.sock"), "--csi-socket=/a/b.sock ", "",
			migrate.Information},
		"a minimum size": {controller("topolvm:1.0.0", ", --minimum-allocation-xfs=1Gi"), "-xfs=1Gi ", "takes effect now",
			migrate.Changed},
		"a flag of zap":     {controller("topolvm:1.0.0", ", --zap-devel"), "--zap-devel ", "has no effect", migrate.Changed},
		"an unknown flag":   {controller("topolvm:1.0.0", ", --nonsense"), "", "has no flag --nonsense", migrate.Required},
		"a patched program": {controller("topolvm:1.0.0-vendor.1", ""), "", "patched topolvm-controller", migrate.Required},
		"one without a Lease": {controller("topolvm-with-sidecar:0.41.0", "") + provisioner,
			"--nodecontroller-leader-election=true --provisioner-leader-election=false", "", migrate.Information},
		"one without a flag for it": {controller("topolvm-with-sidecar:0.41.0", "") + strings.Replace(provisioner,
			", --leader-election=false", "", 1),
			"--nodecontroller-leader-election=true --provisioner-leader-election=false", "", migrate.Information},
		"neither": {strings.Replace(controller("topolvm-with-sidecar:0.41.0", ", --leader-election=false")+provisioner,
			"{type: Recreate}", "{}", 1), "--leader-election=false", "the old and the new c and p both work", migrate.Required},
		"a flag of a role that is off": {controller("topolvm:1.0.0", "") + strings.Replace(provisioner, "=false",
			"=true, --capacity-threads=3", 1),
			"--controllers=provisioner,nodecontroller", "its role did not run", migrate.Information},
		"verbosity": {controller("topolvm:1.0.0", ", --v=2") + strings.Replace(provisioner, "=false", "=true, --v=4", 1), " --v=4 ", "",
			migrate.Information},
		"flags of the resizer": {controller("topolvm:1.0.0", "") + strings.NewReplacer("provisioner", "resizer", "=false",
			"=true, --worker-threads=3, --resync=1m").Replace(provisioner), " --resizer-workers=3 --resync-period=1m", "",
			migrate.Information},
		"without metrics": {controller("topolvm:1.0.0", ", --metrics-bind-address=0"), "--metrics-bind-address=0", "",
			migrate.Information},
		"a livenessprobe": {controller("topolvm:1.0.0", "") + probe, "--probe-timeout=4s --driver-health-endpoint=:1", "",
			migrate.Information},
		"old sidecars": {controller("topolvm-with-sidecar:0.30.0", "") + strings.Replace(provisioner, "0.41", "0.30", 1), "topolvm ",
			"names no version", migrate.Required},
		"sidecars of a release": {controller("topolvm-with-sidecar:0.41.0", "") + provisioner, "topolvm ", "names no version",
			migrate.Information},
		"with an attacher": {controller("topolvm-with-sidecar:0.41.0", "") + strings.Replace(provisioner, "provisioner", "attacher", 1),
			"all -- csi-attacher --csi-address=", "has no attacher", migrate.Information},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, err := migrate.Run([]byte(tt.manifest), migrate.Options{Image: image, Tables: tables()})
			if errors.Is(err, migrate.ErrNothing) != (tt.want == "") || err != nil && !errors.Is(err, migrate.ErrNothing) {
				t.Fatal(err)
			}
			noted := tt.note == "" || slices.ContainsFunc(r.Notes, func(n migrate.Note) bool {
				return n.Level == tt.level && strings.Contains(n.Text, tt.note)
			})
			if !strings.Contains(strings.Join(slices.Concat(r.Commands...), " "), tt.want) || !noted {
				t.Errorf("%q, want %q; notes %v, want %q", r.Commands, tt.want, r.Notes, tt.note)
			}
		})
	}
}

func TestArgumentsThatAreNotAccepted(t *testing.T) {
	t.Parallel()
	strict := tables()
	strict.Accept = func(args, _ []string) error { return fmt.Errorf("got %s", strings.Join(args, " ")) }
	r, err := migrate.Run([]byte(deployment(sidecar("csi-attacher", "--v=${LEVEL}", "--timeout=x"))),
		migrate.Options{Image: image, Tables: strict})
	want := "does not accept these arguments: got all -- csi-attacher --csi-address=/csi/csi.sock --timeout=x --worker-threads=10"
	if err != nil || !r.Incomplete() || !strings.Contains(fmt.Sprint(r.Notes), want) {
		t.Errorf("%v, %v", err, r.Notes)
	}
}

// TestOwnImage expects that a new container is recognized by its arguments if its image has another name.
func TestOwnImage(t *testing.T) {
	t.Parallel()
	for _, perRole := range []bool{false, true} {
		o := migrate.Options{Image: "example/csi-attacher:v1", PerRole: perRole, Tables: tables()}
		r, err := migrate.Run([]byte(deployment(sidecar("csi-attacher"), sidecar("livenessprobe"))), o)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := migrate.Run(r.Manifest, o); !errors.Is(err, migrate.ErrNothing) {
			t.Errorf("%v:\n%s", err, r.Manifest)
		}
	}
}

// TestReportJoins expects one entry for the same note about several containers.
func TestReportJoins(t *testing.T) {
	t.Parallel()
	r := migrate.Result{Notes: []migrate.Note{{migrate.Changed, "d", "a", "x"}, {migrate.Changed, "d", "b", "y"},
		{migrate.Changed, "d", "b", "x"}, {migrate.Required, "", "", "z"}}}
	const want = "You must do, before the rollout:\n  the manifest\n    - z\n" +
		"Changed meaning:\n  d, container a and b\n    - x\n  d, container b\n    - y\n"
	if have := r.Report(); have != want {
		t.Errorf("%s, want:\n%s", have, want)
	}
}

func TestImageName(t *testing.T) {
	t.Parallel()
	for image, want := range map[string]string{
		"csi-provisioner": "csi-provisioner", "csi-provisioner:v5": "csi-provisioner",
		"host.example:5000/a/csi-attacher:v4.8.0": "csi-attacher", "host.example:5000/csi-attacher": "csi-attacher",
		"a/csi-attacher@sha256:0123": "csi-attacher", "a/csi-attacher:v4@sha256:01": "csi-attacher",
	} {
		if got := migrate.ImageName(image); got != want {
			t.Errorf("%s: %s, want %s", image, got, want)
		}
	}
}

// FuzzRun searches for a panic, and for a result that is invalid or can be migrated again.
func FuzzRun(f *testing.F) {
	f.Add(deployment(sidecar("csi-provisioner", "--v=5"), sidecar("csi-attacher")), false)
	f.Add("kind: List\nitems: [{kind: DaemonSet, spec: {template: {spec: {containers: [{image: csi-attacher, args: [-v]}]}}}}]", true)
	f.Add(deployment("      - &a {name: x, image: csi-attacher}\n      - *a\n"), false)
	f.Fuzz(func(t *testing.T, manifest string, perRole bool) {
		o := migrate.Options{Image: image, PerRole: perRole, Tables: tables()}
		r, err := migrate.Run([]byte(manifest), o)
		if err != nil {
			return
		}
		if again, err := migrate.Run(r.Manifest, o); !errors.Is(err, migrate.ErrNothing) {
			t.Errorf("the result can be migrated again (%v):\n%s\nfrom\n%s\nto\n%s", err, r.Manifest, manifest, again.Manifest)
		}
	})
}
