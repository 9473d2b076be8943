// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/wrapperspb"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// objectWrites is the writes of the controller: the method of each request that is none
// to read.
type objectWrites struct {
	mu      sync.Mutex
	methods []string
}

// noteWrites sends the requests for the objects through a proxy that records what it has
// written. before, which may be nil, is called before each write.
// TestSuspendedProcessWritesNothing: a process that continues after its Lease has expired neither deletes nor changes an object.
func TestSuspendedProcessWritesNothing(t *testing.T) {
	f := prepare(t, csitest.Config{}, nil)
	f.node("n1", "a")
	f.start()
	f.Expire()
	f.existing("fast", "a", "9Gi", nil)
	f.existing("fast", "a", "9Gi", nil)
	f.class("fast", nil)
	f.Wait(getCapacity, 3)
	want := []string{"fast t/zone=a 9Gi", "fast t/zone=a 9Gi"}
	if got := f.describe(f.objects()); !slices.Equal(got, want) {
		t.Errorf("%q are published, want %q", got, want)
	}
}

func (f *fixture) noteWrites(before func(*http.Request)) *objectWrites {
	f.Helper()
	w := &objectWrites{}
	cfg := kubetest.Proxy(f, f.ControlPlane.Config(), func(out http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.Method != http.MethodGet {
			w.mu.Lock()
			w.methods = append(w.methods, r.Method)
			w.mu.Unlock()
			if before != nil {
				before(r)
			}
		}
		pass.ServeHTTP(out, r)
	})
	client, err := kubernetes.NewForConfig(cfg)
	f.Must(err)
	f.change = func(d *Deps) { d.Client = client }
	return w
}

// are fails unless the writes so far are those, in any order.
func (w *objectWrites) are(t testing.TB, want ...string) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if have := slices.Sorted(slices.Values(w.methods)); !slices.Equal(have, want) {
		t.Errorf("writes are %q instead of %q", have, want)
	}
}

// working waits until the controller has seen all that was there when it was started.
func (f *fixture) working() {
	f.Helper()
	kubetest.Eventually(f, "the controller works", func(context.Context) error {
		if f.c.term.Load() == nil {
			return errors.New("it waits for its caches")
		}
		return nil
	})
}

// stepIn is the step with which the driver does step in one zone, and says what has was
// told in the others.
func (f *fixture) stepIn(zone string, step csitest.Step) csitest.Step {
	answered := f.answered()
	return func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
		if zoneOf(request.(*csi.GetCapacityRequest)) == zone {
			return step(ctx, p, request, do)
		}
		return answered(ctx, p, request, do)
	}
}

// answeredAfter is the step with which the driver says what has was told once event is closed.
func (f *fixture) answeredAfter(event <-chan struct{}) csitest.Step {
	answered := f.answered()
	return func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
		select {
		case <-event:
		case <-ctx.Done():
		}
		return answered(ctx, p, request, do)
	}
}

func zoneOf(r *csi.GetCapacityRequest) string {
	return r.GetAccessibleTopology().GetSegments()["t/zone"]
}

// callsIn is the calls for one zone.
func (f *fixture) callsIn(zone string) []csitest.Call {
	return slices.DeleteFunc(f.Plugin.Calls(getCapacity), func(c csitest.Call) bool {
		return zoneOf(c.Request.(*csi.GetCapacityRequest)) != zone
	})
}

// askedIn waits until n more calls have begun for a zone. With one thread all but the last
// of them have been dealt with then, writes included.
func (f *fixture) askedIn(zone string, n int) {
	f.Helper()
	before := len(f.callsIn(zone))
	kubetest.Eventually(f, fmt.Sprintf("the driver is asked %d times more about zone %s", n, zone), func(context.Context) error {
		if got := len(f.callsIn(zone)) - before; got < n {
			return fmt.Errorf("it was asked %d times", got)
		}
		return nil
	})
}

// same fails unless the objects are the very same ones as before, not written since.
func (f *fixture) same(before, after []storagev1.CSIStorageCapacity) {
	f.Helper()
	versions := func(objects []storagev1.CSIStorageCapacity) []string {
		var all []string
		for _, o := range objects {
			all = append(all, fmt.Sprintf("%s %s version %s", o.Name, o.UID, o.ResourceVersion))
		}
		slices.Sort(all)
		return all
	}
	if b, a := versions(before), versions(after); !slices.Equal(a, b) {
		f.Errorf("the objects were %q and are %q", b, a)
	}
}

