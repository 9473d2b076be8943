// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"maps"
	"slices"

	storagev1 "k8s.io/api/storage/v1"

	"github.com/storage-controller/storage-controller/test/simulation/cluster"
)

// driverCapacity is the capacity of the driver on each node, which is enough for all volumes.
const driverCapacity = 100 << 30

// wrongCapacities returns the StorageClasses and nodes whose CSIStorageCapacity is missing, obsolete, a second one or not that of the
// driver. StorageClasses with the binding mode Immediate have none.
func (s *simulation) wrongCapacities() []string {
	free := map[string]int64{}
	for _, node := range s.cluster.Nodes {
		if s.cluster.Registered(node) {
			free["waiting on "+node] = driverCapacity
		}
	}
	if s.driver == nil {
		for _, node := range s.cluster.Nodes {
			if key := "waiting on " + node; free[key] > 0 {
				free[key] = s.cluster.Free(node, "waiting")
			}
		}
	}
	for _, v := range s.volumes() {
		if key := "waiting on " + cluster.NodeIn(v.Segment); s.driver != nil && free[key] > 0 {
			free[key] -= v.Capacity
		}
	}
	wrong := map[string]bool{}
	for _, o := range cluster.List[*storagev1.CSIStorageCapacity](s.api, cluster.Capacities) {
		key := o.StorageClassName + " on " + cluster.NodeIn(o.NodeTopology.MatchLabels)
		if want, ok := free[key]; !ok || o.Capacity == nil || o.Capacity.Value() != want {
			wrong[key] = true
		}
		delete(free, key)
	}
	for key := range free {
		wrong[key] = true
	}
	var busy []string
	for _, key := range slices.Sorted(maps.Keys(wrong)) {
		busy = append(busy, "the capacity of class "+key+" is not published")
	}
	return busy
}
