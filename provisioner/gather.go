package provisioner

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/topology"
)

// claimKey names one claim; another one of the same name has another UID.
type claimKey struct {
	Namespace, Name string
	UID             types.UID
}

// String is for logs and pages.
func (k claimKey) String() string { return k.Namespace + "/" + k.Name }

func keyOf(claim *corev1.PersistentVolumeClaim) claimKey {
	return claimKey{claim.Namespace, claim.Name, claim.UID}
}

// snapshot is everything that decide may look at.
type snapshot struct {
	claim    *corev1.PersistentVolumeClaim // nil: gone
	class    *storagev1.StorageClass       // nil: gone, or the claim is
	volume   *corev1.PersistentVolume      // of the name that the volume of the claim has; nil: none
	progress progress
	known    *topology.Aggregate
	now      time.Time
	named    *found // what the claim names, once it was looked up; nil: not yet
}

// gather reads the caches, the own writes that they have not seen yet, and what is
// remembered of the claim.
//
// The API server is not asked whether the claim is still there before its first
// CreateVolume: that would be a read per volume. A claim whose volume was made is
// remembered until the watch has shown it bound or gone (progress.saved), so that
// no state of the cache leads to a second volume; a claim that was deleted
// meanwhile leads to a PersistentVolume that is released at once.
func (t *term) gather(key claimKey) snapshot {
	s := snapshot{progress: t.progressOf(key.UID), known: t.topologies, now: time.Now()}
	s.volume, _ = t.volumes.Get(t.c.driver.volumeName(key.UID))
	claim, ok := t.claims.Get(key.Namespace + "/" + key.Name)
	if !ok || claim.UID != key.UID {
		return s
	}
	s.claim = claim
	s.class, _ = t.c.classes.Get(storagehelpers.GetPersistentVolumeClaimClass(claim))
	return s
}

// progressOf is a copy of what is remembered of a claim; the zero value when nothing is.
func (t *term) progressOf(claim types.UID) progress {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.claimProgress[claim]; p != nil {
		return *p
	}
	return progress{}
}

// remember changes what is remembered of a claim.
func (t *term) remember(claim types.UID, change func(*progress)) {
	t.mu.Lock()
	p := t.claimProgress[claim]
	if p == nil {
		p = &progress{began: time.Now()}
		t.claimProgress[claim] = p
	}
	before := *p
	change(p)
	lost := t.countCopies(before.attempt, p.attempt)
	t.competes(before.race, p.race)
	t.mu.Unlock()
	t.released(lost)
}

// forget drops what is remembered of a claim that is bound or gone, unless
// something is still in progress for it at the driver.
func (t *term) forget(claim types.UID) (inProgress bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.claimProgress[claim]
	switch {
	case p == nil:
		return false
	case p.attempt != nil:
		return true
	}
	t.competes(p.race, race{})
	delete(t.claimProgress, claim)
	return false
}

// doubts is how many claims have a volume of which it is not known whether it came
// into being, and how many have one that is not saved yet.
func (c *Controller) doubts() (inDoubt, unsaved float64) {
	doubtful := map[types.UID]struct{}{}
	for _, claim := range c.claims.ByIndex(kube.ByProvisioningRecord, c.driver.name) {
		doubtful[claim.UID] = struct{}{}
	}
	t := c.term.Load()
	if t == nil {
		return float64(len(doubtful)), 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for claim, p := range t.claimProgress {
		switch a := p.attempt; {
		case a == nil:
		case a.volume != nil:
			unsaved++
			delete(doubtful, claim)
		case a.doubt:
			doubtful[claim] = struct{}{}
		}
	}
	return float64(len(doubtful)), unsaved
}
