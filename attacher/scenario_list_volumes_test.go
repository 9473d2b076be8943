// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

const list = "ListVolumes"

// lists is a driver that says where its volumes are published.
func lists() csitest.Config {
	return csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES,
	}}
}

func often(c *Config) { c.ReconcileSync = 20 * time.Millisecond }

// seldomRetried has what failed wait for longer than any test.
func seldomRetried(c *Config) {
	often(c)
	c.RetryIntervalStart, c.RetryIntervalMax = time.Hour, time.Hour
}

// compared waits for three comparisons that begin after now and have ended.
func (f *fixture) compared() {
	f.Helper()
	ended := func() float64 {
		return testutil.ToFloat64(f.c.metrics.reconciliations.WithLabelValues("ok")) +
			testutil.ToFloat64(f.c.metrics.reconciliations.WithLabelValues("error"))
	}
	before := ended() + 1 // one may be under way
	kubetest.Eventually(f.T, "three more comparisons", func(context.Context) error {
		if n := ended(); n < before+3 {
			return fmt.Errorf("%v have ended, there were %v", n, before)
		}
		return nil
	})
}

func isOutOfSync(t *term, uid types.UID) bool {
	_, ok := t.outOfSync.of(uid)
	return ok
}

// mismatches is how often something was to be worked on again because of a comparison.
func (f *fixture) mismatches() int {
	return int(
		testutil.ToFloat64(f.c.metrics.mismatches.WithLabelValues("published")) +
			testutil.ToFloat64(f.c.metrics.mismatches.WithLabelValues("unpublished")),
	)
}

// agrees waits for three comparisons in which nothing differs.
func (f *fixture) agrees() {
	f.Helper()
	before := f.mismatches()
	f.compared()
	if n := f.mismatches(); n != before {
		f.Errorf("%d mismatches, there were %d", n, before)
	}
}

// attached makes va1 and waits until it is attached.
func (f *fixture) attached() *storagev1.VolumeAttachment {
	f.Helper()
	f.node("id-1")
	f.volume(nil)
	f.attach("va1", nil)
	return f.until("is attached", isAttached)
}

// behind publishes or unpublishes the volume of va1 at the driver, without a call.
func (f *fixture) behind(published bool) {
	f.Helper()
	r := f.Plugin.Calls(publish)[0].Request.(*csi.ControllerPublishVolumeRequest)
	var err error
	if published {
		_, err = f.Plugin.ControllerPublishVolume(f.Context(), r)
	} else {
		_, err = f.Plugin.ControllerUnpublishVolume(
			f.Context(), &csi.ControllerUnpublishVolumeRequest{VolumeId: r.VolumeId, NodeId: r.NodeId},
		)
	}
	f.Must(err)
}

// unchanged fails when va1 was written since before.
func (f *fixture) unchanged(before *storagev1.VolumeAttachment) {
	f.Helper()
	if after := f.until(
		"is there", func(va *storagev1.VolumeAttachment) bool { return va != nil },
	); after.ResourceVersion != before.ResourceVersion {
		f.Errorf("it was written: %+v", after)
	}
}

// slowCall is a call that does what it should at once, and is answered later.
type slowCall struct {
	*fixture
	did, release chan struct{}
}

// slow makes the next call of method a slow one.
func (f *fixture) slow(method string) slowCall {
	c := slowCall{f, make(chan struct{}), make(chan struct{})}
	f.Plugin.Next(method, func(ctx context.Context, _ *csitest.Plugin, _ any, do func() (any, error)) (any, error) {
		response, err := do()
		close(c.did)
		select {
		case <-c.release:
		case <-ctx.Done():
		}
		return response, err
	})
	return c
}

func (c slowCall) wait() {
	c.Helper()
	select {
	case <-c.did:
	case <-time.After(time.Minute):
		c.Fatal("the call did not come")
	}
}

func (c slowCall) answer() { close(c.release) }

// tokens is the tokens with which pages were asked for, one word each, "-" for the first page.
func (f *fixture) tokens() string {
	var all []string
	for _, c := range f.Plugin.Calls(list) {
		token := c.Request.(*csi.ListVolumesRequest).StartingToken
		if token == "" {
			token = "-"
		}
		all = append(all, token)
	}
	return strings.Join(all, " ")
}

