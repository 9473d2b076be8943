// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// TestCapacityScenario is the scenarios of the capacity that are about the process. Those
// about objects, nodes and classes are beside the capacity.
func TestCapacityScenario(t *testing.T) {
	t.Parallel()
	capacityScenarioRefused(t)
	capacityScenarioProcess(t)
	capacityScenarioNode(t)
	capacityScenarioRefresh(t)
}

var (
	getsCapacity = []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_GET_CAPACITY,
	}
	twoZones = []map[string]string{{}, {}}
	// unowned has objects without an owner, and no poll of the driver during a test.
	unowned = []string{"--capacity-ownerref-level=-1", "--capacity-poll-interval=1h", "--kube-api-capacity-qps=0"}
)

// newCapacityEnv has two nodes in the zones a and b.
func newCapacityEnv(t *testing.T, controller []csi.ControllerServiceCapability_RPC_Type) *env {
	t.Helper()
	t.Parallel()
	return newEnv(t, csitest.Config{Controller: controller, Segments: twoZones}, 2)
}

// publisher is the program with the namespace of e for its objects.
func (e *env) publisher(subcommand string, args ...string) *exec.Cmd {
	e.t.Helper()
	cmd := e.command(subcommand, slices.Concat(quick, args)...)
	cmd.Env = []string{"NAMESPACE=" + e.ns}
	return cmd
}

// pool makes a class whose parameter pool is name, by which calls for it are told from others.
func (e *env) pool(name string, change func(*storagev1.StorageClass)) string {
	e.t.Helper()
	return e.class(true, func(c *storagev1.StorageClass) {
		c.Parameters = map[string]string{"pool": name}
		if change != nil {
			change(c)
		}
	})
}

