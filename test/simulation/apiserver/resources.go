// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"reflect"
	"slices"
	"strconv"

	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes/scheme"
)

// resource describes how objects of one resource are handled. The functions are nil where the resource
// needs nothing beyond what all resources have.
type resource struct {
	gvr            schema.GroupVersionResource
	kind           string
	namespaced     bool
	custom         bool // defined by a CRD
	status         bool // has a status subresource
	clearStatus    bool // a create ignores the status
	statusKeepsAll bool // an update of the status ignores all metadata
	returnsDeleted bool // a deletion returns the object instead of a Status
	unconditional  bool // an update needs no resourceVersion
	upsert         bool // an update creates a missing object
	selectors      []string
	fields         func(runtime.Object) fields.Set // values of selectors
	defaults       func(runtime.Object)

	admitCreate    func(*Server, runtime.Object) error
	admitUpdate    func(s *Server, obj, old runtime.Object) error
	beforeCreate   func(runtime.Object)
	beforeUpdate   func(obj, old runtime.Object) // after the status was restored
	beforeStatus   func(obj, old runtime.Object)
	validateCreate func(runtime.Object) field.ErrorList
	validateUpdate func(obj, old runtime.Object) field.ErrorList
	validateStatus func(obj, old runtime.Object) field.ErrorList
}

// resources returns all resources that the server can serve.
func resources(c *clock) []*resource {
	return slices.Concat(coreResources(c), storageResources(), customResources())
}

func coreResources(c *clock) []*resource {
	core := corev1.SchemeGroupVersion.WithResource
	return []*resource{
		{gvr: core("namespaces"), kind: "Namespace", status: true, unconditional: true,
			selectors: []string{"status.phase"}, fields: on(func(ns *corev1.Namespace) fields.Set {
				return fields.Set{"status.phase": string(ns.Status.Phase)}
			}), defaults: do(defaultNamespace), beforeCreate: do(prepareNamespace)},
		{gvr: core("nodes"), kind: "Node", status: true, unconditional: true,
			selectors: []string{"spec.unschedulable"}, fields: on(func(n *corev1.Node) fields.Set {
				return fields.Set{"spec.unschedulable": strconv.FormatBool(n.Spec.Unschedulable)}
			}), defaults: do(defaultNode)},
		{gvr: core("pods"), kind: "Pod", namespaced: true, status: true, clearStatus: true, returnsDeleted: true, unconditional: true,
			selectors: podSelectors, fields: on(podFields), defaults: do(defaultPod), admitCreate: admit(admitPod),
			beforeCreate: do(preparePod), beforeUpdate: pair(preparePodUpdate), beforeStatus: pair(preparePodStatus)},
		{gvr: core("persistentvolumes"), kind: "PersistentVolume", status: true, clearStatus: true, returnsDeleted: true,
			unconditional: true, defaults: do(defaultVolume), admitCreate: protect("kubernetes.io/pv-protection"),
			beforeCreate: do(c.prepareVolume), beforeStatus: pair(c.prepareVolumeStatus), validateCreate: on(validateVolume),
			validateUpdate: check(validateVolumeUpdate), validateStatus: check(validateVolumeStatus)},
		{gvr: core("persistentvolumeclaims"), kind: "PersistentVolumeClaim", namespaced: true, status: true, clearStatus: true,
			returnsDeleted: true, unconditional: true, defaults: do(defaultClaim),
			admitCreate: admitClaim, admitUpdate: admitResize, beforeCreate: do(prepareClaim), beforeUpdate: pair(prepareClaimUpdate),
			validateCreate: on(validateClaim), validateUpdate: check(validateClaimUpdate), validateStatus: check(validateClaimStatus)},
		{gvr: core("secrets"), kind: "Secret", namespaced: true, unconditional: true,
			selectors: []string{"type"}, fields: on(func(s *corev1.Secret) fields.Set { return fields.Set{"type": string(s.Type)} }),
			defaults: do(defaultSecret), validateUpdate: check(validateSecretUpdate)},
		{gvr: core("configmaps"), kind: "ConfigMap", namespaced: true, unconditional: true, validateUpdate: check(validateConfigMapUpdate)},
		{gvr: core("events"), kind: "Event", namespaced: true, unconditional: true, upsert: true,
			selectors: eventSelectors, fields: on(eventFields), validateCreate: validateEvent},
		{gvr: authorizationv1.SchemeGroupVersion.WithResource("selfsubjectaccessreviews"), kind: "SelfSubjectAccessReview"},
		{gvr: coordinationv1.SchemeGroupVersion.WithResource("leases"), kind: "Lease", namespaced: true, upsert: true,
			validateUpdate: check(validateMetaUpdate[*coordinationv1.Lease])},
	}
}

