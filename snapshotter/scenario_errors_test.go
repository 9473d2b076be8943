// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/container-storage-interface/spec/lib/go/csi"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// gaps returns the times between the calls of a method.
func (f *fixture) gaps(method string) (gaps []time.Duration) {
	calls := f.Plugin.Calls(method)
	for i := 1; i < len(calls); i++ {
		gaps = append(gaps, calls[i].Began.Sub(calls[i-1].Ended))
	}
	return gaps
}

// backsOff fails the test unless the gaps are at least those of want.
func (f *fixture) backsOff(method string, want ...time.Duration) {
	f.Helper()
	gaps := f.gaps(method)
	for i, w := range want {
		if i >= len(gaps) || gaps[i] < w-5*time.Millisecond {
			f.Errorf("gaps between the calls of %s: %v, want at least %v", method, gaps, want)
			return
		}
	}
}

func TestSnapshotterScenarioErrors(t *testing.T) {
	t.Run("017_internal_twice", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Second, time.Minute })
		f.Plugin.Next(createSnapshot, csitest.Fail(codes.Internal, "no space"), csitest.Fail(codes.Internal, "no space"))
		f.content("v1", nil)
		o := f.until("reports it", hasError("Failed to create snapshot: failed to take snapshot of the volume "+f.volume+
			`: "rpc error: code = Internal desc = no space"`))
		if *o.Status.ReadyToUse || o.Status.SnapshotHandle != nil {
			t.Errorf("status %+v", o.Status)
		}
		f.until("is complete", isComplete)
		f.backsOff(createSnapshot, time.Second, 2*time.Second)
	})
	t.Run("018_same_error", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Always(createSnapshot, csitest.Fail(codes.Internal, "no space"))
		f.content("v1", nil)
		f.Wait(createSnapshot, 6)
		f.writes(2, 0) // the record and the error
		if got := f.events.all(); len(got) != 1 || !containsAll(got[0], "Warning SnapshotCreationFailed Failed to create snapshot: ") {
			t.Errorf("events %q", got)
		}
	})
	t.Run("019_volatile_error", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		for i := range 6 {
			f.Plugin.Next(createSnapshot, csitest.Fail(codes.Internal, fmt.Sprint("request ", i)))
		}
		f.content("v1", nil)
		f.Wait(createSnapshot, 6)
		f.writes(2, 0)
		if got := f.events.all(); len(got) != 1 {
			t.Errorf("events %q", got)
		}
	})
	t.Run("020_021_timeout", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) {
			c.Timeout, c.RetryIntervalStart, c.RetryIntervalMax = 2*time.Second, 2*time.Second, 2*time.Second
		})
		f.Plugin.Next(createSnapshot, csitest.DoAndHang())
		f.content("v1", nil)
		o := f.until("reports it", hasError("DeadlineExceeded"))
		if !has(o, AnnBeingCreated) {
			t.Error("the annotation is not set")
		}
		f.until("is complete", isComplete)
		r := f.created()
		if len(r) != 2 || r[0].Name != r[1].Name || len(f.Plugin.Snapshots()) != 1 {
			t.Errorf("requests %v", r)
		}
	})
	t.Run("021_022_long_error", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Always(createSnapshot, csitest.Fail(codes.Internal, strings.Repeat("ä", 2500)))
		f.content("v1", nil)
		o := f.until("reports it", hasError("Internal"))
		if m := *o.Status.Error.Message; len(m) > 1024 || !utf8.ValidString(m) {
			t.Errorf("%d bytes: %q", len(m), m)
		}
	})
	t.Run("023_backoff", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) {
			c.RetryIntervalStart, c.RetryIntervalMax = 100*time.Millisecond, 400*time.Millisecond
		})
		f.Plugin.Always(createSnapshot, csitest.Fail(codes.Internal, "no"))
		f.content("v1", nil)
		f.Wait(createSnapshot, 5)
		f.backsOff(createSnapshot, 100*time.Millisecond, 200*time.Millisecond, 400*time.Millisecond, 400*time.Millisecond)
		if gaps := f.gaps(createSnapshot); gaps[3] > 10*time.Second {
			t.Errorf("gaps %v", gaps)
		}
	})
	t.Run("024_events_during_backoff", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) {
			c.RetryIntervalStart, c.RetryIntervalMax, c.ResyncPeriod = time.Hour, time.Hour, 20*time.Millisecond
		})
		f.Plugin.Next(createSnapshot, csitest.Fail(codes.Internal, "no"))
		f.content("v1", nil)
		f.until("reports it", hasError("Internal"))
		f.patch("v1", `{"metadata":{"labels":{"l":"1"}}}`)
		f.annotate("v1", "example.com/unrelated", "x")
		f.annotate("v1", AnnBeingCreated, "yes") // the snapshot-controller restores annotations from its cache
		f.quiet()
		f.Calls(createSnapshot, 1)
		f.secret("s", nil)
		f.patch("v1", fmt.Sprintf(`{"metadata":{"annotations":{%q:"s",%q:%q}}}`, AnnSecretName, AnnSecretNamespace, f.Namespace))
		f.until("is complete", isComplete)
		f.Calls(createSnapshot, 2)
	})
	t.Run("025_record_refused", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		refused := 0
		f.requests.refusing(func(r request) int {
			if r.isMetadata() && refused == 0 {
				refused++
				return internalError
			}
			return 0
		})
		f.content("v1", nil)
		f.until("is complete", isComplete)
		if got := f.events.with("SnapshotCreationFailed", "failed to add VolumeSnapshotBeingCreated annotation on the content "+
			f.Unique("v1")); len(got) != 1 {
			t.Errorf("events %q", f.events.all())
		}
		f.Calls(createSnapshot, 1)
		if first := f.requests.all("PATCH"); !first[0].isStatus() || !first[1].isMetadata() {
			t.Errorf("writes %v", first)
		}
	})
	t.Run("annotations_are_not_stored", func(t *testing.T) {
		f := newFixture(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Hour, time.Hour })
		f.class("c1", nil)
		f.requests.altering(func(r *request) { // as an admission webhook does
			if r.isMetadata() {
				r.body = `[{"op":"add","path":"/metadata/labels","value":{"l":"1"}}]`
			}
		})
		f.start()
		f.content("v1", nil)
		f.until("reports it", hasError("failed to add VolumeSnapshotBeingCreated annotation on the content "+f.Unique("v1"),
			"the API server has not stored it"))
		f.writes(2, 0)
		f.Calls(createSnapshot, 0)
		f.requests.altering(nil)
		f.patch("v1", `{"spec":{"deletionPolicy":"Retain"}}`) // ends the back-off
		f.until("is complete", isComplete)
	})
	t.Run("026_027_result_refused", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		statuses, removals := 0, 0
		f.requests.refusing(func(r request) int {
			switch {
			case r.isStatus() && statuses < 2:
				statuses++
				return internalError
			case r.isMetadata() && strings.Contains(r.body, `"remove"`) && removals < 2:
				removals++
				return internalError
			}
			return 0
		})
		f.content("v1", nil)
		f.until("is complete", isComplete)
		f.Calls(createSnapshot, 1)
		f.writes(3, 0)
		if got := f.events.all(); len(got) > 0 || statuses != 2 || removals != 2 {
			t.Errorf("events %q, %d, %d", got, statuses, removals)
		}
	})
	t.Run("028_error_without_message", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) {
			o.Status = &snapshotv1.VolumeSnapshotContentStatus{Error: &snapshotv1.VolumeSnapshotError{Time: ptr.To(metav1.Now())}}
		})
		f.until("is complete", isComplete)
	})
	t.Run("result_that_cannot_be_stored", func(t *testing.T) {
		f := newFixture(t, csitest.Config{}, nil)
		f.class("c1", nil)
		f.Plugin.Next(createSnapshot, csitest.Alter(func(r *csi.CreateSnapshotResponse) { r.Snapshot.SnapshotId = "unstorable" }))
		f.requests.refusing(func(r request) int {
			return map[bool]int{true: http.StatusRequestEntityTooLarge}[r.isStatus() && strings.Contains(r.body, "unstorable")]
		})
		f.start()
		f.content("v1", nil)
		f.waitEvent("Warning SnapshotCreationFailed", "error updating status")
		f.until("is complete", isComplete)
		f.Calls(createSnapshot, 2)
	})
	t.Run("patch_is_forbidden", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(createSnapshot, csitest.Fail(codes.Internal, "no"))
		f.requests.refusing(func(r request) int {
			if r.method == "PATCH" {
				return 403
			}
			return 0
		})
		f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) { o.Finalizers = append(o.Finalizers, "example.com/other") })
		if o := f.until("is complete", isComplete); o.Status.Error != nil {
			t.Errorf("the error of an earlier call stays: %+v", o.Status)
		}
		f.delete("v1")
		f.until("has only the other finalizer", func(o *snapshotv1.VolumeSnapshotContent) bool {
			return slices.Equal(o.Finalizers, []string{"example.com/other"})
		})
		f.Calls(createSnapshot, 2)
		f.Calls(removeSnapshot, 1)
	})
	t.Run("status_is_forbidden", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(createSnapshot, csitest.Fail(codes.Internal, "no"))
		f.requests.refusing(func(r request) int {
			return map[bool]int{true: 403}[r.method != "GET" && strings.HasSuffix(r.path, "/status")]
		})
		f.content("v1", nil)
		f.waitEvent("Warning SnapshotCreationFailed Failed to create snapshot: ", "Internal")
		f.waitEvent("Warning SnapshotCreationFailed error updating status", "refused")
		f.requests.refusing(nil)
		f.until("is complete", isComplete)
		f.Calls(createSnapshot, 2)
	})
}