// pages answers with a page that names the next one: by the token asked for, "" for the first.
func pages(next map[string]string) csitest.Step {
	return func(_ context.Context, _ *csitest.Plugin, request any, _ func() (any, error)) (any, error) {
		token := request.(*csi.ListVolumesRequest).StartingToken
		if next[token] == "fail" {
			return nil, status.Error(codes.Internal, "no page "+token)
		}
		return &csi.ListVolumesResponse{NextToken: next[token]}, nil
	}
}

func attacherScenarioCompare(t *testing.T) {
	t.Run("059_060_published_again", func(t *testing.T) {
		f := scenario(t, lists(), often)
		var reads atomic.Int32
		f.through(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/"+f.Unique("va1")) {
				reads.Add(1)
			}
			pass.ServeHTTP(w, r)
		})
		before := f.attached()
		f.agrees()
		f.Calls(publish, 1)
		f.behind(false)
		f.Wait(publish, 2)
		f.agrees()
		if f.Plugin.Publications() != 1 {
			t.Error("it is not published")
		}
		f.unchanged(before)
		f.Calls(publish, 2)
		f.Calls(unpublish, 0)
		if n := reads.Load(); n != 1 {
			t.Errorf("the VolumeAttachment was read %d times, want 1: before it is published again", n)
		}
	})
	t.Run("059_with_other_metadata", func(t *testing.T) {
		f := scenario(t, lists(), often)
		f.attached()
		f.Plugin.Next(
			publish,
			csitest.Alter(func(r *csi.ControllerPublishVolumeResponse) { r.PublishContext = map[string]string{"lun": "2"} }),
		)
		f.behind(false)
		f.until("has the metadata of the second publish", func(va *storagev1.VolumeAttachment) bool {
			return isAttached(va) && va.Status.AttachmentMetadata["lun"] == "2"
		})
	})
	t.Run("059_published_elsewhere_is_not_published_here", func(t *testing.T) {
		f := scenario(t, lists(), seldomRetried)
		f.Plugin.Always(list, csitest.Alter(func(r *csi.ListVolumesResponse) {
			for _, e := range r.Entries {
				e.Status.PublishedNodeIds = []string{"id-2"}
			}
		}))
		f.attached()
		f.Wait(publish, 3) // nothing fixes this: once per reconciliation, and no more
		f.Plugin.Always(list, nil)
		f.compared()
		f.agrees()
		if f.Plugin.MaxConcurrent(publish) != 1 {
			t.Error("the driver was called twice at the same time")
		}
	})
	t.Run("059_not_attached_but_published", func(t *testing.T) {
		f := scenario(t, lists(), seldomRetried)
		f.Plugin.Next(publish, csitest.DoAndFail(codes.Internal, "x"))
		f.attached() // without waiting for its back-off
		f.agrees()
		f.Calls(publish, 2)
	})
	t.Run("061_unpublished_again", func(t *testing.T) {
		f := scenario(t, lists(), often)
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", func(va *storagev1.VolumeAttachment) { va.Finalizers = []string{"example.com/theirs"} })
		f.until("is attached", isAttached)
		f.detach("va1")
		before := f.until("is detached", func(va *storagev1.VolumeAttachment) bool { return va != nil && !va.Status.Attached })
		f.agrees()
		f.Calls(unpublish, 1)
		f.behind(true)
		f.Wait(unpublish, 2)
		f.agrees()
		if f.Plugin.Publications() != 0 {
			t.Error("it is still published")
		}
		f.unchanged(before)
		f.Calls(unpublish, 2)
		f.Calls(publish, 1)
	})
	t.Run("062_pages", func(t *testing.T) {
		f := scenario(t, lists(), func(c *Config) { c.ReconcileSync, c.MaxEntries = 20*time.Millisecond, 2 })
		for i := range 5 {
			f.Plugin.AddVolume(fmt.Sprint(i), 1)
		}
		f.compared()
		if got := f.tokens(); !strings.Contains(got+" -", "- 2 4 - 2 4 - ") {
			t.Errorf("tokens %s", got)
		}
		for _, c := range f.Plugin.Calls(list) {
			if n := c.Request.(*csi.ListVolumesRequest).MaxEntries; n != 2 {
				t.Errorf("asked for %d volumes", n)
			}
		}
	})
	// An unusable report, or one without the volume, enqueues nothing.
	for name, tt := range map[string]struct {
		step   csitest.Step
		tokens string // of two comparisons
	}{
		"063_first_page_fails":        {pages(map[string]string{"": "fail"}), "- -"},
		"063_second_page_fails":       {pages(map[string]string{"": "a", "a": "fail"}), "- a - a"},
		"063_page_that_names_itself":  {pages(map[string]string{"": "a", "a": "a"}), "- a - a"},
		"063_pages_that_name_another": {pages(map[string]string{"": "a", "a": "b", "b": "a"}), "- a b - a b"},
		"064_entries_without_status":  {csitest.Alter(func(r *csi.ListVolumesResponse) { r.Entries[0].Status = nil }), "- -"},
		"064_status_in_the_first_entry": {csitest.Alter(func(r *csi.ListVolumesResponse) {
			r.Entries = append(r.Entries, &csi.ListVolumesResponse_Entry{Volume: r.Entries[0].Volume}, &csi.ListVolumesResponse_Entry{})
		}), "- -"},
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, lists(), often)
			f.volume(nil)
			f.Plugin.Always(list, tt.step)
			f.node("id-1")
			f.attach("va1", nil)
			f.until("is attached", isAttached)
			f.agrees()
			f.behind(false)
			f.agrees()
			f.Calls(publish, 1)
			if got := f.tokens(); !strings.Contains(got, tt.tokens) {
				t.Errorf("tokens %s, want %s among them", got, tt.tokens)
			}
			f.Plugin.Always(list, nil)
			f.Wait(publish, 2) // after a report that can be used
		})
	}
	t.Run("064_attached_and_detached_meanwhile", func(t *testing.T) {
		f := scenario(t, lists(), often)
		listed := f.slow(list)
		listed.wait()
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", func(va *storagev1.VolumeAttachment) { va.Finalizers = []string{"example.com/theirs"} })
		f.until("is attached", isAttached)
		listed.answer() // that it is not published
		f.agrees()
		listed = f.slow(list)
		listed.wait()
		f.detach("va1")
		f.until("is detached", func(va *storagev1.VolumeAttachment) bool { return va != nil && !va.Status.Attached })
		listed.answer() // that it is published
		f.agrees()
		if n := f.mismatches(); n != 0 {
			t.Errorf("%d mismatches", n)
		}
		f.Calls(publish, 1)
		f.Calls(unpublish, 1)
	})
	t.Run("064_published_again_meanwhile", func(t *testing.T) {
		f := scenario(t, lists(), often)
		before := f.attached()
		published := f.slow(publish)
		f.behind(false)
		published.wait()
		f.behind(false) // so that a report is one from before the call that is under way
		f.agrees()      // such reports do not count
		listed := f.slow(list)
		listed.wait()
		f.behind(true)
		published.answer()
		kubetest.Eventually(t, "the publish has ended", func(context.Context) error {
			if key := keyOf(before); isOutOfSync(f.c.term.Load(), key.UID) || f.c.term.Load().vaQueue.Processing(key) {
				return fmt.Errorf("it is marked or worked on")
			}
			return nil
		})
		mismatches := f.mismatches()
		listed.answer()
		f.agrees()
		if n := f.mismatches(); n != mismatches {
			t.Errorf("%d mismatches, there were %d", n, mismatches)
		}
		f.unchanged(before)
		f.Calls(publish, 2)
	})
	t.Run("064_another_of_the_name", func(t *testing.T) {
		f := scenario(t, lists(), seldomRetried)
		first := f.attached()
		f.Plugin.Next(publish, csitest.Fail(codes.Internal, "x"))
		f.behind(false)
		f.until("is marked", attachError("code = Internal"))
		f.detach("va1")
		f.until("is deleted", isDeleted)
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		f.agrees()
		f.Calls(publish, 3)
		kubetest.Eventually(t, "nothing is left of the first one", func(context.Context) error {
			if isOutOfSync(f.c.term.Load(), first.UID) {
				return fmt.Errorf("it is marked")
			}
			return nil
		})
	})
	t.Run("065_failure_is_retried", func(t *testing.T) {
		f := scenario(t, lists(), often)
		f.attached()
		f.Plugin.Next(publish, csitest.Fail(codes.Internal, "x"), csitest.Hang())
		f.behind(false)
		f.Wait(publish, 3)
		if va := f.until("reports it", attachError("code = Internal")); !va.Status.Attached {
			t.Error("it counts as not attached")
		}
		f.Plugin.Release()
		f.until("is attached", isAttached)
		f.agrees()
		f.Calls(publish, 3)
	})
	t.Run("065_comparisons_do_not_cut_the_back_off", func(t *testing.T) {
		f := scenario(t, lists(), seldomRetried)
		f.attached()
		f.Plugin.Always(publish, csitest.Fail(codes.Internal, "x"))
		f.behind(false)
		f.until("reports it", attachError("code = Internal"))
		f.compared()
		f.Calls(publish, 2)
		if f.mismatches() < 2 {
			t.Error("the later comparisons have found no difference")
		}
	})
	t.Run("065_failure_that_took_effect", func(t *testing.T) {
		f := scenario(t, lists(), often)
		f.attached()
		f.Plugin.Next(publish, csitest.DoAndFail(codes.Internal, "x"), csitest.Hang()) // the next attempt would remove the error
		f.behind(false)
		f.Wait(publish, 3)
		f.until("reports it", attachError("code = Internal"))
		f.Plugin.Release()
		f.until("is attached without an error", isAttached) // although the driver reports what it should
		f.agrees()
		f.Calls(publish, 3)
	})
	t.Run("065_error_of_an_earlier_process", func(t *testing.T) {
		f := scenario(t, lists(), often)
		f.attached()
		_, err := f.Client.StorageV1().VolumeAttachments().Patch(
			t.Context(), f.Unique("va1"), types.MergePatchType, []byte(`{"status":{"attachError":{"message":"x"}}}`),
			metav1.PatchOptions{}, "status",
		)
		f.Must(err)
		f.until("is attached without an error", isAttached)
		f.agrees()
		f.Calls(publish, 2)
	})
	const (
		publishes = csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME
		volumes   = csi.ControllerServiceCapability_RPC_LIST_VOLUMES
		nodes     = csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES
	)
	for name, tt := range map[string]struct {
		capabilities []csi.ControllerServiceCapability_RPC_Type
		every        time.Duration
	}{
		"066_nodes_are_not_listed":       {[]csi.ControllerServiceCapability_RPC_Type{publishes, volumes}, time.Millisecond},
		"066_volumes_are_not_listed":     {[]csi.ControllerServiceCapability_RPC_Type{publishes, nodes}, time.Millisecond},
		"066_nothing_is_published":       {[]csi.ControllerServiceCapability_RPC_Type{volumes, nodes}, time.Millisecond},
		"066_comparisons_are_turned_off": {[]csi.ControllerServiceCapability_RPC_Type{publishes, volumes, nodes}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, csitest.Config{Controller: tt.capabilities}, func(c *Config) { c.ReconcileSync = tt.every })
			f.attached()
			f.detach("va1")
			f.until("is deleted", isDeleted)
			f.Calls(list, 0)
		})
	}
	t.Run("many_nodes", func(t *testing.T) {
		f := scenario(t, lists(), often)
		f.node("id-1")
		f.volume(func(pv *corev1.PersistentVolume) {
			pv.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}
		})
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		other := &storagev1.CSINode{
			ObjectMeta: metav1.ObjectMeta{Name: f.Unique("n2")},
			Spec:       storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: f.Driver, NodeID: "id-2"}}},
		}
		_, err := f.Client.StorageV1().CSINodes().Create(t.Context(), other, metav1.CreateOptions{})
		f.Must(err)
		f.attach("va2", func(va *storagev1.VolumeAttachment) { va.Spec.NodeName = other.Name })
		f.untilOf("va2", "is attached", isAttached)
		f.agrees()
		f.behind(false) // on the first node only
		f.Wait(publish, 3)
		f.agrees()
		nodes := []string{}
		for _, c := range f.Plugin.Calls(publish) {
			nodes = append(nodes, c.Request.(*csi.ControllerPublishVolumeRequest).NodeId)
		}
		if !slices.Equal(nodes, []string{"id-1", "id-2", "id-1"}) {
			t.Errorf("published to %v", nodes)
		}
	})
	t.Run("driver_goes_away", func(t *testing.T) {
		f := scenario(t, lists(), often)
		f.attached()
		f.Plugin.Next(list, csitest.Drop(), csitest.Drop())
		f.agrees()
		f.behind(false)
		f.Wait(publish, 2)
	})
	t.Run("inline", func(t *testing.T) {
		f := scenario(t, lists(), often)
		f.node("id-1")
		f.attach("va1", func(va *storagev1.VolumeAttachment) {
			va.Spec.Source = storagev1.VolumeAttachmentSource{InlineVolumeSpec: &corev1.PersistentVolumeSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany},
				PersistentVolumeSource: corev1.PersistentVolumeSource{
					CSI: &corev1.CSIPersistentVolumeSource{Driver: f.Driver, VolumeHandle: f.Plugin.AddVolume("v", 1)},
				},
			}}
		})
		f.until("is attached", isAttached)
		f.behind(false)
		f.Wait(publish, 2)
		f.agrees()
	})
}
