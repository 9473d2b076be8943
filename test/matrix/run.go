// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"strings"
	"time"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// outcome is the end of a story.
type outcome string

const (
	passed outcome = "passed"
	failed outcome = "failed"
	notRun outcome = "not run" // skipped, or an earlier test ended the process
)

// result is the outcome of the stories on one Kubernetes version.
type result struct {
	Minor, Kubernetes, Etcd string
	ClientGo                string
	Commit, Date            string
	Outcomes                map[string]outcome // by the test of the story
}

// of returns the outcome of a story.
func (r *result) of(s story) outcome {
	if o, ok := r.Outcomes[s.test]; ok {
		return o
	}
	return notRun
}

// count returns the number of stories with an outcome.
func (r *result) count(o outcome) int {
	n := 0
	for _, s := range stories {
		if r.of(s) == o {
			n++
		}
	}
	return n
}

func resultFile(v kubetest.Version) string { return filepath.Join(dir, v.Minor()+".json") }

// readResult returns the result of an earlier run, or nil if there is none.
func readResult(v kubetest.Version) (*result, error) {
	data, err := os.ReadFile(resultFile(v))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var r result
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, fmt.Errorf("%s: %w", resultFile(v), err)
	}
	if r.Kubernetes != v.Kubernetes {
		return nil, nil
	}
	return &r, nil
}

// withCgo is for the race detector, which the tests also use for the programs that they build.
const withCgo = "CGO_ENABLED=1"

// runner has the programs of a run.
type runner struct {
	demo, e2e string
	commit    string
	clientGo  string
}

// newRunner compiles the programs that do not depend on the Kubernetes version.
func newRunner(ctx context.Context) (*runner, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(abs, 0o755); err != nil {
		return nil, err
	}
	r := &runner{demo: filepath.Join(abs, "demo"), e2e: filepath.Join(abs, "e2e.test")}
	for _, args := range [][]string{
		{"CGO_ENABLED=0", "go", "build", "-trimpath", "-tags", "grpcnotrace", "-o", r.demo, "./test/demo"},
		{withCgo, "go", "test", "-race", "-c", "-o", r.e2e, "./test/e2e"},
	} {
		fmt.Println("$", strings.Join(args, " "))
		cmd := exec.CommandContext(ctx, args[1], args[2:]...)
		cmd.Env = append(os.Environ(), args[0])
		if out, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("%s (is this the root of the repository?): %w\n%s", strings.Join(args, " "), err, out)
		}
	}
	out, err := exec.CommandContext(ctx, "git", "describe", "--tags", "--always", "--dirty").Output()
	if err != nil {
		return nil, fmt.Errorf("git describe: %w", err)
	}
	r.commit = strings.TrimSpace(string(out))
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dependency := range info.Deps {
			if dependency.Path == "k8s.io/client-go" {
				r.clientGo = dependency.Version
			}
		}
	}
	return r, nil
}

// test builds the control plane of a version and runs the stories on it. It stores the result for later runs.
func (r *runner) test(ctx context.Context, v kubetest.Version) (*result, error) {
	fmt.Printf("\nKubernetes %s, etcd %s\n", v.Kubernetes, v.Etcd)
	if _, err := kubetest.BuildVersion(ctx, v, os.Stdout); err != nil {
		return nil, err
	}
	res := &result{Minor: v.Minor(), Kubernetes: v.Kubernetes, Etcd: v.Etcd, ClientGo: r.clientGo, Commit: r.commit,
		Date: time.Now().UTC().Format(time.DateOnly), Outcomes: map[string]outcome{}}
	record := func(test string, o outcome, took string) {
		res.Outcomes[test] = o
		fmt.Printf("  %-8s %s (%s)\n", o, test, took)
	}
	begin := time.Now()
	end := passed
	if err := r.command(ctx, v, "demo", ".", io.Discard, r.demo, "--real"); err != nil {
		fmt.Printf("  %s: %v: read %s/%s-demo.log\n", demo, err, dir, v.Minor())
		end = failed
	}
	record(demo, end, time.Since(begin).Round(time.Second).String())
	err := r.command(ctx, v, "e2e", filepath.Join("test", "e2e"), &testOutput{record: record}, r.e2e,
		"-test.v", "-test.parallel=4", "-test.timeout=60m", "-test.run="+pattern())
	if ctx.Err() != nil {
		return nil, errors.New("interrupted")
	}
	fmt.Printf("  %d of %d passed\n", res.count(passed), len(stories))
	if err != nil { // each test has its own outcome
		fmt.Printf("  test/e2e: %v: read %s/%s-e2e.log\n", err, dir, v.Minor())
	}
	data, err := json.MarshalIndent(res, "", "  ")
	if err != nil {
		return nil, err
	}
	return res, os.WriteFile(resultFile(v), data, 0o644)
}

// command runs a program on the control plane of v, with its output in a log and in out.
func (r *runner) command(ctx context.Context, v kubetest.Version, name, in string, out io.Writer, program string, args ...string) error {
	log, err := os.Create(filepath.Join(dir, v.Minor()+"-"+name+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = in
	cmd.Env = append(os.Environ(), withCgo, "KUBETEST=real", kubetest.MinorVariable+"="+v.Minor())
	cmd.Stdout = io.MultiWriter(log, out)
	cmd.Stderr = cmd.Stdout
	return cmd.Run()
}

// pattern matches the tests of the stories.
func pattern() string {
	var names []string
	for _, s := range stories {
		if s.test != demo {
			names = append(names, s.test)
		}
	}
	return "^(" + strings.Join(names, "|") + ")$"
}

// testOutput records the outcomes that a test binary prints with -test.v.
type testOutput struct {
	record func(test string, o outcome, took string)
	rest   []byte // of a line whose end is missing
}

var outcomeLine = regexp.MustCompile(`^--- (PASS|FAIL|SKIP): (\w+) \((\S+)\)`)

func (o *testOutput) Write(p []byte) (int, error) {
	o.rest = append(o.rest, p...)
	for {
		line, rest, complete := bytes.Cut(o.rest, []byte("\n"))
		if !complete {
			return len(p), nil
		}
		o.rest = rest
		if m := outcomeLine.FindSubmatch(line); m != nil {
			o.record(string(m[2]), map[string]outcome{"PASS": passed, "FAIL": failed, "SKIP": notRun}[string(m[1])], string(m[3]))
		}
	}
}
