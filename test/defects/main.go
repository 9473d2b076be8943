// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Command defects shows a defect of docs/defects.md: it runs the test of the fix, or the seed, on the commit before the fix.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

func main() {
	printed := flag.Bool("print", false, "print the commands instead of running them")
	flag.Usage = func() { fmt.Fprintln(os.Stderr, "usage: go run ./test/defects [-print] NUMBER") }
	flag.Parse()
	if err := run(flag.Args(), *printed); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string, printed bool) error {
	defects, err := parse(source)
	if err != nil {
		return err
	}
	n := 0
	if len(args) == 1 {
		n, err = strconv.Atoi(args[0])
	}
	if err != nil || n < 1 || n > len(defects) {
		return fmt.Errorf("name the number of a defect of docs/defects.md, from 1 to %d: make show-defect N=17", len(defects))
	}
	d := defects[n-1]
	if printed {
		fmt.Println(strings.Join(d.commands(), "\n"))
		return nil
	}
	fmt.Printf("%d: %s: %s\n", n, d.Role, d.Defect)
	if d.Uncompiled {
		return fmt.Errorf("the defect cannot be shown: %s %s uses what %s added and does not compile before it", d.Package, d.Test, d.Fix)
	}
	return d.show(".", os.Stdout)
}

// commands returns what shows d in a clone of the repository: the last commit that had it is checked out, with the tests of the fix.
func (d defect) commands() []string {
	commands := []string{"git switch --detach " + d.Fix + "~1"}
	if len(d.Files) > 0 {
		commands = append(commands, "git checkout "+d.Fix+" -- "+strings.Join(d.Files, " "))
	}
	for _, args := range d.tests() {
		command := "go"
		for _, arg := range args {
			if strings.HasPrefix(arg, "^") { // a pattern, which a shell must not expand
				arg = "'" + arg + "'"
			}
			command += " " + arg
		}
		commands = append(commands, command)
	}
	return commands
}

// tests returns the arguments of the Go command for the test and for the seed of d.
func (d defect) tests() [][]string {
	var tests [][]string
	if d.Test != "" {
		function, row, _ := strings.Cut(d.Test, "/")
		pattern := "^" + function + "$"
		if row != "" {
			pattern += "/" + row
		}
		tests = append(tests, []string{"test", "-count=1", "-vet=off", "./" + d.Package, "-run", pattern})
	}
	if d.Seed != 0 {
		tests = append(tests, []string{
			"test", "-count=1", "-vet=off", "./test/simulation", "-run", "^TestSeeds$",
			"-args", "-from", strconv.FormatUint(d.Seed, 10), "-seeds", "1",
		})
	}
	return tests
}

// failure matches the output of a test that fails, or of a panic that ends its process. A test that does not compile has neither.
var failure = regexp.MustCompile(`(?m)^\s*--- FAIL: |^panic: `)

// show runs the commands of d in a temporary worktree of the repository in dir. It returns an error unless each test fails there.
func (d defect) show(dir string, out io.Writer) (err error) {
	parent, err := os.MkdirTemp("", "defect-")
	if err != nil {
		return err
	}
	worktree := filepath.Join(parent, "worktree")
	if err := git(dir, out, "worktree", "add", "--detach", worktree, d.Fix+"~1"); err != nil {
		return errors.Join(fmt.Errorf("checking out the commit before %s: %w. Fetch the whole history: git fetch --unshallow", d.Fix, err),
			os.RemoveAll(parent))
	}
	defer func() {
		err = errors.Join(err, git(dir, out, "worktree", "remove", "--force", worktree), os.RemoveAll(parent))
	}()
	if len(d.Files) > 0 {
		if err := git(worktree, out, append([]string{"checkout", d.Fix, "--"}, d.Files...)...); err != nil {
			return fmt.Errorf("checking out the tests of %s: %w", d.Fix, err)
		}
	}
	for _, args := range d.tests() {
		var output strings.Builder
		test := exec.Command("go", args...)
		test.Dir, test.Stdout, test.Stderr = worktree, io.MultiWriter(out, &output), out
		failed := test.Run()
		if failed == nil || !failure.MatchString(output.String()) {
			return fmt.Errorf("the defect does not show: go %s: no test has failed (%v)", strings.Join(args, " "), failed)
		}
	}
	fmt.Fprintf(out, "The defect shows: the tests fail on %s~1.\n", d.Fix)
	return nil
}

// git runs git in dir.
func git(dir string, out io.Writer, args ...string) error {
	command := exec.Command("git", args...)
	command.Dir, command.Stdout, command.Stderr = dir, out, out
	if err := command.Run(); err != nil {
		return fmt.Errorf("git %s: %w", args[0], err)
	}
	return nil
}
