// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Command demo shows storage-controller at work: it starts a simulated cluster or a real control plane, the host driver and
// "storage-controller all", has claims and pods live their life, and checks that nothing is left behind. It needs Go, git and make,
// and nothing else.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

const driverName = "host.storage-controller.example.com"

func main() {
	pods := flag.Int("pods", 3, "pods with a claim each")
	real := flag.Bool("real", false, "use a real control plane, which is compiled first")
	stay := flag.Bool("stay", false, "stay up before everything is deleted, until Ctrl-C")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "demo: unknown argument %q; see --help\n", flag.Arg(0))
		os.Exit(2)
	}
	if *pods < 2 || *pods > 100 {
		fmt.Fprintln(os.Stderr, "demo: --pods must be between 2 and 100")
		os.Exit(2)
	}
	d := &demo{pods: *pods, real: *real, begin: time.Now(), leave: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		for range signals {
			if d.stays.CompareAndSwap(true, false) {
				close(d.leave)
			} else {
				cancel()
			}
		}
	}()
	err := d.run(ctx, *stay)
	d.close()
	if err != nil {
		fmt.Fprintf(os.Stderr, "\n✗ %v\n", err)
		os.Exit(1)
	}
}

// demo is a run of the demonstration.
type demo struct {
	pods  int
	real  bool      // control plane
	begin time.Time // of the demo itself, after everything was built
	step  string    // the one under way, for errors
	log   string    // that tells most about it

	dir       string // of logs, sockets and volumes
	programs  string // directory of the programs
	cp        plane
	client    kubernetes.Interface
	endpoint  string // of the diagnostics of storage-controller
	processes []*exec.Cmd
	kubelets  func()   // ends what plays the kubelets; nil before it runs
	last      state    // what was there when it was looked at last
	numbers   []string // for the summary
	stays     atomic.Bool
	leave     chan struct{} // closed by a signal while it stays
}

func (d *demo) run(ctx context.Context, stay bool) error {
	steps := []struct {
		name string
		log  string
		do   func(context.Context) error
	}{
		{"Programs", "", d.build},
		{"The cluster", "", d.startControlPlane},
		{"Starting the host driver: a CSI driver whose volumes are directories", "hostdriver.log", d.startDriver},
		{"Starting storage-controller all", "storage-controller.log", d.startController},
		{"Making three nodes in two zones, and two StorageClasses", "", d.makeCluster},
		{"A claim of a class with immediate binding", "storage-controller.log", d.immediate},
		{"The claim grows from 1 to 2 GiB", "storage-controller.log", d.expand},
		{"A snapshot of the claim, and another claim restored from it", "storage-controller.log", d.snapshot},
		{fmt.Sprintf("%d pods, whose claims wait for them", d.pods), "storage-controller.log", d.createPods},
		{"Deleting all pods but one: volumes are detached and kept", "storage-controller.log", d.deletePods},
		{"What storage-controller says", "storage-controller.log", func(ctx context.Context) error { return d.look(ctx, stay) }},
		{"Deleting everything", "storage-controller.log", d.deleteAll},
		{"Looking for anything that is left", "storage-controller.log", d.nothingLeft},
	}
	if d.real {
		fmt.Println("This demo runs on a real control plane: etcd and Kubernetes. Only the kubelets are simulated.")
	} else {
		fmt.Println("This demo runs on a simulated cluster: an API server in memory and the components around it. REAL=1 takes a\n" +
			"real control plane, which takes minutes to compile. storage-controller and the CSI driver are real processes in both.")
	}
	for _, s := range steps {
		d.step, d.log = s.name, s.log
		begin := time.Now()
		if s.name != "" {
			fmt.Printf("\n%s\n", bold("▸ "+s.name))
		}
		if err := s.do(ctx); err != nil {
			if ctx.Err() != nil {
				return errors.New("interrupted")
			}
			return fmt.Errorf("step %q failed: %w%s", s.name, err, d.tail())
		}
		if s.name != "" {
			fmt.Printf("  done in %.1f s\n", time.Since(begin).Seconds())
		}
	}
	fmt.Printf("\n%s The demo took %.0f s.\n", bold("✓ Nothing is left behind."), time.Since(d.begin).Seconds())
	for _, n := range d.numbers {
		fmt.Println("  " + n)
	}
	return nil
}

// bold returns text in bold on a terminal.
func bold(text string) string {
	if info, err := os.Stdout.Stat(); err != nil || info.Mode()&os.ModeCharDevice == 0 || os.Getenv("NO_COLOR") != "" {
		return text
	}
	return "\033[1m" + text + "\033[0m"
}

