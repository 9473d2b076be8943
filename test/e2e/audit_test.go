// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/tools/audit"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

func (e *env) audit(code int, args ...string) audit.Report {
	e.t.Helper()
	stdout, stderr, got := e.once(nil, "audit", append([]string{"-o", "json", "--settle=50ms"}, args...)...)
	var r audit.Report
	if got != code {
		e.t.Fatalf("exit code %d, want %d\n%s%s", got, code, stdout, stderr)
	}
	if err := json.Unmarshal([]byte(stdout), &r); err != nil {
		e.t.Fatalf("%v\n%s%s", err, stdout, stderr)
	}
	return r
}

// found is kind and object of the findings.
func found(r audit.Report) []string {
	var all []string
	for _, f := range r.Findings {
		all = append(all, strings.TrimSpace(fmt.Sprintf("%s %s%s%s", f.Topic, f.Object, strings.TrimPrefix(" "+f.VolumeHandle, " vol-0"),
			f.Node)))
	}
	return all
}

func (e *env) kinds(r audit.Report, want ...string) {
	e.t.Helper()
	var have []string
	for _, f := range r.Findings {
		have = append(have, f.Topic)
	}
	if !slices.Equal(have, want) {
		e.t.Errorf("found %v, want %v", found(r), want)
	}
}

// TestAuditOfVolumesAndAttachments makes each kind of difference, one after the other, and
// reads the lists of the driver in pages of one.
func TestAuditOfVolumesAndAttachments(t *testing.T) {
	t.Parallel()
	e := newEnv(t, csitest.Config{Controller: publishing}, 2)
	first, second := e.volume("first"), e.volume("second")
	p := e.run("attach", "--reconcile-sync=0")
	e.attach("a", first, e.nodes[0])
	e.attached(1)
	p.kill() // it would fix the following
	paged := []string{"--max-entries=1"}
	r := e.audit(0, paged...)
	if r.Driver != e.plugin.Name() || r.Volumes != 2 || r.Attachments != 1 || r.Findings == nil || len(r.Findings) > 0 {
		t.Errorf("%+v", r)
	}
	if lists := e.plugin.Count("ListVolumes"); lists != 2 {
		t.Errorf("%d pages were read, want 2: a second look is not needed", lists)
	}

	orphan := e.plugin.AddVolume("orphan", 1<<30)
	e.remove(second)
	e.publish(first, "id-1")
	r = e.audit(3, paged...)
	e.kinds(r, audit.VolumeWithoutPV, audit.VolumeWithoutPV, audit.PublishedNotAttached)
	if r.Findings[1].VolumeHandle != orphan || r.Findings[2].Node != "id-1" {
		t.Errorf("%+v", r.Findings)
	}
	e.unpublish(first, "id-1")
	e.unpublish(first, "id-0")
	e.kinds(e.audit(3), audit.VolumeWithoutPV, audit.VolumeWithoutPV, audit.AttachedNotPublished)

	e.driverDeletes(first)
	e.kinds(e.audit(3), audit.VolumeWithoutPV, audit.VolumeWithoutPV, audit.PVWithoutVolume)
	text, _, code := e.once(nil, "audit", "--settle=50ms")
	if code != 3 || !strings.Contains(text, "PersistentVolume "+first+", volume ") ||
		!strings.Contains(text, "3 found. Nothing was changed.") {
		t.Errorf("%d: %s", code, text)
	}
}

