// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
)

// takeoverScenarios: topolvm-controller and the service continue from the LogicalVolumes of each other.
var takeoverScenarios = []scenario{
	{"086_written_by_topolvm_controller", func(t *testing.T) {
		f := start(t)
		f.write("source", "", `"size":"1Gi","deviceClass":"thin"`)
		source := f.created("source", f.class("thin"), f.on("a"))
		const asked = `,"annotations":{"DRIVER/resize-requested-at":"2026-01-02 03:04:05.678901234 +0000 UTC"}`
		rows := map[string]struct {
			metadata, spec string // in JSON
			request        []change
			size           int64
		}{
			"default-class": {"", `"size":"1Gi"`, []change{f.class("")}, gi},
			"thick":         {"", `"size":"1Gi","deviceClass":"ssd"`, nil, gi},
			"thin":          {"", `"size":"1Gi","deviceClass":"thin"`, []change{f.class("thin")}, gi},
			"option-class":  {"", `"size":"1Gi","deviceClass":"ssd","lvcreateOptionClass":"raid"`, nil, gi},
			"size-in-bytes": {"", `"size":"1048580Ki","deviceClass":"ssd"`, []change{size(gi + 4096)}, gi + 4*mi},
			"expanded":      {asked, `"size":"2Gi","deviceClass":"ssd"`, nil, 2 * gi},
			"clone": {"", `"size":"1Gi","deviceClass":"thin","source":"source","accessType":"rw"`,
				[]change{f.class("thin"), fromVolume(source.VolumeId)}, gi},
		}
		f.requests.take()
		f.nodes["a"].Stop() // topolvm-controller exits during its calls
		created, written := map[string]chan *csi.Volume{}, map[string]string{}
		for name, row := range rows {
			f.write(name, row.metadata, row.spec)
			written[name] = string(f.lv(name).UID)
			done := make(chan *csi.Volume, 1)
			created[name] = done
			go func() {
				defer close(done)
				done <- f.created(name, append(row.request, f.on("a"))...)
			}()
		}
		f.write("snapshot", "", `"size":"1Gi","deviceClass":"thin","source":"source","accessType":"ro"`)
		f.nodes["a"].Run()
		for name, row := range rows {
			v, again := <-created[name], f.created(name, append(row.request, f.on("a"))...)
			if v.GetVolumeId() != written[name] || again.VolumeId != v.VolumeId || again.CapacityBytes != row.size {
				t.Errorf("%s: %v and %v", name, v, again)
			}
		}
		s, err := f.snapshot("snapshot", source.VolumeId)
		if err != nil || s.SnapshotId != string(f.lv("snapshot").UID) || s.SizeBytes != gi {
			t.Errorf("%v %v", s, err)
		}
		for _, r := range f.requests.take() {
			if r.verb == http.MethodPatch || r.verb == http.MethodDelete {
				t.Errorf("%s %s: %s", r.verb, r.name, r.body)
			}
		}
		for name, row := range rows {
			id := written[name]
			if response, err := f.expand(id, row.size+gi, nil); err != nil || response.CapacityBytes != row.size+gi {
				t.Errorf("%s: %v %v", name, response, err)
			}
			if strings.Contains(row.spec, "thin") {
				if _, err := f.snapshot("of-"+name, id); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
			if err := f.delete(id); err != nil || f.lv(name) != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		_, err = f.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: s.SnapshotId})
		if err != nil || f.lv("snapshot") != nil {
			t.Error(err)
		}
	}},
	{"086_written_for_topolvm_controller", func(t *testing.T) {
		f := start(t)
		volume := func(changes ...change) func(string) error {
			return func(name string) error { _, err := f.create(name, append(changes, f.on("a"))...); return err }
		}
		source := f.created("source", f.class("thin"), f.on("a"), size(gi+1)).VolumeId
		f.requests.take()
		for _, row := range []struct {
			name, more, spec string // more annotations
			call             func(name string) error
		}{
			{"default-class", "", `"size":"1Gi"`, volume(f.class(""))},
			{"minimum", "", `"size":"300Mi","deviceClass":"ssd"`, volume(size(mi))},
			{"option-class", `,"storage-controller.io/claim":"default/data"`,
				`"size":"1Gi","deviceClass":"ssd","lvcreateOptionClass":"raid"`, volume(func(r *csi.CreateVolumeRequest) {
					r.Parameters[f.driver+"/lvcreate-option-class"] = "raid"
					r.Parameters["csi.storage.k8s.io/pvc/name"], r.Parameters["csi.storage.k8s.io/pvc/namespace"] = "data", "default"
				})},
			{"Capital", "", `"size":"1Gi","deviceClass":"ssd"`, volume()},
			{"clone", "", `"size":"2Gi","deviceClass":"thin","source":"source","accessType":"rw"`,
				volume(f.class("thin"), size(2*gi), fromVolume(source))},
			{"snapshot", "", `"size":"1028Mi","deviceClass":"thin","source":"source","accessType":"ro"`,
				func(name string) error { _, err := f.snapshot(name, source); return err }},
		} {
			if err := row.call(row.name); err != nil {
				t.Fatal(err)
			}
			want := fmt.Sprintf(`{"apiVersion":"DRIVER/v1","kind":"LogicalVolume","spec":{"name":%q,"nodeName":%q,%s},`+
				`"metadata":{"name":%[1]q,"finalizers":["DRIVER/logicalvolume"],"labels":{"app.kubernetes.io/created-by":"topolvm-controller"},`+
				`"annotations":{"storage-controller.io/volume-name":%[4]q%[5]s}}}`,
				strings.ToLower(row.name), f.value("a"), row.spec, row.name, row.more)
			f.wrote(t, http.MethodPost, want)
		}
		v := f.lv("minimum")
		if _, err := f.expand(string(v.UID), gi, nil); err != nil {
			t.Fatal(err)
		}
		at := f.lv("minimum").Annotations[f.driver+"/resize-requested-at"]
		f.wrote(t, http.MethodPatch, fmt.Sprintf(`{"metadata":{"uid":%q,"resourceVersion":%q,"annotations":`+
			`{"DRIVER/resize-requested-at":%q}},"spec":{"size":"1Gi"}}`, v.UID, v.ResourceVersion, at))
		if err := f.delete(string(v.UID)); err != nil {
			t.Fatal(err)
		}
		f.wrote(t, http.MethodDelete, fmt.Sprintf(`{"apiVersion":"DRIVER/v1","kind":"DeleteOptions","preconditions":{"uid":%q}}`, v.UID))
	}},
}

