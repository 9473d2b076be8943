// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/volumerules"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// TestOutcome follows calls whose outcome is unknown.
func TestOutcome(t *testing.T) {
	t.Run("event_names_volume_and_finalizer", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(create, csitest.DoAndFail(codes.Unavailable, "busy"), csitest.Fail(codes.Internal, "broken"))
		f.makeClass(nil)
		claim := f.claim(nil)
		f.event(`Warning ProvisioningFailed failed to provision volume with StorageClass "`+f.class+
			`": rpc error: code = Unavailable desc = busy`,
			`Volume "pvc-`+string(claim.UID)+`" may exist`, "CreateVolume is repeated with the same request", "until then finalizer "+
				kube.ProvisioningFinalizer+" keeps this PVC")
		f.event("ProvisioningFailed", "desc = broken", `check on the storage backend that volume "pvc-`+string(claim.UID)+`" does not exist`)
		f.saved(claim)
	})
	t.Run("class_recreated", func(t *testing.T) {
		for _, protection := range []Protection{ProtectionOnRetry, ProtectionOff} {
			t.Run(string(protection), func(t *testing.T) { classRecreated(t, protection) })
		}
	})
	t.Run("protected_although_the_lease_is_lost", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(create, csitest.Hang())
		f.makeClass(nil)
		claim := f.claim(nil)
		f.Wait(create, 1)
		_ = f.Stop(errors.New("the Lease is lost"))
		left, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Get(t.Context(), "data", metav1.GetOptions{})
		f.Must(err)
		if !isProtected(left) {
			t.Error("the next leader does not know of the call")
		}
		f.start()
		f.saved(claim)
	})
	// 422, as for a claim that is being deleted, or for a patch test that fails.
	for name, deny := range map[string]func(http.ResponseWriter){
		"event_if_a_policy_denies_the_record": func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusUnprocessableEntity)
			fmt.Fprint(w, "denied by a policy")
		},
		"event_if_a_webhook_denies_the_record": denyWithoutDetails,
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, csitest.Config{}, nil)
			f.through(f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
				if r.Method == http.MethodPatch && strings.Contains(r.URL.Path, "/persistentvolumeclaims/") {
					deny(w)
					return
				}
				pass.ServeHTTP(w, r)
			})
			f.Plugin.Next(create, csitest.Fail(codes.Unavailable, "busy"))
			f.makeClass(nil)
			claim := f.claim(nil)
			f.event("ProvisioningFailed", "adding finalizer "+kube.ProvisioningFinalizer)
			f.saved(claim)
		})
	}
	for _, protection := range []Protection{ProtectionOnRetry, ProtectionAlways} {
		for nodes, text := range map[int]string{3600: `"topology":`, 9000: `"recompute":true`} {
			t.Run(fmt.Sprintf("record_of_%d_nodes_%s", nodes, protection), func(t *testing.T) { manyNodes(t, protection, nodes, text) })
		}
	}
	t.Run("volume_refused_by_the_API_server", volumeRefused)
	t.Run("record_of_an_earlier_leader", recordOfEarlierLeader)
	t.Run("record_again_before_the_call", recordAgain)
	for name, limit := range map[string]time.Duration{"before_the_effect": time.Hour, "after_the_limit": time.Nanosecond} {
		t.Run("call_of_an_earlier_process_is_refused_"+name, func(t *testing.T) { earlierMayFollow(t, limit) })
	}
	t.Run("record_refused", recordRefused)
	for name, rescheduled := range map[string]bool{"of_an_ended_request": false, "of_a_rescheduled_claim": true} {
		t.Run("late_record_"+name, func(t *testing.T) { lateRecord(t, rescheduled) })
	}
	t.Run("secret_that_cannot_be_reread_is_logged", rereadFails)
	for name, deleted := range map[string]bool{"claim_deleted": true, "recorded_on_the_claim": false} {
		t.Run("exit_while_indeterminate_"+name, func(t *testing.T) {
			exitUnresolved(t, deleted, csitest.Fail(codes.Unavailable, "busy"), "indeterminate", "the outcome of CreateVolume is unknown")
		})
		t.Run("exit_while_rejected_"+name, func(t *testing.T) {
			small := csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume.CapacityBytes = 1 })
			exitUnresolved(t, deleted, small, "rejected", "it has 1 bytes", "vol-000001")
		})
	}
	t.Run("last_save_does_not_wait_for_the_rate_limit", lastSave)
	t.Run("capacity_is_refreshed_after_each_response", func(t *testing.T) {
		seen := &volumeCalls{}
		f := newFixture(t, csitest.Config{}, nil)
		f.change = func(d *Deps) { d.VolumeObserver = seen }
		f.start()
		f.Plugin.Next(create, csitest.Fail(codes.ResourceExhausted, "full"),
			csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume = nil }),
			csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume.CapacityBytes = 1 }))
		f.makeClass(nil)
		f.saved(f.claim(nil))
		failed := "not provisioned: " + f.class
		kubetest.Eventually(t, "the observer is notified of each response", func(context.Context) error {
			if calls := seen.all(); !slices.Equal(calls, []string{failed, failed, failed, "provisioned"}) {
				return fmt.Errorf("it is notified of %q", calls)
			}
			return nil
		})
	})
}

