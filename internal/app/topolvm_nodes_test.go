// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
	"github.com/storage-controller/storage-controller/topolvm"
	"github.com/storage-controller/storage-controller/topolvm/topolvmtest"
)

// lostNodes permits the cleanup after the nodes of earlier scenarios, which are lost, too.
const lostNodes = "--node-cleanup-min-nodes=99"

// nodeScenarios are about nodes that go and return, and about many claims.
func nodeScenarios(t *testing.T) {
	t.Run("032_a_node_deleted_during_a_creation", func(t *testing.T) {
		p := startPod(t, false, lostNodes)
		a, b, class := p.node("a"), p.node("b"), p.class()
		p.ready()
		a.Stop()
		claim := p.claim("data", class, a.Name())
		kubetest.Eventually(t, "the LogicalVolume is created", func(ctx context.Context) error {
			_, err := p.lvs.Get(ctx, "pvc-"+string(claim.UID), metav1.GetOptions{})
			return err
		})
		if err := p.client.CoreV1().Nodes().Delete(t.Context(), a.Name(), metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		kubetest.Eventually(t, "LogicalVolume and Node are deleted, and the claim has no node", func(ctx context.Context) error {
			_, errNode := p.client.CoreV1().Nodes().Get(ctx, a.Name(), metav1.GetOptions{})
			_, errVolume := p.lvs.Get(ctx, "pvc-"+string(claim.UID), metav1.GetOptions{})
			if err := errors.Join(absent("Node", errNode), absent("LogicalVolume", errVolume)); err != nil {
				return err
			}
			claim, err := p.client.CoreV1().PersistentVolumeClaims(p.ns).Get(ctx, claim.Name, metav1.GetOptions{})
			if err == nil && claim.Annotations["volume.kubernetes.io/selected-node"] != "" {
				err = errors.New("the claim has its node")
			}
			return err
		})
		p.selects(claim, b)
		kubetest.Eventually(t, "the volume is on the other node", func(ctx context.Context) error {
			return p.consistent(ctx, 1, "1Gi", b)
		})
	})
	t.Run("076_a_deleted_node_without_cleanup", func(t *testing.T) {
		p := startPod(t, false, lostNodes, "--skip-node-finalize")
		node, class := p.node("a"), p.class()
		p.ready()
		claim := p.claim("data", class, node.Name())
		pv := p.volumeOf(claim)
		p.bind(claim, pv)
		if err := p.client.CoreV1().Nodes().Delete(t.Context(), node.Name(), metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		kubetest.Eventually(t, "the Node is deleted", func(ctx context.Context) error {
			_, err := p.client.CoreV1().Nodes().Get(ctx, node.Name(), metav1.GetOptions{})
			return absent("Node", err)
		})
		p.unchanged(claim, pv)
	})
	t.Run("078_a_node_returns", func(t *testing.T) {
		p := startPod(t, false, lostNodes)
		node, class := p.node("a"), p.class()
		p.ready()
		claim := p.claim("data", class, node.Name())
		pv := p.volumeOf(claim)
		p.bind(claim, pv)
		p.loses(node)
		node.Create(t)
		kubetest.Eventually(t, "the node has returned", func(ctx context.Context) error {
			records, err := p.records(ctx)
			if err == nil && records.Data[node.Name()] != "" {
				err = errors.New("it has a record")
			}
			return err
		})
		p.unchanged(claim, pv)
	})
	t.Run("077_a_node_without_finalizer", func(t *testing.T) {
		p := startPod(t, false, lostNodes)
		node, class := p.node("a"), p.class()
		p.node("keep")
		p.ready()
		claim := p.claim("data", class, node.Name())
		pv := p.volumeOf(claim)
		p.bind(claim, pv)
		node.Stop()
		p.loses(node)
		// As the end of the grace does, which is a minute at least.
		approval := []byte(`{"metadata":{"annotations":{"storage-controller.io/approve":"` + node.Name() + `"}}}`)
		_, err := p.client.CoreV1().ConfigMaps(p.ns).Patch(t.Context(), nodecleanup.ConfigMapName(topolvm.Driver), types.MergePatchType,
			approval, metav1.PatchOptions{})
		if err != nil {
			t.Fatal(err)
		}
		kubetest.Eventually(t, "the claim is being deleted, and the LogicalVolume is deleted", func(ctx context.Context) error {
			claim, err := p.client.CoreV1().PersistentVolumeClaims(p.ns).Get(ctx, claim.Name, metav1.GetOptions{})
			if err == nil && claim.DeletionTimestamp == nil {
				return errors.New("the claim stays")
			}
			_, err = p.lvs.Get(ctx, pv.Name, metav1.GetOptions{})
			return absent("LogicalVolume", err)
		})
		controller, _ := p.controller()
		if _, err := controller.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: pv.Spec.CSI.VolumeHandle}); err != nil {
			t.Error(err)
		}
	})
	t.Run("051_052_capacity", func(t *testing.T) {
		const nodes = 50
		r := &requests{received: map[string]int{}}
		p := startPodWith(t, kubetest.Proxy(t, kubetest.Get(t).Config(), r.serve), false, "--capacity-poll-interval=1h",
			"--capacity-removal-grace=0s")
		class := p.class()
		p.ready()
		// published waits until the class has so many objects, of which small have less than 100 GiB.
		published := func(want, small int) {
			t.Helper()
			kubetest.Eventually(t, fmt.Sprintf("%d objects exist, %d of them with less", want, small), func(ctx context.Context) error {
				all, err := p.client.StorageV1().CSIStorageCapacities(p.ns).List(ctx, metav1.ListOptions{})
				if err != nil {
					return err
				}
				of, less := map[string]bool{}, 0
				for _, c := range all.Items {
					if c.StorageClassName == class {
						of[c.NodeTopology.MatchLabels["topology."+topolvm.Driver+"/node"]] = true
						less += map[bool]int{true: 1}[c.Capacity.CmpInt64(100<<30) < 0]
					}
				}
				if len(of) != want || less != small {
					return fmt.Errorf("there are %d, %d with less", len(of), less)
				}
				return nil
			})
		}
		var all []*topolvmtest.Node
		for i := range nodes {
			all = append(all, p.node(fmt.Sprint(i)))
		}
		published(nodes, 0)
		for i := range 3 { // other objects are not written
			before := r.writes("csistoragecapacities.storage.k8s.io")
			all[i].Resize("thin", 7<<30)
			published(nodes, i+1)
			if n := r.writes("csistoragecapacities.storage.k8s.io") - before; n != 1 {
				t.Errorf("%d writes after a change of one node", n)
			}
		}
		for _, node := range all {
			node.Delete(t)
		}
		published(0, 0)
		for _, node := range all {
			node.Create(t)
		}
		published(nodes, 3)
	})
	t.Run("070_a_node_not_ready", func(t *testing.T) {
		const waiting, others = 300, 30
		// A call that waits, and a back-off, last longer than the test.
		p := startPod(t, false, "--provisioner-timeout=1h", "--provisioner-retry-interval-start=1h", "--provisioner-retry-interval-max=1h")
		a, b, class := p.node("a"), p.node("b"), p.class()
		p.ready()
		a.Resize("thin", 1<<40)
		a.Stop()
		a.SetReady(t, false)
		for i := range waiting {
			p.claim(fmt.Sprint("waits-", i), class, a.Name())
		}
		for i := range others {
			p.claim(fmt.Sprint("data-", i), class, b.Name())
		}
		kubetest.Eventually(t, "the claims of the other node have a volume, and no others", func(ctx context.Context) error {
			return p.consistent(ctx, others, "1Gi", b)
		})
		kubetest.Eventually(t, "all claims have a LogicalVolume", func(ctx context.Context) error {
			lvs, err := p.lvs.List(ctx, metav1.ListOptions{})
			on := func(lv topolvm.LogicalVolume) bool { return lv.Spec.NodeName != a.Name() }
			if n := len(slices.DeleteFunc(lvs.Items, on)); err == nil && n != waiting {
				err = fmt.Errorf("%d have", n)
			}
			return err
		})
		a.Run()
		a.SetReady(t, true)
		kubetest.Eventually(t, "all claims have a volume", func(ctx context.Context) error {
			return p.consistent(ctx, waiting+others, "1Gi", a, b)
		})
	})
	t.Run("069_many_claims", func(t *testing.T) {
		const claims, nodes = 200, 10
		r := &requests{received: map[string]int{}}
		// A call that ends before the volumes of its node exist would be repeated.
		p := startPodWith(t, kubetest.Proxy(t, kubetest.Get(t).Config(), r.serve), false, "--timeout=5m")
		class := p.class()
		var all []*topolvmtest.Node
		for i := range nodes {
			node := p.node(fmt.Sprint(i))
			node.Delay(100 * time.Millisecond)
			all = append(all, node)
		}
		p.ready()
		began := time.Now()
		var created []*corev1.PersistentVolumeClaim
		for i := range claims {
			created = append(created, p.claim(fmt.Sprint("data-", i), class, all[i%nodes].Name()))
		}
		kubetest.Eventually(t, "all claims have a volume", func(ctx context.Context) error {
			return p.consistent(ctx, claims, "1Gi", all...)
		})
		t.Logf("%d volumes created in %v", claims, time.Since(began))
		began = time.Now()
		for _, claim := range created {
			p.remove(claim, p.volumeOf(claim))
		}
		kubetest.Eventually(t, "all volumes are deleted", func(ctx context.Context) error { return p.consistent(ctx, 0, "", all...) })
		t.Logf("%d volumes deleted in %v", claims, time.Since(began))
		r.once(t, claims, "create logicalvolumes."+topolvm.Driver, "create persistentvolumes.", "delete logicalvolumes."+topolvm.Driver,
			"delete persistentvolumes.")
	})
}

