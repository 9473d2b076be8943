// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// TestBench measures a few volumes, to see that every number comes about.
func TestBench(t *testing.T) {
	kubetest.NeedReal(t)
	want := map[string]map[string]int{
		created: {"CreateVolume": 20}, bound: {"CreateVolume": 20}, "attach": {"ControllerPublishVolume": 20},
		"expand": {"ControllerExpandVolume": 20}, "modify": {"ControllerModifyVolume": 20}, "snapshot": {"CreateSnapshot": 20},
		"delete-snapshot": {"DeleteSnapshot": 20}, "detach": {"ControllerUnpublishVolume": 20}, "delete": {"DeleteVolume": 20},
	}
	phases := []string{"provision", "attach", "expand", "modify", "snapshot", "delete-snapshot", "detach", "delete"}
	profiles := t.TempDir()
	r, err := measure(t.Context(), options{volumes: 20, nodes: 3, foreign: 5, latency: time.Millisecond, limit: 15 * time.Minute,
		phases: phases, profiles: profiles})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Phases) != len(phases)+1 || r.Idle.ResidentBytes == 0 || r.Start.BytesRead == 0 {
		t.Fatalf("got %+v", r)
	}
	for _, p := range r.Phases {
		if !maps.Equal(p.Calls, want[p.Name]) || p.Seconds <= 0 || p.P99 < p.P50 || p.P50 <= 0 || len(p.Requests) == 0 ||
			p.ResidentBytes == 0 || p.APIServerSeconds <= 0 {
			t.Errorf("got %+v", p)
		}
	}
	if life := r.life(); life.EtcdSeconds <= 0 || life.APIServerSeconds <= life.EtcdSeconds {
		t.Errorf("CPU of etcd and the API server: got %+v", life)
	}
	heap, err := os.ReadFile(filepath.Join(profiles, "delete-sidecar-0-heap.pb.gz"))
	if err != nil || len(heap) == 0 {
		t.Errorf("heap profile: %d bytes, %v", len(heap), err)
	}
	var out bytes.Buffer
	r.table(&out)
	if !strings.Contains(out.String(), "CPU per volume, whole life") || !strings.Contains(out.String(), "CreateVolume 1.00") {
		t.Errorf("table: %s", out.String())
	}
}

// TestRequests measures requests of each kind, so many that their CPU is more than a clock tick.
func TestRequests(t *testing.T) {
	kubetest.NeedReal(t)
	costs, err := measureRequests(t.Context(), options{volumes: 100, nodes: 3, limit: 15 * time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	var whole requestCost
	for _, c := range costs {
		whole.APIServerSeconds += c.APIServerSeconds
		whole.EtcdSeconds += c.EtcdSeconds
	}
	if whole.APIServerSeconds <= 0 || whole.APIServerSeconds < whole.EtcdSeconds {
		t.Errorf("CPU of the API server %v s, of etcd %v s", whole.APIServerSeconds, whole.EtcdSeconds)
	}
	var out bytes.Buffer
	costs.table(&out)
	lines := strings.Count(out.String(), "\n")
	if lines != len(costs)+2 || !strings.Contains(out.String(), "| JSON patch of PersistentVolume ") {
		t.Errorf("table: %s", out.String())
	}
}

// TestBenchCapacity measures the capacity of a few nodes, to see that every number comes about.
func TestBenchCapacity(t *testing.T) {
	kubetest.NeedReal(t)
	r, err := measureCapacity(t.Context(), options{nodes: 30, latency: time.Millisecond, limit: 15 * time.Minute, capacity: capacityOptions{
		classes: 2, threads: 4, poll: 2 * time.Second, grace: time.Second, churn: 300, churnTime: 2 * time.Second,
	}})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Phases) != 3 || r.Joined.N != 10 || r.Left.N != 10 || r.Joined.Max < r.Joined.Median || r.Left.Median < 1 ||
		r.Leftovers != 0 || r.Missing != 0 {
		t.Fatalf("got %+v", r)
	}
	first, quiet := r.Phases[0], r.Phases[1]
	if first.Writes != 60 || first.Requests["create csistoragecapacities"] != 60 || first.Calls["GetCapacity"] < 60 ||
		first.ResidentBytes == 0 || first.PeakBytes == 0 {
		t.Errorf("first publication: %+v", first)
	}
	if quiet.Writes != 0 || quiet.Calls["GetCapacity"] < 30 {
		t.Errorf("nothing happens: %+v", quiet)
	}
	var out bytes.Buffer
	r.table(&out)
	if !strings.Contains(out.String(), "10 nodes joined") || !strings.Contains(out.String(), "at the end: 0 objects too many, 0 too few") {
		t.Errorf("table: %s", out.String())
	}
}

func TestQueueDepth(t *testing.T) {
	text := "# TYPE workqueue_depth gauge\nworkqueue_depth{name=\"claims\"} 3\nworkqueue_depth{name=\"csistoragecapacity\"} 1.0001e+04\n"
	if depth, err := queueDepth(strings.NewReader(text)); depth != 10001 || err != nil {
		t.Errorf("got %d, %v", depth, err)
	}
	if _, err := queueDepth(strings.NewReader("")); err == nil {
		t.Error("no error where there is no such metric")
	}
}
