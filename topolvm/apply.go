// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"context"
	"encoding/json"
	"time"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// run waits for the caches, and repeats next, which gathers and decides, and applying its step until the call has an answer: a
// LogicalVolume, nil, or an error.
func (s *Service) run(
	ctx context.Context, operation string, next func(context.Context, *call) (step, error),
) (lv *LogicalVolume, err error) {
	c, err := s.synced(ctx)
	if err != nil {
		return nil, err
	}
	k := &call{
		s: s, c: c, changed: make(chan struct{}, 1), known: map[string]bool{}, seen: map[types.UID]seen{},
		nodes: map[string]*corev1.Node{}, sources: map[string]*LogicalVolume{},
	}
	defer func() {
		k.unfollow()
		s.metrics.waited(operation, k.waited, err)
	}()
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("operation", operation))
	for {
		decided, err := next(ctx, k)
		if err != nil {
			return nil, err
		}
		klog.FromContext(ctx).V(2).Info("Decided", "action", decided.action)
		if decided.action == doAnswer {
			if decided.later && k.c.waits.leave(decided.lv.Name) {
				continue // it may have changed since it was gathered
			}
			return decided.lv, decided.err
		}
		applied, err := k.apply(ctx, decided)
		if err == nil && applied {
			err = decided.err
		}
		if err != nil {
			return nil, err
		}
	}
}

// apply performs s. It returns false if the LogicalVolume has changed since the decision, which has to be made again.
func (k *call) apply(ctx context.Context, s step) (applied bool, err error) {
	switch s.action {
	case doWait:
		return true, k.wait(ctx, s)
	case doReadVolume:
		return true, k.readVolume(ctx, s.lv.Name)
	case doReadNode:
		return true, k.readNode(ctx, s)
	case doReadSource:
		return true, k.readSource(ctx, s.lv)
	case doCreate:
		return true, k.create(ctx, s.lv)
	case doDelete:
		return k.delete(ctx, s)
	default:
		return k.resize(ctx, s)
	}
}

// wait waits for a change, for the time of s, or for the end of ctx.
func (k *call) wait(ctx context.Context, s step) error {
	if s.works {
		k.awaited = s.lv.UID
		if k.before == nil {
			k.before, k.since = &s.lv.Status, k.s.now()
		}
	}
	began := time.Now()
	defer func() { k.waited += time.Since(began) }()
	var expired <-chan time.Time
	if !s.until.IsZero() {
		timer := time.NewTimer(s.until.Sub(k.s.now()))
		defer timer.Stop()
		expired = timer.C
	}
	select {
	case <-k.changed:
	case <-expired:
	case <-ctx.Done():
		return contextError(ctx, subjectOf(s.lv), "waiting for topolvm-node", "topolvm-node")
	}
	return nil
}

// observed returns lv, as the API server has returned it, after recording it as an own write.
func (k *call) observed(lv *LogicalVolume) *LogicalVolume {
	trim(k.s.names, lv)
	k.c.lvs.Observe(lv)
	was := k.seen[lv.UID]
	k.seen[lv.UID] = seen{read: true, began: was.began || !lv.exists(), removed: was.removed}
	return lv
}

// readLive returns the LogicalVolume from the API server, or nil if there is none. What the cache has after the response may be newer, so
// only what it had before counts as deleted.
func (k *call) readLive(ctx context.Context, name string) (*LogicalVolume, error) {
	before, cached := k.c.lvs.Get(name)
	live, err := k.s.client.Get(ctx, name, metav1.GetOptions{})
	if cached && (kube.IsNotFound(err) || err == nil && live.UID != before.UID) {
		k.c.lvs.MarkDeleted(before)
	}
	switch {
	case kube.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, apiError(ctx, subject{lv: name}, "reading it", err)
	}
	return k.observed(live), nil
}

// readVolume has the next state contain the LogicalVolume as it is at the API server.
func (k *call) readVolume(ctx context.Context, name string) error {
	live, err := k.readLive(ctx, name)
	if err == nil && live == nil {
		k.absent = name
	}
	return err
}

// readSource confirms the source of lv.
func (k *call) readSource(ctx context.Context, lv *LogicalVolume) error {
	live, err := k.readLive(ctx, lv.Spec.Source)
	if err == nil {
		k.sources[lv.Spec.Source] = live
	}
	return err
}

