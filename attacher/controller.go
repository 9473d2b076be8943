// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/keylock"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tracing"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Publisher declares the RPCs of the driver that the attacher calls.
type Publisher interface {
	ControllerPublishVolume(context.Context, *csi.ControllerPublishVolumeRequest, ...grpc.CallOption) (
		*csi.ControllerPublishVolumeResponse, error)
	ControllerUnpublishVolume(context.Context, *csi.ControllerUnpublishVolumeRequest, ...grpc.CallOption) (
		*csi.ControllerUnpublishVolumeResponse, error)
	ListVolumes(context.Context, *csi.ListVolumesRequest, ...grpc.CallOption) (*csi.ListVolumesResponse, error)
}

// Deps holds the dependencies of a [Controller]. All fields but Locks are required.
type Deps struct {
	Driver    csiclient.Driver
	Client    kubernetes.Interface // of this role: see kube.ForRole
	Informers *kube.Informers
	CSI       Publisher
	// Ready blocks until the driver can be called.
	Ready    func(context.Context) error
	Registry prometheus.Registerer
	Queues   *workloop.Metrics
	// Locks keeps the node controller from deleting a PersistentVolume during a CSI call for its volume.
	Locks *keylock.Locks[string]
}

// Controller attaches and detaches the volumes of a driver.
type Controller struct {
	cfg     Config
	deps    Deps
	driver  driver
	metrics *metrics

	attachments kube.Informer[*storagev1.VolumeAttachment]
	volumes     kube.Informer[*corev1.PersistentVolume]
	csiNodes    kube.Informer[*storagev1.CSINode] // only if the driver publishes

	term atomic.Pointer[term] // nil without the Lease
}

// New validates cfg and requests the informers that the controller needs. It starts
// nothing; see [Controller.Run].
func New(cfg Config, deps Deps) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	c := &Controller{
		cfg: cfg, deps: deps, metrics: newMetrics(deps.Registry),
		driver: driver{
			name: deps.Driver.Name, finalizer: Finalizer(deps.Driver.Name), defaultFSType: cfg.DefaultFSType, caps: deps.Driver.Controller,
		},
		attachments: deps.Informers.Attachments(), volumes: deps.Informers.Volumes(),
	}
	if c.driver.caps.PublishUnpublishVolume {
		c.csiNodes = deps.Informers.CSINodes()
	}
	return c, nil
}

// LeaseName returns the name of the Lease of csi-attacher for driver.
func LeaseName(driver string) string { return election.LeaseName("external-attacher-leader-" + driver) }

// term holds the state between acquiring and releasing the Lease. It is discarded
// afterwards, because another replica may have changed the objects in between.
type term struct {
	c           *Controller
	attachments *kube.TermCache[*storagev1.VolumeAttachment]
	volumes     *kube.TermCache[*corev1.PersistentVolume]
	vaQueue     *workloop.Loop[attachmentKey]
	pvQueue     *workloop.Loop[string]
	outOfSync   outOfSync
	// calls has the calls for VolumeAttachments, by UID, until their result is in the status or the volume is unpublished.
	calls   *intent.Ledger[types.UID, lastCall]
	running keylock.Locks[string] // calls, by the name of the VolumeAttachment
}

// Run reconciles until ctx ends and returns after the last worker has stopped. It may be
// called again afterwards.
func (c *Controller) Run(ctx context.Context) error {
	t := &term{
		c:           c,
		attachments: kube.NewTermCache(c.attachments), volumes: kube.NewTermCache(c.volumes),
	}
	t.calls = intent.NewLedger[types.UID, lastCall](election.MayCall)
	loop := workloop.Config{
		RetryStart: c.cfg.RetryIntervalStart, RetryMax: c.cfg.RetryIntervalMax,
		WaitReady: c.deps.Ready, GracePeriod: c.cfg.Timeout + workloop.APIGrace,
	}
	loop.Name = "csi-attacher-va"
	t.vaQueue = workloop.NewFair(loop, c.deps.Queues, t.sync, t.nodeOf, t.isAttach)
	loop.Name = "csi-attacher-pv"
	t.pvQueue = workloop.New(loop, c.deps.Queues, t.syncVolume)
	defer t.vaQueue.Stop()
	defer t.pvQueue.Stop()
	registrations := t.register()
	defer registrations.Remove()
	// With an incomplete cache, an attach would fail for a CSINode that was not listed yet.
	if err := registrations.Wait(ctx, "attacher caches"); err != nil {
		return err
	}
	if err := kube.BeginTerm(ctx, t.volumes, c.deps.Client.CoreV1().PersistentVolumes().List); err != nil {
		klog.FromContext(ctx).Error(err,
			"Reading the latest resourceVersion failed. Each PersistentVolume is read from the API server before ControllerPublishVolume")
	}
	c.term.Store(t)
	defer c.term.Store(nil)
	var wg sync.WaitGroup
	wg.Go(func() { t.vaQueue.Run(ctx, int(c.cfg.WorkerThreads)) })
	wg.Go(func() { t.pvQueue.Run(ctx, int(c.cfg.WorkerThreads)) })
	wg.Go(func() { workloop.Every(ctx, c.cfg.Resync, t.resync) })
	caps := c.driver.caps
	if caps.PublishUnpublishVolume && caps.ListVolumes && caps.ListVolumesPublishedNodes && c.cfg.ReconcileSync > 0 {
		wg.Go(func() { t.runReconciliation(ctx) })
	}
	wg.Wait()
	for _, call := range t.calls.All() {
		call.Payload.logUndone(ctx, t)
	}
	return context.Cause(ctx)
}

// maxSteps bounds the steps of one sync. An attach takes up to seven, and one for each former node ID.
const maxSteps = 10 + maxFormerNodeIDs

// sync runs the steps that [driver.decide] returns until nothing is left to do.
func (t *term) sync(ctx context.Context, key attachmentKey) (time.Time, error) {
	log := klog.FromContext(ctx).WithValues("volumeAttachment", key.Name)
	ctx = klog.NewContext(ctx, log)
	var read liveReads
	for range maxSteps {
		s := t.gather(key, read)
		step := t.c.driver.decide(s)
		log.V(2).Info("Decided", "action", step.action, "reason", step.reason)
		if step.action == doNothing {
			if s.showsResult() {
				t.settle(s.attachment.UID)
			}
			return time.Time{}, nil
		}
		operation := "Attach"
		if s.attachment == nil || s.attachment.DeletionTimestamp != nil {
			operation = "Detach"
		}
		traced, end := tracing.StartSpan(tracing.WithOperation(ctx, operation, key.UID), string(step.action))
		err := t.apply(traced, s, step, &read)
		end(err)
		if err != nil {
			return time.Time{}, err
		}
	}
	return time.Time{}, fmt.Errorf("reconciling VolumeAttachment %q: not finished after %d steps", key.Name, maxSteps)
}
