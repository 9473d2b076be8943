// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
)

const driver = "drv.example.com"

func volume(name, driver, handle string) *corev1.PersistentVolume {
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}}
	pv.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: handle}
	return pv
}

func attachment(name, volume, node string, attached bool) *storagev1.VolumeAttachment {
	return &storagev1.VolumeAttachment{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: storagev1.VolumeAttachmentSpec{
			Attacher: driver, NodeName: node, Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &volume},
		},
		Status: storagev1.VolumeAttachmentStatus{Attached: attached},
	}
}

func texts(found []Finding) []string {
	var all []string
	for _, f := range found {
		all = append(all, strings.Join(strings.Fields(fmt.Sprintf("%s %s %s %s", f.Topic, f.Object, f.VolumeHandle, f.Node)), " "))
	}
	return all
}

func TestFindings(t *testing.T) {
	t.Parallel()
	pv, nodes := volume("pv", driver, "v"), map[string]string{"n": "id", "m": "other"}
	moved := attachment("a", "pv", "n", true)
	moved.Annotations = map[string]string{annNodeID: "before", annFormerNodeIDs: `["first"]`}
	inline := attachment("a", "", "n", true)
	inline.Spec.Source = storagev1.VolumeAttachmentSource{InlineVolumeSpec: &pv.Spec}
	unbound := ClusterState{NodeIDs: nodes, Attachments: []*storagev1.VolumeAttachment{inline}}
	recorded := attachment("a", "pv", "n", true)
	recorded.Annotations = map[string]string{annVolumeHandle: "old"}
	foreign := attachment("a", "pv", "n", true)
	foreign.Spec.Attacher = "other.example.com"
	volumes := func(all ...*corev1.PersistentVolume) ClusterState { return ClusterState{Volumes: all} }
	attachedBy := func(va *storagev1.VolumeAttachment) ClusterState {
		return ClusterState{Volumes: []*corev1.PersistentVolume{pv}, NodeIDs: nodes, Attachments: []*storagev1.VolumeAttachment{va}}
	}
	attachedInCase := func(handles ...string) ClusterState {
		state := ClusterState{NodeIDs: nodes}
		for i, h := range handles {
			name := fmt.Sprint("pv", i)
			state.Volumes = append(state.Volumes, volume(name, driver, h))
			state.Attachments = append(state.Attachments, attachment(fmt.Sprint("a", i), name, "n", true))
		}
		return state
	}
	unknownNode := attachedBy(attachment("a", "pv", "n", true))
	unknownNode.NodeIDs = nil
	for name, c := range map[string]struct {
		state  ClusterState
		listed map[string][]string
		silent bool // the driver does not list published nodes
		want   []string
	}{
		"nothing at all":           {ClusterState{}, map[string][]string{}, false, nil},
		"a volume and its PV":      {volumes(pv), map[string][]string{"v": {}}, false, nil},
		"a volume without a PV":    {ClusterState{}, map[string][]string{"v": {}}, false, []string{"volume_without_pv v"}},
		"a handle in another case": {volumes(volume("pv", driver, "/RG/v")), map[string][]string{"/rg/V": {}}, false, nil},
		"attached in another case": {attachedInCase("/RG/v"), map[string][]string{"/rg/V": {"id"}}, false, nil},
		"attached in another case, not published": {attachedInCase("/RG/v"), map[string][]string{"/rg/V": {}}, false,
			[]string{"attached_not_published VolumeAttachment a0 /rg/V id"}},
		"handles that differ in case only": {attachedInCase("v", "V"), map[string][]string{"v": {"id"}, "V": {"id"}}, false, nil},
		"one of them published elsewhere": {attachedInCase("v", "V"), map[string][]string{"v": {"id"}, "V": {"other"}}, false,
			[]string{"attached_not_published VolumeAttachment a1 V id", "published_not_attached V other"}},
		"a handle that may be either": {attachedInCase("/rg/v"), map[string][]string{"/RG/v": {"id"}, "/rg/V": {}}, false, nil},
		"an inline volume of a pod": {
			ClusterState{}, map[string][]string{"csi-" + strings.Repeat("0a", 32): {}}, false, nil,
		},
		"a handle of other drivers": {
			volumes(volume("pv", "other.example.com", "v")), map[string][]string{"v": {}}, false, []string{"volume_without_pv v"},
		},
		"a PV without a volume":    {volumes(pv), map[string][]string{}, false, []string{"pv_without_volume PersistentVolume pv v"}},
		"a driver that lists none": {volumes(pv), nil, false, nil},
		"a stub of another driver": {volumes(volume("pv", "other.example.com", "")), map[string][]string{}, false, nil},
		"attached and published":   {attachedBy(attachment("a", "pv", "n", true)), map[string][]string{"v": {"id"}}, false, nil},
		"being attached":           {attachedBy(attachment("a", "pv", "n", false)), map[string][]string{"v": {}}, false, nil},
		"attached and not published": {
			attachedBy(attachment("a", "pv", "n", true)), map[string][]string{"v": {}}, false,
			[]string{"attached_not_published VolumeAttachment a v id"},
		},
		"published elsewhere": {
			attachedBy(attachment("a", "pv", "n", true)), map[string][]string{"v": {"other"}}, false,
			[]string{"attached_not_published VolumeAttachment a v id", "published_not_attached v other"},
		},
		"a driver that does not list nodes": {attachedBy(attachment("a", "pv", "n", true)), map[string][]string{"v": nil}, true, nil},
		"a volume without a status":         {attachedBy(attachment("a", "pv", "n", true)), map[string][]string{"v": nil}, false, nil},
		"a node that was recreated":         {attachedBy(moved), map[string][]string{"v": {"before"}}, false, nil},
		"a node that was recreated twice":   {attachedBy(moved), map[string][]string{"v": {"first", "before", "id"}}, false, nil},
		"a node with an unknown ID":         {unknownNode, map[string][]string{"v": {"id"}}, false, nil},
		"an inline volume": {
			attachedBy(inline), map[string][]string{"v": {}}, false, []string{"attached_not_published VolumeAttachment a v id"},
		},
		"an inline volume without a PV": {unbound, map[string][]string{"v": {"id"}}, false, nil},
		"a PV that was recreated":       {attachedBy(recorded), map[string][]string{"v": {}, "old": {"id"}}, false, nil},
		"an attachment of another driver": {
			attachedBy(foreign), map[string][]string{"v": {"id"}}, false, []string{"published_not_attached v id"},
		},
	} {
		c.state.Attached = true
		scan := comparison{driver: driver, cluster: c.state, listed: Listed{Volumes: c.listed, Nodes: !c.silent}, stuckAfter: time.Minute,
			now: time.Now()}
		if have := texts(scan.findings()); !slices.Equal(have, c.want) {
			t.Errorf("%s: %q, want %q", name, have, c.want)
		}
	}
}

