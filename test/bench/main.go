// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Command bench measures the life of volumes: claims are provisioned, volumes
// attached, detached and deleted, on the real control plane, and each phase is
// measured. The sidecars to measure are given as command lines, so that any of them
// can be compared; without one, it is "storage-controller all" of this repository.
//
//	go run ./test/bench --volumes=1000 --nodes=50 --latency=5ms
//	go run ./test/bench --sidecar "csi-provisioner --kubeconfig {kubeconfig} --csi-address {socket}" \
//	                    --sidecar "csi-attacher --kubeconfig {kubeconfig} --csi-address {socket}"
//	go run ./test/bench --driver-socket /run/my.sock --driver-name my.example.com
//
// With --capacity it measures the publishing of capacity instead: many nodes, each with
// storage of its own, that then come and go.
//
//	go run ./test/bench --capacity --nodes=5000 --classes=2
//
// With --compare it measures the sidecars alternately with storage-controller, and writes the tables of docs/benchmark.md.
//
//	go run ./test/bench --compare --pairs=5 --memory=5000,20000,50000
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// options are the settings of the command line.
type options struct {
	volumes, nodes, foreign int
	latency                 time.Duration
	sidecars                sidecars
	driverSocket            string
	driverName              string
	jsonFile                string
	profiles                string
	limit                   time.Duration
	phases                  []string
	publishing              bool
	requests                bool
	capacity                capacityOptions
	comparing               bool
	compare                 compareOptions
}

// sidecars is a flag that can be given more than once.
type sidecars []string

func (s *sidecars) String() string         { return strings.Join(*s, "; ") }
func (s *sidecars) Set(value string) error { *s = append(*s, value); return nil }

