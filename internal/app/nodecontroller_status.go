// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"github.com/storage-controller/storage-controller/internal/tools/statusz"
	"github.com/storage-controller/storage-controller/nodecontroller"
)

// lostNodes returns the records of lost nodes as the nodecontroller of this process knows them.
func (t *terms) lostNodes() []statusz.LostNode {
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
					all = append(all, statusz.LostNode{Node: n.Name(), Since: n.Since, State: string(n.State()), Next: n.Next})
				}
			}
		}
	}
	return all
}
