// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

func TestResizerScenario(t *testing.T) {
	resizerScenarioExpand(t)
	resizerScenarioRequest(t)
	resizerScenarioOwner(t)
	resizerScenarioAnswers(t)
	resizerScenarioWrites(t)
	resizerScenarioRecovery(t)
	resizerScenarioNode(t)
	resizerScenarioRestart(t)
	resizerScenarioInUse(t)
	resizerScenarioDeleted(t)
	resizerScenarioModify(t)
	resizerScenarioModifyAnswers(t)
	resizerScenarioBoth(t)
	resizerScenarioAhead(t)
}

// static makes a claim one that does not name its driver.
func static(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) { c.Annotations = nil }

// resizerScenarioExpand: the course of an expansion.
func resizerScenarioExpand(t *testing.T) {
	for name, change := range map[string]func(*corev1.PersistentVolumeClaim, *corev1.PersistentVolume){
		"001_002_005_expand": nil, "001_002_005_expand_static": static,
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, expands, nil)
			f.Plugin.Next(expandMethod, csitest.Hang())
			f.create("c1", change)
			f.request("c1", "2Gi")
			f.Wait(expandMethod, 1)
			f.is("c1", "C=1Gi A=2Gi "+progress+" P=1Gi Resizing")
			f.Plugin.Release()
			f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
			f.sent("c1", "Resizing FileSystemResizeRequired")
			f.called("2Gi")
			f.wrote("c1 pv-c1 c1")
			if message := condition(f.claim("c1"),
				corev1.PersistentVolumeClaimFileSystemResizePending).Message; message != messageNodeExpansion {
				t.Errorf("message %q", message)
			}
			f.nodeExpands("c1")
			f.reaches("c1", "C=2Gi A=2Gi P=2Gi")
			f.drain()
			f.wrote("pv-c1")
			f.called("2Gi")
			f.sent("c1", "Resizing FileSystemResizeRequired")
		})
	}
	t.Run("003_004_without_the_node", func(t *testing.T) {
		plugin := expands
		plugin.NoNodeExpansion = true
		f := scenario(t, plugin, nil)
		f.create("c1", nil)
		f.request("c1", "2Gi")
		f.reaches("c1", "C=2Gi A=2Gi NodeExpansionNotRequired=true P=2Gi")
		f.sent("c1", "Resizing VolumeResizeSuccessful")
		f.wrote("c1 pv-c1 c1")
		f.Plugin.Next(expandMethod, csitest.Alter(func(r *csi.ControllerExpandVolumeResponse) { r.NodeExpansionRequired = true }))
		f.request("c1", "3Gi")
		f.reaches("c1", "C=2Gi A=3Gi "+pending+" P=3Gi PRE=2Gi "+waitNode)
	})
	t.Run("006_driver_rounds_up", func(t *testing.T) {
		f := scenario(t, expands, nil)
		f.Plugin.Always(expandMethod, csitest.Alter(func(r *csi.ControllerExpandVolumeResponse) {
			const gib = 1 << 30
			r.CapacityBytes = (r.CapacityBytes + gib - 1) / gib * gib
		}))
		f.create("c1", nil)
		f.request("c1", "2560Mi")
		f.reaches("c1", "C=1Gi A=2560Mi "+pending+" P=3Gi PRE=1Gi "+waitNode)
		f.nodeExpands("c1")
		f.reaches("c1", "C=2560Mi A=2560Mi P=3Gi")
		f.request("c1", "2816Mi") // within the size that the volume has already
		f.reaches("c1", "C=2560Mi A=2816Mi "+pending+" P=3Gi PRE=2560Mi "+waitNode)
		f.nodeExpands("c1")
		f.reaches("c1", "C=2816Mi A=2816Mi P=3Gi")
		f.called("2560Mi 2816Mi")
	})
	t.Run("007_node_only", func(t *testing.T) {
		f := scenario(t, nodeOnly, nil)
		f.create("c1", nil)
		f.request("c1", "2Gi")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.sent("c1", "Resizing FileSystemResizeRequired")
		f.wrote("c1 pv-c1")
		f.nodeExpands("c1")
		f.reaches("c1", "C=2Gi A=2Gi P=2Gi")
		f.Calls(expandMethod, 0)
		f.wrote("pv-c1")
	})
	t.Run("007_node_only_without_controller_service", func(t *testing.T) {
		plugin := nodeOnly
		plugin.Plugin = []csi.PluginCapability_Service_Type{csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS}
		f := scenario(t, plugin, nil)
		f.create("c1", nil)
		f.request("c1", "2Gi")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.Calls(expandMethod, 0)
	})
	t.Run("020_sizes_of_the_driver", func(t *testing.T) {
		returns := func(size int64) csitest.Step {
			return csitest.Alter(func(r *csi.ControllerExpandVolumeResponse) { r.CapacityBytes = size })
		}
		f := scenario(t, expands, nil)
		f.Plugin.Next(expandMethod, returns(0))
		f.create("c1", nil)
		f.request("c1", "2Gi")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.Plugin.Next(expandMethod, returns(3<<29), csitest.Hang())
		f.create("c2", nil)
		f.request("c2", "2Gi")
		f.Wait(expandMethod, 3)
		f.is("c2", "C=1Gi A=2Gi "+progress+" P=1Gi ControllerResizeError Resizing")
		if got := f.events.messages(reasonResizeFailed); !strings.Contains(got,
			"driver returned capacity 1536Mi, less than requested 2Gi") {
			t.Errorf("events %q", got)
		}
		f.Plugin.Release()
		f.reaches("c2", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.called("2Gi 2Gi 2Gi")
		f.Plugin.Next(expandMethod, returns(math.MaxInt64))
		f.create("c3", nil)
		f.request("c3", "2Gi")
		f.reaches("c3", "C=1Gi A=2Gi "+pending+" P=9223372036854775807 PRE=1Gi "+waitNode)
		if got := f.events.messages(reasonUnlikelyCapacity); !strings.Contains(got,
			"ControllerExpandVolume returned capacity_bytes 9223372036854775807") {
			t.Errorf("events %q", got)
		}
	})
}

