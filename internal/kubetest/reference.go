// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"context"
	"fmt"
	"io"
)

// sidecars are those that can be built, by name.
var sidecars = map[string]program{
	"csi-provisioner": {module: "reference", pkg: "github.com/kubernetes-csi/external-provisioner/v6/cmd/csi-provisioner",
		takes: "five minutes"},
	"csi-attacher": {module: "reference", pkg: "github.com/kubernetes-csi/external-attacher/v4/cmd/csi-attacher", takes: "one minute"},
	"csi-resizer":  {module: "reference", pkg: "github.com/kubernetes-csi/external-resizer/v2/cmd/csi-resizer", takes: "one minute"},
	"csi-snapshotter": {module: "snapshotcontroller", pkg: "github.com/kubernetes-csi/external-snapshotter/v8/cmd/csi-snapshotter",
		takes: "one minute"},
}

// BuildReference returns the paths of sidecars, in the order of their names. It builds them, which takes some
// minutes, unless the cache has them. progress, if not nil, receives messages.
func BuildReference(ctx context.Context, progress io.Writer, names ...string) (paths []string, err error) {
	for _, name := range names {
		p, known := sidecars[name]
		if !known {
			return nil, fmt.Errorf("no source of %s", name)
		}
		p.name, p.title = name, name
		path, err := p.build(ctx, progress)
		if err != nil {
			return nil, err
		}
		paths = append(paths, path)
	}
	return paths, nil
}
