package kubetest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
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

var kindsOnce sync.Once

// InstallCRDs adds VolumeSnapshot with its content and class, and ReferenceGrant, to a
// control plane that [Get] has returned, and waits until they are served.
func InstallCRDs(t testing.TB, c *ControlPlane) {
	t.Helper()
	var err error
	kindsOnce.Do(func() { err = c.installKinds(t.Context()) })
	if err != nil {
		t.Fatalf("installing kinds: %v", err)
	}
	for _, path := range []string{
		"/apis/snapshot.storage.k8s.io/v1/volumesnapshots", "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents",
		"/apis/snapshot.storage.k8s.io/v1/volumesnapshotclasses",
		"/apis/gateway.networking.k8s.io/v1beta1/referencegrants",
	} {
		Eventually(t, path+" is served", func(ctx context.Context) error {
			return c.client.Discovery().RESTClient().Get().AbsPath(path).Do(ctx).Error()
		})
	}
}

func (c *ControlPlane) installKinds(ctx context.Context) error {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}",
		"github.com/kubernetes-csi/external-snapshotter/client/v8").Output()
	if err != nil {
		return fmt.Errorf("looking for the module of the snapshot kinds: %w", err)
	}
	manifests := []string{referenceGrant}
	for _, kind := range []string{"volumesnapshots", "volumesnapshotcontents", "volumesnapshotclasses"} {
		text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(out)), "config", "crd", "snapshot.storage.k8s.io_"+kind+".yaml"))
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
