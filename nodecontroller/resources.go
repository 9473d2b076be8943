// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecontroller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

// customResources are the objects of custom resources. It implements [nodecleanup.Resources]. The name of a
// [nodecleanup.Resource] is that of its kind, its namespace and its name, separated by slashes.
type customResources struct {
	client  dynamic.Interface
	kinds   map[string]CustomResource
	watches map[string]*kube.Optional[kube.Informer[*unstructured.Unstructured]]
	nodes   kube.Informer[*corev1.Node]
	timeout time.Duration
	changed func(node string)
}

// newCustomResources returns the objects of kinds, or nil if there are none.
func newCustomResources(
	client dynamic.Interface, kinds []CustomResource, nodes kube.Informer[*corev1.Node], timeout time.Duration,
) *customResources {
	if len(kinds) == 0 {
		return nil
	}
	r := &customResources{client: client, kinds: map[string]CustomResource{}, nodes: nodes, timeout: timeout,
		watches: map[string]*kube.Optional[kube.Informer[*unstructured.Unstructured]]{}, changed: func(string) {}}
	for _, kind := range kinds {
		name := kind.Resource.GroupResource().String()
		source := kube.Source[*unstructured.UnstructuredList]{
			Resource: kind.Resource, Object: &unstructured.Unstructured{},
			List: client.Resource(kind.Resource).List, Watch: client.Resource(kind.Resource).Watch,
		}
		changed := func(obj *unstructured.Unstructured) { r.changed(field(obj, kind.NodeField)) }
		open := func(ctx context.Context) (informer kube.Informer[*unstructured.Unstructured], _ []kube.Watch, err error) {
			err = source.Probe(ctx)
			if err != nil {
				return informer, nil, err
			}
			informer, watch := kube.NewInformer[*unstructured.Unstructured](source)
			_, err = informer.Handle(kube.Handlers[*unstructured.Unstructured]{
				Add: changed, Update: func(_, obj *unstructured.Unstructured) { changed(obj) }, Delete: changed,
			})
			return informer, []kube.Watch{watch}, err
		}
		r.kinds[name] = kind
		r.watches[name] = kube.NewOptional(name, kube.LongestRecheck, open, func(ctx context.Context, why error) {
			if !apierrors.IsNotFound(why) { // the CRD is installed
				klog.FromContext(ctx).Error(why, "Custom resources of nodes cannot be watched", "resource", name)
			}
		})
	}
	return r
}

// run watches until ctx ends.
func (r *customResources) run(ctx context.Context, name string) { r.watches[name].Run(ctx) }

// OnChange implements [nodecleanup.Resources].
func (r *customResources) OnChange(changed func(node string)) { r.changed = changed }

// List implements [nodecleanup.Resources]. Before the first list of the cache, it lists.
func (r *customResources) List() (all []nodecleanup.Resource) {
	for name, kind := range r.kinds {
		for _, obj := range r.objects(name, kind) {
			res := resourceOf(name, kind, obj)
			left := res.Deleting && !slices.Contains(obj.GetFinalizers(), kind.Finalizer)
			_, exists := r.nodes.Get(res.Node)
			if res.Node != "" && !left && (kind.When == WhenNodeTerminating || !exists) {
				all = append(all, res)
			}
		}
	}
	return all
}

func (r *customResources) objects(name string, kind CustomResource) []*unstructured.Unstructured {
	if informer, _, _ := r.watches[name].Get(); informer != nil && informer.Synced() {
		return informer.List()
	}
	ctx, cancel := context.WithTimeout(context.Background(), r.timeout)
	defer cancel()
	all, err := kube.ListAll[*unstructured.Unstructured](ctx, r.client.Resource(kind.Resource).List)
	if err != nil && !apierrors.IsNotFound(err) {
		klog.FromContext(ctx).Error(err, "Listing custom resources of nodes failed", "resource", name)
	}
	return all
}

// field returns the text at a path of obj, or "".
func field(obj *unstructured.Unstructured, path []string) string {
	text, _, _ := unstructured.NestedString(obj.Object, path...)
	return text
}

func resourceOf(name string, kind CustomResource, obj *unstructured.Unstructured) nodecleanup.Resource {
	return nodecleanup.Resource{
		Name: name + "/" + obj.GetNamespace() + "/" + obj.GetName(), Node: field(obj, kind.NodeField), Handle: field(obj, kind.HandleField),
		Version: obj.GetResourceVersion(), UID: obj.GetUID(), Deleting: obj.GetDeletionTimestamp() != nil,
	}
}

// find returns the kind, the client and the name of an object by its [nodecleanup.Resource.Name].
func (r *customResources) find(name string) (kind CustomResource, client dynamic.ResourceInterface, of, object string) {
	parts := strings.SplitN(name, "/", 3)
	kind = r.kinds[parts[0]]
	return kind, r.client.Resource(kind.Resource).Namespace(parts[1]), parts[0], parts[2]
}

// Get implements [nodecleanup.Resources].
func (r *customResources) Get(ctx context.Context, name string) (*nodecleanup.Resource, error) {
	kind, client, of, object := r.find(name)
	obj, err := client.Get(ctx, object, metav1.GetOptions{})
	if kube.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", name, err)
	}
	return ptr.To(resourceOf(of, kind, obj)), nil
}

var errResourceChanged = errors.New("it has changed since it was read")

// Remove implements [nodecleanup.Resources]. The mark is set together with the removal of the finalizer, so that a running driver
// does not add it again.
func (r *customResources) Remove(ctx context.Context, res nodecleanup.Resource) error {
	kind, client, _, object := r.find(res.Name)
	obj, err := client.Get(ctx, object, metav1.GetOptions{}) // for the finalizers of other components
	switch {
	case err != nil:
		return err
	case obj.GetUID() != res.UID || obj.GetResourceVersion() != res.Version:
		return apierrors.NewConflict(kind.Resource.GroupResource(), object, errResourceChanged)
	}
	if kind.Finalizer != "" && slices.Contains(obj.GetFinalizers(), kind.Finalizer) {
		rest := slices.DeleteFunc(slices.Clone(obj.GetFinalizers()), func(f string) bool { return f == kind.Finalizer })
		metadata := map[string]any{"finalizers": rest, "resourceVersion": res.Version, "uid": res.UID}
		if kind.MarkKey != "" {
			metadata["annotations"] = map[string]string{kind.MarkKey: kind.MarkValue}
		}
		data, err := json.Marshal(map[string]any{"metadata": metadata})
		if err != nil {
			return err
		}
		if obj, err = client.Patch(ctx, object, types.MergePatchType, data, metav1.PatchOptions{}); err != nil {
			return fmt.Errorf("removing finalizer %s: %w", kind.Finalizer, err)
		}
	}
	return client.Delete(ctx, object, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{
		UID: ptr.To(obj.GetUID()), ResourceVersion: ptr.To(obj.GetResourceVersion()),
	}})
}
