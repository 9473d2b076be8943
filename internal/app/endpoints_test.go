// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	dto "github.com/prometheus/client_model/go"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

func TestEndpoints(t *testing.T) {
	const all = "provisioner,attacher,capacity,nodecontroller,resizer,snapshotter"
	for args, want := range map[string]string{
		"":                          "",
		"--http-endpoint=:1":        ":1=" + all,
		"--metrics-bind-address=:1": ":1=nodecontroller",
		"--http-endpoint=:1 --resizer-http-endpoint=:2 --attacher-metrics-path=/m --attacher-http-endpoint=:3": ":1=provisioner,capacity," +
			"nodecontroller,snapshotter :3=attacher :2=resizer",
		"--attacher-http-endpoint=:1 --resizer-metrics-address=:1": ":1=attacher,resizer",

		"--http-endpoint=:1 --attacher-metrics-path=/m":                  "error: the roles provisioner and attacher share the address :1",
		"--http-endpoint=:1 --resizer-enable-pprof":                      "error: the roles provisioner and resizer share the address :1",
		"--attacher-http-endpoint=:1 --resizer-http-endpoint=x":          "error: resizer: --http-endpoint: must be host:port",
		"--attacher-http-endpoint=x --attacher-metrics-path=m":           "error: attacher: --metrics-path: must begin with a slash",
		"--http-endpoint=:1 --attacher-metrics-address=:1":               "error: attacher: --http-endpoint and --metrics-address",
		"--provisioner-leader-election":                                  "error: the roles provisioner and capacity share a Lease",
		"--provisioner-leader-election --controllers=-capacity":          "",
		"--provisioner-leader-election --enable-capacity=false":          "",
		"--attacher-feature-gates=Nope=true":                             `error: attacher: --feature-gates: unknown gate "Nope"`,
		"--feature-gates=Nope=true":                                      `error: --feature-gates: unknown gate "Nope"`,
		"--attacher-leader-election-lease-duration=1s":                   "",
		"--attacher-leader-election-lease-duration=1s --leader-election": "error: attacher: --leader-election-lease-duration",
	} {
		c := configOf(t, All, strings.Fields(args)...)
		var got []string
		if err := c.Validate(); err != nil {
			got = append(got, "error: "+err.Error())
		} else {
			for _, e := range c.endpoints() {
				got = append(got, e.Address()+"="+strings.Join(e.roles, ","))
			}
		}
		text := strings.Join(got, " ")
		wrong := text != want
		if _, message, isError := strings.Cut(want, "error: "); isError {
			wrong = !strings.Contains(text, message)
		}
		if wrong {
			t.Errorf("%s: got %q, want %q", args, text, want)
		}
	}
}

// TestSeriesAtOneAddress: sums over the addresses of a process count nothing twice.
func TestSeriesAtOneAddress(t *testing.T) {
	cp := kubetest.Get(t)
	ns := kubetest.Namespace(t, cp)
	plugin := csitest.Run(t, csitest.Config{Name: ns + ".example.com", Controller: []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES, csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
	}})
	p := newProcess(configOf(t, All, "--csi-address="+plugin.Address(), "--kubeconfig="+cp.Kubeconfig(), "--leader-election",
		"--http-endpoint=:1", "--attacher-http-endpoint=:2", "--resizer-http-endpoint=:3", "--enable-capacity=false"))
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	if err := p.connect(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer p.csi.Close()
	config, err := kube.RESTConfig(p.Common.Kubeconfig, p.Common.Master)
	if err != nil {
		t.Fatal(err)
	}
	services, stopServices := context.WithCancel(t.Context())
	terms, err := p.build(t.Context(), services, config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(terms.stop)
	t.Cleanup(stopServices)
	if _, err := p.csi.Controller().ListVolumes(t.Context(), &csi.ListVolumesRequest{}); err != nil {
		t.Fatal(err)
	}
	addresses := map[string][]string{}
	for _, role := range []string{provisionerName, attacherName, resizerName} {
		families, err := p.registries.of(role).Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, family := range families {
			for _, m := range family.GetMetric() {
				series := seriesOf(family, m)
				addresses[series] = append(addresses[series], role)
			}
		}
	}
	for series, roles := range addresses {
		if everywhere := strings.HasPrefix(series, "storage_controller_driver_info"); (len(roles) > 1) != everywhere {
			t.Errorf("%s is served at the addresses of %v", series, roles)
		}
	}
	driver := "driver_name=" + ns + ".example.com "
	for series, role := range map[string]string{
		"csi_sidecar_operations_seconds " + driver + "grpc_status_code=OK method_name=/csi.v1.Controller/ListVolumes": attacherName,
		"csi_sidecar_operations_seconds " + driver + "grpc_status_code=OK method_name=/csi.v1.Identity/GetPluginInfo": provisionerName,
		"go_goroutines": provisionerName,
		"leader_election_slowpath_total name=external-attacher-leader-" + ns + "-example-com": attacherName,
	} {
		if got := addresses[series]; len(got) != 1 || got[0] != role {
			t.Errorf("%q is served at the addresses of %v, want %s", series, got, role)
		}
	}
}

// seriesOf returns the name and the labels of m.
func seriesOf(family *dto.MetricFamily, m *dto.Metric) string {
	parts := []string{family.GetName()}
	for _, label := range m.GetLabel() {
		parts = append(parts, fmt.Sprintf("%s=%s", label.GetName(), label.GetValue()))
	}
	return strings.Join(parts, " ")
}
