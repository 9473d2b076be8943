// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Command lint runs the checks of go vet and of staticcheck on packages, with the flags of staticcheck. It loads the
// dependencies once for both, and does without the checks for which it would have to analyze each function of the
// dependencies, which takes most of the time of a first run.
package main

import (
	"os"
	"slices"

	"golang.org/x/tools/go/analysis/suite/vet"
	"honnef.co/go/tools/analysis/lint"
	"honnef.co/go/tools/lintcmd"
	"honnef.co/go/tools/simple"
	"honnef.co/go/tools/staticcheck"
	"honnef.co/go/tools/stylecheck"
	"honnef.co/go/tools/unused"
)

// expensive are the checks that need facts about functions of dependencies: whether they are pure, or can return nil, or
// require an even number of arguments.
var expensive = []string{"S1011", "SA4017", "SA4018", "SA4023", "SA5012"}

func main() {
	cmd := lintcmd.NewCommand("lint")
	cmd.ParseFlags(os.Args[1:])
	for _, a := range slices.Concat(simple.Analyzers, staticcheck.Analyzers, stylecheck.Analyzers) {
		if !slices.Contains(expensive, a.Analyzer.Name) {
			cmd.AddAnalyzers(a)
		}
	}
	cmd.AddAnalyzers(unused.Analyzer)
	for _, a := range vet.Suite {
		cmd.AddAnalyzers(&lint.Analyzer{Analyzer: a, Doc: &lint.RawDocumentation{Title: a.Name, Text: a.Doc}})
	}
	cmd.Run()
}
