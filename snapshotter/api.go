// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"sync"

	groupv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/gentype"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// object is a VolumeSnapshotContent or a VolumeGroupSnapshotContent.
type object interface {
	comparable
	metav1.Object
	runtime.Object
}

// client calls the API server for one resource.
type client[T object, L runtime.Object] struct {
	*gentype.ClientWithList[T, L]
	resource schema.GroupVersionResource
	empty    func() T
}

// schemeOf returns the scheme of one version of an API group. The types are those of its version v1, which has the
// schema of v1beta2.
var schemeOf = func() func(schema.GroupVersion) *runtime.Scheme {
	var mu sync.Mutex
	known := map[schema.GroupVersion]*runtime.Scheme{}
	return func(version schema.GroupVersion) *runtime.Scheme {
		mu.Lock()
		defer mu.Unlock()
		if s, ok := known[version]; ok {
			return s
		}
		s := runtime.NewScheme()
		if version.Group == groupv1.GroupName {
			s.AddKnownTypes(version, &groupv1.VolumeGroupSnapshotContent{}, &groupv1.VolumeGroupSnapshotContentList{},
				&groupv1.VolumeGroupSnapshotClass{}, &groupv1.VolumeGroupSnapshotClassList{})
		} else {
			s.AddKnownTypes(version, &snapshotv1.VolumeSnapshotContent{}, &snapshotv1.VolumeSnapshotContentList{},
				&snapshotv1.VolumeSnapshotClass{}, &snapshotv1.VolumeSnapshotClassList{})
		}
		metav1.AddToGroupVersion(s, version)
		known[version] = s
		return s
	}
}()

// restClient returns a client for one version of an API group.
func restClient(config *rest.Config, version schema.GroupVersion) (rest.Interface, runtime.ParameterCodec, error) {
	scheme := schemeOf(version)
	c := kube.ForCustomResources(config)
	c.GroupVersion, c.APIPath = &version, "/apis"
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	client, err := rest.RESTClientFor(c)
	return client, runtime.NewParameterCodec(scheme), err
}

// newClient returns a client for the cluster-scoped resource of the types T and L.
func newClient[T object, L runtime.Object](
	config *rest.Config, resource schema.GroupVersionResource, one func() T, list func() L,
) (client[T, L], error) {
	rest, codec, err := restClient(config, resource.GroupVersion())
	if err != nil {
		return client[T, L]{}, err
	}
	return client[T, L]{gentype.NewClientWithList(resource.Resource, rest, codec, "", one, list), resource, one}, nil
}

// source returns the watch of the resource. Objects for which foreign returns true belong to other
// drivers; it may also remove fields of an object.
func (c client[T, L]) source(foreign func(T) bool, indexers cache.Indexers) kube.Source[L] {
	return kube.Source[L]{
		Resource: c.resource, Object: c.empty(), List: c.List, Watch: c.Watch, Indexers: indexers,
		Transform: func(obj any) (any, error) { return trim(obj, foreign), nil },
	}
}

// status returns the writer of the status subresource.
func (c client[T, L]) status() kube.Writer[T] { return statusWriter[T, L]{c} }

// statusWriter writes to the status subresource.
type statusWriter[T object, L runtime.Object] struct{ client client[T, L] }

func (w statusWriter[T, L]) Get(ctx context.Context, name string, opts metav1.GetOptions) (T, error) {
	return w.client.Get(ctx, name, opts)
}

func (w statusWriter[T, L]) Update(ctx context.Context, obj T, opts metav1.UpdateOptions) (T, error) {
	return w.client.UpdateStatus(ctx, obj, opts)
}

func (w statusWriter[T, L]) Patch(
	ctx context.Context, name string, pt types.PatchType, data []byte, opts metav1.PatchOptions, _ ...string,
) (T, error) {
	return w.client.Patch(ctx, name, pt, data, opts, "status")
}

// trim returns obj without the fields that are never read, or a stub for an object of another driver.
// The type of the stub is another, so that it is in no result of an informer.
func trim[T object](obj any, foreign func(T) bool) any {
	o, ok := obj.(T)
	if !ok {
		return obj
	}
	if foreign(o) {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
			Name: o.GetName(), UID: o.GetUID(), ResourceVersion: o.GetResourceVersion(),
		}}
	}
	o.SetManagedFields(nil)
	delete(o.GetAnnotations(), lastApplied)
	return o
}

// stub returns the metadata that is retained of a class of another driver.
func stub(m metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion}
}

// lastApplied is the annotation of kubectl apply, which the caches drop.
const lastApplied = "kubectl.kubernetes.io/last-applied-configuration"

type (
	contentClient    = client[*snapshotv1.VolumeSnapshotContent, *snapshotv1.VolumeSnapshotContentList]
	classClient      = client[*snapshotv1.VolumeSnapshotClass, *snapshotv1.VolumeSnapshotClassList]
	groupClient      = client[*groupv1.VolumeGroupSnapshotContent, *groupv1.VolumeGroupSnapshotContentList]
	groupClassClient = client[*groupv1.VolumeGroupSnapshotClass, *groupv1.VolumeGroupSnapshotClassList]
)

func newContentClient(config *rest.Config) (contentClient, error) {
	return newClient(config, snapshotv1.SchemeGroupVersion.WithResource("volumesnapshotcontents"),
		func() *snapshotv1.VolumeSnapshotContent { return &snapshotv1.VolumeSnapshotContent{} },
		func() *snapshotv1.VolumeSnapshotContentList { return &snapshotv1.VolumeSnapshotContentList{} })
}

func newClassClient(config *rest.Config) (classClient, error) {
	return newClient(config, snapshotv1.SchemeGroupVersion.WithResource("volumesnapshotclasses"),
		func() *snapshotv1.VolumeSnapshotClass { return &snapshotv1.VolumeSnapshotClass{} },
		func() *snapshotv1.VolumeSnapshotClassList { return &snapshotv1.VolumeSnapshotClassList{} })
}

func newGroupClient(config *rest.Config, version string) (groupClient, error) {
	return newClient(config, groupResource(version, "volumegroupsnapshotcontents"),
		func() *groupv1.VolumeGroupSnapshotContent { return &groupv1.VolumeGroupSnapshotContent{} },
		func() *groupv1.VolumeGroupSnapshotContentList { return &groupv1.VolumeGroupSnapshotContentList{} })
}

func newGroupClassClient(config *rest.Config, version string) (groupClassClient, error) {
	return newClient(config, groupResource(version, "volumegroupsnapshotclasses"),
		func() *groupv1.VolumeGroupSnapshotClass { return &groupv1.VolumeGroupSnapshotClass{} },
		func() *groupv1.VolumeGroupSnapshotClassList { return &groupv1.VolumeGroupSnapshotClassList{} })
}

func groupResource(version, resource string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: groupv1.GroupName, Version: version, Resource: resource}
}

// groupVersionOld has another schema and is only looked for.
const groupVersionOld = "v1beta1"

// groupVersions are the versions of group snapshots in the order of preference. They have one schema.
var groupVersions = []string{"v1", "v1beta2"}
