// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// reported links to an issue of a sidecar.
func reported(sidecar string, issue int) string {
	return fmt.Sprintf(" ([report](https://github.com/kubernetes-csi/external-%s/issues/%d))", sidecar, issue)
}

var timeout = csitest.DoAndFail(codes.DeadlineExceeded, "slow")

// sidecarStories are the rows of docs/beside-the-sidecars.md.
var sidecarStories = []sidecarStory{
	{name: "deleted-after-timeout", sidecar: "csi-provisioner",
		does: "CreateVolume times out, the PVC is deleted, then the driver succeeds" + reported("provisioner", 311),
		play: deletedWhileCreating, end: volumesLeft},
	{name: "killed-after-timeout", sidecar: "csi-provisioner",
		does: "CreateVolume times out, the process is killed during the next attempt, the PVC is deleted, the process starts again" +
			reported("provisioner", 486),
		play: killedWhileCreating(timeout), end: volumesLeft},
	{name: "driver-restarts", sidecar: "csi-provisioner",
		does: "CreateVolume times out, the driver restarts during the next attempt, the PVC is deleted; a process that exited is started " +
			"again" + reported("provisioner", 486),
		play: driverRestarts, end: volumesLeft},
	{name: "killed-at-first", sidecar: "csi-provisioner",
		does: "the process is killed during the first CreateVolume, the PVC is deleted, the process starts again" +
			reported("provisioner", 486),
		play: killedWhileCreating(), end: volumesLeft, fails: true},
	{name: "killed-at-first-protected", sidecar: "csi-provisioner",
		does: "the same with `" + protectAlways + "`", flags: []string{protectAlways},
		play: killedWhileCreating(), end: volumesLeft},
	{name: "killed-unprotected", sidecar: "csi-provisioner",
		does:  "`killed-after-timeout` with `--provisioning-protection=off`, which shows that the verdict depends on the protection",
		flags: []string{"--provisioning-protection=off"}, play: killedWhileCreating(timeout), end: volumesLeft, fails: true},
	{name: "provisioned-twice", sidecar: "csi-provisioner",
		does: "the PVC changes during CreateVolume, the watch of PersistentVolumes is late, the PVC is deleted during a repeated call" +
			reported("provisioner", 1469),
		play: provisionedTwice, end: volumesLeft},
	{name: "volume-retained-late", sidecar: "csi-provisioner",
		does: "DeleteVolume fails, an administrator sets the reclaim policy to Retain, the watch is late",
		play: volumeRetainedLate, end: volumeKept},
	{name: "volume-named-twice", sidecar: "csi-provisioner",
		does: "a second PersistentVolume, Released with the policy Delete, names the volume of a bound PVC",
		play: volumeNamedTwice, end: volumeKept},
	{name: "attach-beside-detaches", sidecar: "csi-attacher", nodes: 2, flags: []string{"--worker-threads=10"},
		does: "100 detaches whose calls time out, then one attach; both sides have ten workers" + reported("attacher", 761),
		play: attachBesideDetaches, end: attachedBesideDetaches},
	{name: "node-id-changes", sidecar: "csi-attacher", nodes: 2,
		does: "a node is created again with another CSI node ID, its volume is detached and attached to another node",
		play: nodeIDChanges, end: publishedOnce},
	{name: "snapshot-error-after-timeout", sidecar: "csi-snapshotter", config: snapshotting(),
		does: "CreateSnapshot times out, the snapshot is deleted meanwhile, the driver returns Internal, then it succeeds",
		play: snapshotDeletedWhileCreating, end: snapshotsLeft},
	{name: "snapshot-retained-late", sidecar: "csi-snapshotter", config: snapshotting(),
		does: "DeleteSnapshot fails, an administrator sets the deletion policy to Retain, the watch is late",
		play: snapshotRetainedLate, end: snapshotKept},
	{name: "killed-while-expanding", sidecar: "csi-resizer", config: resizable,
		does: "the process is killed after it has written the size of the PersistentVolume; the repeated call needs no node expansion",
		play: killedWhileExpanding, end: nodeExpansionPending},
}