// resizerScenarioRequest: what the driver gets.
func resizerScenarioRequest(t *testing.T) {
	expandRequests := func(f *fixture) map[string]*csi.ControllerExpandVolumeRequest {
		requests := map[string]*csi.ControllerExpandVolumeRequest{}
		for _, c := range f.Plugin.Calls(expandMethod) {
			if r, ok := c.Request.(*csi.ControllerExpandVolumeRequest); ok {
				requests[r.VolumeId] = r
			}
		}
		return requests
	}
	t.Run("008_block_and_filesystem", func(t *testing.T) {
		f := scenario(t, expands, nil)
		block := f.create("block", func(c *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
			c.Spec.VolumeMode, pv.Spec.VolumeMode = ptr.To(corev1.PersistentVolumeBlock), ptr.To(corev1.PersistentVolumeBlock)
		})
		mount := f.create("mount", func(_ *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
			pv.Spec.CSI.FSType, pv.Spec.MountOptions = "xfs", []string{"ro"}
		})
		for _, name := range []string{"block", "mount"} {
			f.request(name, "2Gi")
			f.reaches(name, "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		}
		requests := expandRequests(f)
		if c := requests[block].GetVolumeCapability(); c.GetBlock() == nil {
			t.Errorf("got %v", c)
		}
		if m := requests[mount].GetVolumeCapability().GetMount(); m.GetFsType() != "xfs" || fmt.Sprint(m.GetMountFlags()) != "[ro]" {
			t.Errorf("got %v", m)
		}
	})
	const (
		rwo, rox, rwx, rwop = corev1.ReadWriteOnce, corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOncePod
		writer, reader      = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
		writers             = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
		single              = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
		multi               = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	)
	for name, able := range map[string]bool{"009_access_modes": false, "009_access_modes_multi_writer": true} {
		t.Run(name, func(t *testing.T) {
			plugin := expands
			if able {
				plugin.Controller = append(plugin.Controller[:1:1], csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER)
			}
			f := scenario(t, plugin, slowly)
			modes := func(list ...corev1.PersistentVolumeAccessMode) func(*corev1.PersistentVolumeClaim, *corev1.PersistentVolume) {
				return func(c *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
					c.Spec.AccessModes, pv.Spec.AccessModes = list, list
				}
			}
			want := map[string]csi.VolumeCapability_AccessMode_Mode{}
			for mode, m := range map[corev1.PersistentVolumeAccessMode][2]csi.VolumeCapability_AccessMode_Mode{
				rwx: {writers, writers}, rox: {reader, reader}, rwo: {writer, multi}, rwop: {writer, single},
			} {
				name := strings.ToLower(string(mode))
				handle := f.create(name, modes(mode))
				if want[handle] = m[0]; able {
					want[handle] = m[1]
				}
				f.request(name, "2Gi")
				f.reaches(name, "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
			}
			for handle, r := range expandRequests(f) {
				if got := r.GetVolumeCapability().GetAccessMode().GetMode(); got != want[handle] {
					t.Errorf("%s: got %v, want %v", handle, got, want[handle])
				}
			}
			f.create("mixed", modes(rox, rwo))
			f.request("mixed", "2Gi")
			f.sent("mixed", "VolumeResizeFailed")
			f.is("mixed", "C=1Gi P=1Gi")
			f.Calls(expandMethod, 4)
		})
	}
	t.Run("010_secrets_and_fractions", func(t *testing.T) {
		f := scenario(t, expands, nil)
		f.secret("s")
		with := f.create("with", func(_ *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
			pv.Spec.CSI.ControllerExpandSecretRef = &corev1.SecretReference{Namespace: f.Namespace, Name: "s"}
		})
		without := f.create("without", nil)
		f.request("with", "2Gi")
		f.request("without", "2000000000500m")
		for _, name := range []string{"with", "without"} {
			f.sent(name, "Resizing FileSystemResizeRequired")
		}
		requests := expandRequests(f)
		if s := requests[with].GetSecrets(); fmt.Sprint(s) != "map[k:s]" {
			t.Errorf("secrets %v", s)
		}
		if r := requests[without]; r.Secrets != nil || r.CapacityRange.RequiredBytes != 2000000001 || r.CapacityRange.LimitBytes != 0 {
			t.Errorf("got %v", r)
		}
	})
	t.Run("011_secret_missing", func(t *testing.T) {
		f := scenario(t, expands, nil)
		f.create("c1", func(_ *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
			pv.Spec.CSI.ControllerExpandSecretRef = &corev1.SecretReference{Namespace: f.Namespace, Name: "s"}
		})
		f.request("c1", "2Gi")
		kubetest.Eventually(t, "it is reported twice", func(context.Context) error {
			if n := strings.Count(f.events.messages(reasonResizeFailed), "error getting secret s in namespace "+f.Namespace+": "); n < 2 {
				return fmt.Errorf("%d times", n)
			}
			return nil
		})
		f.is("c1", "C=1Gi P=1Gi")
		f.wrote("")
		f.secret("s")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.Calls(expandMethod, 1)
	})
	// What an administrator can correct in a PersistentVolume ends the back-off of its claim.
	for name, tt := range map[string]struct {
		volume  func(f *fixture, pv *corev1.PersistentVolume)
		correct string
	}{
		"011_secret_added": {func(f *fixture, _ *corev1.PersistentVolume) {
			f.Plugin.Next(expandMethod, csitest.Fail(codes.Unauthenticated, "no secret"))
		}, `{"spec":{"csi":{"controllerExpandSecretRef":{"name":"s","namespace":"NAMESPACE"}}}}`},
		"011_access_modes_corrected": {func(_ *fixture, pv *corev1.PersistentVolume) {
			pv.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce, corev1.ReadOnlyMany}
		}, `{"spec":{"accessModes":["ReadWriteOnce"]}}`},
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, expands, slowly)
			f.secret("s")
			f.create("c1", func(_ *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) { tt.volume(f, pv) })
			f.request("c1", "2Gi")
			kubetest.Eventually(t, "it is reported", func(context.Context) error {
				if f.events.messages(reasonResizeFailed) == "" {
					return errors.New("no event")
				}
				return nil
			})
			_, err := f.Client.CoreV1().PersistentVolumes().Patch(t.Context(), f.pvName("c1"), types.MergePatchType,
				[]byte(strings.ReplaceAll(tt.correct, "NAMESPACE", f.Namespace)), metav1.PatchOptions{})
			f.Must(err)
			f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		})
	}
}

