// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migration

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
)

const (
	ebs       = "ebs.csi.aws.com"
	ebsInTree = "kubernetes.io/aws-ebs"
	ebsZone   = "topology.ebs.csi.aws.com/zone"
	gcePD     = "pd.csi.storage.gke.io"
)

func volume(source corev1.PersistentVolumeSource) *corev1.PersistentVolume {
	return &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: corev1.PersistentVolumeSpec{PersistentVolumeSource: source},
	}
}

func ebsVolume(id string) *corev1.PersistentVolume {
	return volume(
		corev1.PersistentVolumeSource{AWSElasticBlockStore: &corev1.AWSElasticBlockStoreVolumeSource{VolumeID: id, FSType: "ext4"}},
	)
}

func csiVolume(driver, handle string) *corev1.PersistentVolume {
	return volume(
		corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: handle, FSType: "ext4"}},
	)
}

func gceVolume(zones string) *corev1.PersistentVolume {
	pv := volume(corev1.PersistentVolumeSource{GCEPersistentDisk: &corev1.GCEPersistentDiskVolumeSource{PDName: "disk"}})
	pv.Labels = map[string]string{corev1.LabelTopologyZone: zones}
	return pv
}

func TestPluginOf(t *testing.T) {
	for driver, want := range map[string]string{
		ebs: ebsInTree, "pd.csi.storage.gke.io": "kubernetes.io/gce-pd", "cinder.csi.openstack.org": "kubernetes.io/cinder",
		"disk.csi.azure.com": "kubernetes.io/azure-disk", "file.csi.azure.com": "kubernetes.io/azure-file",
		"csi.vsphere.vmware.com": "kubernetes.io/vsphere-volume", "pxd.portworx.com": "kubernetes.io/portworx-volume",
		"drv.example.com": "",
	} {
		if got := PluginOf(driver); got != want {
			t.Errorf("%s: %q, want %q", driver, got, want)
		}
		if got := DriverOf(want); want != "" && got != driver {
			t.Errorf("%s: %q, want %q", want, got, driver)
		}
	}
}

func TestToCSI(t *testing.T) {
	for name, tt := range map[string]struct {
		volume         *corev1.PersistentVolume
		driver, handle string // "" without a CSI source
		migrated       bool
		err            string
	}{
		"CSI": {csiVolume("drv.example.com", "vol-1"), "drv.example.com", "vol-1", false, ""},
		"GCE": {gceVolume("z"), gcePD, "projects/UNSPECIFIED/zones/z/disks/disk", true, ""},
		"GCE, two zones": {
			gceVolume("europe-west1-b__europe-west1-c"), gcePD, "projects/UNSPECIFIED/regions/europe-west1/disks/disk", true, "",
		},
		"GCE, no zone":     {gceVolume(""), gcePD, "projects/UNSPECIFIED/zones/UNSPECIFIED/disks/disk", true, ""},
		"GCE, two regions": {gceVolume("europe-west1-b__europe-west2-c"), "", "", true, "failed to translate in tree pv to CSI: "},
		"EBS": {volume(
			corev1.PersistentVolumeSource{
				AWSElasticBlockStore: &corev1.AWSElasticBlockStoreVolumeSource{VolumeID: "vol-02399794d890f9375"},
			},
		),
			"ebs.csi.aws.com", "vol-02399794d890f9375", true, ""},
		"Cinder": {
			volume(corev1.PersistentVolumeSource{Cinder: &corev1.CinderPersistentVolumeSource{VolumeID: "c"}}), "cinder.csi.openstack.org",
			"c", true, "",
		},
		"Azure disk": {
			volume(corev1.PersistentVolumeSource{AzureDisk: &corev1.AzureDiskVolumeSource{DataDiskURI: "uri"}}), "disk.csi.azure.com",
			"uri", true, "",
		},
		"vSphere": {
			volume(corev1.PersistentVolumeSource{VsphereVolume: &corev1.VsphereVirtualDiskVolumeSource{VolumePath: "p"}}),
			"csi.vsphere.vmware.com", "p", true, "",
		},
		"Portworx": {
			volume(corev1.PersistentVolumeSource{PortworxVolume: &corev1.PortworxVolumeSource{VolumeID: "p"}}), "pxd.portworx.com", "p",
			true, "",
		},
		"NFS":         {volume(corev1.PersistentVolumeSource{NFS: &corev1.NFSVolumeSource{Server: "s", Path: "/"}}), "", "", false, ""},
		"none at all": {volume(corev1.PersistentVolumeSource{}), "", "", false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			pv := tt.volume
			before := pv.DeepCopy()
			got, migrated, err := ToCSI(pv)
			if !equality.Semantic.DeepEqual(pv, before) {
				t.Error("the volume of the cache was changed")
			}
			if migrated != tt.migrated || (err != nil) != (tt.err != "") || err != nil && !strings.HasPrefix(err.Error(), tt.err) {
				t.Fatalf("migrated %t, error %v", migrated, err)
			}
			if err != nil {
				return
			}
			driver, handle := "", ""
			if csi := got.Spec.CSI; csi != nil {
				driver, handle = csi.Driver, csi.VolumeHandle
			}
			if driver != tt.driver || handle != tt.handle || IsInTree(pv) != migrated || DriverOfVolume(pv) != driver {
				t.Errorf("%s, %s", driver, handle)
			}
			if got, _, ok := HandleOf(driver, pv); ok != (handle != "") || got != handle {
				t.Errorf("handle %q, %t", got, ok)
			}
			if got, _, ok := HandleOf("other", pv); ok {
				t.Errorf("handle %q of another driver", got)
			}
		})
	}
}

