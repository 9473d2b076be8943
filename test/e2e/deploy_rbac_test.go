// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

// everyCapability is what a driver can have that has the program do something.
var everyCapability = []csi.ControllerServiceCapability_RPC_Type{
	csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
	csi.ControllerServiceCapability_RPC_CLONE_VOLUME, csi.ControllerServiceCapability_RPC_MODIFY_VOLUME,
	csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME, csi.ControllerServiceCapability_RPC_GET_CAPACITY,
	csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
}

// applyRendered is applyRBAC for what was rendered: the permissions among the objects.
func (e *env) applyRendered(objects []*unstructured.Unstructured) map[permission]bool {
	e.t.Helper()
	granted := map[permission]bool{}
	for _, o := range objects {
		if o.GroupVersionKind().Group != "rbac.authorization.k8s.io" {
			continue
		}
		text, err := yaml.Marshal(o.Object)
		if err != nil {
			e.t.Fatal(err)
		}
		if err := e.applyDocument(text, granted); err != nil {
			e.t.Fatal(err)
		}
	}
	return granted
}

// TestOverlaysNeedWhatTheyGrant runs the containers of the overlays as their ServiceAccount: they
// are refused nothing, and nothing is granted that they do not use.
func TestOverlaysNeedWhatTheyGrant(t *testing.T) {
	t.Parallel()
	for _, overlay := range []string{"all-in-one", "per-role"} {
		t.Run(overlay, func(t *testing.T) {
			t.Parallel()
			overlayNeedsWhatItGrants(t, overlay)
		})
	}
}

func overlayNeedsWhatItGrants(t *testing.T, overlay string) {
	e := newEnv(t, csitest.Config{Controller: everyCapability, Groups: true, NoNodeExpansion: true, Segments: []map[string]string{{}}}, 2)
	kubetest.InstallCRDs(t, e.cp)
	objects := kustomized(t, overlays+overlay)
	granted := e.applyRendered(objects)
	e.inForce("csi-controller", granted)
	e.restrict("csi-controller")
	kubeconfig, used, refused := e.as("csi-controller")
	e.secret("s")
	e.attributes("fast", map[string]string{"iops": "9"})
	e.deploymentWithPod("csi-controller")
	for _, c := range podOf(t, objects).Containers {
		if c.Name != "driver" {
			e.contained(c, kubeconfig, "csi-controller-1-x")
		}
	}
	class := e.class(false, func(c *storagev1.StorageClass) {
		c.Parameters, c.AllowVolumeExpansion = map[string]string{}, ptr.To(true)
		for _, purpose := range []string{"provisioner", "controller-publish"} {
			c.Parameters["csi.storage.k8s.io/"+purpose+"-secret-name"] = "s"
			c.Parameters["csi.storage.k8s.io/"+purpose+"-secret-namespace"] = e.ns
		}
	})
	late := e.pool("late", nil)
	e.published(2)

	e.plugin.Next("CreateVolume", csitest.Fail(codes.Aborted, "pending"), csitest.Fail(codes.Aborted, "pending"))
	e.claim("source", class)
	e.snapshot(e.bound("source"))
	for name, change := range map[string]func(*corev1.PersistentVolumeClaimSpec){
		"clone": func(s *corev1.PersistentVolumeClaimSpec) {
			s.DataSource = &corev1.TypedLocalObjectReference{Kind: kube.KindClaim, Name: "source"}
		},
		"restored": func(s *corev1.PersistentVolumeClaimSpec) {
			s.DataSource = &corev1.TypedLocalObjectReference{APIGroup: ptr.To("snapshot.storage.k8s.io"), Kind: kube.KindSnapshot,
				Name: "snap"}
		},
		"attributes": func(s *corev1.PersistentVolumeClaimSpec) { s.VolumeAttributesClassName = ptr.To(e.ns + "-fast") },
	} {
		c := newClaim(name, class)
		change(&c.Spec)
		e.make(c)
		e.bound(name)
	}
	e.request("clone", "2Gi", e.ns+"-fast")
	e.modified("clone", e.ns+"-fast")
	e.contentsCreated(e.bound("source"))
	e.attach("a", e.bound("source"), e.nodes[0])
	e.attached(1)
	e.detach("a")
	e.attached(0)
	e.capacityIs("3Gi", late)
	e.deleteClass(late)
	e.leftovers("source", "clone", "restored", "attributes")
	e.usesAll(granted, used, refused, func(p permission) bool {
		switch {
		case p.verb == "list": // of a server that cannot send it with the watch
			return true
		case p == permission{"patch", "", "events"}: // of a second event of one text
			return true
		case p.verb == "get" && slices.Contains([]string{"volumeattachments", "persistentvolumes"}, p.resource): // after a conflict
			return true
		}
		return p == permission{"get", "", "pods"} // of an owner that is asked for again
	})
}

