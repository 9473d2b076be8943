package nodecontroller

import (
	"context"

	"golang.org/x/sync/errgroup"

	"github.com/storage-controller/storage-controller/nodecontroller/pvcfinalizer"
	"github.com/storage-controller/storage-controller/nodecontroller/servingcert"
	"github.com/storage-controller/storage-controller/nodecontroller/webhook"
)

// webhooks serves the admission webhooks with their certificate.
type webhooks struct {
	server      *webhook.Server
	certificate *servingcert.Manager
}

// newWebhooks returns nil if the webhooks are off.
func (c *Controller) newWebhooks() (*webhooks, error) {
	cfg, deps := c.cfg, c.deps
	if !cfg.EnableWebhooks {
		return nil, nil
	}
	finalizer := ""
	if cfg.PVCFinalizerMode == pvcfinalizer.ModeEnforce {
		finalizer = cfg.PVCFinalizer
	}
	client := deps.UnthrottledClient
	if client == nil {
		client = deps.Client
	}
	certificate, err := servingcert.New(servingcert.Config{
		Mode: servingcert.Mode(cfg.WebhookCertMode), Dir: cfg.CertDir, Secret: cfg.WebhookCertSecret, Service: cfg.WebhookService,
		Namespace: deps.Namespace, WebhookConfig: cfg.WebhookConfigName, ClusterDomain: cfg.WebhookClusterDomain,
	}, client, deps.Registry)
	if err != nil {
		return nil, err
	}
	server, err := webhook.New(webhook.Config{
		Driver: deps.Driver, Address: cfg.WebhookAddr, ShutdownDelay: cfg.ShutdownDelay, ClaimFinalizer: finalizer,
		CapacityResource: cfg.CapacityResource, CapacityAnnotationPrefix: cfg.CapacityAnnotationPrefix,
		DeviceClassParameter: cfg.DeviceClassParameter, DefaultDeviceClass: cfg.DefaultDeviceClass, DefaultVolumeSize: 1 << 30,
		ResolveDefaultClass: cfg.WebhookResolveDefaultClass,
	}, webhook.Deps{
		Client: client, Claims: c.claims, Classes: c.classes, Registry: deps.Registry,
		GetCertificate: certificate.GetCertificate,
	})
	return &webhooks{server, certificate}, err
}

// Serve serves the webhooks until ctx ends, on every replica. It returns after the last response.
func (c *Controller) Serve(ctx context.Context) error {
	if c.webhooks == nil {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { c.webhooks.certificate.Run(ctx); return nil })
	group.Go(func() error { return c.webhooks.server.Serve(ctx) })
	return group.Wait()
}

// Ready returns an error while this replica cannot serve the webhooks.
func (c *Controller) Ready() error {
	if c.webhooks == nil {
		return nil
	}
	if err := c.webhooks.server.Ready(); err != nil {
		return err
	}
	return c.webhooks.certificate.Ready()
}
