package capacity

import (
	"context"
	"slices"
	"sync"
	"time"

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
		t.changed.add(pv.Spec.StorageClassName)
		return
	}
	t.refreshVolume(pv)
}

// VolumeNotProvisioned takes that a CreateVolume for a class has failed: there may be less
// room than was published.
func (c *Controller) VolumeNotProvisioned(class string) {
	if t := c.current.Load(); t != nil {
		t.changed.add(class)
	}
}

// VolumeDeleted takes that the driver has deleted the volume of pv. Of a volume that could
// be anywhere it does not say where there is more room now; the next poll does.
func (c *Controller) VolumeDeleted(pv *corev1.PersistentVolume) {
	if t := c.current.Load(); t != nil && pv.Spec.NodeAffinity != nil {
		t.refreshVolume(pv)
	}
}

// refreshVolume has the driver asked again about where pv is. The labels that plugins of
// Kubernetes itself once used are those of no segment: of such a volume all of its class
// is asked about.
func (t *term) refreshVolume(pv *corev1.PersistentVolume) {
	items := t.world.volumeItems(pv)
	if items == nil && pv.Spec.CSI == nil {
		t.changed.add(pv.Spec.StorageClassName)
		return
	}
	t.refresh(items)
}

// changedClasses is the classes all of whose capacities are to be asked for again. Many
// claims of a class may fail at the same time, and a class may have thousands of segments.
type changedClasses struct {
	mu    sync.Mutex
	names map[string]struct{}
	wake  chan struct{} // holds a value when there is something
}

func (c *changedClasses) add(class string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.names == nil {
		c.names = map[string]struct{}{}
	}
	c.names[class] = struct{}{}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func (c *changedClasses) take() map[string]struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	names := c.names
	c.names = nil
	return names
}

// classPause is the least time between two rounds of refreshes of classes.
const classPause = time.Second

// refreshClasses works off what has changed until ctx ends.
func (t *term) refreshClasses(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.changed.wake:
		}
		for class := range t.changed.take() {
			t.refresh(t.world.classItems(class))
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(classPause):
		}
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

// volumeItems is the items of all classes in the segments where pv is accessible; nil when
// none of those is known.
func (w *world) volumeItems(pv *corev1.PersistentVolume) []item {
	required := pv.Spec.NodeAffinity.Required
	if required == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var items []item
	for _, s := range w.knownSegments(required.NodeSelectorTerms) {
		items = append(items, w.ofSegment(s)...)
	}
	return items
}

// knownSegments is those of the segments that terms select which have nodes, or had them
// just now, each once.
func (w *world) knownSegments(terms []corev1.NodeSelectorTerm) []segment {
	var known []segment
	for _, term := range terms {
		s, ok := segmentOfTerm(term)
		_, going := w.gone[s]
		if ok && (going || w.nodes.segments[s] > 0) && !slices.Contains(known, s) {
			known = append(known, s)
		}
	}
	return known
}
