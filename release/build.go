// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"debug/buildinfo"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// platforms are those of the command line; images are built for those with Linux.
var platforms = []platform{
	{os: "linux", arch: "amd64"}, {os: "linux", arch: "arm64"}, {os: "linux", arch: "amd64", fips: true},
	{os: "linux", arch: "arm64", fips: true}, {os: "darwin", arch: "amd64"}, {os: "darwin", arch: "arm64"},
	{os: "windows", arch: "amd64"},
}

// fipsModule is the version of the Go Cryptographic Module in the programs for FIPS 140-3. It has a certificate.
const fipsModule = "v1.0.0"

type platform struct {
	os, arch string
	fips     bool // with fipsModule, in FIPS mode
}

func (p platform) String() string {
	if p.fips {
		return p.os + "_" + p.arch + "_fips"
	}
	return p.os + "_" + p.arch
}

// parse returns the platform whose text is s.
func parse(s string) platform {
	target, fips := strings.CutSuffix(s, "_fips")
	os, arch, _ := strings.Cut(target, "_")
	return platform{os, arch, fips}
}

// tag returns the tag of the images of a version.
func tag(version string, fips bool) string {
	if fips {
		return version + "-fips"
	}
	return version
}

// program returns the file name of the program.
func (p platform) program() string {
	if p.os == "windows" {
		return "storage-controller.exe"
	}
	return "storage-controller"
}

type options struct {
	version     string // v1.2.3
	source      string // the root of the repository
	out         string // empty: dist/VERSION of the source
	repository  string // of the image, in the chart
	downloadURL string // of the archives, in the krew manifests; empty: releases of the project's home page
	platforms   []platform
}

// release is what the artifacts are made from.
type release struct {
	options
	commit    string
	time      time.Time // of the commit: the time of every file
	goVersion string    // go1.2.3
	home      string    // page of the project
	licences  []licence
	programs  map[platform]string // paths
}

// semver is what semantic versioning allows after the v, without build metadata: OCI tags have no plus sign.
var semver = regexp.MustCompile(`^v(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?$`)

func build(ctx context.Context, o options) (err error) {
	if !semver.MatchString(o.version) {
		return fmt.Errorf("--version %q: want a semantic version such as v1.2.3 or v1.2.3-rc.1", o.version)
	}
	if o.out == "" {
		o.out = filepath.Join(o.source, "dist", o.version)
	}
	r, err := newRelease(ctx, o)
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "release-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	if err := os.RemoveAll(r.out); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(r.out, "krew"), 0o755); err != nil {
		return err
	}
	for _, p := range r.platforms {
		fmt.Printf("building %s for %s\n", r.version, p)
		if r.programs[p], err = r.compile(ctx, p, work); err != nil {
			return err
		}
	}
	info, err := buildinfo.ReadFile(r.programs[r.platforms[0]])
	if err != nil {
		return err
	}
	if r.licences, err = licences(ctx, r.source, info); err != nil {
		return err
	}
	for _, step := range []func() error{r.archives, r.images, r.charts, r.krew, r.notes} {
		if err := step(); err != nil {
			return err
		}
	}
	if err := r.provenance(); err != nil { // of everything before it
		return err
	}
	sums, err := digests(r.out)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(r.out, sumsFile), []byte(sums.String()), 0o644); err != nil {
		return err
	}
	fmt.Printf("%s has %d files; verify them with: make verify-release VERSION=%s\n", r.out, len(sums), r.version)
	return nil
}

// newRelease reads what the commit says. The working tree must have no changes: they would be in the artifacts, and not
// in the commit that the provenance names.
func newRelease(ctx context.Context, o options) (*release, error) {
	r := &release{options: o, programs: map[platform]string{}}
	changes, err := r.output(ctx, "git", "status", "--porcelain")
	if err != nil {
		return nil, err
	}
	if changes != "" {
		return nil, fmt.Errorf("%s has uncommitted changes; commit or remove them:\n%s", o.source, changes)
	}
	if r.commit, err = r.output(ctx, "git", "rev-parse", "HEAD"); err != nil {
		return nil, err
	}
	seconds, err := r.output(ctx, "git", "log", "-1", "--format=%ct")
	if err != nil {
		return nil, err
	}
	unix, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("time of the commit: %w", err)
	}
	r.time = time.Unix(unix, 0).UTC()
	version, err := r.output(ctx, "go", "list", "-m", "-f", "{{.GoVersion}}")
	if err != nil {
		return nil, err
	}
	r.goVersion = "go" + version
	meta, err := r.readChart(chartDir)
	if err != nil {
		return nil, err
	}
	r.home = meta.Home
	if r.downloadURL == "" {
		r.downloadURL = r.home + "/releases/download/" + r.version
	}
	return r, nil
}

// compile builds the program for p into a directory of work. Its flags are those of the Dockerfile.
func (r *release) compile(ctx context.Context, p platform, work string) (string, error) {
	path := filepath.Join(work, p.String(), p.program())
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-tags", "grpcnotrace",
		"-ldflags", "-s -w -buildid= -X main.version="+r.version, "-o", path, "./cmd/storage-controller")
	cmd.Dir = r.source
	module := "off"
	if p.fips {
		module = fipsModule
	}
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off", "GOTOOLCHAIN="+r.goVersion, "GOOS="+p.os, "GOARCH="+p.arch,
		"GOAMD64=v1", "GOARM64=v8.0", "GOEXPERIMENT=", "GOFIPS140="+module)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("go build for %s: %w", p, err)
	}
	return path, nil
}

// output returns what a command prints in the source, without surrounding space.
func (r *release) output(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = r.source
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return "", fmt.Errorf("%s: %w: %s", cmd, err, exit.Stderr)
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w", cmd, err)
	}
	return strings.TrimSpace(string(out)), nil
}
