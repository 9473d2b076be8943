package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tools/statusz"
	"github.com/storage-controller/storage-controller/internal/tracing"
	"github.com/storage-controller/storage-controller/internal/volumelock"
	"github.com/storage-controller/storage-controller/internal/workloop"
	"github.com/storage-controller/storage-controller/metrics"
)

// firstList bounds the wait for the first list of every watched kind. What takes
// longer is a missing permission, which no waiting repairs.
const firstList = 2 * time.Minute

// lastSpans bounds the sending of the last spans at the end.
const lastSpans = 5 * time.Second

// terminationLog is where Kubernetes looks for the last words of a container. It is
// another file in tests.
var terminationLog = "/dev/termination-log"

// newRoleCommand makes the command that runs some of roles. all tells whether the driver
// decides which; else the first of them always runs, and the others are enabled by flags.
func newRoleCommand(use, name string, all bool, roles ...role) *cobra.Command {
	cmd := &cobra.Command{
		Use:   use,
		Short: shortHelp[use],
		Args:  noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if v, _ := cmd.Flags().GetBool("version"); v {
				fmt.Fprintln(cmd.OutOrStdout(), name, buildVersion())
				return nil
			}
			s, err := readSettings(cmd.Flags(), all, roles)
			if err != nil {
				return err
			}
			roles := s.enabled(roles, all)
			if err := errors.Join(s.validate(roles...), s.environment(roles, all)); err != nil {
				return err
			}
			log, flush, err := setUpLogging(s.Common.Logging)
			if err != nil {
				return err
			}
			defer flush()
			ctx, stop := untilSignal(log)
			defer stop()
			p := &process{settings: s, roles: roles, all: all}
			if print, _ := cmd.Flags().GetBool("print-config"); print {
				return p.printConfig(ctx, cmd.OutOrStdout())
			}
			return p.run(ctx)
		},
	}
	options := optionsOf(roles, all)
	if !all {
		options = withoutRepeated(options)
	}
	registerFlags(cmd.Flags(), commonOptions(all, roles...), options)
	return cmd
}

// withoutRepeated leaves each option to the first of roles that has it: one flag sets it
// for all of them.
func withoutRepeated(roles []roleOptions) []roleOptions {
	for i := range roles {
		roles[i].options = slices.DeleteFunc(roles[i].options, func(o option) bool { return sectionsWith(roles[:i], o.name) != nil })
	}
	return roles
}

var shortHelp = map[string]string{
	"provision":      "Create volumes for claims and delete them (replaces csi-provisioner)",
	"attach":         "Attach volumes to nodes and detach them (replaces csi-attacher)",
	"capacity":       "Publish how much room the driver has, for the scheduler (replaces csi-provisioner --enable-capacity)",
	"nodecontroller": "Clean up after nodes that are gone, help claims and pods of volumes that live on one node (replaces the Kubernetes side of topolvm-controller)",
	"all":            "Run every role that the driver supports in one process",
}

// untilSignal is a context that ends at the first SIGTERM or SIGINT, so that
// running work is finished; a second one ends the process at once.
func untilSignal(log logr.Logger) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(klog.NewContext(context.Background(), log))
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		for s := range signals {
			if ctx.Err() != nil {
				log.Info("Second signal, exiting at once", "signal", s.String())
				os.Exit(exitFailure)
			}
			log.Info("Shutting down: finishing what is running", "signal", s.String())
			cancel(fmt.Errorf("received %v: %w", s, workloop.ErrDrain))
		}
	}()
	return ctx, func() { signal.Stop(signals); close(signals) }
}

// process is one run of the program.
type process struct {
	settings settings
	roles    []role
	all      bool // the driver decides which of them run
}

// run works until ctx ends or something fails that no retry repairs. Things
// stop in the opposite order of their start: the workers first, the diagnostics last.
func (p *process) run(ctx context.Context) error {
	log := klog.FromContext(ctx)
	c := p.settings.Common
	log.Info("Starting", "version", buildVersion())
	for _, gate := range c.FeatureGates.withoutEffect() {
		log.Info("This feature gate has graduated, its value has no effect", "featureGate", gate)
	}
	// What serves the workers outlives them.
	services, stopServices := context.WithCancel(context.WithoutCancel(ctx))

	registry := metrics.NewRegistry(buildVersion())
	page := &status{settings: p.settings, started: time.Now()}
	server, err := p.serve(services, registry, page)
	if err != nil {
		stopServices()
		return err
	}
	defer server.wait() // after stopServices: the last to end
	defer stopServices()
	server.ready("shutdown", func() error { // first of all, so that nobody sends more work
		if ctx.Err() != nil {
			return errors.New("the process is about to end")
		}
		return nil
	})
	restConfig, err := kube.RESTConfig(c.Kubeconfig, c.Master)
	if err != nil {
		return err
	}
	csi, driver, err := p.connect(ctx, registry, server, page)
	if csi != nil {
		defer csi.Close()
	}
	if err != nil {
		if errors.Is(context.Cause(ctx), workloop.ErrDrain) {
			return nil
		}
		return err
	}

	terms, err := p.build(ctx, services, restConfig, registry, csi, driver, server, page)
	if err != nil {
		return ignoreDrain(ctx, err)
	}
	defer terms.stop()
	return p.work(ctx, services, stopServices, csi, driver.Name, terms)
}

