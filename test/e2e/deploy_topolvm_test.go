// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"crypto/x509"
	"encoding/pem"
	"os/exec"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// TestModeTopolvm: the program accepts the arguments of the mode and its overlay, and serves the driver and the directories that the
// pod has.
func TestModeTopolvm(t *testing.T) {
	t.Parallel()
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		objects []*unstructured.Unstructured
		want    []string // in the settings
		legacy  bool
	}{
		"overlay": {kustomized(t, overlays+"topolvm"), []string{"node-cleanup claims", "enable-webhooks false"}, false},
		"chart":   {charted(t, modeTopolvm), []string{"node-cleanup claims", "pvc-finalizer-mode strip", "resize-nudge true"}, false},
		"more": {charted(t, modeTopolvm+"useLegacy: true\nsnapshotter: {enabled: false}\ncapacity: {enabled: false}\n"+
			"nodecontroller: {nodeCleanup: report, pvcFinalizerMode: enforce, webhooks: {enabled: true}}"),
			[]string{"node-cleanup report", "pvc-finalizer-mode enforce", "enable-webhooks true", "cert-dir /certs"}, true},
	} {
		c := podOf(t, test.objects).Containers[0]
		out, err := exec.Command(path, append(slices.Clone(c.Args), "--print-config")...).CombinedOutput()
		settings := strings.Join(strings.Fields(string(out)), " ")
		driver := "driver-name topolvm.io "
		if test.legacy {
			driver = "driver-name topolvm.cybozu.com "
		}
		for _, want := range append(test.want, driver) {
			if err != nil || !strings.Contains(settings, want) {
				t.Errorf("%s: %v, no %q in\n%s", name, err, want, out)
			}
		}
		if !slices.ContainsFunc(c.VolumeMounts,
			func(m corev1.VolumeMount) bool { return m.Name == "socket" && m.MountPath == "/run/topolvm" }) {
			t.Errorf("%s: the mounts are %v", name, c.VolumeMounts)
		}
	}
}

// TestCertificateOfModeTopolvm: the CA of the webhook configuration has signed the certificate in the Secret that the pod mounts.
func TestCertificateOfModeTopolvm(t *testing.T) {
	t.Parallel()
	const webhooks = modeTopolvm + "nodecontroller: {webhooks: {enabled: true"
	var secret *corev1.Secret
	var configuration *admissionv1.MutatingWebhookConfiguration
	objects := charted(t, webhooks+"}}")
	for _, o := range objects {
		switch o.GetKind() {
		case "Secret":
			secret = converted[corev1.Secret](t, o)
		case "MutatingWebhookConfiguration":
			configuration = converted[admissionv1.MutatingWebhookConfiguration](t, o)
		}
	}
	hook := configuration.Webhooks[0].ClientConfig
	block, _ := pem.Decode(secret.Data["tls.crt"])
	certificate, err := x509.ParseCertificate(block.Bytes)
	roots := x509.NewCertPool()
	if err != nil || !roots.AppendCertsFromPEM(hook.CABundle) {
		t.Fatalf("%v, CA %q", err, hook.CABundle)
	}
	host := hook.Service.Name + "." + hook.Service.Namespace + ".svc"
	if _, err := certificate.Verify(x509.VerifyOptions{Roots: roots, DNSName: host}); err != nil {
		t.Error(err)
	}
	other := charted(t, webhooks+", configurationAnnotations: {cert-manager.io/inject-ca-from: a/b}}}")
	for _, objects := range [][]*unstructured.Unstructured{objects, other} {
		pod := podOf(t, objects)
		if !slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool {
			return v.Name == "certificate" && v.Secret != nil && v.Secret.SecretName == secret.Name
		}) {
			t.Errorf("the volumes are %v", pod.Volumes)
		}
	}
	if slices.ContainsFunc(other, func(o *unstructured.Unstructured) bool { return o.GetKind() == "Secret" }) {
		t.Error("the chart writes the Secret that another program fills")
	}
}