// tail is the end of the log of the step under way.
func (d *demo) tail() string {
	if d.log == "" {
		return ""
	}
	data, err := os.ReadFile(filepath.Join(d.dir, d.log))
	if err != nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return fmt.Sprintf("\n\nthe end of %s:\n%s", d.log, strings.Join(lines[max(0, len(lines)-25):], "\n"))
}

func (d *demo) close() {
	if d.kubelets != nil {
		d.kubelets()
	}
	for i := len(d.processes) - 1; i >= 0; i-- {
		p := d.processes[i]
		_ = p.Process.Signal(syscall.SIGTERM)
		ended := make(chan struct{})
		go func() { _ = p.Wait(); close(ended) }()
		select {
		case <-ended:
		case <-time.After(20 * time.Second):
			_ = p.Process.Kill()
		}
	}
	if d.cp != nil {
		d.cp.Stop()
	}
	if d.dir != "" {
		os.RemoveAll(d.dir)
	}
}

// build uses the programs beside this one, where make demo has built them, or builds them.
func (d *demo) build(ctx context.Context) error {
	var err error
	if d.dir, err = os.MkdirTemp("", "demo-"); err != nil {
		return err
	}
	d.programs = d.dir
	if self, err := os.Executable(); err == nil {
		if _, err := os.Stat(filepath.Join(filepath.Dir(self), "hostdriver")); err == nil {
			d.programs = filepath.Dir(self)
		}
	}
	if d.programs == d.dir {
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-tags", "grpcnotrace", "-o", d.dir+"/", "./cmd/storage-controller",
			"./test/hostdriver")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOGC=400")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("building (is this the top of the repository?): %w\n%s", err, out)
		}
	}
	if d.real {
		_, err = kubetest.Build(ctx, os.Stdout)
	}
	d.begin = time.Now()
	return err
}

func (d *demo) startControlPlane(ctx context.Context) error {
	if d.real {
		cp, err := kubetest.Start(ctx, kubetest.Config{Dir: filepath.Join(d.dir, "controlplane"), ControllerManager: true, Scheduler: true,
			Audit: true, SnapshotController: true, Progress: indented{}})
		if err != nil {
			return err
		}
		d.cp = cp
	} else {
		cp, err := startSimulated(d.dir)
		if err != nil {
			return err
		}
		d.cp = cp
	}
	d.client = d.cp.Client()
	return nil
}

// indented is standard output, indented.
type indented struct{}

func (indented) Write(p []byte) (int, error) {
	for line := range strings.Lines(string(p)) {
		fmt.Print("  " + line)
	}
	return len(p), nil
}

// start runs a program with its output in a log of its name.
func (d *demo) start(name string, args ...string) error {
	log, err := os.Create(filepath.Join(d.dir, name+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(d.program(name), args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = environ()
	// Ctrl-C reaches the demo alone, which ends the others in order; none outlives it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	d.processes = append(d.processes, cmd)
	fmt.Printf("  $ %s %s\n", d.program(name), strings.Join(args, " "))
	return nil
}

// program returns the path of a program, from the working directory if it is below that.
func (d *demo) program(name string) string {
	path := filepath.Join(d.programs, name)
	if dir, err := os.Getwd(); err == nil {
		if below, found := strings.CutPrefix(path, dir+"/"); found {
			return below
		}
	}
	return path
}

// environ returns the environment without variables that configure storage-controller, such as those of a pod.
func environ() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool {
		for _, prefix := range []string{"KUBECONFIG=", "NAMESPACE=", "POD_", "NODE_NAME=", "STORAGE_CONTROLLER_", "KUBERNETES_"} {
			if strings.HasPrefix(v, prefix) {
				return true
			}
		}
		return false
	})
}

func (d *demo) socket() string { return filepath.Join(d.dir, "csi.sock") }
func (d *demo) root() string   { return filepath.Join(d.dir, "volumes") }

func (d *demo) startDriver(ctx context.Context) error {
	args := []string{"--endpoint", "unix://" + d.socket(), "--root", d.root(), "--driver-name", driverName, "--latency", "50ms"}
	for name, zone := range nodes {
		args = append(args, "--node", name+"="+zoneKey+"="+zone)
	}
	if err := d.start("hostdriver", args...); err != nil {
		return err
	}
	return kubetest.Await(ctx, func(context.Context) error {
		conn, err := net.Dial("unix", d.socket())
		if err == nil {
			conn.Close()
		}
		return err
	})
}

func (d *demo) startController(ctx context.Context) error {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	d.endpoint = free.Addr().String()
	free.Close()
	err = d.start("storage-controller", "all", "--csi-address", d.socket(), "--kubeconfig", d.cp.Kubeconfig(), "--http-endpoint",
		d.endpoint, "--leader-election", "--leader-election-namespace", namespace, "-v=2")
	if err != nil {
		return err
	}
	return kubetest.Await(ctx, d.ready)
}