func deletedWhileCreating(s *side) {
	s.plugin.Always("CreateVolume", timeout)
	s.launch()
	s.claim("c", s.class(false, nil))
	s.wait("CreateVolume", 2)
	s.deleteUnusedClaim("c")
	s.plugin.Always("CreateVolume", nil)
}

// killedWhileCreating kills the process during the CreateVolume after first, and deletes the claim before the next process starts.
func killedWhileCreating(first ...csitest.Step) func(s *side) {
	return func(s *side) {
		s.plugin.Next("CreateVolume", append(first, csitest.DoAndHang())...)
		s.launch()
		s.claim("c", s.class(false, nil))
		s.wait("CreateVolume", len(first)+1)
		s.created(1)
		s.process.kill()
		s.deleteUnusedClaim("c")
		s.launch()
	}
}

// created waits until the driver has n volumes.
func (s *side) created(n int) {
	s.t.Helper()
	s.eventually(fmt.Sprintf("the driver has %d volumes", n), func(context.Context) error {
		if got := s.plugin.VolumeCount(); got != n {
			return fmt.Errorf("it has %d", got)
		}
		return nil
	})
}

// deleteUnusedClaim deletes a claim and waits until only finalizers of the driver's controllers keep it.
func (s *side) deleteUnusedClaim(name string) {
	s.t.Helper()
	s.deleteClaim(name)
	s.eventually("no pod uses the claim", func(ctx context.Context) error {
		claim, err := s.client.CoreV1().PersistentVolumeClaims(s.ns).Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err == nil && slices.Contains(claim.Finalizers, "kubernetes.io/pvc-protection") {
			err = fmt.Errorf("finalizers %v", claim.Finalizers)
		}
		return err
	})
}

