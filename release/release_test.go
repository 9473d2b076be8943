// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

// clone returns a copy of the last commit of this repository.
func clone(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "source")
	if out, err := exec.Command("git", "clone", "-q", "--no-hardlinks", "..", dir).CombinedOutput(); err != nil {
		t.Fatalf("git clone: %v: %s", err, out)
	}
	return dir
}

func write(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestRelease builds the last commit at two places for this machine, compares and verifies the results, and damages one.
func TestRelease(t *testing.T) {
	var outs []string
	var all []sums
	for range 2 {
		out := filepath.Join(t.TempDir(), "out")
		o := options{version: "v0.1.0-test.1", source: clone(t), out: out, repository: "example/storage-controller",
			platforms: []platform{{os: "linux", arch: runtime.GOARCH}, {os: "linux", arch: runtime.GOARCH, fips: true}}}
		if err := build(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		have, err := digests(out)
		if err != nil {
			t.Fatal(err)
		}
		outs, all = append(outs, out), append(all, have)
	}
	if !maps.Equal(all[0], all[1]) {
		t.Errorf("two builds of one commit differ:\n%v", compare("the other build", all[0], all[1]))
	}
	dir := outs[0]
	if err := verify(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	check := exec.Command("sha256sum", "--check", "--quiet", sumsFile)
	check.Dir = dir
	if out, err := check.CombinedOutput(); err != nil {
		t.Errorf("sha256sum: %v: %s", err, out)
	}
	const version = "version: 0.1.0-test.1\nappVersion: v0.1.0-test.1\n"
	const image = "\n  repository: example/storage-controller\n  tag: v0.1.0-test.1\n"
	checkChart(t, filepath.Join(dir, "storage-controller-0.1.0-test.1.tgz"), map[string]string{
		"storage-controller/Chart.yaml":                                   version,
		"storage-controller/values.yaml":                                  image,
		"storage-controller/LICENSE":                                      "Apache License",
		"storage-controller/charts/storage-controller-library/Chart.yaml": version,
	})
	checkChart(t, filepath.Join(dir, "storage-controller-library-0.1.0-test.1.tgz"), map[string]string{
		"storage-controller-library/Chart.yaml":  version,
		"storage-controller-library/values.yaml": image,
		"storage-controller-library/LICENSE":     "Apache License",
	})

	t.Run("images", func(t *testing.T) { runPublished(t, dir) })
	archive := "storage-controller_v0.1.0-test.1_linux_" + runtime.GOARCH + ".tar.gz"
	for name, tt := range map[string]struct {
		damage func(t *testing.T)
		says   string
	}{
		"changed": {func(t *testing.T) { write(t, filepath.Join(dir, "release-notes.md"), []byte("other")) },
			"release-notes.md has the SHA-256 digest"},
		"added": {func(t *testing.T) { write(t, filepath.Join(dir, "krew", "more.yaml"), nil) }, "krew/more.yaml is not listed"},
		"missing": {func(t *testing.T) {
			if err := os.Remove(filepath.Join(dir, archive)); err != nil {
				t.Fatal(err)
			}
		}, archive + " is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Cleanup(restore(t, dir))
			tt.damage(t)
			if err := verify(t.Context(), dir); err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("verify: %v, want %q", err, tt.says)
			}
		})
	}
	t.Run("SBOM lacks a module", func(t *testing.T) {
		t.Cleanup(restore(t, dir))
		path := filepath.Join(dir, archive+".cdx.json")
		var bom map[string]any
		data, err := os.ReadFile(path)
		if err == nil {
			err = json.Unmarshal(data, &bom)
		}
		if err != nil {
			t.Fatal(err)
		}
		bom["components"] = bom["components"].([]any)[1:]
		if data, err = json.Marshal(bom); err != nil {
			t.Fatal(err)
		}
		write(t, path, data)
		err = verifyArchives(dir, all[0], "v0.1.0-test.1")
		if err == nil || !strings.Contains(err.Error(), "does not list pkg:golang/std@") {
			t.Errorf("verifyArchives: %v", err)
		}
	})
	t.Run("krew has another digest", func(t *testing.T) {
		changed := maps.Clone(all[0])
		changed[archive] = strings.Repeat("0", 64)
		if err := verifyKrew(dir, changed); err == nil || !strings.Contains(err.Error(), archive) {
			t.Errorf("verifyKrew: %v", err)
		}
	})
}

// restore returns a function that gives dir its present content again.
func restore(t *testing.T, dir string) func() {
	t.Helper()
	kept := filepath.Join(t.TempDir(), "kept")
	if out, err := exec.Command("cp", "-a", dir, kept).CombinedOutput(); err != nil {
		t.Fatalf("cp: %v: %s", err, out)
	}
	return func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(kept, dir); err != nil {
			t.Fatal(err)
		}
	}
}

