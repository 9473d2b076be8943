// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const securityPage = "../../docs/security.md"

// inputs lists what the program reads of objects, by who can write it with the default roles of Kubernetes: fields, what a wrong
// value can cause, and what checks it. Fields of the API that the API server validates are not listed.
var inputs = []struct{ names, writer, effect, check string }{
	{"`storage-controller.io/provisioning`, `storage-controller.io/provisioning-request`", "PVC, its user",
		"CreateVolume; the PVC stays Terminating", "the hash, and the checks of a new request; the size of a clone in the response"},
	{"`volume.kubernetes.io/storage-provisioner`, `volume.beta.kubernetes.io/storage-provisioner`, `pv.kubernetes.io/migrated-to`",
		"PVC, its user; PV", "the driver provisions the PVC",
		"the StorageClass must name the driver, or the in-tree plugin that it replaces"},
	{"`volume.kubernetes.io/selected-node`, `volume.alpha.kubernetes.io/selected-node`", "PVC, its user",
		"where the volume is",
		"Node and CSINode must exist, and `allowedTopologies` admit them"},
	{"`volume.beta.kubernetes.io/storage-class`", "PVC, its user", "the StorageClass", "it must exist, and name the driver"},
	{"`spec.storageClassName`, `spec.dataSource`", "PVC, its user", "labels of metrics", "only existing classes and known kinds"},
	{"`spec.dataSource`, `spec.dataSourceRef`", "PVC, its user", "a copy of data",
		"driver, size, volume mode; a ReferenceGrant for another namespace"},
	{"annotations that the StorageClass names in a template", "PVC, its user", "the name of a Secret",
		"the class decides the namespace; `--secret-namespaces`"},
	{"`volume.kubernetes.io/storage-resizer`, `volume.kubernetes.io/node-expansion-not-required`", "PVC, its user",
		"the driver expands an in-tree volume; the kubelet does not", "the PV must be of the plugin that the driver replaces"},
	{"`<driver>/node-cleanup`", "PVC, its user; Node, PV", "opts in to or out of the cleanup after a deleted node",
		"`--node-cleanup` must permit it; breaker and grace period"},
	{"`provisioner.storage.kubernetes.io/cloning-protection`, `provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection`",
		"PVC, VolumeSnapshot, its user", "it can be copied while it is being deleted", "removed after the last copy"},
	{"`<driver>/pvc`, `topolvm.io/pvc`, `topolvm.cybozu.com/pvc`", "PVC, its user", "the PVC stays Terminating",
		"removed once no pod waits for the PVC"},
	{"`<driver>/last-resizefs-requested-at`, `topolvm.io/last-resizefs-requested-at`, `capacity.<driver>/<device class>`",
		"Pod, its user", "when its expansion is requested again; where it is scheduled", "only that pod"},
	{"`kubectl.kubernetes.io/last-applied-configuration`", "any", "none", "the caches drop it"},
	{"`storage-controller.io/approve`, `storage-controller.io/approve-until`, `storage-controller.io/holder`, " +
		"`storage-controller.io/last-look`, `storage-controller.io/mode`, `storage-controller.io/topology-key`, " +
		"`storage-controller.io/driver`", "ConfigMap in the driver's namespace", "the cleanup after deleted nodes",
		"write permission in that namespace"},
	{"`csi.alpha.kubernetes.io/node-id`, `storage-controller.io/former-node-ids`, `storage-controller.io/migrated`, " +
		"`storage-controller.io/publish-secret`, `storage-controller.io/volume-handle`, `external-attacher/<driver>`",
		"VolumeAttachment, administrators", "attach and detach", "cluster permissions"},
	{"`snapshot.storage.kubernetes.io/…`, `groupsnapshot.storage.k8s.io/…`, `groupsnapshot.storage.kubernetes.io/…`, " +
		"`storage-controller.io/create-snapshot`", "VolumeSnapshotContent, VolumeGroupSnapshotContent, administrators",
		"snapshots and their Secrets", "cluster permissions; `--secret-namespaces`"},
	{"`storage-controller.io/claim`, `storage-controller.io/volume-name`", "LogicalVolume, administrators", "opt-outs; AlreadyExists",
		"cluster permissions"},
	{"`pv.kubernetes.io/provisioned-by`, `volume.kubernetes.io/controller-modify-secret-name`, " +
		"`volume.kubernetes.io/controller-modify-secret-namespace`, `volume.kubernetes.io/provisioner-deletion-secret-name`, " +
		"`volume.kubernetes.io/provisioner-deletion-secret-namespace`, `volume.alpha.kubernetes.io/pre-resize-capacity`, " +
		"`external-provisioner.volume.kubernetes.io/finalizer`, `kubernetes.io/pv-protection`", "PV, administrators",
		"deletion, modification and expansion, and their Secrets", "cluster permissions; `--secret-namespaces`"},
	{"`storageclass.kubernetes.io/is-default-class`, `storageclass.beta.kubernetes.io/is-default-class`, " +
		"`csi.storage.k8s.io/drivername`, `csi.storage.k8s.io/managed-by`, `topology.<driver>/node`, `kubernetes.io/hostname`, " +
		"`<driver>/node`, " +
		"`<driver>/pendingdeletion`, `<driver>/resize-requested-at`, `<driver>/logicalvolume`, `app.kubernetes.io/created-by`", "StorageClass, CSIStorageCapacity, Node, LogicalVolume, administrators",
		"defaults, topology, cleanup",
		"cluster permissions"},
}

// TestDocsInputs: every annotation, label and finalizer of docs/reference.md is in the table of docs/security.md.
func TestDocsInputs(t *testing.T) {
	var table strings.Builder
	table.WriteString("<!-- inputs: begin -->\n| field | object, written by | can cause | checked by |\n|---|---|---|---|\n")
	for _, i := range inputs {
		fmt.Fprintf(&table, "| %s | %s | %s | %s |\n", i.names, i.writer, i.effect, i.check)
	}
	table.WriteString("<!-- inputs: end -->")
	data, err := os.ReadFile(securityPage)
	if err != nil {
		t.Fatal(err)
	}
	part := regexp.MustCompile("(?s)<!-- inputs: begin -->.*?<!-- inputs: end -->")
	if want := part.ReplaceAllLiteralString(string(data), table.String()); os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(securityPage, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if !part.Match(data) || want != string(data) {
		t.Errorf("the table of %s is stale, run make generate", securityPage)
	}
	listed := tablesOf(t, securityPage)["Input of users"]
	reference := tablesOf(t, referencePage)
	names := slices.Concat(reference["Annotations"], reference["Labels"], reference["Finalizers"])
	if len(names) < 50 {
		t.Errorf("%d names", len(names))
	}
	for _, name := range names {
		group, _, _ := strings.Cut(name, "/")
		if !slices.Contains(listed, name) && !slices.Contains(listed, group+"/…") {
			t.Errorf("%s does not say who can write %q, what it can cause, and what checks it", securityPage, name)
		}
	}
}
