// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"fmt"
	"slices"
	"time"

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
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
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
	referenceGrants = schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1beta1", Resource: "referencegrants"}
	secrets         = schema.GroupVersionResource{Version: "v1", Resource: "secrets"}
)

// gatherer reads the facts about one object.
type gatherer struct {
	Clients
	request Request
	facts   *facts
	reader  *apiread.Reader
}

// readTimeout bounds each request.
const readTimeout = 15 * time.Second

func newGatherer(clients Clients, request Request) *gatherer {
	g := &gatherer{Clients: clients, request: request, facts: &facts{}}
	g.reader = apiread.New(readTimeout, g.addUnread)
	return g
}

// about returns a gatherer of the facts about another object, which shares the results of reads.
func (g *gatherer) about(request Request) *gatherer {
	other := newGatherer(g.Clients, request)
	other.reader = g.reader.With(other.addUnread)
	return other
}

func (g *gatherer) addUnread(f finding.Finding) { g.facts.unread = append(g.facts.unread, f) }

// get reads the object with the name in target.
func get[T any](ctx context.Context, g *gatherer, topic string, target Request, request apiread.Getter[T]) apiread.Result[T] {
	return apiread.Get(ctx, g.reader, apiread.Query{Topic: topic, What: target.String()}, target.Name, request)
}

