// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// patchNode changes the metadata of a Node: labels and annotations, of which nil takes
// one away.
func (f *fixture) patchNode(name string, metadata map[string]map[string]any) {
	f.Helper()
	patch, err := json.Marshal(map[string]any{"metadata": metadata})
	f.Must(err)
	_, err = f.Client.CoreV1().Nodes().Patch(f.Context(), f.Unique(name), types.MergePatchType, patch, metav1.PatchOptions{})
	f.Must(err)
}

func (f *fixture) deleteNode(name string) {
	f.Helper()
	f.Must(f.Client.CoreV1().Nodes().Delete(f.Context(), f.Unique(name), metav1.DeleteOptions{}))
}

func (f *fixture) deleteCSINode(name string) {
	f.Helper()
	f.Must(f.Client.StorageV1().CSINodes().Delete(f.Context(), f.Unique(name), metav1.DeleteOptions{}))
}

// drivers makes those the ones on a node, as the kubelet does.
func (f *fixture) drivers(node string, drivers ...storagev1.CSINodeDriver) {
	f.Helper()
	patch, err := json.Marshal(map[string]any{"spec": map[string]any{"drivers": append([]storagev1.CSINodeDriver{}, drivers...)}})
	f.Must(err)
	_, err = f.Client.StorageV1().CSINodes().Patch(f.Context(), f.Unique(node), types.MergePatchType, patch, metav1.PatchOptions{})
	f.Must(err)
}

// registered is the entry of the driver on a node.
func (f *fixture) registered(node string, keys ...string) storagev1.CSINodeDriver {
	return storagev1.CSINodeDriver{Name: f.Driver, NodeID: f.Unique(node), TopologyKeys: keys}
}

func (f *fixture) deleteClass(name string) {
	f.Helper()
	f.Must(f.Client.StorageV1().StorageClasses().Delete(f.Context(), f.Unique(name), metav1.DeleteOptions{}))
}

// goal waits until that many objects are to be there.
func (f *fixture) goal(want int) {
	f.Helper()
	kubetest.Eventually(f, fmt.Sprintf("the goal is %d objects", want), func(context.Context) error {
		if got := f.c.counts().goal; got != want {
			return fmt.Errorf("it is %d", got)
		}
		return nil
	})
}

