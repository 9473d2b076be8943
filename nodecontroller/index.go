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
	key     string                             // "" while it is unknown
	drivers map[string]storagev1.CSINodeDriver // by the name of the CSINode that has the driver
	nodes   relation
	values  map[string]nodeValue // by the name of the node
	foreign map[string]struct{}  // nodes of the driver whose value of key is not one of their own
	bare    map[string]struct{}  // nodes of the driver that should have a value of key and have none
	former  relation             // nodes that are there, by names that they had and have not now
	volumes relation             // by their local values, and the names of their lost nodes
	mention relation             // volumes of the driver by all values in their affinity, whatever their keys
	going   map[string]struct{}  // names of nodes that are being deleted
	graves  map[string]tombstone // by every name of the node, until that is back
}

// nodeValue is the value of the key that a node has, what it may be called by itself, and
// all by which a volume may mean it.
type nodeValue struct {
	value      string
	own, names []string
}

// ownNames is what a node is called by. A topology key whose values are none of these, nor
// the ID that the driver has for the node, is not one of single nodes: a zone is not gone
// for good because it has no node today.
func ownNames(node *corev1.Node) []string {
	names := []string{node.Name, node.Labels[corev1.LabelHostname]}
	for _, a := range node.Status.Addresses {
		if a.Type == corev1.NodeHostName {
			names = append(names, a.Address)
		}
	}
	return names
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
	return &index{
		driver: driver, ann: ann, fixed: key, key: key, drivers: map[string]storagev1.CSINodeDriver{}, nodes: newRelation(), values: map[string]nodeValue{},
		foreign: map[string]struct{}{}, bare: map[string]struct{}{}, former: newRelation(), volumes: newRelation(), mention: newRelation(), graves: map[string]tombstone{}, going: map[string]struct{}{},
	}
}

// topologyKey is the key of the driver; "" while it reports none, or several, or one whose
// value on any of its nodes is not that node's own. That the operator has set the key is
// proof enough.
func (i *index) topologyKey() string {
	i.mu.RLock()
	defer i.mu.RUnlock()
	if i.fixed == "" && len(i.foreign) > 0 {
		return ""
	}
	return i.key
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
		var d storagev1.CSINodeDriver
		if d, has = registration(csiNode, i.driver); has {
			i.drivers[name] = d
		}
	}
	i.rename(name)
	i.judge(name)
	if i.fixed != "" {
		return had != has, false
	}
	keys := map[string]struct{}{}
	for _, reported := range i.drivers {
		for _, k := range reported.TopologyKeys {
			keys[k] = struct{}{}
		}
	}
	key := ""
	if len(keys) == 1 {
		key = slices.Collect(maps.Keys(keys))[0]
	}
	rekeyed = key != i.key
	i.key = key
	return had != has, rekeyed
}

// setNode notes the names of a node, and returns the volumes that it may concern.
func (i *index) setNode(node *corev1.Node) (volumes []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.values[node.Name] = nodeValue{node.Labels[i.key], ownNames(node), namesOfNode(node, i.key)}
	touched := i.rename(node.Name)
	i.judge(node.Name)
	for _, n := range i.nodes.names[node.Name] {
		if i.graves[n].name == node.Name {
			delete(i.graves, n)
		}
	}
	return i.volumes.find(touched)
}

// rename has a node, or a CSINode without one, found by all its names, and returns those
// that it has or had. A name that a node drops while it is there may still be that of its
// volumes: their data is on it.
func (i *index) rename(node string) (touched []string) {
	value, exists := i.values[node]
	names := slices.Clone(value.names)
	if id := i.drivers[node].NodeID; id != "" {
		names = mergeNames(names, []string{id})
	}
	old := i.nodes.names[node]
	touched = i.nodes.set(node, names)
	if exists {
		former := slices.DeleteFunc(mergeNames(i.former.names[node], old), func(n string) bool { return slices.Contains(names, n) })
		i.former.set(node, former)
	}
	return touched
}