func (e *env) capacities() []storagev1.CSIStorageCapacity {
	e.t.Helper()
	list, err := e.client.StorageV1().CSIStorageCapacities(e.ns).List(e.t.Context(), metav1.ListOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
	return list.Items
}

// published waits until there are n objects.
func (e *env) published(n int) []storagev1.CSIStorageCapacity {
	e.t.Helper()
	var items []storagev1.CSIStorageCapacity
	e.eventually(fmt.Sprintf("%d objects are published", n), func(context.Context) error {
		if items = e.capacities(); len(items) != n {
			return fmt.Errorf("%d are", len(items))
		}
		return nil
	})
	return items
}

// unpublished fails the test when there is an object.
func (e *env) unpublished() {
	e.t.Helper()
	if items := e.capacities(); len(items) > 0 {
		e.t.Errorf("%d objects", len(items))
	}
}

// asked waits until the driver was asked about these, as "pool zone", and about nothing
// else, after the first calls.
func (e *env) asked(first int, want ...string) (all int) {
	e.t.Helper()
	slices.Sort(want)
	var got []string
	e.eventually(fmt.Sprintf("the driver is asked about %q", want), func(context.Context) error {
		got = nil
		for _, call := range e.plugin.Calls("GetCapacity")[first:] {
			r := call.Request.(*csi.GetCapacityRequest)
			got = append(got, r.GetParameters()["pool"]+" "+r.GetAccessibleTopology().GetSegments()[e.plugin.Name()+"/node"])
		}
		slices.Sort(got)
		if len(got) < len(want) {
			return fmt.Errorf("it is about %q", got)
		}
		return nil
	})
	if !slices.Equal(got, want) {
		e.t.Errorf("the driver was asked about %q, want %q", got, want)
	}
	return first + len(got)
}

// capacityScenarioRefused: mistakes that are found before anybody is asked anything.
func capacityScenarioRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		command string
		args    []string
		env     []string // beside the NAMESPACE and the POD_NAME that there are
		says    string
	}{
		"053_no_namespace":              {"capacity", nil, []string{"NAMESPACE="}, "the environment variable NAMESPACE must name"},
		"053_no_namespace_and_no_owner": {"capacity", unowned, []string{"NAMESPACE="}, "the environment variable NAMESPACE must name"},
		"053_no_namespace_for_the_flag": {"provision", []string{"--enable-capacity"}, []string{"NAMESPACE="},
			"the environment variable NAMESPACE must name"},
		"053_no_namespace_in_all": {"all", []string{"--controllers=capacity"}, []string{"NAMESPACE="},
			"the environment variable NAMESPACE must name"},
		"053_no_pod_name": {"capacity", nil, []string{"POD_NAME="}, "the environment variable POD_NAME must name"},
		"053_no_pod_name_for_itself": {"capacity", []string{"--capacity-ownerref-level=0"}, []string{"POD_NAME="},
			"the environment variable POD_NAME must name"},
		"053_no_pod_name_for_the_flag": {"provision", []string{"--enable-capacity"}, []string{"POD_NAME="},
			"the environment variable POD_NAME must name"},
		"053_no_node_name": {"capacity", []string{"--node-deployment"}, nil,
			"the environment variable NODE_NAME must name"},
		"053_no_node_name_without_capacity": {"provision", []string{"--node-deployment"}, nil,
			"the environment variable NODE_NAME must name"},
		"067_no_threads": {"capacity", []string{"--capacity-threads=0"}, nil, "--capacity-threads: must be positive"},
		"067_no_poll_interval": {"capacity", []string{"--capacity-poll-interval=0"}, nil,
			"--capacity-poll-interval: must be positive"},
		"067_negative_poll_interval": {"provision", []string{"--enable-capacity", "--capacity-poll-interval=-1s"}, nil,
			"--capacity-poll-interval: must be positive"},
		"067_no_threads_in_all": {"all", []string{"--capacity-threads=0"}, nil, "--capacity-threads: must be positive"},
	} {
		t.Run(name, func(t *testing.T) {
			e := newCapacityEnv(t, getsCapacity)
			e.pool("fast", nil)
			cmd := e.publisher(tt.command, tt.args...)
			cmd.Env = append(cmd.Env, tt.env...)
			e.refuses(cmd, tt.says)
			e.unpublished()
		})
	}
	t.Run("053_no_pod_name_without_owner", func(t *testing.T) {
		e := newCapacityEnv(t, getsCapacity)
		e.pool("fast", nil)
		cmd := e.publisher("capacity", unowned...)
		cmd.Env = append(cmd.Env, "POD_NAME=")
		e.start(cmd)
		e.published(2)
	})
	t.Run("053_left_out_of_all", func(t *testing.T) {
		e := newCapacityEnv(t, getsCapacity)
		class := e.pool("fast", func(c *storagev1.StorageClass) { c.VolumeBindingMode = nil })
		cmd := e.publisher("all")
		cmd.Env = []string{"NAMESPACE=", "POD_NAME="}
		p := e.start(cmd)
		e.claim("c", class)
		e.bound("c")
		e.calls("GetCapacity", 0)
		for _, name := range []string{"Role disabled", "NAMESPACE", "POD_NAME"} {
			p.says(name)
		}
		e.leftovers("c")
	})
	for name, tt := range map[string]struct {
		args []string
		says string
	}{
		"049_no_pod":           {nil, "not found"},
		"049_no_controller":    {[]string{"--capacity-ownerref-level=1"}, "has no controlling owner reference"},
		"049_no_controller_in": {[]string{"--enable-capacity"}, "has no controlling owner reference"},
	} {
		t.Run(name, func(t *testing.T) {
			e := newCapacityEnv(t, getsCapacity)
			e.pool("fast", nil)
			command := "capacity"
			if slices.Contains(tt.args, "--enable-capacity") {
				command = "provision"
			}
			cmd := e.publisher(command, tt.args...)
			cmd.Env = append(cmd.Env, "POD_NAME=driver-0")
			if tt.args != nil {
				e.unscheduled("driver-0", nil)
			}
			e.start(cmd).fails(`capacity: finding the owner of CSIStorageCapacity objects (--capacity-ownerref-level=1)`, `"driver-0"`,
				tt.says)
			e.calls("GetCapacity", 0)
			e.unpublished()
		})
	}
}

