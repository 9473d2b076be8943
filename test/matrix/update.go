// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// minors is the number of minor versions that are tested: those that Kubernetes supports at a time, and the one before.
const minors = 4

// updateModules writes the module files of the newest minor versions that the module proxy has and removes those of
// older ones. go.mod stays at its minor version.
func updateModules(ctx context.Context, module string) error {
	out, err := goCommand(ctx, module, "list", "-m", "-versions", "k8s.io/kubernetes")
	if err != nil {
		return err
	}
	newest := newestMinors(strings.Fields(string(out)), minors)
	old, err := kubetest.Versions()
	if err != nil {
		return err
	}
	for _, have := range old {
		switch i := slices.IndexFunc(newest, func(v kubetest.Version) bool { return v.Minor() == have.Minor() }); {
		case i >= 0:
			newest[i].ModFile = have.ModFile
			if have.Kubernetes == newest[i].Kubernetes {
				newest = slices.Delete(newest, i, i+1)
			}
		case filepath.Base(have.ModFile) == "go.mod":
			return fmt.Errorf("%s: Kubernetes %s is too old: change go.mod to a newer minor version", have.ModFile, have.Minor())
		default:
			err = errors.Join(os.Remove(have.ModFile), os.Remove(strings.TrimSuffix(have.ModFile, ".mod")+".sum"))
			if err != nil {
				return err
			}
		}
	}
	for _, v := range newest {
		if v.ModFile == "" {
			v.ModFile = filepath.Join(module, "versions", v.Minor()+".mod")
		}
		if err := writeModule(ctx, module, v); err != nil {
			return fmt.Errorf("module file of Kubernetes %s: %w", v.Kubernetes, err)
		}
		fmt.Printf("%s: Kubernetes %s\n", v.ModFile, v.Kubernetes)
	}
	return nil
}

// newestMinors returns the newest release of each of the n newest minor versions.
func newestMinors(versions []string, n int) []kubetest.Version {
	var releases []*version.Version
	for _, text := range versions {
		if v, err := version.ParseSemantic(text); err == nil && v.PreRelease() == "" {
			releases = append(releases, v)
		}
	}
	slices.SortFunc(releases, func(a, b *version.Version) int {
		if a.LessThan(b) {
			return 1
		}
		return -1
	})
	var newest []kubetest.Version
	for _, v := range releases {
		next := kubetest.Version{Kubernetes: "v" + v.String()}
		if len(newest) == 0 || newest[len(newest)-1].Minor() != next.Minor() {
			newest = append(newest, next)
		}
	}
	return newest[:min(n, len(newest))]
}

// writeModule writes a module file that requires v. The Go command adds the other requirements: Kubernetes names them
// in its own go.mod, with the version of etcd.
func writeModule(ctx context.Context, module string, v kubetest.Version) error {
	var this, kubernetes struct {
		GoMod   string // its path
		Go      string
		Require []struct{ Path, Version string }
	}
	for _, step := range []struct {
		args []string
		into any
	}{
		{[]string{"mod", "edit", "-json"}, &this},
		{[]string{"mod", "download", "-json", "k8s.io/kubernetes@" + v.Kubernetes}, &kubernetes},
	} {
		out, err := goCommand(ctx, module, step.args...)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(out, step.into); err != nil {
			return err
		}
	}
	out, err := goCommand(ctx, module, "mod", "edit", "-json", kubernetes.GoMod)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(out, &kubernetes); err != nil {
		return err
	}
	text := fmt.Sprintf("module github.com/storage-controller/storage-controller/test/controlplane\n\ngo %s\n\n"+
		"require k8s.io/kubernetes %s\n\nreplace (\n", this.Go, v.Kubernetes)
	for _, r := range kubernetes.Require {
		if r.Version == "v0.0.0" { // published from the repository of Kubernetes, as v0.36.3 with v1.36.3
			text += fmt.Sprintf("\t%s => %[1]s v0%s\n", r.Path, strings.TrimPrefix(v.Kubernetes, "v1"))
		}
	}
	if err := os.MkdirAll(filepath.Dir(v.ModFile), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(v.ModFile, []byte(text+")\n"), 0o644); err != nil {
		return err
	}
	file, err := filepath.Abs(v.ModFile)
	if err != nil {
		return err
	}
	_, err = goCommand(ctx, module, "mod", "tidy", "-modfile", file)
	return err
}

// goCommand returns the output of the Go command in the directory of a module.
func goCommand(ctx context.Context, module string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = module
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off")
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		err = fmt.Errorf("%w\n%s", err, exit.Stderr)
	}
	if err != nil {
		return nil, fmt.Errorf("go %s: %w", strings.Join(args, " "), err)
	}
	return out, nil
}
