// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"net/http/httptest"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

// TestPagesShowNoPassword: a setting that has one is shown without it.
func TestPagesShowNoPassword(t *testing.T) {
	c := configOf(t, All, "--master=https://me:hidden@api.example.com:6443/path")
	if c.Common.Master != "https://me:hidden@api.example.com:6443/path" {
		t.Errorf("it is not used as it was given: %q", c.Common.Master)
	}
	page := httptest.NewRecorder()
	(&status{cfg: c}).flags(page, nil)
	if body := page.Body.String(); strings.Contains(body, "hidden") || !strings.Contains(body,
		"https://me:xxxxx@api.example.com:6443/path") {
		t.Error(body)
	}
}

// TestLostNodesOfTheStatus: a record that holds or opts out says so before anything else.
func TestLostNodesOfTheStatus(t *testing.T) {
	const since = `"since":"2026-01-02T03:04:05Z"`
	for record, want := range map[string]string{
		`{"node":"n","uid":"u","held":"breaker"}`:               "n held storage-controller nodecontroller approve --driver-name=d n --yes",
		`{` + since + `,"held":"breaker"}`:                      "v held storage-controller nodecontroller approve --driver-name=d v --yes",
		`{"node":"n",` + since + `,"held":"b","optedOut":true}`: "n opted out, held nothing is deleted",
		`{`: "v unparsable nothing is deleted, and further lost nodes are held. Correct or remove the record in ConfigMap lost-nodes.d",
		`{"node":"n",` + since + `,"approved":"2026-01-02T03:05:05Z"}`: "n approved cleaned up as the mode and the opt-in allow",
		`{"node":"n"}`: "n being deleted cleaned up before the finalizer of its Node is removed, " +
			"or else when its Node and CSINode are deleted",
		`{"node":"n",` + since + `}`: "n missing cleaned up after --node-missing-grace, unless it returns",
	} {
		n := lostNode(nodecleanup.ParseLostNodes(&corev1.ConfigMap{Data: map[string]string{"v": record}})[0], "d")
		if got := n.Node + " " + n.State + " " + n.Next; got != want {
			t.Errorf("%s: %q, want %q", record, got, want)
		}
	}
}
