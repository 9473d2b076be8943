// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package supervise runs a Kubernetes control plane out of child processes:
// etcd, kube-apiserver with RBAC, and, where they are wanted,
// kube-controller-manager and kube-scheduler. The components are subcommands of
// the program that calls [Up], which has to provide them.
//
// Everything listens on loopback only. All state is in one directory:
//
//	kubeconfig        that of an administrator (group system:masters)
//	COMPONENT.log     what a component printed; up.log with --detach
//	audit.log         one JSON object per line, with --audit
//	pid, control      the supervising process, and the socket that it obeys
//	etcd, …           data; a later "up" in the same directory reuses it
//
// The controller manager runs the controllers that have to do with volumes, and
// none that watches over nodes. There is no kubelet. The user of such a
// control plane makes Node and CSINode objects and plays the kubelet:
//
//   - Nodes need no heartbeat, and get no taint for being new.
//   - A scheduled pod stays Pending until the user writes its status. A
//     StatefulSet continues after each pod only with podManagementPolicy Parallel.
//   - A deleted pod that has a node goes away only when it is deleted with a grace
//     period of 0, or about a minute after its Node: pods of nodes that are gone are
//     collected as garbage. After that the attach-detach controller detaches its volumes.
//   - The attach-detach controller writes status.volumesAttached of a Node and
//     waits, before it detaches, until the volume is missing in status.volumesInUse.
//     A Node whose volumesInUse is never written detaches at once.
package supervise

import (
	"errors"
	"flag"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

// The components, by the names of their subcommands and of their log files.
const (
	Etcd              = "etcd"
	APIServer         = "apiserver"
	ControllerManager = "controller-manager"
	Scheduler         = "scheduler"
)

// Options is what a control plane is asked for.
type Options struct {
	// Dir holds everything that the control plane writes. Required.
	Dir string
	// Components to run besides etcd and the API server, which always run:
	// "controller-manager", "scheduler", both, or none.
	Components []string
	// Audit makes the API server write audit.log: every request at level
	// Metadata, without the stage RequestReceived, before its response is complete.
	Audit bool
	// StopWithStdin ends the control plane when its standard input does, and so
	// with the process that holds the other end of a pipe, however that dies.
	StopWithStdin bool
	// RemoveDir removes Dir at the end.
	RemoveDir bool
	// Detach makes "up" return when the control plane is ready.
	Detach bool
}

// AddFlags registers the flags of "up". The flag for Dir is not among them.
func (o *Options) AddFlags(fs *flag.FlagSet) {
	o.Components = []string{ControllerManager, Scheduler}
	fs.Func("components", "what to run besides etcd and the API server (default "+strings.Join(o.Components, ",")+")",
		func(value string) error {
			o.Components = nil
			if value != "" {
				o.Components = strings.Split(value, ",")
			}
			return nil
		})
	fs.BoolVar(&o.Audit, "audit", false, "write an audit log of all requests to audit.log")
	fs.BoolVar(&o.StopWithStdin, "stop-with-stdin", false, "end when standard input does, and so with the process that holds its other end")
	fs.BoolVar(&o.RemoveDir, "remove-dir", false, "remove the directory at the end")
	fs.BoolVar(&o.Detach, "detach", false, "return when the control plane is ready and leave it running")
}

// flags are the flags that make Options equal to o again, without --detach.
func (o Options) flags() []string {
	return []string{
		"--dir=" + o.Dir,
		"--components=" + strings.Join(o.Components, ","),
		fmt.Sprintf("--audit=%t", o.Audit),
		fmt.Sprintf("--stop-with-stdin=%t", o.StopWithStdin),
		fmt.Sprintf("--remove-dir=%t", o.RemoveDir),
	}
}

// Validate reports everything that is wrong with o.
func (o Options) Validate() error {
	var errs []error
	if o.Dir == "" {
		errs = append(errs, errors.New("--dir is missing"))
	}
	for i, c := range o.Components {
		if c != ControllerManager && c != Scheduler {
			errs = append(errs, fmt.Errorf("--components: unknown component %q (known are %s and %s)", c, ControllerManager, Scheduler))
		} else if slices.Contains(o.Components[:i], c) {
			errs = append(errs, fmt.Errorf("--components: %s is given twice", c))
		}
	}
	return errors.Join(errs...)
}

// all are the components of o in the order of their start.
func (o Options) all() []string {
	return append([]string{Etcd, APIServer}, o.Components...)
}

func (o Options) file(name string) string { return filepath.Join(o.Dir, name) }