func driverRestarts(s *side) {
	s.plugin.Next("CreateVolume", timeout, csitest.DoAndDrop())
	s.plugin.Always("CreateVolume", csitest.Fail(codes.Unavailable, "starting"))
	s.launch()
	s.claim("c", s.class(false, nil))
	s.wait("CreateVolume", 2)
	s.deleteUnusedClaim("c")
	s.eventually("the process exits or calls the driver again", func(context.Context) error {
		if !isClosed(s.process.exited) && s.plugin.Count("CreateVolume") < 3 {
			return errors.New("it does not")
		}
		return nil
	})
	s.plugin.Always("CreateVolume", nil)
	if isClosed(s.process.exited) {
		s.launch() // as the kubelet does
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// volumesLeft is good if each volume of the driver has a PersistentVolume, and each of these its claim.
func volumesLeft(s *side) verdict {
	ctx := s.t.Context()
	volumes, err := s.volumes(ctx)
	s.must(err)
	list, err := s.client.CoreV1().PersistentVolumeClaims(s.ns).List(ctx, metav1.ListOptions{})
	s.must(err)
	claims, handles := map[types.UID]bool{}, map[string]bool{}
	unknown, unused, deleted := 0, 0, 0
	for _, claim := range list.Items {
		claims[claim.UID] = true
		if claim.DeletionTimestamp != nil {
			deleted++
		}
	}
	for _, pv := range volumes {
		handles[pv.Spec.CSI.VolumeHandle] = true
		if !claims[pv.Spec.ClaimRef.UID] && pv.DeletionTimestamp == nil {
			unused++
		}
	}
	for _, v := range s.plugin.Volumes() {
		if !handles[v.ID] {
			unknown++
		}
	}
	switch {
	case unknown > 0:
		return verdict{state: fmt.Sprintf("%d volume without a PersistentVolume", unknown)}
	case unused+deleted > 0:
		return verdict{state: fmt.Sprintf("%d PersistentVolume without a PVC, %d PVC Terminating", unused, deleted)}
	}
	return verdict{"no volume is left", true}
}

// provisionedTwice has the claim reconciled again when its PersistentVolume exists, but is not in the cache. A second CreateVolume
// of the claim takes effect after the volume has been deleted.
func provisionedTwice(s *side) {
	s.resource = "persistentvolumes"
	class := s.class(false, nil)
	deleted := make(chan struct{})
	s.plugin.Next("CreateVolume", csitest.Hang())
	s.plugin.Always("CreateVolume", func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
		name := request.(*csi.CreateVolumeRequest).GetName()
		if slices.ContainsFunc(p.Volumes(), func(v csitest.Volume) bool { return v.Name == name }) {
			select {
			case <-deleted:
			case <-ctx.Done():
			}
		}
		return do()
	})
	s.launch()
	s.claim("c", class)
	s.wait("CreateVolume", 1)
	_, err := s.client.CoreV1().PersistentVolumeClaims(s.ns).Patch(s.t.Context(), "c", types.MergePatchType,
		[]byte(`{"metadata":{"labels":{"changed":"yes"}}}`), metav1.PatchOptions{})
	s.must(err)
	s.claim("next", class)
	s.bound("next") // the process has seen the change before

	s.late.Lock()
	open := sync.OnceFunc(s.late.Unlock)
	defer open()
	s.plugin.Release()
	pv := s.bound("c")
	s.claim("last", class)
	s.bound("last") // the claim has been reconciled again before
	open()
	// Another component keeps the PersistentVolume for a while, such as an attacher.
	_, err = s.client.CoreV1().PersistentVolumes().Patch(s.t.Context(), pv, types.JSONPatchType,
		[]byte(`[{"op":"add","path":"/metadata/finalizers/-","value":"example.com/backup"}]`), metav1.PatchOptions{})
	s.must(err)
	s.deleteClaim("c")
	s.created(2)
	s.eventually("the PersistentVolume is deleted", func(context.Context) error {
		if s.pv(pv).DeletionTimestamp == nil {
			return errors.New("it is not")
		}
		return nil
	})
	close(deleted)
	s.must(s.plugin.WaitIdle(s.t.Context()))
}

// volumeOf returns the handle of the bound volume of a claim.
func (s *side) volumeOf(claim string) (pv, handle string) {
	s.t.Helper()
	pv = s.bound(claim)
	return pv, s.pv(pv).Spec.CSI.VolumeHandle
}

func volumeRetainedLate(s *side) {
	s.resource = "persistentvolumes"
	s.launch()
	s.claim("c", s.class(false, nil))
	var pv string
	pv, s.handle = s.volumeOf("c")
	s.changedLate("DeleteVolume", func() { s.deleteClaim("c") }, func() {
		_, err := s.client.CoreV1().PersistentVolumes().Patch(s.t.Context(), pv, types.MergePatchType,
			[]byte(`{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}`), metav1.PatchOptions{})
		s.must(err)
	}, volumeKept)
	s.another()
}

// changedLate changes an object after remove, during a call of method that fails. The watch is late until the process has read the
// object since, or has called the driver again.
func (s *side) changedLate(method string, remove, change func(), kept func(*side) verdict) {
	s.t.Helper()
	changed := make(chan struct{})
	s.plugin.Next(method, func(ctx context.Context, _ *csitest.Plugin, _ any, _ func() (any, error)) (any, error) {
		select {
		case <-changed:
		case <-ctx.Done():
		}
		return nil, status.Error(codes.Unavailable, "starting")
	})
	remove()
	s.wait(method, 1)
	s.late.Lock()
	defer s.late.Unlock()
	change()
	reads := s.reads.Load()
	close(changed)
	s.eventually("the process tries again", func(context.Context) error {
		if s.reads.Load() == reads && kept(s).good {
			return errors.New("it does not")
		}
		return nil
	})
}

// another provisions and deletes a volume. The process has tried before what was due before.
func (s *side) another() {
	s.t.Helper()
	s.claim("another", s.class(false, nil))
	_, handle := s.volumeOf("another")
	s.deleteClaim("another")
	s.eventually("another volume is deleted", func(context.Context) error {
		if s.hasVolume(handle) {
			return errors.New("it is there")
		}
		return nil
	})
}

func (s *side) hasVolume(handle string) bool {
	return slices.ContainsFunc(s.plugin.Volumes(), func(v csitest.Volume) bool { return v.ID == handle })
}

func volumeKept(s *side) verdict {
	if s.hasVolume(s.handle) {
		return verdict{"the volume is kept", true}
	}
	return verdict{state: "the volume is deleted"}
}

func volumeNamedTwice(s *side) {
	s.launch()
	s.claim("c", s.class(false, nil))
	var name string
	name, s.handle = s.volumeOf("c")
	pv := s.pv(name)
	pv.ObjectMeta = metav1.ObjectMeta{Name: s.ns + "-copy", Annotations: pv.Annotations}
	pv.Spec.ClaimRef = &corev1.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: s.ns, Name: "deleted",
		UID: "deleted"}
	_, err := s.client.CoreV1().PersistentVolumes().Create(s.t.Context(), pv, metav1.CreateOptions{})
	s.must(err)
	s.eventually("the second PersistentVolume is released", func(ctx context.Context) error {
		pv, err := s.client.CoreV1().PersistentVolumes().Get(ctx, s.ns+"-copy", metav1.GetOptions{})
		if err == nil && pv.Status.Phase != corev1.VolumeReleased {
			err = fmt.Errorf("it is %s", pv.Status.Phase)
		} else if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	})
	s.another()
}

