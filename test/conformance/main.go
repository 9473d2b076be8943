// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Command conformance runs the External Storage specifications of Kubernetes on the node that node.sh has started, with
// the reference sidecars and with storage-controller. It fails if a specification passes only with the reference.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The sides of the comparison.
const (
	reference = "reference"
	ours      = "storage-controller"
)

var sides = []string{reference, ours}

// options are the flags of the command.
type options struct {
	focus, skip *regexp.Regexp
	sides       []string
	bindings    []string
	procs       int
	page        string
	performance bool
	runs        int
}

// The directories of conformance.sh.
var root, dir = os.Getenv("ROOT"), os.Getenv("DIR")

// labels select the specifications that one node without ssh supports.
const labels = "!Disruptive && !/Feature:(Windows|SELinux)/"

// spec is a specification and its result on one side.
type spec struct {
	side, pattern, suite string
	name                 string // with pattern and suite
	text                 string // as ginkgo has it
	output               string // what the specification has logged
	state                string // passed, failed, skipped (the specification does that), or empty if it was not selected
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(1)
	}
}

func parse(args []string) (o options, err error) {
	fs := flag.NewFlagSet("conformance", flag.ExitOnError)
	focus := fs.String("focus", "", "regular expression of the specifications to run, such as 'provisioning|snapshottable'")
	skip := fs.String("skip", "any volume data source", // the image of its populator is not available as a Go module
		"regular expression of the specifications not to run")
	only := fs.String("only", strings.Join(sides, ","), "sides to run")
	bindings := fs.String("binding", "Immediate,WaitForFirstConsumer", "binding modes of the StorageClass to run")
	fs.IntVar(&o.procs, "procs", 6, "number of specifications that run at the same time")
	fs.BoolVar(&o.performance, "performance", false, "run only the suites that measure, one side after the other")
	fs.IntVar(&o.runs, "runs", 3, "number of times that --performance runs each suite")
	fs.StringVar(&o.page, "page", "docs/conformance.md", "page to write, in the repository; empty for none")
	_ = fs.Parse(args) // exits on an error
	o.sides, o.bindings = strings.Split(*only, ","), strings.Split(*bindings, ",")
	if o.performance {
		// Both suites are labeled Serial. With one process, the specifications of the sides wait for each other anyway.
		*focus, o.bindings, o.procs = performanceSuites, []string{performance}, 1
	}
	if o.focus, err = regexp.Compile(*focus); err != nil {
		return o, fmt.Errorf("--focus: %w", err)
	}
	if o.skip, err = regexp.Compile(*skip); err != nil {
		return o, fmt.Errorf("--skip: %w", err)
	}
	return o, nil
}

func run(args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	if o.performance {
		return o.measure()
	}
	var all []*results
	for _, binding := range o.bindings {
		suites, err := o.suites(binding)
		if err != nil {
			return err
		}
		r := &results{binding: binding, remaining: slices.Sorted(maps.Keys(suites))}
		all = append(all, r)
		for len(r.remaining) > 0 {
			suite, begin := r.remaining[0], time.Now()
			specs, err := o.runSuite(binding, suite, suites[suite])
			if err != nil {
				return err
			}
			r.specs, r.suites, r.remaining = append(r.specs, specs...), append(r.suites, suite), r.remaining[1:]
			fmt.Printf("%s %s %s: %s in %v; %d suites remain\n", time.Now().Format(time.TimeOnly), binding, suite, summary(specs),
				time.Since(begin).Round(time.Second), len(r.remaining))
			if err := o.write(all); err != nil { // a later suite may be interrupted
				return err
			}
		}
	}
	fmt.Print("\n" + tables(all))
	return verdict(all)
}