// work runs the terms, and ends when they have ended or the connection has. After the terms
// nobody needs services any more, so that it stops them.
func (p *process) work(ctx, services context.Context, stopServices func(), csi *csiclient.Client, driver string, terms *terms) error {
	log := klog.FromContext(ctx)
	traced, stopTracing, err := tracing.Start(ctx, p.settings.tracingConfig(driver))
	if err != nil {
		return err
	}
	defer func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastSpans) // ctx has ended
		defer cancel()
		if err := stopTracing(last); err != nil {
			log.Info("The last spans were not sent", "err", err)
		}
	}()
	work, cancel := context.WithCancelCause(traced)
	defer cancel(nil)
	var group errgroup.Group
	if csi != nil {
		group.Go(func() error { return endAll(cancel, connection(services, csi)) })
	}
	group.Go(func() error {
		defer stopServices()
		return endAll(cancel, terms.run(work))
	})
	if err := group.Wait(); err != nil {
		return err
	}
	log.Info("Stopped")
	return nil
}

// connect asks the driver who it is. Where nobody calls the driver there is no client.
func (p *process) connect(ctx context.Context, registry prometheus.Registerer, server *diagnostics, page *status) (*csiclient.Client, csiclient.Driver, error) {
	log := klog.FromContext(ctx)
	if name := p.settings.unconnected(p.roles); name != "" {
		log.Info("Working without a connection to the driver", "driver", name)
		return nil, csiclient.Driver{Name: name}, nil
	}
	csi, err := csiclient.New(p.settings.driverConfig(p.roles...), registry)
	if err != nil {
		return nil, csiclient.Driver{}, err
	}
	page.connecting(csi)
	server.ready("driver", csi.CheckReady)
	driver, err := csi.Connect(ctx)
	if err != nil {
		return csi, csiclient.Driver{}, err
	}
	log.Info("Connected to the driver", "driver", driver.Name, "version", driver.VendorVersion)
	return csi, driver, nil
}

// endAll has everything else end because of err, without draining.
func endAll(cancel context.CancelCauseFunc, err error) error {
	if err != nil {
		cancel(err)
	}
	return err
}

// connection watches the connection to the driver and leaves a message for
// Kubernetes when its end is that of the process.
func connection(ctx context.Context, csi *csiclient.Client) error {
	err := csi.Run(ctx)
	if err != nil {
		// Outside of a container there is no such file, and nobody to read it.
		if f, openErr := os.OpenFile(terminationLog, os.O_WRONLY, 0); openErr == nil {
			fmt.Fprintln(f, "Lost connection to CSI driver, exiting")
			f.Close()
		}
	}
	return err
}

// build makes the watches and the controllers of the chosen roles. What it starts lasts as
// long as services; ctx ends its questions.
func (p *process) build(ctx, services context.Context, restConfig *rest.Config, registry prometheus.Registerer,
	csi *csiclient.Client, driver csiclient.Driver, server *diagnostics, page *status) (*terms, error) {
	log := klog.FromContext(ctx)
	chosen, skipped := p.settings.choose(p.roles, p.all, driver)
	for _, why := range skipped {
		log.Info("Leaving out a role", "reason", why.Error())
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("driver %q supports none of the roles; nothing to do", driver.Name)
	}
	client, meta, err := watchClients(restConfig)
	if err != nil {
		return nil, err
	}
	events, stopEvents, err := startEvents(services, restConfig, driver.Name)
	if err != nil {
		return nil, err
	}
	sh := &shared{
		settings: p.settings, driver: driver, csi: csi, registry: registry, events: events,
		informers: kube.NewInformers(client, meta, driver.Name), metadata: meta,
		queues: workloop.NewMetrics(registry), locks: &volumelock.Locks{},
	}
	for _, r := range chosen {
		if r.prepare == nil {
			continue
		}
		if err := r.prepare(sh); err != nil {
			stopEvents()
			return nil, fmt.Errorf("%s: %w", r.section, err)
		}
	}
	t := &terms{settings: p.settings, informers: sh.informers, stopEvents: stopEvents, server: server}
	for _, r := range buildOrder(chosen) {
		if err := sh.addRole(ctx, t, r, restConfig); err != nil {
			return nil, err
		}
	}
	if err := t.prepare(restConfig, registry, events, driver.Name); err != nil {
		return nil, err
	}
	page.working(t, sh.queues)
	sh.informers.Start(services)
	server.ready("informers", sh.informers.Synced)
	return t, nil
}