// gcePD is the driver that replaced the in-tree plugin for disks of GCE.
const gcePD = "pd.csi.storage.gke.io"

// resizerScenarioOwner: which claims and volumes belong to the driver, and to each other.
func resizerScenarioOwner(t *testing.T) {
	t.Run("012_013_in_tree_and_foreign_volumes", func(t *testing.T) {
		plugin := expands
		plugin.Name = gcePD
		f := scenario(t, plugin, oneWorker)
		handle := "projects/UNSPECIFIED/zones/z/disks/disk"
		f.create("c1", func(c *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
			c.Annotations = nil
			pv.Labels = map[string]string{corev1.LabelTopologyZone: "z"}
			pv.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{
				GCEPersistentDisk: &corev1.GCEPersistentDiskVolumeSource{PDName: "disk"}}
		})
		f.Plugin.Next(expandMethod, csitest.Default()) // of settles
		f.request("c1", "2Gi")
		f.settles()
		f.is("c1", "C=1Gi P=1Gi")
		f.Plugin.Next(expandMethod, func(context.Context, *csitest.Plugin, any, func() (any, error)) (any, error) {
			return &csi.ControllerExpandVolumeResponse{CapacityBytes: 2 << 30}, nil
		})
		f.patch("c1", fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, annStorageResizer, gcePD))
		f.reaches("c1", "C=2Gi A=2Gi NodeExpansionNotRequired=true P=2Gi")
		if got := f.sizes(handle); got != "2Gi" {
			t.Errorf("calls for %s: %q", handle, got)
		}
		if n := f.samples("csi_sidecar_operations_seconds", "method_name", "/csi.v1.Controller/"+expandMethod, "migrated", "true"); n != 1 {
			t.Errorf("%d calls for migrated volumes, want 1", n)
		}
		f.Plugin.Next(expandMethod, func(context.Context, *csitest.Plugin, any, func() (any, error)) (any, error) {
			return &csi.ControllerExpandVolumeResponse{CapacityBytes: 3 << 30, NodeExpansionRequired: true}, nil
		})
		f.request("c1", "3Gi")
		f.reaches("c1", "C=2Gi A=3Gi "+pending+" P=3Gi PRE=2Gi "+waitNode)
		f.nodeExpands("c1")
		f.reaches("c1", "C=3Gi A=3Gi P=3Gi")

		// The annotation of the claim is removed during an expansion.
		_, err := f.Client.CoreV1().PersistentVolumes().Patch(t.Context(), f.pvName("c1"), types.MergePatchType,
			fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, storagehelpers.AnnMigratedTo, gcePD), metav1.PatchOptions{})
		f.Must(err)
		calls := f.Plugin.Count(expandMethod)
		f.Plugin.Next(expandMethod, csitest.Hang(), func(context.Context, *csitest.Plugin, any, func() (any, error)) (any, error) {
			return &csi.ControllerExpandVolumeResponse{CapacityBytes: 4 << 30}, nil
		})
		f.request("c1", "4Gi")
		f.Wait(expandMethod, calls+1)
		f.Crash()
		f.Must(f.Plugin.WaitIdle(t.Context()))
		f.patch("c1", fmt.Sprintf(`{"metadata":{"annotations":{%q:null}}}`, annStorageResizer))
		f.start()
		f.reaches("c1", "C=4Gi A=4Gi NodeExpansionNotRequired=true P=4Gi")
		f.api.take()
		foreign := f.create("c2", func(c *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
			c.Annotations = map[string]string{annStorageResizer: gcePD}
			pv.Spec.CSI.Driver = "other.example.com"
		})
		f.request("c2", "2Gi")
		f.settles()
		if got := f.sizes(foreign); got != "" {
			t.Errorf("calls for the volume of another driver: %q", got)
		}
		if writes := f.api.take(); strings.Contains(writes, "c2") {
			t.Errorf("writes %q", writes)
		}
		f.sent("c2", "")
	})
	t.Run("014_015_volume_of_another_claim", func(t *testing.T) {
		f := scenario(t, expands, oneWorker)
		f.create("c1", nil)
		names := map[string]func(*corev1.PersistentVolumeClaim, *corev1.PersistentVolume){
			"c2": func(c *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
				c.Spec.VolumeName, pv.Name = f.pvName("c1"), ""
			},
			"c3": func(_ *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) { pv.Spec.ClaimRef.UID = "another" },
			"c4": func(_ *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) { pv.Spec.ClaimRef = nil },
		}
		for name, change := range names {
			f.create(name, change)
			f.request(name, "2Gi")
		}
		f.settles()
		f.Calls(expandMethod, 1)
		writes := f.api.take()
		for name := range names {
			f.sent(name, "")
			if strings.Contains(writes, name) {
				t.Errorf("writes %q", writes)
			}
		}
		f.request("c1", "2Gi")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
	})
	t.Run("016_not_bound", func(t *testing.T) {
		f := scenario(t, expands, oneWorker)
		for _, phase := range []corev1.PersistentVolumeClaimPhase{corev1.ClaimPending, corev1.ClaimLost} {
			f.create(strings.ToLower(string(phase)), func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) {
				c.Status.Phase, c.Spec.Resources.Requests = phase, storage("2Gi")
			})
		}
		f.settles()
		f.Calls(expandMethod, 1)
		f.status("pending", func(c *corev1.PersistentVolumeClaim) { c.Status.Phase = corev1.ClaimBound })
		f.reaches("pending", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.Calls(expandMethod, 2)
		f.is("lost", "C=1Gi P=1Gi")
	})
	t.Run("017_volume_comes_later", func(t *testing.T) {
		f := scenario(t, expands, slowly)
		f.create("c1", func(_ *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) { pv.Name = "" })
		f.request("c1", "2Gi")
		f.create("other", nil)
		f.request("other", "2Gi")
		f.reaches("other", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		pv := f.pv("other").DeepCopy()
		claim := f.claim("c1")
		pv.ObjectMeta = metav1.ObjectMeta{Name: f.pvName("c1")}
		pv.Spec.Capacity, pv.Spec.CSI.VolumeHandle = storage("1Gi"), f.Plugin.AddVolume("late", 1<<30)
		pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: f.Namespace, Name: "c1", UID: claim.UID}
		_, err := f.Client.CoreV1().PersistentVolumes().Create(t.Context(), pv, metav1.CreateOptions{})
		f.Must(err)
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.sent("c1", "Resizing FileSystemResizeRequired")
		f.Calls(expandMethod, 2)
	})
	t.Run("018_terminating_claim", func(t *testing.T) {
		f := scenario(t, expands, nil)
		f.create("c1", nil)
		f.Must(f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Delete(t.Context(), "c1", metav1.DeleteOptions{}))
		if f.claim("c1").DeletionTimestamp == nil {
			t.Fatal("the claim is not protected")
		}
		f.request("c1", "2Gi")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
	})
}

