// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/nodecontroller"
	"github.com/storage-controller/storage-controller/provisioner"
	"github.com/storage-controller/storage-controller/topolvm"
)

const topolvmName = "topolvm"

// LegacyVariable is the environment variable that selects the first name of the driver with any value, as in topolvm-controller.
const LegacyVariable = "USE_LEGACY"

// Topolvm returns the roles of the controller pod of TopoLVM, with its CSI service. replacing reports that the program runs under the
// name topolvm-controller: the sidecars of the pod call the service, and the flags have the defaults of topolvm-controller.
func Topolvm(replacing bool) Selection {
	legacy := os.Getenv(LegacyVariable) != ""
	defaults := func(s *Settings) {
		c := &s.Common
		c.CSIAddress = "" // the command has no such option
		c.CSISocket, c.HealthBindAddress = "/run/topolvm/csi-topolvm.sock", ":8081"
		for _, role := range s.ofRoles {
			role.Election.Enabled = true
		}
		own := s.ofRoles[nodecontrollerName]
		own.Endpoint.MetricsBindAddress = ":8080"
		s.Provisioner.ProvisioningProtection, s.Provisioner.ExtraCreateMetadata = provisioner.ProtectionAlways, true
		s.Provisioner.StrictTopology = false
		s.Capacity.OwnerRefLevel = 2
		s.Nodecontroller.ResizeNudge = true
		s.topolvm.UseLegacy = legacy
		if replacing {
			c.Controllers, s.Nodecontroller.EnableWebhooks = settings.Names{nodecontrollerName}, true
			own.Election.Timing.RetryPeriod = 2 * time.Second
		} else {
			c.DriverHealthEndpoint = ":9808"
		}
	}
	return Selection{
		all: true, service: true, defaults: defaults,
		roles: []Role{provisionerRole, capacityRole, nodecontrollerRole, resizerRole, snapshotterRole},
	}
}

// serviceConfig holds the flags of the CSI service of TopoLVM.
type serviceConfig struct {
	Served bool // the process serves the driver

	UseLegacy bool
	Block     string // quantities
	Ext4      string
	XFS       string
	Btrfs     string

	ZapEncoder  string
	ZapLogLevel string
	// These have no effect.
	ZapDevel           bool
	ZapStacktraceLevel string
	ZapTimeEncoding    string
}

// defaultService returns the defaults. served reports that the process serves the driver.
func defaultService(served bool) serviceConfig {
	return serviceConfig{Served: served, Block: "8Mi", Ext4: "32Mi", XFS: "300Mi", Btrfs: "200Mi"}
}

// addFlags adds the flags of the service to fs. Their defaults are the values in c.
func (c *serviceConfig) addFlags(fs *pflag.FlagSet) {
	const smaller = "; smaller requests get it; 0 and negative values mean none"
	fs.BoolVar(&c.UseLegacy, "use-legacy", c.UseLegacy,
		"serve the driver topolvm.cybozu.com, as with a value of the environment variable "+LegacyVariable)
	fs.StringVar(&c.Block, "minimum-allocation-block", c.Block, "minimum size of block volumes"+smaller)
	fs.StringVar(&c.Ext4, "minimum-allocation-ext4", c.Ext4, "minimum size of volumes with ext4"+smaller)
	fs.StringVar(&c.XFS, "minimum-allocation-xfs", c.XFS, "minimum size of volumes with xfs"+smaller)
	fs.StringVar(&c.Btrfs, "minimum-allocation-btrfs", c.Btrfs, "minimum size of volumes with btrfs"+smaller)
	fs.StringVar(&c.ZapEncoder, "zap-encoder", c.ZapEncoder, "json or console: sets --logging-format to json or text")
	fs.StringVar(&c.ZapLogLevel, "zap-log-level", c.ZapLogLevel,
		"debug, info, error, panic or a number: sets --v to 1, 0, 0, 0 or the number")
	fs.BoolVar(&c.ZapDevel, "zap-devel", c.ZapDevel, "has no effect")
	fs.StringVar(&c.ZapStacktraceLevel, "zap-stacktrace-level", c.ZapStacktraceLevel, "has no effect")
	fs.StringVar(&c.ZapTimeEncoding, "zap-time-encoding", c.ZapTimeEncoding, "has no effect")
}

