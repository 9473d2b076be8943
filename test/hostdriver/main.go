// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Command hostdriver is a small CSI driver whose volumes are directories on this
// host. It is for trying things out, and for reading: it is as simple as a driver can
// be that keeps what the CSI spec demands, also when it is killed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/api/resource"
)

// nodeFlag is --node NAME=key=value,key=value, repeatable.
type nodeFlag map[string]map[string]string

func (n nodeFlag) String() string { return "" }

func (n nodeFlag) Set(value string) error {
	name, labels, _ := strings.Cut(value, "=")
	if name == "" {
		return errors.New("must be NAME or NAME=key=value,key=value")
	}
	n[name] = map[string]string{}
	for item := range strings.SplitSeq(labels, ",") {
		if item == "" {
			continue
		}
		k, v, ok := strings.Cut(item, "=")
		if !ok || k == "" {
			return fmt.Errorf("%q is not key=value", item)
		}
		n[name][k] = v
	}
	return nil
}

func main() {
	cfg := config{nodes: map[string]map[string]string{}}
	endpoint := flag.String("endpoint", "unix:///tmp/hostdriver/csi.sock", "socket to serve on")
	flag.StringVar(&cfg.root, "root", "/tmp/hostdriver/volumes", "directory that holds the volumes")
	flag.StringVar(&cfg.name, "driver-name", "host.storage-controller.example.com", "name of the driver")
	flag.StringVar(&cfg.node, "node-name", "", "node of the node service; empty means the host name")
	flag.Var(nodeFlag(cfg.nodes), "node", "node that volumes can be published to, as NAME=key=value,key=value with its topology; "+
		"repeatable. Without any, every node will do and there is no topology")
	capacity := flag.String("capacity", "100Gi", "size of all volumes of a topology segment together")
	flag.IntVar(&cfg.maxPerNode, "max-volumes-per-node", 0, "volumes that can be published to one node; 0 means any number")
	flag.DurationVar(&cfg.latency, "latency", 0, "how long each call of the controller takes in addition")
	flag.BoolVar(&cfg.mount, "mount", false, "publish volumes by bind mounts and block volumes as loop devices, which a kubelet "+
		"requires; Linux only, and needs root. The default is a symbolic link")
	flag.Parse()
	if err := run(cfg, *endpoint, *capacity); err != nil {
		fmt.Fprintln(os.Stderr, "hostdriver:", err)
		os.Exit(1)
	}
}

func run(cfg config, endpoint, capacity string) error {
	size, err := resource.ParseQuantity(capacity)
	if err != nil || size.Sign() <= 0 {
		return fmt.Errorf("--capacity: must be a positive size such as 10Gi, got %q", capacity)
	}
	cfg.capacity = size.Value()
	if cfg.node == "" {
		if cfg.node, err = os.Hostname(); err != nil {
			return err
		}
	}
	d, err := newDriver(cfg)
	if err != nil {
		return err
	}
	path := strings.TrimPrefix(endpoint, "unix://")
	if !filepath.IsAbs(path) {
		return fmt.Errorf("--endpoint: must be an absolute path or unix:// and one, got %q", endpoint)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) { // of one that was killed
		return err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	server := d.server()
	context.AfterFunc(ctx, server.GracefulStop)
	log.Printf("driver %s serves %s at %s", cfg.name, cfg.root, path)
	return server.Serve(listener)
}

// server serves d and logs every call in a line.
func (d *driver) server() *grpc.Server {
	s := grpc.NewServer(grpc.UnaryInterceptor(func(ctx context.Context, request any, info *grpc.UnaryServerInfo,
		handler grpc.UnaryHandler) (any, error) {
		begin := time.Now()
		method := info.FullMethod[strings.LastIndexByte(info.FullMethod, '/')+1:]
		if d.cfg.latency > 0 && strings.Contains(info.FullMethod, ".Controller/") {
			select {
			case <-time.After(d.cfg.latency):
			case <-ctx.Done():
				return nil, status.FromContextError(ctx.Err()).Err()
			}
		}
		response, err := handler(ctx, request)
		if method != "Probe" {
			log.Printf("%s %s %v: %v", method, subject(request), time.Since(begin).Round(time.Millisecond), status.Code(err))
		}
		return response, err
	}))
	csi.RegisterIdentityServer(s, d)
	csi.RegisterControllerServer(s, d)
	csi.RegisterGroupControllerServer(s, d)
	csi.RegisterNodeServer(s, d)
	return s
}

// subject is what a call is about; secrets are not looked at.
func subject(request any) string {
	switch r := request.(type) {
	case interface{ GetVolumeId() string }:
		return r.GetVolumeId()
	case interface{ GetSnapshotId() string }:
		return r.GetSnapshotId()
	case interface{ GetName() string }:
		return r.GetName()
	}
	return "-"
}
