// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

// notes writes the section of the version in CHANGELOG.md, else the section Unreleased.
func (r *release) notes() error {
	changelog, err := os.ReadFile(filepath.Join(r.source, "CHANGELOG.md"))
	if err != nil {
		return err
	}
	text, err := section(string(changelog), strings.TrimPrefix(r.version, "v"), "Unreleased")
	if err != nil {
		return err
	}
	text = fmt.Sprintf("# storage-controller %s\n\n%s\n", r.version, text)
	return os.WriteFile(filepath.Join(r.out, "release-notes.md"), []byte(text), 0o644)
}

// section returns the text below the first of the headings that changelog has.
func section(changelog string, headings ...string) (string, error) {
	for _, h := range headings {
		for part := range strings.SplitSeq("\n"+changelog, "\n## ") {
			title, text, _ := strings.Cut(part, "\n")
			text = strings.TrimSpace(text)
			if text != "" && strings.TrimPrefix(strings.Fields(title + " -")[0], "v") == h {
				return text, nil
			}
		}
	}
	return "", fmt.Errorf("CHANGELOG.md has no section of %s", strings.Join(headings, " or "))
}

// krew writes a manifest per plugin of kubectl (sigs.k8s.io/krew, krew.googlecontainertools.github.com/v1alpha2).
func (r *release) krew() error {
	sums, err := digests(r.out)
	if err != nil {
		return err
	}
	for _, plugin := range plugins {
		name := strings.ReplaceAll(strings.TrimPrefix(plugin.link, "kubectl-"), "_", "-")
		var targets []map[string]any
		for _, p := range r.platforms {
			if p.fips { // krew selects by operating system and architecture
				continue
			}
			targets = append(targets, map[string]any{
				"selector": map[string]any{"matchLabels": map[string]string{"os": p.os, "arch": p.arch}},
				"uri":      r.downloadURL + "/" + r.archive(p), "sha256": sums[r.archive(p)], "bin": p.program(),
			})
		}
		data, err := yaml.Marshal(map[string]any{
			"apiVersion": "krew.googlecontainertools.github.com/v1alpha2", "kind": "Plugin",
			"metadata": map[string]string{"name": name},
			"spec": map[string]any{"version": r.version, "homepage": r.home, "shortDescription": plugin.purpose,
				"platforms": targets},
		})
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(r.out, "krew", name+".yaml"), data, 0o644); err != nil {
			return err
		}
	}
	return nil
}
