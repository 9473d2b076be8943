// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
)

// ports are loopback ports, by component; those of etcd's peers stand under
// "peer". They stay the same when a component is restarted.
type ports map[string]int

const peer = "etcd-peer"

// Ports are looked for below the range that Linux (from 32768) and others (from 49152)
// use for outgoing connections and for listeners that want any port. So no process but another
// control plane is likely to take one while a component is being restarted.
const firstPort, lastPort = 20000, 29999

// freePorts finds unused ports. Another process may take one before
// its component does; [Up] tries again with others then.
func freePorts() (ports, error) {
	p := ports{}
	for _, name := range []string{Etcd, peer, APIServer, ControllerManager, Scheduler} {
		for attempt := 0; p[name] == 0; attempt++ {
			l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", firstPort+rand.IntN(lastPort-firstPort+1)))
			if err == nil {
				defer l.Close() // only after all were found, so that they differ
				p[name] = l.Addr().(*net.TCPAddr).Port
			} else if attempt == 1000 {
				return nil, fmt.Errorf("looking for a free port: %w", err)
			}
		}
	}
	return p, nil
}

// errPortTaken is a start that failed because a port was taken meanwhile.
var errPortTaken = errors.New("another process took a port meanwhile")

// healthURL answers 200 when the component serves. Every one of these is open to all.
func (p ports) healthURL(component string) string {
	scheme, path := "https", "/healthz"
	switch component {
	case Etcd:
		scheme, path = "http", "/readyz"
	case APIServer:
		path = "/readyz" // includes the roles of RBAC being there
	}
	return fmt.Sprintf("%s://127.0.0.1:%d%s", scheme, p[component], path)
}

// controllers are those that have to do with volumes, and what cleans up after tests.
var controllers = []string{
	"persistentvolume-binder-controller",
	"persistentvolume-expander-controller",
	"persistentvolume-attach-detach-controller",
	"persistentvolume-protection-controller",
	"persistentvolumeclaim-protection-controller",
	"ephemeral-volume-controller",
	"garbage-collector-controller",
	"pod-garbage-collector-controller", // pods of nodes that are gone keep their claims
	"statefulset-controller",
	"namespace-controller",
}

// arguments is the command line of a component, without its name.
func (o Options) arguments(component string, p ports) []string {
	switch component {
	case Etcd:
		return o.etcdArguments(p)
	case APIServer:
		return o.apiServerArguments(p)
	}
	args := []string{
		"--bind-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", p[component]),
		"--v=1",
	}
	if component == Scheduler {
		return append(args, "--config="+o.file("scheduler.yaml"))
	}
	return append(args,
		"--kubeconfig="+o.file("kubeconfig"),
		"--leader-elect=false",
		"--kube-api-qps=2000",
		"--kube-api-burst=4000",
		"--controllers="+strings.Join(controllers, ","),
		// The binder repeats what ended in a conflict no sooner than this (default: 15s).
		"--pvclaimbinder-sync-period=2s",
		"--attach-detach-reconcile-sync-period=5s",
	)
}

func (o Options) etcdArguments(p ports) []string {
	url := func(name string) string { return fmt.Sprintf("http://127.0.0.1:%d", p[name]) }
	return []string{
		"--name=default",
		"--data-dir=" + o.file("etcd"),
		"--unsafe-no-fsync", // a machine that crashes takes the tests with it
		"--log-level=warn",
		"--listen-client-urls=" + url(Etcd),
		"--advertise-client-urls=" + url(Etcd),
		"--listen-peer-urls=" + url(peer),
		"--initial-advertise-peer-urls=" + url(peer),
		"--initial-cluster=default=" + url(peer),
		"--quota-backend-bytes=4294967296",
	}
}

func (o Options) apiServerArguments(p ports) []string {
	args := []string{
		fmt.Sprintf("--etcd-servers=http://127.0.0.1:%d", p[Etcd]),
		"--bind-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", p[APIServer]),
		// Without these two it looks for an address of the machine that is not loopback.
		"--advertise-address=127.0.0.1",
		"--endpoint-reconciler-type=none",
		"--cert-dir=" + o.file("certificates"),
		"--token-auth-file=" + o.file("tokens.csv"),
		"--authorization-mode=RBAC",
		"--service-account-key-file=" + o.file("service-account.key"),
		"--service-account-signing-key-file=" + o.file("service-account.key"),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-cluster-ip-range=10.0.0.0/24",
		// The controllers that make service accounts and that end the taint of new nodes do not run.
		"--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
		"--feature-gates=CrossNamespaceVolumeDataSource=true", // or the field is dropped
		"--max-requests-inflight=2000",
		"--max-mutating-requests-inflight=1000",
		"--v=1",
	}
	if o.Audit {
		args = append(args,
			"--audit-policy-file="+o.file("audit-policy.yaml"),
			"--audit-log-path="+o.file("audit.log"),
			"--audit-log-mode=blocking-strict",
			"--audit-log-format=json",
			"--audit-log-maxsize=4096", // megabytes: it is never rotated
		)
	}
	return args
}
