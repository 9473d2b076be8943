// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	groupv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// group creates a dynamic content g1 of two volumes and of the group class c1.
func (f *fixture) group(change func(*groupv1.VolumeGroupSnapshotContent)) *groupv1.VolumeGroupSnapshotContent {
	f.Helper()
	o := &groupv1.VolumeGroupSnapshotContent{
		ObjectMeta: metav1.ObjectMeta{Name: f.Unique("g1"), Finalizers: []string{GroupFinalizer}},
		Spec: groupv1.VolumeGroupSnapshotContentSpec{
			VolumeGroupSnapshotRef: corev1.ObjectReference{
				APIVersion: "groupsnapshot.storage.k8s.io/v1", Kind: "VolumeGroupSnapshot", Namespace: f.Namespace, Name: "s1", UID: uid,
			},
			DeletionPolicy: snapshotv1.VolumeSnapshotContentDelete, Driver: f.Driver, VolumeGroupSnapshotClassName: ptr.To(f.Unique("c1")),
			Source: groupv1.VolumeGroupSnapshotContentSource{VolumeHandles: []string{f.volume, f.Plugin.AddVolume("w", 5)}},
		},
	}
	if change != nil {
		change(o)
	}
	o, err := f.groupContents.Create(f.Context(), o, metav1.CreateOptions{})
	f.Must(err)
	return o
}

// groupScenario starts a snapshotter for a driver with groups.
func groupScenario(t *testing.T, change func(*Config)) *fixture {
	t.Helper()
	f := newFixture(t, csitest.Config{Groups: true}, change)
	f.class("c1", nil)
	f.groupClass(map[string]string{"a": "b"})
	f.start()
	return f
}

func (f *fixture) groupClass(parameters map[string]string) {
	f.Helper()
	_, err := f.groupClasses.Create(f.Context(), &groupv1.VolumeGroupSnapshotClass{
		ObjectMeta: metav1.ObjectMeta{Name: f.Unique("c1")}, Driver: f.Driver, Parameters: parameters,
		DeletionPolicy: snapshotv1.VolumeSnapshotContentDelete,
	}, metav1.CreateOptions{})
	f.Must(err)
}

// untilGroup waits until check accepts g1; nil is a deleted one.
func (f *fixture) untilGroup(what string,
	check func(*groupv1.VolumeGroupSnapshotContent) bool) (found *groupv1.VolumeGroupSnapshotContent) {
	f.Helper()
	kubetest.Eventually(f.T, "g1 "+what, func(ctx context.Context) (err error) {
		found, err = f.groupContents.Get(ctx, f.Unique("g1"), metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			found, err = nil, nil
		}
		if err == nil && !check(found) {
			text, _ := json.Marshal(found)
			err = fmt.Errorf("it is %s; events %v", text, f.events.all())
		}
		return err
	})
	return found
}

func isGroupComplete(o *groupv1.VolumeGroupSnapshotContent) bool {
	return o != nil && o.Status != nil && ptr.Deref(o.Status.ReadyToUse, false) && !has(o, AnnGroupBeingCreated)
}

func isGroupDeleted(o *groupv1.VolumeGroupSnapshotContent) bool { return o == nil }

// deleteGroup deletes g1 as the snapshot-controller does.
func (f *fixture) deleteGroup() {
	f.Helper()
	_, err := f.groupContents.Patch(f.Context(), f.Unique("g1"), types.MergePatchType,
		[]byte(fmt.Sprintf(`{"metadata":{"annotations":{%q:"yes"}}}`, AnnGroupBeingDeleted)), metav1.PatchOptions{})
	f.Must(err)
	f.Must(f.groupContents.GetClient().Delete().Resource("volumegroupsnapshotcontents").Name(f.Unique("g1")).Do(f.Context()).Error())
}

