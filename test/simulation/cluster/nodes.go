// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"

	storagev1 "k8s.io/api/storage/v1"
)

const zoneLabel = "topology.example.com/zone"

// Zone returns the topology segment of a node.
func Zone(node string) map[string]string { return map[string]string{zoneLabel: "zone-of-" + node} }

// register returns the steps of kubelets whose driver is not registered.
func (c *Cluster) register() []Step {
	registration := storagev1.CSINodeDriver{Name: c.driver}
	if c.features.Topology {
		registration.TopologyKeys = []string{zoneLabel}
	}
	var steps []Step
	for _, node := range List[*storagev1.CSINode](c.api, CSINodes) {
		if len(node.Spec.Drivers) > 0 {
			continue
		}
		next := node.DeepCopy()
		registration.NodeID = "id-of-" + node.Name
		next.Spec.Drivers = []storagev1.CSINodeDriver{registration}
		steps = append(steps, Step{"kubelet registers the driver on " + node.Name, c.update(CSINodes, next)})
	}
	return steps
}

// unregister returns the steps of an administrator who updates the driver on a node.
func (c *Cluster) unregister() []Step {
	var steps []Step
	for _, node := range List[*storagev1.CSINode](c.api, CSINodes) {
		next := node.DeepCopy()
		next.Spec.Drivers = nil
		if len(node.Spec.Drivers) > 0 {
			steps = append(steps, Step{"the driver on " + node.Name + " is updated", func(context.Context) error {
				return c.api.Update(CSINodes, next, "")
			}})
		}
	}
	return steps
}