// notReady answers CreateSnapshot with a snapshot that is not ready.
func notReady() csitest.Step {
	return csitest.Alter(func(r *csi.CreateSnapshotResponse) { r.Snapshot.ReadyToUse = false })
}

func TestSnapshotterScenarioReady(t *testing.T) {
	t.Run("029_030_ready_later", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(createSnapshot, notReady(), notReady(), notReady())
		f.content("v1", nil)
		o := f.until("is created", isCreated)
		if ptr.Deref(o.Status.ReadyToUse, true) && f.Plugin.Count(createSnapshot) < 4 {
			t.Errorf("status %+v", o.Status)
		}
		f.until("is complete", isComplete)
		f.Calls(createSnapshot, 4)
		f.writes(4, 0)
		f.backsOff(createSnapshot, 50*time.Millisecond, 100*time.Millisecond, 200*time.Millisecond)
	})
	t.Run("031_error_is_removed_before_ready", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(createSnapshot, csitest.Fail(codes.Internal, "no"))
		f.Plugin.Always(createSnapshot, notReady())
		f.content("v1", nil)
		f.until("is not ready and has no error", func(o *snapshotv1.VolumeSnapshotContent) bool {
			return isCreated(o) && !*o.Status.ReadyToUse && o.Status.Error == nil
		})
	})
	t.Run("032_check_fails", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(createSnapshot, notReady(), csitest.Fail(codes.Internal, "no"))
		f.content("v1", nil)
		f.until("is complete", isComplete)
		if got := f.events.with("Warning SnapshotContentCheckandUpdateFailed Failed to check and update snapshot content: ",
			"Internal"); len(got) != 1 {
			t.Errorf("events %q", f.events.all())
		}
		f.writes(5, 0) // record, result, end, error, ready
	})
	t.Run("033_two_counters", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalMax = time.Minute })
		for range 6 {
			f.Plugin.Next(createSnapshot, csitest.Fail(codes.Internal, "no"))
		}
		f.Plugin.Next(createSnapshot, notReady())
		f.content("v1", nil)
		f.until("is complete", isComplete)
		if gaps := f.gaps(createSnapshot); len(gaps) != 7 || gaps[6] > gaps[5] {
			t.Errorf("gaps %v", gaps)
		}
	})
	t.Run("034_ready_stays", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.ResyncPeriod = 20 * time.Millisecond })
		f.content("v1", nil)
		f.until("is complete", isComplete)
		_ = f.Stop(workloop.ErrDrain)
		f.writes(3, 0)
		f.start()
		f.quiet()
		_ = f.Stop(workloop.ErrDrain)
		f.Calls(createSnapshot, 1)
		f.writes(3+1, 0) // that of quiet
	})
	t.Run("034_ready_in_the_meantime", func(t *testing.T) { // another process has written the result of its check
		for name, refused := range map[string]string{"patch": "", "update": http.MethodPatch} {
			t.Run(name, func(t *testing.T) {
				f := newFixture(t, csitest.Config{}, nil)
				f.class("c1", nil)
				gate := f.delayWatches()
				f.start()
				f.Plugin.Next(createSnapshot, notReady())
				f.Plugin.Always(createSnapshot, func(ctx context.Context, _ *csitest.Plugin, _ any, _ func() (any, error)) (any, error) {
					gate.close()
					f.requests.refusing(func(r request) int { return map[bool]int{true: http.StatusForbidden}[r.method == refused] })
					_, err := f.contents.Patch(ctx, f.Unique("v1"), types.MergePatchType, []byte(`{"status":{"readyToUse":true}}`),
						metav1.PatchOptions{}, "status")
					return nil, status.Error(codes.Internal, fmt.Sprint("no ", err))
				})
				f.content("v1", nil)
				kubetest.Eventually(t, "the content is read", func(context.Context) error {
					if len(f.requests.all(http.MethodGet)) == 0 {
						return errors.New("it is not")
					}
					return nil
				})
				gate.open()
				_ = f.Stop(workloop.ErrDrain)
				if o, err := f.get(t.Context(), "v1"); err != nil || !isReady(o) {
					t.Errorf("%+v, %v", o.Status, err)
				}
				f.Calls(createSnapshot, 2)
			})
		}
	})
	t.Run("035_another_handle", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(createSnapshot, notReady(), csitest.Alter(func(r *csi.CreateSnapshotResponse) { r.Snapshot.SnapshotId = "other" }))
		f.content("v1", nil)
		o := f.until("is complete", isComplete)
		if *o.Status.SnapshotHandle != f.Plugin.Snapshots()[0].ID {
			t.Errorf("handle %q", *o.Status.SnapshotHandle)
		}
		if got := f.events.with("SnapshotContentCheckandUpdateFailed", `"other"`); len(got) != 1 {
			t.Errorf("events %q", f.events.all())
		}
		f.writes(4, 0)
	})
	t.Run("036_recorded_request", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Always(createSnapshot, notReady())
		f.content("v1", nil)
		f.until("is created", isCreated)
		_ = f.Stop(workloop.ErrDrain)
		f.deleteClass("c1")
		f.cfg.SnapshotNamePrefix = "other"
		f.start()
		n := f.Plugin.Count(createSnapshot)
		f.Wait(createSnapshot, n+1)
		f.Plugin.Always(createSnapshot, nil)
		f.until("is complete", isComplete)
		r := f.created()
		if slices.ContainsFunc(r, func(one *csi.CreateSnapshotRequest) bool {
			return one.Name != r[0].Name || one.Parameters["a"] != "b"
		}) || len(f.Plugin.Snapshots()) != 1 {
			t.Errorf("requests %v", r)
		}
	})
	t.Run("ignored_record", func(t *testing.T) {
		for name, record := range map[string]string{
			"malformed": "{", "of_another_content": createRequest{"other", nil, "other"}.encode(""),
		} {
			t.Run(name, func(t *testing.T) {
				f := scenario(t, csitest.Config{}, nil)
				f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) { o.Annotations = map[string]string{AnnRequest: record} })
				o := f.until("is complete", isComplete)
				want := createRequest{"snapshot-" + uid, map[string]string{"a": "b"}, o.UID}.encode("")
				if o.Annotations[AnnRequest] != want {
					t.Errorf("record %q", o.Annotations[AnnRequest])
				}
				if got := f.events.with(AnnRequest, "is ignored"); len(got) != 1 {
					t.Errorf("events %q", f.events.all())
				}
			})
		}
	})
}

