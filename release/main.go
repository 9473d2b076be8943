// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Command release builds the artifacts of a release without a container engine, and verifies them.
//
// One commit and version always give the same bytes: nothing depends on the time, the machine or the path of the
// source. It is a Go module of its own, so that the product does not depend on its libraries.
package main

import (
	"context"
	"debug/buildinfo"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
)

const usage = `usage: release build --version v1.2.3 [--source DIR] [--out DIR] [--repository NAME] [--download-url URL]
       release verify DIR
       release licences PROGRAM

build writes into DIR (default dist/VERSION of the source):
  storage-controller_VERSION_OS_ARCH.tar.gz or .zip   the program
  images                                              OCI image layout: storage-controller and one image per sidecar
  storage-controller-VERSION.tgz, chart               the Helm chart, as a file and as OCI image layout,
  storage-controller-library-VERSION.tgz              and the library chart
  krew                                                krew manifests of the kubectl plugins
  *.cdx.json                                          CycloneDX SBOM of each artifact
  release-notes.md, provenance.json, SHA256SUMS

verify checks the digests, that nothing is missing or added, that the SBOMs list the modules of the programs, and that
the programs in the images start under each name.

licences prints the licences of the modules in a program, for the Dockerfile.
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errors.New("a command is required\n" + usage)
	}
	flags := flag.NewFlagSet("release", flag.ContinueOnError)
	flags.Usage = func() { fmt.Fprint(os.Stderr, usage) }
	switch args[0] {
	case "build":
		var o options
		flags.StringVar(&o.version, "version", "", "")
		flags.StringVar(&o.source, "source", "..", "")
		flags.StringVar(&o.out, "out", "", "")
		flags.StringVar(&o.repository, "repository", "", "")
		flags.StringVar(&o.downloadURL, "download-url", "", "")
		if err := flags.Parse(args[1:]); err != nil {
			return err
		}
		if flags.NArg() > 0 {
			return fmt.Errorf("unexpected argument %q", flags.Arg(0))
		}
		o.platforms = platforms
		return build(ctx, o)
	case "verify":
		if len(args) != 2 {
			return errors.New("verify needs one directory\n" + usage)
		}
		return verify(ctx, args[1])
	case "licences":
		if len(args) != 2 {
			return errors.New("licences needs one program\n" + usage)
		}
		info, err := buildinfo.ReadFile(args[1])
		if err != nil {
			return err
		}
		all, err := licences(ctx, "..", info)
		if err != nil {
			return err
		}
		_, err = os.Stdout.Write(thirdParty(all))
		return err
	}
	return fmt.Errorf("unknown command %q\n%s", args[0], usage)
}
