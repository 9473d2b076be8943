// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

func annotationsPatch(a map[string]any) []byte {
	data, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": a}})
	if err != nil {
		panic(err)
	}
	return data
}

// class creates a StorageClass of the driver.
func (f *fixture) class(name string, annotations map[string]string) {
	f.Helper()
	_, err := f.client.StorageV1().StorageClasses().Create(f.Context(), &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: f.name(name), Annotations: annotations}, Provisioner: f.driver,
	}, metav1.CreateOptions{})
	f.must(err)
}

// says sets the opt-in annotation of an object: enabled, disabled or nil.
func (f *fixture) says(kind, name string, value any) {
	f.Helper()
	patch := annotationsPatch(map[string]any{f.optOut: value})
	var err error
	switch kind {
	case "StorageClass":
		_, err = f.client.StorageV1().StorageClasses().Patch(f.Context(), f.name(name), types.MergePatchType, patch, metav1.PatchOptions{})
	case "Node":
		_, err = f.client.CoreV1().Nodes().Patch(f.Context(), f.name(name), types.MergePatchType, patch, metav1.PatchOptions{})
	case "Namespace":
		_, err = f.client.CoreV1().Namespaces().Patch(f.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{})
	case "PersistentVolumeClaim":
		_, err = f.client.CoreV1().PersistentVolumeClaims(f.ns).Patch(f.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{})
	case "PersistentVolume":
		_, err = f.client.CoreV1().PersistentVolumes().Patch(f.Context(), f.name(name), types.MergePatchType, patch, metav1.PatchOptions{})
	}
	f.must(err)
}

// node creates a ready node with the driver on it.
func (f *fixture) node(name string, finalizers ...string) {
	f.Helper()
	f.nodeAs(name, name, "")
	if len(finalizers) > 0 {
		f.patchNode(name, fmt.Sprintf(`{"metadata":{"finalizers":["%s"]}}`, strings.Join(finalizers, `","`)))
	}
}

// nodeAs creates a ready node with a label value and an ID of the driver; empty means the default of
// [kubetest.CreateNode].
func (f *fixture) nodeAs(name, value, id string) {
	f.Helper()
	spec := kubetest.NodeSpec{
		Name: f.name(name), Labels: map[string]string{f.key: f.name(value)}, Driver: f.driver, TopologyKeys: []string{f.key},
	}
	if id != "" {
		spec.NodeID = f.name(id)
	}
	f.must(kubetest.CreateNode(f.Context(), f.client, spec))
}

func (f *fixture) patchNode(name, patch string, subresources ...string) {
	f.Helper()
	_, err := f.client.CoreV1().Nodes().Patch(f.Context(), f.name(name), types.MergePatchType, []byte(patch), metav1.PatchOptions{},
		subresources...)
	f.must(err)
}

// label sets the topology label of a node; "" removes it.
func (f *fixture) label(node, value string) {
	f.Helper()
	text := "null"
	if value != "" {
		text = fmt.Sprintf("%q", f.name(value))
	}
	f.patchNode(node, fmt.Sprintf(`{"metadata":{"labels":{%q:%s}}}`, f.key, text))
}

// unready sets the Ready condition of a node to Unknown.
func (f *fixture) unready(name string) {
	f.Helper()
	f.patchNode(name, `{"status":{"conditions":[{"type":"Ready","status":"Unknown","lastTransitionTime":"2020-01-01T00:00:00Z"}]}}`,
		"status")
}

// registered has the kubelet report the driver with an ID on a node; "" removes the driver.
func (f *fixture) registered(node, id string) {
	f.Helper()
	drivers := "[]"
	if id != "" {
		drivers = fmt.Sprintf(`[{"name":%q,"nodeID":%q,"topologyKeys":[%q]}]`, f.driver, f.name(id), f.key)
	}
	_, err := f.client.StorageV1().CSINodes().Patch(f.Context(), f.name(node), types.MergePatchType,
		[]byte(`{"spec":{"drivers":`+drivers+`}}`),
		metav1.PatchOptions{})
	f.must(err)
}

// deleteNode deletes a Node, and its CSINode as the garbage collector does.
func (f *fixture) deleteNode(name string) {
	f.Helper()
	f.deleteNodes(name)
}

