package explain

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// situations are states that people meet, each built with real objects, and what is said.
var situations = map[string]struct {
	build func(s *scene) (kind, name string)
	want  []string
}{
	"the class does not exist": {
		func(s *scene) (string, string) { s.claim(s.ns+"-gone", nil); return KindClaim, "data" },
		[]string{
			`blocked  class      StorageClass "SCENE-gone" does not exist.`,
			`Next: The cluster administrator creates StorageClass "SCENE-gone", or the owner of the claim deletes the claim and makes it anew with one that exists.`,
			"kubernetes.io/pvc-protection\n    removed by kube-controller-manager, when the claim is being deleted and no pod on a node uses it any more",
		},
	},
	"the class makes no volumes": {
		func(s *scene) (string, string) {
			s.claim(s.class(func(c *storagev1.StorageClass) { c.Provisioner = noProvisioner }), nil)
			return KindClaim, "data"
		},
		[]string{`StorageClass "SCENE-class" makes no volumes (kubernetes.io/no-provisioner)`, `Next: The cluster administrator makes a PersistentVolume of StorageClass "SCENE-class" that fits.`},
	},
	"the class is of another driver by now": {
		func(s *scene) (string, string) {
			s.claim(s.class(func(c *storagev1.StorageClass) { c.Provisioner = "other.example.com" }), nil)
			return KindClaim, "data"
		},
		[]string{`The claim was given to provisioner DRIVER, and StorageClass "SCENE-class" is of other.example.com by now`, "Next: The owner of the claim deletes the claim and makes it anew."},
	},
	"late binding, and no pod": {
		func(s *scene) (string, string) { s.claim(s.class(late), nil); return KindClaim, "data" },
		[]string{
			`waiting  node       No pod uses the claim yet, so that no node is selected for its volume.`,
			"its binding mode is WaitForFirstConsumer",
			"Next: The owner of the claim creates a pod that uses it; nothing happens before that.",
		},
	},
	"the selected node is gone": {
		func(s *scene) (string, string) {
			s.claim(s.class(late), selected(s.ns+"-gone"))
			return KindClaim, "data"
		},
		[]string{`The selected node "SCENE-gone" does not exist any more.`, "Next: The provisioner has the scheduler select another node with the next attempt."},
	},
	"the driver is not on the selected node": {
		func(s *scene) (string, string) {
			n := s.node(func(n *kubetest.NodeSpec) { n.Driver = "" })
			s.claim(s.class(late), selected(n))
			return KindClaim, "data"
		},
		[]string{`failing  node       Driver DRIVER is not registered on node "SCENE-node" (no entry in its CSINode).`, "looks why the node part of driver DRIVER does not run on SCENE-node."},
	},
	"the selected node lacks its topology label": {
		func(s *scene) (string, string) {
			n := s.node(func(n *kubetest.NodeSpec) { n.Labels = nil })
			s.claim(s.class(late), selected(n))
			return KindClaim, "data"
		},
		[]string{`Node "SCENE-node" lacks the topology labels of driver DRIVER: DRIVER/host.`},
	},
	"no node is in the allowed topologies": {
		func(s *scene) (string, string) {
			s.claim(s.class(func(c *storagev1.StorageClass) {
				c.AllowedTopologies = []corev1.TopologySelectorTerm{{MatchLabelExpressions: []corev1.TopologySelectorLabelRequirement{{Key: "zone", Values: []string{s.ns}}}}}
			}), nil)
			return KindClaim, "data"
		},
		[]string{`blocked  topology   allowedTopologies of StorageClass "SCENE-class" are zone in (SCENE), which 0 of`},
	},
	"a secret is missing, another is there": {
		func(s *scene) (string, string) {
			secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "there"}, StringData: map[string]string{"password": "hunter2"}}
			secret, err := s.client.CoreV1().Secrets(s.ns).Create(ctxOf(s), secret, metav1.CreateOptions{})
			must(s, secret, err)
			s.claim(s.class(func(c *storagev1.StorageClass) {
				c.Parameters = map[string]string{
					"csi.storage.k8s.io/provisioner-secret-name": "${pvc.name}-key", "csi.storage.k8s.io/provisioner-secret-namespace": "${pvc.namespace}",
					"csi.storage.k8s.io/node-stage-secret-name": "there", "csi.storage.k8s.io/node-stage-secret-namespace": s.ns,
				}
			}), nil)
			return KindClaim, "data"
		},
		[]string{
			`blocked  secret     Secret SCENE/data-key, which is named as provisioner-secret-name, does not exist.`,
			`fine     secret     Secret SCENE/there, which is named as node-stage-secret-name, exists.`,
			"Next: The cluster administrator creates Secret SCENE/data-key with what the driver needs.",
		},
	},
	"the snapshot is not there": {
		func(s *scene) (string, string) {
			kubetest.InstallCRDs(s.t, s.cp)
			s.claim(s.class(nil), restoring("snap"))
			return KindClaim, "data"
		},
		[]string{"The data source VolumeSnapshot SCENE/snap does not exist.", "Next: The owner of the claim creates the source, or deletes the claim and makes it anew without that."},
	},
	"the snapshot is not ready": {
		func(s *scene) (string, string) {
			kubetest.InstallCRDs(s.t, s.cp)
			s.object(snapshots, s.ns, map[string]any{"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot", "metadata": map[string]any{"name": "snap"},
				"spec": map[string]any{"source": map[string]any{"persistentVolumeClaimName": "other"}}})
			s.claim(s.class(nil), restoring("snap"))
			return KindClaim, "data"
		},
		[]string{"VolumeSnapshot SCENE/snap cannot be restored: it is not bound to a VolumeSnapshotContent yet.", "Next: The provisioner tries again by itself once the source is ready;"},
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
	"an old sidecar works, and fails": {
		func(s *scene) (string, string) {
			s.lease(strings.ReplaceAll(s.driver, ".", "-"), "old-pod", "csi-provisioner", time.Second)
			c := s.claim(s.class(nil), nil)
			s.event(s.ns, aboutClaim(c), "Normal", "Provisioning", "is provisioning", 1, 90*time.Second)
			s.event(s.ns, aboutClaim(c), "Warning", "ProvisioningFailed", "rpc error: no space", 4, 30*time.Second)
			return KindClaim, "data"
		},
		[]string{
			`fine     driver     The provisioner of driver DRIVER is "old-pod", an old sidecar (csi-provisioner), which holds Lease SCENE/`,
			"failing  error      The last error was 3", "s ago, 4 times: rpc error: no space.",
			"Next: The provisioner tries again by itself;", "4×  Warning ProvisioningFailed: rpc error: no space\n  1m3",
		},
	},
	"our own process holds the Lease": {
		func(s *scene) (string, string) {
			s.lease(strings.ReplaceAll(s.driver, ".", "-"), "new-pod", "storage-controller", time.Second)
			s.claim(s.class(nil), nil)
			return KindClaim, "data"
		},
		[]string{`The provisioner of driver DRIVER is "new-pod", a storage-controller, which holds Lease`, `There is no CSIDriver object "DRIVER"`},
	},
	"all is well, and the driver does without a CSIDriver object": {
		func(s *scene) (string, string) {
			s.node(nil)
			for _, lease := range []string{"", "external-attacher-leader-"} {
				s.lease(lease+strings.ReplaceAll(s.driver, ".", "-"), "new-pod", "storage-controller", time.Second)
			}
			c := s.claim(s.class(nil), func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = s.ns + "-pv" })
			s.phase(c, corev1.ClaimBound)
			s.volume(corev1.VolumeBound, boundTo(c))
			return KindClaim, "data"
		},
		[]string{`fine     driver     There is no CSIDriver object "DRIVER": the driver does without one.`, "Next: Nothing is left to do: a pod can use the claim."},
	},
	"the Lease has run out": {
		func(s *scene) (string, string) {
			s.lease(strings.ReplaceAll(s.driver, ".", "-"), "dead-pod", "storage-controller", 3*time.Hour)
			s.claim(s.class(nil), nil)
			return KindClaim, "data"
		},
		[]string{`of "dead-pod" was renewed 3h0m ago for the last time, and has run out: no provisioner works for driver DRIVER.`,
			"Next: The cluster administrator looks why no provisioner of driver DRIVER runs in namespace SCENE: `kubectl -n SCENE get pods`."},
	},
	"the driver has given no final answer": {
		func(s *scene) (string, string) {
			s.claim(s.class(nil), func(c *corev1.PersistentVolumeClaim) {
				c.Finalizers = []string{"storage-controller.io/provisioning"}
				c.Annotations["storage-controller.io/provisioning-request"] = fmt.Sprintf(`{"driver":%q,"request":"x"}`, s.driver)
			})
			return KindClaim, "data"
		},
		[]string{"Driver DRIVER was asked for the volume and has not given a final answer, so that a volume may exist",
			"storage-controller.io/provisioning\n    removed by the provisioner of storage-controller, when the driver has given a final answer",
			"Next: The provisioner repeats CreateVolume with equal arguments until driver DRIVER gives a final answer"},
	},
	"there is not enough room": {
		func(s *scene) (string, string) {
			n := s.node(nil)
			class := s.class(late)
			d := &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: s.driver}, Spec: storagev1.CSIDriverSpec{StorageCapacity: ptr.To(true)}}
			d, err := s.client.StorageV1().CSIDrivers().Create(ctxOf(s), d, metav1.CreateOptions{})
			must(s, d, err)
			c := &storagev1.CSIStorageCapacity{ObjectMeta: metav1.ObjectMeta{GenerateName: "csisc-"}, StorageClassName: class, Capacity: resource.NewQuantity(1<<30, resource.BinarySI),
				NodeTopology: &metav1.LabelSelector{MatchLabels: map[string]string{s.driver + "/host": n}}}
			c, err = s.client.StorageV1().CSIStorageCapacities(s.ns).Create(ctxOf(s), c, metav1.CreateOptions{})
			must(s, c, err)
			s.claim(class, selected(n))
			return KindClaim, "data"
		},
		[]string{
			`failing  capacity   There is not enough room for node "SCENE-node": the claim requests 5Gi, and the most that CSIStorageCapacity tells of for one volume is 1Gi, in 1 object.`,
			`Driver DRIVER is registered on node "SCENE-node" as "id-1", with DRIVER/host=SCENE-node.`,
		},
	},
	"a deleted claim is still used": {
		func(s *scene) (string, string) {
			s.claim(s.class(nil), nil)
			s.pod(s.ns + "-anywhere")
			if err := s.client.CoreV1().PersistentVolumeClaims(s.ns).Delete(ctxOf(s), "data", metav1.DeleteOptions{}); err != nil {
				s.t.Fatal(err)
			}
			return KindClaim, "data"
		},
		[]string{"blocked  deletion   The claim was deleted and is still used by pod app.", "is kept by its finalizers",
			"Next: The owner of pod app deletes it; kube-controller-manager removes kubernetes.io/pvc-protection after that."},
	},
	"a claim has lost its volume": {
		func(s *scene) (string, string) {
			c := s.claim(s.class(nil), func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = s.ns + "-lost" })
			s.phase(c, corev1.ClaimLost)
			return KindClaim, "data"
		},
		[]string{`blocked  volume     The claim has lost its PersistentVolume "SCENE-lost", which was deleted; a claim never recovers from that.`, "Next: The owner of the claim deletes it and makes it anew"},
	},
	"a bound claim, whose volume cannot be attached": {
		func(s *scene) (string, string) {
			c := s.claim(s.class(nil), func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = s.ns + "-pv" })
			s.phase(c, corev1.ClaimBound)
			pv := s.volume(corev1.VolumeBound, boundTo(c))
			s.attachment(pv, s.node(nil), storagev1.VolumeAttachmentStatus{AttachError: failed("too many volumes", time.Minute)})
			return KindClaim, "data"
		},
		[]string{`The claim is bound to PersistentVolume "SCENE-pv".`, `failing  attachment Attaching it to node "SCENE-node" (VolumeAttachment SCENE-va) failed 1m0s ago: too many volumes.`},
	},
	"a released volume that is to stay": {
		func(s *scene) (string, string) {
			return KindVolume, s.volume(corev1.VolumeReleased, func(pv *corev1.PersistentVolume) {
				pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
			})
		},
		[]string{"Its claim is gone, and by its reclaim policy Retain nobody deletes it.", "or removes spec.claimRef to have it used again."},
	},
	"a released volume that cannot be deleted": {
		func(s *scene) (string, string) {
			name := s.volume(corev1.VolumeReleased, func(pv *corev1.PersistentVolume) {
				pv.Finalizers = []string{"external-provisioner.volume.kubernetes.io/finalizer", "example.org/backup"}
			})
			s.event("default", corev1.ObjectReference{Kind: KindVolume, Name: name}, "Warning", "VolumeFailedDelete", "volume is busy", 2, time.Minute)
			return KindVolume, name
		},
		[]string{
			"failing  error      The last error was 1m0s ago, 2 times: volume is busy.",
			"example.org/backup\n    by whom it is removed is unknown: belongs to example.org, nobody but its owner can tell",
			"external-provisioner.volume.kubernetes.io/finalizer\n    removed by the provisioner of the driver, when the driver has deleted the volume (DeleteVolume)",
		},
	},
	"a released volume that is attached": {
		func(s *scene) (string, string) {
			pv := s.volume(corev1.VolumeReleased, nil)
			s.attachment(pv, s.node(nil), storagev1.VolumeAttachmentStatus{Attached: true})
			return KindVolume, pv
		},
		[]string{"it is to be deleted; 1 VolumeAttachment still names it.", `It is attached to node "SCENE-node"`, "Next: The attacher detaches the volume first"},
	},
	"a released volume that somebody else has made": {
		func(s *scene) (string, string) {
			return KindVolume, s.volume(corev1.VolumeReleased, func(pv *corev1.PersistentVolume) { pv.Annotations = nil })
		},
		[]string{`blocked  phase      Its claim is gone, and no provisioner deletes it: annotation pv.kubernetes.io/provisioned-by is "", not "DRIVER".`},
	},
	"a volume whose clean-up is held": {
		func(s *scene) (string, string) {
			return KindVolume, s.volume(corev1.VolumeBound, func(pv *corev1.PersistentVolume) {
				s.onHost(pv, s.ns+"-gone")
				pv.Annotations[s.driver+"/lost-node"], pv.Annotations[s.driver+"/node-cleanup-hold"] = s.ns+"-gone", "breaker"
			})
		},
		[]string{`The clean-up of PersistentVolume "SCENE-pv", whose node SCENE-gone is lost, is held (breaker)`, "kubectl annotate csidriver DRIVER DRIVER/node-cleanup-approve=SCENE-gone",
			"No node has what the node affinity of the volume asks for: DRIVER/host in (SCENE-gone)."},
	},
	"an attachment that fails": {
		func(s *scene) (string, string) {
			pv := s.volume(corev1.VolumeBound, nil)
			return KindAttachment, s.attachment(pv, s.node(nil), storagev1.VolumeAttachmentStatus{AttachError: failed("no such LUN", 2*time.Minute)}, "external-attacher/"+strings.ReplaceAll(s.driver, ".", "-"))
		},
		[]string{"failing  attachment Attaching failed 2m0s ago: no such LUN.", "Next: The attacher tries again to attach the volume (ControllerPublishVolume)", "removed by the attacher of driver DRIVER, when the driver has detached the volume (ControllerUnpublishVolume)"},
	},
	"an attachment to a node that is gone": {
		func(s *scene) (string, string) {
			return KindAttachment, s.attachment(s.volume(corev1.VolumeBound, nil), s.ns+"-gone", storagev1.VolumeAttachmentStatus{Attached: true})
		},
		[]string{`failing  node       Node "SCENE-gone" does not exist any more.`, "Next: kube-controller-manager deletes the attachment once the pods of the node are gone"},
	},
	"an attachment without its volume": {
		func(s *scene) (string, string) {
			return KindAttachment, s.attachment(s.ns+"-gone", s.node(nil), storagev1.VolumeAttachmentStatus{})
		},
		[]string{`blocked  volume     PersistentVolume "SCENE-gone" does not exist.`},
	},
	"an attachment that cannot be detached": {
		func(s *scene) (string, string) {
			name := s.attachment(s.volume(corev1.VolumeBound, nil), s.node(nil), storagev1.VolumeAttachmentStatus{Attached: true, DetachError: failed("in use", time.Minute)}, "external-attacher/"+strings.ReplaceAll(s.driver, ".", "-"))
			if err := s.client.StorageV1().VolumeAttachments().Delete(ctxOf(s), name, metav1.DeleteOptions{}); err != nil {
				s.t.Fatal(err)
			}
			return KindAttachment, name
		},
		[]string{"failing  attachment Detaching failed 1m0s ago: in use.", "Next: The attacher tries again to detach the volume (ControllerUnpublishVolume)"},
	},
	"a node with a driver that lacks its label": {
		func(s *scene) (string, string) {
			return KindNode, s.node(func(n *kubetest.NodeSpec) { n.Labels = nil })
		},
		[]string{"The node is Ready.", "failing  topology   The node lacks topology labels of driver DRIVER: DRIVER/host."},
	},
	"a node that is gone, with a volume": {
		func(s *scene) (string, string) {
			s.volume(corev1.VolumeBound, func(pv *corev1.PersistentVolume) {
				s.onHost(pv, s.ns+"-gone")
				pv.Annotations[s.driver+"/lost-node"] = s.ns + "-gone"
				pv.Annotations[s.driver+"/node-missing-since"] = time.Now().Add(-5 * time.Minute).UTC().Format(time.RFC3339)
			})
			return KindNode, s.ns + "-gone"
		},
		[]string{`Node "SCENE-gone" does not exist any more, and is still named by`, `The node SCENE-gone of PersistentVolume "SCENE-pv" has been missing for 5m`, "1 volume of driver DRIVER lives on this node and nowhere else: SCENE-pv."},
	},
	"a deleted node that a finalizer keeps": {
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
		[]string{"waiting  deletion   The node was deleted, and finalizer DRIVER/node keeps it.", "Next: The nodecontroller for driver DRIVER removes finalizer DRIVER/node when the claims of the node are cleaned up"},
	},
}

