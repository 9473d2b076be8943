// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
)

// TestNamePrefixOfWebhooks: with a namePrefix, which an installation beside another driver
// has, the webhooks call the Service by its name and the program reads the certificate that is mounted.
func TestNamePrefixOfWebhooks(t *testing.T) {
	t.Parallel()
	for _, overlay := range []string{"all-in-one", "configuration-file"} {
		objects := installed(t, "namespace: other\nnamePrefix: second-\nnameSuffix: -x", overlay, "components/webhooks")
		service, called, directory, mounted := "", 0, "", ""
		for _, o := range objects {
			if o.GetKind() == "Service" {
				service = o.GetName()
			}
		}
		for _, o := range objects {
			if o.GetKind() != "MutatingWebhookConfiguration" {
				continue
			}
			if o.GetName() != "second-storage-controller-webhooks-x" {
				t.Errorf("%s: the configuration is %q", overlay, o.GetName())
			}
			for _, w := range converted[admissionv1.MutatingWebhookConfiguration](t, o).Webhooks {
				s := w.ClientConfig.Service
				if called++; s.Name != service || s.Namespace != "other" {
					t.Errorf("%s: %s calls %s/%s", overlay, w.Name, s.Namespace, s.Name)
				}
			}
		}
		pod := podOf(t, objects)
		for _, c := range pod.Containers {
			for _, v := range c.Env {
				if v.Name == "STORAGE_CONTROLLER_CERT_DIR" {
					directory = v.Value
				}
			}
			for _, m := range c.VolumeMounts {
				if m.Name == "certificate" {
					mounted = m.MountPath
				}
			}
		}
		if service != "second-storage-controller-webhook-x" || called != 1 || directory == "" || directory != mounted {
			t.Errorf("%s: Service %q, %d webhooks, the program reads %q, mounted is %q", overlay, service, called, directory, mounted)
		}
	}
}
