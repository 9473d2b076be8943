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
	s := statusz.LostNode{Node: n.Node, Since: n.Since, State: "missing", Next: "cleaned up after --node-missing-grace, unless it returns"}
	if s.Node == "" {
		s.Node = n.Value
	}
	switch {
	case n.OptedOut:
		s.State, s.Next = "opted out", "nothing is deleted"
	case n.Since.IsZero():
		s.State, s.Next = "being deleted", "cleaned up when its Node and CSINode are deleted"
	case n.Held != "":
		s.State, s.Next = "held by the "+n.Held,
			"storage-controller nodecontroller approve --driver-name="+driver+" "+s.Node+" --yes"
	case !n.Approved.IsZero():
		s.State, s.Next = "approved", "cleaned up as the mode and the opt-in allow"
	}
	return s
}