// driver returns the name of the driver that this process serves, "" for none.
func (c serviceConfig) driver() string {
	switch {
	case !c.Served:
		return ""
	case c.UseLegacy:
		return topolvm.LegacyDriver
	}
	return topolvm.Driver
}

// unserved returns why the nodecontroller must not run for driver in a process with s, if it must not.
//
// For a driver of TopoLVM it runs only where the process serves the driver. Elsewhere it would have no LogicalVolumes, and it would
// share the Lease with topolvm-controller, so that chance decides which of them cleans up after a lost node.
func unserved(s Settings, driver string) error {
	if !topolvm.IsDriver(driver) || s.topolvm.driver() == driver {
		return nil
	}
	return &UsageError{fmt.Errorf("the driver is %q: this role and topolvm-controller would delete with one Lease, and the "+
		"LogicalVolumes of lost nodes would stay. Run the command topolvm in place of topolvm-controller", driver)}
}

// unreleased returns the finalizer of topolvm-node on Nodes that none of the chosen roles removes, or "".
func (c Config) unreleased(chosen []Role, driver string) string {
	if !c.service || contains(chosen, nodecontrollerName) {
		return ""
	}
	return nodecontroller.NodeFinalizer(driver)
}

// minimum returns the smallest sizes of volumes, or an error for each flag that is not a quantity.
func (c serviceConfig) minimum() (topolvm.Minimum, error) {
	var m topolvm.Minimum
	var errs []error
	for _, of := range []struct {
		flag, text string
		size       *int64
	}{{"block", c.Block, &m.Block}, {"ext4", c.Ext4, &m.Ext4}, {"xfs", c.XFS, &m.XFS}, {"btrfs", c.Btrfs, &m.Btrfs}} {
		quantity, err := resource.ParseQuantity(of.text)
		if err != nil {
			errs = append(errs, fmt.Errorf("--minimum-allocation-%s: must be a quantity, such as 32Mi, got %q", of.flag, of.text))
		}
		*of.size = quantity.Value()
	}
	return m, errors.Join(errs...)
}

// logging returns the settings of the logs with those of zap in place of defaults.
func (c serviceConfig) logging(l settings.Logging, origin func(string) settings.Origin) (settings.Logging, error) {
	formats := map[string]string{"": l.Format, "json": "json", "console": "text"}
	levels := map[string]int{"": l.Verbosity, "debug": 1, "info": 0, "error": 0, "panic": 0}
	format, known := formats[c.ZapEncoder]
	if !known {
		return l, fmt.Errorf("--zap-encoder: must be json or console, got %q", c.ZapEncoder)
	}
	level, known := levels[c.ZapLogLevel]
	if !known {
		number, err := strconv.Atoi(c.ZapLogLevel)
		if err != nil || number < 0 {
			return l, fmt.Errorf("--zap-log-level: must be debug, info, error, panic or a number, got %q", c.ZapLogLevel)
		}
		level = number
	}
	if origin("logging-format") == "" {
		l.Format = format
	}
	if origin("v") == "" {
		l.Verbosity = level
	}
	return l, nil
}

// validateService returns every error in the settings of a command that serves the driver.
func (c Config) validateService() error {
	if !c.service {
		return nil
	}
	cfg := c.topolvm
	_, err := cfg.minimum()
	errs := []error{err}
	if name := c.DriverName(); name != cfg.driver() {
		errs = append(errs, fmt.Errorf("--driver-name: is %q, but this command serves the driver %q. Remove the flag, or set --use-legacy",
			name, cfg.driver()))
	}
	return errors.Join(errs...)
}

// served returns the driver with the capabilities that the service reports, as a client reads them.
func (c serviceConfig) served() csiclient.Driver {
	d := csiclient.Driver{Name: c.driver()}
	d.Plugin = csiclient.PluginCapabilities{ControllerService: true, VolumeAccessibilityConstraints: true, ExpandOnline: true,
		ExpandOffline: true}
	d.Controller = csiclient.ControllerCapabilities{CreateDeleteVolume: true, CloneVolume: true, GetCapacity: true, ExpandVolume: true,
		CreateDeleteSnapshot: true}
	return d
}

// serviceGrant returns the permissions of a command that serves driver.
func serviceGrant(driver string) rbac.Grant {
	other := topolvm.LegacyDriver
	if driver == other {
		other = topolvm.Driver
	}
	ofOther := func(a rbac.Access) bool { return a.Group == other }
	return rbac.Grant{File: topolvmName, Accesses: slices.DeleteFunc(rbac.Of(topolvmName, ""), ofOther)}
}

