// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"fmt"
	"slices"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/attacher"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/volumerules"
	"github.com/storage-controller/storage-controller/nodecontroller"
	"github.com/storage-controller/storage-controller/provisioner"
	"github.com/storage-controller/storage-controller/resizer"
	"github.com/storage-controller/storage-controller/snapshotter"
)

// The roles whose Leases are read.
const (
	roleProvisioner    = "provisioner"
	roleAttacher       = "attacher"
	roleNodecontroller = "nodecontroller"
	roleResizer        = "resizer"
	roleSnapshotter    = "snapshotter"
)

// componentKubelet is no role: it has no Lease.
const componentKubelet = "kubelet"

// Resources that are read without typed clients.
var (
	snapshots        = schema.GroupVersionResource{Group: "snapshot.storage.k8s.io", Version: "v1", Resource: "volumesnapshots"}
	snapshotContents = schema.GroupVersionResource{Group: "snapshot.storage.k8s.io", Version: "v1", Resource: "volumesnapshotcontents"}
	snapshotClasses  = schema.GroupVersionResource{Group: "snapshot.storage.k8s.io", Version: "v1", Resource: "volumesnapshotclasses"}
	referenceGrants  = schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1beta1", Resource: "referencegrants"}
	secrets          = schema.GroupVersionResource{Version: "v1", Resource: "secrets"}
)

// gatherer reads the facts about one object.
type gatherer struct {
	Clients
	request Request
	facts   *facts
}

func (g *gatherer) gatherClaim(ctx context.Context) error {
	f := g.facts
	claim, err := g.Kubernetes.CoreV1().PersistentVolumeClaims(g.request.Namespace).Get(ctx, g.request.Name, metav1.GetOptions{})
	if err != nil {
		return g.request.wrap(err)
	}
	f.claim = found(claim)
	volume := claim.Spec.VolumeName
	if volume == "" {
		volume = provisioner.DefaultVolumeName(claim.UID)
	}
	f.volume = g.volume(ctx, volume)
	g.class(ctx, claim)
	f.driver = driverOfClaim(claim, f.class.value)
	if f.volume.found && (f.driver == "" || claim.Spec.VolumeName != "") {
		f.driver = migration.DriverOfVolume(f.volume.value)
	}
	roles := []string{roleProvisioner}
	if claim.Spec.VolumeName != "" {
		roles = append(roles, roleAttacher)
	}
	if claim.Status.Phase == corev1.ClaimBound && resizing(claim) {
		roles = append(roles, roleResizer)
		g.attributes(ctx, claim)
	}
	if f.driver != "" {
		g.driver(ctx, roles...)
	}
	if isNeeded := claim.DeletionTimestamp != nil || claim.Spec.VolumeName != "" || f.waitsForPod(); isNeeded && !f.pods.found {
		f.pods = list[*corev1.Pod](ctx, f, "pod", fmt.Sprintf("Pods in namespace %q", claim.Namespace),
			g.Kubernetes.CoreV1().Pods(claim.Namespace).List)
	}
	switch {
	case f.volume.found && claim.Spec.VolumeName != "":
		g.ofVolume(ctx, f.volume.value)
	case claim.Spec.VolumeName != "":
		g.attachmentsOf(ctx, claim.Spec.VolumeName)
	default:
		g.provisioning(ctx, claim, volume)
	}
	g.logicalVolume(ctx, volume, f.volumeHandle())
	g.events(ctx, claim.Namespace, string(claim.UID))
	return nil
}

// attributes reads the VolumeAttributesClass that a claim requests, unless the volume has it.
func (g *gatherer) attributes(ctx context.Context, claim *corev1.PersistentVolumeClaim) {
	name := ptr.Deref(claim.Spec.VolumeAttributesClassName, "")
	if name != "" && name != ptr.Deref(claim.Status.CurrentVolumeAttributesClassName, "") {
		g.facts.attributes = get(ctx, g.facts, "attributes", Request{Kind: kube.KindVolumeAttributesClass, Name: name},
			g.Kubernetes.StorageV1().VolumeAttributesClasses().Get)
	}
}

