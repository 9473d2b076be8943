package nodecontroller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// isNoSuchKind tells whether err says that nobody has installed a kind.
func isNoSuchKind(err error) bool { return apierrors.IsNotFound(err) || meta.IsNoMatchError(err) }

// eachResource calls visit for every object of a kind that belongs to some node, until
// it returns false. A kind that nobody has installed has none, which is told once.
func (c *Controller) eachResource(ctx context.Context, r Resource, visit func(node string, obj *unstructured.Unstructured) bool) error {
	list := func(ctx context.Context, opts metav1.ListOptions) ([]*unstructured.Unstructured, string, error) {
		list, err := c.deps.Dynamic.Resource(r.Resource).List(ctx, opts)
		if isNoSuchKind(err) {
			if _, told := c.unknownKinds.LoadOrStore(r.Resource, true); !told {
				klog.FromContext(ctx).Info("There is no such kind, nothing of it to clean up", "resource", r.Resource.String())
			}
			return nil, "", nil
		}
		if err != nil {
			return nil, "", err
		}
		return pointers(list.Items), list.GetContinue(), nil
	}
	return pages(ctx, c.cfg.Timeout, r.Resource.GroupResource().String(), list, metav1.ListOptions{}, func(obj *unstructured.Unstructured) bool {
		// An object whose field is missing or no text belongs to no node.
		if node, ok, err := unstructured.NestedString(obj.Object, r.NodeField...); ok && err == nil && node != "" {
			return visit(node, obj)
		}
		return true
	})
}

// cleanResources removes the custom resources of a node, those alone that are cleaned up
// when, or all for "". Before each of them gates is asked. next is when to go on.
func (t *term) cleanResources(ctx context.Context, node string, gates func() ([]finding, error), when ResourceWhen) (next time.Time, err error) {
	var errs []error
	for _, r := range t.c.resources {
		if when != "" && r.When != when {
			continue
		}
		var found []*unstructured.Unstructured
		err := t.c.eachResource(ctx, r, func(of string, obj *unstructured.Unstructured) bool {
			if of == node && !r.left(obj) {
				found = append(found, obj)
			}
			return true
		})
		if errs = append(errs, err); err != nil && isAnswer(err) {
			continue
		}
		if err != nil {
			return time.Time{}, errors.Join(errs...)
		}
		if len(found) > 0 {
			t.noteWaiting(keyOfRecords(node), node, true)
			t.holdWaiting(ctx, keyOfRecords(node))
		}
		shuffle(found)
		for _, obj := range found {
			next, ok := t.takeToken(time.Now())
			if !ok {
				return next, errors.Join(errs...)
			}
			closed, err := gates()
			if err != nil || len(closed) > 0 {
				t.giveTokenBack()
				if err == nil && when == WhenNodeTerminating && closed[0].gate == gateBreaker {
					return time.Time{}, nil // a node is not held for it; what is left follows once it is gone
				}
				return time.Now().Add(later), errors.Join(append(errs, err)...)
			}
			t.ledger.act([]string{node}, time.Now())
			err = t.removeResource(ctx, r, obj)
			if errs = append(errs, err); err != nil && !isAnswer(err) {
				return time.Time{}, errors.Join(errs...)
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return time.Time{}, err
	}
	t.ledger.drop(keyOfRecords(node))
	return time.Time{}, nil
}

// hasRecords tells whether there are custom resources of a node. It forgets them once there
// are none, whoever removed them: what is held for the sake of them would wait for an
// approval for ever.
func (t *term) hasRecords(ctx context.Context, node string) (bool, error) {
	for _, r := range t.c.resources {
		found := false
		err := t.c.eachResource(ctx, r, func(of string, obj *unstructured.Unstructured) bool {
			found = of == node && !r.left(obj)
			return !found
		})
		if err != nil || found {
			return found, err
		}
	}
	t.ledger.drop(keyOfRecords(node))
	return false, nil
}

// left tells whether obj is being deleted, and whatever keeps it is not ours.
func (r Resource) left(obj *unstructured.Unstructured) bool {
	return obj.GetDeletionTimestamp() != nil && !slices.Contains(obj.GetFinalizers(), r.Finalizer)
}

// removeResource deletes one custom resource. Its mark is set together with the removal
// of its finalizer, so that a driver that is still alive does not add that again.
func (t *term) removeResource(ctx context.Context, r Resource, obj *unstructured.Unstructured) error {
	ctx, cancel := context.WithTimeout(ctx, t.c.cfg.Timeout)
	defer cancel()
	client, dryRun := t.c.deps.Dynamic.Resource(r.Resource).Namespace(obj.GetNamespace()), []string(nil)
	if t.c.policy.dryRun {
		dryRun = []string{metav1.DryRunAll}
	}
	fail := func(doing string, err error) error {
		return fmt.Errorf("%s %s %q: %w", doing, r.Resource.GroupResource(), kube.Key(obj), err)
	}
	if r.Finalizer != "" && slices.Contains(obj.GetFinalizers(), r.Finalizer) {
		data, err := releaseResource(r, obj)
		if err != nil {
			return fail("releasing", err)
		}
		_, err = client.Patch(ctx, obj.GetName(), types.MergePatchType, data, metav1.PatchOptions{DryRun: dryRun})
		if err != nil && !kube.IsNotFound(err) {
			t.c.metrics.action("cr_delete", t.c.policy, err)
			return fail("removing the finalizer of", err)
		}
	}
	err := client.Delete(ctx, obj.GetName(), metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: ptr.To(obj.GetUID())}, DryRun: dryRun})
	t.c.metrics.action("cr_delete", t.c.policy, err)
	if err != nil && !kube.IsNotFound(err) {
		return fail("deleting", err)
	}
	klog.FromContext(ctx).Info("Custom resource of a node deleted", "resource", r.Resource.GroupResource().String(), "name", kube.Key(obj), "dryRun", t.c.policy.dryRun)
	return nil
}

// releaseResource is the merge patch that marks obj and removes every occurrence of its
// finalizer, as long as it is what was read.
func releaseResource(r Resource, obj *unstructured.Unstructured) ([]byte, error) {
	left := slices.DeleteFunc(slices.Clone(obj.GetFinalizers()), func(f string) bool { return f == r.Finalizer })
	metadata := map[string]any{"finalizers": left, "resourceVersion": obj.GetResourceVersion(), "uid": obj.GetUID()}
	if r.MarkKey != "" {
		metadata["annotations"] = map[string]string{r.MarkKey: r.MarkValue}
	}
	return json.Marshal(map[string]any{"metadata": metadata})
}

// sweep looks for custom resources of nodes that do not exist, of which nothing else may
// tell, from time to time.
func (t *term) sweep(ctx context.Context) {
	if len(t.c.resources) == 0 || t.c.cfg.NodeCleanupResourceSweep <= 0 || !t.c.policy.writes() || !t.c.policy.orphanPath {
		return
	}
	tick := time.NewTicker(t.c.cfg.NodeCleanupResourceSweep)
	defer tick.Stop()
	for {
		for _, r := range t.c.resources {
			err := t.c.eachResource(ctx, r, func(node string, _ *unstructured.Unstructured) bool {
				if _, exists := t.c.nodes.Get(node); !exists {
					t.nodeQueue.Resync(node) // where its grace begins, and it is looked for
				}
				return true
			})
			if ctx.Err() == nil {
				t.tried("sweep/"+r.Resource.String(), err)
			}
			if err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).Error(err, "Custom resources of nodes that are gone could not be looked for; the next look follows", "in", t.c.cfg.NodeCleanupResourceSweep)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
