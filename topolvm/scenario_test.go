// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm_test

import (
	"context"
	"encoding/json"
	"errors"
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
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/topolvm"
	"github.com/storage-controller/storage-controller/topolvm/topolvmtest"
)

var serviceScenarios = []scenario{
	{"001_identity", func(t *testing.T) {
		f := cluster(t)
		f.install()
		f.replica = f.run()
		info, err := f.identity.GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
		if err != nil || info.Name != f.driver || info.VendorVersion != "1.2.3" {
			t.Errorf("%v %v", info, err)
		}
		plugin, err := f.identity.GetPluginCapabilities(t.Context(), &csi.GetPluginCapabilitiesRequest{})
		if err != nil || len(plugin.Capabilities) != 4 {
			t.Errorf("%v %v", plugin, err)
		}
		controller, err := f.ControllerGetCapabilities(t.Context(), &csi.ControllerGetCapabilitiesRequest{})
		var rpcs []string
		for _, c := range controller.GetCapabilities() {
			rpcs = append(rpcs, c.GetRpc().GetType().String())
		}
		slices.Sort(rpcs)
		want := []string{"CLONE_VOLUME", "CREATE_DELETE_SNAPSHOT", "CREATE_DELETE_VOLUME", "EXPAND_VOLUME", "GET_CAPACITY"}
		if err != nil || !slices.Equal(rpcs, want) {
			t.Errorf("%v %v", rpcs, err)
		}
		_, err = f.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		f.fails(err, codes.Unimplemented)
	}},
	{"002_caches_not_synced", func(t *testing.T) {
		f := cluster(t)
		f.install()
		blocked := &sync.Mutex{}
		blocked.Lock()
		f.gate = blocked
		f.replica = f.run()
		if response, err := f.identity.Probe(t.Context(), &csi.ProbeRequest{}); err != nil || response.GetReady().GetValue() {
			t.Errorf("Probe: %v %v", response, err)
		}
		_, err := f.createWithin(time.Second, "v", f.on("a"))
		if c := status.Code(err); c != codes.Unavailable && c != codes.DeadlineExceeded {
			t.Errorf("got %v", err)
		}
		blocked.Unlock()
		f.created("v", f.on("a"))
		f.synced()
	}},
	{"003_no_csidriver", func(t *testing.T) {
		f := cluster(t)
		topolvmtest.InstallDefinition(t, f.client, f.driver)
		f.replica = f.run()
		f.until("Probe reports the missing CSIDriver", func() bool {
			_, err := f.identity.Probe(t.Context(), &csi.ProbeRequest{})
			return status.Code(err) == codes.FailedPrecondition && strings.Contains(err.Error(), f.driver)
		})
		if err := f.service.CheckCSIDriver(); err == nil {
			t.Error("CheckCSIDriver reports nothing")
		}
		object := &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: f.driver}}
		if _, err := f.client.StorageV1().CSIDrivers().Create(t.Context(), object, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		f.synced()
		f.sent(t)
	}},
	{"007_shutdown", func(t *testing.T) {
		f := start(t)
		f.nodes["a"].Delay(time.Second)
		f.nodes["b"].Stop()
		first, second, ended := make(chan error, 1), make(chan error, 1), make(chan struct{})
		go func() { _, err := f.create("v", f.on("a")); first <- err }()
		go func() { _, err := f.create("w", f.on("b")); second <- err }()
		f.until("both calls wait", func() bool { return f.lv("v") != nil && f.lv("w") != nil })
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			f.service.Shutdown(ctx)
			close(ended)
		}()
		f.until("new calls are refused", func() bool {
			_, err := f.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
			return status.Code(err) == codes.Unavailable
		})
		if err := <-first; err != nil {
			t.Errorf("the running call: %v", err)
		}
		select {
		case <-ended:
			t.Error("the shutdown did not wait for the second call")
		default:
		}
		cancel()
		<-ended
		f.fails(<-second, codes.Unavailable)
	}},
	{"008_legacy_name", func(t *testing.T) {
		if topolvm.DriverName("false") != topolvm.LegacyDriver || topolvm.DriverName("") != topolvm.Driver {
			t.Error("the name of the driver does not follow USE_LEGACY")
		}
		createsOneVolume(t, start(t, named(topolvm.DriverName("false"))))
	}},
	{"009_definition_installed_later", func(t *testing.T) {
		f := cluster(t)
		f.replica = f.run()
		f.until("the list fails", func() bool {
			err := f.informers.Synced()
			return err != nil && strings.Contains(err.Error(), "logicalvolumes."+f.driver) && !strings.Contains(err.Error(), "nodes")
		})
		if response, err := f.identity.Probe(t.Context(), &csi.ProbeRequest{}); err != nil || response.GetReady().GetValue() {
			t.Errorf("Probe: %v %v", response, err)
		}
		f.install()
		f.synced()
		createsOneVolume(t, f)
	}},
	{"048_validate", func(t *testing.T) {
		f := start(t)
		v := f.created("v")
		reader := mount("xfs")
		reader.AccessMode = mode(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY)
		for _, tt := range []struct {
			id         string
			capability *csi.VolumeCapability
			confirmed  bool
			code       codes.Code
		}{
			{v.VolumeId, mount("xfs"), true, codes.OK},
			{v.VolumeId, reader, false, codes.OK},
			{"none", mount("xfs"), false, codes.NotFound},
			{"", mount("xfs"), false, codes.InvalidArgument},
		} {
			response, err := f.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{
				VolumeId: tt.id, VolumeCapabilities: []*csi.VolumeCapability{tt.capability},
			})
			f.fails(err, tt.code)
			if (response.GetConfirmed() != nil) != tt.confirmed || err == nil && !tt.confirmed && response.Message == "" {
				t.Errorf("%s: %v", tt.id, response)
			}
		}
	}},
	{"049_capacity", func(t *testing.T) {
		f := start(t)
		f.nodes["b"].Resize("thin", 7*gi)
		f.untilCapacity("thin", 207*gi)
		for value, byClass := range map[string]map[string]int64{
			f.value("a"): {"ssd": 100 * gi, "": 100 * gi, "thin": 100 * gi, "none": 0}, f.value("b"): {"thin": 7 * gi},
			"": {"ssd": 300 * gi, "": 300 * gi, "none": 0}, "no-node": {"ssd": 0},
		} {
			for class, want := range byClass {
				if got := f.available(value, class); got != want {
					t.Errorf("node %q, class %q: %d, want %d", value, class, got, want)
				}
			}
		}
		zone := &csi.Topology{Segments: map[string]string{"zone": "a"}}
		other, err := f.GetCapacity(t.Context(), &csi.GetCapacityRequest{AccessibleTopology: zone})
		if err != nil || other.AvailableCapacity != 0 {
			t.Errorf("another key: %v %v", other, err)
		}
		for range 10_000 {
			if _, err := f.service.GetCapacity(t.Context(), &csi.GetCapacityRequest{}); err != nil {
				t.Fatal(err)
			}
		}
		f.sent(t)
	}},
	{"051_changes_of_the_capacity", func(t *testing.T) {
		f := start(t)
		f.until("the first values are known", func() bool { return len(f.capacity.known()) >= 9 })
		f.capacity.take()
		f.nodes["b"].Resize("thin", 7*gi)
		f.untilCapacity("thin", 207*gi)
		f.until("the change is reported", func() bool { return len(f.capacity.known()) > 0 })
		if got := f.capacity.take(); len(got) != 1 || got[f.value("b")+"/thin"] == 0 {
			t.Errorf("changes %v", got)
		}
		f.nodes["b"].Resize("ssd", 7*gi) // the default class, too
		f.until("the change is reported", func() bool { return len(f.capacity.known()) == 2 })
		if got := f.capacity.take(); got[f.value("b")+"/ssd"] == 0 || got[f.value("b")+"/"] == 0 {
			t.Errorf("changes %v", got)
		}
	}},
	{"053_bad_values", func(t *testing.T) {
		f := start(t)
		f.nodes["a"].Stop()
		f.annotateNode("a", "capacity."+f.driver+"/ssd", "x")
		f.annotateNode("a", "capacity."+f.driver+"/thin", "-1")
		f.until("the value counts 0", func() bool {
			return f.available(f.value("a"), "ssd") == 0 && f.available(f.value("a"), "thin") == 0
		})
		f.deleteNode("b")
		f.until("a Node that is being deleted counts 0", func() bool { return f.available(f.value("b"), "ssd") == 0 })
		if got := f.available("", "ssd"); got != 100*gi {
			t.Errorf("sum %d", got)
		}
	}},
	{"070_node_is_being_deleted", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.on("b"))
		f.nodes["b"].Stop()
		f.deleteNode("b")
		f.fails(f.delete(v.VolumeId), codes.Aborted, "v", f.value("b"), "is being deleted")
	}},
	{"070_node_not_ready", func(t *testing.T) { // the part of the service
		f := start(t)
		f.nodes["a"].Stop()
		f.nodes["a"].SetReady(t, false)
		forClaim := func(name string) change {
			return func(r *csi.CreateVolumeRequest) {
				r.Parameters["csi.storage.k8s.io/pvc/name"], r.Parameters["csi.storage.k8s.io/pvc/namespace"] = name, "default"
			}
		}
		for _, name := range []string{"v", "w", "x"} {
			_, err := f.create(name, f.on("a"), forClaim(name))
			f.fails(err, codes.Aborted, name, f.value("a"), "ssd", "not Ready")
		}
		f.sent(t, createLV, createLV, createLV)
		select {
		case claim := <-f.retried:
			t.Errorf("claim %s is retried without a cause", claim)
		default:
		}
		f.finalize("x")
		f.deleteLV("x")
		if claim := <-f.retried; claim != "default/x" {
			t.Errorf("claim %s is retried", claim)
		}
		f.nodes["a"].Fail(int64(codes.ResourceExhausted))
		f.nodes["a"].Run() // before the kubelet
		retried := []string{<-f.retried, <-f.retried}
		slices.Sort(retried)
		if !slices.Equal(retried, []string{"default/v", "default/w"}) {
			t.Errorf("claims %q are retried", retried)
		}
		_, first := f.create("v", f.on("a"))
		_, second := f.create("w", f.on("a"))
		if got := []codes.Code{status.Code(first), status.Code(second)}; !slices.Contains(got, codes.OK) ||
			!slices.Contains(got, codes.ResourceExhausted) {
			t.Errorf("got %v and %v", first, second)
		}
		f.nodes["a"].SetReady(t, true)
		f.until("the volume exists", func() bool { _, err := f.create("x", f.on("a")); return err == nil })
	}},
	{"074_unreferenced", func(t *testing.T) { // the gauge of the service
		var ahead atomic.Int64
		f := start(t, clocked(func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }))
		const gauge = "storage_controller_topolvm_unreferenced_logical_volumes"
		count := func(want float64) {
			t.Helper()
			f.until(fmt.Sprint("the gauge is ", want), func() bool { return f.metric(gauge) == want })
		}
		claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "data", Namespace: "default"}}
		claim.GenerateName, claim.Name = "data-", ""
		claim.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
		claim.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
		claim, err := f.client.CoreV1().PersistentVolumeClaims("default").Create(t.Context(), claim, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		v := f.created("v", f.on("a"), f.class("thin"))
		f.created("pvc-" + string(claim.UID))
		if _, err := f.snapshot("s", v.VolumeId); err != nil {
			t.Fatal(err)
		}
		if got := f.metric(gauge); got != 0 {
			t.Errorf("the gauge is %v after less than a minute", got)
		}
		ahead.Store(int64(2 * time.Minute))
		count(1)
		pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: v.VolumeId}}
		pv.Spec.Capacity = claim.Spec.Resources.Requests
		pv.Spec.AccessModes, pv.Spec.StorageClassName = claim.Spec.AccessModes, "none"
		pv.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: f.driver, VolumeHandle: v.VolumeId}
		if _, err := f.client.CoreV1().PersistentVolumes().Create(t.Context(), pv, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		count(0)
		if err := f.client.CoreV1().PersistentVolumeClaims("default").Delete(t.Context(), claim.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		_, err = f.client.CoreV1().PersistentVolumeClaims("default").Patch(t.Context(), claim.Name, types.MergePatchType,
			[]byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			t.Fatal(err)
		}
		count(1)
		if left := f.lv("pvc-" + string(claim.UID)); left == nil || left.DeletionTimestamp != nil {
			t.Errorf("the service has deleted an unreferenced LogicalVolume: %+v", left)
		}
	}},
	{"077_node_cleanup", func(t *testing.T) { // what the node cleanup does with LogicalVolumes
		f := start(t)
		v := f.created("v", f.on("a"))
		f.annotate("v", "example.com/note", "kept")
		resources, err := f.service.Resources(f.admin)
		if err != nil {
			t.Fatal(err)
		}
		changed := make(chan string, 10)
		if _, err := resources.OnChange(func(node string) { changed <- node }); err != nil {
			t.Fatal(err)
		}
		if node := <-changed; node != f.value("a") {
			t.Errorf("a LogicalVolume of node %s", node)
		}
		stale, err := resources.Get(t.Context(), "v")
		if err != nil || stale.Node != f.value("a") || stale.Handle != v.VolumeId || stale.Deleting {
			t.Fatalf("%+v %v", stale, err)
		}
		f.finalize("v", f.driver+"/logicalvolume", "example.com/other")
		if node := <-changed; node != f.value("a") {
			t.Errorf("a change of node %s", node)
		}
		permitted := func() error { return nil }
		if err := resources.Remove(t.Context(), *stale, permitted); !apierrors.IsConflict(err) || f.lv("v").DeletionTimestamp != nil {
			t.Errorf("another version: %v", err)
		}
		current, err := resources.Get(t.Context(), "v")
		if err != nil {
			t.Fatal(err)
		}
		asked, lost := 0, errors.New("the Lease was lost after the first write")
		err = resources.Remove(t.Context(), *current, func() error {
			asked++
			if asked > 1 {
				return lost
			}
			return nil
		})
		if !errors.Is(err, lost) || f.lv("v").DeletionTimestamp != nil {
			t.Errorf("without the Lease: %v", err)
		}
		handle := []byte(`{"status":{"volumeID":"handle"}}`) // which a restored LogicalVolume has from another cluster
		if _, err := f.lvs.Patch(t.Context(), "v", types.MergePatchType, handle, metav1.PatchOptions{}, "status"); err != nil {
			t.Fatal(err)
		}
		if current, err = resources.Get(t.Context(), "v"); err != nil || current.Handle != "handle" {
			t.Fatalf("%+v %v", current, err)
		}
		if err := resources.Remove(t.Context(), *current, permitted); err != nil {
			t.Fatal(err)
		}
		lv := f.lv("v")
		if lv.DeletionTimestamp == nil || !slices.Equal(lv.Finalizers, []string{"example.com/other"}) ||
			lv.Annotations[f.driver+"/pendingdeletion"] != "true" || lv.Annotations["example.com/note"] != "kept" {
			t.Errorf("%+v", lv.ObjectMeta)
		}
		f.until("the cache shows the removal", func() bool { return len(resources.List()) == 0 })
		f.finalize("v")
		f.untilDeleted("v")
		if gone, err := resources.Get(t.Context(), "v"); gone != nil || err != nil {
			t.Errorf("%+v %v", gone, err)
		}
		if err := resources.Remove(t.Context(), *current, permitted); err != nil {
			t.Error(err)
		}
		f.until("DeleteVolume finds nothing", func() bool { return f.delete(v.VolumeId) == nil })
	}},
	{"084_panic", func(t *testing.T) {
		var panics atomic.Bool
		f := start(t, clocked(func() time.Time {
			if panics.CompareAndSwap(true, false) {
				panic("injected")
			}
			return time.Now()
		}))
		f.nodes["b"].Delay(50 * time.Millisecond)
		var calls sync.WaitGroup
		errs := make(chan error, 20)
		for i := range 20 {
			calls.Go(func() { _, err := f.create(fmt.Sprintf("v%d", i), f.on("b")); errs <- err })
		}
		f.until("calls wait", func() bool { return f.lv("v19") != nil })
		calls.Wait()
		panics.Store(true)
		_, err := f.create("w", f.on("a"))
		f.fails(err, codes.Unavailable, "injected")
		for range 20 {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
		f.created("w", f.on("a")) // the locks are free
		if n := f.metric("storage_controller_topolvm_panics_total"); n != 1 {
			t.Errorf("%v panics", n)
		}
	}},
	{"085_forbidden", func(t *testing.T) {
		f := start(t)
		f.requests.intercept(func(r request) int { return map[string]int{http.MethodPost: http.StatusForbidden}[r.verb] })
		_, err := f.create("v", f.on("a"))
		f.fails(err, codes.Internal, "v", f.value("a"), "forbidden")
		f.requests.intercept(func(r request) int { return map[string]int{http.MethodPost: http.StatusBadGateway}[r.verb] })
		_, err = f.create("v", f.on("a"))
		f.fails(err, codes.Unavailable, "v")
		f.requests.intercept(nil)
		f.created("v", f.on("a"))
	}},
}

