// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/util/retry"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

func patient(f *fixture) { f.cfg.NodeFinalizerTimeout = 5 * time.Minute }

// impossible creates a released volume whose claimRef cannot be the name of a claim.
func (f *fixture) impossible(name, node, namespace string) {
	f.Helper()
	f.released(name, node, func(pv *corev1.PersistentVolume) { pv.Spec.ClaimRef.Namespace = namespace })
}

// TestOneRefusalOfATerminatingNode: a failure for one claim of a terminating node does not block the others.
func TestOneRefusalOfATerminatingNode(t *testing.T) {
	t.Parallel()
	begin := func(t *testing.T, change func(f *fixture)) *fixture {
		f := scenario(t, func(f *fixture) { patient(f); change(f) })
		f.node("n", f.cfg.NodeFinalizer)
		for _, c := range []string{"a", "b", "c"} {
			f.bound(c, "n")
		}
		f.start()
		f.observed("c")
		return f
	}
	t.Run("deletion_is_denied", func(t *testing.T) {
		var refused *atomic.Int32
		f := begin(t, func(f *fixture) { refused = f.denied(http.MethodDelete, "/"+claimA) })
		f.deleteNode("n")
		f.claimDeleted("b")
		f.claimDeleted("c")
		f.event("PersistentVolume", f.name("pv-a"), "NodeCleanupBlocked", denial)
		f.atLeast(refused, 1)
		f.nodeDeleted("n") // the refusal keeps the claim, not the Node
	})
	t.Run("the_driver_is_called_for_it", func(t *testing.T) {
		f := begin(t, func(f *fixture) {})
		done, ok := f.locks.TryExclusive(f.name("pv-a"))
		if !ok {
			t.Fatal("the volume is locked")
		}
		kept := f.getClaim("a")
		f.deleteNode("n")
		f.claimDeleted("b")
		f.claimDeleted("c")
		f.untouched(kept)
		done()
		f.claimDeleted("a")
		f.nodeDeleted("n")
	})
	t.Run("its_claim_cannot_exist", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { parity(f); patient(f) })
		resources := f.installLogicalVolumes()
		f.node("n", f.cfg.NodeFinalizer)
		f.impossible("a", "n", "")
		resources.create("lv", "n", "")
		f.start()
		f.deleteNode("n")
		f.nodeDeleted("n")
		resources.deleted("lv")
	})
}

// TestOneRefusalOfALostNode: likewise for a node that does not exist.
func TestOneRefusalOfALostNode(t *testing.T) {
	t.Parallel()
	t.Run("custom_resource", func(t *testing.T) {
		f := scenario(t, parity)
		resources := f.installLogicalVolumes()
		refused := f.denied(http.MethodPatch, "/logicalvolumes/la")
		for _, name := range []string{"la", "lb", "lc"} {
			resources.create(name, "n", "")
		}
		f.start()
		resources.deleted("lb", "lc")
		f.atLeast(refused, 2)
		resources.kept("la")
	})
	t.Run("claims_that_cannot_exist", func(t *testing.T) {
		f := scenario(t, nil)
		for i, ns := range []string{"", "x/y", ".."} {
			f.impossible(fmt.Sprint("bad-", i), "n", ns)
		}
		f.bound("a", "n")
		f.start()
		f.claimDeleted("a")
		for i := range 3 {
			f.event("PersistentVolume", f.name(fmt.Sprint("pv-bad-", i)), "NodeCleanupSkipped", "NotBound")
		}
	})
	t.Run("namespace_that_cannot_be_read", func(t *testing.T) {
		f := scenario(t, nil)
		ns := kubetest.Namespace(t, f.cp)
		refused := f.denied(http.MethodGet, "/namespaces/"+ns)
		pv, pvc := f.boundIn(ns, "a", []string{"n"}, nil, nil)
		f.bound("b", "n")
		f.start()
		f.claimDeleted("b")
		f.atLeast(refused, 1)
		f.stays(shortGrace, pv, pvc)
	})
}

