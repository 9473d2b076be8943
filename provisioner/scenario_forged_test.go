// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// forgery is a record that a user writes for a claim, with the hash of the request that follows from it. Nil: only the finalizer.
type forgery struct {
	node                 string
	requisite, preferred []map[string]string // without the prefix of the keys
	topology             bool                // the record has a topology
	content              *csi.VolumeContentSource
}

// forge gives a claim the finalizer and a record, and then its provisioner, as a user who can edit claims can.
func (f *fixture) forge(claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, forged *forgery) {
	f.Helper()
	change := kube.MetadataPatch{AddFinalizers: []string{kube.ProvisioningFinalizer}, SetAnnotations: map[string]string{
		storagehelpers.AnnStorageProvisioner: f.Driver,
	}}
	if forged != nil {
		var t *csi.TopologyRequirement
		segments := func(from []map[string]string) (to []*csi.Topology) {
			for _, labels := range from {
				s := map[string]string{}
				for k, v := range labels {
					s[f.label(k)] = v
				}
				to = append(to, &csi.Topology{Segments: s})
			}
			return to
		}
		record := requestRecord{Driver: f.Driver, SelectedNode: forged.node}
		if forged.topology {
			t = &csi.TopologyRequirement{Requisite: segments(forged.requisite), Preferred: segments(forged.preferred)}
			_, err := record.pack(t)
			f.Must(err)
		}
		o, err := f.c.driver.prepare(claim, class, forged.node, &resolvedRefs{content: forged.content},
			func() (*csi.TopologyRequirement, error) { return t, nil })
		f.Must(err)
		record.Request, err = fingerprint(o.request, false)
		f.Must(err)
		data, err := json.Marshal(record)
		f.Must(err)
		change.SetAnnotations[kube.AnnProvisioningRequest] = string(data)
	}
	_, err := kube.PatchMetadata(f.Context(), f.Client.CoreV1().PersistentVolumeClaims(f.Namespace), claim, change)
	f.Must(err)
}

// forgeries is forged records of claims, each with a class of its own, that must not lead to a call. The event has parts.
type forgeries map[string]struct {
	class  func(*storagev1.StorageClass)
	claim  func(*corev1.PersistentVolumeClaim)
	record *forgery
	parts  []string
}

func (f *fixture) refuses(all forgeries) {
	f.Helper()
	for name, tt := range all {
		f.class = f.Unique(strings.ReplaceAll(name, "_", "-"))
		f.makeClass(tt.class)
		class, err := f.Client.StorageV1().StorageClasses().Get(f.Context(), f.class, metav1.GetOptions{})
		f.Must(err)
		claim := f.claim(func(c *corev1.PersistentVolumeClaim) {
			c.Name, c.Annotations = strings.ReplaceAll(name, "_", "-"), nil
			if tt.claim != nil {
				tt.claim(c)
			}
		})
		f.forge(claim, class, tt.record)
		f.event(append(tt.parts, "Warning ProvisioningFailed", fmt.Sprintf("StorageClass %q", f.class), "cannot be retried",
			"remove finalizer "+kube.ProvisioningFinalizer)...)
	}
	f.settles()
	f.Calls(create, 0)
}

