// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// ReadSecret returns the values of a Secret for a CSI call, a non-nil map even if it is empty. Do
// not log them, and do not keep them longer than the call and its retries. Errors begin with
// secret "namespace/name".
func ReadSecret(ctx context.Context, client kubernetes.Interface, ref *corev1.SecretReference) (map[string]string, error) {
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
