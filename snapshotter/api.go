// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	groupv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// schemeOf returns the scheme of all versions of both kinds. The types of group snapshots are those of version v1, which has the
// schema of v1beta2.
var schemeOf = sync.OnceValue(func() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, version := range snapshotKind.allVersions() {
		s.AddKnownTypes(version, &snapshotv1.VolumeSnapshotContent{}, &snapshotv1.VolumeSnapshotContentList{},
			&snapshotv1.VolumeSnapshotClass{}, &snapshotv1.VolumeSnapshotClassList{})
		metav1.AddToGroupVersion(s, version)
	}
	for _, version := range groupKind.allVersions() {
		s.AddKnownTypes(version, &groupv1.VolumeGroupSnapshotContent{}, &groupv1.VolumeGroupSnapshotContentList{},
			&groupv1.VolumeGroupSnapshotClass{}, &groupv1.VolumeGroupSnapshotClassList{})
		metav1.AddToGroupVersion(s, version)
	}
	return s
})

// resource calls the API server for the objects of one kind, which are cluster-scoped.
type resource struct {
	schema.GroupVersionResource
	empty runtime.Object // of the kind
	rest  rest.Interface
	codec runtime.ParameterCodec
}

func newResource(config *rest.Config, version schema.GroupVersion, kind string) (r resource, err error) {
	r.GroupVersionResource, _ = meta.UnsafeGuessKindToResource(version.WithKind(kind))
	r.codec = runtime.NewParameterCodec(schemeOf())
	if r.empty, err = schemeOf().New(version.WithKind(kind)); err == nil {
		c := kube.ForCustomResources(config)
		c.GroupVersion, c.APIPath = &version, "/apis"
		c.NegotiatedSerializer = serializer.NewCodecFactory(schemeOf()).WithoutConversion()
		r.rest, err = rest.RESTClientFor(c)
	}
	if err != nil {
		return r, fmt.Errorf("creating the client of %s: %w", r.Resource, err)
	}
	return r, nil
}

// get reads the object with that name.
func (r resource) get(ctx context.Context, name string) (runtime.Object, error) {
	return r.send(ctx, r.rest.Get(), name, &metav1.GetOptions{})
}

// send sends a request about the object with that name, and returns the object in the response.
func (r resource) send(ctx context.Context, request *rest.Request, name string, opts runtime.Object) (runtime.Object, error) {
	o := r.empty.DeepCopyObject()
	err := request.Resource(r.Resource).Name(name).VersionedParams(opts, r.codec).Do(ctx).Into(o)
	return o, err
}

func (r resource) list(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
	return r.all(&opts).Do(ctx).Get()
}

func (r resource) watch(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
	opts.Watch = true
	return r.all(&opts).Watch(ctx)
}

// all returns a request for all objects.
func (r resource) all(opts *metav1.ListOptions) *rest.Request {
	timeout := time.Duration(ptr.Deref(opts.TimeoutSeconds, 0)) * time.Second
	return r.rest.Get().Resource(r.Resource).VersionedParams(opts, r.codec).Timeout(timeout)
}

// source returns the watch of r.
func (r resource) source(transform func(any) (any, error)) kube.Source[runtime.Object] {
	return kube.Source[runtime.Object]{
		Resource: r.GroupVersionResource, Object: r.empty, List: r.list, Watch: r.watch, Transform: transform,
	}
}

// writer reads contents, and writes them or a subresource of them.
type writer struct {
	contents     resource
	subresources []string
}

func (w writer) Get(ctx context.Context, name string, opts metav1.GetOptions) (*content, error) {
	return w.send(ctx, w.contents.rest.Get(), name, &opts)
}

func (w writer) Update(ctx context.Context, c *content, opts metav1.UpdateOptions) (*content, error) {
	return w.send(ctx, w.contents.rest.Put().SubResource(w.subresources...).Body(c.raw), c.Name, &opts)
}

func (w writer) Patch(
	ctx context.Context, name string, pt types.PatchType, data []byte, opts metav1.PatchOptions, _ ...string,
) (*content, error) {
	return w.send(ctx, w.contents.rest.Patch(pt).SubResource(w.subresources...).Body(data), name, &opts)
}

func (w writer) send(ctx context.Context, request *rest.Request, name string, opts runtime.Object) (*content, error) {
	o, err := w.contents.send(ctx, request, name, opts)
	return contentOf(o), err
}

// clients holds the clients of one version of contents and classes.
type clients struct{ contents, classes resource }

// newClients returns the clients of all versions.
func newClients(config *rest.Config) (map[schema.GroupVersion]clients, error) {
	all := map[schema.GroupVersion]clients{}
	for _, k := range []*kind{snapshotKind, groupKind} {
		for _, version := range k.allVersions() {
			contents, err := newResource(config, version, k.name)
			classes, errClasses := newResource(config, version, k.classKind)
			if err := errors.Join(err, errClasses); err != nil {
				return nil, err
			}
			all[version] = clients{contents, classes}
		}
	}
	return all, nil
}
