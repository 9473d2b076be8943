// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// kustomize writes what "kubectl kustomize" does, with its restrictions: a kustomization
// cannot read files outside of its directory.
func kustomize(dir string, out io.Writer) error {
	objects, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		return fmt.Errorf("kustomization %s: %w", dir, err)
	}
	text, err := objects.AsYaml()
	if err != nil {
		return fmt.Errorf("kustomization %s: %w", dir, err)
	}
	_, err = out.Write(text)
	return err
}
