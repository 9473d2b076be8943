// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/topolvm"
	"github.com/storage-controller/storage-controller/topolvm/topolvmtest"
)

// scenario is one of the numbered scenarios of the contract.
type scenario struct {
	name string
	run  func(*testing.T)
}

func runScenarios(t *testing.T, all []scenario) {
	for _, s := range all {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			s.run(t)
		})
	}
}

func TestTopolvmScenario(t *testing.T) {
	runScenarios(t, slices.Concat(serviceScenarios, createScenarios, deleteScenarios, expandScenarios, snapshotScenarios,
		takeoverScenarios))
}

var createScenarios = []scenario{
	{"011_volume", func(t *testing.T) { createsOneVolume(t, start(t, named(topolvm.Driver))) }},
	{"012_response_follows_the_status", func(t *testing.T) {
		f := start(t)
		f.nodes["a"].Delay(3 * time.Second)
		began := time.Now()
		f.created("v", f.on("a"))
		if took := time.Since(began); took < 3*time.Second || took > 8*time.Second {
			t.Errorf("the call took %v", took)
		}
	}},
	{"013_invalid_requests", func(t *testing.T) {
		f := start(t)
		multi := mount("xfs")
		multi.AccessMode = mode(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER)
		for name, c := range map[string]change{
			"no capability":  capable(),
			"no access type": capable(&csi.VolumeCapability{AccessMode: mode(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)}),
			"multi-node":     capable(mount("xfs"), multi),
			"mutable":        func(r *csi.CreateVolumeRequest) { r.MutableParameters = map[string]string{"a": "b"} },
		} {
			_, err := f.create("v", f.on("a"), c)
			if err == nil {
				t.Errorf("%s: no error", name)
			}
			f.fails(err, codes.InvalidArgument)
		}
		f.sent(t)
	}},
	{"014_no_access_mode", func(t *testing.T) {
		f := start(t)
		without := mount("xfs")
		without.AccessMode = nil
		f.created("v", capable(without))
	}},
	{"015_sizes", func(t *testing.T) {
		f := start(t)
		for name, tt := range map[string]struct {
			capability      *csi.VolumeCapability
			required, limit int64
			want            topolvm.Bytes
			code            codes.Code
		}{
			"minimum of block":    {block(), 1, 0, 8 * mi, codes.OK},
			"minimum of ext4":     {mount("ext4"), 0, 0, 32 * mi, codes.OK},
			"empty type is ext4":  {mount(""), 10 * mi, 0, 32 * mi, codes.OK},
			"minimum of xfs":      {mount("xfs"), 10 * mi, gi, 300 * mi, codes.OK},
			"minimum of btrfs":    {mount("btrfs"), 4097, 0, 200 * mi, codes.OK},
			"no minimum":          {mount("foo"), 4097, 0, 8192, codes.OK},
			"default":             {mount("foo"), 0, 0, gi, codes.OK},
			"default below limit": {mount("foo"), 0, 8*mi + 1, 8 * mi, codes.OK},
			"no sector":           {mount("foo"), 0, 4095, 0, codes.OutOfRange},
			"above the limit":     {block(), 0, 4097, 0, codes.OutOfRange},
			"rounded above":       {mount("foo"), 4097, 4097, 0, codes.OutOfRange},
			"negative":            {mount("foo"), -1, 0, 0, codes.InvalidArgument},
			"negative limit":      {block(), 0, -1, 0, codes.InvalidArgument},
		} {
			id := strings.ReplaceAll(name, " ", "-")
			_, err := f.create(id, capable(tt.capability), size(tt.required), limit(tt.limit), f.on("a"))
			f.fails(err, tt.code)
			lv := f.lv(id)
			if (lv != nil) != (tt.code == codes.OK) || lv != nil && lv.Spec.Size != tt.want {
				t.Errorf("%s: %+v", name, lv)
			}
			if tt.code == codes.OutOfRange {
				f.fails(err, tt.code, id)
			}
		}
	}},
	{"016_minimum_of_the_configuration", func(t *testing.T) {
		f := start(t, configured(func(c *topolvm.Config) { c.Minimum.XFS, c.Minimum.Ext4 = gi, -1 }))
		f.created("xfs", size(10*mi))
		f.created("ext4", size(10*mi), capable(mount("ext4")))
		if xfs, ext4 := f.lv("xfs").Spec.Size, f.lv("ext4").Spec.Size; xfs != gi || ext4 != 10*mi {
			t.Errorf("xfs %v, ext4 %v", xfs, ext4)
		}
	}},
	{"017_extents_above_the_limit", func(t *testing.T) {
		f := start(t)
		_, err := f.create("v", size(gi+4096), limit(gi+4096), f.on("a"))
		f.fails(err, codes.OutOfRange, "v", f.value("a"), "ssd")
		f.untilDeleted("v")
		// A volume that an earlier call has returned is not deleted.
		earlier := f.created("w", size(gi+4096), f.on("a"))
		_, err = f.create("w", size(gi+4096), limit(gi+4096), f.on("a"))
		f.fails(err, codes.AlreadyExists, "w")
		if lv := f.lv("w"); lv == nil || lv.Status.VolumeID != earlier.VolumeId || lv.DeletionTimestamp != nil {
			t.Errorf("an existing volume was changed: %+v", lv)
		}
	}},
	{"018_most_capacity", func(t *testing.T) {
		f := start(t)
		for name, free := range map[string]int64{"a": 10 * gi, "b": 30 * gi, "c": 20 * gi} {
			f.nodes[name].Resize("ssd", free)
		}
		f.untilCapacity("ssd", 60*gi)
		if got := f.nodeOf(f.created("v1")); got != "b" {
			t.Errorf("on %s, want b", got)
		}
		_, err := f.create("v2", size(40*gi))
		f.fails(err, codes.ResourceExhausted, "v2", "ssd", f.value("b"))
		f.deleteNode("b")
		f.untilCapacity("ssd", 30*gi)
		if got := f.nodeOf(f.created("v3")); got != "c" {
			t.Errorf("on %s, want c", got)
		}
	}},
	{"019_preferred_first", func(t *testing.T) {
		f := start(t)
		if got := f.nodeOf(f.created("v", f.on("b", "a"))); got != "b" {
			t.Errorf("on %s, want b", got)
		}
		_, err := f.create("w", func(r *csi.CreateVolumeRequest) {
			r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{{Segments: map[string]string{"zone": "a"}}}}
		})
		f.fails(err, codes.InvalidArgument, f.key)
	}},
	{"020_no_node", func(t *testing.T) {
		f := start(t)
		_, err := f.create("v", f.in("none-"+f.value("a")))
		f.fails(err, codes.ResourceExhausted, "v", "none-", "ssd")
		f.sent(t, getNode, getLV)
		f.deleteNode("a")
		f.untilCapacity("ssd", 200*gi)
		_, err = f.create("v", f.on("a"))
		f.fails(err, codes.ResourceExhausted, "being deleted")
		f.sent(t, getLV)
	}},
	{"021_class_of_another_node", func(t *testing.T) {
		f := start(t)
		f.addNode("d", topolvmtest.Class{Name: "nvme", Size: gi})
		full := strings.ReplaceAll(f.driver, ".", "-") + "-e"
		f.nodes["e"] = topolvmtest.Start(t, f.admin, topolvmtest.Config{
			Driver: f.driver, Name: full, Classes: topolvmtest.Classes(), NoCapacity: true,
		})
		f.untilCapacity("nvme", gi)
		_, err := f.create("v", f.class("nvme"), f.on("a"))
		f.fails(err, codes.ResourceExhausted, "nvme", f.value("a"))
		f.sent(t, getLV)
		f.until("node e is known", func() bool { v, err := f.create("w", f.on("e")); return err == nil && f.nodeOf(v) == "e" })
	}},
	{"022_no_space", func(t *testing.T) {
		f := start(t)
		f.nodes["a"].Fail(int64(codes.ResourceExhausted))
		_, err := f.create("v", f.on("a"))
		f.fails(err, codes.ResourceExhausted, "v", f.value("a"), "ssd", "as told")
		f.sent(t, createLV, deleteLV)
		if got := f.nodeOf(f.created("v", f.on("b"))); got != "b" {
			t.Errorf("on %s, want b", got)
		}
	}},
	{"023_codes", func(t *testing.T) {
		f := start(t)
		for code, want := range map[codes.Code]codes.Code{
			codes.NotFound: codes.ResourceExhausted, codes.Unimplemented: codes.Internal, codes.Internal: codes.Internal,
			codes.Unavailable: codes.Internal, codes.DeadlineExceeded: codes.Internal, 99: codes.Internal,
			codes.OutOfRange: codes.OutOfRange, codes.InvalidArgument: codes.InvalidArgument,
			codes.FailedPrecondition: codes.FailedPrecondition,
		} {
			name := fmt.Sprintf("v%d", code)
			f.nodes["a"].Fail(int64(code))
			_, err := f.create(name, f.on("a"))
			f.fails(err, want, name, f.value("a"), "ssd")
			f.untilDeleted(name)
		}
	}},
	{"024_failed_deletion", func(t *testing.T) {
		f := start(t)
		f.nodes["a"].Fail(int64(codes.ResourceExhausted))
		f.requests.intercept(func(r request) int { return map[string]int{http.MethodDelete: http.StatusInternalServerError}[r.verb] })
		_, err := f.create("v", f.on("a"))
		f.fails(err, codes.Aborted, "v", f.value("a"))
		f.requests.intercept(nil)
		f.requests.take()
		_, err = f.create("v", f.on("a"))
		f.fails(err, codes.ResourceExhausted)
		f.sent(t, getLV, deleteLV)
		f.untilDeleted("v")
	}},
	{"025_repeated", func(t *testing.T) {
		f := start(t)
		first := f.created("v", f.on("a"), f.class("thin"))
		if second := f.created("v", f.on("a"), f.class("thin")); second.VolumeId != first.VolumeId {
			t.Errorf("%s and %s", first.VolumeId, second.VolumeId)
		}
		f.sent(t, createLV, getLV)
		other := f.created("w", f.on("a"), f.class("thin"))
		for why, c := range map[string]change{"size": size(2 * gi), "class": f.class("ssd"), "source": fromVolume(other.VolumeId)} {
			_, err := f.create("v", f.on("a"), f.class("thin"), c)
			f.fails(err, codes.AlreadyExists, why, "v", f.value("a"))
		}
		f.created("clone", f.class("thin"), fromVolume(other.VolumeId))
		for _, id := range []string{first.VolumeId, "none"} {
			_, err := f.create("clone", f.class("thin"), fromVolume(id))
			f.fails(err, codes.AlreadyExists, "source", "clone", f.value("a"))
		}
	}},
	{"026_expanded_meanwhile", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.on("a"))
		if _, err := f.expand(v.VolumeId, 2*gi, nil); err != nil {
			t.Fatal(err)
		}
		if again := f.created("v", f.on("a")); again.VolumeId != v.VolumeId || again.CapacityBytes != 2*gi {
			t.Errorf("got %v", again)
		}
	}},
	{"027_volume_on_another_node", func(t *testing.T) {
		f := start(t)
		f.created("v", f.on("a"))
		before := f.lv("v").ResourceVersion
		_, err := f.create("v", f.on("b"))
		f.fails(err, codes.AlreadyExists, "v", f.value("a"))
		if f.lv("v").ResourceVersion != before {
			t.Error("the LogicalVolume was changed")
		}
	}},
	{"028_failed_on_another_node", func(t *testing.T) {
		f := start(t)
		f.nodes["a"].Stop()
		f.abandoned("v", f.on("a"))
		f.requests.take()
		waits := func() bool {
			_, err := f.createWithin(2*time.Second, "v", f.on("b"))
			f.fails(err, codes.DeadlineExceeded)
			return f.lv("v").DeletionTimestamp != nil
		}
		f.until("a call deletes the LogicalVolume on a", waits)
		waits() // and another call does not
		f.sentOnce(t, deleteLV)
		f.nodes["a"].Run()
		if got := f.nodeOf(f.created("v", f.on("b"))); got != "b" || len(f.nodes["a"].Volumes()) > 0 {
			t.Errorf("on %s, volumes on a: %v", got, f.nodes["a"].Volumes())
		}
	}},
	{"029_node_of_the_volume", func(t *testing.T) {
		f := start(t)
		f.created("v", f.on("a"))
		if got := f.nodeOf(f.created("v", f.on("b", "a"))); got != "a" {
			t.Errorf("on %s, want a", got)
		}
	}},
	{"030_terminating", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.on("a"))
		f.nodes["a"].RefuseRemoval(true)
		f.deleteLV("v")
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		_, err := f.service.CreateVolume(ctx, f.request("v", f.on("a")))
		f.fails(err, codes.DeadlineExceeded, "v", f.value("a"))
		done := make(chan *csi.Volume, 1)
		go func() { done <- f.created("v", f.on("a")) }()
		f.nodes["a"].RefuseRemoval(false)
		if again := <-done; again.VolumeId == v.VolumeId {
			t.Error("the ID of the deleted volume was returned")
		}
	}},
	{"031_deleted_behind_the_cache", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.on("a"))
		f.watches.Lock()
		f.deleteLV("v")
		f.untilDeleted("v")
		if again, err := f.createWithin(time.Second, "v", f.on("a")); err == nil && again.VolumeId == v.VolumeId {
			t.Error("the ID of the deleted volume was returned")
		}
		f.watches.Unlock()
		if again := f.created("v", f.on("a")); again.VolumeId == v.VolumeId {
			t.Error("the ID of the deleted volume was returned")
		}
	}},
	{"031_response_behind_the_cache", func(t *testing.T) {
		f := start(t)
		resources, err := f.service.Resources(f.admin)
		if err != nil {
			t.Fatal(err)
		}
		f.created("v", f.on("a"))
		f.watches.Lock()
		f.deleteLV("v")
		f.untilDeleted("v")
		var once sync.Once
		var other *topolvm.LogicalVolume
		f.requests.intercept(func(r request) (answer int) {
			if r.verb == http.MethodGet {
				once.Do(func() { // another client creates it after the API server has read nothing
					other = f.existing("v", "a", func(*topolvm.LogicalVolume) {})
					f.watches.Unlock()
					f.until("the cache has it", func() bool { all := resources.List(); return len(all) == 1 && all[0].UID == other.UID })
					answer = http.StatusNotFound
				})
			}
			return answer
		})
		v, err := f.createWithin(20*time.Second, "v", f.on("a"))
		if err != nil || v.VolumeId != string(other.UID) {
			t.Errorf("got %v %v", v, err)
		}
	}},
	{"032_deleted_during_the_call", func(t *testing.T) {
		f := start(t)
		f.nodes["a"].Stop()
		done := make(chan error, 2)
		call := func(name string) {
			go func() { _, err := f.create(name, f.on("a")); done <- err }()
			f.until(name+" exists", func() bool { return f.lv(name) != nil })
		}
		call("v")
		f.deleteLV("v")
		f.fails(<-done, codes.Aborted, "v", f.value("a"))
		call("w")
		f.nodes["a"].Delete(t)
		f.fails(<-done, codes.Aborted, "w", f.value("a"))
		// The node cleanup removes the LogicalVolumes of the deleted Node. The claim gets another node.
		f.cleanUp()
		if got := f.nodeOf(f.created("w", f.on("b"))); got != "b" {
			t.Errorf("on %s, want b", got)
		}
	}},
	{"033_names", func(t *testing.T) {
		f := start(t)
		f.created("Vol-A")
		_, err := f.create("vol-a")
		f.fails(err, codes.AlreadyExists, "Vol-A")
		f.created("vol-b")
		_, err = f.create("Vol-B")
		f.fails(err, codes.AlreadyExists, "vol-b")
		_, err = f.create("a_b")
		f.fails(err, codes.InvalidArgument, "a_b")
		_, err = f.create("")
		f.fails(err, codes.InvalidArgument)
		f.created(strings.Repeat("a", 128))
	}},
	{"034_volume_of_topolvm_controller", func(t *testing.T) {
		f := start(t)
		lv := f.existing("vol-a", "a", func(*topolvm.LogicalVolume) {})
		if v := f.created("Vol-A", f.on("a")); v.VolumeId != string(lv.UID) {
			t.Errorf("got %s, want %s", v.VolumeId, lv.UID)
		}
	}},
	{"035_lost_status", func(t *testing.T) {
		f := start(t)
		f.nodes["a"].DropStatus()
		if v := f.created("v", f.on("a")); v.CapacityBytes != gi {
			t.Errorf("got %v", v)
		}
	}},
	{"036_deadline", func(t *testing.T) {
		f := start(t)
		f.nodes["a"].Delay(4 * time.Second)
		f.abandoned("v", f.on("a"))
		_, err := f.createWithin(time.Second, "v", f.on("a"))
		f.fails(err, codes.DeadlineExceeded)
		lv := f.lv("v")
		if v := f.created("v", f.on("a")); lv == nil || v.VolumeId != string(lv.UID) {
			t.Errorf("got %v, want that of %v", v, lv)
		}
		f.sentOnce(t, createLV)
	}},
	{"036_deletion_after_a_request_without_a_response", func(t *testing.T) {
		var ahead atomic.Int64
		f := start(t, clocked(func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }))
		f.requests.intercept(func(r request) int { return map[string]int{http.MethodPost: http.StatusGatewayTimeout}[r.verb] })
		_, err := f.create("v", f.on("a"))
		f.fails(err, codes.Unavailable, "v")
		f.requests.intercept(nil)
		v := f.created("v", f.on("a"))
		f.fails(f.delete(v.VolumeId), codes.Aborted, "v", "had no response")
		ahead.Store(int64(3 * time.Minute))
		if err := f.delete(v.VolumeId); err != nil {
			t.Error(err)
		}
	}},
	{"036_request_without_a_response", func(t *testing.T) {
		var ahead atomic.Int64
		f := start(t, clocked(func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }))
		f.requests.intercept(func(r request) int { return map[string]int{http.MethodPost: http.StatusGatewayTimeout}[r.verb] })
		_, err := f.create("v", f.on("a"))
		f.fails(err, codes.Unavailable, "v")
		f.requests.intercept(nil)
		f.deleteNode("a")
		others := 0
		f.until("other creations are refused", func() bool {
			others++
			_, err := f.create(fmt.Sprint("other", others), f.on("a"))
			return status.Code(err) == codes.ResourceExhausted
		})
		_, err = f.create("v", f.on("a"))
		f.fails(err, codes.Aborted, "v", "had no response", "the Node is being deleted")
		ahead.Store(int64(3 * time.Minute))
		_, err = f.create("v", f.on("a"))
		f.fails(err, codes.ResourceExhausted)
	}},
	{"037_concurrent", func(t *testing.T) {
		f := start(t)
		f.nodes["a"].Delay(time.Second)
		second := f.run()
		done := make(chan *csi.Volume, 1)
		go func() { done <- f.created("v", f.on("a")) }()
		f.until("v exists", func() bool { return f.lv("v") != nil })
		_, err := f.create("v", f.on("a"))
		f.fails(err, codes.Aborted, "v")
		ctx, cancel := context.WithTimeout(t.Context(), callTimeout)
		defer cancel()
		other, err := second.CreateVolume(ctx, f.request("v", f.on("a")))
		if err != nil {
			t.Fatal(err)
		}
		first := <-done
		if again := f.created("v", f.on("a")); again.VolumeId != first.VolumeId || other.GetVolume().GetVolumeId() != first.VolumeId {
			t.Errorf("%s, %s and %s", first.VolumeId, again.VolumeId, other.GetVolume().GetVolumeId())
		}
		if got := f.requests.of(); slices.Contains(got[1:], createLV) {
			t.Errorf("requests %q", got)
		}
	}},
	{"038_parameter_of_the_other_name", func(t *testing.T) {
		f := start(t)
		f.created("v", f.on("a"), func(r *csi.CreateVolumeRequest) {
			r.Parameters = map[string]string{topolvm.Driver + "/device-class": "thin"}
		})
		if lv := f.lv("v"); lv.Spec.DeviceClass != "" {
			t.Errorf("device class %q", lv.Spec.DeviceClass)
		}
	}},
}