// write creates a LogicalVolume on node a with these fields in JSON, as topolvm-controller does.
func (f *fixture) write(name, metadata, spec string) {
	f.t.Helper()
	text := fmt.Sprintf(`{"apiVersion":"DRIVER/v1","kind":"LogicalVolume","metadata":{"name":%q%s},`+
		`"spec":{"name":%q,"nodeName":%q,%s},"status":{}}`, name, metadata, name, f.value("a"), spec)
	err := f.client.Discovery().RESTClient().Post().AbsPath("/apis/"+f.driver+"/v1/logicalvolumes").
		SetHeader("Content-Type", "application/json").Body([]byte(strings.ReplaceAll(text, "DRIVER", f.driver))).Do(f.t.Context()).Error()
	if err != nil {
		f.t.Fatalf("%s: %v", text, err)
	}
}

// wrote fails the test unless the only write since the last call has this method and this body in JSON.
func (f *fixture) wrote(t *testing.T, method, body string) {
	t.Helper()
	var got []request
	for _, r := range f.requests.take() {
		if r.verb != http.MethodGet && r.verb != "LIST" {
			got = append(got, r)
		}
	}
	if len(got) != 1 || got[0].verb != method {
		t.Fatalf("writes %+v, want one %s", got, method)
	}
	var have, want any
	for text, into := range map[string]*any{got[0].body: &have, strings.ReplaceAll(body, "DRIVER", f.driver): &want} {
		if err := json.Unmarshal([]byte(text), into); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("%s of another object than topolvm-controller reads: %s", method, diff)
	}
}
