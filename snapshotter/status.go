// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

// statusChange holds members of a status by name; nil removes a member.
type statusChange map[string]any

// patchOp is one operation of a JSON patch (RFC 6902). A test for null passes if the value is absent.
type patchOp struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// patch returns the JSON patch that applies s to c. The API server ignores the UID of a merge patch of a custom resource's status, so that
// it has to be tested. The patch fails if it would revert a status that is ready, or the list of its snapshots: c may be outdated.
func (s statusChange) patch(c *content) ([]byte, error) {
	ops := []patchOp{{"test", "/metadata/uid", c.UID}}
	if c.status == nil {
		whole := maps.Clone(s)
		maps.DeleteFunc(whole, func(_ string, v any) bool { return v == nil })
		return json.Marshal(append(ops, patchOp{"test", "/status", nil}, patchOp{"add", "/status", whole}))
	}
	if _, list := s["volumeSnapshotInfoList"]; list || s["readyToUse"] == false {
		var ready any
		if c.status.hasReady {
			ready = c.status.ready && s["readyToUse"] != false
		}
		ops = append(ops, patchOp{"test", "/status/readyToUse", ready})
	}
	for _, name := range slices.Sorted(maps.Keys(s)) {
		op := patchOp{"add", "/status/" + name, s[name]}
		if s[name] == nil {
			op.Op = "remove"
		}
		ops = append(ops, op)
	}
	return json.Marshal(ops)
}

// errorChange returns the change that records message.
func errorChange(message string, now time.Time) statusChange {
	return statusChange{"readyToUse": false, "error": map[string]any{"message": message, "time": metav1.NewTime(now)}}
}

// clearedStatus returns the change that removes the result of a deleted snapshot from c.
func clearedStatus(c *content) statusChange {
	s, change := c.known(), statusChange{}
	if s.handle != "" {
		change[c.handleField] = nil
	}
	if s.created {
		change["creationTime"] = nil
	}
	if s.size != nil {
		change["restoreSize"] = nil
	}
	if s.hasReady {
		change["readyToUse"] = nil
	}
	return change
}

// patchStatus applies change to the status of c. If c is outdated, it is read, and the next attempt decides again.
func (l *loop) patchStatus(ctx context.Context, c *content, change statusChange) error {
	data, err := change.patch(c)
	if err != nil {
		return err
	}
	written, err := l.status.Patch(ctx, c.Name, types.JSONPatchType, data, metav1.PatchOptions{})
	switch {
	case apierrors.IsForbidden(err):
		written, err = l.objects.UpdateInstead(ctx, l.status, c, func(live *content) *content {
			_, list := change["volumeSnapshotInfoList"]
			if live.known().ready && (change["readyToUse"] == false || list && !c.known().ready) {
				return live
			}
			change.apply(live.raw)
			return live
		}, err)
	case apierrors.IsInvalid(err), apierrors.IsConflict(err):
		if _, _, readErr := l.objects.Refetch(ctx, l.writer, c); readErr != nil {
			return readErr
		}
		return err
	}
	if err != nil {
		written = c
	}
	return l.objects.RecordWrite(c, written, err)
}

// apply changes the status of o, an API object.
func (s statusChange) apply(o runtime.Object) {
	removed := statusChange{}
	for name := range s {
		removed[name] = nil
	}
	// Decoding a list keeps members of the previous one.
	for _, status := range []statusChange{removed, s} {
		data, err := json.Marshal(map[string]any{"status": status})
		if err == nil {
			err = json.Unmarshal(data, o)
		}
		if err != nil {
			panic(err) // a status has an encoding
		}
	}
}