// readNode reads the Node with the topology value of s, which is also its name. The label of a Node that the cache lacks is not searched
// for, because topolvm-node uses the name.
func (k *call) readNode(ctx context.Context, s step) error {
	if len(validation.IsDNS1123Subdomain(s.value)) > 0 { // no Node can have this name
		k.nodes[s.value] = nil
		return nil
	}
	live, err := k.s.nodes.Get(ctx, s.value, metav1.GetOptions{})
	switch {
	case kube.IsNotFound(err):
		k.nodes[s.value] = nil
		return nil
	case err != nil:
		return apiError(ctx, subjectOf(s.lv), "reading the Node", err)
	}
	k.nodes[s.value] = live
	return nil
}

// create creates lv. If another client has created it meanwhile, the next state contains that.
func (k *call) create(ctx context.Context, lv *LogicalVolume) error {
	created, err := k.s.client.Create(ctx, lv, metav1.CreateOptions{})
	switch {
	case apierrors.IsAlreadyExists(err):
		return k.readVolume(ctx, lv.Name)
	case apierrors.IsForbidden(err):
		return subjectOf(lv).errorf(codes.Internal, "creating it: forbidden: %v. Grant the permission to the ServiceAccount", err)
	case apierrors.IsInvalid(err):
		return subjectOf(lv).errorf(codes.Internal, "creating it: %v. Check the CustomResourceDefinition and the admission policies", err)
	case err != nil:
		if !kube.IsRefused(err) && !apierrors.IsTooManyRequests(err) {
			k.s.unanswered.add(lv.Name, k.s.now())
		}
		return apiError(ctx, subjectOf(lv), "creating it", err)
	}
	k.awaited = k.observed(created).UID
	klog.FromContext(ctx).Info("LogicalVolume created", "logicalVolume", klog.KRef("", lv.Name), "node", klog.KRef("", lv.Spec.NodeName),
		"deviceClass", lv.Spec.DeviceClass, "size", lv.Spec.Size.String())
	return nil
}

// delete requests the deletion of the LogicalVolume. topolvm-node removes the finalizer after it has removed the LVM volume.
func (k *call) delete(ctx context.Context, s step) (applied bool, err error) {
	lv := s.lv
	preconditions := &metav1.Preconditions{UID: &lv.UID}
	if s.exact {
		preconditions.ResourceVersion = &lv.ResourceVersion
	}
	err = k.s.client.Delete(ctx, lv.Name, metav1.DeleteOptions{Preconditions: preconditions})
	switch {
	case kube.IsNotFound(err):
		k.c.lvs.MarkDeleted(lv)
		return true, nil
	case apierrors.IsConflict(err):
		return false, k.readVolume(ctx, lv.Name)
	case err != nil && s.exact && ctx.Err() == nil:
		return false, subjectOf(lv).errorf(codes.Aborted, "deleting it, so that it can be created again: %v. Repeat the call", err)
	case err != nil:
		return false, apiError(ctx, subjectOf(lv), "deleting it", err)
	}
	was := k.seen[lv.UID]
	was.removed = true
	k.seen[lv.UID] = was
	klog.FromContext(ctx).Info("LogicalVolume deletion requested", "logicalVolume", klog.KRef("", lv.Name),
		"node", klog.KRef("", lv.Spec.NodeName))
	return true, nil
}

// resize changes spec.size in the version of the decision, so that it never reverts a change of another writer.
func (k *call) resize(ctx context.Context, s step) (applied bool, err error) {
	lv, change := s.lv, map[string]any{"spec": map[string]any{"size": s.size}}
	metadata := map[string]any{"uid": lv.UID, "resourceVersion": lv.ResourceVersion}
	if s.retry {
		metadata["annotations"] = map[string]string{k.s.names.resizeRequested(): k.s.now().UTC().Format(time.RFC3339)}
	}
	change["metadata"] = metadata
	data, err := json.Marshal(change)
	if err != nil {
		return false, err
	}
	patched, err := k.s.client.Patch(ctx, lv.Name, types.MergePatchType, data, metav1.PatchOptions{})
	switch {
	case apierrors.IsConflict(err), kube.IsNotFound(err):
		return false, k.readVolume(ctx, lv.Name)
	case err != nil && s.err != nil && ctx.Err() == nil:
		return false, subjectOf(lv).errorf(codes.Aborted, "topolvm-node failed, and so did resetting spec.size: %v. Repeat the call", err)
	case err != nil:
		return false, apiError(ctx, subjectOf(lv), "changing spec.size", err)
	}
	patched = k.observed(patched)
	if s.retry {
		k.before, k.since = &patched.Status, k.s.now()
	}
	klog.FromContext(ctx).Info("LogicalVolume spec.size changed", "logicalVolume", klog.KRef("", lv.Name), "from", lv.Spec.Size.String(),
		"to", s.size.String())
	return true, nil
}
