// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"errors"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// errBug follows a state that no input may lead to.
var errBug = errors.New("this is a bug of storage-controller")

// operations holds the CreateVolume of each claim, with indexes. It is safe for use by several goroutines.
type operations struct {
	*intent.Ledger[claimKey, operation]
	// sourceReleased is called when a call that copied a source has ended. It must not call operations.
	sourceReleased func(*volumerules.Source)

	mu     sync.Mutex                 // after the lock of the ledger
	copies map[volumerules.Source]int // calls in progress by the source they copy
	// byHandle has the claim for which CreateVolume has returned a volume first, until a PersistentVolume names the volume, or no
	// volume is left.
	byHandle map[string]claimKey
}

func newOperations() *operations {
	o := &operations{
		Ledger:         intent.NewLedger[claimKey, operation](election.MayCall),
		sourceReleased: func(*volumerules.Source) {}, copies: map[volumerules.Source]int{}, byHandle: map[string]claimKey{},
	}
	o.OnChange(o.changed)
	return o
}

// changed updates the indexes.
func (o *operations) changed(key claimKey, before, after call) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if was, is := handleOf(before), handleOf(after); was != is {
		if o.byHandle[was] == key {
			delete(o.byHandle, was)
		}
		if _, held := o.byHandle[is]; is != "" && !held {
			o.byHandle[is] = key
		}
	}
	switch was, is := sourceOf(before), sourceOf(after); {
	case was == nil && is != nil:
		o.copies[*is]++
	case was != nil && is == nil:
		o.copies[*was]--
		if o.copies[*was] == 0 {
			delete(o.copies, *was)
		}
		o.sourceReleased(was)
	}
}

// handleOf returns the handle of the volume that CreateVolume has returned and no PersistentVolume names yet; "" for none.
func handleOf(c call) string {
	if !c.State.InProgress() || c.Payload.csiSource == nil {
		return ""
	}
	return c.Payload.csiSource.VolumeHandle
}

// sourceOf returns the source that a call copies; nil for none.
func sourceOf(c call) *volumerules.Source {
	if !c.State.InProgress() {
		return nil
	}
	return c.Payload.source
}

// holderOf returns the claim for which CreateVolume has returned the volume with this handle, without a PersistentVolume yet.
func (o *operations) holderOf(handle string) (holder claimKey, held bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	holder, held = o.byHandle[handle]
	return holder, held
}

// copying returns how many calls copy a source.
func (o *operations) copying(source volumerules.Source) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.copies[source]
}

// announce reports whether the event Provisioning is still to be sent for a claim, and
// records that it is.
func (o *operations) announce(key claimKey) (first bool) {
	o.Update(key, func(_ intent.State, op *operation) { first, op.announced = !op.announced, true })
	return first
}

// allowRetry ends the delay of a request that is infeasible, or that the driver will call so.
func (o *operations) allowRetry(key claimKey) {
	o.Update(key, func(s intent.State, op *operation) { op.infeasible, op.outdated = nil, s.InProgress() })
}

// pvDeleted records that the PersistentVolume of a claim was deleted, and reports whether the claim must be read again.
// exists reports whether the cache has the claim without a volume: an earlier leader may have created the PersistentVolume.
func (o *operations) pvDeleted(key claimKey, exists bool) (read bool) {
	known := o.Update(key, func(s intent.State, op *operation) {
		// Of an answered call, the response to its creation has not arrived yet.
		read = s == intent.Answered || !s.InProgress()
		op.pvDeleted = read
	})
	if !known && exists {
		_, _, _ = o.Apply(key, change{Set: func(op *operation) { op.pvDeleted = true }}) // no event: never illegal
		return true
	}
	return read
}

// takeTopologyWaiters returns the claims for which no topology was found, once each.
func (o *operations) takeTopologyWaiters() (waiters []claimKey) {
	for key, c := range o.All() {
		if c.Payload.awaitsTopology {
			waiters = append(waiters, key)
		}
	}
	for _, key := range waiters {
		o.Update(key, func(_ intent.State, op *operation) { op.awaitsTopology = false })
	}
	return waiters
}

// sameVolume returns another claim whose volume has the name or the handle of the volume of rejected.
func (o *operations) sameVolume(key claimKey, rejected operation) (other claimKey, found bool) {
	for other, c := range o.All() {
		sameName := c.State.InProgress() && c.Payload.plan.VolumeName == rejected.plan.VolumeName
		source := c.Payload.csiSource
		if other != key && (sameName || source != nil && source.VolumeHandle == rejected.csiSource.VolumeHandle) {
			return other, true
		}
	}
	return claimKey{}, false
}

// in returns the calls in a state.
func (o *operations) in(s intent.State) map[claimKey]call {
	found := map[claimKey]call{}
	for key, c := range o.All() {
		if c.State == s {
			found[key] = c
		}
	}
	return found
}

// unresolved adds to indeterminateClaims the UIDs of claims whose volume may exist, and removes those whose volume exists.
// It returns the number of volumes without a PersistentVolume.
func (o *operations) unresolved(indeterminateClaims map[types.UID]struct{}) (unsaved int) {
	for key, c := range o.All() {
		switch c.State {
		case intent.Answered:
			unsaved++
			delete(indeterminateClaims, key.UID)
		case intent.Unknown, intent.Undoing:
			indeterminateClaims[key.UID] = struct{}{}
		}
	}
	return unsaved
}
