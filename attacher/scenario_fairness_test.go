// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// hangsFor returns a step that hangs for the requests with this node ID.
func hangsFor(nodes ...string) csitest.Step {
	return func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
		if r, ok := request.(interface{ GetNodeId() string }); ok && slices.Contains(nodes, r.GetNodeId()) {
			return csitest.Hang()(ctx, p, request, do)
		}
		return do()
	}
}

// A node whose calls hang leaves a worker to the attachments of other nodes.
func TestNodeThatHangs(t *testing.T) {
	const workers, attaches, detaches, attachments = 10, 8, 6, 11
	f := scenario(t, csitest.Config{}, func(c *Config) { c.WorkerThreads, c.Timeout = workers, time.Hour })
	for _, node := range []string{"hangs", "busy", "answers"} {
		_, err := f.Client.StorageV1().CSINodes().Create(f.Context(), &storagev1.CSINode{
			ObjectMeta: metav1.ObjectMeta{Name: f.Unique(node)},
			Spec:       storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: f.Driver, NodeID: node}}},
		}, metav1.CreateOptions{})
		f.Must(err)
	}
	attach := func(name, node string) {
		f.volume(func(pv *corev1.PersistentVolume) {
			pv.Name, pv.Spec.CSI.VolumeHandle = f.Unique(name), f.Plugin.AddVolume(name, 1<<30)
		})
		f.attach(name, func(va *storagev1.VolumeAttachment) {
			va.Spec.NodeName, va.Spec.Source.PersistentVolumeName = f.Unique(node), ptr.To(f.Unique(name))
		})
	}
	of := func(i int) string { return fmt.Sprint("hangs", i) }
	f.Plugin.Always(publish, hangsFor("hangs", "busy"))
	attach("busy", "busy") // without other nodes there is no limit
	f.Wait(publish, 1)
	for i := range attachments {
		attach(of(i), "hangs")
	}
	f.Wait(publish, attaches+1)
	attach("answers", "answers")
	f.untilOf("answers", "is attached", isAttached)
	f.Calls(publish, attaches+2)

	f.Plugin.Always(publish, nil)
	f.Plugin.Release()
	for i := range attachments {
		f.untilOf(of(i), "is attached", isAttached)
	}
	f.untilOf("busy", "is attached", isAttached)
	f.Plugin.Always(unpublish, hangsFor("hangs", "busy"))
	f.detach("busy")
	f.Wait(unpublish, 1)
	for i := range attachments {
		f.detach(of(i))
	}
	f.Wait(unpublish, detaches+1)
	f.detach("answers")
	f.untilOf("answers", "is deleted", isDeleted)
	f.Calls(unpublish, detaches+2)
	f.Plugin.Always(unpublish, nil)
	f.Plugin.Release()
	for i := range attachments {
		f.untilOf(of(i), "is deleted", isDeleted)
	}
	f.untilOf("busy", "is deleted", isDeleted)
	f.Calls(publish, attachments+2)
	f.Calls(unpublish, attachments+2)
}

