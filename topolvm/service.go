// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/keylock"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// Deps is what the service needs from the process. Fields are required unless noted.
type Deps struct {
	// Requests is the client configuration for reads and writes, see [kube.ForRole].
	Requests *rest.Config
	// Watches is the client configuration for watches, see [kube.ForWatches].
	Watches *rest.Config
	// Informers retain [RetainedFields]. They must not have been started.
	Informers *kube.Informers
	// CapacityChanged is called with a topology value and a device class (empty: the default class) whose available bytes have
	// changed. It must not block. May be nil.
	CapacityChanged func(node, class string)
	// RetryClaim is called with the NAMESPACE/NAME of a claim whose CreateVolume did not wait, because the Node is not Ready, once a
	// repeated call has a result: topolvm-node has created the volume, or failed, or the LogicalVolume was deleted. It must not block.
	// May be nil.
	RetryClaim func(claim string)
}

// RetainedFields returns the fields that the service reads, for [kube.Informers.Retain].
func RetainedFields() kube.RetainedFields { return kube.RetainedFields{Nodes: true} }

// Service implements the identity and the controller service of the CSI driver. Its methods are safe for concurrent use.
type Service struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer

	cfg     Config
	names   names
	reg     prometheus.Registerer
	metrics *metrics
	now     func() time.Time
	running running
	foreign onceEach // parameters of the other driver name

	nameLocks keylock.Locks[string] // of creations, by name of the LogicalVolume
	idLocks   keylock.Locks[string] // by volume ID: exclusive during changes, shared while it is a source

	unanswered unanswered // creations

	// attached is closed when the fields below are set.
	attached chan struct{}
	caches   *caches
	client   *Client
	nodes    typedcorev1.NodeInterface
	lookup   lookup
}

// New returns a service without caches, and registers its metrics. Calls that need caches wait for [Service.Attach].
func New(cfg Config, reg prometheus.Registerer) (*Service, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Service{
		cfg: cfg, names: names(cfg.Driver), reg: reg, metrics: newMetrics(reg), now: time.Now, attached: make(chan struct{}),
	}, nil
}

// Attach gives the service its caches and clients, and registers the gauge that needs them. Call it once, before the informers are
// started. ctx is for log lines of the handlers.
func (s *Service) Attach(ctx context.Context, d Deps) error {
	requests, err := NewClient(d.Requests, s.cfg.Driver)
	if err != nil {
		return err
	}
	watches, err := NewClient(d.Watches, s.cfg.Driver)
	if err != nil {
		return err
	}
	client, metadata, err := kube.NewClients(d.Requests)
	if err != nil {
		return err
	}
	s.caches, err = newCaches(ctx, s.names, watches, d)
	if err != nil {
		return err
	}
	s.client, s.nodes = requests, client.CoreV1().Nodes()
	s.lookup.list = func(ctx context.Context) (map[types.UID]string, error) {
		all, err := metadata.Resource(s.names.resource()).List(ctx, metav1.ListOptions{})
		if err != nil {
			return nil, err
		}
		found := make(map[types.UID]string, len(all.Items))
		for i := range all.Items {
			found[all.Items[i].UID] = all.Items[i].Name
		}
		return found, nil
	}
	registerUnreferenced(s.reg, s.names, s.caches, d.Informers, s.now)
	close(s.attached)
	return nil
}

// maxCalls is the number of running calls of a connection. Further ones wait.
const maxCalls = 1000

// Server returns a gRPC server with the service and further options. It accepts connections on each listener that it is given, until
// [Service.Shutdown].
func (s *Service) Server(options ...grpc.ServerOption) *grpc.Server {
	options = append(options, grpc.UnaryInterceptor(s.intercept), grpc.MaxConcurrentStreams(maxCalls))
	server := grpc.NewServer(options...)
	csi.RegisterIdentityServer(server, s)
	csi.RegisterControllerServer(server, s)
	return server
}

// Shutdown makes new calls fail with Unavailable and waits for the running ones. If ctx ends before, they fail with Unavailable, too.
// Stop the server after it.
func (s *Service) Shutdown(ctx context.Context) { s.running.drain(ctx) }

// maxEarly is the longest time before the deadline of a call at which it ends.
const maxEarly = 100 * time.Millisecond

