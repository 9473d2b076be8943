// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// body is the status of a patch as it goes over the wire.
func body(t *testing.T, p statusPatch) string {
	t.Helper()
	data, err := p.patch("u")
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestErrorStatus(t *testing.T) {
	failed := status.Error(codes.ResourceExhausted, "full")
	at := now.UTC().Format(time.RFC3339)
	had := func(message string, code *int32, ago time.Duration) func(*storagev1.VolumeAttachment) {
		return func(va *storagev1.VolumeAttachment) {
			va.Status.AttachError = &storagev1.VolumeError{Message: message, ErrorCode: code, Time: metav1.NewTime(now.Add(-ago))}
		}
	}
	tests := map[string]struct {
		va       *storagev1.VolumeAttachment
		err      error
		detach   bool
		withCode bool
		want     string // "" for no patch
	}{
		"of a call": {
			testAttachment(), failed, false, true,
			`{"attachError":{"errorCode":8,"message":"rpc error: code = ResourceExhausted desc = full","time":"` + at + `"}}`,
		},
		"of a call, gate off": {
			testAttachment(), failed, false, false,
			`{"attachError":{"errorCode":null,"message":"rpc error: code = ResourceExhausted desc = full","time":"` + at + `"}}`,
		},
		"of no call": {
			testAttachment(had("x", ptr.To[int32](8), 0)), errors.New("y"), false, true,
			`{"attachError":{"errorCode":null,"message":"y","time":"` + at + `"}}`,
		},
		"of a detach": {
			testAttachment(), failed, true, true,
			`{"detachError":{"errorCode":null,"message":"rpc error: code = ResourceExhausted desc = full","time":"` + at + `"}}`,
		},
		"the same, recent": {testAttachment(had("y", nil, 59*time.Second)), errors.New("y"), false, true, ""},
		"the same, long ago": {
			testAttachment(had("y", nil, time.Minute)), errors.New("y"), false, true,
			`{"attachError":{"errorCode":null,"message":"y","time":"` + at + `"}}`,
		},
		"the same, other code": {
			testAttachment(had("rpc error: code = ResourceExhausted desc = full", nil, 0)), failed, false, true,
			`{"attachError":{"errorCode":8,"message":"rpc error: code = ResourceExhausted desc = full","time":"` + at + `"}}`,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got := errorStatus(tt.va, tt.err, tt.detach, tt.withCode, now)
			if tt.want == "" {
				if got != nil {
					t.Errorf("got %v, want no patch", got)
				}
				return
			}
			if diff := cmp.Diff(`{"metadata":{"uid":"u"},"status":`+tt.want+`}`, body(t, got)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestAttachedStatus(t *testing.T) {
	va := testAttachment(func(va *storagev1.VolumeAttachment) {
		va.Status.AttachmentMetadata = map[string]string{"old": "1", "kept": "1"}
	})
	got := body(t, attachedStatus(va, map[string]string{"kept": "2", "new": "3"}))
	want := `{"metadata":{"uid":"u"},"status":{"attachError":null,"attached":true,"attachmentMetadata":{"kept":"2","new":"3","old":null}}}`
	if got != want {
		t.Errorf("got %s", got)
	}
	if got, want := body(t, attachedStatus(va, nil)),
		`{"metadata":{"uid":"u"},"status":{"attachError":null,"attached":true,"attachmentMetadata":null}}`; got != want {
		t.Errorf("got %s", got)
	}
	var decoded map[string]any
	if err := json.Unmarshal([]byte(body(t, detachedStatus(va))), &decoded); err != nil || len(decoded["status"].(map[string]any)) != 3 {
		t.Errorf("%v, %v", decoded, err)
	}
}

func TestMetadataLimit(t *testing.T) {
	if err := checkMetadata(map[string]string{"k": strings.Repeat("v", maxMetadata-1)}); err != nil {
		t.Error(err)
	}
	if err := checkMetadata(map[string]string{"k": strings.Repeat("v", maxMetadata)}); err == nil {
		t.Error("accepted")
	}
}

func TestOnlyOwnChanges(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*storagev1.VolumeAttachment)
		own    bool
	}{
		"nothing":          {func(*storagev1.VolumeAttachment) {}, true},
		"our finalizer":    {protected, true},
		"our error":        {func(va *storagev1.VolumeAttachment) { va.Status.AttachError = &storagev1.VolumeError{Message: "x"} }, true},
		"resourceVersion":  {func(va *storagev1.VolumeAttachment) { va.ResourceVersion = "9" }, true},
		"a label":          {func(va *storagev1.VolumeAttachment) { va.Labels = map[string]string{"a": "b"} }, false},
		"their finalizer":  {func(va *storagev1.VolumeAttachment) { va.Finalizers = []string{"theirs"} }, false},
		"their annotation": {func(va *storagev1.VolumeAttachment) { va.Annotations = map[string]string{"a": "b"} }, false},
		"being deleted":    {deleting, false},
		"attached":         {attached, false},
		"another UID":      {func(va *storagev1.VolumeAttachment) { va.UID = "2" }, false},
		"an empty list":    {func(va *storagev1.VolumeAttachment) { va.Finalizers = []string{} }, true},
		"metadata of the attachment": {
			func(va *storagev1.VolumeAttachment) { va.Status.AttachmentMetadata = map[string]string{"a": "b"} }, false,
		},
		"their annotation beside ours": {
			func(va *storagev1.VolumeAttachment) { va.Annotations = map[string]string{annNodeID: "n", "a": ""} }, false,
		},
		"all of ours": {
			func(va *storagev1.VolumeAttachment) {
				va.Annotations = map[string]string{annNodeID: "n", annVolumeHandle: "v", annSecret: "n/s", annMigrated: "true"}
			}, true,
		},
	} {
		va := testAttachment()
		tt.change(va)
		if got := testDriver(nil).onlyOwnChanges(testAttachment(), va); got != tt.own {
			t.Errorf("%s: %t", name, got)
		}
		if got := testDriver(nil).onlyOwnChanges(va, testAttachment()); got != tt.own {
			t.Errorf("%s, undone: %t", name, got)
		}
	}
	theirs := func(value string) *storagev1.VolumeAttachment {
		return testAttachment(func(va *storagev1.VolumeAttachment) { va.Annotations = map[string]string{"a": value} })
	}
	if testDriver(nil).onlyOwnChanges(theirs("1"), theirs("2")) {
		t.Error("another value of their annotation is ours")
	}
}
