// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm_test

import (
	"context"
	"flag"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// sanityClass names the device class in the environment of a process that runs one suite: a process can run one only.
const sanityClass = "TOPOLVM_SANITY_CLASS"

// TestTopolvmScenario010 runs the suite that the Kubernetes CSI project has for drivers (scenario 010), for a thin and a thick device
// class. The node service is that of topolvm-node.
func TestTopolvmScenario010(t *testing.T) {
	skip := map[string]string{"thin": "Node Service", "ssd": "Node Service|[sS]napshot|source"}
	class := os.Getenv(sanityClass)
	if class != "" {
		if err := flag.Set("ginkgo.skip", skip[class]); err != nil {
			t.Fatal(err)
		}
		runSanity(t, class)
		return
	}
	kubetest.Get(t) // or skips the test
	for class := range skip {
		t.Run(class, func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestTopolvmScenario010$", "-test.v")
			cmd.Env = append(os.Environ(), sanityClass+"="+class)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// node is a node service without capabilities, which the suite needs for its clean-up.
type node struct{ csi.UnimplementedNodeServer }

func (node) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	return &csi.NodeGetCapabilitiesResponse{}, nil
}

func (node) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: "a"}, nil
}

func (node) NodeUnpublishVolume(context.Context, *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

func runSanity(t *testing.T, class string) {
	f := start(t)
	dir := t.TempDir()
	listener, err := net.Listen("unix", f.socket+".sanity")
	if err != nil {
		t.Fatal(err)
	}
	server := f.service.Server()
	csi.RegisterNodeServer(server, node{})
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	cfg := sanity.NewTestConfig()
	cfg.Address = csitest.SanityAddress
	cfg.DialOptions = append(cfg.DialOptions, csitest.SanityDialer(f.socket+".sanity"))
	cfg.TargetPath, cfg.StagingPath = filepath.Join(dir, "target"), filepath.Join(dir, "staging")
	cfg.TestVolumeSize = gi
	cfg.TestVolumeParameters = map[string]string{f.driver + "/device-class": class}
	sanity.Test(t, cfg)
}
