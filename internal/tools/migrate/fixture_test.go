// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/internal/app"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/internal/tools/migrate"
)

const image = "storage-controller:dev"

// flags are those of the program.
var flags = sync.OnceValue(func() map[string]map[string]migrate.Flag {
	all := map[string]map[string]migrate.Flag{}
	for name, register := range map[string]func(*pflag.FlagSet){
		"csi-provisioner": app.Provision.Register, "csi-attacher": app.Attach.Register, "csi-resizer": app.Resize.Register,
		"csi-snapshotter": app.Snapshot.Register, "livenessprobe": app.RegisterLivenessprobe, "topolvm": app.Topolvm(false).Register,
	} {
		fs := pflag.NewFlagSet(name, pflag.ContinueOnError)
		register(fs)
		all[name] = map[string]migrate.Flag{}
		fs.VisitAll(func(f *pflag.Flag) {
			today, _ := app.Retired(f.Name)
			all[name][f.Name] = migrate.Flag{Bare: f.NoOptDefVal != "", Today: today}
		})
	}
	return all
})

func tables() migrate.Tables {
	return migrate.Tables{Flags: flags(), Gates: settings.KnownGates(), Grants: testGrants}
}

// testGrants returns a few permissions of the provisioner.
func testGrants(args []string, d migrate.Driver, namespace string) []rbac.Grant {
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
	if d.Topology {
		grants = append(grants, rbac.Grant{File: "provisioner-topology", Accesses: []rbac.Access{{Verb: "watch", Resource: "nodes"}}})
	}
	return grants
}

// deployment returns a Deployment with containers, each given as the lines of an item.
func deployment(containers ...string) string {
	return `apiVersion: apps/v1
kind: Deployment
metadata:
  name: d
spec:
  strategy: {type: Recreate}
  template:
    spec:
      securityContext: {runAsUser: 1}
      containers:
` + strings.Join(containers, "")
}

// sidecar returns the lines of a container with the socket /csi/csi.sock.
func sidecar(name string, args ...string) string {
	return container(name, "", slices.Insert(args, 0, "--csi-address=/csi/csi.sock")...)
}

// container returns the lines of a container with more fields.
func container(name, fields string, args ...string) string {
	quoted := []string{}
	for _, a := range args {
		quoted = append(quoted, fmt.Sprintf("%q", a))
	}
	const lines = "      - name: %s\n        image: example/%[1]s:v9\n        args: [%s]\n%s"
	return fmt.Sprintf(lines, name, strings.Join(quoted, ", "), fields)
}

func migrated(t *testing.T, manifest string, perRole bool) migrate.Result {
	t.Helper()
	r, err := migrate.Run([]byte(manifest), migrate.Options{Image: image, PerRole: perRole, Tables: tables()})
	if err != nil {
		t.Fatal(err)
	}
	return r
}
