// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"testing"
	"time"

	"github.com/storage-controller/storage-controller/internal/settings"
)

// TestNamesOfTheFlagsOfTheResizer: csi-resizer calls some flags differently than the other sidecars.
func TestNamesOfTheFlagsOfTheResizer(t *testing.T) {
	type values struct {
		workers int
		resync  time.Duration
	}
	for name, tt := range map[string]struct {
		roles Selection
		args  []string
		want  values
	}{
		"defaults":       {Resize, nil, values{10, 10 * time.Minute}},
		"of csi-resizer": {Resize, []string{"--workers=3", "--resync-period=1m"}, values{3, time.Minute}},
		"of the others":  {Resize, []string{"--worker-threads=4", "--resync=2m"}, values{4, 2 * time.Minute}},
		"both":           {Resize, []string{"--worker-threads=4", "--workers=3"}, values{3, 10 * time.Minute}},
		"all roles":      {All, []string{"--worker-threads=5", "--resync=3m"}, values{5, 3 * time.Minute}},
		"all, of this one": {All, []string{"--worker-threads=5", "--resizer-workers=6", "--resizer-resync-period=4m"},
			values{6, 4 * time.Minute}},
		"all, without a prefix": {All, []string{"--workers=7"}, values{7, 10 * time.Minute}},
	} {
		cfg := resizerConfig(configOf(t, tt.roles, tt.args...).Settings)
		if got := (values{cfg.Workers, cfg.ResyncPeriod}); got != tt.want {
			t.Errorf("%s: got %+v, want %+v", name, got, tt.want)
		}
	}
	t.Setenv(settings.EnvPrefix+"WORKER_THREADS", "8")
	if cfg := resizerConfig(configOf(t, All).Settings); cfg.Workers != 8 {
		t.Errorf("environment: %d workers", cfg.Workers)
	}
}