const detaches = 100

func attachBesideDetaches(s *side) {
	s.launch()
	name := func(i int) string { return fmt.Sprint("d", i) }
	s.parallel(detaches, func(i int) { s.attach(name(i), s.volume(name(i)), s.nodes[0]) })
	s.attached(detaches)
	s.plugin.Always(unpublish, csitest.Hang())
	s.parallel(detaches, func(i int) { s.detach(name(i)) })
	s.wait(unpublish, 5)
	s.attach("a", s.volume("a"), s.nodes[1])
}

func attachedBesideDetaches(s *side) verdict {
	ended := 0
	for _, call := range s.plugin.Calls(unpublish) {
		if call.Response != nil {
			ended++
		}
	}
	if s.attachment("a").Status.Attached {
		return verdict{fmt.Sprintf("attached; %d of %d detaches have ended", ended, detaches), true}
	}
	return verdict{state: fmt.Sprintf("not attached; %d of %d detaches have ended", ended, detaches)}
}

func nodeIDChanges(s *side) {
	ctx, node := s.t.Context(), s.nodes[0]
	pv := s.volume("v")
	s.handle = s.pv(pv).Spec.CSI.VolumeHandle
	s.launch()
	s.attach("before", pv, node)
	s.attached(1)
	s.must(s.client.CoreV1().Nodes().Delete(ctx, node, metav1.DeleteOptions{}))
	s.must(s.client.StorageV1().CSINodes().Delete(ctx, node, metav1.DeleteOptions{}))
	s.must(kubetest.CreateNode(ctx, s.client, kubetest.NodeSpec{Name: node, NodeID: "id-0-rebuilt", Driver: s.plugin.Name()}))
	s.attach("other", s.volume("other"), node)
	s.attached(2) // the process knows the new ID
	s.detach("before")
	s.attached(1)
	s.attach("after", pv, s.nodes[1])
}

func publishedOnce(s *side) verdict {
	for _, v := range s.plugin.Volumes() {
		if v.ID == s.handle {
			nodes := slices.Sorted(maps.Keys(v.Published))
			return verdict{"published to " + strings.Join(nodes, " and "), slices.Equal(nodes, []string{"id-1"})}
		}
	}
	return verdict{state: "the volume is deleted"}
}

// boundContent makes a VolumeSnapshotContent with the finalizer of the snapshot-controller.
func (s *side) boundContent() {
	s.t.Helper()
	s.snapshotClass()
	s.snapshotContent("s")
	s.patchContent(`{"metadata":{"finalizers":["snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection"]}}`)
}

