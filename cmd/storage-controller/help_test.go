// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// commandTree is every command of the program, by its words after the name of that.
func commandTree(t *testing.T) map[string]*cobra.Command {
	t.Helper()
	tree := map[string]*cobra.Command{}
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		_, words, _ := strings.Cut(cmd.CommandPath(), " ")
		tree[words] = cmd
		for _, sub := range cmd.Commands() {
			if !sub.Hidden { // the command that another one replaces only says so
				walk(sub)
			}
		}
	}
	walk(newRoot("storage-controller"))
	if len(tree) < 15 {
		t.Fatalf("only %d commands were found", len(tree))
	}
	return tree
}

// TestHelp: each command says what it is for, and by examples that it understands.
func TestHelp(t *testing.T) {
	tree := commandTree(t)
	for words, cmd := range tree {
		switch {
		case cmd.Short == "" || len(cmd.Long) < 40 || cmd.Long == cmd.Short:
			t.Errorf("%q: its help says too little: %q, %q", words, cmd.Short, cmd.Long)
		case !strings.Contains(cmd.Example, "storage-controller "+words):
			t.Errorf("%q: its help has no example of it: %q", words, cmd.Example)
		}
		for _, args := range exampleArguments(cmd.Example) {
			if _, err := parse(args); err != nil {
				t.Errorf("%q: its example %q: %v", words, args, err)
			}
		}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Usage == "" {
				t.Errorf("%q: --%s is not explained", words, f.Name)
			}
		})
	}
	for words := range manuals {
		if tree[words] == nil {
			t.Errorf("there is a manual of %q, which is no command", words)
		}
	}
}

// exampleArguments is what follows the name of the program in each command line of text.
func exampleArguments(text string) (all [][]string) {
	for line := range strings.Lines(strings.ReplaceAll(text, "\\\n", " ")) {
		for _, command := range strings.Split(line, "|") {
			words := strings.Fields(command)
			begin := max(lastIndex(words, "storage-controller"), lastIndex(words, "/storage-controller")) + 1
			if begin == 0 {
				continue
			}
			words = words[begin:] // the last, for a container may have the name of the program
			if end := slices.IndexFunc(words, func(w string) bool { return strings.ContainsAny(w[:1], ">#&;") }); end >= 0 {
				words = words[:end]
			}
			all = append(all, words)
		}
	}
	return all
}

func lastIndex(words []string, word string) int {
	for i, w := range slices.Backward(words) {
		if w == word {
			return i
		}
	}
	return -1
}

// TestWrongInput: whatever is wrong in a command line ends with one line that says so,
// and the exit code of a usage error.
func TestWrongInput(t *testing.T) {
	refused := func(t *testing.T, mistake string, argv ...string) {
		t.Helper()
		code, stdout, stderr := output(t, argv...)
		line, rest, _ := strings.Cut(stderr, "\n")
		if code != exitUsage || stdout != "" || rest != "" || !strings.HasPrefix(line, argv[0]+": ") ||
			!strings.Contains(line, mistake) || !strings.Contains(line, `--help"`) {
			t.Errorf("%q: exit code %d, %d bytes on stdout, on stderr %q", argv, code, len(stdout), stderr)
		}
	}
	for words, cmd := range commandTree(t) {
		t.Run(words, func(t *testing.T) {
			argv := append([]string{"storage-controller"}, strings.Fields(words)...)
			refused(t, "--no-such-flag", append(argv, "--no-such-flag")...)
			if !strings.HasSuffix(cmd.Use, "...]") { // else any number of arguments
				refused(t, "no-such-argument", append(argv, "no-such-argument", "no-such-argument")...)
			}
			cmd.Flags().VisitAll(func(f *pflag.Flag) {
				if slices.Contains([]string{"bool", "int", "uint", "float64", "duration"}, f.Value.Type()) {
					refused(t, "--"+f.Name, append(argv, "--"+f.Name+"=no-such-value")...)
				}
			})
		})
	}
	for name := range aliases {
		refused(t, `see "`+name+` --help"`, name, "--no-such-flag")
		if strings.HasPrefix(name, "kubectl-") { // the sidecars ignore arguments
			refused(t, "no-such-argument", name, "no-such-argument", "no-such-argument")
		}
	}
	refused(t, "--status-url: ", "storage-controller", "explain", "pvc", "data", "--status-url=localhost:8080")
	refused(t, "--image: ", "storage-controller", "migrate", "-f", "-", "--image=my image")
	refused(t, "a shell is required", "storage-controller", "completion")
	refused(t, "a subcommand is required", "storage-controller")
}

// TestCompletion: the scripts are there, that of bash is one, and what they ask the
// program for has an answer.
func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		code, stdout, stderr := output(t, "storage-controller", "completion", shell)
		if code != 0 || stderr != "" || !strings.Contains(stdout, "__complete") {
			t.Errorf("%s: exit code %d: %s", shell, code, stderr)
		}
		if shell != "bash" {
			continue
		}
		check := exec.Command("bash", "-n")
		check.Stdin = strings.NewReader(stdout)
		if out, err := check.CombinedOutput(); err != nil {
			t.Errorf("bash: %v: %s", err, out)
		}
	}
	for want, words := range map[string][]string{
		"attach\t":           {"att"},
		"--worker-threads\t": {"provision", "--worker-th"},
		"validate\t":         {"config", "va"},
		"pod\npvc\npv\nva\nvolumesnapshot\nnode\n:4": {"explain", ""},
		":4\n":           {"explain", "pvc", ""}, // 4: no files
		"text\njson\n:4": {"doctor", "-o", ""},
		"json\n:4":       {"attach", "--logging-format", "j"},
		"provisioner\n":  {"all", "--controllers", ""},
		":0\n":           {"migrate", "-f", ""}, // 0: the names of files
	} {
		code, stdout, _ := output(t, append([]string{"storage-controller", "__complete"}, words...)...)
		if code != 0 || !strings.Contains(stdout, want) {
			t.Errorf("%q: exit code %d: %q", words, code, stdout)
		}
	}
}
