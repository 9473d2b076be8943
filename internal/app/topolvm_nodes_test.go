// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

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
		recorded := func(ctx context.Context) (bool, error) {
			records, err := p.client.CoreV1().ConfigMaps(p.ns).Get(ctx, nodecleanup.ConfigMapName(topolvm.Driver), metav1.GetOptions{})
			if err != nil {
				return false, err
			}
			return records.Data[node.Name()] != "", nil
		}
		patch := []byte(`{"metadata":{"finalizers":null}}`)
		_, err := p.client.CoreV1().Nodes().Patch(t.Context(), node.Name(), types.MergePatchType, patch, metav1.PatchOptions{})
		if err != nil {
			t.Fatal(err)
		}
		node.Delete(t)
		kubetest.Eventually(t, "the node is lost", func(ctx context.Context) error {
			lost, err := recorded(ctx)
			if err == nil && !lost {
				err = errors.New("it has no record")
			}
			return err
		})
		node.Create(t)
		kubetest.Eventually(t, "the node has returned", func(ctx context.Context) error {
			lost, err := recorded(ctx)
			if lost {
				err = errors.New("it has a record")
			}
			return err
		})
		p.unchanged(claim, pv)
	})
	t.Run("069_many_claims", func(t *testing.T) {
		const claims, nodes = 200, 10
		r := &requests{answered: map[string]int{}}
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

// requests counts the requests of a process.
type requests struct {
	mu        sync.Mutex
	answered  map[string]int // as [permissionOf] returns them
	conflicts []string
}

func (r *requests) serve(w http.ResponseWriter, request *http.Request, pass http.Handler) {
	status := &statusWriter{ResponseWriter: w}
	pass.ServeHTTP(status, request)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answered[permissionOf(request)]++
	if status.code == http.StatusConflict {
		r.conflicts = append(r.conflicts, request.Method+" "+request.URL.Path)
	}
}

// once fails the test unless the process has sent each write as often as there are volumes, and no write that had a conflict.
func (r *requests) once(t *testing.T, volumes int, writes ...string) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, write := range writes {
		if n := r.answered[write]; n != volumes {
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