// sameUIDs fails unless the objects are the same ones as before, whatever they say.
func (f *fixture) sameUIDs(before, after []storagev1.CSIStorageCapacity) {
	f.Helper()
	if b, a := uids(before), uids(after); !slices.Equal(a, b) {
		f.Errorf("the objects were %q and are %q", b, a)
	}
}

func uids(objects []storagev1.CSIStorageCapacity) []types.UID {
	var all []types.UID
	for _, o := range objects {
		all = append(all, o.UID)
	}
	slices.Sort(all)
	return all
}

// in is the object of a zone.
func (f *fixture) in(zone string, objects []storagev1.CSIStorageCapacity) *storagev1.CSIStorageCapacity {
	f.Helper()
	for _, o := range objects {
		if o.NodeTopology != nil && o.NodeTopology.MatchLabels["t/zone"] == zone {
			return &o
		}
	}
	f.Fatalf("no object is for zone %s", zone)
	return nil
}

// edit changes an object as another client.
func (f *fixture) edit(name, patch string) *storagev1.CSIStorageCapacity {
	f.Helper()
	o, err := f.Client.StorageV1().CSIStorageCapacities(f.Namespace).Patch(
		f.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{},
	)
	f.Must(err)
	return o
}

// cable is the way to the API server for the watch of one kind.
type cable struct {
	mu      sync.Mutex
	end     []context.CancelFunc // of each watch that is open
	open    chan struct{}        // closed while it is whole
	expired bool                 // the next watch is told that what it knows is too old
}

// cuttable has the watch of the kind whose paths end with suffix go over a cable.
func (f *fixture) cuttable(suffix string) *cable {
	f.Helper()
	c := &cable{open: make(chan struct{})}
	close(c.open)
	f.Watch = kubetest.Proxy(f, f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if !strings.HasSuffix(r.URL.Path, suffix) {
			pass.ServeHTTP(w, r)
			return
		}
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		c.mu.Lock()
		open := c.open
		c.mu.Unlock()
		select {
		case <-open:
		case <-ctx.Done():
			return
		}
		c.mu.Lock()
		c.end = append(c.end, cancel)
		expired := c.expired && r.URL.Query().Get("watch") != "" && r.URL.Query().Get("resourceVersion") != ""
		c.expired = c.expired && !expired
		c.mu.Unlock()
		if expired {
			status := apierrors.NewResourceExpired("too old").Status()
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(int(status.Code))
			_ = json.NewEncoder(w).Encode(status)
			return
		}
		pass.ServeHTTP(w, r.WithContext(ctx))
	})
	return c
}

// cut ends the watch and keeps another from beginning.
func (c *cable) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open, c.expired = make(chan struct{}), true
	for _, end := range c.end {
		end()
	}
	c.end = nil
}

// restore has the watch begin again, with a new list of all objects.
func (c *cable) restore() {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.open)
}

// polling is a short time between two looks at everything.
func polling(c *Config) { c.PollInterval = 100 * time.Millisecond }

// never is so long a time between two looks that no scenario comes to the second one.
func never(c *Config) { c.PollInterval = time.Hour }

// zoneA and zoneB are the two objects of the fixture, as published describes them.
const zoneA, zoneB = "fast t/zone=a 1Gi", "fast t/zone=b 2Gi"

