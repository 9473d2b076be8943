// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	storagehelpers "k8s.io/component-helpers/storage/volume"
)

// initial sets *p to value if it is the zero value.
func initial[T comparable](p *T, value T) {
	var zero T
	if *p == zero {
		*p = value
	}
}

// pointer sets *p to a pointer to value if it is nil.
func pointer[T any](p **T, value T) {
	if *p == nil {
		*p = &value
	}
}

func defaultNamespace(ns *corev1.Namespace) {
	if ns.Name != "" {
		metav1.SetMetaDataLabel(&ns.ObjectMeta, corev1.LabelMetadataName, ns.Name)
	}
}

func prepareNamespace(ns *corev1.Namespace) {
	ns.Status = corev1.NamespaceStatus{Phase: corev1.NamespaceActive}
	if !slices.Contains(ns.Spec.Finalizers, corev1.FinalizerKubernetes) {
		ns.Spec.Finalizers = append(ns.Spec.Finalizers, corev1.FinalizerKubernetes)
	}
	defaultNamespace(ns)
}

// addNamespace creates a Namespace.
func (s *Server) addNamespace(name string) {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, UID: s.uid(), CreationTimestamp: s.clock.now()}}
	prepareNamespace(ns)
	s.commit(s.resources[corev1.SchemeGroupVersion.WithResource("namespaces")], name, nil, ns)
}

// checkNamespace returns an error if objects cannot be created in the namespace of c.
func (s *Server) checkNamespace(c *call, name string) error {
	if !c.res.namespaced {
		return nil
	}
	obj, ok := s.objects[s.resources[corev1.SchemeGroupVersion.WithResource("namespaces")]][c.Namespace]
	if !ok {
		return apierrors.NewNotFound(corev1.Resource("namespaces"), c.Namespace)
	}
	if ns := obj.(*corev1.Namespace); ns.DeletionTimestamp == nil && ns.Status.Phase != corev1.NamespaceTerminating {
		return nil
	}
	err := apierrors.NewForbidden(c.res.gvr.GroupResource(), name,
		fmt.Errorf("unable to create new content in namespace %s because it is being terminated", c.Namespace))
	err.ErrStatus.Details.Causes = []metav1.StatusCause{{
		Type: corev1.NamespaceTerminatingCause, Field: "metadata.namespace",
		Message: fmt.Sprintf("namespace %s is being terminated", c.Namespace),
	}}
	return err
}

func defaultNode(n *corev1.Node) {
	if n.Status.Allocatable == nil {
		n.Status.Allocatable = n.Status.Capacity.DeepCopy()
	}
}

func defaultPod(pod *corev1.Pod) {
	spec := &pod.Spec
	initial(&spec.DNSPolicy, corev1.DNSClusterFirst)
	initial(&spec.RestartPolicy, corev1.RestartPolicyAlways)
	initial(&spec.SchedulerName, corev1.DefaultSchedulerName)
	pointer(&spec.SecurityContext, corev1.PodSecurityContext{})
	pointer(&spec.TerminationGracePeriodSeconds, corev1.DefaultTerminationGracePeriodSeconds)
	pointer(&spec.EnableServiceLinks, corev1.DefaultEnableServiceLinks)
	for _, containers := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range containers {
			defaultContainer(&containers[i])
		}
	}
	for i := range spec.Volumes {
		v := &spec.Volumes[i]
		if v.VolumeSource == (corev1.VolumeSource{}) {
			v.EmptyDir = &corev1.EmptyDirVolumeSource{}
		}
		if v.Ephemeral != nil && v.Ephemeral.VolumeClaimTemplate != nil {
			pointer(&v.Ephemeral.VolumeClaimTemplate.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
		}
	}
}

func defaultContainer(c *corev1.Container) {
	policy := corev1.PullIfNotPresent
	if name := c.Image[strings.LastIndex(c.Image, "/")+1:]; strings.HasSuffix(name, ":latest") || !strings.ContainsAny(name, ":@") {
		policy = corev1.PullAlways
	}
	initial(&c.ImagePullPolicy, policy)
	initial(&c.TerminationMessagePath, corev1.TerminationMessagePathDefault)
	initial(&c.TerminationMessagePolicy, corev1.TerminationMessageReadFile)
	for name, quantity := range c.Resources.Limits {
		if _, ok := c.Resources.Requests[name]; !ok {
			if c.Resources.Requests == nil {
				c.Resources.Requests = corev1.ResourceList{}
			}
			c.Resources.Requests[name] = quantity
		}
	}
}

// admitPod does what the admission plugins Priority and DefaultTolerationSeconds do.
func admitPod(pod *corev1.Pod) {
	pointer(&pod.Spec.Priority, 0)
	pointer(&pod.Spec.PreemptionPolicy, corev1.PreemptLowerPriority)
	for _, key := range []string{corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable} {
		tolerated := slices.ContainsFunc(pod.Spec.Tolerations, func(t corev1.Toleration) bool {
			return (t.Key == key || t.Key == "") && (t.Effect == corev1.TaintEffectNoExecute || t.Effect == "")
		})
		if !tolerated {
			pod.Spec.Tolerations = append(pod.Spec.Tolerations, corev1.Toleration{
				Key: key, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: new(int64(300)),
			})
		}
	}
}

