// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"sync"

	groupv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/gentype"
	"k8s.io/client-go/rest"

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

// object is an object of the API.
type object interface {
	metav1.Object
	runtime.Object
}

// resource calls the API server for the objects of one kind, which are cluster-scoped.
type resource struct {
	schema.GroupVersionResource
	*gentype.ClientWithList[object, runtime.Object]
	empty object // of the kind
}

func newResource(config *rest.Config, version schema.GroupVersion, kind string) (r resource, err error) {
	r.GroupVersionResource, _ = meta.UnsafeGuessKindToResource(version.WithKind(kind))
	c := kube.ForCustomResources(config)
	c.GroupVersion, c.APIPath = &version, "/apis"
	c.NegotiatedSerializer = serializer.NewCodecFactory(schemeOf()).WithoutConversion()
	client, errClient := rest.RESTClientFor(c)
	empty, errKind := schemeOf().New(version.WithKind(kind))
	list, errList := schemeOf().New(version.WithKind(kind + "List"))
	if err := errors.Join(errClient, errKind, errList); err != nil {
		return r, fmt.Errorf("creating the client of %s: %w", r.Resource, err)
	}
	r.empty = empty.(object)
	r.ClientWithList = gentype.NewClientWithList(r.Resource, client, runtime.NewParameterCodec(schemeOf()), "",
		func() object { return empty.DeepCopyObject().(object) }, list.DeepCopyObject)
	return r, nil
}

// source returns the watch of r.
func (r resource) source(transform func(any) (any, error)) kube.Source[runtime.Object] {
	return kube.Source[runtime.Object]{
		Resource: r.GroupVersionResource, Object: r.empty, List: r.List, Watch: r.Watch, Transform: transform,
	}
}

// writer reads contents, and writes them or their status.
type writer struct {
	contents resource
	status   bool
}

func (w writer) Get(ctx context.Context, name string, opts metav1.GetOptions) (*content, error) {
	o, err := w.contents.Get(ctx, name, opts)
	return contentOf(o), err
}

func (w writer) Update(ctx context.Context, c *content, opts metav1.UpdateOptions) (*content, error) {
	update := w.contents.Update
	if w.status {
		update = w.contents.UpdateStatus
	}
	o, err := update(ctx, c.raw, opts)
	return contentOf(o), err
}

func (w writer) Patch(
	ctx context.Context, name string, pt types.PatchType, data []byte, opts metav1.PatchOptions, subresources ...string,
) (*content, error) {
	if w.status {
		subresources = []string{"status"}
	}
	o, err := w.contents.Patch(ctx, name, pt, data, opts, subresources...)
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
