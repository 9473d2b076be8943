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
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
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

// APIReader reads the state from the API server. It must not be used concurrently.
type APIReader struct {
	client      kubernetes.Interface
	meta        metadata.Interface
	dynamic     dynamic.Interface
	driver      string
	reader      *apiread.Reader // of the last Read
	unread      []finding.Finding
	volumes     int
	attachments int
	foreign     map[string]string // UIDs of the VolumeSnapshots with a content of another driver, by name; "": unknown
}

// NewAPIReader returns a reader of the objects of driver.
func NewAPIReader(client kubernetes.Interface, meta metadata.Interface, dynamic dynamic.Interface, driver string) *APIReader {
	r := &APIReader{client: client, meta: meta, dynamic: dynamic, driver: driver}
	r.reset()
	return r
}

// readTimeout bounds each request: an API server ends it after this time, too.
const readTimeout = time.Minute

// reset removes the results of the last Read.
func (r *APIReader) reset() {
	r.unread, r.volumes, r.attachments, r.foreign = nil, 0, 0, nil
	r.reader = apiread.New(readTimeout, func(f finding.Finding) { r.unread = append(r.unread, f) })
}

// Unread returns findings of severity unknown: the resources that the last Read may not list, and the consequences.
func (r *APIReader) Unread() []finding.Finding { return r.unread }

// Counts returns the numbers of volumes and attachments of the driver in the last Read.
func (r *APIReader) Counts() (volumes, attachments int) { return r.volumes, r.attachments }

// Read lists all objects, and first the LogicalVolumes of a driver of TopoLVM. It fails without the permission to list
// PersistentVolumes; a missing permission for another resource is a finding.
func (r *APIReader) Read(ctx context.Context) (ClusterState, error) {
	r.reset()
	var state ClusterState
	if err := r.readLogicalVolumes(ctx, &state); err != nil {
		return state, err
	}
	query := apiread.Query{Topic: "volumes", What: "PersistentVolumes"}
	volumes, err := list[*corev1.PersistentVolume](ctx, r, query, r.client.CoreV1().PersistentVolumes().List)
	if err == nil && !volumes.Found {
		err = fmt.Errorf("listing PersistentVolumes: %w. Grant list on persistentvolumes", volumes.Err)
	}
	if err != nil {
		return state, err
	}
	for _, pv := range volumes.Value {
		if _, _, ok := migration.HandleOf(r.driver, pv); ok {
			r.volumes++
		}
	}
	state.Volumes = volumes.Value
	for _, read := range []func(context.Context, *ClusterState) error{r.readAttachments, r.readClaims, r.readContents, r.readOthers} {
		if err := read(ctx, &state); err != nil {
			return state, err
		}
	}
	return state, nil
}

// list reads all objects of a kind. A missing permission is no error.
func list[T, L runtime.Object](
	ctx context.Context, r *APIReader, q apiread.Query, request func(context.Context, metav1.ListOptions) (L, error),
) (apiread.Result[[]T], error) {
	result := apiread.List[T](ctx, r.reader, q, request)
	if result.Found || apierrors.IsForbidden(result.Err) {
		return result, nil
	}
	return result, fmt.Errorf("listing %s: %w", q.What, result.Err)
}

// readLogicalVolumes reads the LogicalVolumes of a driver of TopoLVM.
func (r *APIReader) readLogicalVolumes(ctx context.Context, state *ClusterState) error {
	if !topolvm.IsDriver(r.driver) {
		return nil
	}
	query := apiread.Query{Topic: "volumes", What: "LogicalVolumes", Effect: "Volumes and snapshots were not compared."}
	objects, err := list[*unstructured.Unstructured](ctx, r, query, r.dynamic.Resource(topolvm.Resource(r.driver)).List)
	switch {
	case objects.Missing:
		r.unread = append(r.unread, notCompared(query.Topic, "The cluster does not serve LogicalVolumes of "+r.driver+". "+query.Effect))
		return nil
	case err != nil || !objects.Found:
		return err
	}
	state.LogicalVolumes = make([]*topolvm.LogicalVolume, len(objects.Value))
	for i, object := range objects.Value {
		if state.LogicalVolumes[i], err = apiread.Decode[topolvm.LogicalVolume](object.Object); err != nil {
			return fmt.Errorf("reading LogicalVolume %s: %w", object.GetName(), err)
		}
	}
	return nil
}

