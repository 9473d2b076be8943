package kube

import (
	"encoding/json"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	storagev1beta1 "k8s.io/api/storage/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	storagehelpers "k8s.io/component-helpers/storage/volume"
)

const (
	// CloningProtection is the finalizer that keeps a PVC while other PVCs are cloned from it.
	CloningProtection = "provisioner.storage.kubernetes.io/cloning-protection"
	// SnapshotProtection is the finalizer that keeps a VolumeSnapshot while PVCs are restored from it.
	SnapshotProtection = "provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection"
	// ProvisioningFinalizer keeps a PVC while the outcome of CreateVolume for it is unknown.
	ProvisioningFinalizer = "storage-controller.io/provisioning"
	// AnnProvisioningRequest records which CreateVolume request was sent to which driver.
	AnnProvisioningRequest = "storage-controller.io/provisioning-request"
)

// Trim returns the transform of the informers: what no loop reads is dropped
// before an object is stored, and an object of another driver is replaced by a
// stub, so that memory follows the volumes of driver and not those of the
// cluster. What was trimmed is never written back: writes are patches, or start
// from a live read.
func Trim(driver string) cache.TransformFunc { return trim(driver, &RetainedFields{}) }

// RetainedFields is what the node controller needs of objects that the other loops do not.
// A process that does not run it keeps less.
type RetainedFields struct {
	// Nodes keeps the annotations, taints, host names, machine IDs and the Ready condition of nodes.
	Nodes bool
	// Claims keeps of the claims of other drivers what tells how they are bound and
	// used: any of them may be one of the driver without saying so.
	Claims bool
	// ClaimAnnotations are further annotations of such claims that are kept.
	ClaimAnnotations []string
	// PodAnnotations are the annotations of pods that are kept.
	PodAnnotations []string
}

// trim reads details when it is called, not when it is made.
func trim(driver string, details *RetainedFields) cache.TransformFunc {
	return func(obj any) (any, error) {
		switch o := obj.(type) {
		case *corev1.PersistentVolume:
			return trimVolume(driver, o), nil
		case *corev1.PersistentVolumeClaim:
			return trimClaim(driver, o, details), nil
		case *corev1.Node:
			return trimNode(o), nil
		case *corev1.Pod:
			return trimPod(o, details.PodAnnotations), nil
		case *storagev1.VolumeAttachment:
			return trimAttachment(driver, o), nil
		case *storagev1.CSINode:
			trimMeta(&o.ObjectMeta)
			o.Spec.Drivers = slices.DeleteFunc(o.Spec.Drivers, func(d storagev1.CSINodeDriver) bool { return d.Name != driver })
			return o, nil
		case *metav1.PartialObjectMetadata: // of a Node the labels are what topology is made of
			return &metav1.PartialObjectMetadata{TypeMeta: o.TypeMeta, ObjectMeta: metav1.ObjectMeta{
				Name: o.Name, Namespace: o.Namespace, UID: o.UID, ResourceVersion: o.ResourceVersion, Labels: o.Labels,
				DeletionTimestamp: o.DeletionTimestamp, Finalizers: o.Finalizers,
			}}, nil
		case metav1.ObjectMetaAccessor:
			if m, ok := o.GetObjectMeta().(*metav1.ObjectMeta); ok {
				trimMeta(m)
			}
		}
		return obj, nil
	}
}

func trimMeta(m *metav1.ObjectMeta) {
	m.ManagedFields = nil
	delete(m.Annotations, corev1.LastAppliedConfigAnnotation)
}

// stub is what is left of the metadata of an object of another driver.
func stub(m metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: m.Name, Namespace: m.Namespace, UID: m.UID, ResourceVersion: m.ResourceVersion}
}

func trimVolume(driver string, pv *corev1.PersistentVolume) *corev1.PersistentVolume {
	if mayBelongTo(driver, pv) {
		trimMeta(&pv.ObjectMeta)
		return pv
	}
	s := &corev1.PersistentVolume{ObjectMeta: stub(pv.ObjectMeta)}
	s.Status.Phase = pv.Status.Phase
	if ref := pv.Spec.ClaimRef; ref != nil {
		s.Spec.ClaimRef = &corev1.ObjectReference{Namespace: ref.Namespace, Name: ref.Name, UID: ref.UID}
	}
	if csi := pv.Spec.CSI; csi != nil {
		s.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: csi.Driver}
	}
	return s
}

// mayBelongTo tells whether pv may be one of driver: by its source, by who
// provisioned it, or because its source is one of those that were built into
// Kubernetes once and may belong to any driver.
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

