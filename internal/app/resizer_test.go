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

// TestTimeoutsOfTheResizer: as with csi-resizer, --timeout on the command line overrides those of single calls.
func TestTimeoutsOfTheResizer(t *testing.T) {
	for name, tt := range map[string]struct {
		roles                   Selection
		args                    []string
		timeout, expand, modify time.Duration
	}{
		"defaults":        {Resize, nil, 15 * time.Second, 0, 0},
		"single calls":    {Resize, []string{"--resize-timeout=1m", "--modify-timeout=2m"}, 15 * time.Second, time.Minute, 2 * time.Minute},
		"all, one call":   {All, []string{"--resizer-resize-timeout=1m"}, 15 * time.Second, time.Minute, 0},
		"timeout":         {Resize, []string{"--resize-timeout=1m", "--timeout=3s"}, 3 * time.Second, 0, 0},
		"all, timeout":    {All, []string{"--modify-timeout=1m", "--timeout=3s"}, 3 * time.Second, 0, 0},
		"all, of another": {All, []string{"--modify-timeout=1m", "--attacher-timeout=3s"}, 15 * time.Second, 0, time.Minute},
	} {
		cfg := resizerConfig(configOf(t, tt.roles, tt.args...).Settings)
		if cfg.Timeout != tt.timeout || cfg.ResizeTimeout != tt.expand || cfg.ModifyTimeout != tt.modify {
			t.Errorf("%s: timeout %v, of expansions %v, of modifications %v", name, cfg.Timeout, cfg.ResizeTimeout, cfg.ModifyTimeout)
		}
	}
	t.Setenv(settings.EnvPrefix+"TIMEOUT", "3s")
	cfg := resizerConfig(configOf(t, Resize, "--resize-timeout=1m").Settings)
	if cfg.ResizeTimeout != time.Minute || cfg.Timeout != 3*time.Second {
		t.Errorf("timeout from the environment: %v, of expansions %v", cfg.Timeout, cfg.ResizeTimeout)
	}
}
