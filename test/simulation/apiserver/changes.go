// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"slices"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Change is one write.
type Change struct {
	Version  uint64
	Resource schema.GroupVersionResource
	Key      string         // of the object, unique in the resource
	Object   runtime.Object // after the write; nil: deleted. It must not be modified
}

// Changes returns the writes after version, which must not be compacted, the oldest first.
func (s *Server) Changes(version uint64) []Change {
	s.mu.Lock()
	defer s.mu.Unlock()
	var changes []Change
	for _, c := range slices.Backward(s.log) {
		if c.version <= version {
			break
		}
		changes = append(changes, Change{c.version, c.res.gvr, c.key, c.after})
	}
	slices.Reverse(changes)
	return changes
}