func trimClaim(driver string, pvc *corev1.PersistentVolumeClaim, details *RetainedFields) *corev1.PersistentVolumeClaim {
	// Without an owner a claim may still become one of ours, by an update that
	// brings the whole object again; until then a stub of it is enough.
	if ClaimHandledBy(driver, pvc) {
		trimMeta(&pvc.ObjectMeta)
		return pvc
	}
	s := &corev1.PersistentVolumeClaim{ObjectMeta: stub(pvc.ObjectMeta)}
	s.Spec.VolumeName = pvc.Spec.VolumeName
	s.Spec.StorageClassName = pvc.Spec.StorageClassName
	s.Status.Phase = pvc.Status.Phase
	if pvc.Spec.VolumeName == "" { // whoever provisions it, what it copies must not go meanwhile
		s.Spec.DataSource, s.Spec.DataSourceRef, s.DeletionTimestamp = pvc.Spec.DataSource, pvc.Spec.DataSourceRef, pvc.DeletionTimestamp
	}
	if slices.Contains(pvc.Finalizers, CloningProtection) {
		s.Finalizers, s.DeletionTimestamp = pvc.Finalizers, pvc.DeletionTimestamp
	}
	if details.Claims {
		s.Finalizers, s.DeletionTimestamp, s.OwnerReferences = pvc.Finalizers, pvc.DeletionTimestamp, pvc.OwnerReferences
		s.Annotations = only(pvc.Annotations, append([]string{storagehelpers.AnnSelectedNode, corev1.BetaStorageClassAnnotation}, details.ClaimAnnotations...)...)
		if size, ok := pvc.Spec.Resources.Requests[corev1.ResourceStorage]; ok {
			s.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: size}
		}
		s.Status.Conditions, s.Status.AllocatedResourceStatuses = pvc.Status.Conditions, pvc.Status.AllocatedResourceStatuses
	}
	return s
}

// only is those of annotations that have one of keys; nil for none.
func only(annotations map[string]string, keys ...string) map[string]string {
	var kept map[string]string
	for _, k := range keys {
		if v, ok := annotations[k]; ok {
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
	s.Spec.Taints = node.Spec.Taints
	s.Status.NodeInfo.MachineID = node.Status.NodeInfo.MachineID
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

// trimPod leaves what tells which claims a pod uses, where, and whether it still does.
func trimPod(pod *corev1.Pod, annotations []string) *corev1.Pod {
	s := &corev1.Pod{ObjectMeta: stub(pod.ObjectMeta)}
	s.OwnerReferences, s.DeletionTimestamp = pod.OwnerReferences, pod.DeletionTimestamp
	s.Annotations = only(pod.Annotations, annotations...)
	s.Spec.NodeName, s.Status.Phase = pod.Spec.NodeName, pod.Status.Phase
	for _, v := range pod.Spec.Volumes {
		switch {
		case v.PersistentVolumeClaim != nil:
			s.Spec.Volumes = append(s.Spec.Volumes, corev1.Volume{Name: v.Name, VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: v.PersistentVolumeClaim}})
		case v.Ephemeral != nil:
			s.Spec.Volumes = append(s.Spec.Volumes, corev1.Volume{Name: v.Name, VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}})
		}
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

// trimCapacity is the transform of CSIStorageCapacity objects, of which only those of one
// driver are watched.
func trimCapacity(obj any) (any, error) {
	if beta, ok := obj.(*storagev1beta1.CSIStorageCapacity); ok {
		obj = CapacityFromBeta(beta)
	}
	if c, ok := obj.(*storagev1.CSIStorageCapacity); ok {
		trimMeta(&c.ObjectMeta)
		c.TypeMeta = metav1.TypeMeta{}
	}
	return obj, nil
}

// CapacityFromBeta is obj in the version that replaced its own with the same fields.
func CapacityFromBeta(obj *storagev1beta1.CSIStorageCapacity) *storagev1.CSIStorageCapacity {
	return &storagev1.CSIStorageCapacity{
		ObjectMeta: obj.ObjectMeta, NodeTopology: obj.NodeTopology, StorageClassName: obj.StorageClassName,
		Capacity: obj.Capacity, MaximumVolumeSize: obj.MaximumVolumeSize,
	}
}

// HasProvisioningRecord reports whether the outcome of a CreateVolume of driver for pvc is unknown, also
// if another driver provisions pvc now.
func HasProvisioningRecord(driver string, pvc *corev1.PersistentVolumeClaim) bool {
	return slices.Contains(pvc.Finalizers, ProvisioningFinalizer) && RecordedDriver(pvc) == driver
}

// RecordedDriver returns the driver to which the recorded CreateVolume request for pvc was sent, or "".
func RecordedDriver(pvc *corev1.PersistentVolumeClaim) string {
	var record struct{ Driver string }
	if err := json.Unmarshal([]byte(pvc.Annotations[AnnProvisioningRequest]), &record); err != nil {
		return ""
	}
	return record.Driver
}

// ClaimHandledBy tells whether pvc is one that driver is asked to provision, or was.
func ClaimHandledBy(driver string, pvc *corev1.PersistentVolumeClaim) bool {
	owner, ok := pvc.Annotations[storagehelpers.AnnStorageProvisioner]
	if !ok {
		owner = pvc.Annotations[storagehelpers.AnnBetaStorageProvisioner]
	}
	return owner == driver || pvc.Annotations[storagehelpers.AnnMigratedTo] == driver || HasProvisioningRecord(driver, pvc)
}