// judge notes whether the value of the key that a node has is one of its own, and whether
// it lacks one.
func (i *index) judge(node string) {
	delete(i.foreign, node)
	delete(i.bare, node)
	driver, has := i.drivers[node]
	v, exists := i.values[node]
	switch {
	case !has || !exists:
	case unlabelled(v.value, i.key, driver):
		i.bare[node] = struct{}{}
	case v.value != "" && v.value != driver.NodeID && !slices.Contains(v.own, v.value):
		i.foreign[node] = struct{}{}
	}
}

// dropNode notes that a node is gone, and what is to be remembered of it.
func (i *index) dropNode(node *corev1.Node) (volumes []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.values, node.Name)
	touched := slices.Concat(i.rename(node.Name), i.former.set(node.Name, nil))
	i.judge(node.Name)
	for _, n := range touched {
		if len(i.volumes.objects[n]) > 0 {
			i.graves[n] = tombstoneOf(node)
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
	i.mention.set(pv.Name, mentioned(pv, i.driver))
	return local
}

func (i *index) dropVolume(name string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.mention.set(name, nil)
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
	return mergeNames(names, slices.Concat(i.nodes.find(names), i.former.find(names)))
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

// nodesNamed is the nodes that have one of names as a name, label, host name or ID, and the
// CSINodes without a Node that have it as an ID.
func (i *index) nodesNamed(names []string) []string {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return i.nodes.find(names)
}

// formerly is the nodes that had one of names, and that have been seen without it, or are
// gone and may have come back without it.
func (i *index) formerly(names []string) []string {
	i.mu.RLock()
	defer i.mu.RUnlock()
	found := i.former.find(names)
	for _, n := range names {
		if grave, ok := i.graves[n]; ok {
			found = append(found, grave.name)
		}
	}
	return mergeNames(found, nil)
}

// unlabelled is the nodes of the driver that should have a value of its key and have none.
func (i *index) unlabelled() []string {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return slices.Sorted(maps.Keys(i.bare))
}

// namesOf is the names by which a node, whether it is there or not, is or was found.
func (i *index) namesOf(node string) []string {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return i.named(node)
}

func (i *index) named(node string) []string {
	names := slices.Concat([]string{node}, i.nodes.names[node], i.former.names[node])
	for n, grave := range i.graves { // of nodes that are gone and have volumes: few
		if grave.name == node {
			names = append(names, n)
		}
	}
	return names
}

// volumesOf is the volumes that may belong to a node, whether it is there or not.
func (i *index) volumesOf(node string) []string {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return i.volumes.find(i.named(node))
}

// meansOf is all values by which a volume of the driver may mean a node, whatever the key.
func (i *index) meansOf(node *corev1.Node) []string {
	i.mu.RLock()
	defer i.mu.RUnlock()
	values := ownNames(node)
	for _, d := range i.drivers {
		for _, key := range d.TopologyKeys {
			if v := node.Labels[key]; v != "" && key != corev1.LabelTopologyZone && key != corev1.LabelTopologyRegion {
				values = append(values, v)
			}
		}
	}
	slices.Sort(values)
	return slices.DeleteFunc(slices.Compact(values), func(v string) bool { return v == "" })
}

// mentioning is the volumes of the driver whose affinity names one of values, by any key.
func (i *index) mentioning(values []string) []string {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return i.mention.find(values)
}

// lost is the names of the lost nodes of pv, and what was last seen of the first of them:
// what is written on it, else who last had one of its values, else the values themselves.
func (i *index) lost(pv *corev1.PersistentVolume, values []string) ([]string, *tombstone) {
	i.mu.RLock()
	defer i.mu.RUnlock()
	names := i.ann.lostNodes(pv)
	var last *tombstone
	written := len(names) > 0
	for _, v := range values {
		grave, ok := i.graves[v]
		if ok && last == nil {
			last = &grave
		}
		switch {
		case written:
		case ok:
			names = append(names, grave.name)
		case len(i.former.objects[v]) > 0:
			names = append(names, i.former.find([]string{v})...)
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