// deleteNodes deletes all the Nodes before the first CSINode. A node is lost without both.
func (f *fixture) deleteNodes(names ...string) {
	f.Helper()
	for _, n := range names {
		f.must(f.client.CoreV1().Nodes().Delete(f.Context(), f.name(n), metav1.DeleteOptions{}))
	}
	for _, n := range names {
		f.must(f.client.StorageV1().CSINodes().Delete(f.Context(), f.name(n), metav1.DeleteOptions{}))
	}
}

// nodeDeleted waits until no finalizer keeps a node.
func (f *fixture) nodeDeleted(name string) {
	f.Helper()
	f.eventually("node "+name+" is deleted", func(ctx context.Context) error {
		node, err := f.client.CoreV1().Nodes().Get(ctx, f.name(name), metav1.GetOptions{})
		if kube.IsNotFound(err) {
			return nil
		}
		if err == nil {
			err = fmt.Errorf("it has finalizers %v", node.Finalizers)
		}
		return err
	})
}

// finalizers waits until a node has exactly these.
func (f *fixture) finalizers(name string, want ...string) {
	f.Helper()
	f.eventually(fmt.Sprintf("node %s has finalizers %v", name, want), func(ctx context.Context) error {
		node, err := f.client.CoreV1().Nodes().Get(ctx, f.name(name), metav1.GetOptions{})
		if err == nil && !slices.Equal(node.Finalizers, want) {
			err = fmt.Errorf("it has %v", node.Finalizers)
		}
		return err
	})
}

// volume creates a volume that is accessible from the named nodes only, in phase Available.
func (f *fixture) volume(name string, nodes []string, change func(*corev1.PersistentVolume)) *corev1.PersistentVolume {
	f.Helper()
	values := make([]string, len(nodes))
	for i, n := range nodes {
		values[i] = f.name(n)
	}
	pv := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{
			Name: f.name(name), Annotations: map[string]string{storagehelpers.AnnDynamicallyProvisioned: f.driver},
		},
		Spec: corev1.PersistentVolumeSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: f.name("c"),
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
				Driver: f.driver, VolumeHandle: f.name(name),
			}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: f.key, Operator: corev1.NodeSelectorOpIn, Values: values}},
			}}}},
		},
	}
	if change != nil {
		change(pv)
	}
	pv, err := f.client.CoreV1().PersistentVolumes().Create(f.Context(), pv, metav1.CreateOptions{})
	f.must(err)
	return pv
}

func (f *fixture) phase(pv *corev1.PersistentVolume, phase corev1.PersistentVolumePhase) *corev1.PersistentVolume {
	f.Helper()
	return kubetest.SetStatus(f, f.client.CoreV1().PersistentVolumes(), pv.Name, corev1.PersistentVolumeStatus{Phase: phase})
}

// claimIn creates a claim of class c in a namespace.
func (f *fixture) claimIn(ns, name string, change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	f.Helper()
	pvc := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{}, Finalizers: []string{protectionOfClaims}},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: ptr.To(f.name("c")),
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
		},
	}
	if change != nil {
		change(pvc)
	}
	pvc, err := f.client.CoreV1().PersistentVolumeClaims(ns).Create(f.Context(), pvc, metav1.CreateOptions{})
	f.must(err)
	return pvc
}

func (f *fixture) claim(name string, change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	f.Helper()
	return f.claimIn(f.ns, name, change)
}

// selecting creates an unbound claim for which the scheduler has selected a node.
func (f *fixture) selecting(name, node string) *corev1.PersistentVolumeClaim {
	f.Helper()
	return f.claim(name, func(pvc *corev1.PersistentVolumeClaim) {
		pvc.Annotations[storagehelpers.AnnSelectedNode] = f.name(node)
	})
}

// bound creates volume "pv-NAME" on a node and claim NAME, bound to each other.
func (f *fixture) bound(name, node string) (*corev1.PersistentVolume, *corev1.PersistentVolumeClaim) {
	f.Helper()
	return f.boundTo(name, []string{node}, nil, nil)
}

func (f *fixture) boundTo(name string, nodes []string, changeVolume func(*corev1.PersistentVolume),
	changeClaim func(*corev1.PersistentVolumeClaim),
) (*corev1.PersistentVolume, *corev1.PersistentVolumeClaim) {
	f.Helper()
	return f.boundIn(f.ns, name, nodes, changeVolume, changeClaim)
}

