// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

func TestSnapshotterScenarioCreate(t *testing.T) {
	t.Run("001_created", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.content("v1", nil)
		o := f.until("is complete", isComplete)
		r := f.created()
		if len(r) != 1 || r[0].Name != "snapshot-"+uid || r[0].SourceVolumeId != f.volume ||
			!maps.Equal(r[0].Parameters, map[string]string{"a": "b"}) {
			t.Errorf("requests %v", r)
		}
		s, want := o.Status, f.Plugin.Snapshots()[0]
		if *s.SnapshotHandle != want.ID || *s.RestoreSize != want.Size || time.Since(time.Unix(0, *s.CreationTime)) > time.Hour ||
			!slices.Equal(o.Finalizers, []string{Finalizer}) {
			t.Errorf("got %+v", o)
		}
	})
	t.Run("002_annotated_during_the_call", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(createSnapshot, csitest.Hang())
		f.content("v1", nil)
		f.Wait(createSnapshot, 1)
		o, err := f.get(t.Context(), "v1")
		f.Must(err)
		if !has(o, AnnBeingCreated) || !slices.Contains(o.Finalizers, Finalizer) || o.Status != nil {
			t.Errorf("during the call: %+v", o)
		}
		f.Plugin.Release()
		f.until("is complete", isComplete)
	})
	t.Run("003_finalizer", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		race := true
		f.requests.refusing(func(r request) int {
			if race && strings.Contains(r.body, Finalizer) { // the snapshot-controller adds it at the same moment
				race = false
				_, err := f.contents.Patch(t.Context(), f.Unique("v1"), types.MergePatchType,
					[]byte(fmt.Sprintf(`{"metadata":{"finalizers":[%q]}}`, Finalizer)), metav1.PatchOptions{})
				f.Must(err)
			}
			return 0
		})
		f.Plugin.Next(createSnapshot, csitest.Hang())
		f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) { o.Finalizers = nil })
		f.Wait(createSnapshot, 1)
		o, err := f.get(t.Context(), "v1")
		f.Must(err)
		if !slices.Equal(o.Finalizers, []string{Finalizer}) || race {
			t.Errorf("finalizers before the call: %v", o.Finalizers)
		}
		f.Plugin.Release()
		f.until("is complete", isComplete)
	})
	t.Run("004_name", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.SnapshotNamePrefix, c.SnapshotNameUUIDLength = "p", 8 })
		f.content("v1", nil)
		f.Wait(createSnapshot, 1)
		if name := f.created()[0].Name; name != "p-0123abcd" {
			t.Errorf("name %q", name)
		}
	})
	t.Run("005_006_size_and_time", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		change := func(size int64, at *timestamppb.Timestamp) csitest.Step {
			return csitest.Alter(func(r *csi.CreateSnapshotResponse) { r.Snapshot.SizeBytes, r.Snapshot.CreationTime = size, at })
		}
		f.Plugin.Next(createSnapshot, change(0, nil))
		f.content("v1", nil)
		o := f.until("is complete", isComplete)
		if o.Status.RestoreSize != nil || time.Since(time.Unix(0, *o.Status.CreationTime)) > time.Hour {
			t.Errorf("got %+v", o.Status)
		}
		f.Plugin.Next(createSnapshot, change(5, &timestamppb.Timestamp{Seconds: time.Now().UnixNano()}))
		f.content("v2", func(o *snapshotv1.VolumeSnapshotContent) { o.Spec.VolumeSnapshotRef.UID = "two" })
		if o = f.untilOf("v2", "is complete", isComplete); ptr.Deref(o.Status.RestoreSize, 0) != 5 ||
			time.Since(time.Unix(0, *o.Status.CreationTime)).Abs() > time.Hour {
			t.Errorf("got %+v", o.Status)
		}
	})
	t.Run("007_invalid_answer", func(t *testing.T) {
		for name, change := range map[string]func(*csi.CreateSnapshotResponse){
			"none":             func(r *csi.CreateSnapshotResponse) { r.Snapshot = nil },
			"without_a_handle": func(r *csi.CreateSnapshotResponse) { r.Snapshot.SnapshotId = "" },
			"negative":         func(r *csi.CreateSnapshotResponse) { r.Snapshot.SizeBytes = -1 },
			"two_lines":        func(r *csi.CreateSnapshotResponse) { r.Snapshot.SnapshotId = "a\nb" },
			"long_group":       func(r *csi.CreateSnapshotResponse) { r.Snapshot.GroupSnapshotId = strings.Repeat("g", 2000) },
		} {
			t.Run(name, func(t *testing.T) {
				f := scenario(t, csitest.Config{}, nil)
				f.Plugin.Always(createSnapshot, csitest.Alter(change))
				f.content("v1", nil)
				o := f.until("reports it", hasError("Failed to create snapshot: ", "invalid response of the driver"))
				if o.Status.SnapshotHandle != nil {
					t.Errorf("status %+v", o.Status)
				}
				f.Plugin.Always(createSnapshot, nil)
				f.until("is complete", isComplete)
			})
		}
	})
	t.Run("008_extra_metadata", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.ExtraCreateMetadata = true })
		f.content("v1", nil)
		f.Wait(createSnapshot, 1)
		want := map[string]string{
			"a": "b", "csi.storage.k8s.io/volumesnapshot/name": "s1", "csi.storage.k8s.io/volumesnapshot/namespace": f.Namespace,
			"csi.storage.k8s.io/volumesnapshotcontent/name": f.Unique("v1"),
		}
		if got := f.created()[0].Parameters; !maps.Equal(got, want) {
			t.Errorf("parameters %v", got)
		}
	})
	t.Run("009_reserved_parameters", func(t *testing.T) {
		f := newFixture(t, csitest.Config{}, nil)
		parameters := map[string]string{"a": "b"}
		for _, key := range sidecarParameters {
			parameters["csi.storage.k8s.io/"+key] = "x"
		}
		f.class("c1", parameters)
		f.class("c2", map[string]string{"csi.storage.k8s.io/foo": "x"})
		f.start()
		f.content("v1", nil)
		f.until("is complete", isComplete)
		if got := f.created()[0].Parameters; !maps.Equal(got, map[string]string{"a": "b"}) {
			t.Errorf("parameters %v", got)
		}
		f.content("v2", func(o *snapshotv1.VolumeSnapshotContent) { o.Spec.VolumeSnapshotClassName = ptr.To(f.Unique("c2")) })
		o := f.untilOf("v2", "reports it", hasError("Failed to create snapshot: failed to remove CSI Parameters of prefixed keys: "+
			`found unknown parameter key "csi.storage.k8s.io/foo" with reserved namespace csi.storage.k8s.io/`))
		if has(o, AnnBeingCreated) {
			t.Error("the annotation is set")
		}
		f.delete("v2")
		f.untilOf("v2", "is deleted", isDeleted)
		f.Calls(createSnapshot, 1)
		f.Calls(removeSnapshot, 0)
	})
	t.Run("010_secret", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.content("v1", f.withSecret)
		f.until("reports it", hasError("Failed to create snapshot: failed to get input parameters to create snapshot for content "+
			f.Unique("v1"), "cannot get credentials for snapshot content", f.Namespace+"/s", "not found"))
		f.content("v2", f.withSecret)
		f.untilOf("v2", "reports it", hasError("not found"))
		f.delete("v2")
		f.untilOf("v2", "is deleted", isDeleted)
		f.Calls(createSnapshot, 0)
		f.secret("s", map[string]string{"k": "v"})
		f.until("is complete", isComplete)
		if got := f.created()[0].Secrets; !maps.Equal(got, map[string]string{"k": "v"}) {
			t.Errorf("secrets %v", got)
		}
	})
	t.Run("011_half_a_secret", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) { o.Annotations = map[string]string{AnnSecretName: "s"} })
		f.until("is complete", isComplete)
		if got := f.created()[0].Secrets; len(got) > 0 {
			t.Errorf("secrets %v", got)
		}
		f.content("v2", func(o *snapshotv1.VolumeSnapshotContent) {
			o.Annotations = map[string]string{AnnSecretName: "s", AnnSecretNamespace: ""}
		})
		f.untilOf("v2", "reports it", hasError("cannot retrieve secrets for snapshot content",
			"err: secret name or namespace not specified"))
		f.Calls(createSnapshot, 1)
	})
	t.Run("012_class_created_later", func(t *testing.T) {
		f := newFixture(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Hour, time.Hour })
		f.start()
		f.content("v1", nil)
		f.until("reports it", hasError("Failed to create snapshot: failed to get input parameters to create snapshot for content "+
			f.Unique("v1")+`: "volumesnapshotclass.snapshot.storage.k8s.io \"`+f.Unique("c1")+`\" not found"`))
		f.class("c1", map[string]string{"a": "b"})
		f.until("is complete", isComplete) // long before the back-off of an hour ends
	})
	t.Run("012_class_corrected", func(t *testing.T) {
		good := map[string]string{"a": "good"}
		for name, restart := range map[string]bool{"": false, "_after_a_restart": true} {
			for _, code := range []codes.Code{codes.InvalidArgument, codes.Internal} {
				t.Run(code.String()+name, func(t *testing.T) {
					f := newFixture(t, csitest.Config{}, nil)
					f.Plugin.Always(createSnapshot, func(_ context.Context, _ *csitest.Plugin, r any, do func() (any, error)) (any, error) {
						if !maps.Equal(r.(*csi.CreateSnapshotRequest).Parameters, good) {
							return nil, status.Error(code, "bad parameters")
						}
						return do()
					})
					f.class("c1", map[string]string{"a": "bad"})
					f.start()
					f.content("v1", nil)
					f.until("reports it", hasError("bad parameters"))
					if restart {
						f.Crash()
					}
					f.deleteClass("c1")
					f.class("c1", good)
					if restart {
						f.start()
					}
					o := f.until("is complete", isComplete)
					if request, err := snapshotContent(o).recordedRequest(); err != nil || !maps.Equal(request.Parameters, good) {
						t.Errorf("record %v, %v", request, err)
					}
				})
			}
		}
	})
	t.Run("012_class_changed_while_indeterminate", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.indeterminate(codes.Unavailable)
		f.deleteClass("c1")
		f.class("c1", map[string]string{"a": "other"})
		f.Plugin.Always(createSnapshot, nil)
		f.until("is complete", isComplete)
		for _, r := range f.created() {
			if r.Parameters["a"] != "b" {
				t.Errorf("request %v", r)
			}
		}
	})
	t.Run("013_no_class_and_class_of_another_driver", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.classOf("c2", "other.example.com", nil)
		f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) { o.Spec.VolumeSnapshotClassName = nil })
		f.until("reports it", hasError("failed to take snapshot "+f.Unique("v1")+" without a snapshot class"))
		v2 := f.content("v2", func(o *snapshotv1.VolumeSnapshotContent) { o.Spec.VolumeSnapshotClassName = ptr.To(f.Unique("c2")) })
		f.quiet()
		f.unchanged("v2", v2)
		f.Calls(createSnapshot, 0)
	})
	t.Run("014_unbound", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) { o.Spec.VolumeSnapshotRef.UID = "" })
		o := f.until("reports it", hasError("cannot create snapshot. Snapshot content "+f.Unique("v1")+" not bound to a snapshot"))
		if has(o, AnnBeingCreated) {
			t.Error("the annotation is set")
		}
		f.delete("v1")
		f.until("is deleted", isDeleted)
		f.Calls(createSnapshot, 0)
	})
	t.Run("no_source", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) {
			o.Spec.Source = snapshotv1.VolumeSnapshotContentSource{SnapshotHandle: ptr.To("")}
		})
		f.until("reports it", hasError("Failed to create snapshot: spec.source of VolumeSnapshotContent "+f.Unique("v1"),
			"has empty handles"))
		f.delete("v1")
		f.until("is deleted", isDeleted)
		f.Calls(createSnapshot, 0)
		f.Calls(removeSnapshot, 0)
	})
	t.Run("015_other_driver", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		v1 := f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) { o.Spec.Driver = "other.example.com" })
		f.quiet()
		f.unchanged("v1", v1)
		f.delete("v1")
		f.quiet()
		if o, err := f.get(t.Context(), "v1"); err != nil || o == nil {
			t.Errorf("%v, %v", o, err)
		}
		f.Calls(createSnapshot, 0)
		f.patch("v1", fmt.Sprintf(`{"spec":{"driver":%q},"metadata":{"finalizers":null}}`, f.Driver))
	})
	t.Run("016_cost", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		const n = 100
		for i := range n {
			f.content(fmt.Sprint("n", i), func(o *snapshotv1.VolumeSnapshotContent) {
				o.Spec.VolumeSnapshotRef.UID = types.UID(fmt.Sprint("uid", i))
			})
		}
		for i := range n {
			f.untilOf(fmt.Sprint("n", i), "is complete", isComplete)
		}
		f.Calls(createSnapshot, n)
		f.Calls("GetPluginInfo", 1) // at the start
		f.writes(3*n, 0)
	})
}

// unchanged fails the test unless a content is as before.
func (f *fixture) unchanged(name string, before *snapshotv1.VolumeSnapshotContent) {
	f.Helper()
	o, err := f.get(f.Context(), name)
	f.Must(err)
	if o == nil || o.ResourceVersion != before.ResourceVersion {
		text, _ := json.Marshal(o)
		f.Errorf("%s was changed: %s", name, text)
	}
}

// internalError refuses a request.
const internalError = http.StatusInternalServerError
