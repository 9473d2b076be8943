// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"maps"
	"sync"
	"time"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"k8s.io/apimachinery/pkg/types"
)

// outcome is what this process knows about the last CreateSnapshot of a content.
type outcome int

const (
	unknown       outcome = iota // not called by this process: the annotations decide
	indeterminate                // the driver may have executed it, or may still do so
	definite                     // it has returned a snapshot or a final error, or was never called
)

// memory holds what this process knows about a content besides the object. It is dropped with the
// Lease: everything that a later process needs is recorded on the object.
type memory struct {
	outcome outcome
	// request is the last request, in case another writer has removed its record.
	request *createRequest
	// record is the value of [AnnRequest] that this process has written for a repetition in this term.
	record string
	// recordRefused: the API server has refused such a record, or a webhook has changed it. The repetition does without.
	recordRefused bool
	// answer is a response that is not written to the status yet.
	answer *answer
	// remains says why a snapshot may exist that no call has returned; empty if none may. A deletion ends with it as a warning.
	remains string
	// absent: the driver does not know the snapshot of a pre-provisioned content that is being deleted.
	absent bool
	// deleted: the driver has deleted the snapshot. The finalizer is not removed yet.
	deleted bool
	// releasing: the finalizer is being removed by this process.
	releasing bool
	// checks counts the responses in a row with a snapshot that is not ready. The next check is due
	// at nextCheck.
	checks    int
	nextCheck time.Time
	// reported is the last error that was written to the status.
	reported   failureID
	reportedAt time.Time
	// announced holds the causes of waiting for which an event was sent.
	announced map[string]bool
	// blocked is why a deletion does not proceed, for metrics; empty if it proceeds.
	blocked string
}

// written records that the status has answer a, and when to check a snapshot that is not ready.
func (m *memory) written(a *answer, now time.Time, cfg Config) {
	m.answer = nil
	if a.ready {
		m.checks, m.nextCheck = 0, time.Time{}
		return
	}
	m.nextCheck = now.Add(cfg.checkDelay(m.checks))
	m.checks++
}

// binds reports whether every call must repeat the recorded request of c: the snapshot exists, or may have been created by an
// earlier call. After a definite error, a changed class or name replaces the record.
func (m memory) binds(c *content) bool { return m.outcome != definite || c.known().handle != "" }

// awaitsCheck reports whether the snapshot of c is to be deleted, but was never checked: a backup tool creates such a content only to
// delete the snapshot. It may be that of a group.
func (m memory) awaitsCheck(c *content) bool {
	return c.preProvisioned() && !c.bound() && c.policy == snapshotv1.VolumeSnapshotContentDelete && c.known().handle == "" &&
		!c.status.cleared() && !m.deleted && !m.absent
}

// unrecorded reports whether neither m nor c has a record of a CreateSnapshot.
func (m memory) unrecorded(c *content) bool {
	return m.outcome == unknown && !c.has(c.creating) && !c.has(AnnRequest)
}

// createdAgain reports whether a repeated CreateSnapshot has returned another snapshot than that of the status of c: an earlier
// leader had deleted that one. Both are deleted.
func (m memory) createdAgain(c *content) bool {
	return c.dynamic() && m.answer != nil && c.known().handle != "" && m.answer.handle != c.known().handle
}

// neverCalled records that no process has called CreateSnapshot.
func neverCalled(m *memory) { m.outcome = definite }

// checkDelay returns the time until the next check after a number of unsuccessful ones.
func (c Config) checkDelay(checks int) time.Duration {
	delay := c.RetryIntervalStart
	for range checks {
		if delay >= c.RetryIntervalMax/2 {
			return c.RetryIntervalMax
		}
		delay *= 2
	}
	return min(delay, c.RetryIntervalMax)
}

// failureID identifies errors that differ only in volatile text, such as request IDs.
type failureID struct{ step, code string }

// memories holds the memory of each content by UID.
type memories struct {
	mu sync.Mutex
	of map[types.UID]memory
}

// get returns a copy of the memory of a content.
func (m *memories) get(uid types.UID) memory {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.of[uid]
}

// update changes the memory of a content.
func (m *memories) update(uid types.UID, change func(*memory)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.of[uid]
	now.announced = maps.Clone(now.announced) // copies are in use
	change(&now)
	if m.of == nil {
		m.of = map[types.UID]memory{}
	}
	m.of[uid] = now
}

// forget drops the memory of a content and returns it.
func (m *memories) forget(uid types.UID) memory {
	m.mu.Lock()
	defer m.mu.Unlock()
	last := m.of[uid]
	delete(m.of, uid)
	return last
}