func preparePod(pod *corev1.Pod) {
	pod.Generation = 1
	pod.Status = corev1.PodStatus{Phase: corev1.PodPending, QOSClass: qosClass(pod)}
}

// qosClass returns the quality of service of pod. Pods whose limits equal their requests are not told apart.
func qosClass(pod *corev1.Pod) corev1.PodQOSClass {
	for _, c := range slices.Concat(pod.Spec.Containers, pod.Spec.InitContainers) {
		if len(c.Resources.Requests)+len(c.Resources.Limits) > 0 {
			return corev1.PodQOSBurstable
		}
	}
	return corev1.PodQOSBestEffort
}

func preparePodUpdate(pod, old *corev1.Pod) {
	if !equality.Semantic.DeepEqual(pod.Spec, old.Spec) {
		pod.Generation++
	}
}

func preparePodStatus(pod, old *corev1.Pod) {
	pod.DeletionTimestamp = nil
	pod.OwnerReferences = old.OwnerReferences
	initial(&pod.Status.QOSClass, old.Status.QOSClass)
	initial(&pod.Status.ObservedGeneration, old.Status.ObservedGeneration)
	for i := range pod.Status.Conditions {
		condition := &pod.Status.Conditions[i]
		for _, had := range old.Status.Conditions {
			if had.Type == condition.Type {
				initial(&condition.ObservedGeneration, had.ObservedGeneration)
			}
		}
	}
}

// bindPod returns the Pod in existing, assigned to the node of a Binding.
func (c *clock) bindPod(existing runtime.Object, contentType string, body []byte) (runtime.Object, error) {
	var binding corev1.Binding
	if err := decodeInto(contentType, body, &binding); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	pod := existing.DeepCopyObject().(*corev1.Pod)
	var err error
	switch {
	case binding.UID != "" && binding.UID != pod.UID:
		//lint:ignore ST1005 the message of the API server
		err = fmt.Errorf("Precondition failed: UID in precondition: %v, UID in object meta: %v", binding.UID, pod.UID)
	case pod.DeletionTimestamp != nil:
		err = fmt.Errorf("pod %s is being deleted, cannot be assigned to a host", pod.Name)
	case pod.Spec.NodeName != "":
		err = fmt.Errorf("pod %v is already assigned to node %q", pod.Name, pod.Spec.NodeName)
	}
	if err != nil {
		return nil, apierrors.NewConflict(corev1.Resource("pods/binding"), pod.Name, err)
	}
	pod.Spec.NodeName, pod.Status.NominatedNodeName = binding.Target.Name, ""
	for k, v := range binding.Annotations {
		metav1.SetMetaDataAnnotation(&pod.ObjectMeta, k, v)
	}
	scheduled := corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: c.now()}
	pod.Status.Conditions = append(slices.DeleteFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == scheduled.Type
	}), scheduled)
	return pod, nil
}

