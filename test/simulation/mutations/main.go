// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Command mutations removes one rule of the product after the other and counts the seeds of the simulation until
// the first violation. It does not change files: the Go command compiles an overlay.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

func main() {
	limit := flag.Int("limit", 20000, "seeds after which a mutation counts as not found")
	only := flag.String("only", "", "part of the names of the mutations to run")
	starts := flag.Int("starts", 3, "different first seeds, of which the median is printed")
	small := flag.Bool("explore", false, "explore the small scopes instead of seeds; arguments after the flags are for the test")
	flag.Parse()
	if *small {
		exploreAll(*only)
		return
	}
	missed := 0
	fmt.Printf("| without this rule | median of seeds | the violation |\n|---|---|---|\n")
	for _, m := range mutations {
		if !strings.Contains(m.name, *only) {
			continue
		}
		seeds, violation, err := find(m, *limit, *starts)
		switch {
		case err != nil:
			fmt.Fprintln(os.Stderr, m.name+":", err)
			os.Exit(1)
		case seeds < 0:
			missed++
			fmt.Printf("| %s | not found in %d | |\n", m.rule, *limit)
		default:
			fmt.Printf("| %s | %d | %s |\n", m.rule, seeds, violation)
		}
	}
	if missed > 0 {
		fmt.Fprintf(os.Stderr, "%d mutations were not found\n", missed)
		os.Exit(1)
	}
}

// apply returns the file of m, and its content with the mutation.
func (m mutation) apply(root string) (file string, mutated []byte, err error) {
	s, err := m.place.find(root)
	if err == nil {
		mutated, err = s.replace(m.target, m.text)
	}
	if err != nil {
		return "", nil, fmt.Errorf("mutation %s: %w", m.name, err)
	}
	return s.file, mutated, nil
}

// find returns the median number of seeds until the violation, from different first seeds, and the first violation.
// -1 means that most of them found none within limit.
func find(m mutation, limit, starts int) (int, string, error) {
	dir, err := os.MkdirTemp("", "mutations-")
	if err != nil {
		return 0, "", err
	}
	defer os.RemoveAll(dir)
	binary := filepath.Join(dir, "simulation.test")
	if err := m.build(dir, binary); err != nil {
		return 0, "", err
	}
	first, every := 1, 1
	if m.pkg == "topolvm" { // the other seeds do not run it
		first, every = 2, 5
	}
	seeds, violations := make([]int, starts), make([]string, starts)
	var group errgroup.Group
	group.SetLimit(2)
	for i := range starts {
		group.Go(func() (err error) {
			seeds[i], violations[i], err = run(binary, first+i*1_000_000, every, limit)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return 0, "", err
	}
	slices.Sort(seeds)
	if median := seeds[starts/2]; median <= limit {
		i := slices.IndexFunc(violations, func(v string) bool { return v != "" })
		return median, violations[i], nil
	}
	return -1, "", nil
}

// build builds the simulation with the mutation.
func (m mutation) build(dir, binary string) error {
	root, err := filepath.Abs(".")
	if err != nil {
		return err
	}
	file, mutated, err := m.apply(root)
	if err != nil {
		return err
	}
	mutatedFile := filepath.Join(dir, "mutated.go")
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {filepath.Join(root, file): mutatedFile}})
	if err != nil {
		return err
	}
	overlayFile := filepath.Join(dir, "overlay.json")
	if err := errors.Join(os.WriteFile(mutatedFile, mutated, 0o600), os.WriteFile(overlayFile, overlay, 0o600)); err != nil {
		return err
	}
	args := []string{"-vet=off", "-ldflags=-s -w", "-overlay", overlayFile, "-o", binary, "./test/simulation"}
	out, err := exec.Command("go", append([]string{"test", "-c"}, args...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return nil
}

var (
	violationLine = regexp.MustCompile(`seed (\d+): ([^\n]*)`)
	stuckLine     = regexp.MustCompile(`panic: (.* has not ended [^\n]*)`)
)

// hangs bounds the time of a chunk of seeds.
const hangs = 5 * time.Minute

// run runs every n-th seed of the simulation from one on, until the first violation, and returns the number of seeds that it took;
// more than limit: none was found.
func run(binary string, from, every, limit int) (int, string, error) {
	const chunk = 100
	for done := 0; done < limit; done += chunk {
		ctx, cancel := context.WithTimeout(context.Background(), hangs)
		cmd := exec.CommandContext(ctx, binary, "-test.run=TestSeeds", "-stop",
			"-seeds", strconv.Itoa(min(chunk, limit-done)), "-from", strconv.Itoa(from+done*every), "-every", strconv.Itoa(every))
		cmd.Dir = "test/simulation"
		out, err := cmd.CombinedOutput()
		timeout := ctx.Err()
		cancel()
		found, stuck := violationLine.FindSubmatch(out), stuckLine.FindSubmatch(out)
		switch {
		case found != nil:
			seed, err := strconv.Atoi(string(found[1]))
			return (seed-from)/every + 1, string(found[2]), err
		case stuck != nil:
			return done + chunk, string(stuck[1]), nil
		case timeout != nil:
			return 0, "", fmt.Errorf("no result of %d seeds from %d within %v", chunk, from+done*every, hangs)
		case err != nil: // such as a panic of the mutated code
			return 0, "", fmt.Errorf("%w\n%s", err, out)
		}
	}
	return limit + 1, "", nil
}
