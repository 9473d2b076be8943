// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"hash/maphash"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// compact is an object in the cache of an informer: the values in which it differs from a template, which objects share. Most
// PersistentVolumes, claims and VolumeAttachments have few of them. [Informer] returns the object, which is created for each call.
// An object for which there is no template is in the cache as it is.
type compact interface {
	// GetObjectMeta returns the key and the version of the object for the cache.
	metav1.ObjectMetaAccessor
	object() metav1.Object
}

// compacting returns trim, and compacts its results.
func compacting(trim cache.TransformFunc) cache.TransformFunc {
	return func(obj any) (any, error) {
		if _, ok := obj.(compact); ok { // client-go may transform an object again
			return obj, nil
		}
		trimmed, err := trim(obj)
		if err != nil {
			return nil, err
		}
		if o, ok := trimmed.(metav1.Object); ok && o.GetDeletionTimestamp() != nil { // it changes soon, and no other object is like it
			return trimmed, nil
		}
		switch o := trimmed.(type) {
		case *corev1.PersistentVolume:
			return compactVolumeOf(o), nil
		case *corev1.PersistentVolumeClaim:
			return compactClaimOf(o), nil
		case *storagev1.VolumeAttachment:
			return compactAttachmentOf(o), nil
		}
		return trimmed, nil
	}
}

// typedObject returns an object of a cache, or false if it has another type.
func typedObject[T any](obj any) (T, bool) {
	if c, ok := obj.(compact); ok {
		obj = c.object()
	}
	o, ok := obj.(T)
	return o, ok
}

// template is an object without the values of a compact one. Equal templates have the same encoding.
type template[T any] struct {
	encoding string
	object   *T
}

var (
	volumeTemplates     pool[template[corev1.PersistentVolume]]
	claimTemplates      pool[template[corev1.PersistentVolumeClaim]]
	attachmentTemplates pool[template[storagev1.VolumeAttachment]]
)

// templateOf returns the template of an earlier object that is equal to rest. If there is none, it returns nil and keeps rest for
// later objects.
func templateOf[T any, P interface {
	*T
	Marshal() ([]byte, error)
}](p *pool[template[T]], rest P) *T {
	encoding, err := rest.Marshal()
	if err != nil || len(encoding) > maxPooled {
		return nil
	}
	t := template[T]{string(encoding), rest}
	p.share(&t, maphash.Bytes(hashSeed, encoding), func(a, b template[T]) bool { return a.encoding == b.encoding })
	if t.object == rest {
		return nil
	}
	return t.object
}

// identity has the metadata in which objects with one template differ.
type identity struct {
	name, version string
	uid           types.UID
	created       metav1.Time
	annotations   map[string]string
}

// take moves the identity from m to i.
func (i *identity) take(m *metav1.ObjectMeta) {
	*i = identity{m.Name, m.ResourceVersion, m.UID, m.CreationTimestamp, m.Annotations}
	(&identity{}).restore(m)
}

// restore sets the identity of m.
func (i *identity) restore(m *metav1.ObjectMeta) {
	m.Name, m.ResourceVersion, m.UID, m.CreationTimestamp, m.Annotations = i.name, i.version, i.uid, i.created, i.annotations
}

// metadata returns a copy of m with the identity.
func (i *identity) metadata(m metav1.ObjectMeta) metav1.Object {
	i.restore(&m)
	return &m
}

// compactVolume is a PersistentVolume.
type compactVolume struct {
	template                *corev1.PersistentVolume
	id                      identity
	capacity                corev1.ResourceList
	affinity                *corev1.VolumeNodeAffinity
	claimName, claimVersion string
	claimUID                types.UID
	handle                  string
	attributes              map[string]string
}

