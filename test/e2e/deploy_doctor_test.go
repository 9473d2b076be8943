// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/topolvm"
	"github.com/storage-controller/storage-controller/topolvm/topolvmtest"
)

// TestHelmTest runs the container of "helm test" as the ServiceAccount of releases with different values: it passes with the
// permissions of the chart, and fails without them.
func TestHelmTest(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ values, says string }{
		"defaults": {},
		"per role": {values: "mode: per-role\nprovisioner: {snapshots: false, topology: false}\ncapacity: {enabled: false}\n" +
			"snapshotter: {enabled: false}"},
		"node":           {values: "mode: node\nextraArgs: [--csi-address=/run/csi/x.sock]"},
		"topolvm":        {modeTopolvm + "useLegacy: true", "runs topolvm"},
		"node cleanup":   {values: "nodecontroller: {enabled: true, nodeCleanup: volumes, nodeFinalizerMode: manage}"},
		"secure metrics": {values: "metrics: {secure: true}"},
		"file":           {"config: {otlp-sampling-ratio: 0.5}", "otlp-sampling-ratio (file) has no effect"},
		"environment": {"env: [{name: STORAGE_CONTROLLER_OTLP_SAMPLING_RATIO, value: '0.5'}]",
			"otlp-sampling-ratio (environment) has no effect"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, csitest.Config{}, 1)
			kubetest.InstallCRDs(t, e.cp)
			if strings.HasPrefix(test.values, modeTopolvm) {
				topolvmtest.Install(t, e.client, topolvm.LegacyDriver)
			}
			objects := charted(t, test.values)
			pod := testPod(t, objects)
			for _, o := range objects {
				selector, _, _ := unstructured.NestedStringMap(o.Object, "spec", "selector", "matchLabels")
				if len(selector) > 0 && labels.SelectorFromSet(selector).Matches(labels.Set(pod.Labels)) {
					t.Errorf("%s %s selects the pod", o.GetKind(), o.GetName())
				}
			}
			kubeconfig, _, _ := e.as(pod.Spec.ServiceAccountName)
			if code, out := e.examined(pod.Spec.Containers[0], kubeconfig); code != 3 || !strings.Contains(out, "failing  rbac") {
				t.Errorf("without permissions: exit code %d\n%s", code, out)
			}
			granted := e.applyRendered(objects)
			e.inForce(pod.Spec.ServiceAccountName, granted)
			if code, out := e.examined(pod.Spec.Containers[0], kubeconfig); code != 0 || !strings.Contains(out, test.says) {
				t.Errorf("exit code %d, want %q\n%s", code, test.says, out)
			}
		})
	}
}

// TestDoctorOfTheInstallations: doctor as docs/doctor.md shows it finds nothing to warn of in the overlays and with the default values
// of the chart.
func TestDoctorOfTheInstallations(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(overlays + "*/kustomization.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range append(files, "chart") {
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, csitest.Config{}, 1)
			kubetest.InstallCRDs(t, e.cp)
			driver := e.plugin.Name()
			if strings.Contains(file, "topolvm") {
				driver = topolvm.Driver
				topolvmtest.Install(t, e.client, driver)
				topolvmtest.Start(t, e.cp.Config(), topolvmtest.Config{Driver: driver, Name: e.ns + "-a", Classes: topolvmtest.Classes()})
			} else {
				e.csiDriver(storagev1.CSIDriverSpec{StorageCapacity: ptr.To(true)})
			}
			e.class(true, func(c *storagev1.StorageClass) { c.Provisioner = driver })
			objects := []*unstructured.Unstructured(nil)
			if file == "chart" {
				objects = charted(t, "")
			} else {
				objects = kustomized(t, filepath.Dir(file))
			}
			pod := podOf(t, objects)
			e.inForce(pod.ServiceAccountName, e.applyRendered(objects))
			for _, c := range pod.Containers {
				if c.Name == "driver" {
					continue
				}
				readable(t, objects, pod, &c)
				c.Args = slices.Concat([]string{"doctor", "--driver-name=" + driver, "--as=" + e.ns + "/" + pod.ServiceAccountName, "--"},
					c.Args)
				if code, out := e.examined(c, e.cp.Kubeconfig()); code != 0 || !strings.Contains(out, ", 0 warnings, 0 failing, ") {
					t.Errorf("container %s: exit code %d\n%s", c.Name, code, out)
				}
			}
		})
	}
}

// testPod is the pod of helm test.
func testPod(t *testing.T, objects []*unstructured.Unstructured) *corev1.Pod {
	t.Helper()
	i := slices.IndexFunc(objects, func(o *unstructured.Unstructured) bool { return o.GetAnnotations()["helm.sh/hook"] == "test" })
	pod := converted[corev1.Pod](t, objects[i])
	readable(t, objects, pod.Spec, &pod.Spec.Containers[0])
	return pod
}

// readable writes the configuration file of c to a file of this machine.
func readable(t *testing.T, objects []*unstructured.Unstructured, pod corev1.PodSpec, c *corev1.Container) {
	t.Helper()
	for _, v := range pod.Volumes {
		mount := slices.IndexFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == v.Name })
		if v.ConfigMap == nil || mount < 0 {
			continue
		}
		i := slices.IndexFunc(objects, func(o *unstructured.Unstructured) bool {
			return o.GetKind() == "ConfigMap" && o.GetName() == v.ConfigMap.Name
		})
		file := valuesFile(t, converted[corev1.ConfigMap](t, objects[i]).Data["config.yaml"])
		c.Args[slices.Index(c.Args, "--config="+c.VolumeMounts[mount].MountPath+"/config.yaml")] = "--config=" + file
	}
}

// examined runs doctor as a container does, and returns its exit code and output.
func (e *env) examined(c corev1.Container, kubeconfig string) (int, string) {
	e.t.Helper()
	path, err := binary()
	if err != nil {
		e.t.Fatal(err)
	}
	cmd := exec.Command(path, append(slices.Clone(c.Args), "--kubeconfig", kubeconfig)...)
	fields := map[string]string{"metadata.namespace": e.ns, "metadata.name": "test", "spec.nodeName": e.nodes[0]}
	cmd.Env = append(os.Environ(), "KUBECONFIG=")
	for _, v := range c.Env {
		if v.ValueFrom != nil && v.ValueFrom.FieldRef != nil {
			v.Value = fields[v.ValueFrom.FieldRef.FieldPath]
		}
		cmd.Env = append(cmd.Env, v.Name+"="+v.Value)
	}
	out, err := cmd.CombinedOutput()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		e.t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}