// restoring has a claim restore a snapshot.
func restoring(snapshot string) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) {
		c.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: ptr.To("snapshot.storage.k8s.io"), Kind: "VolumeSnapshot", Name: snapshot}
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

// TestWithoutPermissions lets a user read nothing but claims: the report says what is not
// known, and goes on.
func TestWithoutPermissions(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	s.claim(s.class(nil), selected(s.ns+"-node"))
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "reader"}, Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"persistentvolumeclaims"}, Verbs: []string{"get"}}}}
	role, err := s.client.RbacV1().Roles(s.ns).Create(ctxOf(s), role, metav1.CreateOptions{})
	must(s, role, err)
	binding := &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "reader"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "reader"},
		Subjects: []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: s.ns}}}
	binding, err = s.client.RbacV1().RoleBindings(s.ns).Create(ctxOf(s), binding, metav1.CreateOptions{})
	must(s, binding, err)
	user := s.cp.UserConfig(s.ns)
	kubetest.Eventually(t, "the user may read claims", func(ctx context.Context) error {
		_, err := Explain(ctx, clientsOf(t, user), Request{Kind: KindClaim, Namespace: s.ns, Name: "data"})
		return err
	})
	s.says(s.text(user, Request{Kind: KindClaim, Namespace: s.ns, Name: "data"}),
		`unknown  class      StorageClass "SCENE-class": not known: no permission to get StorageClass "SCENE-class".`,
		`The selected node is "SCENE-node": not known: no permission to get Node "SCENE-node".`,
		`CSIDriver "DRIVER": not known: no permission to get CSIDriver "DRIVER".`,
		`On which nodes driver DRIVER is registered is not known: no permission to list CSINodes.`,
		`Who is the provisioner of driver DRIVER is not known: no permission to list Leases called`,
		`not known: no permission to list events in namespace "SCENE"`,
		"Next: As far as could be found out: The provisioner of driver DRIVER has the volume made",
	)
	_, err = Explain(t.Context(), clientsOf(t, user), Request{Kind: KindVolume, Name: "x"})
	if err == nil || !strings.Contains(err.Error(), `PersistentVolume "x": no permission to get it: ask the cluster administrator`) {
		t.Errorf("the object itself: %v", err)
	}
}

