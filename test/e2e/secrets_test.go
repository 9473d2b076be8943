// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// TestNoVerbosityShowsSecrets provisions with a secret, with more verbosity than there is:
// client-go logs the bodies of its requests then.
func TestNoVerbosityShowsSecrets(t *testing.T) {
	for name, verbose := range map[string]string{"everything": "-v=10", "one file": "--vmodule=*=10"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, csitest.Config{}, 1)
			_, err := e.client.CoreV1().Secrets(e.ns).Create(t.Context(), &corev1.Secret{
				ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: map[string]string{"password": "hunter2"},
			}, metav1.CreateOptions{})
			e.must(err)
			p := e.run("provision", verbose)
			e.claim("c", e.class(false, func(c *storagev1.StorageClass) {
				c.Parameters = map[string]string{"csi.storage.k8s.io/provisioner-secret-name": "s",
					"csi.storage.k8s.io/provisioner-secret-namespace": e.ns}
			}))
			e.bound("c")
			if log := p.logged(); strings.Contains(log, "hunter2") || strings.Contains(log, "Response Body") {
				t.Error("the log has bodies of requests, and secrets with them")
			} else if !strings.Contains(log, "/api/v1/namespaces/"+e.ns+"/secrets/s") {
				t.Error("the log does not have the requests themselves")
			}
		})
	}
}
