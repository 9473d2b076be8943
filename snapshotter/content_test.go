// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"encoding/json"
	"reflect"
	"testing"

	groupv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
)

// TestWatched: caches have the contents of the driver, whose other fields are not retained, and stubs.
func TestWatched(t *testing.T) {
	received := func() metav1.ObjectMeta {
		return metav1.ObjectMeta{
			Name: "o", UID: "u", ResourceVersion: "1", Annotations: map[string]string{lastApplied: "{}", "a": "b"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "m"}},
		}
	}
	whole := metav1.ObjectMeta{Name: "o", UID: "u", ResourceVersion: "1", Annotations: map[string]string{"a": "b"}}
	stub := metav1.ObjectMeta{Name: "o", UID: "u", ResourceVersion: "1"}
	parameters := map[string]string{"a": "b"}
	for name, test := range map[string]struct {
		object runtime.Object
		want   any
	}{
		"content": {&snapshotv1.VolumeSnapshotContent{
			ObjectMeta: received(), Spec: snapshotv1.VolumeSnapshotContentSpec{Driver: driverName}},
			&content{kind: snapshotKind, ObjectMeta: &whole, driver: driverName}},
		"content of another driver": {&snapshotv1.VolumeSnapshotContent{ObjectMeta: received()},
			&metav1.PartialObjectMetadata{ObjectMeta: stub}},
		"group": {&groupv1.VolumeGroupSnapshotContent{
			ObjectMeta: received(), Spec: groupv1.VolumeGroupSnapshotContentSpec{Driver: driverName}},
			&content{kind: groupKind, ObjectMeta: &whole, driver: driverName}},
		"group of another driver": {&groupv1.VolumeGroupSnapshotContent{ObjectMeta: received()},
			&metav1.PartialObjectMetadata{ObjectMeta: stub}},
		"class": {&snapshotv1.VolumeSnapshotClass{ObjectMeta: received(), Driver: driverName, Parameters: parameters},
			&class{&stub, driverName, parameters}},
		"class of another driver": {&snapshotv1.VolumeSnapshotClass{ObjectMeta: received(), Driver: "other", Parameters: parameters},
			&class{&stub, "other", nil}},
		"group class": {&groupv1.VolumeGroupSnapshotClass{ObjectMeta: received(), Driver: driverName, Parameters: parameters},
			&class{&stub, driverName, parameters}},
	} {
		got, err := testDriver().watched(test.object)
		if err != nil || !reflect.DeepEqual(got, test.want) {
			t.Errorf("%s: got %+v, %v", name, got, err)
		}
		if again, err := testDriver().watched(got); err != nil || again != got { // an informer may call it twice
			t.Errorf("%s: got %+v, %v the second time", name, again, err)
		}
		if _, is := got.(*content); is {
			if _, err := json.Marshal(got); err == nil { // nothing may compare it with an API object
				t.Errorf("%s has an encoding", name)
			}
		}
	}
}

// TestApply: an update of the status, without permission to patch, keeps the other members, and none of a list that is replaced.
func TestApply(t *testing.T) {
	for name, test := range map[string]struct {
		object runtime.Object
		change statusChange
		want   string
	}{
		"nanoseconds are kept": {
			&snapshotv1.VolumeSnapshotContent{Status: &snapshotv1.VolumeSnapshotContentStatus{
				CreationTime: ptr.To(int64(1795967099164107224)), RestoreSize: ptr.To(int64(5)), ReadyToUse: ptr.To(false)}},
			statusChange{"readyToUse": true, "restoreSize": nil}, `{"creationTime":1795967099164107224,"readyToUse":true}`,
		},
		"a list": {
			&groupv1.VolumeGroupSnapshotContent{Status: &groupv1.VolumeGroupSnapshotContentStatus{
				VolumeSnapshotInfoList: []groupv1.VolumeSnapshotInfo{{SnapshotHandle: "a", RestoreSize: ptr.To(int64(5))}}}},
			statusChange{"volumeSnapshotInfoList": []groupv1.VolumeSnapshotInfo{{SnapshotHandle: "b"}}},
			`{"volumeSnapshotInfoList":[{"snapshotHandle":"b"}]}`,
		},
		"no status": {&groupv1.VolumeGroupSnapshotContent{}, statusChange{"readyToUse": false}, `{"readyToUse":false}`},
	} {
		test.change.apply(test.object)
		text, err := json.Marshal(test.object)
		var got struct{ Status json.RawMessage }
		if err == nil {
			err = json.Unmarshal(text, &got)
		}
		if err != nil || string(got.Status) != test.want {
			t.Errorf("%s: got %s, %v", name, got.Status, err)
		}
	}
}
