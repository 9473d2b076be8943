// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// TestSecretsOfClasses checks a user who may read no Secrets.
func TestSecretsOfClasses(t *testing.T) {
	t.Parallel()
	cp := kubetest.Get(t, kubetest.Real())
	kubetest.InstallCRDs(t, cp)
	ns := kubetest.Namespace(t, cp)
	clients, err := apiread.NewClients(cp.Config())
	if err != nil {
		t.Fatal(err)
	}
	all := []string{"provisioner", "attacher", "resizer", "snapshotter"}
	for i, c := range []struct {
		purpose  string // of the parameters
		snapshot int    // index of the kind of class in snapshotClasses; -1: StorageClass
		modifies bool
		roles    []string
		want     []string // roles whose permission is missing
	}{
		{"controller-expand-", -1, false, all, []string{"resizer"}},
		{"controller-modify-", -1, true, all, []string{"resizer"}},
		{"controller-modify-", -1, false, all, nil},
		{"", -1, true, all, []string{"provisioner", "attacher", "resizer"}},
		{"", -1, true, []string{"attacher"}, []string{"attacher"}},
		{"node-stage-", -1, true, all, nil},
		{"snapshotter-", 0, false, all, []string{"snapshotter"}},
		{"snapshotter-", 0, false, []string{"resizer"}, nil},
		{"group-snapshotter-", 1, false, all, []string{"snapshotter"}},
	} {
		name := fmt.Sprintf("%s-%d", ns, i)
		driver := csiclient.Driver{Name: name + ".example.com"}
		driver.Controller.ExpandVolume, driver.Controller.ModifyVolume = true, c.modifies
		parameters := map[string]string{"csi.storage.k8s.io/" + c.purpose + "secret-name": "s",
			"csi.storage.k8s.io/" + c.purpose + "secret-namespace": ns}
		options := metav1.CreateOptions{}
		if c.snapshot < 0 {
			_, err = cp.Client().StorageV1().StorageClasses().Create(t.Context(), &storagev1.StorageClass{
				ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: driver.Name, Parameters: parameters}, options)
		} else {
			kind := snapshotClasses[c.snapshot]
			class := &unstructured.Unstructured{Object: map[string]any{"driver": driver.Name, "deletionPolicy": "Delete"}}
			class.SetGroupVersionKind(kind.resource.GroupVersion().WithKind(kind.kind))
			class.SetName(name)
			_ = unstructured.SetNestedStringMap(class.Object, parameters, "parameters")
			_, err = clients.Dynamic.Resource(kind.resource).Create(t.Context(), class, options)
		}
		if err != nil {
			t.Fatal(err)
		}
		e := newExamination(Input{Config: cp.Config(), Impersonate: serviceAccounts + ns + ":stranger"})
		e.Clients, e.driver, e.known = clients, driver, true
		for _, s := range snapshotClasses {
			e.plan.APIs = append(e.plan.APIs, API{GroupVersion: s.resource.GroupVersion().String()})
		}
		for _, r := range c.roles {
			e.plan.Roles = append(e.plan.Roles, Role{Name: r})
		}
		if c.purpose == "" {
			e.plan.SecretNamespaces = []string{"storage"}
		}
		e.checkClasses(t.Context())
		e.checkSnapshotClasses(t.Context())
		refused := slices.ContainsFunc(e.Findings, func(c finding.Finding) bool {
			return c.Severity == finding.Failing && strings.Contains(c.Message, "its namespace is not in --secret-namespaces")
		})
		if refused != (c.purpose == "") {
			t.Errorf("%q: %+v", c.purpose, e.Findings)
		}
		var have []string
		for _, check := range e.Findings {
			if role, ok := strings.CutSuffix(check.Topic, "-secrets "+ns+"/s"); ok && check.Severity == finding.Failing {
				have = append(have, strings.TrimPrefix(role, "rbac "))
			}
		}
		if !slices.Equal(have, c.want) || !e.has("secret "+ns+"/s") && c.snapshot < 0 {
			t.Errorf("%q: %q, want %q: %+v", c.purpose, have, c.want, e.Findings)
		}
	}
}
