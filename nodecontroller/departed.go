package nodecontroller

import (
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// departed remembers the nodes that had opted out when they went. On their volumes that is
// written down; for their claims without a volume and their custom resources nothing else
// tells of it. It is kept by every replica for the life of its process, whoever leads: the
// next leader has not been told by the one before.
type departed struct {
	annotation string
	mu         sync.Mutex
	nodes      map[string]*corev1.Node
}

func newDeparted(annotation string) *departed {
	return &departed{annotation: annotation, nodes: map[string]*corev1.Node{}}
}

// watch has d follow the nodes for the life of the process.
func (d *departed) watch(nodes kube.Kind[*corev1.Node]) error {
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
}

// returned is for a node that exists and speaks for itself.
func (d *departed) returned(node *corev1.Node) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.nodes, node.Name)
}

// optedOut tells whether a node that is gone had opted out.
func (d *departed) optedOut(name string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, ok := d.nodes[name]
	return ok
}

// list is the nodes that had opted out, in no order.
func (d *departed) list() []*corev1.Node {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(maps.Values(d.nodes))
}
