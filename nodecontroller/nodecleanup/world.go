// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// presence is what the API has of the Nodes that a value of the topology key may mean.
type presence string

const (
	present  presence = "present"  // a Node exists and is not being deleted
	deleting presence = "deleting" // all such Nodes are being deleted
	unclear  presence = "unclear"  // only a CSINode, a Node called as recorded, or one that is being deleted for another host
	missing  presence = "missing"  // nothing exists
)

// reader reads objects from caches, from the API server, or from the model of the tests. It returns nil and no error for an
// object that does not exist. Only NotFound means that.
type reader interface {
	volume(ctx context.Context, name string) (*corev1.PersistentVolume, error)
	class(ctx context.Context, name string) (*storagev1.StorageClass, error)
	namespace(ctx context.Context, name string) (*corev1.Namespace, error)
	node(ctx context.Context, name string) (*corev1.Node, error)
	claim(ctx context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error)
	// pods returns the pods that use a claim, on any node and in any phase. If a cache does not know them yet, it is an error:
	// a Node without pods counts as drained.
	pods(ctx context.Context, claim *corev1.PersistentVolumeClaim) ([]*corev1.Pod, error)
	// attachments returns the names of the VolumeAttachments of a volume.
	attachments(ctx context.Context, volume string) ([]string, error)
}

// uncachedReader is a reader that is no cache.
type uncachedReader interface {
	reader
	csiNode(ctx context.Context, name string) (*storagev1.CSINode, error)
	resource(ctx context.Context, name string) (*Resource, error)
	// labelled returns the Nodes with this label.
	labelled(ctx context.Context, key, value string) ([]*corev1.Node, error)
}

// Resource is a custom resource of the driver that belongs to one node and, with a volume handle, to one volume.
type Resource struct {
	Name     string
	Node     string    // value of the topology key
	Handle   string    // of its volume; empty: none
	Claim    string    // NAMESPACE/NAME of the claim that it was created for; empty: unknown
	ClaimUID types.UID // of that claim; empty: unknown
	Version  string    // resourceVersion
	UID      types.UID
	Deleting bool
	Unusable bool // in this version, no CreateVolume returns it: its volume is not complete, or its removal has begun
	Snapshot bool // its deletion is up to the object of the snapshot
}

// objects are what a pass reads, from caches and lists. Nothing of it is modified.
type objects struct {
	Now           time.Time
	Listed        time.Time // when the last lists began that have no Node and CSINode which is not here; zero: never
	Fresh         bool      // Nodes and CSINodes are lists of this pass, else they are those of the caches
	VolumesListed bool      // Volumes has a list of this pass
	Incomplete    string    // why objects may be absent here, so that nothing may be deleted; empty: all are here
	Nodes         map[string]*corev1.Node
	CSINodes      map[string]*storagev1.CSINode
	Cached        map[string]*corev1.Node // the Nodes of the cache, if Fresh
	Departed      []departed
	Volumes       []*corev1.PersistentVolume
	Resources     []Resource
}

// list replaces what the caches have by lists of Nodes and CSINodes, without the Nodes whose deletion was observed since. complete
// reports whether the caches had them all.
func (o *objects) list(at time.Time, nodes []*corev1.Node, csiNodes []*storagev1.CSINode) (complete bool) {
	cached := o.CSINodes
	o.Listed, o.Fresh, o.Cached = at, true, o.Nodes
	o.Nodes, o.CSINodes = byName(nodes), byName(csiNodes)
	for _, d := range o.Departed {
		if node := o.Nodes[d.Name]; node != nil && node.UID == d.UID && d.Deleted {
			delete(o.Nodes, d.Name)
		}
	}
	complete = true
	for name, node := range o.Nodes {
		complete = complete && o.Cached[name] != nil && o.Cached[name].UID == node.UID
	}
	for name := range o.CSINodes {
		complete = complete && cached[name] != nil
	}
	return complete
}

