// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"google.golang.org/grpc/codes"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// ready creates a content and waits until its snapshot is ready.
func (f *fixture) ready(change func(*snapshotv1.VolumeSnapshotContent)) *snapshotv1.VolumeSnapshotContent {
	f.Helper()
	f.content("v1", change)
	return f.until("is complete", isComplete)
}

// indeterminate creates a content whose CreateSnapshot has created a snapshot and returned code.
func (f *fixture) indeterminate(code codes.Code) {
	f.Helper()
	f.Plugin.Always(createSnapshot, csitest.DoAndFail(code, "unknown"))
	f.content("v1", nil)
	f.until("reports it", hasError(code.String()))
}

// blockedByOutcome creates content v1, whose deletion waits for the outcome of CreateSnapshot.
func (f *fixture) blockedByOutcome() {
	f.Helper()
	f.indeterminate(codes.Unavailable)
	f.delete("v1")
	f.waitEvent("Waiting for the outcome of CreateSnapshot")
}

// waitsForOutcome deletes content v1, and checks that DeleteSnapshot is called only after the outcome of
// CreateSnapshot is known.
func (f *fixture) waitsForOutcome(code codes.Code) {
	f.Helper()
	f.delete("v1")
	f.waitEvent("Normal SnapshotDeletePending Waiting for the outcome of CreateSnapshot: ", code.String())
	f.Calls(removeSnapshot, 0)
	f.Plugin.Always(createSnapshot, nil)
	f.until("is deleted", isDeleted)
	f.Calls(removeSnapshot, 1)
	f.noSnapshots()
	for _, r := range f.created() {
		if r.Name != "snapshot-"+uid {
			f.Errorf("request %v", r)
		}
	}
	if got := f.events.with("SnapshotDeletePending"); len(got) != 1 {
		f.Errorf("events %q", got)
	}
}

// inGroup makes the listed snapshots those of a group.
func inGroup(r *csi.ListSnapshotsResponse) {
	for _, e := range r.Entries {
		e.Snapshot.GroupSnapshotId = "group-1"
	}
}

// deleteAtDriver deletes all snapshots at the driver.
func (f *fixture) deleteAtDriver() {
	f.Helper()
	for _, s := range f.Plugin.Snapshots() {
		_, err := f.Plugin.DeleteSnapshot(f.Context(), &csi.DeleteSnapshotRequest{SnapshotId: s.ID})
		f.Must(err)
	}
}

// remains fails the test unless the driver has a snapshot if it should, and an event with these parts says so.
func (f *fixture) remains(does bool, parts ...string) {
	f.Helper()
	left := f.Plugin.Snapshots()
	events := f.events.with(append(parts, "Warning SnapshotDeleteError ", `snapshot "snapshot-`+uid+`"`, "may remain")...)
	if len(left) > 0 != does || len(events) > 0 != does {
		f.Errorf("snapshots %v, events %q", left, f.events.all())
	}
}