// TestDeletionOfAVolumeIsRefused: the event before the removal is sent once, whatever is retried. An attempt that ends before the
// deletion is sent, here with a refused read, does not count.
func TestDeletionOfAVolumeIsRefused(t *testing.T) {
	f := scenario(t, volumes)
	refused, unread := new(atomic.Int32), new(atomic.Int32)
	f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		ofVolume := strings.HasSuffix(r.URL.Path, "/persistentvolumes/"+f.name("pv-a"))
		switch {
		case ofVolume && r.Method == http.MethodDelete:
			refused.Add(1)
			answer(w, http.StatusForbidden, "Forbidden", denial)
		case ofVolume && r.Method == http.MethodGet && unread.CompareAndSwap(0, 1):
			answer(w, http.StatusInternalServerError, "InternalError", "busy")
		default:
			pass.ServeHTTP(w, r)
		}
	})
	pv := f.released("a", "n", nil)
	f.start()
	f.atLeast(refused, 3)
	f.event("PersistentVolume", pv.Name, "NodeVolumeForceRemoved", "")
	f.event("PersistentVolume", pv.Name, "NodeCleanupBlocked", denial)
	if n := f.times("PersistentVolume", pv.Name, "NodeVolumeForceRemoved"); n != 1 {
		t.Errorf("%d events", n)
	}
	f.metric(1, blockedGauge, "forbidden")
	if unread.Load() == 0 {
		t.Error("the volume was not read")
	}
}

// TestFailedVolume: a volume in phase Failed needs an administrator, and does not count for the breaker.
func TestFailedVolume(t *testing.T) {
	f := scenario(t, func(f *fixture) { volumes(f); f.cfg.NodeCleanupWindow = shortGrace })
	ten(f)
	pv := f.released("f", "never", nil)
	f.phase(pv, corev1.VolumeFailed)
	f.start()
	f.event("PersistentVolume", pv.Name, "NodeCleanupBlocked", "Failed")
	f.observed("c1")
	f.deleteNode("n1")
	f.claimDeleted("c1")
}

// TestCheckIsCountedAfterTheGrace: the gauge names the check that keeps a volume once the grace is over.
func TestCheckIsCountedAfterTheGrace(t *testing.T) {
	f := scenario(t, nil)
	f.bound("a", "n")
	f.pod("p", "a", f.name("keep"))
	f.start()
	f.metric(1, blockedGauge, "grace")
	f.metric(1, blockedGauge, "use")
}

// TestSkippedNamesTheReason: the reason is constant and precedes the case.
func TestSkippedNamesTheReason(t *testing.T) {
	f := scenario(t, nil)
	f.node("n", f.cfg.NodeFinalizer)
	f.boundTo("a", []string{"n"}, retained, nil)
	f.boundTo("b", []string{"lost"}, retained, nil)
	f.start()
	f.observed("a")
	f.deleteNode("n")
	for _, pv := range []string{"pv-a", "pv-b"} {
		f.event("PersistentVolume", f.name(pv), "NodeCleanupSkipped", "Retain: ")
	}
}

// TestNothingWhileTheDriverIsCalled: a CSI call for the volume is in flight.
func TestNothingWhileTheDriverIsCalled(t *testing.T) {
	f := scenario(t, nil)
	done, err := f.locks.Share(t.Context(), f.name("pv-a"))
	if err != nil {
		t.Fatal(err)
	}
	_, pvc := f.bound("a", "n")
	f.start()
	f.stays(2*shortGrace, pvc)
	done()
	f.claimDeleted("a")
}

