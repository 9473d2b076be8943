package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// manual is what --help of a command says besides its flags.
type manual struct{ long, example string }

// manuals is by the names of commands below the program. What a command says about
// itself wins.
var manuals = map[string]manual{
	"": {example: `  storage-controller all --csi-address=/csi/csi.sock --leader-election --http-endpoint=:8080
  storage-controller attach --help
  storage-controller help config validate`},
	"all": {`Run every role that the driver supports in one process: the provisioner, the
attacher, the publisher of capacity and the nodecontroller share one connection to
the driver, one set of watches and one address for metrics and health.

The capabilities of the driver decide which roles run; --controllers chooses. Each
role works while it holds its own Lease, which is that of the sidecar that it
replaces. Capacity is published where the environment variables NAMESPACE and
POD_NAME are set. There is no rate limit to the API server unless one is set.

After SIGTERM running calls are finished, volumes saved and the Leases released.`,
		`  storage-controller all --csi-address=/csi/csi.sock --leader-election --http-endpoint=:8080
  storage-controller all --controllers=provisioner,attacher --attacher-worker-threads=20
  storage-controller all --config=/etc/storage-controller/config.yaml`},
	"provision": {`Create a volume and a PersistentVolume for each claim of the driver, and delete
them again. Takes the place of csi-provisioner, flag for flag, and holds the same
Lease, so that the two never work at the same time.

--enable-capacity publishes capacity too; it needs the environment variables
NAMESPACE and POD_NAME. --node-deployment, for one instance on each node, needs
NODE_NAME.`,
		`  storage-controller provision --csi-address=/csi/csi.sock --leader-election --http-endpoint=:8080
  storage-controller provision --enable-capacity --capacity-ownerref-level=2
  storage-controller provision --provisioning-protection=always --secret-namespaces=storage`},
	"attach": {`Publish volumes to nodes and take them back, as VolumeAttachments ask for it. Takes
the place of csi-attacher, flag for flag, and holds the same Lease, so that the two
never work at the same time.`,
		`  storage-controller attach --csi-address=/csi/csi.sock --leader-election --http-endpoint=:8080
  storage-controller attach --worker-threads=50 --timeout=1m --reconcile-sync=5m`},
	"capacity": {`Publish a CSIStorageCapacity for each StorageClass and topology segment, so that the
scheduler puts pods where there is room for their volumes. Takes the place of
csi-provisioner --enable-capacity. The environment variable NAMESPACE names the
namespace of the objects, POD_NAME the pod by which their owner is found.

In a process with the provisioner (all, provision --enable-capacity) a volume that is
made or deleted is noticed at once; here the driver has to be polled.`,
		`  storage-controller capacity --csi-address=/csi/csi.sock --leader-election
  storage-controller capacity --capacity-poll-interval=5m --capacity-threads=10 --kube-api-capacity-qps=0
  storage-controller capacity --node-deployment --capacity-ownerref-level=0`},
	"nodecontroller": {`Clean up after nodes that are gone, and help claims and pods of volumes that live on
one node. Takes the place of the Kubernetes side of topolvm-controller, for any driver.

Unless it is told otherwise it only reports: --node-cleanup=claims or volumes deletes,
and needs --leader-election. --profile sets what a known driver expects, and
--print-config says where each setting comes from.`,
		`  storage-controller nodecontroller --csi-address=/csi/csi.sock --leader-election
  storage-controller nodecontroller --driver-name=local.example.com --node-cleanup=dry-run
  storage-controller nodecontroller --profile=topolvm --leader-election --print-config`},
	"nodecontroller cleanup": {"", `  storage-controller nodecontroller cleanup --driver-name=local.example.com --node=worker-7
  storage-controller nodecontroller cleanup --driver-name=local.example.com --node=worker-7 --volumes --yes`},
	"nodecontroller remove-finalizers": {`Take the finalizer of the nodecontroller from all nodes. Do this before it is
uninstalled: a node that keeps the finalizer could not be deleted any more. Stop the
nodecontroller first, or have --node-finalizer-mode be another than manage, or it puts
the finalizer back. The command looks again after some seconds; when the finalizer is
back it names who holds the Lease, and the exit code is 1.`,
		`  storage-controller nodecontroller remove-finalizers --driver-name=local.example.com --dry-run
  storage-controller nodecontroller remove-finalizers --driver-name=local.example.com`},
	"config": {`Show or check the configuration that "all" would run with. Nothing is started, and
neither the driver nor the API server is asked.`,
		`  storage-controller config print --config=config.yaml
  storage-controller config validate --config=config.yaml`},
	"config print": {"", `  storage-controller config print
  storage-controller config print --config=config.yaml --attacher-timeout=1m`},
	"config validate": {`Check the flags, the environment and the file that "all" would run with, and report
everything that is wrong. The exit code is 0 when all is well.`,
		`  storage-controller config validate --config=config.yaml`},
	"version": {`Print the name of the program and its version.`, `  storage-controller version`},
	"help":    {"", "  storage-controller help\n  storage-controller help config validate"},
	"completion": {`Print a script by which a shell completes the commands and flags of this program.
The help of each shell says how to load it.`,
		`  storage-controller completion bash > /etc/bash_completion.d/storage-controller
  storage-controller completion zsh --help`},
	"completion bash":       {"", `  storage-controller completion bash > /etc/bash_completion.d/storage-controller`},
	"completion zsh":        {"", `  storage-controller completion zsh > "${fpath[1]}/_storage-controller"`},
	"completion fish":       {"", `  storage-controller completion fish > ~/.config/fish/completions/storage-controller.fish`},
	"completion powershell": {"", `  storage-controller completion powershell > storage-controller.ps1`},
}

// complete adds to root the commands that every program of cobra has, with mistakes
// that are told as those of our own are, and gives all commands their manuals.
func complete(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		switch cmd.Name() {
		case "help":
			cmd.Run, cmd.RunE = nil, help
		case "completion":
			cmd.Args = noArguments
			cmd.RunE = func(cmd *cobra.Command, _ []string) error {
				return &usageError{errors.New("a shell is needed: bash, zsh, fish or powershell"), cmd.UsageString()}
			}
			for _, shell := range cmd.Commands() {
				shell.Args = noArguments
			}
		}
	}
	describe(root)
	completeWords(root)
}

// help is that of cobra, which takes the name of a command that does not exist for success.
func help(cmd *cobra.Command, args []string) error {
	about, rest, err := cmd.Root().Find(args)
	if err != nil || len(rest) > 0 {
		return &usageError{fmt.Errorf("unknown command %q", strings.Join(args, " ")), cmd.UsageString()}
	}
	about.InitDefaultHelpFlag() // so that it is among the flags
	return about.Help()
}

func describe(cmd *cobra.Command) {
	_, name, _ := strings.Cut(cmd.CommandPath(), " ")
	m := manuals[name]
	if m.long != "" && (cmd.Long == "" || name == "completion") {
		cmd.Long = m.long
	}
	if cmd.Example == "" {
		cmd.Example = m.example
	}
	for _, sub := range cmd.Commands() {
		describe(sub)
	}
}

// seeHelp says where the help of cmd is for a program that was called name.
func seeHelp(cmd *cobra.Command, name string) string {
	command := cmd.CommandPath()
	if cmd.Name() == "help" {
		command = cmd.Root().Name()
	}
	if sub, ok := aliases[name]; ok && cmd.Name() == sub {
		command = name
	}
	return fmt.Sprintf("see %q", command+" --help")
}