func TestSnapshotterScenarioDelete(t *testing.T) {
	t.Run("021_041_indeterminate", func(t *testing.T) {
		for _, code := range []codes.Code{codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.Aborted} {
			t.Run(code.String(), func(t *testing.T) {
				f := scenario(t, csitest.Config{}, nil)
				f.indeterminate(code)
				f.waitsForOutcome(code)
			})
			t.Run(code.String()+"_of_a_check", func(t *testing.T) {
				f := scenario(t, csitest.Config{}, nil)
				f.Plugin.Next(createSnapshot, notReady())
				f.indeterminate(code)
				f.waitsForOutcome(code)
			})
		}
	})
	// The driver has created the snapshot, and answers with an error that does not exclude it.
	for name, end := range map[string]func(*fixture){
		"answered": func(f *fixture) { f.Plugin.Always(createSnapshot, nil) },
		"excluded": func(f *fixture) {
			f.deleteAtDriver()
			f.Plugin.Always(createSnapshot, csitest.Fail(codes.InvalidArgument, "no"))
		},
		"annotation_removed": func(f *fixture) { f.annotate("v1", AnnBeingCreated, nil) },
	} {
		t.Run("041_indeterminate_then_internal_"+name, func(t *testing.T) {
			f := scenario(t, csitest.Config{}, nil)
			f.indeterminate(codes.DeadlineExceeded)
			f.Plugin.Always(createSnapshot, csitest.Fail(codes.Internal, "no"))
			f.until("reports it", hasError("Internal"))
			f.delete("v1")
			f.waitEvent("Normal SnapshotDeletePending Waiting for the outcome of CreateSnapshot: ", "Internal")
			f.Calls(removeSnapshot, 0)
			end(f)
			f.until("is deleted", isDeleted)
			f.remains(name == "annotation_removed", AnnBeingCreated)
		})
	}
	// A full storage system, or a deleted source, may stay as it is.
	for _, code := range []codes.Code{codes.ResourceExhausted, codes.NotFound} {
		t.Run("041_060_indeterminate_then_"+code.String(), func(t *testing.T) {
			f := scenario(t, csitest.Config{}, nil)
			f.indeterminate(codes.DeadlineExceeded)
			f.Plugin.Always(createSnapshot, csitest.Fail(code, "no"))
			f.delete("v1")
			f.until("is deleted", isDeleted)
			f.remains(true, code.String())
		})
	}
	t.Run("041_indeterminate_then_internal_after_a_restart", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.indeterminate(codes.DeadlineExceeded)
		f.Crash()
		f.Plugin.Always(createSnapshot, csitest.Fail(codes.Internal, "no"))
		f.start()
		f.until("reports it", hasError("Internal"))
		f.delete("v1")
		f.until("is deleted", isDeleted)
		f.remains(true, "Internal")
	})
	t.Run("021_042_060_final", func(t *testing.T) {
		for code := codes.Code(2); code <= codes.Unauthenticated; code++ {
			switch code {
			case codes.DeadlineExceeded, codes.Unavailable, codes.Aborted:
				continue
			}
			t.Run(code.String(), func(t *testing.T) {
				f := scenario(t, csitest.Config{}, nil)
				f.Plugin.Always(createSnapshot, csitest.Fail(code, "no"))
				f.content("v1", nil)
				f.until("reports it", hasError("rpc error"))
				f.delete("v1")
				f.until("is deleted", isDeleted)
				f.Calls(removeSnapshot, 0)
			})
		}
	})
	t.Run("043_deleted", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.secret("s", map[string]string{"k": "v"})
		f.ready(f.withSecret)
		f.delete("v1")
		f.until("is deleted", isDeleted)
		if r := f.deletions(); len(r) != 1 || r[0].Secrets["k"] != "v" {
			t.Errorf("requests %v", r)
		}
		f.noSnapshots()
		f.writes(3+1, 1)
	})
	t.Run("044_retained", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.ready(retain)
		f.delete("v1")
		f.until("is deleted", isDeleted)
		f.Calls(removeSnapshot, 0)
		f.writes(3+1, 0)
	})
	t.Run("045_policy_changed_recently", func(t *testing.T) {
		type policy = snapshotv1.DeletionPolicy
		for name, test := range map[string]struct {
			from, to policy
			refuse   func(request) int
		}{
			"Delete": {"Delete", "Retain", nil}, "Retain": {"Retain", "Delete", nil},
			"Delete_patch_is_forbidden": {"Delete", "Retain", forbidPatch}, "Retain_patch_is_forbidden": {"Retain", "Delete", forbidPatch},
		} {
			t.Run(name, func(t *testing.T) {
				from, to := test.from, test.to
				f := newFixture(t, csitest.Config{},
					func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Second, time.Second })
				f.class("c1", nil)
				gate := f.delayWatches()
				f.start()
				f.ready(func(o *snapshotv1.VolumeSnapshotContent) { o.Spec.DeletionPolicy = from })
				f.refuseDeletion()
				f.annotate("v1", AnnBeingDeleted, "yes")
				f.terminate("v1")
				f.waitEvent("SnapshotDeleteError", "refused")
				gate.close()
				f.patch("v1", fmt.Sprintf(`{"spec":{"deletionPolicy":%q}}`, to))
				f.requests.refusing(test.refuse)
				f.until("is deleted", isDeleted)
				if n := f.Plugin.Count(removeSnapshot); n != map[snapshotv1.DeletionPolicy]int{"Delete": 1, "Retain": 0}[to] {
					t.Errorf("%d calls of DeleteSnapshot", n)
				}
			})
		}
	})
	t.Run("046_047_not_released", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.ready(nil)
		f.terminate("v1")
		f.waitEvent("Normal SnapshotDeletePending Waiting for the snapshot-controller to set annotation " + AnnBeingDeleted +
			" after the deletion of VolumeSnapshot " + f.Namespace + "/s1")
		f.content("v2", func(o *snapshotv1.VolumeSnapshotContent) {
			o.Spec.VolumeSnapshotClassName = ptr.To("missing")
			o.Spec.VolumeSnapshotRef.UID = "two"
		})
		f.untilOf("v2", "reports it", hasError("not found"))
		f.terminate("v2")
		f.patch("v2", fmt.Sprintf(`{"spec":{"volumeSnapshotClassName":%q}}`, f.Unique("c1")))
		kubetest.Eventually(t, "both deletions are pending", func(context.Context) error {
			if got := f.events.with("SnapshotDeletePending"); len(got) != 2 {
				return fmt.Errorf("events %q", got)
			}
			return nil
		})
		f.quiet()
		f.Calls(createSnapshot, 1)
		f.Calls(removeSnapshot, 0)
		f.annotate("v1", AnnBeingDeleted, "yes")
		f.until("is deleted", isDeleted)
		f.annotate("v2", AnnBeingDeleted, "yes")
		f.untilOf("v2", "is deleted", isDeleted)
		f.Calls(createSnapshot, 1)
		f.noSnapshots()
	})
	t.Run("047_deleted_before_the_record", func(t *testing.T) {
		f := newFixture(t, csitest.Config{}, nil)
		f.class("c1", nil)
		deleted := false
		f.requests.refusing(func(r request) int {
			if r.isMetadata() && strings.Contains(r.body, AnnRequest) && !deleted { // the cache does not know it
				deleted = true
				f.terminate("v1")
			}
			return 0
		})
		f.start()
		f.content("v1", nil)
		f.waitEvent("Normal SnapshotDeletePending")
		f.quiet()
		f.annotate("v1", AnnBeingDeleted, "yes")
		f.until("is deleted", isDeleted)
		f.Calls(createSnapshot, 0)
	})
	t.Run("creation_recorded_before_the_release", func(t *testing.T) {
		f := newFixture(t, csitest.Config{}, nil)
		f.start()
		f.content("v1", nil)
		f.until("reports it", hasError("not found"))
		recorded := false
		f.requests.refusing(func(r request) int {
			if r.isMetadata() && !recorded { // another leader sends CreateSnapshot, the cache does not know it
				recorded = true
				f.annotate("v1", AnnBeingCreated, "yes")
			}
			return 0
		})
		f.delete("v1")
		f.waitEvent("SnapshotDeleteError", "CreateSnapshot is indeterminate and cannot be repeated")
		f.patch("v1", `{"metadata":{"finalizers":null}}`)
	})
	// A content of csi-snapshotter has no record. The driver may still execute the last check of its leader.
	t.Run("041_check_of_an_earlier_leader_without_a_record", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.secret("s", map[string]string{"k": "v"})
		f.notReady(f.withSecret)
		f.Crash()
		f.annotate("v1", AnnRequest, nil)
		f.deleteSecret("s")
		f.terminate("v1")
		f.start()
		f.waitEvent("SnapshotDeletePending", "snapshot-controller")
		checks := len(f.created())
		f.annotate("v1", AnnBeingDeleted, "yes")
		f.waitEvent("SnapshotDeletePending", "Secret")
		f.secret("s", map[string]string{"k": "v"})
		f.until("is deleted", isDeleted)
		if len(f.created()) == checks {
			t.Error("the check was not repeated before DeleteSnapshot")
		}
	})
	t.Run("048_deleted_during_the_call", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(createSnapshot, csitest.Hang())
		f.content("v1", nil)
		f.Wait(createSnapshot, 1)
		f.delete("v1")
		f.Plugin.Release()
		f.until("is deleted", isDeleted)
		f.Calls(createSnapshot, 1)
		f.Calls(removeSnapshot, 1)
	})
	// A late write of an earlier leader removes the finalizer during the repeated call.
	for name, step := range map[string]csitest.Step{
		"answered": csitest.Default(), "indeterminate": csitest.DoAndFail(codes.Unavailable, "no"),
	} {
		t.Run("content_removed_during_the_repeated_call_"+name, func(t *testing.T) {
			f := scenario(t, csitest.Config{}, nil)
			f.blockedByOutcome()
			reads := func() (n int) {
				for _, r := range f.requests.all(http.MethodGet) {
					if strings.Contains(r.path, "snapshotcontents/") {
						n++
					}
				}
				return n
			}
			var before atomic.Int32 // reads before the last repeated call
			f.Plugin.Always(createSnapshot, func(_ context.Context, _ *csitest.Plugin, _ any, do func() (any, error)) (any, error) {
				before.Store(int32(reads()))
				return do()
			})
			f.Plugin.Next(removeSnapshot, func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
				if reads() == int(before.Load()) {
					t.Error("the content was not read after a call that may take long")
				}
				return csitest.Fail(codes.Unavailable, "no")(ctx, p, request, do)
			})
			f.Plugin.Next(createSnapshot, func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
				f.patch("v1", `{"metadata":{"finalizers":null}}`)
				return step(ctx, p, request, do)
			})
			f.until("is deleted", isDeleted)
			f.Wait(removeSnapshot, 2)
			if left := f.Plugin.Snapshots(); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
	t.Run("content_removed_before_the_repeated_call", func(t *testing.T) {
		f := newFixture(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Hour, time.Hour })
		f.class("c1", nil)
		gate := f.delayWatches()
		f.start()
		f.indeterminate(codes.Unavailable)
		gate.close()
		f.delete("v1")
		f.patch("v1", `{"metadata":{"finalizers":null}}`)
		f.until("is deleted", isDeleted)
		f.Plugin.Always(createSnapshot, nil)
		gate.open()
		f.Wait(removeSnapshot, 1)
		f.noSnapshots()
	})
	t.Run("content_removed_whose_snapshot_another_content_retains", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		handle := *f.notReady(nil).Status.SnapshotHandle
		f.Plugin.Always(createSnapshot, csitest.Fail(codes.Unavailable, "down"))
		f.until("reports it", hasError("Unavailable"))
		f.content("b", func(o *snapshotv1.VolumeSnapshotContent) {
			f.preProvisioned(o)
			o.Spec.Source.SnapshotHandle = ptr.To(handle)
			o.Spec.DeletionPolicy = snapshotv1.VolumeSnapshotContentRetain
		})
		f.untilOf("b", "is ready", isReady)
		f.delete("v1")
		f.waitEvent("names the same")
		f.patch("v1", `{"metadata":{"finalizers":null}}`)
		f.until("is deleted", isDeleted)
		f.Plugin.Always(createSnapshot, nil)
		f.waitEvent("may remain")
		f.delete("b")
		f.untilOf("b", "is deleted", isDeleted)
		f.quiet()
		f.Calls(removeSnapshot, 0)
	})
	t.Run("content_removed_during_a_check", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.notReady(nil)
		called, reported := make(chan struct{}), make(chan struct{})
		f.Plugin.Next(createSnapshot, func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
			close(called)
			<-reported
			return csitest.Fail(codes.NotFound, "no source volume")(ctx, p, request, do)
		})
		<-called
		f.delete("v1")
		f.patch("v1", `{"metadata":{"finalizers":null}}`)
		f.waitEvent("This content was deleted", "may remain")
		close(reported)
		f.quiet()
		f.Calls(removeSnapshot, 0)
	})
	t.Run("content_and_its_annotation_removed_during_the_repeated_call", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Always(createSnapshot, csitest.DoAndFail(codes.Unavailable, "unknown"))
		f.content("v1", foreign)
		f.until("reports it", hasError("Unavailable"))
		f.delete("v1")
		f.waitEvent("Waiting for the outcome of CreateSnapshot")
		f.Plugin.Next(createSnapshot, func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
			f.patch("v1", `{"metadata":{"finalizers":["example.com/other"],"annotations":{"`+AnnBeingCreated+`":null}}}`)
			f.patch("v1", `{"metadata":{"finalizers":null}}`)
			return csitest.DoAndFail(codes.Unavailable, "no")(ctx, p, request, do)
		})
		f.until("is deleted", isDeleted)
		f.waitEvent("Failed to delete", "the content was deleted before it")
		f.Plugin.Always(createSnapshot, nil)
		f.Wait(removeSnapshot, 1)
		f.noSnapshots()
	})
	t.Run("content_and_source_removed_during_the_repeated_call", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.blockedByOutcome()
		f.Plugin.Always(createSnapshot, csitest.Fail(codes.NotFound, "no source"))
		f.Plugin.Next(createSnapshot, func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
			f.patch("v1", `{"metadata":{"finalizers":null}}`)
			return csitest.Fail(codes.Unavailable, "no")(ctx, p, request, do)
		})
		f.until("is deleted", isDeleted)
		f.waitEvent("Warning SnapshotDeleteError CreateSnapshot is indeterminate", "NotFound", "may remain")
	})
	t.Run("finalizer_removed_late_by_an_earlier_leader", func(t *testing.T) {
		f := newFixture(t, csitest.Config{}, nil)
		soon := f.cfg
		f.cfg.RetryIntervalStart, f.cfg.RetryIntervalMax = time.Hour, time.Hour // until the deletion
		f.class("c1", nil)
		f.Plugin.Next(createSnapshot, csitest.Fail(codes.Internal, "no"))
		late := make(chan string, 1)
		f.requests.refusing(func(r request) int {
			if !r.isMetadata() || !strings.Contains(r.body, `"remove"`) {
				return 0
			}
			select {
			case late <- r.body:
			default:
			}
			return internalError
		})
		f.start()
		f.content("v1", nil)
		f.until("reports it", hasError("Internal"))
		f.delete("v1")
		removal := <-late
		f.Crash()
		f.cfg = soon
		f.requests.refusing(nil)
		n := f.Plugin.Count(createSnapshot)
		f.Plugin.Next(createSnapshot, csitest.DoAndHang())
		f.start()
		f.Wait(createSnapshot, n+1)
		f.Crash()
		_, err := f.contents.Patch(t.Context(), f.Unique("v1"), types.JSONPatchType, []byte(removal), metav1.PatchOptions{})
		if !kube.IsPatchTestFailed(err) {
			t.Errorf("the late removal: %v", err)
		}
		f.start()
		f.until("is deleted", isDeleted)
		f.noSnapshots()
	})
	for name, refuse := range map[string]func(f *fixture){
		"removed": func(f *fixture) {
			f.requests.altering(func(r *request) {
				if strings.Contains(r.body, "create-snapshot") && strings.Contains(r.body, `"add"`) {
					r.body = fmt.Sprintf(`[{"op":"remove","path":%q}]`, kube.AnnotationPath(AnnRequest))
				}
			})
		},
		"reverted": func(f *fixture) {
			f.requests.altering(func(r *request) {
				if strings.Contains(r.body, "create-snapshot") && strings.Contains(r.body, `"add"`) {
					r.body = `[{"op":"add","path":"/metadata/labels","value":{"l":"1"}}]`
				}
			})
		},
		"denied": func(f *fixture) {
			f.requests.refusing(func(r request) int {
				if strings.Contains(r.body, "create-snapshot") && strings.Contains(r.body, `"add"`) {
					return http.StatusUnprocessableEntity
				}
				return 0
			})
		},
	} {
		t.Run("record_of_a_repetition_is_"+name, func(t *testing.T) {
			f := newFixture(t, csitest.Config{}, nil)
			f.class("c1", nil)
			f.Plugin.Next(createSnapshot, csitest.DoAndHang())
			f.start()
			f.content("v1", nil)
			f.Wait(createSnapshot, 1)
			f.delete("v1")
			f.Crash()
			refuse(f)
			f.start()
			f.waitEvent("SnapshotDeleteError", "failed to add VolumeSnapshotBeingCreated annotation")
			f.until("is deleted", isDeleted)
			f.noSnapshots()
		})
	}
	t.Run("content_given_to_another_driver_during_the_repeated_call", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.blockedByOutcome()
		n := f.Plugin.Count(createSnapshot)
		f.Plugin.Next(createSnapshot, func(_ context.Context, _ *csitest.Plugin, _ any, do func() (any, error)) (any, error) {
			f.patch("v1", `{"spec":{"driver":"other"}}`)
			return do()
		})
		f.Plugin.Always(createSnapshot, nil) // no call before it may succeed
		f.Wait(createSnapshot, n+1)
		f.waitEvent("This content was deleted or given to another driver", "may remain")
		f.quiet()
		f.Calls(removeSnapshot, 0)
		f.patch("v1", `{"metadata":{"finalizers":null}}`)
	})
	t.Run("content_given_to_another_driver_during_the_read_before_its_deletion", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.blockedByOutcome()
		o := f.until("exists", func(o *snapshotv1.VolumeSnapshotContent) bool { return o != nil })
		f.Plugin.Next(createSnapshot, func(_ context.Context, _ *csitest.Plugin, _ any, do func() (any, error)) (any, error) {
			var once sync.Once
			f.requests.refusing(func(r request) int {
				if r.method == http.MethodGet {
					once.Do(func() {
						f.patch("v1", `{"spec":{"driver":"other"}}`)
						kubetest.Eventually(f.T, "the watch has delivered it", func(context.Context) error {
							if f.c.contentLoop.Load().ledger.Get(o.UID).Payload.orphan == nil {
								return errors.New("not yet")
							}
							return nil
						})
					})
				}
				return 0
			})
			return do()
		})
		f.Plugin.Always(createSnapshot, nil) // no call before it may succeed
		f.waitEvent("This content was deleted or given to another driver", "may remain")
		f.quiet()
		f.Calls(removeSnapshot, 0)
		f.patch("v1", `{"metadata":{"finalizers":null}}`)
	})
	t.Run("049_annotation_restored", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.ready(nil)
		f.patch("v1", fmt.Sprintf(`{"metadata":{"annotations":{%q:"yes",%q:"yes"}}}`, AnnBeingCreated, AnnBeingDeleted))
		f.terminate("v1")
		f.until("is deleted", isDeleted)
		f.Calls(createSnapshot, 1)
		f.Calls(removeSnapshot, 1)
	})
	t.Run("050_annotation_removed_by_a_tool", func(t *testing.T) {
		for name, success := range map[string]bool{"success": true, "failure": false} {
			t.Run(name, func(t *testing.T) {
				f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Hour, time.Hour })
				f.blockedByOutcome()
				if success {
					f.Plugin.Always(createSnapshot, nil)
				}
				n := f.Plugin.Count(createSnapshot)
				f.annotate("v1", AnnBeingCreated, nil)
				f.until("is deleted", isDeleted)
				f.Calls(createSnapshot, n+1)
				if success {
					f.Calls(removeSnapshot, 1)
					f.noSnapshots()
				} else if got := f.events.with("Warning SnapshotDeleteError CreateSnapshot is indeterminate",
					AnnBeingCreated); len(got) != 1 {
					t.Errorf("events %q", f.events.all())
				}
			})
		}
	})
	t.Run("050_annotation_of_a_check_removed_by_a_tool", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalMax = 2 * time.Second })
		f.notReady(nil)
		f.Plugin.Always(createSnapshot, csitest.Fail(codes.Unavailable, "no"))
		f.waitEvent("SnapshotContentCheckandUpdateFailed", "no")
		f.delete("v1")
		f.waitEvent("Waiting for the outcome of CreateSnapshot")
		f.annotate("v1", AnnBeingCreated, nil)
		f.until("is deleted", isDeleted)
		f.waitEvent("Warning SnapshotDeleteError CreateSnapshot is indeterminate", "may remain")
		f.Calls(removeSnapshot, 1)
	})
	t.Run("another_snapshot_in_the_answer_of_a_check", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		o := f.notReady(nil)
		_, err := f.Plugin.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: *o.Status.SnapshotHandle})
		f.Must(err)
		f.waitEvent("the driver returned snapshot handle")
		f.delete("v1")
		f.until("is deleted", isDeleted)
		f.noSnapshots()
	})
	t.Run("050_annotation_and_finalizer_removed_by_a_tool", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) {
			c.RetryIntervalStart, c.RetryIntervalMax, c.Timeout = time.Hour, time.Hour, 3*time.Second
		})
		f.blockedByOutcome()
		f.Plugin.Always(createSnapshot, csitest.Hang())
		n := f.Plugin.Count(createSnapshot)
		f.annotate("v1", AnnBeingCreated, nil)
		f.Wait(createSnapshot, n+1)
		f.patch("v1", `{"metadata":{"finalizers":null}}`)
		f.waitEvent("Warning SnapshotDeleteError CreateSnapshot is indeterminate", "snapshot-"+uid)
	})
	t.Run("051_class_deleted_and_restart", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.indeterminate(codes.Unavailable)
		f.Crash()
		f.deleteClass("c1")
		f.cfg.SnapshotNamePrefix = "other"
		f.delete("v1")
		f.Plugin.Always(createSnapshot, nil)
		f.start()
		f.until("is deleted", isDeleted)
		f.Calls(removeSnapshot, 1)
		f.noSnapshots()
	})
	t.Run("annotation_removed_and_restart", func(t *testing.T) {
		for name, step := range map[string]csitest.Step{"success": nil, "failure": csitest.Fail(codes.Unavailable, "unknown")} {
			t.Run(name, func(t *testing.T) {
				f := scenario(t, csitest.Config{}, nil)
				f.indeterminate(codes.Unavailable)
				f.Crash()
				f.annotate("v1", AnnBeingCreated, nil)
				f.delete("v1")
				f.Plugin.Always(createSnapshot, step)
				n := f.Plugin.Count(createSnapshot)
				f.start()
				f.until("is deleted", isDeleted)
				f.Calls(createSnapshot, n+1)
				if step == nil {
					f.noSnapshots()
				} else {
					f.waitEvent("Warning SnapshotDeleteError CreateSnapshot is indeterminate")
				}
			})
		}
	})
	t.Run("annotations_replaced", func(t *testing.T) { // the snapshot-controller replaces all of them from its cache
		f := scenario(t, csitest.Config{}, nil)
		f.indeterminate(codes.Unavailable)
		f.patch("v1", fmt.Sprintf(`{"metadata":{"annotations":{%q:null,%q:null,%q:"yes"}}}`, AnnBeingCreated, AnnRequest, AnnBeingDeleted))
		f.terminate("v1")
		f.until("has the record again", func(o *snapshotv1.VolumeSnapshotContent) bool {
			return o != nil && has(o, AnnRequest) && has(o, AnnBeingCreated)
		})
		f.Plugin.Always(createSnapshot, nil)
		f.until("is deleted", isDeleted)
		f.noSnapshots()
	})
	t.Run("052_delete_fails", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.ready(nil)
		f.Plugin.Next(removeSnapshot, csitest.Fail(codes.NotFound, "not here"+strings.Repeat("ä", 1000)),
			csitest.Fail(codes.FailedPrecondition, "in use"))
		f.delete("v1")
		f.until("is deleted", isDeleted)
		f.Calls(removeSnapshot, 3)
		for _, text := range []string{"not here", "in use"} {
			if got := f.events.with("Warning SnapshotDeleteError Failed to delete snapshot: ", text); len(got) != 1 || len(got[0]) > 1060 {
				t.Errorf("events %q", f.events.all())
			}
		}
		f.noSnapshots()
	})
	t.Run("053_secret_is_missing", func(t *testing.T) {
		for name, fix := range map[string]func(*fixture){
			"created": func(f *fixture) { f.secret("s", map[string]string{"k": "v"}) },
			"annotations_removed": func(f *fixture) {
				f.patch("v1", fmt.Sprintf(`{"metadata":{"annotations":{%q:null,%q:null}}}`, AnnSecretName, AnnSecretNamespace))
			},
		} {
			t.Run(name, func(t *testing.T) {
				f := scenario(t, csitest.Config{}, nil)
				f.ready(nil)
				f.patch("v1", fmt.Sprintf(`{"metadata":{"annotations":{%q:"s",%q:%q}}}`, AnnSecretName, AnnSecretNamespace, f.Namespace))
				f.delete("v1")
				f.waitEvent("Warning SnapshotDeleteError Failed to get snapshot credentials: ", f.Namespace+"/s", "not found",
					AnnSecretName)
				f.waitEvent("Normal SnapshotDeletePending Waiting for Secret " + f.Namespace + "/s")
				f.Calls(removeSnapshot, 0)
				fix(f)
				f.until("is deleted", isDeleted)
				if r := f.deletions(); len(r) != 1 || (r[0].Secrets["k"] == "v") != (name == "created") {
					t.Errorf("requests %v", r)
				}
			})
		}
	})
	t.Run("054_foreign_finalizer", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.ResyncPeriod = 20 * time.Millisecond })
		f.ready(foreign)
		f.delete("v1")
		o := f.until("has no finalizer", func(o *snapshotv1.VolumeSnapshotContent) bool { return o != nil && len(o.Finalizers) == 1 })
		if s := o.Status; s.SnapshotHandle != nil || s.CreationTime != nil || s.ReadyToUse != nil || s.RestoreSize != nil {
			t.Errorf("status %+v", s)
		}
		f.quiet()
		f.Calls(createSnapshot, 1)
		f.Calls(removeSnapshot, 1)
		f.patch("v1", `{"metadata":{"finalizers":null}}`)
		f.until("is deleted", isDeleted)
	})
	t.Run("055_bound_and_never_checked", func(t *testing.T) {
		f := scenario(t, csitest.Config{Controller: capabilities(csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS)}, nil)
		f.Plugin.Always(listSnapshots, csitest.Fail(codes.Internal, "no"))
		o := f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) {
			f.preProvisioned(o)
			o.Spec.VolumeSnapshotRef.UID, o.Finalizers = uid, []string{Finalizer}
		})
		f.until("reports it", hasError("Internal"))
		f.delete("v1")
		f.until("is deleted", isDeleted)
		if r := f.deletions(); len(r) != 1 || r[0].SnapshotId != *o.Spec.Source.SnapshotHandle {
			t.Errorf("requests %v", r)
		}
	})
	t.Run("056_unbound", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) {
			f.preProvisioned(o)
			foreign(o)
		})
		f.until("is complete", isComplete)
		f.terminate("v1")
		f.quiet()
		f.patch("v1", `{"metadata":{"finalizers":null}}`)
		f.until("is deleted", isDeleted)
		f.Calls(removeSnapshot, 0)
	})
	// A backup tool copies metadata to a content that it creates only to delete the snapshot.
	t.Run("056_unbound_with_the_finalizer", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		o := f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) {
			f.preProvisioned(o)
			o.Finalizers = []string{Finalizer}
			o.Annotations = map[string]string{AnnGroup: "g"}
		})
		f.until("is complete", isComplete)
		f.terminate("v1")
		f.until("is deleted", isDeleted)
		if r := f.deletions(); len(r) != 1 || r[0].SnapshotId != *o.Spec.Source.SnapshotHandle {
			t.Errorf("requests %v", r)
		}
	})
	t.Run("056_unbound_with_the_finalizer_deleted_before_its_check", func(t *testing.T) {
		unavailable := csitest.Fail(codes.Unavailable, "no")
		for name, test := range map[string]struct {
			first, then csitest.Step
			deleted     bool
			event       string
		}{
			"listed_later":     {unavailable, nil, true, ""},
			"without_a_leader": {nil, nil, true, ""},
			"not_listed": {nil, csitest.Alter(func(r *csi.ListSnapshotsResponse) { r.Entries = nil }), false,
				"does not find the snapshot"},
			"snapshot_of_group": {nil, csitest.Alter(inGroup), false, `only with its group snapshot "group-1"`},
		} {
			t.Run(name, func(t *testing.T) {
				f := newFixture(t, csitest.Config{Controller: capabilities(csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS)}, nil)
				f.Plugin.Always(listSnapshots, test.first)
				o := f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) {
					f.preProvisioned(o)
					o.Finalizers = []string{Finalizer}
				})
				f.terminate("v1")
				if test.first == nil {
					f.Plugin.Always(listSnapshots, test.then)
				}
				f.start()
				if test.first != nil {
					f.waitEvent("SnapshotContentCheckandUpdateFailed", "Unavailable")
					f.Calls(removeSnapshot, 0)
					f.Plugin.Always(listSnapshots, test.then)
				}
				f.until("is deleted", isDeleted)
				if r := f.deletions(); len(r) > 0 != test.deleted || test.deleted && r[0].SnapshotId != *o.Spec.Source.SnapshotHandle {
					t.Errorf("requests %v", r)
				}
				got := f.events.with("Warning SnapshotDeleteError", *o.Spec.Source.SnapshotHandle, test.event)
				if len(got) > 0 == test.deleted {
					t.Errorf("events %q", f.events.all())
				}
			})
		}
	})
	for name, end := range map[string]func(*fixture){
		"deleted":  func(f *fixture) { f.delete("v1") },
		"retained": func(f *fixture) { f.patch("v2", `{"spec":{"deletionPolicy":"Retain"}}`) },
	} {
		t.Run("handle_of_another_content_"+name, func(t *testing.T) {
			f := newFixture(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Hour, time.Hour })
			f.class("c1", nil)
			f.start()
			handle := *f.ready(nil).Status.SnapshotHandle
			f.content("v2", func(o *snapshotv1.VolumeSnapshotContent) {
				o.Spec.Source, o.Spec.VolumeSnapshotRef.UID = snapshotv1.VolumeSnapshotContentSource{SnapshotHandle: &handle}, "two"
			})
			f.untilOf("v2", "is complete", isComplete)
			f.delete("v2")
			f.waitEvent("Warning SnapshotDeleteError Failed to delete snapshot: VolumeSnapshotContent", f.Unique("v1"), handle,
				"Delete that object", "deletionPolicy")
			f.Calls(removeSnapshot, 0)
			end(f)
			f.untilOf("v2", "is deleted", isDeleted) // long before the back-off of an hour ends
			if name == "retained" {
				f.Calls(removeSnapshot, 0)
				f.until("stays", isComplete)
				return
			}
			f.until("is deleted", isDeleted)
			f.noSnapshots()
		})
	}
	for name, hangs := range map[string]bool{"": false, "_at_once": true} {
		t.Run("one_handle_for_two_contents"+name, func(t *testing.T) {
			f := scenario(t, csitest.Config{}, nil)
			same := csitest.Alter(func(r *csi.CreateSnapshotResponse) { r.Snapshot.SnapshotId = "same" })
			f.Plugin.Always(createSnapshot, same)
			var called sync.WaitGroup
			called.Add(2)
			bothHang := func(ctx context.Context, p *csitest.Plugin, r any, do func() (any, error)) (any, error) {
				called.Done()
				called.Wait()
				return same(ctx, p, r, do)
			}
			if hangs {
				f.Plugin.Next(createSnapshot, bothHang, bothHang)
			}
			f.content("v1", nil)
			if !hangs {
				f.until("is complete", isComplete)
			}
			f.content("v2", func(o *snapshotv1.VolumeSnapshotContent) { o.Spec.VolumeSnapshotRef.UID = "two" })
			f.waitEvent("Warning SnapshotCreationFailed", `the driver returned the snapshot "same"`)
			kept, other := "v1", "v2"
			if o, err := f.get(t.Context(), "v2"); err != nil || isReady(o) {
				kept, other = "v2", "v1"
			}
			f.untilOf(kept, "is complete", isComplete)
			f.delete(other)
			f.untilOf(other, "is deleted", isDeleted)
			f.waitEvent("Warning SnapshotDeleteError", "same", f.Unique(kept), "which is kept")
			f.Calls(removeSnapshot, 0)
			f.untilOf(kept, "stays", isComplete)
		})
	}
	t.Run("content_removed_during_the_call", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.indeterminate(codes.Unavailable)
		f.remove("v1")
		f.waitEvent("Warning SnapshotDeleteError This content was deleted", `"snapshot-`+uid+`"`, "may remain")
	})
	t.Run("deleted_while_it_waits_for_other_calls", func(t *testing.T) {
		f := newFixture(t, csitest.Config{}, nil)
		f.FirstLimit = 1
		f.class("c1", nil)
		f.Plugin.Next(createSnapshot, csitest.Hang())
		f.start()
		f.content("v1", nil)
		f.Wait(createSnapshot, 1)
		f.content("v2", func(o *snapshotv1.VolumeSnapshotContent) { o.Spec.VolumeSnapshotRef.UID = "two" })
		f.Waits("CreateSnapshot", 1)
		f.delete("v2")
		kubetest.Eventually(f.T, "the deletion is cached", func(context.Context) error {
			cached, exists := f.c.contentLoop.Load().objects.Get(f.Unique("v2"))
			if exists && !cached.leaving() {
				return errors.New("it is not")
			}
			return nil
		})
		f.Plugin.Release()
		f.untilOf("v2", "is deleted", isDeleted)
		f.until("is complete", isComplete)
		f.Calls(createSnapshot, 1)
	})
	t.Run("no_longer_blocked", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.ready(func(o *snapshotv1.VolumeSnapshotContent) { retain(o); foreign(o) })
		f.terminate("v1")
		f.waitEvent("SnapshotDeletePending")
		if n := f.c.counts().blocked[blockedRelease]; n != 1 {
			t.Errorf("%v deletions are blocked, want 1", n)
		}
		f.annotate("v1", AnnBeingDeleted, "yes")
		f.until("has no finalizer", func(o *snapshotv1.VolumeSnapshotContent) bool { return o != nil && len(o.Finalizers) == 1 })
		f.quiet()
		if n := f.c.counts().blocked; len(n) > 0 {
			t.Errorf("blocked deletions: %v", n)
		}
		f.patch("v1", `{"metadata":{"finalizers":null}}`)
	})
	t.Run("057_class_deleted_or_of_another_driver", func(t *testing.T) {
		for _, recreated := range []bool{false, true} {
			t.Run(fmt.Sprint(recreated), func(t *testing.T) {
				f := scenario(t, csitest.Config{}, nil)
				f.ready(nil)
				f.deleteClass("c1")
				if recreated {
					f.classOf("c1", "other.example.com", nil)
				}
				f.delete("v1")
				f.until("is deleted", isDeleted)
				f.Calls(removeSnapshot, 1)
			})
		}
	})
	t.Run("058_other_writers", func(t *testing.T) {
		f := newFixture(t, csitest.Config{}, nil)
		f.class("c1", nil)
		gate := f.delayWatches()
		f.start()
		f.Plugin.Next(createSnapshot, csitest.Hang())
		f.content("v1", nil)
		f.Wait(createSnapshot, 1)
		gate.close()
		f.patch("v1", fmt.Sprintf(`{"metadata":{"annotations":{"example.com/a":"1"},"finalizers":["example.com/other",%q]}}`, Finalizer))
		f.Plugin.Release()
		o := f.until("is complete", isComplete)
		if !has(o, "example.com/a") || len(o.Finalizers) != 2 {
			t.Errorf("got %+v", o.ObjectMeta)
		}
		gate.open()
		f.delete("v1")
		o = f.until("has no finalizer", func(o *snapshotv1.VolumeSnapshotContent) bool { return o != nil && len(o.Finalizers) == 1 })
		if o.Finalizers[0] != "example.com/other" || !has(o, "example.com/a") {
			t.Errorf("got %+v", o.ObjectMeta)
		}
		f.patch("v1", `{"metadata":{"finalizers":null}}`)
	})
	t.Run("059_cost", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		const n = 100
		for i := range n {
			f.content(fmt.Sprint("n", i), func(o *snapshotv1.VolumeSnapshotContent) {
				o.Spec.VolumeSnapshotRef.UID = types.UID(fmt.Sprint("uid", i))
			})
		}
		for i := range n {
			f.untilOf(fmt.Sprint("n", i), "is complete", isComplete)
			f.delete(fmt.Sprint("n", i))
		}
		for i := range n {
			f.untilOf(fmt.Sprint("n", i), "is deleted", isDeleted)
		}
		f.Calls(createSnapshot, n)
		f.Calls(removeSnapshot, n)
		f.writes(4*n, n)
		f.noSnapshots()
	})
}

