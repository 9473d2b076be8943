// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/diff"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// The real API server validates metadata in several places. A message is in its response as often as a
// place finds the error, and therefore also here.

var metadata = field.NewPath("metadata")

// validateMeta validates the metadata of an object whose name is a DNS subdomain.
func validateMeta(m metav1.Object, namespaced bool) field.ErrorList {
	errs := validation.ValidateObjectMetaAccessor(m, namespaced, validation.NameIsDNSSubdomain, metadata)
	standard := []string{string(corev1.FinalizerKubernetes), metav1.FinalizerOrphanDependents, metav1.FinalizerDeleteDependents}
	for i, finalizer := range m.GetFinalizers() {
		if !strings.Contains(finalizer, "/") && !slices.Contains(standard, finalizer) {
			errs = append(errs, field.Invalid(metadata.Child("finalizers").Index(i), finalizer,
				"name is neither a standard finalizer name nor is it fully qualified"))
		}
	}
	return errs
}

// validateNew validates a new object.
func (r *resource) validateNew(obj runtime.Object) field.ErrorList {
	switch {
	case r.validateCreate != nil:
		return r.validateCreate(obj)
	case r.custom:
		return nil
	}
	return validateMeta(accessor(obj), r.namespaced)
}

// validateEvent validates a new event, whose name need not be a DNS subdomain.
func validateEvent(obj runtime.Object) field.ErrorList {
	return validation.ValidateObjectMetaAccessor(accessor(obj), true, validPathSegment, metadata)
}

// validateMetaUpdate validates a change of metadata.
func validateMetaUpdate[T metav1.Object](obj, old T) field.ErrorList {
	if sameMetadata(obj, old) {
		return nil
	}
	return validation.ValidateObjectMetaAccessorUpdate(obj, old, metadata)
}

// validateCustomUpdate validates a change of the metadata of a custom resource.
func validateCustomUpdate(obj, old runtime.Object) field.ErrorList {
	return validateMetaUpdate(accessor(obj), accessor(old))
}

// validateAccessModes validates the access modes of a claim or volume.
func validateAccessModes(modes []corev1.PersistentVolumeAccessMode, detail string) field.ErrorList {
	path := field.NewPath("spec", "accessModes")
	if len(modes) == 0 {
		return field.ErrorList{field.Required(path, detail)}
	}
	known := []corev1.PersistentVolumeAccessMode{corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOnce, corev1.ReadWriteOncePod}
	var errs field.ErrorList
	for _, mode := range modes {
		if !slices.Contains(known, mode) {
			errs = append(errs, field.NotSupported(path, mode, known))
		}
	}
	if len(modes) > 1 && slices.Contains(modes, corev1.ReadWriteOncePod) {
		errs = append(errs, field.Forbidden(path, "may not use ReadWriteOncePod with other access modes"))
	}
	return errs
}

func validateVolume(pv *corev1.PersistentVolume) field.ErrorList {
	errs := append(validateMeta(pv, false), validateAccessModes(pv.Spec.AccessModes, "")...)
	path := field.NewPath("spec", "capacity")
	if len(pv.Spec.Capacity) == 0 {
		errs = append(errs, field.Required(path, ""))
	}
	if _, ok := pv.Spec.Capacity[corev1.ResourceStorage]; !ok || len(pv.Spec.Capacity) > 1 {
		errs = append(errs, field.NotSupported(path, pv.Spec.Capacity, []corev1.ResourceName{corev1.ResourceStorage}))
	}
	if reflect.ValueOf(pv.Spec.PersistentVolumeSource).IsZero() {
		errs = append(errs, field.Required(field.NewPath("spec"), "must specify a volume type"))
	}
	return errs
}