// Users can write the finalizer and the record of a request, and compute its hash.
func provisionerScenarioForged(t *testing.T) {
	t.Run("022_forged_record_without_node", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, patient)
		selecting := func(c *corev1.PersistentVolumeClaim) { c.Spec.Selector = &metav1.LabelSelector{} }
		f.refuses(forgeries{
			"without_node":   {class: late, record: &forgery{}, parts: []string{"names no node", "volumeBindingMode"}},
			"finalizer_only": {class: late, parts: []string{"no node is selected", "pod"}},
			"with_selector":  {claim: selecting, record: &forgery{}, parts: []string{"spec.selector"}},
			"selector_only":  {claim: selecting, parts: []string{"spec.selector"}},
		})
		f.class = f.Unique("waits")
		f.makeClass(late)
		claim := f.claim(func(c *corev1.PersistentVolumeClaim) { c.Finalizers = []string{kube.ProvisioningFinalizer} })
		f.event("ProvisioningFailed", "no node is selected")
		f.patchClaim(`{"metadata":{"annotations":{"` + storagehelpers.AnnSelectedNode + `":"node"}}}`)
		f.saved(claim) // as any other claim
	})
	t.Run("078_forged_topology", func(t *testing.T) {
		f := scenario(t, anywhere, patient)
		f.places("z1", "z2")
		z1, z2, rack := map[string]string{"zone": "z1"}, map[string]string{"zone": "z2"}, map[string]string{"zone": "z1", "rack": "A"}
		in1 := func(c *storagev1.StorageClass) { late(c); c.AllowedTopologies = allow(in(f.label("zone"), "z1")) }
		both := func(c *storagev1.StorageClass) { late(c); c.AllowedTopologies = allow(in(f.label("zone"), "z1", "z2")) }
		list := func(s ...map[string]string) []map[string]string { return s }
		f.refuses(forgeries{
			"another_zone": {class: in1, record: &forgery{node: "gone", topology: true, requisite: list(z2), preferred: list(z2)},
				parts: []string{"allowedTopologies", `zone":"z2"`}},
			"one_of_two": {class: in1, record: &forgery{node: "gone", topology: true, requisite: list(z1, z2), preferred: list(z1, z2)},
				parts: []string{"allowedTopologies"}},
			"preferred_only": {class: in1, record: &forgery{node: "gone", topology: true, requisite: list(z1), preferred: list(z2)},
				parts: []string{"none with index -1"}},
			"no_topology": {class: in1, record: &forgery{node: "gone"}, parts: []string{"allowedTopologies"}},
			"empty":       {class: late, record: &forgery{node: "gone", topology: true}, parts: []string{"0 segments"}},
			"other_node": {class: both, record: &forgery{
				node: f.nodeName(0), topology: true, requisite: list(z1, z2), preferred: list(z2, z1),
			}, parts: []string{f.nodeName(0), "preferred"}},
			"unknown_key": {class: late, record: &forgery{node: "gone", topology: true, requisite: list(rack), preferred: list(rack)},
				parts: []string{f.label("rack"), "CSINode"}},
			"immediate": {class: func(c *storagev1.StorageClass) { in1(c); c.VolumeBindingMode = nil },
				record: &forgery{topology: true, requisite: list(z2), preferred: list(z2)}, parts: []string{"allowedTopologies"}},
		})
	})
	t.Run("078_forged_topology_strict", func(t *testing.T) {
		f := scenario(t, anywhere, func(c *Config) { patient(c); c.StrictTopology = true })
		f.places("z1", "z2")
		z1, z2 := map[string]string{"zone": "z1"}, map[string]string{"zone": "z2"}
		two := []map[string]string{z1, z2}
		f.refuses(forgeries{"two_segments": {
			class: late, record: &forgery{node: f.nodeName(0), topology: true, requisite: two, preferred: two},
			parts: []string{f.nodeName(0), "--strict-topology"},
		}})
	})
	t.Run("063_forged_record_of_a_clone", func(t *testing.T) {
		for name, reported := range map[string]int64{"063_size_of_the_source": 2 << 30, "063_no_size": 0} {
			t.Run(name, func(t *testing.T) { forgedClone(t, reported) })
		}
	})
}

// forgedClone clones a source of 2Gi into a claim of 1Gi whose record says that the source was smaller.
func forgedClone(t *testing.T, reported int64) {
	f := copying(t, patient)
	source := f.source(f.Namespace, "s", func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) { size("2Gi")(c) })
	pv, err := f.Client.CoreV1().PersistentVolumes().Get(t.Context(), source.Spec.VolumeName, metav1.GetOptions{})
	f.Must(err)
	before := f.Plugin.VolumeCount()
	f.Plugin.Next(create, csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume.CapacityBytes = reported }))
	claim := f.claim(func(c *corev1.PersistentVolumeClaim) {
		cloning("clone", "s")(c)
		c.Annotations = nil
	})
	class, err := f.Client.StorageV1().StorageClasses().Get(t.Context(), f.class, metav1.GetOptions{})
	f.Must(err)
	f.forge(claim, class, &forgery{content: &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: pv.Spec.CSI.VolumeHandle},
	}}})
	f.event("ProvisioningFailed", fmt.Sprintf("it has %d bytes", reported), "the source has 2147483648")
	f.Wait(remove, 1)
	f.settles()
	f.Calls(create, 1)
	if n := f.Plugin.VolumeCount(); n != before {
		t.Errorf("%d volumes, want %d", n, before)
	}
}
