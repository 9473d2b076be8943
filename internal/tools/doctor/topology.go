// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

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
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/internal/topology"
)

// maxNames bounds the names in a message.
const maxNames = 5

// checkNodes checks on which nodes the driver is registered, and its topology there.
func (e *examination) checkNodes(ctx context.Context) {
	const name = "nodes"
	query := apiread.Query{Topic: name, What: "CSINodes"}
	all := apiread.List[*storagev1.CSINode](ctx, e.reader, query, e.Kubernetes.StorageV1().CSINodes().List)
	if !all.Found {
		return
	}
	keys := map[string][]string{} // of the driver by node
	for _, n := range all.Value {
		if d := kube.DriverOnNode(n, e.driver.Name); d != nil {
			keys[n.Name] = slices.Sorted(slices.Values(d.TopologyKeys))
		}
	}
	if len(keys) == 0 {
		e.add(name, finding.Warning, "check that the node plugin is running with node-driver-registrar",
			"the driver is not registered on any node (nodes: %d): no pod can use its volumes", len(all.Value))
		return
	}
	e.ok(name, "the driver is registered on %d of %d", len(keys), len(all.Value))
	if !e.plan.Topology {
		return
	}
	check := topologyKeys(keys)
	e.Findings = append(e.Findings, check)
	if check.Severity == finding.OK {
		e.checkLabels(ctx, keys)
	}
}

// topologyKeys checks that all nodes have the same topology keys. keys holds them by node.
func topologyKeys(keys map[string][]string) finding.Finding {
	c := finding.Finding{Topic: "topology keys", Severity: finding.OK}
	nodes := map[string][]string{} // by their keys
	for _, node := range slices.Sorted(maps.Keys(keys)) {
		text := strings.Join(keys[node], ", ")
		nodes[text] = append(nodes[text], node)
	}
	if len(nodes) > 1 {
		var texts []string
		for _, text := range slices.Sorted(maps.Keys(nodes)) {
			texts = append(texts, fmt.Sprintf("[%s] on %s", text, kube.ShortList(nodes[text], maxNames)))
		}
		c.Severity, c.Message = finding.Warning, "they differ between nodes: "+strings.Join(texts, "; ")
		c.Next = "complete the upgrade of the node plugin, if one is in progress: provisioning may fail for nodes with other keys"
		return c
	}
	for text := range nodes {
		c.Message = text
		if text == "" {
			c.Severity = finding.Failing
			c.Message = "the driver reports VOLUME_ACCESSIBILITY_CONSTRAINTS, but no topology keys on its nodes: provisioning fails"
			c.Next = "return accessible_topology from NodeGetInfo of the node plugin, or set --feature-gates=Topology=false"
		}
	}
	return c
}

// checkLabels checks that the nodes have a label for each topology key. The kubelet sets it.
func (e *examination) checkLabels(ctx context.Context, keys map[string][]string) {
	const name = "topology labels"
	nodes := e.Metadata.Resource(corev1.SchemeGroupVersion.WithResource("nodes"))
	all := apiread.List[*metav1.PartialObjectMetadata](ctx, e.reader, apiread.Query{Topic: name, What: "Nodes"}, nodes.List)
	if !all.Found {
		return
	}
	var incomplete []string
	for _, n := range all.Value {
		if _, missing := topology.OfNode(n.Labels, keys[n.Name]); len(missing) > 0 {
			incomplete = append(incomplete, n.Name)
		}
	}
	if incomplete != nil {
		slices.Sort(incomplete)
		const next = "restart the node plugin on these nodes, because the kubelet sets the labels when the driver registers, " +
			"and find out what removes them"
		e.add(name, finding.Warning, next, "missing on nodes where no volume can be provisioned: %s", kube.ShortList(incomplete, maxNames))
		return
	}
	e.ok(name, "on all nodes of the driver")
}
