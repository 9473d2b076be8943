package nodecontroller

import (
	"maps"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
)

// index finds the nodes and volumes that belong together, so that an event costs what
// belongs to its object and not what the cluster has. Handlers keep it up to date; it may
// be a moment behind the caches.
type index struct {
	driver string
	ann    annotations
	fixed  string // the key that the operator set; "" means the one that the driver reports

	mu      sync.RWMutex
	key     string              // "" while it is unknown
	drivers map[string][]string // topology keys by the name of the CSINode that has the driver
	nodes   relation
	labels  relation             // nodes by their value of key
	shared  map[string]struct{}  // keys of which several nodes have had the same value
	volumes relation             // by their local values, and the names of their lost nodes
	going   map[string]struct{}  // names of nodes that are being deleted
	graves  map[string]tombstone // by every name of the node, for as long as nothing else has it
}

// relation is objects and the names by which they are found.
type relation struct {
	names   map[string][]string            // of an object
	objects map[string]map[string]struct{} // of a name
}

func newRelation() relation {
	return relation{map[string][]string{}, map[string]map[string]struct{}{}}
}

// set gives object other names, and returns those that it has or had.
func (r relation) set(object string, names []string) (touched []string) {
	old := r.names[object]
	for _, n := range old {
		if delete(r.objects[n], object); len(r.objects[n]) == 0 {
			delete(r.objects, n)
		}
	}
	delete(r.names, object)
	if len(names) > 0 {
		r.names[object] = names
	}
	for _, n := range names {
		if r.objects[n] == nil {
			r.objects[n] = map[string]struct{}{}
		}
		r.objects[n][object] = struct{}{}
	}
	return slices.Concat(old, names)
}

// find is the objects that have one of names, in order.
func (r relation) find(names []string) []string {
	found := map[string]struct{}{}
	for _, n := range names {
		maps.Copy(found, r.objects[n])
	}
	return slices.Sorted(maps.Keys(found))
}

func newIndex(driver, key string, ann annotations) *index {
	return &index{driver: driver, ann: ann, fixed: key, key: key, drivers: map[string][]string{}, nodes: newRelation(), labels: newRelation(), shared: map[string]struct{}{}, volumes: newRelation(), graves: map[string]tombstone{}, going: map[string]struct{}{}}
}

// topologyKey is the key of the driver; "" while it reports none, or several, or one that
// does not tell nodes apart: a zone is not gone for good because it has no nodes today.
// That the operator has set the key is proof enough that it does.
func (i *index) topologyKey() string {
	i.mu.RLock()
	defer i.mu.RUnlock()
	if _, shared := i.shared[i.key]; i.fixed == "" && (shared || manyNodes(i.key)) {
		return ""
	}
	return i.key
}

// manyNodes tells whether nodes have the same value of a key by its definition.
func manyNodes(key string) bool {
	switch key {
	case corev1.LabelTopologyZone, corev1.LabelTopologyRegion, corev1.LabelFailureDomainBetaZone, corev1.LabelFailureDomainBetaRegion:
		return true
	}
	return false
}

// hasDriver tells whether the driver is registered on a node.
func (i *index) hasDriver(node string) bool {
	i.mu.RLock()
	defer i.mu.RUnlock()
	_, ok := i.drivers[node]
	return ok
}

// driverNodes is the names of the nodes that have the driver, in no order.
func (i *index) driverNodes() []string {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return slices.Collect(maps.Keys(i.drivers))
}

// setCSINode notes what a CSINode says of the driver; nil means that it is gone. It tells
// whether the driver came to the node or left it, and whether the key is another now: then
// everything else has to be set again.
func (i *index) setCSINode(name string, csiNode *storagev1.CSINode) (moved, rekeyed bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	_, had := i.drivers[name]
	delete(i.drivers, name)
	has := false
	if csiNode != nil {
		for _, d := range csiNode.Spec.Drivers {
			if d.Name == i.driver {
				i.drivers[name], has = d.TopologyKeys, true
			}
		}
	}
	if i.fixed != "" {
		return had != has, false
	}
	keys := map[string]struct{}{}
	for _, reported := range i.drivers {
		for _, k := range reported {
			keys[k] = struct{}{}
		}
	}
	key := ""
	if len(keys) == 1 {
		key = slices.Collect(maps.Keys(keys))[0]
	}
	if rekeyed = key != i.key; rekeyed {
		i.labels = newRelation()
	}
	i.key = key
	return had != has, rekeyed
}

