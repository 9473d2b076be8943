// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/metrics"
)

// Indexes of contents of the driver.
const (
	byClass  = "class"  // name of the class
	byGroup  = "group"  // handle of the group of a member
	byHandle = "handle" // of the snapshot
)

// watches holds the informers of the contents and classes of one kind.
type watches struct {
	contents kube.Informer[*content]
	classes  kube.Informer[*class]
	version  schema.GroupVersion
}

// optional returns the watches of k. It logs idle while they are not open.
func (c *Controller) optional(k *kind, idle string) *kube.Optional[watches] {
	longest := c.cfg.RecheckInterval
	open := func(ctx context.Context) (watches, []kube.Watch, error) { return c.open(ctx, k) }
	return kube.NewOptional("snapshot resources", longest, open, func(ctx context.Context, why error) {
		klog.FromContext(ctx).Info(idle, "reason", why.Error(), "recheckedWithin", longest.String())
	})
}

// Serve watches the snapshot resources on every replica, until ctx ends. While their CRDs are not
// installed, or listing them is forbidden, the controller is idle.
func (c *Controller) Serve(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { c.snapshots.Run(ctx) })
	reason := c.groupsOff()
	switch {
	case reason == nil:
		wg.Go(func() { c.groups.Run(ctx) })
	case c.cfg.Groups && c.deps.Driver.Plugin.GroupControllerService:
		klog.FromContext(ctx).Info(logGroupsOff, "reason", reason.Error())
	}
	wg.Wait()
	return nil
}

const logGroupsOff = "Group snapshots are off"

// groupsOff returns why group snapshots are off for the whole run, or nil.
func (c *Controller) groupsOff() error {
	switch {
	case !c.cfg.Groups:
		return errors.New("the feature gate CSIVolumeGroupSnapshot is off")
	case c.deps.Driver.Group.Unknown:
		return errors.New("the driver's answer to GroupControllerGetCapabilities was an error")
	case !c.deps.Driver.Plugin.GroupControllerService || !c.deps.Driver.Group.CreateDeleteGetVolumeGroupSnapshot:
		return errors.New("the driver does not report CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT")
	case c.cfg.NodeDeployment:
		return errors.New("--node-deployment is set, and groups belong to no node")
	}
	return nil
}

// open returns the watches of k in the first version in which its resources can be listed, or an error that names those that cannot.
func (c *Controller) open(ctx context.Context, k *kind) (w watches, _ []kube.Watch, err error) {
	var failures []error
	for _, version := range k.versions {
		api := c.watchClients[version]
		contents, classes := api.contents.source(c.driver.watched), api.classes.source(c.driver.watched)
		contents.Indexers = indexers()
		if c.cfg.NodeDeployment { // without groups
			contents.Selector = labels.Set{LabelManagedBy: c.cfg.NodeName}.String()
		}
		if err := errors.Join(probe(ctx, contents), probe(ctx, classes)); err != nil {
			failures = append(failures, err)
			continue
		}
		both := make([]kube.Watch, 2)
		w.version = version
		w.contents, both[0] = kube.NewInformer[*content](contents)
		w.classes, both[1] = kube.NewInformer[*class](classes)
		return w, both, nil
	}
	for _, version := range k.old {
		old := c.watchClients[version].contents
		if _, err := old.List(ctx, metav1.ListOptions{Limit: 1}); err == nil {
			return w, nil, fmt.Errorf("the API server serves %s only in version %s. Upgrade the CRDs and the "+
				"snapshot-controller to those of external-snapshotter 8.4 or later", old.GroupResource(), version.Version)
		}
	}
	return w, nil, errors.Join(failures...)
}

// probe returns an error that names the resource unless it can be listed.
func probe(ctx context.Context, s kube.Source[runtime.Object]) error {
	err := s.Probe(ctx)
	name, version := s.Resource.GroupResource().String(), s.Resource.Version
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%s are not served in version %s. Install the CRDs of external-snapshotter", name, version)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("listing %s is forbidden. Grant list and watch: %w", name, err)
	case err != nil:
		return fmt.Errorf("listing %s in version %s: %w", name, version, err)
	}
	return nil
}

// indexers returns the indexes of contents.
func indexers() cache.Indexers {
	index := func(value func(*content) string) cache.IndexFunc {
		return func(obj any) ([]string, error) {
			if c, ok := obj.(*content); ok {
				if v := value(c); v != "" {
					return []string{v}, nil
				}
			}
			return nil, nil
		}
	}
	return cache.Indexers{
		byClass:  index(func(c *content) string { return c.class }),
		byHandle: index((*content).namedHandle),
		byGroup: index(func(c *content) string {
			if c.group { // its own handle
				return c.known().handle
			}
			return c.groupHandle()
		}),
	}
}

// WaitAvailable waits until the snapshot resources are watched, and returns the cause of ctx if that ends
// first. Without them, the controller does not compete for its Lease.
func (c *Controller) WaitAvailable(ctx context.Context) error {
	c.snapshots.Wait(ctx)
	return context.Cause(ctx)
}

// Ready returns a warning while the controller is idle.
func (c *Controller) Ready() error {
	if _, _, idle := c.snapshots.Get(); idle != nil {
		return metrics.Warning("snapshotter idle: " + idle.Error())
	}
	return nil
}
