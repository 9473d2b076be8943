// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

// scene is a namespace, and a driver of its name, in which a test builds its situation.
type scene struct {
	t      *testing.T
	cp     *kubetest.ControlPlane
	client kubernetes.Interface
	ns     string
	driver string
}

func newScene(t *testing.T) *scene {
	t.Helper()
	cp := kubetest.Get(t, kubetest.Real())
	ns := kubetest.Namespace(t, cp)
	return &scene{t: t, cp: cp, client: cp.Client(), ns: ns, driver: ns + ".example.com"}
}

// must is v, unless the API server has refused it.
func must[T any](s *scene, v T, err error) T {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
	return v
}

func clientsOf(t *testing.T, cfg *rest.Config) Clients {
	t.Helper()
	c, err := apiread.NewClients(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return Clients{Clients: c}
}

// explain is the text about an object, as the administrator gets it.
func (s *scene) explain(kind, name string) string {
	s.t.Helper()
	return s.text(s.cp.Config(), Request{Kind: kind, Namespace: s.ns, Name: name})
}

func (s *scene) text(cfg *rest.Config, request Request) string {
	s.t.Helper()
	report, err := Explain(s.t.Context(), clientsOf(s.t, cfg), request)
	if err != nil {
		s.t.Fatal(err)
	}
	return report.Text()
}

// class makes a StorageClass of the driver and returns its name.
func (s *scene) class(change func(*storagev1.StorageClass)) string {
	s.t.Helper()
	c := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: s.ns + "-class"}, Provisioner: s.driver}
	if change != nil {
		change(c)
	}
	c, err := s.client.StorageV1().StorageClasses().Create(s.t.Context(), c, metav1.CreateOptions{})
	return must(s, c, err).Name
}

func late(c *storagev1.StorageClass) {
	c.VolumeBindingMode = ptr.To(storagev1.VolumeBindingWaitForFirstConsumer)
}

// claim makes the claim "data".
func (s *scene) claim(class string, change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	s.t.Helper()
	c := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "data", Annotations: map[string]string{"volume.kubernetes.io/storage-provisioner": s.driver}},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: &class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("5Gi")}},
		},
	}
	if change != nil {
		change(c)
	}
	c, err := s.client.CoreV1().PersistentVolumeClaims(s.ns).Create(s.t.Context(), c, metav1.CreateOptions{})
	return must(s, c, err)
}

// selected has the scheduler have chosen node.
func selected(node string) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) { c.Annotations["volume.kubernetes.io/selected-node"] = node }
}

// phase writes the phase of a claim, as kube-controller-manager does.
func (s *scene) phase(c *corev1.PersistentVolumeClaim, phase corev1.PersistentVolumeClaimPhase) {
	s.t.Helper()
	c.Status.Phase = phase
	c, err := s.client.CoreV1().PersistentVolumeClaims(s.ns).UpdateStatus(s.t.Context(), c, metav1.UpdateOptions{})
	must(s, c, err)
}

// volume makes a PersistentVolume in a phase and returns its name.
func (s *scene) volume(phase corev1.PersistentVolumePhase, change func(*corev1.PersistentVolume)) string {
	s.t.Helper()
	pv := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: s.ns + "-pv", Annotations: map[string]string{"pv.kubernetes.io/provisioned-by": s.driver}},
		Spec: corev1.PersistentVolumeSpec{
			AccessModes:                   []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("5Gi")},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: s.driver,
				VolumeHandle: "vol-1"}},
		},
	}
	if change != nil {
		change(pv)
	}
	pv, err := s.client.CoreV1().PersistentVolumes().Create(s.t.Context(), pv, metav1.CreateOptions{})
	must(s, pv, err).Status.Phase = phase
	pv, err = s.client.CoreV1().PersistentVolumes().UpdateStatus(s.t.Context(), pv, metav1.UpdateOptions{})
	return must(s, pv, err).Name
}

// boundTo binds a volume to a claim.
func boundTo(claim *corev1.PersistentVolumeClaim) func(*corev1.PersistentVolume) {
	return func(pv *corev1.PersistentVolume) {
		pv.Spec.ClaimRef = &corev1.ObjectReference{Kind: "PersistentVolumeClaim", Namespace: claim.Namespace, Name: claim.Name,
			UID: claim.UID}
	}
}

// boundVolume makes the claim "data" and a PersistentVolume that is bound to it, and returns the name of the PersistentVolume.
func (s *scene) boundVolume(change func(*corev1.PersistentVolume)) string {
	s.t.Helper()
	c := s.claim(s.class(nil), func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = s.ns + "-pv" })
	s.phase(c, corev1.ClaimBound)
	return s.volume(corev1.VolumeBound, func(pv *corev1.PersistentVolume) {
		boundTo(c)(pv)
		if change != nil {
			change(pv)
		}
	})
}

// onHost has a volume live on the nodes whose label host has a value.
func (s *scene) onHost(pv *corev1.PersistentVolume, host string) {
	pv.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: s.driver + "/host", Operator: corev1.NodeSelectorOpIn,
			Values: []string{host}}},
	}}}}
}

