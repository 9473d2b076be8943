// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"time"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// entry is the last CreateSnapshot of a content, with the memory of the content. It is dropped with the Lease: everything that a
// later process needs is recorded on the object.
type entry = intent.Entry[memory]

// memory holds what this process knows about a content besides the object and the state of its CreateSnapshot.
type memory struct {
	// inherited: the state is not that of a call of this process, see [content.call].
	inherited bool
	// undoable: the last CreateSnapshot was sent for a content without a snapshot, or whose deletion had begun. See [loop.mustUndo].
	undoable bool
	// orphan is the last state of the content, if it was deleted although that call may have an effect, which must be undone.
	orphan *content
	// answer is the response that is not written to the status yet: in the state Answered of a CreateSnapshot, else of a check without it.
	answer *answer
	// remains says why a snapshot may exist although the call is settled: the wait for its outcome was ended. Empty: none may. A deletion
	// ends with it as a warning.
	remains string
	// absent: the driver does not know the snapshot of a pre-provisioned content that is being deleted.
	absent bool
	// deleted: the driver has deleted the snapshot. The finalizer is not removed yet.
	deleted bool
	// releasing: the finalizer is being removed by this process, because the call has ended.
	releasing bool
	// checks counts the responses in a row with a snapshot that is not ready. The next check is due at nextCheck.
	checks    int
	nextCheck time.Time
	// reported is the last error that was written to the status.
	reported   failureID
	reportedAt time.Time
	// announced holds the causes for which an event was sent that is sent once.
	announced []string
	// blocked is why a deletion does not proceed, for metrics; empty if it proceeds.
	blocked string
}

// written records that the status has answer a, and when to check a snapshot that is not ready.
func (m *memory) written(a *answer, now time.Time, cfg Config) {
	m.answer, m.undoable = nil, false
	if a.ready {
		m.checks, m.nextCheck = 0, time.Time{}
		return
	}
	m.nextCheck = now.Add(workloop.Backoff(cfg.RetryIntervalStart, cfg.RetryIntervalMax, m.checks))
	m.checks++
}

// awaitsCheck reports whether the snapshot of c is to be deleted, but was never checked: a backup tool creates such a content only to
// delete the snapshot. It may be that of a group.
func (m memory) awaitsCheck(c *content) bool {
	return c.preProvisioned() && !c.bound() && c.policy == snapshotv1.VolumeSnapshotContentDelete && c.known().handle == "" &&
		!c.status.cleared() && !m.deleted && !m.absent
}

// failureID identifies errors that differ only in volatile text, such as request IDs.
type failureID struct{ step, code string }

// call returns the last CreateSnapshot of c.
func (l *loop) call(c *content) entry { return c.call(l.ledger.Get(c.UID)) }

// remember changes what this process remembers of a content.
func (l *loop) remember(uid types.UID, change func(*memory)) {
	_, _, _ = l.ledger.Apply(uid, intent.Change[memory]{Set: change}) // without an event, it cannot fail
}

// happened applies an event to the call of a content. The entry of a content that was deleted meanwhile is dropped, and remains so.
func (l *loop) happened(uid types.UID, event intent.Event, change func(*memory)) error {
	before, _, err := l.ledger.Apply(uid, intent.Change[memory]{Event: event, Set: change})
	if !before.InProgress() {
		return nil
	}
	return err
}
