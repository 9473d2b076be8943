// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
	"github.com/storage-controller/storage-controller/topolvm"
	"github.com/storage-controller/storage-controller/topolvm/topolvmtest"
)

// LogicalVolumes are the custom resources of TopoLVM.
var LogicalVolumes = schema.GroupVersionResource{Group: topolvm.Driver, Version: "v1", Resource: "logicalvolumes"}

// deviceClass is the parameter of a StorageClass with a device class.
const deviceClass = topolvm.Driver + "/device-class"

// deviceClasses are those of each node, by the generation of the StorageClass.
var deviceClasses = []string{"thin", "other"}

// hostSize is the size of a device class, which is enough for all volumes.
const hostSize = 100 << 30

// host is a node with topolvm-node.
type host struct {
	*topolvmtest.Host
	down bool
}

// newHosts returns a host for each node.
func newHosts(api *apiserver.Server, nodes []string) (map[string]*host, error) {
	lvs, err := topolvm.NewClient(api.Config("cluster"), topolvm.Driver)
	if err != nil {
		return nil, err
	}
	hosts := map[string]*host{}
	for _, node := range nodes {
		var classes []topolvmtest.Class
		for _, class := range deviceClasses {
			classes = append(classes, topolvmtest.Class{Name: class, Thin: true, Size: hostSize})
		}
		hosts[node] = &host{Host: topolvmtest.NewHost(topolvm.Driver, lvs, classes)}
	}
	return hosts, nil
}

// defineLogicalVolumes creates the CustomResourceDefinition.
func (c *Cluster) defineLogicalVolumes() error {
	data, err := topolvmtest.Definition(topolvm.Driver)
	if err != nil {
		return err
	}
	crd := &unstructured.Unstructured{}
	if err := crd.UnmarshalJSON(data); err != nil {
		return err
	}
	definitions := schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	return c.api.Create(definitions, crd)
}

// classOf returns the device class of a generation of a StorageClass. Copies have the class of their source.
func (c *Cluster) classOf(generation int) string {
	if c.features.Copies {
		return deviceClasses[0]
	}
	return deviceClasses[generation%len(deviceClasses)]
}

// task is what topolvm-node does next for a LogicalVolume.
type task struct {
	node string
	host *host
	task topolvmtest.Task
	lv   *topolvm.LogicalVolume
}

// tasks returns the tasks on the nodes that are up.
func (c *Cluster) tasks() []task {
	var tasks []task
	all := Typed[topolvm.LogicalVolume](c, LogicalVolumes)
	for _, lv := range all {
		h := c.hosts[lv.Spec.NodeName]
		if h == nil || h.down || c.Node(lv.Spec.NodeName) == nil {
			continue
		}
		var source *topolvm.LogicalVolume
		if i := slices.IndexFunc(all, func(of *topolvm.LogicalVolume) bool { return of.Name == lv.Spec.Source }); i >= 0 {
			source = all[i]
		}
		if next := h.Next(lv, source); next != topolvmtest.Nothing && next != topolvmtest.Retry {
			tasks = append(tasks, task{lv.Spec.NodeName, h, next, lv})
		}
	}
	return tasks
}

// step returns the step of topolvm-node that does t with a fault.
func (c *Cluster) step(t task, fault topolvmtest.Fault, how string) Step {
	return Step{fmt.Sprintf("topolvm-node on %s %s %s%s", t.node, t.task, t.lv.Name, how), func(ctx context.Context) error {
		c.changed = true
		_, err := t.host.Do(ctx, t.task, t.lv, fault)
		return err
	}}
}

// topolvmNodes returns the steps of topolvm-node on each node that exists, and those of nodes that were down.
func (c *Cluster) topolvmNodes() []Step {
	if !c.features.Topolvm {
		return nil
	}
	var steps []Step
	for _, name := range c.Nodes {
		node, h := c.Node(name), c.hosts[name]
		switch capacities := h.Capacities(); {
		case node == nil:
		case h.down:
			steps = append(steps, c.setReady(node, h, corev1.ConditionTrue, "is up again"))
		case node.DeletionTimestamp == nil && !maps.Equal(capacitiesOf(node), capacities):
			next := node.DeepCopy()
			for key, value := range capacities {
				metav1.SetMetaDataAnnotation(&next.ObjectMeta, key, value)
			}
			steps = append(steps, Step{"topolvm-node on " + name + " reports its capacity", c.update(Nodes, next)})
		}
	}
	for _, t := range c.tasks() {
		steps = append(steps, c.step(t, topolvmtest.Fault{}, ""))
	}
	return steps
}

// topolvmFaults returns failures of topolvm-node, of LVM and of nodes.
func (c *Cluster) topolvmFaults() []Step {
	if !c.features.Topolvm {
		return nil
	}
	var steps []Step
	for _, name := range c.Nodes {
		if node, h := c.Node(name), c.hosts[name]; node != nil && !h.down {
			steps = append(steps, c.setReady(node, h, corev1.ConditionFalse, "goes down"))
		}
	}
	for _, t := range c.tasks() {
		if t.task == topolvmtest.Create || t.task == topolvmtest.Expand {
			for _, code := range []int64{3, 4, 5, 8, 9, 13, 14} {
				steps = append(steps, c.step(t, topolvmtest.Fault{Code: code}, fmt.Sprint(", which fails with code ", code)))
			}
		}
		if t.task != topolvmtest.Report {
			steps = append(steps, c.step(t, topolvmtest.Fault{Exits: true}, ", and exits before it reports that"))
		}
	}
	return steps
}

