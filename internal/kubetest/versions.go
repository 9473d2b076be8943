// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"
)

// MinorVariable names the environment variable that selects the Kubernetes minor version of the control plane, for
// example 1.35. The default is the version in the control plane's go.mod.
const MinorVariable = "CONTROLPLANE_MINOR"

// Version is a Kubernetes version that the control plane can be built from.
type Version struct {
	Kubernetes string // version of k8s.io/kubernetes
	Etcd       string // version of go.etcd.io/etcd/server/v3
	ModFile    string // path of the module file that requires them
}

// Minor returns the minor version, for example 1.36.
func (v Version) Minor() string {
	parsed := version.MustParseSemantic(v.Kubernetes)
	return fmt.Sprintf("%d.%d", parsed.Major(), parsed.Minor())
}

// Versions returns the versions, the oldest first. The control plane's go.mod has one, and each of its files
// versions/MINOR.mod another.
func Versions() ([]Version, error) {
	module, err := program{module: "controlplane"}.moduleDir()
	if err != nil {
		return nil, err
	}
	return versionsIn(module)
}

func versionsIn(module string) ([]Version, error) {
	files, err := filepath.Glob(filepath.Join(module, "versions", "*.mod"))
	if err != nil {
		return nil, err
	}
	var versions []Version
	for _, file := range append(files, filepath.Join(module, "go.mod")) {
		v, err := readVersion(file)
		if err != nil {
			return nil, err
		}
		if name := filepath.Base(file); name != "go.mod" && name != v.Minor()+".mod" {
			return nil, fmt.Errorf("%s: requires Kubernetes %s: rename the file", file, v.Kubernetes)
		}
		versions = append(versions, v)
	}
	slices.SortFunc(versions, func(a, b Version) int {
		if version.MustParseSemantic(a.Kubernetes).LessThan(version.MustParseSemantic(b.Kubernetes)) {
			return -1
		}
		return 1
	})
	return versions, nil
}

var requirement = regexp.MustCompile(`(?m)^\s*(?:require )?(k8s\.io/kubernetes|go\.etcd\.io/etcd/server/v3) (v\S+)`)

func readVersion(file string) (Version, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return Version{}, err
	}
	required := map[string]string{}
	for _, m := range requirement.FindAllStringSubmatch(string(text), -1) {
		required[m[1]] = m[2]
	}
	v := Version{Kubernetes: required["k8s.io/kubernetes"], Etcd: required["go.etcd.io/etcd/server/v3"], ModFile: file}
	if _, err := version.ParseSemantic(v.Kubernetes); err != nil {
		return Version{}, fmt.Errorf("%s: version of k8s.io/kubernetes: %w", file, err)
	}
	return v, nil
}

// SelectedVersion returns the version that [MinorVariable] selects.
func SelectedVersion() (Version, error) {
	versions, err := Versions()
	if err != nil {
		return Version{}, err
	}
	return selectVersion(versions, os.Getenv(MinorVariable))
}

// selectVersion returns the version with the given minor, and that of go.mod if minor is empty.
func selectVersion(versions []Version, minor string) (Version, error) {
	var known []string
	for _, v := range versions {
		if v.Minor() == minor || minor == "" && filepath.Base(v.ModFile) == "go.mod" {
			return v, nil
		}
		known = append(known, v.Minor())
	}
	return Version{}, fmt.Errorf("%s: no control plane of Kubernetes %q: use one of %s", MinorVariable, minor, strings.Join(known, ", "))
}
