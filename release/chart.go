// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"sigs.k8s.io/yaml"
)

const (
	chartDir   = "deploy/helm/storage-controller"
	libraryDir = chartDir + "/charts/storage-controller-library"
)

// chartMeta is the part of Chart.yaml that a release uses.
type chartMeta struct {
	Name, Description, Home string
}

func (r *release) readChart(dir string) (chartMeta, error) {
	var meta chartMeta
	data, err := os.ReadFile(filepath.Join(r.source, dir, "Chart.yaml"))
	if err != nil {
		return meta, err
	}
	if err := yaml.Unmarshal(data, &meta); err != nil {
		return meta, fmt.Errorf("Chart.yaml: %w", err)
	}
	if meta.Name == "" || meta.Home == "" {
		return meta, fmt.Errorf("Chart.yaml: name and home must be set")
	}
	return meta, nil
}

// charts writes the chart and the library chart with the version of the release and its image, as archives and as an
// OCI layout with the media types of Helm.
func (r *release) charts() error {
	path, err := layout.Write(filepath.Join(r.out, "chart"), empty.Index)
	if err != nil {
		return err
	}
	for _, dir := range []string{chartDir, libraryDir} {
		if err := r.chart(dir, path); err != nil {
			return err
		}
	}
	return nil
}

func (r *release) chart(dir string, path layout.Path) error {
	meta, err := r.readChart(dir)
	if err != nil {
		return err
	}
	files, err := r.chartFiles(dir, meta.Name)
	if err != nil {
		return err
	}
	data, err := tarball(files, r.time)
	if err != nil {
		return err
	}
	if data, err = gzipped(data); err != nil {
		return err
	}
	version := strings.TrimPrefix(r.version, "v")
	name := meta.Name + "-" + version + ".tgz"
	if err := os.WriteFile(filepath.Join(r.out, name), data, 0o644); err != nil {
		return err
	}
	config, err := yaml.YAMLToJSON(files[0].content)
	if err != nil {
		return err
	}
	img, err := artifact(config, data)
	if err != nil {
		return err
	}
	if err := path.AppendImage(img, layout.WithAnnotations(map[string]string{refName: meta.Name + ":" + version})); err != nil {
		return err
	}
	repository := cmp.Or(r.repository, "storage-controller")
	image := repository + ":" + r.version
	return r.sbom(name, []cdx.Component{{Type: cdx.ComponentTypeContainer, Name: repository, Version: r.version, BOMRef: image}})
}

// chartFiles returns the files of the chart in dir and the licence, Chart.yaml first.
func (r *release) chartFiles(dir, name string) ([]file, error) {
	root := filepath.Join(r.source, dir)
	var files []file
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		switch filepath.Base(relative) {
		case "Chart.yaml":
			version := strings.TrimPrefix(r.version, "v")
			content, err = replaceLine(content, "version: ", version, "appVersion: ", r.version)
		case "values.yaml":
			repository := cmp.Or(r.repository, `""`) // required of the user
			content, err = replaceLine(content, "  repository: ", repository, "  tag: ", r.version)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", relative, err)
		}
		files = append(files, file{name: name + "/" + filepath.ToSlash(relative), content: content, mode: 0o644})
		return nil
	})
	if err == nil && (len(files) == 0 || files[0].name != name+"/Chart.yaml") {
		err = fmt.Errorf("%s has no Chart.yaml", root)
	}
	if err != nil {
		return nil, err
	}
	own, err := os.ReadFile(filepath.Join(r.source, "LICENSE"))
	return append(files, file{name: name + "/LICENSE", content: own, mode: 0o644}), err
}

// replaceLine replaces the value of the one line that begins with a prefix, for each pair of prefix and value.
func replaceLine(content []byte, pairs ...string) ([]byte, error) {
	lines := strings.SplitAfter(string(content), "\n")
	for i := 0; i < len(pairs); i += 2 {
		found := 0
		for k, line := range lines {
			if strings.HasPrefix(line, pairs[i]) {
				lines[k] = pairs[i] + pairs[i+1] + "\n"
				found++
			}
		}
		if found != 1 {
			return nil, fmt.Errorf("%d lines begin with %q, want one", found, pairs[i])
		}
	}
	return []byte(strings.Join(lines, "")), nil
}

// helmImage is a manifest whose config is the metadata of a chart, and not that of an image.
type helmImage struct {
	v1.Image
	config []byte
}

func (h helmImage) RawConfigFile() ([]byte, error)      { return h.config, nil }
func (h helmImage) ConfigName() (v1.Hash, error)        { return partial.ConfigName(h) }
func (h helmImage) Digest() (v1.Hash, error)            { return partial.Digest(h) }
func (h helmImage) Size() (int64, error)                { return partial.Size(h) }
func (h helmImage) ConfigFile() (*v1.ConfigFile, error) { return &v1.ConfigFile{}, nil }
func (h helmImage) RawManifest() ([]byte, error)        { return h.rawManifest() }
func (h helmImage) Manifest() (*v1.Manifest, error)     { return partial.Manifest(h) }

func (h helmImage) rawManifest() ([]byte, error) {
	m, err := h.Image.Manifest()
	if err != nil {
		return nil, err
	}
	m = m.DeepCopy()
	m.Config.MediaType = "application/vnd.cncf.helm.config.v1+json"
	m.Config.Digest, m.Config.Size, err = v1.SHA256(bytes.NewReader(h.config))
	if err != nil {
		return nil, err
	}
	return json.Marshal(m)
}

// artifact returns a Helm chart as an OCI manifest.
func artifact(config, chart []byte) (v1.Image, error) {
	base := mutate.MediaType(empty.Image, types.OCIManifestSchema1)
	img, err := mutate.AppendLayers(base, static.NewLayer(chart, "application/vnd.cncf.helm.chart.content.v1.tar+gzip"))
	if err != nil {
		return nil, err
	}
	return helmImage{img, config}, nil
}
