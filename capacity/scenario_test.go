package capacity

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

const getCapacity = "GetCapacity"

// fixture is that of the contract: two nodes in the zones a and b, the class "fast", and a
// driver with 1Gi in a and 2Gi in b. Names carry that of the namespace, so that
// scenarios run side by side.
type fixture struct {
	*testing.T
	cp     *kubetest.ControlPlane
	client kubernetes.Interface
	plugin *csitest.Plugin
	ns     string
	driver string
	cfg    Config
	change func(*Deps)  // of what the controller gets; nil: nothing
	watch  *rest.Config // of the watches; nil: straight to the API server
	reg    *prometheus.Registry
	c      *Controller
	stop   func(cause error) error

	mu     sync.Mutex
	answer map[string]*csi.GetCapacityResponse // by the value of t/zone, or "class/zone"
}

// scenario makes the fixture and starts the controller.
func scenario(t *testing.T, change func(*Config)) *fixture {
	t.Helper()
	f := prepare(t, csitest.Config{}, change)
	f.makeFixture()
	f.start()
	return f
}

// prepare makes nothing but a namespace and a driver.
func prepare(t *testing.T, plugin csitest.Config, change func(*Config)) *fixture {
	t.Helper()
	t.Parallel()
	f := &fixture{T: t, cp: kubetest.Get(t), cfg: DefaultConfig(), answer: map[string]*csi.GetCapacityResponse{}}
	f.client, f.ns = f.cp.Client(), kubetest.Namespace(t, f.cp)
	f.cfg.RetryIntervalStart, f.cfg.RetryIntervalMax = 50*time.Millisecond, 400*time.Millisecond
	f.cfg.RemovalGrace, f.cfg.QPS = 0, 0
	if change != nil {
		change(&f.cfg)
	}
	if plugin.Name == "" {
		plugin.Name = f.ns + ".example.com"
	}
	if plugin.Controller == nil {
		plugin.Controller = []csi.ControllerServiceCapability_RPC_Type{
			csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		}
	}
	f.driver = plugin.Name
	f.plugin = csitest.Run(t, plugin)
	f.plugin.Always(getCapacity, f.answered())
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

// start runs the controller as a process would.
func (f *fixture) start() {
	f.Helper()
	f.reg = prometheus.NewRegistry()
	cfg := csiclient.DefaultConfig()
	cfg.Address = f.plugin.Address()
	client, err := csiclient.New(cfg, f.reg)
	f.must(err)
	driver, err := client.Connect(f.Context())
	f.must(err)
	watch, watchConfig := f.client, f.cp.Config()
	if f.watch != nil {
		watchConfig = f.watch
		watch, err = kubernetes.NewForConfig(watchConfig)
		f.must(err)
	}
	meta, err := metadata.NewForConfig(watchConfig)
	f.must(err)
	informers := kube.NewInformers(watch, meta, driver.Name)
	deps := Deps{
		Driver: driver, Client: f.client, Informers: informers, CSI: client.Controller(), Ready: client.WaitReady,
		Registry: f.reg, Queues: workloop.NewMetrics(f.reg), Namespace: f.ns,
	}
	if f.change != nil {
		f.change(&deps)
	}
	c, err := New(f.cfg, deps)
	f.must(err)
	f.c = c
	f.stop = kubetest.RunTerm(f, informers, c.Run, func() { client.Close() })
}

func (f *fixture) must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

func (f *fixture) name(s string) string { return f.ns + "-" + s }

// node makes a node with the driver on it, whose topology key is t/zone.
func (f *fixture) node(name, zone string) {
	f.Helper()
	f.nodeWith(name, map[string]string{"t/zone": zone}, "t/zone")
}

func (f *fixture) nodeWith(name string, labels map[string]string, keys ...string) {
	f.Helper()
	f.must(
		kubetest.CreateNode(
			f.Context(), f.client, kubetest.NodeSpec{Name: f.name(name), Labels: labels, Driver: f.driver, TopologyKeys: keys},
		),
	)
}

// class makes a class of the driver with late binding and the parameter pool: ssd.
func (f *fixture) class(name string, change func(*storagev1.StorageClass)) {
	f.Helper()
	class := &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: f.name(name)}, Provisioner: f.driver, Parameters: map[string]string{"pool": "ssd"},
		VolumeBindingMode: ptr.To(storagev1.VolumeBindingWaitForFirstConsumer),
	}
	if change != nil {
		change(class)
	}
	_, err := f.client.StorageV1().StorageClasses().Create(f.Context(), class, metav1.CreateOptions{})
	f.must(err)
}

// objects are the CSIStorageCapacities of the namespace.
func (f *fixture) objects() []storagev1.CSIStorageCapacity {
	f.Helper()
	list, err := f.client.StorageV1().CSIStorageCapacities(f.ns).List(f.Context(), metav1.ListOptions{})
	f.must(err)
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
		lines = append(lines, fmt.Sprintf("%s %s %s", o.StorageClassName[len(f.ns)+1:], zone, capacity))
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
		ObjectMeta:       metav1.ObjectMeta{GenerateName: generateName, Namespace: f.ns, Labels: labels(f.driver, "")},
		StorageClassName: f.name(class), NodeTopology: &metav1.LabelSelector{MatchLabels: map[string]string{"t/zone": zone}},
		Capacity: ptr.To(resource.MustParse(capacity)),
	}
	if change != nil {
		change(o)
	}
	o, err := f.client.StorageV1().CSIStorageCapacities(o.Namespace).Create(f.Context(), o, metav1.CreateOptions{})
	f.must(err)
	return o
}

// asked waits for n calls of GetCapacity altogether, and fails if there are more.
func (f *fixture) asked(n int) {
	f.Helper()
	f.must(f.plugin.Wait(f.Context(), getCapacity, n))
	f.must(f.plugin.WaitIdle(f.Context()))
	if got := f.plugin.Count(getCapacity); got != n {
		f.Errorf("GetCapacity was called %d times instead of %d", got, n)
	}
}

func TestCapacityScenario(t *testing.T) {
	t.Run("001_one_object_for_each_zone", func(t *testing.T) {
		f := scenario(t, nil)
		for _, o := range f.published("fast t/zone=a 1Gi", "fast t/zone=b 2Gi") {
			if o.Labels[labelDriver] != f.driver || o.Labels[labelManagedBy] != "external-provisioner" || len(o.Labels) != 2 || o.OwnerReferences != nil || o.GenerateName != "csisc-" {
				t.Errorf("got %+v", o.ObjectMeta)
			}
		}
	})
	t.Run("003_request", func(t *testing.T) {
		f := scenario(t, nil)
		f.published("fast t/zone=a 1Gi", "fast t/zone=b 2Gi")
		for _, call := range f.plugin.Calls(getCapacity) {
			r := call.Request.(*csi.GetCapacityRequest)
			if zone := r.GetAccessibleTopology().GetSegments()["t/zone"]; r.VolumeCapabilities != nil || r.Parameters["pool"] != "ssd" || len(r.Parameters) != 1 || zone != "a" && zone != "b" {
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
		f.must(f.client.CoreV1().Nodes().Delete(t.Context(), f.name("n2"), metav1.DeleteOptions{}))
		f.published("fast t/zone=a 1Gi", "fast t/zone=c 5Gi")
	})
}
