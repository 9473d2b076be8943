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
				released, err := client.Patch(ctx, obj.GetName(), types.MergePatchType, data, metav1.PatchOptions{})
				if err != nil {
					return fmt.Errorf("removing finalizer %s: %w", r.Finalizer, err)
				}
				obj = released
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
	case v.pv.Spec.ClaimRef == nil || v.pv.Spec.ClaimRef.UID == "":
		return "volume " + v.pv.Name + " is not bound"
	case v.pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete:
		return "the reclaim policy of volume " + v.pv.Name + " is " + string(v.pv.Spec.PersistentVolumeReclaimPolicy)
	case v.refusal != "":
		return v.refusal
	case v.claim != nil && v.claim.UID == v.pv.Spec.ClaimRef.UID && v.claim.DeletionTimestamp == nil:
		return "volume " + v.pv.Name + " has a claim"
	}
	return ""
}

// sweep lists the custom resources of Nodes that do not exist, every [Settings.NodeCleanupResourceSweep].
func (t *term) sweep(ctx context.Context) {
	if len(t.c.resources) == 0 || t.policy.NodeCleanupResourceSweep <= 0 || !t.policy.Deletes() {
		return
	}
	tick := time.NewTicker(t.policy.NodeCleanupResourceSweep)
	defer tick.Stop()
	select {
	case <-ctx.Done():
		return
	case <-t.checked: // the records name the hosts of deleted Nodes
	}
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

// cleanResources deletes the custom resources of a host: those with when, or all if when is empty. Otherwise kept is why it
// deletes none.
func (p pass) cleanResources(ctx context.Context, when ResourceWhen) (kept string, next time.Time, err error) {
	nodes, err := p.customResources(ctx, when)
	var found []customResource
	for _, name := range p.h.names() {
		found = append(found, nodes[name]...)
	}
	if len(found) > 0 { // the cache may miss a volume
		volumes, e := p.live.listVolumes(ctx)
		if e == nil {
			kept, e = p.keepsResources(ctx, volumes)
		}
		if err = errors.Join(err, e); kept != "" || e != nil {
			return kept, time.Time{}, err
		}
	}
	for _, r := range found {
		p.remember(p.h.value, func(m *memory) { m.resource = true })
		if !p.h.recorded { // nothing else of the host is left: its record comes first
			return "", time.Now(), nil
		}
		res, e := p.cleaner.removeResource(ctx, p.c.deps.Dynamic, r.kind, r.obj, p.h)
		p.remember(p.h.value, func(m *memory) { m.sent[r.obj.GetUID()] = res.done })
		err = errors.Join(err, e)
		switch {
		case e != nil && !isAnswer(e):
			return "", time.Time{}, err
		case len(res.reasons) > 0:
			return "", p.retryAt(res.reasons), err
		}
	}
	if err == nil {
		p.remember(p.h.value, func(m *memory) { m.resource = false })
	}
	return "", time.Time{}, err
}

// keepsResources returns why the custom resources of a host are kept, or "": a resource may belong
// to one of volumes that is kept. It reads the volumes of the host from the API server.
func (p pass) keepsResources(ctx context.Context, volumes []*corev1.PersistentVolume) (string, error) {
	named := p.c.index.driverNodes().named
	for _, pv := range volumes {
		values, local := localValues(pv, p.policy.driver, p.key())
		for _, value := range values {
			if !named && p.mayOwnResources(pv, value) {
				return "they may belong to volume " + pv.Name + ", whose node is not known", nil
			}
		}
		switch {
		case !mentions(pv, p.policy.driver, p.h.names()):
			continue
		case !local || !slices.Contains(values, p.h.value):
			return "volume " + pv.Name + " names the node by another key", nil
		}
		v, _, err := p.cleaner.gather.owned(ctx, pv.Name)
		if err != nil {
			return "", err
		}
		if why := v.keepsResource(); why != "" {
			return why, nil
		}
	}
	return "", nil
}

// mayOwnResources reports whether the resources of the host may belong to pv, a volume of the host value, because its Node is
// not known. Hosts are not named like their Nodes.
func (p pass) mayOwnResources(pv *corev1.PersistentVolume, value string) bool {
	r, recorded := p.records.get(value)
	created, stays := p.c.index.created(value)
	switch {
	case value == p.h.value:
		return false
	case p.h.record.Node == "" && p.h.last.name == "": // it may be a former name of the Node of value
		return !stays || !created.Before(&pv.CreationTimestamp)
	}
	return !stays && (!recorded || r.Node == "")
}
