// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// stage is how far the volume of a claim has come; doc.go draws the transitions.
type stage int

const (
	pending       stage = iota // no request is prepared
	requested                  // a request is prepared, CreateVolume has returned nothing yet
	indeterminate              // CreateVolume was called, and a volume may exist now or later
	created                    // CreateVolume returned the volume, its PersistentVolume is not saved
	rejected                   // CreateVolume returned a volume that must be deleted again
	pvCreated                  // the PersistentVolume is saved
)

// String returns the name of s in logs, on /statusz and in doc.go.
func (s stage) String() string {
	return [...]string{"pending", "requested", "indeterminate", "created", "rejected", "pvCreated"}[s]
}

// inProgress reports whether the driver may have, or get, a volume for the claim.
func (s stage) inProgress() bool { return s != pending && s != pvCreated }

// transitionName names a transition in logs, and in doc.go; each but four has a constructor of that name.
type transitionName string

const (
	onNoTopology       transitionName = "noTopology"
	onBegin            transitionName = "begin"
	onResume           transitionName = "resume"
	onSecretsRead      transitionName = "secretsRead"
	onCreateCalled     transitionName = "createCalled"
	onOutcomeUnknown   transitionName = "outcomeUnknown"
	onRecordNotWritten transitionName = "recordNotWritten"
	onPrepareAgain     transitionName = "prepareAgain"
	onVolumeCreated    transitionName = "volumeCreated"
	onVolumeRejected   transitionName = "volumeRejected"
	onNoVolume         transitionName = "noVolume"
	onPVNotSaved       transitionName = "pvNotSaved"
	onPVSaved          transitionName = "pvSaved"
	onClaimUnprotected transitionName = "claimUnprotected"
	onBound            transitionName = "bound"
	onUnbound          transitionName = "unbound"
)

// transitions lists everything that may happen to an operation: per transition the stages
// in which it is legal, and the stage that follows.
var transitions = map[transitionName]map[stage]stage{
	onNoTopology:       {pending: pending},
	onBegin:            {pending: requested},
	onResume:           {pending: indeterminate},
	onSecretsRead:      {requested: requested, indeterminate: indeterminate, rejected: rejected, created: created},
	onCreateCalled:     {requested: requested, indeterminate: indeterminate},
	onOutcomeUnknown:   {requested: indeterminate, indeterminate: indeterminate, created: indeterminate},
	onRecordNotWritten: {requested: requested, indeterminate: indeterminate, rejected: rejected, created: created},
	onPrepareAgain:     {requested: requested, indeterminate: indeterminate},
	onVolumeCreated:    {requested: created, indeterminate: created, created: created},
	onVolumeRejected:   {requested: rejected, indeterminate: rejected, created: rejected},
	onNoVolume:         {requested: pending, indeterminate: pending, created: pending, rejected: pending},
	onPVNotSaved:       {created: created},
	onPVSaved:          {created: pvCreated},
	onClaimUnprotected: {pending: pending, pvCreated: pvCreated},
	onBound:            {pvCreated: pvCreated, pending: pending}, // pending: forgotten during the read
	onUnbound:          {pvCreated: pending, pending: pending},
}

// operation holds the state of a claim from its first request until the claim
// is bound or deleted. It is lost when the process exits or loses its Lease; the next
// leader continues from the record on the claim.
type operation struct {
	stage     stage
	began     time.Time // of the work for the claim
	announced bool      // the event Provisioning was sent
	// recordID identifies the record of the request, whether or not it is on the claim. In stage pending it is that of
	// the last request. Empty: the request continues that of an earlier process, whose record has none.
	recordID string
	// inherited: the request is that of a record of an earlier process. It is recorded again before the call: with the old
	// ID, a late write of that process could remove it.
	inherited bool

	// In stage pending:
	finalResult      bool // the last request has one, or was never sent; the claim may still be protected
	infeasible       *infeasible
	topologyFailures int  // in a row
	awaitsTopology   bool // a change of any Node or CSINode may help

	// While a volume is in progress:
	claim        *corev1.PersistentVolumeClaim // as of the request; it may be deleted by now
	classUID     types.UID                     // of the StorageClass the request was prepared from
	classVersion string                        // its resourceVersion
	request      *csi.CreateVolumeRequest      // with the secrets once they are read
	plan         plan
	source       *volumerules.Source // of a clone or a restored snapshot; else nil
	sourceBytes  int64               // see resolvedRefs
	called       bool                // CreateVolume was, by this process or an earlier one
	recordFailed bool                // the claim could not be protected since the last call
	leftID       string              // if recordFailed: the ID of the record on the claim, perhaps of an earlier process
	outdated     bool                // an object that the request was prepared from has changed

	pv         *corev1.PersistentVolume // in stage created
	pvMayExist bool                     // in stage created: a request that creates it failed, perhaps after its effect
	// pvRefused: in stage created, the API server cannot store pv. CreateVolume is repeated, and its response replaces pv.
	pvRefused    bool
	csiSource    *corev1.CSIPersistentVolumeSource // in stages created, rejected and pvCreated
	affinity     *corev1.VolumeNodeAffinity        // of the rejected volume
	rejectReason error                             // in stage rejected

	// pvDeleted: a PersistentVolume of the claim was deleted, in stage created before the response to its creation. The
	// claim must be read before another volume is requested.
	pvDeleted bool
}

