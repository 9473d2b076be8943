// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/go-logr/logr"
	"github.com/go-logr/zapr"
	"go.uber.org/zap"
	"go.uber.org/zap/buffer"
	"go.uber.org/zap/zapcore"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/settings"
)

// maxVerbosity is the highest verbosity with an effect. Above it client-go logs request bodies: the values
// of Secrets, and the tokens in TokenReviews.
const maxVerbosity = 7

// Logs is the logging of the process.
type Logs struct {
	Log   logr.Logger
	Flush func() // writes buffered logs

	mu      sync.Mutex // held while the levels change
	cfg     settings.Logging
	enabled zap.AtomicLevel
	levels  atomic.Pointer[levels]
}

// levels are the verbosity and the exceptions of --vmodule.
type levels struct {
	verbosity int
	modules   []module
}

// SetUpLogging creates the logger of the process and makes it the logger of klog, and so of client-go.
func SetUpLogging(cfg settings.Logging) (*Logs, error) {
	encoder, split, bufferSize, err := logFormat(cfg)
	if err != nil {
		return nil, err
	}
	logs := &Logs{Flush: func() {}, enabled: zap.NewAtomicLevel()}
	if err := logs.set(cfg); err != nil {
		return nil, err
	}
	encoder = boundedEncoder{encoder}
	stderr := zapcore.Lock(os.Stderr)
	core := zapcore.NewCore(encoder, stderr, logs.enabled)
	if split {
		out := zapcore.Lock(os.Stdout)
		if bufferSize > 0 {
			buffered := &zapcore.BufferedWriteSyncer{WS: out, Size: bufferSize, FlushInterval: cfg.FlushFrequency}
			logs.Flush = func() { _ = buffered.Stop() } // at exit, an error cannot be logged any more
			out = buffered
		}
		core = zapcore.NewTee(
			zapcore.NewCore(encoder, stderr, zapcore.ErrorLevel),
			zapcore.NewCore(encoder, out, belowError{logs.enabled}),
		)
	}
	logs.Log = zapr.NewLogger(zap.New(&moduleCore{core, &logs.levels, nil}, zap.AddCaller()))
	klog.SetLoggerWithOptions(logs.Log, klog.ContextualLogger(true))
	return logs, nil
}

// SetVerbosity changes --v of the running process and returns the verbosity that is in effect.
func (l *Logs) SetVerbosity(verbosity int) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	cfg := l.cfg
	cfg.Verbosity = verbosity
	err := l.set(cfg)
	return l.cfg.Verbosity, err
}

// SetVModule changes --vmodule of the running process.
func (l *Logs) SetVModule(vmodule string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	cfg := l.cfg
	cfg.VModule = vmodule
	return l.set(cfg)
}

// set applies the levels of cfg, also in klog: klog.V(n) checks its own before the logger.
func (l *Logs) set(cfg settings.Logging) error {
	modules, err := parseVModule(cfg.VModule)
	if err != nil {
		return err
	}
	cfg.Verbosity = min(cfg.Verbosity, maxVerbosity)
	most := cfg.Verbosity
	for i := range modules {
		modules[i].verbosity = min(modules[i].verbosity, maxVerbosity)
		most = max(most, modules[i].verbosity)
	}
	fs := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(fs)
	if err := fs.Set("v", strconv.Itoa(cfg.Verbosity)); err != nil {
		return fmt.Errorf("--v: %w", err)
	}
	if err := fs.Set("vmodule", cfg.VModule); err != nil {
		return fmt.Errorf("--vmodule: %w", err)
	}
	l.levels.Store(&levels{cfg.Verbosity, modules})
	l.enabled.SetLevel(zapcore.Level(-most)) // logr's V(n) is zap's level -n
	l.cfg = cfg
	return nil
}

// validateLogging returns the errors in cfg.
func validateLogging(cfg settings.Logging) error {
	_, _, _, format := logFormat(cfg)
	_, modules := parseVModule(cfg.VModule)
	if cfg.Verbosity < 0 {
		format = errors.Join(format, fmt.Errorf("--v: must not be negative, got %d", cfg.Verbosity))
	}
	return errors.Join(format, modules)
}

