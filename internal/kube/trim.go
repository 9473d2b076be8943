// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"encoding/json"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"
)

const (
	// CloningProtection is the finalizer that keeps a PVC while other PVCs are cloned from it.
	CloningProtection = "provisioner.storage.kubernetes.io/cloning-protection"
	// SnapshotProtection is the finalizer that keeps a VolumeSnapshot while PVCs are restored from it.
	SnapshotProtection = "provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection"
	// ProvisioningFinalizer keeps a PVC while the outcome of CreateVolume for it is unknown.
	ProvisioningFinalizer = "storage-controller.io/provisioning"
	// AttacherFinalizerPrefix begins the finalizer of an attacher, before the sanitized name of its driver.
	AttacherFinalizerPrefix = "external-attacher/"
	// AnnProvisioningRequest records the indeterminate CreateVolume request of a PVC.
	AnnProvisioningRequest = "storage-controller.io/provisioning-request"
	// AnnStorageResizer names the driver that expands an in-tree volume (CSI migration).
	AnnStorageResizer = "volume.kubernetes.io/storage-resizer"
)

// Trim returns the transform of the informers. It removes fields that no controller reads, and
// reduces objects of other drivers to a stub, so that memory grows with the volumes of driver, not
// of the cluster. Trimmed objects are never written back: writes are patches, or start from a live
// read.
func Trim(driver string) cache.TransformFunc { return trim(driver, &RetainedFields{}) }

// RetainedFields selects fields that only one role reads.
type RetainedFields struct {
	// Nodes retains annotations, unschedulable, host names and the Ready condition.
	Nodes bool
	// Claims retains how claims of other drivers are bound and used: the node controller may have to
	// handle a claim that does not name the driver.
	Claims bool
	// ClaimAnnotations lists further annotations of such claims.
	ClaimAnnotations []string
	// PodAnnotations lists the annotations of pods.
	PodAnnotations []string
	// Resize retains the status, requested size and VolumeAttributesClass of claims that do not name the driver, if an
	// expansion or modification is pending: a statically provisioned claim does not name its driver. Of the other such
	// claims it retains only whether they were expanded and, if they are bound, [AnnStorageResizer].
	Resize bool
}

// add adds the fields of other to f.
func (f *RetainedFields) add(other RetainedFields) {
	f.Nodes, f.Claims, f.Resize = f.Nodes || other.Nodes, f.Claims || other.Claims, f.Resize || other.Resize
	f.ClaimAnnotations = append(f.ClaimAnnotations, other.ClaimAnnotations...)
	f.PodAnnotations = append(f.PodAnnotations, other.PodAnnotations...)
}

// trim returns the transform. It reads retained on every call, because [Informers.Retain] may change
// it later.
func trim(driver string, retained *RetainedFields) cache.TransformFunc {
	return func(obj any) (any, error) {
		switch o := obj.(type) {
		case *corev1.PersistentVolume:
			return shareVolume(trimVolume(driver, o)), nil
		case *corev1.PersistentVolumeClaim:
			return shareClaim(trimClaim(driver, o, retained)), nil
		case *corev1.Node:
			return trimNode(o), nil
		case *corev1.Pod:
			return trimPod(o, retained.PodAnnotations), nil
		case *storagev1.VolumeAttachment:
			return shareAttachment(trimAttachment(driver, o)), nil
		case *storagev1.CSINode:
			trimMeta(&o.ObjectMeta)
			o.Status = storagev1.CSINodeStatus{}
			o.Spec.Drivers = slices.DeleteFunc(o.Spec.Drivers, func(d storagev1.CSINodeDriver) bool { return d.Name != driver })
			return o, nil
		case *metav1.PartialObjectMetadata: // the topology of a Node is in its labels
			s := &metav1.PartialObjectMetadata{TypeMeta: o.TypeMeta, ObjectMeta: metav1.ObjectMeta{
				Name: o.Name, Namespace: o.Namespace, UID: o.UID, ResourceVersion: o.ResourceVersion, Labels: o.Labels,
				DeletionTimestamp: o.DeletionTimestamp, Finalizers: o.Finalizers,
			}}
			if o.Namespace != "" {
				boundMeta(&s.ObjectMeta)
			}
			return s, nil
		case metav1.ObjectMetaAccessor:
			if m, ok := o.GetObjectMeta().(*metav1.ObjectMeta); ok {
				trimMeta(m)
			}
		}
		return obj, nil
	}
}

