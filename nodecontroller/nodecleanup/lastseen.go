// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// lastSeen is the last state of a Node that was deleted, or that has another host now.
type lastSeen struct {
	name     string
	uid      types.UID
	labels   map[string]string // for another topology key
	optedOut bool
	at       time.Time
	recorded bool // a record has the opt-out and decides from then on, as an administrator may remove it there
}

// lastSeenAge bounds the memory for deleted nodes. The records outlive it.
const lastSeenAge = time.Hour

// slot returns the key of a deleted Node in deleted: its host, or its UID while the topology key is not known. Then Nodes
// of the same name may be of different hosts.
func (i *index) slot(host string, uid types.UID) string {
	if i.key == "" {
		return string(uid)
	}
	return host
}

// dropNode records the last state of a deleted Node, and returns the values that may have meant it.
func (i *index) dropNode(node *corev1.Node, annotation string, now time.Time) []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.nodes, node.Name)
	touched := i.rename(node.Name)
	maps.DeleteFunc(i.deleted, func(_ string, l lastSeen) bool { return now.Sub(l.at) > lastSeenAge })
	i.deleted[i.slot(hostOf(node, i.key), node.UID)] = lastSeen{name: node.Name, uid: node.UID, labels: node.Labels,
		optedOut: optOut(annotation, node) != "", at: now}
	return touched
}

// amend changes the last state of a deleted Node, if it is remembered.
func (i *index) amend(value string, uid types.UID, change func(*lastSeen)) {
	i.mu.Lock()
	defer i.mu.Unlock()
	slot := i.slot(value, uid)
	if l := i.deleted[slot]; l.uid == uid && l.name != "" {
		change(&l)
		i.deleted[slot] = l
	}
}

// leaveHost records that the Node known, now node, has another host without a name of its former one: the volumes of the
// former host may still be on that machine. The record of the former host then names the Node, see [index.locate].
func (i *index) leaveHost(known, node *corev1.Node) {
	if known == nil || known.UID != node.UID {
		return
	}
	if former := hostOf(known, i.key); !slices.Contains(i.names.of(node.Name), former) {
		i.deleted[former] = lastSeen{name: known.Name, uid: known.UID, labels: known.Labels,
			optedOut: optOut(CleanupAnnotation(i.driver), known, node) != "", at: time.Now()}
	}
}

// lastSeen returns the last state of the deleted Node of a host, if the topology key is known.
func (i *index) lastSeen(host string) (lastSeen, bool) {
	i.mu.RLock()
	defer i.mu.RUnlock()
	l, ok := i.deleted[host]
	return l, ok
}