// abandoned calls CreateVolume and cancels the call when the LogicalVolume exists.
func (f *fixture) abandoned(name string, changes ...change) {
	f.t.Helper()
	ctx, cancel := context.WithCancel(f.t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := f.CreateVolume(ctx, f.request(name, changes...))
		ended <- err
	}()
	f.until(name+" exists", func() bool { return f.lv(name) != nil })
	cancel()
	f.fails(<-ended, codes.Canceled)
	f.until("the call has ended", func() bool { return topolvm.Idle(f.service) })
}

// createsOneVolume creates a volume with one request, and checks the names.
func createsOneVolume(t *testing.T, f *fixture) {
	v := f.created("Pvc-1", f.on("a"), func(r *csi.CreateVolumeRequest) {
		r.Parameters[f.driver+"/lvcreate-option-class"] = "raid"
		r.Parameters["csi.storage.k8s.io/pvc/name"], r.Parameters["csi.storage.k8s.io/pvc/namespace"] = "data", "default"
	})
	f.sent(t, createLV)
	lv := f.lv("pvc-1")
	if v.VolumeId != string(lv.UID) || v.CapacityBytes != gi || f.nodeOf(v) != "a" {
		t.Errorf("response %v", v)
	}
	want := topolvm.Spec{Name: "pvc-1", NodeName: f.value("a"), Size: gi, DeviceClass: "ssd", LvcreateOptionClass: "raid"}
	if lv.Spec != want || !slices.Equal(lv.Finalizers, []string{f.driver + "/logicalvolume"}) ||
		lv.Labels["app.kubernetes.io/created-by"] != "topolvm-controller" ||
		lv.Annotations["storage-controller.io/volume-name"] != "Pvc-1" || lv.Annotations["storage-controller.io/claim"] != "default/data" {
		t.Errorf("LogicalVolume %+v", lv)
	}
	if err := f.delete(v.VolumeId); err != nil {
		t.Error(err)
	}
}

