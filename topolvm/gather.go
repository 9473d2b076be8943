// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"context"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// call is one running CSI call, with what it has read and written.
type call struct {
	s       *Service
	c       *caches
	changed chan struct{} // has an element after a change of one of keys
	keys    []waitKey

	// known has the IDs that the call has found. If the cache does not have one any more, its LogicalVolume was deleted.
	known map[string]bool
	// seen has the LogicalVolumes that the API server has returned to the call.
	seen map[types.UID]seen
	// nodes has the Nodes by topology value that the cache lacks, as read from the API server; nil means that there is none.
	nodes map[string]*corev1.Node
	// sources has the sources by name that were read from the API server; nil means that there is none.
	sources map[string]*LogicalVolume
	// absent is the name of a LogicalVolume that the API server did not have; empty means none.
	absent string
	// awaited is the LogicalVolume that topolvm-node works on for the call; empty means none yet.
	awaited types.UID
	// before is the status of an expansion at since, the time of its request.
	before *Status
	since  time.Time
	waited time.Duration
}

// seen is what a call knows about a LogicalVolume from its requests.
type seen struct {
	read    bool // it has read or created it. Otherwise the cache may still have a deleted one
	began   bool // it had no LVM volume then
	removed bool // the call has requested its deletion
}

// follow makes each change of key end a wait. Call it before reading the cache.
func (k *call) follow(key waitKey) {
	if !slices.Contains(k.keys, key) {
		k.keys = append(k.keys, key)
		k.c.waits.add(key, k.changed)
	}
}

// unfollow ends all follow.
func (k *call) unfollow() {
	for _, key := range k.keys {
		k.c.waits.remove(key, k.changed)
	}
}

// volumeState is what a decision knows about a LogicalVolume and its Node.
type volumeState struct {
	seen
	now     time.Time
	lv      *LogicalVolume // the newest known version; nil: none
	awaited types.UID
	node    nodeState
	before  *Status
	since   time.Time
}

// terminating reports whether the LogicalVolume is being deleted. The cache may not show yet what the call has requested.
func (s volumeState) terminating() bool { return s.lv.terminating() || s.removed }

// state returns the state of lv, which may be nil.
func (k *call) state(lv *LogicalVolume) volumeState {
	s := volumeState{now: k.s.now(), lv: lv, awaited: k.awaited, before: k.before, since: k.since}
	if lv != nil {
		s.seen, s.node = k.seen[lv.UID], k.node(lv.Spec.NodeName)
	}
	return s
}

// volume returns the newest known version of the LogicalVolume, or nil.
func (k *call) volume(name string) *LogicalVolume {
	k.follow(volumeKey(name))
	lv, _ := k.c.lvs.Get(name)
	return lv
}

// node returns the Node with a topology value.
func (k *call) node(value string) nodeState {
	k.follow(nodeKey(value))
	n := nodeState{value: value, object: k.c.node(value)}
	if n.object == nil {
		n.object, n.read = k.nodes[value]
	}
	return n
}

// find returns the LogicalVolume with that ID, or nil if there is none.
func (k *call) find(ctx context.Context, id string) (*LogicalVolume, error) {
	about := subject{lv: "with ID " + id}
	found := k.c.withID(id)
	switch {
	case len(found) > 1:
		return nil, about.errorf(codes.Internal, "%s and %s have the same volume ID. Correct status.volumeID of one of them",
			min(found[0].Name, found[1].Name), max(found[0].Name, found[1].Name))
	case len(found) == 1:
		k.known[id] = true
		return k.volumeWithID(found[0].Name, id), nil
	case k.known[id]:
		return nil, nil
	}
	if _, deleted := k.c.deletions.name(id); deleted {
		return nil, nil
	}
	name, err := k.s.lookup.name(ctx, id)
	if err != nil {
		return nil, apiError(ctx, about, "listing the LogicalVolumes", err)
	}
	if name == "" {
		return nil, nil
	}
	if err := k.readVolume(ctx, name); err != nil {
		return nil, err
	}
	return k.volumeWithID(name, id), nil
}

// volumeWithID returns the newest known version of the LogicalVolume with that name, or nil if it has another ID.
func (k *call) volumeWithID(name, id string) *LogicalVolume {
	lv := k.volume(name)
	if lv == nil || !lv.HasID(id) {
		return nil
	}
	return lv
}

// creationState is what the decision about a creation knows.
type creationState struct {
	volumeState
	// sourceName is the name of the source in the request, empty if it is not known any more.
	sourceName string
	// source is the source of the LogicalVolume, or of the request if there is none; nil means that it does not exist.
	source *LogicalVolume
	// sourceRead reports that the API server has confirmed this version of source, or that there is none.
	sourceRead bool
	// place is the topology value and placeErr why there is none, if there is no LogicalVolume. node is its Node then.
	place    string
	placeErr error
	// absent reports that the API server has confirmed that there is no LogicalVolume.
	absent bool
}

// gatherCreation returns the state of a creation.
func (k *call) gatherCreation(ctx context.Context, r creation) (s creationState, err error) {
	lv := k.volume(r.name)
	s.volumeState = k.state(lv)
	if lv != nil {
		return k.gatherSource(s, r), nil
	}
	if r.sourceID != "" {
		s.source, err = k.find(ctx, r.sourceID)
		if err != nil {
			return s, err
		}
	}
	s.absent = k.absent == r.name
	s.place, s.placeErr = place(k.s.names, r, s.source, k.c.nodes.List)
	if s.placeErr == nil {
		s.node = k.node(s.place)
	}
	return s, nil
}

// gatherSource adds the source of an existing LogicalVolume.
func (k *call) gatherSource(s creationState, r creation) creationState {
	if r.sourceID != "" {
		s.sourceName = k.sourceName(s.lv, r.sourceID)
	}
	if name := s.lv.Spec.Source; name != "" && !s.lv.exists() {
		s.source = k.volume(name)
		live, read := k.sources[name]
		s.sourceRead = read && versionOf(live) == versionOf(s.source)
	}
	return s
}

// sourceName returns the name of the LogicalVolume with the ID that a request for lv names as its source. If that is not known, it returns
// "", or the ID if the source of lv exists: that has another ID, unless it is a later one of its name.
func (k *call) sourceName(lv *LogicalVolume, id string) string {
	if found := k.c.withID(id); len(found) > 0 {
		return found[0].Name
	}
	if name, deleted := k.c.deletions.name(id); deleted {
		return name
	}
	source, exists := k.c.lvs.Get(lv.Spec.Source)
	if exists && !source.HasID(id) && !lv.CreationTimestamp.Before(&source.CreationTimestamp) {
		return id
	}
	return ""
}

// versionOf returns the resourceVersion of lv, or "" if it is nil.
func versionOf(lv *LogicalVolume) string {
	if lv == nil {
		return ""
	}
	return lv.ResourceVersion
}