func validateVolumeUpdate(pv, old *corev1.PersistentVolume) field.ErrorList {
	errs := append(validateVolume(pv), validateVolume(pv)...)
	source := pv.Spec.PersistentVolumeSource
	if source.CSI != nil && old.Spec.CSI != nil && old.Spec.CSI.ControllerExpandSecretRef == nil {
		source = *source.DeepCopy() // the reference may be added
		source.CSI.ControllerExpandSecretRef = nil
	}
	if !equality.Semantic.DeepEqual(source, old.Spec.PersistentVolumeSource) {
		errs = append(errs, field.Forbidden(field.NewPath("spec", "persistentvolumesource"),
			"spec.persistentvolumesource is immutable after creation\n"+
				diff.Diff(goNames(old.Spec.PersistentVolumeSource), goNames(source))))
	}
	errs = append(errs, validation.ValidateImmutableField(pv.Spec.VolumeMode, old.Spec.VolumeMode, field.NewPath("volumeMode"))...)
	if !affinityEqual(pv, old) {
		errs = append(errs, field.Invalid(field.NewPath("nodeAffinity"), goNames(pv.Spec.NodeAffinity),
			validation.FieldImmutableErrorMsg+", except for updating from beta label to GA"))
	}
	if old.Spec.VolumeAttributesClassName != nil && pv.Spec.VolumeAttributesClassName == nil {
		path := field.NewPath("spec", "volumeAttributesClassName")
		errs = append(errs, field.Forbidden(path, "update from non-nil value to nil is forbidden"))
	}
	return errs
}

// affinityEqual reports whether the node affinity of pv is that of old, which may have had none.
func affinityEqual(pv, old *corev1.PersistentVolume) bool {
	return old.Spec.NodeAffinity == nil || equality.Semantic.DeepEqual(pv.Spec.NodeAffinity, old.Spec.NodeAffinity)
}

func validateVolumeStatus(pv, old *corev1.PersistentVolume) field.ErrorList {
	return validateMetaUpdate(pv, old)
}

func validateClaim(pvc *corev1.PersistentVolumeClaim) field.ErrorList {
	errs := append(validateMeta(pvc, true), validateAccessModes(pvc.Spec.AccessModes, "at least 1 access mode is required")...)
	path := field.NewPath("spec", "resources").Key("storage")
	if size, ok := pvc.Spec.Resources.Requests[corev1.ResourceStorage]; !ok {
		errs = append(errs, field.Required(path, ""))
	} else if size.Sign() <= 0 {
		errs = append(errs, field.Invalid(path, size.String(), "must be greater than zero"))
	}
	if class := pvc.Spec.StorageClassName; class != nil && *class != "" {
		for _, message := range validation.NameIsDNSSubdomain(*class, false) {
			errs = append(errs, field.Invalid(field.NewPath("spec", "storageClassName"), *class, message))
		}
	}
	return errs
}

func validateClaimUpdate(pvc, old *corev1.PersistentVolumeClaim) field.ErrorList {
	errs := append(validateMetaUpdate(pvc, old), validateClaim(pvc)...)
	errs = append(errs, validateClassAnnotation(pvc, old)...)
	errs = append(errs, validateClaimSpec(pvc, old)...)
	path := field.NewPath("spec", "resources", "requests", "storage")
	size := pvc.Spec.Resources.Requests.Storage()
	if size.Cmp(*old.Spec.Resources.Requests.Storage()) < 0 && size.Cmp(*old.Status.Capacity.Storage()) <= 0 {
		errs = append(errs, field.Forbidden(path, "field can not be less than status.capacity"))
	}
	errs = append(errs, validation.ValidateImmutableField(pvc.Spec.VolumeMode, old.Spec.VolumeMode, field.NewPath("volumeMode"))...)
	if class := pvc.Spec.VolumeAttributesClassName; old.Status.CurrentVolumeAttributesClassName != nil &&
		!equality.Semantic.DeepEqual(class, old.Spec.VolumeAttributesClassName) && (class == nil || *class == "") {
		value := "nil"
		if class != nil {
			value = "empty string"
		}
		errs = append(errs, field.Forbidden(field.NewPath("spec", "volumeAttributesClassName"),
			"update to "+value+" is forbidden when status.currentVolumeAttributesClassName is not nil"))
	}
	return errs
}

// validateClassAnnotation validates that the deprecated annotation of the class does not change.
func validateClassAnnotation(pvc, old *corev1.PersistentVolumeClaim) field.ErrorList {
	const key = corev1.BetaStorageClassAnnotation
	if pvc.Annotations[key] == old.Annotations[key] {
		return nil
	}
	return field.ErrorList{field.Invalid(metadata.Child("annotations", key), pvc.Annotations[key], validation.FieldImmutableErrorMsg)}
}