func TestSizes(t *testing.T) {
	t.Parallel()
	pv := volume("pv", driver, "v")
	pv.Spec.Capacity = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("2Gi")}
	for size, want := range map[int64]int{0: 0, 1 << 30: 1, 2 << 30: 0, 3 << 30: 0} {
		for _, listed := range []string{"v", "V"} {
			c := comparison{driver: driver, cluster: ClusterState{Volumes: []*corev1.PersistentVolume{pv}},
				listed: Listed{Volumes: map[string][]string{listed: nil}, Sizes: map[string]int64{listed: size}}}
			if got := c.findings(); len(got) != want || want == 1 && got[0].Topic != VolumeTooSmall {
				t.Errorf("%s, %d bytes: %+v", listed, size, got)
			}
		}
	}
}

func TestSnapshots(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		contents []Content
		listed   map[string]bool
		want     []string
	}{
		"both":            {[]Content{{Handle: "s"}}, map[string]bool{"s": true}, nil},
		"no content":      {[]Content{}, map[string]bool{"s": true}, []string{SnapshotWithoutContent}},
		"no snapshot":     {[]Content{{Handle: "s"}}, map[string]bool{}, []string{ContentWithoutSnapshot}},
		"not listed":      {[]Content{{Handle: "s"}}, nil, nil},
		"contents unread": {nil, map[string]bool{"s": true}, nil},
	} {
		var got []string
		c := comparison{driver: driver, cluster: ClusterState{Contents: test.contents}, listed: Listed{Snapshots: test.listed}}
		for _, f := range c.findings() {
			got = append(got, f.Topic)
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("%s: got %v", name, got)
		}
	}
	creating := comparison{driver: driver, cluster: ClusterState{Contents: []Content{}, Creating: 2},
		listed: Listed{Snapshots: map[string]bool{"s": true}}}
	if m := creating.findings()[0].Message; !strings.Contains(m, "is being created (VolumeSnapshotContents: 2)") {
		t.Error(m)
	}
}

