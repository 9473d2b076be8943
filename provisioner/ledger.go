// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"slices"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

type (
	// call is the CreateVolume of a claim. Its arguments are the ID of the record of the request, whether or not the record is on the
	// claim; empty if the request continues that of an earlier process, whose record has none.
	call = intent.Entry[operation]
	// change is what a step changes of a call.
	change = intent.Change[operation]
)

// stageOf names how far the volume of a claim has come, in logs and on /statusz.
func stageOf(c call) string {
	if c.State == intent.Settled && c.Payload.saved {
		return "pvCreated"
	}
	return map[intent.State]string{
		intent.Idle: "pending", intent.Planned: "requested", intent.Sent: "requested", intent.Unknown: "indeterminate",
		intent.Answered: "created", intent.Undoing: "rejected", intent.Settled: "pending",
	}[c.State]
}

// operation is what the provisioner remembers of a claim from its first request until the claim is bound or deleted. It is lost when
// the process exits or loses its Lease; the next leader continues from the record on the claim.
type operation struct {
	began     time.Time // of the work for the claim
	announced bool      // the event Provisioning was sent

	// Without a call in progress:
	infeasible       *infeasible
	topologyFailures int  // in a row
	awaitsTopology   bool // a change of any Node or CSINode may help
	saved            bool // the call is settled, because the PersistentVolume is created

	// lateRecords are the IDs of all requests for the claim in this term whose record got no response. The API server may still store
	// such a record, also after its request has ended.
	lateRecords []string

	// resumed is the ID of the record that an earlier process has left; empty if there was none.
	resumed string

	// While a call is in progress:
	claim       *corev1.PersistentVolumeClaim // as of the request; it may be deleted by now
	class       *storagev1.StorageClass       // likewise
	request     *csi.CreateVolumeRequest      // with the secrets once they are read
	plan        plan
	source      *volumerules.Source // of a clone or a restored snapshot; else nil
	sourceBytes int64               // see resolvedRefs
	outdated    bool                // an object that the request was prepared from has changed

	handle     string                   // of the volume that CreateVolume has returned
	pv         *corev1.PersistentVolume // for that volume; of a rejected one, to find out whom it belongs to
	pvMayExist bool                     // a request that creates pv failed, perhaps after its effect
	// pvRefused: the API server cannot store pv. CreateVolume is repeated, and its response replaces pv.
	pvRefused    bool
	rejectReason error // why the volume must be deleted

	// pvDeleted: a PersistentVolume of the claim was deleted, of an answered call before the response to its creation. The
	// claim must be read before another volume is requested.
	pvDeleted bool
}

// infeasible is a request that the driver called invalid. It is not repeated
// before until, unless something it was prepared from changes.
type infeasible struct {
	until time.Time
	claim *corev1.PersistentVolumeClaim
	class *storagev1.StorageClass
}

// begin takes up a prepared request. id identifies its record.
func begin(event intent.Event, id string, next operation) change {
	return change{Event: event, Args: id, Set: func(o *operation) {
		if next.began.IsZero() {
			next.began = o.began
		}
		if next.began.IsZero() {
			next.began = time.Now()
		}
		next.announced, next.infeasible, next.lateRecords = o.announced, o.infeasible, o.lateRecords
		*o = next
	}}
}

func secretsRead(request *csi.CreateVolumeRequest, values map[string]string) change {
	request = proto.CloneOf(request) // others hold the old one
	request.Secrets = values
	return change{Set: func(o *operation) { o.request = request }}
}

func outcomeUnknown() change {
	return change{Event: intent.Lose, Set: func(o *operation) {
		o.pv, o.pvMayExist, o.pvRefused, o.pvDeleted, o.handle = nil, false, false, false, ""
	}}
}

func volumeCreated(handle string, pv *corev1.PersistentVolume) change {
	return change{Event: intent.Answer, Set: func(o *operation) { o.handle, o.pv, o.pvRefused = handle, pv, false }}
}

func volumeRejected(handle string, pv *corev1.PersistentVolume, reason error) change {
	return change{Event: intent.Reject, Set: func(o *operation) {
		o.handle, o.pv, o.pvRefused, o.rejectReason = handle, pv, false, reason
	}}
}

// noVolume ends a call for which no volume exists and none will. The claim may still be protected.
func noVolume(i *infeasible) change {
	return change{Event: intent.Settle, Set: func(o *operation) {
		if i == nil {
			i = o.infeasible
		}
		if o.outdated {
			i = nil
		}
		*o = operation{began: o.began, announced: o.announced, infeasible: i, resumed: o.resumed, lateRecords: o.lateRecords}
	}}
}

// pvNotSaved follows a failed attempt to create the PersistentVolume, which exists if only the response was lost. refused: the API
// server cannot store it.
func pvNotSaved(mayExist, refused bool) change {
	return change{Event: intent.Answer, Set: func(o *operation) { o.pvMayExist, o.pvRefused = o.pvMayExist || mayExist, refused }}
}

