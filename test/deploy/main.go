// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Command deploytool renders what deploy/ ships, with the libraries that kustomize and helm
// are made of, and reads and evaluates expressions with the parser and the engine of
// Prometheus. It is a Go module of its own, so that the product depends on none of them.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
)

const usage = `usage: deploytool kustomize DIRECTORY
       deploytool helm CHART RELEASE NAMESPACE [VALUES-FILE...]
       deploytool notes CHART RELEASE NAMESPACE [VALUES-FILE...]
       deploytool lint CHART [VALUES-FILE...]
       deploytool promql < EXPRESSION-PER-LINE
       deploytool evaluate < SCRAPES-EXPRESSIONS-AND-RULES

kustomize and helm print the objects as YAML, notes what helm says after an installation.
promql prints the metrics that each expression selects, with the labels that it matches.
evaluate reads {"scrapes": [{"at": SECONDS, "labels": {}, "text": METRICS, "again": MINUTES}],
"expressions": [], "rules": [{"expression": "", "for": SECONDS}], "clocks": []} and prints the
series that each expression has at the time of the last scrape, and those with which each rule
fires. A target continues for the minutes of "again" as before, and its gauges that are
clocks with the time.
Example: deploytool kustomize ../../deploy/overlays/all-in-one`

func main() {
	if err := run(os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "deploytool:", err)
		os.Exit(1)
	}
}

func run(args []string, in io.Reader, out io.Writer) error {
	if len(args) == 0 {
		return errors.New(usage)
	}
	switch command, args := args[0], args[1:]; {
	case command == "kustomize" && len(args) == 1:
		return kustomize(args[0], out)
	case command == "helm" && len(args) >= 3:
		return renderChart(args[0], args[1], args[2], args[3:], out)
	case command == "notes" && len(args) >= 3:
		return chartNotes(args[0], args[1], args[2], args[3:], out)
	case command == "lint" && len(args) >= 1:
		return lintChart(args[0], args[1:], out)
	case command == "promql" && len(args) == 0:
		return metricNames(in, out)
	case command == "evaluate" && len(args) == 0:
		return evaluate(in, out)
	case command == "help" || command == "--help" || command == "-h":
		_, err := fmt.Fprintln(out, usage)
		return err
	}
	return errors.New(usage)
}
