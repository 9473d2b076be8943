package main

import (
	"context"
	"errors"
	"fmt"
	"os"
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
	"github.com/storage-controller/storage-controller/capacity"
	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tracing"
	"github.com/storage-controller/storage-controller/internal/volumelock"
	"github.com/storage-controller/storage-controller/internal/workloop"
	"github.com/storage-controller/storage-controller/metrics"
	"github.com/storage-controller/storage-controller/nodecontroller"
	"github.com/storage-controller/storage-controller/provisioner"
)

// role is one of the controllers that a process can run.
type role struct {
	// section is its name in the configuration, in --controllers and in user agents.
	section string
	// options are those of the role; all is as for commonOptions.
	options func(all bool) roleOptions
	// enabled tells whether the role is wanted; nil means always.
	enabled func(settings) bool
	// limit is that of its requests to the API server; nil means the common one.
	limit func(settings) (qps float64, burst int)
	// validate reports everything that is wrong with its part of the settings.
	validate func(settings) error
	// timeout is the deadline of its calls of the driver.
	timeout func(settings) time.Duration
	// lease is the name of its Lease: that of the sidecar which it replaces, so
	// that old and new never work at the same time.
	lease func(s settings, driver string) string
	// supported is nil when the driver has what the role is for.
	supported func(csiclient.Driver) error
	// environment reports what the role lacks that comes neither from flags nor from the
	// driver; nil means that it needs nothing.
	environment func(settings) error
	// nameOfDriver is nil for roles that call the driver. Of others it is its name, as
	// far as the settings tell it: they can run without a connection.
	nameOfDriver func(settings) string
	// prepare, which may be nil, is called for every chosen role before any is built.
	prepare func(*shared) error
	// check is the name of the check of its controller, if that has one.
	check string
	// build makes the controller, with clients of its own for cfg. It is called once,
	// before the watches start.
	build func(ctx context.Context, s *shared, cfg *rest.Config) (controller, error)
}

// controller is a loop: Run works for one term of the Lease of its role and may be
// called again after it has returned.
type controller interface {
	Run(ctx context.Context) error
}

// server is what a controller may be besides: Serve works on every replica, whoever
// holds the Lease, from the start to the end of the process.
type server interface {
	Serve(ctx context.Context) error
}

// checked is what a controller may be besides: its check is one of /readyz, under the
// name that its role has for it.
type checked interface {
	Ready() error
}

// shared is what the controllers of a process have in common.
type shared struct {
	settings  settings
	driver    csiclient.Driver
	csi       *csiclient.Client // nil where no role calls the driver
	informers *kube.Informers
	metadata  metadata.Interface // for watches of kinds that may not exist
	events    record.EventRecorder
	registry  prometheus.Registerer
	queues    *workloop.Metrics
	// attacher and capacity are nil where this process does not have their role. They
	// are built first.
	attacher *attacher.Controller
	capacity *capacity.Controller
	// nodecontroller is the resolved configuration of that role, where it runs.
	nodecontroller nodecontroller.Config
	locks          *volumelock.Locks
}

var provisionerRole = role{
	section:  "provisioner",
	options:  provisionerOptions,
	validate: func(s settings) error { return s.provisioner().Validate() },
	timeout:  func(s settings) time.Duration { return s.Provisioner.Timeout },
	lease:    func(_ settings, driver string) string { return provisioner.LeaseName(driver) },
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

// unlimitedClient is a client of the same role for what must not wait for its rate limit.
func unlimitedClient(restConfig *rest.Config) (kubernetes.Interface, error) {
	unlimited := rest.CopyConfig(restConfig)
	unlimited.QPS, unlimited.Burst = -1, 0
	return kubernetes.NewForConfig(unlimited)
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
	unlimited, err := unlimitedClient(restConfig)
	if err != nil {
		return nil, err
	}
	cfg := s.settings.provisioner()
	if _, set := s.settings.Common.FeatureGates["VolumeAttributesClass"]; !set && !kube.ServesKind(client.Discovery(), storagev1.SchemeGroupVersion, "VolumeAttributesClass") {
		klog.FromContext(ctx).Info("The API server does not serve VolumeAttributesClasses: they are ignored")
		cfg.VolumeAttributesClass = false
	}
	deps := provisioner.Deps{
		Driver:            s.driver,
		Client:            client,
		UnthrottledClient: unlimited,
		Snapshots:         snapshots,
		Metadata:          s.metadata,
		Informers:         s.informers,
		CSI:               s.csi.Controller(),
		Ready:             s.csi.WaitReady,
		Events:            s.events,
		Registry:          s.registry,
		Queues:            s.queues,
		Locks:             s.locks,
	}
	if s.capacity != nil {
		deps.VolumeObserver = s.capacity
	}
	if s.attacher != nil {
		deps.RemovableFinalizers = s.attacher.RemovableFinalizers
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
	lease:    func(_ settings, driver string) string { return attacher.LeaseName(driver) },
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
			Locks:     s.locks,
		})
		return s.attacher, err
	},
}

