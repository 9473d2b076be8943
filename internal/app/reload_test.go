// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/zapr"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"k8s.io/klog/v2"
)

// TestReload: changes of the file that need no restart are applied, the others are logged once.
func TestReload(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	write := func(content string) {
		t.Helper()
		header := "apiVersion: config.storage-controller.io/v1alpha1\nkind: StorageControllerConfiguration\n"
		if err := os.WriteFile(file, []byte(header+content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("v: 1\n")
	c := configOf(t, All, "--config="+file, "--kube-api-burst=7")
	c.Logs = &Logs{enabled: zap.NewAtomicLevel()}
	t.Cleanup(func() { _, _ = c.Logs.SetVerbosity(0) }) // klog's levels are global
	core, entries := observer.New(zapcore.DebugLevel)
	ctx := klog.NewContext(t.Context(), zapr.NewLogger(zap.New(core)))
	r := &reloader{cfg: c, page: &status{cfg: c}}
	flagz := func() string {
		page := httptest.NewRecorder()
		r.page.flags(page, nil)
		return strings.Join(strings.Fields(page.Body.String()), " ")
	}
	for _, step := range []struct {
		name, content string
		want          []string // messages and the names of settings
		shown         string   // in /flagz
	}{
		{"unchanged", "v: 1\n", nil, "v 1 file"},
		{"verbosity", "v: 3\n", []string{"Setting reloaded v"}, "v 3 file"},
		{"one file", "v: 3\nvmodule: reload=5\n", []string{"Setting reloaded vmodule"}, "vmodule reload=5 file"},
		{"others", "v: 3\nvmodule: reload=5\ntimeout: 30s\nattacher: {timeout: 15s, worker-threads: 4}\n", []string{
			"Setting changed in the configuration file, effective at the next start provisioner.timeout",
			"Setting changed in the configuration file, effective at the next start attacher.worker-threads"},
			"attacher.worker-threads 100 default"},
		{"a flag takes precedence", "v: 3\nkube-api-burst: 9\n", []string{"Setting reloaded vmodule"}, "kube-api-burst 7 flag"},
		{"a livenessprobe", "v: 3\nlivenessprobe: {probe-timeout: 5s}\n", []string{
			"Setting changed in the configuration file, effective at the next start livenessprobe.probe-timeout"}, "v 3 file"},
		{"none again", "v: 3\n", []string{}, "v 3 file"},
		{"unknown key", "v: 4\nthreads: 1\n", []string{"Configuration file is invalid, keeping the settings "}, "v 3 file"},
		{"invalid value", "v: 4\ntimeout: -1s\n", []string{"Configuration file is invalid, keeping the settings "}, "v 3 file"},
	} {
		write(step.content)
		for range 2 { // the second check finds nothing new
			r.check(ctx)
		}
		var got []string
		for _, e := range entries.TakeAll() {
			setting, _ := e.ContextMap()["setting"].(string)
			got = append(got, e.Message+" "+setting)
		}
		for _, want := range step.want {
			if n := len(slices.DeleteFunc(slices.Clone(got), func(m string) bool { return m != want })); n != 1 {
				t.Errorf("%s: %q was logged %d times: %q", step.name, want, n, got)
			}
		}
		if step.want == nil && got != nil || !strings.Contains(flagz(), step.shown) {
			t.Errorf("%s: logged %q, want %q in %s", step.name, got, step.shown, flagz())
		}
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		r.check(ctx)
	}
	if n := entries.FilterMessage("Cannot read the configuration file, keeping the settings").Len(); n != 1 {
		t.Errorf("a missing file was logged %d times", n)
	}
	if level := c.Logs.levels.Load().verbosity; level != 3 {
		t.Errorf("verbosity %d, want 3", level)
	}
}

// TestPutVerbosity: a client can change the verbosity, up to the level at which contents of Secrets would be logged.
func TestPutVerbosity(t *testing.T) {
	c := configOf(t, All)
	c.Logs = &Logs{enabled: zap.NewAtomicLevel()}
	t.Cleanup(func() { _, _ = c.Logs.SetVerbosity(0) })
	s := &status{cfg: c}
	for _, tt := range []struct {
		body, answer string
		code, level  int
	}{
		{"4", "verbosity set to 4\n", http.StatusOK, 4},
		{" 2\n", "verbosity set to 2\n", http.StatusOK, 2},
		{"9", "verbosity set to 7\n", http.StatusOK, 7},
		{"many", "the body must be", http.StatusBadRequest, 7},
		{"-1", "the body must be", http.StatusBadRequest, 7},
		{strings.Repeat("0", 100), "the body must be", http.StatusBadRequest, 7},
	} {
		w := httptest.NewRecorder()
		s.actions()["/debug/flags/v"].ServeHTTP(w, httptest.NewRequest(http.MethodPut, "/debug/flags/v", bytes.NewBufferString(tt.body)))
		if w.Code != tt.code || !strings.Contains(w.Body.String(), tt.answer) || c.Logs.levels.Load().verbosity != tt.level {
			t.Errorf("%q: %d %s, verbosity %d", tt.body, w.Code, w.Body.String(), c.Logs.levels.Load().verbosity)
		}
	}
	page := httptest.NewRecorder()
	if s.flags(page, nil); !strings.Contains(strings.Join(strings.Fields(page.Body.String()), " "), "v 7 debug endpoint") {
		t.Error(page.Body.String())
	}
}
