// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate_test

import (
	"context"
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/tools/migrate"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

// TestServerAccepts submits each object with a new container to a real API server, before and after.
func TestServerAccepts(t *testing.T) {
	t.Parallel()
	client := kubetest.Get(t, kubetest.Real()).Client()
	each(t, func(t *testing.T, input []byte, _ migrate.Options, r migrate.Result) {
		before, after := typed(t, input), typed(t, r.Manifest)
		for i, object := range after {
			pod := podOf(object)
			if pod == nil || !slices.ContainsFunc(slices.Concat(pod.InitContainers, pod.Containers),
				func(c corev1.Container) bool { return c.Image == image }) {
				continue // unchanged
			}
			for _, o := range []any{before[i], object} {
				if err := tryToCreate(t.Context(), client, o); err != nil {
					t.Errorf("%v\n%s", err, r.Manifest)
				}
			}
		}
	})
}

// tryToCreate submits a workload to the API server as a dry run.
func tryToCreate(ctx context.Context, client kubernetes.Interface, object any) (err error) {
	// The API server of the tests does not allow privileged containers.
	if pod := podOf(object); pod != nil {
		for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
			if c.SecurityContext != nil {
				c.SecurityContext.Privileged = nil
			}
			for i := range c.VolumeMounts {
				c.VolumeMounts[i].MountPropagation = nil // which requires a privileged container
			}
		}
	}
	dry := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict}
	switch o := object.(type) {
	case *appsv1.Deployment:
		o.Namespace = "default"
		_, err = client.AppsV1().Deployments(o.Namespace).Create(ctx, o, dry)
	case *appsv1.StatefulSet:
		o.Namespace = "default"
		_, err = client.AppsV1().StatefulSets(o.Namespace).Create(ctx, o, dry)
	case *appsv1.DaemonSet:
		o.Namespace = "default"
		_, err = client.AppsV1().DaemonSets(o.Namespace).Create(ctx, o, dry)
	}
	return err
}
