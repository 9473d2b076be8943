package nodecontroller

import (
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// departed remembers the nodes that had opted out when they went. On their volumes that is
// written down as soon as it is known which these are; for their claims without a volume
// and their custom resources nothing else tells of it. It is kept by every replica for the
// life of its process, whoever leads: the next leader has not been told by the one before.
type departed struct {
	annotation string
	mu         sync.Mutex
	nodes      map[string]*corev1.Node
	byValue    relation // nodes, by all that an affinity may mean them by
	// written is the volumes on which the opt-out has stood: whoever takes it away there
	// means it.
	written map[types.UID]struct{}
}

func newDeparted(annotation string) *departed {
	return &departed{annotation: annotation, nodes: map[string]*corev1.Node{}, byValue: newRelation(), written: map[types.UID]struct{}{}}
}

// watch has d follow the nodes for the life of the process.
func (d *departed) watch(nodes kube.Informer[*corev1.Node]) error {
	_, err := nodes.Handle(kube.Handlers[*corev1.Node]{
		Add: d.returned, Update: func(_, node *corev1.Node) { d.returned(node) }, Delete: d.left,
	})
	return err
}

// left notes what a node that is gone has said last.
func (d *departed) left(node *corev1.Node) {
	if node.Annotations[d.annotation] != disabled {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.nodes[node.Name] = node
	d.byValue.set(node.Name, allValues(node))
}

// allValues is all by which an affinity may mean a node, whatever its key.
func allValues(node *corev1.Node) []string {
	return slices.Compact(slices.Sorted(slices.Values(slices.Concat(ownNames(node), slices.Collect(maps.Values(node.Labels))))))
}

// ownValues is those that may be its own: it shares its zone and region with others.
func ownValues(node *corev1.Node) []string {
	own := *node
	own.Labels = maps.Clone(node.Labels)
	delete(own.Labels, corev1.LabelTopologyZone)
	delete(own.Labels, corev1.LabelTopologyRegion)
	return allValues(&own)
}

// returned is for a node that exists and speaks for itself.
func (d *departed) returned(node *corev1.Node) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.nodes, node.Name)
	d.byValue.set(node.Name, nil)
}

// optedOut tells whether a node that is gone had opted out.
func (d *departed) optedOut(name string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, ok := d.nodes[name]
	return ok
}

// of is a node that is gone and had opted out, and that one of names means with key; nil
// when there is none.
func (d *departed) of(names []string, key string) *corev1.Node {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, found := range d.byValue.find(names) {
		node := d.nodes[found]
		if slices.ContainsFunc(namesOfNode(node, key), func(n string) bool { return slices.Contains(names, n) }) {
			return node
		}
	}
	return nil
}

// heeds tells whether what a node has said still holds for pv.
func (d *departed) heeds(pv *corev1.PersistentVolume) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if pv.Annotations[d.annotation] == disabled {
		d.written[pv.UID] = struct{}{}
		return true
	}
	_, taken := d.written[pv.UID]
	return !taken
}

// forget is for a volume that is gone.
func (d *departed) forget(uid types.UID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.written, uid)
}
