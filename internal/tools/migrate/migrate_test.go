// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate_test

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8syaml "sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/internal/tools/migrate"
)

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

// each runs test on the result for each manifest, with a container for all sidecars and with one for each.
func each(t *testing.T, test func(t *testing.T, input []byte, o migrate.Options, r migrate.Result)) {
	for _, file := range inputs(t) {
		for mode, perRole := range map[string]bool{"all": false, "per-role": true} {
			name := strings.TrimSuffix(filepath.Base(file), ".yaml")
			t.Run(name+"/"+mode, func(t *testing.T) {
				t.Parallel()
				input := read(t, file)
				o := migrate.Options{Image: image, PerRole: perRole, Tables: tables()}
				if filepath.Base(filepath.Dir(file)) != "published" {
					o.Patched = true
				}
				r, err := migrate.Run(input, o)
				if kept := name == "vsphere-super"; err != nil && !(kept && r.Incomplete() && errors.Is(err, migrate.ErrNothing)) {
					t.Fatal(err)
				}
				test(t, input, o, r)
			})
		}
	}
}

func TestAgainThereIsNothingToReplace(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, _ []byte, o migrate.Options, r migrate.Result) {
		again, err := migrate.Run(r.Manifest, o)
		if !errors.Is(err, migrate.ErrNothing) || string(again.Manifest) != string(r.Manifest) {
			t.Errorf("%v\n%s", err, migrate.Diff("once", "twice", string(r.Manifest), string(again.Manifest)))
		}
	})
}

// replaced is a new container with those that it replaces, in the order of the report.
type replaced struct {
	migrate.Replacement
	now corev1.Container
	old []corev1.Container
}

// replacedIn returns the new containers of r.
func replacedIn(t *testing.T, input []byte, r migrate.Result) []replaced {
	t.Helper()
	before, after := containersOf(t, input), containersOf(t, r.Manifest)
	var all []replaced
	for _, replacement := range r.Replacements {
		c := replaced{Replacement: replacement, now: after[replacement.Object+"/"+replacement.Container]}
		for _, s := range replacement.Sidecars {
			c.old = append(c.old, before[replacement.Object+"/"+s.Name])
		}
		all = append(all, c)
	}
	return all
}

// containersOf returns the containers of a stream by object and name.
func containersOf(t *testing.T, stream []byte) map[string]corev1.Container {
	t.Helper()
	all := map[string]corev1.Container{}
	for _, object := range typed(t, stream) {
		if pod := podOf(object); pod != nil {
			meta := object.(metav1.ObjectMetaAccessor).GetObjectMeta()
			kind := strings.TrimPrefix(fmt.Sprintf("%T", object), "*v1.")
			for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
				all[kind+" "+meta.GetName()+"/"+c.Name] = c
			}
		}
	}
	return all
}

// TestSectionsAreCopies expects the arguments of each sidecar in its section, byte for byte, apart from what the report lists.
func TestSectionsAreCopies(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, input []byte, _ migrate.Options, r migrate.Result) {
		for _, c := range replacedIn(t, input, r) {
			if c.now.Args[0] == "topolvm" { // it has no sections
				continue
			}
			have := map[string][]string{}
			name := ""
			for i, arg := range c.now.Args {
				switch {
				case i == 0:
					name = arg // of the command
				case arg == "--":
					name = c.now.Args[i+1]
				case c.now.Args[i-1] != "--":
					have[name] = append(have[name], arg)
				}
			}
			for i, s := range c.Sidecars {
				old := c.old[i]
				want, program := slices.Clone(old.Args), migrate.Sidecar(old.Name, old.Image, old.Args)
				if len(old.Command) > 0 {
					want, program = slices.Concat(old.Command[1:], old.Args), filepath.Base(old.Command[0])
				}
				for _, change := range s.Changed {
					want[slices.Index(want, change.Before)] = change.After
				}
				want = append(want, s.Appended...)
				if !slices.Equal(have[program], want) {
					t.Errorf("the section %s of %s is %q, want %q", program, c.Container, have[program], want)
				}
				delete(have, program)
			}
			if len(have) > 0 {
				t.Errorf("sections of no container: %v", have)
			}
		}
	})
}

// TestPortsStay expects the ports of all replaced containers, and an address for each.
func TestPortsStay(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, input []byte, _ migrate.Options, r migrate.Result) {
		for _, c := range replacedIn(t, input, r) {
			numbers := func(containers ...corev1.Container) map[string]bool {
				all := map[string]bool{}
				for _, c := range containers {
					for _, p := range c.Ports {
						all[fmt.Sprint(p.ContainerPort, "/", cmp.Or(p.Protocol, "TCP"))] = true
					}
				}
				return all
			}
			if want, have := numbers(c.old...), numbers(c.now); !maps.Equal(want, have) {
				t.Errorf("container %s has the ports %v, want %v", c.Container, have, want)
			}
			for _, old := range c.old {
				for _, arg := range old.Args {
					address, found := strings.CutPrefix(strings.TrimLeft(arg, "-"), "http-endpoint=")
					if found && !strings.Contains(strings.Join(c.now.Args, " "), "-endpoint="+address) {
						t.Errorf("%s of %s is not in %q", arg, old.Name, c.now.Args)
					}
				}
			}
		}
	})
}

// TestTyped decodes the result strictly, and compares everything outside of the replaced containers
// with the input.
func TestTyped(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, input []byte, _ migrate.Options, r migrate.Result) {
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
						if diff := gocmp.Diff(c, k); diff != "" {
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
			if diff := gocmp.Diff(before[i], after[i]); diff != "" {
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
	for _, doc := range documents(string(stream)) {
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
			add(kindOf(t, data), data)
		}
		if head.Items == nil && head.Kind != "" {
			add(head.Kind, []byte(doc))
		}
	}
	return objects
}

func kindOf(t *testing.T, data []byte) string {
	t.Helper()
	var head metav1.TypeMeta
	if err := k8syaml.Unmarshal(data, &head); err != nil {
		t.Fatal(err)
	}
	return head.Kind
}

// documents returns the documents of a stream.
func documents(stream string) []string {
	return strings.Split(strings.TrimPrefix(stream, "---\n"), "\n---\n")
}

// TestDiffIsTheChange patches the input with the diff and expects the result.
func TestDiffIsTheChange(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, input []byte, _ migrate.Options, r migrate.Result) {
		diff := migrate.Diff("a", "b", string(input), string(r.Manifest))
		if have := patched(t, string(input), diff); diff != "" && have != string(r.Manifest) {
			t.Errorf("the patched input is not the result:\n%s", gocmp.Diff(string(r.Manifest), have))
		}
	})
	if diff := migrate.Diff("a", "b", "same\n", "same\n"); diff != "" {
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
