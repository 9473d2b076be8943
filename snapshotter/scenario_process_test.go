// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// refuseWatches answers lists and watches of the snapshotter with the status that f returns, unless
// it is 0.
func (f *fixture) refuseWatches(refuse func(request) int) {
	f.Watch = kubetest.Proxy(f, f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		code := refuse(request{method: r.Method, path: r.URL.Path, probe: r.URL.Query().Get("limit") == "1"})
		if code == 0 {
			ctx, end := context.WithCancel(r.Context())
			defer end()
			f.mu.Lock()
			f.watching = append(f.watching, end)
			f.mu.Unlock()
			pass.ServeHTTP(w, r.WithContext(ctx))
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":%q,"code":%d,"message":"refused"}`,
			map[int]string{403: "Forbidden", 404: "NotFound", 500: "InternalError"}[code], code)
	})
}

// endWatches ends the running watches, as the API server does after the removal of a CRD.
func (f *fixture) endWatches() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, end := range f.watching {
		end()
	}
	f.watching = nil
}

// heap returns the bytes in use.
func heap() int64 {
	var m runtime.MemStats
	for range 3 {
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// adds returns the number of keys that were added to the queues.
func (f *fixture) adds() (sum float64) {
	f.Helper()
	families, err := f.Registry.Gather()
	f.Must(err)
	for _, family := range families {
		if family.GetName() == "workqueue_adds_total" {
			for _, m := range family.GetMetric() {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// TestSnapshotterScenarioMemory has one scenario, which runs alone: it measures the memory of the process.
func TestSnapshotterScenarioMemory(t *testing.T) {
	t.Run("080_other_drivers", func(t *testing.T) {
		kubetest.NeedReal(t)            // else the memory of the API server is measured, too
		const n, limit = 1_000, 1 << 20 // as 10 MiB for 10,000
		f := scenario(t, csitest.Config{}, nil)
		f.quiet()
		before, added := heap(), f.adds()
		var wg sync.WaitGroup
		for worker := range 8 {
			wg.Go(func() {
				for i := worker; i < n; i += 8 {
					f.content(fmt.Sprint("other", i), func(o *snapshotv1.VolumeSnapshotContent) {
						o.Spec.Driver, o.Finalizers = "other.example.com", nil
						o.Annotations = map[string]string{AnnRequest: strings.Repeat("x", 500)}
						o.Spec.VolumeSnapshotRef.UID = types.UID(fmt.Sprint("uid", i))
					})
				}
			})
		}
		wg.Wait()
		f.quiet() // the watch has delivered all of them
		if now := f.adds(); now > added+10 {
			t.Errorf("%v keys were added to the queue", now-added)
		}
		grown := heap() - before
		t.Logf("%d contents of other drivers need %d KiB", n, grown/1024)
		if grown > limit {
			t.Errorf("%d contents of other drivers need %d bytes", n, grown)
		}
		f.Crash()
		before = heap() // the fixture may hold the caches of the snapshotter that ended
		f.content("v1", nil)
		began := time.Now()
		f.start()
		f.until("is complete", isComplete)
		t.Logf("the snapshot was created %v after the start", time.Since(began))
		if now := f.adds(); now > 10 {
			t.Errorf("%v keys were added to the queue after the start", now)
		}
		if grown := heap() - before; grown > limit {
			t.Errorf("after the first list, %d contents of other drivers need %d bytes", n, grown)
		}
		for {
			err := f.contents.GetClient().Delete().Resource("volumesnapshotcontents").Do(t.Context()).Error()
			if !apierrors.IsTimeout(err) { // a slow server deletes a part of them within the time of one request
				f.Must(err)
				return
			}
		}
	})
}

func TestSnapshotterScenarioIdle(t *testing.T) {
	t.Run("076_077_not_served", func(t *testing.T) {
		for name, code := range map[string]int{"no_CRD": 404, "forbidden": 403} {
			t.Run(name, func(t *testing.T) {
				f := newFixture(t, csitest.Config{}, nil)
				f.class("c1", nil)
				var mu sync.Mutex
				missing := code
				f.refuseWatches(func(r request) int {
					mu.Lock()
					defer mu.Unlock()
					if strings.Contains(r.path, "volumesnapshotcontents") {
						return missing
					}
					return 0
				})
				set := func(code int) {
					mu.Lock()
					defer mu.Unlock()
					missing = code
				}
				f.content("v1", nil)
				f.start()
				kubetest.Eventually(t, "the controller is idle", func(context.Context) error {
					if err := f.c.Ready(); err == nil || !containsAll(err.Error(), "snapshotter idle: ", "volumesnapshotcontents") {
						return fmt.Errorf("it reports %v", err)
					}
					return nil
				})
				f.Calls(createSnapshot, 0)
				set(0)
				f.until("is complete", isComplete)
				f.Must(f.c.Ready())
				set(code)
				f.endWatches()
				kubetest.Eventually(t, "the controller is idle again", func(context.Context) error {
					if f.c.Ready() == nil {
						return errors.New("it works")
					}
					return nil
				})
				f.Calls(removeSnapshot, 0)
				set(0)
				f.delete("v1")
				f.until("is deleted", isDeleted)
				f.Calls(removeSnapshot, 1)
			})
		}
	})
	// An API server that starts may answer so for a second.
	for name, refusesFirst := range map[string]bool{"at_first": true, "later": false} {
		for _, code := range []int{403, 404} {
			t.Run(fmt.Sprintf("076_short_%d_%s", code, name), func(t *testing.T) {
				f := newFixture(t, csitest.Config{}, func(c *Config) { c.RecheckInterval = time.Hour })
				f.class("c1", nil)
				var refused atomic.Int32
				refused.Store(map[bool]int32{true: 1}[refusesFirst])
				f.refuseWatches(func(r request) int {
					return map[bool]int{true: code}[strings.Contains(r.path, "volumesnapshotcontents") && refused.Add(-1) >= 0]
				})
				f.start()
				f.content("v1", nil)
				f.until("is complete", isComplete)
				refused.Store(2)
				f.endWatches()
				f.content("v2", func(o *snapshotv1.VolumeSnapshotContent) { o.Spec.VolumeSnapshotRef.UID = "two" })
				f.untilOf("v2", "is complete", isComplete)
			})
		}
	}
	t.Run("list_fails", func(t *testing.T) {
		f := newFixture(t, csitest.Config{}, nil)
		f.class("c1", nil)
		var served atomic.Bool
		f.refuseWatches(func(r request) int {
			if strings.Contains(r.path, "volumesnapshotclasses") && !r.probe && !served.Load() {
				return internalError
			}
			return 0
		})
		f.start()
		kubetest.Eventually(t, "readiness names the error", func(context.Context) error {
			if err := f.c.Ready(); err == nil || !containsAll(err.Error(), "snapshotter idle: listing and watching", "refused") {
				return fmt.Errorf("it reports %v", err)
			}
			return nil
		})
		served.Store(true)
		f.content("v1", nil)
		f.until("is complete", isComplete)
		f.Must(f.c.Ready())
	})
	t.Run("079_node", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.NodeDeployment, c.NodeName = true, "n1" })
		label := func(node string) func(*snapshotv1.VolumeSnapshotContent) {
			return func(o *snapshotv1.VolumeSnapshotContent) {
				o.Labels, o.Spec.VolumeSnapshotRef.UID = map[string]string{LabelManagedBy: node}, types.UID(node)
			}
		}
		f.content("v1", label("n2"))
		f.content("v2", nil)
		f.content("v3", label("n1"))
		f.untilOf("v3", "is complete", isComplete)
		if r := f.created(); len(r) != 1 || r[0].Name != "snapshot-n1" {
			t.Errorf("requests %v", r)
		}
	})
	t.Run("driver_of_a_content_changes", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.content("v1", func(o *snapshotv1.VolumeSnapshotContent) { o.Spec.Driver = "other.example.com" })
		f.quiet()
		f.patch("v1", fmt.Sprintf(`{"spec":{"driver":%q}}`, f.Driver))
		f.until("is complete", isComplete)
	})
}

// TestEndedContext: a loop that waits and runs until an error ends together with its context.
func TestEndedContext(t *testing.T) {
	ctx, stop := context.WithCancelCause(t.Context())
	stop(workloop.ErrDrain)
	for name, failure := range map[string]error{"no watches": errors.New("the CRDs are not installed"), "watches": nil} {
		open := func(context.Context) (w watches, _ []kube.Watch, err error) { return w, nil, failure }
		c := &Controller{snapshots: kube.NewOptional("", time.Hour, open, func(context.Context, error) {})}
		serving, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			c.snapshots.Run(serving)
		}()
		if failure == nil {
			c.snapshots.Wait(t.Context())
		}
		stop()
		<-done
		if err := c.WaitAvailable(ctx); !errors.Is(err, workloop.ErrDrain) {
			t.Errorf("%s: WaitAvailable returned %v", name, err)
		}
		if err := c.Run(ctx); !errors.Is(err, workloop.ErrDrain) {
			t.Errorf("%s: Run returned %v", name, err)
		}
	}
}

func TestSnapshotterScenarioConfig(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"079_no_node_name":       {func(c *Config) { c.NodeDeployment = true }, "NODE_NAME"},
		"079_empty_prefix":       {func(c *Config) { c.SnapshotNamePrefix = "" }, "--snapshot-name-prefix"},
		"079_empty_group_prefix": {func(c *Config) { c.GroupSnapshotNamePrefix = "" }, "--groupsnapshot-name-prefix"},
		"079_length_0":           {func(c *Config) { c.SnapshotNameUUIDLength = 0 }, "--snapshot-name-uuid-length"},
		"079_length_-2":          {func(c *Config) { c.GroupSnapshotNameUUIDLength = -2 }, "--groupsnapshot-name-uuid-length"},
		"079_length_33":          {func(c *Config) { c.SnapshotNameUUIDLength = 33 }, "--snapshot-name-uuid-length"},
		"079_no_workers":         {func(c *Config) { c.WorkerThreads = 0 }, "--worker-threads"},
		"079_no_timeout":         {func(c *Config) { c.Timeout = 0 }, "--timeout"},
		"079_negative_resync":    {func(c *Config) { c.ResyncPeriod = -1 }, "--resync-period"},
		"079_no_retry":           {func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = 0, 0 }, "--retry-interval-max"},
		"079_valid":              {func(c *Config) { c.NodeDeployment, c.NodeName, c.SnapshotNameUUIDLength = true, "n1", 32 }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			c := DefaultConfig()
			test.change(&c)
			if err := c.Validate(); (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}
