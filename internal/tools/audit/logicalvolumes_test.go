// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/topolvm"
)

// TestLogicalVolumes: they stand for the lists of the driver, which is not asked.
func TestLogicalVolumes(t *testing.T) {
	t.Parallel()
	const uid = "0b6c0f4e-5ee8-4b0c-9d3c-5f1d1a2b3c4d"
	now := time.Now()
	lv := func(name string, change func(*topolvm.LogicalVolume)) *topolvm.LogicalVolume {
		lv := &topolvm.LogicalVolume{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("id-" + name),
			CreationTimestamp: metav1.NewTime(now.Add(-2 * time.Minute))}, Spec: topolvm.Spec{NodeName: "n", Size: 1 << 30}}
		if change != nil {
			change(lv)
		}
		return lv
	}
	claim := func(change func(*corev1.PersistentVolumeClaim)) []*corev1.PersistentVolumeClaim {
		pvc := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "data", UID: uid}}
		change(pvc)
		return []*corev1.PersistentVolumeClaim{pvc}
	}
	pending := claim(func(*corev1.PersistentVolumeClaim) {})
	recorded := func(lv *topolvm.LogicalVolume) {
		lv.Annotations = map[string]string{"storage-controller.io/claim": "ns/data"}
	}
	snapshot := lv("s", func(lv *topolvm.LogicalVolume) { lv.Spec.AccessType = "ro" })
	type lvs = []*topolvm.LogicalVolume
	type pvs = []*corev1.PersistentVolume
	for name, tt := range map[string]struct {
		state ClusterState
		want  []string
	}{
		"not read":     {ClusterState{Volumes: pvs{volume("pv", topolvm.Driver, "id-v")}}, nil},
		"none":         {ClusterState{LogicalVolumes: lvs{}}, nil},
		"unreferenced": {ClusterState{LogicalVolumes: lvs{lv("v", nil)}}, []string{"volume_without_pv LogicalVolume v id-v n"}},
		"with a PersistentVolume": {ClusterState{LogicalVolumes: lvs{lv("v", nil)},
			Volumes: pvs{volume("pv", topolvm.Driver, "id-v")}}, nil},
		"with a PersistentVolume of the volume ID": {ClusterState{Volumes: pvs{volume("pv", topolvm.Driver, "old")},
			LogicalVolumes: lvs{lv("v", func(lv *topolvm.LogicalVolume) { lv.Status.VolumeID = "old" })}}, nil},
		"with a PersistentVolume of another driver": {ClusterState{LogicalVolumes: lvs{lv("v", nil)},
			Volumes: pvs{volume("pv", "other.example.com", "id-v")}}, []string{"volume_without_pv LogicalVolume v id-v n"}},
		"new": {ClusterState{LogicalVolumes: lvs{lv("v", func(lv *topolvm.LogicalVolume) {
			lv.CreationTimestamp = metav1.NewTime(now.Add(-59 * time.Second))
		})}}, nil},
		"of a pending claim by its name":       {ClusterState{LogicalVolumes: lvs{lv("pvc-"+uid, nil)}, Claims: pending}, nil},
		"of a pending claim by the annotation": {ClusterState{LogicalVolumes: lvs{lv("v", recorded)}, Claims: pending}, nil},
		"of a claim whose request is recorded": {ClusterState{LogicalVolumes: lvs{lv("v", recorded)},
			Claims: claim(func(c *corev1.PersistentVolumeClaim) {
				c.Spec.VolumeName, c.Finalizers = "pv", []string{"storage-controller.io/provisioning"}
			})}, nil},
		"of a bound claim": {ClusterState{LogicalVolumes: lvs{lv("v", recorded)}, Claims: claim(func(c *corev1.PersistentVolumeClaim) {
			c.Spec.VolumeName = "pv"
		})}, []string{"volume_without_pv LogicalVolume v id-v n"}},
		"deleted long ago": {ClusterState{Volumes: pvs{volume("pv", topolvm.Driver, "id-v")},
			LogicalVolumes: lvs{lv("v", func(lv *topolvm.LogicalVolume) {
				lv.DeletionTimestamp = &metav1.Time{Time: now.Add(-time.Hour)}
			})}}, []string{"stuck LogicalVolume v"}},
		"a PersistentVolume without a LogicalVolume": {ClusterState{LogicalVolumes: lvs{},
			Volumes: pvs{volume("pv", topolvm.Driver, "id-v")}}, []string{"pv_without_volume PersistentVolume pv id-v"}},
		"a snapshot": {ClusterState{LogicalVolumes: lvs{snapshot}, Contents: []Content{{"c", "", "id-s"}}}, nil},
		"a snapshot without its content": {ClusterState{LogicalVolumes: lvs{snapshot}, Contents: []Content{}},
			[]string{"snapshot_without_content"}},
		"a content without its snapshot": {ClusterState{LogicalVolumes: lvs{}, Contents: []Content{{"c", "", "id-s"}}}, []string{
			"content_without_snapshot VolumeSnapshotContent c"}},
	} {
		a := Auditor{
			Config: Config{StuckAfter: time.Minute, Settle: time.Nanosecond}, Driver: csiclient.Driver{Name: topolvm.Driver},
			LogicalVolumes: true, Now: func() time.Time { return now },
			Read: func(context.Context) (ClusterState, error) { return tt.state, nil },
		}
		report, err := a.Audit(t.Context())
		if have := texts(report.Findings); err != nil || !slices.Equal(have, tt.want) {
			t.Errorf("%s: %q, %v, want %q", name, have, err, tt.want)
		}
	}
}

