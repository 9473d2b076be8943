// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
)

var snapshotControllerProgram = program{name: "snapshotcontroller", module: "snapshotcontroller", title: "snapshot-controller",
	pkg: "github.com/kubernetes-csi/external-snapshotter/v8/cmd/snapshot-controller", takes: "two minutes"}

// snapshotController runs the snapshot-controller. It has no Lease: one process works at a time.
type snapshotController struct {
	program, kubeconfig, log string

	mu     sync.Mutex
	cmd    *exec.Cmd     // nil while it does not run
	exited chan struct{} // closed when cmd has exited
}

// startSnapshotController installs the CRDs and starts the snapshot-controller.
func (c *ControlPlane) startSnapshotController(ctx context.Context) error {
	program, err := snapshotControllerProgram.build(ctx, c.cfg.Progress)
	if err != nil {
		return err
	}
	if err := c.InstallCRDs(ctx); err != nil { // without them it exits
		return fmt.Errorf("installing the CRDs of snapshots: %w", err)
	}
	s := &c.snapshots
	s.program, s.kubeconfig, s.log = program, c.Kubeconfig(), filepath.Join(c.cfg.Dir, SnapshotController+".log")
	return s.start()
}

// start starts the process unless it runs.
func (s *snapshotController) start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd != nil {
		return nil
	}
	log, err := os.OpenFile(s.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(s.program, "--kubeconfig="+s.kubeconfig, "--kube-api-qps=2000", "--kube-api-burst=4000",
		"--retry-interval-max=10s", "--feature-gates=CSIVolumeGroupSnapshot=true", "-v=4")
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = log, log, dieWithParent()
	started, exited := make(chan error), make(chan struct{})
	go func() {
		runtime.LockOSThread()         // the death signal belongs to the thread that started the process
		defer runtime.UnlockOSThread() // otherwise the thread would end, and with it other processes that it has started
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // its log has the reason
			close(exited)
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("starting the snapshot-controller: %w", err)
	}
	s.cmd, s.exited = cmd, exited
	return nil
}

// kill kills the process, if it runs, and waits until it has exited.
func (s *snapshotController) kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Kill() // it may have exited
	<-s.exited
	s.cmd = nil
}
