// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

// TestRecordsOfLostNodes: a record that holds or opts out says so before anything else.
func TestRecordsOfLostNodes(t *testing.T) {
	since := `"since":"` + now.Add(-5*time.Minute).Format(time.RFC3339) + `"`
	for record, want := range map[string]struct {
		severity finding.Severity
		text     string
	}{
		`{"node":"n","uid":"u","held":"breaker"}`:               {finding.Blocked, "Node n of driver d is lost. Its cleanup is held by the breaker"},
		`{` + since + `,"held":"breaker"}`:                      {finding.Blocked, "Node v of driver d has been lost for 5m. Its cleanup is held"},
		`{"node":"n",` + since + `,"held":"b","optedOut":true}`: {finding.OK, "Node n of driver d opted out of the cleanup: nothing is deleted. Without"},
		`{`: {finding.Blocked, "The record of node v of driver d cannot be parsed: nothing is deleted, and further"},
		`{"node":"n","planned":true,"next":"x"}`: {finding.Waiting,
			"Node n of driver d is being deleted, or its deletion is not confirmed yet. The removal"},
		`{"node":"n",` + since + `,"next":"x"}`:                     {finding.Waiting, "Node n of driver d has been lost for 5m."},
		`{"node":"n","approved":"2026-01-01T00:00:00Z","next":"x"}`: {finding.Waiting, "Node n of driver d is lost."},
	} {
		records := nodecleanup.ParseLostNodes(&corev1.ConfigMap{Data: map[string]string{"v": record}})
		e := &explanation{facts: &facts{now: now}}
		explainLostNode(e, lostNode{records[0], "d", "ns", ""})
		got := e.findings[0]
		if got.Severity != want.severity || !strings.HasPrefix(got.Message,
			want.text) || (got.Next == "") != (want.severity == finding.OK) {
			t.Errorf("%s: %+v, want %v %q", record, got, want.severity, want.text)
		}
	}
}

// TestModeOfLostNodes: in a mode that deletes nothing, the cleanup is blocked. The next step is that of the record.
func TestModeOfLostNodes(t *testing.T) {
	for mode, severity := range map[nodecleanup.Mode]finding.Severity{
		nodecleanup.ModeReport: finding.Blocked, nodecleanup.ModeClaims: finding.Waiting, nodecleanup.ModeVolumes: finding.Waiting,
		"": finding.Waiting,
	} {
		for _, approved := range []time.Time{{}, now} {
			record := nodecleanup.LostNode{Node: "n", Since: now, Approved: approved, Next: "x"}
			e := &explanation{facts: &facts{now: now}}
			explainLostNode(e, lostNode{record, "d", "ns", mode})
			if got := e.findings[0]; got.Severity != severity || got.Next != "x." {
				t.Errorf("mode %q, record %+v: %+v, want %v", mode, record, got, severity)
			}
		}
	}
}

// TestOptOut: each value of the annotation but enabled disables the cleanup.
func TestOptOut(t *testing.T) {
	for value, want := range map[string]string{
		"enabled":  "",
		"disabled": "PersistentVolume v has the annotation d/node-cleanup: disabled.",
		"off": `annotation d/node-cleanup of PersistentVolume v has the value "off", must be enabled or disabled, and is treated as ` +
			`disabled.`,
	} {
		pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "v", Annotations: map[string]string{"d/node-cleanup": value}}}
		pv.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: "d"}
		e := &explanation{facts: &facts{now: now}}
		if explainCleanUp(e, pv); want == "" && len(e.findings) > 0 {
			t.Errorf("%q: %+v", value, e.findings)
		}
		want = "Cleanup for driver d is disabled: " + want
		if value != "enabled" && (len(e.findings) != 1 || e.findings[0].Message != want) {
			t.Errorf("%q: %+v, want %q", value, e.findings, want)
		}
	}
}
