// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/template"
	"time"

	"go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	kyaml "sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

const kubeBurnerFiles = "../../deploy/examples/kube-burner"

// kubeBurnerConfig has the fields of kube-burner v2 (pkg/config/types.go) that the example uses. Like kube-burner, the test
// refuses other fields. Its Go module is not a dependency.
type kubeBurnerConfig struct {
	MetricsEndpoints []struct {
		Indexer struct {
			Type             string `yaml:"type"`
			MetricsDirectory string `yaml:"metricsDirectory"`
		} `yaml:"indexer"`
	} `yaml:"metricsEndpoints"`
	Global struct {
		GC           bool `yaml:"gc"`
		Measurements []struct {
			Name string `yaml:"name"`
		} `yaml:"measurements"`
	} `yaml:"global"`
	Jobs []kubeBurnerJob `yaml:"jobs"`
}

type kubeBurnerJob struct {
	Name                 string        `yaml:"name"`
	Namespace            string        `yaml:"namespace"`
	NamespacedIterations bool          `yaml:"namespacedIterations"`
	Cleanup              *bool         `yaml:"cleanup"`
	JobIterations        int           `yaml:"jobIterations"`
	QPS                  float32       `yaml:"qps"`
	Burst                int           `yaml:"burst"`
	MaxWaitTimeout       time.Duration `yaml:"maxWaitTimeout"`
	PreLoadImages        bool          `yaml:"preLoadImages"`
	Objects              []struct {
		ObjectTemplate string         `yaml:"objectTemplate"`
		Replicas       int            `yaml:"replicas"`
		InputVars      map[string]any `yaml:"inputVars"`
	} `yaml:"objects"`
}

// renderedForKubeBurner renders a file as kube-burner does: a variable without a value is an error.
func renderedForKubeBurner(t *testing.T, name string, values map[string]any) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(kubeBurnerFiles, name))
	if err != nil {
		t.Fatal(err)
	}
	tmpl, err := template.New(name).Option("missingkey=error").Parse(string(text))
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := tmpl.Execute(&b, values); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// kubeBurner returns the configuration of the example, with the variables that its page sets.
func kubeBurner(t *testing.T, storageClass, snapshotClass string) (c kubeBurnerConfig) {
	t.Helper()
	values := map[string]any{"STORAGE_CLASS": storageClass, "SNAPSHOT_CLASS": snapshotClass}
	decoder := yaml.NewDecoder(bytes.NewReader(renderedForKubeBurner(t, "measure.yaml", values)))
	decoder.KnownFields(true)
	if err := decoder.Decode(&c); err != nil {
		t.Fatal(err)
	}
	return c
}

// objects returns the objects of one iteration of a job.
func (j kubeBurnerJob) objects(t *testing.T, iteration int) (objects []*unstructured.Unstructured) {
	t.Helper()
	for _, o := range j.Objects {
		for replica := 1; replica <= o.Replicas; replica++ {
			values := map[string]any{"Iteration": iteration, "Replica": replica, "JobName": j.Name, "UUID": "u", "RunID": "r"}
			for name, value := range o.InputVars {
				values[name] = value
			}
			object := &unstructured.Unstructured{}
			if err := kyaml.UnmarshalStrict(renderedForKubeBurner(t, o.ObjectTemplate, values), &object.Object); err != nil {
				t.Fatalf("%s: %v", o.ObjectTemplate, err)
			}
			objects = append(objects, object)
		}
	}
	return objects
}

// TestKubeBurnerConfig checks what kube-burner would only find out on a cluster.
func TestKubeBurnerConfig(t *testing.T) {
	t.Parallel()
	c := kubeBurner(t, "class", "snapshots")
	var measurements, used []string
	for _, m := range c.Global.Measurements {
		measurements = append(measurements, m.Name)
	}
	if want := []string{"pvcLatency", "volumeSnapshotLatency"}; !slices.Equal(measurements, want) {
		t.Errorf("measurements: got %v, want %v", measurements, want)
	}
	if len(c.Jobs) != 2 || !c.Global.GC || len(c.MetricsEndpoints) != 1 || c.MetricsEndpoints[0].Indexer.Type != "local" {
		t.Fatalf("the configuration is %+v", c)
	}
	for i, j := range c.Jobs {
		// Without limits, kube-burner sends 5 requests per second, and its own limit is measured.
		if j.QPS < 20 || j.Burst < 20 || j.MaxWaitTimeout < time.Minute || j.JobIterations != c.Jobs[0].JobIterations {
			t.Errorf("job %s is %+v", j.Name, j)
		}
		// kube-burner deletes all namespaces that a job of the same name has left, so that the name must be our own.
		if j.Namespace != "storage-measurement" || !strings.HasPrefix(j.Name, j.Namespace) {
			t.Errorf("job %s has the namespace %s", j.Name, j.Namespace)
		}
		if cleanup := j.Cleanup == nil || *j.Cleanup; cleanup != (i == 0) {
			t.Errorf("job %s: cleanup is %v", j.Name, cleanup)
		}
		for _, o := range j.Objects {
			used = append(used, o.ObjectTemplate)
		}
		if first, second := j.objects(t, 0), j.objects(t, 1); first[0].GetName() == second[0].GetName() {
			t.Errorf("job %s: two iterations create %s", j.Name, first[0].GetName())
		}
	}
	files, err := filepath.Glob(kubeBurnerFiles + "/*")
	if err != nil || len(files) != len(used)+1 {
		t.Errorf("files %v, %v: the jobs use %v", files, err, used)
	}
	page, err := os.ReadFile("../../docs/kube-burner.md")
	if err != nil {
		t.Fatal(err)
	}
	directory := strings.TrimPrefix(kubeBurnerFiles, "../../")
	for _, text := range []string{"cd " + directory, "-c measure.yaml", "STORAGE_CLASS=", "SNAPSHOT_CLASS="} {
		if !strings.Contains(string(page), text) {
			t.Errorf("docs/kube-burner.md does not have %q", text)
		}
	}
}

// testKubeBurnerObjects creates the objects of the example, with a StorageClass that needs the pods.
func testKubeBurnerObjects(t *testing.T, cp *kubetest.ControlPlane) {
	e := newEnvOn(t, cp, snapshotting(), 1)
	e.run("all")
	e.snapshotClass()
	c := kubeBurner(t, e.class(true, nil), e.ns)
	client, err := dynamic.NewForConfig(cp.Config())
	e.must(err)
	const iterations = 3
	for _, job := range c.Jobs {
		for i := range iterations {
			for _, o := range job.objects(t, i) {
				gvk := o.GroupVersionKind()
				resource := schema.GroupVersionResource{Group: gvk.Group, Version: gvk.Version, Resource: strings.ToLower(gvk.Kind) + "s"}
				_, err := client.Resource(resource).Namespace(e.ns).Create(t.Context(), o, metav1.CreateOptions{FieldValidation: "Strict"})
				e.must(err)
			}
		}
	}
	for _, job := range c.Jobs {
		for i := range iterations {
			for _, o := range job.objects(t, i) {
				switch o.GetKind() {
				case "PersistentVolumeClaim":
					e.bound(o.GetName())
				case "VolumeSnapshot":
					e.volumeSnapshotReady(o.GetName())
				}
			}
		}
	}
	e.calls("CreateVolume", iterations)
	e.calls("CreateSnapshot", iterations)
}