// resourcesUnknown is the value of Incomplete while the custom resources of the driver are not cached.
const resourcesUnknown = "the custom resources of the driver are not cached. Check that their CustomResourceDefinition is installed, and " +
	"that the ClusterRole grants list and watch on them"

// departed is the last state of a Node that was deleted, or that has another host now. The process saw that at the time At.
type departed struct {
	Name     string
	UID      types.UID
	Labels   map[string]string
	Created  time.Time // creationTimestamp
	OptedOut bool
	Deleted  bool // else its labels changed
	At       time.Time
}

// item is a volume, or a custom resource with its volume, or one without a volume.
type item struct {
	Volume      *corev1.PersistentVolume
	Claim       *corev1.PersistentVolumeClaim // of Volume; nil: it does not exist, or another claim has its name
	Resource    *Resource
	Owners      map[string]metav1.Object // whose annotations decide, by kind
	Values      []string                 // hosts, sorted
	Users       []string                 // running pods that use the claim on other Nodes that exist
	Used        bool                     // a running pod uses the claim, on any node
	Attachments []string
	Unread      error // of a read without which nothing may be decided
}

// unknown reports whether a later read decides about the item.
func (it *item) unknown() bool { return it.Unread != nil && !errors.Is(it.Unread, errSharedHandle) }

// host is one value of the topology key.
type host struct {
	Value    string
	Presence presence
	Nodes    []*corev1.Node // that it may mean
	Leaving  []*corev1.Node // those that are being deleted and have no other host
	Last     *departed      // the last deleted Node that it may have meant, if this process has seen one
	Items    []*item
	Stale    bool // the cache has a Node of it that the lists of this pass lack
	// Used reports whether a running pod uses a volume of it, or whether that is not known.
	Used bool
	// Mentioned reports whether a volume of the driver names it, or one of its Nodes, by any topology key.
	Mentioned bool
}

// world is what a pass knows about the cluster.
type world struct {
	objects
	Key        string // the topology key
	KeyProblem string // why it cannot be used
	Unlabelled []string
	Drivers    []string         // hosts of the nodes with the driver
	Ready      bool             // a node with the driver is ready
	Checked    time.Time        // the recorded check of the lost nodes
	Hosts      map[string]*host // those without a Node that stays, those with a record, and those that opted out
	names      map[string][]string
	stays      map[string]bool // values that mean a Node that is not being deleted
}

// byName returns objects by name.
func byName[T metav1.Object](objs []T) map[string]T {
	all := make(map[string]T, len(objs))
	for _, obj := range objs {
		all[obj.GetName()] = obj
	}
	return all
}

// newWorld arranges o by hosts. src reads the caches; it is asked for what belongs to lost hosts only.
func newWorld(ctx context.Context, s Settings, o objects, r Records, src reader) world {
	w := world{objects: o, Checked: r.Checked, Hosts: map[string]*host{}, names: make(map[string][]string, len(o.Nodes))}
	w.Key, w.KeyProblem = topologyKey(s, o, r.TopologyKey)
	w.index(s)
	w.addHosts(s, r)
	w.addItems(ctx, s, src)
	for _, h := range w.Hosts {
		w.place(s, h, r.Lost[h.Value].Node)
	}
	w.addStale(s)
	w.addMentions(s, r)
	return w
}