// forbidPatch refuses patches, as an old ClusterRole does.
func forbidPatch(r request) int {
	if r.method == "PATCH" {
		return 403
	}
	return 0
}

// refuseDeletion refuses the reads before DeleteSnapshot and the removal of the finalizer.
func (f *fixture) refuseDeletion() {
	f.requests.refusing(func(r request) int {
		if r.isMetadata() || r.method == "GET" {
			return internalError
		}
		return 0
	})
}

func TestSnapshotterScenarioRestart(t *testing.T) {
	t.Run("061_before_the_call", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(createSnapshot, csitest.Hang()) // the driver does nothing
		f.content("v1", nil)
		f.Wait(createSnapshot, 1)
		f.Crash()
		f.start()
		f.until("is complete", isComplete)
		f.Calls(createSnapshot, 2)
		if n := len(f.Plugin.Snapshots()); n != 1 {
			t.Errorf("%d snapshots", n)
		}
	})
	t.Run("062_before_the_status", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.requests.refusing(func(r request) int {
			if r.isStatus() {
				return internalError
			}
			return 0
		})
		f.content("v1", nil)
		f.Wait(createSnapshot, 1)
		f.Must(f.Plugin.WaitIdle(t.Context()))
		f.Crash()
		f.requests.refusing(nil)
		f.start()
		f.until("is complete", isComplete)
		if r := f.created(); len(r) != 2 || r[0].Name != r[1].Name || len(f.Plugin.Snapshots()) != 1 {
			t.Errorf("requests %v", r)
		}
	})
	t.Run("063_before_the_end", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.requests.refusing(func(r request) int {
			if r.isMetadata() && strings.Contains(r.body, `"remove"`) {
				return internalError
			}
			return 0
		})
		f.content("v1", nil)
		f.until("is ready", isReady)
		f.Crash()
		f.requests.refusing(nil)
		f.start()
		f.until("is complete", isComplete)
		f.Calls(createSnapshot, 1)
	})
	t.Run("064_before_the_finalizer", func(t *testing.T) {
		for ready, removals := range map[bool]int{true: 2, false: 3} { // if not ready, the repeated check creates another snapshot
			t.Run(fmt.Sprintf("ready_%t", ready), func(t *testing.T) {
				f := scenario(t, csitest.Config{}, nil)
				if ready {
					f.ready(nil)
				} else {
					f.notReady(nil)
				}
				f.Plugin.Next(removeSnapshot, csitest.DoAndHang())
				f.delete("v1")
				f.Wait(removeSnapshot, 1)
				f.Crash()
				f.start()
				f.until("is deleted", isDeleted)
				f.Calls(removeSnapshot, removals)
				f.noSnapshots()
			})
		}
	})
	t.Run("065_before_the_finalizer_with_a_foreign_one", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.ready(foreign)
		f.requests.refusing(func(r request) int {
			if r.isMetadata() {
				return internalError
			}
			return 0
		})
		f.delete("v1")
		f.until("has no status", func(o *snapshotv1.VolumeSnapshotContent) bool { return o.Status.SnapshotHandle == nil })
		f.Crash()
		f.requests.refusing(nil)
		f.start()
		f.until("has no finalizer", func(o *snapshotv1.VolumeSnapshotContent) bool { return len(o.Finalizers) == 1 })
		f.Calls(removeSnapshot, 1)
		f.Calls(createSnapshot, 1)
		f.patch("v1", `{"metadata":{"finalizers":null}}`)
		f.until("is deleted", isDeleted)
	})
	t.Run("066_killed_during_the_call", func(t *testing.T) {
		for name, replaced := range map[string]bool{"recorded": false, "annotations_replaced": true} { // by the snapshot-controller
			t.Run(name, func(t *testing.T) {
				f := scenario(t, csitest.Config{}, nil)
				f.Plugin.Next(createSnapshot, csitest.DoAndHang())
				f.content("v1", nil)
				f.Wait(createSnapshot, 1)
				f.Crash()
				if replaced {
					f.patch("v1", `{"metadata":{"annotations":null}}`)
				}
				f.delete("v1")
				f.start()
				f.until("is deleted", isDeleted)
				f.Calls(createSnapshot, 2)
				f.Calls(removeSnapshot, 1)
				f.noSnapshots()
			})
		}
	})
	t.Run("067_delayed_watch", func(t *testing.T) {
		f := newFixture(t, csitest.Config{}, nil)
		f.class("c1", nil)
		gate := f.delayWatches()
		f.start()
		f.quiet()
		f.Plugin.Next(createSnapshot, csitest.Hang())
		f.content("v1", nil)
		f.Wait(createSnapshot, 1)
		gate.close()
		f.Plugin.Release()
		f.until("is complete", isComplete)
		gate.open()
		gate.close()
		f.delete("v1")
		gate.open()
		f.until("is deleted", isDeleted)
		f.Calls(createSnapshot, 1)
		f.Calls(removeSnapshot, 1)
		f.noSnapshots()
	})
	t.Run("068_recreated", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Hour, time.Hour })
		f.Plugin.Next(createSnapshot, csitest.Fail(codes.Internal, "no"))
		f.content("v1", nil)
		f.until("reports it", hasError("Internal"))
		f.Plugin.Next(createSnapshot, csitest.Hang())
		f.content("v2", nil)
		f.Wait(createSnapshot, 2)
		for _, name := range []string{"v1", "v2"} {
			f.remove(name)
			f.content(name, func(o *snapshotv1.VolumeSnapshotContent) { o.Spec.VolumeSnapshotRef.UID = types.UID(name) })
		}
		f.Plugin.Release() // the sync of the old v2
		f.until("is complete", isComplete)
		o := f.untilOf("v2", "is complete", isComplete)
		if !strings.Contains(o.Annotations[AnnRequest], "snapshot-v2") {
			t.Errorf("got %v", o.Annotations)
		}
		for _, s := range f.Plugin.Snapshots() {
			if s.Name == "snapshot-v2" && s.ID != *o.Status.SnapshotHandle {
				t.Errorf("handle %s of %+v", *o.Status.SnapshotHandle, s)
			}
		}
	})
	t.Run("outdated_cache_of_a_new_leader", func(t *testing.T) {
		f := newFixture(t, csitest.Config{}, nil)
		f.class("c1", nil)
		lists := f.delayWatches()
		f.start()
		f.indeterminate(codes.Unavailable)
		f.Crash()
		f.delete("v1")
		f.Plugin.Always(createSnapshot, nil)
		lists.freeze(f)
		for _, s := range f.Plugin.Snapshots() { // the previous leader completes the deletion
			_, err := f.Plugin.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: s.ID})
			f.Must(err)
		}
		f.patch("v1", `{"metadata":{"finalizers":null}}`)
		f.until("is deleted", isDeleted)
		n, writes := f.Plugin.Count(createSnapshot), len(f.requests.all("PATCH"))
		f.start()
		kubetest.Eventually(t, "the request is recorded again", func(context.Context) error {
			if len(f.requests.all("PATCH")) == writes {
				return errors.New("it is not")
			}
			return nil
		})
		f.Calls(createSnapshot, n)
		f.noSnapshots()
	})
	t.Run("record_that_the_cache_of_a_new_leader_lacks", func(t *testing.T) {
		for name, released := range map[string]bool{"released": true, "not_released": false} {
			t.Run(name, func(t *testing.T) {
				f := newFixture(t, csitest.Config{}, nil)
				f.class("c1", nil)
				f.secret("s", map[string]string{"k": "v"})
				lists := f.delayWatches()
				f.start()
				f.Plugin.Next(createSnapshot, csitest.DoAndHang())
				f.content("v1", f.withSecret)
				f.Wait(createSnapshot, 1)
				f.Crash()
				recorded, err := f.get(t.Context(), "v1")
				f.Must(err)
				f.annotate("v1", AnnBeingCreated, nil)
				f.annotate("v1", AnnRequest, nil)
				if released {
					f.delete("v1")
				} else {
					f.terminate("v1")
				}
				lists.freeze(f)
				f.annotate("v1", AnnBeingCreated, recorded.Annotations[AnnBeingCreated])
				f.annotate("v1", AnnRequest, recorded.Annotations[AnnRequest])
				if released {
					f.deleteSecret("s")
				}
				f.start()
				if released {
					f.waitEvent("Warning SnapshotDeleteError", f.Namespace+"/s", "not found")
					f.secret("s", map[string]string{"k": "v"})
				} else {
					f.waitEvent("SnapshotDeletePending")
					f.annotate("v1", AnnBeingDeleted, "yes")
				}
				lists.open()
				f.until("is deleted", isDeleted)
				f.Calls(removeSnapshot, 1)
				f.noSnapshots()
			})
		}
	})
	t.Run("canceled_by_the_end_of_the_term", func(t *testing.T) {
		for method, test := range map[string]func(*fixture){
			removeSnapshot: func(f *fixture) { f.ready(nil) },
			createSnapshot: func(f *fixture) { f.indeterminate(codes.Unavailable) },
		} {
			t.Run(method, func(t *testing.T) {
				f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Hour, time.Hour })
				test(f)
				f.Plugin.Always(createSnapshot, nil)
				n := f.Plugin.Count(method)
				f.Plugin.Next(method, csitest.Hang())
				f.delete("v1")
				f.Wait(method, n+1)
				before := f.events.all()
				_ = f.Stop(election.ErrLost)
				if got := f.events.all(); len(got) != len(before) {
					t.Errorf("events %q", got)
				}
			})
		}
	})
	t.Run("drained", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(createSnapshot, csitest.Hang())
		f.content("v1", nil)
		f.Wait(createSnapshot, 1)
		done := make(chan struct{})
		go func() { _ = f.Stop(workloop.ErrDrain); close(done) }()
		f.Plugin.Release()
		<-done
		o, err := f.contents.Get(t.Context(), f.Unique("v1"), metav1.GetOptions{})
		if err != nil || !isComplete(o) {
			t.Errorf("%v, %+v", err, o)
		}
	})
}