// TestOnlyTheAPIServerKnows: a cache lacks the reason why nothing may be deleted.
func TestOnlyTheAPIServerKnows(t *testing.T) {
	t.Parallel()
	t.Run("class_has_opted_out", func(t *testing.T) {
		f := scenario(t, parity)
		f.frozen("storageclasses")
		resources := f.installLogicalVolumes()
		f.node("n")
		_, pvc := f.bound("a", "n")
		resources.create("lv", "n", "pv-a")
		f.onlyWrites()
		f.start()
		f.observed("a")
		f.says("StorageClass", "c", disabled)
		f.deleteNode("n")
		f.event("PersistentVolume", f.name("pv-a"), "NodeCleanupSkipped", "StorageClass")
		f.stays(2*shortGrace, pvc)
		resources.kept("lv")
	})
	t.Run("volume_is_attached", func(t *testing.T) {
		f := scenario(t, volumes)
		f.frozen("volumeattachments")
		f.node("n")
		pv := f.released("a", "n", nil)
		f.onlyWrites()
		f.start()
		f.observedNodes()
		va := f.attach()
		f.deleteNode("n")
		f.event("PersistentVolume", pv.Name, "NodeCleanupBlocked", va.Name)
		f.stays(2*shortGrace, pv)
	})
	t.Run("volume_is_of_another_node", func(t *testing.T) {
		f := scenario(t, nil)
		f.node("m")
		pv, pvc := f.bound("a", "n")
		f.onlyWrites()
		f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.Method == http.MethodGet && r.URL.Path == "/api/v1/"+"persistentvolumes/"+pv.Name {
				moved := pv.DeepCopy()
				moved.TypeMeta = metav1.TypeMeta{Kind: "PersistentVolume", APIVersion: "v1"}
				moved.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Values = []string{f.name("m")}
				readAs(w, moved)
				return
			}
			pass.ServeHTTP(w, r)
		})
		f.start()
		f.stays(3*shortGrace, pv, pvc)
	})
}

// TestMissingPermission: a forbidden request is reported, and sent again after it was granted.
func TestMissingPermission(t *testing.T) {
	t.Parallel()
	forbidden := func(f *fixture, want bool) {
		f.Helper()
		f.eventually(fmt.Sprintf("something is forbidden: %t", want), func(ctx context.Context) error {
			if n, err := f.value(blockedGauge, "forbidden"); err != nil || (n > 0) != want {
				return errors.Join(err, fmt.Errorf("%v", n))
			}
			return nil
		})
	}
	t.Run("for_the_cluster", func(t *testing.T) {
		f := scenario(t, nil)
		allow := f.without("get", "", "namespaces")
		f.bound("a", "n")
		f.start()
		f.event("PersistentVolume", f.name("pv-a"), "NodeCleanupBlocked", "namespaces")
		forbidden(f, true)
		allow()
		f.claimDeleted("a")
		forbidden(f, false)
	})
	t.Run("for_a_node", func(t *testing.T) {
		f := scenario(t, manage)
		allow := f.without("patch", "", "nodes")
		f.start()
		f.event("Node", f.name("keep"), "NodeCleanupBlocked", "forbidden")
		f.event("Node", f.name("keep"), "NodeCleanupBlocked", "doctor --print-rbac")
		forbidden(f, true)
		allow()
		f.finalizers("keep", f.cfg.NodeFinalizer)
		forbidden(f, false)
	})
	t.Run("for_the_records", func(t *testing.T) {
		f := scenario(t, nil)
		allow := f.without("create", "", "configmaps")
		_, pvc := f.bound("a", "n")
		f.process = f.run(f.user) // start waits for the records
		f.event("CSIDriver", f.driver, "NodeCleanupBlocked", "configmaps")
		f.stays(2*shortGrace, pvc)
		allow()
		f.claimDeleted("a")
	})
}