// TestVolumesOfAnInTreePlugin matches volumes although their translated handles lack the parts
// that only the driver knows.
func TestVolumesOfAnInTreePlugin(t *testing.T) {
	t.Parallel()
	const gce, disk, twin = "pd.csi.storage.gke.io", "projects/p/zones/z/disks/disk", "projects/p/zones/y/disks/disk"
	const unspecified = "projects/UNSPECIFIED/zones/UNSPECIFIED/disks/disk"
	inZones := func(zones string) []*corev1.PersistentVolume {
		pv := volume("pv", "", "")
		pv.Labels = map[string]string{corev1.LabelTopologyZone: zones}
		pv.Spec.CSI, pv.Spec.GCEPersistentDisk = nil, &corev1.GCEPersistentDiskVolumeSource{PDName: "disk"}
		return []*corev1.PersistentVolume{pv}
	}
	attached := func(change func(*storagev1.VolumeAttachment)) []*storagev1.VolumeAttachment {
		va := attachment("a", "pv", "n", true)
		va.Spec.Attacher = gce
		change(va)
		return []*storagev1.VolumeAttachment{va}
	}
	inline := attached(func(va *storagev1.VolumeAttachment) {
		va.Spec.Source = storagev1.VolumeAttachmentSource{InlineVolumeSpec: &volume("", gce, unspecified).Spec}
	})
	recorded := attached(func(va *storagev1.VolumeAttachment) { va.Annotations = map[string]string{annVolumeHandle: unspecified} })
	for name, test := range map[string]struct {
		volumes     []*corev1.PersistentVolume
		attachments []*storagev1.VolumeAttachment
		listed      map[string][]string
		want        []string
	}{
		"a PV":           {inZones("z"), nil, map[string][]string{disk: {}}, nil},
		"an attached PV": {inZones("z"), attached(func(*storagev1.VolumeAttachment) {}), map[string][]string{disk: {"id"}}, nil},
		"another volume": {inZones("z"), nil, map[string][]string{"projects/p/zones/z/disks/another": {}}, []string{
			"volume_without_pv projects/p/zones/z/disks/another",
			"pv_without_volume PersistentVolume pv projects/UNSPECIFIED/zones/z/disks/disk",
		}},
		"zones of two regions": {inZones("europe-west1-b__europe-west2-c"), nil, map[string][]string{disk: {}}, nil},
		"an inline volume":     {nil, inline, map[string][]string{disk: {"id"}}, nil},
		"an inline volume that is not published": {
			nil, inline, map[string][]string{disk: {}}, []string{"attached_not_published VolumeAttachment a " + disk + " id"},
		},
		"two volumes of one name":    {nil, inline, map[string][]string{disk: {"id"}, twin: {}}, nil},
		"two that are not published": {nil, inline, map[string][]string{disk: {}, twin: {}}, nil},
		"a PV that was removed":      {nil, recorded, map[string][]string{disk: {"id"}}, nil},
	} {
		c := comparison{driver: gce, listed: Listed{Volumes: test.listed, Nodes: true}, cluster: ClusterState{
			Volumes: test.volumes, Attachments: test.attachments, Attached: true, NodeIDs: map[string]string{"n": "id"},
		}}
		if got := texts(c.findings()); !slices.Equal(got, test.want) {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

func TestPossibleUsers(t *testing.T) {
	t.Parallel()
	claim := func(owner, volume string, finalizers ...string) *corev1.PersistentVolumeClaim {
		pvc := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Finalizers: finalizers}}
		pvc.Annotations = map[string]string{
			storagehelpers.AnnStorageProvisioner: owner, kube.AnnProvisioningRequest: fmt.Sprintf(`{"driver":%q}`, driver),
		}
		pvc.Spec.VolumeName = volume
		return pvc
	}
	const pending = "; it may belong to a claim that is being provisioned"
	const unknown = "; it may belong to a claim whose CreateVolume outcome is unknown"
	type claims = []*corev1.PersistentVolumeClaim
	for name, test := range map[string]struct {
		driver string
		claims claims
		unread []string
		want   string
	}{
		"no claim":                  {driver, nil, nil, ""},
		"pending claims":            {driver, claims{claim(driver, ""), claim(driver, "")}, nil, pending + " (claims: 2)"},
		"a bound claim":             {driver, claims{claim(driver, "pv")}, nil, ""},
		"a claim of another driver": {driver, claims{claim("other.example.com", "")}, nil, ""},
		"a record and a pending claim": {
			driver, claims{claim(driver, "", kube.ProvisioningFinalizer), claim(driver, "")}, nil,
			unknown + " (claims: 1)" + pending + " (claims: 1)",
		},
		"a driver with an in-tree plugin": {
			"disk.csi.azure.com", nil, nil, "; it may be an inline volume (kubernetes.io/azure-disk) of a pod",
		},
		"without permissions": {
			driver, nil, []string{"VolumeAttachments", "PersistentVolumeClaims"},
			"; it may be in use by objects that were not read: VolumeAttachments, PersistentVolumeClaims",
		},
	} {
		listed := Listed{Volumes: map[string][]string{"v": {}}}
		found := comparison{driver: test.driver, cluster: ClusterState{Claims: test.claims, Unread: test.unread}, listed: listed}.findings()
		want := "no PersistentVolume or VolumeAttachment has this volume handle" + test.want
		if len(found) != 1 || found[0].Message != want {
			t.Errorf("%s: %+v, want %q", name, found, want)
		}
	}
}

func TestStuck(t *testing.T) {
	t.Parallel()
	now := time.Now()
	old, young := metav1.NewTime(now.Add(-time.Hour)), metav1.NewTime(now.Add(-time.Second))
	pv, fresh, foreign := volume("pv", driver, "v"), volume("fresh", driver, "w"), volume("foreign", "other.example.com", "x")
	pv.DeletionTimestamp, fresh.DeletionTimestamp, foreign.DeletionTimestamp = &old, &young, &old
	pv.Finalizers = []string{"kubernetes.io/pv-protection", "external-attacher/drv-example-com", "example.com/x"}
	claim := func(name string) *corev1.PersistentVolumeClaim {
		return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, DeletionTimestamp: &old}}
	}
	mine, bound, others := claim("mine"), claim("static"), claim("theirs")
	mine.Annotations = map[string]string{storagehelpers.AnnStorageProvisioner: driver}
	bound.Spec.VolumeName = "fresh"
	c := comparison{driver: driver, stuckAfter: time.Minute, now: now, cluster: ClusterState{
		Volumes: []*corev1.PersistentVolume{pv, fresh, foreign},
		Claims:  []*corev1.PersistentVolumeClaim{mine, bound, others},
		Others:  map[string]metav1.Object{"Node n": &metav1.ObjectMeta{DeletionTimestamp: &old, Finalizers: []string{driver + "/node"}}},
	}}
	found := c.findings()
	want := []string{"stuck Node n", "stuck PersistentVolume pv", "stuck PersistentVolumeClaim ns/mine",
		"stuck PersistentVolumeClaim ns/static"}
	if have := texts(found); !slices.Equal(have, want) {
		t.Fatalf("%q, want %q", have, want)
	}
	if f := found[0].Finalizers[0]; !strings.Contains(f.By, "the nodecontroller") {
		t.Errorf("%+v", f)
	}
	for i, text := range []string{"kube-controller-manager", "the attacher of driver drv.example.com", "unknown (owner of example.com"} {
		if f := found[1].Finalizers[i]; !strings.Contains(f.By, text) {
			t.Errorf("%+v, want %q", f, text)
		}
	}
}