// compactVolumeOf returns pv, compact if it has a template.
func compactVolumeOf(pv *corev1.PersistentVolume) any {
	rest, c := *pv, &compactVolume{}
	c.id.take(&rest.ObjectMeta)
	spec := &rest.Spec
	c.capacity, spec.Capacity = spec.Capacity, nil
	c.affinity, spec.NodeAffinity = spec.NodeAffinity, nil
	if spec.ClaimRef != nil {
		ref := *spec.ClaimRef
		c.claimName, c.claimVersion, c.claimUID = ref.Name, ref.ResourceVersion, ref.UID
		ref.Name, ref.ResourceVersion, ref.UID = "", "", ""
		spec.ClaimRef = &ref
	}
	if spec.CSI != nil {
		csi := *spec.CSI
		c.handle, c.attributes = csi.VolumeHandle, csi.VolumeAttributes
		csi.VolumeHandle, csi.VolumeAttributes = "", nil
		spec.CSI = &csi
	}
	c.template = templateOf(&volumeTemplates, &rest)
	if c.template == nil {
		return pv
	}
	return c
}

// GetObjectMeta implements [compact].
func (c *compactVolume) GetObjectMeta() metav1.Object { return c.id.metadata(c.template.ObjectMeta) }

func (c *compactVolume) object() metav1.Object {
	pv := *c.template
	c.id.restore(&pv.ObjectMeta)
	spec := &pv.Spec
	spec.Capacity, spec.NodeAffinity = c.capacity, c.affinity
	if spec.ClaimRef != nil {
		ref := *spec.ClaimRef
		ref.Name, ref.ResourceVersion, ref.UID = c.claimName, c.claimVersion, c.claimUID
		spec.ClaimRef = &ref
	}
	if spec.CSI != nil {
		csi := *spec.CSI
		csi.VolumeHandle, csi.VolumeAttributes = c.handle, c.attributes
		spec.CSI = &csi
	}
	return &pv
}

// compactClaim is a PersistentVolumeClaim.
type compactClaim struct {
	template           *corev1.PersistentVolumeClaim
	id                 identity
	volume             string
	requests, capacity corev1.ResourceList
}

// compactClaimOf returns pvc, compact if it has a template.
func compactClaimOf(pvc *corev1.PersistentVolumeClaim) any {
	rest, c := *pvc, &compactClaim{}
	c.id.take(&rest.ObjectMeta)
	c.volume, rest.Spec.VolumeName = rest.Spec.VolumeName, ""
	c.requests, rest.Spec.Resources.Requests = rest.Spec.Resources.Requests, nil
	c.capacity, rest.Status.Capacity = rest.Status.Capacity, nil
	c.template = templateOf(&claimTemplates, &rest)
	if c.template == nil {
		return pvc
	}
	return c
}

// GetObjectMeta implements [compact].
func (c *compactClaim) GetObjectMeta() metav1.Object { return c.id.metadata(c.template.ObjectMeta) }

func (c *compactClaim) object() metav1.Object {
	pvc := *c.template
	c.id.restore(&pvc.ObjectMeta)
	pvc.Spec.VolumeName, pvc.Spec.Resources.Requests, pvc.Status.Capacity = c.volume, c.requests, c.capacity
	return &pvc
}

// compactAttachment is a VolumeAttachment.
type compactAttachment struct {
	template *storagev1.VolumeAttachment
	id       identity
	node     string
	volume   *string
	metadata map[string]string
}

// compactAttachmentOf returns va, compact if it has a template.
func compactAttachmentOf(va *storagev1.VolumeAttachment) any {
	rest, c := *va, &compactAttachment{}
	c.id.take(&rest.ObjectMeta)
	c.node, rest.Spec.NodeName = rest.Spec.NodeName, ""
	c.volume, rest.Spec.Source.PersistentVolumeName = rest.Spec.Source.PersistentVolumeName, nil
	c.metadata, rest.Status.AttachmentMetadata = rest.Status.AttachmentMetadata, nil
	c.template = templateOf(&attachmentTemplates, &rest)
	if c.template == nil {
		return va
	}
	return c
}

// GetObjectMeta implements [compact].
func (c *compactAttachment) GetObjectMeta() metav1.Object {
	return c.id.metadata(c.template.ObjectMeta)
}

func (c *compactAttachment) object() metav1.Object {
	va := *c.template
	c.id.restore(&va.ObjectMeta)
	va.Spec.NodeName, va.Spec.Source.PersistentVolumeName, va.Status.AttachmentMetadata = c.node, c.volume, c.metadata
	return &va
}
