// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"fmt"
	"os"
	"strings"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// scenarioExcluded uses the configuration that is shipped, for four namespaces.
func scenarioExcluded(t *testing.T) {
	t.Parallel()
	f := setup(t, nil)
	own, out := kubetest.Namespace(t, f.cp), kubetest.Namespace(t, f.cp)
	config := &admissionregistrationv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: f.ns}}
	for _, name := range []string{"webhooks", "webhooks-enforce"} {
		text, err := os.ReadFile("../../deploy/helm/storage-controller/files/" + name + ".yaml")
		f.must(err)
		for doc := range strings.SplitSeq(strings.ReplaceAll(string(text), `"csi-example"`, fmt.Sprintf("%q", own)), "\n---\n") {
			if strings.Contains(doc, "\nkind: MutatingWebhookConfiguration\n") {
				var shipped admissionregistrationv1.MutatingWebhookConfiguration
				f.must(yaml.UnmarshalStrict([]byte(doc), &shipped))
				config.Webhooks = append(config.Webhooks, shipped.Webhooks...)
			}
		}
	}
	if len(config.Webhooks) != 2 {
		t.Fatalf("%d webhooks are shipped, want 2", len(config.Webhooks))
	}
	for i := range config.Webhooks {
		w := &config.Webhooks[i]
		w.ClientConfig = admissionregistrationv1.WebhookClientConfig{
			URL: ptr.To("https://" + f.s.Address() + *w.ClientConfig.Service.Path), CABundle: f.ca,
		}
		w.NamespaceSelector.MatchExpressions = append(w.NamespaceSelector.MatchExpressions, metav1.LabelSelectorRequirement{
			Key: corev1.LabelMetadataName, Operator: metav1.LabelSelectorOpIn, Values: []string{f.ns, own, out, metav1.NamespaceSystem},
		})
	}
	namespace, err := f.client.CoreV1().Namespaces().Get(t.Context(), out, metav1.GetOptions{})
	f.must(err)
	namespace.Labels["csi.example.com/webhook"] = "ignore"
	_, err = f.client.CoreV1().Namespaces().Update(t.Context(), namespace, metav1.UpdateOptions{})
	f.must(err)
	f.configureAs(config)

	class := f.class("dc1", "dc1")
	calls := func() float64 { return f.metric("storage_controller_webhook_requests_total") }
	pod := podOf("pod-", ephemeralVolume("v", &class, "1Gi"))
	for _, ns := range []string{own, out, metav1.NamespaceSystem} {
		before := calls()
		created, err := f.client.CoreV1().Pods(ns).Create(t.Context(), pod.DeepCopy(),
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		f.must(err)
		f.unpatched(created)
		pvc := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: f.ns},
			Spec: pod.Spec.Volumes[0].Ephemeral.VolumeClaimTemplate.Spec}
		_, err = f.client.CoreV1().PersistentVolumeClaims(ns).Create(t.Context(), pvc,
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		f.must(err)
		if n := calls() - before; n != 0 {
			t.Errorf("namespace %s: %v calls", ns, n)
		}
	}
	before := calls()
	f.patched(f.createPod(pod), map[string]string{"dc1": "1073741824"})
	if n := calls() - before; n == 0 {
		t.Error("the webhook was not called where it should be")
	}
	// The conditions keep away what cannot concern it.
	before = calls()
	f.unpatched(f.createPod(podOf("pod-", emptyDir("v"))))
	f.newClaim("classless", ptr.To(""), "1Gi")
	if n := calls() - before; n != 0 {
		t.Errorf("%v calls for objects that cannot concern the driver", n)
	}
	f.newClaim("ours", &class, "1Gi")
	f.newClaim("by-annotation", ptr.To(""), "1Gi", func(pvc *corev1.PersistentVolumeClaim) {
		pvc.Annotations = map[string]string{"volume.beta.kubernetes.io/storage-class": class}
		pvc.Spec.StorageClassName = nil
	})
	for _, name := range []string{"ours", "by-annotation"} {
		pvc, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Get(t.Context(), name, metav1.GetOptions{})
		f.must(err)
		if got := fmt.Sprint(pvc.Finalizers); got != "[kubernetes.io/pvc-protection topolvm.io/pvc]" {
			t.Errorf("claim %s: finalizers %v", name, got)
		}
	}
}
