// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/looptest"
)

// story is a transcript of the claim "data" of the StorageClass "fast".
type story struct {
	*fixture
	*looptest.Transcript
}

// newStory starts a provisioner that retries after an hour unless the story changes that.
func newStory(t *testing.T, plugin csitest.Config, text string) *story {
	s := &story{fixture: newFixture(t, plugin, patient)}
	s.cfg.Timeout = 2 * slowCall // the event about a slow call comes first
	s.Transcript = s.Record(text)
	s.change = func(d *Deps) { d.Events = s.Transcript }
	s.makeClass(nil)
	return s
}

// start runs the provisioner and waits until its cache has all PersistentVolumes of earlier leaders: it reads none then.
func (s *story) start() {
	s.Helper()
	s.fixture.start()
	kubetest.Eventually(s.T, "the cache of PersistentVolumes is current", func(ctx context.Context) error {
		l := s.c.claimLoop.Load()
		if l != nil && l.volumes.Complete() {
			return nil
		}
		_, err := s.Client.CoreV1().PersistentVolumes().Create(ctx, &corev1.PersistentVolume{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "other-"},
			Spec: corev1.PersistentVolumeSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
				Capacity:    corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
				PersistentVolumeSource: corev1.PersistentVolumeSource{
					CSI: &corev1.CSIPersistentVolumeSource{Driver: "other.example.com", VolumeHandle: "other"},
				},
			},
		}, metav1.CreateOptions{})
		return cmp.Or(err, errors.New("not yet"))
	})
}

// unprotected waits until the provisioner has removed its finalizer from the claim.
func (s *story) unprotected() {
	s.Helper()
	s.claimIs("is not protected", func(c *corev1.PersistentVolumeClaim) bool { return c == nil || !isProtected(c) })
}

// release deletes the claim, and releases its volume as Kubernetes does.
func (s *story) release(pv *corev1.PersistentVolume) {
	s.Helper()
	// Kubernetes binds the claim first: its operation has ended.
	kubetest.Eventually(s.T, "the operation of the claim has ended", func(context.Context) error {
		if claim, held := s.c.claimLoop.Load().ops.holderOf(pv.Spec.CSI.VolumeHandle); held {
			return fmt.Errorf("that of %s has not", claim)
		}
		return nil
	})
	s.vanish()
	s.phase(pv, corev1.VolumeReleased)
	s.gone(pv)
}

func TestTranscripts(t *testing.T) {
	t.Run("provision_and_delete", func(t *testing.T) {
		s := newStory(t, csitest.Config{}, "A claim is provisioned, and its volume deleted with the claim.")
		s.start()
		s.Step("Claim data of StorageClass fast is created.")
		pv := s.saved(s.claim(nil))
		s.unprotected()
		s.Says("ProvisioningSucceeded")
		s.Step("The claim is deleted. Kubernetes sets the phase of the PersistentVolume to Released.")
		s.release(pv)
		s.Golden("provision_and_delete")
	})
	t.Run("indeterminate_create", func(t *testing.T) {
		s := newStory(t, csitest.Config{},
			"A CreateVolume that exceeds --timeout is indeterminate: the volume may exist. The claim keeps\n"+
				"its finalizer, and the same request is repeated until the driver returns a definite result.")
		s.cfg.RetryIntervalStart = 50 * time.Millisecond
		s.Plugin.Next(create, csitest.DoAndHang())
		s.start()
		s.Step("Claim data of StorageClass fast is created. The driver does not answer in time.")
		claim := s.claim(nil)
		s.Wait(create, 2)
		s.saved(claim)
		s.unprotected()
		s.Golden("indeterminate_create")
	})
	t.Run("claim_deleted_while_indeterminate", func(t *testing.T) {
		s := newStory(t, csitest.Config{}, "The process exits while CreateVolume runs, and the user deletes the claim. The finalizer "+
			"keeps\n"+
			"the claim until the next leader has found the volume, which is then deleted.")
		s.Plugin.Next(create, csitest.DoAndHang())
		s.start()
		s.Step("Claim data of StorageClass fast is created. The process exits during the call.")
		claim := s.claim(nil)
		s.Wait(create, 1)
		s.Crash()
		s.Must(s.Plugin.WaitIdle(t.Context()))
		s.deleteClaim()
		s.Step("The claim is deleted. Another replica acquires the Lease.")
		s.Hidden = []string{ // if the caches have not received the latest versions yet
			"api  get persistentvolumeclaims/data", "api  get persistentvolumes/pvc-" + string(claim.UID) + " -> Not Found",
		}
		s.start()
		pv := s.saved(claim)
		s.claimIs("is released", released)
		s.Step("Kubernetes sets the phase of the PersistentVolume to Released.")
		s.release(pv)
		s.Golden("claim_deleted_while_indeterminate")
	})
	t.Run("clone", func(t *testing.T) {
		s := newStory(t, csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{
			csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
		}}, "A finalizer keeps the source of a clone until no call copies it.")
		source := s.source(s.Namespace, "source", nil)
		s.start()
		s.Step("Claim data of StorageClass fast is created, with claim source as its data source.")
		s.saved(s.claim(cloning("data", "source")))
		s.becomesFree(source)
		s.unprotected()
		s.Golden("clone")
	})
	t.Run("rejected_volume", func(t *testing.T) {
		s := newStory(t, csitest.Config{}, "The driver returns a volume that is smaller than requested. It is deleted before the next\n"+
			"attempt, which is delayed.")
		s.cfg.RetryIntervalStart = 50 * time.Millisecond
		s.Plugin.Next(create, csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume.CapacityBytes = 1 << 20 }))
		s.Plugin.Next(remove, csitest.Fail(codes.Internal, "busy"))
		s.start()
		s.Step("Claim data of StorageClass fast is created.")
		s.saved(s.claim(nil))
		s.unprotected()
		s.Golden("rejected_volume")
	})
	t.Run("released_volume", func(t *testing.T) {
		s := newStory(t, csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{
			csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
		}}, "The volume of a released PersistentVolume is deleted after it was detached. In a process that\n"+
			"attaches too, one request removes the finalizers of the provisioner and the attacher.")
		const attacher = "external-attacher/csi-example-com"
		s.change = func(d *Deps) {
			d.Events = s.Transcript
			d.RemovableFinalizers = func(pv *corev1.PersistentVolume) []string {
				return slices.DeleteFunc(slices.Clone(pv.Finalizers), func(f string) bool { return f != attacher })
			}
		}
		s.start()
		s.Step("A PersistentVolume that is attached to a node is released. DeleteVolume waits.")
		pv := s.attachedVolume("pv")
		_, err := kube.PatchMetadata(t.Context(), s.Client.CoreV1().PersistentVolumes(), pv,
			kube.MetadataPatch{AddFinalizers: []string{storagehelpers.PVDeletionProtectionFinalizer, attacher}})
		s.Must(err)
		s.phase(pv, corev1.VolumeReleased)
		s.Step("The VolumeAttachment is deleted.")
		s.Must(s.Client.StorageV1().VolumeAttachments().Delete(t.Context(), pv.Name, metav1.DeleteOptions{}))
		s.gone(pv)
		s.Golden("released_volume")
	})
}