func TestSnapshotterScenarioPreProvisioned(t *testing.T) {
	lists := csitest.Config{Controller: capabilities(csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS)}
	t.Run("037_listed", func(t *testing.T) {
		f := scenario(t, lists, nil)
		f.content("v1", f.preProvisioned)
		o := f.until("is complete", isComplete)
		want := f.Plugin.Snapshots()[0]
		if *o.Status.SnapshotHandle != want.ID || *o.Status.RestoreSize != want.Size || o.Status.CreationTime == nil ||
			len(o.Annotations) > 0 {
			t.Errorf("got %+v", o)
		}
		if r := f.Plugin.Calls(listSnapshots)[0].Request.(*csi.ListSnapshotsRequest); r.SnapshotId != want.ID || r.MaxEntries != 0 {
			t.Errorf("request %v", r)
		}
		f.Calls(createSnapshot, 0)
		f.Calls(listSnapshots, 1)
		f.writes(1, 0)
	})
	t.Run("038_listed_later", func(t *testing.T) {
		f := scenario(t, lists, nil)
		f.Plugin.Always(listSnapshots, csitest.Alter(func(r *csi.ListSnapshotsResponse) { r.Entries = nil }))
		o := f.content("v1", f.preProvisioned)
		f.until("reports it", hasError("Failed to check and update snapshot content: failed to list snapshot for content "+f.Unique("v1")+
			`: "can not find snapshot for snapshotID `+*o.Spec.Source.SnapshotHandle))
		f.Plugin.Always(listSnapshots, nil)
		f.until("is complete", isComplete)
	})
	t.Run("039_filter_is_ignored", func(t *testing.T) {
		f := scenario(t, lists, nil)
		f.snapshot("other", f.Plugin.AddVolume("w", 5))
		all := f.Plugin.Snapshots()
		f.Plugin.Always(listSnapshots, csitest.Alter(func(r *csi.ListSnapshotsResponse) {
			other := &csi.ListSnapshotsResponse_Entry{Snapshot: &csi.Snapshot{SnapshotId: all[0].ID, SizeBytes: 5, ReadyToUse: true}}
			r.Entries = append([]*csi.ListSnapshotsResponse_Entry{{}, other}, r.Entries...)
		}))
		f.content("v1", f.preProvisioned)
		if o := f.until("is complete", isComplete); *o.Status.RestoreSize != 1<<30 {
			t.Errorf("got %+v", o.Status)
		}
	})
	t.Run("get_is_not_implemented", func(t *testing.T) {
		f := scenario(t, csitest.Config{Controller: capabilities(csi.ControllerServiceCapability_RPC_GET_SNAPSHOT,
			csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS)}, nil)
		f.Plugin.Always(getSnapshot, csitest.Fail(codes.Unimplemented, "no"))
		f.content("v1", f.preProvisioned)
		f.until("is complete", isComplete)
		f.Calls(getSnapshot, 1)
		f.Calls(listSnapshots, 1)
	})
	t.Run("another_snapshot", func(t *testing.T) {
		f := scenario(t, csitest.Config{Controller: capabilities(csi.ControllerServiceCapability_RPC_GET_SNAPSHOT)}, nil)
		other := f.snapshot("other", f.volume)
		f.Plugin.Next(getSnapshot, csitest.Alter(func(r *csi.GetSnapshotResponse) { r.Snapshot.SnapshotId = other }))
		o := f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) {
			f.preProvisioned(o)
			o.Spec.VolumeSnapshotRef.UID, o.Finalizers = uid, []string{Finalizer}
		})
		f.until("is complete", isComplete)
		if got := f.events.with("SnapshotContentCheckandUpdateFailed", fmt.Sprintf("%q", other)); len(got) != 1 {
			t.Errorf("events %q", f.events.all())
		}
		f.delete("v1")
		f.until("is deleted", isDeleted)
		if r := f.deletions(); len(r) != 1 || r[0].SnapshotId != *o.Spec.Source.SnapshotHandle {
			t.Errorf("requests %v", r)
		}
	})
	t.Run("040_no_list_and_secrets", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.content("v1", f.preProvisioned)
		o := f.until("is complete", isComplete)
		if o.Status.RestoreSize != nil || time.Since(time.Unix(0, *o.Status.CreationTime)) > time.Minute || len(f.Plugin.Calls()) > 0 {
			t.Errorf("got %+v, calls %v", o.Status, f.Plugin.Calls())
		}
	})
	t.Run("040_list_secret_and_deletion", func(t *testing.T) {
		f := newFixture(t, lists, nil)
		f.class("c1", map[string]string{
			"csi.storage.k8s.io/snapshotter-list-secret-name":      "s1",
			"csi.storage.k8s.io/snapshotter-list-secret-namespace": f.Namespace,
		})
		f.secret("s1", map[string]string{"k": "v"})
		f.Plugin.Next(listSnapshots, func(_ context.Context, _ *csitest.Plugin, _ any, do func() (any, error)) (any, error) {
			f.delete("v1")
			return do()
		})
		f.start()
		f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) {
			f.preProvisioned(o)
			o.Spec.VolumeSnapshotClassName, o.Spec.VolumeSnapshotRef.UID, o.Finalizers = ptr.To(f.Unique("c1")), uid, []string{Finalizer}
		})
		f.until("is deleted", isDeleted)
		if r := f.deletions(); len(r) != 1 || len(r[0].Secrets) > 0 {
			t.Errorf("requests %v, want one without the Secret of the class", r)
		}
	})
	t.Run("040_annotated_secret_without_a_class", func(t *testing.T) {
		f := scenario(t, lists, nil)
		f.secret("s", map[string]string{"k": "v"})
		f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) {
			f.preProvisioned(o)
			f.withSecret(o)
		})
		f.until("is complete", isComplete)
		if r := f.Plugin.Calls(listSnapshots)[0].Request.(*csi.ListSnapshotsRequest); r.Secrets["k"] != "v" {
			t.Errorf("secrets %v", r.Secrets)
		}
	})
	t.Run("040_list_secret", func(t *testing.T) {
		for name, plugin := range map[string]csitest.Config{
			listSnapshots: lists,
			getSnapshot: {Controller: capabilities(csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
				csi.ControllerServiceCapability_RPC_GET_SNAPSHOT)},
		} {
			t.Run(name, func(t *testing.T) {
				f := newFixture(t, plugin, nil)
				f.class("c1", map[string]string{
					"csi.storage.k8s.io/snapshotter-list-secret-name":      "${volumesnapshot.name}",
					"csi.storage.k8s.io/snapshotter-list-secret-namespace": "${volumesnapshot.namespace}",
				})
				f.secret("s1", map[string]string{"k": "v"})
				f.start()
				f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) {
					f.preProvisioned(o)
					o.Spec.VolumeSnapshotClassName = ptr.To(f.Unique("c1"))
				})
				f.until("is complete", isComplete)
				f.Calls(name, 1)
				r := f.Plugin.Calls(name)[0].Request.(interface{ GetSecrets() map[string]string })
				if len(f.Plugin.Calls()) != 1 || r.GetSecrets()["k"] != "v" {
					t.Errorf("calls %v", f.Plugin.Calls())
				}
			})
		}
	})
}
