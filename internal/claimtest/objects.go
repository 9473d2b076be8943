// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package claimtest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// PVCProtection is the finalizer that Kubernetes adds to every claim.
const PVCProtection = "kubernetes.io/pvc-protection"

func (f *Cluster) claims() typedcorev1.PersistentVolumeClaimInterface {
	return f.Client.CoreV1().PersistentVolumeClaims(f.Namespace)
}

// Claim creates a claim.
func (f *Cluster) Claim(name string, change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	f.Helper()
	pvc := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: f.ClaimSpec()}
	if change != nil {
		change(pvc)
	}
	pvc, err := f.claims().Create(f.Context(), pvc, metav1.CreateOptions{})
	f.Must(err)
	return pvc
}

// ClaimSpec returns the spec of a claim of the driver.
func (f *Cluster) ClaimSpec() corev1.PersistentVolumeClaimSpec {
	return corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: &f.Namespace,
		Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
	}
}

// GetClaim reads a claim.
func (f *Cluster) GetClaim(name string) *corev1.PersistentVolumeClaim {
	f.Helper()
	pvc, err := f.claims().Get(f.Context(), name, metav1.GetOptions{})
	f.Must(err)
	return pvc
}

// DeleteClaim deletes a claim.
func (f *Cluster) DeleteClaim(name string) {
	f.Helper()
	f.Must(f.claims().Delete(f.Context(), name, metav1.DeleteOptions{}))
}

// PatchClaim applies a merge patch to a claim.
func (f *Cluster) PatchClaim(name, patch string, subresources ...string) {
	f.Helper()
	_, err := f.claims().Patch(f.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}, subresources...)
	f.Must(err)
}

// Unprotect removes the finalizer pvc-protection, as Kubernetes does when no pod uses the claim.
func (f *Cluster) Unprotect(name string) {
	f.Helper()
	_, err := kube.PatchMetadata(f.Context(), f.claims(), f.GetClaim(name), kube.MetadataPatch{RemoveFinalizers: []string{PVCProtection}})
	f.Must(err)
}

// ClaimGone waits until a claim does not exist.
func (f *Cluster) ClaimGone(name string) {
	f.Helper()
	kubetest.Eventually(f.T, "claim "+name+" does not exist", func(ctx context.Context) error {
		pvc, err := f.claims().Get(ctx, name, metav1.GetOptions{})
		if kube.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it has the finalizers %v: %w", pvc.Finalizers, err)
	})
}

// HasFinalizers waits until a claim has exactly these finalizers.
func (f *Cluster) HasFinalizers(name string, want ...string) {
	f.Helper()
	kubetest.Eventually(f.T, fmt.Sprintf("claim %s has finalizers %v", name, want), func(context.Context) error {
		if got := f.GetClaim(name).Finalizers; !slices.Equal(got, want) {
			return fmt.Errorf("it has %v", got)
		}
		return nil
	})
}

// Pod creates a pod that uses claim: Running on node, or Pending if node is empty.
func (f *Cluster) Pod(name, claim, node string, change func(*corev1.Pod)) *corev1.Pod {
	f.Helper()
	kept := map[string]string{"kept": "kept"}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: kept, Annotations: kept}, Spec: corev1.PodSpec{
		NodeName:   node,
		Containers: []corev1.Container{{Name: "c", Image: "example.com/i", Env: []corev1.EnvVar{{Name: "KEPT", Value: "env"}}}},
		Volumes: []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}},
	}}
	pod.Status.Phase = corev1.PodPending
	if node != "" {
		pod.Status.Phase = corev1.PodRunning
	}
	if change != nil {
		change(pod)
	}
	phase := pod.Status.Phase
	pods := f.Client.CoreV1().Pods(f.Namespace)
	pod, err := pods.Create(f.Context(), pod, metav1.CreateOptions{})
	f.Must(err)
	if phase == corev1.PodPending {
		return pod
	}
	status := fmt.Appendf(nil, `{"status":{"phase":%q}}`, phase)
	running, err := pods.Patch(f.Context(), name, types.MergePatchType, status, metav1.PatchOptions{}, "status")
	if kube.IsNotFound(err) { // already deleted by the controller
		return pod
	}
	f.Must(err)
	return running
}

