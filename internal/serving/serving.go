// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package serving provides HTTP servers with limits, because every client that reaches a port is served, and their TLS.
package serving

import (
	"crypto/tls"
	"net"
	"net/http"
	"sync"
	"time"
)

// maxConnections bounds the connections of a server.
const maxConnections = 128

// maxStreams bounds the requests of an HTTP/2 connection that are served at a time. A client such as the API server opens another
// connection for more.
const maxStreams = 32

// New returns a server for handler that limits connections, requests, headers and idle time.
func New(handler http.Handler) *http.Server {
	return &http.Server{
		Handler: handler, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 30 * time.Second, MaxHeaderBytes: 8 << 10,
		HTTP2:     &http.HTTP2Config{MaxConcurrentStreams: maxStreams},
		ConnState: (&connections{open: map[net.Conn]connection{}}).changed,
	}
}

// connections holds the connections of a server. A new one above [maxConnections] is accepted and another one closed, so that
// clients that keep connections open, also with incomplete requests, cannot exclude others, such as the probes of the kubelet.
type connections struct {
	mu   sync.Mutex
	open map[net.Conn]connection
}

type connection struct {
	active bool // a request is being served
	since  time.Time
}

// before reports whether c is closed rather than other: idle and incomplete ones first, in the order of their last request.
func (c connection) before(other connection) bool {
	if c.active != other.active {
		return other.active
	}
	return c.since.Before(other.since)
}

// changed implements [http.Server.ConnState].
func (c *connections) changed(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, open := c.open[conn]; state == http.StateClosed || state == http.StateHijacked || !open && state != http.StateNew {
		delete(c.open, conn)
		return
	}
	if state == http.StateNew && len(c.open) >= maxConnections {
		c.closeOne()
	}
	c.open[conn] = connection{state == http.StateActive, time.Now()}
}

// closeOne closes the connection that is missed least. mu is held.
func (c *connections) closeOne() {
	var victim net.Conn
	for conn, state := range c.open {
		if victim == nil || state.before(c.open[victim]) {
			victim = conn
		}
	}
	delete(c.open, victim)
	if secure, ok := victim.(*tls.Conn); ok {
		victim = secure.NetConn() // closing a tls.Conn writes to the client
	}
	_ = victim.Close() // it is closed already
}