func (s *side) patchContent(patch string) {
	s.t.Helper()
	_, err := s.snapshots().VolumeSnapshotContents().Patch(s.t.Context(), s.ns+"-s", types.MergePatchType, []byte(patch),
		metav1.PatchOptions{})
	s.must(err)
}

// deleteContent deletes the VolumeSnapshotContent as the snapshot-controller does.
func (s *side) deleteContent() {
	s.t.Helper()
	s.patchContent(`{"metadata":{"annotations":{"snapshot.storage.kubernetes.io/volumesnapshot-being-deleted":"yes"}}}`)
	s.must(s.snapshots().VolumeSnapshotContents().Delete(s.t.Context(), s.ns+"-s", metav1.DeleteOptions{}))
}

// snapshotDeletedWhileCreating deletes the content while calls time out, although the snapshot exists. An error follows, and then the
// driver succeeds.
func snapshotDeletedWhileCreating(s *side) {
	s.plugin.Always("CreateSnapshot", timeout)
	s.boundContent()
	s.launch()
	s.wait("CreateSnapshot", 1)
	s.deleteContent()
	s.wait("CreateSnapshot", s.plugin.Count("CreateSnapshot")+2)
	s.plugin.Next("CreateSnapshot", csitest.Fail(codes.Internal, "broken"))
	s.plugin.Always("CreateSnapshot", nil)
}

// snapshotsLeft is good if neither the driver nor the API server has the snapshot.
func snapshotsLeft(s *side) verdict {
	contents, err := s.contents(s.t.Context())
	s.must(err)
	_, has := contents[s.ns+"-s"]
	left := len(s.plugin.Snapshots())
	switch {
	case has:
		return verdict{state: fmt.Sprintf("%d snapshot, and the VolumeSnapshotContent is Terminating", left)}
	case left > 0:
		return verdict{state: fmt.Sprintf("%d snapshot without a VolumeSnapshotContent", left)}
	}
	return verdict{"no snapshot is left", true}
}

func snapshotRetainedLate(s *side) {
	s.resource = "volumesnapshotcontents"
	s.boundContent()
	s.launch()
	s.snapshotReady("s")
	s.handle = s.plugin.Snapshots()[0].ID
	s.changedLate("DeleteSnapshot", s.deleteContent, func() { s.patchContent(`{"spec":{"deletionPolicy":"Retain"}}`) }, snapshotKept)
	s.eventually("the content is deleted", func(ctx context.Context) error {
		contents, err := s.contents(ctx)
		if _, has := contents[s.ns+"-s"]; has {
			err = errors.New("it is there")
		}
		return err
	})
}

func snapshotKept(s *side) verdict {
	if slices.ContainsFunc(s.plugin.Snapshots(), func(o csitest.Snapshot) bool { return o.ID == s.handle }) {
		return verdict{"the snapshot is kept", true}
	}
	return verdict{state: "the snapshot is deleted"}
}

func killedWhileExpanding(s *side) {
	s.provisioned()
	s.plugin.Next(expandVolume, csitest.Default())
	s.plugin.Always(expandVolume, csitest.Alter(func(r *csi.ControllerExpandVolumeResponse) { r.NodeExpansionRequired = false }))
	s.killAfter = "persistentvolumes"
	s.launch()
	s.request("c", "2Gi", "")
	s.eventually("the process is killed", func(context.Context) error {
		if !isClosed(s.killed) {
			return errors.New("it is not")
		}
		return nil
	})
	if size := s.pv(s.get("c").Spec.VolumeName).Spec.Capacity.Storage().String(); size != "2Gi" {
		s.t.Errorf("the PersistentVolume has %s", size)
	}
	s.launch()
}

// nodeExpansionPending is good if the kubelet has to expand the file system.
func nodeExpansionPending(s *side) verdict {
	claim := s.get("c")
	if claim.Status.AllocatedResourceStatuses[corev1.ResourceStorage] == corev1.PersistentVolumeClaimNodeResizePending {
		return verdict{"the node expands the file system", true}
	}
	return verdict{state: fmt.Sprintf("the PVC has %s, and no node expands the file system", claim.Status.Capacity.Storage())}
}