// TestReadLogicalVolumes: without the permission, or without the CustomResourceDefinition, they are not compared.
func TestReadLogicalVolumes(t *testing.T) {
	t.Parallel()
	const notCompared = " Volumes and snapshots were not compared."
	for status, want := range map[int]struct{ note, err string }{
		http.StatusOK:        {},
		http.StatusForbidden: {"Cannot list LogicalVolumes: permission denied." + notCompared, ""},
		http.StatusNotFound:  {"The cluster does not serve LogicalVolumes of topolvm.io." + notCompared, ""},
		http.StatusInternalServerError: {`Cannot list LogicalVolumes: an error on the server ("unknown") has prevented the request from succeeding.` +
			notCompared, "listing LogicalVolumes"},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			if r.URL.Path != "/apis/topolvm.io/v1/logicalvolumes" || status != http.StatusOK {
				w.WriteHeader(max(status, http.StatusBadRequest))
				return
			}
			fmt.Fprint(w, `{"kind":"LogicalVolumeList","apiVersion":"topolvm.io/v1","metadata":{},"items":[{"kind":"LogicalVolume",`+
				`"apiVersion":"topolvm.io/v1","metadata":{"name":"v","uid":"id"},"spec":{"size":"1Gi"},"status":{"currentSize":1024}}]}`)
		}))
		defer server.Close()
		client := dynamic.NewForConfigOrDie(&rest.Config{Host: server.URL})
		r := newReading(APIReader{Clients: apiread.Clients{Dynamic: client}, Driver: topolvm.Driver})
		err := r.logicalVolumes(t.Context())
		state := r.state
		if (err != nil) != (want.err != "") || err != nil && !strings.Contains(err.Error(), want.err) {
			t.Errorf("%d: %v", status, err)
		}
		got := ""
		for _, f := range state.NotCompared {
			got += f.Message
		}
		if got != want.note {
			t.Errorf("%d: %q", status, got)
		}
		if status != http.StatusOK {
			if state.LogicalVolumes != nil {
				t.Errorf("%d: %v", status, state.LogicalVolumes)
			}
			continue
		}
		lv := *state.LogicalVolumes[0]
		if lv.UID != "id" || lv.Spec.Size != 1<<30 || lv.Status.CurrentSize != 1024 || len(state.LogicalVolumes) != 1 {
			t.Errorf("%+v", lv)
		}
	}
}
