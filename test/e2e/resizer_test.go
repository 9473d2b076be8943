// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

const expandVolume, modifyVolume = "ControllerExpandVolume", "ControllerModifyVolume"

// resizable is a driver that also expands and modifies volumes.
var resizable = csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{
	csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
	csi.ControllerServiceCapability_RPC_EXPAND_VOLUME, csi.ControllerServiceCapability_RPC_MODIFY_VOLUME,
}}

// expandableClass makes a StorageClass whose volumes may be expanded.
func (e *env) expandableClass() string {
	return e.class(false, func(c *storagev1.StorageClass) { c.AllowVolumeExpansion = ptr.To(true) })
}

// attributesClass makes a VolumeAttributesClass and returns its name.
func (e *env) attributesClass(name string) string {
	e.t.Helper()
	class, err := e.client.StorageV1().VolumeAttributesClasses().Create(e.t.Context(), &storagev1.VolumeAttributesClass{
		ObjectMeta: metav1.ObjectMeta{Name: e.ns + "-" + name}, DriverName: e.plugin.Name(), Parameters: map[string]string{"iops": "9"},
	}, metav1.CreateOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
	return class.Name
}

// request has a claim request a size, and a VolumeAttributesClass unless that is empty. The admission of the
// API server may not know a new StorageClass yet.
func (e *env) request(name, size, class string) {
	e.t.Helper()
	patch := fmt.Sprintf(`{"spec":{"resources":{"requests":{"storage":%q}}}}`, size)
	if class != "" {
		patch = fmt.Sprintf(`{"spec":{"resources":{"requests":{"storage":%q}},"volumeAttributesClassName":%q}}`, size, class)
	}
	e.eventually("the request is accepted", func(ctx context.Context) error {
		_, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Patch(ctx, name, types.MergePatchType, []byte(patch),
			metav1.PatchOptions{})
		return err
	})
}

// expanded waits until the volume of a claim has a size and the node has to complete the expansion.
func (e *env) expanded(name, size string) {
	e.t.Helper()
	want := resource.MustParse(size)
	e.eventually(name+" is expanded", func(ctx context.Context) error {
		claim, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		pv, err := e.client.CoreV1().PersistentVolumes().Get(ctx, claim.Spec.VolumeName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		s := claim.Status.AllocatedResourceStatuses[corev1.ResourceStorage]
		if s != corev1.PersistentVolumeClaimNodeResizePending || pv.Spec.Capacity.Storage().Cmp(want) != 0 {
			return fmt.Errorf("status %q, PersistentVolume %s", s, pv.Spec.Capacity.Storage())
		}
		return nil
	})
}

// modified waits until the volume of a claim has a VolumeAttributesClass.
func (e *env) modified(name, class string) {
	e.t.Helper()
	e.eventually(name+" is modified", func(ctx context.Context) error {
		claim, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Get(ctx, name, metav1.GetOptions{})
		if err == nil && (ptr.Deref(claim.Status.CurrentVolumeAttributesClassName, "") != class || claim.Status.ModifyVolumeStatus != nil) {
			err = fmt.Errorf("status %+v", claim.Status)
		}
		return err
	})
}

// nodeExpands completes the expansion of a claim as the kubelet does.
func (e *env) nodeExpands(name string) {
	e.t.Helper()
	e.eventually("the status is updated", func(ctx context.Context) error {
		claims := e.client.CoreV1().PersistentVolumeClaims(e.ns)
		claim, err := claims.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		claim.Status.Capacity, claim.Status.AllocatedResourceStatuses, claim.Status.Conditions = claim.Status.AllocatedResources, nil, nil
		_, err = claims.UpdateStatus(ctx, claim, metav1.UpdateOptions{})
		return err
	})
}

// unrecorded waits until no PersistentVolume has the size before an expansion.
func (e *env) unrecorded() {
	e.t.Helper()
	e.eventually("the earlier sizes are removed", func(ctx context.Context) error {
		volumes, err := e.volumes(ctx)
		for _, pv := range volumes {
			if _, has := pv.Annotations["volume.alpha.kubernetes.io/pre-resize-capacity"]; has {
				err = errors.Join(err, fmt.Errorf("%s has one", pv.Name))
			}
		}
		return err
	})
}

func (e *env) resizerLease() string { return "external-resizer-" + e.provisionerLease() }

// provisioned makes a bound claim c whose volume may be expanded, without a running process.
func (e *env) provisioned() {
	e.t.Helper()
	p := e.run("provision", quick...)
	e.claim("c", e.expandableClass())
	e.bound("c")
	p.kill()
}

// TestResizerScenario is the scenarios of the resizer that are about the process, under either of its names.
func TestResizerScenario(t *testing.T) {
	t.Run("054_055_replicas", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, resizable, 0)
		e.provisioned()
		args := append([]string{"-leader-election-labels=team:storage"}, election...)
		first := e.start(e.linked("csi-resizer", args...))
		lease := e.leads(first, e.resizerLease())
		if lease.Labels["team"] != "storage" {
			t.Errorf("labels of the Lease: %v", lease.Labels)
		}
		second := e.start(e.linked("csi-resizer", args...))
		second.says("Attempting to acquire leader lease")
		e.plugin.Next(expandVolume, csitest.Hang())
		e.request("c", "2Gi", "")
		e.wait(expandVolume, 1)
		second.signal(syscall.SIGTERM)
		if code := second.code(); code != 0 {
			t.Errorf("the standby: exit code %d, want 0", code)
		}
		first.signal(syscall.SIGTERM)
		first.says("Shutting down")
		e.plugin.Release()
		if code := first.code(); code != 0 {
			t.Errorf("exit code %d, want 0", code)
		}
		e.expanded("c", "2Gi")
		e.calls(expandVolume, 1)
	})
	resizerScenarioStart(t)
	resizerScenarioAll(t)
}

