// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// fileOfPage is the file that a page of docs/ shows, which begins with a comment of its name.
func fileOfPage(t *testing.T, page, name string) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/" + page)
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile("(?s)```yaml\n(# "+regexp.QuoteMeta(name)+"\n.*?)```").FindAllSubmatch(text, -1)
	if len(found) != 1 {
		t.Fatalf("%s shows %d files %s, want 1", page, len(found), name)
	}
	return string(found[0][1])
}

// kustomizedPage renders the kustomization of a page, in a directory beside a copy of
// this repository, as the page has it.
func kustomizedPage(t *testing.T, page string) []*unstructured.Unstructured {
	t.Helper()
	deploy, err := filepath.Abs("../../deploy")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	relative, err := filepath.Rel(dir, deploy)
	if err != nil {
		t.Fatal(err)
	}
	text := strings.ReplaceAll(fileOfPage(t, page, "kustomization.yaml"), "../storage-controller/deploy", relative)
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return kustomized(t, dir)
}

// TestInstallationOfThePage: the overlay and the values that the page shows put the images of the
// reader into the pod.
func TestInstallationOfThePage(t *testing.T) {
	t.Parallel()
	for name, objects := range map[string][]*unstructured.Unstructured{
		"overlay": kustomizedPage(t, "install.md"),
		"chart":   charted(t, fileOfPage(t, "install.md", "values.yaml")),
	} {
		images := map[string]string{}
		for _, c := range podOf(t, objects).Containers {
			images[c.Name] = c.Image
		}
		if len(images) != 2 || images["driver"] != "my-csi-driver:v1.2.3" || images["storage-controller"] != "my-storage-controller:v1" {
			t.Errorf("%s: the images are %v", name, images)
		}
	}
}

// TestNamesOfThePage: the overlay that the page shows has no cluster-wide name that another overlay or the sidecars have, and
// every binding is to a role of the overlay.
func TestNamesOfThePage(t *testing.T) {
	t.Parallel()
	roles, bound := map[string]bool{}, 0
	objects := kustomizedPage(t, "install.md")
	for _, o := range objects {
		if o.GetNamespace() == "" && !strings.HasPrefix(o.GetName(), "my-driver:storage-controller:") {
			t.Errorf("%s %s is not of the driver", o.GetKind(), o.GetName())
		}
		roles[o.GetKind()+" "+o.GetName()] = true
	}
	for _, o := range objects {
		if ref, found, _ := unstructured.NestedStringMap(o.Object, "roleRef"); found {
			if bound++; !roles[ref["kind"]+" "+ref["name"]] {
				t.Errorf("%s %s is to %s %s, which does not exist", o.GetKind(), o.GetName(), ref["kind"], ref["name"])
			}
		}
	}
	if bound == 0 {
		t.Error("the overlay has no bindings")
	}
}

// TestLibraryOfThePage renders the chart that the page shows, which uses the library: its container and its permissions
// are those of the chart storage-controller.
func TestLibraryOfThePage(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{"Chart.yaml", "templates/controller.yaml"} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(fileOfPage(t, "install.md", name)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.CopyFS(filepath.Join(dir, library), os.DirFS(filepath.Join(chart, library))); err != nil {
		t.Fatal(err)
	}
	page := strings.TrimRight(fileOfPage(t, "install.md", "library-values.yaml"), "\n")
	render := func(values string) (string, error) {
		return tool(t, "", "helm", dir, "csi-controller", exampleNamespace, valuesFile(t, values))
	}
	for values, want := range map[string]string{
		page + "\n  nodecontroller: {enabled: true, webhooks: {enabled: true}}": "only the chart storage-controller has webhooks",
		strings.Replace(page, ", tag: v1", "", 1):                               "image: set tag or digest",
	} {
		if _, err := render(values); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("values %s: %v, want %q", values, err, want)
		}
	}
	for values, own := range map[string]string{
		"": "", "\n  nodecontroller: {enabled: true, nodeCleanup: claims}\n  config: {timeout: 20s}": "" +
			"nodecontroller: {enabled: true, nodeCleanup: claims}\nconfig: {timeout: 20s}\n",
		"\n  rbac: {create: false}": "rbac: {create: false}\n",
	} {
		text, err := render(page + values)
		if err != nil {
			t.Fatal(err)
		}
		got := parsed(t, text)
		want := charted(t, own+"driver: {name: my.csi.example.com}\nimage: {repository: my-storage-controller, tag: v1}")
		if sum := checksum(want); sum != "" && sum != checksum(got) {
			t.Errorf("values %s: the checksum of the file is %q, want %q", values, checksum(got), sum)
		}
		if diff := cmp.Diff(podOf(t, want).Containers[0], podOf(t, got).Containers[0]); diff != "" {
			t.Errorf("values %s: the container (- chart, + library):\n%s", values, diff)
		}
		if diff := cmp.Diff(permissionsAndFiles(want), permissionsAndFiles(got)); diff != "" {
			t.Errorf("values %s: the permissions (- chart, + library):\n%s", values, diff)
		}
	}
}

// checksum returns that of the configuration file, which the pod has.
func checksum(objects []*unstructured.Unstructured) (sum string) {
	for _, o := range objects {
		if o.GetKind() == "Deployment" {
			sum, _, _ = unstructured.NestedString(o.Object, "spec", "template", "metadata", "annotations", "checksum/configuration")
		}
	}
	return sum
}

// permissionsAndFiles returns the parts of Roles, bindings and ConfigMaps that matter, by kind and name.
func permissionsAndFiles(objects []*unstructured.Unstructured) map[string][]any {
	all := map[string][]any{}
	for _, o := range objects {
		if strings.Contains(o.GetKind(), "Role") || o.GetKind() == "ConfigMap" && !strings.HasSuffix(o.GetName(), "-test") {
			all[o.GetKind()+" "+o.GetName()] = []any{o.Object["rules"], o.Object["subjects"], o.Object["roleRef"], o.Object["data"]}
		}
	}
	return all
}