var deleteScenarios = []scenario{
	{"039_delete", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.on("a"))
		f.requests.take()
		if err := f.delete(v.VolumeId); err != nil {
			t.Fatal(err)
		}
		if f.lv("v") != nil || len(f.nodes["a"].Volumes()) > 0 {
			t.Error("the volume remains")
		}
		if sent := f.sent(t, deleteLV); !strings.Contains(sent[0].body, v.VolumeId) {
			t.Errorf("without its UID: %s", sent[0].body)
		}
		f.fails(f.delete(""), codes.InvalidArgument)
	}},
	{"040_unknown_id", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.on("a"))
		f.fill(t, 5000)
		f.requests.take()
		if err := f.delete("00000000-0000-0000-0000-000000000000"); err != nil {
			t.Fatal(err)
		}
		if sent := f.sent(t, listLVs); !strings.Contains(sent[0].accept, "PartialObjectMetadataList") {
			t.Errorf("accepts %s", sent[0].accept)
		}
		f.deleteLV("v")
		f.until("the watch has shown the deletion", func() bool {
			f.requests.take()
			return f.delete(v.VolumeId) == nil && len(f.requests.take()) == 0
		})
	}},
	{"042_behind_the_watch", func(t *testing.T) {
		f := start(t)
		other := *f
		other.replica = f.run()
		other.synced()
		f.watches.Lock()
		v := other.created("v", f.on("a"))
		done := make(chan error, 1)
		go func() { done <- f.delete(v.VolumeId) }()
		f.untilDeleted("v")
		f.watches.Unlock()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}},
	{"043_refused_removal", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.on("a"))
		f.nodes["a"].RefuseRemoval(true)
		f.requests.take()
		for range 2 {
			f.fails(f.deleteWithin(3*time.Second, v.VolumeId), codes.DeadlineExceeded)
		}
		f.sent(t, deleteLV)
		f.nodes["a"].RefuseRemoval(false)
		if err := f.delete(v.VolumeId); err != nil {
			t.Error(err)
		}
	}},
	{"044_node_deleted", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.on("a"))
		f.nodes["a"].Stop()
		f.nodes["a"].Delete(t)
		f.until("the service knows that the Node is deleted", func() bool { return f.available(f.value("a"), "ssd") == 0 })
		f.requests.take()
		began := time.Now()
		f.fails(f.delete(v.VolumeId), codes.Aborted, f.value("a"), "v")
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("the call took %v", took)
		}
		f.sent(t, deleteLV, getNode)
		f.fails(f.delete(v.VolumeId), codes.Aborted, f.value("a"))
		f.cleanUp()
		if err := f.delete(v.VolumeId); err != nil {
			t.Error(err)
		}
	}},
	{"045_id_of_a_snapshot", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.class("thin"))
		s, err := f.snapshot("s", v.VolumeId)
		if err != nil {
			t.Fatal(err)
		}
		if err := f.delete(s.SnapshotId); err != nil || f.lv("s").DeletionTimestamp != nil {
			t.Errorf("%v %+v", err, f.lv("s"))
		}
	}},
	{"046_source", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.class("thin"))
		if _, err := f.snapshot("s", v.VolumeId); err != nil {
			t.Fatal(err)
		}
		f.created("clone", f.class("thin"), fromVolume(v.VolumeId))
		if err := f.delete(v.VolumeId); err != nil || f.lv("s") == nil || f.lv("clone") == nil {
			t.Errorf("%v %v %v", err, f.lv("s"), f.lv("clone"))
		}
	}},
	{"047_source_in_use", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.class("thin"), f.on("a"))
		f.nodes["a"].Delay(time.Second)
		done := make(chan error, 1)
		clone := func(name string) {
			go func() { _, err := f.create(name, f.class("thin"), fromVolume(v.VolumeId)); done <- err }()
			f.until("the clone is being created", func() bool { return f.lv(name) != nil })
		}
		clone("clone1")
		f.fails(f.delete(v.VolumeId), codes.Aborted, v.VolumeId)
		if err := <-done; err != nil {
			t.Error(err)
		}
		clone("clone2")
		other := *f
		other.replica = f.run()
		if err := other.delete(v.VolumeId); err != nil {
			t.Error(err)
		}
		if err := <-done; err == nil && f.lv("clone2") == nil {
			t.Error("success without a clone")
		} else if err != nil {
			f.untilDeleted("clone2")
		}
	}},
	{"047_source_without_LogicalVolume", func(t *testing.T) { // calls that are repeated together do not keep each other from an end
		f := start(t)
		began, goOn, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
		var first atomic.Bool
		f.requests.intercept(func(r request) int {
			if r.verb == http.MethodGet && r.resource == "logicalvolumes" && first.CompareAndSwap(false, true) {
				close(began)
				<-goOn
			}
			return 0
		})
		go func() { _, err := f.create("clone", f.class("thin"), fromVolume("gone")); done <- err }()
		<-began
		if err := f.delete("gone"); err != nil {
			t.Error(err)
		}
		close(goOn)
		f.fails(<-done, codes.NotFound, "gone")
	}},
}