// volumeCalls records the calls of a [VolumeObserver].
type volumeCalls struct {
	mu    sync.Mutex
	calls []string
}

func (o *volumeCalls) add(call string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.calls = append(o.calls, call)
}

func (o *volumeCalls) all() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.calls)
}

func (o *volumeCalls) VolumeProvisioned(*corev1.PersistentVolume) { o.add("provisioned") }
func (o *volumeCalls) VolumeNotProvisioned(class string)          { o.add("not provisioned: " + class) }
func (o *volumeCalls) VolumeDeleted(*corev1.PersistentVolume)     { o.add("deleted") }

// classRecreated has a class recreated with other parameters during the first call.
func classRecreated(t *testing.T, protection Protection) {
	f := scenario(t, csitest.Config{}, func(c *Config) { c.ProvisioningProtection = protection })
	busy, gate := csitest.Fail(codes.Unavailable, "busy"), make(chan struct{})
	f.Plugin.Next(create, heldUntil(gate, busy), busy)
	f.makeClass(parameters(map[string]string{"pool": "old"}))
	claim := f.claim(nil)
	f.Wait(create, 1)
	f.Must(f.Client.StorageV1().StorageClasses().Delete(t.Context(), f.class, metav1.DeleteOptions{}))
	f.makeClass(parameters(map[string]string{"pool": "new"}))
	kubetest.Eventually(t, "the provisioner sees the new class", func(context.Context) error {
		if class, ok := f.c.classes.Get(f.class); !ok || class.Parameters["pool"] != "new" {
			return fmt.Errorf("it sees %v", class)
		}
		return nil
	})
	close(gate)
	f.saved(claim)
	var pools []string
	for _, c := range f.Plugin.Calls(create) {
		pools = append(pools, c.Request.(*csi.CreateVolumeRequest).GetParameters()["pool"])
	}
	if want := []string{"old", "old", "old"}; !slices.Equal(pools, want) {
		t.Errorf("calls with pools %q, want %q", pools, want)
	}
	repeated := fmt.Sprintf("The first request is repeated although StorageClass %q was recreated since", f.class)
	if count(f.event("ProvisioningSucceeded"), repeated) != 1 {
		t.Error("no event says that the first request is repeated")
	}
}

// rereadFails deletes the secret of a request between two calls.
func rereadFails(t *testing.T) {
	f := scenario(t, csitest.Config{}, nil)
	lines := f.restartLogged()
	gate := make(chan struct{})
	f.Plugin.Next(create, heldUntil(gate, csitest.Fail(codes.DeadlineExceeded, "slow")))
	f.makeClass(parameters(map[string]string{
		volumerules.ParameterPrefix + "provisioner-secret-name": "login", volumerules.ParameterPrefix +
			"provisioner-secret-namespace": f.Namespace,
	}))
	f.secret("login", "v")
	claim := f.claim(nil)
	f.Wait(create, 1)
	f.Must(f.Client.CoreV1().Secrets(f.Namespace).Delete(t.Context(), "login", metav1.DeleteOptions{}))
	close(gate)
	f.saved(claim)
	if got := lines("Reading the secret again failed", f.Namespace+"/login", "indeterminate"); len(got) == 0 {
		t.Error("it is not")
	}
}

