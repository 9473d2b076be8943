package explain

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/storage-controller/storage-controller/attacher"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/nodecontroller"
	"github.com/storage-controller/storage-controller/provisioner"
)

// The roles of which somebody holds the Lease.
const (
	roleProvisioner    = "provisioner"
	roleAttacher       = "attacher"
	roleNodecontroller = "nodecontroller"
)

// Kinds that are read without types of their own.
var (
	snapshots        = schema.GroupVersionResource{Group: "snapshot.storage.k8s.io", Version: "v1", Resource: "volumesnapshots"}
	snapshotContents = schema.GroupVersionResource{Group: "snapshot.storage.k8s.io", Version: "v1", Resource: "volumesnapshotcontents"}
	referenceGrants  = schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1beta1", Resource: "referencegrants"}
	secrets          = schema.GroupVersionResource{Version: "v1", Resource: "secrets"}
)

// itemsOf is what a list holds, unless it could not be read.
func itemsOf[L, T any](list L, err error, items func(L) []T) ([]T, error) {
	if err != nil {
		return nil, err
	}
	return items(list), nil
}

func (g *gatherer) class(ctx context.Context, name string) known[*storagev1.StorageClass] {
	if name == "" {
		return known[*storagev1.StorageClass]{}
	}
	return read(ctx, fmt.Sprintf("get StorageClass %q", name), func(ctx context.Context) (*storagev1.StorageClass, error) {
		return g.Kubernetes.StorageV1().StorageClasses().Get(ctx, name, metav1.GetOptions{})
	})
}

func (g *gatherer) claim(ctx context.Context, namespace, name string) known[*corev1.PersistentVolumeClaim] {
	return read(ctx, fmt.Sprintf("get PersistentVolumeClaim %s/%s", namespace, name), func(ctx context.Context) (*corev1.PersistentVolumeClaim, error) {
		return g.Kubernetes.CoreV1().PersistentVolumeClaims(namespace).Get(ctx, name, metav1.GetOptions{})
	})
}

func (g *gatherer) volume(ctx context.Context, name string) known[*corev1.PersistentVolume] {
	return read(ctx, fmt.Sprintf("get PersistentVolume %q", name), func(ctx context.Context) (*corev1.PersistentVolume, error) {
		return g.Kubernetes.CoreV1().PersistentVolumes().Get(ctx, name, metav1.GetOptions{})
	})
}

func (g *gatherer) csiDriver(ctx context.Context, name string) known[*storagev1.CSIDriver] {
	return read(ctx, fmt.Sprintf("get CSIDriver %q", name), func(ctx context.Context) (*storagev1.CSIDriver, error) {
		return g.Kubernetes.StorageV1().CSIDrivers().Get(ctx, name, metav1.GetOptions{})
	})
}

func (g *gatherer) csiNode(ctx context.Context, name string) known[*storagev1.CSINode] {
	return read(ctx, fmt.Sprintf("get CSINode %q", name), func(ctx context.Context) (*storagev1.CSINode, error) {
		return g.Kubernetes.StorageV1().CSINodes().Get(ctx, name, metav1.GetOptions{})
	})
}

// oneNode reads a node and its CSINode.
func (g *gatherer) oneNode(ctx context.Context, name string) {
	g.facts.node = read(ctx, fmt.Sprintf("get Node %q", name), func(ctx context.Context) (*corev1.Node, error) {
		return g.Kubernetes.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	})
	g.facts.csiNode = g.csiNode(ctx, name)
}

func (g *gatherer) listNodes(ctx context.Context) {
	g.facts.nodes = read(ctx, "list Nodes", func(ctx context.Context) ([]corev1.Node, error) {
		l, err := g.Kubernetes.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		return itemsOf(l, err, func(l *corev1.NodeList) []corev1.Node { return l.Items })
	})
	g.facts.csiNodes = read(ctx, "list CSINodes", func(ctx context.Context) ([]storagev1.CSINode, error) {
		l, err := g.Kubernetes.StorageV1().CSINodes().List(ctx, metav1.ListOptions{})
		return itemsOf(l, err, func(l *storagev1.CSINodeList) []storagev1.CSINode { return l.Items })
	})
}

