// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"debug/buildinfo"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

const rootsModule = "golang.org/x/crypto/x509roots/fallback"

// programSBOM writes the SBOM of an artifact with the program for p, and others.
func (r *release) programSBOM(artifact string, p platform, others []cdx.Component) error {
	info, err := buildinfo.ReadFile(r.programs[p])
	if err != nil {
		return err
	}
	return r.sbom(artifact, append(components(info, r.licences), others...))
}

// sbom writes one with components beside the artifact.
func (r *release) sbom(artifact string, components []cdx.Component) error {
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{
		Timestamp: r.time.Format(time.RFC3339),
		Component: &cdx.Component{Type: cdx.ComponentTypeApplication, Name: artifact, Version: r.version, BOMRef: artifact,
			Licenses: &cdx.Licenses{{License: &cdx.License{ID: "Apache-2.0"}}}},
	}
	bom.Components = &components
	var buf bytes.Buffer
	if err := cdx.NewBOMEncoder(&buf, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, artifact+".cdx.json"), buf.Bytes(), 0o644)
}

// components are the modules that are linked into the program of info, and the standard library.
func components(info *debug.BuildInfo, licences []licence) []cdx.Component {
	ids := map[string][]string{}
	for _, l := range licences {
		ids[l.module] = l.ids
	}
	all := []cdx.Component{component("std", strings.TrimPrefix(info.GoVersion, "go"), ids["std"])}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		all = append(all, component(m.Path, m.Version, ids[m.Path]))
	}
	return all
}

func component(module, version string, ids []string) cdx.Component {
	purl := "pkg:golang/" + module + "@" + version
	c := cdx.Component{Type: cdx.ComponentTypeLibrary, Name: module, Version: version, PackageURL: purl, BOMRef: purl}
	if len(ids) > 0 {
		licenses := cdx.Licenses{}
		for _, id := range ids {
			licenses = append(licenses, cdx.LicenseChoice{License: &cdx.License{ID: id}})
		}
		c.Licenses = &licenses
	}
	return c
}

// caCertificates is the module of the certificate authorities in the images.
func caCertificates() []cdx.Component {
	info, _ := debug.ReadBuildInfo()
	for _, m := range info.Deps {
		if m.Path == rootsModule {
			return []cdx.Component{component(m.Path, m.Version, []string{"BSD-3-Clause"})}
		}
	}
	panic("this program has no module " + rootsModule)
}
