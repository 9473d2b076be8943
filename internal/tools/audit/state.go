// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/topolvm"
)

// CacheReader reads the state from the informers of a running process.
type CacheReader struct {
	Driver  string
	Volumes kube.Informer[*corev1.PersistentVolume]
	Claims  kube.Informer[*corev1.PersistentVolumeClaim]
	// Attachments and Nodes are nil if the process does not watch them.
	Attachments *kube.Informer[*storagev1.VolumeAttachment]
	Nodes       *kube.Informer[*storagev1.CSINode]
	// LogicalVolumes returns those of TopoLVM, or nil before they are known. It is nil if the process does not watch them.
	LogicalVolumes func() []*topolvm.LogicalVolume
}

// Read returns the state for [Auditor].
func (c CacheReader) Read(context.Context) (ClusterState, error) {
	var state ClusterState
	if c.LogicalVolumes != nil {
		state.LogicalVolumes = c.LogicalVolumes()
	}
	state.Volumes, state.Claims = c.Volumes.List(), c.Claims.List()
	if c.Attachments != nil {
		state.Attachments, state.Attached = c.Attachments.List(), true
	} else if c.LogicalVolumes == nil { // TopoLVM attaches no volumes
		state.Unread = []string{"VolumeAttachments"}
	}
	if c.Nodes != nil {
		state.NodeIDs = nodeIDs(c.Driver, c.Nodes.List())
	}
	return state, nil
}

// nodeIDs returns the IDs that driver uses for nodes, by the name of the Node.
func nodeIDs(driver string, nodes []*storagev1.CSINode) map[string]string {
	ids := map[string]string{}
	for _, n := range nodes {
		if d := kube.DriverOnNode(n, driver); d != nil {
			ids[n.Name] = d.NodeID
		}
	}
	return ids
}

// APIReader reads the state from the API server.
type APIReader struct {
	apiread.Clients
	Driver string
}

// readTimeout bounds each request: an API server ends it after this time, too.
const readTimeout = time.Minute

// Read lists all objects, and first the LogicalVolumes of a driver of TopoLVM. It fails without the permission to list
// PersistentVolumes; a missing permission for another resource is a finding.
func (a APIReader) Read(ctx context.Context) (ClusterState, error) {
	r := newReading(a)
	if err := r.logicalVolumes(ctx); err != nil {
		return r.state, err
	}
	query := apiread.Query{Topic: "volumes", What: "PersistentVolumes"}
	volumes, err := list[*corev1.PersistentVolume](ctx, r, query, r.Kubernetes.CoreV1().PersistentVolumes().List)
	if err == nil && !volumes.Found {
		err = fmt.Errorf("listing PersistentVolumes: %w. Grant list on persistentvolumes", volumes.Err)
	}
	if err != nil {
		return r.state, err
	}
	r.state.Volumes = volumes.Value
	for _, read := range []func(context.Context) error{r.attachments, r.claims, r.contents, r.others} {
		if err := read(ctx); err != nil {
			return r.state, err
		}
	}
	return r.state, nil
}

// reading is one [APIReader.Read].
type reading struct {
	APIReader
	reader  *apiread.Reader
	state   ClusterState
	foreign map[string]string // UIDs of the VolumeSnapshots with a content of another driver, by name; "": unknown
}

func newReading(a APIReader) *reading {
	r := &reading{APIReader: a, foreign: map[string]string{}}
	r.state.Others = map[string]metav1.Object{}
	r.reader = apiread.New(readTimeout, func(f finding.Finding) { r.state.NotCompared = append(r.state.NotCompared, f) })
	return r
}

// list reads all objects of a kind. A missing permission is no error.
func list[T, L runtime.Object](
	ctx context.Context, r *reading, q apiread.Query, request func(context.Context, metav1.ListOptions) (L, error),
) (apiread.Result[[]T], error) {
	result := apiread.List[T](ctx, r.reader, q, request)
	if result.Found || apierrors.IsForbidden(result.Err) {
		return result, nil
	}
	return result, fmt.Errorf("listing %s: %w", q.What, result.Err)
}

// logicalVolumes reads the LogicalVolumes of a driver of TopoLVM.
func (r *reading) logicalVolumes(ctx context.Context) error {
	if !topolvm.IsDriver(r.Driver) {
		return nil
	}
	query := apiread.Query{Topic: "volumes", What: "LogicalVolumes", Effect: "Volumes and snapshots were not compared."}
	objects, err := list[*unstructured.Unstructured](ctx, r, query, r.Dynamic.Resource(topolvm.Resource(r.Driver)).List)
	switch {
	case objects.Missing:
		r.state.NotCompared = append(r.state.NotCompared,
			finding.New(finding.Unknown, query.Topic, "The cluster does not serve LogicalVolumes of "+r.Driver+". "+query.Effect, ""))
		return nil
	case err != nil || !objects.Found:
		return err
	}
	r.state.LogicalVolumes = make([]*topolvm.LogicalVolume, len(objects.Value))
	for i, object := range objects.Value {
		r.state.LogicalVolumes[i], err = apiread.Decode[topolvm.LogicalVolume](object.Object)
		if err != nil {
			return fmt.Errorf("reading LogicalVolume %s: %w", object.GetName(), err)
		}
	}
	return nil
}

