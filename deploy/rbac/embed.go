// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package rbac embeds the manifests with the permissions of the roles.
package rbac

import "embed"

// Manifests has DIRECTORY/rbac.yaml for each directory.
//
//go:embed */rbac.yaml
var Manifests embed.FS
