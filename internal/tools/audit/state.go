// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"context"
	"fmt"
	"slices"
	"strings"

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
	unread      []finding.Finding
	volumes     int
	attachments int
	foreign     map[string]string // UIDs of the VolumeSnapshots with a content of another driver, by name; "": unknown
}

// NewAPIReader returns a reader of the objects of driver.
func NewAPIReader(client kubernetes.Interface, meta metadata.Interface, dynamic dynamic.Interface, driver string) *APIReader {
	return &APIReader{client: client, meta: meta, dynamic: dynamic, driver: driver}
}

// Unread returns findings of severity unknown: the resources that the last Read may not list, and the consequences.
func (r *APIReader) Unread() []finding.Finding { return r.unread }

// Counts returns the numbers of volumes and attachments of the driver in the last Read.
func (r *APIReader) Counts() (volumes, attachments int) { return r.volumes, r.attachments }

// Read lists all objects, and first the LogicalVolumes of a driver of TopoLVM. It fails without the permission to list
// PersistentVolumes; a missing permission for another resource is a finding.
func (r *APIReader) Read(ctx context.Context) (ClusterState, error) {
	r.unread, r.volumes, r.attachments, r.foreign = nil, 0, 0, nil
	var state ClusterState
	if err := r.readLogicalVolumes(ctx, &state); err != nil {
		return state, err
	}
	volumes, err := kube.ListAll[*corev1.PersistentVolume](ctx, r.client.CoreV1().PersistentVolumes().List)
	if apierrors.IsForbidden(err) {
		return state, fmt.Errorf("listing PersistentVolumes: %w. Grant list on persistentvolumes", err)
	}
	if err != nil {
		return state, fmt.Errorf("listing PersistentVolumes: %w", err)
	}
	for _, pv := range volumes {
		if _, _, ok := migration.HandleOf(r.driver, pv); ok {
			r.volumes++
		}
	}
	state.Volumes = volumes
	if err := r.readAttachments(ctx, &state); err != nil {
		return state, err
	}
	if err := r.readClaims(ctx, &state); err != nil {
		return state, err
	}
	if err := r.readContents(ctx, &state); err != nil {
		return state, err
	}
	return state, r.readOthers(ctx, &state)
}

// readLogicalVolumes reads the LogicalVolumes of a driver of TopoLVM.
func (r *APIReader) readLogicalVolumes(ctx context.Context, state *ClusterState) error {
	if !topolvm.IsDriver(r.driver) {
		return nil
	}
	objects, err := kube.ListAll[*unstructured.Unstructured](ctx, r.dynamic.Resource(topolvm.Resource(r.driver)).List)
	const consequence = "volumes and snapshots were not compared"
	if apierrors.IsNotFound(err) {
		r.unread = append(r.unread, notCompared("volumes", "the cluster does not serve LogicalVolumes of "+r.driver+": "+consequence))
		return nil
	}
	if ok, err := r.permitted("volumes", "LogicalVolumes", consequence, err); err != nil || !ok {
		return err
	}
	state.LogicalVolumes = make([]*topolvm.LogicalVolume, len(objects))
	for i, object := range objects {
		state.LogicalVolumes[i] = new(topolvm.LogicalVolume)
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, state.LogicalVolumes[i]); err != nil {
			return fmt.Errorf("reading LogicalVolume %s: %w", object.GetName(), err)
		}
	}
	return nil
}

// readContents reads the VolumeSnapshotContents of the driver that have a snapshot.
func (r *APIReader) readContents(ctx context.Context, state *ClusterState) error {
	resource := schema.GroupVersionResource{Group: "snapshot.storage.k8s.io", Version: "v1", Resource: "volumesnapshotcontents"}
	contents, err := kube.ListAll[*unstructured.Unstructured](ctx, r.dynamic.Resource(resource).List)
	if apierrors.IsNotFound(err) { // the CRD is not installed: every snapshot is without a content
		err = nil
	}
	if ok, err := r.permitted("snapshots", "VolumeSnapshotContents", "snapshots were not compared", err); err != nil || !ok {
		return err
	}
	state.Contents, state.Others, r.foreign = []Content{}, map[string]metav1.Object{}, map[string]string{}
	for _, c := range contents {
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
	attachments, err := kube.ListAll[*storagev1.VolumeAttachment](ctx, r.client.StorageV1().VolumeAttachments().List)
	if state.Attached, err = r.permitted("attachments", "VolumeAttachments", "attachments were not compared", err); err != nil {
		return err
	}
	if !state.Attached {
		state.Unread = append(state.Unread, "VolumeAttachments")
	}
	for _, va := range attachments {
		if va.Spec.Attacher == r.driver {
			r.attachments++
		}
	}
	state.Attachments = attachments
	nodes, err := kube.ListAll[*storagev1.CSINode](ctx, r.client.StorageV1().CSINodes().List)
	if _, err = r.permitted("attachments", "CSINodes", "attachments without annotation "+annNodeID+" were not compared", err); err != nil {
		return err
	}
	state.NodeIDs = nodeIDs(r.driver, nodes)
	return nil
}

func (r *APIReader) readClaims(ctx context.Context, state *ClusterState) error {
	claims, err := kube.ListAll[*corev1.PersistentVolumeClaim](ctx, r.client.CoreV1().PersistentVolumeClaims(metav1.NamespaceAll).List)
	ok, err := r.permitted(Stuck, "PersistentVolumeClaims", "claims stuck in deletion were not searched", err)
	if err != nil {
		return err
	}
	if !ok {
		state.Unread = append(state.Unread, "PersistentVolumeClaims")
	}
	state.Claims = claims
	return nil
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
		objects, err := kube.ListAll[*metav1.PartialObjectMetadata](ctx, r.meta.Resource(kind.resource).List)
		if apierrors.IsNotFound(err) { // the CRD is not installed
			continue
		}
		if _, err = r.permitted(Stuck, kind.name+"s", kind.name+"s stuck in deletion were not searched", err); err != nil {
			return err
		}
		for _, obj := range objects {
			uid, foreign := r.foreign[kube.Key(obj)]
			foreign = foreign && kind.name == "VolumeSnapshot" && (uid == "" || uid == string(obj.UID))
			if slices.Contains(obj.Finalizers, kind.finalizer) && !foreign {
				state.Others[kind.name+" "+kube.Key(obj)] = obj
			}
		}
	}
	return nil
}

// permitted turns a missing permission to list a resource into a finding. It returns other errors.
func (r *APIReader) permitted(topic, resource, consequence string, err error) (ok bool, _ error) {
	switch {
	case apierrors.IsForbidden(err):
		r.unread = append(r.unread, notCompared(topic, fmt.Sprintf("no permission to list %s: %s", resource, consequence)))
		return false, nil
	case err != nil:
		return false, fmt.Errorf("listing %s: %w", resource, err)
	}
	return true, nil
}
