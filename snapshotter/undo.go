// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"fmt"
	"sync"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// replay is a CreateSnapshot that was repeated for a content that is being deleted, until its snapshot is deleted.
type replay struct {
	content  *content
	request  *createRequest
	answer   *answer // nil: the outcome is unknown
	orphaned bool    // the content does not exist any more
}

// replays holds the replays of a term by the UID of the content. A write of an earlier leader, which took effect late, may remove
// the finalizer during a replay: then the content does not protect the snapshot any more.
type replays struct {
	mu sync.Mutex
	of map[types.UID]*replay
}

func (r *replays) begin(c *content, request *createRequest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of == nil {
		r.of = map[types.UID]*replay{}
	}
	r.of[c.uid()] = &replay{content: c, request: request}
}

func (r *replays) answered(uid types.UID, a *answer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if one := r.of[uid]; one != nil {
		one.answer = a
	}
}

func (r *replays) end(uid types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.of, uid)
}

// orphan reports whether the snapshot of a replay for c, which was deleted, is to be deleted. last is the last version of c.
func (r *replays) orphan(last *content) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	one := r.of[last.uid()]
	if one == nil {
		return false
	}
	one.orphaned = last.terminating() && last.released() && last.policy == snapshotv1.VolumeSnapshotContentDelete
	return one.orphaned
}

// get returns a copy of the replay of a content, or nil.
func (r *replays) get(uid types.UID) *replay {
	r.mu.Lock()
	defer r.mu.Unlock()
	if one := r.of[uid]; one != nil {
		return new(*one)
	}
	return nil
}

// undo deletes the snapshot of a replay whose content does not exist any more. If the outcome of the replay is unknown, it is
// repeated first.
func (l *loop[T, C]) undo(ctx context.Context, key contentKey, r *replay) error {
	log := klog.FromContext(ctx).WithValues(logKey(r.content), key.Name, "snapshotName", r.request.Name)
	failed := func(err error) error {
		log.Error(err, "Content was deleted before its snapshot. The deletion is retried while this process leads")
		l.event(r.content, warning, r.content.deleted, fmt.Sprintf("Failed to delete %s: the content was deleted before it: %v. "+
			"Check the storage system for the %[1]s %[3]q, which may remain", r.content.noun, err, r.request.Name))
		return err
	}
	if exists, err := l.stillExists(ctx, key, r); exists || err != nil {
		return err
	}
	secrets, err := l.c.replaySecrets(ctx, r.content)
	if err != nil {
		return failed(err)
	}
	if r.answer == nil {
		if err := l.repeat(ctx, key, r, secrets); err != nil {
			return failed(err)
		}
		if r.answer == nil {
			return nil
		}
	}
	if other := l.other(r.content, r.answer.handle); other != nil && !other.leaving() {
		return failed(fmt.Errorf("%s %q names the same %s %q", other.kind.name, other.meta.Name, other.noun, r.answer.handle))
	}
	call, cancel := context.WithTimeout(ctx, l.c.cfg.Timeout)
	defer cancel()
	members := handlesOf(r.answer.snapshots)
	if len(members) == 0 {
		members, err = l.calls.members(call, r.answer.handle, secrets)
	}
	read, exists := election.Now(), false
	if err == nil { // again: the calls of the driver may have taken long
		exists, err = l.stillExists(ctx, key, r)
	}
	if exists {
		return nil
	}
	if err == nil {
		err = election.MayCallNow(ctx, read)
	}
	if err == nil {
		err = l.calls.delete(call, r.answer.handle, members, secrets)
	}
	if err != nil {
		return failed(fmt.Errorf("deleting the %s %q: %w", r.content.noun, r.answer.handle, err))
	}
	l.replays.end(key.UID)
	l.memories.forget(key.UID)
	log.Info("Snapshot of a deleted content deleted", "snapshotHandle", r.answer.handle)
	return nil
}

// stillExists reads the content of r, and ends the replay if it exists: a watch by labels also ends with a label, and this cache with a
// change of the driver.
func (l *loop[T, C]) stillExists(ctx context.Context, key contentKey, r *replay) (bool, error) {
	live, err := l.writer.Get(ctx, key.Name, metav1.GetOptions{})
	switch {
	case err == nil && live.GetUID() == key.UID:
		l.replays.end(key.UID)
		l.memories.forget(key.UID)
		return true, nil
	case err != nil && !kube.IsNotFound(err):
		return false, fmt.Errorf("reading %s %q, which was deleted during a repeated creation: %w", r.content.kind.name, key.Name, err)
	}
	return false, nil
}

// repeat repeats the CreateSnapshot of r and sets its answer, unless an error ends the wait for it.
func (l *loop[T, C]) repeat(ctx context.Context, key contentKey, r *replay, secrets map[string]string) error {
	release, err := l.c.shareVolumes(ctx, r.content)
	if err != nil {
		return err
	}
	defer release()
	call, cancel := context.WithTimeout(ctx, l.c.cfg.Timeout)
	defer cancel()
	if err := election.MayCallNow(ctx, election.Moment{}); err != nil {
		return err
	}
	a, err := l.calls.create(call, r.content, r.request, secrets)
	if err != nil {
		ended, remains := l.memories.get(key.UID).endedBy(r.content, err, r.request.Name)
		if !ended || ctx.Err() != nil {
			return err
		}
		l.replays.end(key.UID)
		l.memories.forget(key.UID)
		if remains != "" {
			l.announceWarning(r.content, remains, r.content.deleted, remains)
		}
		return nil
	}
	r.answer = a
	l.replays.answered(key.UID, a)
	return nil
}

// replayFailed handles the error of a repeated create call for a content that is being deleted. ended and remains are the results of
// [memory.endedBy].
func (l *loop[T, C]) replayFailed(ctx context.Context, c *content, err error, ended bool, remains string) error {
	switch {
	case ctx.Err() != nil: // the term has ended
		return err
	case ended && remains == "":
		klog.FromContext(ctx).Info("Repeated creation failed, no snapshot exists", "rpc", c.create, "err", err)
		return nil
	case ended:
		l.announceWarning(c, remains, c.deleted, remains)
		return nil
	}
	waitsFor := cause{blockedOutcome, fmt.Sprintf("the outcome of %s: %v", c.create, err)}
	l.announce(c, waitsFor, nil)
	return err
}

// replaySecrets reads the Secret for the calls of an undo; nil for none.
func (c *Controller) replaySecrets(ctx context.Context, o *content) (map[string]string, error) {
	secret, err := c.driver.annotatedSecret(o)
	if err != nil || secret == nil {
		return nil, err
	}
	values, err := kube.ReadSecret(ctx, c.deps.Client, secret)
	if err != nil {
		return nil, credentials(o, err)
	}
	return values, nil
}