// TestOverlayOfNodesNeedsWhatItGrants does the same for the overlay with an instance on each
// node, for a volume whose node the scheduler has chosen and for one whose node is chosen here.
func TestOverlayOfNodesNeedsWhatItGrants(t *testing.T) {
	t.Parallel()
	e := newEnv(t, csitest.Config{Segments: []map[string]string{{}}, Controller: []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_GET_CAPACITY,
	}}, 2)
	features := []string{"attachments", "snapshots", "volumeattributesclasses"} // whose capabilities this driver does not report
	objects := slices.DeleteFunc(kustomized(t, overlays+"node"), func(o *unstructured.Unstructured) bool {
		return slices.ContainsFunc(features, func(f string) bool { return strings.HasSuffix(o.GetName(), ":provisioner-"+f) })
	})
	granted := e.applyRendered(objects)
	e.inForce("csi-controller", granted)
	kubeconfig, used, refused := e.as("csi-controller")
	e.secret("s")
	secret := func(c *storagev1.StorageClass) {
		c.Parameters = map[string]string{"csi.storage.k8s.io/provisioner-secret-name": "s",
			"csi.storage.k8s.io/provisioner-secret-namespace": e.ns}
	}
	e.daemonSetWithPod("csi-controller")
	for _, c := range podOf(t, objects).Containers {
		if c.Name != "driver" {
			e.contained(c, kubeconfig, "csi-controller-x")
		}
	}
	late, now := e.class(true, secret), e.class(false, secret)
	e.published(1)

	e.plugin.Next("CreateVolume", csitest.Fail(codes.Aborted, "pending"), csitest.Fail(codes.Aborted, "pending"))
	chosen := newClaim("chosen", late)
	chosen.Annotations = map[string]string{"volume.kubernetes.io/selected-node": e.nodes[0]}
	e.make(chosen)
	e.claim("here", now)
	e.bound("chosen")
	e.bound("here")
	e.capacityIs("3Gi", late)
	e.deleteClass(late)
	e.published(0)
	e.leftovers("chosen", "here")
	e.usesAll(granted, used, refused, func(p permission) bool {
		// Of a server that cannot send it with the watch; of a second event of one text; before an irreversible step,
		// and indeterminate calls.
		return p.verb == "list" || p == permission{"patch", "", "events"} || p == permission{"get", "", "persistentvolumes"}
	})
}

func (e *env) must(err error) {
	e.t.Helper()
	if err != nil {
		e.t.Fatal(err)
	}
}

func (e *env) secret(name string) {
	e.t.Helper()
	_, err := e.client.CoreV1().Secrets(e.ns).Create(e.t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}},
		metav1.CreateOptions{})
	e.must(err)
}

// grows has the file system of a claim wait for the kubelet of node, on which the pod
// "growing" uses it, and waits until that pod has been touched.
func (e *env) grows(claim, node string) {
	e.t.Helper()
	e.uses("growing", claim, node)
	status := fmt.Appendf(nil,
		`{"status":{"allocatedResources":{"storage":"2Gi"},"allocatedResourceStatuses":{"storage":"NodeResizePending"}}}`)
	_, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Patch(e.t.Context(), claim, types.MergePatchType, status,
		metav1.PatchOptions{}, "status")
	e.must(err)
	e.eventually("the pod is touched", func(ctx context.Context) error {
		p, err := e.client.CoreV1().Pods(e.ns).Get(ctx, "growing", metav1.GetOptions{})
		if err == nil && len(p.Annotations) == 0 {
			err = errors.New("it has no annotation")
		}
		return err
	})
}

