// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"syscall"
	"time"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
	"github.com/storage-controller/storage-controller/test/simulation/cluster"
)

// errNetwork is the error of a request or response that is lost.
var errNetwork error = syscall.ECONNABORTED

// errDead is the error of a request of a process that was killed.
var errDead = errors.New("killed")

// hooks lets the requests of the replicas wait at the gate. Lists and watches that fill the caches of informers do not wait, and
// fail during a partition. The events that watches deliver later wait, and of some processes also the end of each initial list.
func (s *simulation) hooks() apiserver.Hooks {
	return apiserver.Hooks{
		Before: s.before, After: s.after, Deliver: s.deliver, WatchTimeout: s.watchTimeout, Cached: s.cached, Late: s.isLate,
		Mutate: s.mutate,
	}
}

// watchTimeout returns the time of a watch. Those of client-go are random, and it begins watches in random order.
func (s *simulation) watchTimeout(r apiserver.Request, _ time.Duration) time.Duration {
	h := fnv.New32a()
	fmt.Fprint(h, r.Client, r.Resource, s.api.Version())
	return 5*time.Minute + time.Duration(h.Sum32()%300)*time.Second
}

// cached returns the version that the API server of a process has observed.
func (s *simulation) cached(r apiserver.Request) uint64 {
	if from, ok := s.caches.Load(r.Client); ok {
		return from.(*replica).observed.Load()
	}
	return math.MaxUint64
}

// replicaOf returns the replica that sent r; nil: the cluster.
func (s *simulation) replicaOf(r apiserver.Request) *replica {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.processes[r.Client]
}

func (s *simulation) before(ctx context.Context, r apiserver.Request) error {
	from := s.replicaOf(r)
	if from == nil {
		return nil
	}
	if resumed := from.suspension.wait(); resumed != nil && (r.Verb == "watch" || isForCache(r)) {
		select {
		case <-resumed:
		case <-from.dead:
		}
	}
	if err := ctx.Err(); err != nil { // a client sends no request then
		return err
	}
	s.mayRequest(from, r)
	began, late := time.Now(), false
	defer func() {
		if !late { // else it is executed now, before another operation continues
			outlast(ctx, began)
		}
	}()
	switch {
	case r.Resource.Resource == "events": // not errDead, after which the client would wait for a random time
		return apierrors.NewForbidden(r.Resource.GroupResource(), r.Name, errors.New("not simulated"))
	case from.killed():
		return errDead
	case from.unreachable.Load() && (r.Verb == "watch" || isForCache(r)):
		return errNetwork
	case r.Verb == "watch" && r.Initial && s.scale.oldServers:
		return apierrors.NewInvalid(metav1.SchemeGroupVersion.WithKind("ListOptions").GroupKind(), "", field.ErrorList{
			field.Forbidden(field.NewPath("sendInitialEvents"), "the feature gate WatchList is disabled")})
	case r.Verb == "watch" || isForCache(r):
		select {
		case <-from.opened:
		case <-from.dead:
		}
		switch {
		case from.killed():
			return errDead
		case r.Verb == "list":
			return nil
		}
		s.mu.Lock()
		from.unlisted[r.Resource] = nil
		if r.Initial {
			from.listed[r.Resource] = s.api.Version()
		}
		s.mu.Unlock()
		return nil
	}
	o := &operation{
		replica: from, kind: request, name: describe(r), verb: r.Verb, lease: isLease(r), body: string(r.Body), key: keyOf(ctx),
	}
	if r.Verb != "get" && r.Verb != "list" && !o.lease {
		o.late = func() { s.executeLate(o, r) }
	}
	s.nodeControllerDeletes(from, r)
	s.releases(from, r)
	v, ok := s.gate.wait(ctx, o)
	s.tried(from, r)
	if !ok {
		return cmp.Or(ctx.Err(), errDead)
	}
	if v.err == nil {
		v.err = s.denied(r)
	}
	if v.err != nil {
		return v.err
	}
	v.executed = s.observe(from, r)
	late = v.late
	if late {
		s.late.Store(r.ID, true)
		if o.late != nil {
			v.executed = s.observeLate(o, r)
		}
	}
	s.mu.Lock()
	s.verdicts[r.ID] = v
	s.mu.Unlock()
	return nil
}

// createLimit is the time after the end of a request to create a LogicalVolume within which it takes effect, if it does. The product
// relies on it, because no test of a version can refuse a late one. An API server ends a request after a minute by default.
const createLimit = 2 * time.Minute

// executeLate executes the write r of o after its client has given up.
func (s *simulation) executeLate(o *operation, r apiserver.Request) {
	if r.Resource == cluster.LogicalVolumes && r.Verb == "create" && time.Since(o.gaveUp) > createLimit {
		s.record("%s %s has no effect, because it is too late", o.replica.client, o.name)
		return
	}
	s.tookEffectLate(o, r, r.Execute())
}

