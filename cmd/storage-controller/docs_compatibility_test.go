// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
)

// sidecarDefaults are the flags of the newest sidecars: the sidecar, the flag, its default ("" is empty), and if it is another one
// here, the default here and the reason.
const sidecarDefaults = `
sidecars version false
sidecars kubeconfig ""
sidecars csi-address /run/csi/socket
sidecars leader-election false
sidecars leader-election-namespace ""
sidecars leader-election-lease-duration 15s
sidecars leader-election-renew-deadline 10s
sidecars leader-election-retry-period 5s
sidecars kube-api-qps 5 0 no limit: API Priority and Fairness protects the server
sidecars kube-api-burst 10
sidecars http-endpoint ""
sidecars metrics-address ""
sidecars metrics-path /metrics
sidecars leader-election-labels ""
sidecars automaxprocs false
logs v 0
logs vmodule ""
logs logging-format text
logs log-flush-frequency 5s
logs log-text-split-stream false
logs log-text-info-buffer-size 0
logs log-json-split-stream false
logs log-json-info-buffer-size 0
csi-provisioner master ""
csi-provisioner volume-name-prefix pvc
csi-provisioner volume-name-uuid-length -1
csi-provisioner retry-interval-start 1s
csi-provisioner retry-interval-max 5m0s
csi-provisioner worker-threads 100
csi-provisioner cloning-protection-threads 1
csi-provisioner snapshot-orphan-sweep-interval 5m0s
csi-provisioner capacity-threads 1
csi-provisioner timeout 10s 15s one default for all roles that call for volumes: fewer indeterminate calls
csi-provisioner strict-topology false
csi-provisioner immediate-topology true
csi-provisioner extra-create-metadata false
csi-provisioner enable-pprof false
csi-provisioner default-fstype ""
csi-provisioner kube-api-capacity-qps 1 0 no limit: API Priority and Fairness protects the server
csi-provisioner kube-api-capacity-burst 5
csi-provisioner enable-capacity false
csi-provisioner capacity-for-immediate-binding false
csi-provisioner capacity-poll-interval 1m0s
csi-provisioner capacity-ownerref-level 1
csi-provisioner node-deployment false
csi-provisioner node-deployment-immediate-binding true
csi-provisioner node-deployment-base-delay 20s
csi-provisioner node-deployment-max-delay 1m0s
csi-provisioner controller-publish-readonly false
csi-provisioner prevent-volume-mode-conversion true
csi-provisioner feature-gates ""
csi-attacher resync 10m0s
csi-attacher timeout 15s
csi-attacher retry-interval-start 1s
csi-attacher retry-interval-max 5m0s
csi-attacher worker-threads 10 100 a worker mostly waits for the driver
csi-attacher max-entries 0
csi-attacher default-fstype ""
csi-attacher reconcile-sync 1m0s
csi-attacher max-grpc-log-length -1
csi-attacher feature-gates ""
csi-resizer master ""
csi-resizer resync-period 10m0s
csi-resizer workers 10
csi-resizer extra-modify-metadata false
csi-resizer timeout 10s 15s one default for all roles that call for volumes: fewer indeterminate calls
csi-resizer resize-timeout 10s 0s means --timeout
csi-resizer modify-timeout 10s 0s means --timeout
csi-resizer retry-interval-start 1s
csi-resizer retry-interval-max 5m0s
csi-resizer handle-volume-inuse-error true
csi-resizer feature-gates ""
csi-snapshotter resync-period 15m0s
csi-snapshotter snapshot-name-prefix snapshot
csi-snapshotter snapshot-name-uuid-length -1
csi-snapshotter worker-threads 10
csi-snapshotter timeout 1m0s
csi-snapshotter extra-create-metadata false
csi-snapshotter retry-interval-start 1s
csi-snapshotter retry-interval-max 5m0s
csi-snapshotter node-deployment false
csi-snapshotter groupsnapshot-name-prefix groupsnapshot
csi-snapshotter groupsnapshot-name-uuid-length -1
csi-snapshotter feature-gates ""
livenessprobe probe-timeout 3s
livenessprobe csi-address /run/csi/socket
livenessprobe health-port 9808
livenessprobe metrics-address ""
livenessprobe http-endpoint ""
livenessprobe metrics-path /metrics
`

// defaultsOf has the source of the rows of a sidecar, and the commands here that have its flags.
var defaultsOf = map[string]struct {
	source   string
	commands []string
}{
	"sidecars":        {"csi-lib-utils v0.25.0, standardflags", []string{"provision", "attach", "resize", "snapshot"}},
	"logs":            {"component-base v0.37.1, logs/api/v1", []string{"provision", "attach", "resize", "snapshot", "livenessprobe"}},
	"csi-provisioner": {"external-provisioner v6.4.0, cmd/csi-provisioner", []string{"provision"}},
	"csi-attacher":    {"external-attacher v4.13.0, cmd/csi-attacher", []string{"attach"}},
	"csi-resizer":     {"external-resizer v2.3.0, cmd/csi-resizer", []string{"resize"}},
	"csi-snapshotter": {"external-snapshotter v8.7.0, cmd/csi-snapshotter", []string{"snapshot"}},
	"livenessprobe":   {"livenessprobe v2.17 to v2.20, CHANGELOG", []string{"livenessprobe"}},
}

// TestDocsDefaults compares the defaults of the flags with those of the sidecars, and the table of the page with both, or writes it
// when UPDATE is set (make generate).
func TestDocsDefaults(t *testing.T) {
	tree := commandTree(t)
	var table strings.Builder
	table.WriteString("<!-- defaults: begin -->\n| flag | of | default there | here | reason |\n|---|---|---|---|---|\n")
	for line := range strings.Lines(strings.TrimSpace(sidecarDefaults)) {
		fields := strings.Fields(line)
		sidecar, flag, upstream := fields[0], fields[1], strings.Trim(fields[2], `"`)
		ours, reason := upstream, ""
		if len(fields) > 3 {
			ours, reason = fields[3], strings.Join(fields[4:], " ")
			if ours == upstream || reason == "" {
				t.Errorf("--%s of %s: %q there and %q here, because %q", flag, sidecar, upstream, ours, reason)
			}
		}
		for _, command := range defaultsOf[sidecar].commands {
			f := tree[command].Flags().Lookup(flag)
			if f == nil {
				t.Errorf("%s does not have --%s of %s", command, flag, sidecar)
			} else if got := strings.Trim(f.DefValue, "[]"); got != ours {
				t.Errorf("--%s of %s is %q, want %q as in %s, or a reason", flag, command, got, ours, defaultsOf[sidecar].source)
			}
		}
		fmt.Fprintf(&table, "| `--%s` | %s | %s | %s | %s |\n", flag, defaultsOf[sidecar].source, code(upstream), code(ours), reason)
	}
	table.WriteString("<!-- defaults: end -->")
	const page = "../../docs/compatibility.md"
	have, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	part := regexp.MustCompile("(?s)<!-- defaults: begin -->.*?<!-- defaults: end -->")
	want := part.ReplaceAllLiteralString(string(have), table.String())
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if string(have) != want || !part.Match(have) {
		t.Errorf("%s is stale, run make generate", page)
	}
}

// code returns text in backquotes, and nothing for nothing.
func code(text string) string {
	if text == "" {
		return ""
	}
	return "`" + text + "`"
}
