// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecontroller

import (
	"math"
	"strings"
	"testing"

	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
	"github.com/storage-controller/storage-controller/nodecontroller/pvcfinalizer"
	"github.com/storage-controller/storage-controller/topolvm"
)

// TestValidate changes one setting of a valid configuration.
func TestValidate(t *testing.T) {
	long := strings.Repeat("x", 64)
	tests := map[string]struct {
		change func(*Config)
		want   string // what the error says; empty for none
	}{
		"finalizer without a prefix":       {func(c *Config) { c.NodeFinalizer = "node" }, "--node-finalizer: must have a prefix"},
		"finalizer with an illegal prefix": {func(c *Config) { c.NodeFinalizer = "A_b/node" }, "--node-finalizer"},
		"finalizer of claims":              {func(c *Config) { c.PVCFinalizer = "x.y/" }, "--pvc-finalizer"},
		"obsolete finalizer": {func(c *Config) { c.PVCObsoleteFinalizers = []string{"x.y/z", "pvc"} },
			"--pvc-obsolete-finalizers"},
		"finalizer that is obsolete and not": {func(c *Config) {
			c.PVCFinalizerMode, c.PVCObsoleteFinalizers = pvcfinalizer.ModeEnforce, []string{c.PVCFinalizer}
		}, "--pvc-obsolete-finalizers"},
		"finalizer of claims of Kubernetes": {func(c *Config) { c.PVCFinalizer = "kubernetes.io/pvc-protection" }, "--pvc-finalizer"},
		"obsolete finalizer of the provisioner": {func(c *Config) {
			c.PVCObsoleteFinalizers = []string{"storage-controller.io/provisioning"}
		}, "--pvc-obsolete-finalizers"},
		"resize annotation":          {func(c *Config) { c.ResizeAnnotation = "x.y/a b" }, "--resize-annotation"},
		"topology key":               {func(c *Config) { c.TopologyNodeKey = "a/b/c" }, "--topology-node-key"},
		"topology key of Kubernetes": {func(c *Config) { c.TopologyNodeKey = "kubernetes.io/hostname" }, ""},
		"topology key of zones": {func(c *Config) { c.TopologyNodeKey = "topology.kubernetes.io/zone" },
			"--topology-node-key: must have one value per node"},
		"topology key of regions": {func(c *Config) { c.TopologyNodeKey = "x.y/region" },
			"--topology-node-key: must have one value per node"},
		"resource without a prefix": {func(c *Config) { c.CapacityResource = "cpu" }, "--capacity-resource"},
		"resource of Kubernetes":    {func(c *Config) { c.CapacityResource = "x.kubernetes.io/cpu" }, "--capacity-resource"},
		"resource of a quota":       {func(c *Config) { c.CapacityResource = "requests.x/cpu" }, "--capacity-resource"},
		"resource with a long name": {func(c *Config) { c.CapacityResource = "x.y/" + long }, "--capacity-resource"},
		"resource with a long prefix": {func(c *Config) { c.CapacityResource = strings.Repeat("x.", 123) + "y/c" },
			"--capacity-resource"},
		"prefix without a slash": {func(c *Config) { c.CapacityAnnotationPrefix = "capacity.x.y" },
			"--capacity-annotation-prefix: must end with a slash"},
		"prefix that is too long": {func(c *Config) { c.CapacityAnnotationPrefix = strings.Repeat("x.", 127) + "y/" },
			"--capacity-annotation-prefix"},
		"prefix of nothing":         {func(c *Config) { c.CapacityAnnotationPrefix = "/" }, "--capacity-annotation-prefix"},
		"device class with a slash": {func(c *Config) { c.DefaultDeviceClass = "a/b" }, "--default-device-class"},
		"no device class":           {func(c *Config) { c.DefaultDeviceClass = "" }, "--default-device-class"},
		"long device class":         {func(c *Config) { c.DefaultDeviceClass = long }, "--default-device-class"},
		"Lease":                     {func(c *Config) { c.LeaderElectionID = "A" }, "--leader-election-id"},
		"mode of the finalizer": {func(c *Config) { c.NodeFinalizerMode = "add" },
			"--node-finalizer-mode: must be one of off, remove, manage"},
		"mode of the clean-up": {func(c *Config) { c.NodeCleanup = "all" },
			"--node-cleanup: must be one of off, report, claims, volumes"},
		"scope": {func(c *Config) { c.NodeCleanupScope = "" },
			"--node-cleanup-scope: must be one of opt-in, all"},
		"policy for retained volumes": {func(c *Config) { c.NodeCleanupRetain = "x" },
			"--node-cleanup-retain: must be one of skip, claim"},
		"mode of claims": {func(c *Config) { c.PVCFinalizerMode = "x" },
			"--pvc-finalizer-mode: must be one of off, strip, enforce"},
		"enforce for another driver": {func(c *Config) { c.PVCFinalizerMode = pvcfinalizer.ModeEnforce },
			`--pvc-finalizer-mode=enforce: is for TopoLVM only, but the driver is "local.example.com"`},
		"enforce for TopoLVM": {
			func(c *Config) { c.PVCFinalizerMode, c.DriverName = pvcfinalizer.ModeEnforce, topolvm.LegacyDriver }, ""},
		"no deadline":            {func(c *Config) { c.Timeout = 0 }, "--timeout"},
		"no delay":               {func(c *Config) { c.RetryIntervalStart = 0 }, "--retry-interval-start"},
		"negative grace":         {func(c *Config) { c.NodeDeleteGrace = -1 }, "--node-delete-grace: must not be negative"},
		"negative release grace": {func(c *Config) { c.PVReleaseGrace = -1 }, "--pv-release-grace: must not be negative"},
		"short grace of missing nodes": {func(c *Config) { c.NodeMissingGrace = c.MinMissingGrace - 1 },
			"--node-missing-grace: must be at least 1m0s"},
		"shortest grace of missing nodes": {func(c *Config) { c.NodeMissingGrace = c.MinMissingGrace }, ""},
		"no workers":                      {func(c *Config) { c.Workers = 0 }, "--nodecontroller-workers"},
		"fraction above one":              {func(c *Config) { c.NodeCleanupMaxFraction = 1.1 }, "--node-cleanup-max-fraction"},
		"fraction that is no number":      {func(c *Config) { c.NodeCleanupMaxFraction = math.NaN() }, "--node-cleanup-max-fraction"},
		"negative nodes":                  {func(c *Config) { c.NodeCleanupMinNodes = -1 }, "--node-cleanup-min-nodes"},
		"no rate":                         {func(c *Config) { c.NodeCleanupQPS = 0 }, "--node-cleanup-qps"},
		"rate that is no number":          {func(c *Config) { c.NodeCleanupQPS = math.NaN() }, "--node-cleanup-qps"},
		"infinite rate":                   {func(c *Config) { c.NodeCleanupQPS = math.Inf(1) }, "--node-cleanup-qps"},
		"no burst":                        {func(c *Config) { c.NodeCleanupBurst = 0 }, "--node-cleanup-burst"},
		"address of webhooks":             {func(c *Config) { c.EnableWebhooks, c.WebhookAddr = true, "9443" }, "--webhook-addr"},
		"port of webhooks":                {func(c *Config) { c.EnableWebhooks, c.WebhookAddr = true, ":nope" }, "--webhook-addr"},
		"port of webhooks by name":        {func(c *Config) { c.EnableWebhooks, c.WebhookAddr = true, ":https" }, ""},
		"address without webhooks":        {func(c *Config) { c.WebhookAddr = "" }, ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			c, _ := completed(t, "local.example.com", nil)
			tt.change(&c)
			switch err := c.Validate(); {
			case tt.want == "" && err != nil:
				t.Errorf("got %v", err)
			case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("got %v, want an error with %q", err, tt.want)
			}
		})
	}
}