func (g *gatherer) attachmentsOf(ctx context.Context, keep func(storagev1.VolumeAttachment) bool) {
	g.facts.attachments = read(ctx, "list VolumeAttachments", func(ctx context.Context) ([]storagev1.VolumeAttachment, error) {
		l, err := g.Kubernetes.StorageV1().VolumeAttachments().List(ctx, metav1.ListOptions{})
		all, err := itemsOf(l, err, func(l *storagev1.VolumeAttachmentList) []storagev1.VolumeAttachment { return l.Items })
		return slices.DeleteFunc(all, func(va storagev1.VolumeAttachment) bool { return !keep(va) }), err
	})
}

// ofDriver reads what there is about a driver; nothing for "".
func (g *gatherer) ofDriver(ctx context.Context, driver string) {
	if driver == "" {
		return
	}
	g.facts.csiDriver = g.csiDriver(ctx, driver)
	if g.request.Kind != KindAttachment {
		g.lease(ctx, roleProvisioner, driver)
	}
	g.lease(ctx, roleAttacher, driver)
	if g.request.Kind == KindVolume {
		g.lease(ctx, roleNodecontroller, driver)
	}
}

// lease looks for the Lease of a role in all namespaces, since the one of the driver is
// not known.
func (g *gatherer) lease(ctx context.Context, role, driver string) {
	names := map[string]func(string) string{
		roleProvisioner: provisioner.LeaseName, roleAttacher: attacher.LeaseName, roleNodecontroller: nodecontroller.LeaseName,
	}
	l := leaseFact{role: role, driver: driver, name: names[role](driver)}
	l.leases = read(ctx, fmt.Sprintf("list Leases called %q in all namespaces", l.name), func(ctx context.Context) ([]coordinationv1.Lease, error) {
		list, err := g.Kubernetes.CoordinationV1().Leases(metav1.NamespaceAll).List(ctx, metav1.ListOptions{
			FieldSelector: fields.OneTermEqualSelector("metadata.name", l.name).String(),
		})
		return itemsOf(list, err, func(l *coordinationv1.LeaseList) []coordinationv1.Lease { return l.Items })
	})
	g.facts.leases = append(g.facts.leases, l)
}

// readSecrets finds out whether secrets are there. Only their metadata is asked for.
func (g *gatherer) readSecrets(ctx context.Context, named []provisioner.NamedSecret) {
	for _, s := range named {
		there := read(ctx, fmt.Sprintf("get Secret %s/%s", s.Namespace, s.Name), func(ctx context.Context) (bool, error) {
			_, err := g.Metadata.Resource(secrets).Namespace(s.Namespace).Get(ctx, s.Name, metav1.GetOptions{})
			return err == nil, err
		})
		g.facts.secrets = append(g.facts.secrets, secretFact{s, there})
	}
}

// source reads what the data of a claim comes from, and the permission to use it.
func (g *gatherer) source(ctx context.Context, claim *corev1.PersistentVolumeClaim, named provisioner.Source) {
	s := &sourceFact{Source: named}
	g.facts.source = s
	if named.Namespace != claim.Namespace {
		s.grants = read(ctx, fmt.Sprintf("list ReferenceGrants in namespace %q", named.Namespace), func(ctx context.Context) ([]map[string]any, error) {
			l, err := g.Dynamic.Resource(referenceGrants).Namespace(named.Namespace).List(ctx, metav1.ListOptions{})
			if err != nil {
				return nil, err
			}
			var grants []map[string]any
			for _, item := range l.Items {
				grants = append(grants, item.Object)
			}
			return grants, nil
		})
	}
	if named.Kind == kube.KindClaim {
		s.claim = g.claim(ctx, named.Namespace, named.Name)
		if s.claim.found && s.claim.value.Spec.VolumeName != "" {
			s.volume = g.volume(ctx, s.claim.value.Spec.VolumeName)
		}
		return
	}
	s.snapshot = g.object(ctx, snapshots, kube.KindSnapshot, named.Namespace, named.Name)
	if !s.snapshot.found {
		return
	}
	if content, err := provisioner.ContentOf(s.snapshot.value); err == nil {
		s.content = g.object(ctx, snapshotContents, "VolumeSnapshotContent", "", content)
	}
}

