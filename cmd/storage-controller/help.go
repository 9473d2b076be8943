// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// manual is the help of a command besides its flags.
type manual struct{ long, example string }

// manuals holds the help by the name of the command. Texts in the definition of a command take precedence.
var manuals = map[string]manual{
	"": {example: `  storage-controller all --csi-address=/csi/csi.sock --leader-election --http-endpoint=:8080
  storage-controller attach --help
  storage-controller help config validate`},
	"topolvm": {`Run the controller side of TopoLVM in one process: its CSI service, with the
provisioner, the resizer, the snapshotter, the capacity role and the nodecontroller.
The roles call the service in memory. Other containers of the pod can call it on the
socket of --csi-socket, on every replica. topolvm-node and lvmd stay as they are.

Under the name topolvm-controller (a link to this program) only the service and the
nodecontroller run, with the defaults of topolvm-controller, so that the sidecars of
the pod can be replaced one by one.`, `  # The controller pod of TopoLVM, in place of its five containers:
  storage-controller topolvm
  # Beside csi-snapshotter, which calls the socket:
  storage-controller topolvm --controllers=-snapshotter`},
	"all": {`Run every role that the driver supports in one process: the provisioner, the attacher,
the resizer, the snapshotter, the capacity role and the nodecontroller share one
connection to the driver and one set of watches.

The capabilities of the driver decide which roles run, unless --controllers does. A role
works while it holds its own Lease, which is the Lease of the sidecar that it replaces.
Capacity is published if the environment variables NAMESPACE and POD_NAME are set. API
requests have no rate limit by default.

A role that cannot start, for example because a permission is missing, is disabled and
started again with back-off; the others work. /readyz?verbose and /statusz show it. A
role that --controllers names ends the process instead.

A flag of roles sets all roles that have it. With the name of a role as prefix it sets
that role only: --attacher-timeout, --resizer-leader-election. The list below contains
the prefixed flags of options that some roles share; the others exist, too. If roles have
different addresses of --http-endpoint, each address serves the metrics of its roles.

A section, after --, has the arguments of a sidecar as they are: its flags, with their
names, former names and defaults. Sections name the roles. The sections csi-provisioner,
csi-attacher, csi-resizer, csi-snapshotter, livenessprobe, capacity and nodecontroller
exist; NAME --help lists the flags of one. "config print" prints them as a file.

After SIGTERM, running calls are completed, the PersistentVolumes of created volumes are
written, and the Leases are released.`,
		`  storage-controller all -- csi-provisioner --csi-address=/csi/csi.sock --timeout=30s -- csi-attacher -csi-address=/csi/csi.sock -v=5
  storage-controller all --csi-address=/csi/csi.sock --leader-election --http-endpoint=:8080
  storage-controller all --controllers=provisioner,attacher --attacher-worker-threads=20
  storage-controller all --config=/etc/storage-controller/config.yaml`},
	"provision": {`Create a volume and a PersistentVolume for each PersistentVolumeClaim of the driver,
and delete released volumes. Replaces csi-provisioner with the same flags and the same
Lease, so that both never work at the same time.

--enable-capacity also publishes capacity; it requires the environment variables
NAMESPACE and POD_NAME. --node-deployment (distributed provisioning, one instance per
node) requires NODE_NAME.`,
		`  storage-controller provision --csi-address=/csi/csi.sock --leader-election --http-endpoint=:8080
  storage-controller provision --enable-capacity --capacity-ownerref-level=2
  storage-controller provision --provisioning-protection=always --secret-namespaces=storage`},
	"resize": {`Expand volumes whose PersistentVolumeClaims request more storage, and modify volumes whose
claims request another VolumeAttributesClass. Replaces csi-resizer with the same flags
and the same Lease, so that both never work at the same time.

The driver needs EXPAND_VOLUME of the controller or the node, or MODIFY_VOLUME.`,
		`  storage-controller resize --csi-address=/csi/csi.sock --leader-election --http-endpoint=:8080
  storage-controller resize --workers=50 --timeout=1m --handle-volume-inuse-error=false`},
	"attach": {`Publish volumes to nodes and unpublish them, as VolumeAttachments request. Replaces
csi-attacher with the same flags and the same Lease, so that both never work at the same
time.`,
		`  storage-controller attach --csi-address=/csi/csi.sock --leader-election --http-endpoint=:8080
  storage-controller attach --worker-threads=50 --timeout=1m --reconcile-sync=5m`},
	"snapshot": {`Create and delete the snapshots that VolumeSnapshotContents and
VolumeGroupSnapshotContents describe. Replaces csi-snapshotter with the same flags and the
same Lease, so that both never work at the same time. The snapshot-controller of the
cluster is still needed.

While the CRDs of external-snapshotter are not installed, it waits for them.`,
		`  storage-controller snapshot --csi-address=/csi/csi.sock --leader-election --http-endpoint=:8080
  storage-controller snapshot --snapshot-name-prefix=backup --extra-create-metadata --timeout=5m`},
	"livenessprobe": {`Serve the health of a CSI driver at /healthz: 200 if the driver answers Probe and is ready, 500
otherwise. Replaces livenessprobe with the same flags, in controller and node pods. It
calls no API server. A process with a role needs no such container: see
--driver-health-endpoint.`,
		`  storage-controller livenessprobe --csi-address=/csi/csi.sock --health-port=9808
  storage-controller livenessprobe --csi-address=/csi/csi.sock --http-endpoint=:9808 --probe-timeout=3s`},
	"capacity": {`Publish a CSIStorageCapacity for each StorageClass and topology segment, so that the
scheduler selects nodes with enough available capacity. Replaces csi-provisioner
--enable-capacity. The environment variable NAMESPACE sets the namespace of the objects,
and POD_NAME the pod whose owner becomes their owner.

In a process with the provisioner (all, provision --enable-capacity) the capacity is
refreshed when a volume is created or deleted; here it is only polled.`,
		`  storage-controller capacity --csi-address=/csi/csi.sock --leader-election
  storage-controller capacity --capacity-poll-interval=5m --capacity-threads=10 --kube-api-capacity-qps=0
  storage-controller capacity --node-deployment --capacity-ownerref-level=0`},
	"nodecontroller": {`Clean up PVCs and PVs of deleted nodes, and help PVCs and pods of node-local volumes.
For TopoLVM, run the command topolvm instead.

By default it only reports: --node-cleanup=claims or volumes deletes, and requires
--leader-election. --print-config prints the origin of each setting.`, ""},
	"nodecontroller remove-finalizers": {`Print the nodes with the finalizer of the nodecontroller; with --yes, remove it. Do this
when you uninstall the nodecontroller: afterwards nothing else removes the finalizer, and
a Node with it cannot be deleted. First stop the nodecontroller, or set
--node-finalizer-mode to another value than manage; otherwise it adds the finalizer
again. The command checks the nodes again after some seconds. If the finalizer is back,
the exit code is 1.`, ""},
	"config": {`Print or validate the configuration that "all" uses. Nothing is started, and neither the
driver nor the API server is called.`,
		`  storage-controller config print --config=config.yaml
  storage-controller config validate --config=config.yaml`},
	"config print": {"", `  storage-controller config print
  storage-controller config print --config=config.yaml --attacher-timeout=1m`},
	"config validate": {`Validate the flags, the environment and the file that "all" uses, and report every
error. The exit code is 0 if there is none.`,
		`  storage-controller config validate --config=config.yaml`},
	"version": {`Print the name of the program and its version.`, `  storage-controller version`},
	"help":    {"", "  storage-controller help\n  storage-controller help config validate"},
	"completion": {`Print a script with which a shell completes the commands and flags of this program.
The help of each shell explains how to load it.`,
		`  storage-controller completion bash > /etc/bash_completion.d/storage-controller
  storage-controller completion zsh --help`},
	"completion bash":       {"", `  storage-controller completion bash > /etc/bash_completion.d/storage-controller`},
	"completion zsh":        {"", `  storage-controller completion zsh > "${fpath[1]}/_storage-controller"`},
	"completion fish":       {"", `  storage-controller completion fish > ~/.config/fish/completions/storage-controller.fish`},
	"completion powershell": {"", `  storage-controller completion powershell > storage-controller.ps1`},
}

// finishCommands adds the standard commands of cobra to root, with usage errors like those of the other
// commands, and gives all commands their help.
func finishCommands(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		switch cmd.Name() {
		case "help":
			cmd.Run, cmd.RunE = nil, help
		case "completion":
			cmd.Args = noArguments
			cmd.RunE = func(cmd *cobra.Command, _ []string) error {
				return &usageError{errors.New("a shell is required: bash, zsh, fish or powershell")}
			}
			for _, shell := range cmd.Commands() {
				shell.Args = noArguments
			}
		}
	}
	describe(root)
	completeWords(root)
}

// help prints the help of a command. Unlike in cobra, an unknown command is an error.
func help(cmd *cobra.Command, args []string) error {
	about, rest, err := cmd.Root().Find(args)
	if err != nil || len(rest) > 0 {
		return &usageError{fmt.Errorf("unknown command %q", strings.Join(args, " "))}
	}
	about.InitDefaultHelpFlag() // cobra adds it only when the command runs
	return about.Help()
}

// describe sets the help of cmd and its subcommands.
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

// seeHelp returns the command that prints the help of cmd, for a program that was called name.
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
