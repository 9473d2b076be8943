// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csitest

import (
	"context"
	"net"
	"time"

	"google.golang.org/grpc"
)

// SanityAddress is the address for a sanity suite that connects with [SanityDialer].
const SanityAddress = "passthrough:///driver"

// SanityDialer connects the sanity suite of csi-test to a unix socket. The suite waits until the
// connection becomes ready, and hangs if it is ready before the suite looks: dialing takes a moment.
func SanityDialer(socket string) grpc.DialOption {
	return grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(500 * time.Millisecond):
		}
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	})
}