func TestWhatIsNotThere(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	for _, kind := range []string{KindClaim, KindVolume, KindAttachment, KindNode} {
		if _, err := Explain(t.Context(), clientsOf(t, s.cp.Config()), Request{Kind: kind, Namespace: s.ns, Name: s.ns + "-none"}); !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "check the name") {
			t.Errorf("%s: %v", kind, err)
		}
	}
	notOne := httptest.NewServer(http.NotFoundHandler())
	defer notOne.Close()
	for _, kind := range []string{KindClaim, KindNode} {
		_, err := Explain(t.Context(), clientsOf(t, &rest.Config{Host: notOne.URL}), Request{Kind: kind, Namespace: s.ns, Name: "n"})
		if err == nil || errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "no API server of Kubernetes") || !strings.Contains(err.Error(), "check --kubeconfig and --master") {
			t.Errorf("a web server that is no API server, %s: %v", kind, err)
		}
	}
	away := rest.CopyConfig(s.cp.Config())
	away.Host = (&url.URL{Scheme: "https", Host: "127.0.0.1:1"}).String()
	if _, err := Explain(t.Context(), clientsOf(t, away), Request{Kind: KindNode, Name: "n"}); err == nil || !strings.Contains(err.Error(), "check --kubeconfig and --master") {
		t.Errorf("an API server that is not there: %v", err)
	}
}