// checkChart checks that files of a chart contain these texts.
func checkChart(t *testing.T, path string, texts map[string]string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range texts {
		content, err := fromTar(data, name)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Contains(content, []byte(text)) {
			t.Errorf("%s in %s lacks %q", name, path, text)
		}
	}
}

// TestRefused: what build refuses, before it compiles anything.
func TestRefused(t *testing.T) {
	dirty := clone(t)
	write(t, filepath.Join(dirty, "new.go"), nil)
	for name, tt := range map[string]struct{ version, source, says string }{
		"no version":          {"", "..", "--version"},
		"version without a v": {"1.2.3", "..", "--version"},
		"build metadata":      {"v1.2.3+1", "..", "--version"},
		"dirty":               {"v1.2.3", dirty, "uncommitted changes"},
		"no repository":       {"v1.2.3", t.TempDir(), "not a git repository"},
	} {
		t.Run(name, func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "out")
			err := build(t.Context(), options{version: tt.version, source: tt.source, out: out, platforms: platforms})
			if err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("build: %v, want %q", err, tt.says)
			}
		})
	}
}

func TestSection(t *testing.T) {
	const changelog = "# Changelog\n\n## Unreleased\n\nnew\n\n## v1.1.0 (2026-01-01)\n\nold\n\n## 1.0.0\n\nfirst\n"
	for version, want := range map[string]string{"1.2.0": "new", "1.1.0": "old", "1.0.0": "first"} {
		if got, err := section(changelog, version, "Unreleased"); err != nil || got != want {
			t.Errorf("%s: %q, %v, want %q", version, got, err, want)
		}
	}
	if got, err := section("# Changelog\n", "1.0.0"); err == nil {
		t.Errorf("no section: got %q", got)
	}
}

// TestZip: the archive for Windows has the files, their mode and time.
func TestZip(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 6, 0, time.UTC)
	data, err := zipped([]file{{name: "a.exe", content: []byte("x"), mode: fs.FileMode(0o755)}}, at)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := fromZip(data, "a.exe"); err != nil || string(got) != "x" {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := fromZip(data, "b.exe"); err == nil {
		t.Error("a file that is not there was found")
	}
}

// TestTar: krew refuses an archive with another entry than files and directories.
func TestTar(t *testing.T) {
	files := []file{{name: "d/", mode: fs.ModeDir | 0o755}, {name: "a", content: []byte("x"), mode: 0o755}}
	link := file{name: "l", mode: fs.ModeSymlink | 0o777, target: "a"}
	for says, files := range map[string][]file{"": files, "l is neither": append(files[:2:2], link), "no file a": files[:1]} {
		data, err := tarball(files, time.Unix(0, 0))
		if err == nil {
			data, err = gzipped(data)
		}
		if err != nil {
			t.Fatal(err)
		}
		if got, err := fromTar(data, "a"); says == "" && (err != nil || string(got) != "x") ||
			says != "" && (err == nil || !strings.Contains(err.Error(), says)) {
			t.Errorf("got %q, %v, want %q", got, err, says)
		}
	}
}

// TestLicences: a module without a licence, or with an unknown one, cannot be shipped.
func TestLicences(t *testing.T) {
	own, err := os.ReadFile("../LICENSE")
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		files map[string]string
		want  string // empty: an error
	}{
		"apache":        {map[string]string{"LICENSE": string(own)}, "Apache-2.0"},
		"british":       {map[string]string{"licence.md": string(own)}, "Apache-2.0"},
		"no file":       {map[string]string{"README": string(own)}, ""},
		"not a licence": {map[string]string{"LICENSE": "All rights reserved."}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range tt.files {
				write(t, filepath.Join(dir, file), []byte(text))
			}
			l, err := licenceOf("example.com/m", "v1.0.0", dir)
			if got := strings.Join(l.ids, ","); got != tt.want || (err == nil) != (tt.want != "") {
				t.Errorf("got %q, %v, want %q", got, err, tt.want)
			}
		})
	}
}
