package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Limits of the steps of a start and an end. They are generous: a busy machine
// is slow, and a hang is found anyway.
const (
	startLimit = 2 * time.Minute
	stopLimit  = 10 * time.Second
)

// errPortTaken is a start that failed because a port was taken meanwhile.
var errPortTaken = errors.New("a port was taken by somebody else meanwhile")

// up runs a control plane until ctx ends, or standard input where that was asked for.
func up(ctx context.Context, o options) error {
	var err error
	if o.dir, err = filepath.Abs(o.dir); err != nil {
		return err
	}
	if pid, running := supervisor(o.dir); running {
		return fmt.Errorf("a control plane is running in %s already (process %d)", o.dir, pid)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if o.stopWithStdin {
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin) // any end of the other side is what is waited for
			cancel()
		}()
	}
	for attempt := 1; ; attempt++ {
		err := upOnce(ctx, o)
		if !errors.Is(err, errPortTaken) || attempt == 3 {
			return err
		}
		fmt.Println("a port was taken meanwhile, trying others")
	}
}

func upOnce(ctx context.Context, o options) error {
	p, err := freePorts()
	if err != nil {
		return err
	}
	if err := o.writeFiles(p); err != nil {
		return err
	}
	pidFile := filepath.Join(o.dir, "pid")
	if err := os.WriteFile(pidFile, []byte(strconv.Itoa(os.Getpid())), 0o600); err != nil {
		return err
	}
	defer os.Remove(pidFile)
	s := &supervision{options: o, ports: p, running: map[string]*child{}}
	defer s.stopAll()
	listener, err := listenControl(o.dir)
	if err != nil {
		return err
	}
	defer listener.Close()

	begin := time.Now()
	for _, component := range append([]string{etcd, apiServer}, o.components...) {
		if err := s.start(ctx, component); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
	}
	fmt.Printf("ready after %.1fs: export KUBECONFIG=%s\n", time.Since(begin).Seconds(), filepath.Join(o.dir, "kubeconfig"))
	if err := os.WriteFile(filepath.Join(o.dir, "ready"), nil, 0o600); err != nil {
		return err
	}
	defer os.Remove(filepath.Join(o.dir, "ready"))
	return s.serve(ctx, listener)
}

// child is a running component.
type child struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed after its end
}

func (o options) logFile(component string) string {
	return filepath.Join(o.dir, component+".log")
}

// supervision is the running control plane.
type supervision struct {
	options options
	ports   ports
	running map[string]*child
}

// start runs a component and waits until it serves.
func (s *supervision) start(ctx context.Context, component string) error {
	if c, ok := s.running[component]; ok && !c.hasExited() {
		return nil
	}
	begin := time.Now()
	logFile, err := os.OpenFile(s.options.logFile(component), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer logFile.Close()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(self, append([]string{component}, s.options.arguments(component, s.ports)...)...)
	cmd.Stdout, cmd.Stderr = logFile, logFile
	// A component never outlives its supervisor, whatever kills that.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	c := &child{cmd: cmd, exited: make(chan struct{})}
	if err := c.run(); err != nil {
		return fmt.Errorf("starting the %s: %w", component, err)
	}
	s.running[component] = c
	if err := s.await(ctx, component, c); err != nil {
		return err
	}
	fmt.Printf("%-18s up after %.1fs\n", component, time.Since(begin).Seconds())
	return nil
}

// await returns once component serves. The controller manager and the scheduler
// serve nothing; of them it is enough that they run.
func (s *supervision) await(ctx context.Context, component string, c *child) error {
	limit := time.NewTimer(startLimit)
	defer limit.Stop()
	for {
		if s.serves(component) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-c.exited:
			return s.failure(component, "ended")
		case <-limit.C:
			return s.failure(component, fmt.Sprintf("was not ready after %v", startLimit))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (s *supervision) serves(component string) bool {
	var url string
	switch component {
	case etcd:
		url = fmt.Sprintf("http://127.0.0.1:%d/readyz", s.ports.etcdClient)
	case apiServer:
		url = fmt.Sprintf("https://127.0.0.1:%d/readyz", s.ports.apiServer)
	default:
		return true
	}
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // loopback, see kubeconfig
	}}
	response, err := client.Get(url)
	if err != nil {
		return false
	}
	response.Body.Close()
	return response.StatusCode == http.StatusOK
}

// failure is the error of a component that did not start, with the end of its log.
func (s *supervision) failure(component, what string) error {
	data, err := os.ReadFile(s.options.logFile(component))
	if err != nil {
		return fmt.Errorf("the %s %s, and its log cannot be read: %w", component, what, err)
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	tail := strings.Join(lines[max(0, len(lines)-20):], "\n")
	if bytes.Contains(data, []byte("address already in use")) {
		return fmt.Errorf("the %s %s: %w", component, what, errPortTaken)
	}
	return fmt.Errorf("the %s %s; the end of %s:\n%s", component, what, s.options.logFile(component), tail)
}

func (c *child) hasExited() bool {
	select {
	case <-c.exited:
		return true
	default:
		return false
	}
}

// end asks a component to end and, when it does not, ends it.
func (c *child) end(signal syscall.Signal) {
	_ = c.cmd.Process.Signal(signal) // one that has ended already is what is wanted
	select {
	case <-c.exited:
	case <-time.After(stopLimit):
		_ = c.cmd.Process.Kill()
		<-c.exited
	}
}

// stopAll ends the components in the opposite order of their start.
func (s *supervision) stopAll() {
	order := slices.Clone(s.options.components)
	for _, component := range append(order, apiServer, etcd) {
		if c, ok := s.running[component]; ok {
			// A control plane for tests has nothing to lose: no drawn out farewells.
			c.end(syscall.SIGKILL)
			delete(s.running, component)
		}
	}
}