func TestToInTree(t *testing.T) {
	pv := csiVolume(ebs, "vol-1")
	pv.Annotations = map[string]string{storagehelpers.AnnDynamicallyProvisioned: ebsInTree}
	pv.Finalizers = []string{storagehelpers.PVDeletionProtectionFinalizer}
	pv.Spec.NodeAffinity = zoneAffinity(ebsZone, "us-east-1a")
	got, err := ToInTree(pv)
	if err != nil {
		t.Fatal(err)
	}
	if s := got.Spec.AWSElasticBlockStore; got.Spec.CSI != nil || s == nil || s.VolumeID != "vol-1" || s.FSType != "ext4" {
		t.Errorf("source %+v", got.Spec.PersistentVolumeSource)
	}
	if got.Annotations[storagehelpers.AnnDynamicallyProvisioned] != ebsInTree || len(got.Finalizers) != 1 {
		t.Errorf("annotations %v, finalizers %v", got.Annotations, got.Finalizers)
	}
	if e := got.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0]; e.Key != corev1.LabelTopologyZone ||
		e.Values[0] != "us-east-1a" {
		t.Errorf("affinity %+v", e)
	}
	back, _, err := ToCSI(got)
	if err != nil || back.Spec.CSI.VolumeHandle != "vol-1" ||
		back.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Key != ebsZone {
		t.Errorf("back again: %+v, %v", back, err)
	}

	malformed := csiVolume(ebs, "vol-1")
	malformed.Spec.CSI.VolumeAttributes = map[string]string{"partition": "first"}
	for name, pv := range map[string]*corev1.PersistentVolume{
		"malformed attributes": malformed, "another driver": csiVolume("other", "x"),
	} {
		if got, err := ToInTree(pv); err == nil {
			t.Errorf("%s: %+v", name, got.Spec.PersistentVolumeSource)
		}
	}
}

func zoneAffinity(key, zone string) *corev1.VolumeNodeAffinity {
	return &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: corev1.NodeSelectorOpIn, Values: []string{zone}}},
	}}}}
}

