package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// run starts the process of a component. The death signal of a child belongs to
// the thread that started it, which therefore has to live as long.
func (c *child) run() error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := c.cmd.Start()
		started <- err
		if err == nil {
			_ = c.cmd.Wait() // the log of the component says why
			close(c.exited)
		}
	}()
	return <-started
}

// listenControl opens the socket on which a running control plane takes commands.
func listenControl(dir string) (net.Listener, error) {
	path := filepath.Join(dir, "control")
	_ = os.Remove(path) // left behind by one that was killed
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("opening the control socket: %w", err)
	}
	return l, nil
}

// serve takes commands until ctx ends: one line with a verb and a component, answered by one line.
func (s *supervision) serve(ctx context.Context, l net.Listener) error {
	defer context.AfterFunc(ctx, func() { l.Close() })()
	for {
		conn, err := l.Accept()
		if err != nil {
			return nil // closed, because of ctx
		}
		line, _ := bufio.NewReader(conn).ReadString('\n')
		verb, component, _ := strings.Cut(strings.TrimSpace(line), " ")
		answer := "ok"
		if err := s.command(ctx, verb, component); err != nil {
			answer = strings.ReplaceAll(err.Error(), "\n", "\v")
		}
		fmt.Fprintln(conn, answer)
		conn.Close()
	}
}

func (s *supervision) command(ctx context.Context, verb, component string) error {
	if !slices.Contains(append([]string{etcd, apiServer}, s.options.components...), component) {
		return fmt.Errorf("no component %q here", component)
	}
	if verb == "stop" || verb == "restart" {
		if c, ok := s.running[component]; ok {
			c.end(syscall.SIGKILL)
			delete(s.running, component)
		}
	}
	if verb == "start" || verb == "restart" {
		return s.start(ctx, component)
	}
	return nil
}

// control sends a command to the control plane of dir.
func control(dir, verb, component string) error {
	conn, err := net.Dial("unix", filepath.Join(dir, "control"))
	if err != nil {
		return fmt.Errorf("no control plane answers in %s: %w", dir, err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "%s %s\n", verb, component)
	answer, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return fmt.Errorf("the control plane in %s ended: %w", dir, err)
	}
	if answer = strings.TrimSpace(answer); answer != "ok" {
		return errors.New(strings.ReplaceAll(answer, "\v", "\n"))
	}
	return nil
}

// supervisor is the process that runs the control plane of dir, if one does.
func supervisor(dir string) (pid int, running bool) {
	data, err := os.ReadFile(filepath.Join(dir, "pid"))
	if err != nil {
		return 0, false
	}
	if pid, err = strconv.Atoi(strings.TrimSpace(string(data))); err != nil || pid <= 0 {
		return 0, false
	}
	// The number may belong to another process by now.
	cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return pid, err == nil && strings.Contains(string(cmdline), "\x00up\x00")
}

// down ends the control plane of dir; that there is none is fine.
func down(dir string) error {
	pid, running := supervisor(dir)
	if !running {
		return nil
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		return fmt.Errorf("ending process %d: %w", pid, err)
	}
	limit := time.Now().Add(2 * stopLimit)
	for time.Now().Before(limit) {
		if _, running := supervisor(dir); !running {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("process %d did not end within %v", pid, 2*stopLimit)
}

// detach starts "up" as a process of its own and returns when it is ready.
func detach(ctx context.Context, o options, args []string) error {
	args = slices.DeleteFunc(slices.Clone(args), func(a string) bool { return strings.TrimLeft(a, "-") == "detach" })
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(o.dir, 0o755); err != nil {
		return err
	}
	ready := filepath.Join(o.dir, "ready")
	if _, running := supervisor(o.dir); !running {
		_ = os.Remove(ready) // left behind by one that was killed
	}
	log, err := os.OpenFile(filepath.Join(o.dir, "up.log"), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(self, append([]string{"up"}, args...)...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		if _, err := os.Stat(ready); err == nil {
			output, err := os.ReadFile(log.Name())
			fmt.Print(string(output))
			return err
		}
		select {
		case <-ctx.Done():
			_ = cmd.Process.Signal(syscall.SIGTERM)
			return ctx.Err()
		case err := <-ended:
			output, _ := os.ReadFile(log.Name())
			return fmt.Errorf("the control plane ended while it was starting (%v):\n%s", err, output)
		case <-time.After(50 * time.Millisecond):
		}
	}
}
