// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// The kinds of the operator of Prometheus come out of the cache of modules. The sum is
// that of go.sum, of which this module is none: nothing of its code is used.
const (
	operatorModule = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
	operatorSum    = "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s="
)

var monitoringKinds = sync.OnceValues(func() (string, error) {
	out, err := exec.Command("go", "mod", "download", "-json", operatorModule).Output()
	var module struct{ Dir, Sum, Error string }
	if bad := json.Unmarshal(out, &module); bad != nil {
		return "", bad
	}
	if module.Sum != operatorSum {
		return "", os.ErrInvalid
	}
	return filepath.Join(module.Dir, "example", "prometheus-operator-crd"), err
})

// installMonitoringKinds adds PrometheusRule and PodMonitor to the control plane.
func installMonitoringKinds(t *testing.T, cp *kubetest.ControlPlane) {
	t.Helper()
	dir, err := monitoringKinds()
	if err != nil {
		t.Fatalf("the kinds of %s: %v", operatorModule, err)
	}
	client := cp.Client().Discovery().RESTClient()
	for _, kind := range []string{"prometheusrules", "podmonitors"} {
		text, err := os.ReadFile(filepath.Join(dir, "monitoring.coreos.com_"+kind+".yaml"))
		if err != nil {
			t.Fatal(err)
		}
		body, err := yaml.YAMLToJSON(text)
		if err != nil {
			t.Fatal(err)
		}
		err = client.Post().AbsPath("/apis/apiextensions.k8s.io/v1/customresourcedefinitions").
			SetHeader("Content-Type", "application/json").Body(body).Do(t.Context()).Error()
		if err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
		kubetest.Eventually(t, kind+" are served", func(ctx context.Context) error {
			return client.Get().AbsPath("/apis/monitoring.coreos.com/v1/" + kind).Do(ctx).Error()
		})
	}
}
