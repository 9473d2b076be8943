package nodecleanup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
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

	"github.com/storage-controller/storage-controller/internal/kube"
)

// ofNodes lists the objects of r with the names of their Nodes. A resource that is not installed has
// no objects.
func (r Resource) ofNodes(ctx context.Context, client dynamic.Interface, l live) (map[string][]*unstructured.Unstructured, error) {
	all, err := list[*unstructured.Unstructured](ctx, l, r.Resource.GroupResource().String(),
		func(ctx context.Context, o metav1.ListOptions) (*unstructured.UnstructuredList, error) {
			found, err := client.Resource(r.Resource).List(ctx, o)
			if apierrors.IsNotFound(err) || meta.IsNoMatchError(err) {
				return &unstructured.UnstructuredList{}, nil
			}
			return found, err
		})
	nodes := map[string][]*unstructured.Unstructured{}
	for _, obj := range all {
		foreign := obj.GetDeletionTimestamp() != nil && !slices.Contains(obj.GetFinalizers(), r.Finalizer)
		if node, ok, e := unstructured.NestedString(obj.Object, r.NodeField...); ok && e == nil && node != "" && !foreign {
			nodes[node] = append(nodes[node], obj)
		}
	}
	return nodes, err
}

// cleanResources deletes the custom resources of a host: those with when, or all if when is empty.
func (t *term) cleanResources(ctx context.Context, h host, when ResourceWhen) (next time.Time, err error) {
	var errs []error
	found := false
	for _, r := range t.c.resources {
		if when != "" && r.When != when {
			continue
		}
		nodes, err := r.ofNodes(ctx, t.c.deps.Dynamic, t.live)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for _, name := range h.names() {
			for _, obj := range shuffled(nodes[name]) {
				m, _ := t.recall(h.value)
				if found = true; t.policy.dryRun && m.sent[obj.GetUID()] {
					continue
				}
				t.remember(h.value, func(m *memory) { m.resources = true })
				res, err := t.cleaner.removeResource(ctx, t.c.deps.Dynamic, r, obj, h)
				t.remember(h.value, func(m *memory) { m.sent[obj.GetUID()] = res.done })
				if errs = append(errs, err); err != nil && !isAnswer(err) {
					return time.Time{}, errors.Join(errs...)
				}
				if len(res.reasons) > 0 {
					return t.retryAt(res.reasons), errors.Join(errs...)
				}
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return time.Time{}, err
	}
	t.remember(h.value, func(m *memory) { m.resources = when == "" && found && t.policy.dryRun })
	return time.Time{}, nil
}

// removeResource deletes a custom resource. Its mark is set together with the removal of its
// finalizer, so that a running driver does not add it again.
func (c *cleaner) removeResource(
	ctx context.Context, dyn dynamic.Interface, r Resource, obj *unstructured.Unstructured, h host,
) (result, error) {
	reasons, ok, err := c.permit(ctx, []host{h}, func() (target, bool, error) {
		hosts, err := c.gather.hosts(ctx, []string{h.value})
		return target{hosts: hosts, always: true}, true, err
	})
	if err != nil || !ok {
		return result{reasons: reasons}, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.live.timeout)
	defer cancel()
	client := dyn.Resource(r.Resource).Namespace(obj.GetNamespace())
	version := obj.GetResourceVersion()
	if r.Finalizer != "" && slices.Contains(obj.GetFinalizers(), r.Finalizer) {
		data, err := r.releasePatch(obj)
		if err != nil {
			return result{}, err
		}
		released, err := client.Patch(ctx, obj.GetName(), types.MergePatchType, data, metav1.PatchOptions{DryRun: c.dryRun()})
		if err != nil && !kube.IsNotFound(err) {
			c.metrics.action("cr_delete", c.policy, err)
			return result{}, fmt.Errorf("removing the finalizer of %s %q: %w", r.Resource.GroupResource(), kube.Key(obj), err)
		}
		if err == nil && !c.policy.dryRun {
			version = released.GetResourceVersion()
		}
	}
	read := obj.DeepCopy()
	read.SetResourceVersion(version)
	err = client.Delete(ctx, obj.GetName(), c.preconditions(read))
	c.metrics.action("cr_delete", c.policy, err)
	if err != nil && !kube.IsNotFound(err) {
		return result{}, fmt.Errorf("deleting %s %q: %w", r.Resource.GroupResource(), kube.Key(obj), err)
	}
	klog.FromContext(ctx).Info("Custom resource deleted", "resource", r.Resource.GroupResource().String(), "name", kube.Key(obj),
		"dryRun", c.policy.dryRun)
	return result{done: true}, nil
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

// keepsResources returns why the custom resources of a host are kept, or "": a resource may belong
// to a volume that is kept. It reads the volumes from the API server.
func (t *term) keepsResources(ctx context.Context, h host) (string, error) {
	if other := t.ofUnknownNode(h); other != "" {
		return "the node of host " + other + " is not known", nil
	}
	local := t.c.index.volumesOf(h.value)
	for _, pv := range t.c.volumes.List() {
		if mentions(pv, t.policy.driver, h.names()) && !slices.Contains(local, pv.Name) {
			return "volume " + pv.Name + " names the node by another key", nil
		}
	}
	g := t.cleaner.gather
	for _, name := range local {
		v, _, err := g.owned(ctx, name)
		if err != nil {
			return "", err
		}
		if why := t.policy.keeps(v); why != "" {
			return why, nil
		}
	}
	return "", nil
}

// keeps returns why a volume keeps its custom resource, or "".
func (p Policy) keeps(v volume) string {
	switch {
	case v.pv == nil:
	case v.pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete:
		return "the reclaim policy of volume " + v.pv.Name + " is " + string(v.pv.Spec.PersistentVolumeReclaimPolicy)
	case p.refusal(v.consent) != "":
		return p.refusal(v.consent)
	case v.claim != nil && v.claim.UID == v.pv.Spec.ClaimRef.UID && v.claim.DeletionTimestamp == nil:
		return "volume " + v.pv.Name + " has a claim"
	}
	return ""
}

// ofUnknownNode returns a lost host with volumes whose Node name is not known, if in this cluster
// hosts are not named like their Nodes. The resources of any Node may belong to it.
func (t *term) ofUnknownNode(h host) string {
	if !t.c.index.named() {
		for _, value := range t.c.index.lost() {
			if r, ok := t.records.get(value); value != h.value && (!ok || r.Node == "") && len(t.c.index.volumesOf(value)) > 0 {
				return value
			}
		}
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
		for _, r := range t.c.resources {
			nodes, err := r.ofNodes(ctx, t.c.deps.Dynamic, t.live)
			t.report(ctx, "list "+r.Resource.GroupResource().String(), err)
			for name := range nodes {
				if host := t.hostNamed(name); !t.c.index.stays(host) && isRecordable(host) {
					t.remember(host, func(m *memory) { m.resources = true })
					t.queue.Resync(host)
				}
			}
			if err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).Error(err, "Listing custom resources failed", "retryIn", t.policy.NodeCleanupResourceSweep)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