// uses makes a pod with a claim; without a node it is never scheduled.
func (e *env) uses(pod, claim, node string) {
	e.t.Helper()
	_, err := e.client.CoreV1().Pods(e.ns).Create(e.t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: pod}, Spec: corev1.PodSpec{
		NodeName: node, SchedulerName: "none", Containers: []corev1.Container{{Name: "c", Image: "none"}},
		Volumes: []corev1.Volume{{Name: "v",
			VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}},
	}}, metav1.CreateOptions{})
	e.must(err)
}

// TestNodecontrollerNeedsWhatItsManifestsGrant uses every feature at once as the ServiceAccount
// of deploy/rbac: it is refused nothing, and nothing is granted that it does not use.
func TestNodecontrollerNeedsWhatItsManifestsGrant(t *testing.T) {
	t.Parallel()
	e := newEnv(t, csitest.Config{Segments: []map[string]string{{}}}, 2)
	ctx, key := t.Context(), e.plugin.Name()+"/node"
	granted := e.applyRBAC("nodecontrolle*[^e]") // without nodecontroller-pvc-enforce, which is for TopoLVM
	maps.Copy(granted, e.applyRBAC("nodecontroller-resize-nudge"))
	// With the name of the ConfigMap, as in the chart.
	role, err := e.client.RbacV1().Roles(e.ns).Get(ctx, "storage-controller:nodecontroller", metav1.GetOptions{})
	e.must(err)
	role.Rules[0].ResourceNames = []string{nodecleanup.ConfigMapName(e.plugin.Name())}
	_, err = e.client.RbacV1().Roles(e.ns).Update(ctx, role, metav1.UpdateOptions{})
	e.must(err)
	for _, verb := range role.Rules[0].Verbs {
		granted[permission{verb, "", "configmaps"}] = false
	}
	e.inForce("storage-controller-nodecontroller", granted)
	e.restrict("storage-controller-nodecontroller")
	kubeconfig, used, refused := e.as("storage-controller-nodecontroller")
	_, err = e.client.StorageV1().CSIDrivers().Create(ctx, &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: e.plugin.Name()}},
		metav1.CreateOptions{})
	e.must(err)
	finalizer := e.plugin.Name() + "/claim"
	class := e.class(false, nil)
	e.onNode("growing", class, key, "a")
	e.onNode("lost", class, key, "b")
	_, err = e.client.CoreV1().PersistentVolumes().Patch(ctx, e.ns+"-lost", types.MergePatchType,
		[]byte(`{"metadata":{"finalizers":["external-provisioner.volume.kubernetes.io/finalizer"]}}`), metav1.PatchOptions{})
	e.must(err)
	e.onNode("obsolete", class, key, "a", finalizer)

	p := e.run("nodecontroller", append(slices.Clone(quick), "--kubeconfig", kubeconfig, "--leader-election", "--http-endpoint=127.0.0.1:0",
		"--secure-metrics-server",
		"--topology-node-key", key, "--node-finalizer-mode=manage", "--node-finalizer-wait-for-others=false", "--node-delete-grace=0s",
		"--node-cleanup=volumes", "--node-cleanup-scope=all", "--node-cleanup-max-fraction=1",
		"--pv-release-grace=0s",
		"--pvc-finalizer-mode=strip", "--pvc-obsolete-finalizers", finalizer,
		"--enable-webhooks", "--webhook-addr=127.0.0.1:0")...)

	e.grows("growing", e.nodes[0])
	e.eventually("the obsolete finalizer is removed", func(ctx context.Context) error {
		claim, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Get(ctx, "obsolete", metav1.GetOptions{})
		if err == nil && slices.Contains(claim.Finalizers, finalizer) {
			err = fmt.Errorf("finalizers %v", claim.Finalizers)
		}
		return err
	})
	e.eventually("the node has the finalizer", func(ctx context.Context) error {
		n, err := e.client.CoreV1().Nodes().Get(ctx, e.nodes[1], metav1.GetOptions{})
		if err == nil && len(n.Finalizers) == 0 {
			err = errors.New("it has none")
		}
		return err
	})
	e.must(e.client.CoreV1().Nodes().Delete(ctx, e.nodes[1], metav1.DeleteOptions{}))
	e.must(e.client.StorageV1().CSINodes().Delete(ctx, e.nodes[1], metav1.DeleteOptions{}))
	e.approved("b") // its value of the topology key
	for what, get := range map[string]func(context.Context) error{
		"the node": func(ctx context.Context) error {
			_, err := e.client.CoreV1().Nodes().Get(ctx, e.nodes[1], metav1.GetOptions{})
			return err
		},
		"its volume": func(ctx context.Context) error {
			_, err := e.client.CoreV1().PersistentVolumes().Get(ctx, e.ns+"-lost", metav1.GetOptions{})
			return err
		},
	} {
		e.gone(what, get)
	}
	e.asksForMetrics(p)
	e.usesAll(granted, used, refused, func(p permission) bool {
		// A CSIDriver is read for an event about a problem.
		return p.verb == "list" || p == permission{"patch", "", "events"} || p == permission{"get", "storage.k8s.io", "csidrivers"}
	})
}

