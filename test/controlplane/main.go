// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Command controlplane is a Kubernetes control plane in one program: the real
// etcd, kube-apiserver, kube-controller-manager and kube-scheduler, each as a
// subcommand with its own flags, and "up", which runs all of them on free loopback
// ports. Package supervise tells what such a control plane has and what it lacks.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"

	"github.com/storage-controller/storage-controller/test/controlplane/supervise"
)

const usage = `usage: controlplane up --dir D [flags]                           start a control plane
       controlplane down --dir D                                 end it
       controlplane stop|start|restart --dir D COMPONENT         one of its components
       controlplane etcd|apiserver|controller-manager|scheduler  run a component with its own flags
`

var errUsage = errors.New("wrong usage")

func main() {
	if len(os.Args) < 2 {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	command, args := os.Args[1], os.Args[2:]
	switch command {
	case supervise.Etcd:
		etcdmain.Main(os.Args[1:])
	case supervise.APIServer:
		os.Exit(run(apiserver.NewAPIServerCommand(), args))
	case supervise.ControllerManager:
		os.Exit(run(controllermanager.NewControllerManagerCommand(), args))
	case supervise.Scheduler:
		os.Exit(run(scheduler.NewSchedulerCommand(), args))
	default:
		os.Exit(exitCode(dispatch(command, args)))
	}
}

// run runs a component of Kubernetes until it is told to end.
func run(c *cobra.Command, args []string) int {
	c.SetArgs(args)
	return cli.Run(c)
}

func exitCode(err error) int {
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return 0
	case errors.Is(err, errUsage):
		fmt.Fprintf(os.Stderr, "controlplane: %v\n%s", err, usage)
		return 2
	}
	fmt.Fprintf(os.Stderr, "controlplane: %v\n", err)
	return 1
}

// dispatch does what a command line other than that of a component asks for.
func dispatch(command string, args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	fs := flag.NewFlagSet("controlplane "+command, flag.ContinueOnError)
	o := supervise.Options{}
	fs.StringVar(&o.Dir, "dir", "", "directory for data, logs and the kubeconfig (required)")
	if command == "up" {
		o.AddFlags(fs)
	}
	if err := fs.Parse(args); errors.Is(err, flag.ErrHelp) {
		return err
	} else if err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	if err := o.Validate(); err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	switch {
	case command == "up" && fs.NArg() == 0 && o.Detach:
		return supervise.Detach(ctx, o, os.Stdout)
	case command == "up" && fs.NArg() == 0:
		return supervise.Up(ctx, o, os.Stdout)
	case command == "down" && fs.NArg() == 0:
		return supervise.Down(o.Dir)
	case (command == "stop" || command == "start" || command == "restart") && fs.NArg() == 1:
		return supervise.Control(o.Dir, command, fs.Arg(0))
	}
	return fmt.Errorf("%w: %q", errUsage, strings.Join(append([]string{command}, args...), " "))
}
