// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	groupv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
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

// watches holds the informers of one pair of resources, contents and classes.
type watches[T, C object] struct {
	contents kube.Informer[T]
	classes  kube.Informer[C]
	version  string // of the API
}

type (
	snapshotWatches = watches[*snapshotv1.VolumeSnapshotContent, *snapshotv1.VolumeSnapshotClass]
	groupWatches    = watches[*groupv1.VolumeGroupSnapshotContent, *groupv1.VolumeGroupSnapshotClass]
)

// optional returns a pair of watches that open returns. It logs idle while they are not open.
func optional[W any](longest time.Duration, open func(context.Context) (W, []kube.Watch, error), idle string) *kube.Optional[W] {
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

// openSnapshots returns the watches of VolumeSnapshotContents and VolumeSnapshotClasses.
func (c *Controller) openSnapshots(ctx context.Context) (snapshotWatches, []kube.Watch, error) {
	contents := c.watchClients.contents.source(func(o *snapshotv1.VolumeSnapshotContent) bool { return o.Spec.Driver != c.driver.name },
		indexers(snapshotContent))
	if c.cfg.NodeDeployment {
		contents.Selector = metav1.FormatLabelSelector(&metav1.LabelSelector{MatchLabels: map[string]string{
			LabelManagedBy: c.cfg.NodeName}})
	}
	classes := c.watchClients.classes.source(func(o *snapshotv1.VolumeSnapshotClass) bool {
		if o.Driver != c.driver.name {
			*o = snapshotv1.VolumeSnapshotClass{ObjectMeta: stub(o.ObjectMeta), Driver: o.Driver}
		}
		return false
	}, nil)
	return openPair[*snapshotv1.VolumeSnapshotContent, *snapshotv1.VolumeSnapshotClass](ctx, contents, classes)
}

// openGroups returns the watches of VolumeGroupSnapshotContents and VolumeGroupSnapshotClasses in the first version
// in which they can be listed.
func (c *Controller) openGroups(ctx context.Context) (groupWatches, []kube.Watch, error) {
	var failures []error
	for _, version := range groupVersions {
		clients := c.watchClients.groups[version]
		contents := clients.contents.source(func(o *groupv1.VolumeGroupSnapshotContent) bool { return o.Spec.Driver != c.driver.name },
			indexers(groupContent))
		classes := clients.classes.source(func(o *groupv1.VolumeGroupSnapshotClass) bool {
			if o.Driver != c.driver.name {
				*o = groupv1.VolumeGroupSnapshotClass{ObjectMeta: stub(o.ObjectMeta), Driver: o.Driver}
			}
			return false
		}, nil)
		w, watches, err := openPair[*groupv1.VolumeGroupSnapshotContent, *groupv1.VolumeGroupSnapshotClass](ctx, contents, classes)
		if err == nil {
			return w, watches, nil
		}
		failures = append(failures, err)
	}
	old := c.watchClients.groups[groupVersionOld].contents
	if _, err := old.List(ctx, metav1.ListOptions{Limit: 1}); err == nil {
		return groupWatches{}, nil, fmt.Errorf("the API server serves %s only in version %s. Upgrade the CRDs and the "+
			"snapshot-controller to those of external-snapshotter 8.4 or later", old.resource.GroupResource(), groupVersionOld)
	}
	return groupWatches{}, nil, errors.Join(failures...)
}

// openPair returns the watches of contents and classes, or an error that names those that cannot be listed.
func openPair[T, C object, L, M runtime.Object](
	ctx context.Context, contents kube.Source[L], classes kube.Source[M],
) (w watches[T, C], _ []kube.Watch, err error) {
	if err = errors.Join(probe(ctx, contents), probe(ctx, classes)); err != nil {
		return w, nil, err
	}
	w.version = contents.Resource.Version
	both := make([]kube.Watch, 2)
	w.contents, both[0] = kube.NewInformer[T](contents)
	w.classes, both[1] = kube.NewInformer[C](classes)
	return w, both, nil
}

// probe returns an error that names the resource unless it can be listed.
func probe[L runtime.Object](ctx context.Context, s kube.Source[L]) error {
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
func indexers[T object](view func(T) *content) cache.Indexers {
	index := func(value func(*content) string) cache.IndexFunc {
		return func(obj any) ([]string, error) {
			if o, ok := obj.(T); ok {
				if v := value(view(o)); v != "" {
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
