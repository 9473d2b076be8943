// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// Detach runs [Up] in a process of its own and returns when the control plane is
// ready. What it prints goes to up.log, and to out until then. With
// StopWithStdin that process takes over the standard input of this one.
func Detach(ctx context.Context, o Options, out io.Writer) error {
	var err error
	if o.Dir, err = filepath.Abs(o.Dir); err != nil {
		return err
	}
	if conn, err := dial(o.Dir); err == nil {
		conn.Close()
		return fmt.Errorf("a control plane is running in %s already", o.Dir)
	}
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return err
	}
	_ = os.Remove(o.file("ready")) // left behind by one that was killed
	log, err := os.OpenFile(o.file("up.log"), os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(self, append([]string{"up"}, o.flags()...)...)
	cmd.Stdout, cmd.Stderr = log, log
	if o.StopWithStdin {
		cmd.Stdin = os.Stdin
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // it stays when the terminal goes
	if err := cmd.Start(); err != nil {
		return err
	}
	return awaitReady(ctx, cmd, o.file("ready"), log, out)
}

// awaitReady copies what cmd prints from log to out until the file ready exists
// or cmd has ended.
func awaitReady(ctx context.Context, cmd *exec.Cmd, ready string, log *os.File, out io.Writer) error {
	// The offset of log is shared with the process that writes to it: read from an own one.
	printed := io.NewSectionReader(log, 0, 1<<40)
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		_, notReady := os.Stat(ready)
		if _, err := io.Copy(out, printed); err != nil {
			return err
		}
		if notReady == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			_ = cmd.Process.Signal(syscall.SIGTERM)
			<-ended
			return ctx.Err()
		case <-ended:
			_, _ = io.Copy(out, printed)
			return errors.New("the control plane ended before it was ready")
		case <-time.After(50 * time.Millisecond):
		}
	}
}
