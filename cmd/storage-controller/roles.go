package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	snapshotclient "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned/typed/volumesnapshot/v1"
	"github.com/prometheus/client_golang/prometheus"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/attacher"
	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
	"github.com/storage-controller/storage-controller/metrics"
	"github.com/storage-controller/storage-controller/provisioner"
)

// role is one of the controllers that a process can run.
type role struct {
	// section is its name in the configuration, in --controllers and in user agents.
	section string
	options func() roleOptions
	// validate reports everything that is wrong with its part of the settings.
	validate func(settings) error
	// timeout is the deadline of its calls of the driver.
	timeout func(settings) time.Duration
	// lease is the name of its Lease: that of the sidecar which it replaces, so
	// that old and new never work at the same time.
	lease func(driver string) string
	// supported is nil when the driver has what the role is for.
	supported func(csiclient.Driver) error
	// build makes the controller, with clients of its own for cfg. It is called once,
	// before the watches start.
	build func(ctx context.Context, s *shared, cfg *rest.Config) (controller, error)
}

// controller is a loop: Run works for one term of the Lease of its role and may be
// called again after it has returned.
type controller interface {
	Run(ctx context.Context) error
}

// shared is what the controllers of a process have in common.
type shared struct {
	settings  settings
	driver    csiclient.Driver
	csi       *csiclient.Client
	informers *kube.Informers
	metadata  metadata.Interface // for watches of kinds that may not exist
	events    record.EventRecorder
	registry  prometheus.Registerer
	queues    *workloop.Metrics
	// attacher is nil where this process does not attach volumes. It is built first.
	attacher *attacher.Controller
}

var provisionerRole = role{
	section:  "provisioner",
	options:  provisionerOptions,
	validate: func(s settings) error { return s.provisioner().Validate() },
	timeout:  func(s settings) time.Duration { return s.Provisioner.Timeout },
	lease:    provisioner.LeaseName,
	supported: func(d csiclient.Driver) error {
		return lacking(d, "CREATE_DELETE_VOLUME", d.Controller.CreateDeleteVolume)
	},
	build: buildProvisioner,
}

// provisioner is the configuration of the provisioner with what does not come from flags.
func (s settings) provisioner() provisioner.Config {
	cfg, on := s.Provisioner, s.Common.FeatureGates.enabled
	cfg.Topology = on("Topology")
	cfg.VolumeAttributesClass = on("VolumeAttributesClass")
	cfg.CrossNamespaceVolumeDataSource = on("CrossNamespaceVolumeDataSource")
	cfg.NodeName = os.Getenv("NODE_NAME")
	return cfg
}

func buildProvisioner(ctx context.Context, s *shared, restConfig *rest.Config) (controller, error) {
	client, err := kubernetes.NewForConfig(restConfig)
	if err != nil {
		return nil, err
	}
	snapshots, err := snapshotclient.NewForConfig(kube.ForCustomResources(restConfig))
	if err != nil {
		return nil, err
	}
	urgent := rest.CopyConfig(restConfig)
	urgent.QPS, urgent.Burst = -1, 0
	unlimited, err := kubernetes.NewForConfig(urgent)
	if err != nil {
		return nil, err
	}
	cfg := s.settings.provisioner()
	if _, set := s.settings.Common.FeatureGates["VolumeAttributesClass"]; !set && !kube.Serves(client.Discovery(), storagev1.SchemeGroupVersion, "VolumeAttributesClass") {
		klog.FromContext(ctx).Info("The API server does not serve VolumeAttributesClasses: they are ignored")
		cfg.VolumeAttributesClass = false
	}
	deps := provisioner.Deps{
		Driver:    s.driver,
		Client:    client,
		Urgent:    unlimited,
		Snapshots: snapshots,
		Metadata:  s.metadata,
		Informers: s.informers,
		CSI:       s.csi.Controller(),
		Ready:     s.csi.WaitReady,
		Events:    s.events,
		Registry:  s.registry,
		Queues:    s.queues,
	}
	if s.attacher != nil {
		deps.Releasable = s.attacher.Releasable
	}
	if cfg.NodeDeployment {
		node, err := s.csi.NodeInfo(ctx)
		if err != nil {
			return nil, err
		}
		deps.Segments = node.GetAccessibleTopology().GetSegments()
	}
	return provisioner.New(cfg, deps)
}

