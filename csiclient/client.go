// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csiclient

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/storage-controller/storage-controller/internal/pressure"
	"golang.org/x/sync/singleflight"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
)

// Config configures the connection to the driver.
type Config struct {
	// Address is the socket of the driver: an absolute path, unix:PATH or unix://PATH.
	Address string
	// Timeout bounds each call of [Client.Connect], [Client.Run] and [Client.NodeInfo]. Callers set the deadlines of other calls.
	Timeout time.Duration
	// ExitOnConnectionLoss makes [Client.Run] return when the connection is lost.
	ExitOnConnectionLoss bool
	// NodeExpansion has [Client.Connect] read whether the node service expands volumes, unless the
	// controller service does.
	NodeExpansion bool
	// MaxLogLength truncates logged responses to that many bytes, if positive.
	MaxLogLength int
	// Dial opens the connections to Address. Nil means the socket.
	Dial dialer
	// OwnDriver means that Dial reaches a driver of this process, which becomes ready while the process works: [Client.Connect]
	// does not wait for that, and [Client.CheckHealth] does not require it.
	OwnDriver bool
	// AdaptiveConcurrency limits the calls that run at a time, see [Client.Limited].
	AdaptiveConcurrency bool
	// FirstLimit is the limit of each method before the first calls have ended. Zero means none.
	FirstLimit int
	// Registry returns the registry with the durations of the calls of a method, such as /csi.v1.Controller/CreateVolume. Nil
	// means that of [New].
	Registry func(method string) prometheus.Registerer
}

// DefaultConfig returns the defaults of the flags.
func DefaultConfig() Config {
	return Config{Address: "/run/csi/socket", Timeout: 15 * time.Second, MaxLogLength: -1}
}

// Validate returns all errors in c.
func (c Config) Validate() error {
	var errs []error
	if _, err := c.path(); err != nil {
		errs = append(errs, err)
	}
	if c.Timeout <= 0 {
		errs = append(errs, fmt.Errorf("--timeout: must be positive, got %v", c.Timeout))
	}
	return errors.Join(errs...)
}

type dialer func(ctx context.Context, address string) (net.Conn, error)

// path returns the path of the socket. Network addresses are invalid, because only a local
// connection reports reliably that it was lost.
func (c Config) path() (string, error) {
	path := c.Address
	if rest, ok := strings.CutPrefix(path, "unix:"); ok {
		path = strings.TrimPrefix(rest, "//")
	}
	if !strings.HasPrefix(path, "/") {
		return "", fmt.Errorf("--csi-address: must be an absolute path, optionally after unix: or unix://, got %q", c.Address)
	}
	return path, nil
}

const (
	// probeInterval is the time between two probes of a driver that is not ready.
	probeInterval = time.Second
	// waitLogInterval is the time between two log lines while waiting for the driver.
	waitLogInterval = 10 * time.Second
)

// Client is a connection to a driver. Its methods are safe for concurrent use.
type Client struct {
	cfg        Config
	conn       *grpc.ClientConn
	identity   csi.IdentityClient
	controller csi.ControllerClient
	node       csi.NodeClient
	group      csi.GroupControllerClient
	recorder   *recorder
	calls      *calls
	losses     prometheus.Counter
	gate       *pressure.Gate // nil: nothing is limited
	health     singleflight.Group

	mu       sync.Mutex
	driver   Driver
	ready    chan struct{}            // closed while ready
	lost     chan struct{}            // closed while not ready
	reason   error                    // nil while ready
	lastErr  error                    // of the last attempt to open the socket or to read from the driver
	nodeInfo *csi.NodeGetInfoResponse // nil: it was not read
}

// New returns a client and registers its metrics. [Client.Connect] connects it.
func New(cfg Config, reg prometheus.Registerer) (*Client, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	registry := cfg.Registry
	if registry == nil {
		registry = func(string) prometheus.Registerer { return reg }
	}
	c := &Client{
		cfg: cfg, recorder: &recorder{registry: registry}, calls: newCalls(),
		ready: make(chan struct{}), lost: make(chan struct{}), reason: errors.New("not connected to the driver yet"),
	}
	close(c.lost)
	c.losses = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "storage_controller_csi_connection_losses_total",
		Help: "Lost connections to the CSI driver.",
	})
	reg.MustRegister(c.losses, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "storage_controller_csi_ready",
		Help: "1 if the CSI driver is connected and ready, else 0.",
	}, func() float64 {
		if c.CheckReady() != nil {
			return 0
		}
		return 1
	}))
	path, err := cfg.path()
	if err != nil {
		return nil, err
	}
	if cfg.Dial == nil {
		cfg.Dial = func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}
	}
	dial := cfg.Dial
	cfg.Dial = func(ctx context.Context, address string) (net.Conn, error) {
		conn, err := dial(ctx, address)
		c.recordError(err)
		return conn, err
	}
	if cfg.AdaptiveConcurrency {
		c.gate = pressure.New(klog.Background(), reg, cfg.FirstLimit)
	}
	c.conn, err = cfg.dial(pressure.Intercept, traced, c.calls.intercept, c.recorder.intercept, logger{cfg.MaxLogLength}.intercept)
	if err != nil {
		return nil, err
	}
	c.identity = csi.NewIdentityClient(c.conn)
	c.controller = csi.NewControllerClient(c.conn)
	c.node = csi.NewNodeClient(c.conn)
	c.group = csi.NewGroupControllerClient(c.conn)
	return c, nil
}

