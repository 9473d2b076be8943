// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// sidecars are the images that replace the image of a sidecar in a manifest: they start under its name, as root.
var sidecars = []string{"csi-provisioner", "csi-attacher", "csi-resizer", "csi-snapshotter", "livenessprobe"}

// instruction is one of the Dockerfile, with its continuation lines.
type instruction struct{ name, rest string }

// dockerfile is its instructions. There is no engine for containers here: what builds the
// program is run without one, and the other instructions are compared with the expected ones.
func dockerfile(t *testing.T) []instruction {
	t.Helper()
	text, err := os.ReadFile("../../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	var all []instruction
	for line := range strings.SplitSeq(strings.ReplaceAll(string(text), "\\\n", " "), "\n") {
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, rest, found := strings.Cut(line, " ")
		if !found || !slices.Contains([]string{"FROM", "ARG", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT"}, name) {
			t.Fatalf("not an instruction that is expected: %s", line)
		}
		all = append(all, instruction{name, rest})
	}
	return all
}

func run(t *testing.T, dir string, env []string, script string) {
	t.Helper()
	cmd := exec.Command("sh", "-euc", script)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}

// TestImage runs what the Dockerfile runs, in two copies of the source at different places,
// and looks at what the image would have.
func TestImage(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the program, which -short excludes")
	}
	stage, goVersion := "", ""
	var stages, steps []string
	images := map[string]string{}
	for _, i := range dockerfile(t) {
		switch {
		case i.name == "FROM":
			from, name, _ := strings.Cut(i.rest, " AS ")
			stage, stages = name, append(stages, name)
			if goVersion == "" {
				goVersion = i.rest
			} else {
				images[stage] = from
			}
		case i.name == "RUN" && stage == "build" && !strings.HasPrefix(i.rest, "go mod"):
			steps = append(steps, i.rest)
		case i.name == "ARG" && strings.HasPrefix(i.rest, "TARGET") && strings.Contains(i.rest, "="):
			t.Errorf("ARG %s: a default hides the platform that BuildKit sets", i.rest)
		case stage != "build":
			images[stage] += " " + i.name + " " + i.rest
		}
	}
	mod, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	_, version, _ := strings.Cut(string(mod), "\ngo ")
	version, _, _ = strings.Cut(version, "\n")
	if !strings.Contains(goVersion, "golang:"+version+"@sha256:") {
		t.Errorf("the image is built with %s, and go.mod wants %s", goVersion, version)
	}
	want := map[string]string{"files": "scratch COPY --from=build /out/ /"}
	for _, name := range sidecars {
		want[name] = fmt.Sprintf("files USER 0:0 ENTRYPOINT [\"/%s\"]", name)
	}
	const main = "storage-controller"
	want[main] = `files USER 65532:65532 ENTRYPOINT ["/storage-controller"]`
	if diff := cmp.Diff(want, images); diff != "" {
		t.Errorf("the images differ: %s", diff)
	}
	if len(steps) != 2 || stages[len(stages)-1] != main { // the last one is built without --target
		t.Fatalf("stages %q, and steps %q", stages, steps)
	}

	env := []string{"TARGETOS=linux", "TARGETARCH=" + goarch(t), "VERSION=v9.8.7", "SOURCE_DATE_EPOCH=1700000000",
		"GOFIPS140=off"}
	var sums []string
	out := ""
	for range 2 {
		dir := t.TempDir()
		out = filepath.Join(dir, "out")
		source := filepath.Join(dir, "src")
		run(t, "../..", nil, "mkdir -p "+source+" "+out+" && cp -r --parents $(sed -n 's/^!//p' .dockerignore) "+source)
		for _, s := range steps {
			run(t, source, env, strings.ReplaceAll(s, "/out", out))
		}
		program, err := os.ReadFile(filepath.Join(out, "storage-controller"))
		if err != nil {
			t.Fatal(err)
		}
		sums = append(sums, fmt.Sprintf("%x", sha256.Sum256(program)))
		if bytes.Contains(program, []byte(dir)) {
			t.Errorf("the program has the path %s in it", dir)
		}
	}
	if sums[0] != sums[1] {
		t.Errorf("two builds of one source differ: %v", sums)
	}
	if info, err := os.Stat(filepath.Join(out, "storage-controller")); err != nil || info.ModTime().Unix() != 1700000000 {
		t.Errorf("%v, %v: the time is not that of SOURCE_DATE_EPOCH", info, err)
	}
	for name, text := range map[string]string{
		"etc/ssl/certs/ca-certificates.crt": "BEGIN CERTIFICATE", "LICENSE": "Apache License",
		"THIRD_PARTY_LICENSES": "\nk8s.io/client-go v",
	} {
		if content, err := os.ReadFile(filepath.Join(out, name)); err != nil || !bytes.Contains(content, []byte(text)) {
			t.Errorf("%s in the image: %v, want %q in it", name, err, text)
		}
	}
	if linked, err := exec.Command("ldd", filepath.Join(out, "storage-controller")).CombinedOutput(); err == nil {
		t.Errorf("the program needs libraries:\n%s", linked)
	}
	for name, text := range map[string]string{
		"storage-controller": "Available Commands:", "csi-provisioner": "--volume-name-prefix", "csi-attacher": "--reconcile-sync",
		"csi-resizer": "--handle-volume-inuse-error", "csi-snapshotter": "--snapshot-name-prefix", "livenessprobe": "--health-port",
		"topolvm-controller": "--minimum-allocation-xfs",
	} {
		help, err := exec.Command(filepath.Join(out, name), "--help").CombinedOutput()
		if err != nil || !strings.Contains(string(help), text) {
			t.Errorf("%s --help: %v, want %q in it", name, err, text)
		}
		if got, err := exec.Command(filepath.Join(out, name), "--version").CombinedOutput(); name != "storage-controller" &&
			(err != nil || !strings.Contains(string(got), "v9.8.7")) {
			t.Errorf("%s --version: %v, %s", name, err, got)
		}
	}
}

func goarch(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("go", "env", "GOARCH").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}