// resizerScenarioStart: capabilities and flags.
func resizerScenarioStart(t *testing.T) {
	nodeExpands := []csi.NodeServiceCapability_RPC_Type{csi.NodeServiceCapability_RPC_EXPAND_VOLUME}
	publishes := []csi.ControllerServiceCapability_RPC_Type{csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME}
	for name, tt := range map[string]struct {
		plugin csitest.Config
		step   csitest.Step // of NodeGetCapabilities
		asked  int          // calls of NodeGetCapabilities
		works  bool
		says   []string // instead of the missing capabilities
		args   []string
	}{
		"079_controller_expands": {plugin: resizable, works: true},
		"079_node_expands":       {plugin: csitest.Config{Controller: publishes, Node: nodeExpands}, asked: 1, works: true},
		"079_no_controller_service": {plugin: csitest.Config{Plugin: []csi.PluginCapability_Service_Type{2}, Node: nodeExpands}, asked: 1,
			works: true},
		"079_neither": {plugin: csitest.Config{Controller: publishes}, asked: 1},
		"079_node_is_unimplemented": {plugin: csitest.Config{Controller: publishes}, step: csitest.Fail(codes.Unimplemented, "no node"),
			asked: 1},
		"079_modifies_only": {plugin: csitest.Config{Controller: resizable.Controller[3:]}, asked: 1, works: true},
		"079_modifies_only_gate_off": {plugin: csitest.Config{Controller: resizable.Controller[3:]}, asked: 1,
			args: []string{"-feature-gates=VolumeAttributesClass=false"},
			says: []string{"does not support expansion", "feature gate VolumeAttributesClass is off"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, tt.plugin, 0)
			if tt.step != nil {
				e.plugin.Always("NodeGetCapabilities", tt.step)
			}
			p := e.start(e.linked("csi-resizer", tt.args...))
			switch {
			case tt.works:
				p.says("Starting controller")
			case tt.says != nil:
				p.fails(tt.says...)
			default:
				p.fails("neither expansion nor modification", "EXPAND_VOLUME", "MODIFY_VOLUME")
			}
			e.calls("NodeGetCapabilities", tt.asked)
		})
	}
	t.Run("079_neither_in_all", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 0)
		p := e.run("all")
		p.says(`Role disabled {"role": "resizer"`)
		p.lives()
	})
	for name, tt := range map[string]struct {
		args []string
		says string
	}{
		"079_no_workers": {[]string{"-workers=0"}, "--workers"},
		"079_no_timeout": {[]string{"-timeout", "0s"}, "--timeout"},
		"079_no_delay":   {[]string{"-retry-interval-start=0s"}, "--retry-interval-start"},
		"079_alias":      {[]string{"-worker-threads=-1"}, "--workers"},
		"079_two_addresses": {[]string{"-http-endpoint=127.0.0.1:0", "-metrics-address=127.0.0.1:0"},
			"--http-endpoint and --metrics-address"},
		"079_unknown_gate": {[]string{"-feature-gates=Nope=true"}, `--feature-gates: unknown gate "Nope"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, resizable, 0)
			e.refuses(e.linked("csi-resizer", tt.args...), tt.says)
		})
	}
}

// resizerScenarioAll: the role beside the others.
func resizerScenarioAll(t *testing.T) {
	t.Run("080_all", func(t *testing.T) {
		e := newEnv(t, resizable, 0)
		class, gold := e.expandableClass(), e.attributesClass("gold")
		mark := e.mark()
		p := e.run("all", "--http-endpoint=127.0.0.1:0", "--resizer-workers=2", "--feature-gates=RecoverVolumeExpansionFailure=true")
		p.says(`Feature gate has no effect {"featureGate": "RecoverVolumeExpansionFailure"}`)
		e.claim("c", class)
		e.bound("c")
		for _, r := range e.audited(mark, "storage-controller/dev (resizer)") {
			if r.IsWrite() {
				t.Errorf("the resizer wrote %s while nothing was resized", r.RequestURI)
			}
		}
		e.request("c", "2Gi", gold)
		e.expanded("c", "2Gi")
		e.modified("c", gold)
		watches := watches(e.audited(mark, "storage-controller/"))
		for kind, n := range watches {
			if n != 1 {
				t.Errorf("%d watches on %s, want one: %v", n, kind, slices.Sorted(maps.Keys(watches)))
			}
		}
		for _, method := range []string{expandVolume, modifyVolume} {
			labels := fmt.Sprintf("driver_name=%q,grpc_status_code=\"OK\",method_name=\"/csi.v1.Controller/%s\"", e.plugin.Name(), method)
			if _, text := p.get("/metrics"); !strings.Contains(text, "csi_sidecar_operations_seconds_count{"+labels+"} 1") {
				t.Errorf("no metric of %s", method)
			}
		}
		if _, text := p.get("/metrics"); !strings.Contains(text, fmt.Sprintf("workqueue_adds_total{name=\"%s-pvc\"}", e.plugin.Name())) {
			t.Error("no metric of the queue")
		}
		e.eventually("the events have the source of csi-resizer", func(ctx context.Context) error {
			events, err := e.client.CoreV1().Events(e.ns).List(ctx, metav1.ListOptions{FieldSelector: "reason=FileSystemResizeRequired"})
			if err == nil && (len(events.Items) != 1 || events.Items[0].Source.Component != "external-resizer "+e.plugin.Name()) {
				err = fmt.Errorf("got %v", events.Items)
			}
			return err
		})
	})
}

// TestResizeOfManyVolumes counts the calls and the API writes of 200 expansions and modifications, on a control
// plane with its expand controller.
func TestResizeOfManyVolumes(t *testing.T) {
	const n = 200
	e := newEnv(t, resizable, 0)
	class, gold := e.expandableClass(), e.attributesClass("gold")
	e.run("all")
	name := func(i int) string { return fmt.Sprintf("c%d", i) }
	e.parallel(n, func(i int) { e.claim(name(i), class) })
	e.parallel(n, func(i int) { e.bound(name(i)) })
	mark := e.mark()
	e.parallel(n, func(i int) { e.request(name(i), "2Gi", "") })
	e.parallel(n, func(i int) { e.expanded(name(i), "2Gi") })
	e.calls(expandVolume, n)
	mark = e.writes(mark, map[string]int{"patch persistentvolumeclaims/status": 2 * n, "patch persistentvolumes": n})
	e.parallel(n, func(i int) { e.nodeExpands(name(i)) })
	e.unrecorded()
	mark = e.writes(mark, map[string]int{"patch persistentvolumes": n})
	e.parallel(n, func(i int) { e.request(name(i), "2Gi", gold) })
	e.parallel(n, func(i int) { e.modified(name(i), gold) })
	e.calls(modifyVolume, n)
	e.calls(expandVolume, n)
	e.writes(mark, map[string]int{"patch persistentvolumeclaims/status": 2 * n, "patch persistentvolumes": n})
}

// TestResizerKilledAnywhere: whenever the process dies, the volume is never smaller than reported, the request is
// completed by the next process, and the driver gets no other request.
func TestResizerKilledAnywhere(t *testing.T) {
	t.Parallel()
	begin := func(t *testing.T, c *crash) *env {
		e := newEnv(t, resizable, 0)
		gold := e.attributesClass("gold")
		e.provisioned()
		for _, method := range []string{expandVolume, modifyVolume} {
			e.plugin.Always(method, c.step(method, csitest.Default()))
		}
		c.start(e, "resize", "--kubeconfig", kubetest.WriteKubeconfig(t, kubetest.Proxy(t, e.account(), c.hook)))
		e.request("c", "2Gi", gold)
		return e
	}
	notSmaller := func(e *env) {
		e.t.Helper()
		volumes, err := e.volumes(e.t.Context())
		if err != nil {
			e.t.Fatal(err)
		}
		if size, actual := volumes[0].Spec.Capacity.Storage().Value(), e.plugin.Volumes()[0].Capacity; actual < size {
			e.t.Errorf("the volume has %d bytes, and its PersistentVolume %d", actual, size)
		}
	}
	end := func(e *env) {
		e.t.Helper()
		e.expanded("c", "2Gi")
		e.modified("c", e.ns+"-gold")
		e.nodeExpands("c")
		e.unrecorded()
		notSmaller(e)
		if v := e.plugin.Volumes()[0]; v.Capacity != 2<<30 || v.Mutable["iops"] != "9" {
			e.t.Errorf("the volume is %+v", v)
		}
		for _, call := range e.plugin.Calls(expandVolume) {
			if r, ok := call.Request.(*csi.ControllerExpandVolumeRequest); !ok || r.CapacityRange.RequiredBytes != 2<<30 {
				e.t.Errorf("call %v", call.Request)
			}
		}
	}
	c := newCrash(-1)
	e := begin(t, c)
	end(e)
	c.process.kill()
	last := len(c.effects) - 1 // after the node has finished
	c.interrupted(t, func(t *testing.T, at int, _ string) {
		t.Parallel()
		c := newCrash(at)
		e := begin(t, c)
		if c.at == last {
			e.expanded("c", "2Gi")
			e.modified("c", e.ns+"-gold")
			e.nodeExpands("c")
		}
		c.awaitDeath(t)
		notSmaller(e)
		e.run("resize", quick...)
		if c.at == last {
			e.unrecorded()
			return
		}
		end(e)
	})
}
