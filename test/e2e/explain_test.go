// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// explain runs the command and returns its output and exit code.
func (e *env) explain(args ...string) (stdout, stderr string, code int) {
	e.t.Helper()
	path, err := binary()
	if err != nil {
		e.t.Fatal(err)
	}
	cmd := exec.Command(path, append([]string{"explain", "--kubeconfig", e.cp.Kubeconfig()}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.Env = append(os.Environ(), "KUBECONFIG=")
	if err := cmd.Run(); err != nil {
		var exit *exec.ExitError
		if !errors.As(err, &exit) {
			e.t.Fatal(err)
		}
		code = exit.ExitCode()
	}
	return out.String(), errs.String(), code
}

// address is where the process serves, as a URL.
func (p *process) address() string {
	p.t.Helper()
	p.says("Serving metrics and health")
	found := served.FindStringSubmatch(p.logged())
	if found == nil {
		p.t.Fatal("it does not say where it serves")
	}
	return "http://" + found[1]
}

// TestExplainAFailingClaim fails the driver of a running process: the command reports the error, and from the
// process the number of attempts and the next one.
func TestExplainAFailingClaim(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 1)
	e.plugin.Always("CreateVolume", csitest.Fail(codes.Unavailable, "the pool is full of water"))
	p := e.run("all", append([]string{"--retry-interval-start=30m", "--retry-interval-max=1h", "--http-endpoint=127.0.0.1:0",
		"--leader-election-namespace=" + e.ns}, election...)...)
	class := e.class(false, nil)
	claim := e.claim("data", class)
	var text string
	e.eventually("the command reports the failure", func(context.Context) error {
		out, errs, code := e.explain("pvc", "data", "-n", e.ns, "--status-url", p.address())
		text = out
		if code != 0 {
			t.Fatalf("exit code %d: %s", code, errs)
		}
		// The objects are read one after the other while the process still writes to them.
		if !strings.Contains(out, "Warning ProvisioningFailed") || !strings.Contains(out,
			"1 failed attempt in a row (queue claims, stage indeterminate)") ||
			!strings.Contains(out, "CreateVolume is indeterminate") {
			return fmt.Errorf("output:\n%s", out)
		}
		return nil
	})
	for _, want := range []string{
		"PersistentVolumeClaim " + e.ns + "/data\nThe claim is Pending", "Driver: " + e.plugin.Name(),
		fmt.Sprintf("The provisioner of driver %s is %q (storage-controller), which holds Lease %s/%s.", e.plugin.Name(), p.pod, e.ns,
			e.provisionerLease()),
		fmt.Sprintf("CreateVolume for \"pvc-%s\" failed", claim.UID), "with Unavailable: the pool is full of water.",
		"next attempt in 29m", "Next: Retries automatically in 29m",
		"CreateVolume is indeterminate: no final response of driver " + e.plugin.Name() + " is recorded, so a volume may exist",
		"storage-controller.io/provisioning\n    removed by: the provisioner of storage-controller",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("missing %q", want)
		}
	}
	if t.Failed() {
		t.Logf("output:\n%s", text)
	}
	out, _, code := e.explain("pvc/data", "-n", e.ns, "-o", "json")
	var report struct {
		Kind, Next string
		Events     []struct{ Reason string }
	}
	if err := json.Unmarshal([]byte(out), &report); err != nil || code != 0 || report.Kind != "PersistentVolumeClaim" ||
		report.Next == "" || len(report.Events) == 0 {
		t.Errorf("as JSON: %d, %v: %s", code, err, out)
	}
}

