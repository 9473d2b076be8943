package nodecontroller

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/storage-controller/storage-controller/nodecontroller/webhook"
)

// newWebhooks makes the server of the webhooks; nil when they are off.
func (c *Controller) newWebhooks() (*webhook.Server, error) {
	cfg := c.cfg
	if !cfg.EnableWebhooks {
		return nil, nil
	}
	size, err := resource.ParseQuantity(cfg.DefaultVolumeSize)
	if err != nil {
		return nil, fmt.Errorf("--default-volume-size: %q is no quantity: %w", cfg.DefaultVolumeSize, err)
	}
	finalizer := ""
	if cfg.PVCFinalizerMode == ClaimEnforce {
		finalizer = cfg.PVCFinalizer
	}
	client := c.deps.UnthrottledClient
	if client == nil {
		client = c.deps.Client
	}
	return webhook.New(webhook.Config{
		Driver: c.deps.Driver, Address: cfg.WebhookAddr, DisableHTTP2: cfg.WebhookDisableHTTP2, ShutdownDelay: cfg.ShutdownDelay,
		ClaimFinalizer: finalizer, CapacityResource: cfg.CapacityResource, CapacityAnnotationPrefix: cfg.CapacityAnnotationPrefix,
		DeviceClassParameter: cfg.DeviceClassParameter, DefaultDeviceClass: cfg.DefaultDeviceClass, DefaultVolumeSize: size.Value(),
		ResolveDefaultClass: cfg.WebhookResolveDefaultClass, StripForeignCapacity: cfg.WebhookStripForeignCapacity,
		CertMode: webhook.CertMode(cfg.WebhookCertMode), CertDir: cfg.CertDir, CertSecret: cfg.WebhookCertSecret,
		Service: cfg.WebhookService, ConfigName: cfg.WebhookConfigName, OwnNamespace: c.deps.Namespace, ClusterDomain: cfg.WebhookClusterDomain,
	}, webhook.Deps{Client: client, Claims: c.claims, Classes: c.classes, Registry: c.deps.Registry})
}

// Serve does what every replica does, whoever leads: it answers the webhooks until ctx
// ends, and returns when the last answer was given.
func (c *Controller) Serve(ctx context.Context) error {
	if c.webhooks == nil {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	return c.webhooks.Serve(ctx)
}

// Ready is why the process cannot do what every replica has to do; nil when it can.
func (c *Controller) Ready() error {
	if c.webhooks == nil {
		return nil
	}
	return c.webhooks.Ready()
}