func main() {
	var o options
	o.volumeFlags()
	o.capacityFlags()
	o.compareFlags()
	flag.Parse()
	if err := o.validate(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func (o *options) volumeFlags() {
	flag.IntVar(&o.volumes, "volumes", 1000, "volumes that live their life")
	flag.IntVar(&o.nodes, "nodes", 50, "nodes they are attached to")
	flag.IntVar(&o.foreign, "foreign", 0, "volumes, claims and attachments of other drivers that exist before")
	flag.DurationVar(&o.latency, "latency", 5*time.Millisecond, "how long the scripted driver takes for a call")
	flag.BoolVar(&o.requests, "requests", false, "measure the CPU of kube-apiserver and etcd for each kind of request instead, "+
		"with as many as there are volumes")
	flag.Var(&o.sidecars, "sidecar", "command line to measure, with {kubeconfig} and {socket}; repeatable")
	flag.StringVar(&o.driverSocket, "driver-socket", "", "socket of a driver to use instead of the scripted one")
	flag.StringVar(&o.driverName, "driver-name", "", "name of the driver of --driver-socket")
	flag.StringVar(&o.jsonFile, "json", "", "file for the results as JSON; - means standard output, instead of the table")
	flag.StringVar(&o.profiles, "profiles", "", "directory for CPU and memory profiles of each phase; a --sidecar also knows {http}, "+
		"where its profiles are to be")
	flag.DurationVar(&o.limit, "limit", 15*time.Minute, "give up a run after this time")
	o.phases = []string{"provision", "attach", "detach", "delete"}
	flag.Func("phases", "measured phases, in this order; also expand, modify, snapshot and delete-snapshot between provision and delete "+
		"(default provision,attach,detach,delete)", func(value string) error {
		o.phases = strings.Split(value, ",")
		return o.validatePhases()
	})
}

func (o *options) capacityFlags() {
	flag.BoolVar(&o.publishing, "capacity", false, "measure the publishing of capacity; the defaults are 5000 nodes and 10ms then, and a "+
		"--sidecar also knows {http}, where its metrics are to be")
	flag.IntVar(&o.capacity.classes, "classes", 2, "with --capacity: StorageClasses")
	flag.IntVar(&o.capacity.threads, "threads", 20, "with --capacity: --capacity-threads of storage-controller")
	flag.DurationVar(&o.capacity.poll, "poll", time.Minute,
		"with --capacity: --capacity-poll-interval of storage-controller, and the time in which nothing happens")
	flag.DurationVar(&o.capacity.grace, "grace", 30*time.Second, "with --capacity: --capacity-removal-grace of storage-controller")
	flag.IntVar(&o.capacity.churn, "churn", 100, "with --capacity: nodes that join, and that leave, per minute")
	flag.DurationVar(&o.capacity.churnTime, "churn-time", 2*time.Minute, "with --capacity: how long they do")
}

func (o *options) compareFlags() {
	flag.BoolVar(&o.comparing, "compare", false, "measure the sidecars alternately with storage-controller all")
	flag.IntVar(&o.compare.pairs, "pairs", 5, "with --compare: runs of each side; 0 measures none")
	flag.IntVar(&o.compare.changes, "change-pairs", 5, "with --compare: runs of each side that expand, modify and snapshot volumes; "+
		"0 measures none")
	o.compare.memory = []int{5000, 20000, 50000}
	flag.Func("memory", "with --compare: numbers of the driver's own volumes for which memory is measured; empty for none "+
		"(default 5000,20000,50000)", func(value string) (err error) {
		o.compare.memory, err = numbers(value)
		return err
	})
	flag.IntVar(&o.compare.foreign, "memory-foreign", 10000, "with --compare: volumes of other drivers for which memory is measured; "+
		"0 measures none")
	flag.IntVar(&o.compare.detaches, "detaches", 2000, "with --compare: pending detaches beside which attaches are measured; "+
		"0 measures none")
	flag.IntVar(&o.compare.throttled, "throttled", 100, "with --compare: claims of a driver that throttles; 0 measures none")
	flag.IntVar(&o.compare.failover, "failover", 20000, "with --compare: the driver's own volumes for which the failover is measured; "+
		"0 measures none")
	flag.StringVar(&o.compare.page, "page", "docs/benchmark.md", "with --compare: page whose tables are written; empty for none")
}

// validate also applies the defaults of --capacity.
func (o *options) validate() error {
	if o.publishing {
		set := map[string]bool{}
		flag.Visit(func(f *flag.Flag) { set[f.Name] = true })
		if !set["nodes"] {
			o.nodes = 5000
		}
		if !set["latency"] {
			o.latency = 10 * time.Millisecond
		}
		if o.capacity.classes < 1 || o.capacity.churn < 1 || o.capacity.poll <= 0 || o.driverSocket != "" {
			return errors.New("--classes, --churn and --poll must be positive, and --capacity has a driver of its own")
		}
	}
	if o.comparing && (o.publishing || o.sidecars != nil || o.driverSocket != "" || min(o.compare.pairs, o.compare.changes,
		o.compare.foreign, o.compare.detaches, o.compare.throttled, o.compare.failover) < 0) {
		return errors.New("--compare has its own sidecars and driver, and no number may be negative")
	}
	if flag.NArg() > 0 || o.volumes < 1 || o.nodes < 1 || o.foreign < 0 || (o.driverSocket == "") != (o.driverName == "") {
		return errors.New("--volumes and --nodes must be positive, --driver-socket and --driver-name go together, and " +
			"there are no arguments")
	}
	return nil
}

func run(ctx context.Context, o options) error {
	var r interface{ table(io.Writer) }
	var err error
	switch {
	case o.comparing:
		c, err := compare(ctx, o)
		if c == nil {
			return err
		}
		return errors.Join(report(o, c), err) // also if the page could not be written
	case o.requests:
		r, err = measureRequests(ctx, o)
	case o.publishing:
		r, err = measureCapacity(ctx, o)
	default:
		r, err = measure(ctx, o)
	}
	if err != nil {
		return err
	}
	return report(o, r)
}

// report writes results, for people and for programs.
func report(o options, r interface{ table(io.Writer) }) error {
	if o.jsonFile != "-" {
		r.table(os.Stdout)
	}
	if o.jsonFile == "" {
		return nil
	}
	out := io.Writer(os.Stdout)
	if o.jsonFile != "-" {
		f, err := os.Create(o.jsonFile)
		if err != nil {
			return err
		}
		defer f.Close()
		out = f
	}
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	return encoder.Encode(r)
}

func say(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

// lifeOfVolumes is what the scripted driver can do where the life of volumes is measured.
var lifeOfVolumes = []csi.ControllerServiceCapability_RPC_Type{
	csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
	csi.ControllerServiceCapability_RPC_EXPAND_VOLUME, csi.ControllerServiceCapability_RPC_MODIFY_VOLUME,
	csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
}

// measure sets everything up and runs the phases.
func measure(ctx context.Context, o options) (*results, error) {
	ctx, cancel := context.WithTimeout(ctx, o.limit)
	defer cancel()
	b, err := setUp(ctx, o, kubetest.Config{ControllerManager: true, Audit: true}, lifeOfVolumes...)
	if err != nil {
		return nil, err
	}
	defer b.tearDown()
	say("making %d nodes and %d volumes, claims and attachments of other drivers", o.nodes, o.foreign)
	if err := b.prepare(ctx); err != nil {
		return nil, err
	}
	commands := o.sidecars
	if commands == nil {
		program, err := build(ctx, b.dir)
		if err != nil {
			return nil, err
		}
		commands = sidecars{commandOf(program, allFlags)}
		if o.profiles != "" {
			commands[0] += " --http-endpoint={http} --enable-pprof"
		}
	}
	stop, err := b.start(ctx, commands)
	if err != nil {
		return nil, err
	}
	defer stop()
	return b.run(ctx)
}

// setUp starts a control plane, and the scripted driver unless the user has one.
func setUp(ctx context.Context, o options, cfg kubetest.Config, capabilities ...csi.ControllerServiceCapability_RPC_Type) (
	b *bench, err error) {
	b = &bench{o: o, driver: o.driverName, socket: o.driverSocket}
	defer func() {
		if err != nil {
			b.tearDown()
		}
	}()
	if b.dir, err = os.MkdirTemp("", "bench-"); err != nil {
		return nil, err
	}
	cfg.Progress = os.Stderr
	if b.cp, err = kubetest.Start(ctx, cfg); err != nil {
		return nil, err
	}
	if b.client, err = newClient(b.cp); err != nil {
		return nil, err
	}
	if b.driver != "" {
		return b, nil
	}
	b.driver, b.socket = "bench.example.com", filepath.Join(b.dir, "csi.sock")
	b.plugin = csitest.New(csitest.Config{Name: b.driver, Latency: o.latency, DiscardCalls: true, NoNodeExpansion: true,
		Controller: capabilities})
	return b, b.plugin.Start(b.socket)
}

func (b *bench) tearDown() {
	if b.plugin != nil {
		b.plugin.Stop()
	}
	if b.cp != nil {
		b.cp.Stop()
	}
	os.RemoveAll(b.dir)
}

// build builds the program as it is released.
func build(ctx context.Context, dir string) (string, error) {
	say("building storage-controller")
	path := filepath.Join(dir, "storage-controller")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-tags", "grpcnotrace", "-ldflags", "-s -w", "-o", path,
		"github.com/storage-controller/storage-controller/cmd/storage-controller")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building storage-controller: %w\n%s", err, out)
	}
	return path, nil
}

// start runs the sidecars, with more environment. The function returned ends them.
func (b *bench) start(ctx context.Context, commands []string, env ...string) (stop func(), err error) {
	var running []*exec.Cmd
	stop = func() {
		for _, c := range running {
			_ = c.Process.Signal(syscall.SIGTERM)
			_ = c.Wait() // measured already
		}
		b.pids, b.logs, b.commands, b.profiled = nil, nil, nil, nil
	}
	for i, line := range commands {
		line = strings.NewReplacer("{kubeconfig}", b.cp.Kubeconfig(), "{socket}", b.socket).Replace(line)
		if strings.Contains(line, "{http}") {
			address, err := freeAddress()
			if err != nil {
				stop()
				return nil, err
			}
			line = strings.ReplaceAll(line, "{http}", address)
			b.profiled = append(b.profiled, address)
		}
		words := strings.Fields(line)
		if len(words) == 0 {
			stop()
			return nil, fmt.Errorf("--sidecar: an empty command line")
		}
		if b.host != "" { // needs root
			words = append([]string{"unshare", "--uts", "sh", "-c", `hostname "$0" && exec "$@"`, b.host}, words...)
		}
		cmd := exec.CommandContext(ctx, words[0], words[1:]...)
		log, err := os.Create(filepath.Join(b.dir, fmt.Sprintf("sidecar-%d.log", i)))
		if err != nil {
			stop()
			return nil, err
		}
		defer log.Close()
		cmd.Stdout, cmd.Stderr = log, log
		cmd.Env = append(os.Environ(), env...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			stop()
			return nil, fmt.Errorf("starting %q: %w", line, err)
		}
		running = append(running, cmd)
		b.pids = append(b.pids, cmd.Process.Pid)
		b.logs = append(b.logs, log.Name())
		b.commands = append(b.commands, line)
	}
	return stop, nil
}
