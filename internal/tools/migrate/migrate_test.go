// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	k8syaml "sigs.k8s.io/yaml"
)

const image = "storage-controller:dev"

// modes are the two forms of the result, by the names of their directories.
var modes = map[string]bool{"all": false, "per-role": true}

// inputs returns the manifests in testdata, modelled on well-known drivers, and published ones.
func inputs(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("testdata/*.yaml")
	published, errPublished := filepath.Glob("testdata/published/*.yaml")
	if err != nil || errPublished != nil || len(files) < 7 || len(published) < 7 {
		t.Fatalf("%d manifests, %v, and %d published ones, %v", len(files), err, len(published), errPublished)
	}
	return append(files, published...)
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// each runs test on the result for each manifest in each mode.
func each(t *testing.T, test func(t *testing.T, input []byte, o Options, r Result)) {
	for _, file := range inputs(t) {
		for mode, perRole := range modes {
			name := strings.TrimSuffix(filepath.Base(file), ".yaml")
			t.Run(name+"/"+mode, func(t *testing.T) {
				t.Parallel()
				input := read(t, file)
				o := Options{Image: image, PerRole: perRole, Tables: tables()}
				if filepath.Base(filepath.Dir(file)) != "published" {
					o.Patched = true
				}
				r, err := Run(input, o)
				if kept := name == "vsphere-super"; err != nil && !(kept && r.Incomplete() && errors.Is(err, ErrNothing)) {
					t.Fatal(err)
				}
				test(t, input, o, r)
			})
		}
	}
}

func TestAgainThereIsNothingToReplace(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, _ []byte, o Options, r Result) {
		again, err := Run(r.Manifest, o)
		if !errors.Is(err, ErrNothing) || string(again.Manifest) != string(r.Manifest) {
			t.Errorf("%v\n%s", err, Diff("once", "twice", string(r.Manifest), string(again.Manifest)))
		}
	})
}

// TestTyped decodes the result strictly, and compares everything outside of the replaced containers
// with the input.
func TestTyped(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, input []byte, _ Options, r Result) {
		before, after := typed(t, input), typed(t, r.Manifest)
		if len(before) != len(after) {
			t.Fatalf("%d objects, there were %d", len(after), len(before))
		}
		for i := range after {
			a, b := podOf(before[i]), podOf(after[i])
			if a == nil {
				continue
			}
			for _, lists := range [][2]*[]corev1.Container{{&a.Containers, &b.Containers}, {&a.InitContainers, &b.InitContainers}} {
				kept := map[string]corev1.Container{}
				for _, c := range *lists[1] {
					if c.Image != image {
						kept[c.Name] = c
					}
				}
				for _, c := range *lists[0] {
					if k, ok := kept[c.Name]; ok {
						if diff := cmp.Diff(c, k); diff != "" {
							t.Errorf("container %s has changed: %s", c.Name, diff)
						}
						delete(kept, c.Name)
					}
				}
				if len(kept) > 0 {
					t.Errorf("containers out of nothing: %v", kept)
				}
				*lists[0], *lists[1] = nil, nil
			}
			if diff := cmp.Diff(before[i], after[i]); diff != "" {
				t.Errorf("besides the containers: %s", diff)
			}
		}
	})
}

func podOf(object any) *corev1.PodSpec {
	switch o := object.(type) {
	case *appsv1.Deployment:
		return &o.Spec.Template.Spec
	case *appsv1.StatefulSet:
		return &o.Spec.Template.Spec
	case *appsv1.DaemonSet:
		return &o.Spec.Template.Spec
	}
	return nil
}

// typed decodes the objects of a stream. It fails on unknown fields.
func typed(t *testing.T, stream []byte) []any {
	t.Helper()
	var objects []any
	add := func(kind string, data []byte) {
		var object any
		switch kind {
		case "Deployment":
			object = &appsv1.Deployment{}
		case "StatefulSet":
			object = &appsv1.StatefulSet{}
		case "DaemonSet":
			object = &appsv1.DaemonSet{}
		default:
			object = &map[string]any{}
		}
		if err := k8syaml.UnmarshalStrict(data, object); err != nil {
			t.Fatalf("%v\n%s", err, data)
		}
		objects = append(objects, object)
	}
	for _, doc := range split(string(stream)) {
		var head struct {
			Kind  string
			Items []yaml.Node
		}
		if err := yaml.Unmarshal([]byte(doc), &head); err != nil {
			t.Fatal(err)
		}
		for _, item := range head.Items {
			data, err := yaml.Marshal(&item)
			if err != nil {
				t.Fatal(err)
			}
			add(text(get(&item, "kind")), data)
		}
		if head.Items == nil && head.Kind != "" {
			add(head.Kind, []byte(doc))
		}
	}
	return objects
}

// TestDiffIsTheChange patches the input with the diff and expects the result.
func TestDiffIsTheChange(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, input []byte, _ Options, r Result) {
		diff := Diff("a", "b", string(input), string(r.Manifest))
		if have := patched(t, string(input), diff); diff != "" && have != string(r.Manifest) {
			t.Errorf("the patched input is not the result:\n%s", cmp.Diff(string(r.Manifest), have))
		}
	})
	if diff := Diff("a", "b", "same\n", "same\n"); diff != "" {
		t.Errorf("a change out of nothing: %s", diff)
	}
}

// patched applies a unified diff.
func patched(t *testing.T, from, diff string) string {
	t.Helper()
	old := strings.SplitAfter(from, "\n")
	var out strings.Builder
	at := 0
	lines := strings.SplitAfter(diff, "\n")
	for i, line := range lines {
		var begin, count, unused int
		switch {
		case i < 2, line == "", strings.HasPrefix(line, `\`):
		case strings.HasPrefix(line, "@@"):
			if _, err := fmt.Sscanf(line, "@@ -%d,%d +%d,%d @@", &begin, &count, &unused, &unused); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			for ; at < begin-1; at++ {
				out.WriteString(old[at])
			}
		default:
			content := line[1:]
			if i+1 < len(lines) && strings.HasPrefix(lines[i+1], `\`) {
				content = strings.TrimSuffix(content, "\n")
			}
			if line[0] != '+' {
				if old[at] != content {
					t.Fatalf("line %d is %q, the diff says %q", at+1, old[at], content)
				}
				at++
			}
			if line[0] != '-' {
				out.WriteString(content)
			}
		}
	}
	return out.String() + strings.Join(old[at:], "")
}
