// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// secretNamespacesKey is the context key of the namespaces of Secrets.
type secretNamespacesKey struct{}

// WithSecretNamespaces returns a context with which [ReadSecret] reads Secrets of these namespaces only; none means all.
func WithSecretNamespaces(ctx context.Context, namespaces []string) context.Context {
	return context.WithValue(ctx, secretNamespacesKey{}, namespaces)
}

// PermitSecret returns an error if a Secret is in none of namespaces. Without namespaces it permits all.
func PermitSecret(namespaces []string, namespace, name string) error {
	if len(namespaces) > 0 && !slices.Contains(namespaces, namespace) {
		return fmt.Errorf("secret \"%s/%s\": its namespace is not in --secret-namespaces", namespace, name)
	}
	return nil
}

// ReadSecret returns the values of a Secret for a CSI call, a non-nil map even if it is empty. Do
// not log them, and do not keep them longer than the call and its retries. Errors begin with
// secret "namespace/name".
func ReadSecret(ctx context.Context, client kubernetes.Interface, ref *corev1.SecretReference) (map[string]string, error) {
	namespaces, _ := ctx.Value(secretNamespacesKey{}).([]string)
	if err := PermitSecret(namespaces, ref.Namespace, ref.Name); err != nil {
		return nil, err
	}
	secret, err := client.CoreV1().Secrets(ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("secret \"%s/%s\": %w", ref.Namespace, ref.Name, err)
	}
	values := make(map[string]string, len(secret.Data))
	for k, v := range secret.Data {
		values[k] = string(v)
	}
	return values, nil
}