// object reads one object of a kind that has no types here.
func (g *gatherer) object(ctx context.Context, resource schema.GroupVersionResource, kind, namespace, name string) known[map[string]any] {
	what := fmt.Sprintf("get %s %q", kind, name)
	if namespace != "" {
		what = fmt.Sprintf("get %s %s/%s", kind, namespace, name)
	}
	return read(ctx, what, func(ctx context.Context) (map[string]any, error) {
		o, err := g.Dynamic.Resource(resource).Namespace(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		return o.Object, nil
	})
}

// events reads those about an object, and not about one that had its name before. The
// kubelet gives the name of its node as its UID.
func (g *gatherer) events(ctx context.Context, kind, namespace, name, uid string) known[[]corev1.Event] {
	return read(ctx, fmt.Sprintf("list events in namespace %q", namespace), func(ctx context.Context) ([]corev1.Event, error) {
		l, err := g.Kubernetes.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{
			FieldSelector: fields.Set{"involvedObject.kind": kind, "involvedObject.name": name}.String(),
		})
		all, err := itemsOf(l, err, func(l *corev1.EventList) []corev1.Event { return l.Items })
		return slices.DeleteFunc(all, func(e corev1.Event) bool {
			about := string(e.InvolvedObject.UID)
			return about != uid && about != "" && !(kind == KindNode && about == name)
		}), err
	})
}

// volumeOf is the name of the volume of an attachment; "" for one that is written in it.
func volumeOf(va *storagev1.VolumeAttachment) string {
	if va.Spec.Source.PersistentVolumeName == nil {
		return ""
	}
	return *va.Spec.Source.PersistentVolumeName
}

// secretsOfVolume is the secrets that pv names, each once.
func secretsOfVolume(pv *corev1.PersistentVolume) []provisioner.NamedSecret {
	var named []provisioner.NamedSecret
	if s, ok := provisioner.DeletionSecret(pv); ok {
		named = append(named, s)
	}
	named = append(named, publishSecret(pv)...)
	if csi := pv.Spec.CSI; csi != nil {
		for _, s := range []struct {
			purpose string
			ref     *corev1.SecretReference
		}{
			{"node-stage-secret-name", csi.NodeStageSecretRef}, {"node-publish-secret-name", csi.NodePublishSecretRef},
			{"controller-expand-secret-name", csi.ControllerExpandSecretRef}, {"node-expand-secret-name", csi.NodeExpandSecretRef},
		} {
			if s.ref != nil {
				named = append(named, provisioner.NamedSecret{Purpose: s.purpose, Namespace: s.ref.Namespace, Name: s.ref.Name})
			}
		}
	}
	return named
}

// publishSecret is the secret with which pv is attached, if it has one.
func publishSecret(pv *corev1.PersistentVolume) []provisioner.NamedSecret {
	if pv.Spec.CSI == nil || pv.Spec.CSI.ControllerPublishSecretRef == nil {
		return nil
	}
	ref := pv.Spec.CSI.ControllerPublishSecretRef
	return []provisioner.NamedSecret{{Purpose: "controller-publish-secret-name", Namespace: ref.Namespace, Name: ref.Name}}
}

// eventTime is when e was last seen, by whichever API it was written.
func eventTime(e corev1.Event) metav1.Time {
	if e.Series != nil {
		return metav1.Time(e.Series.LastObservedTime)
	}
	if !e.LastTimestamp.IsZero() {
		return e.LastTimestamp
	}
	if !e.EventTime.IsZero() {
		return metav1.Time(e.EventTime)
	}
	return e.CreationTimestamp
}

// newestFirst is e with the newest first.
func newestFirst(events []corev1.Event) []corev1.Event {
	sorted := slices.Clone(events)
	slices.SortStableFunc(sorted, func(a, b corev1.Event) int {
		return cmp.Or(eventTime(b).Compare(eventTime(a).Time), cmp.Compare(a.Name, b.Name))
	})
	return sorted
}
