// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// TestAlertsAboutExpansionsAndSnapshots: the driver fails to expand a volume, a VolumeAttributesClass does not
// exist, the outcome of CreateSnapshot is unknown, and the deletion of a snapshot waits for its release.
func TestAlertsAboutExpansionsAndSnapshots(t *testing.T) {
	t.Parallel()
	e := newEnv(t, csitest.Config{Controller: append(slices.Clone(resizable.Controller),
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT)}, 0)
	kubetest.InstallCRDs(t, e.cp)
	p, h := e.run("all", append(slices.Clone(quick), "--http-endpoint=127.0.0.1:0")...), newHistory()
	class := e.expandableClass()
	for _, name := range []string{"grows", "changes"} {
		e.claim(name, class)
		e.bound(name)
	}
	e.snapshotClass()
	e.snapshotContent("deleted")
	e.snapshotReady("deleted")
	h.minute(p, "a")
	h.minute(p, "a")
	h.fires(t)

	e.plugin.Always(expandVolume, csitest.Fail(codes.Internal, "broken"))
	e.plugin.Always("CreateSnapshot", csitest.Fail(codes.Aborted, "pending"))
	e.request("grows", "2Gi", "")
	e.request("changes", "1Gi", e.ns+"-missing")
	e.snapshotContent("pending")
	e.must(e.snapshots().VolumeSnapshotContents().Delete(t.Context(), e.ns+"-deleted", metav1.DeleteOptions{}))
	e.eventually("everything waits", func(context.Context) error {
		missing := p.value("storage_controller_resizer_waiting", "reason=class_missing")
		unknown := p.value("storage_controller_snapshotter_snapshots_indeterminate", "")
		kept := p.value("storage_controller_snapshotter_deletions_blocked", "reason=release")
		if missing != 1 || unknown != 1 || kept != 1 {
			return fmt.Errorf("%v without a class, %v indeterminate, %v deletions blocked", missing, unknown, kept)
		}
		return nil
	})
	for _, want := range []float64{1, 6} { // a counter has grown only if it was there before
		e.eventually("the expansion has failed", func(context.Context) error {
			if n := p.value("storage_controller_resize_failures_total", "grpc_status_code=Internal operation=expand"); n < want {
				return fmt.Errorf("%v times", n)
			}
			return nil
		})
		e.eventually("a scrape shows the missing class", func(context.Context) error { // but not during a retry
			h.minute(p, "a")
			if last := len(h.Scrapes) - 1; !strings.Contains(h.Scrapes[last].Text, `_resizer_waiting{reason="class_missing"} 1`) {
				h.Scrapes, h.now = h.Scrapes[:last], h.now-60
				return errors.New("it does not")
			}
			return nil
		})
	}
	h.fires(t, "DriverFails", "ResizeFails", "ResizeWaits", "SnapshotDeletionBlocked", "SnapshotsIndeterminate")
}
