// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/attacher"
	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/settings"
)

const attacherName = "attacher"

var attacherRole = Role{
	Name:     attacherName,
	sidecar:  "csi-attacher",
	options:  attacherOptions,
	config:   func() any { return &attacher.Config{} },
	validate: func(s settings.Settings) error { return attacherConfig(s).Validate() },
	timeout:  func(s settings.Settings) time.Duration { return attacherConfig(s).Timeout },
	lease:    func(_ settings.Settings, driver string) string { return attacher.LeaseName(driver) },
	supported: func(d csiclient.Driver) error {
		return requireCapability(d, "PUBLISH_UNPUBLISH_VOLUME", d.Controller.PublishUnpublishVolume)
	},
	ineffective: func(_ settings.Settings, d *csiclient.Driver) []condition {
		lists := d == nil || d.Controller.PublishUnpublishVolume && d.Controller.ListVolumes && d.Controller.ListVolumesPublishedNodes
		return []condition{
			{lists, "the driver does not report LIST_VOLUMES and LIST_VOLUMES_PUBLISHED_NODES",
				[]string{"attacher.reconcile-sync", "attacher.max-entries"}},
		}
	},
	grants: func(settings.Settings, csiclient.Driver) []rbac.Grant { return []rbac.Grant{{File: "attacher"}} },
	build:  buildAttacher,
}

func attacherOptions(bool) []settings.Option {
	d := attacher.DefaultConfig()
	return append(retryOptions(d.Timeout, d.RetryIntervalStart, d.RetryIntervalMax, "timeout of each CSI call"), []settings.Option{
		{Name: "worker-threads", Default: uint(d.WorkerThreads),
			Usage: "number of VolumeAttachments, and separately of PersistentVolumes, that are reconciled at the same time"},
		{Name: "default-fstype", Default: d.DefaultFSType, Usage: "file system of PersistentVolumes that do not set one"},
		{Name: "resync", Default: d.Resync,
			Usage: "time between two resyncs of all VolumeAttachments that are not in their final state; 0 means never"},
		{Name: "reconcile-sync", Default: d.ReconcileSync,
			Usage: "time between two reconciliations of VolumeAttachments with ListVolumes, " +
				"for drivers with LIST_VOLUMES_PUBLISHED_NODES; longer if listing takes long; 0 means never"},
		{Name: "max-entries", Default: d.MaxEntries, Usage: "maximum entries per ListVolumes page; 0 lets the driver decide"},
	}...)
}

// attacherConfig returns the configuration of the attacher with feature gates.
func attacherConfig(s settings.Settings) attacher.Config {
	cfg := settings.Of[attacher.Config](s, attacherName)
	cfg.StoreErrorCode = s.Common.FeatureGates.Enabled("MutableCSINodeAllocatableCount")
	return cfg
}

func buildAttacher(_ context.Context, s *shared, config *rest.Config) (controller, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	c, err := attacher.New(attacherConfig(s.settings), attacher.Deps{
		Driver:    s.driver,
		Client:    client,
		Informers: s.informers,
		CSI:       s.csi.Controller(),
		Ready:     s.csi.WaitReady,
		Registry:  s.registry,
		Queues:    s.queues,
		Locks:     s.locks,
	})
	if err != nil {
		return nil, err
	}
	s.running.attacher.Store(c)
	return c, nil
}

// volumeFinalizers returns the finalizers of the attacher that the provisioner creates PersistentVolumes
// with. It returns none while the attacher does not run here.
func (r *running) volumeFinalizers() []string {
	if c := r.attacher.Load(); c != nil {
		return c.VolumeFinalizers()
	}
	return nil
}

// removableFinalizers returns the finalizers of the attacher that the provisioner may remove together
// with its own. It returns none while the attacher does not run here.
func (r *running) removableFinalizers(pv *corev1.PersistentVolume) []string {
	if c := r.attacher.Load(); c != nil {
		return c.RemovableFinalizers(pv)
	}
	return nil
}