// trimMeta writes to the annotations only if it has to: client-go may transform an object again, which shares them then.
func trimMeta(m *metav1.ObjectMeta) {
	m.ManagedFields = nil
	//lint:ignore S1033 the deletion of a missing key is a write, too
	if _, ok := m.Annotations[corev1.LastAppliedConfigAnnotation]; ok {
		delete(m.Annotations, corev1.LastAppliedConfigAnnotation)
	}
}

// stub returns the metadata that is retained of an object of another driver.
func stub(m metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: m.Name, Namespace: m.Namespace, UID: m.UID, ResourceVersion: m.ResourceVersion}
}

// sharedSources has a *corev1.CSIPersistentVolumeSource for each driver, to which the stubs of its PersistentVolumes point.
var sharedSources sync.Map

func sharedSource(driver string) *corev1.CSIPersistentVolumeSource {
	if s, ok := sharedSources.Load(driver); ok {
		return s.(*corev1.CSIPersistentVolumeSource)
	}
	s, _ := sharedSources.LoadOrStore(driver, &corev1.CSIPersistentVolumeSource{Driver: driver})
	return s.(*corev1.CSIPersistentVolumeSource)
}

func trimVolume(driver string, pv *corev1.PersistentVolume) *corev1.PersistentVolume {
	if mayBelongTo(driver, pv) {
		trimMeta(&pv.ObjectMeta)
		if pv.Spec.CSI != nil {
			shareSource(pv.Spec.CSI)
		}
		return pv
	}
	s := &corev1.PersistentVolume{ObjectMeta: stub(pv.ObjectMeta)}
	s.Status.Phase = pv.Status.Phase
	if ref := pv.Spec.ClaimRef; ref != nil {
		s.Spec.ClaimRef = &corev1.ObjectReference{Namespace: ref.Namespace, Name: ref.Name, UID: ref.UID}
	}
	if csi := pv.Spec.CSI; csi != nil {
		s.Spec.CSI = sharedSource(csi.Driver)
	}
	return s
}

// mayBelongTo reports whether pv may be a volume of driver: by its source, by its annotations, or
// because it has an in-tree source, which CSI migration may translate to any driver.
func mayBelongTo(driver string, pv *corev1.PersistentVolume) bool {
	switch {
	case pv.Spec.CSI != nil && pv.Spec.CSI.Driver == driver,
		pv.Annotations[storagehelpers.AnnDynamicallyProvisioned] == driver,
		pv.Annotations[storagehelpers.AnnMigratedTo] == driver:
		return true
	}
	s := pv.Spec.PersistentVolumeSource
	return s.GCEPersistentDisk != nil || s.AWSElasticBlockStore != nil || s.Cinder != nil ||
		s.AzureDisk != nil || s.AzureFile != nil || s.VsphereVolume != nil || s.PortworxVolume != nil
}

