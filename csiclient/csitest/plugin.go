// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csitest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/stats"
	"google.golang.org/protobuf/proto"
)

// Config configures a plugin. The zero value is a driver without topology that can create, delete,
// publish and unpublish volumes.
type Config struct {
	Name    string // empty means "drv.example.com"
	Version string // empty means "1.0"
	// Plugin and Controller are the capabilities; nil means the service and, for
	// the controller, CREATE_DELETE_VOLUME and PUBLISH_UNPUBLISH_VOLUME.
	Plugin     []csi.PluginCapability_Service_Type
	Controller []csi.ControllerServiceCapability_RPC_Type
	// Expansion are the VolumeExpansion capabilities of the plugin.
	Expansion []csi.PluginCapability_VolumeExpansion_Type
	// Node are the capabilities of the node service; nil means STAGE_UNSTAGE_VOLUME.
	Node []csi.NodeServiceCapability_RPC_Type
	// NoNodeExpansion makes the expansion of a volume complete without the node.
	NoNodeExpansion bool
	// Groups adds the group controller service with snapshots of groups.
	Groups bool
	// Latency is how long every call takes, identity calls excepted.
	Latency time.Duration
	// Segments makes the driver aware of topology: a volume becomes accessible in the
	// first preferred topology, else the first requisite one, else the first of these.
	Segments []map[string]string
	// Capacity is the size in bytes of all volumes of a segment together. Zero means no limit.
	Capacity int64
	// VolumeContext and PublishContext are returned with every volume and publication.
	VolumeContext, PublishContext map[string]string
	// MaxVolumesPerNode bounds publications to a node; zero means no limit.
	MaxVolumesPerNode int
	// NodeID is the node of the node service; empty means "node-1".
	NodeID string
	// Nodes are the IDs of the nodes to which volumes can be published; nil means any.
	Nodes []string
	// Numbered is the number of volumes and snapshots that another instance of the driver has created: IDs differ from theirs.
	Numbered int
	// DiscardCalls turns the record of calls off, apart from the counts, for benchmarks.
	DiscardCalls bool
}

// Plugin is a CSI driver. Its methods are safe for concurrent use.
type Plugin struct {
	*identityService
	*controllerService
	*groupControllerService
	*nodeService
	*callRecord

	life sync.Mutex // held while the server starts or stops; taken before mu

	mu       sync.Mutex
	cfg      Config
	server   *grpc.Server
	socket   string
	open     int // connections
	accepted int
	state    state
	script   script
	release  chan struct{} // closed to continue hanging calls
}

// New returns a plugin. [Plugin.Start] serves it.
func New(cfg Config) *Plugin {
	if cfg.Name == "" {
		cfg.Name = "drv.example.com"
	}
	if cfg.Version == "" {
		cfg.Version = "1.0"
	}
	if cfg.NodeID == "" {
		cfg.NodeID = "node-1"
	}
	if cfg.Plugin == nil {
		cfg.Plugin = []csi.PluginCapability_Service_Type{csi.PluginCapability_Service_CONTROLLER_SERVICE}
		if cfg.Segments != nil {
			cfg.Plugin = append(cfg.Plugin, csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS)
		}
	}
	if cfg.Groups {
		cfg.Plugin = append(slices.Clone(cfg.Plugin), csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE)
	}
	if cfg.Controller == nil {
		cfg.Controller = []csi.ControllerServiceCapability_RPC_Type{
			csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
			csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
		}
	}
	p := &Plugin{
		callRecord: newCallRecord(cfg.DiscardCalls), cfg: cfg, state: newState(cfg.Numbered), release: make(chan struct{}),
		script: script{next: map[string][]Step{}, always: map[string]Step{}},
	}
	p.identityService, p.controllerService = &identityService{p: p}, &controllerService{p: p}
	p.groupControllerService, p.nodeService = &groupControllerService{p: p}, &nodeService{p: p}
	return p
}

// Run starts a plugin and stops it at the end of t.
func Run(t testing.TB, cfg Config) *Plugin {
	t.Helper()
	dir, err := os.MkdirTemp("", "csi") // t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	p := New(cfg)
	if err := p.Start(dir + "/csi.sock"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Stop()
		os.RemoveAll(dir)
	})
	return p
}

// Start serves the plugin on a Unix socket.
func (p *Plugin) Start(socket string) error {
	p.life.Lock()
	defer p.life.Unlock()
	return p.start(socket)
}

