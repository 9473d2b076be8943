// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"slices"
	"strconv"
	"strings"

	"github.com/storage-controller/storage-controller/internal/rbac"
)

// tables returns a copy of the flags of the program, so that this package can be tested without
// it. A test of the program compares its results with the same files in testdata.
func tables() Tables {
	words := strings.Fields
	common := words(`config csi-address exit-on-connection-loss max-grpc-log-length kubeconfig master kube-api-qps kube-api-burst
		leader-election=bool leader-election-namespace leader-election-lease-duration=15s leader-election-renew-deadline=10s
		leader-election-retry-period=5s leader-election-labels http-endpoint metrics-address metrics-path enable-pprof=bool driver-health-endpoint probe-timeout
		automaxprocs=bool feature-gates version=bool v vmodule logging-format log-flush-frequency logtostderr=bool alsologtostderr=bool stderrthreshold`)
	shared := words(`timeout retry-interval-start retry-interval-max`)
	roles := []Role{
		{Name: "provisioner", Options: append(words(`worker-threads default-fstype volume-name-prefix volume-name-uuid-length strict-topology=bool
			immediate-topology=bool extra-create-metadata=bool controller-publish-readonly=bool prevent-volume-mode-conversion=bool
			cloning-protection-threads node-deployment=bool node-deployment-immediate-binding=bool`), shared...)},
		{Name: "attacher", Options: append(words(`worker-threads default-fstype resync reconcile-sync max-entries`), shared...)},
		{Name: "capacity", Options: append(words(`node-deployment=bool enable-capacity=bool capacity-threads capacity-poll-interval
			capacity-ownerref-level capacity-for-immediate-binding=bool kube-api-capacity-qps kube-api-capacity-burst`), shared...)},
		{Name: "nodecontroller", Options: append(words(`leader-election-id skip-node-finalize=bool enable-webhooks=bool cert-dir`),
			shared...)},
		{Name: "resizer", Options: append(words(`workers resync-period handle-volume-inuse-error=bool extra-modify-metadata=bool
			resize-timeout modify-timeout`), shared...), Aliases: words("worker-threads resync")},
		{Name: "snapshotter", Options: append(words(`worker-threads resync-period snapshot-name-prefix snapshot-name-uuid-length
			groupsnapshot-name-prefix groupsnapshot-name-uuid-length extra-create-metadata=bool node-deployment=bool`), shared...)},
	}
	t := Tables{
		Grants: testGrants,
		Commands: map[string][]Flag{
			"provision":      flagsOf(common, roles[0].Options, roles[2].Options),
			"attach":         flagsOf(common, roles[1].Options),
			"resize":         flagsOf(common, roles[4].Options),
			"snapshot":       flagsOf(common, roles[5].Options),
			"nodecontroller": flagsOf(common, words("csi-socket"), roles[3].Options),
			"topolvm": flagsOf(words("leader-election=bool!"), common, words(`csi-socket metrics-bind-address controllers minimum-allocation-xfs
				zap-devel=bool`), roles[0].Options, roles[2].Options, roles[3].Options, roles[4].Options, roles[5].Options),
			"all": flagsOf(common, words("csi-socket controllers"), roles[0].Options, roles[1].Options, roles[2].Options,
				roles[3].Options, roles[4].Options, roles[5].Options),
		},
		Gates: words(`Topology VolumeAttributesClass CrossNamespaceVolumeDataSource ReleaseLeaderElectionOnExit HonorPVReclaimPolicy
			RecoverVolumeExpansionFailure AnnotateFsResize CSIVolumeGroupSnapshot`),
	}
	for i := range roles {
		for j, o := range roles[i].Options {
			roles[i].Options[j], _, _ = strings.Cut(o, "=")
		}
	}
	t.Roles = roles
	for _, r := range roles {
		for _, o := range r.Options {
			if !strings.HasPrefix(o, r.Name+"-") {
				for _, command := range []string{"all", "topolvm"} {
					t.Commands[command] = append(t.Commands[command], Flag{Name: r.Name + "-" + o})
				}
			}
		}
	}
	return t
}

// flagsOf parses lists of NAME, NAME=bool, NAME=bool! for one that is true by default, and NAME=DEFAULT.
func flagsOf(lists ...[]string) []Flag {
	var flags []Flag
	for _, item := range slices.Concat(lists...) {
		name, def, _ := strings.Cut(item, "=")
		f := Flag{Name: name, Default: def, Bare: strings.HasPrefix(def, "bool")}
		if f.Bare {
			f.Default = strconv.FormatBool(def == "bool!")
		}
		flags = append(flags, f)
	}
	return flags
}

// testGrants returns a few permissions of the provisioner.
func testGrants(args []string, d Driver, namespace string) []rbac.Grant {
	grants := []rbac.Grant{{File: "provisioner", Accesses: []rbac.Access{
		{Verb: "get", Resource: "persistentvolumeclaims"}, {Verb: "patch", Resource: "persistentvolumeclaims"},
	}}}
	if slices.Contains(args, "--leader-election") {
		grants = append(grants, rbac.Grant{File: "provisioner-leader-election", Accesses: []rbac.Access{
			{Verb: "get", Group: "coordination.k8s.io", Resource: "leases", Namespace: namespace},
		}})
	}
	if d.Snapshot {
		grants = append(grants, rbac.Grant{File: "provisioner-snapshots", Accesses: []rbac.Access{
			{Verb: "watch", Group: "snapshot.storage.k8s.io", Resource: "volumesnapshots"},
		}})
	}
	return grants
}