// logFormat returns the encoder, whether errors go to a stream of their own, and the size of the buffer of the other one.
func logFormat(cfg settings.Logging) (encoder zapcore.Encoder, split bool, bufferSize int, err error) {
	ec := zap.NewProductionEncoderConfig()
	ec.EncodeLevel = encodeLevel
	ec.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	ec.EncodeDuration = zapcore.StringDurationEncoder
	ec.StacktraceKey = zapcore.OmitKey
	size, name := "", ""
	switch cfg.Format {
	case "text":
		ec.ConsoleSeparator = " "
		encoder, split, size, name = zapcore.NewConsoleEncoder(ec), cfg.TextSplitStream, cfg.TextBufferSize, "--log-text-info-buffer-size"
	case "json":
		encoder, split, size, name = zapcore.NewJSONEncoder(ec), cfg.JSONSplitStream, cfg.JSONBufferSize, "--log-json-info-buffer-size"
	default:
		return nil, false, 0, fmt.Errorf("--logging-format: must be text or json, got %q", cfg.Format)
	}
	if cfg.FlushFrequency < 0 {
		return nil, false, 0, fmt.Errorf("--log-flush-frequency: must not be negative, got %v", cfg.FlushFrequency)
	}
	quantity, err := resource.ParseQuantity(size)
	if err != nil || quantity.Sign() < 0 {
		return nil, false, 0, fmt.Errorf("%s: must be a size such as 64Ki, got %q", name, size)
	}
	return encoder, split, int(quantity.Value()), nil
}

// maxLogField bounds a field of a log entry, in bytes. Users of the API server and the driver decide how long most are.
const maxLogField = 64 << 10

// boundedEncoder cuts long fields.
type boundedEncoder struct{ zapcore.Encoder }

// EncodeEntry encodes e.
func (b boundedEncoder) EncodeEntry(e zapcore.Entry, fields []zapcore.Field) (*buffer.Buffer, error) {
	line, err := b.Encoder.EncodeEntry(e, fields)
	if err != nil || line.Len() <= maxLogField {
		return line, err
	}
	line.Free()
	var short []zapcore.Field
	for _, field := range fields {
		values := zapcore.NewMapObjectEncoder()
		field.AddTo(values)
		for key, value := range values.Fields {
			if text := fmt.Sprint(value); len(text) > maxLogField {
				value = fmt.Sprintf("%s… (%d bytes)", strings.ToValidUTF8(text[:maxLogField], ""), len(text))
			}
			short = append(short, zap.Any(key, value))
		}
	}
	return b.Encoder.EncodeEntry(e, short)
}

// encodeLevel writes every level below debug as debug: zap has no name for them.
func encodeLevel(l zapcore.Level, enc zapcore.PrimitiveArrayEncoder) {
	zapcore.LowercaseLevelEncoder(max(l, zapcore.DebugLevel), enc)
}

// belowError enables the levels that do not go to stderr when the streams are split.
type belowError struct{ zapcore.LevelEnabler }

func (e belowError) Enabled(l zapcore.Level) bool {
	return l < zapcore.ErrorLevel && e.LevelEnabler.Enabled(l)
}

// module is one item of --vmodule: files whose name without .go matches pattern log up to verbosity.
type module struct {
	pattern   string
	verbosity int
}

// parseVModule parses --vmodule.
func parseVModule(value string) ([]module, error) {
	var modules []module
	for item := range strings.SplitSeq(value, ",") {
		if item == "" {
			continue
		}
		pattern, level, ok := strings.Cut(item, "=")
		n, err := strconv.Atoi(level)
		if _, bad := filepath.Match(pattern, ""); !ok || err != nil || n < 0 || bad != nil || pattern == "" {
			return nil, fmt.Errorf("--vmodule: must be a list of pattern=N, got %q", item)
		}
		modules = append(modules, module{pattern, n})
	}
	return modules, nil
}

// moduleCore drops entries that are more verbose than -v, unless --vmodule names their file. The file is
// known only when the entry is written. Fields are encoded then, too: each sync adds some, and few log.
type moduleCore struct {
	zapcore.Core
	levels *atomic.Pointer[levels]
	fields []zapcore.Field
}

func (c *moduleCore) With(fields []zapcore.Field) zapcore.Core {
	return &moduleCore{c.Core, c.levels, slices.Concat(c.fields, fields)}
}

func (c *moduleCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

func (c *moduleCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	if !c.levels.Load().allow(int(-e.Level), e.Caller.File) {
		return nil
	}
	return c.write(e, fields)
}

// write checks with the wrapped core again: otherwise a tee writes to all of its cores.
func (c *moduleCore) write(e zapcore.Entry, fields []zapcore.Field) error {
	if ce := c.Core.Check(e, nil); ce != nil {
		ce.Write(slices.Concat(c.fields, fields)...)
	}
	return nil
}

// allow reports whether an entry of file is logged.
func (l *levels) allow(level int, file string) bool {
	if level <= l.verbosity {
		return true
	}
	base := strings.TrimSuffix(filepath.Base(file), ".go")
	for _, m := range l.modules {
		if ok, _ := filepath.Match(m.pattern, base); ok {
			return level <= m.verbosity
		}
	}
	return false
}