// lost creates the record of a lost node.
func (s *scene) lost(value, record string) {
	s.t.Helper()
	cm := &corev1.ConfigMap{Data: map[string]string{value: record}, ObjectMeta: metav1.ObjectMeta{
		Name: nodecleanup.ConfigMapName(s.driver), Labels: map[string]string{nodecleanup.LabelDriver: s.driver}}}
	if _, err := s.client.CoreV1().ConfigMaps(s.ns).Create(s.t.Context(), cm, metav1.CreateOptions{}); err != nil {
		s.t.Fatal(err)
	}
}

// node makes a node and its CSINode and returns its name.
func (s *scene) node(change func(*kubetest.NodeSpec)) string {
	s.t.Helper()
	spec := kubetest.NodeSpec{Name: s.ns + "-node", Driver: s.driver, NodeID: "id-1", TopologyKeys: []string{s.driver + "/host"},
		Labels: map[string]string{s.driver + "/host": s.ns + "-node"}}
	if change != nil {
		change(&spec)
	}
	if err := kubetest.CreateNode(s.t.Context(), s.client, spec); err != nil {
		s.t.Fatal(err)
	}
	return spec.Name
}

// attachment makes a VolumeAttachment with a status and returns its name.
func (s *scene) attachment(volume, node string, status storagev1.VolumeAttachmentStatus, finalizers ...string) string {
	s.t.Helper()
	va := &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: s.ns + "-va", Finalizers: finalizers},
		Spec: storagev1.VolumeAttachmentSpec{
			Attacher: s.driver, NodeName: node, Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &volume},
		}}
	va, err := s.client.StorageV1().VolumeAttachments().Create(s.t.Context(), va, metav1.CreateOptions{})
	must(s, va, err).Status = status
	va, err = s.client.StorageV1().VolumeAttachments().UpdateStatus(s.t.Context(), va, metav1.UpdateOptions{})
	return must(s, va, err).Name
}

// failed is an error of an attacher, some time ago.
func failed(message string, before time.Duration) *storagev1.VolumeError {
	return &storagev1.VolumeError{Message: message, Time: metav1.NewTime(time.Now().Add(-before))}
}

// lease is held by a pod, written by a program, and was renewed some time ago.
func (s *scene) lease(name, holder, program string, before time.Duration) {
	s.t.Helper()
	l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: coordinationv1.LeaseSpec{
		HolderIdentity: &holder, LeaseDurationSeconds: ptr.To[int32](3600), RenewTime: ptr.To(metav1.NewMicroTime(time.Now().Add(-before))),
	}}
	l, err := s.client.CoordinationV1().Leases(s.ns).Create(s.t.Context(), l, metav1.CreateOptions{FieldManager: program})
	must(s, l, err)
}

// event is about obj, some time ago.
func (s *scene) event(namespace string, about corev1.ObjectReference, kind, reason, message string, times int32, before time.Duration) {
	s.t.Helper()
	e := &corev1.Event{ObjectMeta: metav1.ObjectMeta{GenerateName: "e-"}, InvolvedObject: about, Type: kind, Reason: reason,
		Message: message, Count: times,
		LastTimestamp: metav1.NewTime(time.Now().Add(-before))}
	e, err := s.client.CoreV1().Events(namespace).Create(s.t.Context(), e, metav1.CreateOptions{})
	must(s, e, err)
}

func aboutClaim(c *corev1.PersistentVolumeClaim) corev1.ObjectReference {
	return corev1.ObjectReference{Kind: KindClaim, Namespace: c.Namespace, Name: c.Name, UID: c.UID}
}

// object makes one of a kind that has no types here, with its status.
func (s *scene) object(resource schema.GroupVersionResource, namespace string, object map[string]any) {
	s.t.Helper()
	c, err := dynamic.NewForConfig(s.cp.Config())
	if err != nil {
		s.t.Fatal(err)
	}
	status := object["status"]
	made, err := c.Resource(resource).Namespace(namespace).Create(s.t.Context(), &unstructured.Unstructured{Object: object},
		metav1.CreateOptions{})
	if must(s, made, err); status != nil {
		made.Object["status"] = status
		made, err = c.Resource(resource).Namespace(namespace).UpdateStatus(s.t.Context(), made, metav1.UpdateOptions{})
		must(s, made, err)
	}
}

// pod makes a pod that uses the claim "data", on a node or none.
func (s *scene) pod(node string) {
	s.t.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "app"}, Spec: corev1.PodSpec{
		NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "app:dev"}},
		Volumes: []corev1.Volume{{Name: "v",
			VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}}},
	}}
	p, err := s.client.CoreV1().Pods(s.ns).Create(s.t.Context(), p, metav1.CreateOptions{})
	must(s, p, err)
}

// says fails the test when text lacks one of the sentences; SCENE and DRIVER stand for the
// names of the namespace and the driver.
func (s *scene) says(text string, sentences ...string) {
	s.t.Helper()
	for _, want := range sentences {
		want = strings.NewReplacer("DRIVER", s.driver, "SCENE", s.ns).Replace(want)
		if !strings.Contains(text, want) {
			s.t.Errorf("missing: %s", want)
		}
	}
	s.t.Logf("output:\n%s", text)
}

func ctxOf(s *scene) context.Context { return s.t.Context() }
