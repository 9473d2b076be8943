// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"sigs.k8s.io/yaml"
)

// verify checks the artifacts in dir. It returns every defect that it finds.
func verify(ctx context.Context, dir string) error {
	sums, err := digests(dir)
	if err != nil {
		return err
	}
	parameters, err := verifySums(dir, sums)
	if err != nil {
		return err // nothing else can be trusted
	}
	version := parameters["version"]
	err = errors.Join(verifyBlobs(sums), verifyKrew(dir, sums), verifyArchives(dir, sums, version), verifyImages(ctx, dir, version))
	if err != nil {
		return err
	}
	fmt.Printf("%s: storage-controller %s, %d files: digests, images, SBOMs and programs are as they should be\n", dir, version, len(sums))
	return nil
}

// verifySums compares the files with SHA256SUMS and with the provenance, and returns what the latter says of the build.
func verifySums(dir string, have sums) (map[string]string, error) {
	want, err := os.ReadFile(filepath.Join(dir, sumsFile))
	if err != nil {
		return nil, err
	}
	listed := sums{}
	for line := range strings.Lines(string(want)) {
		sum, name, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		if !ok {
			return nil, fmt.Errorf("%s: not a digest and a file: %q", sumsFile, line)
		}
		listed[name] = sum
	}
	data, err := os.ReadFile(filepath.Join(dir, provenanceFile))
	if err != nil {
		return nil, err
	}
	var s statement
	if err := json.Unmarshal(data, &s); err != nil {
		return nil, fmt.Errorf("%s: %w", provenanceFile, err)
	}
	proven := sums{provenanceFile: have[provenanceFile]} // not a subject of itself
	for _, f := range s.Subject {
		proven[f.Name] = f.Digest["sha256"]
	}
	return s.Predicate.BuildDefinition.ExternalParameters, errors.Join(
		compare(sumsFile, listed, have), compare(provenanceFile, proven, have))
}

// compare returns an error that names the files which differ from those that list has.
func compare(list string, want, have sums) error {
	var all []error
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if have[name] == "" {
			all = append(all, fmt.Errorf("%s is missing, and %s lists it", name, list))
		} else if have[name] != want[name] {
			all = append(all, fmt.Errorf("%s has the SHA-256 digest %s, want %s of %s", name, have[name], want[name], list))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(have)) {
		if want[name] == "" {
			all = append(all, fmt.Errorf("%s is not listed in %s", name, list))
		}
	}
	return errors.Join(all...)
}

// verifyBlobs checks that the blobs of OCI layouts have the digests that are their names.
func verifyBlobs(have sums) error {
	for name, sum := range have {
		if strings.Contains(name, "/blobs/sha256/") && path.Base(name) != sum {
			return fmt.Errorf("%s has the digest %s", name, sum)
		}
	}
	return nil
}