// untilCapacity waits until the service knows the sum of a class.
func (f *fixture) untilCapacity(class string, want int64) {
	f.t.Helper()
	f.until(fmt.Sprintf("the capacity of %s is %d", class, want), func() bool { return f.available("", class) == want })
}

// available calls GetCapacity for a topology value, or for all nodes.
func (f *fixture) available(value, class string) int64 {
	f.t.Helper()
	r := &csi.GetCapacityRequest{Parameters: map[string]string{f.driver + "/device-class": class}}
	if value != "" {
		r.AccessibleTopology = &csi.Topology{Segments: map[string]string{f.key: value}}
	}
	response, err := f.GetCapacity(f.t.Context(), r)
	if err != nil {
		f.t.Fatal(err)
	}
	return response.AvailableCapacity
}

// deleteNode deletes the Node object, whose finalizer keeps it.
func (f *fixture) deleteNode(name string) {
	f.t.Helper()
	if err := f.client.CoreV1().Nodes().Delete(f.t.Context(), f.value(name), metav1.DeleteOptions{}); err != nil {
		f.t.Fatal(err)
	}
}

// deleteLV deletes a LogicalVolume as a user does.
func (f *fixture) deleteLV(name string) {
	f.t.Helper()
	if err := f.lvs.Delete(f.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		f.t.Fatal(err)
	}
}

