// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm_test

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/topolvm/topolvmtest"
)

// manyNodes creates Nodes with capacities, without their topolvm-node.
func (f *fixture) manyNodes(t testing.TB, count int) (values []string) {
	t.Helper()
	for i := range count {
		values = append(values, fmt.Sprintf("%s-many-%d", f.driver, i))
	}
	var workers sync.WaitGroup
	var next atomic.Int32
	for range 16 {
		workers.Go(func() {
			for i := int(next.Add(1)) - 1; i < count; i = int(next.Add(1)) - 1 {
				prefix, free := "capacity."+f.driver+"/", fmt.Sprint(gi)
				node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
					Name: values[i], Labels: map[string]string{f.key: values[i]},
					Annotations: map[string]string{prefix + "ssd": free, prefix + "00default": free},
				}}
				if _, err := f.client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	workers.Wait()
	t.Cleanup(func() {
		for _, value := range values {
			_ = f.client.CoreV1().Nodes().Delete(f.background, value, metav1.DeleteOptions{})
		}
	})
	return values
}

// capacityOfEach calls GetCapacity once for each topology value, without gRPC.
func (f *fixture) capacityOfEach(t testing.TB, values []string) {
	parameters := map[string]string{f.driver + "/device-class": "ssd"}
	for _, value := range values {
		r := &csi.GetCapacityRequest{
			Parameters: parameters, AccessibleTopology: &csi.Topology{Segments: map[string]string{f.key: value}},
		}
		response, err := f.service.GetCapacity(t.Context(), r)
		if err != nil || response.AvailableCapacity != gi {
			t.Fatalf("%s: %v %v", value, response, err)
		}
	}
}

// many returns a cluster with 2,000 Nodes and a service that knows them.
func many(t testing.TB) (*fixture, []string) {
	f := cluster(t)
	topolvmtest.Install(t, f.client, f.driver)
	values := f.manyNodes(t, 2000)
	f.replica = f.run()
	f.synced()
	return f, values
}

// TestTopolvmScenario050 asks for the capacity of each of 2,000 Nodes.
func TestTopolvmScenario050(t *testing.T) {
	f, values := many(t)
	best := time.Hour
	for range 10 { // other tests run on this machine
		began := time.Now()
		f.capacityOfEach(t, values)
		best = min(best, time.Since(began))
	}
	t.Logf("2000 calls of GetCapacity: %v", best)
	if best > 50*time.Millisecond {
		t.Errorf("2000 calls take %v, at most 50 ms are allowed", best)
	}
}

// TestTopolvmScenario087 compares the heap with 10,000 LogicalVolumes and 2,000 Nodes with that without any.
func TestTopolvmScenario087(t *testing.T) {
	f := cluster(t)
	topolvmtest.Install(t, f.client, f.driver)
	f.replica = f.run()
	f.synced()
	before := heap()
	f.fill(t, 10_000)
	values := f.manyNodes(t, 2000)
	filled := heap() // with the objects of an API server in memory
	began := time.Now()
	second := *f
	second.replica = f.run()
	second.synced()
	second.capacityOfEach(t, values[:1])
	took := time.Since(began)
	used := heap() - filled
	t.Logf("heap: %d KiB before, %d with the objects, and %d more for the caches of one process, which starts in %v",
		before>>10, filled>>10, used>>10, took)
	if used > 40<<20 {
		t.Errorf("the caches take %d MiB, at most 40 are allowed", used>>20)
	}
	if took > 30*time.Second { // 5 s on a machine that does nothing else
		t.Errorf("the start took %v", took)
	}
	runtime.KeepAlive(second.replica)
}

// heap returns the bytes that are reachable.
func heap() int64 {
	for range 3 {
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func BenchmarkGetCapacity2000Nodes(b *testing.B) {
	f, values := many(b)
	b.ReportAllocs()
	for b.Loop() {
		f.capacityOfEach(b, values)
	}
}

// BenchmarkCreateVolume200 creates 200 volumes at once on three nodes, and deletes them.
func BenchmarkCreateVolume200(b *testing.B) {
	f := start(b)
	round := 0
	for b.Loop() {
		round++
		var calls sync.WaitGroup
		for i := range 200 {
			calls.Go(func() {
				v, err := f.create(fmt.Sprintf("v-%d-%d", round, i), size(8*mi), f.on(string(rune('a'+i%3))))
				if err == nil {
					err = f.delete(v.VolumeId)
				}
				if err != nil {
					b.Error(err)
				}
			})
		}
		calls.Wait()
	}
	b.ReportMetric(float64(len(f.requests.take()))/float64(200*round), "requests/volume")
}
