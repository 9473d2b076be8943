// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/go-logr/zapr"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/settings"
)

// logConfig returns the configuration that the child process below logs with.
func logConfig(args string) settings.Logging {
	cfg := settings.Logging{Format: "text", TextBufferSize: "0", JSONBufferSize: "0"}
	for arg := range strings.FieldsSeq(args) {
		switch k, v, _ := strings.Cut(arg, "="); k {
		case "v":
			cfg.Verbosity = len(v)
		case "format":
			cfg.Format = v
		case "vmodule":
			cfg.VModule = v
		case "split":
			cfg.TextSplitStream, cfg.JSONSplitStream = true, true
		case "buffer":
			cfg.TextBufferSize = v
		}
	}
	return cfg
}

func TestMain(m *testing.M) {
	if args, ok := os.LookupEnv("LOG_CHILD"); ok {
		logs, err := SetUpLogging(logConfig(args))
		if err != nil {
			panic(err)
		}
		log := logs.Log
		log.Info("zero", "key", "value")
		log.V(1).Info("one")
		log.V(2).Info("two")
		klog.InfoS("from klog", "who", "client-go")
		klog.V(2).InfoS("from klog at two")
		log.Error(errors.New("cause"), "broken")
		if _, err := logs.SetVerbosity(strings.Count(args, "more")); err != nil {
			panic(err)
		}
		log.V(1).Info("one with more")
		klog.V(1).InfoS("from klog with more")
		if err := logs.SetVModule("logging_test=2"); err != nil || logs.SetVModule("x") == nil {
			panic(err)
		}
		log.V(2).Info("two with vmodule")
		text := strings.Repeat("x", 2*maxLogField)
		log.V(2).Info("long", "text", text, "err", errors.New("y"+text), "number", 7)
		logs.Flush()
		os.Exit(0)
	}
	kubetest.Main(m)
}

func logged(t *testing.T, args string) (stdout, stderr string) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "LOG_CHILD="+args)
	var out, err strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &err
	if e := cmd.Run(); e != nil {
		t.Fatalf("%v: %s", e, err.String())
	}
	return out.String(), err.String()
}

// encoded counts how often it is encoded.
type encoded struct{ n *int }

func (e encoded) String() string { *e.n++; return "encoded" }

// TestFieldsAreEncodedWhenLogged checks that the fields of a logger cost nothing until it logs.
func TestFieldsAreEncodedWhenLogged(t *testing.T) {
	core, entries := observer.New(zapcore.DebugLevel)
	n, level := 0, &atomic.Pointer[levels]{}
	level.Store(&levels{})
	log := zapr.NewLogger(zap.New(&moduleCore{Core: encoding{core}, levels: level})).WithValues("a", encoded{&n}).WithValues("b", 1)
	other := log.WithValues("c", 2)
	log.V(1).Info("not logged")
	if n != 0 {
		t.Errorf("encoded %d times before the first entry", n)
	}
	other.Info("logged")
	if all := entries.All(); n != 1 || len(all) != 1 || len(all[0].Context) != 3 {
		t.Errorf("encoded %d times, entries %v", n, all)
	}
}

// encoding is a core that encodes fields, as those that write do.
type encoding struct{ zapcore.Core }

func (c encoding) With(fields []zapcore.Field) zapcore.Core {
	encode(fields)
	return encoding{c.Core.With(fields)}
}

func (c encoding) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	return ce.AddCore(e, c)
}

func (c encoding) Write(e zapcore.Entry, fields []zapcore.Field) error {
	encode(fields)
	return c.Core.Write(e, fields)
}

func encode(fields []zapcore.Field) {
	encoder := zapcore.NewMapObjectEncoder()
	for _, f := range fields {
		f.AddTo(encoder)
	}
}

func TestLogging(t *testing.T) {
	tests := map[string]struct {
		args           string
		stdout, stderr []string // what must be in it; with an exclamation mark, what must not
	}{
		"text": {"", []string{"!zero"}, []string{"info", "zero", `"key": "value"`, "from klog", "client-go", "broken",
			"cause", "!one", "!two\n", "!goroutine"}},
		"verbose":                  {"v=xx", nil, []string{"debug", "one", "two", "from klog at two"}},
		"verbose for one file":     {"vmodule=logging_test=1", nil, []string{"one", "!two\n"}},
		"verbose for another file": {"vmodule=other=5", nil, []string{"zero", "!one"}},
		"a file pattern":           {"vmodule=logg*=2,", nil, []string{"two"}},
		"less verbose at runtime":  {"v=x", nil, []string{"one", "!one with more", "!from klog with more", "two with vmodule"}},
		"more verbose at runtime":  {"more", nil, []string{"!two,", "one with more", "from klog with more", "two with vmodule"}},
		"two streams":              {"split", []string{"zero", "from klog", "!broken"}, []string{"broken", "!zero"}},
		"two streams, buffered":    {"split buffer=64Ki v=x", []string{"zero", "one", "!broken"}, []string{"broken", "!one"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			stdout, stderr := logged(t, tt.args)
			for text, wanted := range map[string][]string{stdout: tt.stdout, stderr: tt.stderr} {
				for _, w := range wanted {
					unwanted, not := strings.CutPrefix(w, "!")
					if not == strings.Contains(text, unwanted) {
						t.Errorf("%q in\n%s", w, text)
					}
				}
			}
		})
	}
	t.Run("json", func(t *testing.T) {
		_, stderr := logged(t, "format=json v=x")
		for line := range strings.Lines(stderr) {
			var record map[string]any
			if err := json.Unmarshal([]byte(line),
				&record); err != nil || record["msg"] == nil || record["level"] == nil || record["ts"] == nil {
				t.Errorf("%v: %s", err, line)
			}
		}
		if n := strings.Count(stderr, "\n"); n != 6 {
			t.Errorf("%d lines:\n%s", n, stderr)
		}
		for _, want := range []string{"x… (131072 bytes)", "x… (131073 bytes)", `"number":7`} {
			if len(stderr) > 3*maxLogField || !strings.Contains(stderr, want) {
				t.Errorf("long fields are not cut: %d bytes without %s", len(stderr), want)
			}
		}
	})
}