// unscheduled makes a pod that no scheduler looks at.
func (e *env) unscheduled(name string, owners []metav1.OwnerReference) *corev1.Pod {
	e.t.Helper()
	pod, err := e.client.CoreV1().Pods(e.ns).Create(e.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, OwnerReferences: owners},
		Spec:       corev1.PodSpec{SchedulerName: "none", Containers: []corev1.Container{{Name: "c", Image: "none"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
	return pod
}

// capacityScenarioProcess: metrics, limits, replicas, and drivers that cannot tell.
func capacityScenarioProcess(t *testing.T) {
	t.Run("063_metrics", func(t *testing.T) {
		e := newCapacityEnv(t, getsCapacity)
		e.pool("fast", nil)
		p := e.start(e.publisher("capacity", slices.Concat(unowned, election, []string{"--http-endpoint=127.0.0.1:0"})...))
		e.published(2)
		want := map[string]float64{"csistoragecapacities_desired_goal": 2, "csistoragecapacities_desired_current": 2,
			"csistoragecapacities_obsolete": 0}
		for name, value := range want {
			e.eventually(name, func(context.Context) error {
				if got := p.value(name, ""); got != value {
					return fmt.Errorf("it is %v, want %v", got, value)
				}
				return nil
			})
		}
		families := ofEveryRole(e.provisionerLease()+"-capacity", "csistoragecapacity")
		for name := range want {
			families[name] = family{[]string{""}, dto.MetricType_GAUGE, nil}
		}
		families["csi_sidecar_operations_seconds"] = e.called("Identity/Probe OK", "Identity/GetPluginInfo OK",
			"Identity/GetPluginCapabilities OK",
			"Controller/ControllerGetCapabilities OK", "Controller/GetCapacity OK")
		p.shows(families)
	})
	t.Run("064_limits", func(t *testing.T) {
		const pairs, notLate = 20, 10 * time.Second
		e := newCapacityEnv(t, getsCapacity)
		for i := range pairs / 2 {
			e.pool(fmt.Sprint("pool", i), nil)
		}
		var mu sync.Mutex
		var created, renewed []time.Time
		proxy := kubetest.Proxy(t, e.account(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			mu.Lock()
			switch {
			case r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/csistoragecapacities"):
				created = append(created, time.Now())
			case r.Method == http.MethodPut && strings.Contains(r.URL.Path, "/leases/"):
				renewed = append(renewed, time.Now())
			}
			mu.Unlock()
			pass.ServeHTTP(w, r)
		})
		e.start(e.publisher("capacity", slices.Concat(unowned, election,
			[]string{"--kubeconfig", kubetest.WriteKubeconfig(t, proxy), "--kube-api-capacity-qps=1", "--kube-api-capacity-burst=1",
				fmt.Sprint("--capacity-threads=", pairs),
				"--leader-election-lease-duration=15s", "--leader-election-renew-deadline=12s"})...))
		e.published(pairs)
		mu.Lock()
		defer mu.Unlock()
		if took := created[len(created)-1].Sub(created[0]); len(created) != pairs || took < 15*time.Second {
			t.Errorf("%d objects were created within %v, want %d within about 19s", len(created), took, pairs)
		}
		// All requests wait for the limit of the objects. One for the Lease among them would come late.
		last := created[0]
		for _, r := range renewed {
			if r.Before(last) {
				continue
			}
			if r.Sub(last) > notLate {
				t.Errorf("the Lease was not renewed for %v", r.Sub(last))
			}
			last = r
		}
		if rest := created[pairs-1].Sub(last); rest > notLate {
			t.Errorf("the Lease was not renewed for %v", rest)
		}
	})
	for name, command := range map[string][]string{
		"065_driver_cannot_tell":                   {"capacity"},
		"065_driver_cannot_tell_but_can_provision": {"provision", "--enable-capacity"},
		"065_driver_cannot_tell_in_all":            {"all"},
	} {
		t.Run(name, func(t *testing.T) {
			e := newCapacityEnv(t, []csi.ControllerServiceCapability_RPC_Type{csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME})
			class := e.pool("fast", func(c *storagev1.StorageClass) { c.VolumeBindingMode = nil })
			e.pool("late", nil)
			p := e.start(e.publisher(command[0], append(slices.Clone(unowned), command[1:]...)...))
			p.says("does not report the controller capability GET_CAPACITY")
			if command[0] != "capacity" {
				e.claim("c", class)
				e.bound("c")
				e.leftovers("c")
			}
			p.lives()
			e.calls("GetCapacity", 0)
			e.unpublished()
			p.signal(syscall.SIGTERM)
			if code := p.code(); code != 0 {
				t.Errorf("exit code %d", code)
			}
			if n := strings.Count(p.logged(), "GET_CAPACITY"); n != 1 {
				t.Errorf("said %d times", n)
			}
		})
	}
	t.Run("066_only_the_leader_asks", func(t *testing.T) {
		e := newCapacityEnv(t, getsCapacity)
		e.pool("fast", nil)
		args := slices.Concat(unowned, election, []string{"--http-endpoint=127.0.0.1:0"})
		leader := e.start(e.publisher("capacity", args...))
		e.leads(leader, e.provisionerLease()+"-capacity")
		other := e.start(e.publisher("capacity", args...))
		n := e.asked(0, "fast a", "fast b")
		e.eventually("the other is warm", func(context.Context) error {
			if status, body := other.get("/readyz"); status != http.StatusOK {
				return errors.New(body)
			}
			return nil
		})
		before := e.published(2)
		e.pool("slow", nil)
		n = e.asked(n, "slow a", "slow b")
		if goal := other.value("csistoragecapacities_desired_goal", ""); goal != 0 {
			t.Errorf("the goal of the one that waits is %v", goal)
		}
		for _, m := range other.metrics()["csi_sidecar_operations_seconds"].GetMetric() {
			if strings.Contains(labelsOf(m), "GetCapacity") {
				t.Errorf("the one that waits has asked the driver: %s", labelsOf(m))
			}
		}
		e.published(4)
		leader.signal(syscall.SIGTERM)
		if code := leader.code(); code != 0 {
			t.Errorf("exit code %d", code)
		}
		e.leads(other, e.provisionerLease()+"-capacity")
		e.asked(n, "fast a", "fast b", "slow a", "slow b")
		for _, o := range before {
			if now, err := e.client.StorageV1().CSIStorageCapacities(e.ns).Get(t.Context(), o.Name, metav1.GetOptions{}); err != nil ||
				now.ResourceVersion != o.ResourceVersion {
				t.Errorf("%q was written again: %v", o.Name, err)
			}
		}
	})
}

// capacityScenarioNode: one instance per node.
func capacityScenarioNode(t *testing.T) {
	t.Run("059_one_per_node", func(t *testing.T) {
		e := newCapacityEnv(t, getsCapacity)
		classes := []string{e.pool("fast", nil), e.pool("slow", nil)}
		e.pool("now", func(c *storagev1.StorageClass) { c.VolumeBindingMode = ptr.To(storagev1.VolumeBindingImmediate) })
		foreign, err := e.client.StorageV1().CSIStorageCapacities(e.ns).Create(t.Context(), &storagev1.CSIStorageCapacity{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "csisc-", Labels: map[string]string{
				"csi.storage.k8s.io/drivername": e.plugin.Name(), "csi.storage.k8s.io/managed-by": "external-provisioner-n2",
			}},
			StorageClassName: classes[0], Capacity: ptr.To(resource.MustParse("1Mi")),
			NodeTopology: &metav1.LabelSelector{MatchLabels: map[string]string{e.plugin.Name() + "/node": "gone"}},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		cmd := e.publisher("capacity", append(slices.Clone(unowned), "--node-deployment", "--http-endpoint=127.0.0.1:0")...)
		cmd.Env = append(cmd.Env, "NODE_NAME=n1")
		p := e.start(cmd)
		var of []string
		for _, o := range e.published(3) {
			if o.UID == foreign.UID {
				continue
			}
			of = append(of, o.StorageClassName)
			if o.Labels["csi.storage.k8s.io/managed-by"] != "external-provisioner-n1" || len(o.Labels) != 2 {
				t.Errorf("labels %v", o.Labels)
			}
			if got := metav1.FormatLabelSelector(o.NodeTopology); got != e.plugin.Name()+"/node=a" {
				t.Errorf("for the nodes %q", got)
			}
		}
		if slices.Sort(of); !slices.Equal(of, slices.Sorted(slices.Values(classes))) {
			t.Errorf("of the classes %q, want %q", of, classes)
		}
		e.asked(0, "fast a", "slow a")
		if p.value("csistoragecapacities_desired_goal", "") != 2 || p.value("csistoragecapacities_obsolete", "") != 0 {
			t.Error("the metrics count objects of another publisher")
		}
		if now, err := e.client.StorageV1().CSIStorageCapacities(e.ns).Get(t.Context(), foreign.Name, metav1.GetOptions{}); err != nil ||
			now.ResourceVersion != foreign.ResourceVersion {
			t.Errorf("the object of the other node was touched: %v", err)
		}
	})
	t.Run("061_driver_without_topology", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{Controller: getsCapacity}, 1)
		e.pool("fast", nil)
		cmd := e.publisher("capacity", append(slices.Clone(unowned), "--node-deployment")...)
		cmd.Env = append(cmd.Env, "NODE_NAME="+e.nodes[0])
		p := e.start(cmd)
		p.says("Capacity publishing is disabled")
		p.says("NodeGetInfo returned no accessible_topology")
		p.signal(syscall.SIGTERM)
		if code := p.code(); code != 0 {
			t.Errorf("exit code %d", code)
		}
		e.calls("GetCapacity", 0)
		e.unpublished()
	})
}

// capacityScenarioRefresh: what happens to volumes is seen at once by the publisher in the
// same process. The driver is not polled meanwhile.
func capacityScenarioRefresh(t *testing.T) {
	t.Run("054_055_056_057_with_provision", func(t *testing.T) { capacityRefresh(t, "provision", "--enable-capacity") })
	t.Run("054_055_056_057_in_all", func(t *testing.T) { capacityRefresh(t, "all") })
}

func capacityRefresh(t *testing.T, command string, args ...string) {
	e := newCapacityEnv(t, getsCapacity)
	fast, secret := e.pool("fast", nil), e.pool("slow", func(c *storagev1.StorageClass) {
		c.Parameters["csi.storage.k8s.io/provisioner-secret-name"], c.Parameters["csi.storage.k8s.io/provisioner-secret-namespace"] = "s",
			e.ns
	})
	e.start(e.publisher(command, slices.Concat(unowned, args)...))
	n := e.asked(0, "fast a", "fast b", "slow a", "slow b")
	e.published(4)
	claim := func(name, class string, node int) {
		t.Helper()
		c := newClaim(name, class)
		c.Annotations = map[string]string{"volume.kubernetes.io/selected-node": e.nodes[node]}
		e.make(c)
	}

	claim("a", fast, 0)
	volume := e.bound("a")
	n = e.asked(n, "fast a", "slow a")

	nowhere := csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume.AccessibleTopology = nil })
	e.plugin.Next("CreateVolume", nowhere)
	claim("nowhere", fast, 0)
	e.bound("nowhere")
	n = e.asked(n, "fast a", "fast b")

	// Each failure refreshes the capacity, and so does the success after it.
	for i, code := range []codes.Code{codes.InvalidArgument, codes.Aborted} {
		e.plugin.Next("CreateVolume", csitest.Fail(code, "no"), csitest.Hang())
		name, creates := fmt.Sprint("retried", i), e.plugin.Count("CreateVolume")
		claim(name, fast, 1)
		n = e.asked(n, "fast a", "fast b")
		e.wait("CreateVolume", creates+2)
		e.plugin.Release()
		e.bound(name)
		n = e.asked(n, "fast b", "slow b")
	}
	e.plugin.Next("CreateVolume", csitest.Fail(codes.ResourceExhausted, "full"))
	claim("full", fast, 1)
	n = e.asked(n, "fast a", "fast b")
	e.eventually("another node is asked for", func(context.Context) error {
		if node, is := e.get("full").Annotations["volume.kubernetes.io/selected-node"]; is {
			return fmt.Errorf("node %s", node)
		}
		return nil
	})

	// The driver was not called for the volume whose secret is missing.
	creates := e.plugin.Count("CreateVolume")
	claim("secret", secret, 0)
	e.eventually("an event of the claim names the missing secret", func(ctx context.Context) error {
		events, err := e.client.CoreV1().Events(e.ns).List(ctx,
			metav1.ListOptions{FieldSelector: "involvedObject.name=secret,reason=ProvisioningFailed"})
		if err == nil && len(events.Items) == 0 {
			err = errors.New("there is no event")
		}
		return err
	})
	e.calls("CreateVolume", creates)

	// A deletion in a zone increases its capacity; the zone of a volume without topology is unknown.
	e.deleteClaim("nowhere")
	e.wait("DeleteVolume", 1)
	for _, name := range []string{"full", "secret"} {
		e.deleteClaim(name)
	}
	e.deleteClaim("retried0")
	e.wait("DeleteVolume", 2)
	n = e.asked(n, "fast b", "slow b")
	e.deleteClaim("a")
	e.wait("DeleteVolume", 3)
	n = e.asked(n, "fast a", "slow a")
	e.leftovers("retried1")
	n = e.asked(n, "fast b", "slow b")
	e.calls("GetCapacity", n)
	if _, err := e.client.CoreV1().PersistentVolumes().Get(t.Context(), volume, metav1.GetOptions{}); err == nil {
		t.Errorf("volume %q is still there", volume)
	}
}
