// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csiclient

import (
	"context"
	"fmt"
	"maps"
	"time"

	"google.golang.org/grpc/connectivity"
	"k8s.io/klog/v2"
)

// Run monitors the connection until ctx ends, and returns nil then. After a loss, the client is not
// ready until the same driver is connected again. Errors wrap [ErrDriverChanged] or
// [ErrConnectionLost].
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
		log.Info("Lost the connection to the driver, reconnecting", "address", c.cfg.Address)
		if err := c.reconnect(ctx); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		c.setReady(nil)
		log.Info("Reconnected to the driver", "address", c.cfg.Address)
	}
}

// reconnect waits until the same driver is connected and ready.
func (c *Client) reconnect(ctx context.Context) error {
	var changed error
	err := c.await(ctx, func(error) bool { return false }, func() (err error) {
		changed, err = c.changed(ctx)
		return err
	})
	if err == nil && changed != nil {
		return fmt.Errorf("%w: %w; the process exits, to start with the new driver", ErrDriverChanged, changed)
	}
	return err
}

// WaitReady waits until the driver can be called. It returns the cause of ctx if that ends first.
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

// WaitLost waits until the driver has not been ready for limit, and returns the reason. It returns nil if ctx ends first.
func (c *Client) WaitLost(ctx context.Context, limit time.Duration) error {
	for {
		c.mu.Lock()
		lost := c.lost
		c.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil
		case <-lost:
		}
		wait, cancel := context.WithTimeout(ctx, limit)
		err := c.WaitReady(wait)
		cancel()
		if reason := c.CheckReady(); err != nil && ctx.Err() == nil && reason != nil {
			return reason
		}
	}
}

// CheckReady returns nil if the driver can be called, else the reason.
func (c *Client) CheckReady() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reason != nil && c.lastErr != nil {
		return fmt.Errorf("%w: %w", c.reason, c.lastErr)
	}
	return c.reason
}

func (c *Client) setReady(reason error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reason == nil && reason != nil {
		c.ready = make(chan struct{})
		close(c.lost)
	}
	if c.reason != nil && reason == nil {
		close(c.ready)
		c.lost = make(chan struct{})
	}
	c.reason = reason
}

// changed returns an error that describes how the driver differs from the one that was connected before. err is the error of a call.
func (c *Client) changed(ctx context.Context) (changed, err error) {
	now, err := c.identify(ctx)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	node := c.nodeInfo
	changed = difference(c.driver, now)
	if changed == nil {
		c.driver.VendorVersion = now.VendorVersion
	}
	c.mu.Unlock()
	if changed != nil || node == nil {
		return changed, nil
	}
	before := node.GetAccessibleTopology().GetSegments()
	if node, err = c.NodeInfo(ctx); err != nil {
		return nil, err
	}
	if segments := node.GetAccessibleTopology().GetSegments(); !maps.Equal(before, segments) {
		return fmt.Errorf("the topology of the node changed from %v to %v", before, segments), nil
	}
	return nil, nil
}
