// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// count returns the numbers of reads and writes of the controllers, events excluded.
func (f *fixture) count() (reads, writes int) {
	for _, s := range f.allRequests() {
		if s.writes() {
			writes++
		} else {
			reads++
		}
	}
	return reads, writes
}

// TestCostOfWaiting: the volumes of lost nodes that wait cost no more than their nodes do. 10 minutes have two checks
// by default.
func TestCostOfWaiting(t *testing.T) {
	t.Parallel()
	const volumes, readLimit, writeLimit = 200, 50, 5
	for name, hold := range map[string]bool{"in_the_grace": false, "held": true} {
		t.Run(name, func(t *testing.T) {
			writeLimit := writeLimit
			f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace, f.cfg.LookInterval = time.Hour, 10*time.Second })
			for i := range volumes {
				f.bound(fmt.Sprintf("c%d", i), "n")
			}
			if hold {
				f.bound("other", "m")
				writeLimit += 2 // for the record of another lost node
			}
			f.onlyWrites()
			f.start()
			n := f.missing("n")
			if hold {
				f.held("n")
			}
			f.passed(n.Since, 2*f.cfg.LookInterval)
			f.stop()
			reads, writes := f.count()
			t.Logf("%d reads, %d writes", reads, writes)
			if reads > readLimit || writes > writeLimit {
				t.Errorf("%d reads and %d writes in two checks, want %d and %d at most", reads, writes, readLimit, writeLimit)
			}
		})
	}
}

// page answers a request for all Nodes or CSINodes with n of them, in the pages that it asks for.
func page(w http.ResponseWriter, r *http.Request, n int, item func(i int) any) {
	var limit, from int
	_, _ = fmt.Sscan(r.URL.Query().Get("limit"), &limit)
	_, _ = fmt.Sscan(r.URL.Query().Get("continue"), &from)
	if limit == 0 {
		limit = n
	}
	to, next := min(n, from+limit), ""
	if to < n {
		next = fmt.Sprint(to)
	}
	items := []any{}
	for i := from; i < to; i++ {
		items = append(items, item(i))
	}
	kind, group := "NodeList", "v1"
	if strings.HasSuffix(r.URL.Path, "/csinodes") {
		kind, group = "CSINodeList", "storage.k8s.io/v1"
	}
	readAs(w, map[string]any{"kind": kind, "apiVersion": group, "metadata": map[string]any{"continue": next}, "items": items})
}

// TestCostOfTheCommand: the command cleans up 100 volumes in a cluster of 5,000 nodes. It lists the nodes once per
// pass, and not for each volume.
func TestCostOfTheCommand(t *testing.T) {
	const nodes, volumes, perVolume = 5000, 100, 20
	f := scenario(t, nil)
	f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		all := r.Method == http.MethodGet && r.URL.Query().Get("labelSelector") == ""
		switch {
		case all && r.URL.Path == "/api/v1/nodes":
			page(w, r, nodes, func(i int) any {
				name := fmt.Sprintf("%s-%d", f.name("keep"), i)
				node := &corev1.Node{}
				if i == 0 { // the others are not ready, because they exist in these lists only
					name = f.name("keep")
					node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
				}
				node.Name, node.Labels = name, map[string]string{f.key: name}
				return node
			})
		case all && r.URL.Path == "/apis/storage.k8s.io/v1/csinodes":
			page(w, r, nodes, func(i int) any {
				name := fmt.Sprintf("%s-%d", f.name("keep"), i)
				if i == 0 {
					name = f.name("keep")
				}
				return &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: storagev1.CSINodeSpec{
					Drivers: []storagev1.CSINodeDriver{{Name: f.driver, NodeID: name, TopologyKeys: []string{f.key}}},
				}}
			})
		default:
			pass.ServeHTTP(w, r)
		}
	})
	for i := range volumes {
		f.bound(fmt.Sprintf("c%d", i), "n")
	}
	var out strings.Builder
	begin := time.Now()
	f.must(Cleanup(t.Context(), f.cfg, f.recorded(), CleanupRequest{Driver: f.driver, Node: f.name("n"), Yes: true}, &out))
	t.Logf("the command has ended after %v", time.Since(begin))
	for i := range volumes {
		f.claimDeleted(fmt.Sprintf("c%d", i))
	}
	var lines []string
	for _, s := range f.allRequests() {
		lines = append(lines, s.line)
	}
	slices.Sort(lines)
	counts := map[string]int{}
	for _, line := range lines {
		kind, _, _ := strings.Cut(line, "/")
		counts[kind]++
	}
	t.Logf("%d requests: %v", len(lines), counts)
	if n := len(f.asked("GET csinodes")); n > 2*nodes/500+2 {
		t.Errorf("%d pages of CSINodes", n)
	}
	if len(lines) > volumes*perVolume+200 {
		t.Errorf("%d requests for %d volumes", len(lines), volumes)
	}
}
