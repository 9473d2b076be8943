// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"cmp"
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// host describes one value of the topology key.
type host struct {
	value    string
	state    presence
	nodes    []*corev1.Node // that it means
	record   LostNode
	recorded bool
	last     lastSeen // of its deleted Node, if this process has seen it
	volumes  []volume
	// resources reports whether custom resources of its Node exist, as far as they were listed.
	resources bool
	drained   bool // see [term.drained]
}

// volume describes one node-local volume.
type volume struct {
	pv          *corev1.PersistentVolume // nil: not found
	claim       *corev1.PersistentVolumeClaim
	hosts       []host    // of all values in its affinity, without their volumes
	refusal     string    // of its owners, see [Policy.refusal]
	namespace   types.UID // of its claim
	attachments []string
	users       []string // pods that use the claim on other nodes that exist
	sent        bool     // this process has sent its deletion
	unread      error    // of a read without which nothing may be decided
}

// target returns v as the target of a deletion.
func (v volume) target() target { return target{v.hosts, v.refusal, v.users} }

// kept returns the hosts of v whose Nodes exist. Nothing of v is deleted while there are any.
func (v volume) kept() (hosts []string) {
	for _, h := range v.hosts {
		if h.state == present {
			hosts = append(hosts, h.value)
		}
	}
	return hosts
}

// name returns the best known name of the Node of a host.
func (h host) name() string {
	return cmp.Or(h.record.Node, h.value)
}

// hasOtherValue reports whether the Node of the record exists and is the node of another host now.
func (h host) hasOtherValue() bool {
	return h.state == unclear && slices.ContainsFunc(h.nodes, func(n *corev1.Node) bool { return n.DeletionTimestamp == nil })
}

// names returns the value of a host and the names of its Nodes.
func (h host) names() []string {
	names := []string{h.value}
	for _, n := range []string{h.record.Node, h.last.name} {
		if n != "" {
			names = append(names, n)
		}
	}
	for _, n := range h.nodes {
		names = append(names, n.Name)
	}
	return sorted(names)
}

// releasedAt returns when the deletion of v was requested, or else when v was released. If the API server does not
// record phase transitions, it returns when the node of v was lost, or the creation of v if that is later.
func (v volume) releasedAt() time.Time {
	switch pv := v.pv; {
	case pv.DeletionTimestamp != nil:
		return pv.DeletionTimestamp.Time
	case pv.Status.LastPhaseTransitionTime != nil:
		return pv.Status.LastPhaseTransitionTime.Time
	}
	at := v.pv.CreationTimestamp.Time
	for _, h := range v.hosts {
		if h.record.Since.After(at) {
			at = h.record.Since
		}
	}
	return at
}

// gatherer reads hosts and volumes from a source.
type gatherer struct {
	policy Policy
	key    func() string // the topology key
	src    source
	record func(host string) (LostNode, bool)
	// aliases returns the names of Nodes and CSINodes that a value may mean.
	aliases func(value string) []string
}

// host reads the state of a host, without its volumes.
func (g gatherer) host(ctx context.Context, value string) (host, error) {
	h := host{value: value}
	h.record, h.recorded = g.record(value)
	i := newIndex(g.policy.driver, g.key())
	labelled, err := g.src.labelled(ctx, g.key(), value)
	if err != nil {
		return h, err
	}
	names := g.aliases(value)
	for _, n := range labelled {
		names = append(names, n.Name)
	}
	for _, name := range sorted(names, []string{value, h.record.Node}) {
		if !isName(name) {
			continue
		}
		node, err := g.src.node(ctx, name)
		if err != nil {
			return h, err
		}
		csiNode, err := g.src.csiNode(ctx, name)
		if err != nil {
			return h, err
		}
		if csiNode != nil {
			i.setCSINode(name, kube.DriverOnNode(csiNode, g.policy.driver), true)
		}
		if node != nil {
			i.setNode(node)
		}
	}
	h.state, h.nodes = i.locate(value, h.record.Node)
	return h, nil
}

// volume reads a volume, its claim, and the hosts and objects that decide about its clean-up.
func (g gatherer) volume(ctx context.Context, name string) (volume, error) {
	v, values, err := g.owned(ctx, name)
	if err != nil || v.pv == nil {
		return v, err
	}
	if phase := v.pv.Status.Phase; phase == corev1.VolumeReleased || phase == corev1.VolumeAvailable {
		if v.attachments, err = g.src.attachments(ctx, name); err != nil {
			return v, err
		}
	}
	if v.claim != nil && v.claim.UID == v.pv.Spec.ClaimRef.UID {
		if v.users, err = g.users(ctx, v.claim, values); err != nil {
			return v, err
		}
	}
	v.hosts, err = g.hosts(ctx, values) // last, so that a returning node is found
	return v, err
}

