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
	changes int   // pairs with changes of volumes
	memory  []int // volumes of the driver
	foreign int   // volumes of other drivers for which memory is measured
	// detaches are pending while the time of attaches is measured
	detaches  int
	throttled int // claims of a driver that throttles
	failover  int // volumes of the driver
	page      string
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
	reference = iota // csi-provisioner, csi-attacher, csi-resizer and csi-snapshotter
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
	s.Versions = strings.Join(versions, ", ")
	return s, nil
}

// comparison is what all runs have measured.
type comparison struct {
	Date       string        `json:"date"`
	Machine    string        `json:"machine"`
	Kubernetes string        `json:"kubernetes"`
	Sides      [2]side       `json:"sides"`
	Pairs      [][2]*results `json:"pairs"`
	Changes    [][2]*results `json:"changes"`
	Footprints []footprint   `json:"footprints"`
	Pressure   *pressure     `json:"pressure"`
	Throttled  *throttled    `json:"throttled"`
	Failover   *failover     `json:"failover"`
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
	for _, section := range c.sections(ctx, o) {
		if err := section(); err != nil {
			return c, err
		}
		if err := c.writePage(o.compare.page); err != nil { // now, in case that the next section fails
			return c, err
		}
	}
	return c, nil
}

// sections returns the measurements that were asked for.
func (c *comparison) sections(ctx context.Context, o options) []func() error {
	return []func() error{
		func() (err error) {
			c.Pairs, err = measurePairs(ctx, o, c.Sides, o.compare.pairs)
			return err
		},
		func() (err error) {
			o.phases = append([]string{"provision"}, changing...)
			c.Changes, err = measurePairs(ctx, o, c.Sides, o.compare.changes)
			return err
		},
		func() (err error) {
			if len(o.compare.memory) > 0 {
				c.Footprints, err = measureMemory(ctx, o, c.Sides)
			}
			return err
		},
		func() (err error) {
			if o.compare.detaches > 0 {
				load := backlog{detaches: o.compare.detaches, nodes: 200, attaches: 60, each: 10 * time.Second, every: time.Second}
				c.Pressure, err = measurePressure(ctx, o, c.Sides, load)
			}
			return err
		},
		func() (err error) {
			if o.compare.throttled > 0 {
				c.Throttled, err = measureThrottled(ctx, o, c.Sides, o.compare.throttled)
			}
			return err
		},
		func() (err error) {
			if o.compare.failover > 0 {
				load := cluster{volumes: o.compare.failover, claims: 10, rounds: 3}
				c.Failover, err = measureFailover(ctx, o, c.Sides, load)
			}
			return err
		},
	}
}

// measurePairs runs both sides alternately. With an error it returns the complete pairs.
func measurePairs(ctx context.Context, o options, sides [2]side, n int) (pairs [][2]*results, err error) {
	for i := range n {
		var pair [2]*results
		for s, side := range sides {
			say("pair %d of %d: %s", i+1, n, side.Versions)
			o.sidecars = side.Commands
			pair[s], err = measure(ctx, o)
			if err != nil {
				return pairs, fmt.Errorf("%s: %w", side.Name, err)
			}
		}
		pairs = append(pairs, pair)
	}
	return pairs, nil
}

// buildSides builds the sidecars and storage-controller. None has a limit of requests that it could reach.
func buildSides(ctx context.Context, dir string) (sides [2]side, err error) {
	programs, err := kubetest.BuildReference(ctx, os.Stderr, "csi-provisioner", "csi-attacher", "csi-resizer", "csi-snapshotter")
	if err != nil {
		return sides, err
	}
	program, err := build(ctx, dir)
	if err != nil {
		return sides, err
	}
	sides[reference], err = sideOf("sidecars", "--worker-threads=100 --kube-api-qps=100000 --kube-api-burst=100000", programs...)
	if err != nil {
		return sides, err
	}
	for i, command := range sides[reference].Commands {
		if strings.HasPrefix(command, programs[2]) { // its flag has another name
			sides[reference].Commands[i] = strings.Replace(command, "--worker-threads", "--workers", 1)
		}
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
