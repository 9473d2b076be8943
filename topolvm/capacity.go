// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"context"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
)

// Available returns the available bytes of a device class (empty: the default class) on node, as topolvm-node of driver reports them. It
// returns false if topolvm-node reports none for the class.
func Available(driver string, node *corev1.Node, class string) (Bytes, bool) {
	return names(driver).available(node, class)
}

// available returns the available bytes of class on node: those of its annotation, or 0 if that is no number or if the Node is being
// deleted. It returns false if the Node has no annotation for the class.
func (n names) available(node *corev1.Node, class string) (Bytes, bool) {
	if class == "" {
		class = defaultClass
	}
	value, reported := node.Annotations[n.capacityPrefix()+class]
	bytes, err := strconv.ParseInt(value, 10, 64)
	if err != nil || bytes < 0 || node.DeletionTimestamp != nil {
		return 0, reported
	}
	return Bytes(bytes), reported
}

// capacities returns the annotations of node with available bytes, by device class. node may be nil.
func (n names) capacities(node *corev1.Node) map[string]string {
	values := map[string]string{}
	if node == nil {
		return values
	}
	for key, value := range node.Annotations {
		if class, ok := strings.CutPrefix(key, n.capacityPrefix()); ok {
			values[class] = value
		}
	}
	return values
}

// GetCapacity returns the available bytes of a device class, on one Node or on all together. It reads caches only.
func (s *Service) GetCapacity(ctx context.Context, r *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	c, err := s.synced(ctx)
	if err != nil {
		return nil, err
	}
	class := s.parameter(ctx, r.GetParameters(), s.names.deviceClass())
	var nodes []*corev1.Node
	if r.GetAccessibleTopology() == nil {
		nodes = c.nodes.List()
	} else if node := c.node(r.GetAccessibleTopology().GetSegments()[s.names.topologyKey()]); node != nil {
		nodes = append(nodes, node)
	}
	var sum Bytes
	for _, node := range nodes {
		bytes, _ := s.names.available(node, class)
		sum = min(sum, math.MaxInt64-bytes) + bytes
	}
	return &csi.GetCapacityResponse{AvailableCapacity: int64(sum)}, nil
}

// nodeChanged notifies the calls that wait for the Node, and the capacity role of each device class whose available bytes have changed.
// before is nil for a new Node, after for a deleted one.
func (c *caches) nodeChanged(ctx context.Context, before, after *corev1.Node) {
	for _, node := range []*corev1.Node{before, after} {
		if node != nil {
			c.waits.notify(nodeKey(c.names.valueOf(node)))
			c.waits.notify(nodeKey(node.Name))
		}
	}
	if after == nil { // the capacity role observes that itself
		return
	}
	old, values := c.names.capacities(before), c.names.capacities(after)
	counted := before == nil || (before.DeletionTimestamp == nil) == (after.DeletionTimestamp == nil)
	for _, class := range slices.Sorted(maps.Keys(merged(old, values))) {
		value, reported := values[class]
		if was, had := old[class]; counted && reported == had && value == was {
			continue
		}
		if _, err := strconv.ParseUint(value, 10, 63); err != nil && reported {
			klog.FromContext(ctx).Info("Capacity annotation is not a number of bytes, counted as 0. Check topolvm-node",
				"node", klog.KRef("", after.Name), "deviceClass", class, "value", value)
		}
		if c.capacityChanged != nil {
			c.capacityChanged(c.names.valueOf(after), strings.TrimPrefix(class, defaultClass))
		}
	}
}

// merged returns a map with the keys of both.
func merged(a, b map[string]string) map[string]string {
	all := maps.Clone(a)
	maps.Copy(all, b)
	return all
}