// intercept counts the calls and their failures. A panic is the failure of one call, whose outcome is unknown: the code is not final.
func (s *Service) intercept(ctx context.Context, r any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (response any, err error) {
	operation := operationOf(info.FullMethod)
	if deadline, ok := ctx.Deadline(); ok { // so that the caller gets the error, which says what the call waited for
		early, cancel := context.WithDeadline(ctx, deadline.Add(-min(maxEarly, time.Until(deadline)/10)))
		defer cancel()
		ctx = early
	}
	ctx, end, ok := s.running.begin(ctx)
	if !ok {
		return nil, status.Errorf(codes.Unavailable, "%s: %v. Repeat the call", operation, errShutdown)
	}
	defer end()
	defer func() {
		if p := recover(); p != nil {
			s.metrics.panics.Inc()
			klog.FromContext(ctx).Error(fmt.Errorf("panic: %v", p), "CSI call panicked. Report it with this line", "operation", operation,
				"stack", string(debug.Stack()))
			response, err = nil, status.Errorf(codes.Unavailable, "%s: panic: %.200v. Report it with the log of the controller",
				operation, p)
		}
		if err != nil {
			s.metrics.failures.WithLabelValues(operation, status.Code(err).String()).Inc()
		}
	}()
	return handler(ctx, r)
}

// synced returns the caches after their first lists. If ctx ends before, the error is Unavailable.
func (s *Service) synced(ctx context.Context) (*caches, error) {
	unavailable := func(what string) error {
		return status.Errorf(codes.Unavailable, "the caches are not complete: waiting for %s. Check the connection to the API server, and "+
			"that the CustomResourceDefinition %s is installed", what, s.names.resource().GroupResource())
	}
	select {
	case <-s.attached:
	case <-ctx.Done():
		return nil, unavailable("the start of the process")
	}
	for _, h := range s.caches.handlers {
		select {
		case <-h.Done():
		case <-ctx.Done():
			return nil, unavailable(h.Name())
		}
	}
	return s.caches, nil
}

// GetPluginInfo returns the name of the driver and the version of this program.
func (s *Service) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: s.cfg.Driver, VendorVersion: s.cfg.Version}, nil
}

// GetPluginCapabilities returns what topolvm-controller does.
func (s *Service) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	r := &csi.GetPluginCapabilitiesResponse{}
	for _, c := range []csi.PluginCapability_Service_Type{
		csi.PluginCapability_Service_CONTROLLER_SERVICE, csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS,
	} {
		service := &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: c}}
		r.Capabilities = append(r.Capabilities, &csi.PluginCapability{Type: service})
	}
	for _, c := range []csi.PluginCapability_VolumeExpansion_Type{
		csi.PluginCapability_VolumeExpansion_ONLINE, csi.PluginCapability_VolumeExpansion_OFFLINE,
	} {
		expansion := &csi.PluginCapability_VolumeExpansion_{VolumeExpansion: &csi.PluginCapability_VolumeExpansion{Type: c}}
		r.Capabilities = append(r.Capabilities, &csi.PluginCapability{Type: expansion})
	}
	return r, nil
}

// Probe reports whether the caches are synced, without a request. A missing CSIDriver is a failed precondition.
func (s *Service) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	notReady := &csi.ProbeResponse{Ready: wrapperspb.Bool(false)}
	select {
	case <-s.attached:
	default:
		return notReady, nil
	}
	for _, h := range s.caches.handlers {
		if !cache.IsDone(h) {
			return notReady, nil
		}
	}
	if !s.caches.drivers.Synced() {
		return notReady, nil
	}
	if err := s.CheckCSIDriver(); err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}

// CheckCSIDriver returns an error if the CSIDriver object of the driver does not exist, for /readyz/csidriver.
func (s *Service) CheckCSIDriver() error {
	select {
	case <-s.attached:
	default:
		return errors.New("the process has not started its watches yet")
	}
	if _, exists := s.caches.drivers.Get(s.cfg.Driver); !exists {
		return fmt.Errorf("CSIDriver %s does not exist. Install the manifests of TopoLVM", s.cfg.Driver)
	}
	return nil
}

// ControllerGetCapabilities returns what topolvm-controller does.
func (s *Service) ControllerGetCapabilities(
	context.Context, *csi.ControllerGetCapabilitiesRequest,
) (*csi.ControllerGetCapabilitiesResponse, error) {
	r := &csi.ControllerGetCapabilitiesResponse{}
	for _, c := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY, csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
	} {
		rpc := &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: c}}
		r.Capabilities = append(r.Capabilities, &csi.ControllerServiceCapability{Type: rpc})
	}
	return r, nil
}

// parameter returns a parameter of a class. It logs once if only the parameter of the other driver name is set, which has no effect.
func (s *Service) parameter(ctx context.Context, parameters map[string]string, key string) string {
	_, name, _ := strings.Cut(key, "/")
	foreign := string(s.names.other()) + "/" + name
	if value, ok := parameters[foreign]; ok && s.foreign.first(foreign+"="+value) {
		klog.FromContext(ctx).Info("Class parameter of the other driver name is ignored. Rename it", "parameter", foreign, "value", value,
			"expected", key)
	}
	return parameters[key]
}

// onceEach reports which values are new. It remembers at most 100. The zero value is ready for use.
type onceEach struct {
	mu   sync.Mutex
	seen map[string]bool
}

func (o *onceEach) first(value string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.seen == nil {
		o.seen = map[string]bool{}
	}
	if o.seen[value] || len(o.seen) >= 100 {
		return false
	}
	o.seen[value] = true
	return true
}

// LogicalVolumes returns those in the cache, in no particular order; nil before its first list. Call it after [Service.Attach].
func (s *Service) LogicalVolumes() []*LogicalVolume {
	if !s.caches.volumes.Synced() {
		return nil
	}
	return append([]*LogicalVolume{}, s.caches.volumes.List()...)
}

// TopologyKey returns the label of the Nodes whose values LogicalVolumes name.
func (s *Service) TopologyKey() string { return s.names.topologyKey() }
