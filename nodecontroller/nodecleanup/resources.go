// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/klog/v2"
)

// customResource is an object that belongs to a Node.
type customResource struct {
	kind Resource
	obj  *unstructured.Unstructured
}

// customResources lists the objects of the custom resources with when, or of all if when is empty, by the names of
// their Nodes. A resource that is not installed has no objects. An error for one resource keeps the others.
func (t *observer) customResources(ctx context.Context, when ResourceWhen) (nodes map[string][]customResource, err error) {
	nodes = map[string][]customResource{}
	for _, r := range t.c.resources {
		if when != "" && r.When != when {
			continue
		}
		what := r.Resource.GroupResource().String()
		all, e := list[*unstructured.Unstructured](ctx, t.live, what,
			func(ctx context.Context, o metav1.ListOptions) (*unstructured.UnstructuredList, error) {
				found, err := t.c.deps.Dynamic.Resource(r.Resource).List(ctx, o)
				if apierrors.IsNotFound(err) || meta.IsNoMatchError(err) {
					return &unstructured.UnstructuredList{}, nil
				}
				return found, err
			})
		t.report(ctx, "list "+what, e)
		err = errors.Join(err, e)
		for _, obj := range shuffled(all) {
			foreign := obj.GetDeletionTimestamp() != nil && !slices.Contains(obj.GetFinalizers(), r.Finalizer)
			if node, ok, e := unstructured.NestedString(obj.Object, r.NodeField...); ok && e == nil && node != "" && !foreign {
				nodes[node] = append(nodes[node], customResource{r, obj})
			}
		}
	}
	return nodes, err
}

// removeResource deletes a custom resource. Its mark is set together with the removal of its
// finalizer, so that a running driver does not add it again.
func (c *cleaner) removeResource(
	ctx context.Context, dyn dynamic.Interface, r Resource, obj *unstructured.Unstructured, h host,
) (result, error) {
	return c.attempt(ctx, []host{h}, func() (target, bool, error) {
		hosts, err := c.gather.hosts(ctx, []string{h.value})
		return target{hosts: hosts}, true, err
	}, func() error {
		return c.send(ctx, "cr_delete", r.Resource.GroupResource().String(), obj, func(ctx context.Context) error {
			client := dyn.Resource(r.Resource).Namespace(obj.GetNamespace())
			if r.Finalizer != "" && slices.Contains(obj.GetFinalizers(), r.Finalizer) {
				data, err := r.releasePatch(obj)
				if err != nil {
					return err
				}
				released, err := client.Patch(ctx, obj.GetName(), types.MergePatchType, data,
					metav1.PatchOptions{DryRun: c.policy.dryRunOption()})
				if err != nil {
					return fmt.Errorf("removing finalizer %s: %w", r.Finalizer, err)
				}
				if !c.policy.dryRun {
					obj = released
				}
			}
			return client.Delete(ctx, obj.GetName(), c.preconditions(obj))
		})
	})
}

// releasePatch returns the merge patch that marks obj and removes its finalizer, if obj is unchanged.
func (r Resource) releasePatch(obj *unstructured.Unstructured) ([]byte, error) {
	rest := slices.DeleteFunc(slices.Clone(obj.GetFinalizers()), func(f string) bool { return f == r.Finalizer })
	metadata := map[string]any{"finalizers": rest, "resourceVersion": obj.GetResourceVersion(), "uid": obj.GetUID()}
	if r.MarkKey != "" {
		metadata["annotations"] = map[string]string{r.MarkKey: r.MarkValue}
	}
	return json.Marshal(map[string]any{"metadata": metadata})
}

// keepsResource returns why a volume keeps its custom resource, or "".
func (v volume) keepsResource() string {
	switch {
	case v.pv == nil:
	case v.pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete:
		return "the reclaim policy of volume " + v.pv.Name + " is " + string(v.pv.Spec.PersistentVolumeReclaimPolicy)
	case v.refusal != "":
		return v.refusal
	case v.claim != nil && v.claim.UID == v.pv.Spec.ClaimRef.UID && v.claim.DeletionTimestamp == nil:
		return "volume " + v.pv.Name + " has a claim"
	}
	return ""
}

