// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"k8s.io/klog/v2"
)

// socketMode lets the group of the pod connect. To connect, a process needs write permission.
const socketMode = 0o660

// socketDialTimeout bounds the check whether a process accepts connections on a socket that exists.
const socketDialTimeout = 5 * time.Second

// maxConnections is the number of open connections of a socket. Each container of the pod needs one.
const maxConnections = 64

// boundedListener closes a connection that it accepts while maxConnections are open, so that they do not use up the files of the process.
type boundedListener struct {
	net.Listener
	log  klog.Logger
	open atomic.Int32
}

// Accept implements [net.Listener].
func (l *boundedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		open := l.open.Add(1)
		if open == maxConnections {
			l.log.Info("Further connections to the socket are closed. Check the other containers of the pod", "limit", maxConnections)
		}
		c := &boundedConn{Conn: conn, closed: sync.OnceFunc(func() { l.open.Add(-1) })}
		if open <= maxConnections {
			return c, nil
		}
		_ = c.Close()
	}
}

// boundedConn is a connection that counts while it is open.
type boundedConn struct {
	net.Conn
	closed func()
}

// Close implements [net.Conn].
func (c *boundedConn) Close() error {
	defer c.closed()
	return c.Conn.Close()
}

// socket is a socket on which other containers of the pod call this process.
type socket struct {
	path     string
	file     fs.FileInfo
	listener *net.UnixListener
}

// openSocket listens on the socket at path. It replaces a socket on which no process accepts connections, and returns an error for
// any other file. The directory must exist.
func openSocket(ctx context.Context, path string) (*socket, error) {
	if err := checkSocket(ctx, path); err != nil {
		return nil, err
	}
	// The socket gets its name after its mode, so that no process connects to it with another one.
	hidden := filepath.Join(filepath.Dir(path), fmt.Sprintf(".%s.%d", filepath.Base(path), os.Getpid()))
	if err := checkSocket(ctx, hidden); err != nil {
		return nil, err
	}
	_ = os.Remove(hidden) // of a process that was killed
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: hidden, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("cannot listen on %s: %w. Its directory must exist, and this process must have write permission", path, err)
	}
	listener.SetUnlinkOnClose(false)
	s := &socket{path: path, listener: listener}
	err = os.Chmod(hidden, socketMode)
	if err == nil {
		s.file, err = os.Lstat(hidden)
	}
	if err == nil {
		err = os.Rename(hidden, path)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("cannot listen on %s: %w", path, err), listener.Close(), os.Remove(hidden))
	}
	return s, nil
}

// checkSocket returns an error if path is in use, or is a file that is no socket.
func checkSocket(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%s is no socket. Remove the file, or choose another path", path)
	}
	dialer := net.Dialer{Timeout: socketDialTimeout}
	conn, err := dialer.DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		return errors.Join(fmt.Errorf("another process accepts connections on %s. Stop it, or choose another path", path), conn.Close())
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
		return nil
	}
	return fmt.Errorf("cannot tell whether a process accepts connections on %s: %w", path, err)
}

// serve has server answer the calls on s until ctx ends. Then the socket is removed, new calls fail with Unavailable, and the running
// ones have grace to end.
func (s *socket) serve(ctx context.Context, server *grpc.Server, grace time.Duration) error {
	defer s.remove(ctx)
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(&boundedListener{Listener: s.listener, log: klog.FromContext(ctx)}) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serving %s: %w", s.path, err)
	case <-ctx.Done():
	}
	s.remove(ctx)
	limit := time.AfterFunc(grace, func() {
		klog.FromContext(ctx).Info("Calls on the socket have not ended in time and fail with Unavailable", "socket", s.path,
			"limit", grace.String())
		server.Stop()
	})
	defer limit.Stop()
	server.GracefulStop()
	return <-failed
}

// remove removes the file of s, unless another process has replaced it.
func (s *socket) remove(ctx context.Context) {
	file, err := os.Lstat(s.path)
	if err == nil && os.SameFile(file, s.file) {
		err = os.Remove(s.path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		klog.FromContext(ctx).Error(err, "Cannot remove the socket")
	}
}