// index fills the fields about all nodes.
func (w *world) index(s Settings) {
	w.stays = make(map[string]bool, len(w.Nodes))
	for name, node := range w.Nodes {
		d := kube.DriverOnNode(w.CSINodes[name], s.Driver)
		for _, n := range namesOf(node, d, w.Key) {
			w.names[n] = append(w.names[n], name)
			w.stays[n] = w.stays[n] || node.DeletionTimestamp == nil
		}
		if d == nil {
			continue
		}
		w.Drivers = append(w.Drivers, hostOf(node.Name, node.Labels, w.Key))
		w.Ready = w.Ready || node.DeletionTimestamp == nil && isReady(node)
		if isUnlabelled(node, d, w.Key) && node.DeletionTimestamp == nil {
			w.Unlabelled = append(w.Unlabelled, name)
		}
	}
	for name, csiNode := range w.CSINodes {
		if w.Nodes[name] != nil {
			continue
		}
		w.names[name] = append(w.names[name], name)
		if d := kube.DriverOnNode(csiNode, s.Driver); d != nil {
			w.Drivers = append(w.Drivers, name)
			if d.NodeID != name && d.NodeID != "" {
				w.names[d.NodeID] = append(w.names[d.NodeID], name)
			}
		}
	}
	slices.Sort(w.Unlabelled)
}

// host returns the host of a value, which it creates.
func (w *world) host(value string) *host {
	h := w.Hosts[value]
	if h == nil {
		h = &host{Value: value}
		w.Hosts[value] = h
	}
	return h
}

// addHosts adds the hosts with a record, those of Nodes that are being deleted, and those of Nodes that opted out.
func (w *world) addHosts(s Settings, r Records) {
	for value := range r.Lost {
		w.host(value)
	}
	for _, node := range w.Nodes {
		if node.DeletionTimestamp != nil || s.optOut("Node", node) != "" {
			w.host(hostOf(node.Name, node.Labels, w.Key))
		}
	}
	for _, d := range w.Departed {
		if d.OptedOut {
			w.host(hostOf(d.Name, d.Labels, w.Key))
		}
	}
}

// addItems adds the volumes and custom resources with a host that has no Node that stays.
func (w *world) addItems(ctx context.Context, s Settings, src reader) {
	lost := func(value string) bool { return !w.stays[value] }
	wanted, handles := map[string]bool{}, map[string]*item{}
	for _, res := range w.Resources {
		wanted[res.Handle] = wanted[res.Handle] || res.Handle != "" && lost(res.Node)
	}
	for _, pv := range w.Volumes {
		if pv.Spec.CSI == nil || pv.Spec.CSI.Driver != s.Driver || !wanted[pv.Spec.CSI.VolumeHandle] && !anyValue(pv, w.Key, lost) {
			continue
		}
		it, err := readItem(ctx, s, src, w.Key, pv.Name)
		it.Unread = err
		if it.Volume == nil { // a list of this pass has it, and the cache does not
			it.Volume, it.Unread = pv, cmp.Or(err, errNotCached)
			it.Values, _ = localValues(pv, s.Driver, w.Key)
		}
		w.add(&it, it.Values, lost)
		if other := handles[pv.Spec.CSI.VolumeHandle]; other != nil {
			it.Unread, other.Unread = errSharedHandle, errSharedHandle
		}
		handles[pv.Spec.CSI.VolumeHandle] = &it
	}
	for i, res := range w.Resources {
		it := handles[res.Handle]
		if !lost(res.Node) && it == nil {
			continue
		}
		own := item{Owners: map[string]metav1.Object{}}
		if it != nil {
			own = *it
		}
		own.Resource = &w.Resources[i]
		if it == nil {
			own.Unread = own.readRequest(ctx, src)
		}
		hosts := sorted(own.Values, []string{res.Node})
		if it == nil || len(it.Values) > 0 { // else its volume belongs to no node: nothing may be deleted
			own.Values = hosts
		}
		w.add(&own, hosts, lost)
	}
}

// add adds it to its lost hosts.
func (w *world) add(it *item, values []string, lost func(string) bool) {
	for _, value := range values {
		if lost(value) {
			h := w.host(value)
			h.Items = append(h.Items, it)
			h.Used = h.Used || it.Used || it.Unread != nil
		}
	}
}

