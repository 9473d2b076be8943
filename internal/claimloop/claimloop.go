// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package claimloop runs controllers of PersistentVolumeClaims and of the pods that use them. It has the
// watches, the queue and the caches; a controller decides what a claim needs, and writes it.
package claimloop

import (
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Settings are the settings of all loops.
type Settings struct {
	Workers                              int
	Timeout                              time.Duration // of each request, or of a read and the deletion that depends on it
	RetryIntervalStart, RetryIntervalMax time.Duration
}

// Deps are the dependencies of a controller. All fields are required.
type Deps struct {
	Client    kubernetes.Interface
	Informers *kube.Informers
	Events    record.EventRecorder
	Registry  prometheus.Registerer
	Queues    *workloop.Metrics
}

// Config describes a controller.
type Config struct {
	Settings
	Name string // of the queue
	Pods bool   // whether the pods of claims are watched, which costs memory
	// Concerns reports whether a claim may need something. Other claims are not enqueued.
	Concerns func(*corev1.PersistentVolumeClaim) bool
	// Sync reconciles a claim, and again at the time that it returns unless that is zero.
	Sync func(context.Context, *Term, *corev1.PersistentVolumeClaim) (again time.Time, err error)
	// Handle adds handlers of other objects; enqueue takes the key of a claim. It may be nil.
	Handle func(r *kube.Registrations, enqueue func(key string))
	// Forget is called when a claim was deleted, or does not concern the controller any more. It may be nil.
	Forget func(types.UID)
}

// Loop runs one controller. A nil Loop has nothing to do.
type Loop struct {
	cfg    Config
	deps   Deps
	claims kube.Informer[*corev1.PersistentVolumeClaim]
	pods   kube.Informer[*corev1.Pod]
}

// New requests the watches of claims and, if necessary, of pods.
func New(cfg Config, deps Deps) *Loop {
	l := &Loop{cfg: cfg, deps: deps, claims: deps.Informers.Claims()}
	if cfg.Pods {
		l.pods = deps.Informers.IfAllowed().Pods()
	}
	return l
}

// Term holds what lasts from becoming leader until losing the Lease.
type Term struct {
	*Loop
	Claims *kube.MutationCache[*corev1.PersistentVolumeClaim]
	Pods   *kube.ClaimUsers // nil if they are not watched
	queue  *workloop.Loop[string]
}

// jitter spreads retries after a failure of the API server.
const jitter = 0.2

// Run reconciles claims until ctx ends, and returns after the last worker has stopped. It may be called again.
func (l *Loop) Run(ctx context.Context) error {
	if l == nil {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	t := &Term{Loop: l, Claims: kube.NewMutationCache(l.claims)}
	t.queue = workloop.New(workloop.Config{
		Name: l.cfg.Name, RetryStart: l.cfg.RetryIntervalStart, RetryMax: l.cfg.RetryIntervalMax, Jitter: jitter,
		GracePeriod: l.cfg.Timeout,
	}, l.deps.Queues, t.sync)
	defer t.queue.Stop()
	registrations := &kube.Registrations{}
	defer registrations.Remove()
	registrations.Add(l.claims.Handle(kube.Handlers[*corev1.PersistentVolumeClaim]{
		Add: t.enqueue, Update: t.updated, Delete: t.deleted,
	}))
	if l.cfg.Pods {
		t.Pods = kube.NewClaimUsers(l.pods)
		registrations.AddUnawaited(t.Pods.Handle(t.enqueueKey))
	}
	if l.cfg.Handle != nil {
		l.cfg.Handle(registrations, t.enqueueKey)
	}
	if err := registrations.Wait(ctx, "caches of "+l.cfg.Name); err != nil {
		return err
	}
	t.queue.Run(ctx, l.cfg.Workers)
	return context.Cause(ctx)
}

func (t *Term) enqueue(pvc *corev1.PersistentVolumeClaim) {
	if t.cfg.Concerns(pvc) {
		t.queue.Add(kube.Key(pvc))
	}
}

func (t *Term) enqueueKey(key string) {
	if pvc, ok := t.claims.Get(key); ok {
		t.enqueue(pvc)
	}
}

func (t *Term) updated(old, pvc *corev1.PersistentVolumeClaim) {
	if old.UID != pvc.UID || !t.cfg.Concerns(pvc) { // another UID: recreated while the watch was interrupted
		t.forget(old)
	}
	if old.ResourceVersion != pvc.ResourceVersion {
		t.enqueue(pvc)
	}
}

func (t *Term) deleted(pvc *corev1.PersistentVolumeClaim) {
	t.forget(pvc)
	t.queue.Forget(kube.Key(pvc))
}

func (t *Term) forget(pvc *corev1.PersistentVolumeClaim) {
	if t.cfg.Forget != nil {
		t.cfg.Forget(pvc.UID)
	}
}

// sync reconciles the claim of key.
func (t *Term) sync(ctx context.Context, key string) (time.Time, error) {
	pvc, ok := t.Claims.Get(key)
	if !ok {
		return time.Time{}, nil
	}
	return t.cfg.Sync(klog.NewContext(ctx, klog.FromContext(ctx).WithValues("persistentVolumeClaim", key)), t, pvc)
}

// reasonBlocked is the reason of the event about a missing permission.
const reasonBlocked = "NodeCleanupBlocked"

// Failed completes err, of a request for pvc, if a permission, a policy or a webhook refuses it, and emits an event about it.
// permission is VERBS on RESOURCE.
func (t *Term) Failed(pvc *corev1.PersistentVolumeClaim, permission string, err error) error {
	switch {
	case apierrors.IsForbidden(err):
		err = fmt.Errorf("%w. Grant %s to the ServiceAccount", err, permission)
	case kube.IsRefused(err):
		err = fmt.Errorf("%w. Correct the policy or webhook that refuses it", err)
	default:
		return err
	}
	t.deps.Events.Event(pvc, corev1.EventTypeWarning, reasonBlocked, err.Error())
	return err
}
