// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// index finds the nodes and volumes of a host, so that an event costs no more than its object.
// The handlers of a [Controller] keep it up to date on every replica.
type index struct {
	driver string
	fixed  bool // the operator has set the key

	names   *relation // nodes and CSINodes by the values that may mean them
	volumes *relation // node-local volumes by their values

	mu      sync.RWMutex
	key     string                              // the last known one
	several bool                                // the CSINodes report several keys
	csi     map[string]*storagev1.CSINodeDriver // of all CSINodes, by name; nil: without the driver
	nodes   map[string]*corev1.Node
	bare    map[string]struct{} // see unlabelled
	foreign map[string]struct{} // see foreign
	deleted map[string]lastSeen // see slot; for at most lastSeenAge
}

// relation maps objects to their values, and back.
type relation struct {
	mu      sync.RWMutex
	values  map[string][]string
	objects map[string]map[string]struct{}
}

func newRelation() *relation {
	return &relation{values: map[string][]string{}, objects: map[string]map[string]struct{}{}}
}

// set replaces the values of an object, and returns the old and the new ones.
func (r *relation) set(object string, values []string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.values[object]
	for _, v := range old {
		delete(r.objects[v], object)
		if len(r.objects[v]) == 0 {
			delete(r.objects, v)
		}
	}
	delete(r.values, object)
	if len(values) > 0 {
		r.values[object] = values
	}
	for _, v := range values {
		if r.objects[v] == nil {
			r.objects[v] = map[string]struct{}{}
		}
		r.objects[v][object] = struct{}{}
	}
	return sorted(old, values)
}

// with returns the objects that have value, sorted.
func (r *relation) with(value string) []string {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return slices.Sorted(maps.Keys(r.objects[value]))
}

// of returns the values of an object.
func (r *relation) of(object string) []string {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.values[object]
}

// all returns the values of all objects.
func (r *relation) all() []string {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return slices.Collect(maps.Keys(r.objects))
}

func newIndex(driver, key string) *index {
	return &index{
		driver: driver, fixed: key != "", key: key, names: newRelation(), volumes: newRelation(),
		csi: map[string]*storagev1.CSINodeDriver{}, nodes: map[string]*corev1.Node{},
		bare: map[string]struct{}{}, foreign: map[string]struct{}{},
		deleted: map[string]lastSeen{},
	}
}

// topologyKey returns the last known key, and why it cannot be used, if so.
func (i *index) topologyKey() (key, problem string) {
	i.mu.RLock()
	defer i.mu.RUnlock()
	switch {
	case i.fixed:
	case i.several:
		return i.key, "the CSINodes report more than one topology key for the driver"
	case i.key == "":
		return "", "no CSINode reports a topology key for the driver"
	case len(i.foreign) > 0:
		return i.key, "the values of topology key " + i.key + " do not identify single nodes"
	}
	return i.key, ""
}

// remember sets the key that an earlier process knew, unless a CSINode reports one. It reports
// whether the volumes must be set again.
func (i *index) remember(key string) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.key != "" || key == "" {
		return false
	}
	i.rekey(key)
	return true
}

// rekey sets the topology key, and the values of all Nodes for it. A Node that was deleted before the key was known, such as
// before the first list of CSINodes arrived, becomes the last one of its host.
func (i *index) rekey(key string) {
	deleted := i.deleted
	i.key, i.deleted = key, map[string]lastSeen{}
	for _, l := range deleted {
		host := hostOf(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: l.name, Labels: l.labels}}, key)
		if l.at.After(i.deleted[host].at) {
			i.deleted[host] = l
		}
	}
	for name, node := range i.nodes {
		if node.DeletionTimestamp == nil {
			delete(i.deleted, hostOf(node, key))
		}
		i.rename(name)
	}
}

// setCSINode sets the entry of the driver in a CSINode, nil if there is none. It returns the values
// that may mean the node, and whether the key changed.
func (i *index) setCSINode(name string, d *storagev1.CSINodeDriver, exists bool) (touched []string, rekeyed bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.csi, name)
	if exists {
		i.csi[name] = d
	}
	touched = i.rename(name)
	if i.fixed {
		return touched, false
	}
	var keys []string
	for _, d := range i.csi {
		if d != nil {
			keys = append(keys, d.TopologyKeys...)
		}
	}
	keys = sorted(keys)
	i.several = len(keys) > 1
	if len(keys) != 1 || keys[0] == i.key {
		return touched, false
	}
	i.rekey(keys[0])
	return touched, true
}

// setNode sets a Node, and returns the values that may mean it, or did.
func (i *index) setNode(node *corev1.Node) []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	known := i.nodes[node.Name]
	i.nodes[node.Name] = node
	if node.DeletionTimestamp == nil {
		delete(i.deleted, i.slot(hostOf(node, i.key), node.UID))
	}
	touched := i.rename(node.Name)
	i.leaveHost(known, node)
	return touched
}

