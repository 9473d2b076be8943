// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
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
		code, _, stderr := output(t, "storage-controller", "nodecontroller", "cleanup", "--node=n", "--volumes", "--yes")
		if code != exitUsage || !strings.Contains(stderr, "use nodecontroller approve, with --node-cleanup=claims or volumes") {
			t.Errorf("%d %q", code, stderr)
		}
	})
	t.Run("042_approve", func(t *testing.T) {
		if code, _, stderr := command("approve", "n1"); code != exitFailure || !strings.Contains(stderr, "lost-nodes."+driver) {
			t.Errorf("without records: %d %q", code, stderr)
		}
		maps := cp.Client().CoreV1().ConfigMaps(ns)
		_, err := maps.Create(t.Context(), &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: "lost-nodes." + driver,
				Annotations: map[string]string{nodecleanup.AnnotationMode: string(nodecleanup.ModeClaims),
					nodecleanup.AnnotationTopologyKey: "k"}},
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
		if code, _, stderr := command("approve", "n2", "--yes"); code != exitFindings || !strings.Contains(stderr, "no such node is lost") {
			t.Errorf("of a node that is not lost: %d %q", code, stderr)
		}
		if code, _, stderr := command("approve", "--yes"); code != exitFailure || !strings.Contains(stderr, "Name the nodes") {
			t.Errorf("without a node: %d %q", code, stderr)
		}
		for _, policy := range []corev1.PersistentVolumeReclaimPolicy{"Delete", "Retain"} {
			volumeOn(t, cp.Client(), ns, driver, "n1", policy)
		}
		code, stdout, stderr := command("approve", "--held", "--all", "--yes", "--namespace="+ns)
		for _, want := range []string{
			"did not opt in, and will be deleted: volume " + ns + "-delete, claim " + ns + "/delete\n",
			"did not opt in, and the claim will be deleted if the controller has --node-cleanup-retain=claim: volume " +
				ns + "-retain, claim " + ns + "/retain\n",
		} {
			if code != 0 || approved() != "n1=all" || !strings.Contains(stdout, want) {
				t.Errorf("%d %q %q, approved %q, want %q", code, stdout, stderr, approved(), want)
			}
		}
	})
	t.Run("TopoLVM", func(t *testing.T) {
		run := func(args ...string) (int, string, string) {
			return output(t, append([]string{"storage-controller", "nodecontroller"}, append(args, "--driver-name=topolvm.io",
				"--kubeconfig="+cp.Kubeconfig())...)...)
		}
		if code, stdout, stderr := run("remove-finalizers"); code != 0 || !strings.Contains(stdout, "topolvm.io/node") {
			t.Errorf("%d %q %q", code, stdout, stderr)
		}
		if code, _, stderr := run("approve", "n1"); code != exitFailure || !strings.Contains(stderr, "lost-nodes.topolvm.io") {
			t.Errorf("%d %q", code, stderr)
		}
	})
	t.Run("055_no_API_server", func(t *testing.T) {
		path := kubetest.WriteKubeconfig(t, &rest.Config{Host: "http://127.0.0.1:1"})
		code, _, stderr := output(t, "storage-controller", "nodecontroller", "approve", "n", "--yes", "--driver-name="+driver,
			"--kubeconfig="+path)
		if code != exitFailure || !strings.Contains(stderr, "connection refused") {
			t.Errorf("%d %q", code, stderr)
		}
	})
}

// volumeOn creates a PersistentVolume on a node with the topology key "k", and its claim, both with the name of the policy.
func volumeOn(t *testing.T, client kubernetes.Interface, ns, driver, node string, policy corev1.PersistentVolumeReclaimPolicy) {
	t.Helper()
	modes := []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
	size := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
	name := strings.ToLower(string(policy))
	claim, err := client.CoreV1().PersistentVolumeClaims(ns).Create(t.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeClaimSpec{AccessModes: modes, VolumeName: ns + "-" + name, StorageClassName: new(string),
			Resources: corev1.VolumeResourceRequirements{Requests: size}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	on := []corev1.NodeSelectorRequirement{{Key: "k", Operator: corev1.NodeSelectorOpIn, Values: []string{node}}}
	_, err = client.CoreV1().PersistentVolumes().Create(t.Context(), &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: ns + "-" + name}, Spec: corev1.PersistentVolumeSpec{
			AccessModes: modes, Capacity: size, PersistentVolumeReclaimPolicy: policy,
			ClaimRef: &corev1.ObjectReference{Namespace: ns, Name: name, UID: claim.UID},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: on}},
			}},
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				CSI: &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: name},
			},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
}
