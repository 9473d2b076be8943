package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/zapr"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/klog/v2"
)

// loggingConfig is what an operator may set about logs.
type loggingConfig struct {
	Verbosity       int           `mapstructure:"v"`
	VModule         string        `mapstructure:"vmodule"`
	Format          string        `mapstructure:"logging-format"`
	FlushFrequency  time.Duration `mapstructure:"log-flush-frequency"`
	TextSplitStream bool          `mapstructure:"log-text-split-stream"`
	JSONSplitStream bool          `mapstructure:"log-json-split-stream"`
	TextBufferSize  string        `mapstructure:"log-text-info-buffer-size"`
	JSONBufferSize  string        `mapstructure:"log-json-info-buffer-size"`
}

// maxVerbosity is the highest that has an effect. With the next one client-go logs the
// bodies of requests: the values of secrets, and the tokens that are reviewed.
const maxVerbosity = 7

// setUpLogging builds the one logger of the process, has client-go and everything
// else that uses klog write to it, and returns it with a function that writes
// out what is buffered.
func setUpLogging(cfg loggingConfig) (logr.Logger, func(), error) {
	encoder, split, bufferSize, err := cfg.format()
	if err != nil {
		return logr.Discard(), nil, err
	}
	modules, err := parseVModule(cfg.VModule)
	if err != nil {
		return logr.Discard(), nil, err
	}
	cfg.Verbosity = min(cfg.Verbosity, maxVerbosity)
	most := cfg.Verbosity
	for i := range modules {
		modules[i].verbosity = min(modules[i].verbosity, maxVerbosity)
		most = max(most, modules[i].verbosity)
	}
	enabled := zap.NewAtomicLevelAt(zapcore.Level(-most)) // logr's V(n) is zap's level -n
	stderr := zapcore.Lock(os.Stderr)
	core := zapcore.NewCore(encoder, stderr, enabled)
	flush := func() {}
	if split {
		out := zapcore.Lock(os.Stdout)
		if bufferSize > 0 {
			buffered := &zapcore.BufferedWriteSyncer{WS: out, Size: bufferSize, FlushInterval: cfg.FlushFrequency}
			flush = func() { _ = buffered.Stop() } // at the end of the process there is nobody left to tell
			out = buffered
		}
		core = zapcore.NewTee(
			zapcore.NewCore(encoder, stderr, zapcore.ErrorLevel),
			zapcore.NewCore(encoder, out, belowError{enabled}),
		)
	}
	z := zap.New(&moduleCore{core, cfg.Verbosity, modules}, zap.AddCaller())
	logger := zapr.NewLogger(z)
	klog.SetLoggerWithOptions(logger, klog.ContextualLogger(true))
	return logger, flush, setKlogVerbosity(cfg)
}

// setKlogVerbosity tells klog the levels too: its klog.V(n) asks them before the logger.
func setKlogVerbosity(cfg loggingConfig) error {
	fs := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(fs)
	if err := fs.Set("v", strconv.Itoa(cfg.Verbosity)); err != nil {
		return fmt.Errorf("-v: %w", err)
	}
	if err := fs.Set("vmodule", cfg.VModule); err != nil {
		return fmt.Errorf("--vmodule: %w", err)
	}
	return nil
}

func (cfg loggingConfig) format() (encoder zapcore.Encoder, split bool, bufferSize int, err error) {
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

// encodeLevel prints every level below debug as debug: zap has no name for them.
func encodeLevel(l zapcore.Level, enc zapcore.PrimitiveArrayEncoder) {
	zapcore.LowercaseLevelEncoder(max(l, zapcore.DebugLevel), enc)
}

// belowError passes what does not go to stderr when the streams are split.
type belowError struct{ zapcore.LevelEnabler }

func (e belowError) Enabled(l zapcore.Level) bool {
	return l < zapcore.ErrorLevel && e.LevelEnabler.Enabled(l)
}

// module is one item of --vmodule: files whose name without .go matches the
// pattern log up to verbosity.
type module struct {
	pattern   string
	verbosity int
}

func parseVModule(value string) ([]module, error) {
	if value == "" {
		return nil, nil
	}
	var modules []module
	for item := range strings.SplitSeq(value, ",") {
		pattern, level, ok := strings.Cut(item, "=")
		n, err := strconv.Atoi(level)
		if _, bad := filepath.Match(pattern, ""); !ok || err != nil || bad != nil || pattern == "" {
			return nil, fmt.Errorf("--vmodule: must be a list of pattern=N, got %q", item)
		}
		modules = append(modules, module{pattern, n})
	}
	return modules, nil
}

// moduleCore drops what is more verbose than -v and whose file --vmodule does
// not name. The file is known only when the entry is written.
type moduleCore struct {
	zapcore.Core
	verbosity int
	modules   []module
}

func (c *moduleCore) With(fields []zapcore.Field) zapcore.Core {
	return &moduleCore{c.Core.With(fields), c.verbosity, c.modules}
}

func (c *moduleCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

func (c *moduleCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	if int(-e.Level) > c.verbosity && !c.named(e.Caller.File, int(-e.Level)) {
		return nil
	}
	return c.write(e, fields)
}

// write asks the wrapped core again whether it wants e: a tee writes to all of its cores otherwise.
func (c *moduleCore) write(e zapcore.Entry, fields []zapcore.Field) error {
	if ce := c.Core.Check(e, nil); ce != nil {
		ce.Write(fields...)
	}
	return nil
}

func (c *moduleCore) named(file string, level int) bool {
	base := strings.TrimSuffix(filepath.Base(file), ".go")
	for _, m := range c.modules {
		if ok, _ := filepath.Match(m.pattern, base); ok {
			return level <= m.verbosity
		}
	}
	return false
}
