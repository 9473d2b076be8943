// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
)

// child is a component that was started.
type child struct {
	name     string
	cmd      *exec.Cmd
	exited   chan struct{} // closed after its end
	unwanted atomic.Bool   // its end is our doing

	log    string // file that it writes to
	offset int64  // where its part of the file begins
}

// launch starts a component, whose output is appended to log. onCrash is called with a
// description if it ends without having been told to.
func launch(name string, args []string, log string, onCrash func(string)) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	file, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	c := &child{name: name, exited: make(chan struct{}), log: log, offset: info.Size()}
	c.cmd = exec.Command(self, append([]string{name}, args...)...)
	c.cmd.Stdout, c.cmd.Stderr = file, file
	c.cmd.SysProcAttr = dieWithParent()
	started := make(chan error)
	go func() {
		// The death signal of a child belongs to the thread that started it,
		// which therefore has to live as long.
		runtime.LockOSThread()
		err := c.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		if err := c.cmd.Wait(); !c.unwanted.Load() {
			onCrash(fmt.Sprintf("%s exited unexpectedly (%v), see %s", name, err, log))
		}
		close(c.exited)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting the %s: %w", name, err)
	}
	return c, nil
}

func (c *child) hasExited() bool {
	select {
	case <-c.exited:
		return true
	default:
		return false
	}
}

// kill ends the component at once: a control plane for tests has nothing to
// lose, and what tests want to see is the sudden end.
func (c *child) kill() {
	c.unwanted.Store(true)
	_ = c.cmd.Process.Kill() // it may have exited already
	<-c.exited
}

// failure is the error of a component that did not start: what happened, and the
// end of what it printed. It wraps errPortTaken where that was the cause.
func (c *child) failure(what string) error {
	data, err := os.ReadFile(c.log)
	if err != nil {
		return fmt.Errorf("the %s %s, and its log cannot be read: %w", c.name, what, err)
	}
	output := strings.TrimSpace(string(data[min(c.offset, int64(len(data))):]))
	if strings.Contains(output, "address already in use") {
		return fmt.Errorf("the %s %s: %w", c.name, what, errPortTaken)
	}
	return fmt.Errorf("the %s %s; the end of %s:\n%s", c.name, what, c.log, tail(output, 20))
}

// tail is the last n lines of text.
func tail(text string, n int) string {
	lines := strings.Split(text, "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
