// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

const (
	rwo, rox, rwx, rwop = corev1.ReadWriteOnce, corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOncePod

	writer  = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	multi   = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	single  = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	reader  = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	writers = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
)

// withModes gives a volume access modes.
func withModes(modes ...corev1.PersistentVolumeAccessMode) func(*corev1.PersistentVolume) {
	return func(pv *corev1.PersistentVolume) { pv.Spec.AccessModes = modes }
}

// ofVolume makes an attachment one of the volume of that name.
func (f *fixture) ofVolume(name string) func(*storagev1.VolumeAttachment) {
	return func(va *storagev1.VolumeAttachment) { va.Spec.Source.PersistentVolumeName = ptr.To(f.Unique(name)) }
}

// in is f for a subtest.
func (f *fixture) in(t *testing.T) *fixture {
	return &fixture{f.In(t), f.cfg, f.c}
}

// settles waits until an attachment made now has been looked at. With one worker,
// everything that happened to attachments before has been looked at then.
func (f *fixture) settles() {
	f.Helper()
	if f.cfg.WorkerThreads != 1 {
		f.Fatal("settles requires one worker")
	}
	f.attach("last", f.ofVolume("none"))
	f.untilOf("last", "reports it", attachError("not found"))
	f.detach("last")
	f.untilOf("last", "is deleted", isDeleted)
}

func oneWorker(c *Config) { c.WorkerThreads = 1 }

func oneWorkerWithLongRetry(c *Config) {
	c.WorkerThreads, c.RetryIntervalStart, c.RetryIntervalMax = 1, time.Hour, time.Hour
}

func (f *fixture) patchAttachment(name, patch string, subresources ...string) {
	f.Helper()
	_, err := f.Client.StorageV1().VolumeAttachments().Patch(
		f.Context(), f.Unique(name), types.MergePatchType, []byte(patch), metav1.PatchOptions{}, subresources...,
	)
	f.Must(err)
}

// published is the requests to publish the volume of that handle.
func (f *fixture) published(handle string) (requests []*csi.ControllerPublishVolumeRequest) {
	for _, c := range f.Plugin.Calls(publish) {
		if r := c.Request.(*csi.ControllerPublishVolumeRequest); r.VolumeId == handle {
			requests = append(requests, r)
		}
	}
	return requests
}

// variant is a volume, and how the request to publish it differs from the plainest one
// of an able driver or another.
type variant struct {
	volume func(*corev1.PersistentVolume)
	want   func(r *csi.ControllerPublishVolumeRequest, able bool)
}

// variants has a volume of each attached, and compares the whole requests.
func (f *fixture) variants(able bool, all map[string]variant) {
	f.Helper()
	f.node("id-1")
	handles := map[string]string{}
	for name, v := range all {
		short := strings.ReplaceAll(name, "_", "-")
		handles[name] = f.volume(func(pv *corev1.PersistentVolume) {
			pv.Name, pv.Spec.CSI.VolumeHandle = f.Unique(short), f.Plugin.AddVolume(name, 1<<30)
			if v.volume != nil {
				v.volume(pv)
			}
		}).Spec.CSI.VolumeHandle
		f.attach(short, f.ofVolume(short))
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		f.Run(name, func(t *testing.T) {
			f := f.in(t)
			va := f.untilOf(strings.ReplaceAll(name, "_", "-"), "is attached", isAttached)
			if va.Status.AttachmentMetadata != nil {
				t.Errorf("metadata %v", va.Status.AttachmentMetadata)
			}
			want := &csi.ControllerPublishVolumeRequest{VolumeId: handles[name], NodeId: "id-1", VolumeCapability: &csi.VolumeCapability{
				AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
				AccessMode: &csi.VolumeCapability_AccessMode{Mode: writer},
			}}
			if able {
				want.VolumeCapability.GetMount().FsType, want.VolumeCapability.AccessMode.Mode = "ext4", multi
			}
			if all[name].want != nil {
				all[name].want(want, able)
			}
			if got := f.published(handles[name]); len(got) != 1 || !proto.Equal(got[0], want) {
				t.Errorf("got  %v\nwant %v", got, want)
			}
		})
	}
}