func TestCapacityScenarioCreation(t *testing.T) {
	t.Run("002_no_class", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, never)
		f.node("n1", "a")
		f.start()
		f.working()
		f.node("n2", "b")
		f.class("fast", nil)
		f.published(zoneA, zoneB)
		f.asked(2) // none before there was a class
	})
	t.Run("002_no_registered_node", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, never)
		f.class("fast", nil)
		f.Must(kubetest.CreateNode(t.Context(), f.Client,
			kubetest.NodeSpec{Name: f.Unique("n1"), Labels: map[string]string{"t/zone": "a"}}))
		f.start()
		f.working()
		f.node("n2", "b")
		f.published(zoneB)
		f.asked(1)
	})
	t.Run("004_reserved_parameters", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, never)
		f.node("n1", "a")
		want := map[string]string{
			"csi.storage.k8s.io/fstype": "xfs", "csi.storage.k8s.io/provisioner-secret-name": "s",
			"csi.storage.k8s.io/provisioner-secret-namespace": "${pvc.namespace}", "pool": "ssd",
		}
		f.class("fast", func(c *storagev1.StorageClass) { c.Parameters = want })
		f.start()
		f.published(zoneA)
		if got := f.Plugin.Calls(getCapacity)[0].Request.(*csi.GetCapacityRequest).Parameters; fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("the driver got the parameters %v", got)
		}
	})
	t.Run("005_maximum_volume_size", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, never)
		f.makeFixture()
		f.says(
			"a",
			&csi.GetCapacityResponse{
				AvailableCapacity: 1 << 30, MaximumVolumeSize: wrapperspb.Int64(1 << 20), MinimumVolumeSize: wrapperspb.Int64(1),
			},
		)
		f.start()
		objects := f.published(zoneA, zoneB)
		if m := f.in("a", objects).MaximumVolumeSize; m.String() != "1Mi" {
			t.Errorf("the maximum in zone a is %v", m)
		}
		if m := f.in("b", objects).MaximumVolumeSize; m != nil {
			t.Errorf("the maximum in zone b is %v", m)
		}
	})
	t.Run("006_two_classes", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, never)
		f.makeFixture()
		f.class("slow", func(c *storagev1.StorageClass) { c.Parameters = map[string]string{"pool": "hdd"} })
		f.has("hdd/a", 10<<30)
		f.has("hdd/b", 20<<30)
		f.start()
		f.published(zoneA, zoneB, "slow t/zone=a 10Gi", "slow t/zone=b 20Gi")
	})
	t.Run("007_nothing_available", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, polling)
		f.makeFixture()
		f.has("b", 0)
		f.start()
		before := f.published(zoneA) // none for b, which the scheduler takes for the same
		f.askedIn("b", 3)
		f.sameUIDs(before, f.published(zoneA))
		f.has("a", 0)
		f.sameUIDs(before, f.published("fast t/zone=a 0"))
		f.has("b", 3<<30)
		f.published("fast t/zone=a 0", "fast t/zone=b 3Gi")
	})
	t.Run("008_class_of_another_provisioner", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, never)
		f.makeFixture()
		f.class("other", func(c *storagev1.StorageClass) { c.Provisioner = "other-" + f.Driver })
		f.class("plugin", func(c *storagev1.StorageClass) { c.Provisioner = "kubernetes.io/aws-ebs" })
		f.start()
		f.published(zoneA, zoneB)
		f.asked(2)
	})
	t.Run("009_immediate_binding", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, never)
		f.makeFixture()
		f.class("soon", func(c *storagev1.StorageClass) {
			c.VolumeBindingMode = ptr.To(storagev1.VolumeBindingImmediate)
		})
		f.start()
		f.published(zoneA, zoneB)
		f.asked(2)
	})
	t.Run("009_immediate_binding_with_the_flag", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, func(c *Config) { c.ImmediateBinding = true })
		f.makeFixture()
		f.class("soon", func(c *storagev1.StorageClass) {
			c.VolumeBindingMode = nil // which the API server takes for immediate
		})
		f.start()
		f.published(zoneA, zoneB, "soon t/zone=a 1Gi", "soon t/zone=b 2Gi")
	})
	t.Run("010_one_zone_fails", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, func(c *Config) {
			never(c)
			c.RetryIntervalStart, c.RetryIntervalMax = 100*time.Millisecond, time.Minute
		})
		f.makeFixture()
		f.Plugin.Always(getCapacity, f.stepIn("a", csitest.Fail(codes.Internal, "pool offline")))
		f.start()
		f.published(zoneB)
		f.askedIn("a", 4-len(f.callsIn("a")))
		if have := f.describe(f.objects()); !slices.Equal(have, []string{zoneB}) {
			t.Errorf("%q are published", have)
		}
		f.Plugin.Always(getCapacity, f.answered())
		f.published(zoneA, zoneB)
		calls := f.callsIn("a")
		for i := range 3 {
			if pause := calls[i+1].Began.Sub(calls[i].Ended); pause < f.cfg.RetryIntervalStart<<i {
				t.Errorf("retry %d began after %v, before its back-off was over", i+1, pause)
			}
		}
		if n := len(f.callsIn("b")); n != 1 {
			t.Errorf("the driver was asked %d times about zone b, which did not fail", n)
		}
	})
	t.Run("011_error_leaves_the_value", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, polling)
		f.makeFixture()
		before := []storagev1.CSIStorageCapacity{*f.existing("fast", "a", "7Gi", nil)}
		f.Plugin.Always(getCapacity, csitest.Fail(codes.Unimplemented, "no"))
		f.start()
		f.askedIn("a", 4)
		f.same(before, f.objects())
	})
	t.Run("012_call_too_slow", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, func(c *Config) {
			never(c)
			c.Timeout = 200 * time.Millisecond
		})
		f.node("n1", "a")
		f.class("fast", nil)
		writes := f.noteWrites(nil)
		f.Plugin.Always(getCapacity, csitest.Hang())
		f.start()
		f.Must(f.Plugin.Wait(t.Context(), getCapacity, 3))
		writes.are(t)
		f.Plugin.Always(getCapacity, f.answered())
		f.published(zoneA)
		for _, call := range f.Plugin.Calls(getCapacity)[:2] {
			if took := call.Ended.Sub(call.Began); call.Err == nil || took < f.cfg.Timeout/2 {
				t.Errorf("a call ended after %v with %v", took, call.Err)
			}
		}
		writes.are(t, http.MethodPost)
	})
	t.Run("013_driver_fails_for_long", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, func(c *Config) {
			c.PollInterval = 20 * time.Millisecond
			c.RetryIntervalStart, c.RetryIntervalMax = 200*time.Millisecond, 200*time.Millisecond
		})
		f.makeFixture()
		f.start()
		f.published(zoneA, zoneB)
		f.Plugin.Always(getCapacity, csitest.Fail(codes.Unavailable, "away"))
		failed := func(zone string) []csitest.Call {
			return slices.DeleteFunc(f.callsIn(zone), func(c csitest.Call) bool { return c.Err == nil })
		}
		kubetest.Eventually(f, "the driver has failed for 20 intervals and more", func(context.Context) error {
			if depth := f.metric("workqueue_depth", "csistoragecapacity"); depth > 2 {
				t.Errorf("%v items wait", depth)
			}
			if a, b := len(failed("a")), len(failed("b")); a < 6 || b < 6 {
				return fmt.Errorf("%d and %d calls have failed", a, b)
			}
			return nil
		})
		for _, zone := range []string{"a", "b"} {
			calls := failed(zone)
			for i := range len(calls) - 1 {
				if pause := calls[i+1].Began.Sub(calls[i].Ended); pause < f.cfg.RetryIntervalStart {
					t.Errorf("zone %s was asked about again after %v, before the back-off was over", zone, pause)
				}
			}
		}
	})
	t.Run("014_start_with_many_threads", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, func(c *Config) {
			never(c)
			c.Threads = 8
		})
		f.makeFixture()
		writes := f.noteWrites(nil)
		f.start()
		f.published(zoneA, zoneB)
		f.asked(2)
		writes.are(t, http.MethodPost, http.MethodPost)
	})
	t.Run("015_negative_capacity", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, polling)
		f.makeFixture()
		f.node("n3", "c")
		before := f.existing("fast", "a", "7Gi", nil)
		writes := f.noteWrites(nil)
		f.has("a", -1)
		f.has("c", -1)
		f.start()
		objects := f.published("fast t/zone=a 7Gi", zoneB)
		f.askedIn("a", 3)
		f.askedIn("c", 3)
		f.same(objects, f.objects())
		f.same([]storagev1.CSIStorageCapacity{*before}, []storagev1.CSIStorageCapacity{*f.in("a", f.objects())})
		writes.are(t, http.MethodPost) // of zone b: the API server was not asked what it thinks of less than nothing
	})
}

