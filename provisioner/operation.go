// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

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

	// resumed is the ID of the record that an earlier process has left; nil if there was none.
	resumed *string

	// While a call is in progress:
	claim        *corev1.PersistentVolumeClaim // as of the request; it may be deleted by now
	classUID     types.UID                     // of the StorageClass the request was prepared from
	classVersion string                        // its resourceVersion
	request      *csi.CreateVolumeRequest      // with the secrets once they are read
	plan         plan
	source       *volumerules.Source // of a clone or a restored snapshot; else nil
	sourceBytes  int64               // see resolvedRefs
	outdated     bool                // an object that the request was prepared from has changed

	pv         *corev1.PersistentVolume // of an answered call
	pvMayExist bool                     // a request that creates pv failed, perhaps after its effect
	// pvRefused: the API server cannot store pv. CreateVolume is repeated, and its response replaces pv.
	pvRefused    bool
	csiSource    *corev1.CSIPersistentVolumeSource // of the volume that CreateVolume has returned
	affinity     *corev1.VolumeNodeAffinity        // of a volume that must be deleted
	rejectReason error                             // why it must be

	// pvDeleted: a PersistentVolume of the claim was deleted, of an answered call before the response to its creation. The
	// claim must be read before another volume is requested.
	pvDeleted bool
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

// begin takes up a prepared request. id identifies its record.
func begin(event intent.Event, id string, next operation) change {
	return change{Event: event, Args: id, Set: func(o *operation) {
		if next.began.IsZero() {
			next.began = o.began
		}
		if next.began.IsZero() {
			next.began = time.Now()
		}
		next.announced, next.infeasible = o.announced, o.infeasible
		*o = next
	}}
}

// prepareAgain replaces an indeterminate request by one of the recreated class, as
// csi-provisioner does; see --provisioning-protection=off.
func prepareAgain(id string, next operation) change {
	return change{Event: intent.Replan, Args: id, Set: func(o *operation) {
		o.claim, o.request, o.plan = next.claim, next.request, next.plan
		o.classUID, o.classVersion = next.classUID, next.classVersion
	}}
}

func secretsRead(request *csi.CreateVolumeRequest, values map[string]string) change {
	request = proto.CloneOf(request) // others hold the old one
	request.Secrets = values
	return change{Set: func(o *operation) { o.request = request }}
}

func outcomeUnknown() change {
	return change{Event: intent.Lose, Set: func(o *operation) {
		o.pv, o.pvMayExist, o.pvRefused, o.pvDeleted, o.csiSource = nil, false, false, false, nil
	}}
}

func volumeCreated(pv *corev1.PersistentVolume, source *corev1.CSIPersistentVolumeSource) change {
	return change{Event: intent.Answer, Set: func(o *operation) { o.pv, o.csiSource, o.pvRefused = pv, source, false }}
}

func volumeRejected(source *corev1.CSIPersistentVolumeSource, affinity *corev1.VolumeNodeAffinity, reason error) change {
	return change{Event: intent.Reject, Set: func(o *operation) {
		o.pv, o.pvRefused, o.csiSource, o.affinity, o.rejectReason = nil, false, source, affinity, reason
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
		*o = operation{began: o.began, announced: o.announced, infeasible: i, resumed: o.resumed}
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
			began: o.began, announced: o.announced, infeasible: o.infeasible, csiSource: o.csiSource, pvDeleted: o.pvDeleted, saved: true,
		}
	}}
}

// claimRefetched follows the deletion of a saved PersistentVolume.
func claimRefetched(bound bool) change {
	c := change{Set: func(o *operation) { o.csiSource, o.pvDeleted, o.saved = nil, false, o.saved && bound }}
	if !bound {
		c.Event = intent.Reset
	}
	return c
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
