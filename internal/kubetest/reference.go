// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"context"
	"io"
)

var (
	provisionerProgram = program{name: "csi-provisioner", module: "reference", title: "csi-provisioner",
		pkg: "github.com/kubernetes-csi/external-provisioner/v6/cmd/csi-provisioner", takes: "five minutes"}
	attacherProgram = program{name: "csi-attacher", module: "reference", title: "csi-attacher",
		pkg: "github.com/kubernetes-csi/external-attacher/v4/cmd/csi-attacher", takes: "one minute"}
)

// BuildReference returns the paths of csi-provisioner and csi-attacher. It builds them, which takes some
// minutes, unless the cache has them. progress, if not nil, receives messages.
func BuildReference(ctx context.Context, progress io.Writer) (provisioner, attacher string, err error) {
	if provisioner, err = provisionerProgram.build(ctx, progress); err != nil {
		return "", "", err
	}
	attacher, err = attacherProgram.build(ctx, progress)
	return provisioner, attacher, err
}
