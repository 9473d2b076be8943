// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
)

// operation is what a key of the queue stands for.
type operation int

const (
	expand operation = iota
	modify
	operations // number of operations
)

// String returns the name of o in logs, metrics and traces.
func (o operation) String() string { return [...]string{"expand", "modify"}[o] }

// other returns the other operation.
func (o operation) other() operation { return 1 - o }

// lock is a mutex that is held during requests. Unlike a [sync.Mutex], a goroutine that waits for it is blocked
// durably in the sense of testing/synctest.
type lock chan struct{}

func (l lock) Lock()   { l <- struct{}{} }
func (l lock) Unlock() { <-l }

// claimMemory holds what this process knows about the operations on one claim and the API does not
// record. It ends with the term of the Lease.
type claimMemory struct {
	// mu is held during decisions and writes, and released during calls to the driver.
	mu  lock
	ops [operations]operationMemory
	// stages are the reasons of the last decisions, for metrics, /statusz and events of other objects.
	stages [operations]atomic.Pointer[string]

	refs int // guarded by the lock of memories
}

// unlocked calls f without the lock.
func (m *claimMemory) unlocked(f func()) {
	m.mu.Unlock()
	defer m.mu.Lock()
	f()
}

// stage returns the reason of the last decision about o.
func (m *claimMemory) stage(o operation) string {
	if s := m.stages[o].Load(); s != nil {
		return *s
	}
	return ""
}

// operationMemory is the part for one operation. Targets are sizes in bytes or names of
// VolumeAttributesClasses.
type operationMemory struct {
	// settled is a target whose outcome is known: its response was final, or, of modifications, the
	// driver was not called for it yet. An expansion that was recorded is always called for.
	settled string
	// called is the target of the last call. A status that an earlier leader writes late does not settle it.
	called string
	// answer is a response that is not written to the API yet.
	answer *answer
	// recorded is the error that was last written to the conditions.
	recorded failure
	// slow delays the retry of an infeasible target.
	slow slowRetry
	// refused is the refused write for which an event was last sent.
	refused failure
	// began is when this process wrote the intent.
	began time.Time

	// Of expansions only.
	inUseError bool // the last response was FailedPrecondition
	waiting    bool // for the end of the use of the volume; the event was sent
	legacy     bool // the API server does not store allocatedResources
	nodeReset  nodeReset

	// missingClass is the VolumeAttributesClass for which a modification waits.
	missingClass string
}

// empty reports whether m has nothing to remember.
func (m *operationMemory) empty() bool { return reflect.ValueOf(*m).IsZero() }

// answer is a response of the driver.
type answer struct {
	target string
	kind   outcome
	err    error // nil for success
	at     time.Time

	volume volumeRef
	// Of a successful expansion.
	size          resource.Quantity
	nodeExpansion bool
	before        resource.Quantity // capacity of the claim before the expansion

	volumeSaved bool
}

// volumeRef identifies a PersistentVolume.
type volumeRef struct {
	name string
	uid  types.UID
}

// failure is an error in the conditions of a claim, or the refusal of a write.
type failure struct {
	target, code, text string
	at                 time.Time
}

// slowRetry delays the next call for target.
type slowRetry struct {
	target string
	until  time.Time
}

// nodeReset is the last time that an expansion which is infeasible on the node was started again.
type nodeReset struct {
	requested string
	at        time.Time
}

// memories holds the memories of a term by the UIDs of their claims.
type memories struct {
	mu     sync.Mutex
	claims map[types.UID]*claimMemory
	keys   map[types.UID]key
}

func newMemories() *memories {
	return &memories{claims: map[types.UID]*claimMemory{}, keys: map[types.UID]key{}}
}

// acquire returns the memory of the claim of k. Call release after its use.
func (s *memories) acquire(k key) *claimMemory {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.claims[k.UID]
	if m == nil {
		m = &claimMemory{mu: make(lock, 1)}
		s.claims[k.UID], s.keys[k.UID] = m, k
	}
	m.refs++
	return m
}

// release drops the memory of the claim of k if it is not used, and empty or of a deleted claim without
// a response that must be written.
func (s *memories) release(k key, m *claimMemory, deleted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m.refs--
	if m.refs > 0 {
		return
	}
	unwritten, empty := false, true
	for i := range m.ops {
		unwritten = unwritten || m.ops[i].answer != nil
		empty = empty && m.ops[i].empty()
	}
	if empty || deleted && !unwritten {
		delete(s.claims, k.UID)
		delete(s.keys, k.UID)
	}
}

// stageOf returns the reason of the last decision about k.
func (s *memories) stageOf(k key) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.claims[k.UID]; m != nil {
		return m.stage(k.Operation)
	}
	return ""
}

// inStage returns the keys whose last decision had this reason.
func (s *memories) inStage(stage string) []key {
	s.mu.Lock()
	defer s.mu.Unlock()
	var keys []key
	for uid, m := range s.claims {
		for o := range operations {
			if m.stage(o) == stage {
				k := s.keys[uid]
				k.Operation = o
				keys = append(keys, k)
			}
		}
	}
	return keys
}

// size returns the number of claims with a memory.
func (s *memories) size() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.claims)
}
