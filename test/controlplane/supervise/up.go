// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"
)

// startLimit bounds the start of one component. It is generous: a busy machine is
// slow, and a hang is found anyway.
const startLimit = 3 * time.Minute

// supervision is a running control plane.
type supervision struct {
	options Options
	out     io.Writer
	end     context.CancelFunc // of the whole control plane

	mu      sync.Mutex // held while components start and end
	ports   ports
	running map[string]*child
	ready   bool // all have started, and the end has not begun
}

// Up runs a control plane until ctx ends, [Down] is called, or standard input
// ends where that was asked for. It prints a line to out for each step. A
// component that does not start is an error with the end of its log.
func Up(ctx context.Context, o Options, out io.Writer) error {
	var err error
	if o.Dir, err = filepath.Abs(o.Dir); err != nil {
		return err
	}
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return err
	}
	if err := os.Chdir(o.Dir); err != nil { // see controlSocket
		return err
	}
	listener, err := listenControl()
	if err != nil {
		return err
	}
	defer listener.Close()
	if o.RemoveDir {
		defer os.RemoveAll(o.Dir)
	}
	ctx, end := context.WithCancel(ctx)
	defer end()
	if o.StopWithStdin {
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin) // wait for any end of the other side
			end()
		}()
	}
	s := &supervision{options: o, out: out, end: end, running: map[string]*child{}}
	go s.serve(ctx, listener)
	for attempt := 1; ; attempt++ {
		err := s.run(ctx)
		if !errors.Is(err, errPortTaken) || attempt == 5 {
			return err
		}
		fmt.Fprintf(out, "%v: trying others\n", err)
	}
}

// run starts the components, waits until ctx ends, and ends them.
func (s *supervision) run(ctx context.Context) error {
	pidFile, readyFile := s.options.file("pid"), s.options.file("ready")
	if err := os.WriteFile(pidFile, []byte(strconv.Itoa(os.Getpid())), 0o600); err != nil {
		return err
	}
	defer os.Remove(pidFile)
	defer s.killAll()

	begin := time.Now()
	if err := s.startAll(ctx); err != nil {
		if ctx.Err() != nil {
			return nil // it was told to end
		}
		return err
	}
	fmt.Fprintf(s.out, "ready after %.1fs: export KUBECONFIG=%s\n", time.Since(begin).Seconds(), s.options.file("kubeconfig"))
	if err := os.WriteFile(readyFile, nil, 0o600); err != nil {
		return err
	}
	defer os.Remove(readyFile)
	<-ctx.Done()
	return nil
}

// startAll starts etcd, then the API server, then all others at the same time.
func (s *supervision) startAll(ctx context.Context) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ports, err = freePorts(); err != nil {
		return err
	}
	if err := s.options.writeFiles(s.ports); err != nil {
		return err
	}
	for _, components := range [][]string{{Etcd}, {APIServer}, s.options.Components} {
		if err := s.start(ctx, components...); err != nil {
			return err
		}
	}
	s.ready = true
	return nil
}

// start runs components that do not run yet and waits until they serve.
func (s *supervision) start(ctx context.Context, components ...string) error {
	begin := time.Now()
	for _, name := range components {
		if c := s.running[name]; c != nil && !c.hasExited() {
			continue
		}
		c, err := launch(name, s.options.arguments(name, s.ports), s.options.file(name+".log"), func(crash string) {
			fmt.Fprintln(s.out, crash)
			go s.revive(ctx, name)
		})
		if err != nil {
			return err
		}
		s.running[name] = c
	}
	for _, name := range components {
		if err := s.await(ctx, s.running[name]); err != nil {
			return err
		}
		fmt.Fprintf(s.out, "%-18s up after %.1fs\n", name, time.Since(begin).Seconds())
	}
	return nil
}

// restartPause is the time between a crash and the start of the next process.
const restartPause = time.Second

// revive starts a component again that has crashed, as the kubelet does with the control plane of a cluster.
func (s *supervision) revive(ctx context.Context, component string) {
	select {
	case <-ctx.Done():
		return
	case <-time.After(restartPause):
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.running[component]; !s.ready || c == nil || !c.hasExited() {
		return // stopped or started on command meanwhile
	}
	if err := s.start(ctx, component); err != nil && ctx.Err() == nil {
		fmt.Fprintln(s.out, err) // and if it has exited, it is tried again
	}
}

// await returns once a component serves.
func (s *supervision) await(ctx context.Context, c *child) error {
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // see kubeconfig
	}}
	limit := time.NewTimer(startLimit)
	defer limit.Stop()
	for {
		if healthy(ctx, client, s.ports.healthURL(c.name)) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-c.exited:
			return c.failure("ended")
		case <-limit.C:
			return c.failure(fmt.Sprintf("was not ready after %v", startLimit))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func healthy(ctx context.Context, client *http.Client, url string) bool {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false
	}
	response, err := client.Do(request)
	if err != nil {
		return false
	}
	response.Body.Close()
	return response.StatusCode == http.StatusOK
}

// kill ends a component if it runs.
func (s *supervision) kill(component string) {
	if c := s.running[component]; c != nil {
		c.kill()
		delete(s.running, component)
	}
}

// killAll ends the components in the opposite order of their start.
func (s *supervision) killAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ready = false
	for _, component := range slices.Backward(s.options.all()) {
		s.kill(component)
	}
}
