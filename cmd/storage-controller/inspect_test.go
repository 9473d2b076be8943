// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/app"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// TestContainerProcess: doctor reads the flags of the first process of its container.
func TestContainerProcess(t *testing.T) {
	for name, tt := range map[string]struct {
		cmdline, use, err string
	}{
		"all":          {"/storage-controller\x00all\x00--timeout=7s\x00", "all", ""},
		"a sidecar":    {"/csi-attacher\x00-timeout=7s\x00-v=5\x00", "attach", ""},
		"another tool": {"/storage-controller\x00explain\x00pvc\x00x\x00", "", ""},
		"no program":   {"/sbin/init\x00", "", ""},
		"wrong flags":  {"/storage-controller\x00all\x00--nope\x00", "", "flags of process 1: unknown flag: --nope"},
	} {
		proc := t.TempDir()
		if err := os.Mkdir(filepath.Join(proc, "1"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(proc, "1", "cmdline"), []byte(tt.cmdline), 0o600); err != nil {
			t.Fatal(err)
		}
		line, err := containerProcess(proc)
		switch {
		case (err != nil) != (tt.err != "") || err != nil && err.Error() != tt.err:
			t.Errorf("%s: %v, want %q", name, err, tt.err)
		case (line != nil) != (tt.use != ""):
			t.Errorf("%s: %+v", name, line)
		case line != nil:
			cmd := newDoctorCommand()
			if err := cmd.ParseFlags([]string{"--max-entries=9", "--driver-name=a.b"}); err != nil {
				t.Fatal(err)
			}
			if err := line.override(cmd, ownFlags); err != nil {
				t.Fatal(err)
			}
			c, err := line.roles.Read(line.flags, "test")
			if err != nil || line.use != tt.use || c.DriverConfig().Timeout.String() != "7s" || c.Common.Logging.Verbosity != 0 ||
				line.flags.Lookup("max-entries").Value.String() != "9" {
				t.Errorf("%s: %v, %s, %+v", name, err, line.use, c.Common)
			}
			if driver := cmp.Or(line.driver, c.DriverName()); driver != "a.b" {
				t.Errorf("%s: the driver is %q", name, driver)
			}
			if err := cmd.ParseFlags([]string{"--controllers=attacher"}); err != nil {
				t.Fatal(err)
			}
			if err := line.override(cmd, ownFlags); (err == nil) != (tt.use == "all") {
				t.Errorf("%s: a flag that the process does not have: %v", name, err)
			}
		}
	}
}

// podVariables are the variables without the prefix of options that roles read.
var podVariables = []string{"POD_NAME", "POD_NAMESPACE", "NAMESPACE", "NODE_NAME", app.LegacyVariable}

// TestTopolvmOfACommandLine: the driver follows from the environment and the roles from the name of the program.
func TestTopolvmOfACommandLine(t *testing.T) {
	for name, tt := range map[string]struct {
		legacy  string // USE_LEGACY
		command []string
		want    string
	}{
		"not legacy":  {"", []string{"/storage-controller", "topolvm"}, "topolvm.io, 5 roles"},
		"legacy":      {"1", []string{"/storage-controller", "topolvm"}, "topolvm.cybozu.com, 5 roles"},
		"link":        {"", []string{"/topolvm-controller"}, "topolvm.io, 1 roles"},
		"legacy link": {"1", []string{"/topolvm-controller"}, "topolvm.cybozu.com, 1 roles"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(app.LegacyVariable, tt.legacy)
			line, err := parseCommandLine("test", tt.command)
			if err != nil {
				t.Fatal(err)
			}
			c, err := line.roles.Read(line.flags, "test")
			if err != nil {
				t.Fatal(err)
			}
			plan := c.Plan(csiclient.Driver{}, false)
			if got := fmt.Sprintf("%s, %d roles", c.DriverName(), len(plan.Roles)); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

// TestDoctorOfACommand: doctor takes flags and file from a command line, and prints the permissions that a ServiceAccount lacks.
func TestDoctorOfACommand(t *testing.T) {
	cp := kubetest.Get(t, kubetest.Real())
	ns := kubetest.Namespace(t, cp)
	for _, name := range append([]string{"KUBECONFIG"}, podVariables...) {
		t.Setenv(name, "") // restored at the end
	}
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte("apiVersion: config.storage-controller.io/v1alpha1\nkind: StorageControllerConfiguration\n"+
		"kube-api-burst: 3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	base := []string{"--kubeconfig=" + cp.Kubeconfig(), "--driver-name=" + ns + ".example.com", "--as=" + ns + "/csi"}
	of := func(controllers string, own ...string) []string {
		return slices.Concat(base, own, []string{"--", "all", "--config=" + file, "--leader-election", "--controllers=" + controllers,
			"--csi-address=/csi/csi.sock"})
	}
	check := func(failures bool) {
		t.Helper()
		code, status := 0, finding.OK
		if failures {
			code, status = exitFindings, finding.Failing
		}
		wantChecks(t, code, of("attacher"),
			finding.Finding{Topic: "process", Severity: finding.OK, Message: "the command line"},
			finding.Finding{Topic: "roles", Severity: finding.OK, Message: "attacher"},
			finding.Finding{Topic: "flags", Severity: finding.Warning, Message: "kube-api-burst (file) has no effect"},
			finding.Finding{Topic: "rbac attacher", Severity: status},
			finding.Finding{Topic: "rbac attacher-leader-election", Severity: status},
			finding.Finding{Topic: "sidecars", Severity: finding.OK, Message: "in namespace " + ns},
		)
	}
	printed := func(controllers string) (int, string, string) {
		return output(t, slices.Concat([]string{programName, "doctor"}, of(controllers, "--print-rbac"))...)
	}
	check(true)
	code, stdout, stderr := printed("attacher")
	if code != 0 || !strings.Contains(stdout, "# attacher: not granted: get,list,watch,patch volumeattachments.storage.k8s.io") {
		t.Fatalf("exit code %d: %s%s", code, stdout, stderr)
	}
	_, features, _ := printed("provisioner,resizer,snapshotter")
	for _, feature := range []string{"provisioner-attachments", "provisioner-topology", "provisioner-snapshots",
		"provisioner-volumeattributesclasses", "resizer-attachments", "resizer-pods", "resizer-volumeattributesclasses",
		"snapshotter-groups"} {
		if !strings.Contains(features, "# "+feature+": not granted: ") {
			t.Errorf("capabilities are unknown, and %s is not in\n%s", feature, features)
		}
	}
	create(t, cp, stdout)
	kubetest.Eventually(t, "the permissions are granted", func(ctx context.Context) error {
		if _, rest, told := printed("attacher"); !strings.Contains(told, "No permission is missing") {
			return errors.New(rest)
		}
		return nil
	})
	check(false)
	forbidden := kubetest.WriteKubeconfig(t, kubetest.Proxy(t, cp.Config(),
		func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.Header.Get("Impersonate-User") != "" {
				http.Error(w, "cannot impersonate", http.StatusForbidden)
				return
			}
			pass.ServeHTTP(w, r)
		}))
	for mistake, tt := range map[string]struct {
		code int
		args []string
	}{
		`"nothing" not found`:               {exitFailure, []string{"sts/nothing", "-n", ns}},
		"must be deployment/NAME":           {exitUsage, []string{"pod/x"}},
		"must be a ServiceAccount, is jane": {exitUsage, []string{"--driver-name=a.b", "--as=jane", "--print-rbac"}},
		"require a workload":                {exitUsage, []string{"-n", ns}},
		"must be a command that runs roles": {exitUsage, []string{"--", "explain"}},
		"could not be checked: rbac attacher": {exitFailure, []string{"--kubeconfig=" + forbidden, "--controllers=attacher",
			"--driver-name=a.b", "--as=" + ns + "/csi", "--print-rbac"}},
	} {
		args := append([]string{"storage-controller", "doctor", "--kubeconfig=" + cp.Kubeconfig()}, tt.args...)
		if code, _, stderr := output(t, args...); code != tt.code || !strings.Contains(stderr, mistake) {
			t.Errorf("%q: exit code %d, want %d with %q: %s", args, code, tt.code, mistake, stderr)
		}
	}
}

// create creates the objects in text, as kubectl apply does.
func create(t *testing.T, cp *kubetest.ControlPlane, text string) {
	t.Helper()
	rbac, options := cp.Client().RbacV1(), metav1.CreateOptions{}
	for document := range strings.SplitSeq(text, "\n---\n") {
		var meta struct {
			Kind     string
			Metadata metav1.ObjectMeta
		}
		err := yaml.Unmarshal([]byte(document), &meta)
		into := func(object any) {
			if err == nil {
				err = yaml.UnmarshalStrict([]byte(document), object)
			}
		}
		switch meta.Kind {
		case "":
			continue
		case "ClusterRole":
			var o rbacv1.ClusterRole
			if into(&o); err == nil {
				_, err = rbac.ClusterRoles().Create(t.Context(), &o, options)
			}
		case "ClusterRoleBinding":
			var o rbacv1.ClusterRoleBinding
			if into(&o); err == nil {
				_, err = rbac.ClusterRoleBindings().Create(t.Context(), &o, options)
			}
		case "Role":
			var o rbacv1.Role
			if into(&o); err == nil {
				_, err = rbac.Roles(o.Namespace).Create(t.Context(), &o, options)
			}
		case "RoleBinding":
			var o rbacv1.RoleBinding
			if into(&o); err == nil {
				_, err = rbac.RoleBindings(o.Namespace).Create(t.Context(), &o, options)
			}
		default:
			t.Errorf("unexpected kind %q", meta.Kind)
		}
		if err != nil {
			t.Fatalf("%v\n%s", err, document)
		}
	}
}