func (g *gatherer) gatherClaim(ctx context.Context) error {
	f := g.facts
	f.claim = g.claim(ctx, g.request.Namespace, g.request.Name)
	if !f.claim.Found {
		return g.request.wrap(f.claim.Err)
	}
	claim := f.claim.Value
	volume := claim.Spec.VolumeName
	if volume == "" {
		volume = provisioner.DefaultVolumeName(claim.UID)
	}
	f.volume = g.volume(ctx, volume)
	g.class(ctx, claim)
	f.driver = driverOfClaim(claim, f.class.Value)
	if f.volume.Found && (f.driver == "" || claim.Spec.VolumeName != "") {
		f.driver = migration.DriverOfVolume(f.volume.Value)
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
	if isNeeded := claim.DeletionTimestamp != nil || claim.Spec.VolumeName != "" || f.waitsForPod(); isNeeded && !f.pods.Found {
		f.pods = apiread.List[*corev1.Pod](ctx, g.reader, apiread.Query{Topic: "pod",
			What: fmt.Sprintf("Pods in namespace %q", claim.Namespace)}, g.Kubernetes.CoreV1().Pods(claim.Namespace).List)
	}
	switch {
	case f.volume.Found && claim.Spec.VolumeName != "":
		g.ofVolume(ctx, f.volume.Value)
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
		g.facts.attributes = get(ctx, g, "attributes", Request{Kind: kube.KindVolumeAttributesClass, Name: name},
			g.Kubernetes.StorageV1().VolumeAttributesClasses().Get)
	}
}

// class reads the StorageClass of a claim without a volume, or all classes if the claim gets the default one.
func (g *gatherer) class(ctx context.Context, claim *corev1.PersistentVolumeClaim) {
	classes := g.Kubernetes.StorageV1().StorageClasses()
	name := storagehelpers.GetPersistentVolumeClaimClass(claim)
	switch {
	case claim.Spec.VolumeName != "" && g.facts.volume.Found:
	case name != "":
		g.facts.class = get(ctx, g, "class", Request{Kind: "StorageClass", Name: name}, classes.Get)
	case claim.Spec.StorageClassName == nil:
		g.facts.classes = apiread.List[*storagev1.StorageClass](ctx, g.reader, apiread.Query{Topic: "class", What: "StorageClasses"},
			classes.List)
	}
}

// provisioning reads what a claim without a volume needs.
func (g *gatherer) provisioning(ctx context.Context, claim *corev1.PersistentVolumeClaim, volume string) {
	f := g.facts
	if name := claim.Annotations[storagehelpers.AnnSelectedNode]; name != "" {
		g.node(ctx, name)
	} else if f.class.Found && len(f.class.Value.AllowedTopologies) > 0 {
		g.listNodes(ctx)
	}
	if f.class.Found {
		var secrets volumerules.Secrets
		secrets, f.secretsErr = volumerules.ResolveSecrets(f.class.Value.Parameters, volumerules.SecretScope{
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
	if !f.csiDriver.Found || !ptr.Deref(f.csiDriver.Value.Spec.StorageCapacity, false) || !kube.WaitsForFirstConsumer(f.class.Value) {
		return
	}
	f.capacities = apiread.List[*storagev1.CSIStorageCapacity](ctx, g.reader,
		apiread.Query{Topic: "capacity", What: "CSIStorageCapacities"},
		g.Kubernetes.StorageV1().CSIStorageCapacities(metav1.NamespaceAll).List)
	f.capacities.Value = slices.DeleteFunc(slices.Clone(f.capacities.Value), func(c *storagev1.CSIStorageCapacity) bool {
		return c.StorageClassName != f.class.Value.Name
	})
}

func (g *gatherer) gatherVolume(ctx context.Context) error {
	f := g.facts
	f.volume = g.volume(ctx, g.request.Name)
	if !f.volume.Found {
		return g.request.wrap(f.volume.Err)
	}
	pv := f.volume.Value
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
	if g.facts.nodes.Found && slices.ContainsFunc(g.facts.nodesOf(pv), func(n *corev1.Node) bool { return n.DeletionTimestamp == nil }) {
		return
	}
	g.lostNodes(ctx)
}

func (g *gatherer) gatherAttachment(ctx context.Context) error {
	f := g.facts
	f.attachment = get(ctx, g, "attachment", g.request, g.Kubernetes.StorageV1().VolumeAttachments().Get)
	if !f.attachment.Found {
		return g.request.wrap(f.attachment.Err)
	}
	va := f.attachment.Value
	f.driver = va.Spec.Attacher
	g.driver(ctx, roleAttacher)
	g.node(ctx, va.Spec.NodeName)
	if name := volumeOf(va); name != "" {
		f.volume = g.volume(ctx, name)
		g.attachmentsOf(ctx, name)
		if f.volume.Found {
			g.secrets(ctx, volumerules.Secrets{ControllerPublish: volumerules.SecretsOfVolume(f.volume.Value).ControllerPublish})
		}
	}
	g.events(ctx, metav1.NamespaceDefault, string(va.UID))
	return nil
}

func (g *gatherer) claim(ctx context.Context, namespace, name string) apiread.Result[*corev1.PersistentVolumeClaim] {
	return get(ctx, g, "claim", Request{Kind: KindClaim, Namespace: namespace, Name: name},
		g.Kubernetes.CoreV1().PersistentVolumeClaims(namespace).Get)
}

func (g *gatherer) volume(ctx context.Context, name string) apiread.Result[*corev1.PersistentVolume] {
	return get(ctx, g, "volume", Request{Kind: KindVolume, Name: name}, g.Kubernetes.CoreV1().PersistentVolumes().Get)
}

func (g *gatherer) snapshot(ctx context.Context, topic, namespace, name string) apiread.Result[*snapshotv1.VolumeSnapshot] {
	return get(ctx, g, topic, Request{Kind: kube.KindSnapshot, Namespace: namespace, Name: name},
		apiread.Typed[snapshotv1.VolumeSnapshot](g.Dynamic.Resource(apiread.Snapshots).Namespace(namespace)))
}

func (g *gatherer) content(ctx context.Context, topic, name string) apiread.Result[*snapshotv1.VolumeSnapshotContent] {
	return get(ctx, g, topic, Request{Kind: kindContent, Name: name},
		apiread.Typed[snapshotv1.VolumeSnapshotContent](g.Dynamic.Resource(apiread.SnapshotContents)))
}

func (g *gatherer) csiNode(ctx context.Context, name string) apiread.Result[*storagev1.CSINode] {
	return get(ctx, g, "node", Request{Kind: "CSINode", Name: name}, g.Kubernetes.StorageV1().CSINodes().Get)
}

// node reads a Node and its CSINode.
func (g *gatherer) node(ctx context.Context, name string) {
	g.facts.node = get(ctx, g, "node", Request{Kind: KindNode, Name: name}, g.Kubernetes.CoreV1().Nodes().Get)
	g.facts.csiNode = g.csiNode(ctx, name)
}

func (g *gatherer) listNodes(ctx context.Context) {
	g.facts.nodes = apiread.List[*corev1.Node](ctx, g.reader, apiread.Query{Topic: "node", What: "Nodes"},
		g.Kubernetes.CoreV1().Nodes().List)
}

// attachmentsOf reads the VolumeAttachments of a PersistentVolume, unless the driver needs none.
func (g *gatherer) attachmentsOf(ctx context.Context, volume string) {
	if g.facts.attaches() {
		g.attachments(ctx, func(va *storagev1.VolumeAttachment) bool { return volumeOf(va) == volume })
	}
}

func (g *gatherer) attachments(ctx context.Context, keep func(*storagev1.VolumeAttachment) bool) {
	all := apiread.List[*storagev1.VolumeAttachment](ctx, g.reader, apiread.Query{Topic: "attachment", What: "VolumeAttachments"},
		g.Kubernetes.StorageV1().VolumeAttachments().List)
	all.Value = slices.DeleteFunc(slices.Clone(all.Value), func(va *storagev1.VolumeAttachment) bool { return !keep(va) })
	g.facts.attachments = all
}

// driver reads the CSIDriver, the CSINodes and the Leases of roles; nothing without a driver.
func (g *gatherer) driver(ctx context.Context, roles ...string) {
	if g.facts.driver == "" {
		return
	}
	f := g.facts
	f.csiDriver = get(ctx, g, "driver", Request{Kind: "CSIDriver", Name: f.driver}, g.Kubernetes.StorageV1().CSIDrivers().Get)
	f.csiNodes = apiread.List[*storagev1.CSINode](ctx, g.reader, apiread.Query{Topic: "driver", What: "CSINodes"},
		g.Kubernetes.StorageV1().CSINodes().List)
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
	query := apiread.Query{Topic: "driver", What: fmt.Sprintf("Leases named %q in all namespaces", l.name),
		Fields: fields.OneTermEqualSelector("metadata.name", l.name).String()}
	l.leases = apiread.List[*coordinationv1.Lease](ctx, g.reader, query, g.Kubernetes.CoordinationV1().Leases(metav1.NamespaceAll).List)
	g.facts.leases = append(g.facts.leases, l)
}

// secrets reads the metadata of secrets, of each once.
func (g *gatherer) secrets(ctx context.Context, all volumerules.Secrets) {
	f := g.facts
	for _, s := range all.List() {
		request := Request{Kind: "Secret", Namespace: s.Namespace, Name: s.Name}
		i := slices.IndexFunc(f.secrets, func(known secretFact) bool { return known.Request == request })
		if i < 0 {
			object := get(ctx, g, "secret", request, apiread.Metadata(g.Metadata.Resource(secrets).Namespace(s.Namespace)))
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
		grants := apiread.List[*unstructured.Unstructured](ctx, g.reader,
			apiread.Query{Topic: "source", What: fmt.Sprintf("ReferenceGrants in namespace %q", named.Namespace)},
			g.Dynamic.Resource(referenceGrants).Namespace(named.Namespace).List)
		s.grants = apiread.Result[[]*volumerules.Grant]{Found: grants.Found, Missing: grants.Missing}
		for _, object := range grants.Value {
			if grant, err := apiread.Decode[volumerules.Grant](object.Object); err == nil {
				s.grants.Value = append(s.grants.Value, grant)
			}
		}
	}
	if named.Kind == kube.KindClaim {
		s.claim = g.claim(ctx, named.Namespace, named.Name)
		if s.claim.Found && s.claim.Value.Spec.VolumeName != "" {
			s.volume = g.volume(ctx, s.claim.Value.Spec.VolumeName)
		}
		return
	}
	s.snapshot = g.snapshot(ctx, "source", named.Namespace, named.Name)
	if !s.snapshot.Found {
		return
	}
	if content, err := volumerules.BoundContent(s.snapshot.Value); err == nil {
		s.content = g.content(ctx, "source", content)
	}
}

// events reads the events about the object with uid, not those about an earlier object of the same name.
func (g *gatherer) events(ctx context.Context, namespace, uid string) {
	r := g.request
	query := apiread.Query{Topic: topicEvents, What: fmt.Sprintf("Events about %v in namespace %q", r, namespace),
		Fields: fields.Set{"involvedObject.kind": r.Kind, "involvedObject.name": r.Name}.String()}
	all := apiread.List[*corev1.Event](ctx, g.reader, query, g.Kubernetes.CoreV1().Events(namespace).List)
	all.Value = slices.DeleteFunc(slices.Clone(all.Value), func(e *corev1.Event) bool {
		about := string(e.InvolvedObject.UID)
		return about != uid && about != "" && !(r.Kind == KindNode && about == r.Name)
	})
	g.facts.events = all
}