// place sets the presence of a host and what depends on it.
func (w *world) place(s Settings, h *host, recorded string) {
	near := objects{Nodes: map[string]*corev1.Node{}, CSINodes: map[string]*storagev1.CSINode{}}
	for _, name := range append([]string{recorded}, w.names[h.Value]...) {
		if node := w.Nodes[name]; node != nil {
			near.Nodes[name] = node
		}
		if csiNode := w.CSINodes[name]; csiNode != nil {
			near.CSINodes[name] = csiNode
		}
	}
	h.Presence, h.Nodes = locate(s, near, w.Key, h.Value, recorded)
	for _, node := range h.Nodes {
		if node.DeletionTimestamp != nil && hostOf(node.Name, node.Labels, w.Key) == h.Value {
			h.Leaving = append(h.Leaving, node)
		}
		if cached := w.Cached[node.Name]; w.Fresh && (cached == nil || cached.UID != node.UID) {
			h.Presence = unclear
		}
	}
	for i, d := range w.Departed {
		means := slices.Contains([]string{d.Name, d.Labels[corev1.LabelHostname], hostOf(d.Name, d.Labels, w.Key)}, h.Value)
		if means && (h.Last == nil || d.At.After(h.Last.At)) {
			h.Last = &w.Departed[i]
		}
	}
}

// addStale marks the hosts of Nodes that the cache has and the lists of this pass lack.
func (w *world) addStale(s Settings) {
	for name, cached := range w.Cached {
		if node := w.Nodes[name]; node != nil && node.UID == cached.UID {
			continue
		}
		for _, value := range namesOf(cached, kube.DriverOnNode(w.CSINodes[name], s.Driver), w.Key) {
			if h := w.Hosts[value]; h != nil {
				h.Stale = true
			}
		}
	}
}

// addMentions marks the hosts that a volume of the driver names by any topology key.
func (w *world) addMentions(s Settings, r Records) {
	if len(w.Hosts) == 0 {
		return
	}
	mentioned := map[string]bool{}
	for _, pv := range w.Volumes {
		for _, term := range affinityOf(pv, s.Driver) {
			for _, e := range slices.Concat(term.MatchExpressions, term.MatchFields) {
				for _, value := range e.Values {
					mentioned[value] = value != ""
				}
			}
		}
	}
	for value, h := range w.Hosts {
		h.Mentioned = mentioned[value] || mentioned[r.Lost[value].Node] || h.Last != nil && mentioned[h.Last.Name] ||
			slices.ContainsFunc(h.Nodes, func(node *corev1.Node) bool { return mentioned[node.Name] })
	}
}

// keyAdvice ends the reports about a topology key that cannot be used.
const keyAdvice = "Set --topology-node-key to a key with one value per node"

// topologyKey returns the topology key, and why it cannot be used. remembered is the last known one, which counts while no
// CSINode reports another.
func topologyKey(s Settings, o objects, remembered string) (key, problem string) {
	if s.TopologyNodeKey != "" {
		return s.TopologyNodeKey, ""
	}
	several := false
	for _, csiNode := range o.CSINodes {
		d := kube.DriverOnNode(csiNode, s.Driver)
		if d == nil {
			continue
		}
		for _, k := range d.TopologyKeys {
			several = several || key != "" && key != k
			key = k
		}
	}
	switch {
	case several:
		return remembered, "the CSINodes report more than one topology key for the driver"
	case key == "" && remembered == "":
		return "", "no CSINode reports a topology key for the driver"
	}
	key = cmp.Or(key, remembered)
	for name, node := range o.Nodes {
		if isForeign(node, kube.DriverOnNode(o.CSINodes[name], s.Driver), key) {
			return key, "label " + key + "=" + node.Labels[key] + " of Node " + name + " does not identify a single node"
		}
	}
	return key, ""
}