// owned reads a volume with its claim and the consent of its owners, and returns its values.
func (g gatherer) owned(ctx context.Context, name string) (v volume, values []string, err error) {
	if v.pv, err = g.src.volume(ctx, name); err != nil || v.pv == nil {
		return v, nil, err
	}
	values, local := localValues(v.pv, g.policy.driver, g.key())
	if !local {
		v.pv = nil
		return v, nil, nil
	}
	owners, class, namespace := map[string]metav1.Object{"PersistentVolume": v.pv}, v.pv.Spec.StorageClassName, ""
	if ref := v.pv.Spec.ClaimRef; namesClaim(ref) {
		namespace = ref.Namespace
		if v.claim, err = g.src.claim(ctx, ref.Namespace, ref.Name); err != nil {
			return v, nil, err
		}
		if v.claim != nil && v.claim.UID == ref.UID { // another claim of this name decides nothing
			owners["PersistentVolumeClaim"] = v.claim
			class = cmp.Or(class, storagehelpers.GetPersistentVolumeClaimClass(v.claim))
		}
	}
	if v.namespace, err = g.owners(ctx, owners, namespace, class); err != nil {
		return v, nil, err
	}
	disagrees := func(value string) bool { r, _ := g.record(value); return !r.agrees() }
	v.refusal = g.policy.refusal(owners, !slices.ContainsFunc(values, disagrees))
	return v, values, nil
}

func (g gatherer) hosts(ctx context.Context, values []string) ([]host, error) {
	hosts := make([]host, 0, len(values))
	for _, value := range values {
		h, err := g.host(ctx, value)
		if err != nil {
			return nil, err
		}
		hosts = append(hosts, h)
	}
	return hosts, nil
}

// owners adds the Namespace and the StorageClass to the objects whose annotations decide.
func (g gatherer) owners(
	ctx context.Context, owners map[string]metav1.Object, namespace, class string,
) (uid types.UID, err error) {
	if namespace != "" {
		ns, err := g.src.namespace(ctx, namespace)
		if err != nil {
			return "", err
		}
		if ns != nil {
			owners["Namespace"], uid = ns, ns.UID
		}
	}
	if class == "" {
		return uid, nil
	}
	c, err := g.src.class(ctx, class)
	if c != nil {
		owners["StorageClass"] = c
	}
	return uid, err
}

// users returns the running pods that use a claim on a Node that exists, except those on the Nodes
// of hosts. PVC protection keeps the claim until these end.
func (g gatherer) users(ctx context.Context, claim *corev1.PersistentVolumeClaim, hosts []string) ([]string, error) {
	pods, err := g.src.pods(ctx, claim)
	if err != nil {
		return nil, err
	}
	names := slices.Clone(hosts)
	for _, value := range hosts {
		if r, ok := g.record(value); ok {
			names = append(names, r.Node)
		}
	}
	var users []string
	for _, pod := range pods {
		if !runs(pod) || slices.Contains(names, pod.Spec.NodeName) {
			continue
		}
		node, err := g.src.node(ctx, pod.Spec.NodeName)
		if err != nil {
			return nil, err
		}
		if node != nil { // the pods of deleted Nodes are deleted by the pod garbage collector
			users = append(users, pod.Namespace+"/"+pod.Name)
		}
	}
	return sorted(users), nil
}

// runs reports whether a pod is on a node and has not ended.
func runs(pod *corev1.Pod) bool {
	return pod.Spec.NodeName != "" && pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed
}

// namesClaim reports whether ref can name a claim.
func namesClaim(ref *corev1.ObjectReference) bool {
	return ref != nil && len(validation.IsDNS1123Label(ref.Namespace)) == 0 && len(validation.IsDNS1123Subdomain(ref.Name)) == 0
}

// cluster describes the cluster and the driver.
type cluster struct {
	now        time.Time
	keyProblem string    // why the topology key cannot be used
	bare       []string  // driver nodes without the label of the topology key
	readyNode  bool      // some driver node is ready
	open       bool      // the verdict of the breaker
	checked    time.Time // the last check of the lost nodes
}