// member creates the content of a member of a group, with the status that the snapshot-controller
// writes.
func (f *fixture) member(name, group, handle string) {
	f.Helper()
	f.content(name, func(o *snapshotv1.VolumeSnapshotContent) {
		o.Spec.VolumeSnapshotClassName = nil
		o.Annotations = map[string]string{AnnGroup: group}
		if handle != "" {
			o.Status = &snapshotv1.VolumeSnapshotContentStatus{
				SnapshotHandle: ptr.To(handle), ReadyToUse: ptr.To(false), CreationTime: ptr.To(int64(1)),
				VolumeGroupSnapshotHandle: ptr.To(group),
			}
		}
	})
}

func groupNotReadyYet() csitest.Step {
	return csitest.Alter(func(r *csi.CreateVolumeGroupSnapshotResponse) {
		r.GroupSnapshot.ReadyToUse, r.GroupSnapshot.Snapshots[1].ReadyToUse = false, false
	})
}

func TestSnapshotterScenarioGroup(t *testing.T) {
	t.Run("069_created", func(t *testing.T) {
		f := groupScenario(t, nil)
		g := f.group(nil)
		o := f.untilGroup("is complete", isGroupComplete)
		r := f.Plugin.Calls(createGroup)[0].Request.(*csi.CreateVolumeGroupSnapshotRequest)
		if r.Name != "groupsnapshot-"+uid || !slices.Equal(r.SourceVolumeIds, g.Spec.Source.VolumeHandles) || r.Parameters["a"] != "b" {
			t.Errorf("request %v", r)
		}
		list := o.Status.VolumeSnapshotInfoList
		if len(list) != 2 || list[0].VolumeHandle != f.volume || list[0].SnapshotHandle == "" || *list[0].RestoreSize != 1<<30 ||
			!*list[1].ReadyToUse || list[1].CreationTime == nil || o.Status.CreationTime == nil || o.Status.Error != nil {
			t.Errorf("status %+v", o.Status)
		}
		f.Calls(createGroup, 1)
		f.writes(3, 0)
	})
	t.Run("070_backoff", func(t *testing.T) {
		for name, steps := range map[string]csitest.Step{
			"not_ready": groupNotReadyYet(), "final_error": csitest.Fail(codes.InvalidArgument, "no"),
		} {
			t.Run(name, func(t *testing.T) {
				f := groupScenario(t, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Second, time.Minute })
				f.Plugin.Always(createGroup, steps)
				f.group(nil)
				f.Wait(createGroup, 3)
				f.backsOff(createGroup, time.Second, 2*time.Second) // so at most six in 30 s
				if n := len(f.requests.all("PATCH")); n > 3 {
					t.Errorf("%d writes", n)
				}
			})
		}
	})
	t.Run("071_ready_later", func(t *testing.T) {
		f := groupScenario(t, nil)
		f.Plugin.Always(createGroup, groupNotReadyYet())
		f.group(nil)
		o := f.untilGroup("is created", func(o *groupv1.VolumeGroupSnapshotContent) bool {
			return o.Status != nil && len(o.Status.VolumeSnapshotInfoList) == 2 && !has(o, AnnGroupBeingCreated)
		})
		if *o.Status.ReadyToUse || *o.Status.VolumeSnapshotInfoList[1].ReadyToUse || !*o.Status.VolumeSnapshotInfoList[0].ReadyToUse {
			t.Errorf("status %+v", o.Status)
		}
		f.member("v1", *o.Status.VolumeGroupSnapshotHandle, o.Status.VolumeSnapshotInfoList[0].SnapshotHandle)
		f.quiet()
		if v1, err := f.get(t.Context(), "v1"); err != nil || *v1.Status.ReadyToUse {
			t.Errorf("the member is ready before the group: %+v, %v", v1, err)
		}
		f.Plugin.Always(createGroup, nil)
		o = f.untilGroup("is complete", isGroupComplete)
		if !*o.Status.VolumeSnapshotInfoList[1].ReadyToUse {
			t.Errorf("status %+v", o.Status)
		}
		f.until("is ready", isReady)
	})
	t.Run("071_groups_are_listed_late", func(t *testing.T) {
		f := newFixture(t, csitest.Config{Groups: true}, nil)
		f.class("c1", nil)
		f.groupClass(nil)
		var served atomic.Bool
		f.refuseWatches(func(r request) int {
			if strings.Contains(r.path, "groupsnapshot.storage.k8s.io") && !served.Load() {
				return 403
			}
			return 0
		})
		f.start()
		f.member("v1", "group-1", "snapshot-1")
		f.quiet()
		if v1, err := f.get(t.Context(), "v1"); err != nil || *v1.Status.ReadyToUse {
			t.Errorf("the member is ready, and its group is not known: %+v, %v", v1, err)
		}
		o := f.group(func(o *groupv1.VolumeGroupSnapshotContent) { o.Spec.Driver = f.Driver })
		kubetest.SetStatus(t, f.groupContents, o.Name,
			groupv1.VolumeGroupSnapshotContentStatus{VolumeGroupSnapshotHandle: ptr.To("group-1"), ReadyToUse: ptr.To(true)})
		served.Store(true)
		f.until("is ready", isReady)
	})
	t.Run("072_pre_provisioned", func(t *testing.T) {
		f := newFixture(t, csitest.Config{Groups: true}, nil)
		f.groupClass(map[string]string{
			"csi.storage.k8s.io/group-snapshotter-get-secret-name":      "s",
			"csi.storage.k8s.io/group-snapshotter-get-secret-namespace": "${volumegroupsnapshot.namespace}",
		})
		f.secret("s", map[string]string{"k": "v"})
		f.start()
		created, err := f.Plugin.CreateVolumeGroupSnapshot(t.Context(),
			&csi.CreateVolumeGroupSnapshotRequest{Name: "g", SourceVolumeIds: []string{f.volume}})
		f.Must(err)
		f.Plugin.Next(getGroup, csitest.Alter(func(r *csi.GetVolumeGroupSnapshotResponse) { r.GroupSnapshot.ReadyToUse = false }),
			csitest.Alter(func(r *csi.GetVolumeGroupSnapshotResponse) { r.GroupSnapshot.ReadyToUse = false }))
		handles := &groupv1.GroupSnapshotHandles{
			VolumeGroupSnapshotHandle: created.GroupSnapshot.GroupSnapshotId,
			VolumeSnapshotHandles:     []string{created.GroupSnapshot.Snapshots[0].SnapshotId},
		}
		f.group(func(o *groupv1.VolumeGroupSnapshotContent) {
			o.Spec.Source = groupv1.VolumeGroupSnapshotContentSource{GroupSnapshotHandles: handles}
		})
		o := f.untilGroup("is complete", isGroupComplete)
		if len(o.Status.VolumeSnapshotInfoList) > 0 || *o.Status.VolumeGroupSnapshotHandle != handles.VolumeGroupSnapshotHandle {
			t.Errorf("status %+v", o.Status)
		}
		r := f.Plugin.Calls(getGroup)[0].Request.(*csi.GetVolumeGroupSnapshotRequest)
		if r.Secrets["k"] != "v" || r.GroupSnapshotId != handles.VolumeGroupSnapshotHandle ||
			!slices.Equal(r.SnapshotIds, handles.VolumeSnapshotHandles) {
			t.Errorf("request %v", r)
		}
		f.Calls(getGroup, 3)
		f.writes(2, 0)
		f.deleteGroup()
		f.untilGroup("is deleted", isGroupDeleted)
		if d := f.Plugin.Calls(removeGroup)[0].Request.(*csi.DeleteVolumeGroupSnapshotRequest); !slices.Equal(d.SnapshotIds,
			handles.VolumeSnapshotHandles) {
			t.Errorf("request %v", d)
		}
	})
	t.Run("073_deleted", func(t *testing.T) {
		f := groupScenario(t, nil)
		f.group(nil)
		o := f.untilGroup("is complete", isGroupComplete)
		info := o.Status.VolumeSnapshotInfoList
		f.member("v1", *o.Status.VolumeGroupSnapshotHandle, info[0].SnapshotHandle)
		f.until("is ready", isReady)
		f.deleteGroup()
		f.untilGroup("is deleted", isGroupDeleted)
		f.delete("v1")
		f.until("is deleted", isDeleted)
		d := f.Plugin.Calls(removeGroup)[0].Request.(*csi.DeleteVolumeGroupSnapshotRequest)
		if !slices.Equal(d.SnapshotIds, []string{info[0].SnapshotHandle, info[1].SnapshotHandle}) {
			t.Errorf("request %v", d)
		}
		f.Calls(removeGroup, 1)
		f.Calls(removeSnapshot, 0)
		f.noSnapshots()
	})
	t.Run("073_deleted_during_its_creation", func(t *testing.T) {
		f := groupScenario(t, nil)
		f.Plugin.Always(createGroup, csitest.DoAndFail(codes.DeadlineExceeded, "unknown"))
		f.group(nil)
		f.untilGroup("reports it", func(o *groupv1.VolumeGroupSnapshotContent) bool { return o.Status != nil && o.Status.Error != nil })
		f.deleteGroup()
		f.waitEvent("Waiting for the outcome of CreateVolumeGroupSnapshot: ")
		f.Plugin.Always(createGroup, nil)
		f.untilGroup("is deleted", isGroupDeleted)
		if d := f.Plugin.Calls(removeGroup)[0].Request.(*csi.DeleteVolumeGroupSnapshotRequest); len(d.SnapshotIds) != 2 {
			t.Errorf("request %v", d)
		}
		f.Calls(getGroup, 0)
		f.noSnapshots()
	})
	t.Run("073_without_a_list", func(t *testing.T) {
		for _, exists := range []bool{true, false} {
			t.Run(fmt.Sprint(exists), func(t *testing.T) {
				f := groupScenario(t, nil)
				f.group(nil)
				o := f.untilGroup("is complete", isGroupComplete)
				kubetest.SetStatus(t, f.groupContents, o.Name, map[string]any{"volumeSnapshotInfoList": nil})
				want := 2
				if !exists {
					want = 0
					_, err := f.Plugin.DeleteVolumeGroupSnapshot(t.Context(),
						&csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: *o.Status.VolumeGroupSnapshotHandle})
					f.Must(err)
				}
				f.deleteGroup()
				f.untilGroup("is deleted", isGroupDeleted)
				d := f.Plugin.Calls(removeGroup)[0].Request.(*csi.DeleteVolumeGroupSnapshotRequest)
				if len(d.SnapshotIds) != want {
					t.Errorf("request %v", d)
				}
				f.noSnapshots()
			})
		}
	})
	t.Run("no_source", func(t *testing.T) {
		f := groupScenario(t, nil)
		f.group(func(o *groupv1.VolumeGroupSnapshotContent) {
			o.Spec.Source = groupv1.VolumeGroupSnapshotContentSource{GroupSnapshotHandles: &groupv1.GroupSnapshotHandles{
				VolumeSnapshotHandles: []string{"s"},
			}}
		})
		f.untilGroup("reports it", func(o *groupv1.VolumeGroupSnapshotContent) bool {
			return o != nil && o.Status != nil && o.Status.Error != nil && strings.Contains(*o.Status.Error.Message, "has empty handles")
		})
		f.deleteGroup()
		f.untilGroup("is deleted", isGroupDeleted)
		f.Calls(removeGroup, 0)
	})
	t.Run("074_member_without_status", func(t *testing.T) {
		f := groupScenario(t, nil)
		f.member("v1", "group-1", "")
		before, err := f.get(t.Context(), "v1")
		f.Must(err)
		f.quiet()
		f.unchanged("v1", before)
		if calls := f.Plugin.Calls(); len(calls) > 0 {
			t.Errorf("calls %v", calls)
		}
	})
	// A backup restores a member without its group.
	for name, test := range map[string]struct {
		policy snapshotv1.DeletionPolicy
		group  bool // exists
		events int
	}{"": {"Delete", false, 1}, "_retained": {"Retain", false, 0}, "_with_its_group": {"Delete", true, 0}} {
		t.Run("073_restored_member"+name, func(t *testing.T) {
			f := groupScenario(t, nil)
			group := "group-1"
			if test.group {
				f.group(nil)
				group = *f.untilGroup("is complete", isGroupComplete).Status.VolumeGroupSnapshotHandle
			}
			o := f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) {
				f.preProvisioned(o)
				o.Spec.VolumeSnapshotRef.UID, o.Finalizers, o.Spec.DeletionPolicy = "restored", []string{Finalizer}, test.policy
				o.Status = &snapshotv1.VolumeSnapshotContentStatus{SnapshotHandle: o.Spec.Source.SnapshotHandle, ReadyToUse: ptr.To(true),
					CreationTime: ptr.To(int64(1)), VolumeGroupSnapshotHandle: &group}
			})
			f.delete("v1")
			f.until("is deleted", isDeleted)
			f.Calls(removeSnapshot, 0)
			if got := f.events.with("Warning SnapshotDeleteError", *o.Spec.Source.SnapshotHandle, group); len(got) != test.events {
				t.Errorf("events %q", f.events.all())
			}
		})
	}
	t.Run("no_class", func(t *testing.T) {
		f := groupScenario(t, nil)
		g := f.group(func(o *groupv1.VolumeGroupSnapshotContent) { o.Spec.VolumeGroupSnapshotClassName = nil })
		f.waitEvent("Warning GroupSnapshotCreationFailed Failed to create group snapshot: failed to get input parameters to create group "+
			"snapshot for group snapshot content "+g.Name, "failed to take group snapshot "+g.Name+" without a group snapshot class")
	})
	t.Run("served_only_in_v1beta1", func(t *testing.T) {
		f := newFixture(t, csitest.Config{Groups: true}, nil)
		f.Watch = kubetest.Proxy(f, f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			w.Header().Set("Content-Type", "application/json")
			switch {
			case !strings.Contains(r.URL.Path, "groupsnapshot.storage.k8s.io"):
				pass.ServeHTTP(w, r)
			case strings.Contains(r.URL.Path, "/v1beta1/"):
				fmt.Fprint(w, `{"kind":"VolumeGroupSnapshotContentList","apiVersion":"groupsnapshot.storage.k8s.io/v1beta1","items":[]}`)
			default:
				w.WriteHeader(http.StatusNotFound)
			}
		})
		f.start()
		kubetest.Eventually(t, "the reason names the upgrade", func(context.Context) error {
			if _, _, reason := f.c.groups.Get(); !containsAll(reason.Error(), "only in version v1beta1", "8.4 or later") {
				return reason
			}
			return nil
		})
	})
	t.Run("075_groups_are_off", func(t *testing.T) {
		for name, off := range map[string]struct {
			plugin csitest.Config
			change func(*Config)
		}{
			"without_the_capability": {csitest.Config{Groups: false}, nil},
			"gate":                   {csitest.Config{Groups: true}, func(c *Config) { c.Groups = false }},
			"node_deployment":        {csitest.Config{Groups: true}, func(c *Config) { c.NodeDeployment, c.NodeName = true, "n1" }},
		} {
			t.Run(name, func(t *testing.T) {
				f := newFixture(t, off.plugin, off.change)
				f.class("c1", nil)
				f.groupClass(nil)
				f.start()
				f.group(nil)
				f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) { o.Labels = map[string]string{LabelManagedBy: "n1"} })
				f.until("is complete", isComplete)
				f.Calls(createGroup, 0)
			})
		}
	})
	for i, problem := range []string{"a group without snapshots", "1 snapshots of 2 volumes"} {
		t.Run("snapshots_are_missing_in_the_answer", func(t *testing.T) {
			f := groupScenario(t, nil)
			f.Plugin.Always(createGroup, csitest.Alter(func(r *csi.CreateVolumeGroupSnapshotResponse) {
				r.GroupSnapshot.Snapshots = r.GroupSnapshot.Snapshots[:i]
			}))
			f.group(nil)
			f.untilGroup("reports it", func(o *groupv1.VolumeGroupSnapshotContent) bool {
				return o.Status != nil && o.Status.VolumeGroupSnapshotHandle != nil && o.Status.Error != nil && !*o.Status.ReadyToUse &&
					containsAll(*o.Status.Error.Message, problem)
			})
			kubetest.Eventually(t, "/statusz shows the problem between two checks", func(context.Context) error {
				all := f.c.deps.Queues.Status()
				if len(all) != 2 || len(all[1].Failing) != 1 || !strings.Contains(all[1].Failing[0].Error, problem) ||
					all[1].Failing[0].Attempts < 2 {
					return fmt.Errorf("it shows %+v", all)
				}
				return nil
			})
			if i == 0 {
				f.Plugin.Always(createGroup, nil)
				if o := f.untilGroup("is complete", isGroupComplete); len(o.Status.VolumeSnapshotInfoList) != 2 {
					t.Errorf("status %+v", o.Status)
				}
			}
			f.deleteGroup() // if snapshots are missing, the driver is asked for them
			f.untilGroup("is deleted", isGroupDeleted)
			if d := f.Plugin.Calls(removeGroup)[0].Request.(*csi.DeleteVolumeGroupSnapshotRequest); len(d.SnapshotIds) != 2 {
				t.Errorf("request %v", d)
			}
		})
	}
	t.Run("fewer_snapshots_in_a_later_answer", func(t *testing.T) {
		f := groupScenario(t, nil)
		f.Plugin.Always(createGroup, groupNotReadyYet())
		f.group(nil)
		list := f.untilGroup("is created", func(o *groupv1.VolumeGroupSnapshotContent) bool {
			return o.Status != nil && len(o.Status.VolumeSnapshotInfoList) == 2 && !has(o, AnnGroupBeingCreated)
		}).Status.VolumeSnapshotInfoList
		f.Plugin.Always(createGroup, csitest.Alter(func(r *csi.CreateVolumeGroupSnapshotResponse) {
			r.GroupSnapshot.Snapshots = r.GroupSnapshot.Snapshots[:1]
		}))
		f.waitEvent("GroupSnapshotContentCheckandUpdateFailed", list[1].SnapshotHandle)
		f.Wait(createGroup, f.Plugin.Count(createGroup)+3)
		f.writes(4, 0) // record, result, end, error
		if got := f.events.all(); len(got) != 1 {
			t.Errorf("events %q", got)
		}
		f.Plugin.Always(createGroup, nil)
		o := f.untilGroup("is complete", isGroupComplete)
		if len(o.Status.VolumeSnapshotInfoList) != 2 || o.Status.Error != nil {
			t.Errorf("status %+v", o.Status)
		}
		f.writes(5, 0)
	})
	t.Run("v1beta2", func(t *testing.T) {
		kubetest.NeedReal(t) // converts versions
		f := newFixture(t, csitest.Config{Groups: true}, nil)
		f.groupClass(nil)
		notFound := func(r request) int {
			if containsAll(r.path, "groupsnapshot.storage.k8s.io/v1/") {
				return 404
			}
			return 0
		}
		f.refuseWatches(notFound)
		f.requests.refusing(notFound)
		f.start()
		f.group(nil)
		f.untilGroup("is complete", isGroupComplete)
		f.deleteGroup()
		f.untilGroup("is deleted", isGroupDeleted)
		f.noSnapshots()
	})
}