func storageResources() []*resource {
	storage := storagev1.SchemeGroupVersion.WithResource
	return []*resource{
		{gvr: storage("storageclasses"), kind: "StorageClass", returnsDeleted: true, unconditional: true,
			defaults: do(defaultClass), validateUpdate: check(validateClassUpdate)},
		{gvr: storage("csinodes"), kind: "CSINode", returnsDeleted: true, validateUpdate: check(validateCSINodeUpdate)},
		{gvr: storage("csidrivers"), kind: "CSIDriver", returnsDeleted: true, defaults: do(defaultDriver),
			beforeUpdate: pair(prepareDriverUpdate), validateUpdate: check(validateDriverUpdate)},
		{gvr: storage("volumeattachments"), kind: "VolumeAttachment", status: true, clearStatus: true, statusKeepsAll: true,
			returnsDeleted: true, validateUpdate: check(validateAttachmentUpdate)},
		{gvr: storage("volumeattributesclasses"), kind: "VolumeAttributesClass", returnsDeleted: true, unconditional: true,
			admitCreate: protect("kubernetes.io/vac-protection"), validateUpdate: check(validateAttributesUpdate)},
		{gvr: storage("csistoragecapacities"), kind: "CSIStorageCapacity", namespaced: true, validateUpdate: check(validateCapacityUpdate)},
	}
}

func customResources() []*resource {
	const snapshot, group = "snapshot.storage.k8s.io", "groupsnapshot.storage.k8s.io"
	definitions := customResource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", false, true)
	definitions.admitCreate = (*Server).define
	return []*resource{
		definitions,
		customResource(snapshot, "v1", "volumesnapshots", "VolumeSnapshot", true, true),
		customResource(snapshot, "v1", "volumesnapshotcontents", "VolumeSnapshotContent", false, true),
		customResource(snapshot, "v1", "volumesnapshotclasses", "VolumeSnapshotClass", false, false),
		customResource(group, "v1", "volumegroupsnapshots", "VolumeGroupSnapshot", true, true),
		customResource(group, "v1", "volumegroupsnapshotcontents", "VolumeGroupSnapshotContent", false, true),
		customResource(group, "v1", "volumegroupsnapshotclasses", "VolumeGroupSnapshotClass", false, false),
		customResource("gateway.networking.k8s.io", "v1beta1", "referencegrants", "ReferenceGrant", true, false),
	}
}

// customResource returns a resource that a CustomResourceDefinition defines.
func customResource(group, version, plural, kind string, namespaced, status bool) *resource {
	return &resource{gvr: schema.GroupVersionResource{Group: group, Version: version, Resource: plural}, kind: kind,
		namespaced: namespaced, status: status, clearStatus: status, statusKeepsAll: true, custom: true,
		beforeCreate: prepareCustom, beforeUpdate: prepareCustomUpdate, validateUpdate: validateCustomUpdate}
}

// object returns an empty object.
func (r *resource) object() runtime.Object {
	gvk := r.gvr.GroupVersion().WithKind(r.kind)
	if r.custom {
		u := &unstructured.Unstructured{}
		u.SetGroupVersionKind(gvk)
		return u
	}
	obj, err := scheme.Scheme.New(gvk)
	if err != nil {
		panic(err) // all kinds are registered
	}
	return obj
}

// subresources returns the names of the subresources.
func (r *resource) subresources() []string {
	switch {
	case r.kind == "Pod":
		return []string{"status", "binding"}
	case r.status:
		return []string{"status"}
	}
	return nil
}

// storagePrefix returns the directory of the objects in etcd.
func (r *resource) storagePrefix() string {
	if r.kind == "Node" {
		return "minions"
	}
	return r.gvr.Resource
}

// lingers reports whether old stays although it has no finalizers in its metadata.
func (r *resource) lingers(old runtime.Object) bool {
	ns, ok := old.(*corev1.Namespace)
	return ok && len(ns.Spec.Finalizers) > 0
}

// prepareCreate clears the fields that a create ignores.
func (r *resource) prepareCreate(obj runtime.Object) {
	if r.clearStatus {
		setField(obj, "status", nil)
		if r.defaults != nil {
			r.defaults(obj)
		}
	}
	if r.beforeCreate != nil {
		r.beforeCreate(obj)
	}
}