// sweep looks for custom resources of Nodes that do not exist, from time to time.
func (t *term) sweep(ctx context.Context) {
	if len(t.c.resources) == 0 || t.policy.NodeCleanupResourceSweep <= 0 || !t.policy.Deletes() || !t.policy.path(PathOrphan) {
		return
	}
	tick := time.NewTicker(t.policy.NodeCleanupResourceSweep)
	defer tick.Stop()
	for {
		nodes, err := t.customResources(ctx, "")
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Listing custom resources failed", "retryIn", t.policy.NodeCleanupResourceSweep)
		}
		found := map[string]bool{}
		for name := range nodes {
			if host := t.hostNamed(name); !t.c.index.stays(host) && isRecordable(host) {
				found[host] = true
			}
		}
		for _, host := range sorted(t.lost(), slices.Collect(maps.Keys(found))) {
			if found[host] || err == nil { // the driver may have deleted them
				t.remember(host, func(m *memory) { m.resource = found[host] })
				t.queue.Resync(host)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// cleanResources deletes the custom resources of a host: those with when, or all if when is empty.
func (p pass) cleanResources(ctx context.Context, when ResourceWhen) (next time.Time, err error) {
	nodes, err := p.customResources(ctx, when)
	found := false
	for _, name := range p.h.names() {
		for _, r := range nodes[name] {
			if found = true; p.policy.dryRun && p.recall(p.h.value).sent[r.obj.GetUID()] {
				continue
			}
			p.remember(p.h.value, func(m *memory) { m.resource = true })
			if !p.h.recorded { // nothing else of the host is left: its record comes first
				return time.Now(), nil
			}
			res, e := p.cleaner.removeResource(ctx, p.c.deps.Dynamic, r.kind, r.obj, p.h)
			p.remember(p.h.value, func(m *memory) { m.sent[r.obj.GetUID()] = res.done })
			err = errors.Join(err, e)
			switch {
			case e != nil && !isAnswer(e):
				return time.Time{}, err
			case len(res.reasons) > 0:
				return p.retryAt(res.reasons), err
			}
		}
	}
	if err == nil {
		p.remember(p.h.value, func(m *memory) { m.resource = when == "" && found && p.policy.dryRun })
	}
	return time.Time{}, err
}

// keepsResources returns why the custom resources of a host are kept, or "": a resource may belong
// to a volume that is kept. It reads the volumes from the API server.
func (p pass) keepsResources(ctx context.Context) (string, error) {
	if other := p.ofUnknownNode(); other != "" {
		return "the node of host " + other + " is not known", nil
	}
	local := p.c.index.volumes.with(p.h.value)
	for _, pv := range p.c.volumes.List() {
		if mentions(pv, p.policy.driver, p.h.names()) && !slices.Contains(local, pv.Name) {
			return "volume " + pv.Name + " names the node by another key", nil
		}
	}
	g := p.cleaner.gather
	for _, name := range local {
		v, _, err := g.owned(ctx, name)
		if err != nil {
			return "", err
		}
		if why := v.keepsResource(); why != "" {
			return why, nil
		}
	}
	return "", nil
}

// ofUnknownNode returns a lost host with volumes whose Node name is not known, if in this cluster
// hosts are not named like their Nodes. The resources of any Node may belong to it.
func (p pass) ofUnknownNode() string {
	if !p.c.index.driverNodes().named {
		for _, value := range p.c.index.lost() {
			if r, ok := p.records.get(value); value != p.h.value && (!ok || r.Node == "") && len(p.c.index.volumes.with(value)) > 0 {
				return value
			}
		}
	}
	return ""
}
