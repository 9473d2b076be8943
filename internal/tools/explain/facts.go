// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"slices"
	"strings"
	"time"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/internal/tools/statusz"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// facts holds everything that findings are derived from.
type facts struct {
	now    time.Time
	driver string // "" if unknown
	// matching holds the results of nodesMatching by the text of the selector.
	matching map[string][]*corev1.Node

	pod        apiread.Result[*corev1.Pod] // that is explained
	podClaims  []podClaim
	claim      apiread.Result[*corev1.PersistentVolumeClaim]
	volume     apiread.Result[*corev1.PersistentVolume]
	attachment apiread.Result[*storagev1.VolumeAttachment]
	node       apiread.Result[*corev1.Node]
	csiNode    apiread.Result[*storagev1.CSINode] // of node

	class      apiread.Result[*storagev1.StorageClass]
	classes    apiread.Result[[]*storagev1.StorageClass] // only if the claim names no class
	csiDriver  apiread.Result[*storagev1.CSIDriver]
	attributes apiread.Result[*storagev1.VolumeAttributesClass] // that the claim requests, if it is not the current one
	leases     []leaseFact
	lost       []lostNode // only if a node does not exist or is being deleted

	nodes       apiread.Result[[]*corev1.Node]
	csiNodes    apiread.Result[[]*storagev1.CSINode]
	pods        apiread.Result[[]*corev1.Pod] // in the namespace of the claim
	volumes     apiread.Result[[]*corev1.PersistentVolume]
	attachments apiread.Result[[]*storagev1.VolumeAttachment]
	capacities  apiread.Result[[]*storagev1.CSIStorageCapacity] // of the class

	logical *logicalFact // only of TopoLVM

	secrets    []secretFact
	secretsErr error // the secrets of the class cannot be resolved for the claim
	source     *sourceFact
	sourceErr  error
	snapshot   *snapshotFact // that is explained

	events  apiread.Result[[]*corev1.Event]
	process *statusPage       // nil: not requested
	unread  []finding.Finding // reads that failed
}

// leaseFact holds the Leases of a role for a driver, of all namespaces.
type leaseFact struct {
	role, driver, name string
	leases             apiread.Result[[]*coordinationv1.Lease]
}

// secretFact is a Secret that a class or a volume references.
type secretFact struct {
	Request
	purposes []volumerules.Purpose
	object   apiread.Result[*metav1.PartialObjectMetadata]
}

// sourceFact is the data source of a claim.
type sourceFact struct {
	volumerules.Source
	snapshot apiread.Result[*snapshotv1.VolumeSnapshot]
	content  apiread.Result[*snapshotv1.VolumeSnapshotContent]
	claim    apiread.Result[*corev1.PersistentVolumeClaim]
	volume   apiread.Result[*corev1.PersistentVolume]
	grants   apiread.Result[[]*volumerules.Grant] // only for a source in another namespace
}

// statusPage is the status page of a running process, or why it cannot be read.
type statusPage struct {
	url  string
	page statusz.Page
	err  error
}

// setNow sets the time with which ages are computed.
func (f *facts) setNow(now time.Time) {
	f.now = now
	for _, c := range f.podClaims {
		c.facts.setNow(now)
	}
}

// age returns how long before now t was, in kubectl's format.
func (f *facts) age(t time.Time) string { return duration.HumanDuration(max(f.now.Sub(t), 0)) }

// waitsForPod reports whether the volume of the claim is provisioned only after a pod that uses it is scheduled.
func (f *facts) waitsForPod() bool {
	claim := f.claim.Value
	return claim.Spec.VolumeName == "" && claim.Annotations[storagehelpers.AnnSelectedNode] == "" && f.class.Found &&
		kube.WaitsForFirstConsumer(f.class.Value)
}

