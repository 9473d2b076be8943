// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/attacher"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
)

// situations are states of a cluster, each built with real objects, and the expected parts of the report.
var situations = map[string]struct {
	build func(s *scene) (kind, name string)
	want  []string
}{
	"the class does not exist": {
		func(s *scene) (string, string) { s.claim(s.ns+"-gone", nil); return KindClaim, "data" },
		[]string{
			`blocked  class       StorageClass "SCENE-gone" not found.`,
			`Next: Create StorageClass "SCENE-gone", or recreate the claim with an existing StorageClass.`,
			"kubernetes.io/pvc-protection\n    removed by: kube-controller-manager when the claim is being deleted and no pod on " +
				"a node uses it",
		},
	},
	"the class does not provision volumes": {
		func(s *scene) (string, string) {
			s.claim(s.class(func(c *storagev1.StorageClass) { c.Provisioner = storagehelpers.NotSupportedProvisioner }), nil)
			return KindClaim, "data"
		},
		[]string{
			`StorageClass "SCENE-class" does not provision volumes (provisioner kubernetes.io/no-provisioner).`,
			`Next: Create a PersistentVolume of StorageClass "SCENE-class" that matches the claim, unless there is one.`,
		},
	},
	"bound to a volume that is not of CSI": {
		func(s *scene) (string, string) {
			pv := s.volume(corev1.VolumeBound, func(pv *corev1.PersistentVolume) {
				pv.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/data"}}
			})
			s.phase(s.claim(s.class(nil), func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = pv }), corev1.ClaimBound)
			return KindClaim, "data"
		},
		[]string{"ok       driver      Not a CSI volume", "Next: Nothing to do: pods can use the claim."},
	},
	"the class has another provisioner than the claim": {
		func(s *scene) (string, string) {
			s.claim(s.class(func(c *storagev1.StorageClass) { c.Provisioner = "other.example.com" }), nil)
			return KindClaim, "data"
		},
		[]string{
			`The claim is assigned to provisioner DRIVER, but StorageClass "SCENE-class" has provisioner other.example.com`,
			"Next: Recreate the claim.",
		},
	},
	"WaitForFirstConsumer, and no pod": {
		func(s *scene) (string, string) { s.claim(s.class(late), nil); return KindClaim, "data" },
		[]string{
			`waiting  node        No pod uses the claim.`,
			"volumeBindingMode WaitForFirstConsumer",
			"Next: Create a pod that uses the claim.",
		},
	},
	"the selected node does not exist": {
		func(s *scene) (string, string) {
			s.claim(s.class(late), selected(s.ns+"-gone"))
			return KindClaim, "data"
		},
		[]string{
			`failing  node        Selected node "SCENE-gone" not found.`,
			"Next: The provisioner removes the selected node from the claim on its next attempt; the scheduler selects another one.",
		},
	},
	"the driver is not on the selected node": {
		func(s *scene) (string, string) {
			n := s.node(func(n *kubetest.NodeSpec) { n.Driver = "" })
			s.claim(s.class(late), selected(n))
			return KindClaim, "data"
		},
		[]string{`failing  node        Driver DRIVER is not registered on node "SCENE-node" (no entry in CSINode).`,
			`Check that the node plugin of driver DRIVER runs and registers on node "SCENE-node".`,
		},
	},
	"the selected node lacks its topology label": {
		func(s *scene) (string, string) {
			n := s.node(func(n *kubetest.NodeSpec) { n.Labels = nil })
			s.claim(s.class(late), selected(n))
			return KindClaim, "data"
		},
		[]string{`failing  topology    Node "SCENE-node" lacks topology labels of driver DRIVER: DRIVER/host.`},
	},
	"no node is in the allowed topologies": {
		func(s *scene) (string, string) {
			s.claim(s.class(func(c *storagev1.StorageClass) {
				zone := corev1.TopologySelectorLabelRequirement{Key: "zone", Values: []string{s.ns}}
				term := corev1.TopologySelectorTerm{MatchLabelExpressions: []corev1.TopologySelectorLabelRequirement{zone}}
				c.AllowedTopologies = []corev1.TopologySelectorTerm{term}
			}), nil)
			return KindClaim, "data"
		},
		[]string{`blocked  topology    No node matches allowedTopologies of StorageClass "SCENE-class": zone in (SCENE).`},
	},
	"a secret is missing, another is there": {
		func(s *scene) (string, string) {
			secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "there"}, StringData: map[string]string{"password": "hunter2"}}
			secret, err := s.client.CoreV1().Secrets(s.ns).Create(ctxOf(s), secret, metav1.CreateOptions{})
			must(s, secret, err)
			s.claim(s.class(func(c *storagev1.StorageClass) {
				c.Parameters = map[string]string{
					"csi.storage.k8s.io/provisioner-secret-name":      "${pvc.name}-key",
					"csi.storage.k8s.io/provisioner-secret-namespace": "${pvc.namespace}",
					"csi.storage.k8s.io/node-stage-secret-name":       "there", "csi.storage.k8s.io/node-stage-secret-namespace": s.ns,
				}
			}), nil)
			return KindClaim, "data"
		},
		[]string{
			`blocked  secret      Secret SCENE/data-key (provisioner-secret-name) not found.`,
			`ok       secret      Secret SCENE/there (node-stage-secret-name) exists.`,
			"Next: Create Secret SCENE/data-key with the keys that the driver requires.",
		},
	},
	"the snapshot is not there": {
		func(s *scene) (string, string) {
			kubetest.InstallCRDs(s.t, s.cp)
			s.claim(s.class(nil), restoring("snap"))
			return KindClaim, "data"
		},
		[]string{
			"blocked  source      Data source VolumeSnapshot SCENE/snap not found.",
			"Next: Create the data source, or recreate the claim without it.",
		},
	},
	"the snapshot is not ready": {
		func(s *scene) (string, string) {
			kubetest.InstallCRDs(s.t, s.cp)
			s.object(apiread.Snapshots, s.ns, map[string]any{"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
				"metadata": map[string]any{"name": "snap"},
				"spec":     map[string]any{"source": map[string]any{"persistentVolumeClaimName": "other"}}})
			s.claim(s.class(nil), restoring("snap"))
			return KindClaim, "data"
		},
		[]string{"VolumeSnapshot SCENE/snap cannot be restored: it is not bound to a VolumeSnapshotContent yet.",
			"Next: Retries automatically. Check the snapshot: `kubectl -n SCENE describe volumesnapshot snap`."},
	},
	"the clone source is not bound": {
		func(s *scene) (string, string) {
			class := s.class(nil)
			s.claim(class, func(c *corev1.PersistentVolumeClaim) { c.Name = "origin" })
			s.claim(class, func(c *corev1.PersistentVolumeClaim) {
				c.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: "origin"}
			})
			return KindClaim, "data"
		},
		[]string{"PersistentVolumeClaim SCENE/origin cannot be cloned: it is Pending, not Bound."},
	},
	"a sidecar holds the Lease, and fails": {
		func(s *scene) (string, string) {
			s.lease(strings.ReplaceAll(s.driver, ".", "-"), "old-pod", "csi-provisioner", time.Second)
			c := s.claim(s.class(nil), nil)
			s.event(s.ns, aboutClaim(c), "Normal", "Provisioning", "is provisioning", 1, 30*time.Minute)
			s.event(s.ns, aboutClaim(c), "Warning", "ProvisioningFailed", "rpc error: code = ResourceExhausted desc = no space", 4,
				20*time.Minute)
			return KindClaim, "data"
		},
		[]string{
			`ok       driver      The provisioner of driver DRIVER is "old-pod" (sidecar csi-provisioner), which holds Lease SCENE/`,
			"failing  error       Last error (4 times) 20m ago: rpc error: code = ResourceExhausted desc = no space.",
			"Next: Retries automatically. Fix the error shown above;",
			"x4  Warning ProvisioningFailed: rpc error: code = ResourceExhausted desc = no space\n  30m ago",
		},
	},
	"our own process holds the Lease": {
		func(s *scene) (string, string) {
			s.lease(strings.ReplaceAll(s.driver, ".", "-"), "new-pod", "storage-controller", time.Second)
			s.claim(s.class(nil), nil)
			return KindClaim, "data"
		},
		[]string{`The provisioner of driver DRIVER is "new-pod" (storage-controller), which holds Lease`, `CSIDriver "DRIVER" not found`},
	},
	"nothing fails, and the driver has no CSIDriver object": {
		func(s *scene) (string, string) {
			s.node(nil)
			for _, lease := range []string{"", "external-attacher-leader-"} {
				s.lease(lease+strings.ReplaceAll(s.driver, ".", "-"), "new-pod", "storage-controller", time.Second)
			}
			s.boundVolume(nil)
			return KindClaim, "data"
		},
		[]string{
			`ok       driver      CSIDriver "DRIVER" not found; defaults apply (attachRequired=true, storageCapacity=false).`,
			"Next: Nothing to do: pods can use the claim.",
		},
	},
	"the Lease has expired": {
		func(s *scene) (string, string) {
			s.lease(strings.ReplaceAll(s.driver, ".", "-"), "dead-pod", "storage-controller", 3*time.Hour)
			s.claim(s.class(nil), nil)
			return KindClaim, "data"
		},
		[]string{`of "dead-pod" has expired (last renewed 3h ago): no provisioner of driver DRIVER is active with it.`,
			"Next: Check that the provisioner of driver DRIVER runs: `kubectl -n SCENE get pods`."},
	},
	"CreateVolume is indeterminate": {
		func(s *scene) (string, string) {
			s.claim(s.class(nil), func(c *corev1.PersistentVolumeClaim) {
				c.Finalizers = []string{"storage-controller.io/provisioning"}
				c.Annotations["storage-controller.io/provisioning-request"] = fmt.Sprintf(`{"driver":%q,"request":"x"}`, s.driver)
			})
			return KindClaim, "data"
		},
		[]string{"CreateVolume is indeterminate: no final response of driver DRIVER is recorded, so a volume may exist",
			"storage-controller.io/provisioning\n    removed by: the provisioner of storage-controller after CreateVolume " +
				"returned a final response",
			"Next: The provisioner repeats CreateVolume with the same arguments, or sends an event with the reason why it cannot. " +
				"Verify that driver DRIVER and its provisioner are running."},
	},
	"insufficient capacity": {
		func(s *scene) (string, string) {
			n := s.node(nil)
			class := s.class(late)
			d := &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: s.driver},
				Spec: storagev1.CSIDriverSpec{StorageCapacity: ptr.To(true)}}
			d, err := s.client.StorageV1().CSIDrivers().Create(ctxOf(s), d, metav1.CreateOptions{})
			must(s, d, err)
			c := &storagev1.CSIStorageCapacity{ObjectMeta: metav1.ObjectMeta{GenerateName: "csisc-"}, StorageClassName: class,
				Capacity:     resource.NewQuantity(1<<30, resource.BinarySI),
				NodeTopology: &metav1.LabelSelector{MatchLabels: map[string]string{s.driver + "/host": n}}}
			c, err = s.client.StorageV1().CSIStorageCapacities(s.ns).Create(ctxOf(s), c, metav1.CreateOptions{})
			must(s, c, err)
			s.claim(class, selected(n))
			return KindClaim, "data"
		},
		[]string{
			`failing  capacity    Insufficient capacity for node "SCENE-node": the claim requests 5Gi, ` +
				`the available capacity for one volume is 1Gi (CSIStorageCapacity objects: 1).`,
			`Driver DRIVER is registered on node "SCENE-node": node ID "id-1", topology segment {DRIVER/host=SCENE-node}.`,
		},
	},
	"a deleted claim is in use": {
		func(s *scene) (string, string) {
			s.claim(s.class(nil), nil)
			s.pod(s.ns + "-anywhere")
			if err := s.client.CoreV1().PersistentVolumeClaims(s.ns).Delete(ctxOf(s), "data", metav1.DeleteOptions{}); err != nil {
				s.t.Fatal(err)
			}
			return KindClaim, "data"
		},
		[]string{"blocked  deletion    The claim is being deleted, and is in use by pod app.", "s, held by its finalizers.",
			"Next: Delete pod app; kube-controller-manager removes finalizer kubernetes.io/pvc-protection after that."},
	},
	"a claim has lost its volume": {
		func(s *scene) (string, string) {
			c := s.claim(s.class(nil), func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = s.ns + "-lost" })
			s.phase(c, corev1.ClaimLost)
			return KindClaim, "data"
		},
		[]string{
			`blocked  volume      PersistentVolume "SCENE-lost" of the claim was deleted; the claim is Lost.`,
			"Next: Recreate the claim and restore its data from a backup.",
		},
	},
	"a bound claim, whose volume cannot be attached": {
		func(s *scene) (string, string) {
			pv := s.boundVolume(nil)
			s.attachment(pv, s.node(nil), storagev1.VolumeAttachmentStatus{AttachError: failed("too many volumes", 20*time.Minute)})
			return KindClaim, "data"
		},
		[]string{`The claim is bound to PersistentVolume "SCENE-pv".`,
			`failing  attachment  Attaching to node "SCENE-node" (VolumeAttachment SCENE-va) failed 20m ago: too many volumes.`},
	},
	"a released volume with policy Retain": {
		func(s *scene) (string, string) {
			return KindVolume, s.volume(corev1.VolumeReleased, func(pv *corev1.PersistentVolume) {
				pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
			})
		},
		[]string{"waiting  phase       The claim was deleted; reclaim policy Retain keeps the volume.",
			"or remove spec.claimRef to reuse the volume."},
	},
	"a released volume that cannot be deleted": {
		func(s *scene) (string, string) {
			name := s.volume(corev1.VolumeReleased, func(pv *corev1.PersistentVolume) {
				pv.Finalizers = []string{"external-provisioner.volume.kubernetes.io/finalizer", "example.org/backup"}
			})
			s.event("default", corev1.ObjectReference{Kind: KindVolume, Name: name}, "Warning", "VolumeFailedDelete", "volume is busy", 2,
				20*time.Minute)
			return KindVolume, name
		},
		[]string{
			"failing  error       Last error (2 times) 20m ago: volume is busy.",
			"example.org/backup\n    removed by: unknown (owner of example.org; not a finalizer of Kubernetes or this driver)\n",
			"external-provisioner.volume.kubernetes.io/finalizer\n    removed by: the provisioner of the driver after " +
				"DeleteVolume succeeded",
		},
	},
	"a released volume that is attached": {
		func(s *scene) (string, string) {
			pv := s.volume(corev1.VolumeReleased, nil)
			s.attachment(pv, s.node(nil), storagev1.VolumeAttachmentStatus{Attached: true})
			return KindVolume, pv
		},
		[]string{
			"reclaim policy Delete applies after detaching (1 VolumeAttachment).", `Attached to node "SCENE-node"`,
			"Next: kube-controller-manager deletes the VolumeAttachments; the attacher detaches the volume; the provisioner deletes it.",
		},
	},
	"a released volume of another provisioner": {
		func(s *scene) (string, string) {
			return KindVolume, s.volume(corev1.VolumeReleased, func(pv *corev1.PersistentVolume) { pv.Annotations = nil })
		},
		[]string{`blocked  phase       The claim was deleted, but no provisioner deletes the volume: ` +
			`annotation pv.kubernetes.io/provisioned-by is "", not "DRIVER".`},
	},
	"a volume whose cleanup is held": {
		func(s *scene) (string, string) {
			s.lost(s.ns+"-gone", `{"node":"n7","since":"2026-01-02T03:04:05Z","held":"breaker"}`)
			return KindVolume, s.volume(corev1.VolumeBound, func(pv *corev1.PersistentVolume) { s.onHost(pv, s.ns+"-gone") })
		},
		[]string{"Its cleanup is held by the breaker: too many nodes are lost.",
			"`storage-controller nodecontroller approve --driver-name=DRIVER --namespace=SCENE n7 --yes`",
			"No node matches the node affinity of the volume: DRIVER/host in (SCENE-gone)."},
	},
	"a bound claim whose only node was deleted": {
		func(s *scene) (string, string) {
			s.boundVolume(func(pv *corev1.PersistentVolume) { s.onHost(pv, s.ns+"-gone") })
			s.pod("")
			return KindClaim, "data"
		},
		[]string{
			`waiting  pod         Pod "app", which uses the claim, has not started.`,
			"blocked  node        No node matches the node affinity of the volume: DRIVER/host in (SCENE-gone). Its node was deleted, or " +
				"lacks the label.",
			"Next: Bring the node back, or label it; or delete the claim if its data is lost.",
		},
	},
	"a pod whose volume lost its node": {
		func(s *scene) (string, string) {
			s.boundVolume(func(pv *corev1.PersistentVolume) { s.onHost(pv, s.ns+"-gone") })
			s.pod("")
			return KindPod, "app"
		},
		[]string{
			"The pod is Pending, created", "waiting  node        The pod is not scheduled.",
			"\nPersistentVolumeClaim SCENE/data:\n", "blocked  node        No node matches the node affinity of the volume",
			"Next: Bring the node back, or label it;",
		},
	},
	"a pod without its claim": {
		func(s *scene) (string, string) { s.pod(""); return KindPod, "app" },
		[]string{"blocked  claim       PersistentVolumeClaim SCENE/data not found.", "Next: Create claim data."},
	},
	"a pod whose volume cannot be attached": {
		func(s *scene) (string, string) {
			n := s.node(nil)
			pv := s.boundVolume(nil)
			s.attachment(pv, n, storagev1.VolumeAttachmentStatus{AttachError: failed("too many volumes", 20*time.Minute)})
			s.pod(n)
			return KindPod, "app"
		},
		[]string{
			`The pod is Pending on node "SCENE-node"`,
			`failing  attachment  Attaching to node "SCENE-node" (VolumeAttachment SCENE-va) failed 20m ago: too many volumes.`,
			"Next: Retries automatically. Run `storage-controller explain va SCENE-va`.",
		},
	},
	"a pod whose volume cannot be mounted": {
		func(s *scene) (string, string) {
			n := s.node(nil)
			s.pod(n)
			s.event(s.ns, corev1.ObjectReference{Kind: KindPod, Namespace: s.ns, Name: "app"}, "Warning", "FailedMount",
				"SetUp failed: rpc error: code = Unknown desc = no such device", 3, 20*time.Minute)
			return KindPod, "app"
		},
		[]string{"failing  mount       Last error (FailedMount) 20m ago: SetUp failed: rpc error: code = Unknown desc = no such device.",
			"blocked  claim       PersistentVolumeClaim SCENE/data not found."},
	},
	"a pod on a node that was deleted": {
		func(s *scene) (string, string) { s.pod(s.ns + "-gone"); return KindPod, "app" },
		[]string{`blocked  node        Node "SCENE-gone" of the pod not found.`,
			"Next: Delete the pod: it cannot start. Run `storage-controller explain node SCENE-gone`."},
	},
	"a running pod on a node that was deleted": {
		func(s *scene) (string, string) {
			s.pod(s.ns + "-gone")
			kubetest.SetStatus(s.t, s.client.CoreV1().Pods(s.ns), "app", corev1.PodStatus{Phase: corev1.PodRunning})
			return KindPod, "app"
		},
		[]string{`failing  node        Node "SCENE-gone" of the pod not found.`},
	},
	"a pod whose volume is not attached": {
		func(s *scene) (string, string) {
			s.boundVolume(nil)
			s.pod(s.node(nil))
			return KindPod, "app"
		},
		[]string{`waiting  attachment  No VolumeAttachment of PersistentVolume "SCENE-pv" for node "SCENE-node".`,
			"Next: kube-controller-manager creates it"},
	},
	"a pod whose claim is not provisioned": {
		func(s *scene) (string, string) { s.claim(s.class(late), nil); s.pod(""); return KindPod, "app" },
		[]string{"waiting  node        No node is selected yet; the claim is used by pod app.",
			"waiting  claim       The claim is Pending"},
	},
	"our permission is missing": {
		func(s *scene) (string, string) {
			c := s.claim(s.class(nil), nil)
			s.event(s.ns, aboutClaim(c), "Warning", "ProvisioningFailed", `failed to provision volume with StorageClass "x": failed to get `+
				`secret: secrets "s" is forbidden: User "system:serviceaccount:a:b" cannot get resource "secrets"`, 4, time.Minute)
			return KindClaim, "data"
		},
		[]string{"Next: Retries automatically. Grant the permission that the error names: `storage-controller doctor --print-rbac` prints " +
			"the missing ones."},
	},
	"the driver does not answer": {
		func(s *scene) (string, string) {
			c := s.claim(s.class(nil), nil)
			s.event(s.ns, aboutClaim(c), "Warning", "ProvisioningFailed", "rpc error: code = Unavailable desc = connection refused", 4,
				time.Minute)
			return KindClaim, "data"
		},
		[]string{"Next: Retries automatically. Check that the driver runs and responds;"},
	},
	"an event about a node that is not selected any more": {
		func(s *scene) (string, string) {
			c := s.claim(s.class(late), nil)
			s.event(s.ns, aboutClaim(c), "Warning", "ProvisioningFailed", `node "n1" not found`, 1, 20*time.Minute)
			return KindClaim, "data"
		},
		[]string{`waiting  error       Last error (1 time) 20m ago: node "n1" not found. The claim has changed since`,
			"Next: Create a pod that uses the claim."},
	},
	"an event about a recorded request without a node": {
		func(s *scene) (string, string) {
			c := s.claim(s.class(late), func(c *corev1.PersistentVolumeClaim) {
				c.Finalizers = []string{"storage-controller.io/provisioning"}
				c.Annotations["storage-controller.io/provisioning-request"] = fmt.Sprintf(`{"driver":%q}`, s.driver)
			})
			s.event(s.ns, aboutClaim(c), "Warning", "ProvisioningFailed", "CreateVolume is indeterminate and cannot be retried", 1,
				20*time.Minute)
			return KindClaim, "data"
		},
		[]string{"failing  error       Last error (1 time) 20m ago: CreateVolume is indeterminate and cannot be retried."},
	},
	"an event before another node was selected": {
		func(s *scene) (string, string) {
			n := s.node(nil)
			c := s.claim(s.class(late), selected(n))
			s.event(s.ns, aboutClaim(c), "Warning", "ProvisioningFailed", `node "n1" not found`, 1, 20*time.Minute)
			return KindClaim, "data"
		},
		[]string{`waiting  error       Last error (1 time) 20m ago: node "n1" not found. The claim has changed since`,
			`Next: Verify that the provisioner runs for driver DRIVER`},
	},
	"a pod that no scheduler sees": {
		func(s *scene) (string, string) {
			s.claim(s.class(late), nil)
			s.pod(s.ns + "-n")
			return KindClaim, "data"
		},
		[]string{`blocked  node        No node is selected, because pod "app" was created with spec.nodeName`},
	},
	"a detach without any record": {
		func(s *scene) (string, string) {
			name := s.attachment(s.ns+"-gone", s.ns+"-gone", storagev1.VolumeAttachmentStatus{Attached: true}, attacher.Finalizer(s.driver))
			if err := s.client.StorageV1().VolumeAttachments().Delete(ctxOf(s), name, metav1.DeleteOptions{}); err != nil {
				s.t.Fatal(err)
			}
			return KindAttachment, name
		},
		[]string{
			`blocked  attachment  PersistentVolume "SCENE-gone" does not have the volume handle any more, and the attachment has not recorded it.`,
			`blocked  attachment  CSINode "SCENE-gone" does not have the node ID any more, and the attachment has not recorded it.`,
		},
	},
	"an attachment that fails": {
		func(s *scene) (string, string) {
			pv := s.volume(corev1.VolumeBound, nil)
			return KindAttachment, s.attachment(pv, s.node(nil),
				storagev1.VolumeAttachmentStatus{AttachError: failed("rpc error: code = Internal desc = no such LUN", 20*time.Minute)},
				attacher.Finalizer(s.driver))
		},
		[]string{
			"failing  attachment  ControllerPublishVolume failed 20m ago: rpc error: code = Internal desc = no such LUN.",
			"Next: Retries automatically. Fix the error shown above;",
			"removed by: the attacher of driver DRIVER after ControllerUnpublishVolume succeeded",
		},
	},
	"an attachment that never reached the driver": {
		func(s *scene) (string, string) {
			return KindAttachment, s.attachment(s.volume(corev1.VolumeBound, nil), s.node(nil),
				storagev1.VolumeAttachmentStatus{AttachError: failed("CSINode n does not contain driver d", 20*time.Minute)})
		},
		[]string{
			"failing  attachment  Attaching the volume failed 20m ago: CSINode n does not contain driver d.",
			"Next: Retries automatically. Fix the error shown above; the log of the attacher has the details.",
		},
	},
	"an attachment that waits for a detach that failed": {
		func(s *scene) (string, string) {
			const message = `volume "v" may still be published to node n: VolumeAttachment "b" is being deleted, and not detached yet ` +
				"(rpc error: code = Internal desc = busy)"
			return KindAttachment, s.attachment(s.volume(corev1.VolumeBound, nil), s.node(nil),
				storagev1.VolumeAttachmentStatus{AttachError: failed(message, 20*time.Minute)})
		},
		[]string{"failing  attachment  Attaching the volume failed 20m ago: volume \"v\" may still be published to node n:",
			"the log of the attacher has the details."},
	},
	"an attachment without an error": {
		func(s *scene) (string, string) {
			return KindAttachment, s.attachment(s.volume(corev1.VolumeBound, nil), s.node(nil), storagev1.VolumeAttachmentStatus{},
				attacher.Finalizer(s.driver))
		},
		[]string{
			"waiting  attachment  The attacher has begun to attach the volume, and recorded no error.",
			"Next: The attacher calls ControllerPublishVolume. If this lasts, it may be unable to write the status: " +
				"`storage-controller doctor` checks its permissions.",
		},
	},
	"an attachment to a deleted node": {
		func(s *scene) (string, string) {
			return KindAttachment, s.attachment(s.volume(corev1.VolumeBound, nil), s.ns+"-gone",
				storagev1.VolumeAttachmentStatus{Attached: true})
		},
		[]string{
			`failing  node        Node "SCENE-gone" not found.`,
			"Next: kube-controller-manager deletes the attachment after the pods of the node",
		},
	},
	"an attachment without its volume": {
		func(s *scene) (string, string) {
			return KindAttachment, s.attachment(s.ns+"-gone", s.node(nil), storagev1.VolumeAttachmentStatus{})
		},
		[]string{`blocked  volume      PersistentVolume "SCENE-gone" not found.`},
	},
	"an attachment that cannot be detached": {
		func(s *scene) (string, string) {
			name := s.attachment(s.volume(corev1.VolumeBound, nil), s.node(nil),
				storagev1.VolumeAttachmentStatus{Attached: true, DetachError: failed("rpc error: code = Internal desc = in use",
					20*time.Minute)},
				attacher.Finalizer(s.driver))
			if err := s.client.StorageV1().VolumeAttachments().Delete(ctxOf(s), name, metav1.DeleteOptions{}); err != nil {
				s.t.Fatal(err)
			}
			return KindAttachment, name
		},
		[]string{"failing  attachment  ControllerUnpublishVolume failed 20m ago: rpc error: code = Internal desc = in use.",
			"Next: Retries automatically. Fix the error shown above;"},
	},
	"a node with a driver that lacks its label": {
		func(s *scene) (string, string) {
			return KindNode, s.node(func(n *kubetest.NodeSpec) { n.Labels = nil })
		},
		[]string{"The node is Ready.", `failing  topology    Node "SCENE-node" lacks topology labels of driver DRIVER: DRIVER/host.`},
	},
	"a deleted node with a volume": {
		func(s *scene) (string, string) {
			s.lost(s.ns+"-value", `{"node":"`+s.ns+`-gone","since":"`+time.Now().Add(-5*time.Minute).UTC().Format(time.RFC3339)+`"}`)
			s.volume(corev1.VolumeBound, func(pv *corev1.PersistentVolume) { s.onHost(pv, s.ns+"-value") })
			return KindNode, s.ns + "-gone"
		},
		[]string{
			`Node "SCENE-gone" not found, but volumes, attachments or a CSINode reference it.`,
			"Node SCENE-gone of driver DRIVER has been lost for 5m",
			"1 volume of driver DRIVER accessible only from this node: SCENE-pv.",
		},
	},
	"a deleted node with a finalizer": {
		func(s *scene) (string, string) {
			name := s.node(nil)
			node, err := s.client.CoreV1().Nodes().Get(ctxOf(s), name, metav1.GetOptions{})
			must(s, node, err).Finalizers = []string{s.driver + "/node"}
			node, err = s.client.CoreV1().Nodes().Update(ctxOf(s), node, metav1.UpdateOptions{})
			must(s, node, err)
			if err := s.client.CoreV1().Nodes().Delete(ctxOf(s), name, metav1.DeleteOptions{}); err != nil {
				s.t.Fatal(err)
			}
			return KindNode, name
		},
		[]string{
			"waiting  deletion    The node is being deleted; finalizer DRIVER/node holds it.",
			"Next: Finalizer DRIVER/node is removed by the nodecontroller for driver DRIVER after the claims of the node are cleaned up",
		},
	},
}

