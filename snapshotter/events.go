// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

//lint:file-ignore ST1005 the texts of csi-snapshotter are capitalized

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// Normal, VolumeSnapshotContent, VolumeGroupSnapshotContent: what the deletion waits for: the snapshot-controller, the outcome
// of the creation, a class, or a Secret
const reasonPending = "SnapshotDeletePending"

const (
	warning = corev1.EventTypeWarning
	normal  = corev1.EventTypeNormal
)

// event sends an event about c. A cluster-scoped object has its events in the namespace default.
func (l *loop) event(c *content, eventType, reason, message string) {
	l.c.deps.Events.Event(c.reference(keyOf(c)), eventType, reason, kube.Message(message))
}

// failure is the error of a CSI call: its text and its cause, which has the gRPC code.
type failure struct{ text, cause error }

func (f failure) Error() string { return f.text.Error() }
func (f failure) Unwrap() error { return f.cause }

// id identifies an error except for volatile text, such as request IDs. Only errors of the driver have such text.
func (a action) id(err error) failureID {
	if call, is := errors.AsType[failure](err); is {
		return failureID{a.String(), status.Code(call.cause).String()}
	}
	return failureID{a.String(), err.Error()}
}

// reportDeletion sends an event about err, with which the deletion of c has failed, and returns it. If the end of the term has canceled
// a call, it sends none.
func (l *loop) reportDeletion(ctx context.Context, c *content, err error) error {
	if ctx.Err() != nil {
		return err
	}
	text := err.Error()
	if e := l.ledger.Get(c.UID); e.Payload.orphan != nil {
		text = fmt.Sprintf("%v (the content was deleted before it). Check the storage system for the %s %q, which may remain",
			err, c.noun, requestWith(e.Args, c.UID).Name)
	}
	l.event(c, warning, c.deleted, text)
	l.remember(c.UID, func(m *memory) { m.blocked = blockedError })
	return err
}

// report records err, as kind of report, on c and returns it. If the end of the term has canceled the call, report writes
// nothing and returns err.
func (l *loop) report(ctx context.Context, c *content, kind action, err error) error {
	if ctx.Err() != nil {
		return err
	}
	if newest, exists := l.objects.Newest(c); exists { // it may have changed during the RPC
		c = newest
	}
	reason, prefix := c.failureWords(kind == doReportCreation)
	message := kube.Message(prefix + err.Error())
	now, id, m := time.Now(), kind.id(err), l.ledger.Get(c.UID).Payload
	if c.terminating() && m.awaitsCheck(c) {
		l.remember(c.UID, func(m *memory) { m.blocked = blockedError })
	}
	isKnown := c.known().err == message || c.known().err != "" && m.reported == id && kube.ReportedRecently(m.reportedAt, now)
	if isKnown {
		return err
	}
	if writeErr := l.patchStatus(ctx, c, errorChange(message, now)); writeErr != nil {
		klog.FromContext(ctx).Info("Updating the status failed", "err", writeErr)
		if !kube.IsRefused(writeErr) || m.reported == id && kube.ReportedRecently(m.reportedAt, now) {
			return err
		}
	}
	l.remember(c.UID, func(m *memory) { m.reported, m.reportedAt = id, now })
	l.event(c, warning, reason, message)
	return err
}

// failureWords returns the reason of an event about a failure of c, and the words with which its text begins.
func (c *content) failureWords(creation bool) (reason, prefix string) {
	if creation {
		return c.created, "Failed to create " + c.noun + ": "
	}
	return c.checked, "Failed to check and update " + c.noun + " content: "
}

// announce sends an event about what a deletion waits for, once per cause.
func (l *loop) announce(c *content, waitsFor cause) {
	l.remember(c.UID, func(m *memory) { m.blocked = waitsFor.reason })
	l.eventOnce(c, waitsFor.reason, normal, reasonPending, "Waiting for "+waitsFor.text)
}

// eventOnce sends an event about c once per key.
func (l *loop) eventOnce(c *content, key, eventType, reason, text string) {
	isNew := false
	l.remember(c.UID, func(m *memory) {
		isNew = !slices.Contains(m.announced, key)
		if isNew {
			m.announced = append(slices.Clip(m.announced), key) // copies of m are in use
		}
	})
	if isNew {
		l.event(c, eventType, reason, text)
	}
}
