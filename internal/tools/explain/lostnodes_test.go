// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

// TestRecordsOfLostNodes: a record that holds or opts out says so before anything else.
func TestRecordsOfLostNodes(t *testing.T) {
	since := `"since":"` + now.Add(-5*time.Minute).Format(time.RFC3339) + `"`
	for record, want := range map[string]struct {
		severity Severity
		text     string
	}{
		`{"node":"n","uid":"u","held":"breaker"}`:               {Blocked, "Node n of driver d is lost. Its cleanup is held by the breaker"},
		`{` + since + `,"held":"breaker"}`:                      {Blocked, "Node v of driver d has been lost for 5m. Its cleanup is held"},
		`{"node":"n",` + since + `,"held":"b","optedOut":true}`: {Fine, "Node n of driver d opted out of the cleanup before it was deleted: nothing is deleted. Without"},
		`{`:                           {Blocked, "The record of node v of driver d cannot be parsed: nothing is deleted, and further"},
		`{"node":"n","planned":true}`: {Waiting, "Node n of driver d is being deleted, or its deletion is not confirmed yet. The removal"},
		`{"node":"n",` + since + `}`:  {Waiting, "Node n of driver d has been lost for 5m."},
		`{"node":"n","approved":"` + "2026-01-01T00:00:00Z" + `"}`: {Waiting, "Node n of driver d is lost; its cleanup was approved"},
	} {
		records := nodecleanup.ParseLostNodes(&corev1.ConfigMap{Data: map[string]string{"v": record}})
		e := &explanation{facts: &facts{now: now}}
		explainLostNode(e, lostNode{records[0], "d", "ns", ""})
		got := e.findings[0]
		if got.Severity != want.severity || !strings.HasPrefix(got.Sentence, want.text) || (got.Next == "") != (want.severity == Fine) {
			t.Errorf("%s: %+v, want %v %q", record, got, want.severity, want.text)
		}
	}
}

// TestModeOfLostNodes: the next step is that of the mode which the nodecontroller has recorded.
func TestModeOfLostNodes(t *testing.T) {
	const plan = "set --node-cleanup=claims or volumes"
	for mode, want := range map[nodecleanup.Mode]struct {
		severity   Severity
		text, next string
	}{
		nodecleanup.ModeReport:  {Blocked, "ran last with --node-cleanup=report: nothing is deleted.", plan},
		nodecleanup.ModeClaims:  {Waiting, "Node n of driver d has been lost", "deletes its claims"},
		nodecleanup.ModeVolumes: {Waiting, "Node n of driver d has been lost", "deletes its claims and volumes"},
		"":                      {Waiting, "Node n of driver d has been lost", "if its mode and the opt-in allow that"},
	} {
		for _, record := range []nodecleanup.LostNode{{Node: "n", Since: now}, {Node: "n", Since: now, Approved: now}} {
			e := &explanation{facts: &facts{now: now}}
			explainLostNode(e, lostNode{record, "d", "ns", mode})
			got := e.findings[0]
			if got.Severity != want.severity || !strings.Contains(got.Sentence, want.text) || !strings.Contains(got.Next, want.next) {
				t.Errorf("mode %q, record %+v: %+v, want %+v", mode, record, got, want)
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
		if value != "enabled" && (len(e.findings) != 1 || e.findings[0].Sentence != want) {
			t.Errorf("%q: %+v, want %q", value, e.findings, want)
		}
	}
}
