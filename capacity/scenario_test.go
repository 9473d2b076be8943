// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/looptest"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

const getCapacity = "GetCapacity"

// fixture runs the capacity controller of a driver with 1Gi in the zone a and 2Gi in b.
// Scenarios run in parallel: the names of their objects begin with the namespace.
type fixture struct {
	*looptest.Fixture
	cfg    Config
	change func(*Deps) // before a start, or nil
	c      *Controller // of the last start

	mu     sync.Mutex
	answer map[string]*csi.GetCapacityResponse // by the value of t/zone, or "class/zone"
}

// scenario starts a controller for the nodes n1 and n2 in the zones a and b and the
// StorageClass fast.
func scenario(t *testing.T, change func(*Config)) *fixture {
	t.Helper()
	f := prepare(t, csitest.Config{}, change)
	f.makeFixture()
	f.start()
	return f
}

// prepare returns a fixture without objects, whose controller does not run yet.
func prepare(t *testing.T, plugin csitest.Config, change func(*Config)) *fixture {
	t.Helper()
	if plugin.Controller == nil {
		plugin.Controller = []csi.ControllerServiceCapability_RPC_Type{
			csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		}
	}
	f := &fixture{Fixture: looptest.New(t, plugin), cfg: DefaultConfig(), answer: map[string]*csi.GetCapacityResponse{}}
	f.cfg.RetryIntervalStart, f.cfg.RetryIntervalMax = 50*time.Millisecond, 400*time.Millisecond
	f.cfg.RemovalGrace, f.cfg.QPS = 0, 0
	if change != nil {
		change(&f.cfg)
	}
	f.Plugin.Always(getCapacity, f.answered())
	f.has("a", 1<<30)
	f.has("b", 2<<30)
	return f
}

func (f *fixture) makeFixture() {
	f.Helper()
	f.node("n1", "a")
	f.node("n2", "b")
	f.class("fast", nil)
}

// answered is the step with which the driver says what has was told.
func (f *fixture) answered() csitest.Step {
	return func(_ context.Context, _ *csitest.Plugin, request any, _ func() (any, error)) (any, error) {
		r := request.(*csi.GetCapacityRequest)
		zone := r.GetAccessibleTopology().GetSegments()["t/zone"]
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, key := range []string{r.GetParameters()["pool"] + "/" + zone, zone} {
			if a := f.answer[key]; a != nil {
				return a, nil
			}
		}
		return &csi.GetCapacityResponse{AvailableCapacity: 5 << 30}, nil
	}
}

// has is what the driver has in a zone from now on.
func (f *fixture) has(zone string, bytes int64) {
	f.says(zone, &csi.GetCapacityResponse{AvailableCapacity: bytes})
}

func (f *fixture) says(zone string, r *csi.GetCapacityResponse) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answer[zone] = r
}

// start runs the controller as a process does.
func (f *fixture) start() {
	f.Helper()
	f.Start(func(p looptest.Process) (_ looptest.Loop, err error) {
		deps := Deps{
			Driver: p.Driver, Client: p.Client, Informers: p.Informers, CSI: p.CSI.Controller(), Ready: p.CSI.WaitReady,
			Registry: p.Registry, Queues: p.Queues, Namespace: f.Namespace,
		}
		if f.change != nil {
			f.change(&deps)
		}
		f.c, err = New(f.cfg, deps)
		return f.c, err
	})
}

// node makes a node with the driver on it, whose topology key is t/zone.
func (f *fixture) node(name, zone string) {
	f.Helper()
	f.nodeWith(name, map[string]string{"t/zone": zone}, "t/zone")
}

func (f *fixture) nodeWith(name string, labels map[string]string, keys ...string) {
	f.Helper()
	f.Must(
		kubetest.CreateNode(
			f.Context(), f.Client, kubetest.NodeSpec{Name: f.Unique(name), Labels: labels, Driver: f.Driver, TopologyKeys: keys},
		),
	)
}

// class makes a class of the driver with late binding and the parameter pool: ssd.
func (f *fixture) class(name string, change func(*storagev1.StorageClass)) {
	f.Helper()
	class := &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: f.Unique(name)}, Provisioner: f.Driver, Parameters: map[string]string{"pool": "ssd"},
		VolumeBindingMode: ptr.To(storagev1.VolumeBindingWaitForFirstConsumer),
	}
	if change != nil {
		change(class)
	}
	_, err := f.Client.StorageV1().StorageClasses().Create(f.Context(), class, metav1.CreateOptions{})
	f.Must(err)
}

// objects are the CSIStorageCapacities of the namespace.
func (f *fixture) objects() []storagev1.CSIStorageCapacity {
	f.Helper()
	list, err := f.Client.StorageV1().CSIStorageCapacities(f.Namespace).List(f.Context(), metav1.ListOptions{})
	f.Must(err)
	return list.Items
}