var expandScenarios = []scenario{
	{"054_055_expand", func(t *testing.T) {
		f := start(t)
		for name, tt := range map[string]struct {
			capability *csi.VolumeCapability
			node       bool
		}{"mount": {mount("xfs"), true}, "absent": {nil, true}, "block": {block(), false}} {
			v := f.created(name, f.on("a"))
			f.requests.take()
			response, err := f.expand(v.VolumeId, gi+203*mi, tt.capability)
			if err != nil || response.CapacityBytes != gi+204*mi || response.NodeExpansionRequired != tt.node {
				t.Errorf("%s: %v %v", name, response, err)
			}
			f.sent(t, patchLV)
			again, err := f.expand(v.VolumeId, gi+203*mi, tt.capability)
			if err != nil || again.CapacityBytes != response.CapacityBytes || again.NodeExpansionRequired != tt.node {
				t.Errorf("%s again: %v %v", name, again, err)
			}
			f.sent(t)
		}
	}},
	{"056_too_little_space", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.on("a"))
		f.requests.take()
		_, err := f.expand(v.VolumeId, 200*gi, nil)
		f.fails(err, codes.ResourceExhausted, "v", f.value("a"), "ssd", fmt.Sprint(199*gi))
		f.sent(t)
		f.nodes["a"].Stop()
		f.annotateNode("a", "capacity."+f.driver+"/ssd", "")
		f.until("the node reports nothing", func() bool { return f.available(f.value("a"), "ssd") == 0 })
		_, err = f.expand(v.VolumeId, 2*gi, nil)
		f.fails(err, codes.FailedPrecondition, "v", f.value("a"), "ssd")
		f.sent(t)
	}},
	{"057_earlier_failure", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.on("a"))
		f.nodes["a"].Fail(slices.Repeat([]int64{int64(codes.Internal)}, 100)...)
		_, err := f.expand(v.VolumeId, 2*gi, nil)
		f.fails(err, codes.Internal, "v", f.value("a"))
		f.nodes["a"].Recover()
		if code := f.lv("v").Status.Code; code != int64(codes.Internal) {
			t.Fatalf("code %d", code)
		}
		if response, err := f.expand(v.VolumeId, 2*gi, nil); err != nil || response.CapacityBytes != 2*gi {
			t.Errorf("%v %v", response, err)
		}
		for range 2 { // the second time, the status does not change
			f.nodes["a"].Fail(slices.Repeat([]int64{int64(codes.Internal)}, 100)...)
			began := time.Now()
			_, err = f.expand(v.VolumeId, 3*gi, nil)
			f.fails(err, codes.Internal)
			if took := time.Since(began); took > 15*time.Second {
				t.Errorf("the call took %v", took)
			}
		}
	}},
	{"058_refused", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.on("a"))
		f.nodes["a"].Fail(slices.Repeat([]int64{int64(codes.ResourceExhausted)}, 100)...)
		f.requests.take()
		_, err := f.expand(v.VolumeId, 2*gi, nil)
		f.fails(err, codes.ResourceExhausted, "as told")
		f.sent(t, patchLV, patchLV)
		if lv := f.lv("v"); lv.Spec.Size != gi || lv.Status.CurrentSize != gi {
			t.Errorf("spec.size %v", lv.Spec.Size)
		}
		// If the second patch fails, the next call withdraws the request.
		f.nodes["a"].Fail(slices.Repeat([]int64{int64(codes.ResourceExhausted)}, 100)...)
		patches := 0
		f.requests.intercept(func(r request) int {
			if r.verb == http.MethodPatch {
				patches++
			}
			return map[bool]int{true: http.StatusInternalServerError}[patches == 2]
		})
		_, err = f.expand(v.VolumeId, 2*gi, nil)
		f.fails(err, codes.Aborted, "v")
		f.requests.intercept(nil)
		if lv := f.lv("v"); lv.Spec.Size != 2*gi {
			t.Errorf("spec.size %v", lv.Spec.Size)
		}
		if _, err := f.expand(v.VolumeId, gi, nil); err != nil { // the claim requests its old size again
			t.Error(err)
		}
		if lv := f.lv("v"); lv.Spec.Size != gi {
			t.Errorf("spec.size %v", lv.Spec.Size)
		}
	}},
	{"059_concurrent_writer", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.on("a"))
		f.watches.Lock()
		f.annotate("v", f.driver+"/note", "kept")
		done := make(chan error, 1)
		go func() { _, err := f.expand(v.VolumeId, 2*gi, nil); done <- err }()
		f.until("the patch is repeated", func() bool { return f.lv("v").Spec.Size == 2*gi })
		f.watches.Unlock()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if lv := f.lv("v"); lv.Annotations[f.driver+"/note"] != "kept" || lv.Annotations[f.driver+"/resize-requested-at"] == "" {
			t.Errorf("annotations %v", lv.Annotations)
		}
	}},
	{"060_invalid", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.class("thin"), f.on("a"))
		s, err := f.snapshot("s", v.VolumeId)
		if err != nil {
			t.Fatal(err)
		}
		_, err = f.expand(s.SnapshotId, 2*gi, nil)
		f.fails(err, codes.InvalidArgument, "s")
		_, err = f.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: v.VolumeId})
		f.fails(err, codes.InvalidArgument)
		_, err = f.expand("none", 2*gi, nil)
		f.fails(err, codes.NotFound, "none")
		f.nodes["a"].RefuseRemoval(true)
		f.deleteLV("v")
		f.until("the deletion is known", func() bool { _, err := f.expand(v.VolumeId, 2*gi, nil); return err != nil })
		_, err = f.expand(v.VolumeId, 3*gi, nil)
		f.fails(err, codes.FailedPrecondition, "v", "thin")
		f.nodes["a"].RefuseRemoval(false)
	}},
}

