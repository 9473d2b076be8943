// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// The components that can be stopped and started.
const (
	Etcd              = "etcd"
	APIServer         = "apiserver"
	ControllerManager = "controller-manager"
	Scheduler         = "scheduler"
	// SnapshotController is the snapshot-controller of external-snapshotter.
	SnapshotController = "snapshot-controller"
)

// Config selects the components of a control plane besides etcd and the API server.
type Config struct {
	// Dir holds data, logs and kubeconfig; empty means a new temporary
	// directory, which [ControlPlane.Stop] removes.
	Dir               string
	ControllerManager bool
	Scheduler         bool
	Audit             bool
	// SnapshotController also installs the CRDs of snapshots.
	SnapshotController bool
	// Progress, if not nil, receives messages about the build and the start.
	Progress io.Writer
}

// ControlPlane is a running control plane.
type ControlPlane struct {
	cfg     Config
	program string
	temp    bool
	stdin   io.Closer // the control plane ends when this is closed, or this process
	exited  chan struct{}
	stop    sync.Once
	output  *watchedOutput
	kinds   sync.Once // see [InstallCRDs]
	rest    *rest.Config
	client  kubernetes.Interface

	snapshots snapshotController
	memory    *httptest.Server // nil: etcd and the API server are real
}

// Start starts a control plane and returns when it serves. The control plane exits with this process,
// even if that is killed.
func Start(ctx context.Context, cfg Config) (*ControlPlane, error) {
	if cfg.Progress == nil {
		cfg.Progress = io.Discard
	}
	program, err := Build(ctx, cfg.Progress)
	if err != nil {
		return nil, err
	}
	c := &ControlPlane{cfg: cfg, program: program, exited: make(chan struct{})}
	if cfg.Dir == "" {
		if c.cfg.Dir, err = os.MkdirTemp("", "controlplane-"); err != nil {
			return nil, err
		}
		c.temp = true
	}
	var components []string
	if cfg.ControllerManager {
		components = append(components, ControllerManager)
	}
	if cfg.Scheduler {
		components = append(components, Scheduler)
	}
	args := []string{"up", "--dir", c.cfg.Dir, "--stop-with-stdin", "--components=" + strings.Join(components, ",")}
	if c.temp {
		args = append(args, "--remove-dir") // also when this process is killed and cannot
	}
	if cfg.Audit {
		args = append(args, "--audit")
	}
	err = c.run(ctx, args)
	if err == nil && cfg.SnapshotController {
		err = c.startSnapshotController(ctx)
	}
	if err != nil {
		c.Stop()
		return nil, err
	}
	return c, nil
}

// run starts the program and waits until it reports that it is ready.
func (c *ControlPlane) run(ctx context.Context, args []string) error {
	cmd := exec.Command(c.program, args...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	c.stdin = stdin
	output := &watchedOutput{word: "ready after", found: make(chan struct{}), out: c.cfg.Progress}
	c.output, cmd.Stdout, cmd.Stderr = output, output, output
	// The Ctrl-C of a terminal is for this process, which may still need the API to clean up.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		close(c.exited)
		return fmt.Errorf("starting the control plane: %w", err)
	}
	go func() {
		_ = cmd.Wait() // its output says why
		close(c.exited)
	}()
	select {
	case <-output.found:
	case <-c.exited:
		return fmt.Errorf("the control plane ended while it was starting:\n%s", output)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if c.rest, err = clientcmd.BuildConfigFromFlags("", c.Kubeconfig()); err != nil {
		return err
	}
	c.rest.QPS = -1
	c.client, err = kubernetes.NewForConfig(c.rest)
	return err
}

// Stop stops the control plane and waits until it has exited.
func (c *ControlPlane) Stop() {
	c.stop.Do(func() {
		c.snapshots.kill()
		if c.stdin != nil {
			c.stdin.Close()
			<-c.exited
		}
		if c.memory != nil {
			c.memory.CloseClientConnections() // watches go on else
			c.memory.Close()
		}
		if c.temp {
			os.RemoveAll(c.cfg.Dir)
		}
	})
}

// Dir returns the directory of the component logs, the kubeconfig and the audit log.
func (c *ControlPlane) Dir() string { return c.cfg.Dir }

// Kubeconfig returns the path of the administrator's kubeconfig.
func (c *ControlPlane) Kubeconfig() string { return filepath.Join(c.cfg.Dir, "kubeconfig") }

// Config returns a copy of the administrator's client configuration, without a rate limit.
func (c *ControlPlane) Config() *rest.Config { return rest.CopyConfig(c.rest) }

// PID returns the process ID of etcd, the API server or another component that runs now. It is 0 on
// systems other than Linux.
func (c *ControlPlane) PID(component string) int {
	commands, _ := filepath.Glob("/proc/[0-9]*/cmdline") // the only error is that of a bad pattern
	for _, file := range commands {
		data, err := os.ReadFile(file)
		args := strings.Split(string(data), "\x00")
		if err != nil || len(args) < 2 || args[1] != component || !strings.Contains(string(data), c.cfg.Dir) {
			continue // also a process that has exited
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
			return pid
		}
	}
	return 0
}

// UserConfig returns the client configuration of a user with the permissions that RBAC grants, for which t needs a real control plane.
func (c *ControlPlane) UserConfig(t testing.TB, name string, groups ...string) *rest.Config {
	t.Helper()
	NeedReal(t)
	cfg := c.Config()
	cfg.Impersonate = rest.ImpersonationConfig{UserName: name, Groups: append(groups, "system:authenticated")}
	return cfg
}

// Client returns a client of the administrator.
func (c *ControlPlane) Client() kubernetes.Interface { return c.client }

// Halt kills a component.
func (c *ControlPlane) Halt(ctx context.Context, component string) error {
	if component == SnapshotController {
		c.snapshots.kill()
		return nil
	}
	return c.control(ctx, "stop", component)
}

// Resume starts a component again and returns when it serves.
func (c *ControlPlane) Resume(ctx context.Context, component string) error {
	if component == SnapshotController {
		return c.snapshots.start()
	}
	return c.control(ctx, "start", component)
}

// Restart kills a component and starts it again, with the same port and data.
func (c *ControlPlane) Restart(ctx context.Context, component string) error {
	return c.control(ctx, "restart", component)
}

func (c *ControlPlane) control(ctx context.Context, verb, component string) error {
	out, err := exec.CommandContext(ctx, c.program, verb, "--dir", c.cfg.Dir, component).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s of the %s: %w\n%s", verb, component, err, out)
	}
	return nil
}

// watchedOutput stores and forwards what it receives, and closes found when it contains word.
type watchedOutput struct {
	word string
	out  io.Writer

	mu    sync.Mutex
	buf   bytes.Buffer
	found chan struct{}
	seen  bool
}

func (w *watchedOutput) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.buf.Write(p)
	if !w.seen && strings.Contains(w.buf.String(), w.word) {
		w.seen = true
		close(w.found)
	}
	return w.out.Write(p)
}

func (w *watchedOutput) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.buf.String()
}

// waitCap is the time after which a wait fails, long enough for a busy machine.
const waitCap = 90 * time.Second