// handle returns the handle of the volume that CreateVolume has returned and no PersistentVolume names yet; "" for none.
func (o *operation) handle() string {
	if o.csiSource == nil || !o.stage.inProgress() {
		return ""
	}
	return o.csiSource.VolumeHandle
}

// infeasible is a request that the driver called invalid. It is not repeated
// before until, unless something it was prepared from changes.
type infeasible struct {
	until          time.Time
	node           string // that the scheduler had selected
	classUID       types.UID
	classVersion   string
	requestedBytes int64
	attributes     string // name of the VolumeAttributesClass
}

// transition changes an operation. The zero value changes nothing.
type transition struct {
	name transitionName
	set  func(*operation)
	// release, if not nil, is called once the transition is recorded.
	release func()
}

// beginRequest takes up a prepared request, or that of an earlier process.
func beginRequest(next operation) transition {
	name := onBegin
	if next.called {
		name = onResume
	}
	return transition{name: name, set: func(o *operation) {
		if next.began.IsZero() {
			next.began = o.began
		}
		next.announced, next.infeasible = o.announced, o.infeasible
		*o = next
	}}
}

// prepareAgain replaces an indeterminate request by one of the recreated class, as
// csi-provisioner does; see --provisioning-protection=off.
func prepareAgain(next operation) transition {
	return transition{name: onPrepareAgain, set: func(o *operation) {
		o.claim, o.request, o.plan = next.claim, next.request, next.plan
		o.classUID, o.classVersion = next.classUID, next.classVersion
	}}
}

func secretsRead(request *csi.CreateVolumeRequest, values map[string]string) transition {
	request = proto.CloneOf(request) // others hold the old one
	request.Secrets = values
	return transition{name: onSecretsRead, set: func(o *operation) { o.request = request }}
}

// createCalled records the call before it is made: after a panic in it the outcome is unknown.
func createCalled() transition {
	return transition{name: onCreateCalled, set: func(o *operation) { o.called = true }}
}

func outcomeUnknown() transition {
	return transition{name: onOutcomeUnknown, set: func(o *operation) {
		o.pv, o.pvMayExist, o.pvRefused, o.pvDeleted, o.csiSource, o.recordFailed = nil, false, false, false, nil, false
	}}
}

// recordNotWritten continues without the record of the request, until the call returns. left is the ID of the record on the claim.
func recordNotWritten(left string) transition {
	return transition{name: onRecordNotWritten, set: func(o *operation) { o.recordFailed, o.leftID = true, left }}
}

func volumeCreated(pv *corev1.PersistentVolume, source *corev1.CSIPersistentVolumeSource) transition {
	return transition{name: onVolumeCreated, set: func(o *operation) { o.pv, o.csiSource, o.pvRefused = pv, source, false }}
}

func volumeRejected(source *corev1.CSIPersistentVolumeSource, affinity *corev1.VolumeNodeAffinity, reason error) transition {
	return transition{name: onVolumeRejected, set: func(o *operation) {
		o.pv, o.pvRefused, o.csiSource, o.affinity, o.rejectReason = nil, false, source, affinity, reason
	}}
}

// noVolume ends an operation for which no volume exists and none will. The claim may
// still be protected.
func noVolume(i *infeasible) transition {
	return transition{name: onNoVolume, set: func(o *operation) {
		outdated := o.outdated
		id := o.recordID
		if o.inherited && o.recordFailed {
			id = o.leftID
		}
		*o = operation{began: o.began, announced: o.announced, infeasible: o.infeasible, finalResult: true, recordID: id}
		if outdated {
			o.infeasible = nil
		} else if i != nil {
			o.infeasible = i
		}
	}}
}

// pvNotSaved follows a failed attempt to create the PersistentVolume, which exists if only the response was lost. refused: the API
// server cannot store it.
func pvNotSaved(mayExist, refused bool) transition {
	return transition{name: onPVNotSaved, set: func(o *operation) {
		o.recordFailed, o.pvMayExist, o.pvRefused = false, o.pvMayExist || mayExist, refused
	}}
}

func pvSaved() transition {
	return transition{name: onPVSaved, set: func(o *operation) {
		*o = operation{
			began: o.began, announced: o.announced, infeasible: o.infeasible, csiSource: o.csiSource, pvDeleted: o.pvDeleted,
		}
	}}
}

func claimUnprotected() transition {
	return transition{name: onClaimUnprotected, set: func(o *operation) { o.finalResult = false }}
}

// claimRefetched follows the deletion of a saved PersistentVolume.
func claimRefetched(bound bool) transition {
	name := onUnbound
	if bound {
		name = onBound
	}
	return transition{name: name, set: func(o *operation) { o.csiSource, o.pvDeleted = nil, false }}
}

func noTopology(anywhere bool) transition {
	return transition{name: onNoTopology, set: func(o *operation) {
		o.topologyFailures++
		o.awaitsTopology = o.awaitsTopology || anywhere
	}}
}