func TestValidateReportsEverything(t *testing.T) {
	c, _ := completed(t, "local.example.com", nil)
	c.CapacityResource, c.DefaultDeviceClass, c.NodeCleanup, c.Workers = "cpu", "a/b", "x", 0
	err := c.Validate()
	for _, want := range []string{"--capacity-resource", "--default-device-class", "--node-cleanup:", "--nodecontroller-workers"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s is missing in %v", want, err)
		}
	}
	if again := c.Validate(); again.Error() != err.Error() {
		t.Errorf("the order of the findings is another:\n%v\n%v", err, again)
	}
}

func TestWhatIsNotResolvedIsValid(t *testing.T) {
	if err := DefaultConfig().Validate(); err != nil {
		t.Error(err)
	}
}

func TestDeletes(t *testing.T) {
	tests := map[string]struct {
		change func(*Config)
		want   string
	}{
		"nothing by default": {nil, ""},
		"claims":             {func(c *Config) { c.NodeCleanup = nodecleanup.ModeClaims }, "--node-cleanup=claims"},
		"volumes":            {func(c *Config) { c.NodeCleanup = nodecleanup.ModeVolumes }, "--node-cleanup=volumes"},
		"stripping":          {func(c *Config) { c.PVCFinalizerMode = pvcfinalizer.ModeStrip }, ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			c, _ := completed(t, "local.example.com", tt.change)
			if got := strings.Join(c.DeletingFlags(), " "); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
	c, _ := completed(t, topolvm.Driver, func(c *Config) { c.PVCFinalizerMode = pvcfinalizer.ModeEnforce })
	if got := strings.Join(c.DeletingFlags(), " "); got != "--node-cleanup=claims --pvc-finalizer-mode=enforce" {
		t.Errorf("TopoLVM: got %q", got)
	}
}
