package attacher

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/status"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
)

const (
	// maxMessage and maxMetadata are what the API server accepts, in bytes.
	maxMessage  = 1024
	maxMetadata = 256 * 1024
	// sameErrorInterval is how often the time of an error that stays the same is
	// written anew.
	sameErrorInterval = time.Minute
)

// statusPatch is fields of the status of an attachment; nil removes one.
type statusPatch map[string]any

// patch is a merge patch for the attachment of that UID and no other of its name.
func (p statusPatch) patch(uid types.UID) ([]byte, error) {
	return json.Marshal(map[string]any{"metadata": map[string]any{"uid": uid}, "status": p})
}

// attachedStatus says that va is attached; an error of earlier attempts goes. It is nil
// when all of that is so.
func attachedStatus(va *storagev1.VolumeAttachment, metadata map[string]string) statusPatch {
	if va.Status.Attached && va.Status.AttachError == nil && maps.Equal(va.Status.AttachmentMetadata, metadata) {
		return nil
	}
	fields := statusPatch{"attached": true, "attachError": nil, "attachmentMetadata": nil}
	if len(metadata) > 0 {
		merged := map[string]any{}
		for k := range va.Status.AttachmentMetadata {
			merged[k] = nil // goes, unless the driver has said it again
		}
		for k, v := range metadata {
			merged[k] = v
		}
		fields["attachmentMetadata"] = merged
	}
	return fields
}

// detachedStatus is for an attachment that stays because of somebody else's finalizer. It
// is nil when it says that it is detached.
func detachedStatus(va *storagev1.VolumeAttachment) statusPatch {
	if !va.Status.Attached && va.Status.AttachmentMetadata == nil && va.Status.DetachError == nil {
		return nil
	}
	return statusPatch{"attached": false, "attachmentMetadata": nil, "detachError": nil}
}

// errorStatus says why va cannot be attached, or detached; nil when that is said
// already. withCode adds the gRPC code of the error of a call.
func errorStatus(va *storagev1.VolumeAttachment, err error, detach, withCode bool, now time.Time) statusPatch {
	e := storagev1.VolumeError{Time: metav1.NewTime(now), Message: truncate(strings.ToValidUTF8(err.Error(), "?"), maxMessage)}
	field, before := "attachError", va.Status.AttachError
	if detach {
		field, before = "detachError", va.Status.DetachError
	} else if s, ok := status.FromError(err); ok && withCode {
		e.ErrorCode = ptr.To(int32(s.Code()))
	}
	if before != nil && before.Message == e.Message && ptr.Equal(before.ErrorCode, e.ErrorCode) && now.Sub(before.Time.Time) < sameErrorInterval {
		return nil
	}
	fields := map[string]any{"message": e.Message, "time": e.Time, "errorCode": nil}
	if e.ErrorCode != nil {
		fields["errorCode"] = *e.ErrorCode
	}
	return statusPatch{field: fields}
}

// truncate is s cut to limit bytes, between two characters.
func truncate(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	for limit > 0 && !utf8.RuneStart(s[limit]) {
		limit--
	}
	return s[:limit]
}

// checkMetadata refuses what the API server would.
func checkMetadata(metadata map[string]string) error {
	size := 0
	for k, v := range metadata {
		size += len(k) + len(v)
	}
	if size > maxMetadata {
		return fmt.Errorf("the driver returned a publish_context of %d bytes; a VolumeAttachment can hold %d", size, maxMetadata)
	}
	return nil
}

// onlyOwnChanges tells whether va differs from old in nothing but what this
// controller writes. Such an update must not cut a back-off short: the error that
// it reports would be retried at once.
func (d driver) onlyOwnChanges(old, va *storagev1.VolumeAttachment) bool {
	return d.content(old) == d.content(va)
}

// content is that of va without what this controller writes while an attachment
// is not finished. Only what can be a reason for another look is in it.
func (d driver) content(va *storagev1.VolumeAttachment) string {
	c := va.DeepCopy()
	own := kube.MetadataPatch{
		RemoveFinalizers:  []string{d.finalizer},
		RemoveAnnotations: []string{annNodeID, annVolumeHandle, annSecret, annMigrated},
	}
	own.Apply(c)
	c.ResourceVersion, c.ManagedFields, c.Generation = "", nil, 0
	c.Status.AttachError, c.Status.DetachError = nil, nil
	data, err := json.Marshal(c)
	if err != nil {
		return "" // cannot be; equal to another such, which then only waits for its back-off
	}
	return string(data)
}
