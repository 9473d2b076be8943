// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"strings"
	"testing"
)

// slowCalls adds minutes in which a driver took these times for the calls of a method.
func (h *history) slowCalls(method string, seconds ...float64) {
	bounds := []float64{.1, .25, .5, 1, 2.5, 5, 10, 15, 25, 50, 120, 300, 600} // of csiclient
	for minute := range 20 {
		h.now += 60
		labels := fmt.Sprintf("driver_name=\"d\",method_name=\"/csi.v1.Controller/%s\",grpc_status_code=\"OK\"", method)
		var b strings.Builder
		b.WriteString("storage_controller_driver_info{driver_name=\"d\"} 1\n# TYPE csi_sidecar_operations_seconds histogram\n")
		for _, bound := range bounds {
			n := 0
			for _, s := range seconds {
				if s <= bound {
					n++
				}
			}
			fmt.Fprintf(&b, "csi_sidecar_operations_seconds_bucket{%s,le=\"%v\"} %d\n", labels, bound, (minute+1)*n)
		}
		n := (minute + 1) * len(seconds)
		fmt.Fprintf(&b, "csi_sidecar_operations_seconds_bucket{%s,le=\"+Inf\"} %d\n", labels, n)
		fmt.Fprintf(&b, "csi_sidecar_operations_seconds_count{%s} %d\ncsi_sidecar_operations_seconds_sum{%s} %d\n", labels, n, labels, n)
		h.Scrapes = append(h.Scrapes, scraped{h.now, target("a", "8080"), b.String(), 0})
	}
}

// TestAlertAboutTheDeadlineOfEachMethod: calls for snapshots block until the snapshot is cut, and have a minute.
func TestAlertAboutTheDeadlineOfEachMethod(t *testing.T) {
	t.Parallel()
	expression := ""
	for _, a := range alerts(t) {
		if a.Alert == "StorageControllerDriverSlow" {
			expression = a.Expr
		}
	}
	for name, tt := range map[string]struct {
		method  string
		seconds float64
		fires   bool
	}{
		"volume":               {"CreateVolume", 12, true},
		"quick volume":         {"CreateVolume", 8, false},
		"expansion":            {"ControllerExpandVolume", 12, true},
		"snapshot":             {"CreateSnapshot", 40, false},
		"slow snapshot":        {"CreateSnapshot", 55, true},
		"slow deletion":        {"DeleteSnapshot", 55, true},
		"list":                 {"ListSnapshots", 40, false},
		"group of snapshots":   {"CreateVolumeGroupSnapshot", 40, false},
		"slow group snapshots": {"CreateVolumeGroupSnapshot", 55, true},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHistory()
			h.slowCalls(tt.method, tt.seconds)
			if got := h.finds(t, expression)[0]; (len(got) > 0) != tt.fires || len(got) > 1 {
				t.Errorf("%v s: the alert has %v", tt.seconds, got)
			}
		})
	}
}