// locate returns the presence of a host, and the Nodes that it may mean, among the Nodes and CSINodes of o. recorded is the
// recorded name of its Node, or empty. A Node that has only this name may be the one that was lost, with another value.
func locate(s Settings, o objects, key, value, recorded string) (p presence, nodes []*corev1.Node) {
	alive, own, other, csi := false, false, false, false
	for _, name := range slices.Sorted(maps.Keys(o.Nodes)) {
		node := o.Nodes[name]
		means := slices.Contains(namesOf(node, kube.DriverOnNode(o.CSINodes[name], s.Driver), key), value)
		switch {
		case !means && name != recorded:
			continue
		case means && node.DeletionTimestamp == nil:
			alive = true
		case means && hostOf(name, node.Labels, key) == value:
			own = true
		default:
			other = true
		}
		nodes = append(nodes, node)
	}
	for name, csiNode := range o.CSINodes {
		d := kube.DriverOnNode(csiNode, s.Driver)
		means := name == value || name == recorded || d != nil && d.NodeID == value
		csi = csi || means && o.Nodes[name] == nil
	}
	switch {
	case alive:
		return present, nodes
	case other || csi:
		return unclear, nodes
	case own:
		return deleting, nodes
	}
	return missing, nil
}

var (
	errNotCached    = errors.New("the cache does not have the volume yet")
	errSharedHandle = errors.New("several volumes have this volume handle")
)

// readItem reads a volume with what decides about its cleanup. Volume is nil if it does not exist, or if other nodes can use it.
func readItem(ctx context.Context, s Settings, src reader, key, volume string) (it item, err error) {
	pv, err := src.volume(ctx, volume)
	if err != nil || pv == nil {
		return it, err
	}
	values, local := localValues(pv, s.Driver, key)
	it.Volume = pv
	if !local {
		return it, nil
	}
	it.Values = values
	it.Owners = map[string]metav1.Object{"PersistentVolume": pv}
	class, ref := pv.Spec.StorageClassName, pv.Spec.ClaimRef
	if namesClaim(ref) {
		if err = it.readClaim(ctx, src, key); err != nil {
			return it, err
		}
		if it.Claim != nil {
			class = cmp.Or(class, storagehelpers.GetPersistentVolumeClaimClass(it.Claim))
		}
	}
	err = it.readClass(ctx, src, class)
	if err != nil {
		return it, err
	}
	it.Attachments, err = src.attachments(ctx, volume)
	return it, err
}

// readClaim reads the claim of the volume, its Namespace and the pods that use it. Another claim of the same name decides
// nothing.
func (it *item) readClaim(ctx context.Context, src reader, key string) error {
	ref := it.Volume.Spec.ClaimRef
	claim, err := src.claim(ctx, ref.Namespace, ref.Name)
	if err != nil {
		return err
	}
	ns, err := src.namespace(ctx, ref.Namespace)
	if err != nil {
		return err
	}
	if ns != nil {
		it.Owners["Namespace"] = ns
	}
	if claim == nil || ref.UID != "" && claim.UID != ref.UID {
		return nil
	}
	it.Claim, it.Owners["PersistentVolumeClaim"] = claim, claim
	pods, err := src.pods(ctx, claim)
	if err != nil {
		return err
	}
	for _, pod := range pods {
		if pod.Spec.NodeName == "" || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
			continue
		}
		it.Used = true
		node, err := src.node(ctx, pod.Spec.NodeName)
		if err != nil {
			return err
		}
		// The pod garbage collector deletes the pods of deleted Nodes. PVC protection waits for those on the nodes of the volume.
		if node != nil && !slices.ContainsFunc(namesOf(node, nil, key), func(n string) bool { return slices.Contains(it.Values, n) }) {
			it.Users = append(it.Users, pod.Namespace+"/"+pod.Name)
		}
	}
	it.Users = sorted(it.Users)
	return nil
}

