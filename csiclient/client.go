package csiclient

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
)

// Config is what an operator may set.
type Config struct {
	// Address is the socket of the driver: an absolute path or unix://PATH.
	Address string
	// Timeout bounds each call of the identity service and each question for capabilities.
	Timeout time.Duration
	// ExitOnConnectionLoss makes [Client.Run] end when the connection is lost.
	ExitOnConnectionLoss bool
	// MaxLogLength cuts logged responses to that many bytes; 0 or less does not.
	MaxLogLength int
}

// DefaultConfig is what is used where the operator sets nothing.
func DefaultConfig() Config {
	return Config{Address: "/run/csi/socket", Timeout: 15 * time.Second, MaxLogLength: -1}
}

// Validate reports everything that is wrong with c.
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

// path is the file of the socket. Other networks are refused: the loss of a
// connection can be told for sure only where both ends are on one machine.
func (c Config) path() (string, error) {
	path := strings.TrimPrefix(c.Address, "unix://")
	if !strings.HasPrefix(path, "/") {
		return "", fmt.Errorf("--csi-address: must be an absolute path or unix:// and one, got %q", c.Address)
	}
	return path, nil
}

const (
	// probeInterval is the time between two looks at a driver that is not ready.
	probeInterval = time.Second
	// maxRecvMsgSize is how many bytes an answer may have. A list of all volumes, without
	// pages, has some hundred bytes per volume.
	maxRecvMsgSize = 256 << 20
	// waitLogInterval is the time between two log lines of a wait.
	waitLogInterval = 10 * time.Second
)

// Client is the connection to a driver. Its methods may be used by many goroutines.
type Client struct {
	cfg        Config
	conn       *grpc.ClientConn
	identity   csi.IdentityClient
	controller csi.ControllerClient
	node       csi.NodeClient
	recorder   *recorder
	calls      *calls
	losses     prometheus.Counter

	mu     sync.Mutex
	driver Driver
	ready  chan struct{} // closed while ready
	reason error         // why not ready; nil while ready
}

// New makes a client and registers its metrics. It connects later, in [Client.Connect].
func New(cfg Config, reg prometheus.Registerer) (*Client, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	path, err := cfg.path()
	if err != nil {
		return nil, err
	}
	c := &Client{cfg: cfg, recorder: newRecorder(reg), calls: newCalls(), ready: make(chan struct{}), reason: errors.New("not connected to the driver yet")}
	c.losses = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "storage_controller_csi_connection_losses_total",
		Help: "How often the connection to the CSI driver was lost.",
	})
	reg.MustRegister(c.losses, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "storage_controller_csi_ready",
		Help: "1 while the CSI driver is connected and ready, else 0.",
	}, func() float64 {
		if c.CheckReady() != nil {
			return 0
		}
		return 1
	}))
	c.conn, err = grpc.NewClient("unix://"+path,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithIdleTimeout(0), // an idle connection that is closed looks like a lost one
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: time.Second,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxRecvMsgSize)),
		grpc.WithAuthority("localhost"), // of the path of a socket some servers make an error
		grpc.WithChainUnaryInterceptor(traced, c.calls.intercept, c.recorder.intercept, logger{cfg.MaxLogLength}.intercept),
	)
	if err != nil {
		return nil, fmt.Errorf("--csi-address %q: %w", cfg.Address, err)
	}
	c.identity = csi.NewIdentityClient(c.conn)
	c.controller = csi.NewControllerClient(c.conn)
	c.node = csi.NewNodeClient(c.conn)
	return c, nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.conn.Close() }

// Controller is the controller service. Callers give each call its deadline.
func (c *Client) Controller() csi.ControllerClient { return c.controller }

// NodeInfo asks the node service of the driver about its node.
func (c *Client) NodeInfo(ctx context.Context) (*csi.NodeGetInfoResponse, error) {
	response, err := call(ctx, c, c.node.NodeGetInfo, &csi.NodeGetInfoRequest{})
	if err != nil {
		return nil, fmt.Errorf("asking driver %q about its node (NodeGetInfo): %w", c.Driver().Name, err)
	}
	return response, nil
}

// Driver is what the driver said in [Client.Connect].
func (c *Client) Driver() Driver {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.driver
}

// call makes a call with the deadline of the configuration.
func call[Q, R any](ctx context.Context, c *Client, f func(context.Context, Q, ...grpc.CallOption) (R, error), request Q) (R, error) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	return f(ctx, request)
}