// validateClaimSpec validates that only those fields of the spec change that may.
func validateClaimSpec(pvc, old *corev1.PersistentVolumeClaim) field.ErrorList {
	spec, oldSpec := pvc.Spec.DeepCopy(), old.Spec.DeepCopy()
	if oldSpec.VolumeName == "" {
		oldSpec.VolumeName = spec.VolumeName
	}
	if oldSpec.StorageClassName == nil && old.Annotations[corev1.BetaStorageClassAnnotation] == "" {
		spec.StorageClassName = nil // set later, by the controller of default classes
	}
	if pvc.Status.Phase == corev1.ClaimBound {
		if spec.Resources.Requests != nil {
			spec.Resources.Requests[corev1.ResourceStorage] = oldSpec.Resources.Requests[corev1.ResourceStorage]
		}
		spec.VolumeAttributesClassName = oldSpec.VolumeAttributesClassName
	}
	if equality.Semantic.DeepEqual(spec, oldSpec) {
		return nil
	}
	return field.ErrorList{field.Forbidden(field.NewPath("spec"), fmt.Sprintf("spec is immutable after creation except resources.requests "+
		"and volumeAttributesClassName for bound claims\n%v", diff.Diff(goNames(*oldSpec), goNames(*spec))))}
}

func validateClaimStatus(pvc, old *corev1.PersistentVolumeClaim) field.ErrorList {
	errs := validateMetaUpdate(pvc, old)
	path := field.NewPath("status", "allocatedResourceStatuses")
	known := []corev1.ClaimResourceStatus{
		corev1.PersistentVolumeClaimControllerResizeInProgress, corev1.PersistentVolumeClaimControllerResizeInfeasible,
		corev1.PersistentVolumeClaimNodeResizePending, corev1.PersistentVolumeClaimNodeResizeInProgress,
		corev1.PersistentVolumeClaimNodeResizeInfeasible,
	}
	slices.Sort(known)
	for _, name := range slices.Sorted(maps.Keys(pvc.Status.AllocatedResourceStatuses)) {
		if !slices.Contains(known, pvc.Status.AllocatedResourceStatuses[name]) {
			errs = append(errs, field.NotSupported(path, name, known))
		}
	}
	return errs
}

// immutableData returns the errors of changes of an immutable Secret or ConfigMap.
func immutableData(is, was *bool, changed map[string]bool) field.ErrorList {
	if was == nil || !*was {
		return nil
	}
	changed["immutable"] = is == nil || !*is
	var errs field.ErrorList
	for _, name := range []string{"immutable", "data", "binaryData"} {
		if changed[name] {
			errs = append(errs, field.Forbidden(field.NewPath(name), "field is immutable when `immutable` is set"))
		}
	}
	return errs
}

func validateSecretUpdate(s, old *corev1.Secret) field.ErrorList {
	errs := append(validateMetaUpdate(s, old), validation.ValidateImmutableField(s.Type, old.Type, field.NewPath("type"))...)
	return append(errs, immutableData(s.Immutable, old.Immutable, map[string]bool{"data": !reflect.DeepEqual(s.Data, old.Data)})...)
}

func validateConfigMapUpdate(m, old *corev1.ConfigMap) field.ErrorList {
	return append(validateMetaUpdate(m, old), immutableData(m.Immutable, old.Immutable, map[string]bool{
		"data": !reflect.DeepEqual(m.Data, old.Data), "binaryData": !reflect.DeepEqual(m.BinaryData, old.BinaryData)})...)
}

func validateClassUpdate(class, old *storagev1.StorageClass) field.ErrorList {
	return slices.Concat(validateMetaUpdate(class, old),
		validation.ValidateImmutableField(class.Parameters, old.Parameters, field.NewPath("parameters")),
		validation.ValidateImmutableField(class.Provisioner, old.Provisioner, field.NewPath("provisioner")),
		validation.ValidateImmutableField(class.ReclaimPolicy, old.ReclaimPolicy, field.NewPath("reclaimPolicy")),
		validation.ValidateImmutableField(class.VolumeBindingMode, old.VolumeBindingMode, field.NewPath("volumeBindingMode")))
}

