// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package kubetest starts an API server in memory or a real control plane for tests: the program of test/controlplane, and with
// [WithSnapshotController] that of test/snapshotcontroller. These programs are built once per machine. A test binary
// starts one control plane. It also builds csi-provisioner and csi-attacher, from test/reference.
package kubetest

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// program is a program that is compiled for tests.
type program struct {
	name    string // of the file in the cache
	module  string // directory in test/
	title   string // in messages
	modFile string // instead of go.mod; empty: go.mod
	pkg     string // package to compile
	ldflags string
	takes   string // how long the first compilation takes
}

// controlPlaneProgram returns the control plane of a Kubernetes version, which reports this version.
func controlPlaneProgram(v Version) program {
	return program{name: "controlplane", module: "controlplane", title: "control plane of Kubernetes " + v.Kubernetes, modFile: v.ModFile,
		pkg: ".", ldflags: "-X k8s.io/component-base/version.gitVersion=" + v.Kubernetes, takes: "five minutes"}
}

// moduleDir returns the directory of the program's module.
func (p program) moduleDir() (string, error) {
	_, file, _, ok := runtime.Caller(0)
	if !ok || !filepath.IsAbs(file) {
		// A build with -trimpath does not know where its source is: the
		// program runs in the repository then.
		wd, err := os.Getwd()
		if err != nil {
			return "", err
		}
		for dir := wd; dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
			module := filepath.Join(dir, "test", p.module)
			if _, err := os.Stat(filepath.Join(module, "go.mod")); err == nil {
				return module, nil
			}
		}
		return "", fmt.Errorf("no test/%s in %s or above", p.module, wd)
	}
	return filepath.Join(filepath.Dir(file), "..", "..", "test", p.module), nil
}

// Build returns the path of the control plane's program, in the [SelectedVersion]. It builds the program, which
// takes some minutes, unless the cache has it. progress, if not nil, receives messages.
func Build(ctx context.Context, progress io.Writer) (string, error) {
	v, err := SelectedVersion()
	if err != nil {
		return "", err
	}
	return BuildVersion(ctx, v, progress)
}

// BuildVersion is [Build] for a version.
func BuildVersion(ctx context.Context, v Version, progress io.Writer) (string, error) {
	return controlPlaneProgram(v).build(ctx, progress)
}

// build returns the path of the program, which it compiles unless the cache has it.
func (p program) build(ctx context.Context, progress io.Writer) (string, error) {
	if progress == nil {
		progress = io.Discard
	}
	module, err := p.moduleDir()
	if err != nil {
		return "", fmt.Errorf("looking for the source of the %s: %w", p.title, err)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("looking for a cache directory: %w", err)
	}
	sum, err := p.contentHash(module)
	if err != nil {
		return "", fmt.Errorf("reading the source of the %s: %w", p.title, err)
	}
	dir := filepath.Join(cache, "storage-controller")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	path := filepath.Join(dir, p.name+"-"+sum)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	// Test binaries run side by side: one builds, the others wait for it.
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := p.lockFile(ctx, lock, progress); err != nil {
		return "", fmt.Errorf("waiting for another build of the %s: %w", p.title, err)
	}
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	return path, p.compile(ctx, module, path, progress)
}

// lockFile waits until no other process holds lock.
func (p program) lockFile(ctx context.Context, lock *os.File, progress io.Writer) error {
	for attempt := 0; ; attempt++ {
		err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			return err
		}
		if attempt == 0 {
			fmt.Fprintf(progress, "Waiting for another process, which is compiling the %s.\n", p.title)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// compile compiles module into path, which appears only when it is complete.
func (p program) compile(ctx context.Context, module, path string, progress io.Writer) error {
	fmt.Fprintf(progress, "Compiling the %s: about %s the first time, and once per machine.\n", p.title, p.takes)
	begin := time.Now()
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-v", "-modfile", cmp.Or(p.modFile, "go.mod"),
		"-ldflags", strings.TrimSpace("-s -w "+p.ldflags), "-o", path+".new", p.pkg)
	cmd.Dir = module
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off", "GOGC=400")
	var output compilerOutput
	cmd.Stdout, cmd.Stderr = &output, &output
	done := make(chan error, 1)
	go func() { done <- cmd.Run() }()
	tick := time.NewTicker(15 * time.Second)
	defer tick.Stop()
	for running := true; running; {
		select {
		case <-tick.C:
			fmt.Fprintf(progress, "  … %d packages compiled after %v\n", output.packages.Load(), time.Since(begin).Round(time.Second))
		case err := <-done:
			if err != nil {
				return fmt.Errorf("building the %s: %w\n%s", p.title, err, output.errors.String())
			}
			running = false
		}
	}
	fmt.Fprintf(progress, "Compiled after %v.\n", time.Since(begin).Round(time.Second))
	return os.Rename(path+".new", path)
}

// compilerOutput counts the packages that go build -v names, one per line, and stores its other lines.
type compilerOutput struct {
	packages atomic.Int32
	errors   bytes.Buffer
	rest     []byte // of a line whose end is missing
}

func (o *compilerOutput) Write(p []byte) (int, error) {
	o.rest = append(o.rest, p...)
	for {
		line, rest, complete := bytes.Cut(o.rest, []byte("\n"))
		if !complete {
			return len(p), nil
		}
		o.rest = rest
		if bytes.ContainsAny(line, " \t") { // a package path has no space
			o.errors.Write(append(line, '\n'))
		} else {
			o.packages.Add(1)
		}
	}
}

// contentHash returns a hash of the Go version, of the linker flags and of the files of the module, except tests and
// module files of other versions.
func (p program) contentHash(module string) (string, error) {
	modFile := cmp.Or(p.modFile, filepath.Join(module, "go.mod"))
	sumFile := strings.TrimSuffix(modFile, ".mod") + ".sum"
	h := sha256.New()
	fmt.Fprintln(h, runtime.Version(), runtime.GOOS, runtime.GOARCH, p.ldflags)
	err := filepath.WalkDir(module, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		source := strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go")
		if entry.IsDir() || !source && path != modFile && path != sumFile {
			return nil
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(module, path)
		fmt.Fprintln(h, relative, len(data))
		h.Write(data)
		return err
	})
	return hex.EncodeToString(h.Sum(nil))[:16], err
}