var attacherRole = role{
	section:  "attacher",
	options:  attacherOptions,
	validate: func(s settings) error { return s.Attacher.Validate() },
	timeout:  func(s settings) time.Duration { return s.Attacher.Timeout },
	lease:    attacher.LeaseName,
	supported: func(d csiclient.Driver) error {
		return lacking(d, "PUBLISH_UNPUBLISH_VOLUME", d.Controller.PublishUnpublishVolume)
	},
	build: func(_ context.Context, s *shared, restConfig *rest.Config) (controller, error) {
		client, err := kubernetes.NewForConfig(restConfig)
		if err != nil {
			return nil, err
		}
		cfg := s.settings.Attacher
		cfg.StoreErrorCode = s.settings.Common.FeatureGates.enabled("MutableCSINodeAllocatableCount")
		s.attacher, err = attacher.New(cfg, attacher.Deps{
			Driver:    s.driver,
			Client:    client,
			Informers: s.informers,
			CSI:       s.csi.Controller(),
			Ready:     s.csi.WaitReady,
			Registry:  s.registry,
			Queues:    s.queues,
		})
		return s.attacher, err
	},
}

func lacking(d csiclient.Driver, capability string, has bool) error {
	if has {
		return nil
	}
	return fmt.Errorf("driver %q does not report the controller capability %s", d.Name, capability)
}

// driverConfig is how to talk to the driver before any role does.
func (s settings) driverConfig(roles ...role) csiclient.Config {
	cfg := csiclient.DefaultConfig()
	cfg.Address = s.Common.CSIAddress
	cfg.ExitOnConnectionLoss = s.Common.ExitOnConnectionLoss
	cfg.MaxLogLength = s.Common.MaxGRPCLogLength
	cfg.Timeout = 0
	for _, r := range roles { // the most patient role decides
		cfg.Timeout = max(cfg.Timeout, r.timeout(s))
	}
	return cfg
}

func (s settings) leaseConfig() election.Config {
	return election.Config{
		LeaseDuration: s.Common.LeaseDuration, RenewDeadline: s.Common.RenewDeadline, RetryPeriod: s.Common.RetryPeriod,
	}
}

// serverConfig is that of the diagnostics server; its address is empty for none.
func (s settings) serverConfig() metrics.Config {
	c := s.Common
	cfg := metrics.Config{Address: c.HTTPEndpoint, MetricsPath: c.MetricsPath, Pprof: c.EnablePprof, LeaderElection: c.LeaderElection}
	if cfg.Address == "" {
		cfg.Address = c.MetricsAddress
	}
	return cfg
}

// validate reports everything that is wrong with s for a process that runs roles.
func (s settings) validate(roles ...role) error {
	c := s.Common
	var errs []error
	if c.HTTPEndpoint != "" && c.MetricsAddress != "" {
		errs = append(errs, errors.New("--http-endpoint and --metrics-address: only one of them may be set"))
	}
	if c.KubeAPIQPS < 0 {
		errs = append(errs, fmt.Errorf("--kube-api-qps: must not be negative, got %v", c.KubeAPIQPS))
	}
	if c.KubeAPIQPS > 0 && c.KubeAPIBurst < 1 {
		errs = append(errs, fmt.Errorf("--kube-api-burst: must be at least 1, got %d", c.KubeAPIBurst))
	}
	for _, name := range c.Controllers {
		if !slices.ContainsFunc(roles, func(r role) bool { return r.section == name }) {
			errs = append(errs, fmt.Errorf("--controllers: unknown role %q", name))
		}
	}
	if s.Provisioner.NodeDeployment {
		if c.LeaderElection {
			errs = append(errs, errors.New("--node-deployment and --leader-election: only one of them may be set, since every node has an instance that works"))
		}
		if len(roles) > 1 && !slices.Equal(c.Controllers, []string{provisionerRole.section}) {
			errs = append(errs, errors.New("--node-deployment: only the provisioner can run once per node; set --controllers=provisioner"))
		}
	}
	errs = append(errs, c.FeatureGates.validate(), s.driverConfig(roles...).Validate(), s.leaseConfig().Validate(), s.serverConfig().Validate())
	for _, r := range roles {
		if err := r.validate(s); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", r.section, err))
		}
	}
	return errors.Join(errs...)
}

// choose is which of roles run for a driver. Those that were asked for by name
// run whatever the driver can do; of all, those that it supports.
func (s settings) choose(roles []role, d csiclient.Driver) (chosen []role, skipped []error) {
	if len(roles) == 1 {
		return roles, nil
	}
	for _, r := range roles {
		if len(s.Common.Controllers) > 0 {
			if slices.Contains(s.Common.Controllers, r.section) {
				chosen = append(chosen, r)
			}
			continue
		}
		if err := r.supported(d); err != nil {
			skipped = append(skipped, fmt.Errorf("%s: %w", r.section, err))
			continue
		}
		chosen = append(chosen, r)
	}
	return chosen, skipped
}