func pvSaved() change {
	return change{Event: intent.Settle, Set: func(o *operation) {
		*o = operation{
			began: o.began, announced: o.announced, infeasible: o.infeasible, handle: o.handle, pvDeleted: o.pvDeleted, saved: true,
			lateRecords: o.lateRecords,
		}
	}}
}

func noTopology(anywhere bool) change {
	return change{Set: func(o *operation) {
		if o.began.IsZero() {
			o.began = time.Now()
		}
		o.topologyFailures++
		o.awaitsTopology = o.awaitsTopology || anywhere
	}}
}

// operations holds the CreateVolume of each claim, with an index. It is safe for use by several goroutines.
type operations struct {
	*intent.Ledger[claimKey, operation]
	// sourceReleased is called when a call that copied a source has ended. It must not call operations.
	sourceReleased func(*volumerules.Source)

	mu sync.Mutex // after the lock of the ledger
	// byHandle has the claims for which CreateVolume has returned a volume, in this order, until a PersistentVolume names the volume, or no
	// volume is left.
	byHandle map[string][]claimKey
}

func newOperations() *operations {
	o := &operations{
		Ledger:         intent.NewLedger[claimKey, operation](election.MayCall),
		sourceReleased: func(*volumerules.Source) {}, byHandle: map[string][]claimKey{},
	}
	o.OnChange(o.changed)
	return o
}

// changed updates the index, and reports a source that is not copied any more.
func (o *operations) changed(key claimKey, before, after call) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if was, is := handleOf(before), handleOf(after); was != is {
		o.byHandle[was] = slices.DeleteFunc(o.byHandle[was], func(k claimKey) bool { return k == key })
		if len(o.byHandle[was]) == 0 {
			delete(o.byHandle, was)
		}
		if is != "" {
			o.byHandle[is] = append(o.byHandle[is], key)
		}
	}
	if was := sourceOf(before); was != nil && sourceOf(after) == nil {
		o.sourceReleased(was)
	}
}

// handleOf returns the handle of the volume that CreateVolume has returned and no PersistentVolume names yet; "" for none.
func handleOf(c call) string {
	if !c.State.InProgress() {
		return ""
	}
	return c.Payload.handle
}

// sourceOf returns the source that a call copies; nil for none.
func sourceOf(c call) *volumerules.Source {
	if !c.State.InProgress() {
		return nil
	}
	return c.Payload.source
}

// holderOf returns the first claim for which CreateVolume has returned the volume with this handle, without a PersistentVolume yet.
func (o *operations) holderOf(handle string) (holder claimKey, held bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if holders := o.byHandle[handle]; len(holders) > 0 {
		return holders[0], true
	}
	return claimKey{}, false
}

// sameVolume returns another claim whose volume has the name or the handle of the volume of rejected. Unlike that of holderOf, it may
// not be the first one, and its PersistentVolume may be saved.
func (o *operations) sameVolume(key claimKey, rejected operation) (other claimKey, found bool) {
	for other, c := range o.All() {
		sameName := c.State.InProgress() && c.Payload.plan.VolumeName == rejected.plan.VolumeName
		if other != key && (sameName || c.Payload.handle == rejected.handle) {
			return other, true
		}
	}
	return claimKey{}, false
}

// copies reports whether a call copies a source.
func (o *operations) copies(source volumerules.Source) bool {
	for _, c := range o.All() {
		if s := sourceOf(c); s != nil && *s == source {
			return true
		}
	}
	return false
}

// announce reports whether the event Provisioning is still to be sent for a claim, and
// records that it is.
func (o *operations) announce(key claimKey) (first bool) {
	o.Update(key, func(_ intent.State, op *operation) { first, op.announced = !op.announced, true })
	return first
}

// recordLost remembers that the record of a request got no response.
func (o *operations) recordLost(key claimKey, id string) {
	o.Update(key, func(_ intent.State, op *operation) {
		if !slices.Contains(op.lateRecords, id) {
			op.lateRecords = append(slices.Clone(op.lateRecords), id)
		}
	})
}

// forgetUntilScheduled is Forget for a claim without a call that waits for a node. Late records are kept: the scheduler may select the same
// node again.
func (o *operations) forgetUntilScheduled(key claimKey) {
	kept := false
	o.Update(key, func(_ intent.State, op *operation) {
		*op = operation{lateRecords: op.lateRecords}
		kept = len(op.lateRecords) > 0
	})
	if !kept {
		o.Forget(key)
	}
}

// allowRetry ends the delay of a request that is infeasible, or that the driver will call so.
func (o *operations) allowRetry(key claimKey) {
	o.Update(key, func(s intent.State, op *operation) { op.infeasible, op.outdated = nil, s.InProgress() })
}

// unresolved adds to indeterminateClaims the UIDs of claims whose volume may exist, and removes those whose volume exists.
// It returns the number of volumes without a PersistentVolume. A first call that is running is neither.
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