// class reads the StorageClass of a claim without a volume, or all classes if the claim gets the default one.
func (g *gatherer) class(ctx context.Context, claim *corev1.PersistentVolumeClaim) {
	classes := g.Kubernetes.StorageV1().StorageClasses()
	name := storagehelpers.GetPersistentVolumeClaimClass(claim)
	switch {
	case claim.Spec.VolumeName != "" && g.facts.volume.found:
	case name != "":
		g.facts.class = get(ctx, g.facts, "class", Request{Kind: "StorageClass", Name: name}, classes.Get)
	case claim.Spec.StorageClassName == nil:
		g.facts.classes = list[*storagev1.StorageClass](ctx, g.facts, "class", "StorageClasses", classes.List)
	}
}

// provisioning reads what a claim without a volume needs.
func (g *gatherer) provisioning(ctx context.Context, claim *corev1.PersistentVolumeClaim, volume string) {
	f := g.facts
	if name := claim.Annotations[storagehelpers.AnnSelectedNode]; name != "" {
		g.node(ctx, name)
	} else if f.class.found && len(f.class.value.AllowedTopologies) > 0 {
		g.listNodes(ctx)
	}
	if f.class.found {
		var secrets volumerules.Secrets
		secrets, f.secretsErr = volumerules.ResolveSecrets(f.class.value.Parameters, volumerules.SecretScope{
			Volume: volume, Claim: claim.Name, Namespace: claim.Namespace, Annotations: claim.Annotations,
		})
		g.secrets(ctx, secrets)
		g.capacities(ctx)
	}
	source, err := volumerules.SourceOf(claim, true)
	f.sourceErr = err
	if source != nil {
		g.source(ctx, claim, *source)
	}
}

// capacities reads the CSIStorageCapacities of the class, which the scheduler ignores unless the driver publishes them and the
// scheduler selects the node.
func (g *gatherer) capacities(ctx context.Context) {
	f := g.facts
	if !f.csiDriver.found || !ptr.Deref(f.csiDriver.value.Spec.StorageCapacity, false) || !kube.WaitsForFirstConsumer(f.class.value) {
		return
	}
	f.capacities = list[*storagev1.CSIStorageCapacity](ctx, f, "capacity", "CSIStorageCapacities",
		g.Kubernetes.StorageV1().CSIStorageCapacities(metav1.NamespaceAll).List)
	f.capacities.value = slices.DeleteFunc(slices.Clone(f.capacities.value), func(c *storagev1.CSIStorageCapacity) bool {
		return c.StorageClassName != f.class.value.Name
	})
}

func (g *gatherer) gatherVolume(ctx context.Context) error {
	f := g.facts
	pv, err := g.Kubernetes.CoreV1().PersistentVolumes().Get(ctx, g.request.Name, metav1.GetOptions{})
	if err != nil {
		return g.request.wrap(err)
	}
	f.volume = found(pv)
	f.driver = migration.DriverOfVolume(pv)
	if ref := pv.Spec.ClaimRef; ref != nil {
		f.claim = g.claim(ctx, ref.Namespace, ref.Name)
	}
	g.driver(ctx, roleProvisioner, roleAttacher, roleNodecontroller)
	g.ofVolume(ctx, pv)
	g.logicalVolume(ctx, pv.Name, f.volumeHandle())
	g.events(ctx, metav1.NamespaceDefault, string(pv.UID))
	return nil
}

// ofVolume reads what the use of pv needs: attachments, Secrets and nodes.
func (g *gatherer) ofVolume(ctx context.Context, pv *corev1.PersistentVolume) {
	if g.facts.driver != "" {
		g.attachmentsOf(ctx, pv.Name)
		g.secrets(ctx, volumerules.SecretsOfVolume(pv))
	}
	if requiredAffinity(pv) == nil {
		return
	}
	g.listNodes(ctx)
	if g.facts.nodes.found && slices.ContainsFunc(g.facts.nodesOf(pv), func(n *corev1.Node) bool { return n.DeletionTimestamp == nil }) {
		return
	}
	g.lostNodes(ctx)
}