// restartLogged restarts the provisioner, and returns a function for its log: the lines that have all parts.
func (f *fixture) restartLogged() func(parts ...string) []string {
	f.Helper()
	f.Crash()
	var mu sync.Mutex
	var all []string
	f.logged = func(line string) {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, line)
	}
	f.start()
	return func(parts ...string) (found []string) {
		mu.Lock()
		defer mu.Unlock()
		for _, line := range all {
			if !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(line, part) }) {
				found = append(found, line)
			}
		}
		return found
	}
}

// exitUnresolved has the process exit before the driver returns a result, or before it deletes an unusable volume.
func exitUnresolved(t *testing.T, claimDeleted bool, first csitest.Step, want ...string) {
	f := scenario(t, csitest.Config{}, nil)
	lines := f.restartLogged()
	gate := make(chan struct{})
	f.Plugin.Next(create, heldUntil(gate, first))
	f.Plugin.Always(create, csitest.Fail(codes.Unavailable, "busy"))
	f.Plugin.Always(remove, csitest.Fail(codes.Unavailable, "busy"))
	f.makeClass(nil)
	claim := f.claim(nil)
	f.Wait(create, 1)
	if claimDeleted {
		f.vanish()
	}
	close(gate)
	f.event("ProvisioningFailed", "busy")
	_ = f.Stop(workloop.ErrDrain)
	got := lines("Volume may exist", `{"name"="data" "namespace"="`+f.Namespace+`"}`, "pvc-"+string(claim.UID))
	if claimDeleted != (len(got) == 1) || claimDeleted && len(lines(append(want, got...)...)) != 1 {
		t.Errorf("logged %q, want %q: %t", got, want, claimDeleted)
	}
}

// lastSave has a PersistentVolume that exists when it is created for the last time, while the
// client with a rate limit does not answer any more.
func lastSave(t *testing.T) {
	f := scenario(t, csitest.Config{}, patient)
	f.change = func(d *Deps) { d.UnthrottledClient = f.Client }
	var posts atomic.Int32
	f.through(f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if !strings.HasPrefix(r.URL.Path, "/api/v1/persistentvolumes") || r.Method == http.MethodGet && posts.Load() == 0 ||
			r.URL.Query().Has("watch") {
			pass.ServeHTTP(w, r)
			return
		}
		if r.Method == http.MethodPost {
			pass.ServeHTTP(httptest.NewRecorder(), r) // the response is lost
			posts.Add(1)
		}
		http.Error(w, "no", http.StatusInternalServerError)
	})
	f.makeClass(nil)
	f.saved(f.claim(nil))
	kubetest.Eventually(t, "the volume is not saved", func(context.Context) error {
		if _, unsaved := f.c.unresolved(); posts.Load() != 1 || unsaved != 1 {
			return errors.New("it may be")
		}
		return nil
	})
	_ = f.Stop(workloop.ErrDrain)
	if events := f.otherEvents(); count(events, "ProvisioningSucceeded") != 1 {
		t.Errorf("events %q", events)
	}
}

// recordAgain: a new leader repeats the call of an earlier one only after it has recorded the request again.
func recordAgain(t *testing.T) {
	f := scenario(t, csitest.Config{}, func(c *Config) { c.ProvisioningProtection = ProtectionAlways })
	f.Plugin.Next(create, csitest.DoAndHang())
	f.makeClass(nil)
	f.claim(nil)
	f.Wait(create, 1)
	var writes atomic.Int32
	f.through(f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.Method == http.MethodPatch && strings.Contains(r.URL.Path, "/persistentvolumeclaims/") && writes.Add(1) < 3 {
			if n := f.Plugin.Count(create); n != 1 {
				t.Errorf("%d calls before the record", n)
			}
			http.Error(w, "no", http.StatusInternalServerError)
			return
		}
		pass.ServeHTTP(w, r)
	})
	f.Wait(create, 2)
	if n := writes.Load(); n < 3 {
		t.Errorf("called after %d writes", n)
	}
}