func trimClaim(driver string, pvc *corev1.PersistentVolumeClaim, retained *RetainedFields) *corev1.PersistentVolumeClaim {
	pvc.Status.HealthStatus = nil
	// An update that assigns a claim to driver contains the whole object. Until then, a stub is enough.
	if ClaimHandledBy(driver, pvc) {
		trimMeta(&pvc.ObjectMeta)
		pvc.Annotations = retainedAnnotations(pvc, retained.ClaimAnnotations)
		return boundClaim(pvc)
	}
	s := &corev1.PersistentVolumeClaim{ObjectMeta: stub(pvc.ObjectMeta)}
	s.Spec.VolumeName = pvc.Spec.VolumeName
	s.Spec.StorageClassName = pvc.Spec.StorageClassName
	s.Status.Phase = pvc.Status.Phase
	if pvc.Spec.VolumeName == "" { // its data source must be protected, whichever driver provisions the claim
		s.Spec.DataSource, s.Spec.DataSourceRef = pvc.Spec.DataSource, pvc.Spec.DataSourceRef
		s.DeletionTimestamp = pvc.DeletionTimestamp
	}
	if slices.Contains(pvc.Finalizers, CloningProtection) {
		s.Finalizers, s.DeletionTimestamp = pvc.Finalizers, pvc.DeletionTimestamp
	}
	if retained.Claims {
		s.Finalizers, s.DeletionTimestamp, s.OwnerReferences = pvc.Finalizers, pvc.DeletionTimestamp, pvc.OwnerReferences
		s.Annotations = only(pvc.Annotations, storagehelpers.AnnSelectedNode, corev1.BetaStorageClassAnnotation)
		for k, v := range only(pvc.Annotations, retained.ClaimAnnotations...) {
			metav1.SetMetaDataAnnotation(&s.ObjectMeta, k, v)
		}
		if size, ok := pvc.Spec.Resources.Requests[corev1.ResourceStorage]; ok {
			s.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: size}
		}
		s.Status.Conditions, s.Status.AllocatedResourceStatuses = pvc.Status.Conditions, pvc.Status.AllocatedResourceStatuses
	}
	if retained.Resize && pvc.Spec.VolumeName != "" {
		for k, v := range only(pvc.Annotations, AnnStorageResizer) {
			metav1.SetMetaDataAnnotation(&s.ObjectMeta, k, v)
		}
	}
	switch {
	case retained.Resize && mayResize(pvc):
		s.Spec.Resources.Requests, s.Spec.VolumeAttributesClassName = pvc.Spec.Resources.Requests, pvc.Spec.VolumeAttributesClassName
		conditions := s.Status.Conditions
		s.Status = pvc.Status
		s.Status.Conditions = conditions
	case retained.Resize:
		if pvc.Status.AllocatedResources != nil {
			s.Status.AllocatedResources = expanded
		} else if pvc.Spec.VolumeName != "" {
			s.Status.AllocatedResources = neverExpanded
		}
		if pvc.Spec.VolumeName != "" { // it would seem to request an expansion
			s.Status.Capacity = s.Spec.Resources.Requests
		}
	}
	return boundClaim(s)
}

// expanded is the status.allocatedResources of the stub of a claim whose expansion has ended. Claims keep it after
// that, and the PersistentVolume may still record the size before the expansion. All stubs share one map, because
// the maps of each claim would take 2 KiB. Its value, zero, is not larger than the capacity of a stub.
var expanded = corev1.ResourceList{corev1.ResourceStorage: resource.Quantity{}}

// neverExpanded is the status.allocatedResources of the stub of a bound claim that has none. Its value is no size.
var neverExpanded = corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(-1, resource.BinarySI)}

// WasNeverExpanded reports whether pvc is a stub of a bound claim that was not expanded. The stub lacks its sizes.
func WasNeverExpanded(pvc *corev1.PersistentVolumeClaim) bool {
	allocated := pvc.Status.AllocatedResources[corev1.ResourceStorage]
	return allocated.Sign() < 0
}

// mayResize reports whether the size or the VolumeAttributesClass that pvc requests differs from that of its volume,
// or a change has not ended.
func mayResize(pvc *corev1.PersistentVolumeClaim) bool {
	requested, actual := pvc.Spec.Resources.Requests[corev1.ResourceStorage], pvc.Status.Capacity[corev1.ResourceStorage]
	allocated := pvc.Status.AllocatedResources[corev1.ResourceStorage]
	return pvc.Spec.VolumeName != "" && (requested.Cmp(actual) > 0 || allocated.Cmp(actual) > 0 ||
		pvc.Status.AllocatedResourceStatuses != nil || pvc.Status.ModifyVolumeStatus != nil ||
		ptr.Deref(pvc.Spec.VolumeAttributesClassName, "") != ptr.Deref(pvc.Status.CurrentVolumeAttributesClassName, ""))
}

// only returns the annotations with these keys, or nil if there are none.
func only(annotations map[string]string, keys ...string) map[string]string {
	var kept map[string]string
	for _, k := range keys {
		if v, ok := annotations[k]; ok && len(v) <= maxValue {
			if kept == nil {
				kept = map[string]string{}
			}
			kept[k] = v
		}
	}
	return kept
}