// TestExplainExitCodes distinguishes missing objects from usage errors.
func TestExplainExitCodes(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 0)
	for args, want := range map[string]struct {
		code int
		says string
	}{
		"pvc none -n " + e.ns: {1, "PersistentVolumeClaim " + e.ns +
			"/none: not found. Check the name and the namespace (-n)"},
		"pvc " + e.ns + "/none": {1, "PersistentVolumeClaim " + e.ns + "/none: not found"},
		"pvc/" + e.ns + "/none": {1, "PersistentVolumeClaim " + e.ns + "/none: not found"},
		"pvc x/none -n " + e.ns: {2, "--namespace: is " + e.ns + ", and x/none names another"},
		"pvc a/b/c":             {2, `name "a/b/c": must be NAME, or NAMESPACE/NAME`},
		"pv a/b":                {2, `name "a/b": a PersistentVolume has no namespace`},
		"pvc/":                  {2, "the name must not be empty"},
		"pvc x --status-ca-file=x --status-url=http://x": {2, "require an https --status-url"},
		"pvc none":                         {1, "PersistentVolumeClaim default/none: not found"},
		"pv none-" + e.ns:                  {1, "not found. Check the name"},
		"pvc":                              {2, "two arguments are needed"},
		"deployment x":                     {2, `kind "deployment" cannot be explained: pod, pvc, pv, va, volumesnapshot and node can`},
		"node x -n " + e.ns:                {2, "--namespace: a Node has no namespace"},
		"node x -o yaml":                   {2, `--output: must be text or json, got "yaml"`},
		"pv x --kubeconfig=/dev/null/none": {1, "reading kubeconfig"},
		"pv x --kubeconfig= --master=http://[::1]:1/": {1, "Check --kubeconfig and --master"},
	} {
		if _, errs, code := e.explain(strings.Fields(args)...); code != want.code || !strings.Contains(errs, want.says) {
			t.Errorf("%s: exit code %d and %q, want %d and %q", args, code, errs, want.code, want.says)
		}
	}
	// A process that does not listen is one finding among others.
	e.claim("data", e.class(true, nil))
	out, _, code := e.explain("pvc", "data", "-n", e.ns, "--status-url=http://127.0.0.1:1")
	if code != 0 || !strings.Contains(out, "Cannot read the status page at http://127.0.0.1:1") ||
		!strings.Contains(out, "No pod uses the claim.") {
		t.Errorf("%d: %s", code, out)
	}
}

// TestExplainReadsASecureStatusPage reads the status page of a process with --secure-metrics-server, which has a
// self-signed certificate and reviews the bearer token.
func TestExplainReadsASecureStatusPage(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 0)
	ctx, accounts := t.Context(), e.client.CoreV1().ServiceAccounts(e.ns)
	_, err := accounts.Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "reader"}}, metav1.CreateOptions{})
	e.must(err)
	name := "explain-" + e.ns
	_, err = e.client.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name},
		Rules: []rbacv1.PolicyRule{{NonResourceURLs: []string{"/statusz"}, Verbs: []string{"get"}}}}, metav1.CreateOptions{})
	e.must(err)
	_, err = e.client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: name},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: e.ns, Name: "reader"}}}, metav1.CreateOptions{})
	e.must(err)
	t.Cleanup(func() {
		e.must(e.client.RbacV1().ClusterRoleBindings().Delete(context.Background(), name, metav1.DeleteOptions{}))
		e.must(e.client.RbacV1().ClusterRoles().Delete(context.Background(), name, metav1.DeleteOptions{}))
	})
	token, err := accounts.CreateToken(ctx, "reader", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	e.must(err)
	file := filepath.Join(t.TempDir(), "token")
	e.must(os.WriteFile(file, []byte(token.Status.Token), 0o600))
	p := e.run("all", "--controllers=provisioner", "--http-endpoint=127.0.0.1:0", "--secure-metrics-server")
	url := strings.Replace(p.address(), "http://127.0.0.1", "https://localhost", 1)
	e.claim("data", e.class(true, nil))
	e.eventually("the status page is read", func(context.Context) error {
		out, errs, code := e.explain("pvc", "data", "-n", e.ns, "--status-url", url, "--status-insecure-skip-tls-verify",
			"--status-token-file", file)
		if code != 0 || !strings.Contains(out, "The process at "+url+" reports no running or failed attempt for this object.") {
			return fmt.Errorf("exit code %d, %s, output:\n%s", code, errs, out)
		}
		return nil
	})
	for want, args := range map[string][]string{
		"certificate signed by unknown authority":         {"--status-token-file", file},
		"reports no running or failed attempt":            {"--status-insecure-skip-tls-verify"}, // with the token of the kubeconfig
		"Set --status-ca-file, or --status-insecure-skip": {},
	} {
		if out, _, _ := e.explain(append([]string{"pvc", "data", "-n", e.ns, "--status-url", url}, args...)...); !strings.Contains(out,
			want) {
			t.Errorf("missing %q:\n%s", want, out)
		}
	}
}
