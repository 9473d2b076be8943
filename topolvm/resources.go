// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

// Resources gives the node cleanup access to the LogicalVolumes: it implements [nodecleanup.Resources]. Its methods are safe for
// concurrent use.
type Resources struct {
	names  names
	caches *caches
	client *Client
}

// Resources returns the LogicalVolumes for the node cleanup, with requests as the client configuration for reads and writes. Call it after
// [Service.Attach].
func (s *Service) Resources(requests *rest.Config) (*Resources, error) {
	client, err := NewClient(requests, s.cfg.Driver)
	return &Resources{s.names, s.caches, client}, err
}

func resourceOf(lv *LogicalVolume, driver string) nodecleanup.Resource {
	return nodecleanup.Resource{
		Name: lv.Name, Node: lv.Spec.NodeName, Handle: cmp.Or(lv.Status.VolumeID, string(lv.UID)),
		Claim: lv.Claim(), ClaimUID: types.UID(claimUID(lv.Name)), Version: lv.ResourceVersion, UID: lv.UID, Deleting: lv.terminating(),
		Unusable: lv.IsIgnored(driver) || lv.Status.CurrentSize == 0, Snapshot: lv.IsSnapshot(),
	}
}

// List returns the cached LogicalVolumes that are not being deleted, or still have the finalizer of topolvm-node, in no particular
// order.
func (r *Resources) List() []nodecleanup.Resource {
	var all []nodecleanup.Resource
	for _, lv := range r.caches.volumes.List() {
		if !lv.terminating() || slices.Contains(lv.Finalizers, r.names.finalizer()) {
			all = append(all, resourceOf(lv, string(r.names)))
		}
	}
	return all
}

// Get reads a LogicalVolume from the API server. It returns nil if there is none.
func (r *Resources) Get(ctx context.Context, name string) (*nodecleanup.Resource, error) {
	lv, err := r.client.Get(ctx, name, metav1.GetOptions{})
	switch {
	case kube.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("reading LogicalVolume %s: %w", name, err)
	}
	found := resourceOf(lv, string(r.names))
	return &found, nil
}

var errChanged = errors.New("it has changed since it was read")

// Remove deletes the LogicalVolume of a Node that does not return, in the version of res. One patch makes topolvm-node ignore it and
// removes its finalizer, so that the deletion does not wait for the Node. permitted is called directly before each write. The error is a
// conflict if it has changed, and nil if it does not exist.
func (r *Resources) Remove(ctx context.Context, res nodecleanup.Resource, permitted func() error) error {
	lv, err := r.client.Get(ctx, res.Name, metav1.GetOptions{}) // for the finalizers of other components
	switch {
	case kube.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("reading LogicalVolume %s: %w", res.Name, err)
	case lv.UID != res.UID || lv.ResourceVersion != res.Version:
		return apierrors.NewConflict(r.names.resource().GroupResource(), res.Name, errChanged)
	}
	others := slices.DeleteFunc(slices.Clone(lv.Finalizers), func(f string) bool { return f == r.names.finalizer() })
	data, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": res.UID, "resourceVersion": res.Version, "finalizers": others,
		"annotations": map[string]string{r.names.pendingDeletion(): "true"},
	}})
	if err == nil {
		err = permitted()
	}
	if err != nil {
		return err
	}
	marked, err := r.client.Patch(ctx, res.Name, types.MergePatchType, data, metav1.PatchOptions{})
	if kube.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("removing finalizer %s of LogicalVolume %s: %w", r.names.finalizer(), res.Name, err)
	}
	err = permitted()
	if err != nil {
		return err
	}
	err = r.client.Delete(ctx, res.Name, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &marked.UID, ResourceVersion: &marked.ResourceVersion},
	})
	if err != nil && !kube.IsNotFound(err) {
		return fmt.Errorf("deleting LogicalVolume %s: %w", res.Name, err)
	}
	return nil
}

// OnChange has changed called with the node of each LogicalVolume in the cache, and of each that is created, changed or deleted later.
// It must not block.
func (r *Resources) OnChange(changed func(node string)) (kube.Registration, error) {
	each := func(lv *LogicalVolume) { changed(lv.Spec.NodeName) }
	return r.caches.volumes.Handle(kube.Handlers[*LogicalVolume]{
		Add: each, Update: func(_, lv *LogicalVolume) { each(lv) }, Delete: each,
	})
}
