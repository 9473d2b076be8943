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
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/provisioner"
)

const provisionerName = "provisioner"

var provisionerRole = Role{
	Name:    provisionerName,
	sidecar: "csi-provisioner",
	options: provisionerOptions,
	config:  func() any { return &provisioner.Config{} },
	commonOptions: []settings.Option{{
		Name: "audit-interval", Default: time.Duration(0),
		Usage: "time between two comparisons of ListVolumes with the PersistentVolumes, for metrics and the log; 0 means never",
	}},
	validate:       func(s settings.Settings) error { return provisionerConfig(s).Validate() },
	timeout:        func(s settings.Settings) time.Duration { return provisionerConfig(s).Timeout },
	nodeDeployment: func(s settings.Settings) bool { return provisionerConfig(s).NodeDeployment },
	lease:          func(_ settings.Settings, driver string) string { return provisioner.LeaseName(driver) },
	supported: func(d csiclient.Driver) error {
		return requireCapability(d, "CREATE_DELETE_VOLUME", d.Controller.CreateDeleteVolume)
	},
	ineffective: provisionerConditions,
	grants:      provisionerGrants,
	apis:        provisionerAPIs,
	build:       buildProvisioner,
}

func provisionerOptions(bool) []settings.Option {
	d := provisioner.DefaultConfig()
	return append(retryOptions(d.Timeout, d.RetryIntervalStart, d.RetryIntervalMax, "timeout of each CSI call"), []settings.Option{
		{Name: "worker-threads", Default: uint(d.WorkerThreads),
			Usage: "number of PersistentVolumeClaims, and separately of PersistentVolumes to delete, that are reconciled at the same time"},
		{Name: "default-fstype", Default: d.DefaultFSType, Usage: "file system of volumes whose StorageClass does not set one"},
		{Name: "volume-name-prefix", Default: d.VolumeNamePrefix, Usage: "prefix of volume names"},
		{Name: "volume-name-uuid-length", Default: d.VolumeNameUUIDLength,
			Usage: "number of characters of the claim's UID in the volume name; -1 means the whole UID with dashes"},
		{Name: "strict-topology", Default: d.StrictTopology,
			Usage: "with WaitForFirstConsumer: request only the topology segment of the selected node"},
		{Name: "immediate-topology", Default: d.ImmediateTopology,
			Usage: "with Immediate binding: request the topology segments of the cluster; " +
				"false means no topology requirement unless the StorageClass restricts it"},
		{Name: "extra-create-metadata", Default: d.ExtraCreateMetadata, Usage: "pass PVC and PV metadata to CreateVolume"},
		{Name: "controller-publish-readonly", Default: d.ControllerPublishReadonly,
			Usage: "mark volumes whose only access mode is ReadOnlyMany as read-only"},
		{Name: "provisioning-protection", Default: string(d.ProvisioningProtection),
			Usage: "when to add a finalizer to a PVC so that its volume cannot leak: " +
				"off, on-retry (after the first CreateVolume call with an unknown outcome, or if the PV cannot be created) or always " +
				"(before the first call; 2 more writes per volume)"},
		{Name: "prevent-volume-mode-conversion", Default: d.PreventVolumeModeConversion,
			Usage: "refuse to restore a snapshot with another volume mode, unless an annotation of its VolumeSnapshotContent allows it"},
		{Name: "cloning-protection-threads", Default: uint(d.CloningProtectionThreads),
			Usage: "number of clone sources, and separately of snapshots, whose finalizer is removed at the same time"},
		{Name: "snapshot-orphan-sweep-interval", Default: d.SnapshotOrphanSweepInterval,
			Usage: "time between two searches for snapshots that are still protected without need; 0 or less means never"},
		{Name: "node-deployment", Default: d.NodeDeployment,
			Usage: "distributed provisioning: run once per node, for its volumes; requires the environment variable NODE_NAME"},
		{Name: "node-deployment-immediate-binding", Default: d.NodeDeploymentImmediateBinding,
			Usage: "with --node-deployment: also compete for PVCs with Immediate binding"},
		{Name: "node-deployment-base-delay", Default: d.NodeDeploymentBaseDelay,
			Usage: "with --node-deployment: maximum random delay before an instance " +
				"tries to select its node for a PVC; doubles with each unsuccessful attempt"},
		{Name: "node-deployment-max-delay", Default: d.NodeDeploymentMaxDelay, Usage: "with --node-deployment: upper limit of that delay"},
	}...)
}

// provisionerConfig returns the configuration of the provisioner with feature gates and environment.
func provisionerConfig(s settings.Settings) provisioner.Config {
	cfg, on := settings.Of[provisioner.Config](s, provisionerName), s.Common.FeatureGates.Enabled
	cfg.SecretNamespaces = s.Common.SecretNamespaces
	cfg.Topology = on("Topology")
	cfg.VolumeAttributesClass = on("VolumeAttributesClass")
	cfg.CrossNamespaceVolumeDataSource = on("CrossNamespaceVolumeDataSource")
	cfg.NodeName = os.Getenv("NODE_NAME")
	return cfg
}

func provisionerConditions(s settings.Settings, d *csiclient.Driver) []condition {
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

func provisionerGrants(s settings.Settings, d csiclient.Driver) []rbac.Grant {
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

func provisionerAPIs(s settings.Settings, d csiclient.Driver) []doctor.API {
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
			Required: s.Common.FeatureGates["VolumeAttributesClass"],
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
	_, explicit := s.settings.Common.FeatureGates["VolumeAttributesClass"]
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