// boundIn is [fixture.boundTo] for a claim in another namespace.
func (f *fixture) boundIn(ns, name string, nodes []string, changeVolume func(*corev1.PersistentVolume),
	changeClaim func(*corev1.PersistentVolumeClaim),
) (*corev1.PersistentVolume, *corev1.PersistentVolumeClaim) {
	f.Helper()
	pvc := f.claimIn(ns, name, func(pvc *corev1.PersistentVolumeClaim) {
		pvc.Spec.VolumeName = f.name("pv-" + name)
		pvc.Annotations[storagehelpers.AnnStorageProvisioner] = f.driver
		if changeClaim != nil {
			changeClaim(pvc)
		}
	})
	pvc = kubetest.SetStatus(f, f.client.CoreV1().PersistentVolumeClaims(ns), name,
		corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound})
	pv := f.volume("pv-"+name, nodes, func(pv *corev1.PersistentVolume) {
		pv.Spec.ClaimRef = &corev1.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: ns, Name: name, UID: pvc.UID}
		if changeVolume != nil {
			changeVolume(pv)
		}
	})
	return f.phase(pv, corev1.VolumeBound), pvc
}

// released creates volume "pv-NAME" of a node, in phase Released, whose claim was deleted.
func (f *fixture) released(name, node string, change func(*corev1.PersistentVolume)) *corev1.PersistentVolume {
	f.Helper()
	pv := f.volume("pv-"+name, []string{node}, func(pv *corev1.PersistentVolume) {
		pv.Spec.ClaimRef = &corev1.ObjectReference{Kind: "PersistentVolumeClaim", Namespace: f.ns, Name: name, UID: "old"}
		pv.Finalizers = []string{provisionerFinalizer, protectionOfVolumes}
		if change != nil {
			change(pv)
		}
	})
	return f.phase(pv, corev1.VolumeReleased)
}

// refusing creates a namespace that has opted out.
func (f *fixture) refusing() string {
	f.Helper()
	ns := kubetest.Namespace(f.T, f.cp)
	f.says("Namespace", ns, disabled)
	return ns
}

func retained(pv *corev1.PersistentVolume) {
	pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
}

// pod creates a pod that uses a claim; node is the full name of the node on which it runs.
func (f *fixture) pod(name, claim, node string) *corev1.Pod {
	f.Helper()
	return f.podWith(name, node, corev1.VolumeSource{
		PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim},
	})
}

func (f *fixture) podWith(name, node string, source corev1.VolumeSource) *corev1.Pod {
	f.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{
		NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "i"}},
		Volumes: []corev1.Volume{{Name: "v", VolumeSource: source}},
	}}
	pod, err := f.client.CoreV1().Pods(f.ns).Create(f.Context(), pod, metav1.CreateOptions{})
	f.must(err)
	if node != "" {
		pod = f.podPhase(name, corev1.PodRunning)
	}
	return pod
}

func (f *fixture) podPhase(name string, phase corev1.PodPhase) *corev1.Pod {
	f.Helper()
	pod, err := f.client.CoreV1().Pods(f.ns).Patch(f.Context(), name, types.MergePatchType,
		fmt.Appendf(nil, `{"status":{"phase":%q}}`, phase),
		metav1.PatchOptions{}, "status")
	f.must(err)
	return pod
}

func (f *fixture) getVolume(name string) *corev1.PersistentVolume {
	f.Helper()
	pv, err := f.client.CoreV1().PersistentVolumes().Get(f.Context(), f.name(name), metav1.GetOptions{})
	f.must(err)
	return pv
}

func (f *fixture) getClaim(name string) *corev1.PersistentVolumeClaim {
	f.Helper()
	pvc, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Get(f.Context(), name, metav1.GetOptions{})
	f.must(err)
	return pvc
}

// untilVolume waits until check accepts a volume; nil means that it was deleted.
func (f *fixture) untilVolume(name, what string, check func(pv *corev1.PersistentVolume) bool) {
	f.Helper()
	f.eventually(name+" "+what, func(ctx context.Context) error {
		found, err := f.client.CoreV1().PersistentVolumes().Get(ctx, f.name(name), metav1.GetOptions{})
		if kube.IsNotFound(err) {
			found = nil
		} else if err != nil {
			return err
		}
		if !check(found) {
			return fmt.Errorf("it is %+v", found)
		}
		return nil
	})
}

