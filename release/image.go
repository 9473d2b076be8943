// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/pem"
	"io"
	"io/fs"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	tarlayer "github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/crypto/x509roots/fallback/bundle"
)

// refName annotates the images of a layout with their name and tag (OCI image specification, annotations).
const refName = "org.opencontainers.image.ref.name"

// images lists the images and their users. Those of the sidecars run as root, as the reference images do: the
// socket of the driver usually belongs to root.
var images = []struct{ name, user string }{
	{"storage-controller", "65532:65532"},
	{"csi-provisioner", "0:0"}, {"csi-attacher", "0:0"}, {"csi-resizer", "0:0"}, {"csi-snapshotter", "0:0"}, {"livenessprobe", "0:0"},
}

// images writes one layout with two multi-architecture images for each name, one of them for FIPS 140-3. The images of a platform have
// the same layers and differ in their entrypoint and user.
func (r *release) images() error {
	path, err := layout.Write(filepath.Join(r.out, "images"), empty.Index)
	if err != nil {
		return err
	}
	layers := map[platform]v1.Layer{}
	for _, p := range r.platforms {
		if p.os != "linux" {
			continue
		}
		if layers[p], err = r.layer(p); err != nil {
			return err
		}
		if err := r.programSBOM("images_"+p.String(), p, caCertificates()); err != nil {
			return err
		}
	}
	for _, image := range images {
		for _, fips := range []bool{false, true} {
			index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
			for _, p := range r.platforms {
				if p.os != "linux" || p.fips != fips {
					continue
				}
				img, err := r.image(p, layers[p], image.name, image.user)
				if err != nil {
					return err
				}
				index = mutate.AppendManifests(index, mutate.IndexAddendum{
					Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: p.os, Architecture: p.arch}}})
			}
			name := layout.WithAnnotations(map[string]string{refName: image.name + ":" + tag(r.version, fips)})
			if err := path.AppendIndex(index, name); err != nil {
				return err
			}
		}
	}
	return nil
}

// image returns one that starts layer's program under name.
func (r *release) image(p platform, layer v1.Layer, name, user string) (v1.Image, error) {
	labels := map[string]string{
		"org.opencontainers.image.title": name, "org.opencontainers.image.version": r.version,
		"org.opencontainers.image.revision": r.commit, "org.opencontainers.image.source": r.home,
		"org.opencontainers.image.licenses": "Apache-2.0",
	}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err := mutate.Append(img, mutate.Addendum{Layer: layer, History: v1.History{
		Created: v1.Time{Time: r.time}, CreatedBy: "release build", Comment: r.commit}})
	if err != nil {
		return nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Created = p.os, p.arch, v1.Time{Time: r.time}
	config.Config = v1.Config{Entrypoint: []string{"/" + name}, User: user, Labels: labels}
	if img, err = mutate.ConfigFile(img, config); err != nil {
		return nil, err
	}
	return mutate.Annotations(img, labels).(v1.Image), nil
}

// layer returns the root file system: the program, links to it, certificates and licences.
func (r *release) layer(p platform) (v1.Layer, error) {
	files, err := r.programFiles(p, images[0].name)
	if err != nil {
		return nil, err
	}
	for _, image := range images[1:] {
		files = append(files, link(image.name))
	}
	files = append(files, link(topolvmController))
	for _, dir := range []string{"etc/", "etc/ssl/", "etc/ssl/certs/"} {
		files = append(files, file{name: dir, mode: fs.ModeDir | 0o755})
	}
	data, err := tarball(append(files, file{name: "etc/ssl/certs/ca-certificates.crt", content: certificates(), mode: 0o644}), r.time)
	if err != nil {
		return nil, err
	}
	return tarlayer.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil },
		tarlayer.WithMediaType(types.OCILayer), tarlayer.WithCompressedCaching)
}

// topolvmController is a link without an image of its own: the containers of a pod of TopoLVM run one image with several programs.
const topolvmController = "topolvm-controller"

// link returns a link to the program.
func link(name string) file {
	return file{name: name, mode: fs.ModeSymlink | 0o777, target: images[0].name}
}

// certificates returns Mozilla's certificate authorities in PEM, without those that it distrusts for new certificates: a
// file cannot say so.
func certificates() []byte {
	var b bytes.Buffer
	for root := range bundle.Roots() {
		if root.Constraint == nil {
			b.Write(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}))
		}
	}
	return b.Bytes()
}
