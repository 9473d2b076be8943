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
)

const attacherName = "attacher"

var attacherRole = Role{
	Name:     attacherName,
	sidecar:  "csi-attacher",
	validate: func(s Settings) error { return attacherConfig(s).Validate() },
	timeout:  func(s Settings) time.Duration { return attacherConfig(s).Timeout },
	lease:    func(_ Settings, driver string) string { return attacher.LeaseName(driver) },
	supported: func(d csiclient.Driver) error {
		return requireCapability(d, "PUBLISH_UNPUBLISH_VOLUME", d.Controller.PublishUnpublishVolume)
	},
	ineffective: func(_ Settings, d *csiclient.Driver) []condition {
		lists := d == nil || d.Controller.PublishUnpublishVolume && d.Controller.ListVolumes && d.Controller.ListVolumesPublishedNodes
		return []condition{
			{lists, "the driver does not report LIST_VOLUMES and LIST_VOLUMES_PUBLISHED_NODES",
				[]string{"attacher.reconcile-sync", "attacher.max-entries"}},
		}
	},
	grants: func(Settings, csiclient.Driver) []rbac.Grant { return []rbac.Grant{{File: "attacher"}} },
	build:  buildAttacher,
}

// attacherConfig returns the configuration of the attacher with feature gates.
func attacherConfig(s Settings) attacher.Config {
	cfg := s.Attacher
	cfg.StoreErrorCode = s.Role(attacherName).Gates.Enabled("MutableCSINodeAllocatableCount")
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