// watchClients are the clients of all watches.
func watchClients(restConfig *rest.Config) (kubernetes.Interface, metadata.Interface, error) {
	watch := kube.ForWatches(restConfig, buildVersion())
	client, err := kubernetes.NewForConfig(watch)
	if err != nil {
		return nil, nil, fmt.Errorf("making the client for watches: %w", err)
	}
	meta, err := metadata.NewForConfig(watch)
	if err != nil {
		return nil, nil, fmt.Errorf("making the client for watches: %w", err)
	}
	return client, meta, nil
}

// addRole makes the controller of r, and has it work in t.
func (s *shared) addRole(ctx context.Context, t *terms, r role, restConfig *rest.Config) error {
	qps, burst := s.settings.Common.KubeAPIQPS, s.settings.Common.KubeAPIBurst
	if r.limit != nil {
		qps, burst = r.limit(s.settings)
	}
	c, err := r.build(ctx, s, kube.ForRole(restConfig, buildVersion(), r.section, float32(qps), burst))
	if err != nil {
		return fmt.Errorf("%s: %w", r.section, err)
	}
	lease := r.lease(s.settings, s.driver.Name)
	t.add(r, lease, c)
	if r.section == provisionerRole.section {
		if err := s.addAudit(t, lease); err != nil {
			return fmt.Errorf("audit: %w", err)
		}
	}
	if c, ok := c.(checked); ok {
		t.server.ready(r.check, c.Ready)
	}
	return nil
}

// diagnostics is the HTTP server, if there is one.
type diagnostics struct {
	server *metrics.Server // nil: none
	done   sync.WaitGroup
}

// serve starts the server before anything else, so that it can tell what is missing.
func (p *process) serve(ctx context.Context, registry *prometheus.Registry, page *status) (*diagnostics, error) {
	cfg, d := p.settings.serverConfig(), &diagnostics{}
	cfg.Handlers, page.checks = page.pages(), d.checks
	if cfg.Address == "" && cfg.HealthAddress == "" && cfg.ProfilingAddress == "" {
		return d, nil
	}
	var err error
	if p.settings.Common.SecureMetrics {
		restConfig, err := kube.RESTConfig(p.settings.Common.Kubeconfig, p.settings.Common.Master)
		if err == nil {
			cfg.Guard, err = newGuard(restConfig)
		}
		if err != nil {
			return nil, fmt.Errorf("--secure-metrics-server: %w", err)
		}
	}
	if d.server, err = metrics.NewServer(cfg, registry); err != nil {
		return nil, err
	}
	d.done.Go(func() {
		if err := d.server.Run(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "The diagnostics server has ended")
		}
	})
	return d, nil
}

// checks is what all checks of health say.
func (d *diagnostics) checks() []statusz.Check {
	var checks []statusz.Check
	for _, r := range d.server.CheckResults(nil) {
		c := statusz.Check{Kind: r.Kind, Name: r.Name}
		if r.Err != nil {
			c.Error = r.Err.Error()
		}
		checks = append(checks, c)
	}
	return checks
}

// wait returns when the server has ended, after its context has.
func (d *diagnostics) wait() { d.done.Wait() }

func (d *diagnostics) ready(name string, check func() error) {
	if d.server != nil {
		d.server.AddReady(name, func(*http.Request) error { return check() })
	}
}

func (d *diagnostics) leaderElection(name string, check func(*http.Request) error) {
	if d.server != nil {
		d.server.AddLeaderElection(name, check)
	}
}

// startEvents makes the recorder for events on objects. Its client is no role's:
// events must not use up the rate limit of the work.
func startEvents(ctx context.Context, restConfig *rest.Config, driver string) (record.EventRecorder, func(), error) {
	client, err := typedcorev1.NewForConfig(kube.ForRole(restConfig, buildVersion(), "events", 0, 0))
	if err != nil {
		return nil, nil, fmt.Errorf("making the client for events: %w", err)
	}
	host, err := os.Hostname()
	if err != nil {
		return nil, nil, fmt.Errorf("reading the host name: %w", err)
	}
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.Events("")})
	component := fmt.Sprintf("%s_%s_%s", driver, host, uuid.NewString())
	return broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component}), broadcaster.Shutdown, nil
}