// readRequest reads what decides about a custom resource without a volume: the claim that it was created for, with its Namespace and
// StorageClass. A recorded CreateVolume may give the claim that volume, unless it is unusable. A resource that is being deleted gets none.
func (it *item) readRequest(ctx context.Context, src reader) error {
	res := it.Resource
	namespace, name, _ := strings.Cut(res.Claim, "/")
	if res.Deleting || !namesClaim(&corev1.ObjectReference{Namespace: namespace, Name: name}) {
		return nil
	}
	ns, err := src.namespace(ctx, namespace)
	if err != nil {
		return err
	}
	if ns != nil {
		it.Owners["Namespace"] = ns
	}
	claim, err := src.claim(ctx, namespace, name)
	if err != nil || claim == nil || res.ClaimUID != "" && claim.UID != res.ClaimUID {
		return err
	}
	it.Owners["PersistentVolumeClaim"] = claim
	if err := it.readClass(ctx, src, storagehelpers.GetPersistentVolumeClaimClass(claim)); err != nil {
		return err
	}
	pv, err := src.volume(ctx, cmp.Or(claim.Spec.VolumeName, res.Name)) // the provisioner gives both the same name
	if err != nil {
		return err
	}
	waits := claim.Spec.VolumeName == "" && slices.Contains(claim.Finalizers, kube.ProvisioningFinalizer) && !res.Unusable
	if waits || pv != nil && pv.Spec.CSI != nil && pv.Spec.CSI.VolumeHandle == res.Handle {
		it.Claim = claim
	}
	return nil
}

// readClass reads the StorageClass, unless its name is empty.
func (it *item) readClass(ctx context.Context, src reader, name string) error {
	if name == "" {
		return nil
	}
	class, err := src.class(ctx, name)
	if class != nil {
		it.Owners["StorageClass"] = class
	}
	return err
}

// reread reads an item again, with the custom resource, if it is one. seen is the item of the plan.
func reread(ctx context.Context, s Settings, src uncachedReader, key string, seen *item) (it item, err error) {
	it.Owners = map[string]metav1.Object{}
	if seen.Volume != nil {
		if it, err = readItem(ctx, s, src, key, seen.Volume.Name); err != nil {
			return it, err
		}
		if it.Volume == nil || it.Volume.UID != seen.Volume.UID {
			return item{}, nil
		}
	}
	if seen.Resource == nil {
		return it, nil
	}
	res, err := src.resource(ctx, seen.Resource.Name)
	if err != nil || res == nil || res.UID != seen.Resource.UID || res.Node != seen.Resource.Node || res.Handle != seen.Resource.Handle {
		return item{}, err
	}
	it.Resource = res
	if it.Volume == nil || len(it.Values) > 0 { // else its volume belongs to no node any more
		it.Values = sorted(it.Values, seen.Values)
	}
	if it.Volume == nil {
		err = it.readRequest(ctx, src)
	}
	return it, err
}

// readHost reads the presence of a host from src by its value, the recorded name of its Node, the label, and names that lists
// have for it.
func readHost(
	ctx context.Context, s Settings, src uncachedReader, key, value, recorded string, names []string,
) (presence, []*corev1.Node, error) {
	o := objects{Nodes: map[string]*corev1.Node{}, CSINodes: map[string]*storagev1.CSINode{}}
	if key != "" && len(validation.IsValidLabelValue(value)) == 0 {
		labelled, err := src.labelled(ctx, key, value)
		if err != nil {
			return "", nil, err
		}
		for _, node := range labelled {
			o.Nodes[node.Name] = node
		}
	}
	for _, name := range sorted(names, []string{value, recorded}) {
		if !isName(name) {
			continue
		}
		node, err := src.node(ctx, name)
		if err != nil {
			return "", nil, err
		}
		csiNode, err := src.csiNode(ctx, name)
		if err != nil {
			return "", nil, err
		}
		if node != nil {
			o.Nodes[name] = node
		}
		if csiNode != nil {
			o.CSINodes[name] = csiNode
		}
	}
	p, nodes := locate(s, o, key, value, recorded)
	return p, nodes, nil
}

// affinityOf returns the terms of the node affinity of pv, which are alternatives, if pv is a volume of driver.
func affinityOf(pv *corev1.PersistentVolume, driver string) []corev1.NodeSelectorTerm {
	if pv.Spec.CSI == nil || pv.Spec.CSI.Driver != driver || pv.Spec.NodeAffinity == nil || pv.Spec.NodeAffinity.Required == nil {
		return nil
	}
	return pv.Spec.NodeAffinity.Required.NodeSelectorTerms
}

