// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"maps"
	"slices"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"
)

// pair identifies the unit of work: a StorageClass in a segment. An object whose selector
// matches no segment is a pair of its own.
type pair struct {
	Class        string
	Segment      segment
	UnmatchedUID types.UID // of an object that belongs to no segment; else empty
}

// String returns the pair for logs and /statusz.
func (p pair) String() string {
	if p.UnmatchedUID != "" {
		return "object " + string(p.UnmatchedUID)
	}
	return p.Class + " in " + string(p.Segment)
}

// pairOf returns the pair of obj. An empty selector matches every node, also when the API
// server returns its labels as nil; a nil selector matches none.
func pairOf(obj *storagev1.CSIStorageCapacity) pair {
	if t := obj.NodeTopology; t != nil && len(t.MatchExpressions) == 0 {
		return pair{Class: obj.StorageClassName, Segment: segmentOf(t.MatchLabels)}
	}
	return pair{UnmatchedUID: obj.UID}
}

// pairState is the input of [decide].
type pairState struct {
	unmatched bool                            // see pair.UnmatchedUID
	class     *storagev1.StorageClass         // nil: deleted, or not published
	hasNodes  bool                            // in the segment
	removeAt  time.Time                       // without nodes: when the objects are to be deleted
	objects   []*storagev1.CSIStorageCapacity // by name
	schedule
	now time.Time
}

// gather reads the state of p and its objects, including own writes that the watch has not
// delivered yet.
func (t *term) gather(p pair) pairState {
	names, s := t.state.read(p)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if obj, ok := t.published.Get(t.c.deps.Namespace + "/" + name); ok && pairOf(obj) == p {
			s.objects = append(s.objects, obj)
		}
	}
	return s
}

// dropMissing removes the objects of p that were deleted or replaced without an event, for
// example because an update returned NotFound.
func (t *term) dropMissing(p pair) {
	names, _ := t.state.read(p)
	for name, uid := range names {
		if obj, ok := t.published.Get(t.c.deps.Namespace + "/" + name); !ok || pairOf(obj) != p {
			t.state.objectDeleted(p, name, uid)
		}
	}
}
