// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvmtest

import (
	"context"
	"strings"
	"testing"

	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// definition is the CustomResourceDefinition of LogicalVolume. Both groups have the same schema.
const definition = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: logicalvolumes.GROUP}
spec:
  group: GROUP
  scope: Cluster
  names: {kind: LogicalVolume, listKind: LogicalVolumeList, plural: logicalvolumes, singular: logicalvolume}
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {status: {}}
    schema:
      openAPIV3Schema:
        type: object
        properties:
          apiVersion: {type: string}
          kind: {type: string}
          metadata: {type: object}
          spec:
            type: object
            required: [name, nodeName, size]
            properties:
              accessType: {type: string}
              deviceClass: {type: string}
              lvcreateOptionClass: {type: string}
              name: {type: string}
              nodeName: {type: string}
              size: {anyOf: [{type: integer}, {type: string}], x-kubernetes-int-or-string: true}
              source: {type: string}
          status:
            type: object
            properties:
              code: {type: integer, format: int32}
              currentSize: {anyOf: [{type: integer}, {type: string}], x-kubernetes-int-or-string: true}
              message: {type: string}
              volumeID: {type: string}
`

// Definition returns the CustomResourceDefinition of the group driver as JSON.
func Definition(driver string) ([]byte, error) {
	return yaml.YAMLToJSON([]byte(strings.ReplaceAll(definition, "GROUP", driver)))
}

// Install creates the CustomResourceDefinition and the CSIDriver of driver, unless they exist, and waits until LogicalVolumes are served.
func Install(t testing.TB, client kubernetes.Interface, driver string) {
	t.Helper()
	InstallDefinition(t, client, driver)
	_, err := client.StorageV1().CSIDrivers().Create(t.Context(), &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: driver}},
		metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatalf("creating the CSIDriver: %v", err)
	}
}

// InstallDefinition creates the CustomResourceDefinition of driver, unless it exists, and waits until LogicalVolumes are served.
func InstallDefinition(t testing.TB, client kubernetes.Interface, driver string) {
	t.Helper()
	body, err := Definition(driver)
	if err != nil {
		t.Fatal(err)
	}
	err = client.Discovery().RESTClient().Post().AbsPath("/apis/apiextensions.k8s.io/v1/customresourcedefinitions").
		SetHeader("Content-Type", "application/json").Body(body).Do(t.Context()).Error()
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatalf("creating the CustomResourceDefinition: %v", err)
	}
	kubetest.Eventually(t, "LogicalVolumes of "+driver+" are served", func(ctx context.Context) error {
		return client.Discovery().RESTClient().Get().AbsPath("/apis/" + driver + "/v1/logicalvolumes").Do(ctx).Error()
	})
}