// TestRefusalIsReported: admission webhooks and policies refuse requests with any code. No permission is missing then.
func TestRefusalIsReported(t *testing.T) {
	t.Parallel()
	bound := func(f *fixture) { f.bound("a", "n") }
	nothing := func(*fixture) {}
	const records = "/configmaps/lost-nodes.NS.example.com"
	for name, tc := range map[string]struct {
		change         func(f *fixture)
		code           int
		reason         string
		method, suffix string // NS is the prefix of names
		build          func(f *fixture)
		kind, about    string
	}{
		"claim_with_400": {nothing, 400, "", "DELETE", "/" + claimA, bound, "PersistentVolume", "NS-pv-a"},
		"claim_with_403": {nothing, 403, "Forbidden", "DELETE", "/" + claimA, bound, "PersistentVolume", "NS-pv-a"},
		"claim_with_422": {nothing, 422, "Invalid", "DELETE", "/" + claimA, bound, "PersistentVolume", "NS-pv-a"},
		"claim_with_500": {nothing, 500, "", "DELETE", "/" + claimA, bound, "PersistentVolume", "NS-pv-a"},
		"volume": {volumes, 422, "", "DELETE", "/persistentvolumes/NS-pv-a", func(f *fixture) { f.released("a", "n", nil) },
			"PersistentVolume", "NS-pv-a"},
		"custom_resource": {parity, 400, "", "PATCH", "/logicalvolumes/la",
			func(f *fixture) { f.installLogicalVolumes().create("la", "n", "") }, "CSIDriver", "NS.example.com"},
		"node":                   {manage, 500, "", "PATCH", "/nodes/NS-n", func(f *fixture) { f.node("n") }, "Node", "NS-n"},
		"records":                {nothing, 422, "Invalid", "PUT", records, bound, "CSIDriver", "NS.example.com"},
		"records_with_403":       {nothing, 403, "Forbidden", "PUT", records, bound, "CSIDriver", "NS.example.com"},
		"records_from_the_start": {nothing, 500, "", "POST", "/configmaps", bound, "CSIDriver", "NS.example.com"},
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, tc.change)
			here := strings.NewReplacer("NS", f.ns).Replace
			refused := f.deniedAs(tc.code, tc.reason, tc.method, here(tc.suffix))
			tc.build(f)
			f.process = f.run(f.user) // start waits for the records
			f.event(tc.kind, here(tc.about), "NodeCleanupBlocked", denial)
			f.atLeast(refused, 2)
			for _, m := range f.messages("", "", "NodeCleanupBlocked") {
				if strings.Contains(m, "Grant") {
					t.Errorf("an event demands a permission: %s", m)
				}
			}
		})
	}
}

// TestResponsesThatPass: what the next attempt may not get again is no refusal.
func TestResponsesThatPass(t *testing.T) {
	of := schema.GroupResource{Resource: "nodes"}
	for err, want := range map[error]bool{
		nil: false, context.DeadlineExceeded: false, apierrors.NewConflict(of, "n", nil): false, apierrors.NewNotFound(of, "n"): false,
		apierrors.NewTooManyRequests("busy", 1): false, apierrors.NewTimeoutError("slow", 1): false,
		apierrors.NewServerTimeout(of, "get", 1): false, apierrors.NewInternalError(errNone): true, apierrors.NewBadRequest("bad"): true,
		apierrors.NewServiceUnavailable("starting"): false, apierrors.NewGenericServerResponse(502, "get", of, "n", "", 0, true): false,
	} {
		if got := isRefusal(err); got != want {
			t.Errorf("%v: %t, want %t", err, got, want)
		}
	}
}

// TestApproveCommand prints what it would approve, and writes with Yes.
func TestApproveCommand(t *testing.T) {
	f, claims := twoHeld(t, nil)
	request := ApproveRequest{Driver: f.driver, Namespace: f.ns, Nodes: []string{f.name("n1")}}
	var plan strings.Builder
	f.must(Approve(t.Context(), f.cfg, f.client, request, &plan))
	if !strings.Contains(plan.String(), f.name("n1")) {
		t.Errorf("the plan is %q", &plan)
	}
	f.stays(shortGrace, claims[0], claims[1])
	request.Yes = true
	existing := request
	existing.Nodes = []string{f.name("keep")}
	if err := Approve(t.Context(), f.cfg, f.client, existing, &strings.Builder{}); !errors.Is(err, ErrRefused) {
		t.Errorf("approval of a node that exists: %v", err)
	}
	f.must(retry.RetryOnConflict(retry.DefaultBackoff, func() error { // the controller may write its records
		return Approve(t.Context(), f.cfg, f.client, request, &strings.Builder{})
	}))
	f.claimDeleted("c1")
	f.stays(shortGrace, claims[1])
	request.Nodes = nil
	if err := Approve(t.Context(), f.cfg, f.client, request, &strings.Builder{}); err == nil {
		t.Error("all nodes were approved by a request without nodes")
	}
	f.stop()
	f.changeRecords(func(cm *corev1.ConfigMap) { cm.Annotations[AnnotationMode] = string(ModeReport) })
	request.Held = true
	if err := Approve(t.Context(), f.cfg, f.client, request, &strings.Builder{}); !errors.Is(err, ErrRefused) {
		t.Errorf("approval in mode report: %v", err)
	}
}
