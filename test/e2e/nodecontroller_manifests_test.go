// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// manifests is the documents of files of deploy, by the names of the files, or of the directories of permissions and webhooks.
func manifests(t *testing.T, patterns ...string) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	for _, pattern := range patterns {
		files, err := filepath.Glob("../../deploy/" + pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("files %s: %v, %v", pattern, files, err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			name := filepath.Base(file)
			if name == "rbac.yaml" || name == "webhook.yaml" {
				name = filepath.Base(filepath.Dir(file))
			}
			all[name] = strings.Split(string(text), "\n---\n")
		}
	}
	return all
}

func sharedControlPlane(t *testing.T) *kubetest.ControlPlane {
	return kubetest.Get(t, kubetest.WithControllerManager(), kubetest.WithScheduler(), kubetest.WithAudit())
}

// TestNodecontrollerManifestsAreAccepted has the API server judge them, which keeps nothing.
func TestNodecontrollerManifestsAreAccepted(t *testing.T) {
	t.Parallel()
	client := sharedControlPlane(t).Client().Discovery().RESTClient()
	paths := map[string]string{
		"ServiceAccount":     "/api/v1/namespaces/%s/serviceaccounts",
		"Role":               "/apis/rbac.authorization.k8s.io/v1/namespaces/%s/roles",
		"RoleBinding":        "/apis/rbac.authorization.k8s.io/v1/namespaces/%s/rolebindings",
		"ClusterRole":        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
		"ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
	}
	for file, docs := range manifests(t, "rbac/nodecontroller*/rbac.yaml") {
		for _, doc := range docs {
			var meta metav1.PartialObjectMetadata
			body, err := yaml.YAMLToJSONStrict([]byte(doc))
			if err == nil {
				err = yaml.Unmarshal(body, &meta)
			}
			if err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			path, known := paths[meta.Kind]
			if !known {
				t.Fatalf("%s: kind %q is not expected", file, meta.Kind)
			}
			if strings.Contains(path, "%s") {
				path = fmt.Sprintf(path, meta.Namespace)
			}
			err = client.Post().AbsPath(path).Param("dryRun", "All").Param("fieldValidation", "Strict").
				SetHeader("Content-Type", "application/json").Body(body).Do(t.Context()).Error()
			if err != nil {
				t.Errorf("%s: %s %s: %v", file, meta.Kind, meta.Name, err)
			}
		}
	}
}

