// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// nodeID changes the ID that the driver has for node n1.
func (f *fixture) nodeID(id string) {
	f.Helper()
	for _, drivers := range []string{"", fmt.Sprintf(`{"name":%q,"nodeID":%q,"topologyKeys":null}`, f.Driver, id)} { // an entry is immutable
		_, err := f.Client.StorageV1().CSINodes().Patch(f.Context(), f.Unique("n1"), types.MergePatchType,
			fmt.Appendf(nil, `{"spec":{"drivers":[%s]}}`, drivers), metav1.PatchOptions{})
		f.Must(err)
	}
	kubetest.Eventually(f.T, "the attacher knows the node ID", func(context.Context) error {
		if n, _ := f.c.csiNodes.Get(f.Unique("n1")); n == nil || len(n.Spec.Drivers) == 0 || n.Spec.Drivers[0].NodeID != id {
			return fmt.Errorf("CSINode %+v", n)
		}
		return nil
	})
}

// nodes returns the calls to publish and unpublish, with their node IDs.
func (f *fixture) nodes() string {
	var all []string
	for _, c := range f.Plugin.Calls(publish, unpublish) {
		r, _ := c.Request.(interface{ GetNodeId() string })
		all = append(all, strings.TrimSuffix(strings.TrimPrefix(c.Method, "Controller"), "Volume")+" "+r.GetNodeId())
	}
	return strings.Join(all, ", ")
}

// sent waits for the calls of want, and for no others.
func (f *fixture) sent(want string) {
	f.Helper()
	kubetest.Eventually(f.T, "the driver is called for the node IDs", func(context.Context) error {
		if got := f.nodes(); got != want {
			return fmt.Errorf("calls %s, want %s", got, want)
		}
		return nil
	})
}

// otherNode returns a change that makes an attachment one of node n2, which has ID id-2.
func (f *fixture) otherNode() func(*storagev1.VolumeAttachment) {
	f.Helper()
	_, err := f.Client.StorageV1().CSINodes().Create(f.Context(), &storagev1.CSINode{
		ObjectMeta: metav1.ObjectMeta{Name: f.Unique("n2")},
		Spec:       storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: f.Driver, NodeID: "id-2"}}},
	}, metav1.CreateOptions{})
	f.Must(err)
	return func(va *storagev1.VolumeAttachment) { va.Spec.NodeName = f.Unique("n2") }
}

