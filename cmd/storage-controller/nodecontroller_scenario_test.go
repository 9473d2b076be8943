package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/metrics"
)

// printed is what --print-config says: of each setting its value and its origin.
func printed(t *testing.T, args ...string) map[string][2]string {
	t.Helper()
	code, stdout, stderr := output(t, append([]string{"storage-controller", "nodecontroller", "--print-config"}, args...)...)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	settings := map[string][2]string{}
	for line := range strings.Lines(stdout) {
		words := strings.Fields(line)
		settings[words[0]] = [2]string{strings.Join(words[1:len(words)-1], " "), words[len(words)-1]}
	}
	return settings
}

func compare(t *testing.T, have, want map[string][2]string) {
	t.Helper()
	for name, w := range want {
		if have[name] != w {
			t.Errorf("%s: got %q, want %q", name, have[name], w)
		}
	}
}

func TestNodecontrollerScenarioStart(t *testing.T) {
	t.Setenv("KUBECONFIG", "")
	t.Run("001_names_follow_from_the_driver", func(t *testing.T) {
		compare(t, printed(t, "--driver-name=Local.Example.COM"), map[string][2]string{
			"driver-name":                {"Local.Example.COM", "flag"},
			"node-finalizer":             {"local.example.com/node", "derived"},
			"capacity-annotation-prefix": {"capacity.local.example.com/", "derived"},
			"leader-election-id":         {"nodecontroller-leader-local-example-com", "derived"},
			"node-cleanup":               {"report", "default"},
		})
	})
	t.Run("002_profile_of_TopoLVM", func(t *testing.T) {
		compare(t, printed(t, "--profile=topolvm"), namesOf("topolvm.io"))
	})
	t.Run("003_profile_of_the_first_name", func(t *testing.T) {
		want := namesOf("topolvm.cybozu.com")
		want["pvc-finalizer"], want["resize-annotation"] = [2]string{"topolvm.io/pvc", "profile"}, [2]string{"topolvm.io/last-resizefs-requested-at", "profile"}
		compare(t, printed(t, "--profile=topolvm-legacy"), want)
	})
	t.Run("004_a_flag_wins_over_the_profile", func(t *testing.T) {
		want := printed(t, "--profile=topolvm")
		want["node-finalizer"] = [2]string{"x.y/z", "flag"}
		compare(t, printed(t, "--profile=topolvm", "--node-finalizer=x.y/z"), want)
	})
	t.Run("005_all_that_is_wrong_at_once", func(t *testing.T) {
		for _, more := range [][]string{{"--driver-name=a.example.com"}, {"--driver-name=a.example.com", "--print-config"}, {"--profile=topolvm"}, nil} {
			code, _, stderr := output(t, append([]string{"storage-controller", "nodecontroller", "--capacity-resource=cpu", "--default-device-class=a/b"}, more...)...)
			if code != exitUsage || !strings.Contains(stderr, "--capacity-resource") || !strings.Contains(stderr, "--default-device-class") {
				t.Errorf("with %v: exit code %d: %s", more, code, stderr)
			}
		}
	})
	t.Run("006_the_driver_has_another_name", func(t *testing.T) {
		plugin := csitest.Run(t, csitest.Config{Name: "a.example.com"})
		nobody := kubetest.WriteKubeconfig(t, &rest.Config{Host: "http://127.0.0.1:1"})
		for _, socket := range []string{"--csi-address", "--csi-socket"} {
			code, _, stderr := output(t, "storage-controller", "nodecontroller", socket+"="+plugin.Address(), "--driver-name=b.example.com", "--kubeconfig="+nobody)
			if code != exitFailure || !strings.Contains(stderr, `"a.example.com"`) || !strings.Contains(stderr, `"b.example.com"`) {
				t.Errorf("%s: exit code %d: %s", socket, code, stderr)
			}
		}
	})
}

// namesOf is what the profiles of TopoLVM make of its two names.
func namesOf(driver string) map[string][2]string {
	names := map[string][2]string{}
	for name, value := range map[string]string{
		"driver-name": "D", "node-finalizer": "D/node", "pvc-finalizer": "D/pvc", "capacity-resource": "D/capacity",
		"capacity-annotation-prefix": "capacity.D/", "default-device-class": "00default", "device-class-parameter": "D/device-class",
		"resize-annotation": "D/last-resizefs-requested-at", "topology-node-key": "topology.D/node", "webhook-optout-label": "D/webhook",
		"default-volume-size": "1Gi", "leader-election-id": "topolvm",
		"node-cleanup-resource": "resource=logicalvolumes.v1.D,node-field=spec.nodeName,finalizer=D/logicalvolume,mark=D/pendingdeletion=true,when=node-terminating",
	} {
		names[name] = [2]string{strings.ReplaceAll(value, "D", driver), "profile"}
	}
	return names
}