// claimDeleted waits until the API server has accepted the deletion of a claim.
func (f *fixture) claimDeleted(name string) {
	f.Helper()
	f.claimDeletedIn(f.ns, name)
}

func (f *fixture) claimDeletedIn(ns, name string) {
	f.Helper()
	f.eventually("claim "+name+" is deleted", func(ctx context.Context) error {
		pvc, err := f.client.CoreV1().PersistentVolumeClaims(ns).Get(ctx, name, metav1.GetOptions{})
		if kube.IsNotFound(err) {
			return nil
		}
		if err == nil && pvc.DeletionTimestamp == nil {
			err = errors.New("it exists")
		}
		return err
	})
}

// removeClaim removes a claim at once, with its finalizers.
func (f *fixture) removeClaim(name string) {
	f.Helper()
	claims := f.client.CoreV1().PersistentVolumeClaims(f.ns)
	_, err := claims.Patch(f.Context(), name, types.MergePatchType, []byte(noFinalizers), metav1.PatchOptions{})
	f.must(err)
	if err := claims.Delete(f.Context(), name, metav1.DeleteOptions{}); !kube.IsNotFound(err) {
		f.must(err)
	}
}

// removeVolume removes a volume at once, with its finalizers.
func (f *fixture) removeVolume(name string) {
	f.Helper()
	volumes := f.client.CoreV1().PersistentVolumes()
	f.must(volumes.Delete(f.Context(), f.name(name), metav1.DeleteOptions{}))
	_, err := volumes.Patch(f.Context(), f.name(name), types.MergePatchType, []byte(noFinalizers), metav1.PatchOptions{})
	if !kube.IsNotFound(err) {
		f.must(err)
	}
}

// release removes a claim that is being deleted, and sets its volume to Released, as Kubernetes does.
func (f *fixture) release(name string) {
	f.Helper()
	_, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Patch(f.Context(), name, types.MergePatchType, []byte(noFinalizers),
		metav1.PatchOptions{})
	f.must(err)
	f.phase(f.getVolume("pv-"+name), corev1.VolumeReleased)
}

// untouched checks that objects were neither changed nor replaced.
func (f *fixture) untouched(objects ...metav1.Object) {
	f.Helper()
	for _, was := range objects {
		var is metav1.Object
		var err error
		ctx, name, ns := f.Context(), was.GetName(), was.GetNamespace()
		switch was.(type) {
		case *corev1.PersistentVolume:
			is, err = f.client.CoreV1().PersistentVolumes().Get(ctx, name, metav1.GetOptions{})
		case *corev1.PersistentVolumeClaim:
			is, err = f.client.CoreV1().PersistentVolumeClaims(ns).Get(ctx, name, metav1.GetOptions{})
		case *corev1.Pod:
			is, err = f.client.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{})
		case *corev1.Node:
			is, err = f.client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		default:
			f.Fatalf("%T is not supported", was)
		}
		if err != nil {
			f.Errorf("%T %s: %v", was, name, err)
		} else if is.GetUID() != was.GetUID() || is.GetResourceVersion() != was.GetResourceVersion() {
			f.Errorf("%T %s was changed: %+v", was, name, is)
		}
	}
}

// records returns the records in the ConfigMap, by value.
func (f *fixture) records(ctx context.Context) (map[string]LostNode, error) {
	cm, err := apiServer{client: f.client, timeout: time.Minute}.configMap(ctx, f.ns, f.driver)
	return parseRecords(cm).Lost, err
}

// untilRecord waits until check accepts the record of a lost node; nil means that there is none.
func (f *fixture) untilRecord(node, what string, check func(n *LostNode) bool) (found LostNode) {
	f.Helper()
	f.eventually("the record of "+node+" "+what, func(ctx context.Context) error {
		all, err := f.records(ctx)
		if err != nil {
			return err
		}
		n, ok := all[f.name(node)]
		if found = n; !ok && !check(nil) || ok && !check(&n) {
			return fmt.Errorf("the records are %+v", all)
		}
		return nil
	})
	return found
}

// missing waits until the API server has confirmed that a node does not exist.
func (f *fixture) missing(node string) LostNode {
	f.Helper()
	return f.untilRecord(node, "has a clock", func(n *LostNode) bool { return n != nil && !n.Since.IsZero() })
}

func (f *fixture) held(node string) LostNode {
	f.Helper()
	return f.untilRecord(node, "is held", func(n *LostNode) bool { return n != nil && n.Held == HeldByBreaker })
}

