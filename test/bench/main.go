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
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
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
	limit                   time.Duration
	phases                  []string
	capacity                capacityOptions
}

// sidecars is a flag that can be given more than once.
type sidecars []string

func (s *sidecars) String() string         { return strings.Join(*s, "; ") }
func (s *sidecars) Set(value string) error { *s = append(*s, value); return nil }

func main() {
	var o options
	flag.IntVar(&o.volumes, "volumes", 1000, "volumes that live their life")
	flag.IntVar(&o.nodes, "nodes", 50, "nodes they are attached to")
	flag.IntVar(&o.foreign, "foreign", 0, "volumes, claims and attachments of other drivers that exist before")
	flag.DurationVar(&o.latency, "latency", 5*time.Millisecond, "how long the scripted driver takes for a call")
	flag.Var(&o.sidecars, "sidecar", "command line to measure, with {kubeconfig} and {socket}; repeatable")
	flag.StringVar(&o.driverSocket, "driver-socket", "", "socket of a driver to use instead of the scripted one")
	flag.StringVar(&o.driverName, "driver-name", "", "name of the driver of --driver-socket")
	flag.StringVar(&o.jsonFile, "json", "", "file for the results as JSON; - means standard output, instead of the table")
	flag.DurationVar(&o.limit, "limit", 15*time.Minute, "give up after this time")
	o.phases = []string{"provision", "attach", "detach", "delete"}
	flag.Func("phases", "measured phases, in this order; also expand, modify, snapshot and unsnapshot between provision and delete "+
		"(default provision,attach,detach,delete)", func(value string) error {
		o.phases = strings.Split(value, ",")
		return o.validatePhases()
	})
	publishing := flag.Bool("capacity", false, "measure the publishing of capacity; the defaults are 5000 nodes and 10ms then, and a "+
		"--sidecar also knows {http}, where its metrics are to be")
	flag.IntVar(&o.capacity.classes, "classes", 2, "with --capacity: StorageClasses")
	flag.IntVar(&o.capacity.threads, "threads", 20, "with --capacity: --capacity-threads of storage-controller")
	flag.DurationVar(&o.capacity.poll, "poll", time.Minute,
		"with --capacity: --capacity-poll-interval of storage-controller, and the time in which nothing happens")
	flag.DurationVar(&o.capacity.grace, "grace", 30*time.Second, "with --capacity: --capacity-removal-grace of storage-controller")
	flag.IntVar(&o.capacity.churn, "churn", 100, "with --capacity: nodes that join, and that leave, per minute")
	flag.DurationVar(&o.capacity.churnTime, "churn-time", 2*time.Minute, "with --capacity: how long they do")
	flag.Parse()
	if *publishing {
		set := map[string]bool{}
		flag.Visit(func(f *flag.Flag) { set[f.Name] = true })
		if !set["nodes"] {
			o.nodes = 5000
		}
		if !set["latency"] {
			o.latency = 10 * time.Millisecond
		}
		if o.capacity.classes < 1 || o.capacity.churn < 1 || o.capacity.poll <= 0 || o.driverSocket != "" {
			fmt.Fprintln(os.Stderr, "bench: --classes, --churn and --poll must be positive, and --capacity has a driver of its own")
			os.Exit(2)
		}
	}
	if flag.NArg() > 0 || o.volumes < 1 || o.nodes < 1 || o.foreign < 0 || (o.driverSocket == "") != (o.driverName == "") {
		fmt.Fprintln(os.Stderr, "bench: --volumes and --nodes must be positive, --driver-socket and --driver-name go together, and "+
			"there are no arguments")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, o.limit)
	defer cancel()
	if err := run(ctx, o, *publishing); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, publishing bool) error {
	if publishing {
		r, err := measureCapacity(ctx, o)
		if err != nil {
			return err
		}
		return report(o, r)
	}
	r, err := measure(ctx, o)
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

// measure sets everything up and runs the phases.
func measure(ctx context.Context, o options) (*results, error) {
	say := func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	cp, err := kubetest.Start(ctx, kubetest.Config{ControllerManager: true, Audit: true, Progress: os.Stderr})
	if err != nil {
		return nil, err
	}
	defer cp.Stop()
	if slices.Contains(o.phases, "snapshot") { // without the snapshot-controller, whose part the bench plays
		if err := cp.InstallCRDs(ctx); err != nil {
			return nil, err
		}
	}
	b := &bench{o: o, cp: cp, driver: o.driverName, socket: o.driverSocket}
	if b.client, err = newClient(cp); err != nil {
		return nil, err
	}
	if b.driver == "" {
		b.driver, b.socket = "bench.example.com", filepath.Join(dir, "csi.sock")
		b.plugin = csitest.New(csitest.Config{Name: b.driver, Latency: o.latency, DiscardCalls: true, NoNodeExpansion: true,
			Controller: []csi.ControllerServiceCapability_RPC_Type{
				csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
				csi.ControllerServiceCapability_RPC_EXPAND_VOLUME, csi.ControllerServiceCapability_RPC_MODIFY_VOLUME,
				csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
			}})
		if err := b.plugin.Start(b.socket); err != nil {
			return nil, err
		}
		defer b.plugin.Stop()
	}
	say("making %d nodes and %d volumes, claims and attachments of other drivers", o.nodes, o.foreign)
	if err := b.prepare(ctx); err != nil {
		return nil, err
	}
	commands := o.sidecars
	if commands == nil {
		say("building storage-controller")
		program, err := build(ctx, dir)
		if err != nil {
			return nil, err
		}
		commands = sidecars{program + " all --kubeconfig {kubeconfig} --csi-address {socket} --worker-threads=100"}
	}
	stop, err := b.start(ctx, dir, commands)
	if err != nil {
		return nil, err
	}
	defer stop()
	return b.run(ctx, say)
}

// build builds the program as it is released.
func build(ctx context.Context, dir string) (string, error) {
	path := filepath.Join(dir, "storage-controller")
	cmd := exec.CommandContext(ctx, "go", "build", "-tags", "grpcnotrace", "-ldflags", "-s -w", "-o", path,
		"github.com/storage-controller/storage-controller/cmd/storage-controller")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building storage-controller: %w\n%s", err, out)
	}
	return path, nil
}

// start runs the sidecars, with more environment. The function returned ends them.
func (b *bench) start(ctx context.Context, dir string, commands []string, env ...string) (stop func(), err error) {
	var running []*exec.Cmd
	stop = func() {
		for _, c := range running {
			_ = c.Process.Signal(syscall.SIGTERM)
			_ = c.Wait() // measured already
		}
	}
	for i, line := range commands {
		line = strings.NewReplacer("{kubeconfig}", b.cp.Kubeconfig(), "{socket}", b.socket).Replace(line)
		words := strings.Fields(line)
		if len(words) == 0 {
			stop()
			return nil, fmt.Errorf("--sidecar: an empty command line")
		}
		cmd := exec.CommandContext(ctx, words[0], words[1:]...)
		log, err := os.Create(filepath.Join(dir, fmt.Sprintf("sidecar-%d.log", i)))
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