func TestPersistent(t *testing.T) {
	t.Parallel()
	a, b := Finding{VolumeHandle: "a"}.of(VolumeWithoutPV, "", ""), Finding{VolumeHandle: "b"}.of(VolumeWithoutPV, "", "")
	again := a
	again.Message = "an hour older"
	if got := persistent([]Finding{a}, []Finding{again, b}); len(got) != 1 || got[0].VolumeHandle != "a" {
		t.Errorf("%+v", got)
	}
	stuck := Finding{}.of(Stuck, "PersistentVolume p", "")
	if got := persistent([]Finding{a}, []Finding{stuck}); len(got) != 1 || got[0].Topic != Stuck {
		t.Errorf("stuck since the first scan: %+v", got)
	}
	recreated := Finding{UID: "2"}.of(PVWithoutVolume, "PersistentVolume p", "")
	before := recreated
	before.UID = "1"
	if got := persistent([]Finding{before}, []Finding{recreated}); len(got) != 0 {
		t.Errorf("an object that was recreated: %+v", got)
	}
}

// FuzzFindings searches for a finding about a volume that both sides have, and for findings
// that depend on the order of the input.
func FuzzFindings(f *testing.F) {
	f.Add("a b c", "b c d", "b:id c:id", "c")
	f.Fuzz(func(t *testing.T, volumes, listed, published, attached string) {
		var w ClusterState
		l := Listed{Volumes: map[string][]string{}, Nodes: true}
		known := map[string]bool{}
		for i, h := range strings.Fields(volumes) {
			w.Volumes = append(w.Volumes, volume(fmt.Sprint("pv", i), driver, h))
			known[h] = true
		}
		for _, h := range strings.Fields(listed) {
			l.Volumes[h] = []string{}
		}
		for _, p := range strings.Fields(published) {
			if h, node, ok := strings.Cut(p, ":"); ok {
				l.Volumes[h] = append(l.Volumes[h], node)
			}
		}
		for i := range strings.Fields(attached) {
			w.Attachments = append(w.Attachments, attachment(fmt.Sprint("a", i), fmt.Sprint("pv", i), "n", true))
		}
		w.Attached, w.NodeIDs = true, map[string]string{"n": "id"}
		c := comparison{driver: driver, cluster: w, listed: l, now: time.Now(), stuckAfter: time.Minute}
		found := c.findings()
		for _, f := range found {
			_, lists := l.Volumes[f.VolumeHandle]
			if f.Topic == VolumeWithoutPV && (known[f.VolumeHandle] || !lists) || f.Topic == PVWithoutVolume && lists {
				t.Errorf("%+v", f)
			}
		}
		slices.Reverse(c.cluster.Volumes)
		if again := c.findings(); !slices.Equal(texts(found), texts(again)) {
			t.Errorf("%q in another order is %q", texts(found), texts(again))
		}
	})
}