// existing creates a LogicalVolume like topolvm-controller, and waits for its volume.
func (f *fixture) existing(name, node string, change func(*topolvm.LogicalVolume)) *topolvm.LogicalVolume {
	f.t.Helper()
	lv := &topolvm.LogicalVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: topolvm.Spec{
		Name: name, NodeName: f.value(node), Size: gi, DeviceClass: "ssd",
	}}
	lv.APIVersion, lv.Kind = f.driver+"/v1", "LogicalVolume"
	change(lv)
	if _, err := f.lvs.Create(f.t.Context(), lv, metav1.CreateOptions{}); err != nil {
		f.t.Fatal(err)
	}
	f.until(name+" has a volume", func() bool { lv = f.lv(name); return lv.Status.CurrentSize > 0 })
	return lv
}

// cleanUp removes the finalizers of the LogicalVolumes of Nodes that do not exist, as the node cleanup does.
func (f *fixture) cleanUp() {
	f.t.Helper()
	resources, err := f.service.Resources(f.admin)
	if err != nil {
		f.t.Fatal(err)
	}
	f.until("no LogicalVolume is left", func() bool {
		all, err := f.lvs.List(f.t.Context(), metav1.ListOptions{})
		if err != nil {
			f.t.Fatal(err)
		}
		for _, lv := range all.Items {
			res, err := resources.Get(f.t.Context(), lv.Name)
			if err != nil || res == nil {
				return false
			}
			if err := resources.Remove(f.t.Context(), *res, func() error { return nil }); err != nil {
				f.t.Fatal(err)
			}
		}
		return len(all.Items) == 0
	})
}

// annotate sets an annotation of a LogicalVolume.
func (f *fixture) annotate(name, key, value string) {
	f.t.Helper()
	patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, key, value)
	if _, err := f.lvs.Patch(f.t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		f.t.Fatal(err)
	}
}
