// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/yaml"
)

// referenceGrant is the part of that kind of the Gateway API that is used here.
const referenceGrant = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: referencegrants.gateway.networking.k8s.io
  annotations: {api-approved.kubernetes.io: "https://github.com/kubernetes-sigs/gateway-api/pull/1538"}
spec:
  group: gateway.networking.k8s.io
  scope: Namespaced
  names: {kind: ReferenceGrant, listKind: ReferenceGrantList, plural: referencegrants, singular: referencegrant}
  versions:
  - name: v1beta1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
`

// SnapshotCRDs lists the groups and plural names of the kinds of snapshots and group snapshots.
var SnapshotCRDs = []string{
	"snapshot.storage.k8s.io_volumesnapshots", "snapshot.storage.k8s.io_volumesnapshotcontents",
	"snapshot.storage.k8s.io_volumesnapshotclasses", "groupsnapshot.storage.k8s.io_volumegroupsnapshots",
	"groupsnapshot.storage.k8s.io_volumegroupsnapshotcontents", "groupsnapshot.storage.k8s.io_volumegroupsnapshotclasses",
}

// InstallCRDs adds VolumeSnapshot and VolumeGroupSnapshot, both with content and class, and ReferenceGrant, to a
// control plane that [Get] has returned, and waits until they are served.
func InstallCRDs(t testing.TB, c *ControlPlane) {
	t.Helper()
	var err error
	c.kinds.Do(func() { err = c.InstallCRDs(t.Context()) })
	if err != nil {
		t.Fatalf("installing kinds: %v", err)
	}
}

// InstallCRDs adds the kinds that do not exist and waits until all are served.
func (c *ControlPlane) InstallCRDs(ctx context.Context) error {
	if c.memory != nil {
		return nil // it serves them always
	}
	if err := c.installKinds(ctx); err != nil {
		return err
	}
	if err := Await(ctx, c.kindsServed); err != nil {
		return fmt.Errorf("waiting until the kinds are served: %w", err)
	}
	return nil
}

// kindsServed returns an error until the kinds of [ControlPlane.installKinds] are served.
func (c *ControlPlane) kindsServed(ctx context.Context) error {
	paths := []string{"/apis/gateway.networking.k8s.io/v1beta1/referencegrants"}
	for _, kind := range SnapshotCRDs {
		group, plural, _ := strings.Cut(kind, "_")
		paths = append(paths, "/apis/"+group+"/v1/"+plural)
	}
	for _, path := range paths {
		if err := c.client.Discovery().RESTClient().Get().AbsPath(path).Do(ctx).Error(); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

// installKinds creates the CRDs. It succeeds if they exist.
func (c *ControlPlane) installKinds(ctx context.Context) error {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}",
		"github.com/kubernetes-csi/external-snapshotter/client/v8").Output()
	if err != nil {
		return fmt.Errorf("looking for the module of the snapshot kinds: %w", err)
	}
	manifests := []string{referenceGrant}
	for _, kind := range SnapshotCRDs {
		text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(out)), "config", "crd", kind+".yaml"))
		if err != nil {
			return err
		}
		manifests = append(manifests, string(text))
	}
	for _, manifest := range manifests {
		body, err := yaml.YAMLToJSON([]byte(manifest))
		if err != nil {
			return err
		}
		err = c.client.Discovery().RESTClient().Post().AbsPath("/apis/apiextensions.k8s.io/v1/customresourcedefinitions").
			SetHeader("Content-Type", "application/json").Body(body).Do(ctx).Error()
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
	}
	return nil
}
