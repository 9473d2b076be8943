// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
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

// TestTopolvmOfAWorkload: the driver follows from the environment of the container and the roles from the name of its program, whatever
// the environment of doctor has.
func TestTopolvmOfAWorkload(t *testing.T) {
	client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		own, env string // values of USE_LEGACY
		command  []string
		want     string
	}{
		"legacy":      {"", "false", []string{"/storage-controller", "topolvm"}, "topolvm.cybozu.com, 5 roles"},
		"not legacy":  {"1", "", []string{"/storage-controller", "topolvm"}, "topolvm.io, 5 roles"},
		"link":        {"1", "", []string{"/topolvm-controller"}, "topolvm.io, 1 roles"},
		"legacy link": {"", "1", []string{"/topolvm-controller"}, "topolvm.cybozu.com, 1 roles"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, variable := range podVariables {
				t.Setenv(variable, "") // restored at the end
			}
			t.Setenv("USE_LEGACY", tt.own)
			w := workload{kind: "deployment", namespace: "ns", name: "topolvm-controller", pod: corev1.PodTemplateSpec{
				Spec: corev1.PodSpec{Containers: []corev1.Container{
					{Name: "controller", Command: tt.command, Env: []corev1.EnvVar{{Name: "USE_LEGACY", Value: tt.env}}},
					{Name: "other", Command: []string{"/other"}, Env: []corev1.EnvVar{{Name: "USE_LEGACY", Value: tt.own}}},
				}}}}
			line, err := w.commandLine(t.Context(), client, "")
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

// deployment creates a Deployment whose container runs "all", with a configuration file.
func deployment(t *testing.T, cp *kubetest.ControlPlane, ns string) {
	t.Helper()
	config := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "settings"}, Data: map[string]string{
		"file": "apiVersion: config.storage-controller.io/v1alpha1\nkind: StorageControllerConfiguration\nkube-api-burst: 3\n"}}
	labels := map[string]string{"app": "controller"}
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "controller"}, Spec: appsv1.DeploymentSpec{
		Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{
			ServiceAccountName: "csi",
			Volumes: []corev1.Volume{{Name: "config", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
				LocalObjectReference: corev1.LocalObjectReference{Name: "settings"},
				Items:                []corev1.KeyToPath{{Key: "file", Path: "config.yaml"}}}}}},
			Containers: []corev1.Container{
				{Name: "driver", Image: "driver:v1", Args: []string{"--timeout=1s"}},
				{Name: "controller", Image: "storage-controller:v1",
					Args: []string{"all", "--config=/etc/sc/config.yaml", "--leader-election", "--controllers=$(ROLES)",
						"--csi-address=/csi/csi.sock"},
					Env: []corev1.EnvVar{{Name: "ROLE", Value: "attacher"}, {Name: "ROLES", Value: "$(ROLE)"},
						{Name: "STORAGE_CONTROLLER_MAX_ENTRIES", Value: "12"},
						{Name: "POD_NAME", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{
							APIVersion: "v1", FieldPath: "metadata.name"}}},
						{Name: "STORAGE_CONTROLLER_TIMEOUT", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{
							LocalObjectReference: corev1.LocalObjectReference{Name: "settings"}, Key: "timeout"}}},
						{Name: "GOMEMLIMIT", ValueFrom: &corev1.EnvVarSource{ResourceFieldRef: &corev1.ResourceFieldSelector{
							Resource: "limits.memory"}}}},
					EnvFrom: []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{
						LocalObjectReference: corev1.LocalObjectReference{Name: "settings"}}}},
					VolumeMounts: []corev1.VolumeMount{{Name: "config", MountPath: "/etc/sc"}}},
			}}}}}
	_, err := cp.Client().CoreV1().ConfigMaps(ns).Create(t.Context(), config, metav1.CreateOptions{})
	if err == nil {
		_, err = cp.Client().AppsV1().Deployments(ns).Create(t.Context(), d, metav1.CreateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestDoctorOfAWorkload: doctor takes flags, environment, file and ServiceAccount from a Deployment, and prints the
// permissions that the ServiceAccount lacks.
func TestDoctorOfAWorkload(t *testing.T) {
	cp := kubetest.Get(t, kubetest.Real())
	ns := kubetest.Namespace(t, cp)
	for _, name := range append([]string{"STORAGE_CONTROLLER_MAX_ENTRIES", "KUBECONFIG"}, podVariables...) {
		t.Setenv(name, "") // restored at the end
	}
	deployment(t, cp, ns)
	base := []string{"storage-controller", "doctor", "-n", ns, "deployment/controller", "--kubeconfig=" + cp.Kubeconfig(),
		"--driver-name=" + ns + ".example.com"}
	check := func(failures bool) {
		t.Helper()
		code, stdout, stderr := output(t, append(base, "-o", "json")...)
		var report doctor.Report
		if err := json.Unmarshal([]byte(stdout), &report); err != nil || (code == exitFindings) != failures {
			t.Fatalf("%v, exit code %d: %s%s", err, code, stdout, stderr)
		}
		status := doctor.OK
		if failures {
			status = doctor.Failure
		}
		for _, want := range []doctor.Check{
			{Name: "process", Status: doctor.OK, Message: "container controller of deployment/controller"},
			{Name: "roles", Status: doctor.OK, Message: "attacher"},
			{Name: "flags", Status: doctor.Warning, Message: "kube-api-burst (file) has no effect"},
			{Name: "rbac attacher", Status: status},
			{Name: "rbac attacher-leader-election", Status: status},
			{Name: "sidecars", Status: doctor.OK, Message: "in namespace " + ns},
			{Name: "environment", Status: doctor.Warning, Message: "in namespace " + ns + ": envFrom, STORAGE_CONTROLLER_TIMEOUT"},
		} {
			if !slices.ContainsFunc(report.Checks, func(c doctor.Check) bool {
				return c.Name == want.Name && c.Status == want.Status && strings.Contains(c.Message, want.Message)
			}) {
				t.Errorf("no check %+v in %s", want, stdout)
			}
		}
	}
	check(true)
	code, stdout, stderr := output(t, append(base, "--print-rbac")...)
	if code != 0 || !strings.Contains(stdout, "# attacher: not granted: get,list,watch,patch volumeattachments.storage.k8s.io") {
		t.Fatalf("exit code %d: %s%s", code, stdout, stderr)
	}
	_, features, _ := output(t, append(base, "--print-rbac", "--controllers=provisioner,resizer,snapshotter")...)
	for _, feature := range []string{"provisioner-attachments", "provisioner-topology", "provisioner-snapshots",
		"provisioner-volumeattributesclasses", "resizer-attachments", "resizer-pods", "resizer-volumeattributesclasses",
		"snapshotter-groups"} {
		if !strings.Contains(features, "# "+feature+": not granted: ") {
			t.Errorf("capabilities are unknown, and %s is not in\n%s", feature, features)
		}
	}
	create(t, cp, stdout)
	kubetest.Eventually(t, "the permissions are granted", func(ctx context.Context) error {
		if _, rest, told := output(t, append(base, "--print-rbac")...); !strings.Contains(told, "No permission is missing") {
			return errors.New(rest)
		}
		return nil
	})
	check(false)
	checkNativeSidecar(t, cp, ns)
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
		"no container driver runs roles":    {exitFailure, []string{"deployment/controller", "-n", ns, "-c", "driver"}},
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
			t.Errorf("%q: exit code %d, want %d with %q: %s", tt.args, code, tt.code, mistake, stderr)
		}
	}
}

// checkNativeSidecar fails the test unless doctor finds roles in an init container, with one short request for pods.
func checkNativeSidecar(t *testing.T, cp *kubetest.ControlPlane, ns string) {
	t.Helper()
	limits := make(chan string, 9)
	client, err := kubernetes.NewForConfig(kubetest.Proxy(t, cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if strings.HasSuffix(r.URL.Path, "/pods") {
			limits <- r.URL.Query().Get("limit")
		}
		pass.ServeHTTP(w, r)
	}))
	if err != nil {
		t.Fatal(err)
	}
	w, err := readWorkload(t.Context(), client, ns, "deployment/controller")
	if err != nil {
		t.Fatal(err)
	}
	w.pod.Spec.InitContainers, w.pod.Spec.Containers = w.pod.Spec.Containers, nil
	line, err := w.commandLine(t.Context(), client, "")
	if err != nil {
		t.Fatal(err)
	}
	os.Remove(line.copied)
	if limit := <-limits; line.use != "all" || limit != "1" || len(limits) > 0 {
		t.Errorf("found %s, with the limit %q and %d more requests for pods", line.use, limit, len(limits))
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
