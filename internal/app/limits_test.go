// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"testing"

	"k8s.io/client-go/rest"
)

// TestNoLimitByDefault: API Priority and Fairness protects the API server, so no role limits its own requests.
func TestNoLimitByDefault(t *testing.T) {
	t.Parallel()
	for command, selection := range map[string]Selection{"provision": Provision, "attach": Attach, "resize": Resize,
		"snapshot": Snapshot, "capacity": Capacity, "nodecontroller": Nodecontroller, "all": All} {
		c := configOf(t, selection)
		for _, r := range c.roles {
			if got := clientConfig(&rest.Config{}, c, r); got.QPS != -1 {
				t.Errorf("%s, %s: a limit of %v requests per second", command, r.Name, got.QPS)
			}
		}
	}
}

// TestLimits: the flags mean what they mean in client-go.
func TestLimits(t *testing.T) {
	t.Parallel()
	type limits struct {
		qps   float32
		burst int
	}
	for name, tt := range map[string]struct {
		flags []string
		want  limits // of the attacher
	}{
		"no limit":        {[]string{"--kube-api-qps=-1", "--kube-api-burst=0"}, limits{-1, 0}},
		"default burst":   {[]string{"--kube-api-qps=7", "--kube-api-burst=0"}, limits{7, 10}},
		"no burst is set": {[]string{"--kube-api-qps=7"}, limits{7, 10}},
		"both":            {[]string{"--kube-api-qps=0.5", "--kube-api-burst=3"}, limits{0.5, 3}},
	} {
		c := configOf(t, All, tt.flags...)
		if err := c.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		got := clientConfig(&rest.Config{}, c, attacherRole)
		if (limits{got.QPS, got.Burst}) != tt.want {
			t.Errorf("%s: %v requests per second, burst %d, want %v", name, got.QPS, got.Burst, tt.want)
		}
	}
	capacity := configOf(t, Capacity, "--kube-api-capacity-qps=2", "--kube-api-capacity-burst=0")
	if got := clientConfig(&rest.Config{}, capacity, capacityRole); capacity.Validate() != nil || got.QPS != 2 || got.Burst != 10 {
		t.Errorf("capacity: %v, %v requests per second, burst %d", capacity.Validate(), got.QPS, got.Burst)
	}
	if configOf(t, All, "--kube-api-qps=1", "--kube-api-burst=-1").Validate() == nil {
		t.Error("a negative burst is accepted")
	}
}
