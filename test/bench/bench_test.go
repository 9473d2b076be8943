package main

import (
	"bytes"
	"maps"
	"strings"
	"testing"
	"time"
)

// TestBench measures a few volumes, to see that every number comes about.
func TestBench(t *testing.T) {
	r, err := measure(t.Context(), options{volumes: 20, nodes: 3, foreign: 5, latency: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]map[string]int{
		"provision": {"CreateVolume": 20}, "attach": {"ControllerPublishVolume": 20}, "detach": {"ControllerUnpublishVolume": 20}, "delete": {"DeleteVolume": 20},
	}
	if len(r.Phases) != 4 || r.Idle.ResidentBytes == 0 || r.Start.BytesRead == 0 {
		t.Fatalf("got %+v", r)
	}
	for _, p := range r.Phases {
		if !maps.Equal(p.Calls, want[p.Name]) || p.Seconds <= 0 || p.P99 < p.P50 || p.P50 <= 0 || len(p.Requests) == 0 || p.ResidentBytes == 0 {
			t.Errorf("got %+v", p)
		}
	}
	var out bytes.Buffer
	r.table(&out)
	if !strings.Contains(out.String(), "CPU per volume, whole life") || !strings.Contains(out.String(), "CreateVolume 1.00") {
		t.Errorf("table: %s", out.String())
	}
}
