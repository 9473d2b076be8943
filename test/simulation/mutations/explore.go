// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

var exploredLine = regexp.MustCompile(`(scope \w+: after \d+ states, \d+ histories): ([^\n]*)`)

// exploreAll explores the small scopes without each rule whose mutation has that part in its name, and prints a table.
func exploreAll(only string) {
	fmt.Printf("| without this rule | found | the violation |\n|---|---|---|\n")
	for _, m := range mutations {
		if !strings.Contains(m.name, only) {
			continue
		}
		where, violation, err := explore(m, flag.Args())
		if err != nil {
			fmt.Fprintln(os.Stderr, m.name+":", err)
			os.Exit(1)
		}
		fmt.Printf("| %s | %s | %s |\n", m.rule, cmp.Or(where, "not found"), violation)
	}
}

// explore explores the small scopes without the rule of m until the first violation. It returns where it was found, "" for nowhere, and
// the violation.
func explore(m mutation, args []string) (where, violation string, err error) {
	dir, err := os.MkdirTemp("", "mutations-")
	if err != nil {
		return "", "", err
	}
	defer os.RemoveAll(dir)
	binary := filepath.Join(dir, "simulation.test")
	if err := m.build(dir, binary); err != nil {
		return "", "", err
	}
	cmd := exec.Command(binary, append([]string{"-test.run=TestSmallScopes$", "-stop"}, args...)...)
	cmd.Dir = "test/simulation"
	out, err := cmd.CombinedOutput()
	if found := exploredLine.FindSubmatch(out); found != nil {
		return string(found[1]), string(found[2]), nil
	}
	if err != nil {
		return "", "", fmt.Errorf("%w\n%s", err, out)
	}
	return "", "", nil
}
