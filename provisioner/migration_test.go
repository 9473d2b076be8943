// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

const (
	ebs       = "ebs.csi.aws.com"
	ebsInTree = "kubernetes.io/aws-ebs"
	ebsZone   = "topology.ebs.csi.aws.com/zone"
)

func ebsDriver(d *driver) { d.name, d.inTree = ebs, migration.PluginOf(ebs) }

func ebsVolume(id string) *corev1.PersistentVolume {
	return &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: corev1.PersistentVolumeSpec{
		PersistentVolumeSource: corev1.PersistentVolumeSource{AWSElasticBlockStore: &corev1.AWSElasticBlockStoreVolumeSource{VolumeID: id,
			FSType: "ext4"}},
	}}
}

func csiVolume(driver, handle string) *corev1.PersistentVolume {
	return &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: corev1.PersistentVolumeSpec{
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: handle,
			FSType: "ext4"}},
	}}
}

func TestTranslated(t *testing.T) {
	inTree := func(change func(*storagev1.StorageClass)) *storagev1.StorageClass {
		return testClass(func(c *storagev1.StorageClass) {
			c.Provisioner, c.Parameters = ebsInTree, map[string]string{"type": "gp2", "fsType": "ext4"}
			if change != nil {
				change(c)
			}
		})
	}
	parameters := fmt.Sprint(map[string]string{"type": "gp2", volumerules.ParameterPrefix + "fstype": "ext4"})
	for name, tt := range map[string]struct {
		driver     func(*driver)
		class      *storagev1.StorageClass
		parameters string
		topologies string // "": none
		err        bool
	}{
		"of the plugin": {driver: ebsDriver, class: inTree(nil), parameters: parameters},
		"with a zone": {driver: ebsDriver, class: inTree(func(c *storagev1.StorageClass) { c.Parameters["zone"] = "us-east-1a" }),
			parameters: parameters, topologies: "[" + ebsZone + "=us-east-1a]"},
		"with allowed topologies": {driver: ebsDriver, class: inTree(func(c *storagev1.StorageClass) {
			c.AllowedTopologies = allow(in(corev1.LabelTopologyZone, "us-east-1a"))
		}), parameters: parameters, topologies: "[" + ebsZone + "=us-east-1a]"},
		"with both": {driver: ebsDriver, err: true, class: inTree(func(c *storagev1.StorageClass) {
			c.Parameters["zone"], c.AllowedTopologies = "us-east-1a", allow(in(corev1.LabelTopologyZone, "us-east-1a"))
		})},
		"of the driver": {driver: ebsDriver, class: inTree(func(c *storagev1.StorageClass) { c.Provisioner = ebs }),
			parameters: "map[fsType:ext4 type:gp2]"},
		"a driver without plugin": {class: inTree(nil), parameters: "map[fsType:ext4 type:gp2]"},
	} {
		t.Run(name, func(t *testing.T) {
			before := tt.class.DeepCopy()
			got, err := testDriver(tt.driver).translated(tt.class)
			if !equality.Semantic.DeepEqual(tt.class, before) {
				t.Errorf("the class was changed to %+v", tt.class) // it is shared with everybody
			}
			if tt.err || err != nil {
				if !tt.err || err == nil || !strings.Contains(err.Error(), `StorageClass "fast"`) {
					t.Errorf("error %v", err)
				}
				return
			}
			topologies := ""
			if terms, _ := flatten(got.AllowedTopologies); terms != nil {
				topologies = fmt.Sprint(terms)
			}
			if fmt.Sprint(got.Parameters) != tt.parameters || topologies != tt.topologies || got.Provisioner != before.Provisioner ||
				got.Name != before.Name {
				t.Errorf("got %v and %q of %s", got.Parameters, topologies, got.Provisioner)
			}
		})
	}
}