// attacherScenarioRequests is what a driver is asked, for which volume, with which node ID.
func attacherScenarioRequests(t *testing.T) {
	modes := func(plain, able csi.VolumeCapability_AccessMode_Mode) func(*csi.ControllerPublishVolumeRequest, bool) {
		return func(r *csi.ControllerPublishVolumeRequest, isAble bool) {
			r.VolumeCapability.AccessMode.Mode = plain
			if isAble {
				r.VolumeCapability.AccessMode.Mode = able
			}
		}
	}
	all := map[string]variant{
		"004_007_plainest": {},
		"005_attributes": {
			volume: func(pv *corev1.PersistentVolume) { pv.Spec.CSI.VolumeAttributes = map[string]string{"a": "b"} },
			want:   func(r *csi.ControllerPublishVolumeRequest, _ bool) { r.VolumeContext = map[string]string{"a": "b"} },
		},
		"006_file_system": {
			volume: func(pv *corev1.PersistentVolume) {
				pv.Spec.CSI.FSType, pv.Spec.MountOptions = "xfs", []string{"o1", "o2"}
			},
			want: func(r *csi.ControllerPublishVolumeRequest, _ bool) {
				mount := r.VolumeCapability.GetMount()
				mount.FsType, mount.MountFlags = "xfs", []string{"o1", "o2"}
			},
		},
		"008_block": {
			volume: func(pv *corev1.PersistentVolume) {
				pv.Spec.VolumeMode = ptr.To(corev1.PersistentVolumeBlock)
				pv.Spec.CSI.FSType = "xfs"
			},
			want: func(r *csi.ControllerPublishVolumeRequest, _ bool) {
				r.VolumeCapability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
			},
		},
		"009_010_many_writers":  {volume: withModes(rwx), want: modes(writers, writers)},
		"009_010_many_readers":  {volume: withModes(rox), want: modes(reader, reader)},
		"009_010_one_node":      {volume: withModes(rwo), want: modes(writer, multi)},
		"009_010_one_pod":       {volume: withModes(rwop), want: modes(writer, single)},
		"009_010_several_modes": {volume: withModes(rwx, rox, rwo), want: modes(writers, writers)},
		"012_read_only": {
			volume: func(pv *corev1.PersistentVolume) { pv.Spec.CSI.ReadOnly = true },
			want:   func(r *csi.ControllerPublishVolumeRequest, able bool) { r.Readonly = able },
		},
	}
	t.Run("004_to_012_plain_driver", func(t *testing.T) { scenario(t, csitest.Config{}, nil).variants(false, all) })
	t.Run("004_to_012_able_driver", func(t *testing.T) {
		scenario(t, csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{
			csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME, csi.ControllerServiceCapability_RPC_PUBLISH_READONLY,
			csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		}}, func(c *Config) { c.DefaultFSType = "ext4" }).variants(true, all)
	})
	t.Run("011_modes_that_exclude_each_other", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Hour, time.Hour })
		f.node("id-1")
		f.volume(withModes(rwo, rox))
		f.attach("va1", nil)
		va := f.until("reports it", attachError("CSI does not support ReadOnlyMany and ReadWriteOnce on the same PersistentVolume"))
		if len(va.Finalizers) > 0 || va.Status.AttachError.ErrorCode != nil {
			t.Errorf("got %+v", va)
		}
		f.Calls(publish, 0)
		pv := fmt.Appendf(nil, `{"spec":{"accessModes":[%q]}}`, rwo)
		_, err := f.Client.CoreV1().PersistentVolumes().Patch(t.Context(), f.Unique("pv1"), types.MergePatchType, pv, metav1.PatchOptions{})
		f.Must(err)
		f.until("is attached without waiting for its back-off", isAttached)
	})

	t.Run("020_mount_options_corrected", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Hour, time.Hour })
		f.Plugin.Next(publish, csitest.Fail(codes.InvalidArgument, "bad option"))
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		f.until("reports it", attachError("bad option"))
		_, err := f.Client.CoreV1().PersistentVolumes().Patch(t.Context(), f.Unique("pv1"), types.MergePatchType,
			[]byte(`{"spec":{"mountOptions":["noatime"]}}`), metav1.PatchOptions{})
		f.Must(err)
		f.until("is attached without waiting for its back-off", isAttached)
	})

	// What the API server does not accept, so that only a bug of it could bring it here.
	inline := func(spec *corev1.PersistentVolumeSpec) func(*storagev1.VolumeAttachment) {
		return func(va *storagev1.VolumeAttachment) {
			va.Spec.Source = storagev1.VolumeAttachmentSource{InlineVolumeSpec: spec}
		}
	}
	spec := func(modes ...corev1.PersistentVolumeAccessMode) *corev1.PersistentVolumeSpec {
		return &testVolume(withModes(modes...)).Spec
	}
	for name, tt := range map[string]struct {
		attachment func(*storagev1.VolumeAttachment)
		want       string
	}{
		"016_two_sources": {func(va *storagev1.VolumeAttachment) { va.Spec.Source.InlineVolumeSpec = spec(rwo) },
			"both InlineCSIVolumeSource and PersistentVolumeName specified in VA source"},
		"016_no_source": {inline(nil), "neither InlineCSIVolumeSource nor PersistentVolumeName specified in VA source"},
		"017_inline_without_csi": {inline(&corev1.PersistentVolumeSpec{AccessModes: []corev1.PersistentVolumeAccessMode{rwo}}),
			"inline volume spec contains nil CSI source"},
		"017_one_pod_and_one_node": {inline(spec(rwop, rwo)),
			"Kubernetes does not support use of ReadWriteOncePod with other access modes on the same PersistentVolume"},
		"017_no_mode":      {inline(spec()), "unsupported AccessMode combination: []"},
		"017_unknown_mode": {inline(spec("Some")), "unsupported AccessMode combination: [Some]"},
	} {
		t.Run(name, func(t *testing.T) {
			got := testDriver(nil).decide(
				attachmentState{attachment: testAttachment(tt.attachment), volume: testVolume(), csiNode: testNode("id-1")},
			)
			if got.action != doReportError || got.err == nil || got.err.Error() != tt.want {
				t.Errorf("%v, %v", got.action, got.err)
			}
		})
	}

	t.Run("020_outdated_annotation", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.node("id-1")
		handle := f.volume(nil).Spec.CSI.VolumeHandle
		f.attach("va1", func(va *storagev1.VolumeAttachment) { va.Annotations = map[string]string{annNodeID: "old"} })
		if va := f.until("is attached", isAttached); va.Annotations[annNodeID] != "id-1" {
			t.Errorf("annotations %v", va.Annotations)
		}
		if got := f.published(handle); len(got) != 1 || got[0].NodeId != "id-1" {
			t.Errorf("got %v", got)
		}
	})

	// The node ID of an unpublish. The note is another one than that of the CSINode, so
	// that it shows which was used.
	for name, tt := range map[string]struct {
		csiNode func(f *fixture) // what becomes of it after the attach
		node    string           // what another attachment says then, to see that the attacher knows
		want    string
	}{
		"040_no_csinode": {
			csiNode: func(f *fixture) {
				f.Must(f.Client.StorageV1().CSINodes().Delete(f.Context(), f.Unique("n1"), metav1.DeleteOptions{}))
			},
			node: "csinode.storage.k8s.io", want: "noted",
		},
		"041_driver_not_on_the_node": {
			csiNode: func(f *fixture) {
				_, err := f.Client.StorageV1().CSINodes().Patch(
					f.Context(), f.Unique("n1"), types.MergePatchType, []byte(`{"spec":{"drivers":[]}}`), metav1.PatchOptions{},
				)
				f.Must(err)
			},
			node: "does not contain driver", want: "noted",
		},
		"042_the_csinode_has_another_id": {want: "noted"},
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, csitest.Config{}, nil)
			f.node("id-1")
			handle := f.volume(withModes(rwx)).Spec.CSI.VolumeHandle
			f.attach("va1", nil)
			f.until("is attached", isAttached)
			f.patchAttachment("va1", fmt.Sprintf(`{"metadata":{"annotations":{%q:"noted"}}}`, annNodeID))
			if tt.csiNode != nil {
				tt.csiNode(f)
				kubetest.Eventually(t, "the attacher knows about the CSINode", func(context.Context) error {
					f.attach("va2", nil)
					va := f.untilOf(
						"va2", "was looked at",
						func(va *storagev1.VolumeAttachment) bool { return isAttached(va) || attachError("")(va) },
					)
					f.detach("va2")
					f.untilOf("va2", "is deleted", isDeleted)
					if !attachError(tt.node)(va) {
						return fmt.Errorf("status %+v", va.Status)
					}
					return nil
				})
			}
			before := f.Plugin.Count(unpublish)
			f.detach("va1")
			f.until("is deleted", isDeleted)
			f.Calls(unpublish, before+1)
			if r := f.Plugin.Calls(unpublish)[before].Request; !proto.Equal(
				r, &csi.ControllerUnpublishVolumeRequest{VolumeId: handle, NodeId: tt.want},
			) {
				t.Errorf("got %v", r)
			}
		})
	}
	t.Run("043_no_node_id", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, oneWorker)
		f.volume(nil)
		f.attach("va1", func(va *storagev1.VolumeAttachment) { va.Finalizers = []string{Finalizer(f.Driver)} })
		missing := fmt.Sprintf("csinode.storage.k8s.io %q not found", f.Unique("n1"))
		f.until("reports it", attachError(missing))
		f.detach("va1")
		va := f.until("reports it", detachError(missing))
		if va.Status.DetachError.ErrorCode != nil {
			t.Errorf("error code %v", *va.Status.DetachError.ErrorCode)
		}
		f.settles()
		f.Calls(unpublish, 0)
		f.node("id-1")
		f.until("is deleted", isDeleted)
		f.Calls(unpublish, 1)
	})
}