func (g *gatherer) gatherAttachment(ctx context.Context) error {
	f := g.facts
	va, err := g.Kubernetes.StorageV1().VolumeAttachments().Get(ctx, g.request.Name, metav1.GetOptions{})
	if err != nil {
		return g.request.wrap(err)
	}
	f.attachment = found(va)
	f.driver = va.Spec.Attacher
	g.driver(ctx, roleAttacher)
	g.node(ctx, va.Spec.NodeName)
	if name := volumeOf(va); name != "" {
		f.volume = g.volume(ctx, name)
		g.attachmentsOf(ctx, name)
		if f.volume.found {
			g.secrets(ctx, volumerules.Secrets{ControllerPublish: volumerules.SecretsOfVolume(f.volume.value).ControllerPublish})
		}
	}
	g.events(ctx, metav1.NamespaceDefault, string(va.UID))
	return nil
}

func (g *gatherer) claim(ctx context.Context, namespace, name string) result[*corev1.PersistentVolumeClaim] {
	return get(ctx, g.facts, "claim", Request{Kind: KindClaim, Namespace: namespace, Name: name},
		g.Kubernetes.CoreV1().PersistentVolumeClaims(namespace).Get)
}

func (g *gatherer) volume(ctx context.Context, name string) result[*corev1.PersistentVolume] {
	return get(ctx, g.facts, "volume", Request{Kind: KindVolume, Name: name}, g.Kubernetes.CoreV1().PersistentVolumes().Get)
}

func (g *gatherer) csiNode(ctx context.Context, name string) result[*storagev1.CSINode] {
	return get(ctx, g.facts, "node", Request{Kind: "CSINode", Name: name}, g.Kubernetes.StorageV1().CSINodes().Get)
}

// node reads a Node and its CSINode.
func (g *gatherer) node(ctx context.Context, name string) {
	g.facts.node = get(ctx, g.facts, "node", Request{Kind: KindNode, Name: name}, g.Kubernetes.CoreV1().Nodes().Get)
	g.facts.csiNode = g.csiNode(ctx, name)
}

func (g *gatherer) listNodes(ctx context.Context) {
	g.facts.nodes = list[*corev1.Node](ctx, g.facts, "node", "Nodes", g.Kubernetes.CoreV1().Nodes().List)
}

// attachmentsOf reads the VolumeAttachments of a PersistentVolume, unless the driver needs none.
func (g *gatherer) attachmentsOf(ctx context.Context, volume string) {
	if g.facts.attaches() {
		g.attachments(ctx, func(va *storagev1.VolumeAttachment) bool { return volumeOf(va) == volume })
	}
}

func (g *gatherer) attachments(ctx context.Context, keep func(*storagev1.VolumeAttachment) bool) {
	all := list[*storagev1.VolumeAttachment](ctx, g.facts, "attachment", "VolumeAttachments",
		g.Kubernetes.StorageV1().VolumeAttachments().List)
	all.value = slices.DeleteFunc(slices.Clone(all.value), func(va *storagev1.VolumeAttachment) bool { return !keep(va) })
	g.facts.attachments = all
}

// driver reads the CSIDriver, the CSINodes and the Leases of roles; nothing without a driver.
func (g *gatherer) driver(ctx context.Context, roles ...string) {
	if g.facts.driver == "" {
		return
	}
	f := g.facts
	f.csiDriver = get(ctx, f, "driver", Request{Kind: "CSIDriver", Name: f.driver}, g.Kubernetes.StorageV1().CSIDrivers().Get)
	f.csiNodes = list[*storagev1.CSINode](ctx, g.facts, "driver", "CSINodes", g.Kubernetes.StorageV1().CSINodes().List)
	for _, role := range roles {
		g.lease(ctx, role, g.facts.driver)
	}
}