func TestNodecontrollerScenarioSecureMetrics(t *testing.T) {
	t.Run("085_who_may_see_the_metrics", func(t *testing.T) {
		cp := kubetest.Get(t)
		ns := kubetest.Namespace(t, cp)
		client := cp.Client()
		reader, stranger := token(t, client, ns, "reader"), token(t, client, ns, "stranger")
		// The program may review and nothing else, which is what its ClusterRole is to grant for it.
		grant(t, client, ns+"-reviewer", rbacv1.Subject{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: ns},
			rbacv1.PolicyRule{APIGroups: []string{"authentication.k8s.io"}, Resources: []string{"tokenreviews"}, Verbs: []string{"create"}},
			rbacv1.PolicyRule{APIGroups: []string{"authorization.k8s.io"}, Resources: []string{"subjectaccessreviews"}, Verbs: []string{"create"}})
		// Who may read the path and nothing else, in particular not by another verb.
		grant(t, client, ns+"-reader", rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Name: "reader", Namespace: ns},
			rbacv1.PolicyRule{NonResourceURLs: []string{"/metrics"}, Verbs: []string{"get"}})

		address := serveSecurely(t, cp, ns)
		kubetest.Eventually(t, "the roles are in force", func(context.Context) error { return want(address, reader, http.StatusOK) })
		for name, check := range map[string]error{
			"no token":                     want(address, "", http.StatusUnauthorized),
			"a token that nobody issued":   want(address, "x"+reader, http.StatusUnauthorized),
			"a token without permission":   want(address, stranger, http.StatusForbidden),
			"the permission of the reader": want(address, reader, http.StatusOK),
			"another verb of the reader":   wantOf(http.MethodHead, address, reader, http.StatusForbidden),
		} {
			if check != nil {
				t.Errorf("%s: %v", name, check)
			}
		}
		if response, err := http.Get("http://" + address + "/metrics"); err == nil {
			response.Body.Close()
			if response.StatusCode != http.StatusBadRequest {
				t.Errorf("plain HTTP: %s", response.Status)
			}
		}

		t.Run("without_the_permission_to_review", func(t *testing.T) {
			if err := want(serveSecurely(t, cp, ns+"-nobody"), reader, http.StatusInternalServerError); err != nil {
				t.Error(err)
			}
		})
	})
}

// serveSecurely runs the server of a process that acts as user, and returns its address.
func serveSecurely(t *testing.T, cp *kubetest.ControlPlane, user string) string {
	t.Helper()
	proxy := kubetest.Proxy(t, cp.UserConfig(user), func(w http.ResponseWriter, r *http.Request, pass http.Handler) { pass.ServeHTTP(w, r) })
	cmd := newRoleCommand("nodecontroller", "x", false, nodecontrollerRole)
	if err := cmd.ParseFlags([]string{"--driver-name=a.example.com", "--secure-metrics-server", "--metrics-bind-address=127.0.0.1:0", "--kubeconfig=" + kubetest.WriteKubeconfig(t, proxy)}); err != nil {
		t.Fatal(err)
	}
	s, err := readSettings(cmd.Flags(), false, []role{nodecontrollerRole})
	if err == nil {
		err = s.validate(nodecontrollerRole)
	}
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	d, err := (&process{settings: s, roles: []role{nodecontrollerRole}}).serve(ctx, metrics.NewRegistry("test"), &status{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stop(); d.wait() })
	return d.server.Address()
}

// want is nil when the metrics are answered with status, over TLS.
func want(address, token string, status int) error {
	return wantOf(http.MethodGet, address, token, status)
}

// wantOf is want for a method.
func wantOf(method, address, token string, status int) error {
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} // self-signed
	defer client.CloseIdleConnections()
	request, err := http.NewRequest(method, "https://"+address+"/metrics", nil)
	if err != nil {
		return err
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != status {
		return fmt.Errorf("%s, want %d: %w", response.Status, status, err)
	}
	if seen := strings.Contains(string(body), "storage_controller_build_info"); seen != (status == http.StatusOK) {
		return fmt.Errorf("%s, and metrics: %t", response.Status, seen)
	}
	return nil
}

// token is one of a new ServiceAccount.
func token(t *testing.T, client kubernetes.Interface, ns, name string) string {
	t.Helper()
	accounts := client.CoreV1().ServiceAccounts(ns)
	_, err := accounts.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	request, err := accounts.CreateToken(t.Context(), name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return request.Status.Token
}

func grant(t *testing.T, client kubernetes.Interface, name string, to rbacv1.Subject, rules ...rbacv1.PolicyRule) {
	t.Helper()
	meta := metav1.ObjectMeta{Name: name}
	_, err := client.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: meta, Rules: rules}, metav1.CreateOptions{})
	if err == nil {
		_, err = client.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{ObjectMeta: meta, Subjects: []rbacv1.Subject{to},
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name}}, metav1.CreateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
}
