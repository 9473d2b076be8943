// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/util/cert"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/topolvm"
)

// claimScenarios are about claims and their pods.
func claimScenarios(t *testing.T) {
	const protection, seed, legacy = "kubernetes.io/pvc-protection", "topolvm.io/pvc", "topolvm.cybozu.com/pvc"
	for _, tt := range []struct {
		name string
		args []string
		kept []string // finalizers
	}{
		{"079_obsolete_finalizers", nil, []string{protection}},
		{"079_the_finalizer_of_the_seed", []string{"--pvc-finalizer-mode=enforce"}, []string{protection, seed}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := startPod(t, false, tt.args...)
			node, class := p.node("a"), p.class()
			p.ready()
			claims, pods := p.client.CoreV1().PersistentVolumeClaims(p.ns), p.client.CoreV1().Pods(p.ns)
			claim := p.claim("data", class, node.Name())
			p.bind(claim, p.volumeOf(claim))
			p.patch(claim, `{"metadata":{"finalizers":["`+protection+`","`+seed+`","`+legacy+`"]}}`)
			kubetest.Eventually(t, "the obsolete finalizers are removed", func(ctx context.Context) error {
				claim, err := claims.Get(ctx, claim.Name, metav1.GetOptions{})
				if err == nil && !slices.Equal(slices.Sorted(slices.Values(claim.Finalizers)), tt.kept) {
					err = fmt.Errorf("the claim has %q", claim.Finalizers)
				}
				return err
			})
			if !slices.Contains(tt.kept, seed) {
				return
			}
			user := p.user("user", claim, node.Name())
			if err := claims.Delete(t.Context(), claim.Name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			kubetest.Eventually(t, "the pod is being deleted", func(ctx context.Context) error {
				pod, err := pods.Get(ctx, user.Name, metav1.GetOptions{})
				if err == nil && (pod.DeletionTimestamp == nil || *pod.DeletionGracePeriodSeconds != 1) {
					err = fmt.Errorf("it is not: %v", pod.DeletionGracePeriodSeconds)
				}
				return err
			})
			if _, err := claims.Get(t.Context(), claim.Name, metav1.GetOptions{}); err != nil {
				t.Errorf("while the pod exists: %v", err)
			}
			if err := pods.Delete(t.Context(), user.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}); err != nil {
				t.Fatal(err)
			}
			p.patch(claim, `{"metadata":{"finalizers":["`+seed+`"]}}`)
			kubetest.Eventually(t, "the claim is deleted", func(ctx context.Context) error {
				_, err := claims.Get(ctx, claim.Name, metav1.GetOptions{})
				return absent("claim", err)
			})
		})
	}
	t.Run("080_file_system_expansion", func(t *testing.T) {
		p := startPod(t, false, "--nodecontroller-workers=1")
		node, class := p.node("a"), p.class()
		p.ready()
		// expanded expands the volume of a new claim, and returns the annotation of its pod.
		expanded := func(name string) (claim *corev1.PersistentVolumeClaim, at func(context.Context) (string, error)) {
			claim = p.claim(name, class, node.Name())
			p.bind(claim, p.volumeOf(claim))
			p.user(name, claim, node.Name())
			at = func(ctx context.Context) (string, error) {
				pod, err := p.client.CoreV1().Pods(p.ns).Get(ctx, name, metav1.GetOptions{})
				if err != nil {
					return "", err
				}
				return pod.Annotations["topolvm.io/last-resizefs-requested-at"], nil
			}
			p.expand(claim, "2Gi")
			kubetest.Eventually(t, "the pod is annotated", func(ctx context.Context) error {
				value, err := at(ctx)
				if err == nil && value == "" {
					err = errors.New("it has no annotation")
				}
				return err
			})
			return claim, at
		}
		claim, at := expanded("data")
		before, err := at(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		p.patch(claim, `{"metadata":{"labels":{"changed":"yes"}}}`)
		expanded("later") // the only worker has seen the change
		if after, err := at(t.Context()); err != nil || after != before {
			t.Errorf("the annotation was %s, and is %s, %v", before, after, err)
		}
	})
	t.Run("081_webhooks", func(t *testing.T) {
		dir, address := t.TempDir(), freeAddress(t)
		chain, key, err := cert.GenerateSelfSignedCertKey("127.0.0.1", nil, nil)
		for name, content := range map[string][]byte{corev1.TLSCertKey: chain, corev1.TLSPrivateKeyKey: key} {
			err = errors.Join(err, os.WriteFile(filepath.Join(dir, name), content, 0o600))
		}
		if err != nil {
			t.Fatal(err)
		}
		p := startPod(t, false, "--enable-webhooks", "--webhook-addr="+address, "--cert-dir="+dir, "--shutdown-delay=0s")
		p.ready()
		claim := p.claim("data", p.class(), "unknown")
		pod := userOf("user", claim)
		response := p.review(address, chain, "pods", pod)
		patch, err := jsonpatch.DecodePatch(response.Patch)
		if err != nil {
			t.Fatalf("%s: %v", response.Patch, err)
		}
		document, err := json.Marshal(pod)
		if err == nil {
			document, err = patch.Apply(document)
		}
		if err == nil {
			err = json.Unmarshal(document, pod)
		}
		if err != nil {
			t.Fatal(err)
		}
		resources, name := pod.Spec.Containers[0].Resources, corev1.ResourceName(topolvm.Driver+"/capacity")
		if resources.Requests.Name(name, "").Value() != 1 || resources.Limits.Name(name, "").Value() != 1 ||
			!maps.Equal(pod.Annotations, map[string]string{"capacity." + topolvm.Driver + "/thin": fmt.Sprint(1 << 30)}) {
			t.Errorf("the pod has %+v and %v", resources, pod.Annotations)
		}
		if response := p.review(address, chain, "persistentvolumeclaims", claim); len(response.Patch) > 0 {
			t.Errorf("the claim gets %s", response.Patch)
		}
	})
}