// remove deletes a PersistentVolume and leaves its volume.
func (e *env) remove(pv string) {
	e.t.Helper()
	ctx := e.t.Context()
	if err := e.client.CoreV1().PersistentVolumes().Delete(ctx, pv, metav1.DeleteOptions{}); err != nil {
		e.t.Fatal(err)
	}
	if _, err := e.client.CoreV1().PersistentVolumes().Patch(ctx, pv, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`),
		metav1.PatchOptions{}); err != nil && !strings.Contains(err.Error(), "not found") {
		e.t.Fatal(err)
	}
}

func (e *env) handle(pv string) string {
	e.t.Helper()
	volumes, err := e.volumes(e.t.Context())
	if err != nil {
		e.t.Fatal(err)
	}
	for _, v := range volumes {
		if v.Name == pv {
			return v.Spec.CSI.VolumeHandle
		}
	}
	e.t.Fatalf("no PersistentVolume %s", pv)
	return ""
}

// publish, unpublish and driverDeletes are done at the driver, behind the back of everybody.
func (e *env) publish(pv, node string) {
	e.t.Helper()
	_, err := e.plugin.ControllerPublishVolume(e.t.Context(),
		&csi.ControllerPublishVolumeRequest{VolumeId: e.handle(pv), NodeId: node, VolumeCapability: &csi.VolumeCapability{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER},
		}})
	if err != nil {
		e.t.Fatal(err)
	}
}

func (e *env) unpublish(pv, node string) {
	e.t.Helper()
	if _, err := e.plugin.ControllerUnpublishVolume(e.t.Context(),
		&csi.ControllerUnpublishVolumeRequest{VolumeId: e.handle(pv), NodeId: node}); err != nil {
		e.t.Fatal(err)
	}
}

func (e *env) driverDeletes(pv string) {
	e.t.Helper()
	if _, err := e.plugin.DeleteVolume(e.t.Context(), &csi.DeleteVolumeRequest{VolumeId: e.handle(pv)}); err != nil {
		e.t.Fatal(err)
	}
}

// TestAuditLeavesOutWhatIsUnderWay has volumes that the first look finds, and that are
// settled before the second.
func TestAuditLeavesOutWhatIsUnderWay(t *testing.T) {
	t.Parallel()
	e := newEnv(t, csitest.Config{Controller: publishing}, 0)
	young := e.plugin.AddVolume("young", 1<<30)
	e.plugin.Next("ListVolumes", csitest.Default(),
		func(ctx context.Context, p *csitest.Plugin, _ any, do func() (any, error)) (any, error) {
			if _, err := p.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: young}); err != nil {
				return nil, err
			}
			p.AddVolume("younger", 1<<30) // which the first look has not seen
			return do()
		})
	e.kinds(e.audit(0))
	if lists := e.plugin.Count("ListVolumes"); lists != 2 {
		t.Errorf("%d lists, want 2", lists)
	}
	e.kinds(e.audit(3), audit.VolumeWithoutPV)
}

// TestAuditOfWhatIsStuck names finalizers and who removes them, with a driver that lists
// nothing.
func TestAuditOfWhatIsStuck(t *testing.T) {
	t.Parallel()
	e := newEnv(t, csitest.Config{}, 1)
	pv := e.volume("v")
	e.attach("a", pv, e.nodes[0])
	patch := fmt.Appendf(nil, `{"metadata":{"finalizers":["external-attacher/%s","example.com/mine"]}}`, e.provisionerLease())
	if _, err := e.client.StorageV1().VolumeAttachments().Patch(t.Context(), e.ns+"-a", types.MergePatchType, patch,
		metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	e.detach("a")
	if r := e.audit(0); len(r.Findings) != 1 || r.Findings[0].Severity != finding.Unknown ||
		!strings.Contains(r.Findings[0].Message, "LIST_VOLUMES") {
		t.Errorf("%+v", r)
	}
	var r audit.Report
	e.eventually("a second has gone", func(context.Context) error {
		stdout, _, code := e.once(nil, "audit", "-o", "json", "--stuck-after=1ms")
		if code != 3 {
			return fmt.Errorf("exit code %d", code)
		}
		r = audit.Report{}
		return json.Unmarshal([]byte(stdout), &r)
	})
	e.kinds(r, "volumes", audit.Stuck)
	f := r.Findings[1]
	if f.Object != "VolumeAttachment "+e.ns+"-a" || len(f.Finalizers) != 2 ||
		!strings.Contains(f.Finalizers[0].By, "the attacher of driver "+e.plugin.Name()) ||
		!strings.Contains(f.Finalizers[1].By, "unknown") {
		t.Errorf("%+v", f)
	}
	for _, c := range []struct {
		code int
		text string
		args []string
	}{
		{1, "persistentvolumes", []string{"--kubeconfig", func() string { k, _, _ := e.as("stranger"); return k }()}},
		{1, "not ready within", []string{"--csi-address=/nowhere/csi.sock", "--timeout=300ms"}},
		{2, "--settle: must be positive", []string{"--settle=0s"}},
	} {
		if _, stderr, code := e.once(nil, "audit", c.args...); code != c.code || !strings.Contains(stderr, c.text) {
			t.Errorf("%v: exit code %d, want %d: %s", c.args, code, c.code, stderr)
		}
	}
}

// TestAuditOfARunningProcess reads the metrics of one that works, and counts its requests.
func TestAuditOfARunningProcess(t *testing.T) {
	t.Parallel()
	e := newEnv(t, csitest.Config{Controller: publishing}, 1)
	class := e.class(false, func(c *storagev1.StorageClass) {})
	var mu sync.Mutex
	lists := map[string]int{} // by kind, and the watches that bring a list: not those that continue an earlier one
	proxy := kubetest.Proxy(t, e.account(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		asked, counts := asked(r)
		query := r.URL.Query()
		// A new leader lists one object for its resourceVersion.
		if counts && (asked.verb == "list" && query.Get("limit") != "1" || asked.verb == "watch" && query.Get("sendInitialEvents") != "") {
			mu.Lock()
			lists[asked.resource]++
			mu.Unlock()
		}
		pass.ServeHTTP(w, r)
	})
	p := e.run("all", append([]string{"--kubeconfig", kubetest.WriteKubeconfig(t, proxy), "--controllers=provisioner,attacher",
		"--reconcile-sync=0", "--audit-interval=100ms", "--http-endpoint=127.0.0.1:0"}, election...)...)
	e.claim("c", class)
	volume := e.bound("c")
	e.attach("a", volume, e.nodes[0])
	e.attached(1)
	findings := func(want map[string]float64) {
		t.Helper()
		e.eventually(fmt.Sprintf("the findings are %v", want), func(context.Context) error {
			if p.value("storage_controller_audit_timestamp_seconds", "") == 0 {
				return fmt.Errorf("there was no audit")
			}
			for _, k := range audit.Kinds() {
				if got := p.value("storage_controller_audit_findings", "kind="+k); got != want[k] {
					return fmt.Errorf("%v of %s", got, k)
				}
			}
			return nil
		})
	}
	findings(nil)
	orphan := e.plugin.AddVolume("orphan", 1<<30)
	findings(map[string]float64{audit.VolumeWithoutPV: 1})
	p.says(`"volumeHandle": "` + orphan + `"`)
	e.unpublish(volume, "id-0")
	findings(map[string]float64{audit.VolumeWithoutPV: 1, audit.AttachedNotPublished: 1})
	e.publish(volume, "id-0")
	if _, err := e.plugin.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: orphan}); err != nil {
		t.Fatal(err)
	}
	findings(nil)
	mu.Lock()
	defer mu.Unlock()
	for _, kind := range []string{"persistentvolumes", "volumeattachments"} {
		if lists[kind] != 1 {
			t.Errorf("%d lists and watches of %s, want the watch of the caches, from which audits read", lists[kind], kind)
		}
	}
	p.kill()
	e.start(e.command("provision", "--audit-interval=1m", "--node-deployment")).failsWith(2, "--audit-interval and --node-deployment")
}
