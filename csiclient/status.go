// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

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

	"github.com/storage-controller/storage-controller/internal/pressure"
)

// Status describes the connection and its calls for /statusz.
type Status struct {
	Address  string           `json:"address"`
	Driver   Driver           `json:"driver"`
	NotReady string           `json:"notReady,omitempty"` // the reason, empty if ready
	Running  []Call           `json:"running"`            // longest first
	Limits   []pressure.Limit `json:"limits,omitempty"`   // by method
	Slowest  []Call           `json:"slowest"`            // since the start of the process
	Failed   []Call           `json:"failed"`             // newest first
}

// Call describes a CSI call.
type Call struct {
	Method string        `json:"method"`
	Volume string        `json:"volume,omitempty"` // ID, or name for CreateVolume
	Began  time.Time     `json:"began"`
	Took   time.Duration `json:"tookNanoseconds,omitempty"` // 0 while running
	Code   string        `json:"code,omitempty"`            // of gRPC, empty while running
	Error  string        `json:"error,omitempty"`
}

const (
	maxSlowest = 10
	maxFailed  = 20
)

// calls holds the running, the slowest and the latest failed calls of a connection.
type calls struct {
	mu      sync.Mutex
	running map[*Call]struct{}
	slowest []Call // longest first
	failed  []Call // oldest first
}

func newCalls() *calls { return &calls{running: map[*Call]struct{}{}} }

func (c *calls) intercept(
	ctx context.Context, method string, request, response any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
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
		if len(c.failed) == maxFailed {
			c.failed = slices.Delete(c.failed, 0, 1)
		}
		c.failed = append(c.failed, *call)
	}
	if len(c.slowest) < maxSlowest || call.Took > c.slowest[maxSlowest-1].Took {
		i, _ := slices.BinarySearchFunc(c.slowest, *call, func(a, b Call) int { return cmp.Compare(b.Took, a.Took) })
		c.slowest = slices.Insert(c.slowest, i, *call)
		c.slowest = c.slowest[:min(len(c.slowest), maxSlowest)]
	}
	return err
}

// volumeOf returns the ID of the volume, snapshot or group in request, or the name in a request that
// creates one.
func volumeOf(request any) string {
	switch r := request.(type) {
	case interface{ GetVolumeId() string }:
		return r.GetVolumeId()
	case interface{ GetSnapshotId() string }:
		return r.GetSnapshotId()
	case interface{ GetGroupSnapshotId() string }:
		return r.GetGroupSnapshotId()
	case interface{ GetName() string }:
		return r.GetName()
	}
	return ""
}

// Status returns the current state of the connection.
func (c *Client) Status() Status {
	s := Status{Address: c.cfg.Address}
	c.mu.Lock()
	s.Driver = c.driver
	if c.reason != nil {
		s.NotReady = c.reason.Error()
	}
	c.mu.Unlock()
	s.Limits = c.gate.Limits()
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
