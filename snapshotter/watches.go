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

// watches holds the informers of one pair of resources, contents and classes, while the API server
// serves both.
type watches[T, C object] struct {
	contents    kube.Informer[T]
	classes     kube.Informer[C]
	version     string          // of the API
	unavailable <-chan struct{} // closed when one of the resources cannot be listed any more
}

type (
	snapshotWatches = watches[*snapshotv1.VolumeSnapshotContent, *snapshotv1.VolumeSnapshotClass]
	groupWatches    = watches[*groupv1.VolumeGroupSnapshotContent, *groupv1.VolumeGroupSnapshotClass]
)

// slot holds the watches of a pair of resources, or why there are none.
type slot[W any] struct {
	mu      sync.Mutex
	watches *W            // nil: none
	changed chan struct{} // closed at each change
	idle    error         // why there are none
}

func newSlot[W any]() *slot[W] {
	return &slot[W]{changed: make(chan struct{}), idle: errors.New("the snapshot resources have not been listed yet")}
}

// get returns the watches, which are nil if there are none, and a channel that is closed at the next
// change.
func (s *slot[W]) get() (watches *W, changed <-chan struct{}, idle error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.watches, s.changed, s.idle
}

// set sets the watches, or why there are none. It reports whether the reason is a new one.
func (s *slot[W]) set(watches *W, idle error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	isNew := idle != nil && (s.idle == nil || s.idle.Error() != idle.Error())
	s.watches, s.idle = watches, idle
	close(s.changed)
	s.changed = make(chan struct{})
	return isNew
}

// waiting sets why there are no watches yet. It reports whether there are none, and the reason is a new
// one.
func (s *slot[W]) waiting(reason error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.watches != nil {
		return false
	}
	isNew := s.idle == nil || s.idle.Error() != reason.Error()
	s.idle = reason
	return isNew
}

// wait waits until there are watches, and returns nil when ctx ends.
func (s *slot[W]) wait(ctx context.Context) *W { return s.waitOther(ctx, nil) }