// lease reads the Leases of a role in all namespaces, because the namespace of the driver is unknown.
func (g *gatherer) lease(ctx context.Context, role, driver string) {
	names := map[string]func(string) string{
		roleProvisioner: provisioner.LeaseName, roleAttacher: attacher.LeaseName,
		roleNodecontroller: nodecontroller.LeaseName, roleResizer: resizer.LeaseName, roleSnapshotter: snapshotter.LeaseName,
	}
	l := leaseFact{role: role, driver: driver, name: names[role](driver)}
	named := fields.OneTermEqualSelector("metadata.name", l.name).String()
	l.leases = list[*coordinationv1.Lease](ctx, g.facts, "driver", fmt.Sprintf("Leases named %q in all namespaces", l.name),
		selecting(g.Kubernetes.CoordinationV1().Leases(metav1.NamespaceAll).List, named))
	g.facts.leases = append(g.facts.leases, l)
}

// secrets reads the metadata of secrets, of each once.
func (g *gatherer) secrets(ctx context.Context, all volumerules.Secrets) {
	f := g.facts
	for _, s := range all.List() {
		request := Request{Kind: "Secret", Namespace: s.Namespace, Name: s.Name}
		i := slices.IndexFunc(f.secrets, func(known secretFact) bool { return known.Request == request })
		if i < 0 {
			client := g.Metadata.Resource(secrets).Namespace(s.Namespace)
			object := read(ctx, f, "secret", "get "+request.String(), func(ctx context.Context) (*metav1.PartialObjectMetadata, error) {
				return client.Get(ctx, s.Name, metav1.GetOptions{})
			})
			i, f.secrets = len(f.secrets), append(f.secrets, secretFact{Request: request, object: object})
		}
		f.secrets[i].purposes = append(f.secrets[i].purposes, s.Purpose)
	}
}

// source reads the data source of a claim and the ReferenceGrants for it.
func (g *gatherer) source(ctx context.Context, claim *corev1.PersistentVolumeClaim, named volumerules.Source) {
	s := &sourceFact{Source: named}
	g.facts.source = s
	if named.Namespace != claim.Namespace {
		grants := list[*unstructured.Unstructured](ctx, g.facts, "source", fmt.Sprintf("ReferenceGrants in namespace %q", named.Namespace),
			g.Dynamic.Resource(referenceGrants).Namespace(named.Namespace).List)
		s.grants = result[[]*volumerules.Grant]{found: grants.found, missing: grants.missing}
		for _, object := range grants.value {
			if grant, err := decode[volumerules.Grant](object.Object); err == nil {
				s.grants.value = append(s.grants.value, grant)
			}
		}
	}
	if named.Kind == kube.KindClaim {
		s.claim = g.claim(ctx, named.Namespace, named.Name)
		if s.claim.found && s.claim.value.Spec.VolumeName != "" {
			s.volume = g.volume(ctx, s.claim.value.Spec.VolumeName)
		}
		return
	}
	s.snapshot = get(ctx, g.facts, "source", Request{Kind: kube.KindSnapshot, Namespace: named.Namespace, Name: named.Name},
		typed[snapshotv1.VolumeSnapshot](g.Dynamic.Resource(snapshots).Namespace(named.Namespace)))
	if !s.snapshot.found {
		return
	}
	if content, err := volumerules.BoundContent(s.snapshot.value); err == nil {
		s.content = get(ctx, g.facts, "source", Request{Kind: "VolumeSnapshotContent", Name: content},
			typed[snapshotv1.VolumeSnapshotContent](g.Dynamic.Resource(snapshotContents)))
	}
}

// events reads the events about the object with uid, not those about an earlier object of the same name.
func (g *gatherer) events(ctx context.Context, namespace, uid string) {
	r := g.request
	selector := fields.Set{"involvedObject.kind": r.Kind, "involvedObject.name": r.Name}.String()
	all := list[*corev1.Event](ctx, g.facts, topicEvents, fmt.Sprintf("Events about %v in namespace %q", r, namespace),
		selecting(g.Kubernetes.CoreV1().Events(namespace).List, selector))
	all.value = slices.DeleteFunc(slices.Clone(all.value), func(e *corev1.Event) bool {
		about := string(e.InvolvedObject.UID)
		return about != uid && about != "" && !(r.Kind == KindNode && about == r.Name)
	})
	g.facts.events = all
}
