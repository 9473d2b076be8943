// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"
)

// slowIdentity answers Probe when it is released.
type slowIdentity struct {
	csi.UnimplementedIdentityServer
	called, released chan struct{}
}

func (s slowIdentity) Probe(ctx context.Context, _ *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	close(s.called)
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-s.released:
		return &csi.ProbeResponse{}, nil
	}
}

// TestTopolvmScenario004 has a row for each file that may have the name of the socket.
func TestTopolvmScenario004(t *testing.T) {
	for name, row := range map[string]struct {
		prepare func(t *testing.T, path string)
		want    string // error
	}{
		"nothing": {prepare: func(*testing.T, string) {}},
		"a socket without a process": {prepare: func(t *testing.T, path string) {
			l := listenAt(t, path)
			l.SetUnlinkOnClose(false)
			l.Close()
		}},
		"a socket of a process": {want: "another process accepts connections",
			prepare: func(t *testing.T, path string) { listenAt(t, path) }},
		"a file": {want: "is no socket", prepare: func(t *testing.T, path string) {
			if err := os.WriteFile(path, []byte("data"), 0o600); err != nil {
				t.Fatal(err)
			}
		}},
		"a link": {want: "is no socket", prepare: func(t *testing.T, path string) {
			if err := os.Symlink("elsewhere", path); err != nil {
				t.Fatal(err)
			}
		}},
		"no directory": {want: "Its directory must exist", prepare: func(t *testing.T, path string) {
			if err := os.Remove(filepath.Dir(path)); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "csi.sock")
			row.prepare(t, path)
			before, _ := os.Lstat(path)
			s, err := openSocket(t.Context(), path)
			if row.want != "" {
				after, _ := os.Lstat(path)
				if err == nil || !strings.Contains(err.Error(), row.want) || before != nil && !os.SameFile(before, after) {
					t.Errorf("got %v, and the file may have changed", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer s.listener.Close()
			if info, err := os.Lstat(path); err != nil || info.Mode() != fs.ModeSocket|socketMode {
				t.Errorf("the socket has the mode %v, %v", info.Mode(), err)
			}
			if files, err := os.ReadDir(filepath.Dir(path)); err != nil || len(files) != 1 {
				t.Errorf("there are the files %v, %v", files, err)
			}
		})
	}
}

func listenAt(t *testing.T, path string) *net.UnixListener {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// TestServeSocket ends while a call is running. The call succeeds, or fails at the end of the grace. Soon, other calls fail.
func TestServeSocket(t *testing.T) {
	for _, inTime := range []bool{true, false} {
		path := filepath.Join(t.TempDir(), "csi.sock")
		s, err := openSocket(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		server, identity := grpc.NewServer(), slowIdentity{called: make(chan struct{}), released: make(chan struct{})}
		csi.RegisterIdentityServer(server, identity)
		grace := time.Minute
		if !inTime {
			grace = time.Millisecond
		}
		ctx, stop := context.WithCancel(t.Context())
		served, answered := make(chan error, 1), make(chan error, 1)
		go func() { served <- s.serve(ctx, server, grace) }()
		conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		go func() {
			_, err := csi.NewIdentityClient(conn).Probe(t.Context(), &csi.ProbeRequest{})
			answered <- err
		}()
		<-identity.called
		stop()
		for gone := false; !gone; {
			_, err := os.Lstat(path)
			gone = errors.Is(err, fs.ErrNotExist)
		}
		want := codes.OK
		if inTime {
			for refused := false; !refused; { // else it hangs: the server answers Unimplemented
				_, err := csi.NewIdentityClient(conn).GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
				refused = grpcstatus.Code(err) == codes.Unavailable
			}
			close(identity.released)
		} else {
			want = codes.Unavailable
		}
		if err := <-answered; grpcstatus.Code(err) != want {
			t.Errorf("the running call got %v, want %v", err, want)
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}

// TestConnectionsOfSocket: with too many connections, another one is closed, until one of them is.
func TestConnectionsOfSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "csi.sock")
	s, err := openSocket(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- s.serve(ctx, grpc.NewServer(), time.Minute) }()
	connect := func() (conn net.Conn, answered bool) {
		t.Helper()
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		n, _ := conn.Read(make([]byte, 1)) // the server begins with its settings
		return conn, n > 0
	}
	var open []net.Conn
	for range maxConnections {
		conn, answered := connect()
		if !answered {
			t.Fatalf("connection %d was closed", len(open))
		}
		open = append(open, conn)
	}
	further, answered := connect()
	further.Close()
	if answered {
		t.Error("there is no limit")
	}
	open[0].Close()
	for answered := false; !answered; {
		open[0], answered = connect()
	}
	for _, conn := range open {
		conn.Close()
	}
	stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// TestRemoveSocket keeps the file of a process that has replaced the socket.
func TestRemoveSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "csi.sock")
	first, err := openSocket(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	first.listener.Close()
	second, err := openSocket(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer second.listener.Close()
	first.remove(t.Context())
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the socket of the second process: %v", err)
	}
}