// metric is the value of a gauge of a queue.
func (f *fixture) metric(name, queue string) float64 {
	f.Helper()
	families, err := f.Registry.Gather()
	f.Must(err)
	for _, family := range families {
		for _, m := range family.GetMetric() {
			if family.GetName() == name && len(m.GetLabel()) == 1 && m.GetLabel()[0].GetValue() == queue {
				return m.GetGauge().GetValue()
			}
		}
	}
	f.Fatalf("there is no metric %s of the queue %s", name, queue)
	return 0
}

func TestCapacityScenarioUpdates(t *testing.T) {
	t.Run("017_nothing_changes", func(t *testing.T) {
		f := scenario(t, polling)
		before := f.published(zoneA, zoneB)
		f.askedIn("a", 6)
		f.askedIn("b", 1)
		f.same(before, f.objects())
	})
	t.Run("018_maximum_alone_changes", func(t *testing.T) {
		f := scenario(t, polling)
		before := f.published(zoneA, zoneB)
		for _, m := range []*wrapperspb.Int64Value{wrapperspb.Int64(1 << 20), wrapperspb.Int64(2 << 20), nil} {
			f.says("a", &csi.GetCapacityResponse{AvailableCapacity: 1 << 30, MaximumVolumeSize: m})
			var want *resource.Quantity
			if m != nil {
				want = resource.NewQuantity(m.Value, resource.BinarySI)
			}
			kubetest.Eventually(f, fmt.Sprintf("the maximum is %v", want), func(context.Context) error {
				if have := f.in("a", f.objects()).MaximumVolumeSize; !sameQuantity(have, want) {
					return fmt.Errorf("it is %v", have)
				}
				return nil
			})
		}
		f.sameUIDs(before, f.published(zoneA, zoneB))
	})
	t.Run("019_capacity_edited", func(t *testing.T) {
		f := scenario(t, polling)
		before := f.published(zoneA, zoneB)
		f.edit(f.in("a", before).Name, `{"capacity":"100Ti"}`)
		f.sameUIDs(before, f.published(zoneA, zoneB))
	})
	t.Run("020_foreign_label_and_annotation", func(t *testing.T) {
		f := scenario(t, polling)
		before := f.published(zoneA, zoneB)
		f.edit(f.in("a", before).Name, `{"metadata":{"labels":{"team":"x"},"annotations":{"note":"y"}}}`)
		f.has("a", 3<<30)
		o := f.in("a", f.published("fast t/zone=a 3Gi", zoneB))
		if o.Labels["team"] != "x" || o.Annotations["note"] != "y" || len(o.Labels) != 3 {
			t.Errorf("the object has the labels %v and the annotations %v", o.Labels, o.Annotations)
		}
	})
	t.Run("021_conflicting_write", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, polling)
		f.makeFixture()
		old := f.existing("fast", "a", "7Gi", nil)
		var once sync.Once
		writes := f.noteWrites(func(r *http.Request) {
			if r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, old.Name) {
				once.Do(func() { f.edit(old.Name, `{"capacity":"8Gi","metadata":{"annotations":{"note":"y"}}}`) })
			}
		})
		f.start()
		objects := f.published(zoneA, zoneB)
		if o := f.in("a", objects); o.UID != old.UID || o.Annotations["note"] != "y" {
			t.Errorf("got %+v", o.ObjectMeta)
		}
		writes.mu.Lock()
		defer writes.mu.Unlock()
		if len(writes.methods) < 3 {
			t.Errorf("the writes were %q, and none was repeated", writes.methods)
		}
	})
	t.Run("022_object_deleted", func(t *testing.T) {
		f := scenario(t, never)
		before := f.published(zoneA, zoneB)
		f.Must(f.Client.StorageV1().CSIStorageCapacities(f.Namespace).Delete(t.Context(), f.in("a", before).Name, metav1.DeleteOptions{}))
		f.another("a", before)
		f.asked(3)
	})
	t.Run("023_label_removed", func(t *testing.T) {
		f := scenario(t, never)
		before := f.in("a", f.published(zoneA, zoneB))
		alone := f.edit(before.Name, fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, labelManagedBy))
		objects := f.published(zoneA, zoneA, zoneB)
		if i := slices.IndexFunc(objects, func(o storagev1.CSIStorageCapacity) bool { return o.UID == alone.UID }); i < 0 {
			t.Error("the object has gone")
		} else {
			f.same([]storagev1.CSIStorageCapacity{*alone}, objects[i:i+1])
		}
		f.asked(3)
	})
	t.Run("024_object_of_the_same_name", func(t *testing.T) {
		// The driver answers when both have been seen, the end of the one and the other.
		f := prepare(t, csitest.Config{}, never)
		f.makeFixture()
		writes := f.noteWrites(nil)
		f.start()
		before := f.published(zoneA, zoneB)
		seen := make(chan struct{})
		f.Plugin.Next(getCapacity, f.answeredAfter(seen))
		old := f.in("a", before)
		f.Must(f.Client.StorageV1().CSIStorageCapacities(f.Namespace).Delete(t.Context(), old.Name, metav1.DeleteOptions{}))
		f.Must(f.Plugin.Wait(t.Context(), getCapacity, 3))
		made := f.existing("fast", "a", "9Gi", func(o *storagev1.CSIStorageCapacity) { o.Name = old.Name })
		want := []string{http.MethodPatch, http.MethodPost, http.MethodPost} // no object but those of the start is made
		kubetest.Eventually(f, "the controller sees the object", func(context.Context) error {
			if o, ok := f.c.published.Get(f.Namespace + "/" + old.Name); !ok || o.UID != made.UID {
				return errors.New("it does not")
			}
			return nil
		})
		close(seen)
		if o := f.in("a", f.published(zoneA, zoneB)); o.UID != made.UID {
			t.Errorf("%q was not adopted", made.Name)
		}
		writes.are(t, want...)
	})
	t.Run("024_object_of_the_same_name_while_disconnected", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, never)
		f.makeFixture()
		line := f.cuttable("/csistoragecapacities")
		f.start()
		old := f.in("a", f.published(zoneA, zoneB))
		kubetest.Eventually(f, "the watch has delivered the object", func(context.Context) error {
			if _, ok := f.c.published.Get(f.Namespace + "/" + old.Name); !ok {
				return errors.New("it has not")
			}
			return nil
		})
		line.cut()
		f.Must(f.Client.StorageV1().CSIStorageCapacities(f.Namespace).Delete(t.Context(), old.Name, metav1.DeleteOptions{}))
		made := f.existing("fast", "a", "9Gi", func(o *storagev1.CSIStorageCapacity) { o.Name = old.Name })
		line.restore()
		if o := f.in("a", f.published(zoneA, zoneB)); o.UID != made.UID {
			t.Errorf("%q was not adopted", made.Name)
		}
	})
	t.Run("025_object_without_capacity", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, polling)
		f.makeFixture()
		made := f.existing("fast", "a", "1", func(o *storagev1.CSIStorageCapacity) { o.Name, o.Capacity = "by-hand", nil })
		f.has("b", 0)
		f.start()
		f.working()
		later := f.existing("fast", "b", "1", func(o *storagev1.CSIStorageCapacity) { o.Name, o.Capacity = "later-by-hand", nil })
		objects := f.published(zoneA, "fast t/zone=b 0")
		f.sameUIDs([]storagev1.CSIStorageCapacity{*made, *later}, objects)
	})
}

