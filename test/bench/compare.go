// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"debug/buildinfo"
	"fmt"
	"os"
	"os/exec"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// compareOptions are the settings of the command line with --compare.
type compareOptions struct {
	pairs   int
	memory  []int // volumes of the driver
	foreign int   // volumes of other drivers for which memory is measured
	// detaches are pending while the time of attaches is measured
	detaches int
	page     string
}

// numbers parses a list of positive numbers and sorts them. An empty list is valid.
func numbers(list string) (parsed []int, err error) {
	if list == "" {
		return nil, nil
	}
	for word := range strings.SplitSeq(list, ",") {
		n, err := strconv.Atoi(word)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("%q is not a positive number", word)
		}
		parsed = append(parsed, n)
	}
	slices.Sort(parsed)
	return parsed, nil
}

// allFlags are measured unless the user gives a command line.
const allFlags = "all --worker-threads=100"

// The sides of a comparison.
const (
	reference = iota // csi-provisioner and csi-attacher
	ours             // storage-controller all
)

// side is what one side of a comparison runs.
type side struct {
	Name     string   `json:"name"`
	Versions string   `json:"versions"`
	Flags    string   `json:"flags"` // of each command
	Commands sidecars `json:"commands"`
}

// commandOf returns the command line of a program for --sidecar.
func commandOf(program, flags string) string {
	return program + " " + flags + " --kubeconfig={kubeconfig} --csi-address={socket}"
}

// sideOf returns the side that runs programs, each with flags.
func sideOf(name, flags string, programs ...string) (side, error) {
	s := side{Name: name, Flags: flags}
	var versions []string
	for _, p := range programs {
		info, err := buildinfo.ReadFile(p)
		if err != nil {
			return side{}, err
		}
		version := info.Main.Version
		if version == "(devel)" { // Go records no version of a git worktree
			commit, err := exec.Command("git", "describe", "--tags", "--always", "--dirty").Output()
			if err != nil {
				return side{}, fmt.Errorf("reading the version with git describe: %w", err)
			}
			version = strings.TrimSpace(string(commit))
		}
		versions = append(versions, path.Base(info.Path)+" "+version)
		s.Commands = append(s.Commands, commandOf(p, flags))
	}
	s.Versions = strings.Join(versions, " and ")
	return s, nil
}

// comparison is what all runs have measured.
type comparison struct {
	Date       string        `json:"date"`
	Machine    string        `json:"machine"`
	Kubernetes string        `json:"kubernetes"`
	Sides      [2]side       `json:"sides"`
	Pairs      [][2]*results `json:"pairs"`
	Footprints []footprint   `json:"footprints"`
	Pressure   *pressure     `json:"pressure"`
}

// compare measures both sides and writes the tables of the page. With an error it returns what was measured before.
func compare(ctx context.Context, o options) (*comparison, error) {
	if _, err := readPage(o.compare.page); err != nil {
		return nil, err // now, not after minutes
	}
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	version, err := kubetest.SelectedVersion()
	if err != nil {
		return nil, err
	}
	c := &comparison{Date: time.Now().UTC().Format(time.DateOnly), Machine: machine(), Kubernetes: version.Kubernetes}
	if c.Sides, err = buildSides(ctx, dir); err != nil {
		return nil, err
	}
	for i := range o.compare.pairs {
		c.Pairs = append(c.Pairs, [2]*results{})
		for s, side := range c.Sides {
			say("pair %d of %d: %s", i+1, o.compare.pairs, side.Versions)
			o.sidecars = side.Commands
			if c.Pairs[i][s], err = measure(ctx, o); err != nil {
				c.Pairs = c.Pairs[:i]
				return c, fmt.Errorf("%s: %w", side.Name, err)
			}
		}
	}
	if err := c.writePage(o.compare.page); err != nil { // now, in case that the measurement of memory fails
		return c, err
	}
	if len(o.compare.memory) > 0 {
		if c.Footprints, err = measureMemory(ctx, o, c.Sides); err != nil {
			return c, err
		}
	}
	if o.compare.detaches > 0 {
		load := backlog{detaches: o.compare.detaches, nodes: 200, attaches: 60, each: 10 * time.Second, every: time.Second}
		c.Pressure, err = measurePressure(ctx, o, c.Sides, load)
		if err != nil {
			return c, err
		}
	}
	return c, c.writePage(o.compare.page)
}

// buildSides builds csi-provisioner, csi-attacher and storage-controller. None has a limit of requests that
// it could reach.
func buildSides(ctx context.Context, dir string) (sides [2]side, err error) {
	programs, err := kubetest.BuildReference(ctx, os.Stderr, "csi-provisioner", "csi-attacher")
	if err != nil {
		return sides, err
	}
	program, err := build(ctx, dir)
	if err != nil {
		return sides, err
	}
	sides[reference], err = sideOf("csi-provisioner + csi-attacher",
		"--worker-threads=100 --kube-api-qps=100000 --kube-api-burst=100000", programs...)
	if err != nil {
		return sides, err
	}
	sides[ours], err = sideOf("storage-controller", allFlags, program)
	return sides, err
}

// machine describes the processors and the memory.
func machine() string {
	model := runtime.GOARCH
	data, _ := os.ReadFile("/proc/cpuinfo") // without it, the architecture has to do
	for line := range strings.Lines(string(data)) {
		if name, value, _ := strings.Cut(line, ":"); strings.TrimSpace(name) == "model name" {
			model = strings.TrimSpace(value)
			break
		}
	}
	return fmt.Sprintf("%d CPUs (%s), %.0f GiB", runtime.NumCPU(), model, float64(field("/proc/meminfo", "MemTotal:"))/(1<<20))
}