func defaultVolume(pv *corev1.PersistentVolume) {
	initial(&pv.Status.Phase, corev1.VolumePending)
	initial(&pv.Spec.PersistentVolumeReclaimPolicy, corev1.PersistentVolumeReclaimRetain)
	pointer(&pv.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
}

func (c *clock) prepareVolume(pv *corev1.PersistentVolume) {
	pv.Status = corev1.PersistentVolumeStatus{Phase: corev1.VolumePending, LastPhaseTransitionTime: new(c.now())}
}

func (c *clock) prepareVolumeStatus(pv, old *corev1.PersistentVolume) {
	at, before := &pv.Status.LastPhaseTransitionTime, old.Status.LastPhaseTransitionTime
	switch same := pv.Status.Phase == old.Status.Phase; {
	case same && *at == nil:
		*at = before
	case !same && (*at == nil || (*at).Equal(before)):
		*at = new(c.now())
	}
}

func defaultClaim(pvc *corev1.PersistentVolumeClaim) {
	initial(&pvc.Status.Phase, corev1.ClaimPending)
	pointer(&pvc.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
}

func prepareClaim(pvc *corev1.PersistentVolumeClaim) { normalizeSources(&pvc.Spec, nil) }

func prepareClaimUpdate(pvc, old *corev1.PersistentVolumeClaim) {
	normalizeSources(&pvc.Spec, &old.Spec)
}

// normalizeSources keeps dataSource and dataSourceRef of spec equal. old is nil for a new claim.
func normalizeSources(spec, old *corev1.PersistentVolumeClaimSpec) {
	source, ref := spec.DataSource, spec.DataSourceRef
	inUse := old != nil && (old.DataSource != nil || old.DataSourceRef != nil)
	if source != nil && ref == nil && !inUse {
		group := ""
		if source.APIGroup != nil {
			group = *source.APIGroup
		}
		claim := source.Kind == "PersistentVolumeClaim" && group == ""
		if !claim && (source.Kind != "VolumeSnapshot" || group != "snapshot.storage.k8s.io") {
			spec.DataSource = nil
			return
		}
	}
	switch {
	case source != nil && ref == nil:
		spec.DataSourceRef = &corev1.TypedObjectReference{APIGroup: source.APIGroup, Kind: source.Kind, Name: source.Name}
	case ref != nil && source == nil && (ref.Namespace == nil || *ref.Namespace == ""):
		spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: ref.APIGroup, Kind: ref.Kind, Name: ref.Name}
	}
}

// admitClaim adds the finalizer against deletion of claims in use, and sets the default StorageClass.
func admitClaim(s *Server, obj runtime.Object) error {
	pvc := obj.(*corev1.PersistentVolumeClaim)
	if err := protect("kubernetes.io/pvc-protection")(s, pvc); err != nil {
		return err
	}
	if _, ok := pvc.Annotations[corev1.BetaStorageClassAnnotation]; ok || pvc.Spec.StorageClassName != nil {
		return nil
	}
	var defaults []*storagev1.StorageClass
	for _, obj := range s.objects[s.resources[storagev1.SchemeGroupVersion.WithResource("storageclasses")]] {
		class := obj.(*storagev1.StorageClass)
		if class.Annotations["storageclass.kubernetes.io/is-default-class"] == "true" ||
			class.Annotations["storageclass.beta.kubernetes.io/is-default-class"] == "true" {
			defaults = append(defaults, class)
		}
	}
	if len(defaults) > 0 { // the newest
		class := slices.MinFunc(defaults, func(a, b *storagev1.StorageClass) int {
			return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
		})
		pvc.Spec.StorageClassName = &class.Name
	}
	return nil
}

// admitResize refuses to expand a claim that is not bound, or whose StorageClass does not allow it.
func admitResize(s *Server, obj, oldObj runtime.Object) error {
	pvc, old := obj.(*corev1.PersistentVolumeClaim), oldObj.(*corev1.PersistentVolumeClaim)
	if pvc.Spec.Resources.Requests.Storage().Cmp(*old.Spec.Resources.Requests.Storage()) <= 0 {
		return nil
	}
	if old.Status.Phase != corev1.ClaimBound {
		//lint:ignore ST1005 the message of the API server
		err := errors.New("Only bound persistent volume claims can be expanded")
		return apierrors.NewForbidden(corev1.Resource("persistentvolumeclaims"), pvc.Name, err)
	}
	name := storagehelpers.GetPersistentVolumeClaimClass(pvc)
	class, ok := s.objects[s.resources[storagev1.SchemeGroupVersion.WithResource("storageclasses")]][name].(*storagev1.StorageClass)
	if ok && name == storagehelpers.GetPersistentVolumeClaimClass(old) && class.AllowVolumeExpansion != nil && *class.AllowVolumeExpansion {
		return nil
	}
	return apierrors.NewForbidden(corev1.Resource("persistentvolumeclaims"), pvc.Name, fmt.Errorf(
		"only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize"))
}

func defaultSecret(s *corev1.Secret) {
	initial(&s.Type, corev1.SecretTypeOpaque)
	for k, v := range s.StringData {
		if s.Data == nil {
			s.Data = map[string][]byte{}
		}
		s.Data[k] = []byte(v)
	}
	s.StringData = nil
}

func defaultClass(class *storagev1.StorageClass) {
	pointer(&class.ReclaimPolicy, corev1.PersistentVolumeReclaimDelete)
	pointer(&class.VolumeBindingMode, storagev1.VolumeBindingImmediate)
}

func defaultDriver(d *storagev1.CSIDriver) {
	pointer(&d.Spec.AttachRequired, true)
	pointer(&d.Spec.PodInfoOnMount, false)
	pointer(&d.Spec.StorageCapacity, false)
	pointer(&d.Spec.FSGroupPolicy, storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy)
	pointer(&d.Spec.RequiresRepublish, false)
	pointer(&d.Spec.SELinuxMount, false)
	if len(d.Spec.VolumeLifecycleModes) == 0 {
		d.Spec.VolumeLifecycleModes = []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}
	}
}

func prepareDriverUpdate(d, old *storagev1.CSIDriver) {
	if !equality.Semantic.DeepEqual(d.Spec, old.Spec) {
		d.Generation = old.Generation + 1
	}
}

func prepareCustom(obj runtime.Object) { accessor(obj).SetGeneration(1) }

func prepareCustomUpdate(obj, old runtime.Object) {
	content := func(obj runtime.Object) map[string]any {
		c := maps.Clone(obj.(*unstructured.Unstructured).Object)
		delete(c, "metadata")
		return c
	}
	if !equality.Semantic.DeepEqual(content(obj), content(old)) {
		accessor(obj).SetGeneration(accessor(old).GetGeneration() + 1)
	}
}