// The ID of a node changes while a volume is or may be published to the node.
func TestAttacherScenarioNodeID(t *testing.T) {
	indeterminate := csitest.DoAndFail(codes.DeadlineExceeded, "slow")
	for name, tt := range map[string]struct {
		modes          func(*corev1.PersistentVolume)
		publish, after csitest.Step // of the first ControllerPublishVolume, of the first ControllerUnpublishVolume
		attached, all  string       // the calls until it is attached, and until it is detached
	}{
		"042_while_attached": {withModes(rwo), csitest.Default(), csitest.Default(), "Publish id-1", "Publish id-1, Unpublish id-1"},
		"042_while_attaching": {withModes(rwo), indeterminate, csitest.Default(), "Publish id-1, Unpublish id-1, Publish new",
			"Publish id-1, Unpublish id-1, Publish new, Unpublish new"},
		"042_while_attaching_the_former_is_not_found": {
			withModes(rwo), csitest.Fail(codes.DeadlineExceeded, "slow"), csitest.Fail(codes.NotFound, "no such node"),
			"Publish id-1, Unpublish id-1, Publish new", "Publish id-1, Unpublish id-1, Publish new, Unpublish new"},
		"042_while_attaching_the_former_fails": {
			withModes(rwo), indeterminate, csitest.Fail(codes.Internal, "busy"),
			"Publish id-1, Unpublish id-1, Unpublish id-1, Publish new",
			"Publish id-1, Unpublish id-1, Unpublish id-1, Publish new, Unpublish new"},
		"042_while_attaching_to_many_nodes": {withModes(rwx), indeterminate, csitest.Default(), "Publish id-1, Publish new",
			"Publish id-1, Publish new, Unpublish id-1, Unpublish new"},
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, csitest.Config{}, nil)
			changed := make(chan struct{})
			f.Plugin.Next(publish, func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
				select {
				case <-changed:
				case <-ctx.Done():
				}
				return tt.publish(ctx, p, request, do)
			})
			f.Plugin.Next(unpublish, tt.after)
			f.node("id-1")
			f.volume(tt.modes)
			f.attach("va1", nil)
			f.Wait(publish, 1)
			f.nodeID("new")
			close(changed)
			f.until("is attached", isAttached)
			f.sent(tt.attached)
			f.detach("va1")
			f.until("is deleted", isDeleted)
			f.sent(tt.all)
			f.nothingIsPublished()
		})
	}
	t.Run("042_detach_fails", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.Timeout = time.Minute })
		f.Plugin.Next(unpublish, csitest.Fail(codes.NotFound, "no such node"), csitest.Hang())
		f.attached()
		f.nodeID("new")
		f.detach("va1")
		f.until("names both", detachError(`published with node ID "id-1"`))
		f.Wait(unpublish, 2)
		f.Plugin.Release()
		f.until("is deleted", isDeleted)
		f.sent("Publish id-1, Unpublish id-1, Unpublish id-1")
	})
	t.Run("042_deleted_by_force_after_the_change", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		began, gate := make(chan struct{}), make(chan struct{})
		f.Plugin.Always(publish, func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
			if request.(*csi.ControllerPublishVolumeRequest).NodeId == "id-1" { // also if it is repeated before the ID changes
				return indeterminate(ctx, p, request, do)
			}
			close(began)
			<-gate
			return do()
		})
		f.node("id-1")
		f.volume(withModes(rwx))
		f.attach("va1", nil)
		f.until("was published", attachError("slow"))
		f.nodeID("new")
		<-began
		f.deleteByForce(f.Unique("va1"), 0)
		close(gate)
		f.Wait(unpublish, 2)
		f.nothingIsPublished()
	})

	t.Run("042_recorded_by_an_earlier_leader_that_the_cache_lacks", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		var earlier sync.Once
		f.through(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if f.patches(r, "va1") {
				earlier.Do(func() {
					f.patchAttachment("va1", fmt.Sprintf(`{"metadata":{"finalizers":[%q],"annotations":{%q:"id-1"}}}`,
						Finalizer(f.Driver), annNodeID))
				})
			}
			pass.ServeHTTP(w, r)
		})
		f.node("new")
		f.volume(withModes(rwo))
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		f.sent("Unpublish id-1, Publish new")
	})

	// With ListVolumes.
	t.Run("059_node_id_changed_while_attached_to_many_nodes", func(t *testing.T) {
		f := scenario(t, lists(), seldomRetried)
		f.node("id-1")
		f.volume(withModes(rwx))
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		f.nodeID("new")
		f.sent("Publish id-1, Publish new")
		f.agrees()
		f.detach("va1")
		f.until("is deleted", isDeleted)
		f.nothingIsPublished()
	})
	t.Run("059_node_id_changed_while_attached_to_one_node", func(t *testing.T) {
		f := scenario(t, lists(), seldomRetried)
		f.attached()
		f.nodeID("new")
		f.until("names both", attachError(`published with the former node ID "id-1"`))
		f.sent("Publish id-1")
		f.behind(false) // the storage system has unpublished the volume with the former machine
		f.until("is attached", isAttached)
		f.sent("Publish id-1, Unpublish id-1, Publish new")
	})
}

// csi-attacher records the node ID only.
func TestAttacherScenarioOfCSIAttacher(t *testing.T) {
	t.Run("049_volume_lost_after_an_upgrade", func(t *testing.T) {
		f := newFixture(t, csitest.Config{}, nil)
		f.node("id-1")
		f.volume(func(pv *corev1.PersistentVolume) { pv.Finalizers = []string{Finalizer(f.Driver)} })
		f.attach("va1", func(va *storagev1.VolumeAttachment) {
			va.Finalizers, va.Annotations = []string{Finalizer(f.Driver)}, map[string]string{annNodeID: "id-1"}
		})
		f.patchAttachment("va1", `{"status":{"attached":true}}`, "status")
		f.cfg.WorkerThreads = 1
		f.start()
		f.settles()
		if va := f.until("is attached", isAttached); va.Annotations[annVolumeHandle] != "" {
			t.Errorf("annotations %v: each VolumeAttachment was written", va.Annotations)
		}
		f.deleteVolume("pv1")
		f.until("has the record", func(va *storagev1.VolumeAttachment) bool { return va.Annotations[annVolumeHandle] != "" })
		_, err := f.Client.CoreV1().PersistentVolumes().Patch(
			t.Context(), f.Unique("pv1"), types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{},
		)
		f.Must(err)
		f.detach("va1")
		f.until("is deleted", isDeleted)
		f.sent("Unpublish id-1")
	})
}

