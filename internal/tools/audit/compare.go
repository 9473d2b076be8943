package audit

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	csitrans "k8s.io/csi-translation-lib"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// ClusterState is what the API server knows. Objects of other drivers may be among them, also as
// stubs.
type ClusterState struct {
	Volumes     []*corev1.PersistentVolume
	Attachments []*storagev1.VolumeAttachment
	Claims      []*corev1.PersistentVolumeClaim
	// Others are further objects that may be stuck, by what they are called in a report.
	Others map[string]metav1.Object
	// NodeIDs is how the driver calls nodes, by their names; those that are not there are
	// not known.
	NodeIDs map[string]string
	// Attached tells that Attachments are all there are.
	Attached bool
}

// Listed is what the driver said: the nodes where each volume is published, by handle. It
// is nil where the driver lists no volumes.
type Listed struct {
	Volumes map[string][]string
	// Nodes tells that the driver said where its volumes are published.
	Nodes bool
}

// annNodeID is where an attacher notes how the driver calls the node of an attachment.
const annNodeID = "csi.alpha.kubernetes.io/node-id"

// comparison is of one driver.
type comparison struct {
	driver     string
	world      ClusterState
	listed     Listed
	stuckAfter time.Duration
	now        time.Time
}

// findings is everything that differs, and everything that is stuck.
func (c comparison) findings() []Finding {
	var found []Finding
	if c.listed.Volumes != nil {
		found = append(found, c.volumes()...)
		if c.listed.Nodes && c.world.Attached {
			found = append(found, c.attachments()...)
		}
	}
	return sorted(append(found, c.stuck()...))
}

// translator knows the volume plugins that were built into Kubernetes (KEP-625).
var translator = csitrans.New()

// handle is that of pv if it is one of driver. In-tree tells that it was translated: such
// a handle may lack what only the driver knows, such as the project; its last part is
// the name of the volume.
func handle(driver string, pv *corev1.PersistentVolume) (handle string, inTree, ok bool) {
	if pv.Spec.CSI != nil {
		return pv.Spec.CSI.VolumeHandle, false, pv.Spec.CSI.Driver == driver && pv.Spec.CSI.VolumeHandle != ""
	}
	if !translator.IsMigratedCSIDriverByName(driver) || !translator.IsPVMigratable(pv) {
		return "", false, false
	}
	translated, err := translator.TranslateInTreePVToCSI(logr.Discard(), pv)
	if err != nil || translated.Spec.CSI == nil || translated.Spec.CSI.Driver != driver {
		return "", false, false
	}
	return translated.Spec.CSI.VolumeHandle, true, true
}

// volumes compares the volumes with the PersistentVolumes.
func (c comparison) volumes() []Finding {
	var found []Finding
	known, knownNames, listedNames := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for h := range c.listed.Volumes {
		listedNames[path.Base(h)] = true
	}
	for _, pv := range c.world.Volumes {
		h, inTree, ok := handle(c.driver, pv)
		if !ok {
			continue
		}
		_, listed := c.listed.Volumes[h]
		known[h] = true
		if inTree {
			knownNames[path.Base(h)] = true
			listed = listed || listedNames[path.Base(h)]
		}
		if !listed {
			found = append(found, Finding{
				Kind: PVWithoutVolume, Object: "PersistentVolume " + pv.Name, UID: string(pv.UID), VolumeHandle: h,
				Message: fmt.Sprintf("%s, and the driver lists no volume with this handle", described(pv)),
			})
		}
	}
	for h := range c.listed.Volumes {
		if !known[h] && !knownNames[path.Base(h)] {
			found = append(found, Finding{Kind: VolumeWithoutPV, VolumeHandle: h, Message: "the driver lists it, and no PersistentVolume has its handle" + c.doubts()})
		}
	}
	return found
}

func described(pv *corev1.PersistentVolume) string {
	text := "it is " + string(pv.Status.Phase)
	if ref := pv.Spec.ClaimRef; ref != nil {
		text += fmt.Sprintf(" for claim %s/%s", ref.Namespace, ref.Name)
	}
	return text
}

// doubts says of a volume that nobody knows whose it may be.
func (c comparison) doubts() string {
	n := 0
	for _, pvc := range c.world.Claims {
		if kube.HasProvisioningRecord(c.driver, pvc) {
			n++
		}
	}
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("; it may belong to one of %d claims for which it is not known yet what became of CreateVolume", n)
}

// place is a volume at a node.
type place struct{ handle, node string }

