// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

func TestNodecontrollerScenarioCommands(t *testing.T) {
	t.Setenv("KUBECONFIG", "")
	cp := kubetest.Get(t)
	ns := kubetest.Namespace(t, cp)
	driver, key := ns+".example.com", ns+".example.com/node"
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	node := func(name string) {
		t.Helper()
		must(kubetest.CreateNode(t.Context(), cp.Client(), kubetest.NodeSpec{Name: ns + "-" + name,
			Labels: map[string]string{key: ns + "-" + name}, Driver: driver, TopologyKeys: []string{key}}))
		_, err := cp.Client().CoreV1().Nodes().Patch(t.Context(), ns+"-"+name, "application/merge-patch+json",
			[]byte(fmt.Sprintf(`{"metadata":{"finalizers":["%s/node","x.example.com/other"]}}`, driver)), metav1.PatchOptions{})
		must(err)
	}
	finalizers := func(name string) string {
		n, err := cp.Client().CoreV1().Nodes().Get(t.Context(), ns+"-"+name, metav1.GetOptions{})
		must(err)
		return strings.Join(n.Finalizers, ",")
	}
	command := func(args ...string) (int, string, string) {
		t.Helper()
		return output(t, append([]string{"storage-controller", "nodecontroller"},
			append(args, "--driver-name="+driver, "--kubeconfig="+cp.Kubeconfig())...)...)
	}
	node("keep")
	node("n")
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: ns + "-pv",
		Annotations: map[string]string{storagehelpers.AnnDynamicallyProvisioned: driver}}, Spec: corev1.PersistentVolumeSpec{
		AccessModes:                   []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
		PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: driver,
			VolumeHandle: "h"}},
		NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: corev1.NodeSelectorOpIn, Values: []string{ns + "-n"}}},
		}}}},
	}}
	pv, err := cp.Client().CoreV1().PersistentVolumes().Create(t.Context(), pv, metav1.CreateOptions{})
	must(err)
	pv.Status.Phase = corev1.VolumeAvailable
	_, err = cp.Client().CoreV1().PersistentVolumes().UpdateStatus(t.Context(), pv, metav1.UpdateOptions{})
	must(err)

	t.Run("019_remove_finalizers", func(t *testing.T) {
		all := driver + "/node,x.example.com/other"
		if code, stdout, stderr := command("remove-finalizers"); code != 0 || strings.Count(stdout,
			"would be removed") != 2 || finalizers("n") != all {
			t.Errorf("the plan: %d %q %q, left are %s", code, stdout, stderr, finalizers("n"))
		}
		if code, _, stderr := command("remove-finalizers", "--dry-run"); code != exitUsage || !strings.Contains(stderr, "--yes") {
			t.Errorf("a removed flag: %d %q", code, stderr)
		}
		if code, stdout, stderr := command("remove-finalizers", "--yes"); code != 0 || strings.Count(stdout,
			" removed\n") != 2 || finalizers("n") != "x.example.com/other" || finalizers("keep") != "x.example.com/other" {
			t.Errorf("%d %q %q, left are %s", code, stdout, stderr, finalizers("n"))
		}
	})
	t.Run("055_cleanup", func(t *testing.T) {
		if code, _, stderr := command("cleanup", "--yes"); code != exitUsage || !strings.Contains(stderr, "--node") {
			t.Errorf("without a node: %d %q", code, stderr)
		}
		if code, _, stderr := command("cleanup", "--node="+ns+"-n", "--volumes", "--yes"); code != exitFindings || !strings.Contains(stderr,
			"exists") {
			t.Errorf("of a node that exists: %d %q", code, stderr)
		}
		_, err := cp.Client().CoreV1().Nodes().Patch(t.Context(), ns+"-n", "application/merge-patch+json",
			[]byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
		must(err)
		must(cp.Client().CoreV1().Nodes().Delete(t.Context(), ns+"-n", metav1.DeleteOptions{}))
		must(cp.Client().StorageV1().CSINodes().Delete(t.Context(), ns+"-n", metav1.DeleteOptions{}))
		if code, stdout, stderr := command("cleanup", "--node="+ns+"-n", "--volumes"); code != 0 || !strings.Contains(stdout, ns+"-pv") {
			t.Errorf("the plan: %d %q %q", code, stdout, stderr)
		}
		if code, stdout, stderr := command("cleanup", "--node="+ns+"-n", "--volumes", "--yes"); code != 0 {
			t.Errorf("%d %q %q", code, stdout, stderr)
		}
		kubetest.Eventually(t, "the volume is deleted", func(ctx context.Context) error {
			got, err := cp.Client().CoreV1().PersistentVolumes().Get(ctx, pv.Name, metav1.GetOptions{})
			if kube.IsNotFound(err) || err == nil && got.DeletionTimestamp != nil {
				return nil
			}
			return fmt.Errorf("%v, %v", got, err)
		})
		if code, stdout, _ := command("cleanup", "--node="+ns+"-unknown", "--yes"); code != 0 || !strings.Contains(stdout, "no volume") {
			t.Errorf("a node without volumes: %d %q", code, stdout)
		}
	})
	t.Run("042_approve", func(t *testing.T) {
		if code, _, stderr := command("approve", "n1"); code != exitFailure || !strings.Contains(stderr, "lost-nodes."+driver) {
			t.Errorf("without records: %d %q", code, stderr)
		}
		maps := cp.Client().CoreV1().ConfigMaps(ns)
		_, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "lost-nodes." + driver},
			Data: map[string]string{"n1": `{"node":"n1","since":"2026-11-22T09:51:03Z","held":"breaker"}`}}, metav1.CreateOptions{})
		must(err)
		approved := func() string {
			cm, err := maps.Get(t.Context(), "lost-nodes."+driver, metav1.GetOptions{})
			must(err)
			return cm.Annotations["storage-controller.io/approve"]
		}
		if code, stdout, stderr := command("approve", "n1"); code != 0 || !strings.Contains(stdout, "held") || approved() != "" {
			t.Errorf("the plan: %d %q %q", code, stdout, stderr)
		}
		if code, _, stderr := command("approve", "--yes"); code != exitFailure || !strings.Contains(stderr, "Name the nodes") {
			t.Errorf("without a node: %d %q", code, stderr)
		}
		if code, stdout, stderr := command("approve", "n1", "--yes", "--namespace="+ns); code != 0 || approved() != "n1" {
			t.Errorf("%d %q %q, approved %q", code, stdout, stderr, approved())
		}
	})
	t.Run("055_no_API_server", func(t *testing.T) {
		path := kubetest.WriteKubeconfig(t, &rest.Config{Host: "http://127.0.0.1:1"})
		code, _, stderr := output(t, "storage-controller", "nodecontroller", "cleanup", "--node=n", "--yes", "--driver-name="+driver,
			"--kubeconfig="+path)
		if code != exitFailure || !strings.Contains(stderr, "connection refused") {
			t.Errorf("%d %q", code, stderr)
		}
	})
}