// approved approves the clean-up of a lost node, by its value of the topology key, after the controller has recorded
// it, so that there is no grace to wait for.
func (e *env) approved(host string) {
	e.t.Helper()
	e.missing(host)
	e.must(e.approve(e.t.Context(), host))
}

// gone waits until get finds nothing.
func (e *env) gone(what string, get func(context.Context) error) {
	e.t.Helper()
	e.eventually(what+" was deleted", func(ctx context.Context) error {
		err := get(ctx)
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(err, errors.New("it is there"))
	})
}

// onNode makes a claim, and a volume for it in a zone, as the provisioner would.
func (e *env) onNode(name, class, key, zone string, finalizers ...string) {
	e.t.Helper()
	claim := newClaim(name, class)
	claim.Finalizers, claim.Spec.VolumeName = finalizers, e.ns+"-"+name
	e.make(claim)
	_, err := e.client.CoreV1().PersistentVolumes().Create(e.t.Context(), &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: e.ns + "-" + name,
			Annotations: map[string]string{storagehelpers.AnnDynamicallyProvisioned: e.plugin.Name()}},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: claim.Spec.Resources.Requests, AccessModes: claim.Spec.AccessModes, StorageClassName: class,
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: e.plugin.Name(),
				VolumeHandle: name}},
			ClaimRef: &corev1.ObjectReference{Namespace: e.ns, Name: name},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: corev1.NodeSelectorOpIn, Values: []string{zone}}},
			}}}},
		},
	}, metav1.CreateOptions{})
	e.must(err)
	e.bound(name)
}

// asksForMetrics requests the metrics of p with a token that is not authorized.
func (e *env) asksForMetrics(p *process) {
	e.t.Helper()
	account, err := e.client.CoreV1().ServiceAccounts(e.ns).Create(e.t.Context(),
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "curious"}}, metav1.CreateOptions{})
	e.must(err)
	token, err := e.client.CoreV1().ServiceAccounts(e.ns).CreateToken(e.t.Context(), account.Name, &authenticationv1.TokenRequest{},
		metav1.CreateOptions{})
	e.must(err)
	p.says("Serving metrics and health")
	address := regexp.MustCompile(`Serving metrics and health.*"address": "([^"]+)"`).FindStringSubmatch(p.logged())
	if address == nil {
		e.t.Fatal("it does not say where it serves")
	}
	request, err := http.NewRequestWithContext(e.t.Context(), http.MethodGet, "https://"+address[1]+"/metrics", nil)
	e.must(err)
	request.Header.Set("Authorization", "Bearer "+token.Status.Token)
	response, err := selfSigned.Do(request)
	e.must(err)
	defer response.Body.Close()
	if response.StatusCode != http.StatusForbidden {
		e.t.Errorf("a request without permission for metrics was answered with %d", response.StatusCode)
	}
}
