// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// statefulSet makes one whose pods run on the nodes of the test and have a claim each.
func (e *env) statefulSet(name, class string, replicas int32) {
	e.t.Helper()
	labels := map[string]string{"app": name}
	claim := newClaim("data", class)
	set := &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.StatefulSetSpec{
			Replicas: &replicas, ServiceName: name, Selector: &metav1.LabelSelector{MatchLabels: labels},
			PodManagementPolicy:  appsv1.ParallelPodManagement,
			VolumeClaimTemplates: []corev1.PersistentVolumeClaim{*claim},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					NodeSelector: map[string]string{"test": e.ns}, TerminationGracePeriodSeconds: ptr.To[int64](0),
					// By the requests, the scheduler prefers an empty node. Of nodes that it finds equally good it takes
					// the one that it has looked at first, which may be the same one for minutes.
					Containers: []corev1.Container{{Name: "c", Image: "none",
						Resources: corev1.ResourceRequirements{
							Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4")}},
						VolumeMounts: []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}}},
				},
			},
		},
	}
	if _, err := e.client.AppsV1().StatefulSets(e.ns).Create(e.t.Context(), set, metav1.CreateOptions{}); err != nil {
		e.t.Fatal(err)
	}
}

func (e *env) scale(name string, replicas int) {
	e.t.Helper()
	patch := fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas)
	if _, err := e.client.AppsV1().StatefulSets(e.ns).Patch(e.t.Context(), name, types.MergePatchType, patch,
		metav1.PatchOptions{}); err != nil {
		e.t.Fatal(err)
	}
}

func (e *env) deleteStatefulSet(name string) {
	e.t.Helper()
	if err := e.client.AppsV1().StatefulSets(e.ns).Delete(e.t.Context(), name,
		metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationForeground)}); err != nil {
		e.t.Fatal(err)
	}
}

// running waits until n pods of a StatefulSet run.
func (e *env) running(name string, n int) {
	e.t.Helper()
	e.eventually(fmt.Sprintf("%d pods of %s run", n, name), func(ctx context.Context) error {
		pods, err := e.client.CoreV1().Pods(e.ns).List(ctx, metav1.ListOptions{LabelSelector: "app=" + name})
		if err != nil {
			return err
		}
		if got := kubetest.Running(pods.Items); got != n {
			return fmt.Errorf("%d of %d do", got, len(pods.Items))
		}
		return nil
	})
}