// records reads the records of lost nodes.
func (p *pod) records(ctx context.Context) (*corev1.ConfigMap, error) {
	return p.client.CoreV1().ConfigMaps(p.ns).Get(ctx, nodecleanup.ConfigMapName(topolvm.Driver), metav1.GetOptions{})
}

// loses deletes a node without its finalizer, and waits until it has a record.
func (p *pod) loses(node *topolvmtest.Node) {
	p.t.Helper()
	patch := []byte(`{"metadata":{"finalizers":null}}`)
	_, err := p.client.CoreV1().Nodes().Patch(p.t.Context(), node.Name(), types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		p.t.Fatal(err)
	}
	node.Delete(p.t)
	kubetest.Eventually(p.t, "the node is lost", func(ctx context.Context) error {
		records, err := p.records(ctx)
		if err == nil && records.Data[node.Name()] == "" {
			err = errors.New("it has no record")
		}
		return err
	})
}

// requests counts the requests of a process.
type requests struct {
	mu        sync.Mutex
	received  map[string]int // as [permissionOf] returns them
	conflicts []string
}

func (r *requests) serve(w http.ResponseWriter, request *http.Request, pass http.Handler) {
	r.mu.Lock()
	// Before the API server has it: a test may see the change before this proxy has the response.
	r.received[permissionOf(request)]++
	r.mu.Unlock()
	status := &statusWriter{ResponseWriter: w}
	pass.ServeHTTP(status, request)
	r.mu.Lock()
	defer r.mu.Unlock()
	if status.code == http.StatusConflict {
		r.conflicts = append(r.conflicts, request.Method+" "+request.URL.Path)
	}
}

// writes returns the number of writes to objects of a resource, with its group.
func (r *requests) writes(resource string) (sum int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, verb := range []string{"create", "update", "patch", "delete"} {
		sum += r.received[verb+" "+resource]
	}
	return sum
}

// once fails the test unless the process has sent each write as often as there are volumes, and no write that had a conflict.
func (r *requests) once(t *testing.T, volumes int, writes ...string) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, write := range writes {
		if n := r.received[write]; n != volumes {
			t.Errorf("%d requests to %s, want %d", n, write, volumes)
		}
	}
	if len(r.conflicts) > 0 {
		t.Errorf("conflicts: %q", r.conflicts)
	}
}

// statusWriter keeps the status of a response.
type statusWriter struct {
	http.ResponseWriter
	code int
}

// WriteHeader sends the status.
func (w *statusWriter) WriteHeader(code int) {
	w.code = code
	w.ResponseWriter.WriteHeader(code)
}

// Unwrap lets the proxy flush a watch.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