// samples returns the value of a counter or gauge, or the number of observations of a histogram, with
// these labels: name and value in turns.
func (f *fixture) samples(metric string, labels ...string) (n int) {
	f.Helper()
	families, err := f.Registry.Gather()
	f.Must(err)
	for _, family := range families {
		if family.GetName() != metric {
			continue
		}
		for _, m := range family.GetMetric() {
			match := true
			for i := 0; i < len(labels); i += 2 {
				match = match && hasLabel(m, labels[i], labels[i+1])
			}
			if match {
				n += int(m.GetCounter().GetValue()) + int(m.GetGauge().GetValue()) + int(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return n
}

func hasLabel(m *dto.Metric, name, value string) bool {
	for _, l := range m.GetLabel() {
		if l.GetName() == name && l.GetValue() == value {
			return true
		}
	}
	return false
}

// each calls do for n names at the same time.
func (f *fixture) each(n int, do func(name string)) {
	f.Helper()
	names := make(chan string)
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for name := range names {
				do(name)
			}
		})
	}
	for i := range n {
		names <- fmt.Sprintf("c%d", i)
	}
	close(names)
	wg.Wait()
}

// counts fails the test unless each of n claims caused this number of writes, without conflicts.
func (f *fixture) counts(n, writes int) {
	f.Helper()
	kubetest.Eventually(f.T, "the writes are logged", func(context.Context) error {
		if got := len(strings.Fields(f.api.written())); got != n*writes {
			return fmt.Errorf("%d writes, want %d", got, n*writes)
		}
		return nil
	})
	list := strings.Fields(f.api.take())
	for _, w := range list {
		if strings.Contains(w, "!") {
			f.Errorf("a write was refused: %s", w)
		}
	}
}

// distances checks that each call began at least so long after the end of the one before.
func (f *fixture) distances(calls []csitest.Call, want ...time.Duration) {
	f.Helper()
	if len(calls) < len(want)+1 {
		f.Fatalf("%d calls, want %d", len(calls), len(want)+1)
	}
	for i, w := range want {
		if d := calls[i+1].Began.Sub(calls[i].Ended); d < w {
			f.Errorf("call %d came %v after the one before, want %v at least", i+2, d, w)
		}
	}
}

// resizerScenarioDeleted: claims that are deleted during an expansion.
func resizerScenarioDeleted(t *testing.T) {
	t.Run("062_volume_is_bound_again", func(t *testing.T) {
		f := scenario(t, expands, nil)
		handle := f.create("c1", nil)
		f.request("c1", "2Gi")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.delete("c1")
		f.create("c1", func(c *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
			pv.Name = ""
			c.Spec.Resources.Requests, c.Status.Phase = storage("2Gi"), corev1.ClaimPending
		})
		patch := fmt.Sprintf(`{"spec":{"claimRef":{"uid":%q,"resourceVersion":null}}}`, f.claim("c1").UID)
		_, err := f.Client.CoreV1().PersistentVolumes().Patch(t.Context(), f.pvName("c1"), types.MergePatchType, []byte(patch),
			metav1.PatchOptions{})
		f.Must(err)
		f.api.take()
		f.status("c1", func(c *corev1.PersistentVolumeClaim) { c.Status.Phase = corev1.ClaimBound })
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.wrote("c1 c1")
		if got := f.sizes(handle); got != "2Gi 2Gi" {
			t.Errorf("calls %q", got)
		}
		f.nodeExpands("c1")
		f.reaches("c1", "C=2Gi A=2Gi P=2Gi")
	})
	for name, recreated := range map[string]bool{"063_deleted_during_the_call": false, "064_recreated_during_the_call": true} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, expands, nil)
			f.Plugin.Next(expandMethod, csitest.Hang())
			f.create("c1", nil)
			f.request("c1", "2Gi")
			f.Wait(expandMethod, 1)
			deleted := f.claim("c1").UID
			f.delete("c1")
			want := "deleted"
			if recreated {
				f.create("c1", func(_ *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) { pv.Name = "" })
				want = "C=1Gi"
			}
			kubetest.Eventually(t, "the resizer sees that the claim is deleted", func(context.Context) error {
				if cached, ok := f.c.claims.Get(f.Namespace + "/c1"); ok && cached.UID == deleted {
					return errors.New("it is in the cache")
				}
				return nil
			})
			f.Plugin.Release()
			f.reaches("c1", want+" P=2Gi PRE=1Gi")
			f.drain()
			f.is("c1", want+" P=2Gi PRE=1Gi")
			f.wrote("c1 pv-c1")
			f.sent("c1", "Resizing")
			f.Calls(expandMethod, 1)
		})
	}
	t.Run("063_volume_deleted_too", func(t *testing.T) {
		f := scenario(t, expands, nil)
		f.Plugin.Next(expandMethod, csitest.Hang())
		f.create("c1", func(_ *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
			pv.Annotations = map[string]string{storagehelpers.AnnDynamicallyProvisioned: f.Driver}
		})
		f.request("c1", "2Gi")
		f.Wait(expandMethod, 1)
		f.delete("c1")
		volumes := f.Client.CoreV1().PersistentVolumes()
		f.Must(volumes.Delete(t.Context(), f.pvName("c1"), metav1.DeleteOptions{}))
		_, err := volumes.Patch(t.Context(), f.pvName("c1"), types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`),
			metav1.PatchOptions{})
		f.Must(err)
		f.Plugin.Release()
		kubetest.Eventually(t, "the resizer forgets the claim", func(context.Context) error {
			for k := range f.c.term.Load().ledger.All() {
				return fmt.Errorf("it remembers %s", k)
			}
			return nil
		})
		f.sent("c1", "Resizing")
	})
}