func TestAsCSI(t *testing.T) {
	nfs := &corev1.PersistentVolume{}
	nfs.Spec.NFS = &corev1.NFSVolumeSource{}
	for name, tt := range map[string]struct {
		driver func(*driver)
		volume *corev1.PersistentVolume
		want   string // driver and handle; "": no CSI source
		err    bool
	}{
		"of the plugin":               {driver: ebsDriver, volume: ebsVolume("vol-1"), want: ebs + " vol-1"},
		"of the plugin, with a zone":  {driver: ebsDriver, volume: ebsVolume("aws://us-east-1a/vol-1"), want: ebs + " vol-1"},
		"of the plugin, malformed":    {driver: ebsDriver, volume: ebsVolume("aws://us-east-1a/disk-1"), err: true},
		"of the driver":               {driver: ebsDriver, volume: csiVolume(ebs, "vol-1"), want: ebs + " vol-1"},
		"of another driver":           {driver: ebsDriver, volume: csiVolume("other", "x"), want: "other x"},
		"of no plugin with a driver":  {driver: ebsDriver, volume: nfs},
		"a driver that replaced none": {volume: ebsVolume("vol-1")},
	} {
		t.Run(name, func(t *testing.T) {
			before := tt.volume.DeepCopy()
			got, err := testDriver(tt.driver).asCSI(tt.volume)
			if !equality.Semantic.DeepEqual(tt.volume, before) {
				t.Errorf("the volume was changed to %+v", tt.volume)
			}
			if tt.err || err != nil {
				if !tt.err || err == nil || !strings.Contains(err.Error(), `PersistentVolume "pv"`) {
					t.Errorf("error %v", err)
				}
				return
			}
			source := ""
			if got.Spec.CSI != nil {
				source = got.Spec.CSI.Driver + " " + got.Spec.CSI.VolumeHandle
			}
			if source != tt.want {
				t.Errorf("got %q, want %q", source, tt.want)
			}
		})
	}
}

func zoneAffinity(key, zone string) *corev1.VolumeNodeAffinity {
	return &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: corev1.NodeSelectorOpIn, Values: []string{zone}}},
	}}}}
}

func TestIsVolume(t *testing.T) {
	d := testDriver(ebsDriver)
	for name, tt := range map[string]struct {
		pv   *corev1.PersistentVolume
		id   string
		want bool
	}{
		"equal":                      {ebsVolume("vol-1"), "vol-1", true},
		"spelled in another way":     {ebsVolume("aws://us-east-1a/vol-1"), "vol-1", true},
		"another volume":             {ebsVolume("vol-2"), "vol-1", false},
		"malformed, both":            {ebsVolume("aws://a/x"), "aws://a/x", false},
		"a CSI source":               {csiVolume(ebs, "vol-1"), "vol-1", true},
		"a CSI source of another":    {csiVolume(ebs, "vol-2"), "vol-1", false},
		"a source of another driver": {csiVolume("other", "vol-1"), "vol-1", false},
	} {
		if got := d.isVolume(tt.pv, csiVolume(ebs, tt.id)); got != tt.want {
			t.Errorf("%s: %v", name, got)
		}
	}
	here, there := csiVolume(ebs, "vol-1"), zoneAffinity("zone", "b")
	at := func(affinity *corev1.VolumeNodeAffinity) *corev1.PersistentVolume {
		pv := csiVolume(ebs, "vol-1")
		pv.Spec.NodeAffinity = affinity
		return pv
	}
	here.Spec.NodeAffinity = zoneAffinity("zone", "a")
	if !d.isVolume(here, at(there)) {
		t.Error("one ID is one volume, wherever it is")
	}
	d.NodeDeployment = true
	if d.isVolume(here, at(there)) || !d.isVolume(here, at(zoneAffinity("zone", "a"))) {
		t.Error("the volumes of two nodes may have one ID")
	}
	d.segments = map[string]string{"zone": "b", "host": "n"}
	if d.isVolume(here, at(there)) {
		t.Error("the volume of another node is none of this one")
	}
	here.Spec.NodeAffinity = zoneAffinity("host", "n") // changed by a webhook
	if !d.isVolume(here, at(there)) {
		t.Error("a volume that this node reaches is that of another node")
	}
}

// TestOwns goes through all combinations of the annotations that name an owner.
func TestOwns(t *testing.T) {
	const absent = "absent"
	for _, d := range []driver{testDriver(ebsDriver), testDriver(nil)} {
		for _, owner := range []string{absent, "", d.name, ebsInTree, "other"} {
			for _, beta := range []string{absent, "", d.name, ebsInTree, "other"} {
				for _, to := range []string{absent, "", d.name, ebsInTree, "other"} {
					claim := testClaim(func(c *corev1.PersistentVolumeClaim) {
						c.Annotations = map[string]string{}
						for key, value := range map[string]string{storagehelpers.AnnStorageProvisioner: owner,
							storagehelpers.AnnBetaStorageProvisioner: beta, storagehelpers.AnnMigratedTo: to} {
							if value != absent {
								c.Annotations[key] = value
							}
						}
					})
					named := owner
					if owner == absent {
						named = beta
					}
					// Row 2, then row 4: a foreign owner is not outweighed by the migration.
					want := (named == d.name || to == d.name) && (named == d.name || d.inTree == ebsInTree && named == ebsInTree)
					if got := d.owns(claim); got != want {
						t.Errorf("%s: owner %q, beta %q, migrated to %q: %v", d.name, owner, beta, to, got)
					}
					if want && !kube.ClaimHandledBy(d.name, claim) {
						t.Errorf("%s: owner %q, beta %q, migrated to %q: its claim would be trimmed", d.name, owner, beta, to)
					}
				}
			}
		}
	}
}

