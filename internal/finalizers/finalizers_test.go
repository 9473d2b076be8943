// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package finalizers

import (
	"strings"
	"testing"
)

func TestRemovalOf(t *testing.T) {
	const volume, attachment, claim, node = "PersistentVolume", "VolumeAttachment", "PersistentVolumeClaim", "Node"
	for name, tt := range map[string]struct{ kind, finalizer, by, when string }{
		"of claims":  {claim, "kubernetes.io/pvc-protection", "kube-controller-manager", "no pod"},
		"of volumes": {volume, "kubernetes.io/pv-protection", "kube-controller-manager", "not bound"},
		"of the provisioner": {
			volume, "external-provisioner.volume.kubernetes.io/finalizer", "the provisioner", "DeleteVolume succeeded",
		},
		"of the attacher on a PV": {
			volume, "external-attacher/d-example-com", "the attacher of driver d.example.com", "no VolumeAttachment",
		},
		"of the attacher on a VA": {
			attachment, "external-attacher/d-example-com", "the attacher of driver d.example.com", "ControllerUnpublishVolume",
		},
		"of another attacher": {volume, "external-attacher/third", "sanitized name third", "no VolumeAttachment"},
		"of a clone": {
			claim, "provisioner.storage.kubernetes.io/cloning-protection", "the provisioner", "data source",
		},
		"of an indeterminate CreateVolume": {claim, "storage-controller.io/provisioning", "storage-controller", "final response"},
		"of a snapshot": {
			claim, "snapshot.storage.kubernetes.io/pvc-as-source-protection", "the snapshot controller", "snapshot",
		},
		"of nodes":                {node, "d.example.com/node", "the nodecontroller for driver d.example.com", "cleaned up"},
		"of TopoLVM":              {node, "topolvm.io/node", "topolvm-controller", "cleaned up"},
		"of a LogicalVolume":      {"LogicalVolume", "topolvm.io/logicalvolume", "topolvm-node", "LVM volume"},
		"of claims of the driver": {claim, "d.example.com/pvc", "the nodecontroller for driver d.example.com", "pods"},
		"of another program": {claim, "example.org/backup",
			"unknown (owner of example.org; not a finalizer of Kubernetes or this driver)", ""},
		"without a domain": {claim, "backup", "unknown (not a finalizer of Kubernetes or this driver)", ""},
	} {
		got := RemovalOf(tt.kind, tt.finalizer, "other", "d.example.com")
		if !strings.Contains(got.By, tt.by) || !strings.Contains(got.When, tt.when) || (got.When == "") != (tt.when == "") {
			t.Errorf("%s: %+v", name, got)
		}
	}
	for finalizer, r := range removals {
		if r.By == "" || r.When == "" {
			t.Errorf("%s: %+v", finalizer, r)
		}
	}
}

func TestText(t *testing.T) {
	all := Of("PersistentVolume", []string{"kubernetes.io/pv-protection", "a"}, "d.example.com")
	const want = "kubernetes.io/pv-protection: removed by kube-controller-manager, when the volume is being deleted and is not bound to " +
		"a claim; a: removed by unknown (not a finalizer of Kubernetes or this driver)"
	if got := Text(all); got != want {
		t.Errorf("got %q", got)
	}
}
