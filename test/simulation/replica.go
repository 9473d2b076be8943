// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/go-logr/logr"
	"github.com/spf13/pflag"
	"google.golang.org/grpc/peer"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/app"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// replica is a process of the program, from its start to its end.
type replica struct {
	name   string                                 // of the pod, the same after a restart of the container
	client string                                 // unique
	listed map[schema.GroupVersionResource]uint64 // version of the initial list, by watch
	cancel context.CancelCauseFunc
	dead   chan struct{} // closed when the process is killed
	ended  chan struct{} // closed when it has returned
	opened chan struct{} // closed when its watches may begin
	err    error         // after ended
	slow   bool          // its initial lists end one by one
	// unlisted are the objects of the initial lists that have not ended.
	unlisted map[schema.GroupVersionResource][]metav1.Object

	// Guarded by simulation.mu:
	attachments map[types.UID]bool // the VolumeAttachments that its watch has shown
	cutOff      bool               // it was killed, or could not reach the API server

	suspension  suspension
	partitioned int         // the step at which its requests reach the API server again
	unreachable atomic.Bool // partitioned is not zero
	// observed is the version that its API server has observed, until the step caughtUp; then math.MaxUint64.
	observed atomic.Uint64
	caughtUp int
	stopping bool // it was told to end
}

var errKilled = errors.New("killed")

// killed reports whether the process was killed.
func (r *replica) killed() bool {
	select {
	case <-r.dead:
		return true
	default:
		return false
	}
}

// configuration returns the configuration of a command with the given flags. It is read once per process.
var configuration = func() func(command app.Selection, args ...string) app.Config {
	var mu sync.Mutex
	read := map[string]app.Config{}
	return func(command app.Selection, args ...string) app.Config {
		key := fmt.Sprint(command.Names(), args)
		mu.Lock()
		defer mu.Unlock()
		if c, ok := read[key]; ok {
			return c
		}
		fs := pflag.NewFlagSet("simulation", pflag.ContinueOnError)
		command.Register(fs)
		if err := fs.Parse(args); err != nil {
			panic(err) // the flags are constants
		}
		c, err := command.Read(fs, "simulation")
		if err == nil {
			c = c.Enabled()
			err = c.Validate()
		}
		if err != nil {
			panic(err)
		}
		read[key] = c
		return c
	}
}()

// start starts a process with config under the name of a replica and returns when it has read its environment.
func (s *simulation) start(name string, config app.Config) *replica {
	s.started++
	r := &replica{
		name: name, client: fmt.Sprintf("%s#%d", name, s.started), listed: map[schema.GroupVersionResource]uint64{},
		dead: make(chan struct{}), ended: make(chan struct{}), opened: make(chan struct{}), attachments: map[types.UID]bool{},
		slow: s.choices.Pick(4) == 3, unlisted: map[schema.GroupVersionResource][]metav1.Object{},
	}
	r.observed.Store(math.MaxUint64)
	if s.scale.oldServers && s.choices.Pick(2) == 1 {
		r.observed.Store(s.api.Version() - min(s.api.Version()-1, uint64(s.choices.Pick(60))))
		r.caughtUp = s.step + 5 + s.choices.Pick(60)
	}
	s.caches.Store(r.client, r)
	s.mu.Lock()
	s.processes[r.client] = r
	s.mu.Unlock()
	config.KeepMemory = true
	config.DelayExpiry = func() { s.delayExpiry(r) }
	config.API = s.api.Config(r.client)
	config.API.ContentType = runtime.ContentTypeProtobuf
	config.API.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	// As after throttled calls: attempts wait before their call, and decide again. Not with capacity, whose pairs have a random order.
	if s.choices.Pick(3) == 2 && !s.scale.features.Capacity {
		config.FirstLimit = 1
	}
	if s.scale.features.Topolvm {
		config.DriverCalls = s.driverCalls(r)
	}
	config.DialDriver = func(ctx context.Context, _ string) (net.Conn, error) {
		s.mu.Lock()
		listener := s.socket
		s.mu.Unlock()
		return listener.dial(ctx, r.client)
	}
	os.Setenv("POD_NAME", name)
	os.Setenv("POD_NAMESPACE", metav1.NamespaceSystem)
	os.Setenv("NAMESPACE", metav1.NamespaceSystem)
	config.Enqueue = func(loop string, key any, add func()) { s.gate.hold(r, loop, key, add) }
	sink := keySink{bug: func(err error) { s.violated("%s: %v", r.client, err) }}
	ctx, cancel := context.WithCancelCause(klog.NewContext(context.Background(), logr.New(sink)))
	r.cancel = cancel
	go func() {
		defer close(r.ended)
		r.err = config.Run(ctx)
	}()
	s.settle()
	close(r.opened) // not earlier: the process looks at its caches right after it has begun to fill them
	s.settle()
	return r
}

// kill ends the process: nothing that it does from here on has an effect.
func (s *simulation) kill(r *replica) {
	s.loses(r)
	close(r.dead)
	r.cancel(errKilled)
	s.settle()
}

// stop tells the process to end, as SIGTERM does.
func (s *simulation) stop(r *replica) {
	s.loses(r)
	r.stopping = true
	r.cancel(workloop.ErrDrain)
	s.settle()
}

// removeEnded removes the processes that have ended. Only those may end that were told to, or whose initial lists took long.
func (s *simulation) removeEnded() {
	for i, r := range s.replicas {
		if r == nil {
			continue
		}
		select {
		case <-r.ended:
			gaveUp := r.slow && !s.scale.oldServers && r.err != nil && strings.Contains(r.err.Error(), "waiting for the first list")
			if (!r.stopping || r.err != nil) && !gaveUp {
				s.violated("%s exits: %v", r.client, r.err)
			}
			s.record("%s exits", r.client)
			s.replicas[i] = nil
		default:
		}
	}
}

// caller returns the replica that a call comes from.
func (s *simulation) caller(ctx context.Context) *replica {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.processes[p.Addr.String()]
}