// restoring has a claim restore a snapshot.
func restoring(snapshot string) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) {
		c.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: ptr.To("snapshot.storage.k8s.io"), Kind: "VolumeSnapshot",
			Name: snapshot}
	}
}

func TestSituations(t *testing.T) {
	for name, situation := range situations {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t)
			text := s.explain(situation.build(s))
			s.says(text, situation.want...)
			if strings.Contains(text, "hunter2") {
				t.Error("it tells a secret")
			}
		})
	}
}

// TestWithoutPermissions explains a claim to a user who may only read claims.
func TestWithoutPermissions(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	s.claim(s.class(nil), func(c *corev1.PersistentVolumeClaim) { selected(s.ns + "-node")(c); restoring("snap")(c) })
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "reader"},
		Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"persistentvolumeclaims"}, Verbs: []string{"get"}}}}
	role, err := s.client.RbacV1().Roles(s.ns).Create(ctxOf(s), role, metav1.CreateOptions{})
	must(s, role, err)
	binding := &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "reader"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "reader"},
		Subjects: []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: s.ns}}}
	binding, err = s.client.RbacV1().RoleBindings(s.ns).Create(ctxOf(s), binding, metav1.CreateOptions{})
	must(s, binding, err)
	user := s.cp.UserConfig(s.t, s.ns)
	kubetest.Eventually(t, "the user may read claims", func(ctx context.Context) error {
		_, err := Explain(ctx, clientsOf(t, user), Request{Kind: KindClaim, Namespace: s.ns, Name: "data"})
		return err
	})
	s.says(s.text(user, Request{Kind: KindClaim, Namespace: s.ns, Name: "data"}),
		`unknown  class       Cannot get StorageClass "SCENE-class": permission denied (get storageclasses.storage.k8s.io).`,
		`unknown  node        Cannot get Node "SCENE-node": permission denied (get nodes).`,
		`unknown  source      Cannot get VolumeSnapshot SCENE/snap: permission denied (get volumesnapshots.snapshot.storage.k8s.io).`,
		`unknown  driver      Cannot get CSIDriver "DRIVER": permission denied (get csidrivers.storage.k8s.io).`,
		`unknown  driver      Cannot list CSINodes: permission denied (list csinodes.storage.k8s.io).`,
		`unknown  driver      Cannot list Leases named`,
		"Events, newest first:\n  Cannot list Events about PersistentVolumeClaim SCENE/data in namespace \"SCENE\": permission denied "+
			"(list events).\n",
		"Next: As far as known: The provisioner of driver DRIVER calls CreateVolume",
	)
	_, err = Explain(t.Context(), clientsOf(t, user), Request{Kind: KindVolume, Name: "x"})
	if err == nil || !strings.Contains(err.Error(), `PersistentVolume "x": permission denied: `) ||
		!strings.Contains(err.Error(), `Ask the cluster administrator`) {
		t.Errorf("the object itself: %v", err)
	}
}