// userOf returns a pod that uses a claim.
func userOf(name string, claim *corev1.PersistentVolumeClaim) *corev1.Pod {
	volume := corev1.Volume{Name: "data"}
	volume.PersistentVolumeClaim = &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim.Name}
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: claim.Namespace}, Spec: corev1.PodSpec{
		Containers: []corev1.Container{{Name: "user", Image: "user"}}, Volumes: []corev1.Volume{volume}}}
}

// user creates such a pod on a node.
func (p *pod) user(name string, claim *corev1.PersistentVolumeClaim, node string) *corev1.Pod {
	p.t.Helper()
	pod := userOf(name, claim)
	pod.Spec.NodeName = node
	pod, err := p.client.CoreV1().Pods(pod.Namespace).Create(p.t.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		p.t.Fatal(err)
	}
	return pod
}

// review asks a webhook about the creation of an object, as the API server does, and fails the test unless it allows it.
func (p *pod) review(address string, roots []byte, resource string, object runtime.Object) *admissionv1.AdmissionResponse {
	p.t.Helper()
	raw, err := json.Marshal(object)
	if err != nil {
		p.t.Fatal(err)
	}
	review := admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"},
		Request: &admissionv1.AdmissionRequest{UID: "review", Operation: admissionv1.Create, Namespace: p.ns,
			Resource: metav1.GroupVersionResource{Version: "v1", Resource: resource}, Object: runtime.RawExtension{Raw: raw}},
	}
	body, err := json.Marshal(review)
	if err != nil {
		p.t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(roots)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}
	defer transport.CloseIdleConnections()
	path := map[string]string{"pods": "/pod/mutate", "persistentvolumeclaims": "/pvc/mutate"}[resource]
	response, err := (&http.Client{Transport: transport}).Post("https://"+address+path, "application/json", bytes.NewReader(body))
	if err != nil {
		p.t.Fatal(err)
	}
	defer response.Body.Close()
	var answer admissionv1.AdmissionReview
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil || answer.Response == nil || !answer.Response.Allowed {
		p.t.Fatalf("%s: %s, %+v, %v", path, response.Status, answer.Response, err)
	}
	return answer.Response
}