// lateRecord has the API server store the record of a request after that request has ended, while the next one is sent. The process
// exits before it knows the result of the next one, which its successor must repeat.
func lateRecord(t *testing.T, rescheduled bool) {
	f := scenario(t, csitest.Config{Segments: []map[string]string{{"zone": "a"}}}, func(c *Config) { c.ImmediateTopology = false })
	var first atomic.Pointer[[]byte] // the first record, whose response is lost
	f.through(f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		records := r.Method == http.MethodPatch && bytes.Contains(body, []byte(`"add","path":"`+kube.AnnotationPath(kube.AnnProvisioningRequest)))
		if records && first.CompareAndSwap(nil, &body) {
			http.Error(w, "no response", http.StatusInternalServerError)
			return
		}
		pass.ServeHTTP(w, r)
	})
	class := func(pool string) {
		f.makeClass(func(c *storagev1.StorageClass) {
			c.Parameters = map[string]string{"pool": pool}
			if rescheduled {
				late(c)
			}
		})
		kubetest.Eventually(t, "the provisioner sees the class", func(context.Context) error {
			if class, ok := f.c.classes.Get(f.class); !ok || class.Parameters["pool"] != pool {
				return fmt.Errorf("it sees %v", class)
			}
			return nil
		})
	}
	gate := make(chan struct{})
	full := heldUntil(gate, csitest.Fail(codes.ResourceExhausted, "full"))
	f.Plugin.Next(create, csitest.Fail(codes.Unavailable, "busy"), full, csitest.DoAndHang())
	class("first")
	node := f.zoned("node")
	selected := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, storagehelpers.AnnSelectedNode, node)
	claim := f.claim(func(c *corev1.PersistentVolumeClaim) {
		if rescheduled {
			c.Annotations[storagehelpers.AnnSelectedNode] = node
		}
	})
	f.Wait(create, 2)
	f.Must(f.Client.StorageV1().StorageClasses().Delete(t.Context(), f.class, metav1.DeleteOptions{}))
	class("second")
	close(gate)
	if rescheduled {
		f.claimIs("has no node", func(c *corev1.PersistentVolumeClaim) bool { return selectedNode(c) == "" })
		f.settles()
		f.patchClaim(selected)
	}
	f.Wait(create, 3)
	_, _ = f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Patch(
		t.Context(), claim.Name, types.JSONPatchType, *first.Load(), metav1.PatchOptions{})
	_ = f.Stop(errors.New("the Lease is lost"))
	f.start()
	f.saved(claim)
	var pools []string
	for _, c := range f.Plugin.Calls(create) {
		pools = append(pools, c.Request.(*csi.CreateVolumeRequest).GetParameters()["pool"])
	}
	if want := []string{"first", "first", "second", "second"}; !slices.Equal(pools, want) {
		t.Errorf("calls with pools %q, want %q", pools, want)
	}
}

// earlierMayFollow: the driver refuses the call that a new leader repeats. Until the limit after the beginning of its term, the call of the
// earlier leader may take effect.
func earlierMayFollow(t *testing.T, limit time.Duration) {
	f := newFixture(t, csitest.Config{}, func(c *Config) { c.ProvisioningProtection = ProtectionAlways })
	f.change = func(d *Deps) { d.LateAfter = limit }
	f.start()
	f.Plugin.Next(create, csitest.Hang(), csitest.Fail(codes.ResourceExhausted, "full"))
	f.makeClass(nil)
	claim := f.claim(nil)
	f.Wait(create, 1)
	f.vanish()
	f.Crash()
	f.start()
	if limit == time.Nanosecond {
		f.event("ProvisioningFailed", "full. An earlier call had no definite result")
		f.claimIs("is deleted", isGone)
		f.Calls(create, 2)
		return
	}
	f.event("ProvisioningFailed", "full. The call of an earlier process may still take effect", "is repeated with the same request")
	f.saved(claim) // so that the volume, which the third call returns, is reclaimed
}

// recordRefused: a webhook or policy that denies, removes or reverts records of requests stops neither the repeated call nor
// what follows its result.
func recordRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(op map[string]any) (kept bool) // of an operation that adds a record; nil: the patch is denied
		result csitest.Step
	}{
		"removed":                          {removed, csitest.Default()},
		"reverted":                         {reverted, csitest.Default()},
		"denied":                           {nil, csitest.Default()},
		"removed_before_a_definite_error":  {removed, csitest.Fail(codes.InvalidArgument, "no")},
		"reverted_before_a_definite_error": {reverted, csitest.Fail(codes.InvalidArgument, "no")},
		"denied_before_a_definite_error":   {nil, csitest.Fail(codes.InvalidArgument, "no")},
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, csitest.Config{}, func(c *Config) { c.ProvisioningProtection = ProtectionAlways })
			f.Plugin.Next(create, csitest.DoAndHang())
			f.makeClass(nil)
			claim := f.claim(nil)
			f.Wait(create, 1)
			definite := strings.HasSuffix(name, "error")
			if definite {
				f.vanish()
			}
			f.Plugin.Always(create, tt.result)
			f.throughWebhook(tt.change)
			f.Wait(create, 2)
			if definite {
				f.claimIs("is deleted", isGone)
			} else {
				f.saved(claim)
			}
		})
	}
	t.Run("before_the_first_call", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.ProvisioningProtection = ProtectionAlways })
		f.throughWebhook(reverted)
		f.makeClass(nil)
		f.claim(nil)
		f.event("ProvisioningFailed", "the API server has not stored it")
		f.Calls(create, 0)
	})
}

