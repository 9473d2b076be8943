// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"go.uber.org/zap"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

func TestNodecontrollerScenarioSecureMetrics(t *testing.T) {
	t.Run("085_who_may_see_the_metrics", func(t *testing.T) {
		cp := kubetest.Get(t, kubetest.Real())
		ns := kubetest.Namespace(t, cp)
		client := cp.Client()
		reader, stranger := token(t, client, ns, "reader"), token(t, client, ns, "stranger")
		// The program may review and nothing else, which is what its ClusterRole is to grant for it.
		grant(t, client, ns+"-reviewer", rbacv1.Subject{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: ns},
			rbacv1.PolicyRule{APIGroups: []string{"authentication.k8s.io"}, Resources: []string{"tokenreviews"}, Verbs: []string{"create"}},
			rbacv1.PolicyRule{APIGroups: []string{"authorization.k8s.io"}, Resources: []string{"subjectaccessreviews"},
				Verbs: []string{"create"}})
		// Who may read the path and nothing else, in particular not by another verb.
		grant(t, client, ns+"-reader", rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Name: "reader", Namespace: ns},
			rbacv1.PolicyRule{NonResourceURLs: []string{"/metrics"}, Verbs: []string{"get"}})

		operator := token(t, client, ns, "operator")
		grant(t, client, ns+"-operator", rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Name: "operator", Namespace: ns},
			rbacv1.PolicyRule{NonResourceURLs: []string{"/debug/flags/v"}, Verbs: []string{"put"}})

		address := serveSecurely(t, cp, ns)
		kubetest.Eventually(t, "the roles are in force", func(context.Context) error { return want(address, reader, http.StatusOK) })
		for name, check := range map[string]error{
			"no token":                     want(address, "", http.StatusUnauthorized),
			"a token that was not issued":  want(address, "x"+reader, http.StatusUnauthorized),
			"a token without permission":   want(address, stranger, http.StatusForbidden),
			"the permission of the reader": want(address, reader, http.StatusOK),
			"another verb of the reader":   wantOf(http.MethodHead, address, reader, http.StatusForbidden),
		} {
			if check != nil {
				t.Errorf("%s: %v", name, check)
			}
		}
		kubetest.Eventually(t, "the operator may change the verbosity", func(context.Context) error {
			return putVerbosity(address, operator, http.StatusOK)
		})
		if err := errors.Join(putVerbosity(address, "", http.StatusUnauthorized),
			putVerbosity(address, reader, http.StatusForbidden)); err != nil {
			t.Error(err)
		}
		if response, err := http.Get("http://" + address + "/metrics"); err == nil {
			response.Body.Close()
			if response.StatusCode != http.StatusBadRequest {
				t.Errorf("plain HTTP: %s", response.Status)
			}
		}

		t.Run("without_the_permission_to_review", func(t *testing.T) {
			if err := want(serveSecurely(t, cp, ns+"-unknown"), reader, http.StatusInternalServerError); err != nil {
				t.Error(err)
			}
		})
	})
}

// serveSecurely runs the server of a process that acts as user, and returns its address.
func serveSecurely(t *testing.T, cp *kubetest.ControlPlane, user string) string {
	t.Helper()
	proxy := kubetest.Proxy(t, cp.UserConfig(t, user), func(w http.ResponseWriter, r *http.Request,
		pass http.Handler) {
		pass.ServeHTTP(w, r)
	})
	c := configOf(t, Nodecontroller, "--driver-name=a.example.com", "--secure-metrics-server", "--metrics-bind-address=127.0.0.1:0",
		"--kubeconfig="+kubetest.WriteKubeconfig(t, proxy))
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	c.Logs = &Logs{enabled: zap.NewAtomicLevel()}
	ctx, stop := context.WithCancel(t.Context())
	d, err := newProcess(c).serve(ctx)
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

// putVerbosity returns nil if the request to change the verbosity is answered with status.
func putVerbosity(address, token string, status int) error {
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} // self-signed
	defer client.CloseIdleConnections()
	request, err := http.NewRequest(http.MethodPut, "https://"+address+"/debug/flags/v", strings.NewReader("0"))
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+token)
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != status {
		return fmt.Errorf("changing the verbosity: %s, want %d", response.Status, status)
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
	_, err := client.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: meta, Rules: rules},
		metav1.CreateOptions{})
	if err == nil {
		_, err = client.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{ObjectMeta: meta,
			Subjects: []rbacv1.Subject{to},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name}}, metav1.CreateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
}