// TestResponsible tells by which annotations and sources a volume is ours.
func TestResponsible(t *testing.T) {
	nfs := corev1.PersistentVolumeSource{NFS: &corev1.NFSVolumeSource{}}
	aws, ours, other := ebsVolume("vol-1").Spec.PersistentVolumeSource, csiVolume(ebs, "vol-1").Spec.PersistentVolumeSource,
		csiVolume("other", "x").Spec.PersistentVolumeSource
	for name, tt := range map[string]struct {
		driver func(*driver)
		by, to string // annotations; "": absent
		source corev1.PersistentVolumeSource
		want   bool
	}{
		"provisioned by the driver":                      {driver: ebsDriver, by: ebs, source: ours, want: true},
		"provisioned by the plugin":                      {driver: ebsDriver, by: ebsInTree, source: aws, want: true},
		"provisioned by the plugin, migrated":            {driver: ebsDriver, by: ebsInTree, to: ebs, source: aws, want: true},
		"provisioned by another, migrated to the driver": {driver: ebsDriver, by: "other", to: ebs, source: aws, want: true},
		"provisioned by another, migrated to the plugin": {driver: ebsDriver, by: "other", to: ebsInTree, source: aws,
			want: true},
		"provisioned by another":                                     {driver: ebsDriver, by: "other", source: ours},
		"provisioned by another, migrated to another":                {driver: ebsDriver, by: "other", to: "third", source: ours},
		"made by hand, CSI":                                          {driver: ebsDriver, source: ours, want: true},
		"made by hand, CSI of another driver":                        {driver: ebsDriver, source: other},
		"made by hand, CSI of another driver, migrated":              {driver: ebsDriver, to: ebs, source: other},
		"made by hand, of the plugin, migrated":                      {driver: ebsDriver, to: ebs, source: aws, want: true},
		"made by hand, of the plugin, migrated to the plugin":        {driver: ebsDriver, to: ebsInTree, source: aws, want: true},
		"made by hand, of the plugin":                                {driver: ebsDriver, source: aws},
		"made by hand, of the plugin, migrated to another":           {driver: ebsDriver, to: "other", source: aws},
		"made by hand, of no plugin":                                 {driver: ebsDriver, source: nfs},
		"provisioned by a plugin, for a driver that replaced none":   {by: ebsInTree, source: aws},
		"made by hand, of a plugin, for a driver that replaced none": {source: aws},
		"on a node in the zone of the volume": {driver: onNode("us-east-1a"), by: ebsInTree, source: aws,
			want: true},
		"on a node in another zone": {driver: onNode("us-east-1b"), by: ebsInTree, source: aws},
	} {
		t.Run(name, func(t *testing.T) {
			pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv", Annotations: map[string]string{}},
				Spec: corev1.PersistentVolumeSpec{
					PersistentVolumeSource: tt.source, NodeAffinity: zoneAffinity(corev1.LabelTopologyZone, "us-east-1a"),
				}}
			for key, value := range map[string]string{storagehelpers.AnnDynamicallyProvisioned: tt.by,
				storagehelpers.AnnMigratedTo: tt.to} {
				if value != "" {
					pv.Annotations[key] = value
				}
			}
			d := testDriver(tt.driver)
			if got := d.responsible(pv); got != tt.want {
				t.Errorf("got %v", got)
			}
			// What the cache has of it leads to the same.
			trimmed, err := kube.Trim(d.name)(pv.DeepCopy())
			if err != nil || d.responsible(trimmed.(*corev1.PersistentVolume)) != tt.want {
				t.Errorf("trimmed to %+v: another answer (%v)", trimmed, err)
			}
		})
	}
}

func onNode(zone string) func(*driver) {
	return func(d *driver) {
		ebsDriver(d)
		d.NodeDeployment, d.NodeName, d.segments = true, "node", map[string]string{ebsZone: zone}
	}
}
