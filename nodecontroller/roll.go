package nodecontroller

import (
	"context"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// roll is by what all Nodes and CSINodes of the cluster may be meant, as the API server has
// them. A node may be called like a value by its host name or its ID alone, for which
// nothing can be asked but everything.
type roll struct {
	names      relation
	unlabelled []string // see [index.unlabelled]
}

// candidates is the nodes that volumes with one of values may mean.
func (o *roll) candidates(values []string) []string {
	return mergeNames(o.names.find(values), o.unlabelled)
}

// everyNode reads all of them. visit, which may be nil, is called for each Node with what
// the driver has registered there.
func (r *reader) everyNode(ctx context.Context, key string, visit func(n *corev1.Node, d storagev1.CSINodeDriver, registered bool)) (*roll, error) {
	found, drivers := &roll{names: newRelation()}, map[string]storagev1.CSINodeDriver{}
	err := pages(ctx, r.timeout, "CSINodes", r.listCSINodes, metav1.ListOptions{}, func(n *storagev1.CSINode) bool {
		if d, ok := registration(n, r.policy.driver); ok {
			drivers[n.Name] = d
			found.names.set(n.Name, slices.DeleteFunc([]string{n.Name, d.NodeID}, func(v string) bool { return v == "" }))
		}
		return true
	})
	if err != nil {
		return nil, err
	}
	err = pages(ctx, r.timeout, "Nodes", r.listNodes, metav1.ListOptions{}, func(n *corev1.Node) bool {
		d, ok := drivers[n.Name]
		found.names.set(n.Name, mergeNames(found.names.names[n.Name], namesOfNode(n, key)))
		if ok && unlabelled(n.Labels[key], key, d) {
			found.unlabelled = append(found.unlabelled, n.Name)
		}
		if visit != nil {
			visit(n, d, ok)
		}
		return true
	})
	return found, err
}

// rollAge is how long one look at all nodes serves: for what one burst removes, and no more
// often than this in a large cluster. What is called like a lost node itself, or has its
// label, is asked for before each deletion nevertheless.
const rollAge = 10 * time.Second

// lastRoll is the latest of these looks.
type lastRoll struct {
	mu   sync.Mutex
	roll *roll
	key  string
	at   time.Time
}

// everyNode is all nodes, as they were a moment ago.
func (t *term) everyNode(ctx context.Context) (*roll, error) {
	key := t.index.topologyKey()
	t.rolled.mu.Lock()
	defer t.rolled.mu.Unlock()
	if l := &t.rolled; l.roll != nil && l.key == key && time.Since(l.at) < rollAge {
		return l.roll, nil
	}
	at := time.Now()
	found, err := t.reader.everyNode(ctx, key, nil)
	if err != nil {
		return nil, err
	}
	t.rolled.roll, t.rolled.key, t.rolled.at = found, key, at
	return found, nil
}
