// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"os"
	"time"

	snapshotclient "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned/typed/volumesnapshot/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/provisioner"
	"github.com/storage-controller/storage-controller/topolvm"
)

const provisionerName = "provisioner"

var provisionerRole = Role{
	Name:           provisionerName,
	sidecar:        "csi-provisioner",
	validate:       func(s Settings) error { return provisionerConfig(s).Validate() },
	timeout:        func(s Settings) time.Duration { return provisionerConfig(s).Timeout },
	nodeDeployment: func(s Settings) bool { return provisionerConfig(s).NodeDeployment },
	lease:          func(_ Settings, driver string) string { return provisioner.LeaseName(driver) },
	supported: func(d csiclient.Driver) error {
		return requireCapability(d, "CREATE_DELETE_VOLUME", d.Controller.CreateDeleteVolume)
	},
	ineffective: provisionerConditions,
	grants:      provisionerGrants,
	apis:        provisionerAPIs,
	build:       buildProvisioner,
}

// provisionerConfig returns the configuration of the provisioner with feature gates and environment.
func provisionerConfig(s Settings) provisioner.Config {
	cfg, on := s.Provisioner, s.Role(provisionerName).Gates.Enabled
	cfg.SecretNamespaces = s.Common.SecretNamespaces
	cfg.Topology = on("Topology")
	cfg.VolumeAttributesClass = on("VolumeAttributesClass")
	cfg.CrossNamespaceVolumeDataSource = on("CrossNamespaceVolumeDataSource")
	cfg.NodeName = os.Getenv("NODE_NAME")
	return cfg
}

func provisionerConditions(s Settings, d *csiclient.Driver) []condition {
	return []condition{
		{provisionerConfig(s).NodeDeployment, "--node-deployment is off", []string{
			"provisioner.node-deployment-immediate-binding", "provisioner.node-deployment-base-delay",
			"provisioner.node-deployment-max-delay",
		}},
		{d == nil || d.Plugin.VolumeAccessibilityConstraints, "the driver does not report VOLUME_ACCESSIBILITY_CONSTRAINTS", []string{
			"provisioner.strict-topology", "provisioner.immediate-topology",
		}},
	}
}

func provisionerGrants(s Settings, d csiclient.Driver) []rbac.Grant {
	cfg, caps := provisionerConfig(s), d.Controller
	grants := []rbac.Grant{{File: "provisioner"}}
	if caps.PublishUnpublishVolume {
		grants = append(grants, rbac.Grant{File: "provisioner-attachments"})
	}
	if d.Plugin.VolumeAccessibilityConstraints && cfg.Topology && !cfg.NodeDeployment {
		grants = append(grants, rbac.Grant{File: "provisioner-topology"})
	}
	if caps.CreateDeleteSnapshot {
		grants = append(grants, rbac.Grant{File: "provisioner-snapshots",
			Without: "volumes are not restored from snapshots, only after a delay, or without protecting the snapshot"})
	}
	if caps.ModifyVolume && cfg.VolumeAttributesClass {
		without := "PVCs with a VolumeAttributesClass fail, or are provisioned only after a delay"
		grants = append(grants, rbac.Grant{File: "provisioner-volumeattributesclasses", Without: without})
	}
	if cfg.CrossNamespaceVolumeDataSource {
		grants = append(grants, rbac.Grant{File: "provisioner-cross-namespace"})
	}
	return grants
}

func provisionerAPIs(s Settings, d csiclient.Driver) []doctor.API {
	cfg, caps := provisionerConfig(s), d.Controller
	var apis []doctor.API
	if caps.CreateDeleteSnapshot {
		for _, resource := range []string{"volumesnapshots", "volumesnapshotcontents"} {
			apis = append(apis, doctor.API{
				GroupVersion: "snapshot.storage.k8s.io/v1", Resource: resource, For: "restoring snapshots",
				Hint: "install the CRDs of external-snapshotter, if you use snapshots",
			})
		}
	}
	if cfg.CrossNamespaceVolumeDataSource {
		apis = append(apis, doctor.API{
			GroupVersion: "gateway.networking.k8s.io/v1beta1", Resource: "referencegrants",
			For: "data sources in other namespaces (feature gate CrossNamespaceVolumeDataSource)", Required: true,
			Hint: "install the ReferenceGrant CRD of the Gateway API, or turn the feature gate off",
		})
	}
	if caps.ModifyVolume && cfg.VolumeAttributesClass {
		apis = append(apis, doctor.API{
			GroupVersion: "storage.k8s.io/v1", Resource: "volumeattributesclasses", For: "VolumeAttributesClasses of new volumes",
			Required: s.Role(provisionerName).Gates["VolumeAttributesClass"],
			Hint:     "upgrade to Kubernetes 1.34 or later, if you use VolumeAttributesClasses",
		})
	}
	return apis
}

func buildProvisioner(ctx context.Context, s *shared, config *rest.Config) (controller, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	snapshots, err := snapshotclient.NewForConfig(kube.ForCustomResources(config))
	if err != nil {
		return nil, err
	}
	unthrottled, err := unthrottledClient(config)
	if err != nil {
		return nil, err
	}
	cfg := provisionerConfig(s.settings)
	_, explicit := s.settings.Role(provisionerName).Gates["VolumeAttributesClass"]
	if !explicit && !kube.ServesKind(ctx, client.Discovery(), storagev1.SchemeGroupVersion, "VolumeAttributesClass") {
		klog.FromContext(ctx).Info("VolumeAttributesClasses are ignored: the API server does not serve them")
		cfg.VolumeAttributesClass = false
	}
	deps := provisioner.Deps{
		Driver:              s.driver,
		Client:              client,
		UnthrottledClient:   unthrottled,
		Snapshots:           snapshots,
		Metadata:            s.metadata,
		Informers:           s.informers,
		CSI:                 s.csi.Controller(),
		Ready:               s.csi.WaitReady,
		Events:              s.events,
		Registry:            s.registry,
		Queues:              s.queues,
		Locks:               s.locks,
		VolumeObserver:      volumeObserver{s.running},
		VolumeFinalizers:    s.running.volumeFinalizers,
		RemovableFinalizers: s.running.removableFinalizers,
	}
	if s.service != nil {
		deps.LateAfter = topolvm.LateAfter
	}
	if cfg.NodeDeployment {
		node, err := s.csi.NodeInfo(ctx)
		if err != nil {
			return nil, err
		}
		deps.Segments = node.GetAccessibleTopology().GetSegments()
	}
	c, err := provisioner.New(cfg, deps)
	if err != nil {
		return nil, err
	}
	s.running.provisioner.Store(c)
	return c, nil
}
