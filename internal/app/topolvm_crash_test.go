// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/topolvm"
	"github.com/storage-controller/storage-controller/topolvm/topolvmtest"
)

// crash cuts a process off from the API server at one of its requests, as if it had exited there.
type crash struct {
	at      string // as [permissionOf] returns it
	after   bool   // the API server serves the request, but the process gets no response
	found   atomic.Bool
	reached atomic.Bool
}

func (c *crash) serve(w http.ResponseWriter, r *http.Request, pass http.Handler) {
	if permissionOf(r) == c.at && c.found.CompareAndSwap(false, true) {
		if c.after {
			pass.ServeHTTP(httptest.NewRecorder(), r)
		}
		c.reached.Store(true)
	}
	if c.reached.Load() {
		http.Error(w, "the process has exited", http.StatusServiceUnavailable)
		return
	}
	pass.ServeHTTP(w, r)
}

// crashed is what a story of [crashScenarios] is about.
type crashed struct {
	*pod
	a, b  *topolvmtest.Node
	class string
	claim *corev1.PersistentVolumeClaim
	pv    *corev1.PersistentVolume // nil before it is provisioned
}

// provision creates the claim on a.
func (s *crashed) provision() { s.claim = s.pod.claim("data", s.class, s.a.Name()) }

// provisioned does this, and binds the claim to its volume.
func (s *crashed) provisioned() {
	s.provision()
	s.pv = s.volumeOf(s.claim)
	s.bind(s.claim, s.pv)
}

// name returns the name of the LogicalVolume and of the PersistentVolume.
func (s *crashed) name() string { return "pvc-" + string(s.claim.UID) }

// crashScenarios kills the process before and after each write of the service.
func crashScenarios(t *testing.T) {
	for _, tt := range []struct {
		name, at string
		args     []string
		before   func(*crashed) // with a process of its own
		cause    func(*crashed) // of the write
		after    func(*crashed) // the next process has started
		volumes  int
		size     string
	}{
		{name: "create", at: "create", cause: (*crashed).provision, volumes: 1, size: "1Gi"},
		{name: "delete_after_a_failure", at: "delete",
			before: func(s *crashed) { s.a.Fail(13) }, cause: (*crashed).provision, volumes: 1, size: "1Gi"},
		// With the defaults, the next process repeats the recorded call, and accepts the other node.
		{name: "delete_of_a_mismatch", at: "delete", args: []string{"--provisioning-protection=on-retry", "--strict-topology"},
			before: func(s *crashed) {
				s.a.Stop()
				s.provision()
				kubetest.Eventually(s.t, "the LogicalVolume is created", func(ctx context.Context) error {
					_, err := s.lvs.Get(ctx, s.name(), metav1.GetOptions{})
					return err
				})
				s.selects(s.claim, s.b) // which this process ignores while it repeats its call
			},
			after: func(s *crashed) {
				kubetest.Eventually(s.t, "the LogicalVolume on a is being deleted", func(ctx context.Context) error {
					lv, err := s.lvs.Get(ctx, s.name(), metav1.GetOptions{})
					if err == nil && lv.DeletionTimestamp == nil {
						err = errors.New("it is not")
					}
					return err
				})
				s.a.Run()
			}, volumes: 1, size: "1Gi"},
		{name: "delete", at: "delete", before: (*crashed).provisioned,
			cause: func(s *crashed) { s.remove(s.claim, s.pv) }},
		{name: "patch_of_an_expansion", at: "patch", before: (*crashed).provisioned,
			cause: func(s *crashed) { s.expand(s.claim, "2Gi") }, volumes: 1, size: "2Gi"},
	} {
		for _, after := range []bool{false, true} {
			when := map[bool]string{false: "before", true: "after"}[after]
			t.Run("071_killed_"+when+"_"+tt.name, func(t *testing.T) {
				first := startPod(t, false, tt.args...)
				s := &crashed{pod: first, a: first.node("a"), b: first.node("b"), class: first.class()}
				if tt.before != nil {
					tt.before(s)
				}
				first.kill()
				c := &crash{at: tt.at + " logicalvolumes." + topolvm.Driver, after: after}
				second := startPodWith(t, kubetest.Proxy(t, kubetest.Get(t).Config(), c.serve), false, tt.args...)
				if tt.cause != nil {
					tt.cause(s)
				}
				kubetest.Eventually(t, "the process has exited at its request", func(context.Context) error {
					if !c.reached.Load() {
						return errors.New("no " + c.at)
					}
					return nil
				})
				second.kill()
				startPod(t, false, tt.args...)
				if tt.after != nil {
					tt.after(s)
				}
				kubetest.Eventually(t, "there is nothing but the volume of the claim", func(ctx context.Context) error {
					return s.consistent(ctx, tt.volumes, tt.size, s.a, s.b)
				})
			})
		}
	}
	t.Run("073_another_leader", func(t *testing.T) {
		const claims = 50
		first := startPod(t, false)
		node, class := first.node("a"), first.class()
		first.ready()
		node.Delay(10 * time.Millisecond)
		for i := range claims {
			first.claim(fmt.Sprint("data-", i), class, node.Name())
		}
		kubetest.Eventually(t, "the first volumes exist", func(context.Context) error {
			if n := len(node.Volumes()); n < 5 {
				return fmt.Errorf("there are %d", n)
			}
			return nil
		})
		node.Stop()
		if n := len(node.Volumes()); n == claims {
			t.Errorf("the leader has completed all %d creations", n)
		}
		second := startPod(t, false, "--leader-election-namespace="+first.ns, "--leader-election-retry-period=200ms")
		second.ready()
		first.kill()
		first.expire()
		node.Run()
		kubetest.Eventually(t, "all claims have a volume", func(ctx context.Context) error {
			return first.consistent(ctx, claims, "1Gi", node)
		})
	})
}

