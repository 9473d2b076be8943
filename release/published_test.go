// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/layout"
	"sigs.k8s.io/yaml"
)

// sidecarImage matches the image of a sidecar that one of our images replaces.
var sidecarImage = regexp.MustCompile(`/(csi-provisioner|csi-attacher|csi-resizer|csi-snapshotter|livenessprobe)[:@]`)

// runPublished runs the entrypoint of each image in dir from its root file system, with each command line that published
// manifests have for the sidecar. It accepts them: a role ends when it reads its kubeconfig, after all validation, and
// livenessprobe reports only the wrong flag that is added.
func runPublished(t *testing.T, dir string) {
	roots := rootFilesystems(t, dir)
	files, err := filepath.Glob("../internal/tools/migrate/testdata/published/*.yaml")
	if err != nil || len(files) < 7 {
		t.Fatalf("%d manifests: %v", len(files), err)
	}
	ran := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for document := range strings.SplitSeq("\n"+string(text), "\n---") {
			var w struct {
				Spec struct {
					Template struct {
						Spec struct{ Containers []container }
					}
				}
			}
			if yaml.Unmarshal([]byte(document), &w) != nil { // another kind
				continue
			}
			for _, c := range w.Spec.Template.Spec.Containers {
				if m := sidecarImage.FindStringSubmatch(c.Image); m != nil {
					ran++
					c.run(t, filepath.Base(file), m[1], filepath.Join(roots[m[1]], m[1]))
				}
			}
		}
	}
	if ran < 30 {
		t.Errorf("only %d containers", ran)
	}
}

type container struct {
	Image string
	Args  []string
}

// run runs entrypoint with the arguments of c, which is in file.
func (c container) run(t *testing.T, file, sidecar, entrypoint string) {
	t.Helper()
	args, want, code := []string{}, "/does/not/exist", exitFailure
	for _, arg := range c.Args {
		switch name, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "="); name {
		case "csi-address", "http-endpoint", "metrics-address": // paths and ports of the manifest's node
		default:
			args = append(args, arg)
		}
	}
	if sidecar == "livenessprobe" {
		args, want, code = append(args, "--metrics-path=x"), `livenessprobe: --metrics-path: must begin with a slash, got "x"`, exitUsage
	} else {
		args = append(args, "--http-endpoint=127.0.0.1:0", "--kubeconfig="+want)
	}
	if strings.Contains(c.Image, "_vmware") && sidecar == "csi-provisioner" { // a fork with flags of its own
		want, code = "unknown flag: --", exitUsage
	}
	cmd := exec.CommandContext(t.Context(), entrypoint, args...)
	cmd.Env = []string{"NAMESPACE=n", "POD_NAME=p", "POD_NAMESPACE=n", "NODE_NAME=node"}
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != code || !strings.Contains(string(out), want) {
		t.Errorf("%s: %s %q: %v, want exit code %d with %q: %s", file, sidecar, args, err, code, want, out)
	}
}

// The exit codes of the program.
const (
	exitFailure = 1
	exitUsage   = 2
)

// rootFilesystems unpacks the images for this machine and returns the directories by the names of the images.
func rootFilesystems(t *testing.T, dir string) map[string]string {
	t.Helper()
	index, err := layout.ImageIndexFromPath(filepath.Join(dir, "images"))
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	roots := map[string]string{}
	for _, m := range manifest.Manifests {
		name, tagged, _ := strings.Cut(m.Annotations[refName], ":")
		if strings.HasSuffix(tagged, tag("", true)) {
			continue
		}
		multi, err := index.ImageIndex(m.Digest)
		if err != nil {
			t.Fatal(err)
		}
		list, err := multi.IndexManifest()
		if err != nil {
			t.Fatal(err)
		}
		for _, one := range list.Manifests {
			if one.Platform.OS != runtime.GOOS || one.Platform.Architecture != runtime.GOARCH {
				continue
			}
			img, err := multi.Image(one.Digest)
			if err != nil {
				t.Fatal(err)
			}
			roots[name] = t.TempDir()
			if err := unpack(img, roots[name]); err != nil {
				t.Fatal(err)
			}
		}
	}
	return roots
}