// setNode notes the names of a node, and returns the volumes that it may concern.
func (i *index) setNode(node *corev1.Node) (volumes []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	touched := i.nodes.set(node.Name, namesOfNode(node, i.key))
	i.label(node)
	for _, n := range touched {
		delete(i.graves, n)
	}
	return i.volumes.find(touched)
}

// label notes the value of the key that a node has. A key that several nodes shared stays
// one that they may share, when all but one of them are gone too.
func (i *index) label(node *corev1.Node) {
	value := node.Labels[i.key]
	if value == "" || node.DeletionTimestamp != nil {
		i.labels.set(node.Name, nil)
		return
	}
	i.labels.set(node.Name, []string{value})
	if len(i.labels.objects[value]) > 1 {
		i.shared[i.key] = struct{}{}
	}
}

// dropNode notes that a node is gone, and what is to be remembered of it.
func (i *index) dropNode(node *corev1.Node) (volumes []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	touched := mergeNames(i.nodes.set(node.Name, nil), namesOfNode(node, i.key)) // it may have gone before this term
	i.labels.set(node.Name, nil)
	for _, n := range touched {
		if len(i.volumes.objects[n]) > 0 {
			i.graves[n] = tombstone{name: node.Name, uid: string(node.UID), optedOut: node.Annotations[i.ann.cleanup] == disabled}
		}
	}
	return i.volumes.find(touched)
}

// setVolume notes by which names pv is found; it tells whether it is node-local.
func (i *index) setVolume(pv *corev1.PersistentVolume) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	values, local := localValues(pv, i.driver, i.key)
	if local {
		values = append(values, i.ann.lostNodes(pv)...)
		slices.Sort(values)
		values = slices.Compact(values)
	}
	i.volumes.set(pv.Name, values)
	return local
}

func (i *index) dropVolume(name string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, n := range i.volumes.set(name, nil) {
		if len(i.volumes.objects[n]) == 0 {
			delete(i.graves, n)
		}
	}
}

// nodesOf is the names under which the nodes of a volume are found.
func (i *index) nodesOf(volume string) []string {
	i.mu.RLock()
	defer i.mu.RUnlock()
	names := i.volumes.names[volume]
	return mergeNames(names, i.nodes.find(names))
}

// setGoing notes whether a node is being deleted.
func (i *index) setGoing(node string, going bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if delete(i.going, node); going {
		i.going[node] = struct{}{}
	}
}

// goingNodes is the names of the nodes that are being deleted, in no order.
func (i *index) goingNodes() []string {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return slices.Collect(maps.Keys(i.going))
}

// nodesNamed is the nodes that have one of names as a name, label or host name.
func (i *index) nodesNamed(names []string) []string {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return i.nodes.find(names)
}

// volumesOf is the volumes that may belong to a node, whether it is there or not.
func (i *index) volumesOf(node string) []string {
	i.mu.RLock()
	defer i.mu.RUnlock()
	names := append([]string{node}, i.nodes.names[node]...)
	for n, grave := range i.graves { // of nodes that are gone and have volumes: few
		if grave.name == node {
			names = append(names, n)
		}
	}
	return i.volumes.find(names)
}

// lost is the names of the lost nodes of pv, and what was last seen of one of them:
// what is written on it, else who last had one of its values, else the values themselves.
func (i *index) lost(pv *corev1.PersistentVolume, values []string) ([]string, *tombstone) {
	i.mu.RLock()
	defer i.mu.RUnlock()
	names := i.ann.lostNodes(pv)
	var last *tombstone
	written := len(names) > 0
	for _, v := range values {
		grave, ok := i.graves[v]
		if ok && (last == nil || grave.optedOut && !last.optedOut) { // one that says no is enough
			last = &grave
		}
		switch {
		case written:
		case ok:
			names = append(names, grave.name)
		default:
			names = append(names, v)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), last
}

// lostNodes is the names of lost nodes that are written on pv.
func (a annotations) lostNodes(pv *corev1.PersistentVolume) []string {
	var names []string
	for n := range strings.SplitSeq(pv.Annotations[a.lostNode], nodeListMark) {
		if n = strings.TrimSpace(n); n != "" {
			names = append(names, n)
		}
	}
	return names
}