// localValues returns the sorted values of key that the node affinity of pv names, if pv is a volume of driver that no other
// node can use: each term must name key.
func localValues(pv *corev1.PersistentVolume, driver, key string) (values []string, local bool) {
	for _, term := range affinityOf(pv, driver) {
		bound := false
		for _, e := range term.MatchExpressions {
			if e.Key == key && e.Operator == corev1.NodeSelectorOpIn && len(e.Values) > 0 {
				values, bound = append(values, e.Values...), true
			}
		}
		if !bound {
			return nil, false
		}
	}
	values = sorted(values)
	if key == "" || len(values) == 0 || values[0] == "" { // no node can be found by the empty value
		return nil, false
	}
	return values, true
}

// anyValue reports whether f holds for a value of key in the node affinity of pv, a CSI volume.
func anyValue(pv *corev1.PersistentVolume, key string, f func(string) bool) bool {
	for _, term := range affinityOf(pv, pv.Spec.CSI.Driver) {
		for _, e := range term.MatchExpressions {
			if e.Key == key && slices.ContainsFunc(e.Values, f) {
				return true
			}
		}
	}
	return false
}

// namesClaim reports whether ref can name a claim.
func namesClaim(ref *corev1.ObjectReference) bool {
	return ref != nil && len(validation.IsDNS1123Label(ref.Namespace)) == 0 && len(validation.IsDNS1123Subdomain(ref.Name)) == 0
}

// isName reports whether an object can have this name.
func isName(name string) bool { return name != "" && len(content.IsPathSegmentName(name)) == 0 }

// sorted returns the distinct elements of all, sorted.
func sorted(all ...[]string) []string {
	names := slices.Concat(all...)
	slices.Sort(names)
	return slices.Compact(names)
}

// hostOf returns the host of a Node: its value of key, or its name if it has none.
func hostOf(name string, labels map[string]string, key string) string {
	if v := labels[key]; key != "" && v != "" {
		return v
	}
	return name
}

// ownNames returns the name and the host names of a Node.
func ownNames(node *corev1.Node) []string {
	names := append(make([]string, 0, 4), node.Name)
	add := func(name string) {
		if name != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	add(node.Labels[corev1.LabelHostname])
	for _, a := range node.Status.Addresses {
		if a.Type == corev1.NodeHostName {
			add(a.Address)
		}
	}
	return names
}

// namesOf returns all values by which a volume may mean a Node: its name, its host names, its label, and its node ID. d is its
// CSINode entry, or nil.
func namesOf(node *corev1.Node, d *storagev1.CSINodeDriver, key string) []string {
	names := ownNames(node)
	if h := hostOf(node.Name, node.Labels, key); !slices.Contains(names, h) {
		names = append(names, h)
	}
	if d != nil && d.NodeID != "" && !slices.Contains(names, d.NodeID) {
		names = append(names, d.NodeID)
	}
	return names
}

// isUnlabelled reports whether a Node lacks the label that its driver registered. Such a node may be the node of any volume.
func isUnlabelled(node *corev1.Node, d *storagev1.CSINodeDriver, key string) bool {
	return d != nil && key != "" && node.Labels[key] == "" && slices.Contains(d.TopologyKeys, key)
}

// isForeign reports whether the value of a Node is not one of its own names or its node ID. Then the values of key are not those
// of single nodes, but for example zones.
func isForeign(node *corev1.Node, d *storagev1.CSINodeDriver, key string) bool {
	v := node.Labels[key]
	return d != nil && key != "" && v != "" && v != d.NodeID && v != node.Name && !slices.Contains(ownNames(node), v)
}

// isReady reports whether the condition Ready of a Node is True.
func isReady(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}