var snapshotScenarios = []scenario{
	{"061_snapshot", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.class("thin"), f.on("a"))
		first, err := f.snapshot("s", v.VolumeId)
		if err != nil {
			t.Fatal(err)
		}
		lv := f.lv("s")
		want := topolvm.Spec{Name: "s", NodeName: f.value("a"), Size: gi, DeviceClass: "thin", Source: "v", AccessType: "ro"}
		if lv.Spec != want || !first.ReadyToUse || !first.CreationTime.AsTime().Equal(lv.CreationTimestamp.Time) ||
			first.SnapshotId != string(lv.UID) || first.SourceVolumeId != v.VolumeId || first.SizeBytes != gi {
			t.Errorf("%v %+v", first, lv.Spec)
		}
		if _, err := f.expand(v.VolumeId, 2*gi, nil); err != nil {
			t.Fatal(err)
		}
		again, err := f.snapshot("s", v.VolumeId)
		if err != nil || again.SnapshotId != first.SnapshotId || !again.CreationTime.AsTime().Equal(first.CreationTime.AsTime()) {
			t.Errorf("%v %v", again, err)
		}
		// The source grows after the CREATE and before the node works.
		f.nodes["a"].Stop()
		done := make(chan error, 1)
		go func() { _, err := f.snapshot("s2", v.VolumeId); done <- err }()
		f.until("the snapshot is being created", func() bool { return f.lv("s2") != nil })
		source := f.lv("v")
		source.Spec.Size, source.Status.CurrentSize = 3*gi, 3*gi
		if _, err := f.lvs.UpdateStatus(t.Context(), source, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		f.fails(<-done, codes.Aborted, "s2", "expanded")
		f.nodes["a"].Run()
		last, err := f.snapshot("s2", v.VolumeId)
		if err != nil || last.SizeBytes != 3*gi {
			t.Errorf("%v %v", last, err)
		}
	}},
	{"062_other_source", func(t *testing.T) {
		f := start(t)
		v, w := f.created("v", f.class("thin"), f.on("a")), f.created("w", f.class("thin"), f.on("a"))
		if _, err := f.snapshot("s", v.VolumeId); err != nil {
			t.Fatal(err)
		}
		_, err := f.snapshot("s", w.VolumeId)
		f.fails(err, codes.AlreadyExists, "s", "source")
		_, err = f.snapshot("v", w.VolumeId)
		f.fails(err, codes.AlreadyExists, "v")
		_, err = f.create("s", f.class("thin"))
		f.fails(err, codes.AlreadyExists, "s", "snapshot")
	}},
	{"063_thick", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.on("a"))
		_, err := f.snapshot("s", v.VolumeId)
		f.fails(err, codes.InvalidArgument, "s", "ssd", "thin")
		f.untilDeleted("s")
	}},
	{"064_restore", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.class("thin"), f.on("b"))
		s, err := f.snapshot("s", v.VolumeId)
		if err != nil {
			t.Fatal(err)
		}
		restored := f.created("r", f.class("thin"), fromSnapshot(s.SnapshotId), size(2*gi))
		lv := f.lv("r")
		if lv.Spec.AccessType != "rw" || lv.Spec.Source != "s" || restored.CapacityBytes != 2*gi || f.nodeOf(restored) != "b" ||
			restored.GetContentSource().GetSnapshot().GetSnapshotId() != s.SnapshotId {
			t.Errorf("%v %+v", restored, lv.Spec)
		}
		_, err = f.create("r2", f.class("thin"), fromSnapshot(s.SnapshotId), size(512*mi))
		f.fails(err, codes.OutOfRange, "r2", "1Gi")
		_, err = f.create("r2", f.class("ssd"), fromSnapshot(s.SnapshotId))
		f.fails(err, codes.InvalidArgument, "ssd", "thin")
	}},
	{"065_other_node", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.class("thin"), f.on("b"))
		_, err := f.create("w", f.class("thin"), fromVolume(v.VolumeId), f.on("a", "c"))
		f.fails(err, codes.ResourceExhausted, f.value("b"))
		if got := f.nodeOf(f.created("w", f.class("thin"), fromVolume(v.VolumeId), f.on("a", "b"))); got != "b" {
			t.Errorf("on %s", got)
		}
	}},
	{"066_unknown_source", func(t *testing.T) {
		f := start(t)
		_, err := f.create("c", f.class("thin"), fromVolume("none"))
		f.fails(err, codes.NotFound, "none")
		_, err = f.create("c", f.class("thin"), fromVolume(""))
		f.fails(err, codes.NotFound)
		_, err = f.create("c", f.class("thin"), func(r *csi.CreateVolumeRequest) { r.VolumeContentSource = &csi.VolumeContentSource{} })
		f.fails(err, codes.InvalidArgument)
		v := f.created("v", f.class("thin"), f.on("a"))
		clone := f.created("c", f.class("thin"), fromVolume(v.VolumeId))
		f.nodes["a"].RefuseRemoval(true)
		f.deleteLV("v")
		attempts := 0
		f.until("the deletion is known", func() bool {
			attempts++
			_, err := f.create(fmt.Sprint("e", attempts), f.class("thin"), fromVolume(v.VolumeId))
			return err != nil
		})
		_, err = f.create("d", f.class("thin"), fromVolume(v.VolumeId))
		f.fails(err, codes.NotFound)
		f.nodes["a"].RefuseRemoval(false)
		f.untilDeleted("v")
		if again := f.created("c", f.class("thin"), fromVolume(v.VolumeId)); again.VolumeId != clone.VolumeId {
			t.Errorf("%s and %s", again.VolumeId, clone.VolumeId)
		}
	}},
	{"067_delete_snapshot", func(t *testing.T) {
		f := start(t)
		v := f.created("v", f.class("thin"))
		s, err := f.snapshot("s", v.VolumeId)
		if err != nil {
			t.Fatal(err)
		}
		for id, want := range map[string]codes.Code{
			v.VolumeId: codes.OK, "none": codes.OK, "": codes.InvalidArgument, s.SnapshotId: codes.OK,
		} {
			_, err := f.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})
			f.fails(err, want)
		}
		if f.lv("v") == nil || f.lv("v").DeletionTimestamp != nil || f.lv("s") != nil {
			t.Errorf("%v %v", f.lv("v"), f.lv("s"))
		}
	}},
}

