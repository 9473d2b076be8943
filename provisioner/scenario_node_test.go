// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

const getCapacity = "GetCapacity"

// nodeCapabilities is a driver of volumes that are on the disks of its node.
var nodeCapabilities = []csi.ControllerServiceCapability_RPC_Type{
	csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_GET_CAPACITY,
}

func nodePlugin(node string, capacity int64) csitest.Config {
	return csitest.Config{NodeID: node, Segments: []map[string]string{{"node": node}}, Capacity: capacity, Controller: nodeCapabilities}
}

// nodeScenario is the instances of the nodes n1 and n2, with room for that many bytes.
// They share the class and the claims.
func nodeScenario(t *testing.T, room1, room2 int64, change func(*Config)) (n1, n2 *fixture) {
	t.Helper()
	n1 = scenario(t, nodePlugin("n1", room1), func(c *Config) {
		c.NodeDeployment, c.NodeName = true, "n1"
		c.NodeDeploymentBaseDelay, c.NodeDeploymentMaxDelay = 100*time.Millisecond, 300*time.Millisecond
		if change != nil {
			change(c)
		}
	})
	other := *n1
	n2 = &other
	n2.Fixture = n1.In(t)
	plugin := nodePlugin("n2", room2)
	plugin.Name = n1.Driver
	n2.Plugin, n2.events, n2.cfg.NodeName = csitest.Run(t, plugin), record.NewFakeRecorder(10000), "n2"
	n2.start()
	return n1, n2
}

func selectNode(node string) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) { c.Annotations[storagehelpers.AnnSelectedNode] = node }
}

// isOn checks that a volume is accessible from one node alone.
func (f *fixture) isOn(pv *corev1.PersistentVolume, node string) {
	f.Helper()
	terms := pv.Spec.NodeAffinity.Required.NodeSelectorTerms
	if len(terms) != 1 || len(terms[0].MatchExpressions) != 1 ||
		fmt.Sprint(terms[0].MatchExpressions[0].Values) != fmt.Sprint([]string{node}) {
		f.Errorf("the volume is accessible from %v, want %s", terms, node)
	}
}

// nodesOf watches a claim. What it returns waits until the nodes that were selected for
// it from then on are those, one for each change and "" for none.
func (f *fixture) nodesOf(claim *corev1.PersistentVolumeClaim) func(want ...string) {
	f.Helper()
	w, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Watch(f.Context(), metav1.ListOptions{
		FieldSelector: "metadata.name=" + claim.Name, ResourceVersion: claim.ResourceVersion,
	})
	f.Must(err)
	f.Cleanup(w.Stop)
	last := selectedNode(claim)
	var nodes []string
	return func(want ...string) {
		f.Helper()
		limit := time.After(time.Minute)
		for !slices.Equal(nodes, want) {
			select {
			case e := <-w.ResultChan():
				if c, ok := e.Object.(*corev1.PersistentVolumeClaim); ok && selectedNode(c) != last {
					last = selectedNode(c)
					nodes = append(nodes, last)
				}
			case <-limit:
				f.Fatalf("the selected nodes were %q, want %q", nodes, want)
			}
		}
	}
}

// counts is the metrics of an instance, without those of its claims.
func (f *fixture) counts() map[string]string {
	f.Helper()
	families, err := f.c.deps.Registry.(prometheus.Gatherer).Gather()
	f.Must(err)
	out := map[string]string{}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			if labels := fmt.Sprint(m.GetLabel()); !strings.Contains(labels, `"claims"`) {
				out[family.GetName()+labels] = fmt.Sprint(m.GetCounter().GetValue(), m.GetGauge().GetValue(),
					m.GetHistogram().GetSampleCount())
			}
		}
	}
	return out
}

// settle waits until all instances have looked at a claim made now, and so at
// everything before it.
func settle(nodes ...*fixture) {
	nodes[0].Helper()
	last := nodes[0].claim(func(c *corev1.PersistentVolumeClaim) {
		c.Name = fmt.Sprintf("zz-last-%d", time.Now().UnixNano())
		c.Annotations[corev1.BetaStorageClassAnnotation] = "none-of-this-name"
	})
	for _, n := range nodes {
		kubetest.Eventually(n.T, "the queue of "+n.cfg.NodeName+" has come to a later claim", func(context.Context) error {
			isLast := func(f workloop.Failing) bool { return f.Key == kube.Key(last) }
			if l := n.c.claimLoop.Load(); l == nil || !slices.ContainsFunc(l.queue.Status().Failing, isLast) {
				return errors.New("it has not")
			}
			return nil
		})
	}
}

func (f *fixture) noEvents() {
	f.Helper()
	if n := len(f.events.Events); n > 0 {
		f.Errorf("%d events: %s", n, <-f.events.Events)
	}
}