// verifyKrew checks that the manifests of the plugins have the digests of the archives.
func verifyKrew(dir string, have sums) error {
	for name := range have {
		if !strings.HasPrefix(name, "krew/") {
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		var plugin struct {
			Spec struct {
				Platforms []struct{ URI, SHA256 string }
			}
		}
		if err := yaml.Unmarshal(data, &plugin); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		for _, p := range plugin.Spec.Platforms {
			if archive := path.Base(p.URI); p.SHA256 == "" || have[archive] != p.SHA256 {
				return fmt.Errorf("%s has the digest %q for %s, want %q", name, p.SHA256, archive, have[archive])
			}
		}
	}
	return nil
}

// verifyArchives checks the programs in the archives.
func verifyArchives(dir string, have sums, version string) error {
	for name := range have {
		rest, isArchive := strings.CutPrefix(name, "storage-controller_"+version+"_")
		if !isArchive || strings.HasSuffix(name, ".cdx.json") {
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		target, suffix, _ := strings.Cut(rest, ".")
		p := parse(target)
		var program []byte
		if suffix == "zip" {
			program, err = fromZip(data, p.program())
		} else {
			program, err = fromTar(data, p.program())
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := verifyProgram(dir, name, p, program, 0); err != nil {
			return err
		}
	}
	return nil
}

func fromZip(data []byte, name string) ([]byte, error) {
	r, err := zip.NewReader(bytes.NewReader(data), int64(len(data)))
	if err != nil {
		return nil, err
	}
	return fs.ReadFile(r, name)
}

// fromTar returns a file of an archive. An entry that krew cannot extract is an error.
func fromTar(data []byte, name string) (content []byte, err error) {
	z, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		switch {
		case errors.Is(err, io.EOF) && content != nil:
			return content, nil
		case err != nil:
			return nil, fmt.Errorf("no file %s: %w", name, err)
		case h.Typeflag != tar.TypeReg && h.Typeflag != tar.TypeDir:
			return nil, fmt.Errorf("%s is neither a file nor a directory: krew cannot extract it", h.Name)
		case h.Name == name:
			if content, err = io.ReadAll(r); err != nil {
				return nil, err
			}
		}
	}
}

// verifyProgram checks that program is one for p, and that the SBOM of its artifact lists its modules and extra others.
func verifyProgram(dir, artifact string, p platform, program []byte, extra int) error {
	info, err := buildinfo.Read(bytes.NewReader(program))
	if err != nil {
		return fmt.Errorf("%s: %w", artifact, err)
	}
	built := map[string]string{}
	for _, s := range info.Settings {
		built[s.Key] = s.Value
	}
	if got := (platform{built["GOOS"], built["GOARCH"], strings.HasPrefix(built["GOFIPS140"], fipsModule)}); got != p {
		return fmt.Errorf("%s has a program for %s", artifact, got)
	}
	f, err := os.Open(filepath.Join(dir, artifact+".cdx.json"))
	if err != nil {
		return err
	}
	defer f.Close()
	var bom cdx.BOM
	if err := cdx.NewBOMDecoder(f, cdx.BOMFileFormatJSON).Decode(&bom); err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	listed := map[string]bool{}
	for _, c := range *bom.Components {
		listed[c.PackageURL] = true
	}
	want := components(info, nil)
	for _, c := range want {
		if !listed[c.PackageURL] {
			return fmt.Errorf("%s does not list %s", f.Name(), c.PackageURL)
		}
	}
	if len(listed) != len(want)+extra {
		return fmt.Errorf("%s lists %d components, want %d", f.Name(), len(listed), len(want)+extra)
	}
	return nil
}

// verifyImages checks the images, and starts those for this machine.
func verifyImages(ctx context.Context, dir, version string) error {
	index, err := layout.ImageIndexFromPath(filepath.Join(dir, "images"))
	if err != nil {
		return err
	}
	if err := validate.Index(index); err != nil {
		return fmt.Errorf("images: %w", err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return err
	}
	names := map[string]bool{}
	for _, m := range manifest.Manifests {
		ref := m.Annotations[refName]
		name, tagged, _ := strings.Cut(ref, ":")
		fips := tagged == tag(version, true)
		if tagged != tag(version, fips) {
			return fmt.Errorf("images: %s has the tag %q, want %q", name, tagged, version)
		}
		names[ref] = true
		multi, err := index.ImageIndex(m.Digest)
		if err != nil {
			return fmt.Errorf("image %s: %w", name, err)
		}
		list, err := multi.IndexManifest()
		if err != nil {
			return fmt.Errorf("image %s: %w", name, err)
		}
		for _, one := range list.Manifests {
			img, err := multi.Image(one.Digest)
			if err != nil {
				return fmt.Errorf("image %s: %w", name, err)
			}
			if err := verifyImage(ctx, dir, name, version, img, fips); err != nil {
				return fmt.Errorf("image %s for %s: %w", name, one.Platform, err)
			}
		}
	}
	for _, want := range images {
		for _, fips := range []bool{false, true} {
			if ref := want.name + ":" + tag(version, fips); !names[ref] {
				return fmt.Errorf("images: there is none of %s", ref)
			}
		}
	}
	return nil
}

// verifyImage checks the program of an image, and starts it if it is for this machine. A program for FIPS 140-3 then tests its module.
func verifyImage(ctx context.Context, dir, name, version string, img v1.Image, fips bool) (err error) {
	config, err := img.ConfigFile()
	if err != nil {
		return err
	}
	root, err := os.MkdirTemp("", "release-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(root)) }()
	if err := unpack(img, root); err != nil {
		return err
	}
	program, err := os.ReadFile(filepath.Join(root, images[0].name))
	if err != nil {
		return err
	}
	p := platform{config.OS, config.Architecture, fips}
	if err := verifyProgram(dir, "images_"+p.String(), p, program, 1); err != nil { // 1: the certificates
		return err
	}
	if len(config.Config.Entrypoint) != 1 || config.Config.Entrypoint[0] != "/"+name {
		return fmt.Errorf("the entrypoint is %q", config.Config.Entrypoint)
	}
	for _, name := range []string{name, topolvmController} {
		program := filepath.Join(root, name)
		if _, err := os.Stat(program); err != nil {
			return err
		}
		if p.os != runtime.GOOS || p.arch != runtime.GOARCH {
			continue
		}
		cmd := exec.CommandContext(ctx, program, "--version")
		if fips {
			cmd.Env = []string{"GODEBUG=fips140=only"}
		}
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s --version: %w: %s", name, err, out)
		}
		if !strings.Contains(string(out), version) {
			return fmt.Errorf("%s --version prints %q, want %s in it", name, out, version)
		}
	}
	return nil
}

// unpack writes the root file system of img to dir.
func unpack(img v1.Image, dir string) error {
	files := mutate.Extract(img)
	defer files.Close()
	root, err := os.OpenRoot(dir) // no entry can leave it
	if err != nil {
		return err
	}
	defer root.Close()
	for r := tar.NewReader(files); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch h.Typeflag {
		case tar.TypeDir:
			err = root.MkdirAll(strings.TrimSuffix(h.Name, "/"), 0o755)
		case tar.TypeSymlink:
			err = root.Symlink(h.Linkname, h.Name)
		case tar.TypeReg:
			var content []byte
			if content, err = io.ReadAll(r); err == nil {
				err = root.WriteFile(h.Name, content, fs.FileMode(h.Mode).Perm())
			}
		}
		if err != nil {
			return fmt.Errorf("%s: %w", h.Name, err)
		}
	}
}