// testFlags returns the flags of the test program.
func (o options) testFlags(binding string) []string {
	flags := []string{"--kubeconfig=" + os.Getenv("KUBECONFIG"), "--provider=local", "--num-nodes=1",
		"--kubectl-path=" + filepath.Join(dir, "bin", "kubectl")}
	for _, side := range o.sides {
		flags = append(flags, "--storage.testdriver="+filepath.Join(dir, "state", side+"-"+strings.ToLower(binding)+".yaml"))
	}
	return flags
}

// suites returns the specifications to run, by suite.
func (o options) suites(binding string) (map[string][]spec, error) {
	report := filepath.Join(dir, "log", "list.json")
	out, err := exec.Command("e2e.test", append([]string{"--ginkgo.dry-run", "--ginkgo.label-filter=" + labels,
		"--ginkgo.json-report=" + report}, o.testFlags(binding)...)...).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("listing the specifications: %w\n%s", err, out)
	}
	listed, err := read(report)
	suites := map[string][]spec{}
	for _, s := range listed {
		if s.state == "passed" && o.focus.MatchString(s.name) && (o.skip.String() == "" || !o.skip.MatchString(s.name)) {
			suites[s.suite] = append(suites[s.suite], s)
		}
	}
	if err == nil && len(suites) == 0 {
		err = errors.New("no specification is selected")
	}
	return suites, err
}

// runSuite runs the specifications of a suite, those of both sides at the same time.
func (o options) runSuite(binding, suite string, specs []spec) ([]spec, error) {
	var focus []string
	selected := map[string]bool{}
	for _, s := range specs {
		selected[s.text] = true
		focus = append(focus, strings.Join(strings.Fields(regexp.QuoteMeta(s.text)), " +")) // ginkgo trims the parts of its text
	}
	name := strings.ToLower(binding) + "-" + suite
	log, err := os.Create(filepath.Join(dir, "log", name+".log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command("ginkgo", append([]string{"--procs=" + strconv.Itoa(o.procs), "--timeout=2h", "-v", "--no-color",
		"--output-interceptor-mode=none", "--focus=(" + strings.Join(focus, "|") + ")$", "--label-filter=" + labels,
		"--json-report=" + name + ".json", "--output-dir=" + filepath.Join(dir, "log"), filepath.Join(dir, "bin", "e2e.test"), "--"},
		o.testFlags(binding)...)...)
	cmd.Stdout, cmd.Stderr = log, log
	failed := cmd.Run() // also if a specification fails
	results, err := read(filepath.Join(dir, "log", name+".json"))
	if err != nil {
		return nil, fmt.Errorf("%s: %w, %w; see %s", suite, failed, err, log.Name())
	}
	for i, s := range results {
		if s.state == "" && selected[s.text] {
			results[i].state = "failed" // it did not run
		}
	}
	return slices.DeleteFunc(results, func(s spec) bool { return s.state == "" }), nil
}

var specText = regexp.MustCompile(`\[Driver: ([^.\]]+)[^\]]*\].*?(\[Testpattern: ([^\]]+)\](?: \[[^\]]+\])* (\S+) .*)$`)

// read returns the specifications of a report of ginkgo.
func read(path string) (specs []spec, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var reports []struct {
		SpecReports []struct {
			ContainerHierarchyTexts []string
			LeafNodeText, State     string
			Failure                 struct{ Message string }

			CapturedGinkgoWriterOutput string
		}
	}
	if err := json.Unmarshal(data, &reports); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for _, r := range reports {
		for _, s := range r.SpecReports {
			text := strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " ")
			part := specText.FindStringSubmatch(text)
			if part == nil { // a node of the whole suite
				continue
			}
			state := ""
			switch {
			case s.State == "passed":
				state = "passed"
			case s.State != "skipped" && s.State != "pending":
				state = "failed" // also panicked, timedout and interrupted
			case s.Failure.Message != "":
				state = "skipped"
			}
			specs = append(specs, spec{side: part[1], pattern: part[3], suite: part[4], name: part[2], text: text, state: state,
				output: s.CapturedGinkgoWriterOutput})
		}
	}
	return specs, nil
}
