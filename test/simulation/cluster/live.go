// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
)

// lookInterval is the time between two looks of the components at the API.
const lookInterval = 20 * time.Millisecond

// NewLive returns the components of a cluster whose Nodes, CSINodes, classes and pods exist in the API only. Its scheduler spreads pods
// over the Nodes. Its pods use one claim at most.
func NewLive(api *apiserver.Server, driver string) (*Cluster, error) {
	c, err := New(api, driver, 0, Features{Resize: true, Snapshots: true})
	if err == nil {
		c.live, err = kubernetes.NewForConfig(api.Config("cluster"))
	}
	return c, err
}

// Run lets the components of a cluster of [NewLive] act until ctx ends. A step that fails, as after a change by another client, is
// decided again.
func (c *Cluster) Run(ctx context.Context) {
	for ctx.Err() == nil {
		for _, step := range c.Steps() {
			_ = step.Do(ctx)
		}
		select {
		case <-ctx.Done():
		case <-time.After(lookInterval):
		}
	}
}

// observe reads the Nodes and pods of the API, and returns the steps of the scheduler for pods without a Node.
func (c *Cluster) observe(s state) []Step {
	c.Nodes, c.pods = nil, nil
	load := map[string]int{} // pods by Node
	for _, node := range List[*corev1.Node](c.api, Nodes) {
		c.Nodes = append(c.Nodes, node.Name)
	}
	var pending []*corev1.Pod
	for _, pod := range List[*corev1.Pod](c.api, Pods) {
		selected := ""
		if claim := s.claim(claimOf(pod)); claim != nil {
			selected = claim.Annotations[storagehelpers.AnnSelectedNode]
			c.pods = append(c.pods, Pod{claim.Name, pod.Spec.NodeName})
		}
		load[cmp.Or(pod.Spec.NodeName, selected)]++
		if pod.Spec.NodeName == "" && pod.DeletionTimestamp == nil {
			pending = append(pending, pod)
		}
	}
	var steps []Step
	for _, pod := range pending {
		claim := s.claim(claimOf(pod))
		nodes := slices.DeleteFunc(slices.Clone(c.Nodes), func(node string) bool {
			return claim != nil && !c.accessible(s.volume(claim.Spec.VolumeName), node)
		})
		slices.SortStableFunc(nodes, func(a, b string) int { return cmp.Compare(load[a], load[b]) })
		switch {
		case len(nodes) == 0 || claimOf(pod) != "" && claim == nil:
		case claim != nil && claim.Annotations[storagehelpers.AnnSelectedNode] == "" && claim.Spec.VolumeName == "":
			load[nodes[0]]++
			steps = append(steps, c.selectNode(s, claim, nodes[0])...)
		case claim == nil || claim.Status.Phase == corev1.ClaimBound:
			node := nodes[0]
			if claim != nil {
				node = cmp.Or(claim.Annotations[storagehelpers.AnnSelectedNode], node)
			}
			load[node]++
			steps = append(steps, Step{"scheduler assigns pod " + pod.Name + " to " + node, func(ctx context.Context) error {
				return c.live.CoreV1().Pods(pod.Namespace).Bind(ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: pod.Name},
					Target: corev1.ObjectReference{Kind: "Node", Name: node}}, metav1.CreateOptions{})
			}})
		}
	}
	return steps
}

// selectNode returns the step of the scheduler that selects node for claim, if it waits for its first pod.
func (c *Cluster) selectNode(s state, claim *corev1.PersistentVolumeClaim, node string) []Step {
	class := s.class(claim)
	if class == nil || !waits(class, claim) || claim.DeletionTimestamp != nil || time.Since(c.selected[claim.UID]) < schedulerBackoff {
		return nil
	}
	next := claim.DeepCopy()
	metav1.SetMetaDataAnnotation(&next.ObjectMeta, storagehelpers.AnnSelectedNode, node)
	return []Step{{"scheduler selects " + node + " for claim " + claim.Name, func(context.Context) error {
		c.selected[claim.UID] = time.Now()
		return c.api.Update(Claims, next, "")
	}}}
}

// claimOf returns the name of the claim of pod, or "".
func claimOf(pod *corev1.Pod) string {
	for _, v := range pod.Spec.Volumes {
		if v.PersistentVolumeClaim != nil {
			return v.PersistentVolumeClaim.ClaimName
		}
	}
	return ""
}
