// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// sameErrorInterval limits how often an error is written that differs only in volatile text.
const sameErrorInterval = time.Minute

// statusChange holds members of a status by name; nil removes a member.
type statusChange map[string]any

// patchOp is one operation of a JSON patch (RFC 6902). A test for null passes if the value is absent.
type patchOp struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// patch returns the JSON patch that applies s to c. The API server ignores the UID of a merge patch of a
// custom resource's status, so that it has to be tested. The patch fails if it would revert a status that
// is ready, or the list of its snapshots: c may be outdated.
func (s statusChange) patch(c *content) ([]byte, error) {
	ops := []patchOp{{"test", "/metadata/uid", c.uid()}}
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

// errorChange returns the change that records message, a result of [errorMessage].
func errorChange(message string, now time.Time) statusChange {
	return statusChange{"readyToUse": false, "error": map[string]any{"message": message, "time": metav1.NewTime(now)}}
}

// errorMessage returns the text of err for the status, cut to the allowed length.
func errorMessage(prefix string, err error) string {
	return kube.Message(prefix + err.Error())
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

// patchStatus applies change to the status of obj. If obj is outdated, it is read, and the next
// attempt decides again.
func (l *loop[T, C]) patchStatus(ctx context.Context, obj T, change statusChange) error {
	c := l.content(obj)
	data, err := change.patch(c)
	if err != nil {
		return err
	}
	written, err := l.status.Patch(ctx, obj.GetName(), types.JSONPatchType, data, metav1.PatchOptions{})
	switch {
	case apierrors.IsForbidden(err):
		written, err = l.objects.UpdateInstead(ctx, l.status, obj, func(live T) T {
			_, list := change["volumeSnapshotInfoList"]
			if (change["readyToUse"] == false || list && !c.known().ready) && l.content(live).known().ready {
				return live
			}
			return applied(live, change)
		}, err)
	case apierrors.IsInvalid(err), apierrors.IsConflict(err):
		if _, _, readErr := l.objects.Refetch(ctx, l.writer, obj); readErr != nil {
			return readErr
		}
		return err
	}
	if err != nil {
		written = obj
	}
	return l.objects.RecordWrite(obj, written, err)
}

// applied returns a copy of live with change applied to its status.
func applied[T object](live T, change statusChange) T {
	var fields map[string]any
	data, err := json.Marshal(live)
	if err == nil {
		err = json.Unmarshal(data, &fields)
	}
	if err == nil {
		members, _ := fields["status"].(map[string]any)
		if members == nil {
			members = map[string]any{}
		}
		for name, value := range change {
			members[name] = value
			if value == nil {
				delete(members, name)
			}
		}
		fields["status"] = members
		data, err = json.Marshal(fields)
	}
	changed := reflect.New(reflect.TypeOf(live).Elem()).Interface().(T) // decoding into live would keep the removed members
	if err == nil {
		err = json.Unmarshal(data, changed)
	}
	if err != nil {
		panic(err) // an API object has an encoding
	}
	return changed
}