// podsUsing returns the pods that use the claim and have not ended, sorted by name.
func (f *facts) podsUsing() []*corev1.Pod {
	using := slices.DeleteFunc(slices.Clone(f.pods.Value), func(p *corev1.Pod) bool {
		return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed || !kube.UsesClaim(p, f.claim.Value)
	})
	slices.SortFunc(using, func(a, b *corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	return using
}

// volumeHandle returns the ID of the volume at the driver; "" if unknown.
func (f *facts) volumeHandle() string {
	if f.volume.Found && f.volume.Value.Spec.CSI != nil {
		return f.volume.Value.Spec.CSI.VolumeHandle
	}
	return ""
}

// attaches reports whether volumes of the driver are attached; true if unknown.
func (f *facts) attaches() bool {
	return !f.csiDriver.Found || ptr.Deref(f.csiDriver.Value.Spec.AttachRequired, true)
}

// namesOf returns the names of objects.
func namesOf[T metav1.Object](objects []T) []string {
	var names []string
	for _, o := range objects {
		names = append(names, o.GetName())
	}
	return names
}

// driversOfNode returns the drivers that are registered on a node or have volumes only there, sorted.
func (f *facts) driversOfNode(name string) []string {
	var drivers []string
	if f.csiNode.Found {
		for _, d := range f.csiNode.Value.Spec.Drivers {
			drivers = append(drivers, d.Name)
		}
	}
	for _, pv := range f.volumesOfNode(name) {
		drivers = append(drivers, migration.DriverOfVolume(pv))
	}
	slices.Sort(drivers)
	return slices.DeleteFunc(slices.Compact(drivers), func(d string) bool { return d == "" })
}

// volumesOfNode returns the CSI volumes that are accessible only from a node. For a deleted node these are the
// volumes without a matching node whose affinity names it or the value of its record.
func (f *facts) volumesOfNode(name string) []*corev1.PersistentVolume {
	var local []*corev1.PersistentVolume
	for _, pv := range f.volumes.Value {
		if pv.Spec.CSI == nil || requiredAffinity(pv) == nil || !f.nodes.Found {
			continue
		}
		hosts := f.nodesOf(pv)
		lost := slices.ContainsFunc(f.lostNodesOf(pv), func(n lostNode) bool { return n.Node == name })
		if len(hosts) == 1 && hosts[0].Name == name || len(hosts) == 0 && (lost || affinityNames(pv, name)) {
			local = append(local, pv)
		}
	}
	return local
}

// requiredAffinity returns the node affinity of pv; nil for none.
func requiredAffinity(pv *corev1.PersistentVolume) *corev1.NodeSelector {
	if pv.Spec.NodeAffinity == nil {
		return nil
	}
	return pv.Spec.NodeAffinity.Required
}

// affinityNames reports whether the node affinity of pv has value.
func affinityNames(pv *corev1.PersistentVolume, value string) bool {
	for _, t := range requiredAffinity(pv).NodeSelectorTerms {
		for _, e := range slices.Concat(t.MatchExpressions, t.MatchFields) {
			if e.Operator == corev1.NodeSelectorOpIn && slices.Contains(e.Values, value) {
				return true
			}
		}
	}
	return false
}

// nodesOf returns the nodes from which pv is accessible.
func (f *facts) nodesOf(pv *corev1.PersistentVolume) []*corev1.Node {
	return f.nodesMatching(requiredAffinity(pv))
}

// nodesMatching returns the nodes that match selector, which many volumes may have.
func (f *facts) nodesMatching(selector *corev1.NodeSelector) []*corev1.Node {
	key := selector.String()
	if known, ok := f.matching[key]; ok {
		return known
	}
	var nodes []*corev1.Node
	parsed := nodeaffinity.NewLazyErrorNodeSelector(selector)
	for _, node := range f.nodes.Value {
		if ok, err := parsed.Match(node); err == nil && ok {
			nodes = append(nodes, node)
		}
	}
	if f.matching == nil {
		f.matching = map[string][]*corev1.Node{}
	}
	f.matching[key] = nodes
	return nodes
}

// driverOfClaim returns the driver that provisions the volume of claim; "" if unknown.
func driverOfClaim(claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass) string {
	a := claim.Annotations
	owner := cmp.Or(a[storagehelpers.AnnStorageProvisioner], a[storagehelpers.AnnBetaStorageProvisioner])
	if name := cmp.Or(a[storagehelpers.AnnMigratedTo], owner); name != "" {
		return name
	}
	if class != nil && class.Provisioner != storagehelpers.NotSupportedProvisioner {
		return cmp.Or(migration.DriverOf(class.Provisioner), class.Provisioner)
	}
	return ""
}

// volumeOf returns the name of the PersistentVolume of va; "" for an inline volume.
func volumeOf(va *storagev1.VolumeAttachment) string {
	return ptr.Deref(va.Spec.Source.PersistentVolumeName, "")
}