// waitOther waits until the watches are not those of before, and returns them, or nil when ctx ends.
func (s *slot[W]) waitOther(ctx context.Context, before *W) *W {
	for {
		watches, changed, _ := s.get()
		if watches != before {
			return watches
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// Serve watches the snapshot resources on every replica, until ctx ends. While their CRDs are not
// installed, or listing them is forbidden, the controller is idle.
func (c *Controller) Serve(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() {
		keep(ctx, c.cfg.RecheckInterval, c.snapshots, c.openSnapshots, "Idle: snapshot resources cannot be listed")
	})
	if reason := c.groupsOff(); reason != nil {
		if c.groups.set(nil, reason) && c.cfg.Groups && c.deps.Driver.Plugin.GroupControllerService {
			klog.FromContext(ctx).Info(logGroupsOff, "reason", reason.Error())
		}
	} else {
		wg.Go(func() { keep(ctx, c.cfg.RecheckInterval, c.groups, c.openGroups, logGroupsOff) })
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

// opened is the result of an attempt to watch.
type opened[W any] struct {
	// run returns when ctx ends, or when a resource cannot be listed any more, with the cause.
	run func(ctx context.Context) error
}

// keep keeps the watches of s open until ctx ends, and logs idle while they are not. After a failure it waits, at most for longest.
func keep[W any](
	ctx context.Context, longest time.Duration, s *slot[W], open func(context.Context) (opened[W], error), idle string,
) {
	backoff := kube.RecheckBackoff(longest)
	for ctx.Err() == nil {
		o, err := open(ctx)
		if err == nil {
			backoff = kube.RecheckBackoff(longest)
			err = o.run(ctx)
		}
		if ctx.Err() == nil && s.set(nil, err) {
			klog.FromContext(ctx).Info(idle, "reason", err.Error(), "recheckedWithin", longest.String())
		}
		select {
		case <-ctx.Done():
		case <-time.After(backoff.Step()):
		}
	}
	s.set(nil, context.Cause(ctx))
}

// openSnapshots watches VolumeSnapshotContents and VolumeSnapshotClasses if they can be listed.
func (c *Controller) openSnapshots(ctx context.Context) (opened[snapshotWatches], error) {
	errs := newWatchErrors(c.cfg.RecheckInterval / 3)
	contents := c.watchClients.contents.source(func(o *snapshotv1.VolumeSnapshotContent) bool { return o.Spec.Driver != c.driver.name },
		indexers(snapshotContent), errs.failed)
	if c.cfg.NodeDeployment {
		contents.Selector = metav1.FormatLabelSelector(&metav1.LabelSelector{MatchLabels: map[string]string{
			LabelManagedBy: c.cfg.NodeName}})
	}
	classes := c.watchClients.classes.source(func(o *snapshotv1.VolumeSnapshotClass) bool {
		if o.Driver != c.driver.name {
			*o = snapshotv1.VolumeSnapshotClass{ObjectMeta: stub(o.ObjectMeta), Driver: o.Driver}
		}
		return false
	}, nil, errs.failed)
	errs.probe = probes(contents, classes)
	if err := errors.Join(probe(ctx, contents, c.watchClients.contents.resource),
		probe(ctx, classes, c.watchClients.classes.resource)); err != nil {
		return opened[snapshotWatches]{}, err
	}
	return openPair[*snapshotv1.VolumeSnapshotContent, *snapshotv1.VolumeSnapshotClass](c.snapshots, contents, classes, errs, "v1"), nil
}

// openGroups watches VolumeGroupSnapshotContents and VolumeGroupSnapshotClasses in the first version
// in which they can be listed.
func (c *Controller) openGroups(ctx context.Context) (opened[groupWatches], error) {
	var failures []error
	for _, version := range groupVersions {
		clients, errs := c.watchClients.groups[version], newWatchErrors(c.cfg.RecheckInterval/3)
		contents := clients.contents.source(func(o *groupv1.VolumeGroupSnapshotContent) bool { return o.Spec.Driver != c.driver.name },
			indexers(groupContent), errs.failed)
		classes := clients.classes.source(func(o *groupv1.VolumeGroupSnapshotClass) bool {
			if o.Driver != c.driver.name {
				*o = groupv1.VolumeGroupSnapshotClass{ObjectMeta: stub(o.ObjectMeta), Driver: o.Driver}
			}
			return false
		}, nil, errs.failed)
		errs.probe = probes(contents, classes)
		err := errors.Join(probe(ctx, contents, clients.contents.resource), probe(ctx, classes, clients.classes.resource))
		if err == nil {
			return openPair[*groupv1.VolumeGroupSnapshotContent, *groupv1.VolumeGroupSnapshotClass](
				c.groups, contents, classes, errs, version), nil
		}
		failures = append(failures, err)
	}
	old := c.watchClients.groups[groupVersionOld].contents
	if _, err := old.List(ctx, metav1.ListOptions{Limit: 1}); err == nil {
		return opened[groupWatches]{}, fmt.Errorf("the API server serves %s only in version %s. Upgrade the CRDs and the "+
			"snapshot-controller to those of external-snapshotter 8.4 or later", old.resource.GroupResource(), groupVersionOld)
	}
	return opened[groupWatches]{}, errors.Join(failures...)
}

// probes returns a function that returns the errors of listing both resources.
func probes[L, M runtime.Object](contents kube.Source[L], classes kube.Source[M]) func(context.Context) error {
	return func(ctx context.Context) error { return errors.Join(contents.Probe(ctx), classes.Probe(ctx)) }
}

// probe returns an error that names resource unless it can be listed.
func probe[L runtime.Object](ctx context.Context, s kube.Source[L], resource schema.GroupVersionResource) error {
	err := s.Probe(ctx)
	name := resource.GroupResource().String()
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%s are not served in version %s. Install the CRDs of external-snapshotter", name, resource.Version)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("listing %s is forbidden. Grant list and watch: %w", name, err)
	case err != nil:
		return fmt.Errorf("listing %s in version %s: %w", name, resource.Version, err)
	}
	return nil
}

// watchErrors handles the errors of the lists and watches of a pair of resources.
type watchErrors struct {
	unavailable chan struct{} // closed when one of the resources cannot be listed any more
	suspected   chan struct{} // has an element after an error that means so if it lasts
	patience    time.Duration // how long it must last
	probe       func(context.Context) error
	// waiting is called for other errors, and reports whether to log one. Set it before the informers run.
	waiting func(error) bool

	mu     sync.Mutex
	logged time.Time // when isDue last returned true
}

// isDue reports whether to log an error of resources that were watched before: one per minute. An expired watch is no error.
func (e *watchErrors) isDue(err error, now time.Time) bool {
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	due := now.Sub(e.logged) >= time.Minute
	if due {
		e.logged = now
	}
	return due
}

func newWatchErrors(patience time.Duration) *watchErrors {
	return &watchErrors{unavailable: make(chan struct{}), suspected: make(chan struct{}, 1), patience: patience}
}

// lasting returns why a resource is not available, or nil once both can be listed.
func (e *watchErrors) lasting(ctx context.Context) error {
	for began := time.Now(); ; {
		err := e.probe(ctx)
		switch {
		case !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err): // the informers retry after other errors
			return nil
		case time.Since(began) >= e.patience:
			return fmt.Errorf("a watched resource is not available any more: %w", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(e.patience / 10):
		}
	}
}

// failed is called for each error of a list or watch. The informer retries all of them.
func (e *watchErrors) failed(resource string, err error) {
	switch {
	case apierrors.IsNotFound(err), apierrors.IsForbidden(err):
		select {
		case e.suspected <- struct{}{}:
		default:
		}
	case e.waiting(fmt.Errorf("listing and watching the snapshot resources: %w", err)), e.isDue(err, time.Now()):
		klog.Background().Info("List or watch of snapshot resources failed, retrying", "resource", resource, "err", err)
	default:
		klog.Background().V(2).Info("List or watch of snapshot resources failed, retrying", "resource", resource, "err", err)
	}
}

// openPair creates the informers and the function that runs them, and that publishes them in s once
// they are synced.
func openPair[T, C object, L, M runtime.Object](
	s *slot[watches[T, C]], contents kube.Source[L], classes kube.Source[M], errs *watchErrors, version string,
) opened[watches[T, C]] {
	w := &watches[T, C]{version: version, unavailable: errs.unavailable}
	errs.waiting = s.waiting
	var runContents, runClasses func(context.Context)
	w.contents, runContents = kube.NewInformer[T](contents)
	w.classes, runClasses = kube.NewInformer[C](classes)
	return opened[watches[T, C]]{func(ctx context.Context) error {
		ctx, cancel := context.WithCancel(ctx)
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		defer s.set(nil, errClosed) // before the informers stop
		wg.Go(func() { runContents(ctx) })
		wg.Go(func() { runClasses(ctx) })
		synced := make(chan struct{})
		wg.Go(func() {
			if cache.WaitForCacheSync(ctx.Done(), w.contents.Synced, w.classes.Synced) {
				close(synced)
			}
		})
		for {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-errs.suspected:
				if err := errs.lasting(ctx); err != nil {
					close(errs.unavailable)
					return err
				}
			case <-synced:
				s.set(w, nil) // here: they are not set after they were removed
				synced = nil
			}
		}
	}}
}

// errClosed is the state of a slot whose watches end.
var errClosed = errors.New("the watches are closed")

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
	c.snapshots.wait(ctx)
	return context.Cause(ctx)
}

// Ready returns a warning while the controller is idle.
func (c *Controller) Ready() error {
	if _, _, idle := c.snapshots.get(); idle != nil {
		return metrics.Warning("snapshotter idle: " + idle.Error())
	}
	return nil
}
