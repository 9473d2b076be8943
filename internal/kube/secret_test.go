// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
)

// TestSecretNamespaces: whatever refers to a Secret, its namespace must be permitted.
func TestSecretNamespaces(t *testing.T) {
	client, err := kubernetes.NewForConfig(apiserver.New(apiserver.Hooks{}).Config("test"))
	if err != nil {
		t.Fatal(err)
	}
	for _, namespace := range []string{"storage", "tenant"} {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
		if _, err := client.CoreV1().Namespaces().Create(t.Context(), ns, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := client.CoreV1().Secrets(namespace).Create(t.Context(), &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: "s"}, Data: map[string][]byte{"k": []byte("v")},
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for name, tt := range map[string]struct {
		permitted []string
		namespace string
		refused   bool
	}{
		"all":           {nil, "tenant", false},
		"permitted":     {[]string{"a", "storage"}, "storage", false},
		"not permitted": {[]string{"a", "storage"}, "tenant", true},
	} {
		ref := &corev1.SecretReference{Namespace: tt.namespace, Name: "s"}
		values, err := ReadSecret(WithSecretNamespaces(t.Context(), tt.permitted), client, ref)
		refused := err != nil && strings.Contains(err.Error(), "its namespace is not in --secret-namespaces")
		if refused != tt.refused || !refused && values["k"] != "v" {
			t.Errorf("%s: %v, %v", name, values, err)
		}
	}
}
