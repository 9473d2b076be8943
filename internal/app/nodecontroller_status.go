// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"github.com/storage-controller/storage-controller/internal/tools/statusz"
	"github.com/storage-controller/storage-controller/nodecontroller"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

// lostNodes returns the records of lost nodes as the nodecontroller of this process knows them.
func (t *terms) lostNodes(driver string) []statusz.LostNode {
	var all []statusz.LostNode
	for _, e := range t.entries {
		for _, m := range e.members {
			select {
			case <-m.built:
			default:
				continue
			}
			if c, ok := m.controller.(*nodecontroller.Controller); ok {
				for _, n := range c.LostNodes() {
					all = append(all, lostNode(n, driver))
				}
			}
		}
	}
	return all
}

// lostNode returns the state of a lost node and what happens, or has to happen, next.
func lostNode(n nodecleanup.LostNode, driver string) statusz.LostNode {
	return statusz.LostNode{Node: n.Name(), Since: n.Since, State: string(n.State()), Next: map[nodecleanup.RecordState]string{
		nodecleanup.RecordUnparsable: "nothing is deleted, and further lost nodes are held. Correct or remove the record in ConfigMap " +
			nodecleanup.ConfigMapName(driver),
		nodecleanup.RecordOptedOutHeld: "nothing is deleted",
		nodecleanup.RecordOptedOut:     "nothing is deleted",
		nodecleanup.RecordHeld:         "storage-controller nodecontroller approve --driver-name=" + driver + " " + n.Name() + " --yes",
		nodecleanup.RecordApproved:     "cleaned up as the mode and the opt-in allow",
		nodecleanup.RecordDeleting: "cleaned up before the finalizer of its Node is removed, " +
			"or else when its Node and CSINode are deleted",
		nodecleanup.RecordReturned: "the breaker counts its cleanup until --node-cleanup-window has passed",
		nodecleanup.RecordMissing:  "cleaned up after --node-missing-grace, unless it returns",
	}[n.State()]}
}