// annotateNode sets an annotation of a Node, or removes it if value is empty.
func (f *fixture) annotateNode(name, key, value string) {
	f.t.Helper()
	patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, key, value)
	if value == "" {
		patch = fmt.Sprintf(`{"metadata":{"annotations":{%q:null}}}`, key)
	}
	nodes := f.client.CoreV1().Nodes()
	_, err := nodes.Patch(f.t.Context(), f.value(name), types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	if err != nil {
		f.t.Fatal(err)
	}
}

// finalize sets the finalizers of a LogicalVolume.
func (f *fixture) finalize(name string, finalizers ...string) {
	f.t.Helper()
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"finalizers": finalizers}})
	if err == nil {
		_, err = f.lvs.Patch(f.t.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{})
	}
	if err != nil {
		f.t.Fatal(err)
	}
}

// fill creates LogicalVolumes of a node that does not exist.
func (f *fixture) fill(t testing.TB, count int) {
	t.Helper()
	var workers sync.WaitGroup
	var next atomic.Int32
	for range 16 {
		workers.Go(func() {
			for i := int(next.Add(1)); i <= count; i = int(next.Add(1)) {
				name := fmt.Sprintf("pvc-00000000-0000-4000-8000-%012d", i)
				lv := &topolvm.LogicalVolume{Spec: topolvm.Spec{Name: name, NodeName: "none", Size: gi}}
				lv.Name = name
				lv.APIVersion, lv.Kind = f.driver+"/v1", "LogicalVolume"
				if _, err := f.lvs.Create(t.Context(), lv, metav1.CreateOptions{}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	workers.Wait()
}