func TestSameVolume(t *testing.T) {
	source := func(driver, handle string, attributes ...string) *corev1.CSIPersistentVolumeSource {
		csi := csiVolume(driver, handle).Spec.CSI
		csi.VolumeAttributes = map[string]string{}
		for i := 0; i < len(attributes); i += 2 {
			csi.VolumeAttributes[attributes[i]] = attributes[i+1]
		}
		return csi
	}
	withSecret := func(csi *corev1.CSIPersistentVolumeSource) *corev1.CSIPersistentVolumeSource {
		csi.NodeStageSecretRef = &corev1.SecretReference{Namespace: "ns", Name: "azure-storage-account-b-secret"}
		return csi
	}
	const disk, azure = "projects/p/zones/z/disks/", "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/disks/"
	const vSphere, vmdk, azureFile = "csi.vsphere.vmware.com", "initialvolumefilepath", "file.csi.azure.com"
	for name, tt := range map[string]struct {
		saved, other *corev1.CSIPersistentVolumeSource // of two volumes
	}{
		"EBS":                            {source(ebs, "vol-1", "partition", "1"), source(ebs, "vol-2", "partition", "1")},
		"GCE":                            {source(gcePD, disk+"a"), source(gcePD, disk+"b")},
		"Cinder":                         {source("cinder.csi.openstack.org", "a"), source("cinder.csi.openstack.org", "b")},
		"Portworx":                       {source("pxd.portworx.com", "a"), source("pxd.portworx.com", "b")},
		"Azure disk":                     {source("disk.csi.azure.com", azure+"a"), source("disk.csi.azure.com", azure+"b")},
		"vSphere":                        {source(vSphere, "1", vmdk, "[ds] a.vmdk"), source(vSphere, "2", vmdk, "[ds] b.vmdk")},
		"Azure file":                     {source(azureFile, "g#account#a#"), source(azureFile, "g#account#b#")},
		"Azure file, another account":    {source(azureFile, "g#a#share#"), source(azureFile, "g#b#share#")},
		"Azure file, share in attribute": {source(azureFile, "1", "shareName", "a", "secretName", "s"), source(azureFile, "g#account#b#")},
		"Azure file, secret":             {withSecret(source(azureFile, "g#account#a#")), withSecret(source(azureFile, "g#account#b#"))},
	} {
		pv, err := ToInTree(volume(corev1.PersistentVolumeSource{CSI: tt.saved}))
		if err != nil {
			t.Fatal(err)
		}
		pv.Annotations = nil // Azure file: the resource group
		pv.Name, pv.Spec.ClaimRef = "another-pv", &corev1.ObjectReference{Namespace: "another"}
		saved := volume(corev1.PersistentVolumeSource{CSI: tt.saved})
		other := volume(corev1.PersistentVolumeSource{CSI: tt.other})
		driver := tt.saved.Driver
		for _, of := range []struct {
			name string
			b    *corev1.PersistentVolume
			want bool
		}{{"its volume", saved, true}, {"another volume", other, false}, {"itself", pv, true}} {
			found := slices.ContainsFunc(Handles(driver, pv), func(h string) bool { return slices.Contains(Handles(driver, of.b), h) })
			same, reverse := SameVolume(driver, pv, of.b), SameVolume(driver, of.b, pv)
			if same != of.want || reverse != of.want || found != of.want {
				t.Errorf("%s, %s: %t, reverse %t, found by a handle %t", name, of.name, same, reverse, found)
			}
		}
	}
	for name, tt := range map[string]struct {
		pv   *corev1.PersistentVolume
		want bool
	}{
		"another notation": {ebsVolume("aws://us-east-1a/vol-1"), true},
		"malformed":        {ebsVolume("aws://a/x"), false},
		"another plugin":   {gceVolume("z"), false},
		"no plugin":        {volume(corev1.PersistentVolumeSource{NFS: &corev1.NFSVolumeSource{}}), false},
	} {
		if got := SameVolume(ebs, tt.pv, csiVolume(ebs, "vol-1")); got != tt.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func TestRepairHandle(t *testing.T) {
	if got, err := RepairHandle(
		gcePD, "projects/UNSPECIFIED/zones/z/disks/disk", "projects/p/zones/z/instances/i",
	); got != "projects/p/zones/z/disks/disk" {
		t.Errorf("%q, %v", got, err)
	}
	for driver, nodeID := range map[string]string{gcePD: "malformed", "drv.example.com": "n"} {
		if got, err := RepairHandle(driver, "projects/UNSPECIFIED/zones/z/disks/disk", nodeID); err == nil {
			t.Errorf("%s: %q", driver, got)
		}
	}
}