// tookEffectLate records the write r of o, which was executed after its client had given up.
func (s *simulation) tookEffectLate(o *operation, r apiserver.Request, result apiserver.Result) {
	switch {
	case result.Object == nil:
	case r.Resource == cluster.Claims && r.Verb == "patch":
		s.recorded(o.replica, r)
	case isOf("nodecontroller", r):
		s.forces(r, result)
	}
}

// isForCache reports whether r is a list that fills a cache.
func isForCache(r apiserver.Request) bool { return r.Verb == "list" && isOf("watch", r) }

// after delays or loses the response to r, as decided when it was executed.
func (s *simulation) after(ctx context.Context, r apiserver.Request, result apiserver.Result) error {
	s.mu.Lock()
	v, ok := s.verdicts[r.ID]
	delete(s.verdicts, r.ID)
	from := s.processes[r.Client]
	s.mu.Unlock()
	if from != nil && r.Resource == cluster.Claims && r.Verb == "patch" && result.Object != nil {
		s.recorded(from, r)
	}
	if from != nil && isForCache(r) && result.Object != nil {
		return meta.EachListItem(result.Object, func(obj runtime.Object) error {
			s.shows(from, r, obj.(metav1.Object))
			return nil
		})
	}
	if !ok {
		return nil
	}
	defer outlast(ctx, time.Now())
	received := v.executed(result)
	if err := ctx.Err(); err != nil && !v.late {
		return err
	}
	if v.delay {
		o := &operation{replica: from, kind: response, name: "response to " + describe(r), lease: isLease(r), key: keyOf(ctx)}
		arrives, ok := s.gate.wait(ctx, o)
		if !ok {
			return cmp.Or(ctx.Err(), errDead)
		}
		if arrives.late {
			s.late.Store(r.ID, true)
		}
		v.lost = arrives.lost
	}
	if v.lost == nil {
		received()
	}
	return v.lost
}

// deliver lets an event of a watch wait, unless it belongs to the initial list. The cache has the list after the bookmark.
func (s *simulation) deliver(ctx context.Context, r apiserver.Request, kind watch.EventType, obj metav1.Object) error {
	from := s.replicaOf(r)
	_, complete := obj.GetAnnotations()[metav1.InitialEventsAnnotationKey]
	switch {
	case from == nil || kind == watch.Bookmark && !(complete && from.slow):
		return nil
	case from.killed():
		return errDead
	}
	s.mu.Lock()
	initial := kind == watch.Added && version(obj) <= from.listed[r.Resource]
	if initial && from.slow {
		from.unlisted[r.Resource] = append(from.unlisted[r.Resource], obj)
	}
	s.mu.Unlock()
	switch {
	case initial && from.slow:
		return nil
	case initial:
		s.shows(from, r, obj)
		return nil
	}
	name := fmt.Sprintf("watch %s %s %s @%s",
		r.Resource.Resource, kind, nameOf(obj.GetNamespace(), obj.GetName()), obj.GetResourceVersion())
	v, ok := s.gate.wait(ctx, &operation{replica: from, kind: event, name: name})
	if !ok {
		return errDead
	}
	shown := []metav1.Object{obj}
	if complete {
		s.mu.Lock()
		shown, from.unlisted[r.Resource] = from.unlisted[r.Resource], nil
		s.mu.Unlock()
	}
	for _, obj := range shown {
		if v.err == nil {
			s.shows(from, r, obj)
		}
	}
	return v.err
}

// shows records that a watch, or a list for a cache, shows obj to a replica.
func (s *simulation) shows(to *replica, r apiserver.Request, obj metav1.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch r.Resource {
	case cluster.Attachments:
		to.attachments[obj.GetUID()] = true
	case cluster.Volumes:
		s.checker.read.shown(to, obj.(*corev1.PersistentVolume))
	case cluster.Contents:
		s.checker.taken.read.shown(to, cluster.TypedOf[snapshotv1.VolumeSnapshotContent](s.cluster, obj))
	}
}

func isLease(r apiserver.Request) bool { return r.Resource.Group == coordinationv1.GroupName }

// describe returns the verb and the object of r.
func describe(r apiserver.Request) string {
	text := r.Verb + " " + r.Resource.Resource
	if r.Subresource != "" {
		text += "/" + r.Subresource
	}
	if r.Name != "" || r.Namespace != "" {
		text += " " + nameOf(r.Namespace, r.Name)
	}
	return text
}

func nameOf(namespace, name string) string {
	if namespace == "" {
		return name
	}
	return namespace + "/" + name
}
