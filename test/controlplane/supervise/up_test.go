// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The test binary plays the program with the components: a component serves
// health only, and "up" is the real one.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case Etcd, APIServer, ControllerManager, Scheduler:
			playComponent(os.Args[1], os.Args[2:])
		case "up":
			if err := playUp(os.Args[2:]); err != nil {
				fmt.Println(err)
				os.Exit(1)
			}
			os.Exit(0)
		}
	}
	os.Exit(m.Run())
}

func playUp(args []string) error {
	fs := flag.NewFlagSet("up", flag.ExitOnError)
	var o Options
	fs.StringVar(&o.Dir, "dir", "", "")
	o.AddFlags(fs)
	_ = fs.Parse(args)
	return Up(context.Background(), o, os.Stdout)
}

// playComponent serves until it is killed. A file NAME.fail in the working directory, which
// is that of the control plane, has it print the content and end; it fails so once.
func playComponent(name string, args []string) {
	if data, err := os.ReadFile(name + ".fail"); err == nil {
		os.Remove(name + ".fail")
		fmt.Println(string(data))
		os.Exit(1)
	}
	os.WriteFile(name+".pid.new", []byte(strconv.Itoa(os.Getpid())), 0o600)
	os.Rename(name+".pid.new", name+".pid") // no reader sees a part of it
	var address string
	for _, arg := range args {
		if port, ok := strings.CutPrefix(arg, "--secure-port="); ok {
			address = "127.0.0.1:" + port
		} else if url, ok := strings.CutPrefix(arg, "--listen-client-urls=http://"); ok {
			address = url
		}
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	s.Listener = l
	if name == Etcd {
		s.Start()
	} else {
		s.StartTLS()
	}
	select {}
}

// plane is a control plane of playing components in a process of its own.
type plane struct {
	Options
	t     *testing.T
	cmd   *exec.Cmd
	out   *os.File
	ended chan error
	stdin *os.File
}

// startPlane does not wait. Files are written into the directory before.
func startPlane(t *testing.T, files map[string]string) *plane {
	t.Helper()
	// A path that is too long for a unix socket, as directories of tests often are.
	dir := filepath.Join(t.TempDir(), strings.Repeat("long", 30))
	t.Chdir(t.TempDir()) // Control and Down leave the directory changed
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	p := &plane{t: t, out: out, ended: make(chan error, 1)}
	p.Options = Options{Dir: dir, Components: []string{Scheduler}, StopWithStdin: true}
	p.cmd = exec.Command(os.Args[0], append([]string{"up"}, p.flags()...)...)
	p.cmd.Stdout, p.cmd.Stderr = p.out, p.out
	in, stdin, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Stdin, p.stdin = in, stdin
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	in.Close()
	go func() { p.ended <- p.cmd.Wait() }()
	t.Cleanup(func() { stdin.Close(); p.cmd.Process.Kill(); out.Close() })
	return p
}

func (p *plane) awaitReady() {
	p.t.Helper()
	p.await("ready", func() bool { _, err := os.Stat(p.file("ready")); return err == nil })
}

func (p *plane) await(what string, done func() bool) {
	p.t.Helper()
	for limit := time.Now().Add(time.Minute); !done(); {
		if time.Now().After(limit) {
			p.t.Fatalf("waiting for: %s", what)
		}
		select {
		case err := <-p.ended:
			p.t.Fatalf("the control plane ended (%v) before: %s\n%s", err, what, p.printed())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func (p *plane) awaitEnd() error {
	p.t.Helper()
	select {
	case err := <-p.ended:
		return err
	case <-time.After(time.Minute):
		p.t.Fatal("it does not end")
		return nil
	}
}

// printed is what "up" has printed so far.
func (p *plane) printed() string {
	p.t.Helper()
	data, err := os.ReadFile(p.out.Name())
	if err != nil {
		p.t.Fatal(err)
	}
	return string(data)
}

// pid is the process that plays a component now.
func (p *plane) pid(component string) int {
	p.t.Helper()
	data, err := os.ReadFile(p.file(component + ".pid"))
	if err != nil {
		p.t.Fatal(err)
	}
	pid, err := strconv.Atoi(string(data))
	if err != nil {
		p.t.Fatal(err)
	}
	return pid
}

// awaitGone waits until no component of p runs; a zombie counts as exited.
func (p *plane) awaitGone() {
	p.t.Helper()
	for _, component := range p.all() {
		pid := p.pid(component)
		for limit := time.Now().Add(time.Minute); runs(pid); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(limit) {
				p.t.Fatalf("%s (process %d) outlived its supervisor", component, pid)
			}
		}
	}
}

func runs(pid int) bool {
	if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil && bytes.Contains(stat, []byte(") Z ")) {
		return false
	}
	return syscall.Kill(pid, 0) == nil
}

func TestRestartKeepsThePortAndReplacesTheProcess(t *testing.T) {
	p := startPlane(t, nil)
	p.awaitReady()
	before, config := p.pid(APIServer), p.read("kubeconfig")
	if err := Control(p.Dir, "restart", APIServer); err != nil {
		t.Fatal(err)
	}
	if after := p.pid(APIServer); after == before || runs(before) || !runs(after) {
		t.Errorf("process %d (running: %t) was to be replaced, now %d (running: %t)", before, runs(before), after, runs(after))
	}
	if got := p.read("kubeconfig"); got != config {
		t.Errorf("the kubeconfig changed from\n%s to\n%s", config, got)
	}
	for range 2 { // stopping twice is no error
		if err := Control(p.Dir, "stop", Scheduler); err != nil {
			t.Fatal(err)
		}
		if runs(p.pid(Scheduler)) {
			t.Error("the scheduler runs on")
		}
	}
	for range 2 { // and starting what runs
		if err := Control(p.Dir, "start", Scheduler); err != nil {
			t.Fatal(err)
		}
		if !runs(p.pid(Scheduler)) {
			t.Error("the scheduler does not run again")
		}
	}
	if err := Control(p.Dir, "restart", ControllerManager); err == nil || !strings.Contains(err.Error(), ControllerManager) {
		t.Errorf("restarting what this control plane lacks: %v", err)
	}
}

func (p *plane) read(name string) string {
	p.t.Helper()
	data, err := os.ReadFile(p.file(name))
	if err != nil {
		p.t.Fatal(err)
	}
	return string(data)
}

func TestEnds(t *testing.T) {
	for name, end := range map[string]func(*plane) error{
		"down":                     func(p *plane) error { return Down(p.Dir) },
		"the end of its stdin":     func(p *plane) error { return p.stdin.Close() },
		"a kill of the supervisor": func(p *plane) error { return p.cmd.Process.Kill() },
	} {
		t.Run(name, func(t *testing.T) {
			p := startPlane(t, nil)
			p.awaitReady()
			if err := end(p); err != nil {
				t.Fatal(err)
			}
			_ = p.awaitEnd() // killed is an error, the others are not
			p.awaitGone()
			if err := Down(p.Dir); err != nil {
				t.Errorf("Down when there is nothing to end: %v", err)
			}
			if err := Control(p.Dir, "restart", Etcd); err == nil {
				t.Error("a command was obeyed after the end")
			}
		})
	}
}

func TestDownDuringTheStart(t *testing.T) {
	p := startPlane(t, nil)
	p.await("control socket", func() bool {
		conn, err := dial(p.Dir)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	if err := Down(p.Dir); err != nil {
		t.Fatal(err)
	}
	if err := p.awaitEnd(); err != nil {
		t.Errorf("%v\n%s", err, p.printed())
	}
}

func TestRunningDirectoryIsRefused(t *testing.T) {
	p := startPlane(t, nil)
	p.awaitReady()
	if err := Up(t.Context(), Options{Dir: p.Dir}, io.Discard); err == nil || !strings.Contains(err.Error(), "already") {
		t.Errorf("got %v", err)
	}
	if err := Detach(t.Context(), Options{Dir: p.Dir}, io.Discard); err == nil || !strings.Contains(err.Error(), "already") {
		t.Errorf("got %v", err)
	}
	if err := Control(p.Dir, "restart", APIServer); err != nil {
		t.Errorf("the attempt harmed the running one: %v", err)
	}
}

func TestTakenPortIsTriedAgainWithOthers(t *testing.T) {
	p := startPlane(t, map[string]string{"apiserver.fail": "listen tcp 127.0.0.1:1: bind: address already in use"})
	p.awaitReady()
	if err := Down(p.Dir); err != nil {
		t.Fatal(err)
	}
	if err := p.awaitEnd(); err != nil || strings.Count(p.printed(), "trying others") != 1 {
		t.Errorf("%v\n%s", err, p.printed())
	}
}

func TestFailureNamesTheComponentAndShowsItsLog(t *testing.T) {
	p := startPlane(t, map[string]string{
		"apiserver.fail": "unknown flag: --nonsense",
		"apiserver.log":  "an earlier run: address already in use\n", // says nothing about this one
	})
	err := p.awaitEnd()
	if err == nil || !strings.Contains(p.printed(), "the apiserver ended") || !strings.Contains(p.printed(), "unknown flag: --nonsense") {
		t.Errorf("%v\n%s", err, p.printed())
	}
	if runs(p.pid(Etcd)) {
		t.Error("etcd runs on")
	}
}

func TestCrashIsReportedAndEndsInARestart(t *testing.T) {
	p := startPlane(t, nil)
	p.awaitReady()
	crashed := p.pid(Scheduler)
	if err := syscall.Kill(crashed, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	p.await("report", func() bool { return strings.Contains(p.printed(), "scheduler exited unexpectedly") })
	p.await("the next process", func() bool { return p.pid(Scheduler) != crashed && runs(p.pid(Scheduler)) })
	p.await("its readiness", func() bool { return strings.Count(p.printed(), Scheduler+" ") > 1 })
	if err := Control(p.Dir, "restart", Scheduler); err != nil {
		t.Fatal(err)
	}
	if err := Down(p.Dir); err != nil {
		t.Fatal(err)
	}
	if err := p.awaitEnd(); err != nil || strings.Count(p.printed(), "exited unexpectedly") != 1 {
		t.Errorf("%v\n%s", err, p.printed())
	}
}

func TestDetachReturnsWhenReady(t *testing.T) {
	t.Chdir(t.TempDir())
	o := Options{Dir: t.TempDir(), Components: []string{Scheduler}, RemoveDir: true}
	var out bytes.Buffer
	if err := Detach(t.Context(), o, &out); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 4 || !strings.HasPrefix(lines[3], "ready after") || !slices.Contains(strings.Fields(lines[2]), Scheduler) {
		t.Errorf("a line per step is wanted, got\n%s", &out)
	}
	if err := Control(o.Dir, "restart", Etcd); err != nil {
		t.Error(err)
	}
	t.Chdir(t.TempDir()) // Control left it in o.Dir, which goes away
	if err := Down(o.Dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(o.Dir); !os.IsNotExist(err) {
		t.Errorf("the directory is still there: %v", err)
	}
}

func TestDetachTellsWhyItFailed(t *testing.T) {
	t.Chdir(t.TempDir())
	o := Options{Dir: t.TempDir()}
	if err := os.WriteFile(o.file("etcd.fail"), []byte("no space left"), 0o600); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := Detach(t.Context(), o, &out); err == nil || !strings.Contains(out.String(), "no space left") {
		t.Errorf("%v\n%s", err, &out)
	}
}
