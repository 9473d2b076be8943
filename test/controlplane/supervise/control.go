// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
)

// controlSocket is the unix socket on which a control plane takes commands: one
// line with a verb and a component per connection, answered by one line. That
// the listener on it shows that a control plane runs.
//
// It is always opened by its relative name, with the directory of the control
// plane as the working directory: the path of a unix socket must be
// shorter than 108 bytes, which that of a directory often is not.
const controlSocket = "control"

// listenControl opens the control socket in the working directory. It is an error if
// another process listens already.
func listenControl() (net.Listener, error) {
	if conn, err := net.Dial("unix", controlSocket); err == nil {
		conn.Close()
		return nil, errors.New("a control plane is running in this directory already")
	}
	_ = os.Remove(controlSocket) // left behind by one that was killed
	l, err := net.Listen("unix", controlSocket)
	if err != nil {
		return nil, fmt.Errorf("opening the control socket: %w", err)
	}
	return l, nil
}

// serve obeys commands until ctx ends. All but "down" wait for the control plane to be ready.
func (s *supervision) serve(ctx context.Context, l net.Listener) {
	defer context.AfterFunc(ctx, func() { l.Close() })()
	for {
		conn, err := l.Accept()
		if err != nil {
			return // closed, because of ctx
		}
		go s.answer(ctx, conn)
	}
}

func (s *supervision) answer(ctx context.Context, conn net.Conn) {
	line, _ := bufio.NewReader(conn).ReadString('\n')
	verb, component, _ := strings.Cut(strings.TrimSpace(line), " ")
	if verb == "down" {
		s.end()
		return // the end of this process closes the connection, and that is the answer
	}
	defer conn.Close()
	answer := "ok"
	if err := s.command(ctx, verb, component); err != nil {
		answer = strings.ReplaceAll(err.Error(), "\n", "\v")
	}
	fmt.Fprintln(conn, answer)
}

func (s *supervision) command(ctx context.Context, verb, component string) error {
	if !slices.Contains(s.options.all(), component) {
		return fmt.Errorf("no component %q here, only %s", component, strings.Join(s.options.all(), ", "))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ready {
		return errors.New("the control plane is ending")
	}
	if verb == "stop" || verb == "restart" {
		s.kill(component)
	}
	if verb == "start" || verb == "restart" {
		return s.start(ctx, component)
	}
	return nil
}

// Control stops, starts or restarts (verb) one component of the control plane
// in dir. Stopping kills. A started component serves when Control returns, on the
// port and with the data that it had before.
func Control(dir, verb, component string) error {
	conn, err := dial(dir)
	if err != nil {
		return fmt.Errorf("no control plane answers in %s: %w", dir, err)
	}
	defer conn.Close()
	if _, err := fmt.Fprintf(conn, "%s %s\n", verb, component); err != nil {
		return err
	}
	answer, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return fmt.Errorf("the control plane in %s ended: %w", dir, err)
	}
	answer = strings.TrimSpace(answer)
	if answer != "ok" {
		return errors.New(strings.ReplaceAll(answer, "\v", "\n"))
	}
	return nil
}

// Down stops the control plane of dir and returns when its processes have exited. That there is none
// is fine.
func Down(dir string) error {
	conn, err := dial(dir)
	if err != nil {
		return nil
	}
	defer conn.Close()
	if _, err := fmt.Fprintln(conn, "down"); err != nil {
		return nil // it has just ended
	}
	_, _ = io.Copy(io.Discard, conn) // until the process has exited
	return nil
}

func dial(dir string) (net.Conn, error) {
	if err := os.Chdir(dir); err != nil {
		return nil, err
	}
	return net.Dial("unix", controlSocket)
}
