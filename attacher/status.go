// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc/status"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// maxMetadata is a limit of the API server, in bytes.
const maxMetadata = 256 * 1024

// statusPatch holds fields of a VolumeAttachment's status; nil removes a field.
type statusPatch map[string]any

// patch returns a merge patch that applies only to the VolumeAttachment with that UID.
func (p statusPatch) patch(uid types.UID) ([]byte, error) {
	return json.Marshal(map[string]any{"metadata": map[string]any{"uid": uid}, "status": p})
}

// attachedStatus returns the fields that mark va attached and remove its attachError, or
// nil if va is up to date.
func attachedStatus(va *storagev1.VolumeAttachment, metadata map[string]string) statusPatch {
	if va.Status.Attached && va.Status.AttachError == nil && maps.Equal(va.Status.AttachmentMetadata, metadata) {
		return nil
	}
	fields := statusPatch{"attached": true, "attachError": nil, "attachmentMetadata": nil}
	if len(metadata) > 0 {
		merged := map[string]any{}
		for k := range va.Status.AttachmentMetadata {
			merged[k] = nil // removed, unless metadata contains it
		}
		for k, v := range metadata {
			merged[k] = v
		}
		fields["attachmentMetadata"] = merged
	}
	return fields
}

// detachedStatus returns the fields that mark va detached, or nil if va is up to date. It
// matters if another component's finalizer keeps va after the detach.
func detachedStatus(va *storagev1.VolumeAttachment) statusPatch {
	if !va.Status.Attached && va.Status.AttachmentMetadata == nil && va.Status.DetachError == nil {
		return nil
	}
	return statusPatch{"attached": false, "attachmentMetadata": nil, "detachError": nil}
}

// errorStatus returns the fields that record err, or nil if va has the same, recent error.
// withCode adds the gRPC code of a failed publish.
func errorStatus(va *storagev1.VolumeAttachment, err error, detach, withCode bool, now time.Time) statusPatch {
	e := storagev1.VolumeError{Time: metav1.NewTime(now), Message: kube.Message(err.Error())}
	field, before := "attachError", va.Status.AttachError
	if detach {
		field, before = "detachError", va.Status.DetachError
	} else if s, ok := status.FromError(err); ok && withCode {
		e.ErrorCode = ptr.To(int32(s.Code()))
	}
	same := before != nil && before.Message == e.Message && ptr.Equal(before.ErrorCode, e.ErrorCode)
	if same && kube.ReportedRecently(before.Time.Time, now) {
		return nil
	}
	fields := map[string]any{"message": e.Message, "time": e.Time, "errorCode": nil}
	if e.ErrorCode != nil {
		fields["errorCode"] = *e.ErrorCode
	}
	return statusPatch{field: fields}
}

// checkMetadata returns an error for metadata that the API server would reject.
func checkMetadata(metadata map[string]string) error {
	size := 0
	for k, v := range metadata {
		size += len(k) + len(v)
	}
	if size > maxMetadata {
		return fmt.Errorf("publish_context of the driver has %d bytes, a VolumeAttachment holds at most %d", size, maxMetadata)
	}
	return nil
}

// onlyOwnChanges reports whether va differs from old only in fields that the attacher
// writes while it attaches or detaches. Such an update must not reset the back-off:
// recording an error would otherwise retry immediately. The spec is immutable.
func (d driver) onlyOwnChanges(old, va *storagev1.VolumeAttachment) bool {
	finalizers := func(va *storagev1.VolumeAttachment) []string {
		return slices.DeleteFunc(slices.Clone(va.Finalizers), func(f string) bool { return f == d.finalizer })
	}
	annotations := func(va *storagev1.VolumeAttachment) map[string]string {
		of := maps.Clone(va.Annotations)
		for _, own := range []string{annNodeID, annFormerNodeIDs, annVolumeHandle, annSecret, annMigrated} {
			delete(of, own)
		}
		return of
	}
	return old.UID == va.UID && old.DeletionTimestamp.Equal(va.DeletionTimestamp) && old.Status.Attached == va.Status.Attached &&
		maps.Equal(old.Status.AttachmentMetadata, va.Status.AttachmentMetadata) && maps.Equal(old.Labels, va.Labels) &&
		slices.Equal(finalizers(old), finalizers(va)) && maps.Equal(annotations(old), annotations(va))
}