// Connect waits for the socket and for the driver to be ready, both without
// limit, and asks the driver who it is and what it can do. Any other error of
// the driver is one of Connect. The client is ready afterwards.
func (c *Client) Connect(ctx context.Context) (Driver, error) {
	for {
		if err := c.awaitConnection(ctx); err != nil {
			return Driver{}, err
		}
		again, err := c.probe(ctx)
		if err != nil {
			return Driver{}, err
		}
		if !again {
			break
		}
	}
	driver, err := c.identify(ctx)
	if err != nil {
		return Driver{}, err
	}
	c.mu.Lock()
	c.driver = driver
	c.mu.Unlock()
	c.setReady(nil)
	return driver, nil
}

// awaitConnection dials until the connection stands.
func (c *Client) awaitConnection(ctx context.Context) error {
	log, begin := klog.FromContext(ctx), time.Now()
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
			return fmt.Errorf("waiting for the driver at %s: %w", c.cfg.Address, context.Cause(ctx))
		}
		if !changed {
			log.Info("Still waiting for the driver; is it running, and does it serve this socket?", "address", c.cfg.Address, "since", time.Since(begin).Round(time.Second))
		}
	}
}

// probe asks the driver whether it is ready until it says so, each time a second
// after the last answer. It returns again when the connection went away meanwhile.
func (c *Client) probe(ctx context.Context) (again bool, err error) {
	log := klog.FromContext(ctx)
	for {
		response, err := call(ctx, c, c.identity.Probe, &csi.ProbeRequest{})
		switch {
		case ctx.Err() != nil:
			return false, fmt.Errorf("waiting for the driver at %s to be ready: %w", c.cfg.Address, context.Cause(ctx))
		case err == nil && (response.GetReady() == nil || response.GetReady().GetValue()):
			return false, nil
		case err == nil:
			log.Info("The driver says that it is not ready yet", "address", c.cfg.Address)
		case status.Code(err) == codes.DeadlineExceeded:
			log.Info("The driver does not answer whether it is ready", "address", c.cfg.Address, "timeout", c.cfg.Timeout)
		case status.Code(err) == codes.Unavailable && c.conn.GetState() != connectivity.Ready:
			return true, nil // the socket closed: not an answer of the driver
		default:
			return false, fmt.Errorf("asking the driver at %s whether it is ready (Probe): %w", c.cfg.Address, err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(probeInterval):
		}
	}
}

// Run watches the connection until ctx ends, which is no error. When the
// connection is lost, the client is not ready until the same driver answers again.
// Errors wrap [ErrDriverChanged] or [ErrConnectionLost].
func (c *Client) Run(ctx context.Context) error {
	log := klog.FromContext(ctx)
	for {
		if !c.conn.WaitForStateChange(ctx, connectivity.Ready) {
			return nil
		}
		c.losses.Inc()
		lost := fmt.Errorf("%w at %s", ErrConnectionLost, c.cfg.Address)
		c.setReady(lost)
		if c.cfg.ExitOnConnectionLoss {
			return lost
		}
		log.Info("Lost the connection to the driver, waiting for it to come back", "address", c.cfg.Address)
		if err := c.reconnect(ctx); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		c.setReady(nil)
		log.Info("The driver is back", "address", c.cfg.Address)
	}
}

// reconnect returns when the same driver answers as before.
func (c *Client) reconnect(ctx context.Context) error {
	log := klog.FromContext(ctx)
	for {
		if err := c.awaitConnection(ctx); err != nil {
			return err
		}
		// A driver that is coming up may answer anything; that is no reason to end.
		again, err := c.probe(ctx)
		if err == nil && !again {
			var now Driver
			if now, err = c.identify(ctx); err == nil {
				if changed := difference(c.Driver(), now); changed != nil {
					return fmt.Errorf("%w: %w; restart with the new one", ErrDriverChanged, changed)
				}
				return nil
			}
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			log.Info("The driver is not back yet", "address", c.cfg.Address, "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(probeInterval):
		}
	}
}

// WaitReady returns when the driver can be called, or with the cause of the end of ctx.
func (c *Client) WaitReady(ctx context.Context) error {
	c.mu.Lock()
	ready := c.ready
	c.mu.Unlock()
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// CheckReady is nil while the driver can be called, else why not.
func (c *Client) CheckReady() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.reason
}

func (c *Client) setReady(reason error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reason == nil && reason != nil {
		c.ready = make(chan struct{})
	}
	if c.reason != nil && reason == nil {
		close(c.ready)
	}
	c.reason = reason
}
