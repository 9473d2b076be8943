// Command controlplane is a Kubernetes control plane in one program: the real
// etcd, kube-apiserver, kube-controller-manager and kube-scheduler, each as a
// subcommand, and "up" and "down", which run all of them on free loopback ports.
//
// There is no kubelet. Nodes are objects that a test makes, and a test plays what a
// kubelet would do: status.volumesInUse and status.volumesAttached of a Node,
// which the attach-detach controller reads, and the end of a pod that is being
// deleted, which it must delete by force.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

const usage = `usage: controlplane up --dir D [flags]      start a control plane
       controlplane down --dir D            end it
       controlplane stop|start|restart --dir D COMPONENT
       controlplane etcd|apiserver|controller-manager|scheduler [flags of the component]
`

func main() {
	if len(os.Args) < 2 {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	command, args := os.Args[1], os.Args[2:]
	switch command {
	case etcd:
		etcdmain.Main(os.Args[1:])
		return
	case apiServer:
		c := apiserver.NewAPIServerCommand()
		c.SetArgs(args)
		os.Exit(cli.Run(c))
	case controllerManager:
		c := controllermanager.NewControllerManagerCommand()
		c.SetArgs(args)
		os.Exit(cli.Run(c))
	case schedulerName:
		c := scheduler.NewSchedulerCommand()
		c.SetArgs(args)
		os.Exit(cli.Run(c))
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	err := dispatch(ctx, command, args)
	switch {
	case errors.Is(err, flag.ErrHelp):
	case errors.Is(err, errUsage):
		fmt.Fprintf(os.Stderr, "controlplane: %v\n%s", err, usage)
		os.Exit(2)
	case err != nil:
		fmt.Fprintf(os.Stderr, "controlplane: %v\n", err)
		os.Exit(1)
	}
}

var errUsage = errors.New("wrong usage")

func dispatch(ctx context.Context, command string, args []string) error {
	fs := flag.NewFlagSet("controlplane "+command, flag.ContinueOnError)
	o := options{}
	fs.StringVar(&o.dir, "dir", "", "directory for data, logs and the kubeconfig (required)")
	components := ""
	if command == "up" {
		fs.StringVar(&components, "components", controllerManager+","+schedulerName, "what to run besides etcd and the API server")
		fs.BoolVar(&o.audit, "audit", false, "write an audit log of all requests to audit.log")
		fs.BoolVar(&o.stopWithStdin, "stop-with-stdin", false, "end when standard input does, and so with the process that holds its other end")
		fs.BoolVar(&o.detach, "detach", false, "return when the control plane is ready and leave it running")
	}
	if err := fs.Parse(args); err != nil {
		return err
	}
	if o.dir == "" {
		return fmt.Errorf("%w: --dir is missing", errUsage)
	}
	switch {
	case command == "up" && fs.NArg() == 0:
		for c := range strings.SplitSeq(components, ",") {
			if c == "" {
				continue
			}
			if c != controllerManager && c != schedulerName {
				return fmt.Errorf("%w: --components: unknown component %q", errUsage, c)
			}
			o.components = append(o.components, c)
		}
		if o.detach {
			return detach(ctx, o, args)
		}
		return up(ctx, o)
	case command == "down" && fs.NArg() == 0:
		return down(o.dir)
	case slices.Contains([]string{"stop", "start", "restart"}, command) && fs.NArg() == 1:
		return control(o.dir, command, fs.Arg(0))
	}
	return fmt.Errorf("%w: %q", errUsage, strings.Join(append([]string{command}, args...), " "))
}
