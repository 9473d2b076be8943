// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Command registrar registers a CSI driver with the kubelet through the kubelet's directory of plugins.
package main

import (
	"context"
	"flag"
	"log"
	"net"

	"google.golang.org/grpc"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// plugin answers the kubelet's questions about the driver.
type plugin struct {
	registerapi.UnimplementedRegistrationServer
	info *registerapi.PluginInfo
}

func (p plugin) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return p.info, nil
}

func (p plugin) NotifyRegistrationStatus(_ context.Context,
	status *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	if !status.GetPluginRegistered() {
		log.Fatalf("The kubelet refuses the driver: %s", status.GetError())
	}
	log.Print("The kubelet has registered the driver")
	return &registerapi.RegistrationStatusResponse{}, nil
}

func main() {
	name := flag.String("driver-name", "", "name of the driver")
	endpoint := flag.String("csi-address", "", "path of the driver's socket")
	socket := flag.String("registration", "", "path of the socket in the kubelet's directory of plugins")
	flag.Parse()
	listener, err := net.Listen("unix", *socket)
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer()
	registerapi.RegisterRegistrationServer(server, plugin{info: &registerapi.PluginInfo{
		Type: registerapi.CSIPlugin, Name: *name, Endpoint: *endpoint, SupportedVersions: []string{"1.0.0"},
	}})
	log.Fatal(server.Serve(listener))
}
