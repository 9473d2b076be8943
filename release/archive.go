// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
)

// plugins are the names under which kubectl finds the program: "kubectl storage-explain" runs kubectl-storage_explain,
// which is "storage-controller explain". krew creates these links. It allows 50 characters for the purpose.
var plugins = []struct{ link, purpose string }{
	{"kubectl-storage_audit", "Compare a CSI driver's volumes with the cluster"},
	{"kubectl-storage_doctor", "Check the installation of a CSI driver"},
	{"kubectl-storage_explain", "Show why a volume is stuck, and the next step"},
	{"kubectl-storage_migrate", "Rewrite the manifest of a CSI driver"},
}

// archive returns the name of the archive for p.
func (r *release) archive(p platform) string {
	name := "storage-controller_" + r.version + "_" + p.String()
	if p.os == "windows" {
		return name + ".zip"
	}
	return name + ".tar.gz"
}

// archives writes the program with its licences for each platform, without links: krew cannot extract them.
func (r *release) archives() error {
	for _, p := range r.platforms {
		files, err := r.programFiles(p, p.program())
		if err != nil {
			return err
		}
		var data []byte
		if p.os == "windows" {
			data, err = zipped(files, r.time)
		} else if data, err = tarball(files, r.time); err == nil {
			data, err = gzipped(data)
		}
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(r.out, r.archive(p)), data, 0o644); err != nil {
			return err
		}
		if err := r.programSBOM(r.archive(p), p, nil); err != nil {
			return err
		}
	}
	return nil
}

// programFiles returns the program for p at path, and the licences.
func (r *release) programFiles(p platform, path string) ([]file, error) {
	program, err := os.ReadFile(r.programs[p])
	if err != nil {
		return nil, err
	}
	own, err := os.ReadFile(filepath.Join(r.source, "LICENSE"))
	if err != nil {
		return nil, err
	}
	return []file{
		{name: path, content: program, mode: 0o755},
		{name: "LICENSE", content: own, mode: 0o644},
		{name: "THIRD_PARTY_LICENSES", content: thirdParty(r.licences), mode: 0o644},
	}, nil
}
