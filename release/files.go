// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// file is an entry of an archive or a layer.
type file struct {
	name    string // with slashes
	content []byte
	mode    fs.FileMode // with fs.ModeDir or fs.ModeSymlink
	target  string      // of a link
}

// tarball packs files in their order. Owner is root, and all times are at.
func tarball(files []file, at time.Time) ([]byte, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Mode: int64(f.mode.Perm()), Size: int64(len(f.content)), ModTime: at, Typeflag: tar.TypeReg,
			Linkname: f.target, Format: tar.FormatUSTAR}
		switch {
		case f.mode.IsDir():
			h.Typeflag = tar.TypeDir
		case f.mode&fs.ModeSymlink != 0:
			h.Typeflag = tar.TypeSymlink
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.content); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return buf.Bytes(), err
}

// gzipped compresses data. The header has neither a name nor a time.
func gzipped(data []byte) ([]byte, error) {
	var buf bytes.Buffer
	w, err := gzip.NewWriterLevel(&buf, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(data); err != nil {
		return nil, err
	}
	err = w.Close()
	return buf.Bytes(), err
}

// zipped packs regular files.
func zipped(files []file, at time.Time) ([]byte, error) {
	var buf bytes.Buffer
	w := zip.NewWriter(&buf)
	for _, f := range files {
		h := &zip.FileHeader{Name: f.name, Method: zip.Deflate, Modified: at}
		h.SetMode(f.mode)
		entry, err := w.CreateHeader(h)
		if err != nil {
			return nil, err
		}
		if _, err := entry.Write(f.content); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return buf.Bytes(), err
}

// sumsFile lists the SHA-256 digests of all other files, as sha256sum writes and checks it.
const sumsFile = "SHA256SUMS"

// sums maps paths, with slashes and relative to a directory, to SHA-256 digests in hexadecimal.
type sums map[string]string

// digests returns those of all files below dir but sumsFile.
func digests(dir string) (sums, error) {
	all := sums{}
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil || name == sumsFile {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		h := sha256.New()
		if _, err := io.Copy(h, f); err != nil {
			return err
		}
		all[filepath.ToSlash(name)] = hex.EncodeToString(h.Sum(nil))
		return nil
	})
	return all, err
}

func (s sums) String() string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(s)) {
		fmt.Fprintf(&b, "%s  %s\n", s[name], name)
	}
	return b.String()
}

// subjects returns the files for a statement, without the statement itself.
func (s sums) subjects() []subject {
	var all []subject
	for _, name := range slices.Sorted(maps.Keys(s)) {
		if name != provenanceFile {
			all = append(all, subject{Name: name, Digest: map[string]string{"sha256": s[name]}})
		}
	}
	return all
}
