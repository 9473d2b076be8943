package audit

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// CacheReader is the world as the watches of a process have it.
type CacheReader struct {
	Volumes kube.Informer[*corev1.PersistentVolume]
	Claims  kube.Informer[*corev1.PersistentVolumeClaim]
	// Attachments and Nodes are nil where the process does not watch them.
	Attachments *kube.Informer[*storagev1.VolumeAttachment]
	Nodes       *kube.Informer[*storagev1.CSINode]
}

// World is the function for [Auditor].
func (c CacheReader) World(driver string) func(context.Context) (ClusterState, error) {
	return func(context.Context) (ClusterState, error) {
		w := ClusterState{Volumes: c.Volumes.List(), Claims: c.Claims.List()}
		if c.Attachments != nil {
			w.Attachments, w.Attached = c.Attachments.List(), true
		}
		if c.Nodes != nil {
			w.NodeIDs = nodeIDs(driver, c.Nodes.List())
		}
		return w, nil
	}
}

func nodeIDs(driver string, nodes []*storagev1.CSINode) map[string]string {
	ids := map[string]string{}
	for _, n := range nodes {
		if d := kube.DriverOnNode(n, driver); d != nil {
			ids[n.Name] = d.NodeID
		}
	}
	return ids
}

// APIReader is the world as the API server has it when it is asked.
type APIReader struct {
	client  kubernetes.Interface
	meta    metadata.Interface
	driver  string
	notes   map[string]string // by kind
	volumes int
	attach  int
}

// NewLive makes a reader for driver. It is for one goroutine.
func NewLive(client kubernetes.Interface, meta metadata.Interface, driver string) *APIReader {
	return &APIReader{client: client, meta: meta, driver: driver, notes: map[string]string{}}
}

// Notes say which kinds could not be read, and what that left out.
func (l *APIReader) Notes() []string {
	var notes []string
	for _, kind := range slices.Sorted(maps.Keys(l.notes)) {
		notes = append(notes, l.notes[kind])
	}
	return notes
}

// Counts is how many volumes and attachments of the driver there were.
func (l *APIReader) Counts() (volumes, attachments int) { return l.volumes, l.attach }

// World reads everything, page by page. Without PersistentVolumes there is nothing to
// compare with; of other kinds a missing permission is a note.
func (l *APIReader) World(ctx context.Context) (ClusterState, error) {
	var w ClusterState
	volumes, err := kube.ListPages(func(o metav1.ListOptions) ([]corev1.PersistentVolume, string, error) {
		list, err := l.client.CoreV1().PersistentVolumes().List(ctx, o)
		if err != nil {
			return nil, "", err
		}
		return list.Items, list.Continue, nil
	})
	if apierrors.IsForbidden(err) {
		return w, fmt.Errorf("listing the PersistentVolumes: %w; grant list on them", err)
	}
	if err != nil {
		return w, fmt.Errorf("listing the PersistentVolumes: %w", err)
	}
	l.volumes = 0
	for i := range volumes {
		if _, _, ok := handle(l.driver, &volumes[i]); ok {
			l.volumes++
		}
		w.Volumes = append(w.Volumes, &volumes[i])
	}
	if err := l.attachments(ctx, &w); err != nil {
		return w, err
	}
	if err := l.claims(ctx, &w); err != nil {
		return w, err
	}
	return w, l.others(ctx, &w)
}

func (l *APIReader) attachments(ctx context.Context, w *ClusterState) error {
	attachments, err := kube.ListPages(func(o metav1.ListOptions) ([]storagev1.VolumeAttachment, string, error) {
		list, err := l.client.StorageV1().VolumeAttachments().List(ctx, o)
		if err != nil {
			return nil, "", err
		}
		return list.Items, list.Continue, nil
	})
	if w.Attached, err = l.read("VolumeAttachments", "they were not compared", err); err != nil {
		return err
	}
	l.attach = 0
	for i := range attachments {
		if attachments[i].Spec.Attacher == l.driver {
			l.attach++
		}
		w.Attachments = append(w.Attachments, &attachments[i])
	}
	nodes, err := kube.ListPages(func(o metav1.ListOptions) ([]storagev1.CSINode, string, error) {
		list, err := l.client.StorageV1().CSINodes().List(ctx, o)
		if err != nil {
			return nil, "", err
		}
		return list.Items, list.Continue, nil
	})
	if _, err = l.read("CSINodes", "attachments that do not say how the driver calls their node were not compared", err); err != nil {
		return err
	}
	var all []*storagev1.CSINode
	for i := range nodes {
		all = append(all, &nodes[i])
	}
	w.NodeIDs = nodeIDs(l.driver, all)
	return nil
}

func (l *APIReader) claims(ctx context.Context, w *ClusterState) error {
	claims, err := kube.ListPages(func(o metav1.ListOptions) ([]corev1.PersistentVolumeClaim, string, error) {
		list, err := l.client.CoreV1().PersistentVolumeClaims(metav1.NamespaceAll).List(ctx, o)
		if err != nil {
			return nil, "", err
		}
		return list.Items, list.Continue, nil
	})
	if _, err = l.read("PersistentVolumeClaims", "stuck ones were not looked for", err); err != nil {
		return err
	}
	for i := range claims {
		w.Claims = append(w.Claims, &claims[i])
	}
	return nil
}

// others are nodes and snapshots that a finalizer of the roles holds; of these the
// metadata are enough.
func (l *APIReader) others(ctx context.Context, w *ClusterState) error {
	w.Others = map[string]metav1.Object{}
	for _, kind := range []struct {
		name, finalizer string
		resource        schema.GroupVersionResource
	}{
		{"Node", strings.ToLower(l.driver) + "/node", corev1.SchemeGroupVersion.WithResource("nodes")},
		{"VolumeSnapshot", SnapshotFinalizer, schema.GroupVersionResource{Group: "snapshot.storage.k8s.io", Version: "v1", Resource: "volumesnapshots"}},
	} {
		objects, err := kube.ListPages(func(o metav1.ListOptions) ([]metav1.PartialObjectMetadata, string, error) {
			list, err := l.meta.Resource(kind.resource).List(ctx, o)
			if err != nil {
				return nil, "", err
			}
			return list.Items, list.Continue, nil
		})
		if apierrors.IsNotFound(err) { // nobody has installed the kind
			continue
		}
		if _, err = l.read(kind.name+"s", "stuck ones were not looked for", err); err != nil {
			return err
		}
		for i := range objects {
			if slices.Contains(objects[i].Finalizers, kind.finalizer) {
				w.Others[kind.name+" "+kube.Key(&objects[i])] = &objects[i]
			}
		}
	}
	return nil
}

// read notes a missing permission; another error is one of the audit.
func (l *APIReader) read(kind, consequence string, err error) (ok bool, _ error) {
	switch {
	case apierrors.IsForbidden(err):
		l.notes[kind] = fmt.Sprintf("no permission to list %s: %s", kind, consequence)
		return false, nil
	case err != nil:
		return false, fmt.Errorf("listing the %s: %w", kind, err)
	}
	return true, nil
}