// attachments compares where volumes are published with the attachments.
func (c comparison) attachments() []Finding {
	var found []Finding
	volumes := map[string]*corev1.PersistentVolume{}
	for _, pv := range c.world.Volumes {
		volumes[pv.Name] = pv
	}
	expected, unknown := map[place]bool{}, map[string]bool{} // unknown: handles of attachments to a node of which the ID is not known
	for _, va := range c.world.Attachments {
		h, ok := c.handleOf(va, volumes)
		if !ok {
			continue
		}
		ids := c.nodeIDs(va)
		if len(ids) == 0 {
			unknown[h] = true
			continue
		}
		published := false
		nodes, listed := c.listed.Volumes[h]
		for _, id := range ids {
			expected[place{h, id}] = true
			published = published || slices.Contains(nodes, id)
		}
		if va.Status.Attached && listed && nodes != nil && !published {
			found = append(found, Finding{
				Kind: AttachedNotPublished, Object: "VolumeAttachment " + va.Name, UID: string(va.UID), VolumeHandle: h, Node: ids[0],
				Message: fmt.Sprintf("attached to node %s by its status, and the driver has the volume published %s", va.Spec.NodeName, at(nodes)),
			})
		}
	}
	for h, nodes := range c.listed.Volumes {
		for _, id := range nodes {
			if !expected[place{h, id}] && !unknown[h] {
				found = append(found, Finding{Kind: PublishedNotAttached, VolumeHandle: h, Node: id, Message: "the driver has it published at the node, and no VolumeAttachment is for that"})
			}
		}
	}
	return found
}

func at(nodes []string) string {
	if len(nodes) == 0 {
		return "nowhere"
	}
	return fmt.Sprintf("at %q only", nodes)
}

// handleOf is the handle of the volume that va attaches, if it is one of the driver and
// known.
func (c comparison) handleOf(va *storagev1.VolumeAttachment, volumes map[string]*corev1.PersistentVolume) (string, bool) {
	if va.Spec.Attacher != c.driver {
		return "", false
	}
	source := va.Spec.Source
	switch {
	case source.InlineVolumeSpec != nil && source.InlineVolumeSpec.CSI != nil:
		return source.InlineVolumeSpec.CSI.VolumeHandle, true
	case source.PersistentVolumeName == nil || volumes[*source.PersistentVolumeName] == nil:
		return "", false
	}
	h, inTree, ok := handle(c.driver, volumes[*source.PersistentVolumeName])
	if _, listed := c.listed.Volumes[h]; ok && inTree && !listed {
		for candidate := range c.listed.Volumes {
			if path.Base(candidate) == path.Base(h) {
				return candidate, true
			}
		}
	}
	return h, ok
}

// nodeIDs is how the driver may call the node of va: as it was when it was attached, and
// as it is now.
func (c comparison) nodeIDs(va *storagev1.VolumeAttachment) []string {
	ids := map[string]bool{va.Annotations[annNodeID]: true, c.world.NodeIDs[va.Spec.NodeName]: true}
	delete(ids, "")
	return slices.Sorted(maps.Keys(ids))
}

// stuck is the objects of the driver that have been deleted for long and are still there.
func (c comparison) stuck() []Finding {
	var found []Finding
	look := func(name string, obj metav1.Object) {
		since := obj.GetDeletionTimestamp()
		if since == nil || c.now.Sub(since.Time) < c.stuckAfter {
			return
		}
		f := Finding{Kind: Stuck, Object: name, UID: string(obj.GetUID()), Message: fmt.Sprintf("deleted %v ago, and held by its finalizers", c.now.Sub(since.Time).Round(time.Second))}
		for _, finalizer := range obj.GetFinalizers() {
			f.Finalizers = append(f.Finalizers, Finalizer{finalizer, c.remover(finalizer)})
		}
		found = append(found, f)
	}
	mine := map[string]bool{}
	for _, pv := range c.world.Volumes {
		if _, _, ok := handle(c.driver, pv); ok {
			mine[pv.Name] = true
			look("PersistentVolume "+pv.Name, pv)
		}
	}
	for _, va := range c.world.Attachments {
		if va.Spec.Attacher == c.driver {
			look("VolumeAttachment "+va.Name, va)
		}
	}
	for _, pvc := range c.world.Claims {
		if kube.ClaimHandledBy(c.driver, pvc) || mine[pvc.Spec.VolumeName] {
			look("PersistentVolumeClaim "+kube.Key(pvc), pvc)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.world.Others)) {
		look(name, c.world.Others[name])
	}
	return found
}
