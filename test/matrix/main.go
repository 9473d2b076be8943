// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Command matrix runs the demo and the main stories of test/e2e on the control plane of each Kubernetes version that
// test/controlplane has, and writes docs/support-matrix.md. Run it from the root of the repository.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// page is the file that is generated, dir has the logs and the results.
const page = "docs/support-matrix.md"

var dir = filepath.Join("bin", "matrix")

func main() {
	minor := flag.String("minor", "", "test this minor version only, and keep the results of the others")
	update := flag.Bool("update", false, "write the module files of the newest minor versions, and test nothing")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	run := func() error { return testAll(ctx, *minor) }
	if *update {
		run = func() error { return updateModules(ctx, filepath.Join("test", "controlplane")) }
	}
	if err := run(); err != nil {
		fmt.Fprintf(os.Stderr, "matrix: %v\n", err)
		os.Exit(1)
	}
}

var errFailed = errors.New("not all stories passed")

// testAll tests the versions, or one of them, and reports all results.
func testAll(ctx context.Context, minor string) error {
	versions, err := kubetest.Versions()
	if err != nil {
		return err
	}
	r, err := newRunner(ctx)
	if err != nil {
		return err
	}
	var results []*result
	found := false
	for _, v := range versions {
		var res *result
		if minor == "" || minor == v.Minor() {
			found = true
			res, err = r.test(ctx, v)
		} else {
			res, err = readResult(v)
		}
		if err != nil {
			return err
		}
		if res == nil {
			fmt.Printf("\nKubernetes %s: no result. Test it with make test-matrix ARGS=-minor=%s\n", v.Kubernetes, v.Minor())
			continue
		}
		results = append(results, res)
	}
	if !found {
		return fmt.Errorf("-minor=%s: test/controlplane does not have this version", minor)
	}
	return report(results)
}

// report prints the table and writes the page.
func report(results []*result) error {
	fmt.Print("\n" + storyTable(results))
	if err := os.WriteFile(page, []byte(render(results)), 0o644); err != nil {
		return err
	}
	for _, r := range results {
		if r.count(passed) < len(stories) {
			return errFailed
		}
	}
	return nil
}