func removed(op map[string]any) bool {
	op["op"] = "remove"
	return true
}

func reverted(map[string]any) bool { return false }

// throughWebhook starts the provisioner again, with a webhook that denies patches that add a record to a claim, or changes them.
func (f *fixture) throughWebhook(change func(op map[string]any) bool) {
	f.Helper()
	f.through(f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.Method == http.MethodPatch && strings.Contains(r.URL.Path, "/persistentvolumeclaims/") {
			var ops, kept []map[string]any
			if err := json.NewDecoder(r.Body).Decode(&ops); err != nil {
				f.Error(err)
			}
			for _, op := range ops {
				if op["op"] == "add" && op["path"] == kube.AnnotationPath(kube.AnnProvisioningRequest) {
					if change == nil {
						denyWithoutDetails(w)
						return
					}
					if !change(op) {
						continue
					}
				}
				kept = append(kept, op)
			}
			body, err := json.Marshal(kept)
			if err != nil {
				f.Error(err)
			}
			r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		}
		pass.ServeHTTP(w, r)
	})
}

// denyWithoutDetails answers like a webhook whose status has the code 422 only.
func denyWithoutDetails(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusUnprocessableEntity)
	fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422,"message":"denied"}`)
}

// recordOfEarlierLeader: with a cache that does not show the record of an earlier leader yet, that record is neither
// replaced nor removed. A claim that was deleted meanwhile is decided about again.
func recordOfEarlierLeader(t *testing.T) {
	f := scenario(t, csitest.Config{}, nil)
	f.settles()
	l := f.c.claimLoop.Load()
	claims := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace)
	created := f.claim(func(c *corev1.PersistentVolumeClaim) {
		c.Annotations[storagehelpers.AnnStorageProvisioner] = "other.example.com" // the loop that runs ignores it
	})
	request := func(claim *corev1.PersistentVolumeClaim, id string) claimState {
		return claimState{claim: claim, call: testCall(intent.Unknown, func(c *call) { c.Args = id })}
	}
	live := func() *corev1.PersistentVolumeClaim {
		c, err := claims.Get(t.Context(), created.Name, metav1.GetOptions{})
		f.Must(err)
		return c
	}
	_, err := l.protect(t.Context(), request(created, "first"))
	f.Must(err)
	left := live()
	if !isProtected(left) {
		t.Fatal("the request is not recorded")
	}
	unprotected := left.DeepCopy() // a user has removed the finalizer, and the earlier leader has added it again
	unprotected.Finalizers, unprotected.ResourceVersion = nil, created.ResourceVersion
	for name, stale := range map[string]*corev1.PersistentVolumeClaim{"before the record": created, "without the finalizer": unprotected} {
		for _, id := range []string{"first", "second"} {
			if second, err := l.protect(t.Context(), request(stale, id)); err != nil || second.Event != 0 {
				t.Errorf("%s, another request %q: %q, %v", name, id, second.Event, err)
			}
		}
	}
	rescheduled := created.DeepCopy() // since then, a scheduler has selected a node
	rescheduled.Annotations[storagehelpers.AnnSelectedNode] = "node-1"
	third := request(rescheduled, "third").call.Payload
	if change, err := third.protection(f.Driver, "third", rescheduled); err != nil || change.AppliedTo(created) ||
		change.Tests[kube.AnnotationPath(storagehelpers.AnnSelectedNode)] != "node-1" {
		t.Errorf("a record for another node: %v, %v", change, err)
	}
	outdated := left.DeepCopy()
	outdated.Annotations[kube.AnnProvisioningRequest], outdated.ResourceVersion = "{}", created.ResourceVersion
	if removed, err := l.unprotect(t.Context(), claimState{claim: outdated}); err != nil || removed.Event != 0 {
		t.Errorf("removing another record: %q, %v", removed.Event, err)
	}
	if now := live(); now.ResourceVersion != left.ResourceVersion {
		t.Fatalf("the record was replaced: %v", now.ObjectMeta)
	}
	removed, err := l.unprotect(t.Context(), claimState{claim: left})
	if now := live(); err != nil || removed.Event != intent.Reset || isProtected(now) {
		t.Errorf("removing the record: %v: %v", err, now.ObjectMeta)
	}
	const kept = `{"metadata":{"finalizers":["example.com/kept"]}}`
	before, err := claims.Patch(t.Context(), created.Name, types.MergePatchType, []byte(kept), metav1.PatchOptions{})
	f.Must(err)
	f.Must(claims.Delete(t.Context(), created.Name, metav1.DeleteOptions{}))
	if refused, err := l.protect(t.Context(), request(before, "fourth")); err != nil || refused.Event != 0 {
		t.Errorf("a record on a claim that is being deleted: %q, %v", refused.Event, err)
	}
	_, err = claims.Patch(t.Context(), created.Name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
	f.Must(err)
}

// manyNodes has the process exit during the first call, with a topology segment for each of n nodes. text is in the record.
func manyNodes(t *testing.T, protection Protection, n int, text string) {
	f := scenario(t, anywhere, func(c *Config) { c.ProvisioningProtection = protection })
	join := func() {
		for i := range n {
			name := fmt.Sprintf("%x", sha256.Sum256([]byte{byte(i), byte(i >> 8)}))[:36]
			l := f.c.claimLoop.Load()
			l.topologies.SetNode(name, map[string]string{"topology.example.com/node": name}, true)
			l.topologies.SetKeys(name, []string{"topology.example.com/node"}, true)
		}
	}
	f.settles()
	join()
	f.Plugin.Next(create, csitest.DoAndHang())
	f.makeClass(nil)
	claim := f.claim(nil)
	f.Wait(create, 1)
	f.Crash()
	f.claimIs("has the record", func(c *corev1.PersistentVolumeClaim) bool {
		return c != nil && isProtected(c) && strings.Contains(c.Annotations[kube.AnnProvisioningRequest], text)
	})
	f.deleteClaim()
	f.start()
	f.settles()
	join()
	pv := f.saved(claim)
	f.claimIs("is deleted", released)
	// The nodes of a topology that is not recorded join one after the other here.
	if calls := f.Plugin.Calls(create); n == 3600 && fmt.Sprint(calls[0].Request) != fmt.Sprint(calls[len(calls)-1].Request) {
		t.Error("another request is sent")
	}
	f.phase(pv, corev1.VolumeReleased)
	f.gone(pv)
	if n := f.Plugin.VolumeCount(); n != 0 {
		t.Errorf("%d volumes are left", n)
	}
}

// volumeRefused has the driver return volumes whose PersistentVolume the API server cannot store. The next response is correct.
func volumeRefused(t *testing.T) {
	kubetest.NeedReal(t) // validation of label keys, and limits of sizes
	large := csitest.Alter(func(r *csi.CreateVolumeResponse) {
		r.Volume.VolumeContext = map[string]string{"x": strings.Repeat("x", 2<<20)}
	})
	for name, tt := range map[string]struct {
		steps []csitest.Step
		event string
	}{
		"invalid_topology_key":   {[]csitest.Step{accessible(map[string]string{"no key!": "x"})}, "Invalid value"},
		"large_volume_context":   {[]csitest.Step{large}, "creating PersistentVolume"},
		"definite_error_follows": {[]csitest.Step{large, csitest.Fail(codes.ResourceExhausted, "full"), large}, "desc = full"},
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, anywhere, nil)
			f.places("z1")
			f.Plugin.Next(create, tt.steps...)
			f.makeClass(nil)
			claim := f.claim(nil)
			f.event("Warning ProvisioningFailed", tt.event)
			f.saved(claim)
			f.event("ProvisioningSucceeded")
			f.Calls(create, len(tt.steps)+1)
			if n := f.Plugin.VolumeCount(); n != 1 {
				t.Errorf("%d volumes", n)
			}
		})
	}
}