// TestNodecontrollerManifestsGrantNoMore holds each file against the permissions that its
// feature may have.
func TestNodecontrollerManifestsGrantNoMore(t *testing.T) {
	read := "get,list,watch"
	want := map[string]map[string]string{
		"nodecontroller": {
			"nodes": read, "persistentvolumes": read, "persistentvolumeclaims": read, "csinodes.storage.k8s.io": read,
			"storageclasses.storage.k8s.io": read, "namespaces": "get", "events": "create,patch",
			"csidrivers.storage.k8s.io": "get", "configmaps in default": "create,get,list,update,watch",
		},
		"nodecontroller-leader-election": {"leases.coordination.k8s.io in default": "create,get,update,watch"},
		"nodecontroller-node-finalizer":  {"nodes": "patch"},
		"nodecontroller-cleanup": {"persistentvolumeclaims": "delete", "pods": "list,watch",
			"volumeattachments.storage.k8s.io": "list,watch"},
		"nodecontroller-cleanup-volumes": {"persistentvolumes": "delete,patch"},
		"nodecontroller-resize-nudge":    {"pods": "list,patch,watch"},
		"nodecontroller-pvc-strip":       {"persistentvolumeclaims": "patch"},
		"nodecontroller-pvc-enforce":     {"persistentvolumeclaims": "patch", "pods": "delete,get,list,watch"},
		"nodecontroller-secure-metrics": {"tokenreviews.authentication.k8s.io": "create",
			"subjectaccessreviews.authorization.k8s.io": "create"},
	}
	got := map[string]map[string]string{}
	for file, docs := range manifests(t, "rbac/nodecontroller*/rbac.yaml") {
		got[file] = map[string]string{}
		bound := map[string]bool{}
		for _, doc := range docs {
			var o struct {
				metav1.TypeMeta   `json:",inline"`
				metav1.ObjectMeta `json:"metadata"`
				Rules             []rbacv1.PolicyRule
				Subjects          []rbacv1.Subject
				RoleRef           rbacv1.RoleRef
			}
			if err := yaml.UnmarshalStrict([]byte(doc), &o); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			switch o.Kind {
			case "ClusterRole", "Role":
				bound[o.Kind+" "+o.Name] = bound[o.Kind+" "+o.Name] || false
				noteRules(got[file], o.Namespace, o.Rules)
			case "ClusterRoleBinding", "RoleBinding":
				bound[o.RoleRef.Kind+" "+o.RoleRef.Name] = true
				if len(o.Subjects) != 1 || o.Subjects[0].Kind != "ServiceAccount" ||
					o.Subjects[0].Name != "storage-controller-nodecontroller" {
					t.Errorf("%s: bound to %v", file, o.Subjects)
				}
			}
		}
		for role, is := range bound {
			if !is {
				t.Errorf("%s: no subject has %s", file, role)
			}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// noteRules writes down rules as "resource.group name in namespace": "verb,verb".
func noteRules(granted map[string]string, namespace string, rules []rbacv1.PolicyRule) {
	for _, r := range rules {
		for _, resource := range r.Resources {
			key := strings.TrimSuffix(resource+"."+r.APIGroups[0], ".")
			if len(r.ResourceNames) > 0 {
				key += " " + strings.Join(r.ResourceNames, " ")
			}
			if namespace != "" {
				key += " in " + namespace
			}
			verbs := slices.Concat(r.Verbs, strings.Split(granted[key], ","))
			granted[key] = strings.Trim(strings.Join(slices.Sorted(slices.Values(verbs)), ","), ",")
		}
	}
}

// webhookConfiguration is that of a file of the chart.
func webhookConfiguration(t *testing.T, file string) *admissionv1.MutatingWebhookConfiguration {
	t.Helper()
	for _, doc := range manifests(t, "helm/storage-controller/files/"+file)[file] {
		if strings.Contains(doc, "kind: MutatingWebhookConfiguration") {
			var c admissionv1.MutatingWebhookConfiguration
			if err := yaml.UnmarshalStrict([]byte(doc), &c); err != nil {
				t.Fatal(err)
			}
			return &c
		}
	}
	t.Fatalf("%s has no configuration", file)
	return nil
}

// webhookConfigurationToEnforce is that of the chart with pvcFinalizerMode enforce, which adds a webhook.
func webhookConfigurationToEnforce(t *testing.T) *admissionv1.MutatingWebhookConfiguration {
	t.Helper()
	c, added := webhookConfiguration(t, "webhooks.yaml"), webhookConfiguration(t, "webhooks-enforce.yaml")
	if len(c.Webhooks) != 1 || len(added.Webhooks) != 1 || c.Name != added.Name {
		t.Fatalf("%d webhooks in %s, %d in %s", len(c.Webhooks), c.Name, len(added.Webhooks), added.Name)
	}
	c.Webhooks = append(c.Webhooks, added.Webhooks...)
	return c
}

func TestNodecontrollerWebhookManifestsAgree(t *testing.T) {
	for _, w := range webhookConfigurationToEnforce(t).Webhooks {
		if *w.FailurePolicy != admissionv1.Ignore || *w.TimeoutSeconds != 5 || *w.MatchPolicy != admissionv1.Equivalent ||
			*w.SideEffects != admissionv1.SideEffectClassNone ||
			*w.ReinvocationPolicy != admissionv1.IfNeededReinvocationPolicy || !slices.Equal(w.AdmissionReviewVersions, []string{"v1"}) ||
			w.ObjectSelector != nil {
			t.Errorf("webhook %s is %+v", w.Name, w)
		}
	}
}

// TestNodecontrollerScenarioWebhookManifest has the API server use the configuration with
// webhooks without a server: objects that they select cannot be created then.
func TestNodecontrollerScenarioWebhookManifest(t *testing.T) {
	t.Parallel()
	cp := sharedControlPlane(t)
	client, ns, ignored := cp.Client(), kubetest.Namespace(t, cp), kubetest.Namespace(t, cp)
	ctx := t.Context()
	label := []byte(`{"metadata":{"labels":{"csi.example.com/webhook":"ignore"}}}`)
	if _, err := client.CoreV1().Namespaces().Patch(ctx, ignored, types.MergePatchType, label, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	c := webhookConfigurationToEnforce(t)
	c.Name = ns
	for i := range c.Webhooks {
		w := &c.Webhooks[i]
		w.FailurePolicy = ptr.To(admissionv1.Fail) // so that the API server shows which objects it selects
		w.ClientConfig = admissionv1.WebhookClientConfig{URL: ptr.To("https://127.0.0.1:1" + *w.ClientConfig.Service.Path)}
		// Other tests run at the same time.
		w.NamespaceSelector.MatchExpressions = append(w.NamespaceSelector.MatchExpressions, metav1.LabelSelectorRequirement{
			Key: corev1.LabelMetadataName, Operator: metav1.LabelSelectorOpIn, Values: []string{ns, ignored, metav1.NamespaceSystem},
		})
	}
	configurations := client.AdmissionregistrationV1().MutatingWebhookConfigurations()
	if _, err := configurations.Create(ctx, c, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = configurations.Delete(context.WithoutCancel(ctx), c.Name, metav1.DeleteOptions{}) })

	create := func(ctx context.Context, namespace string, object any) error {
		tryOnly := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
		var err error
		switch o := object.(type) {
		case *corev1.Pod:
			_, err = client.CoreV1().Pods(namespace).Create(ctx, o, tryOnly)
		case *corev1.PersistentVolumeClaim:
			_, err = client.CoreV1().PersistentVolumeClaims(namespace).Create(ctx, o, tryOnly)
		}
		return err
	}
	direct := podWith(corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}})
	refused := map[string]any{
		"a pod with a claim": direct,
		"a pod with a volume of its own": podWith(corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{
			VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: newClaim(
				"", "x").Spec}}}),
		"a claim with a class":             newClaim("c", "x"),
		"a claim with a class the old way": oldClaim("x"),
	}
	passed := map[string]any{
		"a pod without volumes":                  podWith(),
		"a pod with other volumes":               podWith(corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}),
		"a claim of no class":                    newClaim("c", ""),
		"a claim of no class the old way":        oldClaim(""),
		"a claim without a class, but annotated": unclassed(map[string]string{"a": "b"}),
		"a claim without a class":                unclassed(nil),
	}
	for _, name := range slices.Sorted(maps.Keys(refused)) {
		kubetest.Eventually(t, name+" is refused", func(ctx context.Context) error {
			err := create(ctx, ns, refused[name])
			if err == nil {
				return errors.New("it is not")
			}
			if !strings.Contains(err.Error(), "failed calling webhook") {
				return err
			}
			return nil
		})
	}
	for name, object := range passed {
		if err := create(ctx, ns, object); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	t.Run("076_excepted_namespaces", func(t *testing.T) {
		for _, namespace := range []string{ignored, metav1.NamespaceSystem} {
			for name, object := range refused {
				if err := create(t.Context(), namespace, object); err != nil {
					t.Errorf("%s in %s: %v", name, namespace, err)
				}
			}
		}
	})
}

func podWith(sources ...corev1.VolumeSource) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "example.com/i"}}}}
	for i, s := range sources {
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: fmt.Sprint("v", i), VolumeSource: s})
	}
	return pod
}

// oldClaim names its class by the annotation that did so before the field.
func oldClaim(class string) *corev1.PersistentVolumeClaim {
	return unclassed(map[string]string{corev1.BetaStorageClassAnnotation: class})
}

func unclassed(annotations map[string]string) *corev1.PersistentVolumeClaim {
	c := newClaim("c", "")
	c.Spec.StorageClassName, c.Annotations = nil, annotations
	return c
}
