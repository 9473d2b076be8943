// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// TestUnderTheNamesOfTheSidecars runs the two roles as the sidecars that they
// replace: a process each, under that name, with flags as old manifests have them.
func TestUnderTheNamesOfTheSidecars(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 1)
	provisioner := e.start(e.linked("csi-provisioner", "--leader-election", "--feature-gates=Topology=true,HonorPVReclaimPolicy=true",
		"--extra-create-metadata", "--kube-api-qps=100", "--kube-api-burst=200"))
	attacher := e.start(e.linked("csi-attacher", "-leader-election", "-worker-threads=5", "-timeout=30s", "-resync=1m"))
	e.claim("c", e.class(false, nil))
	e.attach("a", e.bound("c"), e.nodes[0])
	e.attached(1)
	e.detach("a")
	e.attached(0)
	e.leftovers("c")
	if r := e.plugin.Calls("CreateVolume")[0].Request.(*csi.CreateVolumeRequest); r.Parameters["csi.storage.k8s.io/pvc/name"] != "c" {
		t.Errorf("parameters %v", r.Parameters)
	}
	for _, p := range []*process{provisioner, attacher} {
		p.signal(os.Interrupt)
		if code := p.code(); code != 0 {
			t.Errorf("exit code %d", code)
		}
	}
}

// TestOnlyTheRolesThatTheDriverSupports: a driver without publishing has no attacher.
func TestOnlyTheRolesThatTheDriverSupports(t *testing.T) {
	e := newEnv(t,
		csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME}}, 0)
	mark := e.mark()
	e.run("all")
	e.claim("c", e.class(false, nil))
	e.bound("c")
	for _, r := range e.audited(mark, "storage-controller/") {
		if r.Object.Resource == "volumeattachments" || r.Object.Resource == "nodes" {
			t.Errorf("%s of %s, which no role needs", r.Verb, r.Object.Resource)
		}
	}
	e.leftovers("c")
}