// prepareUpdate restores the fields that an update ignores.
func (r *resource) prepareUpdate(obj, old runtime.Object) {
	if r.status {
		setField(obj, "status", old)
	}
	if r.beforeUpdate != nil {
		r.beforeUpdate(obj, old)
	}
}

// prepareStatus returns old with the fields of obj that an update of the status may change.
func (r *resource) prepareStatus(obj, old runtime.Object) runtime.Object {
	if r.statusKeepsAll {
		kept := old.DeepCopyObject()
		accessor(kept).SetResourceVersion(accessor(obj).GetResourceVersion())
		if !r.custom {
			accessor(kept).SetUID(accessor(obj).GetUID())
		}
		setField(kept, "status", obj)
		obj = kept
	} else {
		setField(obj, "spec", old)
	}
	if r.beforeStatus != nil {
		r.beforeStatus(obj, old)
	}
	return obj
}

// setField sets spec or status of obj to that of from, or clears it if from is nil.
func setField(obj runtime.Object, name string, from runtime.Object) {
	if u, ok := obj.(*unstructured.Unstructured); ok {
		delete(u.Object, name)
		if from == nil {
			return
		}
		if value, ok := from.DeepCopyObject().(*unstructured.Unstructured).Object[name]; ok {
			u.Object[name] = value
		}
		return
	}
	goName := map[string]string{"spec": "Spec", "status": "Status"}[name]
	to := reflect.ValueOf(obj).Elem().FieldByName(goName)
	if from == nil {
		to.SetZero()
		return
	}
	to.Set(reflect.ValueOf(from.DeepCopyObject()).Elem().FieldByName(goName))
}

// on adapts a function for one type.
func on[T runtime.Object, R any](f func(T) R) func(runtime.Object) R {
	return func(obj runtime.Object) R { return f(obj.(T)) }
}

// do adapts a function for one type.
func do[T runtime.Object](f func(T)) func(runtime.Object) {
	return func(obj runtime.Object) { f(obj.(T)) }
}

// pair adapts a function for two objects of one type.
func pair[T runtime.Object](f func(obj, old T)) func(obj, old runtime.Object) {
	return func(obj, old runtime.Object) { f(obj.(T), old.(T)) }
}

// check adapts a validation of an update.
func check[T runtime.Object](f func(obj, old T) field.ErrorList) func(obj, old runtime.Object) field.ErrorList {
	return func(obj, old runtime.Object) field.ErrorList { return f(obj.(T), old.(T)) }
}

// admit adapts an admission plugin that refuses nothing.
func admit[T runtime.Object](f func(T)) func(*Server, runtime.Object) error {
	return func(_ *Server, obj runtime.Object) error {
		f(obj.(T))
		return nil
	}
}

// protect returns the admission plugin that adds a finalizer to new objects.
func protect(finalizer string) func(*Server, runtime.Object) error {
	return func(_ *Server, obj runtime.Object) error {
		if m := accessor(obj); !slices.Contains(m.GetFinalizers(), finalizer) {
			m.SetFinalizers(append(m.GetFinalizers(), finalizer))
		}
		return nil
	}
}

var podSelectors = []string{"spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "status.phase"}

func podFields(pod *corev1.Pod) fields.Set {
	return fields.Set{
		"spec.nodeName": pod.Spec.NodeName, "spec.restartPolicy": string(pod.Spec.RestartPolicy),
		"spec.schedulerName":      pod.Spec.SchedulerName,
		"spec.serviceAccountName": pod.Spec.ServiceAccountName, "status.phase": string(pod.Status.Phase),
	}
}

var eventSelectors = []string{
	"involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid", "involvedObject.apiVersion",
	"involvedObject.resourceVersion", "involvedObject.fieldPath", "reason", "reportingComponent", "source", "type",
}

func eventFields(e *corev1.Event) fields.Set {
	source := e.Source.Component
	if source == "" {
		source = e.ReportingController
	}
	o := e.InvolvedObject
	return fields.Set{
		"involvedObject.kind": o.Kind, "involvedObject.namespace": o.Namespace, "involvedObject.name": o.Name,
		"involvedObject.uid": string(o.UID), "involvedObject.apiVersion": o.APIVersion, "involvedObject.resourceVersion": o.ResourceVersion,
		"involvedObject.fieldPath": o.FieldPath, "reason": e.Reason, "reportingComponent": e.ReportingController, "source": source,
		"type": e.Type,
	}
}
