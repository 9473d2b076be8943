// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"context"
	"os"
	"time"

	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/settings"
)

// reloadInterval is the time between two reads of the configuration file. The kubelet needs up to a minute to
// update a mounted ConfigMap.
const reloadInterval = 10 * time.Second

// reloader applies changes of the configuration file to the running process.
type reloader struct {
	cfg  Config // with the settings that were read last
	page *status

	content []byte // that was read last; nil: none
	failure string // to read the file, that was logged last
}

// run checks the file until ctx ends. Without a file it returns at once.
func (r *reloader) run(ctx context.Context) {
	if r.cfg.file == "" {
		return
	}
	ticker := time.NewTicker(reloadInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			r.check(ctx)
		}
	}
}

// check applies the changes of the file since the last call. An invalid file changes nothing.
func (r *reloader) check(ctx context.Context) {
	log := klog.FromContext(ctx).WithValues("file", r.cfg.file)
	content, err := os.ReadFile(r.cfg.file)
	if err != nil {
		if r.failure != err.Error() {
			log.Error(err, "Cannot read the configuration file, keeping the settings")
		}
		r.failure = err.Error()
		return
	}
	if r.content != nil && bytes.Equal(content, r.content) {
		r.failure = ""
		return
	}
	next := r.cfg
	if next.Settings, err = r.cfg.reread(); err == nil {
		err = next.Validate()
	}
	if err != nil { // perhaps because of another file that it names
		if r.failure != err.Error() {
			log.Error(err, "Configuration file is invalid, keeping the settings")
		}
		r.failure = err.Error()
		return
	}
	r.content, r.failure = content, ""
	before := map[string]string{}
	for _, v := range r.cfg.Values {
		before[v.Name] = v.Value
	}
	for _, v := range next.Values {
		if value, known := before[v.Name]; !known || v.Value != value {
			r.apply(klog.NewContext(ctx, log), next, v)
		}
	}
	r.cfg.Settings = next.Settings
}

// apply applies the setting v of cfg if that is possible without a restart.
func (r *reloader) apply(ctx context.Context, cfg Config, v settings.Value) {
	log := klog.FromContext(ctx).WithValues("setting", v.Name)
	var err error
	switch {
	case cfg.Logs != nil && v.Name == "v":
		_, err = cfg.Logs.SetVerbosity(cfg.Common.Logging.Verbosity)
	case cfg.Logs != nil && v.Name == "vmodule":
		err = cfg.Logs.SetVModule(cfg.Common.Logging.VModule)
	default:
		log.Info("Setting changed in the configuration file, effective at the next start")
		return
	}
	if err != nil {
		log.Error(err, "Cannot apply the changed setting")
		return
	}
	r.page.change(v)
	log.Info("Setting reloaded", "value", v.Value)
}
