// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csiclient

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"
)

// errNotReady is the result of a health check. livenessprobe returns the same text.
var errNotReady = errors.New("driver responded but is not ready")

// CheckHealth returns an error unless the driver accepts a new connection, answers Probe and is ready, all within
// timeout. The call appears in the metrics, but not in [Client.Status]. Concurrent checks share one call, because clients decide
// how many there are.
func (c *Client) CheckHealth(ctx context.Context, timeout time.Duration) error {
	result := c.health.DoChan("", func() (any, error) { // not with the context of the first client, which may go away
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
		defer cancel()
		err := c.checkHealth(ctx)
		if err != nil { // the event of the kubelet has only the status code
			klog.FromContext(ctx).Error(err, "Health check of the driver failed")
		}
		return nil, err
	})
	select {
	case r := <-result:
		return r.Err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (c *Client) checkHealth(ctx context.Context) error {
	conn, err := c.cfg.dial(c.recorder.intercept, logger{c.cfg.MaxLogLength}.intercept)
	if err != nil {
		return err
	}
	defer conn.Close()
	if c.cfg.OwnDriver {
		_, err := csi.NewIdentityClient(conn).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
		return err
	}
	response, err := csi.NewIdentityClient(conn).Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return fmt.Errorf("probing the driver at %s: Probe: %w", c.cfg.Address, err)
	}
	if !isReady(response) {
		return errNotReady
	}
	if !c.recorder.hasDriver() { // livenessprobe never calls Connect
		if info, err := csi.NewIdentityClient(conn).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}); err == nil && info.GetName() != "" {
			c.recorder.setDriver(info.GetName())
		}
	}
	return nil
}

// isReady reports whether the driver is ready. A response without a value means ready.
func isReady(response *csi.ProbeResponse) bool {
	return response.GetReady() == nil || response.GetReady().GetValue()
}