// readContents reads the VolumeSnapshotContents of the driver that have a snapshot. Without their CRD, every snapshot is without a
// content.
func (r *APIReader) readContents(ctx context.Context, state *ClusterState) error {
	resource := schema.GroupVersionResource{Group: "snapshot.storage.k8s.io", Version: "v1", Resource: "volumesnapshotcontents"}
	query := apiread.Query{Topic: "snapshots", What: "VolumeSnapshotContents", Effect: "Snapshots were not compared."}
	contents, err := list[*unstructured.Unstructured](ctx, r, query, r.dynamic.Resource(resource).List)
	if !contents.Found && !contents.Missing {
		return err
	}
	state.Contents, state.Others, r.foreign = []Content{}, map[string]metav1.Object{}, map[string]string{}
	for _, c := range contents.Value {
		driver, _, _ := unstructured.NestedString(c.Object, "spec", "driver")
		handle, _, _ := unstructured.NestedString(c.Object, "status", "snapshotHandle")
		if handle == "" { // pre-provisioned
			handle, _, _ = unstructured.NestedString(c.Object, "spec", "source", "snapshotHandle")
		}
		if driver != r.driver {
			namespace, _, _ := unstructured.NestedString(c.Object, "spec", "volumeSnapshotRef", "namespace")
			name, _, _ := unstructured.NestedString(c.Object, "spec", "volumeSnapshotRef", "name")
			uid, _, _ := unstructured.NestedString(c.Object, "spec", "volumeSnapshotRef", "uid")
			r.foreign[namespace+"/"+name] = uid
			continue
		}
		state.Others["VolumeSnapshotContent "+c.GetName()] = c
		if handle == "" {
			state.Creating++
			continue
		}
		state.Contents = append(state.Contents, Content{c.GetName(), string(c.GetUID()), handle})
	}
	return nil
}

func (r *APIReader) readAttachments(ctx context.Context, state *ClusterState) error {
	query := apiread.Query{Topic: "attachments", What: "VolumeAttachments", Effect: "Attachments were not compared."}
	attachments, err := list[*storagev1.VolumeAttachment](ctx, r, query, r.client.StorageV1().VolumeAttachments().List)
	if err != nil {
		return err
	}
	if !attachments.Found {
		state.Unread = append(state.Unread, query.What)
	}
	for _, va := range attachments.Value {
		if va.Spec.Attacher == r.driver {
			r.attachments++
		}
	}
	state.Attachments, state.Attached = attachments.Value, attachments.Found
	query = apiread.Query{Topic: "attachments", What: "CSINodes",
		Effect: "Attachments without annotation " + annNodeID + " were not compared."}
	nodes, err := list[*storagev1.CSINode](ctx, r, query, r.client.StorageV1().CSINodes().List)
	state.NodeIDs = nodeIDs(r.driver, nodes.Value)
	return err
}

func (r *APIReader) readClaims(ctx context.Context, state *ClusterState) error {
	query := apiread.Query{Topic: Stuck, What: "PersistentVolumeClaims", Effect: "Claims stuck in deletion were not searched."}
	claims, err := list[*corev1.PersistentVolumeClaim](ctx, r, query, r.client.CoreV1().PersistentVolumeClaims(metav1.NamespaceAll).List)
	if !claims.Found {
		state.Unread = append(state.Unread, query.What)
	}
	state.Claims = claims.Value
	return err
}

// readOthers reads the metadata of Nodes and VolumeSnapshots with a finalizer of the roles. The one of a VolumeSnapshot is the same
// for all drivers.
func (r *APIReader) readOthers(ctx context.Context, state *ClusterState) error {
	if state.Others == nil { // without VolumeSnapshotContents
		state.Others = map[string]metav1.Object{}
	}
	snapshots := schema.GroupVersionResource{Group: "snapshot.storage.k8s.io", Version: "v1", Resource: "volumesnapshots"}
	for _, kind := range []struct {
		name, finalizer string
		resource        schema.GroupVersionResource
	}{
		{"Node", strings.ToLower(r.driver) + "/node", corev1.SchemeGroupVersion.WithResource("nodes")},
		{"VolumeSnapshot", kube.SnapshotProtection, snapshots},
	} {
		query := apiread.Query{Topic: Stuck, What: kind.name + "s", Effect: kind.name + "s stuck in deletion were not searched."}
		objects, err := list[*metav1.PartialObjectMetadata](ctx, r, query, r.meta.Resource(kind.resource).List)
		if err != nil && !objects.Missing { // without the CRD there are none
			return err
		}
		for _, obj := range objects.Value {
			uid, foreign := r.foreign[kube.Key(obj)]
			foreign = foreign && kind.name == "VolumeSnapshot" && (uid == "" || uid == string(obj.UID))
			if slices.Contains(obj.Finalizers, kind.finalizer) && !foreign {
				state.Others[kind.name+" "+kube.Key(obj)] = obj
			}
		}
	}
	return nil
}