// another waits until the object of a zone is another than before.
func (f *fixture) another(zone string, before []storagev1.CSIStorageCapacity) {
	f.Helper()
	want, old := f.describe(before), f.in(zone, before).UID
	kubetest.Eventually(f, "another object is there for zone "+zone, func(context.Context) error {
		objects := f.objects()
		if have := f.describe(objects); !slices.Equal(have, want) || slices.Contains(uids(objects), old) {
			return fmt.Errorf("%q are published", have)
		}
		return nil
	})
}

func TestCapacityScenarioAdoption(t *testing.T) {
	t.Run("026_right_objects", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, polling)
		f.makeFixture()
		before := []storagev1.CSIStorageCapacity{*f.existing("fast", "a", "1Gi", nil), *f.existing("fast", "b", "2Gi", nil)}
		writes := f.noteWrites(nil)
		f.start()
		f.askedIn("a", 3)
		f.askedIn("b", 1)
		f.same(before, f.objects())
		writes.are(t)
	})
	t.Run("027_old_value", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, never)
		f.makeFixture()
		before := []storagev1.CSIStorageCapacity{*f.existing("fast", "a", "9Gi", nil), *f.existing("fast", "b", "2Gi", nil)}
		writes := f.noteWrites(nil)
		f.start()
		f.sameUIDs(before, f.published(zoneA, zoneB))
		f.asked(2)
		writes.are(t, http.MethodPatch)
	})
	t.Run("027_old_value_without_patch", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, never)
		f.makeFixture()
		before := []storagev1.CSIStorageCapacity{*f.existing("fast", "a", "9Gi", nil), *f.existing("fast", "b", "2Gi", nil)}
		client, err := kubernetes.NewForConfig(kubetest.Proxy(f, f.ControlPlane.Config(),
			func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
				if r.Method == http.MethodPatch {
					w.Header().Set("Content-Type", runtime.ContentTypeJSON)
					w.WriteHeader(http.StatusForbidden)
					_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
						Status: metav1.StatusFailure, Reason: metav1.StatusReasonForbidden, Code: http.StatusForbidden})
					return
				}
				pass.ServeHTTP(w, r)
			}))
		f.Must(err)
		f.change = func(d *Deps) { d.Client = client }
		f.start()
		f.sameUIDs(before, f.published(zoneA, zoneB))
	})
	t.Run("028_unknown_class", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, func(c *Config) { c.RemovalGrace = time.Hour })
		f.makeFixture()
		f.existing("gone", "a", "1Gi", nil)
		f.start()
		f.published(zoneA, zoneB)
		f.existing("gone", "b", "1Gi", nil)
		f.published(zoneA, zoneB)
	})
	t.Run("029_unknown_topology", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, nil)
		f.makeFixture()
		f.existing("fast", "z", "1Gi", nil)
		f.existing("fast", "a", "1Gi", func(o *storagev1.CSIStorageCapacity) { o.NodeTopology = nil })
		f.existing("fast", "a", "1Gi", func(o *storagev1.CSIStorageCapacity) { o.NodeTopology = &metav1.LabelSelector{} })
		f.existing("fast", "a", "1Gi", func(o *storagev1.CSIStorageCapacity) {
			o.NodeTopology.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: "x", Operator: metav1.LabelSelectorOpExists}}
		})
		f.existing("fast", "a", "1Gi", func(o *storagev1.CSIStorageCapacity) { o.NodeTopology.MatchLabels["t/rack"] = "1" })
		f.start()
		f.published(zoneA, zoneB)
		f.existing("fast", "y", "1Gi", nil)
		f.existing("fast", "a", "1Gi", func(o *storagev1.CSIStorageCapacity) { o.NodeTopology = nil })
		f.published(zoneA, zoneB)
	})
	t.Run("030_foreign_objects", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, nil)
		f.makeFixture()
		elsewhere := kubetest.Namespace(t, f.ControlPlane)
		before := []storagev1.CSIStorageCapacity{
			*f.existing("fast", "a", "11Gi", func(o *storagev1.CSIStorageCapacity) { o.Labels[labelManagedBy] = "me" }),
			*f.existing("fast", "a", "12Gi", func(o *storagev1.CSIStorageCapacity) { o.Labels = nil }),
			*f.existing("fast", "a", "13Gi", func(o *storagev1.CSIStorageCapacity) { o.Labels[labelDriver] = "other" }),
			*f.existing("gone", "z", "14Gi", func(o *storagev1.CSIStorageCapacity) { delete(o.Labels, labelDriver) }),
		}
		other := f.existing("gone", "z", "15Gi", func(o *storagev1.CSIStorageCapacity) { o.Namespace = elsewhere })
		writes := f.noteWrites(nil)
		f.start()
		objects := f.published("fast t/zone=a 11Gi", "fast t/zone=a 12Gi", "fast t/zone=a 13Gi", zoneA, zoneB, "gone t/zone=z 14Gi")
		f.same(before, slices.DeleteFunc(objects, func(o storagev1.CSIStorageCapacity) bool {
			return !slices.Contains(uids(before), o.UID)
		}))
		now, err := f.Client.StorageV1().CSIStorageCapacities(elsewhere).Get(t.Context(), other.Name, metav1.GetOptions{})
		f.Must(err)
		f.same([]storagev1.CSIStorageCapacity{*other}, []storagev1.CSIStorageCapacity{*now})
		writes.are(t, http.MethodPost, http.MethodPost)
	})
	t.Run("031_duplicates", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, nil)
		f.makeFixture()
		older := f.existing("fast", "a", "1Gi", func(o *storagev1.CSIStorageCapacity) { o.Name = "zzz" })
		// The younger one has the name that sorts first, and is younger by what can be
		// told from a time that is in seconds.
		kubetest.Eventually(f, "there is a younger object", func(ctx context.Context) error {
			younger := f.existing("fast", "a", "1Gi", func(o *storagev1.CSIStorageCapacity) { o.Name = "aaa" })
			if younger.CreationTimestamp.After(older.CreationTimestamp.Time) {
				return nil
			}
			f.Must(f.Client.StorageV1().CSIStorageCapacities(f.Namespace).Delete(ctx, younger.Name, metav1.DeleteOptions{}))
			return errors.New("they are of the same second")
		})
		f.start()
		if o := f.in("a", f.published(zoneA, zoneB)); o.UID != older.UID {
			t.Errorf("%q is left", o.Name)
		}
		f.existing("fast", "a", "5Gi", nil)
		f.published(zoneA, zoneB)
	})
	t.Run("032_node_lists_come_late", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, nil)
		f.makeFixture()
		before := []storagev1.CSIStorageCapacity{*f.existing("fast", "a", "1Gi", nil), *f.existing("fast", "b", "2Gi", nil)}
		gates := map[string]chan struct{}{"/nodes": make(chan struct{}), "/csinodes": make(chan struct{})}
		f.Watch = kubetest.Proxy(t, f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			for suffix, gate := range gates {
				if strings.HasSuffix(r.URL.Path, suffix) {
					select {
					case <-gate:
					case <-r.Context().Done():
					}
				}
			}
			pass.ServeHTTP(w, r)
		})
		writes := f.noteWrites(nil)
		f.start()
		held := func(list string, nodes bool) {
			t.Helper()
			kubetest.Eventually(f, "the controller has the other lists", func(context.Context) error {
				_, class := f.c.classes.Get(f.Unique("fast"))
				_, node := f.c.nodes.Get(f.Unique("n2"))
				if !class || node != nodes || len(f.c.published.List()) != 2 {
					return errors.New("it has not")
				}
				return nil
			})
			if f.c.term.Load() != nil {
				t.Errorf("the controller works without the list of %s", list)
			}
			f.same(before, f.objects())
			f.asked(0)
		}
		held("nodes", false)
		close(gates["/nodes"])
		held("CSINodes", true)
		// After a failed WatchList request, client-go lists from the API server's cache, which
		// may be old. Without a removal grace, the controller deletes the object of a missing node.
		kubetest.Eventually(f, "the API server's cache has the CSINodes", func(ctx context.Context) error {
			list, err := f.Client.StorageV1().CSINodes().List(ctx, metav1.ListOptions{ResourceVersion: "0"})
			for _, name := range []string{f.Unique("n1"), f.Unique("n2")} {
				if err == nil && !slices.ContainsFunc(list.Items, func(n storagev1.CSINode) bool { return n.Name == name }) {
					err = fmt.Errorf("%s is missing", name)
				}
			}
			return err
		})
		close(gates["/csinodes"])
		f.asked(2)
		f.same(before, f.published(zoneA, zoneB))
		writes.are(t)
	})
	t.Run("033_another_leader", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, polling)
		f.makeFixture()
		f.start()
		before := f.published(zoneA, zoneB)
		_ = f.Stop(errors.New("the Lease is lost")) // which it returns
		f.has("a", 3<<30)
		f.start()
		f.sameUIDs(before, f.published("fast t/zone=a 3Gi", zoneB))
		f.has("a", 4<<30)
		f.sameUIDs(before, f.published("fast t/zone=a 4Gi", zoneB))
	})
	t.Run("033_leader_again", func(t *testing.T) {
		// The same process gets the Lease back. The controller of the fixture is only
		// there for its watches, and never gets to work.
		f := prepare(t, csitest.Config{}, polling)
		f.makeFixture()
		var deps Deps
		f.change = func(d *Deps) {
			deps = *d
			d.Ready = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
		}
		f.start()
		deps.Registry = prometheus.NewRegistry()
		c, err := New(f.cfg, deps)
		f.Must(err)
		lead := func() (lose func()) {
			ctx, cancel := context.WithCancelCause(t.Context())
			var run sync.WaitGroup
			run.Go(func() { _ = c.Run(ctx) })
			return func() {
				cancel(errors.New("the Lease is lost"))
				run.Wait()
			}
		}
		lose := lead()
		before := f.published(zoneA, zoneB)
		lose()
		f.has("a", 3<<30)
		f.Must(f.Client.CoreV1().Nodes().Delete(t.Context(), f.Unique("n2"), metav1.DeleteOptions{}))
		defer lead()()
		f.sameUIDs([]storagev1.CSIStorageCapacity{*f.in("a", before)}, f.published("fast t/zone=a 3Gi"))
	})
	t.Run("034_process_stops", func(t *testing.T) {
		f := scenario(t, nil)
		before := f.published(zoneA, zoneB)
		if err := f.Stop(workloop.ErrDrain); !errors.Is(err, workloop.ErrDrain) {
			t.Errorf("the controller ended with %v", err)
		}
		f.same(before, f.objects())
	})
}