func provisionerScenarioNode(t *testing.T) {
	t.Run("116_late_binding", func(t *testing.T) {
		n1, n2 := nodeScenario(t, 0, 0, nil)
		n1.makeClass(func(c *storagev1.StorageClass) { late(c) })
		claim := n1.claim(selectNode("n2"))
		n2.isOn(n2.saved(claim), "n2")
		settle(n1)
		n1.Calls(create, 0)
		n1.noEvents()
		n2.Calls(create, 1)
		n2.Calls(getCapacity, 0) // the scheduler has chosen
	})
	t.Run("117_immediate_binding", func(t *testing.T) {
		// The first delay is below the base: the longest one would not end.
		n1, n2 := nodeScenario(t, 0, 0, func(c *Config) { c.NodeDeploymentBaseDelay, c.NodeDeploymentMaxDelay = 2*time.Second, time.Hour })
		n1.makeClass(nil)
		claim := n1.claim(nil)
		nodes := n1.nodesOf(claim)
		pv := n1.saved(claim)
		settle(n1, n2)
		owner, other := n1, n2
		if n1.Plugin.Count(create) == 0 {
			owner, other = n2, n1
		}
		owner.isOn(pv, owner.cfg.NodeName)
		owner.Calls(create, 1)
		other.Calls(create, 0)
		nodes(owner.cfg.NodeName)
	})
	t.Run("117_restart_after_owning", func(t *testing.T) {
		n1, n2 := nodeScenario(t, 0, 0, nil)
		n1.makeClass(nil)
		n1.Crash()
		claim := n1.claim(selectNode("n1")) // all that a process that owned it and died has left
		settle(n2)
		n2.Calls(create, 0)
		n1.start()
		n1.isOn(n1.saved(claim), "n1")
		n1.Calls(create, 1)
	})
	t.Run("117_owning_is_refused", func(t *testing.T) {
		n1, n2 := nodeScenario(t, 0, 0, nil)
		n2.Crash()
		refused := atomic.Bool{}
		refused.Store(true)
		n1.through(n1.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if refused.Load() && r.Method == http.MethodPatch && strings.Contains(r.URL.Path, "/persistentvolumeclaims/") {
				http.Error(w, "no selected nodes here", http.StatusUnprocessableEntity) // as a policy answers
				return
			}
			pass.ServeHTTP(w, r)
		})
		n1.makeClass(nil)
		claim := n1.claim(nil)
		n1.event("ProvisioningFailed", "setting the selected node of claim "+n1.Namespace+"/data")
		n1.Calls(create, 0)
		refused.Store(false)
		n1.saved(claim)
	})
	t.Run("recorded_by_a_central_provisioner", func(t *testing.T) {
		n1, n2 := nodeScenario(t, 0, 0, nil)
		n1.makeClass(nil)
		settle(n1, n2) // the event of the class would wake the claim
		n1.claim(func(c *corev1.PersistentVolumeClaim) {
			c.Finalizers = []string{kube.ProvisioningFinalizer}
			c.Annotations[kube.AnnProvisioningRequest] = fmt.Sprintf(`{"driver":%q,"request":"x"}`, n1.Driver)
		})
		for _, n := range []*fixture{n1, n2} {
			n.event("ProvisioningFailed", "Run the provisioner without --node-deployment", "remove finalizer "+kube.ProvisioningFinalizer)
		}
		settle(n1, n2)
		for _, n := range []*fixture{n1, n2} { // there may be many nodes: each reports it once
			n.noEvents()
			n.Calls(create, 0)
		}
		n1.deleteClaim()
		for _, n := range []*fixture{n1, n2} { // and once more for the user who looks why the claim stays
			n.event("ProvisioningFailed", "Run the provisioner without --node-deployment")
		}
	})
	t.Run("record_removed_by_a_user", func(t *testing.T) {
		n1, n2 := nodeScenario(t, 0, 0, nil)
		n1.makeClass(nil)
		claim := n1.claim(func(c *corev1.PersistentVolumeClaim) {
			c.Finalizers = []string{kube.ProvisioningFinalizer}
			c.Annotations[kube.AnnProvisioningRequest] = fmt.Sprintf(`{"driver":%q,"request":"x"}`, n1.Driver)
		})
		for _, n := range []*fixture{n1, n2} {
			n.event("ProvisioningFailed", "Run the provisioner without --node-deployment")
		}
		_, err := n1.Client.CoreV1().PersistentVolumeClaims(n1.Namespace).Patch(t.Context(), claim.Name, types.MergePatchType,
			fmt.Appendf(nil, `{"metadata":{"finalizers":null,"annotations":{%q:null}}}`, kube.AnnProvisioningRequest), metav1.PatchOptions{})
		n1.Must(err)
		n1.saved(claim)
	})
	t.Run("118_no_room", func(t *testing.T) {
		n1, n2 := nodeScenario(t, 1<<20, 0, nil)
		n2.Plugin.Always(getCapacity, csitest.Alter(func(r *csi.GetCapacityResponse) { r.AvailableCapacity = 1<<30 - 1 }))
		n1.makeClass(parameters(map[string]string{"a": "b"}))
		claim := n1.claim(nil)
		nodes := n1.nodesOf(claim)
		n1.Wait(getCapacity, 3)
		n2.Wait(getCapacity, 3)
		n1.noEvents()
		n2.noEvents()
		n2.Calls(create, 0)
		n2.Plugin.Always(getCapacity, nil) // room enough, as the next look shows
		n2.isOn(n2.saved(claim), "n2")
		n1.Calls(create, 0)
		nodes("n2")
		r := n1.Plugin.Calls(getCapacity)[0].Request.(*csi.GetCapacityRequest)
		if r.AccessibleTopology.GetSegments()["node"] != "n1" || !maps.Equal(r.Parameters, map[string]string{"a": "b"}) ||
			len(r.VolumeCapabilities) != 1 {
			t.Errorf("asked for %v", r)
		}
	})
	t.Run("118_room_not_known", func(t *testing.T) {
		n1, n2 := nodeScenario(t, 0, 1, nil)
		n1.Plugin.Always(getCapacity, csitest.Fail(codes.Internal, "broken"))
		n1.Plugin.Next(create, csitest.Fail(codes.Internal, "broken too"))
		n1.makeClass(nil)
		claim := n1.claim(nil)
		n1.event("ProvisioningFailed", "broken too") // so the user sees why
		n1.isOn(n1.saved(claim), "n1")
		n2.Calls(create, 0)
	})
	t.Run("119_full", func(t *testing.T) {
		// n1 waits for 10 s to 20 s, n2 less than 10 s.
		n1, n2 := nodeScenario(t, 0, 0, func(c *Config) { c.NodeDeploymentBaseDelay, c.NodeDeploymentMaxDelay = 10*time.Second, time.Hour })
		n1.Plugin.Always(create, csitest.Fail(codes.ResourceExhausted, "full")) // though GetCapacity says otherwise
		n1.makeClass(nil)
		claim := n1.claim(selectNode("n1"))
		nodes := n1.nodesOf(claim)
		n1.event("ProvisioningFailed", "code = ResourceExhausted desc = full")
		n2.isOn(n2.saved(claim), "n2")
		n2.Calls(create, 1)
		nodes("", "n2") // n1 lets the others go first
	})
	t.Run("119_full_everywhere", func(t *testing.T) {
		n1, n2 := nodeScenario(t, 0, 0, nil)
		for _, n := range []*fixture{n1, n2} {
			n.Plugin.Always(create, csitest.Fail(codes.ResourceExhausted, "full"))
		}
		n1.makeClass(nil)
		claim := n1.claim(nil)
		for _, n := range []*fixture{n1, n2} { // the instance that failed competes again
			n.Wait(create, 2)
		}
		n2.Plugin.Always(create, nil)
		n2.isOn(n2.saved(claim), "n2")
	})
	t.Run("120_deletion", func(t *testing.T) {
		n1, n2 := nodeScenario(t, 0, 0, nil)
		n1.makeClass(func(c *storagev1.StorageClass) { late(c) })
		other := n1.saved(n1.claim(func(c *corev1.PersistentVolumeClaim) { c.Name = "other"; selectNode("n1")(c) }))
		pv := n2.saved(n2.claim(selectNode("n2")))
		if pv.Spec.CSI.VolumeHandle != other.Spec.CSI.VolumeHandle { // each driver numbers its own volumes
			t.Fatalf("handles %q and %q", pv.Spec.CSI.VolumeHandle, other.Spec.CSI.VolumeHandle)
		}
		kubetest.Eventually(t, "n1 knows the volume", func(context.Context) error {
			if _, ok := n1.c.volumes.Get(pv.Name); !ok {
				return errors.New("it does not")
			}
			return nil
		})
		n1.event("ProvisioningSucceeded")
		before := n1.counts()
		n2.deleteClaim()
		n2.phase(pv, corev1.VolumeReleased)
		n2.gone(pv)
		kubetest.Eventually(t, "n1 has seen that the PersistentVolume was deleted", func(context.Context) error {
			if _, ok := n1.c.volumes.Get(pv.Name); ok {
				return errors.New("it does not")
			}
			return nil
		})
		n1.Calls(remove, 0)
		n2.Calls(remove, 1)
		if diff := cmp.Diff(before, n1.counts()); diff != "" {
			t.Error(diff)
		}
		n1.noEvents()
	})
	t.Run("121_without_immediate_binding", func(t *testing.T) {
		n1, n2 := nodeScenario(t, 0, 0, func(c *Config) {
			c.NodeDeploymentImmediateBinding, c.NodeDeploymentBaseDelay = false,
				time.Nanosecond
		})
		n1.makeClass(nil)
		claim := n1.claim(nil)
		nodes := n1.nodesOf(claim)
		settle(n1, n2)
		for _, n := range []*fixture{n1, n2} {
			n.Calls(create, 0)
			if r := n.c.claimLoop.Load().ownership.raceOf(keyOf(claim)); !r.due.IsZero() {
				t.Errorf("%s competes for the claim", n.cfg.NodeName)
			}
		}
		n1.patchClaim(`{"metadata":{"annotations":{"` + storagehelpers.AnnSelectedNode + `":"n1"}}}`)
		n1.isOn(n1.saved(claim), "n1")
		n2.Calls(create, 0)
		nodes("n1")
	})
}
