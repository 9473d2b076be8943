// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// local is a cluster whose driver has storage of its own on each node, 2Gi everywhere, and
// whose scheduler is told of it.
type local struct {
	*env
	class string
}

func newLocal(t *testing.T, nodes int, attach bool) *local {
	t.Helper()
	t.Parallel()
	capabilities := []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_GET_CAPACITY,
	}
	if attach {
		capabilities = append(capabilities, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME)
	}
	l := &local{env: newEnv(t, csitest.Config{Controller: capabilities, Segments: []map[string]string{{}}, Capacity: 2 << 30}, 0)}
	l.must(l.plugin.Restart(func(c *csitest.Config) { c.Segments = nil }))
	driver := &storagev1.CSIDriver{
		ObjectMeta: metav1.ObjectMeta{Name: l.plugin.Name()},
		Spec:       storagev1.CSIDriverSpec{StorageCapacity: ptr.To(true), AttachRequired: &attach},
	}
	_, err := l.client.StorageV1().CSIDrivers().Create(t.Context(), driver, metav1.CreateOptions{})
	l.must(err)
	t.Cleanup(func() {
		_ = l.client.StorageV1().CSIDrivers().Delete(context.Background(), driver.Name, metav1.DeleteOptions{})
	})
	l.class = l.env.class(true, nil)
	for range nodes {
		l.join()
	}
	return l
}

func (l *local) must(err error) {
	l.t.Helper()
	if err != nil {
		l.t.Fatal(err)
	}
}

// kubelets has pods run whose volumes are attached.
func (l *local) kubelets() {
	ctx, stop := context.WithCancel(l.t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { kubetest.Kubelets{Client: l.client}.Run(ctx) })
	l.t.Cleanup(func() { stop(); wg.Wait() })
}

// key is the only topology key of the driver.
func (l *local) key() string { return l.plugin.Name() + "/node" }

// join has one more node come, with storage.
func (l *local) join() {
	l.t.Helper()
	name := fmt.Sprintf("%s-%d", l.ns, len(l.nodes))
	segment := map[string]string{l.key(): name}
	l.must(l.plugin.Restart(func(c *csitest.Config) { c.Segments = append(c.Segments, segment) }))
	l.nodes = append(l.nodes, name) // newEnv removes it in the end
	l.register(len(l.nodes) - 1)
}

// register has the kubelet of a node make its objects.
func (l *local) register(i int) {
	l.t.Helper()
	l.must(kubetest.CreateNode(l.t.Context(), l.client, kubetest.NodeSpec{
		Name: l.nodes[i], NodeID: fmt.Sprintf("id-%d", i), Driver: l.plugin.Name(), TopologyKeys: []string{l.key()},
		Labels: map[string]string{"test": l.ns, l.key(): l.nodes[i]},
	}))
}

// publish runs the program with capacity.
func (l *local) publish(subcommand string, args ...string) *process {
	l.t.Helper()
	cmd := l.command(subcommand, append([]string{"--capacity-ownerref-level=-1", "--kube-api-capacity-qps=0"}, args...)...)
	cmd.Env = []string{"NAMESPACE=" + l.ns}
	return l.start(cmd)
}

// published waits until just these capacities are published, by node; "" for none.
func (l *local) published(want ...string) {
	l.t.Helper()
	l.eventually(fmt.Sprintf("%q are published", want), func(ctx context.Context) error {
		list, err := l.client.StorageV1().CSIStorageCapacities(l.ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		have := make([]string, len(l.nodes))
		for _, o := range list.Items {
			for i, n := range l.nodes {
				if o.NodeTopology.MatchLabels[l.key()] == n {
					have[i] += o.Capacity.String()
				}
			}
		}
		if strings.Join(have, " ") != strings.Join(want, " ") {
			return fmt.Errorf("%q are", have)
		}
		return nil
	})
}

// pod makes a pod that would like best to run on a node, and its claim.
func (l *local) pod(name, size, likes string) {
	l.t.Helper()
	claim := newClaim(name, l.class)
	claim.Spec.Resources.Requests[corev1.ResourceStorage] = resource.MustParse(size)
	_, err := l.client.CoreV1().PersistentVolumeClaims(l.ns).Create(l.t.Context(), claim, metav1.CreateOptions{})
	l.must(err)
	_, err = l.client.CoreV1().Pods(l.ns).Create(l.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			NodeSelector: map[string]string{"test": l.ns}, Containers: []corev1.Container{{Name: "c", Image: "none"}},
			Affinity: &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
				PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{{
					Weight: 100, Preference: corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: l.key(),
						Operator: corev1.NodeSelectorOpIn, Values: []string{likes}}}},
				}}}},
			Volumes: []corev1.Volume{{Name: "v",
				VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name}}}},
		},
	}, metav1.CreateOptions{})
	l.must(err)
}

// lands waits until a pod is on a node, with its volume.
func (l *local) lands(name, node string) {
	l.t.Helper()
	l.eventually(name+" is on a node", func(ctx context.Context) error {
		pod, err := l.client.CoreV1().Pods(l.ns).Get(ctx, name, metav1.GetOptions{})
		switch {
		case err != nil:
			return err
		case pod.Spec.NodeName == "":
			return fmt.Errorf("it is not: %v", pod.Status.Conditions)
		case pod.Spec.NodeName != node:
			l.t.Fatalf("%s is on %q, want %q", name, pod.Spec.NodeName, node)
		}
		return nil
	})
	l.bound(name)
}