func validateCSINodeUpdate(node, old *storagev1.CSINode) field.ErrorList {
	errs := validateMeta(node, false)
	for _, was := range old.Spec.Drivers {
		for _, is := range node.Spec.Drivers {
			if is.Name == was.Name {
				is.Allocatable, was.Allocatable = nil, nil
				errs = append(errs, immutable(is, was, field.NewPath("spec", "drivers"))...)
			}
		}
	}
	return errs
}

func validateDriverUpdate(d, old *storagev1.CSIDriver) field.ErrorList {
	spec := field.NewPath("spec")
	return slices.Concat(validateMetaUpdate(d, old),
		validation.ValidateImmutableField(d.Spec.AttachRequired, old.Spec.AttachRequired, spec.Child("attachedRequired")),
		validation.ValidateImmutableField(d.Spec.VolumeLifecycleModes, old.Spec.VolumeLifecycleModes, spec.Child("volumeLifecycleModes")))
}

func validateAttachmentUpdate(va, old *storagev1.VolumeAttachment) field.ErrorList {
	return append(validateMeta(va, false), immutable(va.Spec, old.Spec, field.NewPath("spec"))...)
}

func validateAttributesUpdate(class, old *storagev1.VolumeAttributesClass) field.ErrorList {
	errs := validateMetaUpdate(class, old)
	if class.DriverName != old.DriverName {
		errs = append(errs, field.Forbidden(field.NewPath("driverName"), "updates to driverName are forbidden."))
	}
	if !reflect.DeepEqual(class.Parameters, old.Parameters) {
		errs = append(errs, field.Forbidden(field.NewPath("parameters"), "updates to parameters are forbidden."))
	}
	return append(errs, validateMeta(class, false)...)
}

func validateCapacityUpdate(capacity, old *storagev1.CSIStorageCapacity) field.ErrorList {
	errs := validateMetaUpdate(capacity, old)
	if !equality.Semantic.DeepEqual(capacity.NodeTopology, old.NodeTopology) {
		errs = append(errs, field.Invalid(field.NewPath("nodeTopology"), capacity.NodeTopology, "field is immutable"))
	}
	if capacity.StorageClassName != old.StorageClassName {
		errs = append(errs, field.Invalid(field.NewPath("storageClassName"), capacity.StorageClassName, "field is immutable"))
	}
	return errs
}

// immutable returns an error if a struct changes.
func immutable[T any](is, was T, path *field.Path) field.ErrorList {
	if equality.Semantic.DeepEqual(is, was) {
		return nil
	}
	return field.ErrorList{field.Invalid(path, goNames(is), validation.FieldImmutableErrorMsg)}
}

// goNames returns v as messages of the API server show it: with the names of the fields in Go, and with
// fields that are empty.
func goNames(v any) json.RawMessage {
	var b strings.Builder
	writeGoNames(&b, reflect.ValueOf(v))
	return json.RawMessage(b.String())
}

func writeGoNames(b *strings.Builder, v reflect.Value) {
	if v.Kind() == reflect.Pointer && !v.IsNil() {
		writeGoNames(b, v.Elem())
		return
	}
	if v.Kind() == reflect.Slice && v.Len() > 0 && v.Type().Elem().Kind() != reflect.Uint8 {
		for i := range v.Len() {
			b.WriteString(map[bool]string{true: "[", false: ","}[i == 0])
			writeGoNames(b, v.Index(i))
		}
		b.WriteByte(']')
		return
	}
	_, marshals := v.Interface().(json.Marshaler)
	if v.CanAddr() && !marshals {
		_, marshals = v.Addr().Interface().(json.Marshaler)
	}
	if v.Kind() != reflect.Struct || marshals {
		data, err := json.Marshal(v.Interface())
		if err != nil {
			panic(err) // a part of an API object
		}
		b.Write(data)
		return
	}
	b.WriteByte('{')
	writeFields(b, v, true)
	b.WriteByte('}')
}

// writeFields writes the fields of a struct, those of embedded structs among them.
func writeFields(b *strings.Builder, v reflect.Value, first bool) {
	for i := range v.NumField() {
		if !first {
			b.WriteByte(',')
		}
		first = false
		if f := v.Type().Field(i); f.Anonymous {
			writeFields(b, v.Field(i), true)
		} else {
			fmt.Fprintf(b, "%q:", f.Name)
			writeGoNames(b, v.Field(i))
		}
	}
}