// A volume for one node is not published to a second one before it is unpublished from the first.
func TestAttacherScenarioSecondNode(t *testing.T) {
	t.Run("047_waits_for_the_first_node", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, oneWorkerWithLongRetry)
		f.Plugin.Next(unpublish, csitest.Fail(codes.Internal, "node is shut down"))
		f.attached()
		f.settles() // a late event of the status would end the back-off of the detach
		f.detach("va1")
		f.until("cannot be detached", detachError("node is shut down"))
		f.attach("va2", f.otherNode())
		va := f.untilOf("va2", "waits", attachError(fmt.Sprintf("VolumeAttachment %q", f.Unique("va1"))))
		if len(va.Finalizers) > 0 || !strings.Contains(va.Status.AttachError.Message, "node is shut down") {
			t.Errorf("got %+v", va)
		}
		f.sent("Publish id-1, Unpublish id-1")
		f.patchAttachment("va1", `{"metadata":{"labels":{"retry":"now"}}}`)
		f.until("is deleted", isDeleted)
		f.untilOf("va2", "is attached without waiting for its back-off", isAttached)
		f.sent("Publish id-1, Unpublish id-1, Unpublish id-1, Publish id-2")
	})
	t.Run("047_waits_while_a_finalizer_of_others_keeps_the_first", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Hour, time.Hour })
		f.Plugin.Next(unpublish, csitest.Hang())
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", func(va *storagev1.VolumeAttachment) { va.Finalizers = []string{theirs} })
		f.until("is attached", isAttached)
		f.detach("va1")
		f.Wait(unpublish, 1)
		f.attach("va2", f.otherNode())
		f.untilOf("va2", "waits", attachError("is being deleted"))
		f.Plugin.Release()
		f.untilOf("va2", "is attached", isAttached)
		f.sent("Publish id-1, Unpublish id-1, Publish id-2")
	})
	t.Run("047_many_nodes_do_not_wait", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, oneWorkerWithLongRetry)
		f.Plugin.Always(unpublish, csitest.Fail(codes.Internal, "node is shut down"))
		f.node("id-1")
		f.volume(withModes(rwx))
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		f.detach("va1")
		f.until("cannot be detached", detachError("node is shut down"))
		f.attach("va2", f.otherNode())
		f.untilOf("va2", "is attached", isAttached)
	})
	t.Run("047_deleted_by_force", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, oneWorkerWithLongRetry)
		f.Plugin.Next(unpublish, csitest.Fail(codes.Internal, "node is shut down"))
		f.Plugin.Always(publish, func(context.Context, *csitest.Plugin, any, func() (any, error)) (any, error) {
			return &csi.ControllerPublishVolumeResponse{}, nil
		})
		f.attached()
		f.settles() // as above
		f.detach("va1")
		f.until("cannot be detached", detachError("node is shut down"))
		f.attach("va2", f.otherNode())
		f.untilOf("va2", "waits", attachError("is being deleted"))
		f.patchAttachment("va1", `{"metadata":{"finalizers":null}}`)
		f.untilOf("va2", "is attached", isAttached)
	})
}

// A detach calls the driver for two node IDs. It does not repeat the first call because the second one has to wait for other calls.
func TestNodeIDsWithLimit(t *testing.T) {
	f := newFixture(t, csitest.Config{}, nil)
	f.FirstLimit = 1
	f.node("id-1")
	f.start()
	onNode2 := f.otherNode()
	others := []string{"first", "last"}
	for _, name := range others {
		f.volume(func(pv *corev1.PersistentVolume) {
			pv.Name, pv.Spec.CSI.VolumeHandle = f.Unique(name), f.Plugin.AddVolume(name, 1<<30)
		})
		f.attach(name, func(va *storagev1.VolumeAttachment) {
			onNode2(va)
			va.Spec.Source.PersistentVolumeName = ptr.To(f.Unique(name))
		})
		f.untilOf(name, "is attached", isAttached)
	}
	changed := make(chan struct{})
	f.Plugin.Next(publish, func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
		select {
		case <-changed:
		case <-ctx.Done():
		}
		return csitest.DoAndFail(codes.DeadlineExceeded, "slow")(ctx, p, request, do)
	})
	f.volume(withModes(rwx))
	f.attach("va1", nil)
	f.Wait(publish, 3)
	f.nodeID("new")
	close(changed)
	f.until("is attached", isAttached)
	before := f.nodes()
	f.Plugin.Next(unpublish, csitest.Hang())
	f.detach("first")
	f.Wait(unpublish, 1)
	f.detach("va1")
	f.Waits("ControllerUnpublishVolume", 1)
	f.detach("last")
	f.Waits("ControllerUnpublishVolume", 2)
	f.Plugin.Release()
	for _, name := range append(others, "va1") {
		f.untilOf(name, "is deleted", isDeleted)
	}
	f.nothingIsPublished()
	if calls := strings.TrimPrefix(f.nodes(), before); strings.Count(calls, "Unpublish id-1") != 1 {
		t.Errorf("calls%s, want one for each node ID of va1", calls)
	}
}