// contents reads the VolumeSnapshotContents of the driver that have a snapshot. Without their CRD, every snapshot is without a
// content.
func (r *reading) contents(ctx context.Context) error {
	query := apiread.Query{Topic: "snapshots", What: "VolumeSnapshotContents", Effect: "Snapshots were not compared."}
	contents, err := list[*unstructured.Unstructured](ctx, r, query, r.Dynamic.Resource(apiread.SnapshotContents).List)
	if !contents.Found && !contents.Missing {
		return err
	}
	r.state.Contents = []Content{}
	for _, c := range contents.Value {
		driver, _, _ := unstructured.NestedString(c.Object, "spec", "driver")
		handle, _, _ := unstructured.NestedString(c.Object, "status", "snapshotHandle")
		if handle == "" { // pre-provisioned
			handle, _, _ = unstructured.NestedString(c.Object, "spec", "source", "snapshotHandle")
		}
		if driver != r.Driver {
			namespace, _, _ := unstructured.NestedString(c.Object, "spec", "volumeSnapshotRef", "namespace")
			name, _, _ := unstructured.NestedString(c.Object, "spec", "volumeSnapshotRef", "name")
			uid, _, _ := unstructured.NestedString(c.Object, "spec", "volumeSnapshotRef", "uid")
			r.foreign[namespace+"/"+name] = uid
			continue
		}
		r.state.Others["VolumeSnapshotContent "+c.GetName()] = c
		if handle == "" {
			r.state.Creating++
			continue
		}
		r.state.Contents = append(r.state.Contents, Content{c.GetName(), string(c.GetUID()), handle})
	}
	return nil
}

func (r *reading) attachments(ctx context.Context) error {
	query := apiread.Query{Topic: "attachments", What: "VolumeAttachments", Effect: "Attachments were not compared."}
	attachments, err := list[*storagev1.VolumeAttachment](ctx, r, query, r.Kubernetes.StorageV1().VolumeAttachments().List)
	if err != nil {
		return err
	}
	if !attachments.Found {
		r.state.Unread = append(r.state.Unread, query.What)
	}
	r.state.Attachments, r.state.Attached = attachments.Value, attachments.Found
	query = apiread.Query{Topic: "attachments", What: "CSINodes",
		Effect: "Attachments without annotation " + annNodeID + " were not compared."}
	nodes, err := list[*storagev1.CSINode](ctx, r, query, r.Kubernetes.StorageV1().CSINodes().List)
	r.state.NodeIDs = nodeIDs(r.Driver, nodes.Value)
	return err
}

func (r *reading) claims(ctx context.Context) error {
	query := apiread.Query{Topic: Stuck, What: "PersistentVolumeClaims", Effect: "Claims stuck in deletion were not searched."}
	claims, err := list[*corev1.PersistentVolumeClaim](ctx, r, query,
		r.Kubernetes.CoreV1().PersistentVolumeClaims(metav1.NamespaceAll).List)
	if !claims.Found {
		r.state.Unread = append(r.state.Unread, query.What)
	}
	r.state.Claims = claims.Value
	return err
}

// others reads the metadata of Nodes and VolumeSnapshots with a finalizer of the roles. The one of a VolumeSnapshot is the same
// for all drivers.
func (r *reading) others(ctx context.Context) error {
	for _, kind := range []struct {
		name, finalizer string
		resource        schema.GroupVersionResource
	}{
		{"Node", strings.ToLower(r.Driver) + "/node", corev1.SchemeGroupVersion.WithResource("nodes")},
		{"VolumeSnapshot", kube.SnapshotProtection, apiread.Snapshots},
	} {
		query := apiread.Query{Topic: Stuck, What: kind.name + "s", Effect: kind.name + "s stuck in deletion were not searched."}
		objects, err := list[*metav1.PartialObjectMetadata](ctx, r, query, r.Metadata.Resource(kind.resource).List)
		if err != nil && !objects.Missing { // without the CRD there are none
			return err
		}
		for _, obj := range objects.Value {
			uid, foreign := r.foreign[kube.Key(obj)]
			foreign = foreign && kind.name == "VolumeSnapshot" && (uid == "" || uid == string(obj.UID))
			if slices.Contains(obj.Finalizers, kind.finalizer) && !foreign {
				r.state.Others[kind.name+" "+kube.Key(obj)] = obj
			}
		}
	}
	return nil
}