// setReady returns the step of a node that goes down, or is up again.
func (c *Cluster) setReady(node *corev1.Node, h *host, ready corev1.ConditionStatus, what string) Step {
	next := node.DeepCopy()
	next.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}
	return Step{node.Name + " " + what, func(context.Context) error {
		h.down, c.changed = ready != corev1.ConditionTrue, true
		return c.api.Update(Nodes, next, "status")
	}}
}

const capacityPrefix = "capacity." + topolvm.Driver + "/"

// capacitiesOf returns the capacity annotations of node.
func capacitiesOf(node *corev1.Node) map[string]string {
	values := maps.Clone(node.Annotations)
	maps.DeleteFunc(values, func(key, _ string) bool { return !strings.HasPrefix(key, capacityPrefix) })
	return values
}

// Free returns the free bytes on a node of the device class of the StorageClass with that name.
func (c *Cluster) Free(node, class string) int64 {
	of := deviceClasses[0]
	if obj, ok := c.api.Get(Classes, "", class).(*storagev1.StorageClass); ok {
		of = obj.Parameters[deviceClass]
	}
	free, _ := strconv.ParseInt(c.hosts[node].Capacities()[capacityPrefix+of], 10, 64) // the host has written it
	return free
}

// LVMVolume is a volume or snapshot on a node: an LVM volume, a LogicalVolume, or both.
type LVMVolume struct {
	ID, Name, Node string
	Snapshot       bool
	Size           int64                  // of the LVM volume; 0: there is none
	LV             *topolvm.LogicalVolume // nil: it was deleted
}

// LVMVolumes returns the volumes and snapshots, those of LogicalVolumes first.
func (c *Cluster) LVMVolumes() []LVMVolume {
	var all []LVMVolume
	known := map[string]bool{}
	for _, lv := range Typed[topolvm.LogicalVolume](c, LogicalVolumes) {
		v := LVMVolume{ID: string(lv.UID), Name: lv.Name, Node: lv.Spec.NodeName, Snapshot: lv.Spec.AccessType == "ro", LV: lv}
		if h := c.hosts[v.Node]; h != nil {
			v.Size = h.Volumes()[lv.UID].Size
		}
		all, known[v.ID] = append(all, v), true
	}
	for _, node := range c.Nodes {
		volumes := c.hosts[node].Volumes()
		for _, uid := range slices.Sorted(maps.Keys(volumes)) {
			if v := volumes[uid]; !known[string(uid)] {
				all = append(all, LVMVolume{ID: string(uid), Name: v.Name, Node: node, Snapshot: v.ReadOnly, Size: v.Size})
			}
		}
	}
	return all
}

// KeepsLogicalVolume reports whether the node controller has to keep a LogicalVolume on a lost node: an owner forbids the cleanup, or it is
// a snapshot. Of one that is being deleted, only the owner of the node counts.
func (c *Cluster) KeepsLogicalVolume(name string) bool {
	if !c.features.Topolvm {
		return false
	}
	obj := c.api.Get(LogicalVolumes, "", name)
	return obj != nil && c.keeps(c.read(), TypedOf[topolvm.LogicalVolume](c, obj))
}

func (c *Cluster) keeps(s state, lv *topolvm.LogicalVolume) bool {
	node := c.Node(lv.Spec.NodeName)
	switch {
	case node != nil && node.DeletionTimestamp == nil:
		return false
	case c.optedOutNode(lv.Spec.NodeName) || lv.DeletionTimestamp != nil:
		return c.optedOutNode(lv.Spec.NodeName)
	}
	for _, claim := range s.claims {
		if "pvc-"+string(claim.UID) != lv.Name {
			continue
		}
		class := s.class(claim)
		if OptedOut(claim, c.driver) || class != nil && OptedOut(class, c.driver) {
			return true
		}
	}
	ns := c.api.Get(Namespaces, "", Namespace).(*corev1.Namespace)
	return lv.IsSnapshot() || OptedOut(ns, c.driver)
}

// lostLogicalVolumes returns the LogicalVolumes of lost nodes without a PersistentVolume, which the node controller has to delete.
func (c *Cluster) lostLogicalVolumes(s state) []string {
	var lost []string
	for _, lv := range Typed[topolvm.LogicalVolume](c, LogicalVolumes) {
		names := func(pv *corev1.PersistentVolume) bool { return pv.Spec.CSI.VolumeHandle == string(lv.UID) }
		if c.Node(lv.Spec.NodeName) == nil && !slices.ContainsFunc(s.volumes, names) && !c.keeps(s, lv) {
			lost = append(lost, "LogicalVolume "+lv.Name+" of the lost "+lv.Spec.NodeName+" is not deleted")
		}
	}
	return lost
}
