package capacity

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// VolumeProvisioned takes that the driver has made the volume of pv, so that it has less
// room where that is.
func (c *Controller) VolumeProvisioned(pv *corev1.PersistentVolume) {
	t := c.current.Load()
	if t == nil {
		return
	}
	if pv.Spec.NodeAffinity == nil {
		t.refresh(t.world.classItems(pv.Spec.StorageClassName))
		return
	}
	t.refresh(t.world.volumeItems(pv))
}

// VolumeNotProvisioned takes that a CreateVolume for a class has failed: there may be less
// room than was published.
func (c *Controller) VolumeNotProvisioned(class string) {
	if t := c.current.Load(); t != nil {
		t.refresh(t.world.classItems(class))
	}
}

// VolumeDeleted takes that the driver has deleted the volume of pv. Of a volume that could
// be anywhere it does not say where there is more room now; the next poll does.
func (c *Controller) VolumeDeleted(pv *corev1.PersistentVolume) {
	if t := c.current.Load(); t != nil && pv.Spec.NodeAffinity != nil {
		t.refresh(t.world.volumeItems(pv))
	}
}

// classItems is the items of a class; none when it is not published.
func (w *world) classItems(class string) []item {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.classes[class] == nil {
		return nil
	}
	return w.ofClass(class)
}

// volumeItems is the items of all classes in the segments where pv is accessible. When
// none of those is known, as with the labels that plugins of Kubernetes itself once used,
// it is all items of its class.
func (w *world) volumeItems(pv *corev1.PersistentVolume) []item {
	required := pv.Spec.NodeAffinity.Required
	if required == nil {
		return nil
	}
	w.mu.Lock()
	segments := w.knownSegments(required.NodeSelectorTerms)
	var items []item
	for _, s := range segments {
		items = append(items, w.ofSegment(s)...)
	}
	w.mu.Unlock()
	if len(segments) == 0 && len(required.NodeSelectorTerms) > 0 {
		return w.classItems(pv.Spec.StorageClassName)
	}
	return items
}

// knownSegments is those of the segments that terms select which have nodes, each once.
func (w *world) knownSegments(terms []corev1.NodeSelectorTerm) []segment {
	var known []segment
	for _, term := range terms {
		if s, ok := segmentOfTerm(term); ok && w.nodes.segments[s] > 0 && !slices.Contains(known, s) {
			known = append(known, s)
		}
	}
	return known
}
