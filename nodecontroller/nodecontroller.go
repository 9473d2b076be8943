// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecontroller

import (
	"context"
	"path/filepath"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/claimloop"
	"github.com/storage-controller/storage-controller/internal/serving"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
	"github.com/storage-controller/storage-controller/nodecontroller/pvcfinalizer"
	"github.com/storage-controller/storage-controller/nodecontroller/resizenudge"
	"github.com/storage-controller/storage-controller/nodecontroller/webhook"
)

// Deps holds the dependencies of the role. All fields are required unless noted.
type Deps struct {
	nodecleanup.Deps // its informers retain [Config.RetainedFields]
	// UnthrottledClient has no rate limit, for requests that pods wait for; nil means Client.
	UnthrottledClient kubernetes.Interface
	// TLS is for the server of the webhooks.
	TLS serving.TLS
}

// Controller runs the parts of the role.
type Controller struct {
	cleanup      *nodecleanup.Controller
	pvcFinalizer *pvcfinalizer.Controller
	resizeNudge  *resizenudge.Controller
	server       *webhook.Server // nil: the webhooks are off
}

// New checks cfg, which is complete, and requests the informers. It starts nothing; see
// [Controller.Run] and [Controller.Serve].
func New(cfg Config, deps Deps) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if deps.UnthrottledClient == nil {
		deps.UnthrottledClient = deps.Client
	}
	claims := claimloop.Deps{
		Client: deps.Client, Informers: deps.Informers, Events: deps.Events, Registry: deps.Registry, Queues: deps.Queues,
	}
	settings := claimloop.Settings{
		Workers: cfg.Workers, Timeout: cfg.Timeout, RetryIntervalStart: cfg.RetryIntervalStart, RetryIntervalMax: cfg.RetryIntervalMax,
	}
	c := &Controller{
		pvcFinalizer: pvcfinalizer.New(pvcfinalizer.Config{
			Settings: settings, Mode: cfg.PVCFinalizerMode, Finalizer: cfg.PVCFinalizer, Obsolete: cfg.PVCObsoleteFinalizers,
		}, claims),
		resizeNudge: resizenudge.New(resizenudge.Config{
			Settings: settings, Enabled: cfg.ResizeNudge, Driver: deps.Driver, Annotation: cfg.ResizeAnnotation,
		}, claims),
	}
	if err := c.addWebhooks(cfg, deps); err != nil {
		return nil, err
	}
	var err error
	// the last step: a role whose New fails is built again, and this one registers event handlers
	c.cleanup, err = nodecleanup.New(nodecleanup.Config{
		Settings: cfg.Settings, Workers: cfg.Workers, Timeout: cfg.Timeout,
		RetryIntervalStart: cfg.RetryIntervalStart, RetryIntervalMax: cfg.RetryIntervalMax,
	}, deps.Deps)
	return c, err
}

// addWebhooks adds the admission webhooks, unless they are off.
func (c *Controller) addWebhooks(cfg Config, deps Deps) (err error) {
	if !cfg.EnableWebhooks {
		return nil
	}
	finalizer := ""
	if cfg.PVCFinalizerMode == pvcfinalizer.ModeEnforce {
		finalizer = cfg.PVCFinalizer
	}
	c.server, err = webhook.New(webhook.Config{
		Driver: deps.Driver, Address: cfg.WebhookAddr, ClientCA: cfg.WebhookClientCA, TLS: deps.TLS,
		Certificate: &serving.Certificate{
			CertFile: filepath.Join(cfg.CertDir, corev1.TLSCertKey), KeyFile: filepath.Join(cfg.CertDir, corev1.TLSPrivateKeyKey),
			Flag: "--cert-dir",
		},
		ShutdownDelay: cfg.ShutdownDelay, ClaimFinalizer: finalizer,
		CapacityResource: cfg.CapacityResource, CapacityAnnotationPrefix: cfg.CapacityAnnotationPrefix,
		DeviceClassParameter: cfg.DeviceClassParameter, DefaultDeviceClass: cfg.DefaultDeviceClass,
	}, webhook.Deps{
		Client: deps.UnthrottledClient, Claims: deps.Informers.Claims(), Classes: deps.Informers.Classes(), Registry: deps.Registry,
	})
	return err
}

// Run does the work of the leader until ctx ends, and returns after the last worker has stopped. It
// may be called again.
func (c *Controller) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.cleanup.Run(ctx) })
	group.Go(func() error { return c.pvcFinalizer.Run(ctx) })
	group.Go(func() error { return c.resizeNudge.Run(ctx) })
	return group.Wait()
}

// LostNodes returns the records of lost nodes, as this replica knows them.
func (c *Controller) LostNodes() []nodecleanup.LostNode { return c.cleanup.LostNodes() }

// Serve serves the webhooks until ctx ends, on every replica. It returns after the last response.
func (c *Controller) Serve(ctx context.Context) error {
	if c.server == nil {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	return c.server.Serve(ctx)
}

// Ready returns an error while this replica cannot serve the webhooks.
func (c *Controller) Ready() error {
	if c.server == nil {
		return nil
	}
	return c.server.Ready()
}