func (f *fixture) notHeld(node string) {
	f.Helper()
	f.untilRecord(node, "is not held", func(n *LostNode) bool { return n == nil || n.Held == "" })
}

func (f *fixture) noRecord(node string) {
	f.Helper()
	f.untilRecord(node, "does not exist", func(n *LostNode) bool { return n == nil || n.State() == RecordReturned })
}

func (f *fixture) optedOut(node string) {
	f.Helper()
	f.untilRecord(node, "has the opt-out", func(n *LostNode) bool { return n != nil && n.OptedOut })
}

// changeRecords updates the ConfigMap, which it creates if needed, as an administrator would.
func (f *fixture) changeRecords(change func(cm *corev1.ConfigMap)) {
	f.Helper()
	cms := f.client.CoreV1().ConfigMaps(f.ns)
	f.eventually("the ConfigMap is changed", func(ctx context.Context) error {
		cm, err := cms.Get(ctx, ConfigMapName(f.driver), metav1.GetOptions{})
		exists := err == nil
		if err != nil && !kube.IsNotFound(err) {
			return err
		}
		if !exists {
			cm = &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: ConfigMapName(f.driver)}}
		}
		if cm.Annotations == nil {
			cm.Annotations = map[string]string{}
		}
		if cm.Data == nil {
			cm.Data = map[string]string{}
		}
		change(cm)
		if exists {
			_, err = cms.Update(ctx, cm, metav1.UpdateOptions{})
		} else {
			_, err = cms.Create(ctx, cm, metav1.CreateOptions{})
		}
		return err
	})
}

// approve lets an administrator approve the clean-up of nodes, by their short names.
func (f *fixture) approve(nodes ...string) {
	f.Helper()
	names := make([]string, len(nodes))
	for i, n := range nodes {
		names[i] = f.name(n)
	}
	f.changeRecords(func(cm *corev1.ConfigMap) { cm.Annotations[AnnotationApprove] = strings.Join(names, ",") })
}

// event waits for an event about an object whose message contains part.
func (f *fixture) event(kind, name, reason, part string) {
	f.Helper()
	f.eventually(fmt.Sprintf("event %s with %q about %s %s", reason, part, kind, name), func(context.Context) error {
		found := f.messages(kind, name, reason)
		if !slices.ContainsFunc(found, func(m string) bool { return strings.Contains(m, part) }) {
			return fmt.Errorf("there is only %q", found)
		}
		return nil
	})
}

// said returns the events of the driver; empty kind, name or reason means any.
func (f *fixture) said(kind, name, reason string) (found []corev1.Event) {
	f.Helper()
	list, err := f.client.CoreV1().Events("").List(f.Context(), metav1.ListOptions{})
	f.must(err)
	for _, e := range list.Items {
		if e.Source.Component == f.driver && (kind == "" || e.InvolvedObject.Kind == kind) &&
			(name == "" || e.InvolvedObject.Name == name) && (reason == "" || e.Reason == reason) {
			found = append(found, e)
		}
	}
	return found
}

func (f *fixture) messages(kind, name, reason string) (messages []string) {
	f.Helper()
	for _, e := range f.said(kind, name, reason) {
		messages = append(messages, e.Message)
	}
	return messages
}

// times returns how often such an event was sent: the same message again is one object with a count.
func (f *fixture) times(kind, name, reason string) (n int32) {
	f.Helper()
	for _, e := range f.said(kind, name, reason) {
		n += max(e.Count, 1)
	}
	return n
}

// silent checks that the controller has sent no event. It sends one first, after which all earlier ones
// are stored.
func (f *fixture) silent() {
	f.Helper()
	const reason = "ScenarioMarker"
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: f.ns}, TypeMeta: metav1.TypeMeta{Kind: "Namespace", APIVersion: "v1"}}
	f.process.events.Event(ns, corev1.EventTypeNormal, reason, "All earlier events are stored.")
	f.event("Namespace", f.ns, reason, "")
	for _, e := range f.said("", "", "") {
		if e.Reason != reason {
			f.Errorf("event about %s %s: %s: %s", e.InvolvedObject.Kind, e.InvolvedObject.Name, e.Reason, e.Message)
		}
	}
}

// in returns the time in the format of annotations.
func in(d time.Duration) string { return time.Now().Add(d).UTC().Format(time.RFC3339) }