func TestCapacityScenarioTopology(t *testing.T) {
	t.Run("035_another_node_in_a_zone", func(t *testing.T) {
		f := scenario(t, never)
		before := f.published(zoneA, zoneB)
		f.node("n3", "a")
		f.node("n4", "c") // its events follow those of n3
		f.published(zoneA, zoneB, "fast t/zone=c 5Gi")
		f.asked(3)
		f.same(before, []storagev1.CSIStorageCapacity{*f.in("a", f.objects()), *f.in("b", f.objects())})
	})
	t.Run("036_label_comes_late", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, never)
		f.makeFixture()
		f.nodeWith("n3", map[string]string{"t/other": "c"}, "t/zone")
		f.start()
		f.published(zoneA, zoneB)
		f.asked(2)
		f.patchNode("n3", map[string]map[string]any{"labels": {"t/zone": "c"}})
		f.published(zoneA, zoneB, "fast t/zone=c 5Gi")
		f.patchNode("n3", map[string]map[string]any{"labels": {"t/zone": nil}})
		f.published(zoneA, zoneB)
		f.patchNode("n3", map[string]map[string]any{"labels": {"t/zone": ""}}) // a value like others
		f.published("fast t/zone= 5Gi", zoneA, zoneB)
	})
	t.Run("037_last_csinode_deleted", func(t *testing.T) {
		f := scenario(t, nil)
		f.published(zoneA, zoneB)
		f.deleteCSINode("n2")
		f.published(zoneA)
	})
	t.Run("037_driver_unregistered", func(t *testing.T) {
		f := scenario(t, nil)
		f.published(zoneA, zoneB)
		f.drivers("n2", storagev1.CSINodeDriver{Name: "other." + f.Driver, NodeID: "x", TopologyKeys: []string{"t/zone"}})
		f.published(zoneA)
	})
	t.Run("037_another_node_left", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, never)
		f.makeFixture()
		f.node("n3", "b")
		f.node("n4", "b")
		f.node("n5", "c")
		f.start()
		before := f.published(zoneA, zoneB, "fast t/zone=c 5Gi")
		f.deleteNode("n2")
		f.deleteCSINode("n2")
		f.drivers("n3")
		f.deleteNode("n5") // its events follow those of the Nodes before
		f.published(zoneA, zoneB)
		f.sameUIDs([]storagev1.CSIStorageCapacity{*f.in("a", before), *f.in("b", before)}, f.objects())
		f.deleteCSINode("n4")
		f.published(zoneA)
	})
	t.Run("037_after_the_grace", func(t *testing.T) {
		f := scenario(t, func(c *Config) {
			never(c)
			c.RemovalGrace = time.Second
		})
		before := f.published(zoneA, zoneB)
		left := time.Now()
		f.deleteNode("n2")
		f.goal(1)
		f.published(zoneA)
		if after := time.Since(left); after < f.cfg.RemovalGrace {
			t.Errorf("the object was deleted after %v", after)
		}
		f.sameUIDs([]storagev1.CSIStorageCapacity{*f.in("a", before)}, f.objects())
		f.asked(2)
	})
	t.Run("037_gone_at_start", func(t *testing.T) {
		// The last node left while no replica was at work: the time since is not known.
		f := prepare(t, csitest.Config{}, func(c *Config) { c.RemovalGrace = 10 * time.Second })
		f.makeFixture()
		f.existing("fast", "c", "1Gi", nil)
		f.start()
		f.published(zoneA, zoneB, "fast t/zone=c 1Gi")
		f.published(zoneA, zoneB)
	})
	t.Run("038_node_moves", func(t *testing.T) {
		f := scenario(t, never)
		before := f.published(zoneA, zoneB)
		f.patchNode("n1", map[string]map[string]any{"labels": {"t/zone": "c"}})
		after := f.published(zoneB, "fast t/zone=c 5Gi")
		f.sameUIDs([]storagev1.CSIStorageCapacity{*f.in("b", before)}, []storagev1.CSIStorageCapacity{*f.in("b", after)})
		f.asked(3)
	})
	t.Run("039_heartbeats", func(t *testing.T) {
		f := scenario(t, never)
		before := f.published(zoneA, zoneB)
		for i := range 10 {
			node, err := f.Client.CoreV1().Nodes().Get(t.Context(), f.Unique("n1"), metav1.GetOptions{})
			f.Must(err)
			for c := range node.Status.Conditions {
				node.Status.Conditions[c].LastHeartbeatTime = metav1.Now()
				node.Status.Conditions[c].Message = fmt.Sprint(i)
			}
			_, err = f.Client.CoreV1().Nodes().UpdateStatus(t.Context(), node, metav1.UpdateOptions{})
			f.Must(err)
			f.patchNode("n1", map[string]map[string]any{"annotations": {"beat": fmt.Sprint(i)}, "labels": {"other": fmt.Sprint(i)}})
			f.drivers("n1", f.registered("n1", "t/zone"), storagev1.CSINodeDriver{Name: fmt.Sprintf("other%d.example.com", i), NodeID: "x"})
		}
		f.node("n3", "c") // its events follow all others
		f.published(zoneA, zoneB, "fast t/zone=c 5Gi")
		f.asked(3)
		f.same(before, []storagev1.CSIStorageCapacity{*f.in("a", f.objects()), *f.in("b", f.objects())})
	})
	t.Run("040_order_of_keys", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, never)
		f.class("fast", nil)
		labels := map[string]string{"t/zone": "a", "t/rack": "1"}
		f.nodeWith("n1", labels, "t/rack", "t/zone")
		f.nodeWith("n2", labels, "t/zone", "t/rack")
		f.start()
		f.published("fast t/rack=1,t/zone=a 1Gi")
		f.asked(1)
	})
	t.Run("041_different_keys", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, never)
		f.class("fast", nil)
		labels := map[string]string{"t/zone": "a", "t/rack": "1"}
		f.nodeWith("n1", labels, "t/zone")
		f.nodeWith("n2", labels, "t/zone", "t/rack")
		f.start()
		f.published("fast t/rack=1,t/zone=a 1Gi", zoneA)
		f.asked(2)
	})
	t.Run("042_no_topology_keys", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, polling)
		f.class("fast", nil)
		f.nodeWith("n1", nil)
		f.nodeWith("n2", map[string]string{"t/zone": "a"})
		writes := f.noteWrites(nil)
		f.start()
		before := f.published("fast everywhere 5Gi")
		f.askedIn("", 6)
		f.same(before, f.objects())
		writes.are(t, "POST")
		if r := f.Plugin.Calls(getCapacity)[0].Request.(*csi.GetCapacityRequest); r.AccessibleTopology == nil {
			t.Error("the request has no topology")
		}
	})
	t.Run("042_no_topology_keys_restart", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, never)
		f.class("fast", nil)
		f.nodeWith("n1", nil)
		before := f.existing("fast", "", "5Gi", func(o *storagev1.CSIStorageCapacity) { o.NodeTopology = &metav1.LabelSelector{} })
		writes := f.noteWrites(nil)
		f.start()
		f.asked(1)
		f.same([]storagev1.CSIStorageCapacity{*before}, f.published("fast everywhere 5Gi"))
		writes.are(t)
	})
	t.Run("043_classes_come_and_go", func(t *testing.T) {
		f := scenario(t, func(c *Config) {
			never(c)
			c.RemovalGrace = time.Hour // which is not for classes
		})
		f.published(zoneA, zoneB)
		f.class("slow", nil)
		f.published(zoneA, zoneB, "slow t/zone=a 1Gi", "slow t/zone=b 2Gi")
		f.deleteClass("fast")
		f.published("slow t/zone=a 1Gi", "slow t/zone=b 2Gi")
		f.class("fast", nil)
		f.published(zoneA, zoneB, "slow t/zone=a 1Gi", "slow t/zone=b 2Gi")
	})
	t.Run("043_class_deleted_during_the_call", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, never)
		f.node("n1", "a")
		f.class("fast", nil)
		writes := f.noteWrites(nil)
		deleted := make(chan struct{})
		f.Plugin.Next(getCapacity, f.answeredAfter(deleted))
		f.start()
		f.Must(f.Plugin.Wait(t.Context(), getCapacity, 1))
		f.deleteClass("fast")
		f.goal(0)
		close(deleted)
		f.class("slow", nil) // its objects follow all others
		f.published("slow t/zone=a 1Gi")
		writes.are(t, "POST")
	})
	t.Run("044_class_replaced_while_disconnected", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, never)
		f.makeFixture()
		f.class("slow", nil)
		line := f.cuttable("/storageclasses")
		f.start()
		f.published(zoneA, zoneB, "slow t/zone=a 1Gi", "slow t/zone=b 2Gi")
		line.cut()
		f.deleteClass("fast")
		f.class("fast", func(c *storagev1.StorageClass) {
			c.VolumeBindingMode = ptr.To(storagev1.VolumeBindingImmediate)
		})
		f.deleteClass("slow")
		f.class("slow", func(c *storagev1.StorageClass) { c.Provisioner = "other." + f.Driver })
		line.restore()
		f.published()
	})
	t.Run("045_many_nodes", func(t *testing.T) {
		const zones, nodes = 3, 300
		f := prepare(t, csitest.Config{}, never)
		f.class("fast", nil)
		var making sync.WaitGroup
		for zone := range zones {
			making.Go(func() {
				for i := range nodes / zones {
					name := fmt.Sprintf("n%d-%d", zone, i)
					if err := kubetest.CreateNode(t.Context(), f.Client, kubetest.NodeSpec{
						Name: f.Unique(name), Driver: f.Driver, TopologyKeys: []string{"t/zone"},
						Labels: map[string]string{"t/zone": string(rune('a' + zone))},
					}); err != nil {
						t.Error(err)
					}
				}
			})
		}
		making.Wait()
		f.start()
		f.published(zoneA, zoneB, "fast t/zone=c 5Gi")
		f.asked(zones)
		_, err := f.Client.StorageV1().StorageClasses().Patch(t.Context(), f.Unique("fast"), types.MergePatchType,
			[]byte(`{"metadata":{"annotations":{"note":"x"}}}`), metav1.PatchOptions{})
		f.Must(err)
		f.asked(2 * zones)
		f.node("last", "d") // whatever else the change led to was queued before this
		f.published(zoneA, zoneB, "fast t/zone=c 5Gi", "fast t/zone=d 5Gi")
		f.asked(2*zones + 1)
	})
	t.Run("046_driver_restarts", func(t *testing.T) {
		f := scenario(t, func(c *Config) {
			never(c)
			c.RemovalGrace = DefaultConfig().RemovalGrace
		})
		before := f.published(zoneA, zoneB)
		for range 3 {
			f.drivers("n2")
			f.goal(1)
			f.drivers("n2", f.registered("n2", "t/zone"))
			f.goal(2)
		}
		f.node("n3", "c")
		after := f.published(zoneA, zoneB, "fast t/zone=c 5Gi")
		f.same(before, []storagev1.CSIStorageCapacity{*f.in("a", after), *f.in("b", after)})
		f.asked(3)
	})
}