// expire makes the Leases of a process that was killed free, as time does.
func (p *pod) expire() {
	p.t.Helper()
	leases := p.client.CoordinationV1().Leases(p.ns)
	all, err := leases.List(p.t.Context(), metav1.ListOptions{})
	if err != nil || len(all.Items) == 0 {
		p.t.Fatalf("%d Leases, %v", len(all.Items), err)
	}
	for _, lease := range all.Items {
		patch := []byte(`{"spec":{"holderIdentity":""}}`)
		_, err := leases.Patch(p.t.Context(), lease.Name, types.MergePatchType, patch, metav1.PatchOptions{})
		if err != nil {
			p.t.Fatal(err)
		}
	}
}

// selects does what the scheduler does for another node.
func (p *pod) selects(claim *corev1.PersistentVolumeClaim, node *topolvmtest.Node) {
	p.t.Helper()
	p.patch(claim, `{"metadata":{"annotations":{"volume.kubernetes.io/selected-node":"`+node.Name()+`"}}}`)
}

// expand requests another size.
func (p *pod) expand(claim *corev1.PersistentVolumeClaim, size string) {
	p.t.Helper()
	p.patch(claim, `{"spec":{"resources":{"requests":{"storage":"`+size+`"}}}}`)
}

// patch patches a claim.
func (p *pod) patch(claim *corev1.PersistentVolumeClaim, patch string) {
	p.t.Helper()
	claims := p.client.CoreV1().PersistentVolumeClaims(claim.Namespace)
	_, err := claims.Patch(p.t.Context(), claim.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	if err != nil {
		p.t.Fatal(err)
	}
}

// remove deletes a claim with its volume.
func (p *pod) remove(claim *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
	p.t.Helper()
	err := p.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Delete(p.t.Context(), claim.Name, metav1.DeleteOptions{})
	if err != nil {
		p.t.Fatal(err)
	}
	p.release(pv)
}

// consistent returns an error unless the claims of the namespace have that number of PersistentVolumes of a size, and nodes have their
// LogicalVolumes and LVM volumes, and no others.
func (p *pod) consistent(ctx context.Context, volumes int, size string, nodes ...*topolvmtest.Node) error {
	pvs, errVolumes := p.client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
	lvs, errLogical := p.lvs.List(ctx, metav1.ListOptions{})
	if err := errors.Join(errVolumes, errLogical); err != nil {
		return err
	}
	of, real := map[string]string{}, 0 // volume handles by name
	for _, pv := range pvs.Items {
		if ref := pv.Spec.ClaimRef; ref == nil || ref.Namespace != p.ns {
			continue
		}
		if have := pv.Spec.Capacity.Storage().String(); have != size {
			return fmt.Errorf("PersistentVolume %s has %s", pv.Name, have)
		}
		of[pv.Name] = pv.Spec.CSI.VolumeHandle
	}
	named := 0
	for _, lv := range lvs.Items {
		if !slices.ContainsFunc(nodes, func(n *topolvmtest.Node) bool { return n.Name() == lv.Spec.NodeName }) {
			continue
		}
		named++
		if of[lv.Name] != lv.Status.VolumeID || lv.Status.CurrentSize.String() != size || lv.DeletionTimestamp != nil {
			return fmt.Errorf("LogicalVolume %s: %+v, the PersistentVolume has %q", lv.Name, lv.Status, of[lv.Name])
		}
	}
	for _, n := range nodes {
		real += len(n.Volumes())
	}
	if len(of) != volumes || named != volumes || real != volumes {
		return fmt.Errorf("%d PersistentVolumes, %d LogicalVolumes and %d LVM volumes, want %d", len(of), named, real, volumes)
	}
	return nil
}

// unchanged fails the test unless a claim, its volume, and its LogicalVolume are as a provisioner leaves them.
func (p *pod) unchanged(claim *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
	p.t.Helper()
	claim, errClaim := p.client.CoreV1().PersistentVolumeClaims(p.ns).Get(p.t.Context(), claim.Name, metav1.GetOptions{})
	pv, errVolume := p.client.CoreV1().PersistentVolumes().Get(p.t.Context(), pv.Name, metav1.GetOptions{})
	if err := errors.Join(errClaim, errVolume); err != nil {
		p.t.Fatal(err)
	}
	lv, err := p.lvs.Get(p.t.Context(), pv.Name, metav1.GetOptions{})
	if err != nil {
		p.t.Fatal(err)
	}
	if claim.DeletionTimestamp != nil || pv.DeletionTimestamp != nil || lv.DeletionTimestamp != nil || lv.IsIgnored(topolvm.Driver) ||
		!slices.Contains(lv.Finalizers, topolvm.Driver+"/logicalvolume") {
		p.t.Errorf("not unchanged: claim %+v, PersistentVolume %+v, LogicalVolume %+v", claim.ObjectMeta, pv.ObjectMeta, lv.ObjectMeta)
	}
}

// absent returns an error unless err says that an object does not exist.
func absent(what string, err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return fmt.Errorf("%s: %w", what, errors.Join(err, errors.New("it exists, or may exist")))
}