// The calls that undo the attachments of a node, which were deleted by force, leave a worker to those of other nodes.
func TestUndoThatHangs(t *testing.T) {
	const workers, limit = 10, 6
	f := scenario(t, csitest.Config{}, func(c *Config) { c.WorkerThreads, c.Timeout = workers, time.Hour })
	f.node("id-1")
	other := f.otherNode()
	of := func(i int) string { return fmt.Sprint("forced", i) }
	attach := func(name string, change func(*storagev1.VolumeAttachment)) {
		f.volume(func(pv *corev1.PersistentVolume) {
			pv.Name, pv.Spec.CSI.VolumeHandle = f.Unique(name), f.Plugin.AddVolume(name, 1<<30)
		})
		f.attach(name, func(va *storagev1.VolumeAttachment) {
			va.Spec.Source.PersistentVolumeName = ptr.To(f.Unique(name))
			change(va)
		})
		f.untilOf(name, "is attached", isAttached)
	}
	f.Plugin.Always(unpublish, csitest.Fail(codes.Internal, "node is shut down"))
	for i := range workers {
		attach(of(i), func(*storagev1.VolumeAttachment) {})
		f.detach(of(i))
		f.untilOf(of(i), "cannot be detached", detachError("node is shut down"))
	}
	attach("busy", other) // without other nodes there is no limit
	attach("answers", other)
	busy := make(chan struct{})
	f.Plugin.Always(unpublish, func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
		if request.(*csi.ControllerUnpublishVolumeRequest).NodeId == "id-1" {
			return nil, status.Error(codes.Internal, "node is shut down")
		}
		close(busy)
		return csitest.Hang()(ctx, p, request, do)
	})
	f.detach("busy")
	select { // the calls of the other node, which are retried meanwhile, must not hang before it
	case <-busy:
	case <-t.Context().Done():
		t.Fatal("busy is not detached")
	}
	calls := f.Plugin.Count(unpublish)
	f.Plugin.Always(unpublish, hangsFor("id-1"))
	for i := range workers {
		f.patchAttachment(of(i), `{"metadata":{"finalizers":null}}`)
	}
	f.Wait(unpublish, calls+limit)
	f.detach("answers")
	f.untilOf("answers", "is deleted", isDeleted)
	f.Plugin.Always(unpublish, nil)
	f.Plugin.Release()
}

// An attach does not wait for detaches, which hold all workers that they may.
func TestAttachDoesNotWaitForDetaches(t *testing.T) {
	const workers, detaches = 10, 8
	f := scenario(t, csitest.Config{}, func(c *Config) { c.WorkerThreads, c.Timeout = workers, time.Hour })
	f.node("id-1")
	attach := func(name string) {
		f.volume(func(pv *corev1.PersistentVolume) {
			pv.Name, pv.Spec.CSI.VolumeHandle = f.Unique(name), f.Plugin.AddVolume(name, 1<<30)
		})
		f.attach(name, func(va *storagev1.VolumeAttachment) { va.Spec.Source.PersistentVolumeName = ptr.To(f.Unique(name)) })
		f.untilOf(name, "is attached", isAttached)
	}
	f.Plugin.Always(unpublish, csitest.Hang())
	for i := range workers {
		attach(fmt.Sprint("old", i))
	}
	for i := range workers {
		f.detach(fmt.Sprint("old", i))
	}
	f.Wait(unpublish, detaches)
	attach("new")
	f.Calls(unpublish, detaches)
	f.Plugin.Always(unpublish, nil)
	f.Plugin.Release()
}

// A VolumeAttachment that is deleted while its call waits for others of a limited method is not attached. Detaches have a limit of
// their own.
func TestDeletedWhileWaiting(t *testing.T) {
	f := newFixture(t, csitest.Config{}, nil)
	f.FirstLimit = 1
	f.node("id-1")
	f.start()
	attach := func(name string) {
		f.volume(func(pv *corev1.PersistentVolume) {
			pv.Name, pv.Spec.CSI.VolumeHandle = f.Unique(name), f.Plugin.AddVolume(name, 1<<30)
		})
		f.attach(name, func(va *storagev1.VolumeAttachment) { va.Spec.Source.PersistentVolumeName = ptr.To(f.Unique(name)) })
	}
	f.Plugin.Next(publish, csitest.Hang())
	attach("first")
	f.Wait(publish, 1)
	attach("second")
	f.Waits("ControllerPublishVolume", 1)
	f.detach("second")
	kubetest.Eventually(f.T, "the deletion is cached", func(context.Context) error {
		cached, exists := f.c.term.Load().attachments.Get(f.Unique("second"))
		if exists && cached.DeletionTimestamp == nil {
			return errors.New("it is not")
		}
		return nil
	})
	f.Plugin.Release()
	f.untilOf("first", "is attached", isAttached)
	f.untilOf("second", "is deleted", isDeleted)
	f.Calls(publish, 1)
}