// TestReadsOfAPod: nothing is read twice for the claims of a pod, and no other pods.
func TestReadsOfAPod(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	class := s.class(nil)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "app"}, Spec: corev1.PodSpec{
		Containers: []corev1.Container{{Name: "c", Image: "app:dev"}}}}
	for i := range 3 {
		name := fmt.Sprint("data-", i)
		c := s.claim(class, func(c *corev1.PersistentVolumeClaim) { c.Name, c.Spec.VolumeName = name, s.ns+name })
		s.phase(c, corev1.ClaimBound)
		s.volume(corev1.VolumeBound, func(pv *corev1.PersistentVolume) { boundTo(c)(pv); s.onHost(pv, "none"); pv.Name = s.ns + name })
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name}}})
	}
	made, err := s.client.CoreV1().Pods(s.ns).Create(t.Context(), pod, metav1.CreateOptions{})
	must(s, made, err)
	reads := map[string]int{}
	counted := rest.CopyConfig(s.cp.Config())
	counted.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			reads[r.URL.String()]++
			if strings.HasSuffix(r.URL.Path, "/pods") {
				t.Errorf("lists pods: %s", r.URL)
			}
			return next.RoundTrip(r)
		})
	})
	s.says(s.text(counted, Request{Kind: KindPod, Namespace: s.ns, Name: "app"}), "PersistentVolumeClaim SCENE/data-2:")
	for url, n := range reads {
		if n > 1 {
			t.Errorf("%d reads of %s", n, url)
		}
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// TestNodeOfAZone: a deleted node may be named by nothing, because its volumes name only the zone.
func TestNodeOfAZone(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	pv := s.volume(corev1.VolumeBound, func(pv *corev1.PersistentVolume) { s.onHost(pv, "zone-of-"+s.ns) })
	g := newGatherer(clientsOf(t, s.cp.Config()), Request{Kind: KindNode, Name: s.ns + "-gone"})
	err := g.gatherNode(t.Context())
	if !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "If the node was deleted, it may be that of a volume") ||
		!slices.ContainsFunc(g.facts.volumes.Value, func(v *corev1.PersistentVolume) bool { return v.Name == pv }) {
		t.Errorf("got %v", err)
	}
}

