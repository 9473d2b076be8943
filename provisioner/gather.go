// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/topology"
)

// claimKey identifies a claim; a recreated claim of the same name has another UID.
type claimKey struct {
	Namespace, Name string
	UID             types.UID
}

// String returns namespace/name, for logs and pages.
func (k claimKey) String() string { return k.Namespace + "/" + k.Name }

func keyOf(claim *corev1.PersistentVolumeClaim) claimKey {
	return claimKey{claim.Namespace, claim.Name, claim.UID}
}

// claimState holds the state that decide reads.
type claimState struct {
	claim  *corev1.PersistentVolumeClaim // nil: deleted
	class  *storagev1.StorageClass       // nil: deleted, or the claim is
	volume *corev1.PersistentVolume      // of the name that the volume of the claim has; nil: none
	call   call
	race   race
	known  *topology.Aggregate
	now    time.Time
	// stale: the cache may lack a request that an earlier leader has recorded on the claim.
	stale bool
	reads
}

// reads is what one sync has read from the API server, or learned from a failed call. It
// is not kept until the next sync.
type reads struct {
	volumeRead   bool          // the PersistentVolume of the claim was read; the cache cannot remember that there was none
	refs         *resolvedRefs // the objects that the claim references; nil: not read yet
	freshSecrets bool          // the secrets of the request were read in this sync
	failure      *failure      // of a call in this sync
	unlock       func()        // releases the source of a request that is taken up in this step; nil: none
}

// release releases the source, if its lock is held.
func (r *reads) release() {
	if r.unlock != nil {
		r.unlock()
		r.unlock = nil
	}
}

// failure is a failed call, which the sync returns once the stage that follows from it is
// recorded on the claim.
type failure struct {
	err  error
	node string // selected for the request; "": none
}

// gather reads the caches, the own writes that the caches have not observed yet, and the
// CreateVolume of the claim.
//
// It does not ask the API server whether the claim still exists before its first
// CreateVolume: that would be a read per volume. The claim and its PersistentVolume are read only if the cache may lack what
// an earlier leader has written to them.
// The call is kept after the PersistentVolume is saved
// until the watch has shown the claim bound or deleted, so that no state of the cache leads
// to a second volume. A claim that was deleted meanwhile leads to a PersistentVolume that
// is released at once.
func (l *claimLoop) gather(key claimKey, r reads) claimState {
	s := claimState{call: l.ops.Get(key), race: l.ownership.raceOf(key), known: l.topologies, now: time.Now(), reads: r}
	complete := l.volumes.Complete() // before the PersistentVolume is read
	s.volume, _ = l.volumes.Get(l.c.driver.volumeName(key.UID))
	claim, fresh, ok := l.claims.Fresh(key.Namespace + "/" + key.Name)
	if !ok || claim.UID != key.UID {
		return s
	}
	s.claim, s.stale = claim, !fresh || s.volume == nil && !complete && !r.volumeRead
	s.class, _ = l.c.classes.Get(storagehelpers.GetPersistentVolumeClaimClass(claim))
	return s
}
