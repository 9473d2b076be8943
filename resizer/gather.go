// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// key identifies an operation on a claim. The UID gives a recreated claim of the same name a history of
// its own.
type key struct {
	Namespace, Name string
	UID             types.UID
	Operation       operation
}

// String returns the claim and the operation, for logs and /statusz.
func (k key) String() string { return fmt.Sprintf("%s/%s %s", k.Namespace, k.Name, k.Operation) }

// claim returns the key of the claim in the cache.
func (k key) claim() string { return k.Namespace + "/" + k.Name }

func keyOf(claim *corev1.PersistentVolumeClaim, o operation) key {
	return key{claim.Namespace, claim.Name, claim.UID, o}
}

// usage is whether a volume is in use.
type usage int

const (
	usageUnknown usage = iota // what uses volumes is not watched yet
	usageUnused
	usageInUse
)

// claimState is the input of [driver.decide].
type claimState struct {
	key    key
	claim  *corev1.PersistentVolumeClaim // nil: deleted
	volume *corev1.PersistentVolume      // nil: not in the cache
	// stub: the cache has some fields of the claim only.
	stub bool
	// confirmed: this term has read the claim from the API server, or has written it.
	confirmed bool
	// volumeConfirmed: likewise, of the PersistentVolume.
	volumeConfirmed bool
	usage           usage
	// classesServed: VolumeAttributesClasses can be read. A driver that modifies no volumes does not need them.
	classesServed bool
	call          call
	trigger       intent.Event // of the next call, see [operation.callOf]
	now           time.Time
	reads
}

// reads holds what earlier steps of the same sync read from the API server.
type reads struct {
	live       *corev1.PersistentVolumeClaim // nil: not read
	secretRead bool
	secrets    map[string]string
	classes    classes
}

// gather reads the caches, including own writes that the watch has not delivered yet.
func (t *term) gather(k key, r reads) claimState {
	s := claimState{key: k, call: t.ledger.Get(k), now: time.Now(), reads: r}
	volume := ""
	if claim, fresh, ok := t.claims.Fresh(k.claim()); ok && claim.UID == k.UID {
		s.claim, s.confirmed, volume = claim, fresh, claim.Spec.VolumeName
		s.stub = !kube.ClaimHandledBy(t.c.driver.name, claim)
		if r.live != nil && r.live.ResourceVersion == claim.ResourceVersion {
			s.claim, s.stub = r.live, false
		}
		s.call, s.trigger = k.Operation.callOf(s.call, s.claim)
	}
	if answer := s.call.Payload.answer; answer != nil {
		volume = answer.volume.Name
	}
	s.volume, s.volumeConfirmed, _ = t.volumes.Fresh(volume)
	s.classesServed = t.c.noClasses.Load() == nil
	if k.Operation == expand && s.volume != nil {
		s.usage = t.usageOf(k, s.volume.Name)
	}
	return s
}