// PodNow returns a pod, or nil if it does not exist.
func (f *Cluster) PodNow(name string) *corev1.Pod {
	f.Helper()
	pod, err := f.Client.CoreV1().Pods(f.Namespace).Get(f.Context(), name, metav1.GetOptions{})
	if kube.IsNotFound(err) {
		return nil
	}
	f.Must(err)
	return pod
}

// PodDeleted waits until the deletion of a pod has begun.
func (f *Cluster) PodDeleted(name string) {
	f.Helper()
	kubetest.Eventually(f.T, "pod "+name+" is being deleted", func(context.Context) error {
		if pod := f.PodNow(name); pod != nil && pod.DeletionTimestamp == nil {
			return errors.New("it is not")
		}
		return nil
	})
}

// Unchanged fails the test if one of pods was updated or deleted.
func (f *Cluster) Unchanged(pods ...*corev1.Pod) {
	f.Helper()
	for _, before := range pods {
		if now := f.PodNow(before.Name); now == nil || now.ResourceVersion != before.ResourceVersion {
			f.Errorf("pod %s was changed: %+v", before.Name, now)
		}
	}
}

// Node creates a node and returns its name, which ends with name.
func (f *Cluster) Node(name string) string {
	f.Helper()
	name = f.Namespace + "-" + name
	f.Must(kubetest.CreateNode(f.Context(), f.Client, kubetest.NodeSpec{Name: name}))
	return name
}

// Terminate deletes a node, which a finalizer keeps until the end of the test.
func (f *Cluster) Terminate(node string) {
	f.Helper()
	nodes := f.Client.CoreV1().Nodes()
	patch := func(finalizers string) {
		data := []byte(`{"metadata":{"finalizers":` + finalizers + `}}`)
		_, err := nodes.Patch(context.WithoutCancel(f.Context()), node, types.MergePatchType, data, metav1.PatchOptions{})
		if err != nil && !kube.IsNotFound(err) {
			f.Errorf("changing the finalizers of the node: %v", err)
		}
	}
	patch(`["test/hold"]`)
	f.Must(nodes.Delete(f.Context(), node, metav1.DeleteOptions{}))
	f.Cleanup(func() { patch("null") })
}

// Class creates the StorageClass of [Cluster.ClaimSpec].
func (f *Cluster) Class() {
	f.Helper()
	_, err := f.Client.StorageV1().StorageClasses().Create(f.Context(), &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: f.Namespace}, Provisioner: f.Driver,
	}, metav1.CreateOptions{})
	f.Must(err)
}

// Volume creates the volume of a claim.
func (f *Cluster) Volume(name, claim, driver string) {
	f.Helper()
	_, err := f.Client.CoreV1().PersistentVolumes().Create(f.Context(), &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: f.Namespace + "-" + name},
		Spec: corev1.PersistentVolumeSpec{
			AccessModes:                   []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			ClaimRef:                      &corev1.ObjectReference{Namespace: f.Namespace, Name: claim},
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				CSI: &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: name}},
		},
	}, metav1.CreateOptions{})
	f.Must(err)
}

// Bound creates a claim and its volume.
func (f *Cluster) Bound(name, driver string) {
	f.Helper()
	f.Claim(name, func(pvc *corev1.PersistentVolumeClaim) { pvc.Spec.VolumeName = f.Namespace + "-" + name })
	f.Volume(name, name, driver)
}

// Grow makes a claim wait for a file system expansion since at.
func (f *Cluster) Grow(name string, at time.Time) {
	f.Helper()
	f.PatchClaim(name, fmt.Sprintf(
		`{"status":{"conditions":[{"type":"FileSystemResizePending","status":"True","lastTransitionTime":%q}]}}`,
		at.UTC().Format(time.RFC3339)), "status")
}