// describe is what objects say, as "class zone capacity", sorted. The zone is "nowhere"
// for an object without a selector, "everywhere" for one that selects every node.
func (f *fixture) describe(objects []storagev1.CSIStorageCapacity) []string {
	var lines []string
	for _, o := range objects {
		zone, capacity := "nowhere", "none"
		if o.NodeTopology != nil {
			if zone = string(segmentOf(o.NodeTopology.MatchLabels)); zone == "" {
				zone = "everywhere"
			}
		}
		if o.Capacity != nil {
			capacity = o.Capacity.String()
		}
		lines = append(lines, fmt.Sprintf("%s %s %s", o.StorageClassName[len(f.Namespace)+1:], zone, capacity))
	}
	slices.Sort(lines)
	return lines
}

// published waits until the objects of the namespace are just these; see describe.
func (f *fixture) published(want ...string) []storagev1.CSIStorageCapacity {
	f.Helper()
	var objects []storagev1.CSIStorageCapacity
	kubetest.Eventually(f, fmt.Sprintf("%q are published", want), func(context.Context) error {
		objects = f.objects()
		if have := f.describe(objects); !slices.Equal(have, want) {
			return fmt.Errorf("%q are", have)
		}
		return nil
	})
	return objects
}

// existing makes an object as an earlier publisher would have.
func (f *fixture) existing(class, zone, capacity string, change func(*storagev1.CSIStorageCapacity)) *storagev1.CSIStorageCapacity {
	f.Helper()
	o := &storagev1.CSIStorageCapacity{
		ObjectMeta:       metav1.ObjectMeta{GenerateName: generateName, Namespace: f.Namespace, Labels: labels(f.Driver, "")},
		StorageClassName: f.Unique(class), NodeTopology: &metav1.LabelSelector{MatchLabels: map[string]string{"t/zone": zone}},
		Capacity: ptr.To(resource.MustParse(capacity)),
	}
	if change != nil {
		change(o)
	}
	o, err := f.Client.StorageV1().CSIStorageCapacities(o.Namespace).Create(f.Context(), o, metav1.CreateOptions{})
	f.Must(err)
	return o
}

// asked waits for n calls of GetCapacity altogether, and fails if there are more.
func (f *fixture) asked(n int) {
	f.Helper()
	f.Must(f.Plugin.Wait(f.Context(), getCapacity, n))
	f.Must(f.Plugin.WaitIdle(f.Context()))
	if got := f.Plugin.Count(getCapacity); got != n {
		f.Errorf("GetCapacity was called %d times instead of %d", got, n)
	}
}

func TestCapacityScenario(t *testing.T) {
	t.Run("001_one_object_for_each_zone", func(t *testing.T) {
		f := scenario(t, nil)
		for _, o := range f.published("fast t/zone=a 1Gi", "fast t/zone=b 2Gi") {
			if o.Labels[labelDriver] != f.Driver || o.Labels[labelManagedBy] != "external-provisioner" || len(o.Labels) != 2 ||
				o.OwnerReferences != nil || o.GenerateName != "csisc-" {
				t.Errorf("got %+v", o.ObjectMeta)
			}
		}
	})
	t.Run("003_request", func(t *testing.T) {
		f := scenario(t, nil)
		f.published("fast t/zone=a 1Gi", "fast t/zone=b 2Gi")
		for _, call := range f.Plugin.Calls(getCapacity) {
			r := call.Request.(*csi.GetCapacityRequest)
			if zone := r.GetAccessibleTopology().GetSegments()["t/zone"]; r.VolumeCapabilities != nil || r.Parameters["pool"] != "ssd" ||
				len(r.Parameters) != 1 || zone != "a" && zone != "b" {
				t.Errorf("got %v", r)
			}
		}
	})
	t.Run("016_capacity_changes", func(t *testing.T) {
		f := scenario(t, func(c *Config) { c.PollInterval = 200 * time.Millisecond })
		before := f.published("fast t/zone=a 1Gi", "fast t/zone=b 2Gi")
		f.has("a", 3<<30)
		after := f.published("fast t/zone=a 3Gi", "fast t/zone=b 2Gi")
		for _, o := range after {
			if !slices.ContainsFunc(before, func(b storagev1.CSIStorageCapacity) bool { return b.UID == o.UID }) {
				t.Errorf("%q is another object", o.Name)
			}
		}
	})
	t.Run("035_037_zone_comes_and_goes", func(t *testing.T) {
		f := scenario(t, nil)
		f.published("fast t/zone=a 1Gi", "fast t/zone=b 2Gi")
		f.node("n3", "c")
		f.published("fast t/zone=a 1Gi", "fast t/zone=b 2Gi", "fast t/zone=c 5Gi")
		f.Must(f.Client.CoreV1().Nodes().Delete(t.Context(), f.Unique("n2"), metav1.DeleteOptions{}))
		f.published("fast t/zone=a 1Gi", "fast t/zone=c 5Gi")
	})
}
