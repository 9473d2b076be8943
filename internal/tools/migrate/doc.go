// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package migrate rewrites the manifest of a CSI driver: storage-controller replaces the
// sidecars csi-provisioner, csi-attacher, csi-resizer and csi-snapshotter, livenessprobe beside them, and
// topolvm-controller. It reads and writes text and does nothing else.
//
// Lines outside of a replaced container are kept byte for byte: the parsed tree locates the
// containers, and only their lines are replaced. A document in which that is not possible,
// such as JSON, is encoded from its tree.
//
//	text ─split─► documents ─find─► sources (one per sidecar) ─group─► containers ─render─► text
//
// The new container runs "all" with a section for each sidecar: its arguments as they are, then the flags whose default differs.
// Only the command topolvm has no sections. The caller passes the known flags in [Tables], so that the result always matches the
// program.
package migrate