var capacityRole = role{
	section:  "capacity",
	options:  capacityOptions,
	enabled:  func(s settings) bool { return s.Capacity.Enabled },
	limit:    func(s settings) (float64, int) { return s.Capacity.QPS, s.Capacity.Burst },
	validate: func(s settings) error { return s.capacity().Validate() },
	timeout:  func(s settings) time.Duration { return s.Capacity.Timeout },
	// csi-provisioner does both under one.
	lease: func(_ settings, driver string) string { return provisioner.LeaseName(driver) },
	supported: func(d csiclient.Driver) error {
		return lacking(d, "GET_CAPACITY", d.Controller.GetCapacity)
	},
	environment: settings.capacityEnvironment,
	build:       buildCapacity,
}

// capacityAlone is the role where it is all that a process does. It has a Lease of its own
// then: that of the provisioner it would keep from whoever provisions, for ever.
var capacityAlone = func() role {
	r := capacityRole
	r.lease = func(_ settings, driver string) string { return provisioner.LeaseName(driver) + "-capacity" }
	return r
}()

// capacity is the configuration of the role with what does not come from flags.
func (s settings) capacity() capacity.Config {
	cfg := s.Capacity
	cfg.NodeName = os.Getenv("NODE_NAME")
	return cfg
}

// capacityEnvironment reports what of the environment is missing for publishing capacity.
func (s settings) capacityEnvironment() error {
	var errs []error
	if os.Getenv("NAMESPACE") == "" {
		errs = append(errs, errors.New("the environment variable NAMESPACE must name the namespace of the CSIStorageCapacity objects; set it from metadata.namespace"))
	}
	if s.Capacity.OwnerRefLevel >= 0 && os.Getenv("POD_NAME") == "" {
		errs = append(errs, errors.New("the environment variable POD_NAME must name the pod of this process; set it from metadata.name, or --capacity-ownerref-level=-1 for objects without an owner"))
	}
	return errors.Join(errs...)
}

func buildCapacity(ctx context.Context, s *shared, restConfig *rest.Config) (controller, error) {
	client, err := kubernetes.NewForConfig(restConfig)
	if err != nil {
		return nil, err
	}
	cfg := s.settings.capacity()
	deps := capacity.Deps{
		Driver:    s.driver,
		Client:    client,
		Informers: s.informers,
		CSI:       s.csi.Controller(),
		Ready:     s.csi.WaitReady,
		Registry:  s.registry,
		Queues:    s.queues,
		Namespace: os.Getenv("NAMESPACE"),
	}
	meta, err := metadata.NewForConfig(restConfig) // unlike that of the watches it gives up
	if err != nil {
		return nil, err
	}
	deps.Owner, err = capacity.FindOwner(ctx, meta, client.Discovery(), deps.Namespace, os.Getenv("POD_NAME"), cfg.OwnerRefLevel)
	if err != nil {
		return nil, err
	}
	if deps.Beta, err = capacity.Beta(ctx, client.Discovery()); err != nil {
		return nil, err
	}
	if cfg.NodeDeployment {
		node, err := s.csi.NodeInfo(ctx)
		if err != nil {
			return nil, err
		}
		deps.Topology = node.GetAccessibleTopology().GetSegments()
	}
	s.capacity, err = capacity.New(cfg, deps)
	return s.capacity, err
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
	if s.Common.CSISocket != "" {
		cfg.Address = s.Common.CSISocket
	}
	cfg.ExitOnConnectionLoss = s.Common.ExitOnConnectionLoss
	cfg.MaxLogLength = s.Common.MaxGRPCLogLength
	cfg.Timeout = 0
	for i, r := range roles { // the most patient role decides
		if timeout := r.timeout(s); i == 0 || timeout > cfg.Timeout { // a negative one is reported as it is
			cfg.Timeout = timeout
		}
	}
	return cfg
}

func (s settings) leaseConfig() election.Config {
	return election.Config{
		LeaseDuration: s.Common.LeaseDuration, RenewDeadline: s.Common.RenewDeadline, RetryPeriod: s.Common.RetryPeriod,
	}
}

// tracingConfig is how to tell of the work for driver; its endpoint is empty for not at all.
func (s settings) tracingConfig(driver string) tracing.Config {
	return tracing.Config{
		Endpoint: s.Common.OTLPEndpoint, Ratio: s.Common.OTLPSamplingRatio,
		Service: "storage-controller/" + driver, Version: buildVersion(),
	}
}

// serverConfig is that of the diagnostics server.
func (s settings) serverConfig() metrics.Config {
	c := s.Common
	cfg := metrics.Config{
		HealthAddress: address(c.HealthBindAddress), ProfilingAddress: address(c.ProfilingBindAddress),
		MetricsPath: c.MetricsPath, Pprof: c.EnablePprof, LeaderElection: c.LeaderElection,
	}
	for _, a := range s.endpoints() { // which has at most one
		cfg.Address = a
	}
	return cfg
}

// endpoints are the addresses for everything, under their names.
func (s settings) endpoints() map[string]string {
	c, set := s.Common, map[string]string{}
	for name, a := range map[string]string{
		"--http-endpoint": c.HTTPEndpoint, "--metrics-address": c.MetricsAddress, "--metrics-bind-address": address(c.MetricsBindAddress),
	} {
		if a != "" {
			set[name] = a
		}
	}
	return set
}

// address is text, or nothing where that means none, as "0" does.
func address(text string) string {
	if text == "0" {
		return ""
	}
	return text
}
