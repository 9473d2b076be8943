// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
)

const provenanceFile = "provenance.json"

// The statement is that of in-toto (Statement v1) with a predicate of SLSA (Provenance v1).
type statement struct {
	Type          string    `json:"_type"`
	Subject       []subject `json:"subject"`
	PredicateType string    `json:"predicateType"`
	Predicate     predicate `json:"predicate"`
}

type subject struct {
	Name   string            `json:"name,omitempty"`
	URI    string            `json:"uri,omitempty"`
	Digest map[string]string `json:"digest"`
}

type predicate struct {
	BuildDefinition struct {
		BuildType            string            `json:"buildType"`
		ExternalParameters   map[string]string `json:"externalParameters"`
		InternalParameters   map[string]string `json:"internalParameters"`
		ResolvedDependencies []subject         `json:"resolvedDependencies"`
	} `json:"buildDefinition"`
	RunDetails struct {
		Builder map[string]string `json:"builder"`
	} `json:"runDetails"`
}

// provenance writes from what and how all files were built. It is not signed, and has no time of the build: a second
// build of the commit gives the same file.
func (r *release) provenance() error {
	sums, err := digests(r.out)
	if err != nil {
		return err
	}
	s := statement{Type: "https://in-toto.io/Statement/v1", PredicateType: "https://slsa.dev/provenance/v1", Subject: sums.subjects()}
	b := &s.Predicate.BuildDefinition
	b.BuildType = r.home + "/blob/" + r.version + "/docs/release.md"
	b.ExternalParameters = map[string]string{"version": r.version, "repository": r.repository, "downloadURL": r.downloadURL}
	b.InternalParameters = map[string]string{"go": r.goVersion}
	b.ResolvedDependencies = []subject{{URI: "git+" + r.home, Digest: map[string]string{"gitCommit": r.commit}}}
	s.Predicate.RunDetails.Builder = map[string]string{"id": r.home + "/blob/" + r.version + "/Makefile"}
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, provenanceFile), append(data, '\n'), 0o644)
}