// rename updates the indexes after a change of the Node or CSINode with this name, and returns the affected hosts.
func (i *index) rename(name string) []string {
	node := i.nodes[name]
	d, csiNode := i.csi[name]
	delete(i.bare, name)
	delete(i.foreign, name)
	var names []string
	switch {
	case node != nil:
		names = namesOf(node, d, i.key)
		if unlabelled(node, d, i.key) && node.DeletionTimestamp == nil {
			i.bare[name] = struct{}{}
		}
		if foreign(node, d, i.key) {
			i.foreign[name] = struct{}{}
		}
	case d != nil:
		names = sorted([]string{name, d.NodeID})
	case csiNode:
		names = []string{name}
	}
	return i.names.set(name, names)
}

// setVolume sets a volume, nil if it was deleted, and returns its values, old and new.
func (i *index) setVolume(name string, pv *corev1.PersistentVolume) []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	var values []string
	if pv != nil {
		values, _ = localValues(pv, i.driver, i.key)
	}
	return i.volumes.set(name, values)
}

// locate returns the presence of a host and its Nodes. name is the recorded name of its Node, or empty. A Node
// that has only this name may be the one that was lost, with another value: then the host is unclear.
func (i *index) locate(host, name string) (state presence, nodes []*corev1.Node) {
	i.mu.RLock()
	defer i.mu.RUnlock()
	state, csi := missing, false
	for _, n := range sorted(i.names.with(host), []string{name}) {
		node := i.nodes[n]
		_, exists := i.csi[n]
		csi = csi || exists
		switch {
		case node == nil:
			continue
		case node.DeletionTimestamp == nil && slices.Contains(i.names.of(n), host):
			state = present
		case state != present && hostOf(node, i.key) != host:
			state = unclear
		case state == missing:
			state = deleting
		}
		nodes = append(nodes, node)
	}
	if csi && state == missing {
		state = unclear
	}
	return state, nodes
}

// stays reports whether a Node that value may mean exists and is not being deleted.
func (i *index) stays(value string) bool {
	_, ok := i.created(value)
	return ok
}

// created returns when the latest Node for which [index.stays] holds was created.
func (i *index) created(value string) (latest metav1.Time, ok bool) {
	i.mu.RLock()
	defer i.mu.RUnlock()
	for _, name := range i.names.with(value) {
		if n := i.nodes[name]; n != nil && n.DeletionTimestamp == nil {
			ok = true
			if latest.Before(&n.CreationTimestamp) {
				latest = n.CreationTimestamp
			}
		}
	}
	return latest, ok
}

// lost returns the hosts that have volumes and no node that stays, and those of nodes that are
// being deleted.
func (i *index) lost() []string {
	var hosts []string
	i.mu.RLock()
	for _, n := range i.nodes {
		if n.DeletionTimestamp != nil {
			hosts = append(hosts, hostOf(n, i.key))
		}
	}
	i.mu.RUnlock()
	for _, v := range i.volumes.all() {
		if !i.stays(v) {
			hosts = append(hosts, v)
		}
	}
	return sorted(hosts)
}

// hostNamed returns the host of the Node with this name, which may have been deleted lately.
func (i *index) hostNamed(name string) (host string, ok bool) {
	i.mu.RLock()
	defer i.mu.RUnlock()
	if n := i.nodes[name]; n != nil {
		return hostOf(n, i.key), true
	}
	var last lastSeen
	for of, l := range i.deleted {
		if l.name == name && i.key != "" && (!ok || l.at.After(last.at)) {
			host, last, ok = of, l, true
		}
	}
	return host, ok
}

// driverNodes describes the nodes with the driver.
type driverNodes struct {
	hosts []string
	ready []string // names
	named bool     // the hosts are called like the Nodes
}

func (i *index) driverNodes() driverNodes {
	i.mu.RLock()
	defer i.mu.RUnlock()
	all := driverNodes{named: true}
	for name, d := range i.csi {
		if d == nil {
			continue
		}
		host, node := name, i.nodes[name]
		if node != nil {
			host = hostOf(node, i.key)
		}
		all.hosts, all.named = append(all.hosts, host), all.named && host == name
		if node != nil && isReady(node) && node.DeletionTimestamp == nil {
			all.ready = append(all.ready, name)
		}
	}
	return all
}

// ambiguous returns the Nodes for which [unlabelled] holds, and those for which [foreign] holds.
func (i *index) ambiguous() (bare, foreign []string) {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return slices.Sorted(maps.Keys(i.bare)), slices.Sorted(maps.Keys(i.foreign))
}

// registered reports whether the driver is on a node.
func (i *index) registered(node string) bool {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return i.csi[node] != nil
}
