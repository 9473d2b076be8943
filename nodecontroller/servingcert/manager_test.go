// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package servingcert

import (
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"
)

// TestCertificateForAnotherName: it is served, because the API server may call a URL, and a warning says so.
func TestCertificateForAnotherName(t *testing.T) {
	for name, tt := range map[string]struct {
		service, namespace string
		hosts              []string
		want               string
	}{
		"the Service":                {"hook", "ns", []string{"hook.ns.svc"}, ""},
		"all of the namespace":       {"hook", "ns", []string{"*.ns.svc"}, ""},
		"another Service":            {"hook", "ns", []string{"other.ns.svc", "localhost"}, "not for hook.ns.svc"},
		"another namespace":          {"hook", "ns", []string{"hook.default.svc"}, "not for hook.ns.svc"},
		"a Service, any is right":    {"", "ns", []string{"localhost", "other.ns.svc"}, ""},
		"no Service, any is right":   {"", "ns", []string{"localhost"}, "no name of a Service"},
		"the namespace is not known": {"hook", "", []string{"localhost"}, "no name of a Service"},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := New(Config{Mode: Files, Service: tt.service, Namespace: tt.namespace}, nil, prometheus.NewRegistry())
			if err != nil {
				t.Fatal(err)
			}
			certs, key, err := generate(tt.hosts, 0)
			if err != nil {
				t.Fatal(err)
			}
			logged := 0
			ctx := klog.NewContext(t.Context(), funcr.New(func(_, line string) {
				if strings.Contains(line, "does not name the Service") && strings.Contains(line, tt.hosts[0]) {
					logged++
				}
			}, funcr.Options{}))
			m.load(ctx, certs, key, nil)
			m.load(ctx, certs, key, nil)
			if err := m.Ready(); err != nil {
				t.Error(err)
			}
			if got := m.Warning(); (got == "") != (tt.want == "") || !strings.Contains(got, tt.want) {
				t.Errorf("got %q, want %q", got, tt.want)
			}
			if (logged == 1) != (tt.want != "") {
				t.Errorf("%d log lines", logged)
			}
		})
	}
}