// dated sets the Date of responses.
type dated struct {
	http.RoundTripper
	date time.Time
}

func (d dated) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := d.RoundTripper.RoundTrip(r)
	if err == nil {
		response.Header.Set("Date", d.date.UTC().Format(http.TimeFormat))
	}
	return response, err
}

// TestLocalClockIsAhead: a Lease that was renewed according to the API server has not expired.
func TestLocalClockIsAhead(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	s.lease(strings.ReplaceAll(s.driver, ".", "-"), "pod", "storage-controller", 3*time.Hour)
	s.claim(s.class(nil), nil)
	cfg := rest.CopyConfig(s.cp.Config())
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return dated{next, time.Now().Add(-3 * time.Hour)} })
	s.says(s.text(cfg, Request{Kind: KindClaim, Namespace: s.ns, Name: "data"}), `is "pod" (storage-controller), which holds Lease`)
}

func TestReadErrors(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	web := httptest.NewServer(http.NotFoundHandler())
	defer web.Close()
	away := rest.CopyConfig(s.cp.Config())
	away.Host = "https://127.0.0.1:1"
	forbidden := kubetest.Proxy(t, s.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if strings.HasSuffix(r.URL.Path, "/persistentvolumes") {
			http.Error(w, "no", http.StatusForbidden)
			return
		}
		pass.ServeHTTP(w, r)
	})
	const connection = "Check --kubeconfig and --master"
	for name, test := range map[string]struct {
		cfg        *rest.Config
		kinds      []string
		notFound   bool
		want, next string
	}{
		"no object": {s.cp.Config(), []string{KindClaim, KindVolume, KindAttachment, KindNode}, true, "not found", "Check the name"},
		"volumes are forbidden": {forbidden, []string{KindNode}, false,
			"may exist: Cannot list PersistentVolumes: permission denied (list persistentvolumes). ",
			"ask the cluster administrator"},
		"a web server":  {&rest.Config{Host: web.URL}, []string{KindClaim, KindNode}, false, "not a Kubernetes API server", connection},
		"not reachable": {away, []string{KindNode}, false, "reading from the API server failed", connection},
	} {
		for _, kind := range test.kinds {
			_, err := Explain(t.Context(), clientsOf(t, test.cfg), Request{Kind: kind, Namespace: s.ns, Name: s.ns + "-none"})
			if err == nil || errors.Is(err, ErrNotFound) != test.notFound || !strings.Contains(err.Error(), test.want) ||
				!strings.Contains(err.Error(), test.next) {
				t.Errorf("%s, %s: %v", name, kind, err)
			}
		}
	}
}
