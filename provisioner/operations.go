// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// operations holds the operation of each claim. It is safe for use by several goroutines.
type operations struct {
	// sourceReleased is called when an operation that copied a source has ended.
	sourceReleased func(*volumerules.Source)

	mu      sync.Mutex
	byClaim map[claimKey]*operation
	copies  map[volumerules.Source]int // operations in progress by the source they copy
	// byHandle has the claim for which CreateVolume has returned a volume first, until a PersistentVolume names the volume, or no
	// volume is left.
	byHandle map[string]claimKey
}

func newOperations() *operations {
	return &operations{sourceReleased: func(*volumerules.Source) {}, byClaim: map[claimKey]*operation{},
		copies: map[volumerules.Source]int{}, byHandle: map[string]claimKey{}}
}

// errBug follows a state that no input may lead to.
var errBug = errors.New("this is a bug of storage-controller")

// get returns a copy of the operation of a claim; the zero value if there is none.
func (o *operations) get(key claimKey) operation {
	o.mu.Lock()
	defer o.mu.Unlock()
	if op := o.byClaim[key]; op != nil {
		return *op
	}
	return operation{}
}

// transition changes the operation of a claim, which it creates in stage pending if there
// is none. An illegal transition changes nothing and is an error.
func (o *operations) transition(key claimKey, t transition) (before, after stage, err error) {
	if t.release != nil {
		defer t.release()
	}
	before, after, released, err := o.record(key, t)
	if released != nil {
		o.sourceReleased(released)
	}
	return before, after, err
}

// record changes the operation, and returns the source that it has stopped copying.
func (o *operations) record(key claimKey, t transition) (before, after stage, released *volumerules.Source, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	op := o.byClaim[key]
	if op == nil {
		op = &operation{began: time.Now()}
	}
	before = op.stage
	after, legal := transitions[t.name][before]
	if !legal {
		return before, before, nil, fmt.Errorf("illegal transition %q of claim %s in stage %s: %w", t.name, key, before, errBug)
	}
	source, handle := op.source, op.handle()
	t.set(op)
	op.stage = after
	o.byClaim[key] = op
	if now := op.handle(); now != handle {
		o.hold(key, handle, now)
	}
	return before, after, o.countCopies(source, before, op), nil
}

// hold records that the volume that CreateVolume has returned for a claim has another handle than before; "": none. The caller
// holds mu.
func (o *operations) hold(key claimKey, before, now string) {
	if o.byHandle[before] == key {
		delete(o.byHandle, before)
	}
	if _, held := o.byHandle[now]; now != "" && !held {
		o.byHandle[now] = key
	}
}

// holderOf returns the claim for which CreateVolume has returned the volume with this handle, without a PersistentVolume yet.
func (o *operations) holderOf(handle string) (holder claimKey, held bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	holder, held = o.byHandle[handle]
	return holder, held
}

// countCopies updates the number of operations that copy a source, and returns the source
// that an operation has stopped copying. The caller holds mu.
func (o *operations) countCopies(source *volumerules.Source, before stage, op *operation) (released *volumerules.Source) {
	if op.source != nil && op.stage.inProgress() && !before.inProgress() {
		o.copies[*op.source]++
	}
	if source == nil || op.stage.inProgress() {
		return nil
	}
	if o.copies[*source]--; o.copies[*source] == 0 {
		delete(o.copies, *source)
	}
	return source
}

// forget drops the operation of a claim that is bound or deleted, unless a volume is in
// progress at the driver.
func (o *operations) forget(key claimKey) (inProgress bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if op := o.byClaim[key]; op != nil && op.stage.inProgress() {
		return true
	}
	delete(o.byClaim, key)
	return false
}

// announce reports whether the event Provisioning is still to be sent for a claim, and
// records that it is.
func (o *operations) announce(key claimKey) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	op := o.byClaim[key]
	if op == nil || op.announced {
		return false
	}
	op.announced = true
	return true
}

// allowRetry ends the delay of a request that is infeasible, or that the driver will call so.
func (o *operations) allowRetry(key claimKey) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if op := o.byClaim[key]; op != nil {
		op.infeasible, op.outdated = nil, op.stage.inProgress()
	}
}

// pvDeleted records that the PersistentVolume of a claim was deleted, and reports whether the claim must be read again.
// exists reports whether the cache has the claim without a volume: an earlier leader may have created the PersistentVolume.
func (o *operations) pvDeleted(key claimKey, exists bool) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	op := o.byClaim[key]
	if op == nil && exists {
		op = &operation{began: time.Now()}
		o.byClaim[key] = op
	}
	if op == nil {
		return false
	}
	// In stage created, the response to its creation has not arrived yet.
	op.pvDeleted = op.stage == created || !op.stage.inProgress()
	return op.pvDeleted
}

// copying returns how many operations copy a source.
func (o *operations) copying(source volumerules.Source) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.copies[source]
}

// takeTopologyWaiters returns the claims for which no topology was found, once each.
func (o *operations) takeTopologyWaiters() (waiters []claimKey) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for key, op := range o.byClaim {
		if op.awaitsTopology {
			op.awaitsTopology = false
			waiters = append(waiters, key)
		}
	}
	return waiters
}

// sameVolume returns another claim whose volume has the name or the handle of the volume of rejected.
func (o *operations) sameVolume(key claimKey, rejected operation) (other claimKey, found bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for other, op := range o.byClaim {
		sameName := op.stage.inProgress() && op.plan.VolumeName == rejected.plan.VolumeName
		sameHandle := op.csiSource != nil && op.csiSource.VolumeHandle == rejected.csiSource.VolumeHandle
		if other != key && (sameName || sameHandle) {
			return other, true
		}
	}
	return claimKey{}, false
}

// in returns copies of the operations in a stage.
func (o *operations) in(s stage) map[claimKey]operation {
	o.mu.Lock()
	defer o.mu.Unlock()
	found := map[claimKey]operation{}
	for key, op := range o.byClaim {
		if op.stage == s {
			found[key] = *op
		}
	}
	return found
}

// unresolved adds to indeterminateClaims the UIDs of claims whose volume may exist, and removes those whose volume exists.
// It returns the number of volumes without a PersistentVolume.
func (o *operations) unresolved(indeterminateClaims map[types.UID]struct{}) (unsaved int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for key, op := range o.byClaim {
		switch op.stage {
		case created:
			unsaved++
			delete(indeterminateClaims, key.UID)
		case indeterminate, rejected:
			indeterminateClaims[key.UID] = struct{}{}
		}
	}
	return unsaved
}