func (p *Plugin) start(socket string) error {
	_ = os.Remove(socket) // of a plugin that was killed
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return fmt.Errorf("serving: %w", err)
	}
	serve(p, listener, socket)
	return nil
}

// Serve serves p on listener until it stops.
func Serve(p *Plugin, listener net.Listener) {
	p.life.Lock()
	defer p.life.Unlock()
	serve(p, listener, listener.Addr().String())
}

func serve(p *Plugin, listener net.Listener, socket string) {
	server := grpc.NewServer(grpc.UnaryInterceptor(p.intercept), grpc.StatsHandler(connections{p}),
		grpc.ReadBufferSize(4<<10)) // most messages are small
	csi.RegisterIdentityServer(server, p)
	csi.RegisterControllerServer(server, p)
	csi.RegisterNodeServer(server, p)
	csi.RegisterGroupControllerServer(server, p)
	p.mu.Lock()
	p.server, p.socket = server, socket
	p.mu.Unlock()
	go func() { _ = server.Serve(listener) }() // ends with Stop
}

// ListenOn serves on another socket, too, until the plugin stops. With a socket per client,
// [Call.Socket] identifies the client.
func (p *Plugin) ListenOn(socket string) error {
	p.life.Lock()
	defer p.life.Unlock()
	p.mu.Lock()
	server := p.server
	p.mu.Unlock()
	if server == nil {
		return errors.New("serving on another socket: the plugin is stopped")
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return fmt.Errorf("serving on another socket: %w", err)
	}
	go func() { _ = server.Serve(listener) }() // ends with Stop
	return nil
}

// Stop closes the sockets and all connections; running calls fail at the client. The plugin keeps its
// volumes.
func (p *Plugin) Stop() {
	p.life.Lock()
	defer p.life.Unlock()
	p.mu.Lock()
	server := p.server
	p.server = nil
	p.mu.Unlock()
	if server != nil {
		server.Stop() // hanging calls end with their connections
	}
}

// Restart stops the plugin and starts it on the same socket. change, if not nil, can change its name
// or capabilities.
func (p *Plugin) Restart(change func(*Config)) error {
	p.Stop()
	p.mu.Lock()
	if change != nil {
		change(&p.cfg)
	}
	socket := p.socket
	p.mu.Unlock()
	return p.Start(socket)
}

// Address returns the path of the socket.
func (p *Plugin) Address() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.socket
}

// Name returns the name of the driver.
func (p *Plugin) Name() string { return p.config().Name }

func (p *Plugin) config() Config {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cfg
}

// Connections returns how many connections were accepted so far, and how many are open.
func (p *Plugin) Connections() (accepted, open int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted, p.open
}

// connections counts the connections of a plugin.
type connections struct{ p *Plugin }

func (c connections) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (c connections) HandleRPC(context.Context, stats.RPCStats)                         {}
func (c connections) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

func (c connections) HandleConn(_ context.Context, s stats.ConnStats) {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	switch s.(type) {
	case *stats.ConnBegin:
		c.p.accepted++
		c.p.open++
	case *stats.ConnEnd:
		c.p.open--
	}
}

// errDropped closes the connection of a call instead of a response.
var errDropped = errors.New("dropped")

// intercept records a call and answers it as scripted.
func (p *Plugin) intercept(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	method := short(info.FullMethod)
	latency := p.config().Latency
	if identity[method] {
		latency = 0
	}
	socket := ""
	if client, ok := peer.FromContext(ctx); ok && client.LocalAddr != nil {
		socket = client.LocalAddr.String()
	}
	released := p.released() // before a test can see the call
	call := p.begin(method, socket, request.(proto.Message))
	ctx = context.WithValue(ctx, releasedKey{}, released)
	response, err := p.play(ctx, method, request, latency, handler)
	if errors.Is(err, errDropped) {
		go p.drop() // this call is one that it ends
		<-ctx.Done()
		err = ctx.Err()
	}
	p.end(call, response, err)
	return response, err
}

// drop closes all connections and serves again, unless the plugin was stopped meanwhile.
func (p *Plugin) drop() {
	p.life.Lock()
	defer p.life.Unlock()
	p.mu.Lock()
	server, socket := p.server, p.socket
	p.mu.Unlock()
	if server != nil {
		server.Stop()
		_ = p.start(socket) // it could serve there a moment ago
	}
}

var identity = map[string]bool{
	"Probe": true, "GetPluginInfo": true, "GetPluginCapabilities": true, "ControllerGetCapabilities": true,
	"GroupControllerGetCapabilities": true,
	"NodeGetInfo":                    true, "NodeGetCapabilities": true,
}