func trimNode(node *corev1.Node) *corev1.Node {
	s := &corev1.Node{ObjectMeta: node.ObjectMeta}
	trimMeta(&s.ObjectMeta)
	s.Spec.Unschedulable = node.Spec.Unschedulable
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			c.LastHeartbeatTime, c.Message = metav1.Time{}, ""
			s.Status.Conditions = append(s.Status.Conditions, c)
		}
	}
	for _, a := range node.Status.Addresses {
		if a.Type == corev1.NodeHostName {
			s.Status.Addresses = append(s.Status.Addresses, a)
		}
	}
	return s
}

// trimPod retains the claims, the node, the owners and the phase of a pod.
func trimPod(pod *corev1.Pod, annotations []string) *corev1.Pod {
	s := &corev1.Pod{ObjectMeta: stub(pod.ObjectMeta)}
	s.OwnerReferences, s.DeletionTimestamp = pod.OwnerReferences, pod.DeletionTimestamp
	s.Annotations = only(pod.Annotations, annotations...)
	boundMeta(&s.ObjectMeta)
	s.Spec.NodeName, s.Status.Phase = pod.Spec.NodeName, pod.Status.Phase
	for _, v := range pod.Spec.Volumes {
		kept := corev1.Volume{Name: v.Name}
		switch {
		case v.PersistentVolumeClaim != nil:
			kept.PersistentVolumeClaim = v.PersistentVolumeClaim
		case v.Ephemeral != nil:
			kept.Ephemeral = &corev1.EphemeralVolumeSource{}
		default:
			continue
		}
		s.Spec.Volumes = append(s.Spec.Volumes, kept)
	}
	return s
}

func trimAttachment(driver string, va *storagev1.VolumeAttachment) *storagev1.VolumeAttachment {
	if va.Spec.Attacher == driver {
		trimMeta(&va.ObjectMeta)
		return va
	}
	s := &storagev1.VolumeAttachment{ObjectMeta: stub(va.ObjectMeta)}
	s.Spec.Attacher = va.Spec.Attacher
	s.Spec.NodeName = va.Spec.NodeName
	s.Spec.Source.PersistentVolumeName = va.Spec.Source.PersistentVolumeName
	return s
}

// trimCapacity is the transform of CSIStorageCapacity objects. Only those of the driver are watched.
func trimCapacity(obj any) (any, error) {
	if c, ok := obj.(*storagev1.CSIStorageCapacity); ok {
		trimMeta(&c.ObjectMeta)
		c.TypeMeta = metav1.TypeMeta{}
	}
	return obj, nil
}

// HasProvisioningRecord reports whether pvc records a CreateVolume call of driver whose outcome is
// unknown. The claim may have been assigned to another driver since.
func HasProvisioningRecord(driver string, pvc *corev1.PersistentVolumeClaim) bool {
	return slices.Contains(pvc.Finalizers, ProvisioningFinalizer) && RecordOwner(pvc) == driver
}

// RecordOwner returns the driver whose provisioner repeats the recorded CreateVolume request for pvc: the recorded one or, if the record
// cannot be read, the one that pvc names. It returns "" if pvc names none, which kube-controller-manager corrects.
func RecordOwner(pvc *corev1.PersistentVolumeClaim) string {
	return cmp.Or(RecordedDriver(pvc), pvc.Annotations[storagehelpers.AnnMigratedTo], ProvisionerOf(pvc))
}

// RecordedDriver returns the driver to which the recorded CreateVolume request for pvc was sent, or "".
func RecordedDriver(pvc *corev1.PersistentVolumeClaim) string {
	var record struct{ Driver string }
	if err := json.Unmarshal([]byte(pvc.Annotations[AnnProvisioningRequest]), &record); err != nil {
		return ""
	}
	return record.Driver
}

// ClaimHandledBy reports whether driver provisions pvc, or has a provisioning record on it.
func ClaimHandledBy(driver string, pvc *corev1.PersistentVolumeClaim) bool {
	return ProvisionerOf(pvc) == driver || pvc.Annotations[storagehelpers.AnnMigratedTo] == driver || HasProvisioningRecord(driver, pvc)
}

// ProvisionerOf returns the provisioner that pvc names, which may be that of an in-tree plugin.
func ProvisionerOf(pvc *corev1.PersistentVolumeClaim) string {
	owner, ok := pvc.Annotations[storagehelpers.AnnStorageProvisioner]
	if !ok {
		owner = pvc.Annotations[storagehelpers.AnnBetaStorageProvisioner]
	}
	return owner
}
