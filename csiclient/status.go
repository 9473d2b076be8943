package csiclient

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
)

// Status is the connection and its calls, for people who look at the process.
type Status struct {
	Address  string `json:"address"`
	Driver   Driver `json:"driver"`
	NotReady string `json:"notReady,omitempty"` // why not; "" when it is
	Running  []Call `json:"running"`            // longest first
	Slowest  []Call `json:"slowest"`            // since the process began
	Failed   []Call `json:"failed"`             // newest first
}

// Call is one call of the driver. Of its request only what names the volume is kept.
type Call struct {
	Method string        `json:"method"`
	Volume string        `json:"volume,omitempty"` // its ID, or its name before it has one
	Began  time.Time     `json:"began"`
	Took   time.Duration `json:"tookNanoseconds,omitempty"` // 0 while it runs
	Code   string        `json:"code,omitempty"`            // gRPC, "" while it runs
	Error  string        `json:"error,omitempty"`
}

const (
	keptSlowest  = 10
	keptFailed   = 20
	keptErrorLen = 500
)

// calls is what is kept of the calls of a connection.
type calls struct {
	mu      sync.Mutex
	running map[*Call]struct{}
	slowest []Call // longest first
	failed  []Call // oldest first
}

func newCalls() *calls { return &calls{running: map[*Call]struct{}{}} }

func (c *calls) intercept(ctx context.Context, method string, request, response any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	call := &Call{Method: method[strings.LastIndexByte(method, '/')+1:], Volume: volumeOf(request), Began: time.Now()}
	c.mu.Lock()
	c.running[call] = struct{}{}
	c.mu.Unlock()
	err := invoke(ctx, method, request, response, conn, opts...)
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.running, call)
	call.Took, call.Code = time.Since(call.Began), status.Code(err).String()
	if err != nil {
		call.Error = status.Convert(err).Message()
		if len(call.Error) > keptErrorLen {
			call.Error = strings.ToValidUTF8(call.Error[:keptErrorLen], "") + "…"
		}
		if len(c.failed) == keptFailed {
			c.failed = slices.Delete(c.failed, 0, 1)
		}
		c.failed = append(c.failed, *call)
	}
	if len(c.slowest) < keptSlowest || call.Took > c.slowest[keptSlowest-1].Took {
		i, _ := slices.BinarySearchFunc(c.slowest, call.Took, func(other Call, took time.Duration) int { return cmp.Compare(took, other.Took) })
		c.slowest = slices.Insert(c.slowest, i, *call)
		c.slowest = c.slowest[:min(len(c.slowest), keptSlowest)]
	}
	return err
}

// volumeOf is what request calls its volume, "" when it is about none.
func volumeOf(request any) string {
	switch r := request.(type) {
	case interface{ GetVolumeId() string }:
		return r.GetVolumeId()
	case interface{ GetName() string }:
		return r.GetName()
	}
	return ""
}

// Status is the connection and its calls now.
func (c *Client) Status() Status {
	s := Status{Address: c.cfg.Address}
	c.mu.Lock()
	s.Driver = c.driver
	if c.reason != nil {
		s.NotReady = c.reason.Error()
	}
	c.mu.Unlock()
	c.calls.mu.Lock()
	defer c.calls.mu.Unlock()
	for call := range c.calls.running {
		s.Running = append(s.Running, *call)
	}
	slices.SortFunc(s.Running, func(a, b Call) int { return a.Began.Compare(b.Began) })
	s.Slowest, s.Failed = slices.Clone(c.calls.slowest), slices.Clone(c.calls.failed)
	slices.Reverse(s.Failed)
	return s
}
