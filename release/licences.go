// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/google/licensecheck"
)

// licence is what a module of the program permits.
type licence struct {
	module, version string
	ids             []string // of SPDX, sorted
	text            []byte
}

var licenceFile = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice)([.-].*)?$`)

// licences returns those of all modules that are linked into the program of info, and of Go itself. A module without a
// licence file, or with one that is not recognized, is an error: it must not be shipped.
func licences(ctx context.Context, source string, info *debug.BuildInfo) ([]licence, error) {
	args := []string{"mod", "download", "-json"}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		args = append(args, m.Path+"@"+m.Version)
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir, cmd.Stderr = source, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go mod download: %w", err)
	}
	root, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return nil, fmt.Errorf("go env GOROOT: %w", err)
	}
	std, err := licenceOf("std", strings.TrimPrefix(info.GoVersion, "go"), strings.TrimSpace(string(root)))
	if err != nil {
		return nil, err
	}
	all := []licence{std}
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var m struct{ Path, Version, Dir string }
		if err := decoder.Decode(&m); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, fmt.Errorf("go mod download: %w", err)
		}
		l, err := licenceOf(m.Path, m.Version, m.Dir)
		if err != nil {
			return nil, err
		}
		all = append(all, l)
	}
}

func licenceOf(module, version, dir string) (licence, error) {
	l := licence{module: module, version: version}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return l, err
	}
	for _, e := range entries {
		if e.IsDir() || !licenceFile.MatchString(e.Name()) {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return l, err
		}
		for _, m := range licensecheck.Scan(text).Match {
			if !m.IsURL {
				l.ids = append(l.ids, m.ID)
			}
		}
		l.text = append(append(l.text, text...), '\n')
	}
	slices.Sort(l.ids)
	l.ids = slices.Compact(l.ids)
	if len(l.ids) == 0 {
		return l, fmt.Errorf("module %s %s has no licence that is recognized in %s", module, version, dir)
	}
	return l, nil
}

// thirdParty is the file with the licences of all modules.
func thirdParty(all []licence) []byte {
	var b bytes.Buffer
	for _, l := range all {
		fmt.Fprintf(&b, "%s\n%s %s (%s)\n\n%s", strings.Repeat("=", 80), l.module, l.version, strings.Join(l.ids, ", "), l.text)
	}
	return b.Bytes()
}