// dial returns a connection, which is established by the first call.
func (c Config) dial(interceptors ...grpc.UnaryClientInterceptor) (*grpc.ClientConn, error) {
	path, err := c.path()
	if err != nil {
		return nil, err
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithIdleTimeout(0), // closing an idle connection would look like a loss
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: time.Second,
		}),
		grpc.WithMaxHeaderListSize(maxResponse), // the text of an error is a header
		grpc.WithAuthority("localhost"),         // some servers reject the path of the socket
		grpc.WithChainUnaryInterceptor(append(interceptors, limited)...),
	}
	if c.Dial != nil {
		options = append(options, grpc.WithContextDialer(c.Dial))
	}
	conn, err := grpc.NewClient("unix://"+path, options...)
	if err != nil {
		return nil, fmt.Errorf("--csi-address %q: %w", c.Address, err)
	}
	return conn, nil
}

// recordError makes err part of the reason for which the client is not ready.
func (c *Client) recordError(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lastErr = err
}

// Close closes the connection.
func (c *Client) Close() error { return c.conn.Close() }

// Limited returns the context of loops whose calls are limited while more of them do not complete sooner: see package pressure.
func (c *Client) Limited(ctx context.Context) context.Context { return pressure.WithGate(ctx, c.gate) }

// Controller returns the client of the controller service. Callers set the deadline of each call.
func (c *Client) Controller() csi.ControllerClient { return c.controller }

// GroupController returns the client of the group controller service. Callers set the deadline of
// each call.
func (c *Client) GroupController() csi.GroupControllerClient { return c.group }

// NodeInfo calls NodeGetInfo. From then on, a change of the node's topology is one of the driver: see [Client.Run].
func (c *Client) NodeInfo(ctx context.Context) (*csi.NodeGetInfoResponse, error) {
	response, err := call(ctx, c, c.node.NodeGetInfo, &csi.NodeGetInfoRequest{})
	if err != nil {
		return nil, fmt.Errorf("calling NodeGetInfo of driver %q: %w", c.Driver().Name, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nodeInfo = response
	return response, nil
}

// Driver returns the identity and the capabilities that [Client.Connect] read, and the version that was read last.
func (c *Client) Driver() Driver {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.driver
}

// call calls f with [Config.Timeout].
func call[Q, R any](ctx context.Context, c *Client, f func(context.Context, Q, ...grpc.CallOption) (R, error), request Q) (R, error) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	return f(ctx, request)
}

// Connect waits, without a timeout, until the driver serves the socket and is ready, and reads its
// identity and capabilities. After that, the client is ready. A driver may return any error during
// its start. Connect fails only after one that needs another driver.
func (c *Client) Connect(ctx context.Context) (Driver, error) {
	var driver Driver
	err := c.await(ctx, needsOther, func() (err error) {
		driver, err = c.identify(ctx)
		return err
	})
	if err != nil {
		return Driver{}, err
	}
	c.mu.Lock()
	c.driver = driver
	c.mu.Unlock()
	c.setReady(nil)
	return driver, nil
}

// needsOther reports whether err means that no CSI driver serves the socket, or one that violates the CSI spec.
func needsOther(err error) bool {
	return status.Code(err) == codes.Unimplemented || errors.Is(err, errInvalidName)
}

// await waits until the driver is connected and ready, and read succeeds. It repeats all of it every second after an error, unless
// final returns true for it.
func (c *Client) await(ctx context.Context, final func(error) bool, read func() error) error {
	log := klog.FromContext(ctx)
	var last error
	var logged time.Time
	for {
		if err := c.awaitConnection(ctx); err != nil {
			return waitError(ctx, c.cfg.Address, last)
		}
		var err error
		if !c.cfg.OwnDriver {
			err = c.probe(ctx)
		}
		if err == nil {
			err = read()
		}
		// A driver may report the deadline of ctx before the timer of ctx has fired.
		if deadline, ok := ctx.Deadline(); ok && !time.Now().Before(deadline) {
			<-ctx.Done()
		}
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return waitError(ctx, c.cfg.Address, last)
		case final(err):
			return err
		}
		if last == nil || last.Error() != err.Error() || time.Since(logged) > waitLogInterval {
			logged = time.Now()
			log.Info("Driver is not ready yet, retrying", "address", c.cfg.Address, "err", err)
		}
		last = err
		c.recordError(err)
		select {
		case <-ctx.Done():
		case <-time.After(probeInterval):
		}
	}
}

// waitError returns the error of a wait for the driver at address whose context has ended. last is the last error of the driver, or nil.
func waitError(ctx context.Context, address string, last error) error {
	err := fmt.Errorf("waiting for the driver at %s: %w", address, context.Cause(ctx))
	if last != nil {
		return fmt.Errorf("%w; the last error was: %w", err, last)
	}
	return err
}

// awaitConnection waits until the connection is established.
func (c *Client) awaitConnection(ctx context.Context) error {
	log, start := klog.FromContext(ctx), time.Now()
	for {
		state := c.conn.GetState()
		if state == connectivity.Ready {
			return nil
		}
		if state == connectivity.Idle {
			c.conn.Connect()
		}
		wait, cancel := context.WithTimeout(ctx, waitLogInterval)
		changed := c.conn.WaitForStateChange(wait, state)
		cancel()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if !changed {
			log.Info("Still connecting to the driver. Check that it is running and serves this socket",
				"address", c.cfg.Address, "waited", time.Since(start).Round(time.Second), "err", c.CheckReady())
		}
	}
}

// probe returns an error unless the driver is ready.
func (c *Client) probe(ctx context.Context) error {
	response, err := call(ctx, c, c.identity.Probe, &csi.ProbeRequest{})
	if err != nil {
		return fmt.Errorf("probing the driver at %s: Probe: %w", c.cfg.Address, err)
	}
	if !isReady(response) {
		return errNotReady
	}
	return nil
}
