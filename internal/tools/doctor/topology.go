package doctor

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/topology"
)

// checkTopology compares what the driver has registered on the nodes.
func (e *examination) checkTopology(ctx context.Context) {
	const name = "nodes"
	if e.driver.Name == "" {
		e.skip(name, "the name of the driver is not known")
		return
	}
	all, err := kube.ListAll[*storagev1.CSINode](ctx, e.client.StorageV1().CSINodes().List)
	if err != nil {
		e.skip(name, "the CSINodes were not read (%s)", reason(err))
		return
	}
	nodes := registrations(all, e.driver.Name)
	if len(nodes) == 0 {
		e.add(name, Warning, "is its node plugin running, with node-driver-registrar beside it?", "the driver is registered on none of %d nodes: no pod can use its volumes", len(all))
		return
	}
	e.ok(name, "the driver is registered on %d of %d", len(nodes), len(all))
	if !e.plan.Topology {
		return
	}
	keys, check := topologyKeys(nodes)
	e.report.Checks = append(e.report.Checks, check)
	if len(keys) > 0 {
		e.checkLabels(ctx, nodes)
	}
}

// registrations is the topology keys of driver by node.
func registrations(all []*storagev1.CSINode, driver string) map[string][]string {
	nodes := map[string][]string{}
	for _, n := range all {
		if d := kube.DriverOnNode(n, driver); d != nil {
			nodes[n.Name] = slices.Sorted(slices.Values(d.TopologyKeys))
		}
	}
	return nodes
}

// topologyKeys is the keys of nodes, and whether they are the same on all.
func topologyKeys(nodes map[string][]string) ([]string, Check) {
	c := Check{Name: "topology keys", Status: OK}
	by := map[string][]string{} // nodes by their keys
	for _, node := range slices.Sorted(maps.Keys(nodes)) {
		keys := strings.Join(nodes[node], ", ")
		by[keys] = append(by[keys], node)
	}
	if len(by) > 1 {
		var texts []string
		for _, keys := range slices.Sorted(maps.Keys(by)) {
			texts = append(texts, fmt.Sprintf("[%s] on %s", keys, names(by[keys])))
		}
		c.Status, c.Message = Warning, "they differ between nodes: "+strings.Join(texts, "; ")
		c.Hint = "is an upgrade of the node plugin under way? A volume for a node with other keys may not be provisioned"
		return nil, c
	}
	for keys := range by {
		if keys == "" {
			c.Status, c.Message = Failure, "the driver reports VOLUME_ACCESSIBILITY_CONSTRAINTS, but no keys on its nodes: provisioning fails for want of a topology"
			c.Hint = "NodeGetInfo of the node plugin has to return accessible_topology; or set --feature-gates=Topology=false"
			return nil, c
		}
		c.Message = keys
		return strings.Split(keys, ", "), c
	}
	return nil, c
}

// checkLabels looks whether nodes have the labels that kubelets set for the keys.
func (e *examination) checkLabels(ctx context.Context, nodes map[string][]string) {
	const name = "topology labels"
	all, err := kube.ListAll[*metav1.PartialObjectMetadata](ctx, e.meta.Resource(corev1.SchemeGroupVersion.WithResource("nodes")).List)
	if err != nil {
		e.skip(name, "the nodes were not read (%s)", reason(err))
		return
	}
	labels := map[string]map[string]string{}
	for _, n := range all {
		labels[n.Name] = n.Labels
	}
	var without []string
	for _, node := range slices.Sorted(maps.Keys(nodes)) {
		of, exists := labels[node]
		if _, missing := topology.OfNode(of, nodes[node]); exists && missing != nil {
			without = append(without, node)
		}
	}
	if without != nil {
		e.add(name, Warning, "kubelets set them when the driver registers: restart its pod on these nodes, and see that nobody removes them", "nodes without a label for each key, where no volume can be made: %s", names(without))
		return
	}
	e.ok(name, "on all nodes of the driver")
}
