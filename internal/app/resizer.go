// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/resizer"
)

const (
	resizerName      = "resizer"
	timeoutOfResizer = resizerName + ".timeout"
)

var resizerRole = Role{
	Name:        resizerName,
	sidecar:     "csi-resizer",
	validate:    func(s Settings) error { return resizerConfig(s).Validate() },
	timeout:     func(s Settings) time.Duration { return resizerConfig(s).LongestTimeout() },
	lease:       func(_ Settings, driver string) string { return resizer.LeaseName(driver) },
	supported:   resizer.Supported,
	ineffective: resizerConditions,
	grants:      resizerGrants,
	apis:        resizerAPIs,
	prepare: func(s *shared) error {
		s.informers.Retain(kube.RetainedFields{Resize: true})
		return nil
	},
	check: "modification",
	build: buildResizer,
}

// resizerConfig returns the configuration of the resizer with feature gates. As with csi-resizer, --timeout on the
// command line overrides the timeouts of single calls.
func resizerConfig(s Settings) resizer.Config {
	cfg, on := s.Resizer, s.Role(resizerName).Gates.Enabled
	if s.Origin(timeoutOfResizer) == settings.OriginFlag {
		cfg.ResizeTimeout, cfg.ModifyTimeout = 0, 0
	}
	cfg.VolumeAttributesClass, cfg.AnnotateFsResize = on("VolumeAttributesClass"), on("AnnotateFsResize")
	return cfg
}

func resizerConditions(s Settings, d *csiclient.Driver) []condition {
	return []condition{
		{s.Origin(timeoutOfResizer) != settings.OriginFlag, "--timeout overrides it",
			[]string{"resizer.resize-timeout", "resizer.modify-timeout"}},
		{d == nil || d.Controller.ExpandVolume && !d.Plugin.ExpandOnline,
			"the driver does not expand volumes with the controller, or expands " +
				"volumes in use", []string{"resizer.handle-volume-inuse-error"}},
		{d == nil || d.Controller.ModifyVolume, "the driver does not report MODIFY_VOLUME", []string{"resizer.extra-modify-metadata"}},
	}
}

func resizerGrants(s Settings, d csiclient.Driver) []rbac.Grant {
	cfg := resizerConfig(s)
	grants := []rbac.Grant{{File: resizerName}}
	if d.Controller.ModifyVolume && cfg.VolumeAttributesClass {
		grants = append(grants, rbac.Grant{File: "resizer-volumeattributesclasses", Without: "volumes are not modified"})
	}
	if !cfg.HandleVolumeInUseError || d.Plugin.ExpandOnline || !d.Controller.ExpandVolume {
		return grants
	}
	if d.Controller.PublishUnpublishVolume {
		return append(grants, rbac.Grant{File: "resizer-attachments", Or: "resizer-pods",
			Without: "the expansion of an attached volume is tried, too"})
	}
	return append(grants, rbac.Grant{File: "resizer-pods", Or: "resizer-attachments",
		Without: "the expansion of a volume in use is tried, too"})
}

func resizerAPIs(s Settings, d csiclient.Driver) []doctor.API {
	if !d.Controller.ModifyVolume || !resizerConfig(s).VolumeAttributesClass {
		return nil
	}
	return []doctor.API{{
		GroupVersion: "storage.k8s.io/v1", Resource: "volumeattributesclasses", For: "modifying volumes",
		Required: s.Role(resizerName).Gates["VolumeAttributesClass"],
		Hint:     "upgrade to Kubernetes 1.34 or later, if you use VolumeAttributesClasses",
	}}
}

func buildResizer(ctx context.Context, s *shared, config *rest.Config) (controller, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	cfg := resizerConfig(s.settings)
	_, explicit := s.settings.Role(resizerName).Gates["VolumeAttributesClass"]
	if cfg.VolumeAttributesClass && s.driver.Controller.ModifyVolume && !explicit &&
		!kube.ServesKind(ctx, client.Discovery(), storagev1.SchemeGroupVersion, "VolumeAttributesClass") {
		klog.FromContext(ctx).Info("Volumes are not modified: the API server does not serve VolumeAttributesClasses")
		cfg.VolumeAttributesClass = false
	}
	return resizer.New(cfg, resizer.Deps{
		Driver:    s.driver,
		Client:    client,
		Metadata:  s.metadata,
		Informers: s.informers,
		CSI:       s.csi.Controller(),
		Ready:     s.csi.WaitReady,
		Events:    s.recorder(resizer.EventSource(s.driver.Name)),
		Registry:  s.registry,
		Queues:    s.queues,
		Locks:     s.locks,
	})
}