// waits waits until the scheduler has found that there is no room for a pod on any node.
func (l *local) waits(name string) {
	l.t.Helper()
	l.eventually(name+" waits for room", func(ctx context.Context) error {
		pod, err := l.client.CoreV1().Pods(l.ns).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodScheduled && strings.Contains(c.Message, "not have enough free storage") {
				return nil
			}
		}
		return fmt.Errorf("on %q, %v", pod.Spec.NodeName, pod.Status.Conditions)
	})
}

// remove removes a pod and its claim.
func (l *local) remove(name string) {
	l.t.Helper()
	l.must(l.client.CoreV1().Pods(l.ns).Delete(l.t.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
	l.deleteClaim(name)
}

// TestSchedulerFollowsCapacity checks that the real scheduler follows the published capacity.
func TestSchedulerFollowsCapacity(t *testing.T) {
	t.Run("pods land only where there is room", func(t *testing.T) {
		l := newLocal(t, 3, false)
		full := l.nodes[0]
		l.plugin.Always("GetCapacity", func(_ context.Context, _ *csitest.Plugin, request any, do func() (any, error)) (any, error) {
			if request.(*csi.GetCapacityRequest).GetAccessibleTopology().GetSegments()[l.key()] == full {
				return &csi.GetCapacityResponse{}, nil
			}
			return do()
		})
		l.must(l.client.StorageV1().CSINodes().Delete(t.Context(), l.nodes[2], metav1.DeleteOptions{})) // the driver is not there
		l.publish("provision", "--enable-capacity")
		l.published("", "2Gi", "")
		for _, likes := range []string{full, l.nodes[2]} {
			name := "likes-" + likes
			l.pod(name, "1Gi", likes)
			l.lands(name, l.nodes[1])
		}
		l.calls("CreateVolume", 2) // that there is no room elsewhere was not found out by trying
	})
	t.Run("a full node sends pods elsewhere, until there is room again", func(t *testing.T) {
		l := newLocal(t, 2, false)
		l.publish("provision", "--enable-capacity", "--capacity-poll-interval=1h") // nothing is noticed by polling
		l.published("2Gi", "2Gi")
		a, b := l.nodes[0], l.nodes[1]
		for i, step := range []struct {
			node string
			left []string
		}{{a, []string{"1Gi", "2Gi"}}, {a, []string{"0", "2Gi"}}, {b, []string{"0", "1Gi"}}, {b, []string{"0", "0"}}} {
			name := fmt.Sprintf("pod-%d", i)
			l.pod(name, "1Gi", a)
			l.lands(name, step.node)
			l.published(step.left...)
		}
		l.pod("pod-4", "1Gi", a)
		l.waits("pod-4")
		l.remove("pod-2")
		l.lands("pod-4", b)
		l.published("0", "0")
		l.pod("pod-5", "2Gi", a)
		l.waits("pod-5")
		l.join()
		l.lands("pod-5", l.nodes[2])
		l.published("0", "0", "0")
	})
	t.Run("a pod that is too large waits for a larger driver", func(t *testing.T) {
		l := newLocal(t, 1, false)
		l.publish("provision", "--enable-capacity", "--capacity-poll-interval=500ms")
		l.published("2Gi")
		l.pod("large", "3Gi", l.nodes[0])
		l.waits("large")
		l.must(l.plugin.Restart(func(c *csitest.Config) { c.Capacity = 4 << 30 }))
		l.lands("large", l.nodes[0])
		l.published("1Gi")
		l.calls("CreateVolume", 1)
	})
	t.Run("many pods at once fill all nodes", func(t *testing.T) {
		l := newLocal(t, 3, true)
		l.publish("all", quick...)
		l.kubelets()
		l.published("2Gi", "2Gi", "2Gi")
		l.statefulSet("web", l.class, 6)
		l.running("web", 6)
		l.published("0", "0", "0")
		l.scale("web", 7)
		l.waits("web-6")
		l.join()
		l.running("web", 7)
		l.agrees(7)
	})
}

// TestCapacityLease has publishing and provisioning in containers of their own: neither
// keeps the other from working, in one pod and in two.
func TestCapacityLease(t *testing.T) {
	l := newLocal(t, 1, false)
	replica := func(pod, subcommand string) *process {
		cmd := l.command(subcommand, election...)
		cmd.Env = []string{"POD_NAME=" + pod, "NAMESPACE=" + l.ns, "STORAGE_CONTROLLER_CAPACITY_OWNERREF_LEVEL=-1"}
		return l.start(cmd)
	}
	first := replica("one", "capacity")
	for _, p := range []*process{first, replica("one", "provision")} {
		p.says("Starting controller")
	}
	l.published("2Gi")
	for lease, want := range map[string]string{l.provisionerLease(): "one", l.provisionerLease() + "-capacity": "one"} {
		if holder := *l.somebodyLeads(lease).Spec.HolderIdentity; holder != want {
			t.Errorf("%q holds %s", holder, lease)
		}
	}
	second := replica("two", "capacity")
	second.says("Attempting to acquire leader lease")
	if strings.Contains(second.logged(), "Starting controller") {
		t.Error("two publish at the same time")
	}
	first.kill()
	second.says("Starting controller")
}