// serviceAPI returns the kind without which a command cannot serve driver.
func serviceAPI(driver string) doctor.API {
	return doctor.API{GroupVersion: driver + "/v1", Resource: "logicalvolumes", For: "the volumes of TopoLVM",
		Hint: "install the CustomResourceDefinition of TopoLVM"}
}

// ownDriver is the CSI service of TopoLVM in this process. The roles call it in memory, other containers of the pod on its socket.
type ownDriver struct {
	service *topolvm.Service
	memory  *bufconn.Listener
	server  *grpc.Server  // of memory
	served  chan struct{} // closed when the socket is not served any more, with the result err
	err     error
	stop    context.CancelFunc
	grace   time.Duration // for running calls at the end
}

// memorySize is the number of bytes that a connection in memory buffers in each direction.
const memorySize = 64 << 10

// startDriver serves the driver from now on. New calls on the socket fail once ctx ends.
func (p *process) startDriver(ctx context.Context) (*ownDriver, error) {
	cfg := p.topolvm
	for _, name := range []string{"zap-devel", "zap-stacktrace-level", "zap-time-encoding"} {
		if p.Origin(topolvmName+"."+name) != "" {
			klog.FromContext(ctx).Info("Flag has no effect", "flag", "--"+name)
		}
	}
	minimum, err := cfg.minimum()
	if err != nil {
		return nil, err
	}
	service, err := topolvm.New(topolvm.Config{Driver: cfg.driver(), Version: p.Version, Minimum: minimum}, p.registries.first)
	if err != nil {
		return nil, err
	}
	d := &ownDriver{service: service, memory: bufconn.Listen(memorySize), served: make(chan struct{}),
		grace: p.DriverConfig().Timeout + 10*time.Second}
	var options []grpc.ServerOption
	serve := func(ctx context.Context) error { // nothing
		<-ctx.Done()
		return nil
	}
	if p.DriverCalls != nil {
		options = append(options, grpc.ChainUnaryInterceptor(p.DriverCalls))
	} else {
		socket, err := openSocket(ctx, p.DriverConfig().Address)
		if err != nil {
			return nil, fmt.Errorf("--csi-socket: %w", err)
		}
		serve = func(ctx context.Context) error { return socket.serve(ctx, service.Server(), d.grace) }
	}
	d.server = service.Server(options...)
	served, stop := context.WithCancel(ctx)
	d.stop = stop
	go func() {
		defer close(d.served)
		d.err = serve(served)
	}()
	go func() { _ = d.server.Serve(d.memory) }() // ends with the server
	klog.FromContext(ctx).Info("Serving the CSI driver", "driver", cfg.driver(), "socket", p.DriverConfig().Address)
	return d, nil
}

// dial returns a connection in memory.
func (d *ownDriver) dial(ctx context.Context, _ string) (net.Conn, error) {
	return d.memory.DialContext(ctx)
}

// attach gives the service its caches, before they start.
func (d *ownDriver) attach(ctx context.Context, s *shared, config *rest.Config, version string) error {
	s.service = d.service
	s.informers.Retain(topolvm.RetainedFields())
	return d.service.Attach(ctx, topolvm.Deps{
		Requests: kube.ForRole(config, version, topolvmName, 0, 0), Watches: s.watches, Informers: s.informers.For(topolvmName),
		CapacityChanged: func(node, _ string) {
			if c := s.running.capacity.Load(); c != nil {
				c.SegmentChanged(map[string]string{d.service.TopologyKey(): node})
			}
		},
		RetryClaim: func(claim string) {
			if p := s.running.provisioner.Load(); p != nil {
				p.Retry(claim)
			}
		},
	})
}

// wait waits until the socket is not served any more.
func (d *ownDriver) wait() error {
	<-d.served
	return d.err
}

// close ends the service after the roles have ended.
func (d *ownDriver) close(ctx context.Context) {
	d.stop()
	_ = d.wait() // reported before
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.grace)
	defer cancel()
	d.service.Shutdown(ctx)
	d.server.Stop()
}

// driverConfig returns the configuration of the connection to the driver, which may be d.
func (d *ownDriver) driverConfig(cfg csiclient.Config) csiclient.Config {
	if d != nil {
		cfg.Dial, cfg.OwnDriver = d.dial, true
	}
	return cfg
}
