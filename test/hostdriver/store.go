// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// entry is a volume or a snapshot. Its data is the directory of its ID. Its metadata
// is a file beside that directory, written last: data without metadata belongs to a call
// that did not finish.
type entry struct {
	ID       string `json:"id"`
	Name     string `json:"name"`
	Size     int64  `json:"size"`
	Snapshot bool   `json:"snapshot,omitempty"`
	Block    bool   `json:"block,omitempty"`
	// Source is the ID of the volume or snapshot that it was made from.
	Source     string            `json:"source,omitempty"`
	Group      string            `json:"group,omitempty"` // of a snapshot
	Parameters map[string]string `json:"parameters,omitempty"`
	Mutable    map[string]string `json:"mutable,omitempty"` // parameters of a VolumeAttributesClass
	Segment    map[string]string `json:"segment,omitempty"`
	Created    int64             `json:"created"` // seconds since 1970
	Number     int               `json:"number"`  // orders lists
	// Published is the nodes that a volume is published to, read-only or not.
	Published map[string]publication `json:"published,omitempty"`

	// target is the path at which this process has published a volume with a single writer, or "".
	target string
}

// unpublished forgets the only writer of e, if it was at target.
func (e *entry) unpublished(target string) {
	if e.target == target {
		e.target = ""
	}
}

type publication struct {
	Readonly bool `json:"readonly"`
	Mode     int  `json:"mode"`
}

// idOf is the ID for a name. It says nothing about the name, so that no name,
// whatever it contains, leads to a path elsewhere.
func idOf(kind, name string) string {
	sum := sha256.Sum256([]byte(name))
	return kind + "-" + hex.EncodeToString(sum[:])[:20]
}

var validID = regexp.MustCompile(`^(vol|snap)-[0-9a-f]{20}$`)

func dataPath(root, id string) string { return filepath.Join(root, id) }
func infoPath(root, id string) string { return filepath.Join(root, id+".json") }

// load reads the entries and removes the data of unfinished calls.
func load(root string) (map[string]*entry, error) {
	if err := os.MkdirAll(root, 0o755); err != nil {
		return nil, err
	}
	files, err := os.ReadDir(root)
	if err != nil {
		return nil, err
	}
	entries := map[string]*entry{}
	for _, f := range files {
		id, isInfo := strings.CutSuffix(f.Name(), ".json")
		if !isInfo || !validID.MatchString(id) {
			continue
		}
		data, err := os.ReadFile(filepath.Join(root, f.Name()))
		if err != nil {
			return nil, err
		}
		e := &entry{}
		if err := json.Unmarshal(data, e); err != nil || e.ID != id {
			return nil, fmt.Errorf("%s is not what this driver wrote: %w", filepath.Join(root, f.Name()), err)
		}
		if e.Published == nil {
			e.Published = map[string]publication{}
		}
		entries[id] = e
	}
	for _, f := range files {
		name := f.Name()
		unfinished := strings.HasSuffix(name, ".tmp") || validID.MatchString(name) && entries[name] == nil
		if unfinished {
			if err := os.RemoveAll(filepath.Join(root, name)); err != nil {
				return nil, err
			}
		}
	}
	return entries, nil
}

// save writes the metadata of e atomically.
func (e *entry) save(root string) error {
	data, err := json.MarshalIndent(e, "", "  ")
	if err != nil {
		return err
	}
	temp := infoPath(root, e.ID) + ".tmp"
	f, err := os.Create(temp)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(temp, infoPath(root, e.ID))
}

// remove deletes the metadata of e first, so that a crash leaves data that load removes.
func (e *entry) remove(root string) error {
	if err := os.Remove(infoPath(root, e.ID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.RemoveAll(dataPath(root, e.ID))
}

// blockPath returns the path of the file that is the device of a block volume.
func (e *entry) blockPath(root string) string { return filepath.Join(dataPath(root, e.ID), blockFile) }

// growData extends the device of a block volume to the size of e.
func (e *entry) growData(root string) error {
	if !e.Block {
		return nil
	}
	return os.Truncate(e.blockPath(root), e.Size)
}

// blockFile is the file in the directory of a block volume that is its device.
const blockFile = "block"

// makeData makes the directory of e, empty or as a copy of that of its source.
func (e *entry) makeData(root string) error {
	path := dataPath(root, e.ID)
	if err := os.RemoveAll(path); err != nil { // of a call that did not finish
		return err
	}
	if err := os.Mkdir(path, 0o755); err != nil {
		return err
	}
	if e.Source != "" {
		if err := os.CopyFS(path, os.DirFS(dataPath(root, e.Source))); err != nil {
			return err
		}
	}
	if e.Block {
		f, err := os.OpenFile(e.blockPath(root), os.O_CREATE|os.O_WRONLY, 0o644)
		if err != nil {
			return err
		}
		return errors.Join(f.Truncate(e.Size), f.Close()) // sparse
	}
	return nil
}
