package explain

import (
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/tools/statusz"
	"github.com/storage-controller/storage-controller/provisioner"
)

// facts is everything that the findings are made of.
type facts struct {
	now    time.Time
	driver string // "" when it is not known

	claim      known[*corev1.PersistentVolumeClaim]
	volume     known[*corev1.PersistentVolume]
	attachment known[*storagev1.VolumeAttachment]
	node       known[*corev1.Node]
	csiNode    known[*storagev1.CSINode] // of node

	class     known[*storagev1.StorageClass]
	classes   known[[]storagev1.StorageClass] // only when the claim names none
	csiDriver known[*storagev1.CSIDriver]
	leases    []leaseFact

	nodes       known[[]corev1.Node]
	csiNodes    known[[]storagev1.CSINode]
	pods        known[[]corev1.Pod] // of the namespace of the claim
	volumes     known[[]corev1.PersistentVolume]
	attachments known[[]storagev1.VolumeAttachment]
	capacities  known[[]storagev1.CSIStorageCapacity]

	secrets    []secretFact
	secretsErr error // why the class names no secrets that can be used
	source     *sourceFact
	sourceErr  error

	events  known[[]corev1.Event]
	process *processFact // nil: nobody asked for it
}

// leaseFact is the Leases, in any namespace, under which a role works for a driver.
type leaseFact struct {
	role, driver, name string
	leases             known[[]coordinationv1.Lease]
}

// secretFact is a secret that is named, and whether it is there.
type secretFact struct {
	provisioner.NamedSecret
	there known[bool]
}

// sourceFact is what the data of a claim comes from.
type sourceFact struct {
	provisioner.Source
	snapshot, content known[map[string]any]
	claim             known[*corev1.PersistentVolumeClaim]
	volume            known[*corev1.PersistentVolume]
	grants            known[[]map[string]any] // only for a source in another namespace
}

// processFact is what a running process says of itself, or why it could not be asked.
type processFact struct {
	url  string
	page statusz.Page
	err  error
}

// driverOfClaim is the driver that makes the volume of claim; "" when nothing says that.
func driverOfClaim(claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass) string {
	for _, key := range []string{storagehelpers.AnnMigratedTo, storagehelpers.AnnStorageProvisioner, storagehelpers.AnnBetaStorageProvisioner} {
		if name := claim.Annotations[key]; name != "" {
			return name
		}
	}
	if class != nil && class.Provisioner != noProvisioner {
		return class.Provisioner
	}
	return ""
}

// classOfVolume is the name of the class of pv; "" for none.
func classOfVolume(pv *corev1.PersistentVolume) string {
	if name, ok := pv.Annotations[corev1.BetaStorageClassAnnotation]; ok {
		return name
	}
	return pv.Spec.StorageClassName
}

// noProvisioner is the provisioner of classes of volumes that are made by hand.
const noProvisioner = "kubernetes.io/no-provisioner"
